"""The document: "Integrate learned reward models for Reinforcement Learning from Human Feedback
(RLHF)."

The page "RLHF with Reward Models" of NeMo Gym (a resources server), walked through: what is quoted
is run. Sections: scoring; the classes; reward model types; the folder and its commands; the
configuration; normalisation.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import runpy
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from families import tiny_model
from loopback import wait_until
from messages import chat
from signed import write_signed_model
from starlette.testclient import TestClient
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import treeward
from treeward.environments.registry import make_environment
from treeward.errors import ConfigError
from treeward.parallel.ray_cluster import free_port
from treeward.scoring.scorer import Scorer
from treeward.serving.app import create_app
from treeward.serving.service import Service

REPOSITORY = Path(__file__).parent.parent.parent
APP = runpy.run_path(str(REPOSITORY / "resources_servers" / "reward_model" / "app.py"))
checked = APP["checked"]
PROMPT = "Explain quantum computing simply."
RESPONSE = "It computes with waves of chance."
CHAT = chat(PROMPT, RESPONSE)
ATTRIBUTES = ["helpfulness", "correctness", "coherence", "complexity", "verbosity"]


@pytest.fixture(scope="module")
def model_path(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        write_signed_model(
            tmp_path_factory.mktemp("page") / "rm", tiny_tokenizer, seed=3, max_length=300
        )
    )


def rollout(response: str = RESPONSE, **more: Any) -> dict[str, Any]:
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": response}],
    }
    params = {"input": [{"role": "user", "content": PROMPT}]}
    return {"responses_create_params": params, "response": {"id": "r", "output": [message]}, **more}


def verified(client: TestClient, response: str = RESPONSE, **more: Any) -> dict[str, Any]:
    got: dict[str, Any] = client.post("/verify", json=rollout(response, **more)).json()
    return got


# Scoring: `reward_model = load_reward_model(path)`, `.score(prompt=..., response=...)`,
# `.predict(prompt, response)`


def test_a_loaded_model_scores_a_prompt_and_a_response(model_path: str) -> None:
    reward_model = treeward.load_reward_model(model_path, device="cpu")
    [expected] = reward_model.scorer.score([CHAT])
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": PROMPT}]}
    ]
    for prompt, response in (
        (PROMPT, RESPONSE),
        (CHAT[:1], CHAT[1:]),
        (items, rollout()["response"]["output"]),
    ):
        assert reward_model.score(prompt=prompt, response=response) == expected.score
        assert (
            reward_model.score(prompt, response)
            == reward_model.predict(prompt, response)
            == expected.score
        )
    developer = [{"role": "developer", "content": "Be brief."}, *CHAT]
    system = [developer[0] | {"role": "system"}, *CHAT]
    assert (
        reward_model.predict(developer[:-1], RESPONSE)
        == reward_model.scorer.score([system])[0].score
    )


# The classes, as the page has them; the lines above the first one are ours

IMPORTS = """
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from treeward.compat.nemo_gym import *
"""
QUICK_START = """
class RewardModelResourcesServer(SimpleResourcesServer):
    def model_post_init(self, context):
        # Load reward model
        self.reward_model = load_reward_model(self.config.model_path)

    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        # Extract response text
        response_text = extract_response(body.response)

        # Get reward model score
        reward = self.reward_model.score(
            prompt=body.responses_create_params.input,
            response=response_text
        )

        return BaseVerifyResponse(**body.model_dump(), reward=reward)
"""
LENGTH_PENALTY = """
class LengthPenalty(RewardModelResourcesServer):
    async def verify(self, body: BaseVerifyRequest) -> BaseVerifyResponse:
        prompt, response = body.responses_create_params.input, extract_response(body.response)  # the page leaves it out
        raw_reward = self.reward_model.score(prompt, response)

        # Length penalty to discourage verbosity gaming
        length_penalty = max(0, len(response) - 500) * 0.001

        reward = raw_reward - length_penalty
        return BaseVerifyResponse(**body.model_dump(), reward=reward)
"""
HUGGING_FACE = """
class HFRewardModelServer(SimpleResourcesServer):
    def model_post_init(self, context):
        self.tokenizer = AutoTokenizer.from_pretrained(self.config.model_path)
        self.model = AutoModelForSequenceClassification.from_pretrained(
            self.config.model_path,
            torch_dtype=torch.float16,
            device_map="auto"
        )

    def score(self, prompt: str, response: str) -> float:
        inputs = self.tokenizer(
            prompt + response,
            return_tensors="pt",
            truncation=True,
            max_length=self.config.max_length
        ).to(self.model.device)

        with torch.no_grad():
            outputs = self.model(**inputs)

        return outputs.logits[0].item()
"""
START = '\nif __name__ == "__main__":\n    RewardModelResourcesServer.run_webserver()\n'


@pytest.fixture
def app_of(tmp_path: Path, model_path: str) -> Callable[..., TestClient]:
    """A function: a client of a class of the page."""

    def make(code: str, name: str) -> TestClient:
        (tmp_path / "app.py").write_text(IMPORTS + code, encoding="utf-8")
        server = runpy.run_path(str(tmp_path / "app.py"))[name](config={"model_path": model_path})
        return TestClient(server.setup_webserver())

    return make


def test_the_quick_starts_class(app_of: Callable[..., TestClient], model_path: str) -> None:
    client = app_of(QUICK_START, "RewardModelResourcesServer")
    expected = treeward.load_reward_model(model_path, device="cpu").predict(PROMPT, RESPONSE)
    body = rollout(reward_threshold=0.7, _ng_task_index=3, note={"kept": [1, None]})
    for path in ("/verify", "/ng-rollout/r-1/verify"):
        got = client.post(path, json=body).json()
        assert got["reward"] == pytest.approx(expected, abs=1e-6)
        assert {key: got[key] for key in body} == body
    assert client.post("/verify", json=got).json() == got  # verified again
    seeded = client.post(
        "/seed_session", json={"resources_session_id": "s", "episode_id": {}, "task_data": {}}
    )
    assert seeded.json() == {"resources_session_id": "s"} and seeded.headers["set-cookie"]
    assert client.post("/ng-rollout/r-1/seed_session", json=body).json() == {}
    assert client.post("/close_session", json={"resources_session_id": "s"}).json() == {
        "resources_session_id": "s"
    }
    metrics = client.post("/aggregate_metrics", json={"verify_responses": [got]}).json()
    assert metrics["key_metrics"]["mean/reward"] == pytest.approx(expected, abs=1e-6)
    assert client.get("/reverify_mode").json() == "stateless"
    assert client.post("/verify", json={"response": {}}).status_code == 422


def test_a_failed_verify_is_masked(app_of: Callable[..., TestClient]) -> None:
    client = app_of(QUICK_START, "RewardModelResourcesServer")
    got = verified(client, "word " * 400)
    assert (got["reward"], got["mask_sample"], got["_ng_failure_class"]) == (
        0.0,
        True,
        "verifier_error",
    )
    assert "too long" in got["failure_reason"]
    # as /verify elsewhere
    assert client.post("/verify", content=json.dumps(rollout(note=math.nan))).status_code == 422


def test_a_class_with_predict_and_no_verify(app_of: Callable[..., TestClient]) -> None:
    code = """
class Mine(SimpleResourcesServer):
    def predict(self, prompt, response):
        rewards = {"system: Be brief.\\n\\nuser: " + %r: [2], %r: [float("nan")]}
        return next(iter(rewards[prompt] if response else []))
"""
    client = app_of(code % (PROMPT, PROMPT), "Mine")
    assert "StopIteration" in verified(client, "")["failure_reason"]
    body = rollout()
    assert client.post("/verify", json=body).json()["failure_reason"] == "the reward is nan"
    body["responses_create_params"]["instructions"] = "Be brief."
    assert client.post("/verify", json=body).json()["reward"] == 2
    call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "1"}
    got = client.post("/verify", json=body | {"response": {"output": [call]}}).json()
    assert got["mask_sample"] is True and "no response" in got["failure_reason"]


def test_a_verify_that_is_no_coroutine_is_an_error_at_the_start(
    app_of: Callable[..., TestClient],
) -> None:
    with pytest.raises(ConfigError, match="async def verify"):
        app_of(QUICK_START.replace("async def verify", "def verify"), "RewardModelResourcesServer")


def test_the_length_penalty(app_of: Callable[..., TestClient]) -> None:
    client = app_of(QUICK_START + LENGTH_PENALTY, "LengthPenalty")
    plain = app_of(QUICK_START, "RewardModelResourcesServer")
    for response, penalty in ((RESPONSE, 0.0), ("wave " * 120, 0.1)):
        raw, less = (verified(one, response)["reward"] for one in (plain, client))
        assert raw - less == pytest.approx(penalty, abs=1e-6)


def test_the_hugging_face_class(app_of: Callable[..., TestClient], model_path: str) -> None:
    got = verified(app_of(HUGGING_FACE, "HFRewardModelServer"))
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    hf = AutoModelForSequenceClassification.from_pretrained(model_path, dtype=torch.float32)
    expected = hf(**tokenizer(PROMPT + RESPONSE, return_tensors="pt")).logits[0].item()
    assert got["reward"] == pytest.approx(expected, abs=0.02)  # float16


@pytest.mark.slow
def test_as_gym_starts_it(tmp_path: Path, model_path: str) -> None:
    (tmp_path / "app.py").write_text(IMPORTS + QUICK_START + START, encoding="utf-8")
    port = free_port()
    section = {
        "entrypoint": "app.py",
        "model_path": model_path,
        "device": "cpu",
        "host": "127.0.0.1",
        "port": port,
    }
    merged = {"reward_model_server": {"resources_servers": {"reward_model": section}}}
    gym = {
        "NEMO_GYM_CONFIG_DICT": json.dumps(merged),
        "NEMO_GYM_CONFIG_PATH": "reward_model_server",
    }
    process = subprocess.Popen([sys.executable, "app.py"], cwd=tmp_path, env=os.environ | gym)
    try:
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False)

        def listens() -> bool:
            assert process.poll() is None, "it has ended"
            with contextlib.suppress(httpx.ConnectError):
                return client.get("/") is not None
            return False

        wait_until(listens)
        assert math.isfinite(verified(client)["reward"])
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize("method", ["score", "predict"])
def test_the_custom_class_is_served_and_is_an_environment(
    tmp_path: Path, app_of: Callable[..., TestClient], method: str
) -> None:
    code = f"""
def load_custom_model(model_path):
    class Model:
        def forward(self, prompt, response):
            return len(prompt) + len(response) / 1000
    return Model()

class CustomRewardModel:
    def __init__(self, model_path: str):
        self.model = load_custom_model(model_path)

    def {method}(self, prompt: str, response: str) -> float:
        # Your custom scoring logic
        return self.model.forward(prompt, response)
"""
    served = f"""
class Served(SimpleResourcesServer):
    def model_post_init(self, context):
        self.reward_model = CustomRewardModel(self.config.model_path)

    def score(self, prompt, response):
        return self.reward_model.{method}(prompt, response)
"""
    expected = pytest.approx(len(PROMPT) + len(RESPONSE) / 1000)
    assert verified(app_of(code + served, "Served"))["reward"] == expected
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    path = f"{tmp_path / 'mine.py'}:CustomRewardModel"
    section = {"type": "custom", "function": path, "kwargs": {"model_path": "/path/to/weights"}}
    assert make_environment("mine", section).step([CHAT], [{}]).rewards.item() == expected


# Reward model types: scalar, multi-attribute


@pytest.fixture(scope="module")
def five_attributes(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A classifier with five labels, as a hub has them: without a scoring contract."""
    folder = tmp_path_factory.mktemp("attributes")
    tiny_model("llama", num_labels=5, id2label=dict(enumerate(ATTRIBUTES))).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_model_of_five_attributes_is_served(
    five_attributes: str, make_client: Callable[..., Any]
) -> None:
    weights = {"helpfulness": 1.0, "verbosity": -0.25}
    got = verified(client := make_client(model_path=five_attributes, head_weights=weights))
    parts = got["reward_components"]
    assert list(parts) == [f"reward_head_{name}" for name in ATTRIBUTES]
    assert all(got[name] == value for name, value in parts.items())
    expected = parts["reward_head_helpfulness"] - 0.25 * parts["reward_head_verbosity"]
    assert got["reward"] == pytest.approx(expected, abs=1e-5)
    [listed] = client.get("/v1/models").json()["data"]
    assert listed["heads"] == ATTRIBUTES
    [row] = client.post("/v1/rewards", json={"conversations": [CHAT]}).json()["data"]
    assert row["heads"] == pytest.approx(list(parts.values()), abs=1e-5)
    assert row["reward"] == pytest.approx(expected, abs=1e-5)


@pytest.fixture
def make_client(request: pytest.FixtureRequest) -> Callable[..., TestClient]:
    """A function: a client of the server with these keys of the page's configuration."""

    def make(**section: Any) -> TestClient:
        config = checked({"entrypoint": "app.py", "device": "cpu", **section}, "Gym").server_config
        service = Service.load(config)
        request.addfinalizer(service.close)
        return TestClient(create_app(service), base_url="http://localhost")

    return make


# The configuration: the page's first YAML and its table

FIRST_YAML = """
reward_model_server:
  resources_servers:
    reward_model:
      entrypoint: app.py
      model_path: {model_path}
      device: cuda
"""


def test_the_first_yaml_starts(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_CONFIG_PATH", "reward_model_server")
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", FIRST_YAML.format(model_path=model_path))
    assert APP["gym_config"]().server_config.models[0].device == "cuda"
    if not torch.cuda.is_available():
        with pytest.raises(
            ConfigError, match="(?s)cuda.*`auto` takes a GPU where there is one, else the CPU"
        ):
            Service.load(APP["gym_config"]().server_config)
        without = FIRST_YAML.format(model_path=model_path).replace("      device: cuda\n", "")
        monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", without)
    service = Service.load(APP["gym_config"]().server_config)
    got = verified(TestClient(create_app(service), base_url="http://localhost"))
    service.close()
    assert got["reward"] == pytest.approx(
        Scorer.load(model_path).predict(PROMPT, RESPONSE), abs=1e-5
    )


def test_the_options_have_the_pages_defaults(
    model_path: str, five_attributes: str, make_client: Any
) -> None:
    config = checked({"model_path": [model_path]}, "Gym")
    assert config.batch_size == 8 and config.server_config.batch_tokens == 8 * 2048
    assert config.server_config.models[0].default_max_length == 2048
    assert config.server_config.models[0].shaping is None  # normalize_rewards: false
    # The contract of a model says more than a default; a model that says nothing has the default,
    # or its positions.
    for path, expected in ((model_path, 300), (five_attributes, 100)):
        client = make_client(model_path=path, default_max_length=100, head_weights="mean")
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == expected
    got = verified(make_client(model_path=model_path, max_length=50), "word " * 60)
    assert got["failure_reason"].endswith("at most 50")


def test_a_preference_score_is_in_0_to_1(model_path: str, make_client: Any) -> None:
    got = verified(make_client(model_path=model_path, preference_score=True))
    assert got["reward"] == pytest.approx(1 / (1 + math.exp(-got["reward_score"])))


# Normalisation: constants, and "running statistics normalization"


def test_rewards_are_normalised_by_the_pages_defaults_and_by_the_contract(
    model_path: str, tmp_path: Any, make_client: Any
) -> None:
    raw = verified(make_client(model_path=model_path))["reward"]
    for constants, expected in (
        ({}, raw), ({"reward_mean": 0.5}, raw - 0.5), ({"reward_std": 0.5}, raw / 0.5),
        ({"reward_mean": 0.0}, raw)
    ):  # fmt: skip
        client = make_client(model_path=model_path, normalize_rewards=True, **constants)
        assert verified(client)["reward"] == pytest.approx(expected, abs=1e-5)
    fitted = tmp_path / "fitted"
    shutil.copytree(model_path, fitted)
    contract = json.loads((fitted / "reward_contract.json").read_text())
    contract["calibration"] = {"normalization": {"mean": 0.25, "std": 0.125}}
    (fitted / "reward_contract.json").write_text(json.dumps(contract))
    got = verified(make_client(model_path=str(fitted), shaping={"normalize_rewards": True}))
    assert got["reward"] == pytest.approx(max(-5, min(5, (raw - 0.25) / 0.125)), abs=1e-4)


RESPONSES = [
    "Four.",
    "It is five, I think.",
    "No idea at all, sorry.",
    "Waves.",
    "Ask me later about it.",
]


def test_running_statistics_are_the_pages_formula_and_fixed_for_who_asks_again(
    model_path: str, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeward.serving.running.SIZE", 3)
    client = make_client(model_path=model_path, running=True)

    def ask(response: str) -> dict[str, Any]:
        return {
            key: value
            for key, value in verified(client, response).items()
            if key.startswith("reward")
        }

    first = [ask(response) for response in RESPONSES]
    scores = [got["reward_score"] for got in first]
    for i, got in enumerate(first):
        seen = scores[: min(i + 1, 3)]
        mean = statistics.fmean(seen)
        std = statistics.pstdev(seen)
        expected = max(-5.0, min(5.0, (scores[i] - mean) / (std + 1e-8)))
        assert got["reward"] == pytest.approx(expected, abs=1e-6)
        assert got["reward_components"] == {key: got[key] for key in got["reward_components"]}
        found = (got["reward_running_mean"], got["reward_running_std"], got["reward_running_count"])
        assert found == pytest.approx((mean, std, len(seen)))
    for response, got in zip(RESPONSES[::-1], first[::-1], strict=True):
        repeated = ask(response)
        assert repeated["reward"] == pytest.approx(got["reward"], abs=1e-5)
        assert repeated["reward_running_count"] == got["reward_running_count"]
    body = {"context": [{"role": "user", "content": PROMPT}], "completions": RESPONSES[:1]}
    [row] = client.post("/v1/rewards", json=body).json()["data"]
    # there, nothing runs
    assert row["reward"] == row["score"] == pytest.approx(scores[0], abs=1e-5)
