"""`RequestQueue`: the requests that wait for a step of the batcher, and whose turn it is.

    queue = RequestQueue(attained=lambda request: request.num_taken)
    queue.add(request)
    requests = queue.next_requests()

Models take turns. Of one model's requests, the one that has had the least goes first, so a large one does not hold up
the small ones behind it; every second time the oldest goes first, so a stream of small ones does not hold up a large
one. Requests that have had the same go in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from treeward.scoring.score import Conversation, Score
from treeward.serving.models import Item, ServedModel
from treeward.serving.rendered_text import RenderedText

__all__ = ["TURN", "PendingRequest", "RequestQueue"]

TURN = 8
"""Conversations of one request that are taken before the next has its turn."""

_WINDOW = 512
"""Requests that are looked at in one go, so the cost of a step does not grow with the queue."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """The conversations of one request, and their scores as they come in.

    `num_prepared` were tokenized, `num_taken` went on to be scored; `ready` lie between, with their place in the
    request. `is_over`: it is complete, or nobody waits for it any more.
    """

    model: ServedModel
    conversations: Sequence[Conversation | RenderedText]
    future: asyncio.Future[list[Score]]
    scores: list[Score | None]
    num_missing: int
    num_prepared: int = 0
    num_taken: int = 0
    ready: deque[tuple[int, Item]] = field(default_factory=deque)
    is_over: bool = False


class RequestQueue:
    """Requests in the order in which they came. `attained`: how many conversations of one had their turn.

    Not thread-safe: the batcher locks.
    """

    def __init__(self, attained: Callable[[PendingRequest], int]) -> None:
        self._attained = attained
        self._of_model: OrderedDict[str, OrderedDict[PendingRequest, None]] = OrderedDict()  # by whose turn it is
        self._num_turns = 0

    def __bool__(self) -> bool:
        return bool(self._of_model)

    def add(self, request: PendingRequest) -> None:
        """Append a request; one that waits already keeps its place."""
        self._of_model.setdefault(request.model.name, OrderedDict()).setdefault(request)

    def any(self, condition: Callable[[PendingRequest], bool]) -> bool:
        """Whether one of the first requests meets the condition."""
        return any(condition(request) for of_one in self._of_model.values() for request in islice(of_one, _WINDOW))

    def discard(self, request: PendingRequest) -> None:
        """Remove a request, if it waits."""
        waiting = self._of_model.get(request.model.name, OrderedDict())
        waiting.pop(request, None)
        if not waiting:
            self._of_model.pop(request.model.name, None)

    def next_requests(self, condition: Callable[[PendingRequest], bool] = lambda request: True) -> list[PendingRequest]:
        """Requests of the model whose turn it is that meet the condition, in their order; empty if none does."""
        for name in list(self._of_model):
            self._of_model.move_to_end(name)
            requests = [request for request in islice(self._of_model[name], _WINDOW) if condition(request)]
            if requests:
                break
        else:
            return []
        self._num_turns += 1
        oldest = requests[0]
        requests.sort(key=lambda request: self._attained(request) // TURN)
        if self._num_turns % 2:
            requests.remove(oldest)
            requests.insert(0, oldest)
        return requests
