"""A server in the place of a reward model: its scores through every face of the environment;
failures have reasons."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from loopback import Asked, Loopback

from treeward import RewardModelEnvironment, RewardServerError, as_trl
from treeward.environments.interface import DETAILS
from treeward.environments.nemo_rl import NemoRLEnvironment
from treeward.environments.verl import compute_scores
from treeward.errors import ConfigError, ModelError
from treeward.scoring.scorer import Scorer

PROMPT = [{"role": "user", "content": "Name a river."}]
COMPLETIONS = ["The Nile.", "A river is water.", "No."]
LOGS = [[*PROMPT, {"role": "assistant", "content": text}] for text in COMPLETIONS]
INFOS: list[dict[str, Any]] = [{}, {}, {}]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "a-token")


@pytest.fixture(scope="module")
def scores(signed_folder: Path) -> list[float]:
    found = Scorer.load(signed_folder, device="cpu").score(LOGS)
    return [one.score for one in found if one.score is not None]


def section(served: str, **keys: Any) -> dict[str, Any]:
    """With what a configuration of NeMo RL has beside the model; it has no effect."""
    own = {"enabled": True, "precision": "bfloat16", "batch_size": 4, "tokenizer": {"name": served}}
    return {
        "model_name": served,
        "token_env": "REWARD_TOKEN",
        "resources": {"gpus_per_node": 2},
        **own,
        **keys,
    }


def test_every_face_gives_the_scores_of_the_model(served: str, scores: list[float]) -> None:
    ends = [log[-1:] for log in LOGS]
    infos = [{"prompt": PROMPT} for _ in LOGS]
    section_of_verl = {"environment": {"model_name": served, "token_env": "REWARD_TOKEN"}}
    long = [*PROMPT, {"role": "assistant", "content": "word " * 400}]
    step = RewardModelEnvironment(section(f"{served}/v1")).step([*LOGS, long], [*INFOS, {}])
    assert math.isnan(step.rewards[3]) and "too long" in step.metadata[3][DETAILS]["error"]
    found = {
        "step": step.rewards[:3].tolist(),
        "nemo_rl": NemoRLEnvironment(section(served)).step(LOGS, INFOS).rewards.tolist(),
        "as_trl": as_trl(served, token_env="REWARD_TOKEN")(
            [PROMPT] * 3, ends, ground_truth=[1, 2, 3]
        ),
        "as_trl, texts": as_trl(served, token_env="REWARD_TOKEN")(
            ["Name a river."] * 3, COMPLETIONS
        ),
        "verl": [
            one["score"]
            for one in compute_scores(["d"] * 3, COMPLETIONS, [""] * 3, infos, **section_of_verl)
        ],
    }
    for face, rewards in found.items():
        assert rewards == pytest.approx(scores, abs=1e-5), face


def test_shaping_is_the_servers(served: str, signed_folder: Path, scores: list[float]) -> None:
    shaping = {"normalize_rewards": True, "reward_mean": 1.0, "reward_std": 0.5}
    local = RewardModelEnvironment({"model_name": str(signed_folder), "reward_shaping": shaping})
    server = RewardModelEnvironment(section(served, served_model="shaped"))
    rewards, local_rewards = (environment.reward(LOGS, INFOS) for environment in (server, local))
    assert [reward.value for reward in rewards] == pytest.approx(
        [reward.value for reward in local_rewards], abs=1e-4
    )
    assert [reward.raw for reward in rewards] == pytest.approx(scores, abs=1e-5)


def test_at_the_start_the_server_must_be_there_and_ours(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RewardServerError, match="cannot be reached"):
        as_trl("http://127.0.0.1:1", max_retries=0)
    with pytest.raises(RewardServerError, match="401"):
        as_trl(served)
    with pytest.raises(ConfigError, match=r"models rm, shaped(?s:.)*with other"):
        RewardModelEnvironment(section(served, served_model="other"))
    vllm = Loopback(lambda asked: (200, {"data": [{"id": "a policy of vLLM"}]}))
    with vllm, pytest.raises(ConfigError, match="treeward serve"):
        as_trl(vllm.url)
    monkeypatch.delenv("REWARD_TOKEN")
    with pytest.raises(ConfigError, match="REWARD_TOKEN is empty or not set"):
        RewardModelEnvironment(section(served))


class FakeServer(Loopback):
    """Everyone's reward is 1; `status` and `model` are those of the next response, `later` is the
    model after it."""

    def __init__(self) -> None:
        super().__init__(self.respond)
        self.status = 200
        self.later = {}
        self.model = {"id": "rm", "identity": "one", "heads": ["good", "brief"]}

    def respond(self, asked: Asked) -> Any:
        if asked.path == "/v1/models":
            return 200, {"data": [self.model]}
        self.model |= self.later
        row = {
            "score": 1.0,
            "reward": 1.0,
            "num_tokens": 1,
            "truncated": False,
            "error": None,
            "heads": [1.0, 2.0],
        }
        return self.status, {
            "data": [{"index": i, **row} for i in range(len(asked.json["conversations"]))]
        }


def test_a_server_that_fails_gives_reasons_and_no_numbers() -> None:
    with FakeServer() as server:
        environment = RewardModelEnvironment({"model_name": server.url, "max_retries": 0})
        found = environment.reward(LOGS, INFOS)[0]
        assert found.value == 1.0 and found.components == {"head_good": 1.0, "head_brief": 2.0}
        server.status = 503
        failed = environment.step(LOGS, INFOS)
        assert bool(failed.rewards.isnan().all()) and "503" in failed.metadata[0][DETAILS]["error"]
        assert as_trl(environment)([PROMPT] * 3, COMPLETIONS) == [None] * 3
        server.status = 401
        with pytest.raises(ModelError, match="401"):
            environment.step(LOGS, INFOS)
        # it starts again just before it scores
        server.status = 200
        server.later = {"identity": "two"}
        with pytest.raises(ModelError, match="have changed"):
            environment.step(LOGS, INFOS)
        assert environment.shutdown()


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"model_name": "results/rm", "token_env": "X"}, "the only model_name"),
        ({"head_weights": [1.0, 2.0]}, "its server is started with the others"),
        ({"reward_shaping": {"normalize_rewards": True}}, "its server is started with the others"),
        ({"model_name": "localhost:8000"}, "http:// before the address"),
    ],
)
def test_what_makes_no_sense_with_a_server(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        RewardModelEnvironment({"model_name": "http://host:8000", **keys})
