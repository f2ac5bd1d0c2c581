"""`RewardClient`: scores and rewards from a server that `treeward serve` runs.

    client = RewardClient("http://localhost:8000", timeout_seconds=30)
    question = {"role": "user", "content": "2 + 2?"}
    client.score([[question, {"role": "assistant", "content": "4"}]])[0].score
    client.score_completions([question], ["4", "5"])

A call waits for the server no longer than `timeout_seconds`, and ends with a score for each
conversation or with an error. Needs neither torch nor the server's packages.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NotRequired

from pydantic import ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from treeward.data.conversation import (
    AnyConversation,
    as_conversations,
    check_messages,
    to_json,
    with_messages,
)
from treeward.errors import ConfigError, DataError
from treeward.http import Connection, RewardServerError
from treeward.scoring.score import OnError, Reward, Score

_BODY_BYTES = 2**23
"""A request with a larger body is split, since servers limit bodies: `treeward serve` by default to
four times as much (`max_body_bytes`)."""


class RewardClient:
    """A client of `treeward serve`; a `ConversationScorer`, so it can stand for a `Scorer`.

    `url`: of the server, as http://host:8000. `token`: the bearer token that the server asks for.
    `model`: one of its models, None for its first. `timeout_seconds`: for a whole call.
    `max_retries`: for one request. A call with more than `max_conversations` makes several
    requests, `max_concurrency` at a time.

    Raises `ConfigError` for a URL, a token or a number that cannot be used. It keeps its
    connections, and may be called from several threads. Methods raise `RewardServerError` for a
    server that fails.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        model: str | None = None,
        timeout_seconds: float = 120.0,
        max_retries: int = 5,
        max_conversations: int = 256,
        max_concurrency: int = 8,
    ) -> None:
        _check_positive("timeout_seconds", timeout_seconds)
        _check_positive("max_conversations", max_conversations)
        _check_positive("max_concurrency", max_concurrency)
        if max_retries < 0:
            raise ConfigError(
                "a number is too small",
                field="max_retries",
                got=max_retries,
                need="0 or more",
            )
        self.model = model
        self.timeout_seconds = timeout_seconds
        self.max_conversations = max_conversations
        self.max_concurrency = max_concurrency
        self._connection = Connection(url, token=token, max_retries=max_retries)
        self.url = self._connection.url

    def score(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Score]:
        """Scores in order, as `Scorer.score` gives them: raw, even if the model is served with
        shaping.

        `where` names the conversations in errors. A conversation that cannot be scored raises
        `RewardServerError`; with `on_error="mask"` its score is None, and `Score.error` says why.
        Raises `DataError` for a malformed one.
        """
        rewards = self.rewards(conversations, shaped=False, where=where, on_error=on_error)
        return [reward.score for reward in rewards]

    def score_completions(
        self,
        context: AnyConversation | str,
        completions: Sequence[AnyConversation | str],
        *,
        on_error: OnError = "raise",
    ) -> list[Score]:
        """Scores of several completions of one context; either is messages, or text of the user and
        the assistant.
        """
        conversations = as_conversations(context, completions)
        names = [f"completion {i}" for i in range(len(conversations))]
        return self.score(conversations, where=names, on_error=on_error)

    def rewards(
        self,
        conversations: Sequence[AnyConversation],
        *,
        shaped: bool = True,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Reward]:
        """Rewards in order, each with its score: the scores after the shaping that the model is
        served with.

        `shaped`: False leaves rewards as scores. A conversation without a reward raises
        `RewardServerError`; with `on_error="mask"` its value is None, and `Reward.error` says why.
        A malformed one is not sent.
        """
        rewards: dict[int, Reward] = {}
        sent: dict[int, Any] = {}
        parts: list[list[int]] = []
        num_bytes = 0
        names = where or [f"conversation {i}" for i in range(len(conversations))]
        for i, (conversation, name) in enumerate(zip(conversations, names, strict=True)):
            try:
                messages = check_messages(conversation, "messages", name)
                sent[i] = to_json(with_messages(conversation, messages))
                # In bytes of JSON, which servers limit.
                size = len(_json(sent[i], name))
            except DataError as error:
                if on_error == "raise":
                    raise
                problem = error.in_one_line
                # It is not sent: the server would refuse the whole request.
                rewards[i] = Reward(None, Score(None, error=problem), error=problem)
                continue
            is_full = not parts or len(parts[-1]) >= self.max_conversations
            # A conversation above the limit is a request of its own, which the server refuses.
            if is_full or num_bytes + size > _BODY_BYTES:
                parts.append([])
                num_bytes = 0
            parts[-1].append(i)
            num_bytes += size
        until = time.monotonic() + self.timeout_seconds

        def send(part: list[int]) -> list[Reward]:
            # Masked, so that the response says which conversation failed.
            body: dict[str, Any] = {"model": self.model, "on_error": "mask", "shaped": shaped}
            body["conversations"] = [sent[i] for i in part]
            part_rewards = self._connection.request(
                "/v1/rewards",
                _json(body, "the request"),
                until=until,
                read=partial(_read, number=len(part)),
            )
            for i, reward in zip(part, part_rewards, strict=True):
                value = reward.value if shaped else reward.score.score
                if on_error == "raise" and value is None:
                    raise RewardServerError(
                        f"{names[i]} has no score",
                        status=200,
                        where=self.url,
                        got=reward.error,
                    )
            return part_rewards

        # Side by side, so that the server has full batches.
        with ThreadPoolExecutor(self.max_concurrency) as threads:
            for part, part_rewards in zip(parts, threads.map(send, parts), strict=True):
                rewards.update(zip(part, part_rewards, strict=True))
        return [rewards[i] for i in range(len(conversations))]

    def models(self) -> list[dict[str, Any]]:
        """The models of the server (id, contract, ...); the first is the default."""

        def read(response: Any) -> list[dict[str, Any]]:
            # A row without an id is an error of the server.
            return [dict(model, id=model["id"]) for model in response["data"]]

        until = time.monotonic() + self.timeout_seconds
        return self._connection.request("/v1/models", until=until, read=read)

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _json(value: Any, name: str) -> bytes:
    try:
        return json.dumps(
            value,
            ensure_ascii=False,
            allow_nan=False,
            separators=(",", ":"),
        ).encode()
    except (ValueError, TypeError) as error:
        # NaN, lone surrogates, and objects.
        need = "text, and finite numbers"
        raise DataError(
            "this cannot be written as JSON",
            where=name,
            got=str(error),
            need=need,
        ) from error


def _check_positive(name: str, number: float) -> None:
    if not 0 < number < math.inf:
        raise ConfigError(
            "a number cannot be used",
            field=name,
            got=number,
            need="a finite number above 0",
        )


@with_config(ConfigDict(strict=True, allow_inf_nan=False))
class RewardRow(TypedDict):
    """A conversation in a response of `/v1/rewards`.

    `heads`, `members`: the value of each head, of each member of an ensemble. `spread`: how sure
    the score is. `steps`: of a process reward model, the probability of each step.
    """

    index: int
    reward: float | None
    score: float | None
    num_tokens: int
    truncated: bool
    error: str | None
    heads: NotRequired[list[float]]
    spread: NotRequired[float]
    members: NotRequired[list[float]]
    steps: NotRequired[list[float]]


_ROWS = TypeAdapter(list[RewardRow])


def _read(response: Any, number: int) -> list[Reward]:
    """The rows of a response: as many as were sent, each with finite numbers or a reason."""
    # Strictly: a text, NaN or a truth value is no score.
    rows = _ROWS.validate_python(response["data"])
    # Another order would give scores to the wrong conversations.
    if [row["index"] for row in rows] != list(range(number)):
        raise ValueError(f"{len(rows)} rows in this order for {number} conversations")
    for row in rows:
        is_missing = row["score"] is None or row["reward"] is None
        if is_missing and row["error"] is None:
            raise ValueError("a row has neither a score nor an error")
    rewards = []
    for row in rows:
        # The error of a row with a score is about its reward.
        score_error = row["error"] if row["score"] is None else None
        score = Score(
            row["score"],
            row["num_tokens"],
            row["truncated"],
            heads=tuple(row.get("heads", ())),
            members=tuple(row.get("members", ())),
            error=score_error,
            spread=row.get("spread"),
            steps=tuple(row.get("steps", ())),
        )
        rewards.append(Reward(row["reward"], score, error=row["error"]))
    return rewards
