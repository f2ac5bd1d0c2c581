"""`CheckpointingConfig`: when a run is saved, which checkpoints stay, and by which metric they are
ranked.

    checkpointing:
      metric_name: val:validation-plain_length_controlled_accuracy
      keep_top_k: 3
      save_period: 100

A metric of one validation set is spelt `val:validation-<name>_<metric>`,
`validation-<name>_<metric>` or `validation-<name>/<metric>`; a metric over all sets `val_<metric>`,
`val:val_<metric>` or `eval/rm/<metric>`. A run of GRPO has one validation: `val:<metric>`,
`val_<metric>` or `validation/<metric>`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import BeforeValidator, PositiveFloat, PositiveInt

from treeward.config.base import FilePath, Strict
from treeward.errors import ConfigError

METRICS: Mapping[str, bool | None] = {
    **dict.fromkeys(("loss", "ece", "mse"), False),
    **dict.fromkeys(("accuracy", "length_controlled_accuracy", "worst_subset"), True),
    **dict.fromkeys(("accuracy_longer_right", "accuracy_shorter_right"), True),
    **dict.fromkeys(
        ("reward_margin", "kendall_tau", "group_accuracy", "best_of_k", "pearson"), True
    ),
    **dict.fromkeys(("first_error_accuracy", "processbench_f1"), True),
    **dict.fromkeys(("chosen_rewards", "rejected_rewards", "accuracy_gap")),
}
"""The validation metrics of a reward model -> whether higher is better; None where neither
direction is.

A metric whose name ends in `_` and another metric's name has the same direction, because a name in
underscores may be read as either.
"""

GRPO_METRICS: Mapping[str, bool | None] = {
    **dict.fromkeys(("reward", "raw_reward", "gold_reward"), True),
    **dict.fromkeys(("kl", "truncation_rate"), False),
    **dict.fromkeys(("entropy", "mean_gen_tokens_per_sample")),
}
"""The validation metrics of GRPO -> whether higher is better; None where neither direction is."""

# NeMo RL's DD:HH:MM:SS. YAML reads some of these as a number of base 60, hence the quotes.
_DURATION = re.compile(r"(\d+):([01]?\d|2[0-3]):([0-5]?\d):([0-5]?\d)")
_SPELLINGS = (
    "val_<metric>, or of one set val:validation-<name>_<metric> or validation-<name>/<metric>"
)


class MetricKey(NamedTuple):
    """A validation metric of the set `validation`, or over all sets if that is None."""

    validation: str | None
    metric: str

    @property
    def logged_name(self) -> str:
        """Its name in the log of a run that trains a reward model."""
        if self.validation is None:
            return f"eval/rm/{self.metric}"
        return f"validation-{self.validation}/{self.metric}"


def parse_metric_name(
    name: str, sets: Sequence[str] = (), metrics: Collection[str] = METRICS
) -> MetricKey:
    """The metric that a name means, in any accepted spelling.

    `sets`: the names of the validation sets. With underscores `validation-a_group_accuracy` is the
    metric `group_accuracy` of the set `a` or `accuracy` of `a_group`: the first such set of `sets`
    decides. Raises `ConfigError` for any other name.
    """
    # What a name may begin with -> the set that it means, None for all.
    forms: dict[str, str | None] = dict.fromkeys(("val:", "val_", "eval/rm/", "validation/"))
    # Reversed, because a later entry replaces an earlier one: the first set decides.
    for validation in reversed(sets):
        forms[f"validation-{validation}_"] = validation
        forms[f"validation-{validation}/"] = validation
    names: dict[str, MetricKey] = {}
    for form, validation_set in forms.items():
        for metric in metrics:
            names[f"{form}{metric}"] = MetricKey(validation_set, metric)
    key = names.get(name) or names.get(name.removeprefix("val:"))
    if key is None:
        need = f"{_SPELLINGS}; <metric> is one of {', '.join(metrics)}"
        if sets:
            need += f"; <name> is one of {', '.join(sets)}"
        field = "checkpointing.metric_name"
        raise ConfigError.unknown("a metric is not known", name, names, field=field, need=need)
    return key


def parse_grpo_metric_name(name: str) -> str:
    """The key of `GRPO_METRICS` that a name means; `accuracy` is NeMo RL's name of the mean reward.

    Raises `ConfigError` for any other name.
    """
    metric = parse_metric_name(name, metrics=GRPOCheckpointingConfig.metrics).metric
    return "reward" if metric == "accuracy" else metric


def _seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        return value  # pydantic refuses it, or reads a number that is written as text
    days, hours, minutes, seconds = map(int, match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


class CheckpointingConfig(Strict):
    """When a run is saved, and which checkpoints stay."""

    enabled: bool = True
    """Save checkpoints, and resume from them."""
    checkpoint_dir: FilePath = "results/rm"
    """Folder of this run's checkpoints and of its export. A run goes on from the latest of them."""
    save_period: PositiveInt | None = 100
    """Optimiser steps from one save to the next. None: only at the end, on a signal, and at the
    deadline."""
    checkpoint_must_save_by: Annotated[PositiveFloat | None, BeforeValidator(_seconds)] = None
    """Save and stop after this time, in seconds or as `"DD:HH:MM:SS"`, in quotes."""
    metric_name: str | None = None
    """The validation metric that ranks checkpoints, as `val_loss` or
    `validation-plain_length_controlled_accuracy`; docs/training.md lists them. None: the latest are
    kept."""
    higher_is_better: bool | None = None
    """Direction of the metric. None: decided by the metric, if it has a direction of its own."""
    keep_top_k: PositiveInt | None = 3
    """Number of best checkpoints that stay, beside the latest. None: all."""

    metrics: ClassVar[Mapping[str, bool | None]] = METRICS
    """The metrics by name -> whether higher is better."""

    @property
    def _metric(self) -> str | None:
        """The metric of `metric_name`: the longest that it ends with."""
        name = self.metric_name or ""
        # The longest, because group_accuracy ends with accuracy too.
        endings = [metric for metric in self.metrics if name.endswith(metric)]
        return max(endings, key=len, default=None)

    def check(self) -> None:
        if self._metric is None:
            return  # an unknown name is an error of the run, which knows the sets
        direction = self.metrics[self._metric]
        if direction is None and self.higher_is_better is None:
            need = "true or false: the metric has no direction of its own; "
            need += "length_controlled_accuracy has one"
            raise self.error("higher_is_better metric_name", need)
        if direction is not None and self.higher_is_better not in (None, direction):
            need = f"{str(direction).lower()}, or null: the best checkpoints would be deleted"
            raise self.error("higher_is_better metric_name", need)

    @property
    def metric_is_better_when_higher(self) -> bool:
        """The direction of `metric_name`; true if there is none (a later step is better)."""
        if self.higher_is_better is not None or self._metric is None:
            return self.higher_is_better is not False
        return bool(self.metrics[self._metric])


class GRPOCheckpointingConfig(CheckpointingConfig):
    """When the run is saved, and which checkpoints stay."""

    # NeMo RL ranks checkpoints of GRPO by val:accuracy, its name of the mean reward.
    metrics: ClassVar[Mapping[str, bool | None]] = {**GRPO_METRICS, "accuracy": True}

    checkpoint_dir: FilePath = "results/grpo"
    """Folder of this run's checkpoints and of its export."""
    save_period: PositiveInt | None = 10
    """Steps from one save to the next. None: only at the end, on a signal, and at the deadline."""
    metric_name: str | None = None
    """The validation metric that ranks checkpoints: `reward` (also `accuracy`), `raw_reward`,
    `gold_reward`, `kl`, `truncation_rate`, `entropy` or `mean_gen_tokens_per_sample`. None: the
    latest stay."""
