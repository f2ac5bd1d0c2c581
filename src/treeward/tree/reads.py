"""`Reads`: the places at which a model's head reads the sequences of a batch, one or many for each sequence.

    reads = Reads.of([[7], [3, 9], [9]])
    reads.places_N                          # [3, 7, 9]: each place once
    values_RH = values_NH[reads.index_R]    # for every read of every sequence, in order
    values_RH.split(reads.counts)           # by sequence: 1, 2 and 1 reads

A reward model reads at the last token. A gate reads where the prompt ends too, and a process reward model after every
step. Sequences of a tree may be read at the same place, whose hidden state is computed and multiplied once.

Shapes: N different places, R reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treeward.tree.movable import Movable


@dataclass(frozen=True, slots=True)
class Reads(Movable):
    """`places_N`: where the hidden states lie in the batch, int64, ascending, each once. `index_R`: the index into them
    of every read, sequence after sequence, int64. `counts`: the reads of each sequence."""

    places_N: Tensor
    index_R: Tensor
    counts: tuple[int, ...]

    @classmethod
    def of(cls, places: Sequence[Sequence[int]]) -> Reads:
        """`places`: those of each sequence."""
        counts = tuple(len(places_of_sequence) for places_of_sequence in places)
        all_places = np.concatenate([np.asarray(row, dtype=np.int64) for row in places])
        places_N, index_R = np.unique(all_places, return_inverse=True)
        return cls(torch.from_numpy(places_N), torch.from_numpy(index_R), counts)
