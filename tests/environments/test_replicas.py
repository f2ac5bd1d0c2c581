"""Several copies of a reward model in Ray workers: the same rewards, whoever computes them and whoever dies."""

from __future__ import annotations

import copy
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from families import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from treeward.config.environment import RewardModelEnvironmentConfig
from treeward.data.rendering import Renderer
from treeward.environments.interface import DETAILS, step_of
from treeward.environments.replicas import check_resources, plan_chunks
from treeward.environments.reward_model import RewardModelEnvironment
from treeward.errors import ConfigError, ModelError
from treeward.scoring.scorer import Scorer

CLOSE = 1e-5

Log = list[dict[str, Any]]


def chat(question: str, answer: str) -> Log:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


LOGS = [chat(f"What is {n} times {n}? " * 20, f"It is {'about ' * k}{n * n}.") for n in range(60) for k in range(5)]
INFOS: list[dict[str, Any]] = [{} for _ in LOGS]


@pytest.fixture(scope="module")
def folder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = Renderer(tokenizer).chat_template
    tokenizer.save_pretrained(folder)
    tiny_model("qwen3").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def scores(folder: str) -> list[float]:
    return [score.score or math.nan for score in Scorer.load(folder, device="cpu").score(LOGS)]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
        yield ray
        ray.shutdown()


def make(folder: str, **keys: Any) -> RewardModelEnvironment:
    """An environment here whose model is in Ray workers; one conversation in a pass, so that steps take a while."""
    config = {"model_name": folder, "precision": "float32", "batch_size": 1, "cpus_per_replica": 0.5}
    return RewardModelEnvironment(config | keys, workers="ray")


class Accident(threading.Thread):
    """Sends a signal to processes once each of them has computed for a while since this was made."""

    def __init__(self, process_ids: list[int], number: int = signal.SIGKILL) -> None:
        super().__init__()
        self.processes = [psutil.Process(process_id) for process_id in process_ids]
        self.before = [process.cpu_times().user for process in self.processes]
        self.number = number
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 60
        for process, before in zip(self.processes, self.before, strict=True):
            while process.cpu_times().user < before + 0.1 and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(process.pid, self.number)


def test_the_dictionary_of_the_guide(folder: str, ray: Any) -> None:
    env_config = {
        "enabled": True,
        "model_name": "path/to/your/trained/reward/model",
        "tokenizer": {"name": "path/to/your/trained/reward/model"},
        "precision": "bfloat16",
        "batch_size": 32,
        "resources": {"gpus_per_node": 1, "num_nodes": 1},
        "reward_model_cfg": {
            "enabled": True,
            "reward_model_type": "bradley_terry",
        },
    }
    env_config |= {"model_name": folder, "tokenizer": {"name": folder}, "precision": "float32"}
    env_config["reward_shaping"] = {"normalize_rewards": True, "running": True}
    reward_env = RewardModelEnvironment.options(name="rewards").remote(env_config)
    logs = [*LOGS[:7], LOGS[0][:1]]
    step = ray.get(reward_env.step.remote(logs, [{"id": i} for i in range(8)]))
    want = RewardModelEnvironment(env_config)
    assert step.rewards[:7].tolist() == pytest.approx(want.step(logs, [None] * 8).rewards[:7].tolist(), abs=CLOSE)
    assert math.isnan(step.rewards[7]) and step.metadata[7]["id"] == 7 and step.metadata[7][DETAILS]["error"]
    one = ray.get(ray.get_actor("rewards").step.remote(LOGS[:1], [{}]))
    assert one.rewards.tolist() == pytest.approx(want.step(LOGS[:1], [{}]).rewards.tolist(), abs=CLOSE)
    _, metrics = ray.get(reward_env.global_post_process_and_metrics.remote({"rewards": step.rewards}))
    assert metrics["reward_model_env/num_samples"] == 8 and metrics["reward_model_env/num_failed"] == 1
    state = ray.get(reward_env.state_dict.remote())["reward_shaping"]["running"]
    assert state["count"] == 8 and state == pytest.approx(want.state_dict()["reward_shaping"]["running"], rel=1e-4)
    evaluated = step_of(reward_env)(LOGS[:3], [{}] * 3, update=False).rewards
    assert evaluated.tolist() == pytest.approx(want.step(LOGS[:3], [{}] * 3, update=False).rewards.tolist(), abs=CLOSE)
    assert ray.get(reward_env.state_dict.remote())["reward_shaping"]["running"] == state
    [process_id] = ray.get(reward_env.process_ids.remote())
    assert process_id != os.getpid() and psutil.pid_exists(process_id)
    assert ray.get(reward_env.shutdown.remote()) and ray.get(reward_env.shutdown.remote())
    with pytest.raises(ModelError, match="was shut down"):
        ray.get(reward_env.step.remote(LOGS[:1], [{}]))
    assert not _outlives(process_id)


def _outlives(process_id: int) -> bool:
    deadline = time.monotonic() + 30
    while psutil.pid_exists(process_id) and time.monotonic() < deadline:
        time.sleep(0.05)
    return psutil.pid_exists(process_id)


def test_what_is_wrong_is_told_to_the_caller(folder: str, ray: Any, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is not supported yet"):
        RewardModelEnvironment.remote({"model_name": folder, "dtensor_cfg": {"tensor_parallel_size": 2}})
    with pytest.raises(ConfigError, match=r"too few CPUs(?s:.*)need:  9 CPUs for 9 replicas"):
        make(folder, num_replicas=9, cpus_per_replica=1)
    with pytest.raises(ModelError, match="no such folder"):  # from the worker itself
        make(str(tmp_path / "nowhere"))
    # The actor cannot make the environment, and its methods say why.
    unfit = RewardModelEnvironment.remote({"model_name": folder, "reward_shaping": "contract"})
    with pytest.raises(ConfigError, match="no reward shaping"):
        ray.get(unfit.step.remote(LOGS[:1], [{}]))
    assert ray.get(unfit.shutdown.remote())


def test_three_workers_one_of_them_killed_in_mid_step(
    folder: str, scores: list[float], ray: Any, caplog: pytest.LogCaptureFixture
) -> None:
    environment = make(folder, num_replicas=3)
    before = environment.process_ids()
    assert len(set(before)) == 3
    with pytest.raises(ConfigError, match="needs the model in this process"):
        environment.preprocess_data(LOGS)
    for few in ([], LOGS[:1], LOGS[:7]):
        got = environment.step(few, [{}] * len(few)).rewards.tolist()
        assert got == pytest.approx(scores[: len(few)], abs=CLOSE)
    assert "died" not in caplog.text
    with pytest.raises(ModelError, match=r"not ready in time(?s:.*)free in the Ray cluster: 0 GPUs, 0.5 CPUs"):
        make(folder, cpus_per_replica=1, start_timeout_seconds=1)
    accident = Accident(before[:1])
    step = environment.step(LOGS, INFOS)
    accident.join()
    assert step.rewards.tolist() == pytest.approx(scores, abs=CLOSE)
    assert caplog.text.count("worker of the reward model died") == 1  # it was scoring
    after = environment.process_ids()
    assert before[0] not in after and set(before[1:]) <= set(after) and len(set(after)) == 3
    os.kill(after[1], signal.SIGKILL)  # one that is doing nothing
    assert environment.step(LOGS[:30], INFOS[:30]).rewards.tolist() == pytest.approx(scores[:30], abs=CLOSE)
    environment.shutdown()


def test_a_part_without_tries_left_is_masked(
    folder: str, scores: list[float], ray: Any, caplog: pytest.LogCaptureFixture
) -> None:
    environment = make(folder, max_retries=0, num_replicas=1)
    chunks = plan_chunks(LOGS, 1)
    assert len(chunks) > 1
    accident = Accident(environment.process_ids())
    step = environment.step(LOGS, INFOS)
    accident.join()
    failed = set(step.rewards.isnan().nonzero().flatten().tolist())
    assert failed in [set(chunk) for chunk in chunks]  # the one that was being scored, and no other
    assert all(
        step.rewards[i].item() == pytest.approx(scores[i], abs=CLOSE) for i in range(len(LOGS)) if i not in failed
    )
    reasons = {step.metadata[i][DETAILS]["error"] for i in failed}
    assert len(reasons) == 1 and "tried 1 times: its worker died" in reasons.pop()
    _, metrics = environment.global_post_process_and_metrics({"rewards": step.rewards})
    assert metrics["reward_model_env/num_failed"] == len(failed)
    assert f"{len(failed)} of {len(LOGS)} samples have no reward" in caplog.text
    assert environment.step(LOGS[:9], INFOS[:9]).rewards.tolist() == pytest.approx(scores[:9], abs=CLOSE)
    environment.shutdown()


def test_shut_down_in_mid_step(folder: str, ray: Any) -> None:
    environment = make(folder, num_replicas=2)
    process = psutil.Process(environment.process_ids()[0])
    before = process.cpu_times().user
    raised: list[BaseException] = []

    def step() -> None:
        try:
            environment.step(LOGS * 4, INFOS * 4)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    while process.cpu_times().user < before + 0.1:
        time.sleep(0.01)
    assert environment.shutdown()
    thread.join(60)
    [error] = raised
    assert isinstance(error, ModelError) and "was shut down" in str(error)


@pytest.mark.slow
def test_a_worker_that_hangs_is_killed(
    folder: str, scores: list[float], ray: Any, caplog: pytest.LogCaptureFixture
) -> None:
    environment = make(folder, num_replicas=2, worker_timeout_seconds=15)
    before = environment.process_ids()
    accident = Accident(before[:1], signal.SIGSTOP)
    assert environment.step(LOGS, INFOS).rewards.tolist() == pytest.approx(scores, abs=CLOSE)
    accident.join()
    assert caplog.text.count("took longer than 15 seconds") == 1
    after = environment.process_ids()
    assert before[0] not in after
    os.kill(after[1], signal.SIGSTOP)  # between steps
    assert environment.step(LOGS[:5], INFOS[:5]).rewards.tolist() == pytest.approx(scores[:5], abs=CLOSE)
    environment.shutdown()


@pytest.mark.slow
def test_the_environment_itself_is_killed(folder: str, scores: list[float], ray: Any) -> None:
    config = {"model_name": folder, "precision": "float32", "batch_size": 1}
    environment = RewardModelEnvironment.remote(config)
    owner = psutil.Process(ray.get(environment.__ray_call__.remote(lambda _: os.getpid())))
    before = ray.get(environment.process_ids.remote())
    accident = Accident(before)
    pending = environment.step.remote(LOGS, INFOS)
    accident.join()  # of the worker; its owner is next
    assert owner.pid not in before and not ray.wait([pending], timeout=0)[0]
    owner.kill()
    assert ray.get(pending).rewards.tolist() == pytest.approx(scores, abs=CLOSE)
    ray.get(environment.shutdown.remote())


@pytest.mark.slow
def test_wrapped_as_nemo_rl_does(folder: str, scores: list[float], ray: Any) -> None:
    environment = (
        ray.remote(RewardModelEnvironment).options(num_cpus=1).remote({"model_name": folder, "precision": "float32"})
    )
    assert ray.get(environment.step.remote(LOGS[:9], INFOS[:9])).rewards.tolist() == pytest.approx(
        scores[:9], abs=CLOSE
    )


def test_what_a_cluster_must_have(caplog: pytest.LogCaptureFixture) -> None:
    config = RewardModelEnvironmentConfig.model_validate(
        {"model_name": "m", "resources": {"gpus_per_node": 2, "num_nodes": 2}, "cpu_offload": True}
    )
    caplog.set_level("INFO", logger="treeward")
    large = {"CPU": 16.0, "GPU": 4.0}
    assert check_resources(config, large, large) is True and not caplog.records
    assert check_resources(config, large, large | {"GPU": 1.0}) is True
    assert "4 GPUs are needed for the reward model, and free are 1 GPUs, 16 CPUs" in caplog.text
    with pytest.raises(ConfigError, match=r"too few GPUs(?s:.*)got:   3 GPUs, 16 CPUs(?s:.*)need:  4 GPUs"):
        check_resources(config, large | {"GPU": 3.0}, large)
    caplog.clear()
    assert check_resources(config, {"CPU": 4.0}, {"CPU": 4.0}) is False
    assert "no GPU in the Ray cluster: 4 replicas" in caplog.text and "cpu_offload has no effect" in caplog.text
    with pytest.raises(ConfigError, match="too few CPUs"):
        check_resources(config, {"CPU": 2.0}, {"CPU": 2.0})
    on_cpu = RewardModelEnvironmentConfig.model_validate({"model_name": "m", "resources": {"gpus_per_node": 0}})
    assert check_resources(on_cpu, large, large) is False


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
    assert min(num_workers, number) <= len(chunks) <= min(4 * num_workers, number)


def test_chunks_are_even_and_the_longest_comes_first() -> None:
    conversations = [chat(f"{n}", "x" * (n * 100)) for n in range(1, 101)]
    chunks = plan_chunks(conversations, 3)
    sizes = [sum(len(conversations[i][1]["content"]) for i in chunk) for chunk in chunks]
    assert len(chunks) == 12 and max(sizes) < 1.05 * min(sizes)
    assert sizes == sorted(sizes, reverse=True) or max(sizes) - min(sizes) < 1000
