"""`RewardClient` and `AsyncRewardClient`: scores and rewards from a server that `treeward serve` runs.

    with RewardClient("http://localhost:8000", timeout_seconds=30) as client:
        client.score([[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]])[0].score
        client.score_completions([{"role": "user", "content": "2 + 2?"}], ["4", "5"])

A call ends within `timeout_seconds`, with a score for each conversation or with an error. Needs neither torch nor the
server's packages.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from treeward.data.preference import check_messages
from treeward.errors import ConfigError, DataError
from treeward.http import Connection, Reply, RewardServerError
from treeward.scoring.score import Conversation, OnError, Score

__all__ = ["AsyncRewardClient", "RewardClient"]

_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")

_BODY_BYTES = 2**23
"""A request with a larger body is split, since servers limit bodies."""


@dataclass(frozen=True, slots=True)
class _Item:
    """A conversation or completion to send. `place`: its index in the caller's list; `name`: for errors."""

    place: int
    name: str
    messages: Conversation
    reference: Any
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the server's reply: the reward, the score behind it, and the reason why either is missing."""

    reward: float | None
    score: Score
    error: str | None = None


class AsyncRewardClient:
    """A client for coroutines; `RewardClient` has the same methods for synchronous code.

    `url`: of the server, as http://host:8000. `token`: the bearer token that the server asks for. `model`: one of its
    models, None for its first. `timeout_seconds`: for a whole call. `max_retries`: for one request. `verify_tls`: as in
    `Connection`. A call with more than `max_conversations` makes several requests, `max_concurrency` at a time.

    Raises `ConfigError` for impossible arguments; methods raise `RewardServerError` for a server that fails.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        model: str | None = None,
        timeout_seconds: float = 120.0,
        max_retries: int = 5,
        verify_tls: bool | str = True,
        max_conversations: int = 256,
        max_concurrency: int = 8,
    ) -> None:
        positive = {
            "timeout_seconds": timeout_seconds,
            "max_conversations": max_conversations,
            "max_concurrency": max_concurrency,
        }
        for name, number in positive.items():
            if not (math.isfinite(number) and number > 0):
                raise ConfigError(f"{name} is not positive", field=name, got=number, need="a positive number")
        self.model, self.timeout_seconds, self.max_conversations = model, timeout_seconds, max_conversations
        self._max_concurrency = max_concurrency
        self._connection = Connection(
            url, token=token, max_retries=max_retries, verify_tls=verify_tls, max_connections=max_concurrency
        )

    async def score(
        self, conversations: Sequence[Conversation], *, where: Sequence[str] | None = None, on_error: OnError = "raise"
    ) -> list[Score]:
        """Scores in order, as `Scorer.score` gives them: raw, even if the model is served with shaping.

        `where` names the conversations in errors. A conversation that cannot be scored raises `RewardServerError`; with
        `on_error="mask"` its score is None, and `Score.error` says why. Raises `DataError` for a malformed one.
        """
        rows = await self._rows(conversations, {"shaped": False}, where, on_error)
        return [row.score for row in rows]

    async def score_completions(
        self, context: Conversation, completions: Sequence[Conversation | str], *, on_error: OnError = "raise"
    ) -> list[Score]:
        """Scores of several completions of one context, which is sent once. A completion is messages, or the text of
        an assistant's message.
        """
        if isinstance(completions, str) or not completions:
            need = 'a list, as ["a completion", "another"]'
            raise DataError("completions is not a list of completions", got=completions, need=need)
        ends = [[{"role": "assistant", "content": one}] if isinstance(one, str) else one for one in completions]
        _num_bytes(check_messages(context, "context", None, may_be_empty=True), "context")
        names = [f"completion {i}" for i in range(len(ends))]
        rows = await self._rows(ends, {"shaped": False, "context": context}, names, on_error)
        return [row.score for row in rows]

    async def rewards(
        self,
        conversations: Sequence[Conversation],
        *,
        reference_answers: Sequence[Any] | None = None,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[float | None]:
        """Rewards in order: the scores after the shaping that the model is served with.

        `reference_answers`: for shaping that compares with them; for each conversation a text, a list, or None. A
        conversation without a reward raises `RewardServerError`; with `on_error="mask"` its reward is None.
        """
        rows = await self._rows(conversations, {"shaped": True}, where, on_error, reference_answers)
        return [row.reward for row in rows]

    async def models(self) -> list[dict[str, Any]]:
        """The models of the server (id, contract, ...); the first is the default."""
        reply = await self._connection.get("/v1/models", until=self._until())
        listed = reply.json.get("data") if isinstance(reply.json, dict) else None
        if not isinstance(listed, list) or not all(isinstance(one, dict) and "id" in one for one in listed):
            raise reply.error("the reply lists no models", field="data", got=listed, need="a list of models")
        return listed

    async def ready(self) -> bool:
        """Whether the server accepts requests now; one attempt. Raises for a reply of another kind of server."""
        try:
            reply = await self._connection.get("/ready", until=self._until(), max_retries=0)
        except RewardServerError as error:
            if error.status in (None, 502, 503):
                return False
            raise
        return isinstance(reply.json, dict) and reply.json.get("status") == "ready"

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def __aenter__(self) -> AsyncRewardClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _until(self) -> float:
        return time.monotonic() + self.timeout_seconds

    async def _rows(
        self,
        conversations: Sequence[Conversation],
        fields: Mapping[str, Any],
        where: Sequence[str] | None,
        on_error: OnError,
        references: Sequence[Any] | None = None,
    ) -> list[_Row]:
        """The server's row for each conversation; a malformed one is not sent. `fields`: of every request."""
        rows: dict[int, _Row] = {}
        items = list(_items(conversations, where, references, on_error, rows))
        until = self._until()
        slots = asyncio.Semaphore(self._max_concurrency)

        async def send(batch: Sequence[_Item]) -> None:
            async with slots:
                reply = await self._connection.post("/v1/rewards", self._body(batch, fields), until=until)
            for item, row in zip(batch, _read(reply, len(batch)), strict=True):
                if on_error == "raise" and (row.reward if fields["shaped"] else row.score.score) is None:
                    raise reply.error(f"{item.name} has no score", got=row.error)
                rows[item.place] = row

        try:
            async with asyncio.TaskGroup() as group:
                for batch in self._batches(items):
                    group.create_task(send(batch))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [rows[i] for i in range(len(conversations))]

    def _batches(self, items: Sequence[_Item]) -> list[list[_Item]]:
        batches: list[list[_Item]] = []
        size = 0
        for item in items:
            if not batches or len(batches[-1]) >= self.max_conversations or size + item.num_bytes > _BODY_BYTES:
                batches.append([])
                size = 0
            batches[-1].append(item)
            size += item.num_bytes
        return batches

    def _body(self, batch: Sequence[_Item], fields: Mapping[str, Any]) -> bytes:
        # Masked, so that the reply says which conversation failed.
        body = {"model": self.model, "on_error": "mask", **fields}
        body["completions" if "context" in fields else "conversations"] = [item.messages for item in batch]
        if any(item.reference is not None for item in batch):
            body["reference_answers"] = [item.reference for item in batch]
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _blocking(
    method: Callable[Concatenate[AsyncRewardClient, _Arguments], Coroutine[Any, Any, _Value]],
) -> Callable[Concatenate[RewardClient, _Arguments], _Value]:
    """The synchronous form of a method of `AsyncRewardClient`."""

    def call(self: RewardClient, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Value:
        return self._run(method(self._client, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


class RewardClient:
    """A client of `treeward serve` for synchronous code; a `ConversationScorer`, so it can stand for a `Scorer`.

    Arguments and methods are those of `AsyncRewardClient`, which runs in a thread. It may be used from several threads,
    and after a fork.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        model: str | None = None,
        timeout_seconds: float = 120.0,
        max_retries: int = 5,
        verify_tls: bool | str = True,
        max_conversations: int = 256,
        max_concurrency: int = 8,
    ) -> None:
        self._client = AsyncRewardClient(
            url,
            token=token,
            model=model,
            timeout_seconds=timeout_seconds,
            max_retries=max_retries,
            verify_tls=verify_tls,
            max_conversations=max_conversations,
            max_concurrency=max_concurrency,
        )
        self._lock = threading.Lock()
        self._thread: tuple[int, BlockingPortal, ExitStack] | None = None

    score = _blocking(AsyncRewardClient.score)
    score_completions = _blocking(AsyncRewardClient.score_completions)
    rewards = _blocking(AsyncRewardClient.rewards)
    models = _blocking(AsyncRewardClient.models)
    ready = _blocking(AsyncRewardClient.ready)

    def close(self) -> None:
        """Close the connections and end the thread; another request starts them again."""
        if self._thread is not None and self._thread[0] == os.getpid():
            self._run(self._client.aclose())
            self._thread[2].close()
        self._thread = None

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, _Value]) -> _Value:
        with self._lock:
            if self._thread is None or self._thread[0] != os.getpid():  # threads do not survive a fork
                stack = ExitStack()
                self._thread = os.getpid(), stack.enter_context(start_blocking_portal()), stack
                weakref.finalize(self, stack.close)
            portal = self._thread[1]
        future: Future[_Value] = portal.start_task_soon(lambda: coroutine)
        try:
            return future.result()
        finally:
            future.cancel()  # after an interrupt


def _items(
    conversations: Sequence[Conversation],
    where: Sequence[str] | None,
    references: Sequence[Any] | None,
    on_error: OnError,
    failed: dict[int, _Row],
) -> Iterator[_Item]:
    """The conversations to send; with `on_error="mask"` malformed ones are put into `failed`."""
    names = where if where is not None else [f"conversation {i}" for i in range(len(conversations))]
    for what, given in (("names", names), ("reference answers", references)):
        if given is not None and len(given) != len(conversations):
            got = f"{len(given)} {what} for {len(conversations)} conversations"
            raise DataError(f"{what} and conversations do not belong together", got=got, need="one for each")
    for i, (conversation, name) in enumerate(zip(conversations, names, strict=True)):
        reference = None if references is None else references[i]
        try:
            messages = check_messages(conversation, "messages", name)
            size = _num_bytes([messages, reference], name)
        except DataError as error:
            if on_error == "raise":
                raise
            why = " ".join(str(error).split())
            failed[i] = _Row(None, Score(None, error=why), why)
        else:
            yield _Item(i, name, messages, reference, size)


def _num_bytes(value: Any, name: str) -> int:
    try:
        return len(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())
    except (ValueError, TypeError) as error:  # NaN, lone surrogates, objects
        need = "text, and finite numbers"
        raise DataError("this cannot be written as JSON", where=name, got=str(error), need=need) from error


def _read(reply: Reply, number: int) -> list[_Row]:
    """The rows of the reply: as many as were sent, each with finite numbers or a reason."""
    data = reply.json.get("data") if isinstance(reply.json, dict) else None
    if not isinstance(data, list) or len(data) != number:
        got = f"{len(data)} rows" if isinstance(data, list) else data
        raise reply.error("the reply cannot be read", field="data", got=got, need=f"{number} rows")
    return [_read_row(reply, row, place) for place, row in enumerate(data)]


def _read_row(reply: Reply, row: Any, place: int) -> _Row:
    try:
        score, reward, error = row["score"], row["reward"], row["error"]
        heads, members = tuple(row.get("heads", ())), tuple(row.get("members", ()))
        numbers = [value for value in (score, reward, *heads, *members) if value is not None]
        if row["index"] != place or not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
            raise ValueError(f"row {place} has another index, or no finite numbers")
        if (score is None or reward is None) and not isinstance(error, str):
            raise ValueError(f"row {place} has no score and no error that says why")
        why = error if score is None else None
        return _Row(reward, Score(score, int(row["num_tokens"]), bool(row["truncated"]), heads, members, why), error)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        need = f"a score, or why there is none: {problem}"
        raise reply.error("the reply cannot be read", field=f"data[{place}]", got=row, need=need) from problem
