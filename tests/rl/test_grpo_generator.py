"""The loop with a server that samples: it is given the weights, and the run survives its death."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import Asked, Loopback
from served_policy import ServedPolicy

from treeward.rl.generation import GenerationError
from treeward.rl.grpo import GRPOOutcome, grpo
from treeward.training.tracking import read_metrics

Make = Callable[..., Any]


class Dying(ServedPolicy):
    """It is dead from its `dies_at`-th request of the path `dies_in` on."""

    dies_at: int | None = None
    dies_in = "/v1/completions"
    asked = 0

    def __call__(self, asked: Asked) -> Any:
        self.asked += asked.path == self.dies_in
        return None if self.dies_at is not None and self.asked >= self.dies_at else super().__call__(asked)


@pytest.fixture
def server(tiny_tokenizer: Any) -> Iterator[tuple[Dying, str]]:
    vllm = Dying(None, tiny_tokenizer)
    with Loopback(vllm) as loopback:
        yield vllm, loopback.url


@pytest.fixture
def start(tiny_grpo: Make, server: tuple[Dying, str]) -> Callable[..., GRPOOutcome]:
    def run(*more: str) -> GRPOOutcome:
        generation = f"{{backend: vllm, url: {server[1]}, model: m, max_new_tokens: 8, max_retries: 1}}"
        options = ("grpo.max_num_steps=4", "checkpointing.save_period=4", f"policy.generation={generation}")
        return grpo(tiny_grpo(*options, *more), show_progress=False)

    return run


@pytest.fixture(scope="module")
def computed() -> dict[str, Any]:
    return {}


@pytest.fixture
def uninterrupted(
    computed: dict[str, Any],
    start: Callable[..., GRPOOutcome],
    tmp_path_factory: pytest.TempPathFactory,
    result_of: Callable[[Path], dict[str, Any]],
) -> dict[str, Any]:
    """What the run comes to when its server lives; run once."""
    if not computed:
        folder = tmp_path_factory.mktemp("uninterrupted")
        start(f"checkpointing.checkpoint_dir={folder}/checkpoints", f"logger.log_dir={folder}/logs")
        computed |= result_of(folder)
    return computed


@pytest.mark.parametrize(
    ("path", "count", "saved"),
    [
        ("/v1/completions", 9, 1),
        ("/collective_rpc", 4, 3),  # after the update of step 3
        ("/v1/completions", 13, 2),  # in the validation after step 2
    ],
)
def test_a_generator_that_dies_stops_at_a_saved_state_and_the_run_goes_on(
    server: tuple[Dying, str],
    start: Callable[..., GRPOOutcome],
    tmp_path: Path,
    uninterrupted: dict[str, Any],
    result_of: Callable[[Path], dict[str, Any]],
    path: str,
    count: int,
    saved: int,
) -> None:
    vllm, _ = server
    vllm.asked, vllm.policy = 0, None
    vllm.dies_in, vllm.dies_at = path, count
    with pytest.raises(GenerationError, match="generator has failed"):
        start()
    there = [folder.name for folder in (tmp_path / "checkpoints").glob("step_*")]
    assert there == ([f"step_{saved}"] if saved else [])
    vllm.dies_at, vllm.policy = None, None  # a new server, without the weights
    assert start().step == 4
    assert result_of(tmp_path) == uninterrupted
    # The trainer finds the same log-probabilities: the weights are those of the step, and not of one before.
    lines = [line for line in read_metrics(tmp_path / "logs" / "metrics.jsonl") if "train/loss" in line]
    assert len(lines) == 4
    assert all(line["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4) for line in lines)
