"""`StepBatches`: what a step of a reward-model run computes; a thread prepares the next step's beside the current one.

    preparer = BatchPreparer(setup)
    ahead = Ahead(preparer.step, num_steps=100)
    batches = ahead.get(1)              # and a thread begins with step 2
    for micro_batch in batches.micro_batches: micro_batch.to(device, non_blocking=True)
    ahead.close()

Reading, planning and packing are Python and numpy. On a GPU they are done while it computes, and their memory is
page-locked, so that neither a copy nor anything else makes the host wait within a step. The data of a step follow from
its number alone: what was prepared ahead and never used is no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from treeward.data.encoding import Comparison
from treeward.losses import Pairs, ranked_pairs
from treeward.training.setup import RewardModelSetup
from treeward.tree.batch import Batch, Movable, plan_micro_batches, plan_padded

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class MicroBatch(Movable):
    """Comparisons of one forward and backward pass: `batches`, several where one comparison exceeds the token budget.

    `order_S`: where the score of each sequence is among those of the batches (`tree.parts.order_of_parts`).
    """

    batches: tuple[Batch, ...]
    order_S: Tensor | None
    pairs: Pairs


@dataclass(frozen=True, slots=True)
class StepBatches:
    """All comparisons of one step: `micro_batches`; `pairs` of the whole step; `num_scores`, its completions."""

    micro_batches: tuple[MicroBatch, ...]
    pairs: Pairs
    num_scores: int

    @property
    def num_computed_tokens(self) -> int:
        return sum(batch.num_computed_tokens for one in self.micro_batches for batch in one.batches)

    @property
    def num_row_tokens(self) -> int:
        return sum(batch.num_row_tokens for one in self.micro_batches for batch in one.batches)


class BatchPreparer:
    """Makes the batches of a run in the memory of the host. It changes nothing, so any thread may ask it."""

    def __init__(self, setup: RewardModelSetup) -> None:
        self.setup, self.config, self.model = setup, setup.config, setup.model

    def step(self, number: int) -> StepBatches:
        """The batches of the step of this number, counted from 1."""
        size, sets = self.config.policy.train_global_batch_size, list(self.setup.training_sets.values())
        comparisons = [sets[which][row] for which, row in self.setup.order.batch(number - 1, size)]
        micro_batches = tuple(self.micro_batch([comparisons[i] for i in some]) for some in self.plan(comparisons))
        return StepBatches(micro_batches, self._pairs(comparisons), sum(len(one.ranks) for one in comparisons))

    def plan(self, comparisons: Sequence[Comparison], *, validation: bool = False) -> list[list[int]]:
        """Which comparisons share a forward pass: as many as the configured tokens and comparisons allow."""
        policy, max_groups = self.config.policy, self.config.policy.train_micro_batch_size
        if validation:
            max_groups = self.config.rm.val_micro_batch_size or max_groups
        limits = {"max_tokens": policy.micro_batch_tokens, "max_groups": max_groups}
        if self.model.layout == "tree":
            return plan_micro_batches([c.tree_tokens for c in comparisons], **limits)
        return plan_padded([(len(c.token_ids), max(map(len, c.token_ids))) for c in comparisons], **limits)

    def micro_batch(self, comparisons: Sequence[Comparison]) -> MicroBatch:
        """The comparisons packed; page-locked where the model is on a GPU."""
        groups = [one.token_ids for one in comparisons]
        batches, order_S = self.model.pack_parts(groups, max_tokens=self.config.policy.micro_batch_tokens)
        packed = MicroBatch(tuple(batches), order_S, self._pairs(comparisons))
        return packed.pin() if self.model.device.type == "cuda" else packed

    def _pairs(self, comparisons: Sequence[Comparison]) -> Pairs:
        """The pairs that the loss compares."""
        wanted, margins = self.config.rm.loss.margin, None
        if wanted:
            margins = [c.scores if c.margin is None and wanted == "scores" else c.margin for c in comparisons]
        half = self.config.data.ties == "half"
        return ranked_pairs([c.ranks for c in comparisons], margins=margins, ties="half" if half else "drop")


class Ahead(Generic[_T]):
    """`make(number)` for numbers up to `num_steps`, one step ahead: what fails is raised by the `get` of its number."""

    def __init__(self, make: Callable[[int], _T], *, num_steps: int) -> None:
        self._make, self._num_steps = make, num_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="treeward-prefetch")
        self._next: tuple[int, Future[_T]] | None = None

    def get(self, number: int) -> _T:
        """What `make` gives for this number; a thread then makes the next."""
        prepared, self._next = self._next, None
        made = prepared[1].result() if prepared is not None and prepared[0] == number else self._make(number)
        if number < self._num_steps:
            self._next = (number + 1, self._thread.submit(self._make, number + 1))
        return made

    def close(self) -> None:
        """End the thread; what it is making is thrown away. Safe to repeat."""
        self._thread.shutdown(cancel_futures=True)
        self._next = None
