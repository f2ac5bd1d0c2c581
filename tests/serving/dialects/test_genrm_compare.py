"""`/compare` and the cohort form of `/verify`, over HTTP, with a judge at an address of loopback and
one in this process."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_judge import FakeJudge, places
from loopback import serving_on_loopback, wait_until
from templates import PROMPTING_CHATML

from treeward.config.load import load_section
from treeward.config.served_judge import ServedJudgeConfig
from treeward.config.server import ServerConfig
from treeward.errors import ConfigError
from treeward.scoring.judge_local import LocalJudge
from treeward.scoring.verdicts import Verdict, make_question
from treeward.serving.service import Service

HISTORY = [{"role": "user", "content": "2 + 2?"}]
Serve = Callable[..., Service]


def response(text: str, reasoning: str | None = None) -> dict[str, Any]:
    """As a policy's server writes it."""
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "m", "type": "message", "role": "assistant", "content": [part]}
    output: list[dict[str, Any]] = [message | {"status": "completed"}]
    if reasoning is not None:
        summary = [{"type": "summary_text", "text": reasoning}]
        output.insert(0, {"id": "r", "type": "reasoning", "summary": summary})
    return {"id": f"resp-{text}", "object": "response", "output": output}


def scores(score_1: float, score_2: float, ranking: float) -> str:
    verdict = {"score_1": score_1, "score_2": score_2, "ranking": ranking}
    return f"<think>Hm.</think> ```json\n{json.dumps(verdict)}\n```"


def by_quality(**qualities: int) -> Callable[[dict[str, Any]], str]:
    """A judge that knows how good each text is."""

    def answer(request: dict[str, Any]) -> str:
        first, second = [qualities[text] for text in places(request)]
        return scores(first, second, 3 if first >= second else 4)

    return answer


@pytest.fixture
def remote() -> Iterator[FakeJudge]:
    judge = FakeJudge()
    with judge.server:
        yield judge


@pytest.fixture
def judged(remote: FakeJudge) -> Iterator[Serve]:
    """A function that makes a service with a judge; keywords are keys of its section."""
    services = []

    def make(**keys: Any) -> Service:
        section = {
            "base_url": remote.url,
            "model": "genrm",
            "api_key_env": None,
            "max_retries": 0,
            "genrm_parse_retry_sleep_s": 0,
            **keys,
        }
        if section["base_url"] is None:
            del section["api_key_env"]
        services.append(
            Service.load(load_section(ServerConfig, {"judge": section}, where="server")),
        )
        return services[-1]

    yield make
    for service in services:
        service.close()


def compare(client: Any, *texts: str, **keys: Any) -> Any:
    body = {
        "conversation_history": HISTORY,
        "response_objs": [response(text) for text in texts],
        **keys,
    }
    return client.post("/compare", json=body)


def rollout(text: str, number: int | None, **keys: Any) -> dict[str, Any]:
    body = {
        "responses_create_params": {"input": HISTORY, "tools": [], "parallel_tool_calls": False},
        "response": response(text),
        "agent_ref": {"name": "genrm_simple_agent"},
        "dataset": "hs3",
        "_ng_task_index": 0,
        **keys,
    }
    if number is not None:
        body["_ng_rollout_index"] = number
    return body


def verify(url: str, bodies: Sequence[dict[str, Any]]) -> list[httpx.Response]:
    """The response to each of several requests that wait for each other."""
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(
            threads.map(lambda body: httpx.post(f"{url}/verify", json=body, timeout=600), bodies),
        )


@contextmanager
def waiting(url: str, body: dict[str, Any]) -> Iterator[None]:
    """A rollout waits at the server, until the context ends and its client leaves."""
    address = httpx.URL(url)
    content = json.dumps(body).encode()
    head = f"POST /verify HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\n\r\n"
    with socket.create_connection((address.host, address.port)) as connection:
        connection.sendall(head.encode() + content)
        # The server reads connections in the order in which they come.
        assert httpx.get(f"{url}/health").status_code == 200
        yield


def test_compare_gives_the_rewards_of_the_worked_example(
    remote: FakeJudge, judged: Serve, asgi_client: Callable[..., Any]
) -> None:
    texts = ["a" * 100, "b" * 300, "c" * 200]
    by_pair = {"ab": scores(4, 3, 2), "bc": scores(3, 3, 5), "ca": scores(2, 4, 5)}
    remote.answer = lambda request: by_pair["".join(text[0] for text in places(request))]
    got = compare(asgi_client(judged()), *texts).json()
    assert got["rewards"] == pytest.approx([4, 2.25, 3.25], abs=1e-6)
    keys = ("response_i", "response_j", "judge_idx", "score_1", "score_2", "ranking")
    assert [[result[key] for key in keys] for result in got["comparison_results"]] == [
        [0, 1, 0, 4, 3, 2],
        [1, 2, 0, 3, 3, 5],
        [2, 0, 0, 2, 4, 5],
    ]
    assert got["metrics"]["tiebreak_usage_rate"] == pytest.approx(1 / 3)
    service = judged(group_answer_length_penalty_coeff=0.35)
    got = compare(asgi_client(service), *texts).json()
    assert got["rewards"] == pytest.approx([4.175, 2.075, 3.25], abs=1e-6)


def test_every_pair_is_judged_as_often_as_asked(
    remote: FakeJudge, judged: Serve, asgi_client: Callable[..., Any]
) -> None:
    remote.answer = by_quality(a=4, b=2, c=3)
    service = judged(comparison_strategy="all_pairs", num_judges_per_comparison=2, temperature=0.6)
    got = compare(asgi_client(service), "a", "b", "c").json()
    assert got["rewards"] == [4, 2, 3]
    results = [
        (r["response_i"], r["response_j"], r["judge_idx"]) for r in got["comparison_results"]
    ]
    assert results == [(i, j, judge) for judge in (0, 1) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert len(remote.requests) == 6


def test_a_genrm_is_shown_what_gym_shows_it(
    remote: FakeJudge, judged: Serve, asgi_client: Callable[..., Any]
) -> None:
    remote.answer = lambda request: scores(3, 3, 3)
    client = asgi_client(judged(genrm_roles=True, use_principle=True))
    history = [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "2 + "},
                {"type": "input_text", "text": "2?"},
            ],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
        {"role": "user", "content": "3 + 3?"},
    ]
    responses = [response("6", reasoning="hidden"), response(" "), {"output": []}]
    body = {"conversation_history": history, "response_objs": responses, "principle": "Be brief."}
    assert client.post("/compare", json=body).status_code == 200
    shown = sorted([request["messages"] for request in remote.requests], key=str)
    beginning = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3 + 3?"},
        {"role": "principle", "content": "Be brief."},
    ]
    roles = [("6", "None"), ("None", "6"), ("None", "None")]
    assert shown == [
        [
            *beginning,
            {"role": "response_1", "content": first},
            {"role": "response_2", "content": second},
        ]
        for first, second in roles
    ]
    without = asgi_client(
        judged(genrm_roles=True, use_principle=True, supports_principle_role=False)
    )
    assert compare(without, "a", "b").status_code == 200
    roles_shown = [message["role"] for message in remote.requests[-1]["messages"]]
    assert roles_shown == ["user", "response_1", "response_2"]


def test_any_other_judge_is_asked_the_question_with_the_principle(
    remote: FakeJudge, judged: Serve, asgi_client: Callable[..., Any]
) -> None:
    remote.answer = by_quality(a=4, b=2)
    client = asgi_client(judged(use_principle=True, default_principle="Rhyme."))
    assert compare(client, "a", "b", principle="Be brief.").json()["rewards"] == [4, 2]
    system, question = remote.requests[0]["messages"]
    assert "Be brief." in system["content"] and "user: 2 + 2?" in question["content"]
    compare(client, "a", "b")
    assert "Rhyme." in remote.requests[-1]["messages"][0]["content"]
    compare(asgi_client(judged()), "a", "b", principle="Be brief.")
    assert "Be brief." not in str(remote.requests[-1])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_cohort_is_rewarded_by_number_however_it_arrives(
    order: Sequence[int], remote: FakeJudge, judged: Serve, serve_on_loopback: Callable[..., str]
) -> None:
    remote.answer = by_quality(a=5, b=1, c=3)
    service = judged(num_rollouts_per_prompt=3, comparison_strategy="all_pairs")
    bodies = [rollout(text, number) for number, text in enumerate("abc")]
    got = verify(serve_on_loopback(service), [bodies[number] for number in order])
    assert [answer.json()["reward"] for answer in got] == [[5, 1, 3][number] for number in order]
    for number, answer in zip(order, got, strict=True):
        assert answer.json() == {
            "responses_create_params": bodies[number]["responses_create_params"],
            "response": bodies[number]["response"],
            "_ng_rollout_index": number,
            "reward": answer.json()["reward"],
        }
    # The one with the lower number stands first, whoever was faster.
    pairs = sorted(tuple(places(request)) for request in remote.requests)
    assert pairs == [("a", "b"), ("a", "c"), ("b", "c")]


def test_rollouts_with_other_instructions_are_of_another_prompt(
    remote: FakeJudge, judged: Serve, serve_on_loopback: Callable[..., str]
) -> None:
    remote.answer = by_quality(a=5, b=1, c=4, d=2)
    bodies = []
    for text, instructions in zip("acbd", ["Be brief.", "Rhyme."] * 2, strict=True):
        body = rollout(text, None, _ng_task_index=None)
        body["responses_create_params"]["instructions"] = instructions
        bodies.append(body)
    got = verify(serve_on_loopback(judged(num_rollouts_per_prompt=2)), bodies)
    assert [answer.json().get("reward") for answer in got] == [5, 4, 1, 2]
    for request in remote.requests:
        shown = "".join(sorted(places(request)))
        expected = {"ab": "Be brief.", "cd": "Rhyme."}[shown]
        assert f"system: {expected}" in request["messages"][1]["content"]


@pytest.mark.parametrize("output", [{}, {"output": "4"}, {"choices": [{"message": "4"}]}])
def test_a_body_of_another_api_is_no_empty_completion(
    output: dict[str, Any], judged: Serve, asgi_client: Callable[..., Any]
) -> None:
    body = {"conversation_history": HISTORY, "response_objs": [response("a"), output]}
    refused = asgi_client(judged()).post("/compare", json=body)
    assert refused.status_code == 422
    assert refused.json()["error"]["param"] == "response_objs[1].output"


@pytest.mark.parametrize(("strategy", "most"), [("circular", 10), ("all_pairs", 4)])
def test_the_comparisons_of_a_request_are_bounded(
    strategy: str,
    most: int,
    judge_section: dict[str, Any],
    asgi_client: Callable[..., Any],
) -> None:
    section = {**judge_section, "comparison_strategy": strategy}
    config = load_section(ServerConfig, {"judge": section, "max_queued": 10}, where="server")
    service = Service.load(config)
    client = asgi_client(service)
    assert compare(client, *map(str, range(most))).status_code == 200
    refused = compare(client, *map(str, range(most + 2)))
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_many_comparisons")
    service.close()


def test_a_client_that_goes_away_frees_its_place(
    remote: FakeJudge, judged: Serve, serve_on_loopback: Callable[..., str]
) -> None:
    remote.answer = by_quality(a=5, b=1)
    url = serve_on_loopback(judged(num_rollouts_per_prompt=2))

    with waiting(url, rollout("gone", 0)):
        pass
    wait_until(lambda: 'code="client_disconnected"}' in httpx.get(f"{url}/metrics").text)
    got = verify(url, [rollout("a", 0), rollout("b", 1)])
    assert [answer.json().get("reward") for answer in got] == [5, 1]


def test_a_cohort_that_stays_incomplete_gets_an_error(
    judged: Serve, asgi_client: Callable[..., Any]
) -> None:
    client = asgi_client(judged(num_rollouts_per_prompt=2, cohort_collection_timeout_s=0.05))
    refused = client.post("/verify", json=rollout("a", 0))
    assert (refused.status_code, refused.json()["error"]["code"]) == (504, "incomplete_cohort")
    assert "1 of 2 rollouts" in refused.json()["error"]["message"]


def test_a_server_that_ends_answers_the_rollouts_whose_others_cannot_come(judged: Serve) -> None:
    service = judged(num_rollouts_per_prompt=2)
    judge = service.judge
    assert judge is not None
    with ThreadPoolExecutor(1) as threads:
        with serving_on_loopback(service) as url:
            body = rollout("a", 0)
            sent = threads.submit(httpx.post, f"{url}/verify", json=body, timeout=600)
            wait_until(lambda: judge.cohorts.num_waiting == 1)
        refused = sent.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")


def test_judging_that_outlasts_the_shutdown_may_be_asked_again(
    remote: FakeJudge, judged: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treeward.serving.run.SHUTDOWN_SECONDS", 0.2)
    gate = threading.Event()

    def answer(request: dict[str, Any]) -> str:
        gate.wait(60)
        return "{}"

    remote.answer = answer
    try:
        with ThreadPoolExecutor(1) as threads:
            with serving_on_loopback(judged()) as url:
                body = {"conversation_history": HISTORY, "response_objs": list(map(response, "ab"))}
                sent = threads.submit(httpx.post, f"{url}/compare", json=body, timeout=600)
                wait_until(lambda: len(remote.requests) > 0)
            refused = sent.result()
    finally:
        gate.set()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert "retry-after" in refused.headers


def test_rollouts_that_wait_are_bounded(
    judge_section: dict[str, Any], serve_on_loopback: Callable[..., str]
) -> None:
    section = {**judge_section, "num_rollouts_per_prompt": 3}
    config = load_section(ServerConfig, {"judge": section, "max_queued": 1}, where="server")
    service = Service.load(config)
    url = serve_on_loopback(service)
    with waiting(url, rollout("a", 0)):
        refused = httpx.post(f"{url}/verify", json=rollout("b", 1), timeout=600)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    service.close()


@pytest.mark.parametrize("answer", [(503, b"down"), "I like both.", (401, b"who?")])
def test_a_judge_without_verdicts_is_an_error_and_never_a_reward(
    answer: Any,
    remote: FakeJudge,
    judged: Serve,
    asgi_client: Callable[..., Any],
    serve_on_loopback: Callable[..., str],
) -> None:
    remote.answer = lambda request: answer
    keys = {"num_rollouts_per_prompt": 2, "genrm_parse_retries": 1}
    service = judged(**keys)
    refused = compare(asgi_client(service), "a", "b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "judge_failed")
    if answer == "I like both.":
        # Both questions, and both once more.
        assert len(remote.requests) == 4
        assert "no scores and ranking in JSON" in refused.json()["error"]["message"]
    bodies = [rollout("a", 0), rollout("b", 1)]
    got = verify(serve_on_loopback(service), bodies)
    assert [one.status_code for one in got] == [503, 503]
    assert all("reward" not in one.json() for one in got)
    masked = verify(serve_on_loopback(judged(on_error="mask", **keys)), bodies)
    for one in masked:
        assert one.status_code == 200
        row = one.json()
        assert (row["reward"], row["mask_sample"]) == (0.0, True)
        assert row["_ng_failure_class"] == "judge_failed" and row["response"]


def test_comparisons_that_fail_in_part_leave_the_others(
    remote: FakeJudge, judged: Serve, asgi_client: Callable[..., Any]
) -> None:
    known = by_quality(a=4, b=2, c=3)

    def answer(request: dict[str, Any]) -> Any:
        return "Hm." if places(request) == ["b", "c"] else known(request)

    remote.answer = answer
    client = asgi_client(judged(genrm_parse_retries=0))
    got = compare(client, "a", "b", "c").json()
    assert got["rewards"] == [4, 2, 3]
    assert got["metrics"]["missing_comparisons"] == 1
    missing = got["comparison_results"][1]
    assert missing["score_1"] is None and "no scores" in missing["error"]

    remote.answer = lambda request: "Hm." if "b" in places(request) else known(request)
    refused = compare(client, "a", "b", "c")
    assert refused.status_code == 503 and "completion 1" in refused.json()["error"]["message"]


def test_a_message_without_a_verdict_is_asked_for_again(
    remote: FakeJudge, judged: Serve, asgi_client: Callable[..., Any]
) -> None:
    seen: list[str] = []

    def answer(request: dict[str, Any]) -> str:
        pair = "".join(places(request))
        seen.append(pair)
        return scores(4, 2, 2) if seen.count(pair) == 2 else '{"score_1": 9}'

    remote.answer = answer
    assert compare(asgi_client(judged()), "a", "b").json()["rewards"] == [3, 3]
    assert sorted(seen) == ["ab", "ab", "ba", "ba"]


def test_defaults_count_only_where_they_are_asked_for_and_never_for_a_judge_that_is_down(
    remote: FakeJudge, judged: Serve, asgi_client: Callable[..., Any]
) -> None:
    keys = {"genrm_parse_retries": 0, "default_score": 3.0, "default_ranking": 3.5}
    client = asgi_client(judged(**keys))
    answers = {"ab": "Hm.", "ba": '{"score_1": 5}'}
    remote.answer = lambda request: answers["".join(places(request))]
    # (3, 3, 3.5) for a before b, (5, 3, 3.5) for b before a.
    assert compare(client, "a", "b").json()["rewards"] == [3, 4]
    assert compare(client, "a").json() == {
        "rewards": [3.0],
        "comparison_results": None,
        "metrics": None,
    }
    assert compare(client).json()["rewards"] == []
    assert client.post("/verify", json=rollout("a", 0)).json()["reward"] == 3.0
    remote.answer = lambda request: (500, b"down")
    assert compare(client, "a", "b").status_code == 503

    without = asgi_client(judged())
    for refused in (compare(without, "a"), without.post("/verify", json=rollout("a", 0))):
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "nothing_to_compare")


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"_ng_rollout_index": "0"}, "_ng_rollout_index"),
        ({"_ng_group_attempt": 0.5}, "_ng_group_attempt"),
        ({"_ng_group_id": "g", "_ng_rollout_index": None}, "_ng_rollout_index"),
        ({"principle": 5}, "principle"),
        (
            {
                "responses_create_params": {
                    "input": [{"role": "user", "content": [{"type": "image"}]}]
                }
            },
            "input",
        ),
    ],
)
def test_a_rollout_that_cannot_be_read_is_refused(
    keys: dict[str, Any], field: str, judged: Serve, asgi_client: Callable[..., Any]
) -> None:
    client = asgi_client(judged(num_rollouts_per_prompt=2))
    refused = client.post("/verify", json=rollout("a", 0) | keys)
    assert (refused.status_code, refused.json()["error"]["param"]) == (422, field)


def test_an_error_names_the_field_that_the_client_has_sent(
    judged: Serve, asgi_client: Callable[..., Any]
) -> None:
    body = {"conversation_history": [{"content": "a"}], "response_objs": list(map(response, "ab"))}
    refused = asgi_client(judged()).post("/compare", json=body)
    assert refused.status_code == 422
    error = refused.json()["error"]
    assert error["param"] == "conversation_history"
    assert "conversation_history[0]" in error["message"] and "input" not in error["message"]


def test_a_server_of_a_judge_alone_says_what_it_is(
    judged: Serve, asgi_client: Callable[..., Any], client: Any
) -> None:
    judge_client = asgi_client(judged())
    assert judge_client.get("/health").json() == {"status": "ready", "models": []}
    for route, body in (
        ("/v1/rewards", {"conversations": [[{"role": "user", "content": "a"}]]}),
        ("/classify", {"input": "a"}),
        ("/get_reward", {"query": ["a"]}),
    ):
        refused = judge_client.post(route, json=body)
        assert refused.status_code == 404
        assert "a judge and no reward model" in refused.text
    refused = compare(client, "a", "b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_judge")


def test_a_server_needs_something_to_serve(judge_section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="nothing to serve"):
        load_section(ServerConfig, {"models": []}, where="server")
    with pytest.raises(ConfigError, match="serve the judge by itself"):
        load_section(ServerConfig, {"judge": judge_section, "replicas": 2}, where="server")


def test_a_judge_in_this_process_counts_by_its_probabilities(
    judge_section: dict[str, Any], judged: Serve, asgi_client: Callable[..., Any]
) -> None:
    section = {**judge_section, "base_url": None}
    texts = ["four", "4", "five"]
    got = compare(asgi_client(judged(**section)), *texts).json()
    config = ServedJudgeConfig(**judge_section)
    questions = [
        make_question(config, "user: 2 + 2?", pair) for pair in pairwise([*texts, texts[0]])
    ]
    values = []
    for verdict in LocalJudge(config).ask(questions):
        assert isinstance(verdict, Verdict)
        values.append(verdict.value)
    # A verdict of the probability p for the first place counts as 1 + 4 p and 5 - 4 p.
    expected = []
    for i in range(3):
        expected.append((1 + 4 * values[i] + 5 - 4 * values[i - 1]) / 2)
    assert got["rewards"] == pytest.approx(expected, abs=1e-5)
    assert compare(asgi_client(judged(**section)), "long " * 300, "b").status_code == 422


def test_a_template_that_names_the_roles_is_shown_the_roles(
    judge_section: dict[str, Any],
    judged: Serve,
    asgi_client: Callable[..., Any],
    own_policy_folder: Path,
) -> None:
    template = PROMPTING_CHATML + "{# response_1 response_2 principle #}"
    (own_policy_folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    section = {**judge_section, "base_url": None, "model": str(own_policy_folder)}
    section["verdict"] = "scores"

    def judge(**keys: Any) -> Any:
        return compare(asgi_client(judged(**section, **keys)), "four", "4").json()

    assert judge()["rewards"] == pytest.approx(judge(genrm_roles=True)["rewards"], abs=1e-6)
    # The question has more tokens than the model reads.
    assert judge(genrm_roles=False)["error"]["code"] == "cannot_be_judged"
