"""The page "RLHF with Reward Models" of NeMo Gym (a resources server), walked through: what is quoted is run.

Sections: scoring; the classes; reward model types; the folder and its commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from families import tiny_model
from signed import write_signed_model
from starlette.testclient import TestClient

import treeward
from treeward.config.nemo_gym import NemoGymConfig
from treeward.environments.reward_model import RewardModelEnvironment
from treeward.errors import DataError
from treeward.scoring.score import Score
from treeward.scoring.scorer import Scorer
from treeward.serving.app import create_app

PROMPT = "Explain quantum computing simply."
RESPONSE = "It computes with waves of chance."
ATTRIBUTES = ["helpfulness", "correctness", "coherence", "complexity", "verbosity"]


@pytest.fixture(scope="module")
def model_path(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_signed_model(tmp_path_factory.mktemp("page") / "rm", tiny_tokenizer, seed=3, max_length=300))


def rollout(response: str = RESPONSE, **more: Any) -> dict[str, Any]:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": response}]}
    params = {"input": [{"role": "user", "content": PROMPT}]}
    return {"responses_create_params": params, "response": {"id": "r", "output": [message]}, **more}


# Scoring: `reward_model = load_reward_model(path)`, `.score(prompt=..., response=...)`, `.predict(prompt, response)`


def test_a_loaded_model_scores_a_prompt_and_a_response(model_path: str) -> None:
    reward_model = treeward.load_reward_model(model_path, device="cpu")
    messages = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": RESPONSE}]
    [expected] = reward_model.score([messages])
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": PROMPT}]}]
    for prompt, response in [
        (PROMPT, RESPONSE),
        (messages[:1], messages[1:]),
        (items, rollout()["response"]["output"]),
    ]:
        assert reward_model.score(prompt=prompt, response=response) == expected.score
        assert reward_model.score(prompt, response) == reward_model.predict(prompt, response) == expected.score
    developer = [{"role": "developer", "content": "Be brief."}, *messages]
    system = [developer[0] | {"role": "system"}, *messages]
    assert reward_model.predict(developer[:-1], RESPONSE) == reward_model.score([system])[0].score
    assert reward_model.predict(PROMPT, [{"role": "assistant", "content": RESPONSE}]) == expected.score


@pytest.mark.parametrize(("prompt", "response"), [(PROMPT, "word " * 400), (PROMPT, []), (PROMPT, None), (3, RESPONSE)])
def test_what_has_no_score_is_an_error_and_no_number(model_path: str, prompt: Any, response: Any) -> None:
    with pytest.raises(DataError):
        treeward.load_reward_model(model_path, device="cpu").score(prompt=prompt, response=response)


# Reward model types: scalar, multi-attribute


@pytest.fixture(scope="module")
def five_attributes(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A classifier with five labels, as a hub has them: without a scoring contract."""
    folder = tmp_path_factory.mktemp("attributes") / "model"
    hf = tiny_model("llama", num_labels=5, id2label=dict(enumerate(ATTRIBUTES)))
    hf.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_model_of_five_attributes_is_served(five_attributes: str, make_client: Callable[..., Any]) -> None:
    weights = {"helpfulness": 1.0, "verbosity": -0.25}
    client = make_client(model_path=five_attributes, head_weights=weights)
    got = client.post("/verify", json=rollout()).json()
    parts = got["reward_components"]
    assert list(parts) == [f"reward_head_{name}" for name in ATTRIBUTES]
    assert all(got[name] == value for name, value in parts.items())
    expected = parts["reward_head_helpfulness"] - 0.25 * parts["reward_head_verbosity"]
    assert got["reward"] == pytest.approx(expected, abs=1e-5)
    [listed] = client.get("/v1/models").json()["data"]
    assert listed["heads"] == ATTRIBUTES
    chat = {"conversations": [[{"role": "user", "content": PROMPT}, {"role": "assistant", "content": RESPONSE}]]}
    [row] = client.post("/v1/rewards", json=chat).json()["data"]
    assert row["heads"] == pytest.approx(list(parts.values()), abs=1e-5)
    assert row["reward"] == pytest.approx(expected, abs=1e-5)


def test_and_is_an_environment(five_attributes: str) -> None:
    section = {"model_name": five_attributes, "precision": "float32", "head_weights": {"helpfulness": 1.0}}
    environment = RewardModelEnvironment(section | {"resources": {"gpus_per_node": 0}})
    log = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": RESPONSE}]
    step = environment.step([log], [{}])
    components = step.metadata[0]["reward_details"]["components"]
    assert list(components) == [f"head_{name}" for name in ATTRIBUTES]
    assert step.rewards[0].item() == pytest.approx(components["head_helpfulness"], abs=1e-5)


def test_without_weights_it_says_which_there_are(five_attributes: str) -> None:
    with pytest.raises(treeward.ModelError, match="helpfulness, correctness"):
        Scorer.load(five_attributes, device="cpu")
    assert Score(1.0, heads=(1.0, 2.0)).parts == {"head_0": 1.0, "head_1": 2.0}


@pytest.fixture
def make_client(request: pytest.FixtureRequest) -> Callable[..., TestClient]:
    """A function: a client of the server with these keys of the page's configuration."""
    from treeward.serving.run import make_service

    def make(**section: Any) -> TestClient:
        config = NemoGymConfig.model_validate({"entrypoint": "app.py", "device": "cpu", **section}).server_config
        service = make_service(config)
        request.addfinalizer(service.close)
        return TestClient(create_app(service))

    return make
