"""Whose turn it is: the requests that wait for a step of the engine, by model, and in which order they go.

    line = Line()
    line.add(work)
    works = line.next_works(attained=lambda work: work.num_taken)

Models take turns. Of one model's requests, the one that has had the least goes first, so a large one does not hold up
the small ones behind it; at every second time the oldest goes first, so that no stream of small ones holds it up for
ever. Requests that have had the same go in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from treeward.scoring.score import Score
from treeward.serving.models import Asked, Item, ServedModel

__all__ = ["TURN", "Line", "Outcome", "Work", "prompts_together"]

TURN = 8
"""Conversations of one request that are taken before the next has its turn."""

_WINDOW = 512
"""Requests that are looked at in one go: what this takes does not grow with the queue."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A score; where it has none, `by_request` says whether the conversation cannot be scored or the server failed."""

    score: Score
    by_request: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """The conversations of one request. `missing`: how many have no outcome; `over`: nobody waits for them any more.

    `num_prepared` and `num_taken`: how many were made tokens of, and how many went on to be scored.
    """

    model: ServedModel
    conversations: Sequence[Asked]
    future: asyncio.Future[list[Outcome]]
    outcomes: list[Outcome | None]
    missing: int
    over: bool = False
    num_prepared: int = 0
    num_taken: int = 0
    ready: deque[tuple[int, Item]] = field(default_factory=deque)


class Line:
    """Requests that wait, in the order in which they came. Not for several threads at one time."""

    def __init__(self) -> None:
        self._of_model: OrderedDict[str, OrderedDict[Work, None]] = OrderedDict()  # by whose turn it is
        self._num_turns = 0

    def __bool__(self) -> bool:
        return bool(self._of_model)

    def add(self, work: Work) -> None:
        """Let it wait; it keeps its place if it does already."""
        self._of_model.setdefault(work.model.name, OrderedDict()).setdefault(work)

    def discard(self, work: Work) -> None:
        """Forget it, if it waits."""
        waiting = self._of_model.get(work.model.name)
        if waiting is not None and work in waiting:
            del waiting[work]
            if not waiting:
                del self._of_model[work.model.name]

    def any(self, condition: Callable[[Work], bool]) -> bool:
        """Whether one of the first requests is like this."""
        return any(condition(work) for waiting in self._of_model.values() for work in islice(waiting, _WINDOW))

    def next_works(
        self, attained: Callable[[Work], int], condition: Callable[[Work], bool] = lambda work: True
    ) -> list[Work]:
        """Requests of the model whose turn it is, in their order; `attained`: how many conversations each has had."""
        for name in list(self._of_model):
            self._of_model.move_to_end(name)
            works = [work for work in islice(self._of_model[name], _WINDOW) if condition(work)]
            if works:
                break
        else:
            return []
        self._num_turns += 1
        oldest = works[0]
        works.sort(key=lambda work: attained(work) // TURN)
        if self._num_turns % 2 and works[0] is not oldest:
            works.remove(oldest)
            works.insert(0, oldest)
        return works


def prompts_together(works: Sequence[Work]) -> list[Work]:
    """The same requests; those whose next conversation has the prompt of an earlier one's come right after it."""
    groups: dict[object, list[Work]] = {}
    for work in works:
        item = work.ready[0][1]
        groups.setdefault(item.prompt if item.shared_tokens else work, []).append(work)
    return [work for group in groups.values() for work in group]
