"""`StepBatches`: the batches of a step of a reward-model run; a thread prepares the next step's
during the current one.

    prefetcher = Prefetcher(BatchPreparer(setup).step, num_steps=100)
    batches = prefetcher.get(1)         # and a thread begins with step 2

Their memory is page-locked, so that the host never waits within a step. The data of a step follow
from its number, so there is no state to save.

Shapes: S completions of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from treeward.data.encoding import Comparison, EncodedDataset
from treeward.losses import Labels, ranked_pairs
from treeward.model.reward_model import FeatureBatch
from treeward.model.wrapped import Layout
from treeward.training.setup import RewardModelSetup
from treeward.tree.batch import Batch, Movable
from treeward.tree.plan import plan_micro_batches, plan_padded, split_group

_T = TypeVar("_T")

_MOST_FEATURES = 4096
"""The limit of a micro-batch of features, in completions: 64 MB of float32 at a hidden size of
4096."""


@dataclass(frozen=True, slots=True)
class MicroBatch(Movable):
    """Comparisons of one forward and backward pass: `batches`, several where one comparison exceeds
    the token budget. `order_S`: where the score of each sequence (of a process reward model: of
    each step) is among those of the batches (`tree.plan.order_of_parts`)."""

    batches: tuple[Batch | FeatureBatch, ...]
    order_S: Tensor | None
    labels: Labels


@dataclass(frozen=True, slots=True)
class StepBatches:
    """This process's part of a step, whose loss is a mean over `num_units`: the `micro_batches`,
    and the tokens of their comparisons as plain rows."""

    num_units: float
    micro_batches: tuple[MicroBatch, ...]
    num_row_tokens: int

    @property
    def num_computed_tokens(self) -> int:
        total = 0
        for micro_batch in self.micro_batches:
            total += sum(batch.num_computed_tokens for batch in micro_batch.batches)
        return total


class RankBatch(NamedTuple):
    """A micro-batch of this process, and its comparisons by their index among the planned ones,
    perhaps none."""

    comparisons: dict[int, Comparison]
    micro_batch: MicroBatch


class BatchPreparer:
    """Makes the batches of a run in the host's memory, statelessly. Every process makes the same
    plan of a whole step, from sizes alone, and reads and packs its own share: as many micro-batches
    and forward passes as the others."""

    def __init__(self, setup: RewardModelSetup) -> None:
        self.model = setup.model
        self.mesh = setup.mesh
        self.heads = setup.heads
        self.order = setup.order
        self.training_sets = list(setup.training_sets.values())
        self.features = setup.features
        self.batch_size = setup.policy.train_global_batch_size
        self.max_tokens = setup.policy.micro_batch_tokens
        self.max_groups = setup.policy.train_micro_batch_size
        self.max_groups_of_validation = setup.rm.val_micro_batch_size or self.max_groups
        self.weighs_pairs = setup.rm.loss.weight == "pair"

    def step(self, number: int) -> StepBatches:
        """The batches of the step of this number, counted from 1."""
        places = self.order.batch(number - 1, self.batch_size)
        rows = [(self.training_sets[which], row) for which, row in places]
        micro_batches: list[MicroBatch] = []
        num_row_tokens = 0
        for share in self.shares(rows):
            micro_batches.append(share.micro_batch)
            num_row_tokens += sum(item.num_tokens for item in share.comparisons.values())
        # Of the whole step, not of this process's share: gradients are summed over the processes,
        # and the loss is divided once.
        num_units: float = len(rows)
        if self.heads.step_options is not None:
            counts = [dataset.step_counts(row) for dataset, row in rows]
            num_units = self.heads.num_units_of_steps(counts)
        elif self.weighs_pairs:
            ranks = [dataset.ranks(row) for dataset, row in rows]
            pair_labels = [dataset.pair_labels(row) for dataset, row in rows]
            pairs = ranked_pairs(ranks, pair_labels=pair_labels, **self.heads.pair_options)
            num_units = pairs.num_units
        return StepBatches(num_units, tuple(micro_batches), num_row_tokens=num_row_tokens)

    def shares(
        self,
        rows: Sequence[tuple[EncodedDataset, int]],
        *,
        validation: bool = False,
    ) -> Iterator[RankBatch]:
        """This process's micro-batches of rows of data sets, which are the same on all
        processes."""
        plan = self.plan(rows, validation=validation)
        num_ranks = self.mesh.data_size
        for start in range(0, len(plan), num_ranks):
            rank_batches = plan[start : start + num_ranks]
            rank_comparisons: dict[int, Comparison] = {}
            for i in rank_batches[self.mesh.data_rank]:
                dataset, row = rows[i]
                rank_comparisons[i] = dataset[row]
            # Processes exchange something in every pass, so that all need as many.
            num_passes = 0
            for batch in rank_batches:
                num_passes = max(num_passes, self._num_passes([rows[i] for i in batch]))
            packed = self.micro_batch(
                list(rank_comparisons.values()),
                num_passes=num_passes,
                features=self._features([rows[i] for i in rank_comparisons]),
            )
            yield RankBatch(rank_comparisons, packed)

    def plan(
        self,
        rows: Sequence[tuple[EncodedDataset, int]],
        *,
        validation: bool = False,
    ) -> list[list[int]]:
        """Which comparisons share a forward pass; see `plan_passes`."""
        num_ranks = self.mesh.data_size
        if self.features:
            # A head reads completions whose tokens are done, so they are what is counted.
            sizes = [int(dataset.shapes[row][0]) for dataset, row in rows]
            return plan_micro_batches(sizes, max_tokens=_MOST_FEATURES, num_ranks=num_ranks)
        max_groups = self.max_groups
        if validation:
            max_groups = self.max_groups_of_validation
        return plan_passes(
            rows,
            self.model.layout,
            max_tokens=self.max_tokens,
            max_groups=max_groups,
            num_ranks=num_ranks,
        )

    def micro_batch(
        self,
        comparisons: Sequence[Comparison],
        *,
        num_passes: int = 1,
        features: FeatureBatch | None = None,
    ) -> MicroBatch:
        """The comparisons packed; page-locked where the model is on a GPU. A process with fewer
        forward passes than `num_passes` computes a token and ignores its score. `features`: the
        head's inputs, instead of tokens."""
        batches: list[Batch | FeatureBatch] = []
        order_S: Tensor | None = None
        if features is not None:
            batches.append(features)
        elif comparisons:
            groups = [comparison.token_ids for comparison in comparisons]
            parts, order_S = self.model.pack_parts(groups, max_tokens=self.max_tokens)
            batches.extend(parts)
        if len(batches) < num_passes:
            if order_S is None:
                # It leaves out the values of the tokens that follow.
                num_values = 0
                for comparison in comparisons:
                    num_values += sum(map(self.model.num_values, comparison.token_ids))
                order_S = torch.arange(num_values)
            batches += [self.model.pack_one_token()] * (num_passes - len(batches))
        labels = self.heads.labels(comparisons)
        packed = MicroBatch(tuple(batches), order_S, labels)
        if self.model.device.type == "cuda":
            packed = packed.pin()
        return packed

    def _features(self, rows: Sequence[tuple[EncodedDataset, int]]) -> FeatureBatch | None:
        """The head's inputs for rows of data sets, perhaps none; None if the backbone computes
        them."""
        if not self.features:
            return None
        if not rows:
            return FeatureBatch(torch.empty(0, *self.model.feature_shape))
        states = [self.features[dataset.fingerprint](row) for dataset, row in rows]
        return FeatureBatch(torch.cat(states))

    def _num_passes(self, rows: Sequence[tuple[EncodedDataset, int]]) -> int:
        """The forward passes of a micro-batch: one, unless a single comparison exceeds the
        budget."""
        most = self.max_tokens
        share = self.model.layout == "tree"
        # A process alone waits for nobody: it computes as many as its comparison needs.
        if self.mesh.data_size == 1 or most is None or len(rows) != 1 or self.features:
            return 1
        dataset, row = rows[0]
        # From sizes, which every process has in memory: only a comparison that is too large is
        # read by all of them.
        if share:
            num_tokens = dataset.tree_tokens[row]
        else:
            num_tokens = dataset.shapes[row].prod()
        if num_tokens <= most:
            return 1
        return len(split_group(dataset[row].token_ids, max_tokens=most, share=share))


def plan_passes(
    rows: Sequence[tuple[EncodedDataset, int]],
    layout: Layout,
    *,
    max_tokens: int | None,
    max_groups: int | None,
    num_ranks: int = 1,
) -> list[list[int]]:
    """Which comparisons share a forward pass: as many as the limits allow, by index into `rows`.

    The plan of rank r is `plan[r::num_ranks]`, as in `plan_micro_batches`.
    """
    # A tree costs its tokens; a padded row lengthens with the longest row beside it.
    limits = {"max_tokens": max_tokens, "max_groups": max_groups}
    if layout == "tree":
        sizes = [int(dataset.tree_tokens[row]) for dataset, row in rows]
        return plan_micro_batches(sizes, **limits, num_ranks=num_ranks)
    shapes = []
    for dataset, row in rows:
        num_completions, longest = dataset.shapes[row]
        shapes.append((int(num_completions), int(longest)))
    return plan_padded(shapes, **limits, num_ranks=num_ranks)


class Prefetcher(Generic[_T]):
    """Calls `make(number)` one step ahead, up to `num_steps`; an error is raised by the `get` of
    its number."""

    def __init__(self, make: Callable[[int], _T], *, num_steps: int) -> None:
        self._make = make
        self._num_steps = num_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="treeward-prefetch")
        self._next: tuple[int, Future[_T]] | None = None

    def get(self, number: int) -> _T:
        """The result of `make` for this number; a thread then makes the next."""
        prepared = self._next
        # Forgotten before its error is raised: another `get` makes it again.
        self._next = None
        if prepared is not None and prepared[0] == number:
            made = prepared[1].result()
        else:
            made = self._make(number)
        if number < self._num_steps:
            self._next = (number + 1, self._thread.submit(self._make, number + 1))
        return made

    def close(self) -> None:
        """End the thread, and drop its result. Safe to repeat."""
        self._thread.shutdown(cancel_futures=True)
        self._next = None
