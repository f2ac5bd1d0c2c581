"""`treeward rollouts`: against a policy on loopback; what is asked, what is written, what survives a kill."""

from __future__ import annotations

import contextlib
import json
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_policy import FakePolicy
from loopback import Loopback, serving_on_loopback

from treeward.cli.main import main
from treeward.config.server import ServerConfig
from treeward.scoring.scorer import Scorer
from treeward.serving.models import ServedModel
from treeward.serving.run import make_service

PROMPTS = ["Why?", "Who?", "When?"]


class Collector:
    """`treeward rollouts` on `policy`, of a row for each of `PROMPTS`, into `out/rollouts.jsonl` of a folder."""

    def __init__(self, policy: FakePolicy, folder: Path) -> None:
        self.policy, self.output, self.rows = policy, folder / "out" / "rollouts.jsonl", folder / "rows.jsonl"
        self.write([{"prompt": prompt, "kept": [prompt]} for prompt in PROMPTS])

    def write(self, rows: list[dict[str, Any]]) -> None:
        self.rows.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def __call__(self, *more: str, url: str | None = None) -> int:
        common = ["--model-url", url or self.policy.url, "--model", "policy", "--input", str(self.rows)]
        return main(["rollouts", *common, "--output", str(self.output), *more])

    def read(self, what: str = "") -> list[dict[str, Any]]:
        file = self.output.with_name(f"rollouts{what}.jsonl")
        found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return sorted(found, key=lambda row: (row["_ng_task_index"], row.get("_ng_rollout_index", 0)))


@pytest.fixture
def collect(tmp_path: Path) -> Iterator[Collector]:
    with FakePolicy() as policy:
        yield Collector(policy, tmp_path)


def text(row: dict[str, Any]) -> str:
    found: str = row["response"]["output"][-1]["content"][0]["text"]
    return found


@pytest.mark.parametrize(("api", "served"), [("chat", False), ("responses", True)])
def test_rewards_are_scores(api: str, served: bool, collect: Collector, model_folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        source = ["--reward-model", str(model_folder), "--device", "cpu"]
        if served:
            config = ServerConfig.model_validate({"models": [{"model": str(model_folder), "device": "cpu"}]})
            source = ["--rewards-url", stack.enter_context(serving_on_loopback(make_service(config)))]
        assert collect(*source, "--num-repeats", "2", "--api", api) == 0
    rollouts = collect.read()
    pairs = [(task, repeat) for task in range(3) for repeat in range(2)]
    assert [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in rollouts] == pairs
    scorer = Scorer.load(model_folder, device="cpu")
    for row in rollouts:
        prompt = PROMPTS[row["_ng_task_index"]]
        assert row["prompt"] == prompt and row["kept"] == [prompt] and text(row).endswith(f"to {prompt}.")
        conversation = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text(row)}]
        assert row["reward"] == pytest.approx(scorer.score([conversation])[0].score, abs=1e-5)
    assert len({text(row) for row in rollouts}) == 6 and collect.read("_failures") == []
    metrics = json.loads(collect.output.with_name("rollouts_aggregate_metrics.json").read_text(encoding="utf-8"))
    rewards = [row["reward"] for row in rollouts]
    assert metrics["agent_metrics"]["mean/reward"] == pytest.approx(sum(rewards) / 6)
    assert metrics["agent_metrics"]["mean/total_tokens"] == 17
    profiles = collect.read("_reward_profiles")
    assert [profile["rewards"] for profile in profiles] == [rewards[0:2], rewards[2:4], rewards[4:6]]
    assert [profile["input"][0]["content"] for profile in profiles] == PROMPTS


def test_all_forms_of_rows(collect: Collector) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "find", "arguments": '{"q": 1}'}
    params = {
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            call,
            {"type": "function_call_output", "call_id": "a", "output": "one"},
            {"role": "user", "content": "Why?"},
        ],
        "tools": [{"type": "function", "name": "find", "parameters": {}}],
        "temperature": 0.5,
        "max_output_tokens": 7,
        "metadata": None,
    }
    collect.write(
        [
            {"responses_create_params": params},
            {"responses_create_params": {"input": "Who?", "instructions": "Be kind."}},
            {"messages": [{"role": "system", "content": "Be sure."}, {"role": "user", "content": "When?"}]},
        ]
    )
    assert collect("--temperature", "0.9", "--concurrency", "1") == 0
    first, second, third = collect.policy.requests
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
    assert "reward" not in collect.read()[0]


def test_calls_thoughts_and_refusals(collect: Collector, model_folder: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    collect.policy.replies = {
        "Why?": {"content": "So.", "reasoning_content": "Hm."},
        "Who?": {"content": None, "tool_calls": [call]},
        "When?": {"content": None, "refusal": "No."},
    }
    assert collect("--reward-model", str(model_folder), "--device", "cpu") == 0
    why, who, when = collect.read()
    assert [item["type"] for item in why["response"]["output"]] == ["reasoning", "message"]
    assert who["response"]["output"] == [{"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"}]
    scorer = Scorer.load(model_folder, device="cpu")
    for row, prompt, answer in ((why, "Why?", "So."), (when, "When?", "No.")):
        conversation = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        assert row["reward"] == pytest.approx(scorer.score([conversation])[0].score, abs=1e-5)


def test_what_does_not_pass_is_in_the_failures_and_tried_on_resume(collect: Collector, model_folder: Path) -> None:
    policy = collect.policy
    policy.failures |= {"Why?": [400], "Who?": [500, 500]}
    policy.replies["When?"] = "word " * 200  # more than the model's 96 tokens
    reward = ("--reward-model", str(model_folder), "--device", "cpu")
    assert collect(*reward, "--max-retries", "1") == 1
    assert collect.read() == []
    why, who, when = collect.read("_failures")
    assert "told to answer 400" in why["failure_reason"] and why["_ng_failure_class"] == "agent_request_failed"
    assert "told to answer 500" in who["failure_reason"]
    assert when["_ng_failure_class"] == "verifier_error" and "too long to score" in when["failure_reason"]
    assert text(when) == "word " * 200
    assert [len([r for r in policy.requests if r["messages"][0]["content"] == p]) for p in PROMPTS] == [1, 2, 1]
    policy.replies.clear()
    assert collect(*reward, "--resume") == 0
    assert len(collect.read()) == 3 and collect.read("_failures") == []


@pytest.mark.slow
def test_a_slow_reward_model_is_waited_for(
    collect: Collector, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = ServedModel.score

    def slowly(self: ServedModel, items: Any) -> Any:
        time.sleep(1.3)
        return score(self, items)

    monkeypatch.setattr(ServedModel, "score", slowly)
    assert collect("--reward-model", str(model_folder), "--device", "cpu", "--timeout", "1") == 0
    assert all("reward" in row for row in collect.read())


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_setting_ends_the_run(status: int, collect: Collector, capsys: pytest.CaptureFixture[str]) -> None:
    collect.policy.failures.update({prompt: [status] for prompt in PROMPTS})
    assert collect("--concurrency", "1") == 2
    assert len(collect.policy.requests) == 1 and f"told to answer {status}" in capsys.readouterr().err


def test_nobody_is_there(collect: Collector, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect("--max-retries", "9", url="http://127.0.0.1:9") == 2
    said = capsys.readouterr().err
    assert "the server cannot be reached" in said and "http://127.0.0.1:9/v1" in said
    assert not collect.output.with_name("rollouts_failures.jsonl").exists()


def test_a_certificate_is_trusted_where_the_environment_says_so(
    collect: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -keyout k.pem -out c.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *words.split(), *subject], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "c.pem", tmp_path / "k.pem")
    reply = {"choices": [{"message": {"role": "assistant", "content": "So."}, "finish_reason": "stop"}]}
    with Loopback(lambda asked: (200, reply), tls=context) as policy:
        for more in ([], ["--rewards-url", policy.url]):
            assert collect("--max-retries", "0", *more, url=policy.url) == 2
            said = capsys.readouterr().err
            assert "certificate" in said and "SSL_CERT_FILE" in said
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "c.pem"))
        assert collect(url=policy.url) == 0
    assert [text(row) for row in collect.read()] == ["So."] * 3


def test_a_cut_file_goes_on_and_is_not_overwritten(collect: Collector, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect("--num-repeats", "2", "--concurrency", "1") == 0
    lines = collect.output.read_bytes().splitlines(keepends=True)
    collect.output.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    collect.policy.requests.clear()
    assert collect("--num-repeats", "2", "--resume", "--temperature", "0.5") == 2, "other settings do not mix"
    assert collect("--num-repeats", "2", "--resume") == 0
    assert len(collect.policy.requests) == 3 and len(collect.read()) == 6
    assert collect.output.read_bytes().startswith(b"".join(lines[:3]))
    capsys.readouterr()
    assert collect("--reward-model", "no/such/model") == 2  # and that before a model is loaded
    assert "there are rollouts already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row",
    [{"question": "Why?"}, {"responses_create_params": {"input": "Why?", "previous_response_id": "of Responses only"}}],
)
def test_a_row_that_cannot_be_asked_is_told_before_the_first_request(collect: Collector, row: Any) -> None:
    collect.write([{"prompt": "Why?"}, row])
    assert collect("--concurrency", "1") == 2 and collect.policy.requests == []


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
def test_options_that_do_not_fit(arguments: tuple[str, ...], collect: Callable[..., int]) -> None:
    assert collect(*arguments) == 2
