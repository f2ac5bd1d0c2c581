"""Optimisers and schedules, and states that come back exactly."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
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
from treeward.errors import CheckpointError, ConfigError
from treeward.training.masters import MasterWeights
from treeward.training.optimisation import build_optimizer, build_scheduler
from treeward.training.state import (
    RunState,
    check_files,
    load_state,
    read_state,
    save_state,
    stored_metric,
    write_state,
)
from treeward.user_code import import_object


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
        (
            {"name": "cosine", "min_lr_ratio": 0.1},
            [0.1 + 0.45 * (1 + math.cos(math.pi * n / 5)) for n in range(5)],
        ),
        ({"name": "cosine", "warmup_steps": 9}, [1 / 9, 2 / 9, 3 / 9]),  # longer than the run
    ],
)
def test_named_schedules_rise_and_fall_to_the_end(options: Any, expected: list[float]) -> None:
    assert rates(NamedScheduleConfig(**options), len(expected)) == pytest.approx(expected)


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
def test_an_optimiser_that_cannot_be_is_refused(
    name: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer(nn.Linear(2, 1), OptimizerConfig(name=name, kwargs=kwargs))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("torch.optim.lr_scheduler.StepLR", {"step": 3}, "does not take these arguments"),
        ("torch.optim.lr_scheduler.ReduceLROnPlateau", {}, "not a schedule over steps"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(
    name: str, kwargs: dict[str, Any], message: str
) -> None:
    config = TorchScheduleConfig(schedulers=(TorchSchedulerConfig(name=name, kwargs=kwargs),))
    with pytest.raises(ConfigError, match=message) as caught:
        build_scheduler(
            torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), config, total_steps=4
        )
    assert "policy.scheduler[0]" in str(caught.value)


TOTAL = 12


class Session:
    """A small model in training: what a run has of optimiser, schedule and names."""

    def __init__(
        self,
        optimizer: OptimizerConfig,
        schedule: Any,
        *,
        dtype: torch.dtype = torch.float32,
        width: int = 4,
        on_host: bool = False,
    ) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(
            nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 8), nn.Linear(8, 1)
        ).to(dtype)
        self.model[-1].float()
        self.optimizer = build_optimizer(self.model, optimizer)
        if on_host:
            make = partial(
                import_object(optimizer.name, where="here", field="name"), **optimizer.kwargs
            )
            self.optimizer = MasterWeights(self.model.parameters(), make, on_host=True)
        self.scheduler = build_scheduler(self.optimizer, schedule, total_steps=TOTAL)
        self.rates: list[float] = []

    def train(self, steps: range) -> None:
        for step in steps:
            rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
            self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
            hidden = self.model[:-1](rows.to(self.model[0].weight.dtype))
            self.model[-1](hidden.float()).square().mean().backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path, step: int) -> None:
        save_state(folder, RunState(step, {"what": "x"}), self.optimizer, self.scheduler)

    def resume(self, folder: Path, weights: dict[str, Any]) -> RunState:
        self.model.load_state_dict(weights)
        return load_state(folder, self.optimizer, self.scheduler)


CONSTANT = NamedScheduleConfig(name="constant")


def resumes_exactly(folder: Path, optimizer: OptimizerConfig, schedule: Any, **model: Any) -> None:
    whole = Session(optimizer, schedule, **model)
    whole.train(range(TOTAL))
    first = Session(optimizer, schedule, **model)
    first.train(range(5))
    first.save(folder, 5)
    second = Session(optimizer, schedule, **model)
    weights = {name: weight.clone() for name, weight in first.model.state_dict().items()}
    if isinstance(second.optimizer, MasterWeights):  # the masters are what is saved
        weights = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    state = second.resume(folder, weights)
    for name, weight in first.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name
    second.train(range(state.step, TOTAL))
    assert first.rates + second.rates == whole.rates
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, second.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("AdamW", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adafactor", {}),
    ],
)
def test_a_resumed_optimiser_goes_on_bit_for_bit(
    tmp_path: Path, name: str, kwargs: dict[str, Any]
) -> None:
    optimizer = OptimizerConfig(name=f"torch.optim.{name}", kwargs={"lr": 0.01, **kwargs})
    resumes_exactly(tmp_path, optimizer, NamedScheduleConfig(name="cosine", warmup_steps=3))


class TwoGroups(torch.optim.AdamW):
    """Decays matrices alone, as the code of many papers does."""

    def __init__(self, params: Any, **options: Any) -> None:
        params = list(params)
        matrices = [weight for weight in params if weight.dim() > 1]
        vectors = [weight for weight in params if weight.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.003}]
        super().__init__(groups, **options)


class WithNone(torch.optim.SGD):
    """Keeps None for a value that it does not have yet."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["variance"] = None


@pytest.mark.parametrize("kind", [TwoGroups, WithNone])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimiser_of_the_user_goes_on_bit_for_bit(
    tmp_path: Path, kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    optimizer = OptimizerConfig(name=f"{__name__}.{kind.__name__}", kwargs={"lr": 0.01})
    resumes_exactly(tmp_path, optimizer, CONSTANT, dtype=dtype)


def test_masters_go_on_bit_for_bit_and_take_steps_below_the_rounding_of_bfloat16(
    tmp_path: Path,
) -> None:
    config = OptimizerConfig(kwargs={"lr": 3e-4})
    schedule = NamedScheduleConfig(name="cosine", warmup_steps=3)
    resumes_exactly(tmp_path, config, schedule, dtype=torch.bfloat16)
    rounded, exact = (
        Session(config, schedule, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    exact.model.load_state_dict(rounded.model.state_dict())
    exact.optimizer = build_optimizer(exact.model, config)
    exact.scheduler = build_scheduler(exact.optimizer, schedule, total_steps=TOTAL)
    before = [p.detach().float().clone() for p in rounded.model.parameters()]
    for session in (rounded, exact):
        session.train(range(TOTAL))
    assert (
        isinstance(rounded.optimizer, MasterWeights)
        and rounded.optimizer.inner.defaults["fused"] is True
    )
    for weight, want, old in zip(
        rounded.model.parameters(), exact.model.parameters(), before, strict=True
    ):
        # Steps of 3e-4 on weights of up to 0.6 would be rounded away; the masters' sum is within
        # one rounding.
        assert torch.allclose(weight.float(), want, rtol=2**-8, atol=2e-4)
        assert float((want.detach() - old).abs().max()) > 1e-3
    assert rounded.model[-1].weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adafactor"])
def test_states_in_the_memory_of_the_host_are_the_same_states(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """One parameter is stepped after another, by gradients as they are when they have been
    clipped."""
    config = OptimizerConfig(name=f"torch.optim.{name}", kwargs={"lr": 0.01})
    schedule = NamedScheduleConfig(name="cosine", warmup_steps=3)
    resumes_exactly(tmp_path, config, schedule, dtype=dtype, on_host=True)
    here, there = (
        Session(config, schedule, dtype=dtype, on_host=on_host) for on_host in (False, True)
    )
    for session in (here, there):
        session.train(range(TOTAL))
    for weight, want in zip(there.model.parameters(), here.model.parameters(), strict=True):
        torch.testing.assert_close(weight, want)


@pytest.mark.slow  # PyTorch compiles their step
@pytest.mark.parametrize("stochastic", [True, False])
def test_torchao_goes_on_bit_for_bit(tmp_path: Path, stochastic: bool) -> None:
    """Eight-bit states, and bfloat16 rounded stochastically by PyTorch's generator; otherwise with
    masters."""
    kwargs = {"lr": 0.01} | ({} if stochastic else {"bf16_stochastic_round": False})
    optimizer = OptimizerConfig(name="torchao.optim.AdamW8bit", kwargs=kwargs)
    # states of fewer than 4096 numbers are not quantised
    model = {
        "dtype": torch.bfloat16,
        "width": 2048,
    }
    schedule = NamedScheduleConfig(name="cosine", warmup_steps=3)
    assert isinstance(Session(optimizer, schedule, **model).optimizer, MasterWeights) != stochastic
    resumes_exactly(tmp_path, optimizer, schedule, **model)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": TOTAL}),
        ("CyclicLR", {"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 3}),
    ],
)
def test_a_resumed_schedule_goes_on_bit_for_bit(
    tmp_path: Path, name: str, kwargs: dict[str, Any]
) -> None:
    one = TorchSchedulerConfig(name=f"torch.optim.lr_scheduler.{name}", kwargs=kwargs)
    warmup = TorchSchedulerConfig(
        name="torch.optim.lr_scheduler.LinearLR", kwargs={"total_iters": 3}
    )
    sgd = OptimizerConfig(name="torch.optim.SGD", kwargs={"lr": 0.01, "momentum": 0.9})
    resumes_exactly(tmp_path, sgd, TorchScheduleConfig(schedulers=(one,)))
    if name != "OneCycleLR":  # which wants to be alone
        resumes_exactly(
            tmp_path, sgd, TorchScheduleConfig(schedulers=(warmup, one), milestones=(4,))
        )


def test_state_and_random_numbers_come_back_exactly(tmp_path: Path) -> None:
    session = Session(OptimizerConfig(), CONSTANT)
    state = RunState(
        7,
        {"the model": "ä ${x}"},
        validation_step=6,
        validation={
            "a/loss": 0.1 + 0.2,
            "a/accuracy": 1 / 3,
            "a/reward_margin": 5e-324,
            "b/loss": math.inf,
        },
        run={"prompts_drawn": 3, "rewards": {"mean": 0.1}},
    )
    torch.manual_seed(3)
    save_state(tmp_path, state, session.optimizer, session.scheduler)
    expected = torch.rand(4)
    torch.manual_seed(99)
    assert (
        load_state(tmp_path, session.optimizer, session.scheduler) == state == read_state(tmp_path)
    )
    assert torch.equal(torch.rand(4), expected)


def test_a_checkpoint_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    session = Session(OptimizerConfig(), CONSTANT)
    session.save(tmp_path, 1)
    for name in ("optimizer.pt", "training_state.json"):
        file = tmp_path / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        with pytest.raises(CheckpointError, match="the checkpoint is damaged") as caught:
            load_state(tmp_path, session.optimizer, session.scheduler)
        assert str(file) in str(caught.value) and f"remove {tmp_path}" in str(caught.value)


def test_an_optimiser_that_could_not_be_loaded_again_is_not_saved(tmp_path: Path) -> None:
    session = Session(OptimizerConfig(), CONSTANT)
    for odd, named in ((Code(), "posix.getcwd"), (lambda: 1, "lambda")):
        session.optimizer.param_groups[0]["odd"] = odd
        with pytest.raises(
            CheckpointError, match=rf"(?s)policy.optimizer.*cannot be saved.*{named}"
        ):
            session.save(tmp_path, 1)


class Code:
    def __reduce__(self) -> Any:
        return os.getcwd, ()


def test_nothing_that_is_loaded_can_be_code(tmp_path: Path) -> None:
    session = Session(OptimizerConfig(), CONSTANT)
    session.save(tmp_path, 1)
    torch.save({"optimizer": Code()}, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        load_state(tmp_path, session.optimizer, session.scheduler)


def flip(file: Path) -> None:
    """Change one bit in the middle of a file, as a disk may."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_every_file_of_a_checkpoint_has_a_digest(tmp_path: Path) -> None:
    """Of the weights, the optimiser, its tensors, and the state itself, each is missed and each
    changed bit is seen."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(range(256)))
    session = Session(OptimizerConfig(), CONSTANT)
    session.train(range(1))
    session.save(tmp_path, 1)
    check_files(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == {"model", "optimizer", tmp_path.name}
    for file in files:
        sound = file.read_bytes()
        flip(file)
        with pytest.raises(CheckpointError, match="the checkpoint is damaged") as caught:
            check_files(tmp_path)
        assert caught.value.where == str(file) and f"remove {tmp_path}" in str(caught.value)
        file.unlink()
        with pytest.raises(CheckpointError, match="No such file") as caught:
            check_files(tmp_path)
        assert caught.value.where == str(file)
        file.write_bytes(sound)
    check_files(tmp_path)


def test_a_state_that_is_written_anew_keeps_the_digests(tmp_path: Path) -> None:
    session = Session(OptimizerConfig(), CONSTANT)
    session.save(tmp_path, 1)
    write_state(
        tmp_path, RunState(1, {"what": "x"}, validation_step=1, validation={"a/loss": math.nan})
    )
    check_files(tmp_path)
    flip(tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        check_files(tmp_path)


@pytest.mark.parametrize(("loss", "metric"), [(0.5, 0.5), (math.nan, None), (math.inf, None)])
def test_a_metric_that_is_not_finite_ranks_nothing(
    tmp_path: Path, loss: float, metric: float | None
) -> None:
    session = Session(OptimizerConfig(), CONSTANT)
    state = RunState(1, {}, validation_step=1, validation={"eval/rm/loss": loss})
    save_state(tmp_path, state, session.optimizer, session.scheduler)
    assert stored_metric(tmp_path, "eval/rm/loss") == metric


def test_an_optimiser_of_other_weights_is_refused(tmp_path: Path) -> None:
    session = Session(OptimizerConfig(), CONSTANT)
    session.train(range(1))
    session.save(tmp_path, 1)
    other = Session(OptimizerConfig(), CONSTANT)
    other.model.append(nn.Linear(1, 1))
    other.optimizer = build_optimizer(other.model, OptimizerConfig())
    other.scheduler = build_scheduler(other.optimizer, CONSTANT, total_steps=TOTAL)
    with pytest.raises(CheckpointError, match="the saved optimiser is of other weights") as caught:
        load_state(tmp_path, other.optimizer, other.scheduler)
    assert "6 parameters" in str(caught.value.got) and "8 parameters" in str(caught.value.need)
