"""The optimiser and the learning-rate schedule that a configuration names.

optimizer = build_optimizer(model, config.policy.optimizer)
scheduler = build_scheduler(optimizer, config.policy.scheduler, total_steps=1000)
"""

from __future__ import annotations

import inspect
import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR

from treeward.config.optimisation import NamedScheduleConfig, OptimizerConfig, SchedulerConfig
from treeward.errors import ConfigError, ModelError
from treeward.user_code import import_object

__all__ = ["build_optimizer", "build_scheduler", "clip_gradients"]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """An optimiser over the model's trainable parameters. Raises `ConfigError` for a class or arguments that fail."""
    where = "policy.optimizer"
    optimizer_class = import_object(config.name, where=where, field="name")
    kwargs = dict(config.kwargs)
    if optimizer_class in (torch.optim.Adam, torch.optim.AdamW) and not kwargs.keys() & {"fused", "foreach"}:
        kwargs["fused"] = True  # one kernel for all parameters: several times faster, on a CPU too
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        optimizer = optimizer_class(parameters, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{config.name} does not take these arguments", where=f"{where}.kwargs", got=f"{kwargs}: {error}"
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError("not an optimiser", where=f"{where}.name", got=config.name, need="a torch.optim.Optimizer")
    if inspect.signature(optimizer.step).parameters["closure"].default is inspect.Parameter.empty:
        raise ConfigError(
            "this optimiser computes the loss several times a step, which training does not do",
            where=f"{where}.name",
            got=config.name,
            need="a class whose step() takes no closure, as torch.optim.AdamW",
        )
    return optimizer


def build_scheduler(optimizer: torch.optim.Optimizer, config: SchedulerConfig, *, total_steps: int) -> LRScheduler:
    """The schedule; `scheduler.step()` follows each optimiser step.

    Raises `ConfigError` for a class or arguments that fail.
    """
    if isinstance(config, NamedScheduleConfig):
        return LambdaLR(optimizer, lambda step: _learning_rate_factor(config, step, total_steps))
    schedulers: list[LRScheduler] = []
    for i, entry in enumerate(config.schedulers):
        where = f"policy.scheduler[{i}]"
        try:
            scheduler = import_object(entry.name, where=where, field="name")(optimizer, **entry.kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{entry.name} does not take these arguments", where=f"{where}.kwargs", got=f"{entry.kwargs}: {error}"
            ) from error
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                "not a schedule over steps",
                where=f"{where}.name",
                got=entry.name,
                need="a class of torch.optim.lr_scheduler that steps without a metric",
            )
        schedulers.append(scheduler)
    if len(schedulers) == 1:
        return schedulers[0]
    return SequentialLR(optimizer, schedulers, milestones=list(config.milestones))


def clip_gradients(model: nn.Module, max_norm: float | None, loss: float, *, what: str, fix: str) -> float:
    """Clip the gradients, and return their norm before that.

    Raises `ModelError` if it or the loss is not finite; the gradients are then gone. `what`: the name of the loss.
    """
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), math.inf if max_norm is None else max_norm))
    if not (math.isfinite(norm) and math.isfinite(loss)):
        model.zero_grad(set_to_none=True)
        raise ModelError(
            f"{what} is not finite",
            got=f"loss {loss}, gradient norm {norm}",
            need="finite numbers; the weights were not changed by this step",
            fix=fix,
        )
    return norm


def _learning_rate_factor(config: NamedScheduleConfig, step: int, total_steps: int) -> float:
    """The learning rate of the step after `step` steps, as a fraction of the peak.

    Warm-up rises from 1/w in the first of w steps to 1; a decay then falls so that the step after the last would have
    `min_lr_ratio`.
    """
    warmup = config.warmup_steps
    if warmup is None:
        warmup = math.ceil((config.warmup_ratio or 0.0) * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.name == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    falling = 1 - progress if config.name == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * falling
