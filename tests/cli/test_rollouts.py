"""`treeward rollouts`: against a policy on loopback; what is asked, what is written, what survives a kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_policy import FakePolicy
from loopback import Loopback

from treeward.cli.main import main
from treeward.client.rewards import AsyncRewardClient
from treeward.config.server import ServerConfig
from treeward.errors import DataError
from treeward.scoring.scorer import Scorer
from treeward.serving.app import create_app
from treeward.serving.rollouts.collect import Rewards
from treeward.serving.run import make_service

PROMPTS = ["Why?", "Who?", "When?"]


@pytest.fixture
def policy() -> Iterator[FakePolicy]:
    with FakePolicy() as running:
        yield running


@pytest.fixture
def collect(policy: FakePolicy, tmp_path: Path) -> Callable[..., int]:
    """Run the command on `policy`; the output is `out/rollouts.jsonl`."""

    def run(rows: Path, *more: str, api: str = "chat") -> int:
        output = str(tmp_path / "out" / "rollouts.jsonl")
        common = ["--model-url", policy.url, "--model", "policy", "--api", api, "--input", str(rows)]
        return main(["rollouts", *common, "--output", output, *more])

    return run


@pytest.fixture
def rows(write_rows: Callable[..., Path]) -> Path:
    return write_rows("rows.jsonl", [{"prompt": prompt, "kept": [prompt]} for prompt in PROMPTS])


def read(tmp_path: Path, what: str = "") -> list[dict[str, Any]]:
    file = tmp_path / "out" / f"rollouts{what}.jsonl"
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return sorted(found, key=lambda row: (row["_ng_task_index"], row.get("_ng_rollout_index", 0)))


def text(row: dict[str, Any]) -> str:
    found: str = row["response"]["output"][-1]["content"][0]["text"]
    return found


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_rewards_are_scores(
    api: str, collect: Callable[..., int], rows: Path, model_folder: Path, tmp_path: Path, policy: FakePolicy
) -> None:
    arguments = ("--reward-model", str(model_folder), "--device", "cpu", "--num-repeats", "2")
    assert collect(rows, *arguments, api=api) == 0
    rollouts = read(tmp_path)
    assert [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in rollouts] == [
        (task, repeat) for task in range(3) for repeat in range(2)
    ]
    scorer = Scorer.load(model_folder, device="cpu")
    for row in rollouts:
        prompt = PROMPTS[row["_ng_task_index"]]
        assert row["prompt"] == prompt and row["kept"] == [prompt]
        assert text(row).endswith(f"to {prompt}.")
        conversation = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text(row)}]
        assert row["reward"] == pytest.approx(scorer.score([conversation])[0].score, abs=1e-5)
    assert len({text(row) for row in rollouts}) == 6
    assert read(tmp_path, "_failures") == []
    metrics = json.loads((tmp_path / "out" / "rollouts_aggregate_metrics.json").read_text(encoding="utf-8"))
    rewards = [row["reward"] for row in rollouts]
    assert metrics["agent_metrics"]["mean/reward"] == pytest.approx(sum(rewards) / 6)
    assert metrics["agent_metrics"]["max/reward"] == max(rewards)
    assert metrics["agent_metrics"]["mean/total_tokens"] == 17
    profiles = read(tmp_path, "_reward_profiles")
    assert [profile["rewards"] for profile in profiles] == [rewards[0:2], rewards[2:4], rewards[4:6]]
    assert [profile["input"][0]["content"] for profile in profiles] == PROMPTS


def client_of(service: Any) -> AsyncRewardClient:
    return AsyncRewardClient("http://localhost", transport=httpx.ASGITransport(create_app(service)))


PLAIN: dict[str, Any] = {"normalize_rewards": True, "reward_mean": 0.5, "reward_std": 0.1}


def test_rollouts_know_what_their_rewards_depend_on(model_folder: Path) -> None:
    """`--resume` may go on with the same model under another name, and not with another shaping or ensemble."""
    one = {"model": str(model_folder), "device": "cpu"}
    ensemble = {"models": [str(model_folder)] * 2, "device": "cpu"}
    sections: list[dict[str, Any]] = [
        {**one, "name": "rm"},
        {**one, "name": "shaped", "shaping": PLAIN},
        {**one, "name": "par", "shaping": {"reference": "par", "reference_key": "gold"}},
        {**ensemble, "name": "mean", "ensemble": {"method": "mean", "standardize": False}},
        {**ensemble, "name": "worst", "ensemble": {"method": "worst", "standardize": False}},
        {**one, "name": "renamed"},
    ]
    output = [{"type": "message", "role": "assistant", "content": "The Amazon."}]
    params = {"input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Why?"}]}

    async def identity_of(section: dict[str, Any]) -> Mapping[str, Any]:
        with contextlib.closing(make_service(ServerConfig.model_validate({"models": [section]}))) as service:
            rewards = await Rewards.of(client_of(service))
            found = await rewards.judge(params, output, {"reward_threshold": 0.0, "gold": "The Nile."})
            assert found.keys() >= {"reward", "reward_num_tokens", "reward_passed"}
            if section["name"] == "par":
                with pytest.raises(DataError, match="gold"):
                    await rewards.judge(params, output, {})
            return rewards.identity

    *different, renamed = [asyncio.run(identity_of(section)) for section in sections]
    assert all(different.count(identity) == 1 for identity in different) and renamed == different[0]


def test_all_forms_of_rows(
    collect: Callable[..., int], write_rows: Callable[..., Path], tmp_path: Path, policy: FakePolicy
) -> None:
    tools = [{"type": "function", "name": "find", "parameters": {}}]
    call = {"type": "function_call", "call_id": "a", "name": "find", "arguments": '{"q": 1}'}
    params = {
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            call,
            {"type": "function_call_output", "call_id": "a", "output": "one"},
            {"role": "user", "content": "Why?"},
        ],
        "tools": tools,
        "temperature": 0.5,
        "max_output_tokens": 7,
        "metadata": None,
    }
    data = [
        {"responses_create_params": params},
        {"responses_create_params": {"input": "Who?", "instructions": "Be kind."}},
        {"messages": [{"role": "system", "content": "Be sure."}, {"role": "user", "content": "When?"}]},
    ]
    assert collect(write_rows("rows.jsonl", data), "--temperature", "0.9", "--concurrency", "1") == 0
    first, second, third = policy.requests
    function = {"name": "find", "arguments": '{"q": 1}'}
    assert first["messages"] == [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]},
        {"role": "tool", "content": "one", "tool_call_id": "a", "name": "find"},
        {"role": "user", "content": "Why?"},
    ]
    assert first["tools"] == [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    assert (first["temperature"], first["max_tokens"], first["model"]) == (0.5, 7, "policy")
    assert second["messages"][0] == {"role": "system", "content": "Be kind."} and second["temperature"] == 0.9
    assert [message["role"] for message in third["messages"]] == ["system", "user"]
    written = read(tmp_path)
    assert written[0]["responses_create_params"] == {key: value for key, value in params.items() if value is not None}
    assert "reward" not in written[0] and len(written) == 3


class TestChatAnswers:
    def test_calls_thoughts_and_refusals(
        self, collect: Callable[..., int], rows: Path, tmp_path: Path, policy: FakePolicy, model_folder: Path
    ) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
        policy.replies = {
            "Why?": {"content": "So.", "reasoning_content": "Hm."},
            "Who?": {"content": None, "tool_calls": [call]},
            "When?": {"content": None, "refusal": "No."},
        }
        assert collect(rows, "--reward-model", str(model_folder), "--device", "cpu") == 0
        why, who, when = read(tmp_path)
        assert [item["type"] for item in why["response"]["output"]] == ["reasoning", "message"]
        assert who["response"]["output"] == [
            {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"}
        ]
        scorer = Scorer.load(model_folder, device="cpu")
        for row, prompt, answer in ((why, "Why?", "So."), (when, "When?", "No.")):
            conversation = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            assert row["reward"] == pytest.approx(scorer.score([conversation])[0].score, abs=1e-5)


class TestFailures:
    def test_what_does_not_pass_is_in_the_failures_and_tried_on_resume(
        self, collect: Callable[..., int], rows: Path, tmp_path: Path, policy: FakePolicy, model_folder: Path
    ) -> None:
        policy.failures["Why?"] = [400]
        policy.failures["Who?"] = [500, 500]
        policy.replies["When?"] = "word " * 200  # more than the model's 96 tokens
        reward = ("--reward-model", str(model_folder), "--device", "cpu")
        assert collect(rows, *reward, "--max-retries", "1") == 1
        assert (tmp_path / "out" / "rollouts.jsonl").read_text(encoding="utf-8") == ""
        why, who, when = read(tmp_path, "_failures")
        assert "told to answer 400" in why["failure_reason"] and why["_ng_failure_class"] == "agent_request_failed"
        assert "told to answer 500" in who["failure_reason"]
        assert when["_ng_failure_class"] == "verifier_error" and "too long to score" in when["failure_reason"]
        assert text(when) == "word " * 200
        assert [len([r for r in policy.requests if r["messages"][0]["content"] == p]) for p in PROMPTS] == [1, 2, 1]
        policy.replies.clear()
        assert collect(rows, *reward, "--resume") == 0
        assert len(read(tmp_path)) == 3 and read(tmp_path, "_failures") == []

    @pytest.mark.parametrize("status", [401, 404])
    def test_a_wrong_setting_ends_the_run(
        self,
        status: int,
        collect: Callable[..., int],
        rows: Path,
        policy: FakePolicy,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        policy.failures.update({prompt: [status] for prompt in PROMPTS})
        assert collect(rows, "--concurrency", "1") == 2
        assert len(policy.requests) == 1
        assert f"told to answer {status}" in capsys.readouterr().err

    def test_a_certificate_is_trusted_where_the_environment_says_so(
        self, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -keyout k.pem -out c.pem"
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run(["openssl", *words.split(), *subject], cwd=tmp_path, check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "c.pem", tmp_path / "k.pem")
        reply = {"choices": [{"message": {"role": "assistant", "content": "So."}, "finish_reason": "stop"}]}
        with Loopback(lambda asked: (200, reply), tls=context) as policy:
            common = ["rollouts", "--model-url", policy.url, "--model", "m", "--input", str(rows), "--max-retries", "0"]
            common += ["--output", str(tmp_path / "out" / "rollouts.jsonl")]
            for more in ([], ["--rewards-url", policy.url]):
                assert main([*common, *more]) == 2
                said = capsys.readouterr().err
                assert "certificate" in said and "SSL_CERT_FILE" in said
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "c.pem"))
            assert main(common) == 0
        assert [text(row) for row in read(tmp_path)] == ["So."] * 3

    def test_nobody_is_there(self, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        output = str(tmp_path / "out" / "rollouts.jsonl")
        common = ["--model-url", "http://127.0.0.1:9", "--model", "m", "--input", str(rows), "--max-retries", "9"]
        assert main(["rollouts", *common, "--output", output]) == 2
        said = capsys.readouterr().err
        assert "the server cannot be reached" in said and "http://127.0.0.1:9/v1" in said
        assert not (tmp_path / "out" / "rollouts_failures.jsonl").exists()


class TestResume:
    def test_a_cut_file_goes_on(
        self, collect: Callable[..., int], rows: Path, tmp_path: Path, policy: FakePolicy
    ) -> None:
        assert collect(rows, "--num-repeats", "2", "--concurrency", "1") == 0
        output = tmp_path / "out" / "rollouts.jsonl"
        lines = output.read_bytes().splitlines(keepends=True)
        output.write_bytes(b"".join(lines[:3]) + lines[3][:20])
        policy.requests.clear()
        assert collect(rows, "--num-repeats", "2", "--resume") == 0
        assert len(policy.requests) == 3
        assert output.read_bytes().startswith(b"".join(lines[:3]))
        assert [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in read(tmp_path)] == [
            (task, repeat) for task in range(3) for repeat in range(2)
        ]

    def test_rollouts_are_not_overwritten(
        self, collect: Callable[..., int], rows: Path, policy: FakePolicy, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert collect(rows) == 0
        assert collect(rows) == 2
        capsys.readouterr()
        assert collect(rows, "--reward-model", "no/such/model") == 2  # and that before a model is loaded
        assert "there are rollouts already" in capsys.readouterr().err
        assert len(policy.requests) == 3

    def test_other_settings_do_not_mix(self, collect: Callable[..., int], rows: Path, policy: FakePolicy) -> None:
        assert collect(rows) == 0
        assert collect(rows, "--resume", "--temperature", "0.5") == 2
        assert len(policy.requests) == 3


def test_a_row_that_cannot_be_asked_is_told_before_the_first_request(
    collect: Callable[..., int],
    write_rows: Callable[..., Path],
    policy: FakePolicy,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert collect(write_rows("rows.jsonl", [{"prompt": "Why?"}, {"question": "Why?"}]), "--concurrency", "1") == 2
    assert "the row has no prompt" in capsys.readouterr().err and policy.requests == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--output", "rollouts.json"),
        ("--model-url", "localhost:8001"),
        ("--shaping", "{normalize_rewards: true}"),
        ("--rewards-model", "rm"),
        ("--reward-model", "a", "b"),
        ("--reward-model", "a", "--shaping", "{normalize_rewards: true, running: true}"),
    ],
)
def test_options_that_do_not_fit(arguments: tuple[str, ...], collect: Callable[..., int], rows: Path) -> None:
    assert collect(rows, *arguments) == 2
