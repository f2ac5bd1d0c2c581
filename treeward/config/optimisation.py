"""The optimiser and the learning-rate schedule.

    optimizer: {name: torch.optim.AdamW, kwargs: {lr: 3.0e-6}}
    scheduler: {name: cosine, warmup_ratio: 0.03}

A schedule may also be a list of PyTorch schedulers, with the steps at which one follows another as its last entry:
`[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {...}}, {name: ...}, {milestones: [10]}]`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, field_validator

from treeward.config.base import Strict
from treeward.errors import ConfigError

DottedPath = Annotated[str, Field(pattern=r"\w\.\w")]
"""The dotted path of a class."""


class OptimizerConfig(Strict):
    """A class of `torch.optim`, or any other with its interface, and its arguments."""

    name: DottedPath = "torch.optim.AdamW"
    """Dotted path of the class."""
    kwargs: dict[str, Any] = Field(default_factory=lambda: {"lr": 3e-6})
    """Its arguments, with `lr`, the peak of the schedule."""

    @field_validator("kwargs")
    @classmethod
    def _check_kwargs(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        lr = kwargs.get("lr")
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not lr > 0:
            raise ConfigError("there is no learning rate", field="lr", got=lr, need="a positive number, as 3.0e-6")
        return kwargs


class NamedScheduleConfig(Strict):
    """A schedule over the whole run: warm up linearly, then stay or fall."""

    name: Literal["constant", "linear", "cosine"] = "linear"
    """After the warm-up the rate is `constant`, or falls to `min_lr_ratio` by the last step (`linear`, `cosine`)."""
    warmup_steps: NonNegativeInt | None = None
    """Optimiser steps of linear warm-up from zero. None: by `warmup_ratio`."""
    warmup_ratio: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Warm-up as a fraction of all steps. None, and no `warmup_steps`: no warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """The last learning rate as a fraction of the peak."""

    def check(self) -> None:
        is_both = self.warmup_steps is not None and self.warmup_ratio is not None
        self.refuse(is_both, "warmup_steps warmup_ratio", "at most one of them")


class TorchSchedulerConfig(Strict):
    """One class of `torch.optim.lr_scheduler` and its arguments."""

    name: DottedPath
    """Dotted path of the class, as `torch.optim.lr_scheduler.LinearLR`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, without the optimiser; steps are optimiser steps."""


class TorchScheduleConfig(Strict):
    """PyTorch schedulers, one after another."""

    schedulers: tuple[TorchSchedulerConfig, ...] = Field(min_length=1)
    """The schedulers in their order."""
    milestones: tuple[PositiveInt, ...] = ()
    """The optimiser steps at which the second and later schedulers begin."""

    def check(self) -> None:
        steps, num_steps = self.milestones, len(self.schedulers) - 1
        need = f"{num_steps} rising steps: where each scheduler but the first begins"
        is_wrong = len(steps) != num_steps or any(a >= b for a, b in itertools.pairwise(steps))
        self.refuse(is_wrong, "milestones", need)


def _schedule(raw: Any) -> Any:
    """The section of a schedule's name, of null (constant), of PyTorch schedulers, or of one of them."""
    if raw is None or isinstance(raw, str):
        raw = {"name": "constant" if raw is None else raw}
    if isinstance(raw, Mapping) and ("kwargs" in raw or "." in str(raw.get("name", ""))):
        raw = [raw]
    if isinstance(raw, Sequence):
        milestones = [entry["milestones"] for entry in raw if isinstance(entry, Mapping) and [*entry] == ["milestones"]]
        if len(milestones) > 1:
            raise ConfigError("milestones are given more than once", got=milestones, need="one list of steps")
        schedulers = [entry for entry in raw if not (isinstance(entry, Mapping) and [*entry] == ["milestones"])]
        raw = {"schedulers": schedulers, "milestones": milestones[0] if milestones else ()}
    if not isinstance(raw, Mapping):
        return raw
    keys = {str(key): value for key, value in raw.items()}
    return TorchScheduleConfig(**keys) if "schedulers" in keys else NamedScheduleConfig(**keys)


SchedulerConfig = Annotated[NamedScheduleConfig | TorchScheduleConfig, BeforeValidator(_schedule)]
