"""`RewardClient` and `AsyncRewardClient`: scores and rewards of a server that `treeward serve` runs.

    with RewardClient("http://localhost:8000", timeout_seconds=30) as client:
        client.score([[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]])[0].score
        client.score_completions([{"role": "user", "content": "2 + 2?"}], ["4", "5"])

A call ends within `timeout_seconds`, with a score for each conversation or with an error. Needs neither torch nor the
server's packages.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import threading
import time
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from treeward.data.preference import check_messages
from treeward.errors import ConfigError, DataError
from treeward.http import Connection, Reply, RewardServerError
from treeward.scoring.score import Conversation, OnError, Score

__all__ = ["AsyncRewardClient", "RewardClient"]

_Value = TypeVar("_Value")

_BODY_BYTES = 2**23
"""Larger bodies are split, for servers limit them."""
_ROW = re.compile(r"(?:conversations|completions|reference_answers)\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class _Row:
    """A conversation or completion to send. `place`: its index in the caller's list; `name`: for errors."""

    place: int
    name: str
    messages: Conversation
    reference: Any
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Scored:
    """The server's row: the reward, the score behind it, and why either is missing."""

    reward: float | None
    score: Score
    error: str | None = None


class AsyncRewardClient:
    """A client for coroutines; `RewardClient` has the same methods for synchronous code.

    `url`: of the server, as http://host:8000. `token`: the bearer token that the server asks for. `model`: one of its
    models, None for its first. `timeout_seconds`: for a whole call. `max_retries`: for one request. `verify_tls`: as in
    `Connection`. A call with more than `max_conversations` makes several requests, `max_concurrency` at a time.

    Raises `ConfigError` for arguments that cannot be; methods raise `RewardServerError` for a server that fails.
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
        """Scores in order, as `Scorer.score` gives them: raw, whatever shaping the model is served with.

        `where` names the conversations in errors. A conversation that cannot be scored raises `RewardServerError`; with
        `on_error="mask"` its score is None, and `Score.error` says why. Raises `DataError` for a malformed one.
        """
        return [one.score for one in await self._all(conversations, {"shaped": False}, where, on_error)]

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
        return [one.score for one in await self._all(ends, {"shaped": False, "context": context}, names, on_error)]

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
        scored = await self._all(conversations, {"shaped": True}, where, on_error, reference_answers)
        return [one.reward for one in scored]

    async def models(self) -> list[dict[str, Any]]:
        """The models of the server (id, contract, ...); the first is the default."""
        reply = await self._connection.get("/v1/models", until=self._until())
        listed = reply.json.get("data") if isinstance(reply.json, dict) else None
        if not isinstance(listed, list) or not all(isinstance(one, dict) and "id" in one for one in listed):
            raise reply.error("the answer lists no models", field="data", got=listed, need="a list of models")
        return listed

    async def ready(self) -> bool:
        """Whether the server accepts requests now; one attempt. Raises for an answer of another kind of server."""
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

    async def _all(
        self,
        conversations: Sequence[Conversation],
        fields: Mapping[str, Any],
        where: Sequence[str] | None,
        on_error: OnError,
        references: Sequence[Any] | None = None,
    ) -> list[_Scored]:
        """What the server says of each conversation. `fields`: of every request."""
        scored: dict[int, _Scored] = {}
        rows = _rows(conversations, where, on_error, references, scored)
        until = self._until()
        slots = asyncio.Semaphore(self._max_concurrency)

        async def one(part: list[_Row]) -> None:
            async with slots:
                await self._part(part, fields, until, on_error, scored)

        try:
            async with asyncio.TaskGroup() as group:
                for part in self._parts(rows):
                    group.create_task(one(part))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [scored[i] for i in range(len(conversations))]

    def _parts(self, rows: Sequence[_Row]) -> list[list[_Row]]:
        parts: list[list[_Row]] = []
        size = 0
        for row in rows:
            if not parts or len(parts[-1]) >= self.max_conversations or size + row.num_bytes > _BODY_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(row)
            size += row.num_bytes
        return parts

    async def _part(
        self, part: list[_Row], fields: Mapping[str, Any], until: float, on_error: OnError, scored: dict[int, _Scored]
    ) -> None:
        """One request; several where the body is too large for the server, or where it names a row it cannot read."""
        while part:
            try:
                reply = await self._connection.post("/v1/rewards", self._body(part, fields), until=until)
            except RewardServerError as error:
                if error.status == 413 and len(part) > 1:
                    half = len(part) // 2
                    await self._part(part[:half], fields, until, on_error, scored)
                    part = part[half:]
                    continue
                row = _refused_row(error, part)
                if row is None:
                    raise
                if on_error == "raise":
                    raise _with_name(error, row.name) from error
                scored[row.place] = _missing(str(error.got))
                part = [other for other in part if other is not row]
            else:
                for row, one in zip(part, _read(reply, len(part)), strict=True):
                    value = one.reward if fields["shaped"] else one.score.score
                    if value is None and on_error == "raise":
                        raise reply.error(f"{row.name} has no score", got=one.error)
                    scored[row.place] = one
                return

    def _body(self, part: Sequence[_Row], fields: Mapping[str, Any]) -> bytes:
        messages = [row.messages for row in part]
        # Masked, so that the answer says which row failed.
        body = {"model": self.model, "on_error": "mask", **fields}
        body["completions" if "context" in fields else "conversations"] = messages
        if any(row.reference is not None for row in part):
            body["reference_answers"] = [row.reference for row in part]
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


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

    def score(
        self, conversations: Sequence[Conversation], *, where: Sequence[str] | None = None, on_error: OnError = "raise"
    ) -> list[Score]:
        """As `AsyncRewardClient.score`."""
        return self._run(self._client.score(conversations, where=where, on_error=on_error))

    def score_completions(
        self, context: Conversation, completions: Sequence[Conversation | str], *, on_error: OnError = "raise"
    ) -> list[Score]:
        """As `AsyncRewardClient.score_completions`."""
        return self._run(self._client.score_completions(context, completions, on_error=on_error))

    def rewards(
        self,
        conversations: Sequence[Conversation],
        *,
        reference_answers: Sequence[Any] | None = None,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[float | None]:
        """As `AsyncRewardClient.rewards`."""
        return self._run(
            self._client.rewards(conversations, reference_answers=reference_answers, where=where, on_error=on_error)
        )

    def models(self) -> list[dict[str, Any]]:
        """As `AsyncRewardClient.models`."""
        return self._run(self._client.models())

    def ready(self) -> bool:
        """As `AsyncRewardClient.ready`."""
        return self._run(self._client.ready())

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


def _rows(
    conversations: Sequence[Conversation],
    where: Sequence[str] | None,
    on_error: OnError,
    references: Sequence[Any] | None,
    scored: dict[int, _Scored],
) -> list[_Row]:
    """The conversations to send; with `on_error="mask"` malformed ones are put into `scored`."""
    names = where if where is not None else [f"conversation {i}" for i in range(len(conversations))]
    for what, given in (("names", names), ("reference answers", references)):
        if given is not None and len(given) != len(conversations):
            got = f"{len(given)} {what} for {len(conversations)} conversations"
            raise DataError(f"{what} and conversations do not belong together", got=got, need="one for each")
    rows = []
    for i, (conversation, name) in enumerate(zip(conversations, names, strict=True)):
        reference = None if references is None else references[i]
        try:
            messages = check_messages(conversation, "messages", name)
            rows.append(_Row(i, name, messages, reference, _num_bytes([messages, reference], name)))
        except DataError as error:
            if on_error == "raise":
                raise
            scored[i] = _missing(" ".join(str(error).split()))
    return rows


def _num_bytes(value: Any, name: str) -> int:
    try:
        return len(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())
    except (ValueError, TypeError) as error:  # NaN, lone surrogates, objects
        need = "text, and finite numbers"
        raise DataError("this cannot be written as JSON", where=name, got=str(error), need=need) from error


def _missing(why: str) -> _Scored:
    return _Scored(None, Score(None, error=why), why)


def _refused_row(error: RewardServerError, part: Sequence[_Row]) -> _Row | None:
    match = _ROW.match(error.param or "") if error.status == 422 else None
    place = int(match[1]) if match else len(part)
    return part[place] if place < len(part) else None


def _with_name(error: RewardServerError, name: str) -> RewardServerError:
    return RewardServerError(
        error.summary,
        status=error.status,
        code=error.code,
        param=error.param,
        request_id=error.request_id,
        where=name,
        got=error.got,
        fix=error.fix,
    )


def _read(reply: Reply, number: int) -> list[_Scored]:
    """The rows of the answer: as many as were sent, each with finite numbers or a reason."""
    data = reply.json.get("data") if isinstance(reply.json, dict) else None
    if not isinstance(data, list) or len(data) != number:
        got = f"{len(data)} rows" if isinstance(data, list) else data
        raise reply.error("the answer has another form", field="data", got=got, need=f"{number} rows")
    return [_read_row(reply, row, i) for i, row in enumerate(data)]


def _read_row(reply: Reply, row: Any, place: int) -> _Scored:
    try:
        score, reward, why = row["score"], row["reward"], row["error"]
        heads, members = tuple(row.get("heads", ())), tuple(row.get("members", ()))
        numbers = [value for value in (score, reward, *heads, *members) if value is not None]
        if row["index"] != place or not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
            raise ValueError(f"row {place} has another index, or no finite numbers")
        if (score is None or reward is None) and not isinstance(why, str):
            raise ValueError(f"row {place} has no score and does not say why")
        reason = why if score is None else None
        kept = Score(score, int(row["num_tokens"]), bool(row["truncated"]), heads, members, reason)
        return _Scored(reward, kept, why)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        need = f"a score, or why there is none: {error}"
        raise reply.error("the answer cannot be read", field=f"data[{place}]", got=row, need=need) from error
