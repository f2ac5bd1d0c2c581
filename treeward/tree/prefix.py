"""`Prefix`: the keys and values of a conversation's first tokens, kept from an earlier forward pass.

    batch = TreeBatch.from_groups([completions_without_their_prompt], prefixes=[prefix], keep=[(0, 0, 120)])
    scores_S = model(batch)
    prompt, = batch.layout.exchange.kept()      # keys and values of the prompt and 120 tokens more

In a causal model the keys and values at a position depend on the tokens up to it alone: whoever continues the same
tokens may attend to them as they are. A prefix hangs above the root of a tree, so that the tree holds only what is new.

Shapes: J key/value heads, P tokens of the prefix, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """For each attention layer, in the order of the forward pass, keys and values (J, P, D) of the first P tokens."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def __len__(self) -> int:
        return self.keys[0].shape[1]

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self.keys, *self.values))

    def first(self, num_tokens: int) -> Prefix:
        """Its first tokens, as views."""
        if num_tokens == len(self):
            return self
        return Prefix(
            tuple(key[:, :num_tokens] for key in self.keys), tuple(value[:, :num_tokens] for value in self.values)
        )


Prefixes = Sequence[tuple[Tensor, Tensor] | None]
"""For each tree the keys and values (J, P, D) of its prefix in one layer."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What is to be kept of a tree: its prefix, if it has one, and then these ranges of the row, root first."""

    prefix: Prefix | None
    ranges: tuple[tuple[int, int], ...]


class Exchange:
    """What the attention layers of one forward pass read of prefixes, and what they leave to be kept.

    It counts the layers as they are called, so one exchange serves one forward pass.
    """

    def __init__(self, prefixes: Sequence[Prefix | None], keep: Sequence[Kept] = ()) -> None:
        self.prefixes = tuple(prefixes)
        self.keep = tuple(keep)
        self._layer = 0
        self._kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in keep]

    def enter(self, key_BJTD: Tensor, value_BJTD: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Called by each attention layer with the row's keys and values; gives those of each tree's prefix."""
        layer, self._layer = self._layer, self._layer + 1
        for one, kept in zip(self.keep, self._kept, strict=True):
            kept.append(
                (
                    _joined(None if one.prefix is None else one.prefix.keys[layer], key_BJTD[0], one.ranges),
                    _joined(None if one.prefix is None else one.prefix.values[layer], value_BJTD[0], one.ranges),
                )
            )
        return [None if one is None else (one.keys[layer], one.values[layer]) for one in self.prefixes]

    def kept(self) -> list[Prefix]:
        """After the forward pass, the prefixes that were asked for."""
        return [Prefix(tuple(key for key, _ in layers), tuple(value for _, value in layers)) for layers in self._kept]


def _joined(prefix_JPD: Tensor | None, row_JTD: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    parts = [] if prefix_JPD is None else [prefix_JPD]
    return torch.cat([*parts, *(row_JTD[:, start:end] for start, end in ranges)], dim=1)
