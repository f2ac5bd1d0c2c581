"""`CheckpointingConfig`: when a run is saved, which checkpoints stay, and by which metric they are ranked.

    checkpointing:
      checkpoint_dir: results/rm
      metric_name: val:validation-plain_length_controlled_accuracy
      keep_top_k: 3
      save_period: 100       # optimiser steps

A metric of one validation set is spelt `val:validation-<name>_<metric>`, `validation-<name>_<metric>` or
`validation-<name>/<metric>`; a metric over all sets `val_<metric>`, `val:val_<metric>` or `eval/rm/<metric>`. A run of
GRPO has one validation: `val:<metric>`, `val_<metric>` or `validation/<metric>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, PositiveFloat, PositiveInt

from treeward.config.base import Strict, at_field, nearest_name
from treeward.errors import ConfigError

__all__ = ["GRPO_METRICS", "METRICS", "CheckpointingConfig", "GRPOCheckpointingConfig", "MetricKey"]
__all__ += ["parse_grpo_metric_name", "parse_metric_name"]

METRICS: Mapping[str, bool | None] = {
    "loss": False,
    "accuracy": True,
    "reward_margin": True,
    "chosen_rewards": None,
    "rejected_rewards": None,
    "length_controlled_accuracy": True,
    "accuracy_longer_right": True,
    "accuracy_shorter_right": True,
    "accuracy_gap": None,
    "ece": False,
    "brier": False,
    "auroc": True,
    "kendall_tau": True,
    "worst_subset": True,
    "robust_accuracy": True,
}
"""The validation metrics of a reward model -> whether higher is better; None where neither direction is.

A metric whose name ends in `_` and another metric's name has the same direction, because a name in underscores may be
read as either.
"""

GRPO_METRICS: Mapping[str, bool | None] = {
    "reward": True,
    "raw_reward": True,
    "proxy": True,
    "gold_reward": True,
    "kl": False,
    "truncation_rate": False,
    "entropy": None,
    "mean_gen_tokens_per_sample": None,
}
"""The validation metrics of GRPO -> whether higher is better; None where neither direction is."""

_DURATION = re.compile(r"(\d+):([01]?\d|2[0-3]):([0-5]?\d):([0-5]?\d)")
_SPELLINGS = "val:validation-<name>_<metric>, validation-<name>/<metric>, val_<metric> or eval/rm/<metric>"


class MetricKey(NamedTuple):
    """A validation metric of the set `validation`, or over all sets if that is None."""

    validation: str | None
    metric: str


def parse_metric_name(name: str, sets: Sequence[str] = ()) -> MetricKey:
    """Read a metric's name in any accepted spelling.

    `sets`: the names of the validation sets. With underscores `validation-a_robust_accuracy` is the metric
    `robust_accuracy` of the set `a` or `accuracy` of `a_robust`: the set in `sets` decides, and without one the longer
    metric. Raises `ConfigError` for any other name, and where both sets exist.
    """
    spelling, validation = name.removeprefix("val:"), None
    if (of_all := re.fullmatch(r"(?:val_|eval/rm/)(.*)", spelling)) is not None:
        metric = of_all[1]
    elif (of_one := re.fullmatch(r"validation-(.+)/([^/]*)", spelling)) is not None:
        validation, metric = of_one.groups()
    elif (of_one := re.fullmatch(r"validation-(.+_.+)", spelling)) is not None:
        validation, metric = _split_at_underscore(of_one[1], sets, name)
    else:
        near = nearest_name(spelling, METRICS)
        need = f"{_SPELLINGS}; <metric> is one of {', '.join(METRICS)}"
        fix = f"for {near} over all validation sets write val_{near}" if near else None
        raise ConfigError("a metric's name is not understood", got=name, need=need, fix=fix)
    if metric not in METRICS:
        near, need = nearest_name(metric, METRICS), f"a name that ends in one of {', '.join(METRICS)}"
        fix = f"did you mean {name.removesuffix(metric)}{near}?" if near else None
        raise ConfigError("a metric is not known", got=name, need=need, fix=fix)
    return MetricKey(validation, metric)


def _split_at_underscore(spelling: str, sets: Sequence[str], name: str) -> tuple[str, str]:
    """The set and the metric of a spelling in underscores; the longest metric unless `sets` says otherwise."""
    named = [(one, spelling.removeprefix(f"{one}_")) for one in sets if spelling.startswith(f"{one}_")]
    meant = [reading for reading in named if reading[1] in METRICS]
    if len(meant) > 1:
        fix = "write " + " or ".join(f"validation-{validation}/{metric}" for validation, metric in sorted(meant))
        need = "a slash between the set and the metric"
        raise ConfigError("a metric's name can be read in two ways", got=name, need=need, fix=fix)
    known = sorted((metric for metric in METRICS if spelling.endswith(f"_{metric}")), key=len)
    longest = [(spelling.removesuffix(f"_{metric}"), metric) for metric in known[-1:]]
    validation, _, metric = spelling.rpartition("_")
    return (meant or sorted(named)[-1:] or longest or [(validation, metric)])[0]


def parse_grpo_metric_name(name: str) -> str:
    """The key of `GRPO_METRICS` that a name means; `accuracy` is NeMo RL's name of the mean reward.

    Raises `ConfigError` for any other name.
    """
    match = re.fullmatch(r"(?:val:|(?=val))(?:val_|validation/)?(\w+)", name)
    metric = match[1] if match else name
    metric = "reward" if match and metric == "accuracy" else metric
    if match is None or metric not in GRPO_METRICS:
        need = f"val:<metric>, val_<metric> or validation/<metric>; <metric> is one of {', '.join(GRPO_METRICS)}"
        near = nearest_name(metric, GRPO_METRICS)
        raise ConfigError(
            "a metric is not known", got=name, need=need, fix=f"did you mean val:{near}?" if near else None
        )
    return metric


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
    """Folder of this run's checkpoints and of its export."""
    resume: bool = True
    """Continue from the latest checkpoint in `checkpoint_dir` if there is one."""
    save_period: PositiveInt | None = 100
    """Optimiser steps from one save to the next. None: only at the end, on a signal, and at the deadline."""
    checkpoint_must_save_by: Annotated[PositiveFloat | None, BeforeValidator(_seconds)] = None
    """Save and stop after this time, in seconds or as `"DD:HH:MM:SS"`, in quotes."""
    metric_name: str | None = None
    """The metric that ranks checkpoints (spellings above): `loss`, `accuracy`, `reward_margin`, `chosen_rewards`,
    `rejected_rewards`, `length_controlled_accuracy`, `accuracy_longer_right`, `accuracy_shorter_right`, `accuracy_gap`,
    `ece`, `brier`, `auroc`, `kendall_tau`, `worst_subset` or `robust_accuracy`. None: the latest are kept."""
    higher_is_better: bool | None = None
    """Direction of the metric. None: decided by the metric. `accuracy_gap`, `chosen_rewards` and `rejected_rewards`
    have no direction of their own and need it."""
    keep_top_k: PositiveInt | None = 3
    """Number of best checkpoints that stay, beside the latest. None: all."""
    save_optimizer: bool = True
    """Save the state of the optimiser. A checkpoint without it can be scored with, and not resumed from."""
    model_save_format: Literal["safetensors"] = "safetensors"
    """The only format: pickled weights would be code."""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the exported weights; the score head stays float32."""

    @classmethod
    def _metric(cls, name: str) -> tuple[str, bool | None]:
        """The metric that a name means, and its direction. Raises `ConfigError`."""
        metric = parse_metric_name(name).metric
        return metric, METRICS[metric]

    def check(self) -> None:
        if self.metric_name is None:
            return
        try:
            metric, direction = self._metric(self.metric_name)
        except ConfigError as error:
            raise at_field(error, "metric_name") from None
        keys, given = "higher_is_better metric_name", self.higher_is_better
        fix = "rank by length_controlled_accuracy, which has a direction" if metric == "accuracy_gap" else None
        summary = f"{metric} does not say which of two checkpoints is better"
        self.refuse(direction is None and given is None, summary, keys, need="true or false", fix=fix)
        need = f"{str(direction).lower()}, or null: the best checkpoints would be deleted"
        is_opposite = direction is not None and given not in (None, direction)
        self.refuse(is_opposite, "higher_is_better contradicts metric_name", keys, need=need)

    @property
    def metric_is_better_when_higher(self) -> bool:
        """The direction of `metric_name`; true if there is none (a later step is better)."""
        if self.higher_is_better is not None or self.metric_name is None:
            return self.higher_is_better is not False
        return bool(self._metric(self.metric_name)[1])


class GRPOCheckpointingConfig(CheckpointingConfig):
    """When the run is saved, and which checkpoints stay."""

    checkpoint_dir: str = "results/grpo"
    """Folder of this run's checkpoints and of its export."""
    save_period: PositiveInt | None = 10
    """Steps from one save to the next. None: only at the end, on a signal, and at the deadline."""
    metric_name: str | None = None
    """The validation metric that ranks checkpoints, as `val:<metric>`, `val_<metric>` or `validation/<metric>`:
    `reward` (also `accuracy`), `raw_reward`, `proxy` (the reward on a fixed scale, where running statistics change
    it), `gold_reward`, `kl`, `truncation_rate`, `entropy` or `mean_gen_tokens_per_sample`. None: the latest stay."""
    higher_is_better: bool | None = None
    """Direction of the metric. None: decided by the metric. `entropy` and `mean_gen_tokens_per_sample` need it."""

    @classmethod
    def _metric(cls, name: str) -> tuple[str, bool | None]:
        metric = parse_grpo_metric_name(name)
        return metric, GRPO_METRICS[metric]
