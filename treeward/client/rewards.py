"""`RewardClient` and `AsyncRewardClient`: scores and rewards from a server that `treeward serve` runs.

    client = RewardClient("http://localhost:8000", timeout_seconds=30)
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
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from treeward.data.preference import check_messages
from treeward.errors import ConfigError, DataError
from treeward.http import Connection, Reply, RewardServerError, run_async, tls_context
from treeward.scoring.score import Conversation, OnError, Reward, Score

__all__ = ["AsyncRewardClient", "RewardClient"]

_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")

_BODY_BYTES = 2**23
"""A request with a larger body is split, since servers limit bodies."""


class _Item(NamedTuple):
    """A conversation or completion to send, as JSON. `place`: its index in the caller's list; `name`: for errors."""

    place: int
    name: str
    messages: str
    reference: str


class _Client:
    """What both clients are made of. `_options`: the constructor's arguments."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        model: str | None = None,
        timeout_seconds: float = 120.0,
        max_retries: int = 5,
        verify_tls: Any = True,
        max_conversations: int = 256,
        max_concurrency: int = 8,
    ) -> None:
        positive: dict[str, Any] = {
            "timeout_seconds": timeout_seconds,
            "max_conversations": max_conversations,
            "max_concurrency": max_concurrency,
        }
        for name, number in positive.items():
            if not (math.isfinite(number) and number > 0):
                raise ConfigError(f"{name} is not positive", field=name, got=number, need="a positive number")
        of_connection = {"token": token, "max_retries": max_retries, "verify_tls": tls_context(verify_tls)}
        self._connection = Connection(url, max_connections=max_concurrency, **of_connection)
        self._options = {"url": url, "model": model, **positive, **of_connection}
        self.model, self.timeout_seconds, self.max_conversations = model, timeout_seconds, max_conversations
        self._max_concurrency = max_concurrency


class AsyncRewardClient(_Client):
    """A client for coroutines; `RewardClient` has the same methods for synchronous code.

    `url`: of the server, as http://host:8000. `token`: the bearer token that the server asks for. `model`: one of its
    models, None for its first. `timeout_seconds`: for a whole call. `max_retries`: for one request. `verify_tls`: as in
    `Connection`. A call with more than `max_conversations` makes several requests, `max_concurrency` at a time.

    Raises `ConfigError` for impossible arguments; methods raise `RewardServerError` for a server that fails.
    """

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
        checked = check_messages(context, "context", None, may_be_empty=True)
        _json(checked, "context")
        names = [f"completion {i}" for i in range(len(ends))]
        rows = await self._rows(ends, {"shaped": False, "context": checked}, names, on_error)
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
        rows = await self.detailed_rewards(
            conversations, reference_answers=reference_answers, where=where, on_error=on_error
        )
        return [row.value for row in rows]

    async def detailed_rewards(
        self,
        conversations: Sequence[Conversation],
        *,
        reference_answers: Sequence[Any] | None = None,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Reward]:
        """`rewards`, each with the score that it was made of, or the reason why there is none."""
        return await self._rows(conversations, {"shaped": True}, where, on_error, reference_answers)

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
    ) -> list[Reward]:
        """The server's row for each conversation; a malformed one is not sent. `fields`: of every request."""
        rows: dict[int, Reward] = {}
        items: list[_Item] = []
        names = where or [f"conversation {i}" for i in range(len(conversations))]
        given = references or [None] * len(conversations)
        if len(names) != len(conversations) or len(given) != len(conversations):
            got = f"{len(names)} names and {len(given)} references for {len(conversations)} conversations"
            raise DataError("names, references and conversations do not belong together", got=got, need="one for each")
        for i, (conversation, name, reference) in enumerate(zip(conversations, names, given, strict=True)):
            try:
                messages = _json(check_messages(conversation, "messages", name), name)
                items.append(_Item(i, name, messages, _json(reference, name)))
            except DataError as error:
                if on_error == "raise":
                    raise
                why = " ".join(str(error).split())
                rows[i] = Reward(None, Score(None, error=why), error=why)
        until = self._until()
        slots = asyncio.Semaphore(self._max_concurrency)

        async def send(batch: Sequence[_Item]) -> None:
            async with slots:
                reply = await self._connection.post("/v1/rewards", self._body(batch, fields), until=until)
            for item, row in zip(batch, _read(reply, len(batch)), strict=True):
                if on_error == "raise" and (row.value if fields["shaped"] else row.score.score) is None:
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
            num_bytes = len(item.messages) + len(item.reference)
            if not batches or len(batches[-1]) >= self.max_conversations or size + num_bytes > _BODY_BYTES:
                batches.append([])
                size = 0
            batches[-1].append(item)
            size += num_bytes
        return batches

    def _body(self, batch: Sequence[_Item], fields: Mapping[str, Any]) -> bytes:
        # Masked, so that the reply says which conversation failed.
        head = json.dumps({"model": self.model, "on_error": "mask", **fields}, ensure_ascii=False)[:-1]
        what = "completions" if "context" in fields else "conversations"
        body = f'{head}, "{what}": [{",".join(item.messages for item in batch)}]'
        if any(item.reference != "null" for item in batch):
            body += f', "reference_answers": [{",".join(item.reference for item in batch)}]'
        return f"{body}}}".encode()


def _blocking(
    method: Callable[Concatenate[AsyncRewardClient, _Arguments], Coroutine[Any, Any, _Value]],
) -> Callable[Concatenate[RewardClient, _Arguments], _Value]:
    """The synchronous form of a method of `AsyncRewardClient`."""

    def call(self: RewardClient, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Value:
        async def run() -> _Value:
            async with AsyncRewardClient(**self._options) as client:
                return await method(client, *args, **kwargs)

        return run_async(run())

    functools.update_wrapper(call, method)
    return call


class RewardClient(_Client):
    """A client of `treeward serve` for synchronous code; a `ConversationScorer`, so it can stand for a `Scorer`.

    Arguments and methods are those of `AsyncRewardClient`. Every call has a thread and connections of its own, so it
    may be made from several threads, after a fork, and where an event loop runs already.
    """

    score = _blocking(AsyncRewardClient.score)
    score_completions = _blocking(AsyncRewardClient.score_completions)
    rewards = _blocking(AsyncRewardClient.rewards)
    detailed_rewards = _blocking(AsyncRewardClient.detailed_rewards)
    models = _blocking(AsyncRewardClient.models)
    ready = _blocking(AsyncRewardClient.ready)

    def close(self) -> None:
        """Nothing is open between calls; it is there because scorers that hold something have it."""

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _json(value: Any, name: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (ValueError, TypeError) as error:  # NaN, lone surrogates, objects
        need = "text, and finite numbers"
        raise DataError("this cannot be written as JSON", where=name, got=str(error), need=need) from error
    return text


def _read(reply: Reply, number: int) -> list[Reward]:
    """The rows of the reply: as many as were sent, each with finite numbers or a reason."""
    data = reply.json.get("data") if isinstance(reply.json, dict) else None
    if not isinstance(data, list) or len(data) != number:
        got = f"{len(data)} rows" if isinstance(data, list) else data
        raise reply.error("the reply cannot be read", field="data", got=got, need=f"{number} rows")
    return [_read_row(reply, row, place) for place, row in enumerate(data)]


def _read_row(reply: Reply, row: Any, place: int) -> Reward:
    try:
        score, reward, error = row["score"], row["reward"], row["error"]
        heads, members = tuple(row.get("heads", ())), tuple(row.get("members", ()))
        numbers = [value for value in (score, reward, *heads, *members) if value is not None]
        if row["index"] != place or not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
            raise ValueError(f"row {place} has another index, or no finite numbers")
        if (score is None or reward is None) and not isinstance(error, str):
            raise ValueError(f"row {place} has no score and no error that says why")
        why = error if score is None else None
        scored = Score(score, int(row["num_tokens"]), bool(row["truncated"]), heads, members, why)
        return Reward(reward, scored, error=error)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        need = f"a score, or why there is none: {problem}"
        raise reply.error("the reply cannot be read", field=f"data[{place}]", got=row, need=need) from problem
