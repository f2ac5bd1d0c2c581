"""`Service`: what every dialect of the server calls; from what a client asks to rewards, or to a `Refusal`.

    answers = await service.answer("rm", [conversation, RenderedText(text)], deadline=deadline)
    answers[0].value        # the reward: the score, or what the model's shaping makes of it

A dialect reads its own bodies and writes its own; everything between lies here, so that a conversation has one score
whichever way it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from treeward.config.server import ServerConfig
from treeward.data.preference import Message
from treeward.scoring.rewarding import Rewarder
from treeward.scoring.score import Conversation, Score
from treeward.serving.engine import Engine
from treeward.serving.metrics import ServerMetrics
from treeward.serving.models import Asked, RenderedText, ServedModel
from treeward.serving.refusals import Refusal

__all__ = ["MOST_MESSAGES", "THREADS", "Answer", "Service"]

MOST_MESSAGES = 2**20
"""Of conversations that are made of others: of a context with each completion, and with each reference answer."""

THREADS = "treeward-"
"""How the names of the server's own threads begin."""
_LAST_JOIN_SECONDS = 0.25

_LAST_BYTES_SECONDS = 1.0
"""For a body that is still on its way when the server ends."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A reward with the score that it was made of. `value` is finite, or None and `error` says why.

    `by_request`: the conversation cannot be scored, as it is too long; otherwise the server has failed.
    """

    value: float | None
    score: Score
    error: str | None = None
    by_request: bool = False


class Service:
    """The models, the engine that scores with them, and what the server counts."""

    def __init__(self, engine: Engine, config: ServerConfig, metrics: ServerMetrics) -> None:
        self.engine, self.config, self.metrics = engine, config, metrics
        self.started = time.time()
        self.is_draining = False
        """Whether no new request is let in."""
        self.num_requests = 0
        """Requests that were let in and are not answered yet."""
        self.held_bytes = 0
        """Bytes of their bodies."""
        self._reading: set[asyncio.Timeout] = set()
        self._pools: list[ThreadPoolExecutor] = []
        self._shaping = self.pool("shaping")
        self.bodies = self.pool("bodies")
        """For bodies that are too large to be read in the event loop. One thread: others wait while a body is parsed,
        and two would take turns in making them wait."""
        metrics.watch("requests_in_flight", "Requests that are not answered yet.", lambda: self.num_requests)
        metrics.watch("held_bytes", "Bytes of request bodies that are held.", lambda: self.held_bytes)

    def pool(self, name: str) -> ThreadPoolExecutor:
        """A thread of its own for work that is too long for the event loop; it ends with the service."""
        self._pools.append(ThreadPoolExecutor(1, thread_name_prefix=f"{THREADS}{name}"))
        return self._pools[-1]

    def close_pools(self) -> None:
        """Begin nothing more in the threads of `pool`; what is being done goes on."""
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)

    async def answer(
        self,
        model: str | None,
        asked: Sequence[Asked],
        *,
        deadline: float,
        reference_answers: Sequence[Any] | None = None,
        shaped: bool = True,
    ) -> list[Answer]:
        """One answer for each conversation, in order; those that cannot be scored say why.

        `reference_answers`: as `Rewarder.rewards` reads them. `shaped`: by the shaping that the model is served with,
        if any. Raises `Refusal` for an unknown model, too many conversations, a full queue and a deadline.
        """
        served = self.engine.model(model)
        self._check_number(len(asked))
        if served.shaper is None or not shaped:
            outcomes = await self.engine.score(served, asked, deadline=deadline)
            return [Answer(o.score.score, o.score, o.score.error, o.by_request) for o in outcomes]
        return await self._shaped(served, asked, reference_answers, deadline)

    def refuse_failures(self, answers: Sequence[Answer]) -> None:
        """For a dialect that has no word for a missing score. Raises `Refusal`: 422 for a conversation that cannot be
        scored, 500 for a failure of the server.
        """
        for i, answer in enumerate(answers):
            if answer.value is None:
                status, code = (422, "cannot_be_scored") if answer.by_request else (500, "scoring_failed")
                raise Refusal(status, code, f"conversation {i}: {answer.error}", param=f"[{i}]")

    def _check_number(self, num_conversations: int) -> None:
        limit = self.config.max_conversations
        if num_conversations > limit:
            message = f"{num_conversations} conversations in one request, with their references; at most {limit}"
            raise Refusal(413, "too_many_conversations", message)

    def _check_references(
        self, conversations: Sequence[Conversation | list[Message] | None], reference_answers: Sequence[Any]
    ) -> None:
        """Before anything is made of them."""
        numbers = [len(one) if isinstance(one, list) else 1 for one in reference_answers]
        self._check_number(max(numbers, default=0))
        num_messages = sum(
            number * len(chat) for number, chat in zip(numbers, conversations, strict=False) if chat is not None
        )
        if num_messages > MOST_MESSAGES:
            message = f"{num_messages} messages in the conversations with their references; at most {MOST_MESSAGES}"
            raise Refusal(413, "too_many_messages", message)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """While a request is answered."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    @contextlib.contextmanager
    def reading(self, patience: asyncio.Timeout) -> Iterator[None]:
        """While a client sends its body: in the time that it has, or what is left of it when the server ends."""
        if self.is_draining:
            self._hurry(patience)
        self._reading.add(patience)
        try:
            yield
        finally:
            self._reading.discard(patience)

    def hold(self, num_bytes: int) -> None:
        """Count bytes of a body as held. Raises `Refusal` 429 where they are too many together with the others'."""
        limit = self.config.max_queued_bytes
        if self.held_bytes and self.held_bytes + num_bytes > limit:
            message = f"{self.held_bytes} bytes of requests are held, and at most {limit} may be"
            raise Refusal(429, "memory_full", message, retry_after=self.engine.seconds_of_queue)
        self.held_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """The bytes are not held any more."""
        self.held_bytes -= num_bytes

    async def drain(self, seconds: float, *, stop: Callable[[], bool] = lambda: False) -> int:
        """Let no request in, answer those that were, and end the engine; how many were not answered in time.

        What is not answered by then, or when `stop()` holds, is refused with 503.
        """
        self.is_draining = True
        for patience in self._reading:
            self._hurry(patience)
        end = time.monotonic() + seconds
        while self.num_requests and time.monotonic() < end and not stop():
            await asyncio.sleep(0.02)
        num_left = self.num_requests
        left = 0.0 if stop() else max(end - time.monotonic(), 0.0)
        await self.engine.close(join_seconds=left + _LAST_JOIN_SECONDS)
        return num_left

    def _hurry(self, patience: asyncio.Timeout) -> None:
        soon = asyncio.get_running_loop().time() + _LAST_BYTES_SECONDS
        when = patience.when()
        if not patience.expired() and (when is None or when > soon):
            patience.reschedule(soon)

    async def _shaped(
        self, served: ServedModel, asked: Sequence[Asked], reference_answers: Sequence[Any] | None, deadline: float
    ) -> list[Answer]:
        assert served.shaper is not None
        rewarder = Rewarder(None, served.shaper)
        conversations = [_messages(one) for one in asked]
        self._check_references(conversations, reference_answers or ())
        chats = [chat or [] for chat in conversations]
        # It makes tokens of replies, and may keep statistics: in a thread, and always the same. So does what copies
        # each conversation for each of its references.
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._shaping)
        if rewarder.reference_key is None or reference_answers is None:
            plan = rewarder.plan(chats)
        else:
            plan = await in_thread(rewarder.plan, chats, reference_answers)
        references = plan.to_score[len(asked) :]
        self._check_number(len(plan.to_score))
        outcomes = await self.engine.score(served, [*asked, *references], deadline=deadline)
        scores = [outcome.score for outcome in outcomes]
        for i, chat in enumerate(conversations):
            if chat is None and served.shaper.reads_replies and scores[i].score is not None:
                why = "this model's rewards depend on the reply: send messages, or the prompt beside the text"
                scores[i] = replace(scores[i], score=None, error=why)
        rewarded = await in_thread(rewarder.finish, plan, scores)
        # A failed reference, and a shaping without its constants, are no fault of the model's threads.
        return [
            Answer(one.value, one.score, one.error, one.error is not None and (o.by_request or o.score.error is None))
            for one, o in zip(rewarded, outcomes, strict=False)
        ]


def _messages(asked: Asked) -> Conversation | list[Message] | None:
    return asked.messages if isinstance(asked, RenderedText) else asked
