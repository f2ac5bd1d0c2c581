"""`RMConfig`: how long a reward model is trained, when it is validated, and its loss.

rm:
  max_num_epochs: 1
  val_period: 100        # optimiser steps
  seed: 42
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from treeward.config.base import Strict

__all__ = ["LossConfig", "RMConfig", "none_for"]


def none_for(*sentinels: int) -> BeforeValidator:
    """Other toolkits write -1 or 0 for `no limit` and `never`; inside treeward that is None."""

    def normalise(value: Any) -> Any:
        return None if value in sentinels and not isinstance(value, bool) else value

    return BeforeValidator(normalise)


class LossConfig(Strict):
    """The Bradley-Terry loss, softplus(-(score(chosen) - score(rejected) - margin)), and its two options."""

    margin: bool = True
    """Use the margins that the data carries; without any in the data there is no difference."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """The assumed probability that a label is the wrong way round."""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the mean square of score(chosen) + score(rejected), which keeps scores near zero. 0: off."""


class RMConfig(Strict):
    """The length of the run, its validations, its seed and its loss."""

    max_num_epochs: PositiveInt = 1
    """Passes over the training data."""
    max_num_steps: Annotated[PositiveInt | None, none_for(-1)] = None
    """Most optimiser steps, whatever the epochs say. None (or -1): no limit."""
    val_period: Annotated[PositiveInt | None, none_for(0, -1)] = 100
    """Validate each time after so many optimiser steps. None (or 0): not on the way."""
    val_batches: Annotated[PositiveInt | None, none_for(-1)] = None
    """Most batches of `val_global_batch_size` to validate on, per set. None (or -1): the whole set."""
    val_global_batch_size: PositiveInt | None = None
    """Comparisons in a validation batch. None: `policy.train_global_batch_size`."""
    val_perturbations: PositiveInt | None = None
    """Most comparisons of each validation set whose replies are rewritten (padded, cut off, marked up ...) to measure
    `robust_accuracy`. None: it is not measured, unless `checkpointing.metric_name` names it; then it is of 100."""
    val_micro_batch_size: PositiveInt | None = None
    """Most comparisons in one forward pass of validation. None: as many as in training."""
    val_at_start: bool = False
    """Validate before the first step too."""
    val_at_end: bool = True
    """Validate after the last step too."""
    log_period: PositiveInt = 1
    """Log the training metrics each time after so many optimiser steps."""
    seed: NonNegativeInt = 42
    """Determines the head's initial weights, the order of the data and every other draw."""
    head_init_std: NonNegativeFloat | None = None
    """Standard deviation of the score head's initial weights. None: 1 / sqrt(hidden size + 1), as in Stiennon et al.
    2020, page 11."""
    loss: LossConfig = LossConfig()
    """The loss."""
