"""NeMo Gym's dialect: what is echoed, what is added, and what becomes of a rollout without a reward."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from treeward.config.nemo_gym import NemoGymConfig
from treeward.data.responses_items import conversation_of
from treeward.errors import ConfigError
from treeward.serving.dialects.nemo_gym import with_verdict
from treeward.serving.models import ServedModel

QUESTION = "Name a river in Peru, please."
ANSWER = "The Amazon."


def rollout(answer: str = ANSWER, **more: Any) -> dict[str, Any]:
    """As the real simple_agent sends it, shortened."""
    return {
        "responses_create_params": {
            "input": [
                {"role": "system", "content": "be brief", "type": "message"},
                {"role": "user", "content": QUESTION, "type": "message"},
            ],
            "tools": [],
            "metadata": None,
        },
        "agent_ref": {"name": "my_agent"},
        "_ng_task_index": 0,
        "_ng_rollout_index": 0,
        "response": {
            "id": "resp_12",
            "created_at": 1.0,
            "object": "response",
            "output": [
                {"type": "reasoning", "id": "rs_12", "summary": [{"type": "summary_text", "text": "thinking"}]},
                {
                    "type": "message",
                    "id": "msg_12",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": answer, "annotations": [], "logprobs": []}],
                    "prompt_token_ids": [1, 2, 3],
                    "generation_log_probs": [-0.1000000000000000055, -1e-30],
                },
            ],
            "usage": {"input_tokens": 10, "output_tokens": 7, "total_tokens": 17},
        },
        **more,
    }


def messages(answer: str = ANSWER) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": answer},
    ]


def score_of(model: ServedModel, conversation: list[dict[str, Any]]) -> float:
    value = model.scorer.score([conversation])[0].score
    assert value is not None
    return value


@pytest.mark.parametrize("path", ["/verify", "/ng-rollout/a/verify", "/ng-rollout/0.run_1-b/verify"])
def test_the_reward_is_the_score_and_the_rest_comes_back(client: Any, loaded_model: ServedModel, path: str) -> None:
    answer = client.post(path, json=rollout(extra={"deep": [None, 1]})).json()
    assert answer.pop("reward") == pytest.approx(score_of(loaded_model, messages()), abs=1e-5)
    assert answer.pop("reward_num_tokens") == loaded_model.scorer.score([messages()])[0].num_tokens
    assert answer.pop("reward_truncated") is False
    assert answer == rollout(extra={"deep": [None, 1]})


def test_the_echo_is_the_bytes_themselves(client: Any) -> None:
    body = orjson.dumps(rollout())
    odd = body[:-1] + b' , "number": 1.10e+2, "big": 123456789012345678901234567890, "text": "\\u0041\\/" } \r\n'
    answer = client.post("/verify", content=odd).content
    assert answer.startswith(odd.rstrip()[:-1])
    assert json.loads(answer)["big"] == 123456789012345678901234567890


@pytest.mark.parametrize(
    ("content", "kept"),
    [
        (b"{}", {}),
        (b'{"a":"}\\",\\"reward\\":1"}\t', {"a": '}","reward":1'}),
        (b'{"reward":1,"a":[{"reward":2}],"reward" : {"x":[3,"}"]} , "b":2}', {"a": [{"reward": 2}], "b": 2}),
        (b'{"rew\\u0061rd": 1, "n": 100000000000000000000000001}', {"n": 100000000000000000000000001}),
    ],
)
def test_splicing(content: bytes, kept: dict[str, Any]) -> None:
    result = with_verdict(content, orjson.loads(content), {"reward": 1.5, "x": [1]})
    pairs = json.loads(result, object_pairs_hook=list)
    assert [key for key, _ in pairs] == [*kept, "reward", "x"]
    assert json.loads(result) == {**kept, "reward": 1.5, "x": [1]}
    assert orjson.loads(result)["reward"] == 1.5


def test_a_rollout_that_is_verified_again_has_one_verdict(client: Any, loaded_model: ServedModel) -> None:
    failed = client.post("/verify", json=rollout("word " * 400)).json()
    assert failed["mask_sample"] is True
    failed["response"]["output"][1]["content"][0]["text"] = ANSWER
    again = client.post("/verify", json=failed)
    assert again.content.count(b'"reward":') == 1
    answer = again.json()
    assert not {"mask_sample", "failure_kind", "failure_reason", "_ng_failure_class"} & answer.keys()
    assert answer["reward"] == pytest.approx(score_of(loaded_model, messages()), abs=1e-5)
    assert client.post("/verify", json=answer).json() == answer


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ([], "there is no completion to score"),
        ([{"type": "web_search_call", "id": "w"}], "'web_search_call' cannot be scored"),
        ([{"role": "assistant", "content": [{"type": "output_audio"}]}], "'output_audio' cannot be scored"),
        ([{"role": "assistant", "content": 3}], "content cannot be read"),
        ([{"role": "assistant", "content": "word " * 400}], "too long to score"),
        ([{"role": "assistant", "content": "x", "tool_calls": [3]}], "tool_calls[0] cannot be read"),
    ],
)
def test_no_reward_is_the_masked_form(client: Any, output: list[Any], why: str) -> None:
    body = rollout()
    body["response"]["output"] = output
    reply = client.post("/verify", json=body)
    assert reply.status_code == 200
    answer = reply.json()
    assert why in answer.pop("failure_reason")
    assert {key: answer.pop(key) for key in ("reward", "mask_sample", "_ng_failure_class", "failure_kind")} == {
        "reward": 0.0,
        "mask_sample": True,
        "_ng_failure_class": "verifier_error",
        "failure_kind": "verifier_error",
    }
    assert answer == body


def test_a_server_that_does_not_score_in_time_masks_too(own_client: Any, service: Any) -> None:
    reply = own_client.post("/verify", json=rollout(), headers={"X-Deadline-Seconds": "0"})
    assert reply.status_code == 200
    assert reply.json()["mask_sample"] is True and "not scored in time" in reply.json()["failure_reason"]
    registry = service.metrics.registry
    assert registry.get_sample_value("treeward_refused_requests_total", {"code": "deadline_exceeded"}) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"responses_create_params": {"input": "x"}, "response": {"output": [NaN]}}',
        b'{"responses_create_params": {"input": 3}, "response": {"output": []}}',
        b'{"responses_create_params": {"input": "x"}, "response": {"output": {}}}',
        b'{"responses_create_params": {"input": "x"}, "response": {"output": []}, "reward_threshold": "high"}',
    ],
)
def test_what_is_no_rollout_is_refused(client: Any, content: bytes) -> None:
    reply = client.post("/verify", content=content)
    assert reply.status_code == 422
    assert reply.json()["error"]["code"] in ("invalid_json", "invalid_request")


def test_a_threshold_says_whether_it_is_reached(client: Any, loaded_model: ServedModel) -> None:
    score = score_of(loaded_model, messages())
    assert client.post("/verify", json=rollout(reward_threshold=score - 0.1)).json()["reward_passed"] is True
    assert client.post("/verify", json=rollout(reward_threshold=score + 0.1)).json()["reward_passed"] is False
    assert "reward_passed" not in client.post("/verify", json=rollout(reward_threshold=None)).json()


def test_sessions(client: Any) -> None:
    assert client.post("/seed_session", json=rollout()).json() == {}
    for path in ("/seed_session", "/ng-rollout/r1/seed_session"):
        seeded = client.post(
            path, json={"resources_session_id": 'a b;"', "episode_id": {}, "task_id": {}, "task_data": {}}
        )
        assert seeded.json() == {"resources_session_id": 'a b;"'}
        assert seeded.headers["set-cookie"].startswith("treeward_session=")
    for _ in range(2):
        assert client.post("/close_session", json={"resources_session_id": "x"}).json() == {"resources_session_id": "x"}
    assert client.post("/close_session", json={}).status_code == 422
    assert client.post("/seed_session", json={"resources_session_id": 3}).status_code == 422
    assert client.get("/reverify_mode").json() == "stateless"


def test_aggregate_metrics(client: Any) -> None:
    nothing = {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}
    assert client.post("/aggregate_metrics", json={"verify_responses": []}).json() == nothing
    rows = [
        {"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1.0, "reward_passed": True},
        {"_ng_task_index": 0, "_ng_rollout_index": 1, "reward": 2.0, "reward_passed": False},
        {"_ng_task_index": 1, "_ng_rollout_index": 0, "reward": 6, "response": {"usage": {"total_tokens": 4}}},
        {"_ng_task_index": 1, "_ng_rollout_index": 1, "reward": 0.0, "mask_sample": True},
    ]
    found = client.post("/aggregate_metrics", json={"verify_responses": rows}).json()
    metrics = found["agent_metrics"]
    assert [metrics[f"{name}/reward"] for name in ("mean", "max", "min", "median")] == [3.0, 6.0, 1.0, 2.0]
    assert metrics["std/reward"] == pytest.approx(7**0.5)
    assert metrics["mean/reward_passed"] == 0.5 and metrics["mean/total_tokens"] == 4.0
    assert metrics["coverage/masked_rollouts"] == 1 and metrics["coverage/measured_rollouts"] == 3
    assert found["key_metrics"]["mean/reward"] == 3.0
    assert [(group["_ng_task_index"], group["mean/reward"]) for group in found["group_level_metrics"]] == [
        (0, 1.5),
        (1, 6.0),
    ]
    odd = [{"reward": 1.0, "_ng_task_index": [1], "_ng_rollout_index": {}}, {"reward": 2.0, "_ng_task_index": "a"}]
    found = client.post("/aggregate_metrics", json={"verify_responses": odd}).json()
    assert [group["mean/reward"] for group in found["group_level_metrics"]] == [1.5]


class TestItems:
    def test_text_and_instructions(self) -> None:
        output = [{"type": "message", "role": "assistant", "content": "4"}]
        assert conversation_of({"input": "2 + 2?", "instructions": "Be brief."}, output) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "4"},
        ]

    def test_calls_belong_to_the_message_before_them(self) -> None:
        output = [
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
            {"type": "function_call", "call_id": "a", "name": "find", "arguments": '{"q": "Peru"}'},
            {"type": "function_call", "call_id": "b", "name": "sum", "arguments": "no json"},
            {"type": "function_call_output", "call_id": "a", "output": "Amazon"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "output_text", "text": "4"}]},
            {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": ""},
            {"type": "message", "role": "assistant", "content": "The Amazon."},
        ]
        calls = [
            {"id": "a", "type": "function", "function": {"name": "find", "arguments": {"q": "Peru"}}},
            {"id": "b", "type": "function", "function": {"name": "sum", "arguments": "no json"}},
        ]
        again = {"id": "c", "type": "function", "function": {"name": "find", "arguments": {}}}
        assert conversation_of({"input": [{"role": "assistant", "content": "Hello."}]}, output) == [
            {"role": "assistant", "content": "Hello."},
            {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
            {"role": "tool", "content": "Amazon", "tool_call_id": "a", "name": "find"},
            {"role": "tool", "content": "4", "tool_call_id": "b", "name": "sum"},
            {"role": "assistant", "content": "", "tool_calls": [again]},
            {"role": "tool", "content": "", "tool_call_id": "c", "name": "find"},
            {"role": "assistant", "content": "The Amazon."},
        ]


class TestConfig:
    def test_the_seeds_options(self) -> None:
        config = NemoGymConfig.model_validate(
            {
                "entrypoint": "app.py",
                "domain": "rlhf",
                "verified": False,
                "model_path": "some/model",
                "device": "cpu",
                "batch_size": 4,
                "max_length": 512,
                "normalize_rewards": True,
                "reward_mean": 0.5,
                "reward_std": 2.0,
                "length_penalty": {"coefficient": 0.01, "threshold": 100},
                "host": "127.0.0.1",
                "port": 1234,
                "server": {"deadline_seconds": 7},
            }
        ).server_config
        [model] = config.models
        assert (model.model, model.device, model.max_length) == ("some/model", "cpu", 512)
        assert (config.host, config.port, config.batch_tokens, config.deadline_seconds) == ("127.0.0.1", 1234, 2048, 7)
        shaping = model.shaping
        assert not isinstance(shaping, str) and shaping is not None and shaping.length_penalty is not None
        assert (shaping.reward_mean, shaping.reward_std, shaping.length_penalty.coefficient) == (0.5, 2.0, 0.01)

    def test_several_models_are_an_ensemble(self) -> None:
        [model] = NemoGymConfig.model_validate({"model_path": ["a", "b"], "ensemble": "worst"}).server_config.models
        assert model.models == ("a", "b") and model.ensemble is not None and model.ensemble.method == "worst"
        [model] = NemoGymConfig.model_validate({"model_path": ["a", "b"]}).server_config.models
        assert model.ensemble is not None and model.ensemble.method == "mean"

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({}, "model_path"),
            ({"model_path": "m", "batchsize": 3}, "batchsize"),
            ({"model_path": "m", "reward_mean": 0.0}, "do not fit together"),
            ({"model_path": "m", "shaping": {}, "normalize_rewards": True}, "in two ways"),
            ({"model_path": "m", "shaping": {"normalize_rewards": True, "running": True}}, "verified again"),
            ({"model_path": ["m", "n"], "reward_class": "a:B"}, "reward_class"),
            ({"model_path": "m", "server": {"port": 3}}, "set twice"),
        ],
    )
    def test_mistakes(self, values: dict[str, Any], message: str) -> None:
        from treeward.config.load import load_section

        with pytest.raises(ConfigError, match=message):
            load_section(NemoGymConfig, values, where="gym")

    def test_the_section_of_the_instance_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from treeward.serving.nemo_gym_app import gym_config, main

        merged = (
            "base: /models\nmine:\n  resources_servers:\n    reward_model: {model_path: '${base}/rm', port: 4321}\n"
        )
        monkeypatch.setenv("NEMO_GYM_CONFIG_DICT", merged)
        monkeypatch.setenv("NEMO_GYM_CONFIG_PATH", "mine")
        assert gym_config().model_path == ("/models/rm",) and gym_config().port == 4321
        monkeypatch.setenv("NEMO_GYM_CONFIG_PATH", "other")
        assert main() == 2
        monkeypatch.delenv("NEMO_GYM_CONFIG_DICT")
        assert main() == 2


class TestShaped:
    def test_components_of_a_shaped_reward(
        self, make_service: Callable[..., Any], asgi_client: Callable[..., Any], served_folder: Path
    ) -> None:
        config = NemoGymConfig.model_validate(
            {
                "model_path": str(served_folder),
                "device": "cpu",
                "normalize_rewards": True,
                "reward_mean": 0.25,
                "reward_std": 0.5,
                "reward_clip": None,
                "length_penalty": {"coefficient": 0.125, "threshold": 3},
            }
        ).server_config
        answer = asgi_client(make_service(models=config.models)).post("/verify", json=rollout()).json()
        expected = (answer["reward_score"] - 0.125 * (len(ANSWER) - 3) - 0.25) / 0.5
        assert answer["reward"] == pytest.approx(expected, abs=1e-6)
        assert answer["reward_components"] == {"reward_score": answer["reward_score"]}

    def test_members_of_an_ensemble(
        self,
        make_service: Callable[..., Any],
        asgi_client: Callable[..., Any],
        served_folder: Path,
        loaded_model: ServedModel,
    ) -> None:
        ensemble = {"method": "worst", "means": [0.0, 1.0], "stds": [1.0, 1.0]}
        paths = [str(served_folder)] * 2
        config = NemoGymConfig.model_validate({"model_path": paths, "ensemble": ensemble, "device": "cpu"})
        answer = asgi_client(make_service(models=config.server_config.models)).post("/verify", json=rollout()).json()
        score = score_of(loaded_model, messages())
        assert answer["reward"] == pytest.approx(score - 1.0, abs=1e-5)
        components = answer["reward_components"]
        assert components.keys() == {"reward_member_0", "reward_member_1"}
        assert all(answer[name] == value for name, value in components.items())

    def test_reference_answers_are_those_of_the_row(
        self, make_service: Callable[..., Any], asgi_client: Callable[..., Any], served_folder: Path
    ) -> None:
        shaping = {"reference": "par"}
        config = NemoGymConfig.model_validate({"model_path": str(served_folder), "device": "cpu", "shaping": shaping})
        client = asgi_client(make_service(models=config.server_config.models))
        same = client.post("/verify", json=rollout(reference_answers=[ANSWER])).json()
        assert same["reward"] == pytest.approx(0.5, abs=1e-5)
        assert client.post("/verify", json=rollout()).json()["mask_sample"] is True


class Lengths:
    """A reward class: as many points as letters."""

    threads: set[str] = set()
    batches: list[int] = []

    def __init__(self, model_path: str) -> None:
        self.model_path = model_path

    def score(self, prompt: str, response: str) -> float:
        self.threads.add(threading.current_thread().name)
        if "fail" in response:
            raise RuntimeError("it was told to")
        return float("nan") if "nan" in response else len(prompt) + len(response) / 1000


class InBatches(Lengths):
    def score_batch(self, prompts: list[str], responses: list[str]) -> list[float]:
        self.batches.append(len(prompts))
        if any("fail" in response for response in responses):
            raise RuntimeError("it was told to")
        return [self.score(*pair) for pair in zip(prompts, responses, strict=True)]


class TestRewardClass:
    @pytest.fixture(autouse=True)
    def module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("own_rewards")
        module.Lengths, module.InBatches = Lengths, InBatches  # type: ignore[attr-defined]
        module.number, module.Silent = 3, type("Silent", (), {})  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "own_rewards", module)
        Lengths.threads.clear()
        Lengths.batches.clear()

    @pytest.mark.parametrize("name", ["Lengths", "InBatches"])
    def test_it_scores(self, make_service: Callable[..., Any], asgi_client: Callable[..., Any], name: str) -> None:
        config = NemoGymConfig(model_path=("any/path",), reward_class=f"own_rewards:{name}").server_config
        service = make_service(models=config.models)
        client = asgi_client(service)
        prompt = f"system: be brief\n\nuser: {QUESTION}"
        answer = client.post("/verify", json=rollout()).json()
        assert answer["reward"] == pytest.approx(len(prompt) + len(ANSWER) / 1000)
        conversations = [messages("a"), messages("fail"), messages("abc"), messages("nan")]
        body = {"conversations": conversations, "on_error": "mask"}
        data = client.post("/v1/rewards", json=body).json()["data"]
        assert [one["reward"] for one in data] == [
            pytest.approx(len(prompt) + 0.001),
            None,
            pytest.approx(len(prompt) + 0.003),
            None,
        ]
        assert all(data[i]["error"] for i in (1, 3))
        assert len(Lengths.threads) == 1 and threading.current_thread().name not in Lengths.threads
        assert bool(Lengths.batches) == (name == "InBatches")

    @pytest.mark.parametrize(
        "path", ["own_rewards", "own_rewards:Lenghts", "no_such:Thing", "own_rewards:number", "own_rewards:Silent"]
    )
    def test_what_is_no_reward_class(self, make_service: Callable[..., Any], path: str) -> None:
        config = NemoGymConfig(model_path=("any/path",), reward_class=path).server_config
        with pytest.raises(ConfigError, match="reward_class"):
            make_service(models=config.models)


def test_the_resources_server_folder_is_what_gym_reads() -> None:
    import yaml

    folder = Path(__file__).parents[3] / "resources_servers" / "reward_model"
    merged = yaml.safe_load((folder / "configs" / "reward_model.yaml").read_text(encoding="utf-8"))
    section = merged["reward_model_server"]["resources_servers"]["reward_model"]
    assert NemoGymConfig.model_validate(section | {"model_path": "m"}).server_config.batch_tokens == 8 * 2048
    agent = merged["reward_model_simple_agent"]["responses_api_agents"]["simple_agent"]
    assert agent["resources_server"] == {"type": "resources_servers", "name": "reward_model_server"}
    for line in (folder / "data" / "example.jsonl").read_text(encoding="utf-8").splitlines():
        assert conversation_of(json.loads(line)["responses_create_params"], [{"role": "assistant", "content": "x"}])
