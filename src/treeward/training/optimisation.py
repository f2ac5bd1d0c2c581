"""The optimiser and the learning-rate schedule that a configuration names."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from treeward.config.policy import NamedScheduleConfig, OptimizerConfig, SchedulerConfig
from treeward.errors import ConfigError, ModelError
from treeward.parallel.sharding import clip_grad_norm_
from treeward.training.masters import MasterWeights
from treeward.user_code import import_object

logger = logging.getLogger(__name__)

MOST_SKIPPED_IN_A_ROW = 5
"""So many steps in a row without a finite gradient end a run: one may be a batch's fault, five are
the weights'."""
_ADAMS_OF_TORCH = ("torch.optim.Adam", "torch.optim.AdamW")


def be_deterministic() -> None:
    """Make PyTorch use deterministic algorithms in this process, and raise if there is none."""
    # read by cuBLAS when it is first used
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, cpu_offload: bool = False
) -> torch.optim.Optimizer:
    """An optimiser over the model's trainable parameters, with float32 masters of bfloat16 ones;
    torchao's Adam and its variants round stochastically instead, unless `bf16_stochastic_round` is
    false. `cpu_offload`: keep masters and states in the host's memory. Raises `ConfigError` for a
    class or arguments that fail, and for torchao's on sharded parameters."""
    names: list[str] = []
    parameters: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            names.append(name)
            parameters.append(parameter)
    is_low = any(parameter.dtype == torch.bfloat16 for parameter in parameters)
    kwargs = dict(config.kwargs)
    chooses_kernel = "fused" in kwargs or "foreach" in kwargs
    if config.name in _ADAMS_OF_TORCH and not chooses_kernel:
        # One kernel for all parameters: several times faster, on a CPU too. It wants all of them on
        # one mesh, or none.
        meshes = {getattr(parameter, "device_mesh", None) for parameter in parameters}
        kwargs["fused"] = len(meshes) <= 1
    if config.name.startswith("torchao."):
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            check_sharded_optimizer(config)
        if is_low and config.name.startswith("torchao.optim.Adam"):
            kwargs.setdefault("bf16_stochastic_round", True)

    def make(chosen: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = _made(
            config.name, kwargs, chosen, where="policy.optimizer"
        )
        is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
        if not is_optimizer or isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "this optimiser cannot be used",
                where="policy.optimizer",
                field="name",
                got=config.name,
                need="a torch.optim.Optimizer whose step needs no closure",
            )
        # PyTorch's own key; a checkpoint knows the states by these names. A class may sort the
        # parameters into groups of its own, as those with and without a decay.
        # Masters stand in the order of their parameters.
        name_of = dict(zip(chosen, names, strict=True))
        for group in optimizer.param_groups:
            group["param_names"] = [name_of[parameter] for parameter in group["params"]]
        return optimizer

    if cpu_offload:
        logger.info(
            "The optimiser keeps float32 masters and its states in the host's memory, and steps "
            "them there."
        )
        return MasterWeights(parameters, make, on_host=True)
    if not is_low:
        return make(parameters)
    if kwargs.get("bf16_stochastic_round"):
        logger.info(
            "The optimiser keeps no float32 weights: it rounds its steps to bfloat16 "
            "stochastically."
        )
        return make(parameters)
    logger.info("The optimiser keeps float32 masters of the bfloat16 weights.")
    return MasterWeights(parameters, make)


def check_sharded_optimizer(config: OptimizerConfig) -> None:
    """Raise `ConfigError` for an optimiser whose states cannot be shared out to several
    processes."""
    if config.name.startswith("torchao."):
        raise ConfigError(
            "quantised states are for one process",
            where="policy.optimizer",
            field="name",
            got=config.name,
            need="one process",
            fix="set policy.optimizer.name=torch.optim.AdamW: processes share its states out",
        )


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: SchedulerConfig, *, total_steps: int
) -> LRScheduler:
    """The schedule; `scheduler.step()` follows each optimiser step. Raises `ConfigError` for a
    class or arguments that fail."""
    if isinstance(config, NamedScheduleConfig):
        return LambdaLR(optimizer, lambda step: _learning_rate_factor(config, step, total_steps))
    schedulers: list[LRScheduler] = []
    for i, entry in enumerate(config.schedulers):
        where = f"policy.scheduler[{i}]"
        scheduler = _made(entry.name, entry.kwargs, optimizer, where=where)
        is_scheduler = isinstance(scheduler, LRScheduler)
        if not is_scheduler or isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "not a schedule over steps",
                where=where,
                field="name",
                got=entry.name,
                need="a class of torch.optim.lr_scheduler that steps without a metric",
            )
        schedulers.append(scheduler)
    if len(schedulers) == 1:
        return schedulers[0]
    return SequentialLR(optimizer, schedulers, milestones=list(config.milestones))


def _made(name: str, kwargs: Mapping[str, Any], of: Any, *, where: str) -> Any:
    """An object of a class by its dotted path, made of `of`, the parameters or the optimiser."""
    try:
        return import_object(name, where=where, field="name")(of, **kwargs)
    except ConfigError:
        raise
    # A constructor may raise anything, as an IndexError for betas: [0.9].
    except Exception as error:
        raise ConfigError(
            f"{name} does not take these arguments",
            where=where,
            field="kwargs",
            got=f"{dict(kwargs)}: {error}",
        ) from error


@dataclass(slots=True)
class SkippedSteps:
    """Counts steps of the optimiser that were skipped for a loss or gradient that was not finite;
    part of the state."""

    total: int = 0
    in_a_row: int = 0

    def clip(
        self, model: nn.Module, max_norm: float | None, loss: float, *, what: str, fix: str
    ) -> float:
        """Clip the gradients, and return their norm before that; NaN for a step to skip, which is
        counted. Raises `ModelError` for too many in a row, after it has dropped the gradients.
        `what`: the name of the loss."""
        norm = clip_grad_norm_(model.parameters(), max_norm)
        if math.isfinite(norm) and math.isfinite(loss):
            self.in_a_row = 0
            return norm
        got = f"loss {loss}, gradient norm {norm}"
        if self.in_a_row + 1 == MOST_SKIPPED_IN_A_ROW:
            # A caller who catches the error and goes on must not step by these gradients.
            model.zero_grad(set_to_none=True)
            got += f", the step of the optimiser number {MOST_SKIPPED_IN_A_ROW} in a row"
            need = "finite numbers; none of these steps has changed the weights"
            raise ModelError(f"{what} or its gradient is not finite", got=got, need=need, fix=fix)
        self.total += 1
        self.in_a_row += 1
        sentence = f"{what[0].upper()}{what[1:]} or its gradient is not finite"
        logger.warning("%s (%s): skipped.", sentence, got)
        return math.nan


def advance(scheduler: LRScheduler) -> None:
    """Go on to the next learning rate, also after a skipped step: a schedule depends on the number
    of steps alone."""
    with warnings.catch_warnings():
        # torch takes a schedule that goes on before the first step of the optimiser for a mistake.
        message = "Detected call of `lr_scheduler.step"
        warnings.filterwarnings("ignore", message=message, category=UserWarning)
        scheduler.step()


def _learning_rate_factor(config: NamedScheduleConfig, step: int, total_steps: int) -> float:
    """The learning rate of the step after `step` steps, as a fraction of the peak: warm-up rises
    from 1/w in the first of w steps to 1; a decay then falls so that the step after the last would
    have `min_lr_ratio`."""
    warmup = config.warmup_steps
    if warmup is None:
        warmup = math.ceil((config.warmup_ratio or 0.0) * total_steps)
    if step < warmup:
        return (step + 1) / warmup  # + 1: a first step at a rate of 0 would change nothing
    if config.name == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.name == "linear":
        falling = 1 - progress
    else:
        # Half a cosine, without restarts (Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5).
        falling = (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * falling
