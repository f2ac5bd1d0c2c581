"""`EvaluationConfig`: whether a run ends with a report of what the exported model has learnt, and of which data.

    evaluation:
      enabled: true
      suites: [llmbar=downloads/llmbar, rewardbench]
      perturbations: 100

The validation sets are always part of the report. One suite may stand without brackets: `suites: rewardbench`.
"""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt, field_validator

from treeward.config.base import Strict
from treeward.errors import ConfigError

__all__ = ["EvaluationConfig"]


class EvaluationConfig(Strict):
    """The report that a run writes of its exported model when training ends, as `treeward eval` does."""

    enabled: bool = False
    """Evaluate the exported model on the validation sets and `suites`, and write a report."""
    suites: tuple[str, ...] = ()
    """Suites beside the validation sets: `rewardbench`, `rewardbench2`, `rmbench`, `judgebench`, `llmbar`, from the hub
    or, as `llmbar=FOLDER`, from a copy."""
    perturbations: PositiveInt | None = None
    """Rewrite the replies of so many examples of each set and suite, to see what that does to the score. None: none."""
    limit: PositiveInt | None = None
    """Most examples of each set and suite, the first. None: all, of a validation set those that validation measures."""
    look_for_training_data: bool = True
    """Look for the examples of each set and suite in the training sets, and give the accuracy without them."""
    output: str | None = None
    """Folder of the report and its rows. None: `report` inside `checkpointing.checkpoint_dir`."""

    @field_validator("suites", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, suites: Any) -> Any:
        return [suites] if isinstance(suites, str) else suites

    @field_validator("suites")
    @classmethod
    def _suites_are_named_once(cls, suites: tuple[str, ...]) -> tuple[str, ...]:
        for suite in suites:
            name, equals, folder = suite.partition("=")
            if not name.strip() or "," in name or (equals and not folder.strip()):
                raise ConfigError(
                    "a suite is not understood",
                    got=repr(suite),
                    need="a name, as llmbar, or a name and a folder, as llmbar=downloads/llmbar",
                )
        return suites

    @property
    def named_suites(self) -> tuple[tuple[str, str | None], ...]:
        """The name of each suite and the folder that it is read from; None for the hub."""
        parts = (suite.partition("=") for suite in self.suites)
        return tuple((name.strip(), folder.strip() or None) for name, _, folder in parts)
