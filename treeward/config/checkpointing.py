"""`CheckpointingConfig`: when a run is saved, which checkpoints stay, and by which metric they are ranked.

    checkpointing: {metric_name: val:validation-plain_length_controlled_accuracy, keep_top_k: 3, save_period: 100}

A metric of one validation set is spelt `val:validation-<name>_<metric>`, `validation-<name>_<metric>` or
`validation-<name>/<metric>`; a metric over all sets `val_<metric>`, `val:val_<metric>` or `eval/rm/<metric>`. A run of
GRPO has one validation: `val:<metric>`, `val_<metric>` or `validation/<metric>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, PositiveFloat, PositiveInt

from treeward.config.base import Strict
from treeward.errors import ConfigError, nearest_name

METRICS: Mapping[str, bool | None] = {
    **dict.fromkeys(("loss", "ece", "brier", "mse"), False),
    **dict.fromkeys(("accuracy", "length_controlled_accuracy", "worst_subset"), True),
    **dict.fromkeys(("accuracy_longer_right", "accuracy_shorter_right"), True),
    **dict.fromkeys(("reward_margin", "auroc", "kendall_tau", "group_accuracy", "best_of_k", "pearson"), True),
    **dict.fromkeys(("chosen_rewards", "rejected_rewards", "accuracy_gap")),
}
"""The validation metrics of a reward model -> whether higher is better; None where neither direction is.

A metric whose name ends in `_` and another metric's name has the same direction, because a name in underscores may be
read as either.
"""

GRPO_METRICS: Mapping[str, bool | None] = {
    **dict.fromkeys(("reward", "raw_reward", "gold_reward"), True),
    **dict.fromkeys(("kl", "truncation_rate"), False),
    **dict.fromkeys(("entropy", "mean_gen_tokens_per_sample")),
}
"""The validation metrics of GRPO -> whether higher is better; None where neither direction is."""

_DURATION = re.compile(r"(\d+):([01]?\d|2[0-3]):([0-5]?\d):([0-5]?\d)")
_SPELLINGS = "val_<metric>, or of one set val:validation-<name>_<metric> or validation-<name>/<metric>"


class MetricKey(NamedTuple):
    """A validation metric of the set `validation`, or over all sets if that is None."""

    validation: str | None
    metric: str


def parse_metric_name(name: str, sets: Sequence[str] = (), metrics: Mapping[str, Any] = METRICS) -> MetricKey:
    """Read a metric's name in any accepted spelling.

    `sets`: the names of the validation sets. With underscores `validation-a_group_accuracy` is the metric
    `group_accuracy` of the set `a` or `accuracy` of `a_group`: the first such set of `sets` decides, and without one
    the longer metric. Raises `ConfigError` for any other name.
    """
    spelling = name.removeprefix("val:")
    if spelling.startswith("validation-"):
        key = _key_of_one_set(spelling.removeprefix("validation-"), sets)
    else:
        metric = re.sub("^(val_|eval/rm/|validation/)", "", spelling)
        key = MetricKey(None, metric if metric != name else "")
    if key.metric not in metrics or key.validation == "":
        near, need = nearest_name(key.metric or name, metrics), f"{_SPELLINGS}; <metric> is one of {', '.join(metrics)}"
        prefix = name.removesuffix(key.metric) if key.metric else "val_"
        fix = f"did you mean {prefix}{near}?" if near else None
        raise ConfigError("a metric is not known", got=name, need=need, fix=fix)
    return key


def _key_of_one_set(spelling: str, sets: Sequence[str]) -> MetricKey:
    """The set and the metric of `set/metric` or `set_metric`; the longest metric unless `sets` says otherwise."""
    if "/" in spelling:
        validation, _, metric = spelling.rpartition("/")
        return MetricKey(validation, metric)
    named = [MetricKey(name, spelling.removeprefix(f"{name}_")) for name in sets if spelling.startswith(f"{name}_")]
    meant = [key for key in named if key.metric in METRICS]
    suffixes = [metric for metric in METRICS if spelling.endswith(f"_{metric}")]
    metric = max(suffixes, key=len, default=spelling.rpartition("_")[2])
    return (meant or sorted(named)[-1:] or [MetricKey(spelling.removesuffix(metric)[:-1], metric)])[0]


def parse_grpo_metric_name(name: str) -> str:
    """The key of `GRPO_METRICS` that a name means; `accuracy` is NeMo RL's name of the mean reward.

    Raises `ConfigError` for any other name.
    """
    key = parse_metric_name(name, metrics={**GRPO_METRICS, "accuracy": True})
    if key.validation is not None:
        need = "val:<metric>: there is one validation, of all sets"
        raise ConfigError("a run of GRPO has no metrics of one set", got=name, need=need, fix=f"write val:{key.metric}")
    return "reward" if key.metric == "accuracy" else key.metric


def _seconds(value: Any) -> Any:
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return value
    days, hours, minutes, seconds = map(int, match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


class CheckpointingConfig(Strict):
    """When a run is saved, and which checkpoints stay."""

    enabled: bool = True
    """Save checkpoints, and resume from them."""
    checkpoint_dir: str = "results/rm"
    """Folder of this run's checkpoints and of its export. A run goes on from the latest of them."""
    save_period: PositiveInt | None = 100
    """Optimiser steps from one save to the next. None: only at the end, on a signal, and at the deadline."""
    checkpoint_must_save_by: Annotated[PositiveFloat | None, BeforeValidator(_seconds)] = None
    """Save and stop after this time, in seconds or as `"DD:HH:MM:SS"`, in quotes."""
    metric_name: str | None = None
    """The validation metric that ranks checkpoints, as `val_loss` or `validation-plain_length_controlled_accuracy`;
    docs/training.md lists them. None: the latest are kept."""
    higher_is_better: bool | None = None
    """Direction of the metric. None: decided by the metric, if it has a direction of its own."""
    keep_top_k: PositiveInt | None = 3
    """Number of best checkpoints that stay, beside the latest. None: all."""

    @classmethod
    def _direction(cls, name: str) -> bool | None:
        """Whether the metric that a name means is better when it is higher. Raises `ConfigError`."""
        return METRICS[parse_metric_name(name).metric]

    def check(self) -> None:
        if self.metric_name is None:
            return
        try:
            direction = self._direction(self.metric_name)
        except ConfigError as error:
            raise error.but(field="metric_name") from None
        if direction is None and self.higher_is_better is None:
            need = "true or false: the metric has no direction of its own; length_controlled_accuracy has one"
            raise self.error("higher_is_better metric_name", need)
        if direction is not None and self.higher_is_better not in (None, direction):
            need = f"{str(direction).lower()}, or null: the best checkpoints would be deleted"
            raise self.error("higher_is_better metric_name", need)

    @property
    def metric_is_better_when_higher(self) -> bool:
        """The direction of `metric_name`; true if there is none (a later step is better)."""
        if self.higher_is_better is not None or self.metric_name is None:
            return self.higher_is_better is not False
        return bool(self._direction(self.metric_name))


class GRPOCheckpointingConfig(CheckpointingConfig):
    """When the run is saved, and which checkpoints stay."""

    checkpoint_dir: str = "results/grpo"
    """Folder of this run's checkpoints and of its export."""
    save_period: PositiveInt | None = 10
    """Steps from one save to the next. None: only at the end, on a signal, and at the deadline."""
    metric_name: str | None = None
    """The validation metric that ranks checkpoints: `reward` (also `accuracy`), `raw_reward`, `gold_reward`, `kl`,
    `truncation_rate`, `entropy` or `mean_gen_tokens_per_sample`. None: the latest stay."""

    @classmethod
    def _direction(cls, name: str) -> bool | None:
        return GRPO_METRICS[parse_grpo_metric_name(name)]
