"""Plans: which comparison groups or sequences go through the model together.

    plan_micro_batches([300, 200, 100], max_tokens=400)    # [[0, 2], [1]]: groups by index
    plan_sequences(all_ids, max_tokens=4096)               # ungrouped: those that begin alike
    split_group(group_ids, max_tokens=4096)                # one group that is too large, in parts

Every process of a run makes the same plan, from sizes alone. A group that goes in parts has one
loss all the same: `backward_in_parts`.

Shapes: S sequences.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treeward.tree.token_tree import TokenIds, common_prefix_length, sort_key

MIN_SHARED_BETWEEN_SEQUENCES = 8
"""Single sequences to score share a tree if they have so many leading tokens in common: a short
question already pays."""


def plan_micro_batches(
    sizes: Sequence[int],
    *,
    max_tokens: int | None = None,
    max_groups: int | None = None,
    num_ranks: int = 1,
) -> list[list[int]]:
    """Put groups together so that no micro-batch exceeds a budget; return the indices of each.

    Largest first, each into the emptiest of as few micro-batches as hold all.

    `sizes`: the tokens of each group. `max_tokens`: of a micro-batch; a larger group has its own.
    `max_groups`: of a micro-batch. `num_ranks`: processes that share the plan: rank r computes
    `plan[r::num_ranks]`, as many micro-batches as the others, of like size at the same time, some
    perhaps empty.
    """
    most_tokens = max_tokens or sys.maxsize
    most_groups = max_groups or sys.maxsize
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    fewest_by_tokens = math.ceil(sum(sizes) / most_tokens)
    fewest_by_groups = math.ceil(len(sizes) / most_groups)
    fewest = min(max(fewest_by_tokens, fewest_by_groups), len(sizes))
    if num_ranks > 1:
        # every rank has a micro-batch, an empty one where there is no group
        fewest = max(fewest, 1)
    fewest_rounds = math.ceil(fewest / num_ranks)
    for num_rounds in itertools.count(fewest_rounds):
        plan = _distributed(sizes, order, num_rounds * num_ranks, most_tokens, most_groups)
        if plan is not None:
            # Largest first: the ranks compute micro-batches of like size at the same time, and the
            # first one shows whether the memory suffices.
            def num_tokens(members: Sequence[int]) -> int:
                return sum(sizes[i] for i in members)

            plan.sort(key=num_tokens, reverse=True)
            return [sorted(members) for members in plan]
    raise AssertionError("as many micro-batches as groups hold all")


def _distributed(
    sizes: Sequence[int], order: Sequence[int], count: int, most_tokens: int, most_groups: int
) -> list[list[int]] | None:
    """The groups in `count` micro-batches, each group in the emptiest; None if they do not fit."""
    plan: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, number) for number in range(count)]  # a heap of (tokens, micro-batch)
    for i in order:
        if not emptiest:
            return None
        used, number = emptiest[0]
        # Where the emptiest has no room for it, none has.
        if used and used + sizes[i] > most_tokens:  # an empty one takes a group of any size
            return None
        heapq.heappop(emptiest)
        plan[number].append(i)
        if len(plan[number]) < most_groups:
            heapq.heappush(emptiest, (used + sizes[i], number))
    return plan


def plan_padded(
    shapes: Sequence[tuple[int, int]],
    *,
    max_tokens: int | None = None,
    max_groups: int | None = None,
    num_ranks: int = 1,
) -> list[list[int]]:
    """`plan_micro_batches` for padded rows, where one long row lengthens all others.

    `shapes`: (rows, longest row) of each group. Groups of similar length go together, longest
    first.
    """
    if num_ranks > 1:
        return _plan_padded_shares(shapes, max_tokens, max_groups, num_ranks)
    plan: list[list[int]] = []
    rows = 0
    length = 0  # of the first group of a micro-batch, which is the longest
    for i in sorted(range(len(shapes)), key=lambda i: (-shapes[i][1], i)):
        group_rows, longest = shapes[i]
        is_full = not plan
        if max_tokens is not None and (rows + group_rows) * length > max_tokens:
            is_full = True
        if max_groups is not None and plan and len(plan[-1]) == max_groups:
            is_full = True
        if is_full:
            plan.append([])
            rows = 0
            length = longest
        plan[-1].append(i)
        rows += group_rows
    return [sorted(members) for members in plan]


def _plan_padded_shares(
    shapes: Sequence[tuple[int, int]],
    max_tokens: int | None,
    max_groups: int | None,
    num_ranks: int,
) -> list[list[int]]:
    """The plan for the smallest budget of tokens that needs no more micro-batches than `max_tokens`
    does."""

    def cost(members: Sequence[int]) -> int:
        rows = sum(shapes[i][0] for i in members)
        longest = max((shapes[i][1] for i in members), default=0)
        return rows * longest

    best = plan_padded(shapes, max_tokens=max_tokens, max_groups=max_groups)
    # The last micro-batch of a plan may be small. A smaller budget for all gives the ranks work of
    # like size, at no more micro-batches: it is found by halving.
    count = math.ceil(max(len(best), 1) / num_ranks) * num_ranks
    low = 0  # too small a budget
    high = max(map(cost, best), default=0)
    # A larger budget never needs more of them, so that this is the least, and no more than
    # `max_tokens`.
    while high - low > 1:
        middle = (low + high) // 2
        plan = plan_padded(shapes, max_tokens=middle, max_groups=max_groups)
        if len(plan) <= count:
            best = plan
            high = middle
        else:
            low = middle
    best.sort(key=cost, reverse=True)
    num_empty = count - len(best)
    return best + [[] for _ in range(num_empty)]


def distinct_sequences(sequences: Sequence[TokenIds]) -> tuple[list[TokenIds], list[int]]:
    """The sequences without repeats, and the place of each sequence among these."""
    place_of: dict[tuple[int, ...], int] = {}
    distinct: list[TokenIds] = []
    places = []
    for sequence in sequences:
        key = tuple(map(int, sequence))
        if key not in place_of:
            place_of[key] = len(distinct)
            distinct.append(sequence)
        places.append(place_of[key])
    return distinct, places


def plan_sequences(
    sequences: Sequence[TokenIds],
    *,
    max_tokens: int | None = None,
    max_sequences: int | None = None,
    share: bool = True,
    num_cached: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Plan the scoring of ungrouped sequences: micro-batches of groups of indices.

    In lexicographic order sequences that begin alike are neighbours and share a group; with
    `share=False` (padded rows) those of similar length are neighbours. `max_tokens`: computed
    tokens of a micro-batch; a longer sequence has its own. `max_sequences`: of a micro-batch.
    `num_cached`: each sequence's first tokens that need not be computed.
    """
    most_tokens = max_tokens or sys.maxsize
    most_sequences = max_sequences or sys.maxsize
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    if not share:
        shapes = [(1, len(array)) for array in arrays]
        micro_batches = []
        for members in plan_padded(shapes, max_tokens=most_tokens, max_groups=most_sequences):
            micro_batches.append([[i] for i in members])  # each row is a group of its own
        return micro_batches

    plan: list[list[list[int]]] = []
    used = 0
    count = 0
    previous: np.ndarray | None = None
    for i in sorted(range(len(arrays)), key=lambda i: sort_key(arrays[i])):
        array = arrays[i]
        shared = 0
        if previous is not None:
            shared = common_prefix_length(previous, array)
        # an equal sequence is shared however short it is
        if shared < min(MIN_SHARED_BETWEEN_SEQUENCES, len(array)):
            shared = 0
        cached = 0
        if num_cached is not None:
            cached = num_cached[i]
        cost = len(array) - max(shared, cached)
        # an equal sequence costs nothing, so no budget is too small for it
        exceeds_tokens = cost > 0 and used + cost > most_tokens
        if not plan or exceeds_tokens or count == most_sequences:
            plan.append([])
            used = 0
            count = 0
            # the neighbour is in another micro-batch: nothing of it is shared
            shared = 0
            cost = len(array) - cached
        if shared:
            plan[-1][-1].append(i)
        else:
            plan[-1].append([i])
        used += cost
        count += 1
        previous = array
    return plan


class GroupPart(NamedTuple):
    """Sequences `members` of the group number `group`. `num_tokens`: tokens to compute: of their
    tree, or padded."""

    group: int
    members: tuple[int, ...]
    num_tokens: int


def split_group(
    sequences: Sequence[TokenIds], *, max_tokens: int, share: bool = True, group: int = 0
) -> list[GroupPart]:
    """Cut one group into parts of at most `max_tokens`, as few as its order allows.

    `share`: parts are trees, of sequences that begin alike; otherwise padded rows, of sequences of
    like length. A longer sequence is its own part.
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    if share:
        order = sorted(range(len(arrays)), key=lambda i: sort_key(arrays[i]))
    else:
        order = sorted(range(len(arrays)), key=lambda i: -len(arrays[i]))
    parts: list[GroupPart] = []
    members: list[int] = []
    used = 0
    for i in order:
        # The tokens of the part if this sequence joins it.
        if not members:
            needed = len(arrays[i])
        elif share:
            # neighbours in lexicographic order share the longest prefix
            needed = used + len(arrays[i]) - common_prefix_length(arrays[members[-1]], arrays[i])
        else:
            needed = (len(members) + 1) * len(arrays[members[0]])
        if members and needed > max_tokens:
            parts.append(GroupPart(group, tuple(members), used))
            members = []
            needed = len(arrays[i])
        members.append(i)
        used = needed
    if members:
        parts.append(GroupPart(group, tuple(members), used))
    return parts


def plan_parts(
    groups: Sequence[Sequence[TokenIds]],
    *,
    max_tokens: int,
    share: bool = True,
    num_ranks: int = 1,
) -> list[list[GroupPart]]:
    """The micro-batches of groups: each has at most `max_tokens`, unless a single sequence is
    larger.

    A group that fits stays whole; empty groups are in no micro-batch. `num_ranks`: see
    `plan_micro_batches`.
    """
    parts: list[GroupPart] = []
    for number, sequences in enumerate(groups):
        parts += split_group(sequences, max_tokens=max_tokens, share=share, group=number)
    if share:
        sizes = [part.num_tokens for part in parts]
        plan = plan_micro_batches(sizes, max_tokens=max_tokens, num_ranks=num_ranks)
    else:
        shapes = []
        for part in parts:
            num_rows = len(part.members)
            # Its tokens are padded ones, so this is its longest row.
            shapes.append((num_rows, part.num_tokens // num_rows))
        plan = plan_padded(shapes, max_tokens=max_tokens, num_ranks=num_ranks)
    micro_batches = []
    for members in plan:
        micro_batches.append([parts[i] for i in members])
    return micro_batches


def order_of_parts(parts: Sequence[Sequence[int]]) -> Tensor | None:
    """The index of each sequence's score in the concatenated scores of `parts` (their sequences).

    int64 (S,) on the CPU, or None if they are in order.
    """
    members = list(itertools.chain.from_iterable(parts))
    if members == sorted(members):
        return None
    return torch.from_numpy(np.argsort(members))


def backward_in_parts(
    parts: Sequence[Callable[[], Tensor]],
    loss_of: Callable[[Tensor], Tensor],
    *,
    order_S: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Add the gradient of `scale * loss_of(scores_S)` to the parameters behind the scores.

    `parts`: for each part a deterministic function that computes its scores. `order_S`: of
    `order_of_parts`, on the device of the scores. Returns the scores (S,), in the order of the
    sequences, and the loss without `scale`, both detached. Several parts are scored without a graph
    first, for the gradient of the loss by the scores, and then forward again and backward one by
    one (Gao et al. 2021, arXiv 2101.06983). The host never waits for a GPU here.
    """
    if len(parts) == 1:
        scores_S = parts[0]()
        scores_S, loss = _scored(scores_S, order_S, loss_of)
        (scale * loss).backward()
        return scores_S.detach(), loss.detach()

    # The loss compares scores of all parts, whose graphs do not fit into memory together.
    with torch.no_grad():
        part_scores = [score() for score in parts]
    joined_S = torch.cat(part_scores).requires_grad_(True)
    scores_S, loss = _scored(joined_S, order_S, loss_of)
    (scale * loss).backward()
    assert joined_S.grad is not None
    part_sizes = [len(scores) for scores in part_scores]
    for score, grad in zip(parts, joined_S.grad.split(part_sizes), strict=True):
        score().backward(grad)
    return scores_S.detach(), loss.detach()


def _scored(
    scores_S: Tensor, order_S: Tensor | None, loss_of: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """The scores in the order of the sequences, and their loss."""
    if order_S is not None:
        scores_S = scores_S[order_S]
    return scores_S, loss_of(scores_S)
