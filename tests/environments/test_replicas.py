"""Replicas of a reward model in Ray workers: the same rewards with any number of them, and after a
death."""

from __future__ import annotations

import math
import threading
from typing import Any

import psutil
import pytest
import torch
from loopback import wait_until
from messages import chat

from treeward.environments.interface import DETAILS
from treeward.environments.reward_model import RewardModelEnvironment
from treeward.errors import ModelError
from treeward.scoring.scorer import Scorer

CLOSE = 1e-5


LOGS = [
    chat(f"What is {n} times {n}? " * 20, f"It is {'about ' * k}{n * n}.")
    for n in range(24)
    for k in range(5)
]
INFOS: list[dict[str, Any]] = [{} for _ in LOGS]


@pytest.fixture(scope="module")
def scores(folder: str) -> list[float]:
    return [score.score or math.nan for score in Scorer.load(folder, device="cpu").score(LOGS)]


def make(folder: str, **keys: Any) -> RewardModelEnvironment:
    """Two replicas, on CPUs where there is no GPU; one conversation in a pass, so that steps take a
    while."""
    config = {"model_name": folder, "batch_size": 1, "resources": {"gpus_per_node": 2}}
    return RewardModelEnvironment(config | keys)


def process_ids() -> list[int]:
    """Of the replicas, then of the other parts of their models."""
    titles = {
        process.pid: " ".join(process.cmdline())
        for process in psutil.Process().children(recursive=True)
    }
    names = ("ServeReplica:reward-model", "ModelPart")
    return [process_id for name in names for process_id, title in titles.items() if name in title]


def killed_while_busy(process_id: int) -> threading.Thread:
    """Of a thread that kills the process as soon as it has computed for a while."""
    process = psutil.Process(process_id)
    before = process.cpu_times().user

    def kill() -> None:
        wait_until(lambda: process.cpu_times().user > before + 0.03, seconds=60)
        process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


@pytest.mark.slow
def test_replicas_and_the_death_of_one(folder: str, scores: list[float], ray: Any) -> None:
    """Without retries, only what the replica that dies was scoring is masked; then there is
    another.
    """
    environment = make(folder, max_retries=0)
    before = process_ids()
    assert len(set(before)) == 2
    for few in ([], LOGS[:1], LOGS[:7]):
        got = environment.step(few, [{}] * len(few)).rewards.tolist()
        assert got == pytest.approx(scores[: len(few)], abs=CLOSE)
    accident = killed_while_busy(before[0])
    step = environment.step(LOGS, INFOS)
    accident.join()
    masked = step.rewards.isnan()
    # A replica scores the completions of at most 4 prompts at a time, of which there are 5 each.
    assert 5 <= int(masked.sum()) <= 4 * 5
    assert step.rewards[~masked].tolist() == pytest.approx(
        torch.tensor(scores)[~masked].tolist(), abs=CLOSE
    )
    error = step.metadata[int(masked.nonzero()[0])][DETAILS]["error"]
    assert "tried 1 times: 1 replicas died while they scored these conversations" in error
    assert environment.step(LOGS, INFOS).rewards.tolist() == pytest.approx(scores, abs=CLOSE)
    environment.shutdown()
    with pytest.raises(ModelError, match="was shut down"):
        environment.step(LOGS[:1], [{}])


@pytest.mark.slow
def test_a_replica_that_dies_costs_no_reward(folder: str, scores: list[float], ray: Any) -> None:
    """With retries, as by default."""
    environment = make(folder)
    accident = killed_while_busy(process_ids()[0])
    step = environment.step(LOGS, INFOS)
    accident.join()
    environment.shutdown()
    assert step.rewards.tolist() == pytest.approx(scores, abs=CLOSE)


@pytest.mark.slow
def test_replicas_that_take_too_long_give_no_reward(folder: str, ray: Any) -> None:
    environment = make(folder, max_retries=1, worker_timeout_seconds=1e-3)
    step = environment.step(LOGS, INFOS)
    environment.shutdown()
    assert bool(step.rewards.isnan().all())
    error = step.metadata[0][DETAILS]["error"]
    assert error == "tried 2 times: not scored within worker_timeout_seconds: 0.001"


@pytest.mark.slow
def test_a_replica_of_two_processes(folder: str, scores: list[float], ray: Any) -> None:
    """Each has a part of the model."""
    environment = make(folder, dtensor_cfg={"tensor_parallel_size": 2}, batch_size=None)
    assert len(set(process_ids())) == 2
    assert environment.step(LOGS, INFOS).rewards.tolist() == pytest.approx(scores, abs=CLOSE)
    environment.shutdown()
