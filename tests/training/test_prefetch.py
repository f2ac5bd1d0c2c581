"""A step waits for the device once, and its batches are prepared beside the step before it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from no_syncs import ATTENTION, NoSyncs
from torch.nn.attention import flex_attention as torch_flex

from treeward.losses import GradeSums, RewardSums, ranked_pairs
from treeward.training.prefetch import BatchPreparer, Prefetcher, StepBatches
from treeward.training.setup import set_up
from treeward.training.train import RewardModelRun
from treeward.tree import flex
from treeward.tree.attention import FLEX

LAYOUTS = [
    pytest.param((), id="trees"),
    pytest.param(("policy.train_micro_batch_tokens=60",), id="trees in parts"),
    pytest.param(("policy.activation_checkpointing_enabled=true",), id="recomputed"),
    pytest.param(("data.ties=half", "rm.loss.label_smoothing=0.1"), id="ties"),
    pytest.param(("policy.reward_model_cfg.num_heads=3",), id="heads"),
]


ROWS = pytest.param(("policy.attention=rows",), id="rows")


@pytest.mark.parametrize("overrides", [*LAYOUTS, ROWS])
def test_the_host_waits_for_nothing_within_a_micro_batch(
    tiny_run: Callable[..., Any], overrides: tuple[str, ...]
) -> None:
    setup = set_up(tiny_run(*overrides))
    run = RewardModelRun(setup)
    batches = BatchPreparer(setup).step(1)
    sums = RewardSums()
    setup.model.train()
    # transformers itself asks once a forward whether rows have padding at all.
    with NoSyncs(
        (*ATTENTION, "transformers/masking_utils.py")
        if "policy.attention=rows" in overrides
        else ATTENTION
    ):
        for micro_batch in batches.micro_batches:
            run.backward(micro_batch, batches.num_units, sums)
        with torch.no_grad():
            run.evaluate(batches.micro_batches[0], sums, GradeSums())
    assert sums.read().num_units > batches.num_units
    assert any(parameter.grad is not None for parameter in setup.model.parameters())


def test_nor_does_attention_as_a_gpu_runs_it(
    tiny_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention by PyTorch's own arithmetic: masks and blocks are made on the device, and
    nothing is excused."""
    # which refuses gradients on a CPU
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "compiled_kernel", lambda: torch_flex.flex_attention)
    setup = set_up(tiny_run())
    setup.model.tree_attention = FLEX
    run = RewardModelRun(setup)
    batches = BatchPreparer(setup).step(1)
    sums = RewardSums()
    with NoSyncs(excused=()):
        run.backward(batches.micro_batches[0], batches.num_units, sums)
    assert any(parameter.grad is not None for parameter in setup.model.parameters())


def num_units(step: StepBatches) -> int:
    return sum(micro_batch.labels.num_units for micro_batch in step.micro_batches)


@pytest.mark.parametrize(("weight", "units"), [("group", 8), ("pair", 24)])
def test_the_loss_is_divided_by_what_weighs_one(
    tiny_run: Callable[..., Any], write_rows: Callable[..., Path], weight: str, units: int
) -> None:
    rows = [
        {"prompt": f"{n}?", "completions": [f"{n}.", "No.", "So."], "scores": [5, 4, 3]}
        for n in range(8)
    ]
    data = f"data.train=[{{data_path: {write_rows('rows.jsonl', rows)}}}]"
    options = f"rm.loss.weight={weight}", "rm.loss.strength=margin"
    step = BatchPreparer(set_up(tiny_run(data, *options))).step(1)
    assert step.num_units == num_units(step) == units
    margins = []
    for micro_batch in step.micro_batches:
        margins += micro_batch.labels.pairs.margin_P.tolist()
    assert sorted(margins) == [1.0] * 16 + [2.0] * 8  # the differences of the scores


@pytest.mark.gpu
@pytest.mark.parametrize(
    "overrides", [*LAYOUTS, pytest.param(("policy.precision=bfloat16",), id="bfloat16")]
)
def test_cuda_waits_for_nothing_within_a_micro_batch(
    tiny_run: Callable[..., Any], overrides: tuple[str, ...]
) -> None:
    # the smallest heads of FlexAttention
    setup = set_up(tiny_run(*overrides, "policy.model_config.head_dim=16"))
    run = RewardModelRun(setup)
    preparer = BatchPreparer(setup)
    sums = RewardSums()
    assert setup.model.device.type == "cuda"
    batches = preparer.step(1)
    setup.model.train()
    try:
        # the first time compiles, and fills the caches of kernels
        for mode in (
            "default",
            "error",
        ):
            torch.cuda.set_sync_debug_mode(mode)
            for micro_batch in batches.micro_batches:
                run.backward(micro_batch, batches.num_units, sums)
            with torch.no_grad():
                run.evaluate(batches.micro_batches[0].to(setup.model.device), sums, GradeSums())
    finally:
        torch.cuda.set_sync_debug_mode("default")
        run.close()
    assert sums.read().num_units > batches.num_units


SCORES = torch.tensor([1.0, 2.0])
WAITS: dict[str, Callable[[], Any]] = {
    "item": lambda: SCORES.sum().item(),
    "mask": lambda: SCORES[SCORES > 1],
    "made": lambda: torch.tensor([1, 0]),
    "copied": lambda: ranked_pairs([[0, 1]]).to("cpu"),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_would_wait_is_seen(name: str) -> None:
    with pytest.raises(AssertionError, match="the host would wait"), NoSyncs():
        WAITS[name]()


def test_the_next_step_is_prepared_beside_the_current_one_and_no_step_beyond_the_last() -> None:
    made: list[tuple[int, str]] = []
    ahead = Prefetcher(
        lambda number: made.append((number, threading.current_thread().name)) or number, num_steps=4
    )
    assert [ahead.get(number) for number in (2, 3, 4)] == [2, 3, 4]
    ahead.close()
    main = threading.current_thread().name
    assert [number for number, _ in made] == [2, 3, 4]
    assert made[0][1] == main and main not in {name for _, name in made[1:]}
