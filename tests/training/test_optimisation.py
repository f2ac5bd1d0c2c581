from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from treeward.config.policy import (
    NamedScheduleConfig,
    OptimizerConfig,
    TorchScheduleConfig,
    TorchSchedulerConfig,
)
from treeward.errors import ConfigError
from treeward.training.optimisation import build_optimizer, build_scheduler


def rates(config: Any, steps: int, *, lr: float = 1.0) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = build_scheduler(optimizer, config, total_steps=steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"name": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        ({"name": "linear"}, [1.0, 0.75, 0.5, 0.25]),
        ({"name": "linear", "warmup_ratio": 0.5, "min_lr_ratio": 0.5}, [0.5, 1.0, 1.0, 0.75]),
        ({"name": "cosine", "min_lr_ratio": 0.1}, [0.1 + 0.45 * (1 + math.cos(math.pi * n / 5)) for n in range(5)]),
        ({"name": "cosine", "warmup_steps": 9}, [1 / 9, 2 / 9, 3 / 9]),  # longer than the run
    ],
)
def test_named_schedules_rise_and_fall_to_the_end(options: Any, expected: list[float]) -> None:
    assert rates(NamedScheduleConfig(**options), len(expected)) == pytest.approx(expected)


def test_torch_schedulers_follow_one_another() -> None:
    module = "torch.optim.lr_scheduler."
    config = TorchScheduleConfig(
        schedulers=(
            TorchSchedulerConfig(name=module + "LinearLR", kwargs={"start_factor": 0.5, "total_iters": 2}),
            TorchSchedulerConfig(name=module + "ConstantLR", kwargs={"factor": 1.0}),
        ),
        milestones=(2,),
    )
    assert rates(config, 4, lr=2.0) == pytest.approx([1.0, 1.5, 2.0, 2.0])


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("nowhere.Adam", {"lr": 1e-3}, "has no|cannot be imported"),
        ("torch.optim.AdamW", {"lr": 1e-3, "momentum": 0.9}, "momentum"),
        ("torch.optim.AdamW", {"lr": 1e-3, "betas": [0.9]}, "does not take these arguments"),
        ("collections.OrderedDict", {"lr": 1.0}, "OrderedDict"),
        ("torch.optim.LBFGS", {"lr": 1.0}, "needs no closure"),
    ],
)
def test_an_optimiser_that_cannot_be_is_refused(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer(nn.Linear(2, 1), OptimizerConfig(name=name, kwargs=kwargs))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("torch.optim.lr_scheduler.StepLR", {"step": 3}, "does not take these arguments"),
        ("torch.optim.lr_scheduler.ReduceLROnPlateau", {}, "not a schedule over steps"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(name: str, kwargs: dict[str, Any], message: str) -> None:
    config = TorchScheduleConfig(schedulers=(TorchSchedulerConfig(name=name, kwargs=kwargs),))
    with pytest.raises(ConfigError, match=message) as caught:
        build_scheduler(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), config, total_steps=4)
    assert "policy.scheduler[0]" in str(caught.value)


def test_frozen_parameters_are_left_alone() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig())
    assert [p is model.weight for group in optimizer.param_groups for p in group["params"]] == [True]
    assert optimizer.defaults["fused"] is True
