"""`Cohorts`: rollouts of one prompt that arrive one by one, and are judged together.

    cohorts = Cohorts(config, evaluate)           # `evaluate`: the rollouts' rewards, in order
    reward = await cohorts.reward(rollout)        # once the others are here

A cohort is complete with `num_rollouts_per_prompt` rollouts. They are judged in the order of their
numbers (`_ng_rollout_index`), or without numbers in that of a digest of the response: the order of
arrival is that of length, and the place in a comparison must not depend on it. Everything happens
in one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treeward.config.served_judge import ServedJudgeConfig
from treeward.data.conversation import Message
from treeward.scoring.group_rewards import GroupCompletion
from treeward.serving.api_error import APIError, shutting_down

_TOO_LATE = "the server is shutting down, and the other rollouts of the prompt cannot come"


@dataclass(frozen=True)
class ComparedPrompt:
    """What completions have in common. `history`: the messages before them. `tools`: what the
    policy could call."""

    history: Sequence[Message]
    principle: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Rollout:
    """A completion that waits for the others of its prompt.

    `key`: the same for all rollouts of a cohort. `prompt_digest`: of what they all answer.
    `digest`: of the whole response. `number`: its place in the cohort, if the client has given one.
    `group_id`, `attempt`: the client's name of the cohort, and how often it was tried before.
    """

    key: str
    prompt_digest: str
    digest: str
    prompt: ComparedPrompt
    completion: GroupCompletion
    number: int | None = None
    group_id: str | None = None
    attempt: int = 0


@dataclass(eq=False)
class _Member:
    """A rollout, and how many requests wait for its reward."""

    rollout: Rollout
    num_waiting: int = 0


@dataclass(eq=False)
class _Cohort:
    """`outcome`: the rewards by place. `timer`: ends the collection. `task`: the judging."""

    group_id: str | None
    attempt: int
    prompt_digest: str
    outcome: asyncio.Future[dict[Any, float]]
    timer: asyncio.TimerHandle
    members: dict[Any, _Member] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return sum(member.num_waiting for member in self.members.values())


Evaluate = Callable[[Sequence[Rollout]], Awaitable[Sequence[float]]]


class Cohorts:
    """The cohorts of a server that are not complete, are judged, or have a name and were judged.

    `num_waiting`: the requests that wait for a reward.
    """

    def __init__(self, config: ServedJudgeConfig, evaluate: Evaluate) -> None:
        self._config = config
        self._evaluate = evaluate
        self._open: dict[str, _Cohort] = {}
        # Cohorts with a name, whose clients may send a request again that was answered.
        self._judged: OrderedDict[str, tuple[dict[Any, str], dict[Any, float]]] = OrderedDict()
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._is_closed = False
        self.num_waiting = 0

    async def reward(self, rollout: Rollout) -> float:
        """The reward of a rollout, once its cohort is complete and judged.

        Raises `APIError`: 409 for a rollout that contradicts its cohort, 504 if the others do not
        come in time, 503 if they cannot come any more, and what judging raises. A caller that is
        cancelled leaves its place to another one.
        """
        self._check_attempt(rollout)
        if rollout.key in self._judged:
            digests, rewards = self._judged[rollout.key]
            if digests.get(rollout.number) != rollout.digest:
                message = (
                    f"the cohort was judged with another response for rollout {rollout.number}"
                )
                raise APIError(409, "conflicting_rollout", message)
            return rewards[rollout.number]
        cohort = self._open.get(rollout.key)
        if cohort is None:
            if self._is_closed:
                raise shutting_down(_TOO_LATE)
            cohort = self._begin(rollout)
        place = self._join(cohort, rollout)
        member = cohort.members[place]
        member.num_waiting += 1
        self.num_waiting += 1
        if cohort.task is None and len(cohort.members) == self._config.num_rollouts_per_prompt:
            cohort.timer.cancel()
            cohort.task = asyncio.create_task(self._judge(rollout.key, cohort))
            # Those without numbers cannot be told from the next ones of the same prompt.
            if rollout.number is None:
                del self._open[rollout.key]
        try:
            # Shielded: one client that leaves must not end the waiting of the others.
            rewards = await asyncio.shield(cohort.outcome)
        finally:
            member.num_waiting -= 1
            self.num_waiting -= 1
            if not cohort.outcome.done():
                self._leave(rollout.key, cohort, place)
        return rewards[place]

    def close(self) -> None:
        """Answer the rollouts whose cohorts are not complete with 503, now and from now on. Those
        that are complete are judged."""
        self._is_closed = True
        for key, cohort in list(self._open.items()):
            if cohort.task is None:
                self._fail(key, cohort, shutting_down(_TOO_LATE))

    def _begin(self, rollout: Rollout) -> _Cohort:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[dict[Any, float]] = loop.create_future()
        # asyncio logs an exception that nobody has read, and here nobody may wait any more: it is
        # read at once.
        outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        seconds = self._config.cohort_collection_timeout_s
        timer = loop.call_later(seconds, self._expire, rollout.key)
        cohort = _Cohort(rollout.group_id, rollout.attempt, rollout.prompt_digest, outcome, timer)
        self._open[rollout.key] = cohort
        return cohort

    def _join(self, cohort: _Cohort, rollout: Rollout) -> Any:
        """The rollout's place. The same rollout again waits with the first."""
        if cohort.prompt_digest != rollout.prompt_digest:
            message = "the rollouts of one _ng_group_id have different prompts or principles"
            raise APIError(409, "conflicting_rollout", message)
        if rollout.number is None:
            # Equal responses are different rollouts, and so have places of their own.
            place: Any = (rollout.digest, len(cohort.members))
            # Where one has left, this number may be taken.
            while place in cohort.members:
                place = (rollout.digest, place[1] + 1)
        else:
            place = rollout.number
        member = cohort.members.get(place)
        if member is None:
            if cohort.task is not None:
                need = self._config.num_rollouts_per_prompt
                message = (
                    f"the cohort is complete with {need} rollouts (num_rollouts_per_prompt), and "
                    f"rollout {rollout.number} is not part of it"
                )
                raise APIError(409, "conflicting_rollout", message)
            cohort.members[place] = _Member(rollout)
        elif member.rollout.digest != rollout.digest:
            message = f"the cohort has another response for rollout {rollout.number}"
            raise APIError(409, "conflicting_rollout", message)
        return place

    def _leave(self, key: str, cohort: _Cohort, place: Any) -> None:
        """A request has gone before there was an outcome."""
        if cohort.task is not None:
            # The others still want the rewards, for which this completion is needed.
            if cohort.num_waiting == 0:
                cohort.task.cancel()
                # At once: until the judging has ended, it would end the next ones with it.
                self._forget(key, cohort)
            return
        if cohort.members[place].num_waiting == 0:
            del cohort.members[place]
        if not cohort.members:
            cohort.timer.cancel()
            self._forget(key, cohort)

    async def _judge(self, key: str, cohort: _Cohort) -> None:
        """Set the outcome of a complete cohort."""
        try:
            members = sorted(cohort.members.items(), key=_order)
            rollouts = [member.rollout for _, member in members]
            rewards = await self._evaluate(rollouts)
            outcome = {}
            for (place, _), reward in zip(members, rewards, strict=True):
                outcome[place] = reward
        except asyncio.CancelledError:
            self._fail(key, cohort, shutting_down("the judging has ended"))
            raise
        # A fault of ours too is of every rollout that waits, and none may wait for ever.
        except Exception as error:
            self._fail(key, cohort, error)
            return
        self._forget(key, cohort)
        if cohort.group_id is not None:
            digests = {place: member.rollout.digest for place, member in members}
            self._judged[key] = (digests, outcome)
            while len(self._judged) > self._config.max_terminal_cohorts:
                self._judged.popitem(last=False)
        if not cohort.outcome.done():
            cohort.outcome.set_result(outcome)

    def _check_attempt(self, rollout: Rollout) -> None:
        """A later attempt of a named cohort ends the earlier one, whose rollouts come too late."""
        if rollout.group_id is None:
            return
        latest = self._attempts.get(rollout.group_id, rollout.attempt)
        if rollout.attempt < latest:
            message = f"attempt {rollout.attempt} of the cohort was replaced by attempt {latest}"
            raise APIError(409, "superseded", message)
        self._attempts[rollout.group_id] = rollout.attempt
        self._attempts.move_to_end(rollout.group_id)
        while len(self._attempts) > self._config.max_terminal_cohorts:
            self._attempts.popitem(last=False)
        if rollout.attempt == latest:
            return
        for key, cohort in list(self._open.items()):
            is_earlier = cohort.attempt < rollout.attempt
            if cohort.group_id == rollout.group_id and is_earlier:
                message = f"the cohort was replaced by attempt {rollout.attempt}"
                self._fail(key, cohort, APIError(409, "superseded", message))

    def _expire(self, key: str) -> None:
        # It is there: the timer of a cohort is cancelled before the cohort goes.
        cohort = self._open[key]
        need = self._config.num_rollouts_per_prompt
        seconds = self._config.cohort_collection_timeout_s
        message = (
            f"{len(cohort.members)} of {need} rollouts of this prompt have come in {seconds:g} "
            "seconds (num_rollouts_per_prompt, cohort_collection_timeout_s)"
        )
        self._fail(key, cohort, APIError(504, "incomplete_cohort", message))

    def _fail(self, key: str, cohort: _Cohort, error: Exception) -> None:
        """Answer all rollouts of a cohort with an error, and forget it: a next try begins anew."""
        cohort.timer.cancel()
        self._forget(key, cohort)
        if not cohort.outcome.done():
            cohort.outcome.set_exception(error)
        # Where `_judge` itself has failed it is at its end, and is not stopped by this.
        if cohort.task is not None:
            cohort.task.cancel()

    def _forget(self, key: str, cohort: _Cohort) -> None:
        # Another cohort may have begun under the key.
        if self._open.get(key) is cohort:
            del self._open[key]


def _order(item: tuple[Any, _Member]) -> tuple[bool, Any]:
    """Rollouts with numbers come before those without."""
    place, member = item
    return member.rollout.number is None, place
