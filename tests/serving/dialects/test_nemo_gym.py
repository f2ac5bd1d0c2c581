"""NeMo Gym's dialect: what is echoed, what is added, and what becomes of a rollout without a
reward.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import chat

from treeward.data.responses_items import conversation_of
from treeward.errors import ConfigError
from treeward.scoring.scorer import Scorer

APP = runpy.run_path(
    str(Path(__file__).parents[3] / "resources_servers" / "reward_model" / "app.py"),
)
gym_config = APP["gym_config"]
main = APP["main"]

QUESTION = "Name a river in Peru, please."
COMPLETION = "The Amazon."


def rollout(completion: str = COMPLETION, **more: Any) -> dict[str, Any]:
    """As the real simple_agent sends it, shortened."""
    return {
        "responses_create_params": {
            "input": [
                {"role": "system", "content": "be brief", "type": "message"},
                {"role": "user", "content": QUESTION, "type": "message"},
            ],
        },
        "agent_ref": {"name": "my_agent"},
        "_ng_task_index": 0,
        "_ng_rollout_index": 0,
        "response": {
            "id": "resp_12",
            "created_at": 1.0,
            "object": "response",
            "output": [
                {
                    "type": "reasoning",
                    "id": "rs_12",
                    "summary": [{"type": "summary_text", "text": "thinking"}],
                },
                {
                    "type": "message",
                    "id": "msg_12",
                    "role": "assistant",
                    "status": "completed",
                    "content": [
                        {
                            "type": "output_text",
                            "text": completion,
                            "annotations": [],
                            "logprobs": [],
                        },
                    ],
                    "prompt_token_ids": [1, 2, 3],
                    "generation_log_probs": [-0.1000000000000000055, -1e-30],
                },
            ],
            "usage": {"input_tokens": 10, "output_tokens": 7, "total_tokens": 17},
        },
        **more,
    }


def messages(completion: str = COMPLETION) -> list[dict[str, str]]:
    return [{"role": "system", "content": "be brief"}, *chat(QUESTION, completion)]


def score_of(scorer: Scorer) -> float:
    value = scorer.score([messages()])[0].score
    assert value is not None
    return value


@pytest.mark.parametrize("path", ["/verify", "/ng-rollout/0.run_1-b/verify"])
def test_the_reward_is_the_score_and_the_rest_comes_back(
    client: Any,
    served_scorer: Scorer,
    path: str,
) -> None:
    got = client.post(path, json=rollout(extra={"deep": [None, 1]})).json()
    assert got.pop("reward") == pytest.approx(score_of(served_scorer), abs=1e-5)
    assert got.pop("reward_num_tokens") == served_scorer.score([messages()])[0].num_tokens
    assert got.pop("reward_truncated") is False
    assert got == rollout(extra={"deep": [None, 1]})


def test_a_rollout_that_is_verified_again_has_one_verdict(
    client: Any,
    served_scorer: Scorer,
) -> None:
    failed = client.post("/verify", json=rollout("word " * 400)).json()
    assert failed["mask_sample"] is True
    failed["response"]["output"][1]["content"][0]["text"] = COMPLETION
    again = client.post("/verify", json=failed)
    assert again.content.count(b'"reward":') == 1
    got = again.json()
    assert not {"mask_sample", "failure_kind", "failure_reason", "_ng_failure_class"} & got.keys()
    assert got["reward"] == pytest.approx(score_of(served_scorer), abs=1e-5)
    assert client.post("/verify", json=got).json() == got


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ([], "there is no completion to score"),
        ([{"type": "web_search_call", "id": "w"}], "'web_search_call' cannot be scored"),
        (
            [{"role": "assistant", "content": [{"type": "output_audio"}]}],
            "'output_audio' cannot be scored",
        ),
        ([{"role": "assistant", "content": "word " * 400}], "too long to score"),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [3]}],
            "tool_calls[0] cannot be read",
        ),
    ],
)
def test_no_reward_is_the_masked_form(client: Any, output: list[Any], why: str) -> None:
    body = rollout()
    body["response"]["output"] = output
    reply = client.post("/verify", json=body)
    assert reply.status_code == 200
    got = reply.json()
    assert why in got.pop("failure_reason")
    kind = "verifier_error"
    masked = {"reward": 0.0, "mask_sample": True, "_ng_failure_class": kind, "failure_kind": kind}
    assert got == body | masked


def test_a_server_that_does_not_score_in_time_masks_too(
    make_service: Callable[..., Any],
    asgi_client: Callable[..., Any],
) -> None:
    service = make_service(deadline_seconds=1e-6)
    reply = asgi_client(service).post("/verify", json=rollout())
    assert reply.status_code == 200
    assert reply.json()["mask_sample"] is True
    assert "not scored in time" in reply.json()["failure_reason"]
    labels = {"code": "deadline_exceeded"}
    counted = service.metrics.registry.get_sample_value("treeward_refused_requests_total", labels)
    assert counted == 1


def test_a_threshold_says_whether_it_is_reached(client: Any, served_scorer: Scorer) -> None:
    score = score_of(served_scorer)
    below = client.post("/verify", json=rollout(reward_threshold=score - 0.1)).json()
    above = client.post("/verify", json=rollout(reward_threshold=score + 0.1)).json()
    without = client.post("/verify", json=rollout(reward_threshold=None)).json()
    assert below["reward_passed"] is True
    assert above["reward_passed"] is False
    assert "reward_passed" not in without


def test_metrics_of_nothing_are_empty(client: Any) -> None:
    nothing = {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}
    assert client.post("/aggregate_metrics", json={"verify_responses": []}).json() == nothing


@pytest.fixture
def aggregated(client: Any) -> Any:
    """The metrics of two rollouts of a task and of two of another, of which one has no reward."""
    rows = [
        {"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0, "reward_passed": True},
        {"_ng_task_index": 0, "_ng_rollout_index": 1, "reward": 2.0, "reward_passed": False},
        {
            "_ng_task_index": 1,
            "_ng_rollout_index": 0,
            "reward": 6,
            "response": {"usage": {"total_tokens": 4}},
        },
        {"_ng_task_index": 1, "_ng_rollout_index": 1, "reward": 0.0, "mask_sample": True},
    ]
    return client.post("/aggregate_metrics", json={"verify_responses": rows}).json()


def test_metrics_are_of_every_number_of_the_rows(aggregated: Any) -> None:
    metrics = aggregated["agent_metrics"]
    assert metrics["mean/reward"] == 3.0
    assert metrics["max/reward"] == 6.0
    assert metrics["min/reward"] == 1.0
    assert metrics["median/reward"] == 2.0
    assert metrics["std/reward"] == pytest.approx(7**0.5)
    assert metrics["mean/reward_passed"] == 0.5
    assert metrics["mean/total_tokens"] == 4.0
    assert aggregated["key_metrics"]["mean/reward"] == 3.0


def test_rollouts_without_a_reward_are_counted_apart(aggregated: Any) -> None:
    assert aggregated["agent_metrics"]["coverage/masked_rollouts"] == 1
    assert aggregated["agent_metrics"]["coverage/measured_rollouts"] == 3


def test_each_task_has_metrics_of_its_own(aggregated: Any) -> None:
    means = {}
    for group in aggregated["group_level_metrics"]:
        means[group["_ng_task_index"]] = group["mean/reward"]
    assert list(means.items()) == [(0, 1.5), (1, 6.0)]


def test_calls_belong_to_the_message_before_them() -> None:
    output = [
        {"type": "reasoning", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me look."}],
        },
        {"type": "function_call", "call_id": "a", "name": "find", "arguments": '{"q": "Peru"}'},
        {"type": "function_call", "call_id": "b", "name": "sum", "arguments": "no json"},
        {"type": "function_call_output", "call_id": "a", "output": "Amazon"},
        {
            "type": "function_call_output",
            "call_id": "b",
            "output": [{"type": "output_text", "text": "4"}],
        },
        {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"},
        {"type": "message", "role": "assistant", "content": "The Amazon."},
    ]
    calls = [
        {"id": "a", "type": "function", "function": {"name": "find", "arguments": {"q": "Peru"}}},
        {"id": "b", "type": "function", "function": {"name": "sum", "arguments": "no json"}},
    ]
    again = {"id": "c", "type": "function", "function": {"name": "find", "arguments": {}}}
    assert conversation_of({"input": "Hello.", "instructions": "Be brief."}, output) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "content": "Amazon", "tool_call_id": "a", "name": "find"},
        {"role": "tool", "content": "4", "tool_call_id": "b", "name": "sum"},
        {"role": "assistant", "content": "", "tool_calls": [again]},
        {"role": "assistant", "content": "The Amazon."},
    ]


def config_of(**section: Any) -> Any:
    return APP["checked"]({"device": "cpu", **section}, "Gym").server_config


def test_gyms_own_keys_reach_the_server() -> None:
    config = config_of(
        entrypoint="app.py",
        domain="rlhf",
        verified=False,
        host="127.0.0.1",
        port=1234,
        server={"deadline_seconds": 7},
        model_path="some/model",
        batch_size=4,
        max_length=512,
    )
    assert config.host == "127.0.0.1"
    assert config.port == 1234
    assert config.deadline_seconds == 7
    assert config.batch_tokens == 2048, "4 conversations of 512 tokens"
    assert config.models[0].max_length == 512
    assert config.models[0].device == "cpu"


def test_several_models_are_an_ensemble() -> None:
    [model] = config_of(model_path=["some/model", "other"]).models
    assert model.models == ("some/model", "other")
    assert model.ensemble.method == "mean"


def test_shaping_is_that_of_the_section() -> None:
    scale = {"normalize_rewards": True, "reward_mean": 0.5, "reward_std": 2.0}
    penalty = {"length_penalty": {"coefficient": 0.01, "threshold": 100}}
    [model] = config_of(model_path="m", **scale, **penalty).models
    assert model.shaping.reward_mean == 0.5
    assert model.shaping.reward_std == 2.0
    assert model.shaping.length_penalty.coefficient == 0.01


def test_two_normalisations_are_refused() -> None:
    with pytest.raises(ConfigError, match="running"):
        config_of(model_path="m", running=True, normalize_rewards=True)


MERGED = """
base: /models
mine:
  resources_servers:
    reward_model: {model_path: '${base}/rm', port: 4321}
"""


def test_the_section_of_the_instance_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", MERGED)
    monkeypatch.setenv("NEMO_GYM_CONFIG_PATH", "mine")
    assert gym_config().models == ("/models/rm",)
    assert gym_config().port == 4321


def test_without_a_section_it_ends_with_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_CONFIG_PATH", "other")
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", MERGED)
    assert main() == 2, "there is no such instance"
    monkeypatch.delenv("NEMO_GYM_CONFIG_DICT")
    assert main() == 2, "there is no configuration"


@pytest.fixture
def verified(
    make_service: Callable[..., Any],
    asgi_client: Callable[..., Any],
) -> Callable[..., Any]:
    """A function: the verdict of a server with these keys on a rollout."""

    def verify(body: Any = None, **section: Any) -> Any:
        client = asgi_client(make_service(models=config_of(**section).models))
        return client.post("/verify", json=body or rollout()).json()

    return verify


def test_several_models_without_calibration_are_averaged(
    verified: Callable[..., Any],
    served_folder: Path,
    served_scorer: Scorer,
) -> None:
    result = verified(model_path=[str(served_folder)] * 2)
    assert result["reward"] == pytest.approx(score_of(served_scorer), abs=1e-5)


def test_an_average_of_raw_scores_is_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = {"resources_servers": {"reward_model": {"model_path": ["a", "b"]}}}
    monkeypatch.setenv("NEMO_GYM_CONFIG_PATH", "mine")
    monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", json.dumps({"mine": server}))
    assert gym_config().models == ("a", "b")
    assert "The scores of 2 models are averaged as they are" in caplog.text


def test_members_of_an_ensemble(
    verified: Callable[..., Any],
    served_folder: Path,
    served_scorer: Scorer,
) -> None:
    got = verified(
        model_path=[str(served_folder)] * 2,
        ensemble={"method": "worst", "standardize": False},
    )
    assert got["reward"] == pytest.approx(score_of(served_scorer), abs=1e-5)
    assert got["reward_components"].keys() == {"reward_member_0", "reward_member_1"}
    assert all(got[name] == value for name, value in got["reward_components"].items())


def test_a_rollout_that_another_model_has_verified_keeps_none_of_its_parts(
    verified: Callable[..., Any],
    served_folder: Path,
) -> None:
    ensemble = {"method": "worst", "standardize": False}
    earlier = verified(model_path=[str(served_folder)] * 2, ensemble=ensemble)
    assert {"reward_member_0", "reward_member_1"} <= earlier.keys()
    earlier["reward_note"] = "of the row's author"

    got = verified(body=earlier, model_path=str(served_folder))

    assert got.keys() & {"reward_member_0", "reward_member_1", "reward_components"} == set()
    assert got["reward_note"] == "of the row's author"
