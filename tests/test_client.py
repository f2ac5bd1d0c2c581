"""The client of a reward server, against servers on loopback that answer, refuse, drop, drip and
lie.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import messages
import pytest
from loopback import Asked, Loopback

from treeward.client.rewards import RewardClient
from treeward.errors import ConfigError, DataError, TreewardError
from treeward.http import RewardServerError
from treeward.scoring.score import Score


def chat(number: int) -> list[dict[str, Any]]:
    return messages.chat("How many?", str(number))


def row(index: int, score: float | None, **more: Any) -> dict[str, Any]:
    error = None if score is not None else "too long"
    return {
        "index": index,
        "score": score,
        "reward": score,
        "num_tokens": 7,
        "truncated": False,
        "error": error,
    } | more


def scored(asked: Asked) -> Any:
    """A score is the number that the completion says, a reward twice that."""
    sent = asked.json
    ends = [one[-1]["content"] for one in sent["conversations"]]
    rows = []
    for i, end in enumerate(ends):
        factor = 2 if sent["shaped"] else 1
        rows.append(row(i, float(end), reward=factor * float(end)))
    return 200, {"data": rows, "model": "m"}


@pytest.fixture
def serve() -> Iterator[Callable[..., Loopback]]:
    """A function that starts a server which gives these answers in turn, the last one again and
    again.
    """
    servers: list[Loopback] = []

    def start(*answers: Any) -> Loopback:
        left = list(answers)
        lock = threading.Lock()

        def answer(asked: Asked) -> Any:
            with lock:
                one = left.pop(0) if len(left) > 1 else left[0]
            return one(asked) if callable(one) else one

        servers.append(Loopback(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.__exit__()


def test_what_is_sent_and_read(serve: Callable[..., Loopback]) -> None:
    server = serve(
        (
            200,
            {
                "data": [
                    row(0, 1.5, heads=[1.0, 0.5], members=[2.0]),
                    row(1, 2.5, truncated=True, steps=[0.5]),
                ],
            },
        ),
        scored,
    )
    want = [
        Score(1.5, 7, heads=(1.0, 0.5), members=(2.0,)),
        Score(2.5, 7, truncated=True, steps=(0.5,)),
    ]
    with RewardClient(server.url + "/", model="rm", token="secret", timeout_seconds=50) as client:
        assert client.score([chat(1), chat(2)]) == want
        assert [reward.value for reward in client.rewards([chat(3), chat(4)])] == [6.0, 8.0]
        assert client.rewards([]) == client.score([]) == []
    first, second = server.requests
    assert first.path == "/v1/rewards"
    assert first.headers["authorization"] == "Bearer secret"
    sent = {"model": "rm", "on_error": "mask", "shaped": False}
    assert first.json == sent | {"conversations": [chat(1), chat(2)]}
    assert second.json["shaped"] is True


def test_long_conversations_are_sent_in_bodies_that_a_server_takes(
    serve: Callable[..., Loopback],
) -> None:
    server = serve(scored)
    context = [{"role": "user", "content": "x" * 3_000_000}]
    scores = RewardClient(server.url).score_completions(context, [str(i) for i in range(5)])
    assert [score.score for score in scores] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert sorted(len(request.json["conversations"]) for request in server.requests) == [1, 2, 2]


def test_it_asks_again_where_that_may_help(serve: Callable[..., Loopback]) -> None:
    busy = 429, {"error": {"message": "many wait", "code": "queue_full"}}, {"retry-after": "0"}
    server = serve(busy, (503, b"<html>restarting</html>"), None, scored)
    assert RewardClient(server.url, timeout_seconds=60).score([chat(4)])[0].score == 4.0
    assert len(server.requests) == 4


@pytest.mark.parametrize("max_retries", [0, 2])
def test_only_attempts_that_come_are_announced(
    max_retries: int, serve: Callable[..., Loopback], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="treeward.http")
    server = serve((503, b"restarting", {"retry-after": "0"}))
    with pytest.raises(RewardServerError, match="503"):
        RewardClient(server.url, max_retries=max_retries).score([chat(4)])
    announced = [record.getMessage() for record in caplog.records if "comes after" in record.msg]
    assert len(announced) == max_retries == len(server.requests) - 1


@pytest.mark.parametrize("status", [401, 413, 422, 500])
def test_it_does_not_ask_again_for_what_is_wrong(
    status: int,
    serve: Callable[..., Loopback],
) -> None:
    server = serve((status, {"error": {"message": "no", "code": "why"}}))
    with pytest.raises(RewardServerError) as caught:
        RewardClient(server.url).score([chat(1)])
    error = caught.value
    assert (error.status, error.code) == (status, "why")
    assert error.got == "no"
    assert f"HTTP {status}" in str(error)
    assert isinstance(error, TreewardError)
    assert len(server.requests) == 1


def test_a_server_that_does_not_answer_in_time(serve: Callable[..., Loopback]) -> None:
    let_go = threading.Event()
    server = serve(lambda asked: let_go.wait(600) and None)
    with pytest.raises(RewardServerError, match="has not responded in time") as caught:
        RewardClient(server.url, timeout_seconds=0.4).score([chat(1)])
    assert caught.value.status is None
    assert len(server.requests) == 1
    let_go.set()


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>hello</html>",
        b"[" * 100_000,
        {},
        {"data": [row(0, math.nan)]},
        {"data": [row(0, None, error=None)]},
        {"data": [row(0, "1.0")]},
    ],
)
def test_a_response_without_scores(answer: Any, serve: Callable[..., Loopback]) -> None:
    server = serve((200, answer))
    with pytest.raises(RewardServerError, match="response") as caught:
        RewardClient(server.url).score([chat(1)], on_error="mask")
    assert caught.value.status == 200
    assert len(server.requests) == 1


def test_a_conversation_without_a_score(serve: Callable[..., Loopback]) -> None:
    server = serve((200, {"data": [row(0, 1.0), row(1, None)]}))
    client = RewardClient(server.url)
    with pytest.raises(RewardServerError, match="b.jsonl:2 has no score\n  got:   too long"):
        client.score([chat(1), chat(2)], where=["b.jsonl:1", "b.jsonl:2"])
    assert client.score([chat(1), chat(2)], on_error="mask")[1] == Score(None, 7, error="too long")
    assert [reward.value for reward in client.rewards([chat(1), chat(2)], on_error="mask")] == [
        1.0,
        None,
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        "text",
        [{"content": "no role"}],
        [{"role": "assistant", "content": "\ud800"}],
        [{"role": "assistant", "content": "x", "extra": object()}],
    ],
)
def test_a_malformed_conversation_is_not_sent(wrong: Any, serve: Callable[..., Loopback]) -> None:
    server = serve(scored)
    client = RewardClient(server.url)
    with pytest.raises(DataError, match="second"):
        client.score([chat(1), wrong], where=["first", "second"])
    assert not server.requests
    scores = client.score([chat(1), wrong, chat(2)], on_error="mask")
    assert [score.score for score in scores] == [1.0, None, 2.0]
    assert scores[1].error
    assert server.requests[0].json["conversations"] == [chat(1), chat(2)]


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_seconds": 0},
        {"timeout_seconds": float("inf")},
        {"timeout_seconds": float("nan")},
        {"max_concurrency": 0},
        {"max_conversations": 0},
        {"max_retries": -1},
    ],
)
def test_impossible_arguments_are_refused_at_once(options: dict[str, Any]) -> None:
    [field] = options
    with pytest.raises(ConfigError, match=field):
        RewardClient("http://localhost:1", **options)


def test_it_waits_as_long_as_the_server_asks(serve: Callable[..., Loopback]) -> None:
    headers = {"retry-after": "0.6"}  # longer than the client's own first pause
    busy = 429, {"error": {"message": "many wait", "code": "queue_full"}}, headers
    times: list[float] = []

    def answer(asked: Asked) -> Any:
        times.append(time.monotonic())
        return busy if len(times) == 1 else scored(asked)

    assert RewardClient(serve(answer).url, timeout_seconds=60).score([chat(4)])[0].score == 4.0
    assert times[1] - times[0] > 0.5  # a lower bound alone: it may take longer
