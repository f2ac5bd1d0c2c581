"""Groups that do not fit a budget of tokens, in parts: which sequences go together, and an exact gradient.

    for micro_batch in plan_parts(groups, max_tokens=4096):
        for part in micro_batch:
            part.group, part.members         # some sequences of one group; they share their prefix

A loss that separates by sequence, as that of a policy, is computed part by part. One that compares the sequences of a
group, as Bradley and Terry's, needs all scores of the group at once: `backward_in_parts`.

Shapes: S sequences of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from treeward.tree.batch import plan_micro_batches, plan_padded
from treeward.tree.token_tree import TokenIds, common_prefix_length


class GroupPart(NamedTuple):
    """Sequences `members` of the group number `group`. `num_tokens`: tokens to compute: of their tree, or padded."""

    group: int
    members: tuple[int, ...]
    num_tokens: int


def split_group(
    sequences: Sequence[TokenIds], *, max_tokens: int, share: bool = True, group: int = 0
) -> list[GroupPart]:
    """Cut one group into as few parts of at most `max_tokens` as its order gives; one part where all fit.

    `share`: a part is a tree, and sequences that begin alike stay together; otherwise it is padded rows, and those of
    like length do. A sequence that is larger than `max_tokens` is a part of its own.
    """
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    if share:
        order = sorted(range(len(arrays)), key=lambda i: arrays[i].astype(">i8").tobytes())
    else:
        order = sorted(range(len(arrays)), key=lambda i: -len(arrays[i]))
    parts: list[GroupPart] = []
    members: list[int] = []
    used = 0
    for i in order:
        if not members:
            needed = len(arrays[i])
        elif share:  # neighbours in lexicographic order share the longest prefix
            needed = used + len(arrays[i]) - common_prefix_length(arrays[members[-1]], arrays[i])
        else:
            needed = (len(members) + 1) * len(arrays[members[0]])
        if members and needed > max_tokens:
            parts.append(GroupPart(group, tuple(members), used))
            members, needed = [], len(arrays[i])
        members.append(i)
        used = needed
    return [*parts, GroupPart(group, tuple(members), used)] if members else parts


def plan_parts(
    groups: Sequence[Sequence[TokenIds]], *, max_tokens: int, share: bool = True, num_ranks: int = 1
) -> list[list[GroupPart]]:
    """The micro-batches of groups: each has at most `max_tokens`, unless a single sequence is larger.

    A group that fits stays whole. Groups without sequences are in no micro-batch. `num_ranks`: as `plan_micro_batches`
    has it.
    """
    parts = [
        part
        for g, sequences in enumerate(groups)
        for part in split_group(sequences, max_tokens=max_tokens, share=share, group=g)
    ]
    if share:
        plan = plan_micro_batches([part.num_tokens for part in parts], max_tokens=max_tokens, num_ranks=num_ranks)
    else:
        shapes = [(len(part.members), part.num_tokens // len(part.members)) for part in parts]
        plan = plan_padded(shapes, max_tokens=max_tokens, num_ranks=num_ranks)
    return [[parts[i] for i in members] for members in plan]


def order_of_parts(parts: Sequence[Sequence[int]]) -> Tensor | None:
    """Where the score of each sequence is among those of the parts, one after another: int64 (S,) on the CPU, or None
    if they are in order. `parts`: the sequences of each."""
    members = [i for part in parts for i in part]
    return None if members == sorted(members) else torch.from_numpy(np.argsort(members))


def backward_in_parts(
    parts: Sequence[Callable[[], Tensor]],
    loss_of: Callable[[Tensor], Tensor],
    *,
    order_S: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Add the gradient of `scale * loss_of(scores_S)` to the parameters behind the scores.

    `parts`: for each part a function that computes its scores, deterministic. `order_S`: as `order_of_parts` gives it,
    on the device of the scores. Returns the scores (S,), in the order of the sequences, and the loss without `scale`;
    both detached. The host never waits for a GPU here.

    One part takes one forward and one backward pass. With several, first the scores of all are computed without a
    graph, then the gradient of the loss with respect to them, and then each part goes forward again and backward with
    its share of it: by the chain rule the same gradient, for one more forward pass, in the memory of one part (Gao et
    al. 2021, arXiv 2101.06983).
    """
    if len(parts) == 1:
        scores_S = parts[0]()
    else:
        with torch.no_grad():
            of_parts = [score() for score in parts]
        scores_S = joined_S = torch.cat(of_parts).requires_grad_(True)
    if order_S is not None:
        scores_S = scores_S[order_S]
    loss = loss_of(scores_S)
    (scale * loss).backward()
    if len(parts) > 1:
        assert joined_S.grad is not None
        for score, grad in zip(parts, joined_S.grad.split([len(one) for one in of_parts]), strict=True):
            score().backward(grad)
    return scores_S.detach(), loss.detach()
