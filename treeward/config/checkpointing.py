"""`CheckpointingConfig`: when a run is saved, which checkpoints stay, and by which metric they are ranked.

    checkpointing:
      checkpoint_dir: results/rm
      metric_name: val:validation-plain_length_controlled_accuracy
      keep_top_k: 3
      save_period: 100       # optimiser steps

A metric of one validation set is spelt `val:validation-<name>_<metric>`, `validation-<name>_<metric>` or
`validation-<name>/<metric>`; one pooled over all sets `val_<metric>`, `val:val_<metric>` or `eval/rm/<metric>`.
Metrics are those of the loss (`loss`, `accuracy`, `reward_margin`, ...) and the diagnostics of `treeward eval`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, PositiveFloat, PositiveInt, model_validator

from treeward.config.base import Strict, nearest_name
from treeward.errors import ConfigError

__all__ = ["METRICS", "CheckpointingConfig", "MetricKey", "parse_metric_name"]

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
"""The validation metrics -> whether higher is better; None where neither direction is.

A metric whose name ends in `_` and another's has the other's direction, so that a name in underscores, which may be
read as either, has one direction.
"""

_DURATION = re.compile(r"(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})")
_SPELLINGS = "val:validation-<name>_<metric>, validation-<name>/<metric>, val_<metric> or eval/rm/<metric>"


class MetricKey(NamedTuple):
    """Which validation metric: of the set `validation`, or pooled over all sets if that is None."""

    validation: str | None
    metric: str


def parse_metric_name(name: str, sets: Sequence[str] = ()) -> MetricKey:
    """Read a metric's name in any accepted spelling.

    `sets`: the names of the validation sets. With underscores `validation-a_robust_accuracy` is the metric
    `robust_accuracy` of the set `a` or `accuracy` of `a_robust`: a set that is there is meant, and where none is the
    longer metric. Raises `ConfigError` for what is no name of a metric, and where both sets are there.
    """
    spelling = name.removeprefix("val:")
    for pooled in ("val_", "eval/rm/"):
        if spelling.startswith(pooled):
            return MetricKey(None, _known_metric(spelling.removeprefix(pooled), name))
    if not spelling.startswith("validation-"):
        near = nearest_name(spelling, METRICS)
        raise ConfigError(
            "a metric's name is not understood",
            got=name,
            need=f"{_SPELLINGS}; <metric> is one of {', '.join(METRICS)}",
            fix=f"for {near} over all validation sets write val_{near}" if near else None,
        )
    spelling = spelling.removeprefix("validation-")
    if "/" in spelling:
        validation, _, metric = spelling.rpartition("/")
    else:
        validation, metric = _split_at_underscore(spelling, sets, name)
    if not validation:
        raise ConfigError("a metric's name does not say of which validation set", got=name, need=_SPELLINGS)
    return MetricKey(validation, _known_metric(metric, name))


def _split_at_underscore(spelling: str, sets: Sequence[str], name: str) -> tuple[str, str]:
    """The set and the metric of a spelling in which only underscores part them, the longest metric first."""
    known = sorted((m for m in METRICS if spelling.endswith(f"_{m}") and spelling != f"_{m}"), key=len, reverse=True)
    readings = [(spelling.removesuffix(f"_{metric}"), metric) for metric in known]
    meant = [reading for reading in readings if reading[0] in sets]
    if not meant:  # plain_lenght_controlled_accuracy: a set that is there, and a metric that is misspelt
        for known_set in sorted(sets, key=len, reverse=True):
            if spelling.startswith(f"{known_set}_"):
                return known_set, spelling.removeprefix(f"{known_set}_")
    if not readings:
        validation, _, metric = spelling.rpartition("_")
        return validation, metric
    meant = meant or readings[:1]
    if len(meant) > 1:
        raise ConfigError(
            "a metric's name can be read in two ways",
            got=name,
            need="a slash between the set and the metric",
            fix="write " + " or ".join(f"validation-{validation}/{metric}" for validation, metric in meant),
        )
    return meant[0]


def _known_metric(metric: str, name: str) -> str:
    if metric not in METRICS:
        near = nearest_name(metric, METRICS)
        raise ConfigError(
            "a metric is not known",
            got=name,
            need=f"a name that ends in one of {', '.join(METRICS)}",
            fix=f"did you mean {name.removesuffix(metric)}{near}?" if near else None,
        )
    return metric


def _seconds(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        return value
    days, hours, minutes, seconds = map(int, match.groups())
    if hours > 23 or minutes > 59 or seconds > 59:
        raise ConfigError("a duration is out of range", got=value, need="DD:HH:MM:SS with HH < 24, MM < 60, SS < 60")
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


class CheckpointingConfig(Strict):
    """When a run is saved, and which checkpoints stay."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        "save_consolidated": "an export is always one plain Hugging Face folder",
        "model_cache_dir": "models are cached where HF_HOME says",
        "model_repo_id": "the hub section names the repository",
        "is_async": "a save is finished before training goes on",
    }

    enabled: bool = True
    """Save checkpoints, and resume from them."""
    checkpoint_dir: str = "results/rm"
    """Folder of this run's checkpoints and of its export."""
    resume: bool = True
    """Go on from the latest checkpoint in `checkpoint_dir` if there is one."""
    save_period: PositiveInt | None = 100
    """Save each time after so many optimiser steps. None: only at the end, on a signal, and by the deadline."""
    checkpoint_must_save_by: Annotated[PositiveFloat | None, BeforeValidator(_seconds)] = None
    """Save and leave after this time, as `DD:HH:MM:SS` or in seconds."""
    metric_name: str | None = None
    """The metric that ranks checkpoints (spellings above): `loss`, `accuracy`, `reward_margin`, `chosen_rewards`,
    `rejected_rewards`, `length_controlled_accuracy`, `accuracy_longer_right`, `accuracy_shorter_right`, `accuracy_gap`,
    `ece`, `brier`, `auroc`, `kendall_tau`, `worst_subset` or `robust_accuracy`. None: the latest are kept."""
    higher_is_better: bool | None = None
    """Direction of the metric. None: decided by the metric; those of which neither direction is better (`accuracy_gap`,
    `chosen_rewards`, `rejected_rewards`) need it."""
    keep_top_k: PositiveInt | None = 3
    """How many of the best checkpoints stay, beside the latest. None: all."""
    save_optimizer: bool = True
    """Without the optimiser's state a checkpoint can be scored with, and not resumed from."""
    model_save_format: Literal["safetensors"] = "safetensors"
    """The only format: pickled weights would be code."""
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the exported weights; the score head stays float32."""

    @classmethod
    def _metric(cls, name: str) -> tuple[str, bool | None]:
        """The metric that a name means, and its direction. Raises `ConfigError`."""
        metric = parse_metric_name(name).metric
        return metric, METRICS[metric]

    @model_validator(mode="after")
    def _metric_is_known(self) -> CheckpointingConfig:
        if self.metric_name is None:
            return self
        try:
            metric, direction = self._metric(self.metric_name)
        except ConfigError as error:
            raise ConfigError(
                error.summary, field="metric_name", got=error.got, need=error.need, fix=error.fix
            ) from None
        if direction is None and self.higher_is_better is None:
            raise ConfigError(
                f"{metric} does not say which of two checkpoints is better",
                field="higher_is_better",
                got="null",
                need="true or false",
                fix="a gap costs length_controlled_accuracy, which has a direction: rank by that"
                if metric == "accuracy_gap"
                else None,
            )
        if direction is not None and self.higher_is_better not in (None, direction):
            raise ConfigError(
                "higher_is_better contradicts metric_name",
                field="higher_is_better",
                got=f"{str(self.higher_is_better).lower()} for {self.metric_name}",
                need=f"{str(direction).lower()}: the best checkpoints would be deleted",
                fix=f"set checkpointing.higher_is_better={str(direction).lower()}, or null",
            )
        return self

    @property
    def metric_is_better_when_higher(self) -> bool:
        """The direction of `metric_name`; true if there is none (a later step is better)."""
        if self.higher_is_better is not None or self.metric_name is None:
            return self.higher_is_better is not False
        return bool(self._metric(self.metric_name)[1])
