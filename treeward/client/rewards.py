"""`RewardClient` and `AsyncRewardClient`: scores and rewards of a server that `treeward serve` runs.

    with RewardClient("http://localhost:8000", timeout_seconds=30) as client:
        client.score([[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]])[0].score
        client.score_completions([{"role": "user", "content": "2 + 2?"}], ["4", "5"])

A call ends within `timeout_seconds`: with a score for every conversation, or with an error. Requests are repeated where
the server is busy or away, never for longer than that. Needs httpx, and neither torch nor the server's packages.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from treeward.client.http import Background, Connection, Reply, RewardServerError
from treeward.data.preference import check_messages
from treeward.errors import ConfigError, DataError
from treeward.scoring.score import Conversation, OnError, Score

__all__ = ["AsyncRewardClient", "RewardClient"]

_Value = TypeVar("_Value")

_BODY_BYTES = 2**23
"""Conversations of more bytes go in several requests; servers limit bodies."""
_ROW = re.compile(r"(?:conversations|completions|reference_answers)\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class _Row:
    """A conversation, or a completion, as JSON. `place`: in the list that was given; `name`: in errors."""

    place: int
    name: str
    content: bytes
    references: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    """`value`: the reward; `error`: why it is None."""

    value: float | None
    score: Score
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Ask:
    """What the requests of one call have in common. `context`: that of completions, as JSON."""

    until: float
    on_error: OnError
    is_shaped: bool = False
    context: bytes | None = None


class AsyncRewardClient:
    """A client for coroutines; `RewardClient` has the same methods for code that waits.

    `url`: of the server, as http://host:8000. `token`: what it asks for. `model`: which of its models; None is its
    first. `timeout_seconds`: of one call, whatever it takes. `max_retries`: of one request. `verify_tls`: as in
    `Connection`. A call with more than `max_conversations` makes several requests, `max_concurrency` at a time.

    Raises `ConfigError` for arguments that cannot be; methods raise `RewardServerError` where there is no answer.
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
        for name, number in (
            ("timeout_seconds", timeout_seconds),
            ("max_conversations", max_conversations),
            ("max_concurrency", max_concurrency),
        ):
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

        `where` names each conversation in errors. One that cannot be scored, as it is too long, raises; with
        `on_error="mask"` its score is None, and `Score.error` says why. Raises `DataError` for what is no conversation.
        """
        ask = self._ask(on_error)
        rows, answers = _rows(conversations, where, on_error)
        await self._answer(ask, rows, answers)
        return [answers[i].score for i in range(len(conversations))]

    async def score_completions(
        self, context: Conversation, completions: Sequence[Conversation | str], *, on_error: OnError = "raise"
    ) -> list[Score]:
        """Scores of several completions of one context, which is sent once; a completion is messages, or the text of
        an assistant's message.
        """
        if isinstance(completions, str) or not completions:
            raise DataError("there is no list of answers", got=completions, need='a list, as ["an answer", "another"]')
        ends = [[{"role": "assistant", "content": one}] if isinstance(one, str) else one for one in completions]
        before = _as_json(check_messages(context, "context", None, may_be_empty=True), "context")
        ask = replace(self._ask(on_error), context=before)
        rows, answers = _rows(ends, [f"completion {i}" for i in range(len(ends))], on_error)
        await self._answer(ask, rows, answers)
        return [answers[i].score for i in range(len(ends))]

    async def rewards(
        self,
        conversations: Sequence[Conversation],
        *,
        reference_answers: Sequence[Any] | None = None,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[float | None]:
        """Rewards in order: what the shaping that the model is served with makes of the scores, or the scores.

        `reference_answers`: for shaping that compares with them; of each conversation a text, a list, or None. With
        `on_error="mask"` a reward that cannot be had is None, otherwise it raises.
        """
        ask = replace(self._ask(on_error), is_shaped=True)
        rows, answers = _rows(conversations, where, on_error, reference_answers)
        await self._answer(ask, rows, answers)
        return [answers[i].value for i in range(len(conversations))]

    async def models(self) -> list[dict[str, Any]]:
        """The models of the server, the first of which answers where none is named: id, contract, ..."""
        reply = await self._connection.get("/v1/models", until=self._ask("raise").until)
        listed = reply.json.get("data") if isinstance(reply.json, dict) else None
        if not isinstance(listed, list) or not all(isinstance(one, dict) and "id" in one for one in listed):
            raise reply.error("the answer lists no models", field="data", got=listed, need="a list of models")
        return listed

    async def ready(self) -> bool:
        """Whether the server accepts requests now; it is asked once. Raises for an answer of another kind of server."""
        try:
            reply = await self._connection.get("/ready", until=self._ask("raise").until, max_retries=0)
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

    def _ask(self, on_error: OnError) -> _Ask:
        return _Ask(time.monotonic() + self.timeout_seconds, on_error)

    async def _answer(self, ask: _Ask, rows: Sequence[_Row], answers: dict[int, _Answer]) -> None:
        """Ask for all rows, in parts; `answers` has those of each place."""
        room = asyncio.Semaphore(self._max_concurrency)

        async def one(part: list[_Row]) -> None:
            async with room:
                await self._answer_part(ask, part, answers)

        tasks = [asyncio.ensure_future(one(part)) for part in self._parts(rows)]
        try:
            await asyncio.gather(*tasks)
        finally:  # the first error ends the others
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _parts(self, rows: Sequence[_Row]) -> list[list[_Row]]:
        parts: list[list[_Row]] = []
        size = 0
        for row in rows:
            length = len(row.content) + len(row.references or b"")
            if not parts or len(parts[-1]) >= self.max_conversations or size + length > _BODY_BYTES:
                parts.append([])
                size = 0
            parts[-1].append(row)
            size += length
        return parts

    async def _answer_part(self, ask: _Ask, part: list[_Row], answers: dict[int, _Answer]) -> None:
        """One request, or more: where the server says which row it cannot read, that is masked and the others sent."""
        while part:
            try:
                reply = await self._connection.post("/v1/rewards", self._body(ask, part), until=ask.until)
            except RewardServerError as error:
                if error.status == 413 and len(part) > 1:
                    half = len(part) // 2
                    await self._answer_part(ask, part[:half], answers)
                    part = part[half:]
                    continue
                row = _row_of(error, part)
                if row is None:
                    raise
                if ask.on_error == "raise":
                    raise _of_row(error, row) from error
                answers[row.place] = _missing(str(error.got))
                part = [other for other in part if other is not row]
            else:
                for row, answer in zip(part, _read(reply, len(part)), strict=True):
                    failed = answer.value is None if ask.is_shaped else answer.score.score is None
                    if failed and ask.on_error == "raise":
                        raise reply.error(f"{row.name} has no score", got=answer.error)
                    answers[row.place] = answer
                return

    def _body(self, ask: _Ask, part: Sequence[_Row]) -> bytes:
        fields = {
            "model": json.dumps(self.model).encode(),
            "on_error": b'"mask"',  # which row failed is known then
            "shaped": b"true" if ask.is_shaped else b"false",
        }
        rows = b"[" + b",".join(row.content for row in part) + b"]"
        if ask.context is None:
            fields["conversations"] = rows
        else:
            fields |= {"context": ask.context, "completions": rows}
        references = [row.references for row in part]
        if any(references):
            fields["reference_answers"] = b"[" + b",".join(one or b"null" for one in references) + b"]"
        return b"{" + b",".join(b'"%s":%s' % (name.encode(), value) for name, value in fields.items()) + b"}"


class RewardClient:
    """A client of `treeward serve` for code that waits; a `ConversationScorer`, so it can stand for a `Scorer`.

    Arguments and methods are those of `AsyncRewardClient`. Requests are made in a thread, several at a time. It may be
    used from several threads, and after a fork.
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
        self._background: tuple[int, Background] | None = None
        self._lock = threading.Lock()

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
        if self._background is not None and self._background[0] == os.getpid():
            self._run(self._client.aclose())
            self._background[1].close()
        self._background = None

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, _Value]) -> _Value:
        with self._lock:
            if self._background is None or self._background[0] != os.getpid():  # threads stay behind in a fork
                self._background = os.getpid(), Background()
            background = self._background[1]
        return background.run(coroutine)


def _rows(
    conversations: Sequence[Conversation],
    where: Sequence[str] | None,
    on_error: OnError,
    references: Sequence[Any] | None = None,
) -> tuple[list[_Row], dict[int, _Answer]]:
    """The conversations to send, and the answers of those that cannot be."""
    names = where if where is not None else [f"conversation {i}" for i in range(len(conversations))]
    for what, given in (("names", names), ("reference answers", references)):
        if given is not None and len(given) != len(conversations):
            got = f"{len(given)} {what} for {len(conversations)} conversations"
            raise DataError(f"{what} and conversations do not belong together", got=got, need="one for each")
    rows, answers = [], {}
    for i, (conversation, name) in enumerate(zip(conversations, names, strict=True)):
        try:
            content = _as_json(check_messages(conversation, "messages", name), name)
            reference = None if references is None or references[i] is None else _as_json(references[i], name)
        except DataError as error:
            if on_error == "raise":
                raise
            answers[i] = _missing(" ".join(str(error).split()))
        else:
            rows.append(_Row(i, name, content, reference))
    return rows, answers


def _as_json(value: Any, name: str) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, TypeError) as error:  # NaN, lone surrogates, objects
        raise DataError(
            "this cannot be written as JSON", where=name, got=str(error), need="text, and finite numbers"
        ) from error


def _missing(why: str) -> _Answer:
    return _Answer(None, Score(None, error=why), why)


def _row_of(error: RewardServerError, part: Sequence[_Row]) -> _Row | None:
    """The row that a refusal is about."""
    match = _ROW.match(error.param or "") if error.status == 422 else None
    place = int(match[1]) if match else len(part)
    return part[place] if place < len(part) else None


def _of_row(error: RewardServerError, row: _Row) -> RewardServerError:
    return RewardServerError(
        error.summary,
        status=error.status,
        code=error.code,
        param=error.param,
        request_id=error.request_id,
        where=row.name,
        got=error.got,
        fix=error.fix,
    )


def _read(reply: Reply, number: int) -> list[_Answer]:
    """The answers, which must be as many as were asked for, and numbers or reasons."""
    data = reply.json.get("data") if isinstance(reply.json, dict) else None
    if not isinstance(data, list) or len(data) != number:
        got = f"{len(data)} rows" if isinstance(data, list) else data
        raise reply.error("the answer is not what was asked for", field="data", got=got, need=f"{number} rows")
    return [_read_row(reply, row, i) for i, row in enumerate(data)]


def _read_row(reply: Reply, row: Any, place: int) -> _Answer:
    try:
        score, reward, why = row["score"], row["reward"], row["error"]
        heads, members = tuple(row.get("heads", ())), tuple(row.get("members", ()))
        numbers = [value for value in (score, reward, *heads, *members) if value is not None]
        if row["index"] != place or not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
            raise ValueError(f"row {place} has another index, or no finite numbers")
        if (score is None or reward is None) and not isinstance(why, str):
            raise ValueError(f"row {place} has no score and does not say why")
        kept = Score(
            score, int(row["num_tokens"]), bool(row["truncated"]), heads, members, why if score is None else None
        )
        return _Answer(reward, kept, why)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise reply.error(
            "the answer cannot be read", field=f"data[{place}]", got=row, need=f"a score, or why there is none: {error}"
        ) from error
