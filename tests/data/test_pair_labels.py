"""The file of `check-labels`, as a run learns it: each proposal, and a file that does not fit."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.data.encoding import EncodedDataset, encode_dataset
from treeward.data.pair_labels import labelled, pair_name, read_pair_labels
from treeward.data.preference import pair_ids
from treeward.data.rendering import Renderer
from treeward.errors import DataError
from treeward.losses import ranked_pairs

ROWS = [{"prompt": f"{n}?", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(6)]
PAIR = {"prompt": "What?", "completions": ["good", "bad"], "scores": [2, 1]}
RANKED = {"prompt": "Which?", "completions": ["best", "middle", "worst"], "scores": [3, 2, 1]}


@pytest.fixture
def encode(
    write_rows: Callable[..., Path], tiny_tokenizer: Any, tmp_path: Path
) -> Callable[..., EncodedDataset]:
    def of(rows: list[dict[str, Any]], **options: Any) -> EncodedDataset:
        stream = open_dataset(DatasetConfig(data_path=str(write_rows("data.jsonl", rows))))
        renderer = Renderer(tiny_tokenizer)
        return encode_dataset(stream, renderer, cache_dir=tmp_path / "cache", **options)

    return of


@pytest.fixture
def labels(write_rows: Callable[..., Path]) -> Callable[..., Any]:
    """The labels of a file with these proposals, a line for each pair of the dataset."""

    def of(dataset: EncodedDataset, proposals: list[str], suspects: Any = "proposed") -> Any:
        lines = []
        ids = dataset.ids_of_pairs("all_pair_ids").tolist()
        for pair_id, proposal in zip(ids, proposals, strict=True):
            line = {"pair": pair_name(pair_id), "proposal": proposal, "probability": 0.25}
            lines.append(line)
        random.Random(0).shuffle(lines)
        return read_pair_labels([str(write_rows("labels.jsonl", lines))], suspects)

    return of


def test_each_proposal_is_learnt(encode: Any, labels: Any) -> None:
    dataset = encode(ROWS)
    proposals = ["keep", "drop", "flip", "soft", "weight", "keep"]
    view = labelled({"a": dataset}, {}, labels(dataset, proposals), "drop")["a"]
    assert len(view) == 5
    counts = view.counts
    assert (counts.read, counts.kept, counts.dropped_suspects) == (6, 5, 1)
    assert counts.tokens == sum(comparison.num_tokens for comparison in view)
    assert "1 wrong labels by data.labels" in counts.summary()
    pairs = ranked_pairs(
        [comparison.ranks for comparison in view],
        pair_labels=[comparison.pair_labels for comparison in view],
    )
    # The completions of each comparison are the better and the worse one.
    assert pairs.better_P.tolist() == [0, 3, 5, 6, 8]
    assert pairs.worse_P.tolist() == [1, 2, 4, 7, 9]
    assert pairs.weight_P.tolist() == [1.0, 1.0, 1.0, 0.25, 1.0]
    assert pairs.target_P.tolist() == [1.0, 1.0, 0.75, 1.0, 1.0]
    assert pairs.num_units == 5


def test_the_key_overrules_every_proposal_but_keep(encode: Any, labels: Any) -> None:
    dataset = encode(ROWS)
    proposals = ["keep", "drop", "flip", "soft", "weight", "keep"]
    dropped = labels(dataset, proposals, "drop")
    view = labelled({"a": dataset}, {}, dropped, "drop")["a"]
    assert [comparison.where for comparison in view] == [dataset[0].where, dataset[5].where]
    assert dropped.proposals["drop"] == 4
    # Another file or key is another run, and equal ones are not.
    assert view.fingerprint != dataset.fingerprint
    assert dropped.fingerprint == labels(dataset, proposals, "drop").fingerprint
    assert dropped.fingerprint != labels(dataset, proposals, "flip").fingerprint


def test_pairs_of_a_group_are_dropped_and_turned_alone(encode: Any, labels: Any) -> None:
    dataset = encode([RANKED, PAIR])
    # best > middle is dropped, best > worst kept, middle > worst turned round.
    view = labelled({"a": dataset}, {}, labels(dataset, ["drop", "keep", "flip", "keep"]), "drop")[
        "a"
    ]
    assert len(view) == 2
    pairs = ranked_pairs([(0, 1, 2)], pair_labels=[view[0].pair_labels])
    assert list(zip(pairs.better_P.tolist(), pairs.worse_P.tolist(), strict=True)) == [
        (0, 2),
        (2, 1),
    ]
    assert pairs.weight_P.tolist() == [0.5, 0.5]
    per_pair = ranked_pairs([(0, 1, 2)], pair_labels=[view[0].pair_labels], weight="pair")
    assert per_pair.num_units == 2


def test_a_dataset_with_labels_is_pickled_whole(encode: Any, labels: Any) -> None:
    dataset = encode(ROWS)
    view = labelled({"a": dataset}, {}, labels(dataset, ["drop"] * 3 + ["flip"] * 3), "drop")["a"]
    copy = pickle.loads(pickle.dumps(view))
    assert copy.fingerprint == view.fingerprint
    assert [one.pair_labels for one in copy] == [one.pair_labels for one in view] == [((1, 0),)] * 3


def test_ids_are_of_texts_and_labels(write_rows: Callable[..., Path]) -> None:
    def ids(*rows: dict[str, Any]) -> list[int]:
        found = []
        stream = open_dataset(DatasetConfig(data_path=str(write_rows("ids.jsonl", rows))))
        for preference, _ in stream:
            found += pair_ids(preference, preference.completions)
        return found

    swapped = ROWS[0] | {"chosen": "no 0", "rejected": "yes 0"}
    assert ids(*ROWS) == ids(*reversed(ROWS))[::-1]
    assert len({*ids(*ROWS), *ids(swapped)}) == 7
    assert len(ids(RANKED)) == 3


def test_ties_stay_where_they_are_learnt(encode: Any, labels: Any) -> None:
    tied = {"prompt": "Which?", "completions": ["a", "b", "c"], "scores": [2, 2, 1]}
    dataset = encode([tied, PAIR], ties="half")
    both_dropped = labels(dataset, ["drop", "drop", "keep"])
    assert len(labelled({"a": dataset}, {}, both_dropped, "half")["a"]) == 2
    assert len(labelled({"a": dataset}, {}, both_dropped, "drop")["a"]) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"proposal": "keep"}, "the line names no pair"),
        ({"pair": "xyz", "proposal": "keep"}, "the line names no pair"),
        # Forms that Python reads as numbers, and no file of ours has.
        ({"pair": "+123456789abcdef", "proposal": "keep"}, "the line names no pair"),
        ({"pair": "0123456_89abcdef", "proposal": "keep"}, "the line names no pair"),
        ({"pair": "0x23456789abcdef", "proposal": "keep"}, "the line names no pair"),
        ({"pair": " 123456789abcdef", "proposal": "keep"}, "the line names no pair"),
        ({"pair": "0123456789ABCDEF", "proposal": "keep"}, "the line names no pair"),
        ({"pair": "٠١٢٣٤٥٦٧٨٩٠١٢٣٤٥", "proposal": "keep"}, "the line names no pair"),
        ({"pair": 123456789, "proposal": "keep"}, "the line names no pair"),
        ({"pair": "0" * 16, "proposal": "dropp"}, "did you mean drop"),
        ({"pair": "0" * 16, "proposal": "soft"}, "no probability, which soft needs"),
        ({"pair": "0" * 16, "proposal": "weight", "probability": 1.5}, "from 0 to 1"),
    ],
)
def test_a_bad_line_is_an_error(
    line: dict[str, Any], words: str, write_rows: Callable[..., Path]
) -> None:
    path = write_rows("labels.jsonl", [{"pair": "1" * 16, "proposal": "keep"}, line])
    with pytest.raises(DataError, match=words) as caught:
        read_pair_labels([str(path)], "proposed")
    assert caught.value.where is not None and caught.value.where.endswith("labels.jsonl:2")


def test_lines_that_contradict_each_other_are_an_error(write_rows: Callable[..., Path]) -> None:
    pair = {"pair": "1" * 16}
    path = write_rows("l.jsonl", [pair | {"proposal": "keep"}, pair | {"proposal": "drop"}])
    with pytest.raises(DataError, match="another line, which says something else"):
        read_pair_labels([str(path)], "proposed")


def test_labels_that_do_not_fit_are_an_error(encode: Any, write_rows: Callable[..., Path]) -> None:
    dataset = encode(ROWS)
    lines = []
    for pair_id in dataset.ids_of_pairs().tolist():
        lines.append({"pair": pair_name(pair_id), "proposal": "keep"})

    def read(lines: list[dict[str, Any]]) -> Any:
        return read_pair_labels([str(write_rows("labels.jsonl", lines))], "proposed")

    with pytest.raises(DataError, match=r"no line for 1 of 6 pairs.*data.jsonl:6"):
        labelled({"a": dataset}, {}, read(lines[:-1]), "drop")
    other = {"pair": "0" * 15 + "7", "proposal": "keep"}
    with pytest.raises(DataError, match="1 of 7 lines name a pair that is not in the data"):
        labelled({"a": dataset}, {}, read([*lines, other]), "drop")
    nothing = [line | {"proposal": "drop"} for line in lines]
    with pytest.raises(DataError, match="no comparison is left"):
        labelled({"a": dataset}, {}, read(nothing), "drop")
    # Lines of pairs that are held out fit too.
    held_out = encode([RANKED])
    for pair_id in held_out.ids_of_pairs().tolist():
        lines.append({"pair": pair_name(pair_id), "proposal": "keep"})
    both = labelled({"a": dataset}, {"b": held_out}, read(lines), "drop")
    assert len(both["a"]) == 6


def test_a_copy_is_one_line(encode: Any, labels: Any, write_rows: Callable[..., Path]) -> None:
    dataset = encode([*ROWS, ROWS[0]])
    proposals = ["drop", *["keep"] * 5, "drop"]
    assert len(labelled({"a": dataset}, {}, labels(dataset, proposals), "drop")["a"]) == 5
    lines = Path(labels(dataset, proposals).name).read_text().splitlines()
    once = write_rows("once.jsonl", [json.loads(line) for line in dict.fromkeys(lines)])
    view = labelled({"a": dataset}, {}, read_pair_labels([str(once)], "proposed"), "drop")["a"]
    assert len(view) == 5


def test_shapes_are_of_the_comparisons_that_are_left(encode: Any, labels: Any) -> None:
    """Rows of the file that are dropped by labels, or lie beyond a limit, have conversations too."""
    long = [row | {"rejected": "no " * 40 * (1 + n)} for n, row in enumerate(ROWS)]
    dataset = encode(long)
    view = labelled({"a": dataset}, {}, labels(dataset, ["keep", "drop"] * 3), "drop")["a"]
    for one in (view, dataset, dataset.first(2)):
        expected = []
        for comparison in one:
            expected.append([2, max(map(len, comparison.token_ids))])
        assert one.shapes.tolist() == expected
