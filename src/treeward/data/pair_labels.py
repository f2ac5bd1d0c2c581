"""`PairLabels`: what `treeward check-labels` proposes for each pair, as a run learns it.

    labels = read_pair_labels(["results/labels/labels.jsonl"], "drop")
    training_sets = labelled(training_sets, encoded_sets, labels, ties="drop")
    dataset[0].pair_labels      # ((1.0, 1.0),): it counts 1, and its better one wins

A line of the file is a pair of completions, known by a digest of its texts (`pair_ids`), so that
the order of the data does not matter:

    {"pair": "f3a0...", "proposal": "drop", "probability": 0.08, ...}

The data stays as it is: a `LabelledDataset` is a view of an encoded one.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from treeward.config.data import PROPOSALS, Proposal, Suspects, Ties
from treeward.data.encoding import SUMMED, EncodedDataset
from treeward.data.encoding_counts import EncodingCounts
from treeward.data.sources import Row, read_rows
from treeward.errors import DataError, nearest_name

logger = logging.getLogger(__name__)

_PAIR_NAME = re.compile("[0-9a-f]{16}")
"""What `pair_name` writes."""
_FIX = "treeward check-labels DATA --model MODEL --output DIR writes the file of this data"


@dataclass(frozen=True)
class PairLabels:
    """What each of P pairs counts, and the probability that its better completion wins.

    `ids_P`: int64, ascending. `weight_P`: 0 for a pair that is dropped. `target_P`: 0 for one that
    is flipped. `name`: of the files. `proposals`: how many pairs have each.
    """

    name: str
    ids_P: npt.NDArray[np.int64]
    weight_P: npt.NDArray[np.float64]
    target_P: npt.NDArray[np.float64]
    proposals: Mapping[str, int]

    def places(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The place of each id, -1 for those that are not here."""
        # An id above all of these would have the place after the last, where there is none. There is
        # one at least: a file without lines is an error.
        places = np.searchsorted(self.ids_P, ids).clip(max=len(self.ids_P) - 1)
        return np.where(self.ids_P[places] == ids, places, -1)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what is learnt; lines that are kept count as little as their order."""
        digest = hashlib.sha256()
        is_changed = (self.weight_P != 1) | (self.target_P != 1)
        for values in (self.ids_P, self.weight_P, self.target_P):
            digest.update(values[is_changed].tobytes())
        return digest.hexdigest()[:32]


class LabelledDataset(EncodedDataset):
    """An encoded dataset whose pairs count as `labels` say. A comparison of which no pair is left
    is dropped, and counted."""

    def __init__(self, path: Path, name: str, labels: PairLabels, ties: Ties) -> None:
        super().__init__(path, name)
        self._labels = labels
        self._ties = ties
        ids = self.ids_of_pairs()
        places = labels.places(ids)
        self.missing_ids = ids[places == -1]
        # A missing pair takes the last label, by its place of -1: `labelled` refuses such a set.
        self._weights = labels.weight_P[places]
        self._targets = labels.target_P[places]
        nested = self._column("pair_ids")
        sizes = pa.compute.list_value_length(nested).to_numpy().astype(np.int64)
        # The pairs of the row r of the file are those from `_ends[r]` to `_ends[r + 1]`.
        self._ends = np.concatenate([[0], np.cumsum(sizes)])
        # A row is alive where the number of pairs that count grows within it.
        num_alive_before = np.concatenate([[0], np.cumsum(self._weights > 0)])
        is_alive = num_alive_before[self._ends[1:]] > num_alive_before[self._ends[:-1]]
        if ties == "half":
            # Tied pairs are learnt too, and no label is about them.
            is_alive |= self._column("tied_pairs").to_numpy() > 0
        self._dropped = self._kept[~is_alive[self._kept]]
        self._kept = self._kept[is_alive[self._kept]]
        self.fingerprint = f"{path.stem} {labels.fingerprint}"

    def __reduce__(self) -> tuple[Any, ...]:
        return LabelledDataset, (self.path, self.name, self._labels, self._ties)

    def pair_labels(self, index: int) -> tuple[tuple[float, float], ...]:
        row = int(self._kept[index])
        pairs = slice(self._ends[row], self._ends[row + 1])
        weights = self._weights[pairs].tolist()
        targets = self._targets[pairs].tolist()
        return tuple(zip(weights, targets, strict=True))

    @cached_property
    def counts(self) -> EncodingCounts:
        counts = EncodedDataset(self.path, self.name).counts
        changes = {}
        for name in SUMMED:
            of_dropped = self._column(name).to_numpy()[self._dropped]
            changes[name] = getattr(counts, name) - int(of_dropped.sum())
        num_dropped = len(self._dropped)
        changes["kept"] = counts.kept - num_dropped
        changes["dropped_suspects"] = num_dropped
        return replace(counts, **changes)


def pair_name(pair_id: int) -> str:
    """The id of a pair as the file has it: 16 hexadecimal digits."""
    return f"{pair_id & (2**64 - 1):016x}"


def read_pair_labels(paths: Sequence[str], suspects: Suspects) -> PairLabels:
    """The labels of files of `check-labels`. `suspects`: what becomes of each pair that is not
    kept; "proposed": what its line says. Raises `DataError` for a file or a line that cannot be
    read, and for lines that contradict each other."""
    labels: dict[int, tuple[float, float]] = {}
    proposals: dict[str, int] = dict.fromkeys(PROPOSALS, 0)
    for path in paths:
        for row in read_rows(path):
            pair_id = _pair_id(row)
            proposal = _proposal(row)
            if proposal != "keep" and suspects != "proposed":
                proposal = suspects
            label = _label(row, proposal)
            if labels.setdefault(pair_id, label) != label:
                raise DataError(
                    "the pair has another line, which says something else",
                    where=row.where,
                    field="pair",
                    got=row.values["pair"],
                    need="one line for each pair, or equal ones",
                    fix="remove one of the two",
                )
            proposals[proposal] += 1
    ids = sorted(labels)
    pairs_P2 = np.array([labels[pair_id] for pair_id in ids], dtype=np.float64).reshape(-1, 2)
    return PairLabels(
        name=", ".join(paths),
        ids_P=np.array(ids, dtype=np.int64),
        weight_P=pairs_P2[:, 0],
        target_P=pairs_P2[:, 1],
        proposals=proposals,
    )


def _pair_id(row: Row) -> int:
    name = row.values.get("pair")
    # Not whatever `int` reads: "+", "_", "0x" and white space are of another file, or of a mistake.
    if not isinstance(name, str) or not _PAIR_NAME.fullmatch(name):
        raise DataError(
            "the line names no pair",
            where=row.where,
            field="pair",
            got=name,
            need="16 hexadecimal digits in lower case, as check-labels writes them",
            fix=_FIX,
        )
    number = int(name, 16)
    # The digests are signed.
    return number - 2**64 if number >= 2**63 else number


def _proposal(row: Row) -> Proposal:
    proposal = row.values.get("proposal")
    if proposal not in PROPOSALS:
        near = nearest_name(str(proposal), PROPOSALS)
        raise DataError(
            "the line has no proposal that is known",
            where=row.where,
            field="proposal",
            got=proposal,
            need=" or ".join(PROPOSALS),
            fix=None if near is None else f"did you mean {near}?",
        )
    known: Proposal = proposal
    return known


def _label(row: Row, proposal: Proposal) -> tuple[float, float]:
    """What the pair counts, and the probability that its better completion wins."""
    if proposal == "keep":
        return 1.0, 1.0
    if proposal == "drop":
        return 0.0, 1.0
    if proposal == "flip":
        return 1.0, 0.0
    probability = row.values.get("probability")
    # NaN is in no range.
    if not isinstance(probability, int | float) or not 0 <= probability <= 1:
        raise DataError(
            f"the line has no probability, which {proposal} needs",
            where=row.where,
            field="probability",
            got=probability,
            need="a number from 0 to 1, that the label is right",
            fix="give one, or propose drop or flip",
        )
    if proposal == "soft":
        return 1.0, float(probability)
    return float(probability), 1.0


def labelled(
    training_sets: Mapping[str, EncodedDataset],
    encoded_sets: Mapping[str, EncodedDataset],
    labels: PairLabels,
    ties: Ties,
) -> dict[str, EncodedDataset]:
    """The training sets with their labels. Validation sets are not changed; they are asked because
    rows that are held out may have lines too.

    Raises `DataError` for a training pair without a line, for lines of no pair of the data, and if
    no comparison is left.
    """
    known: list[npt.NDArray[np.int64]] = []
    for dataset in [*training_sets.values(), *encoded_sets.values()]:
        # Pairs that are too long have lines too: another model may read them.
        known.append(dataset.ids_of_pairs("all_pair_ids"))
    is_known = np.isin(labels.ids_P, np.concatenate(known))
    with_labels: dict[str, EncodedDataset] = {}
    for name, dataset in training_sets.items():
        view = LabelledDataset(dataset.path, dataset.name, labels, ties)
        if len(view.missing_ids) > 0:
            raise DataError(
                "the labels do not fit the data: pairs have no line",
                where=labels.name,
                field="data.labels",
                got=f"no line for {len(view.missing_ids):,} of {len(view.ids_of_pairs()):,} pairs, "
                f"the first at {_place_of(dataset, view.missing_ids[0])}",
                need="a line for each pair, labelled as in the data",
                fix=_FIX,
            )
        if len(view) == 0:
            raise DataError(
                "no comparison is left to learn from",
                where=labels.name,
                field="data.labels",
                got=view.counts.summary(),
                need="pairs that are not dropped",
                fix="look at the report beside the file: a model that sees little finds much wrong",
            )
        with_labels[name] = view
        logger.info("%s, with %s: %s", dataset.name, labels.name, view.counts.summary())
    num_others = int((~is_known).sum())
    if num_others > 0:
        raise DataError(
            "the labels do not fit the data: lines are about other pairs",
            where=labels.name,
            field="data.labels",
            got=f"{num_others:,} of {len(is_known):,} lines name a pair that is not in the data, "
            f"as {pair_name(int(labels.ids_P[~is_known][0]))}",
            need="lines of pairs of data.train and data.validation",
            fix=_FIX,
        )
    shown = [f"{number:,} {proposal}" for proposal, number in labels.proposals.items() if number]
    logger.info("%s says of pairs: %s", labels.name, ", ".join(shown))
    return with_labels


def _place_of(dataset: EncodedDataset, pair_id: int) -> str:
    """The file and the line of the first comparison with this pair."""
    for index in range(len(dataset)):
        if pair_id in dataset.pair_ids(index):
            return dataset[index].where
    raise AssertionError("the pair is of the dataset")
