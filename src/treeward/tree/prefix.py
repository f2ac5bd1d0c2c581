"""`Prefix`: what the layers of a model know of a conversation's first tokens, kept from an earlier
forward pass: keys and values of attention, and the states of recurrent layers.

    groups = [completions_without_their_prompt]
    batch = TreeBatch.from_groups(groups, prefixes=[prefix], keep=[(0, 0, 120)])
    scores_S = model(batch)
    prompt, = batch.layout.exchange.kept()      # of the prompt and 120 tokens more

In a causal model it depends only on the tokens up to its end, so every continuation can go on from
it: a prefix hangs above the root of a tree, which holds only the new tokens. `PrefixCache` holds
prefixes within a budget of bytes, for a server that receives the completions of a prompt one by
one; the least recently used go first.

Shapes: B batch (1: a row), J key/value heads, T tokens of the row, P of the prefix, D head
dimension.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treeward.tree.token_tree import TokenIds, common_prefix_length, sort_key


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The first P tokens of a conversation.

    `keys`, `values`: of each attention layer, in the order of the forward pass, (J, P, D).
    `states`: after the last of the tokens, of each function of a recurrent layer (`mixers.py`), in
    the same order.
    """

    num_tokens: int
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    states: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        return (*self.keys, *self.values, *self.states)

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def first(self, num_tokens: int) -> Prefix:
        """Its first tokens, as views. With states it has none but itself, because a state is that
        of one place."""
        if num_tokens == len(self):
            return self
        assert not self.states, "the states at other places were not kept"
        keys = tuple(key[:, :num_tokens] for key in self.keys)
        values = tuple(value[:, :num_tokens] for value in self.values)
        return Prefix(num_tokens, keys, values)


Prefixes = Sequence[tuple[Tensor, Tensor] | None]
"""For each tree the keys and values (J, P, D) of its prefix in one layer."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A prefix to keep: that of the tree of this number, if any, and then these ranges of the row,
    root first."""

    tree: int
    ranges: tuple[tuple[int, int], ...]


class Exchange:
    """The prefixes that the layers of one forward pass read, and the ones that they write. It
    counts the calls of layers, so that it is for passes without gradients: activation checkpointing
    would call them again."""

    def __init__(self, prefixes: Sequence[Prefix | None], keep: Sequence[Kept] = ()) -> None:
        self.prefixes = tuple(prefixes)
        self.keep = tuple(keep)
        self._layer = 0
        self._state = 0
        self._kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in keep]
        self._kept_states: list[list[Tensor]] = [[] for _ in keep]

    def enter(self, key_BJTD: Tensor, value_BJTD: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Called by each attention layer with the row's keys and values; returns each tree's
        prefix."""
        layer = self._layer
        self._layer += 1
        prefixes: list[tuple[Tensor, Tensor] | None] = []
        for prefix in self.prefixes:
            if prefix is None:
                prefixes.append(None)
            else:
                prefixes.append((prefix.keys[layer], prefix.values[layer]))
        for path, kept in zip(self.keep, self._kept, strict=True):
            key_JPD, value_JPD = prefixes[path.tree] or (None, None)
            key = _joined(key_JPD, key_BJTD[0], path.ranges)
            value = _joined(value_JPD, value_BJTD[0], path.ranges)
            kept.append((key, value))
        return prefixes

    def enter_states(self) -> list[Tensor | None]:
        """Called by each function of a recurrent layer; returns the state at the end of each tree's
        prefix."""
        number = self._state
        self._state += 1
        states: list[Tensor | None] = []
        for prefix in self.prefixes:
            if prefix is None:
                states.append(None)
            else:
                states.append(prefix.states[number])
        return states

    def keep_states(self, states: Sequence[Tensor]) -> None:
        """Called by each function of a recurrent layer with the states at the ends of `keep`."""
        for kept, state in zip(self._kept_states, states, strict=True):
            kept.append(state.clone())  # a view would hold the states of all conversations

    def kept(self) -> list[Prefix]:
        """After the forward pass, the prefixes of `keep`."""
        prefixes = []
        for path, layers, states in zip(self.keep, self._kept, self._kept_states, strict=True):
            before = self.prefixes[path.tree]
            num_tokens = sum(end - start for start, end in path.ranges)
            if before is not None:
                num_tokens += len(before)
            keys = tuple(key for key, _ in layers)
            values = tuple(value for _, value in layers)
            prefixes.append(Prefix(num_tokens, keys, values, tuple(states)))
        return prefixes


def _joined(
    prefix_JPD: Tensor | None, row_JTD: Tensor, ranges: Sequence[tuple[int, int]]
) -> Tensor:
    parts = []
    if prefix_JPD is not None:
        parts.append(prefix_JPD)
    for start, end in ranges:
        parts.append(row_JTD[:, start:end])
    # `cat` copies, also of one part: a view would hold the keys of the whole row in the cache.
    return torch.cat(parts, dim=1)


MIN_PREFIX_TOKENS = 32
"""Shorter beginnings are not kept: computing them again costs about as much as a lookup."""


class PrefixCache:
    """Prefixes by their tokens. `max_bytes`: of all that they hold. `whole`: a prefix serves only
    conversations that begin with all of its tokens, as for a model with recurrent layers, whose
    states are those of its end. It belongs to one model: clear it after a change of the weights.
    One thread uses it at a time."""

    def __init__(self, max_bytes: int, *, whole: bool = False) -> None:
        self.max_bytes = max_bytes
        self.whole = whole
        self.num_bytes = 0
        self.num_reused_tokens = 0
        """Tokens read from the cache so far."""
        self._entries: OrderedDict[bytes, Prefix] = OrderedDict()  # least recently used first
        # The same keys in lexicographic order, the order of their tokens: the entry that begins
        # most like a sequence is beside its place.
        self._sorted: list[bytes] = []

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, tokens: TokenIds, most: int | None = None) -> int:
        """How many of the first tokens are cached, at most `most` (None: all but the last); 0 if
        they are too few to matter.
        """
        # The last token has to be computed: a cache holds no hidden state to read.
        limit = len(tokens) - 1
        if most is not None:
            limit = min(most, limit)
        _, num_known = self._longest(sort_key(tokens[:limit]))
        if num_known < MIN_PREFIX_TOKENS:
            return 0
        return num_known

    def get(self, tokens: TokenIds, num_tokens: int) -> Prefix:
        """The prefix of the first `num_tokens` tokens, as many as `match` has said."""
        entry, num_known = self._longest(sort_key(tokens[:num_tokens]))
        assert entry is not None and num_tokens <= num_known, (
            f"{num_tokens} of {num_known} known tokens"
        )
        self._entries.move_to_end(entry)
        return self._entries[entry].first(num_tokens)

    def put(self, tokens: TokenIds, prefix: Prefix) -> None:
        """Keep the prefix of these tokens, if it fits."""
        key = sort_key(tokens)
        size = prefix.num_bytes
        # One that is larger than the cache would empty it and still not fit.
        if size > self.max_bytes or len(prefix) < MIN_PREFIX_TOKENS:
            return
        _, num_known = self._longest(key)
        if num_known == len(prefix):  # an entry begins with it
            return
        place = bisect.bisect_left(self._sorted, key)
        # No entry begins with another one, unless `whole`: one that this continues is its
        # neighbour.
        continues_another = place > 0 and key.startswith(self._sorted[place - 1])
        # The longer one does the work of both, unless each serves at its own end alone.
        if continues_another and not self.whole:
            self._drop(self._sorted[place - 1])
        while self.num_bytes + size > self.max_bytes:
            self._drop(next(iter(self._entries)))
        self._entries[key] = prefix
        bisect.insort(self._sorted, key)
        self.num_bytes += size

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self._sorted.clear()
        self.num_bytes = 0

    def _drop(self, key: bytes) -> None:
        self.num_bytes -= self._entries.pop(key).num_bytes
        del self._sorted[bisect.bisect_left(self._sorted, key)]

    def _longest(self, key: bytes) -> tuple[bytes | None, int]:
        """The entry that begins most like `key`, and how many tokens they share."""
        if self.whole:
            # A neighbour in the order may go on where the key parts from it, so every length that
            # is there is tried, the longest first.
            lengths = {len(entry) for entry in self._entries if len(entry) <= len(key)}
            for length in sorted(lengths, reverse=True):
                if key[:length] in self._entries:
                    return key[:length], length // 8  # bytes of a token
            return None, 0
        place = bisect.bisect_left(self._sorted, key)
        neighbours = self._sorted[max(place - 1, 0) : place + 1]
        best: bytes | None = None
        most = 0
        for entry in neighbours:
            num_shared = common_prefix_length(_tokens(entry), _tokens(key))
            if best is None or num_shared > most:
                best = entry
                most = num_shared
        return best, most


class RecentTokens:
    """The beginnings of recent sequences, to find repeated prompts: the tokens that a rendered text
    shares with an earlier one are the prompt, or more. It keeps hashes in blocks of 32 tokens; the
    oldest of `max_blocks` go first."""

    # The blocks of four million tokens, in about 20 MB.
    def __init__(self, max_blocks: int = 2**17) -> None:
        self.max_blocks = max_blocks
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def add(self, tokens: TokenIds) -> int:
        """Add a sequence; returns how many of its first tokens an earlier one shares, in whole
        blocks."""
        key = sort_key(tokens)
        hashed = hashlib.blake2b(digest_size=16)
        num_known = 0
        size = 8 * MIN_PREFIX_TOKENS  # bytes of a block: a key has eight for each token
        for start in range(0, len(key) - size + 1, size):
            # The hash goes on, so that a block stands for all tokens up to its end.
            hashed.update(key[start : start + size])
            block = hashed.digest()
            if block in self._seen:
                num_known = start // 8 + MIN_PREFIX_TOKENS
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._seen) > self.max_blocks:
            self._seen.popitem(last=False)
        return num_known


def _tokens(key: bytes) -> np.ndarray:
    return np.frombuffer(key, dtype=">i8")


def known_beginnings(
    cache: PrefixCache, sequences: Sequence[TokenIds], read_at: Sequence[Sequence[int]]
) -> tuple[list[int], list[Prefix | None]]:
    """How many of each sequence's first tokens need not be computed, and what is known of them.

    They are cached ones before the first that is read: no value is kept for a cached token, only
    what others attend to.
    """
    num_known = []
    cached: list[Prefix | None] = []
    for ids, positions in zip(sequences, read_at, strict=True):
        length = cache.match(ids, most=min(positions, default=0))
        num_known.append(length)
        # Fetched already here: what the first forward passes of a call keep may drop it from the
        # cache before a later one reads it.
        cached.append(cache.get(ids, length) if length else None)
    return num_known, cached


def by_known_beginning(
    sequences: Sequence[TokenIds], num_known: Sequence[int], groups: Sequence[Sequence[int]]
) -> list[list[int]]:
    """The groups in parts by the cached beginnings, so that each part continues one prefix."""
    all_parts: list[list[int]] = []
    for group in groups:
        # By the tokens themselves: two sequences of a group may continue different entries.
        parts: dict[bytes, list[int]] = {}
        for i in group:
            prefix = np.asarray(sequences[i][: num_known[i]], dtype=np.int64)
            parts.setdefault(prefix.tobytes(), []).append(i)
        all_parts.extend(parts.values())
    return all_parts
