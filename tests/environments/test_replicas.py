"""Replicas of a reward model in Ray workers: the same rewards with any number of them, and after a death."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeward.config.reward_environments import RewardModelEnvironmentConfig
from treeward.environments.interface import DETAILS
from treeward.environments.replicas import ReplicaPool, check_resources, plan_chunks
from treeward.environments.reward_model import RewardModelEnvironment
from treeward.errors import ConfigError, ModelError
from treeward.scoring.scorer import Scorer

CLOSE = 1e-5

Log = list[dict[str, Any]]


def chat(prompt: str, completion: str) -> Log:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


LOGS = [chat(f"What is {n} times {n}? " * 20, f"It is {'about ' * k}{n * n}.") for n in range(24) for k in range(5)]
INFOS: list[dict[str, Any]] = [{} for _ in LOGS]


@pytest.fixture(scope="module")
def scores(folder: str) -> list[float]:
    return [score.score or math.nan for score in Scorer.load(folder, device="cpu").score(LOGS)]


def make(folder: str, **keys: Any) -> RewardModelEnvironment:
    """An environment here whose model is in Ray workers; one conversation in a pass, so that steps take a while."""
    config = {"model_name": folder, "precision": "float32", "batch_size": 1, "cpus_per_replica": 0.5}
    return RewardModelEnvironment(config | keys, workers="ray")


def process_ids(environment: RewardModelEnvironment) -> list[int]:
    assert isinstance(environment._workers, ReplicaPool)
    return environment._workers.process_ids()


def wait_until_busy(process_id: int) -> None:
    """Until the process has computed for a while."""
    process = psutil.Process(process_id)
    before, deadline = process.cpu_times().user, time.monotonic() + 60
    while process.cpu_times().user < before + 0.1 and time.monotonic() < deadline:
        time.sleep(0.01)


def killed_while_busy(process_id: int) -> threading.Thread:
    def kill() -> None:
        wait_until_busy(process_id)
        os.kill(process_id, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


def test_workers_and_the_death_of_one(folder: str, scores: list[float], ray: Any) -> None:
    with pytest.raises(ConfigError, match=r"too few CPUs(?s:.*)need:  9 CPUs for 9 replicas"):
        make(folder, num_replicas=9, cpus_per_replica=1)
    environment = make(folder, num_replicas=2)
    before = process_ids(environment)
    assert len(set(before)) == 2
    with pytest.raises(ConfigError, match="needs the model in this process"):
        environment.preprocess_data(LOGS)
    for few in ([], LOGS[:1], LOGS[:7]):
        got = environment.step(few, [{}] * len(few)).rewards.tolist()
        assert got == pytest.approx(scores[: len(few)], abs=CLOSE)
    accident = killed_while_busy(before[0])
    step = environment.step(LOGS, INFOS)
    accident.join()
    assert step.rewards.tolist() == pytest.approx(scores, abs=CLOSE)
    after = process_ids(environment)
    assert before[0] not in after and before[1] in after
    environment.shutdown()
    with pytest.raises(ModelError, match="was shut down"):
        environment.step(LOGS[:1], [{}])


@pytest.mark.slow
def test_errors_reach_the_caller(folder: str, ray: Any, tmp_path: Any) -> None:
    with pytest.raises(ModelError, match="no such folder"):  # from the worker
        make(str(tmp_path / "nowhere"))
    # The actor cannot make the environment, and its methods raise the error.
    unfit = RewardModelEnvironment.remote({"model_name": folder, "reward_shaping": "contract"})
    with pytest.raises(ConfigError, match="no reward shaping"):
        ray.get(unfit.step.remote(LOGS[:1], [{}]))
    assert ray.get(unfit.shutdown.remote())


@pytest.mark.slow
def test_a_worker_that_takes_too_long_ends_itself(folder: str, ray: Any) -> None:
    environment = make(folder, max_retries=0, worker_timeout_seconds=0.001)
    before = process_ids(environment)
    step = environment.step(LOGS[:5], INFOS[:5])
    assert bool(step.rewards.isnan().all()) and "its worker died" in step.metadata[0][DETAILS]["error"]
    assert process_ids(environment) != before
    environment.shutdown()


@pytest.mark.slow
def test_only_the_chunk_of_the_dead_worker_is_masked(folder: str, ray: Any) -> None:
    logs = [chat(f"What is {n:03} times {n:03}? " * 20, "That is hard.") for n in range(100)]
    environment = make(folder, num_replicas=2, max_retries=0)
    want = environment.step(logs, [{}] * 100).rewards
    assert bool(want.isfinite().all())
    accident = killed_while_busy(process_ids(environment)[0])
    step = environment.step(logs, [{}] * 100)
    accident.join()
    masked = step.rewards.isnan()
    assert int(masked.sum()) == 50
    assert step.rewards[~masked].tolist() == pytest.approx(want[~masked].tolist(), abs=CLOSE)
    environment.shutdown()


def test_resources_of_the_cluster(caplog: pytest.LogCaptureFixture) -> None:
    config = RewardModelEnvironmentConfig.model_validate(
        {"model_name": "m", "resources": {"gpus_per_node": 2, "num_nodes": 2}}
    )
    assert check_resources(config, {"CPU": 16.0, "GPU": 4.0}) is True
    with pytest.raises(ConfigError, match=r"too few GPUs(?s:.*)got:   3 GPUs, 16 CPUs(?s:.*)need:  4 GPUs"):
        check_resources(config, {"CPU": 16.0, "GPU": 3.0})
    caplog.set_level("INFO", logger="treeward")
    assert check_resources(config, {"CPU": 4.0}) is False
    assert "no GPU: 4 replicas" in caplog.text


_CONVERSATIONS = st.lists(
    st.builds(chat, st.sampled_from(["a", "b" * 3000, "c" * 20_000, "d"]), st.text("xyz", max_size=50)), max_size=30
)


@given(_CONVERSATIONS, st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_chunks(conversations: list[Log], num_workers: int) -> None:
    chunks = plan_chunks(conversations, num_workers)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(conversations)))
    assert all(chunks)
    prompts = [{conversations[i][0]["content"] for i in chunk} for chunk in chunks]
    number = len(set().union(*prompts))
    assert sum(map(len, prompts)) == number  # each prompt in one chunk
    assert len(chunks) == min(num_workers, number)
