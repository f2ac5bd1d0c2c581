"""`check_data`: planted faults are each found, with the exact number, and clean data has none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import WORDS

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.data.encoding import encode_dataset
from treeward.data.rendering import Renderer
from treeward.errors import DataError
from treeward.evaluation.data_check.check import DataCheck, check_data, open_sets, write_check

Write = Callable[..., Path]
Row = dict[str, Any]


def text(number: int, *, words: int = 24) -> str:
    """Prose of its own, that ends."""
    drawn = random.Random(number).choices(WORDS, k=words)
    return f"{' '.join(drawn)} {number}."


def clean(count: int = 60) -> list[Row]:
    """Comparisons without a fault: prompts of their own, and texts of which neither side is longer
    in most."""
    rows = []
    for i in range(count):
        sides = sorted((text(3 * i + 1), text(3 * i + 2)), key=len, reverse=bool(i % 2))
        rows.append({"prompt": text(3 * i), "chosen": sides[0], "rejected": sides[1]})
    return rows


@pytest.fixture
def checked(write_rows: Write, tiny_tokenizer: Any) -> Callable[..., DataCheck]:
    def check(rows: list[Row | str], validation: list[Row] | None = None, **how: Any) -> DataCheck:
        streams = open_sets([DatasetConfig(data_path=str(write_rows("train.jsonl", rows)))])
        held_out = (
            ()
            if validation is None
            else [DatasetConfig(data_path=str(write_rows("held.jsonl", validation)))]
        )
        renderer = Renderer(tiny_tokenizer)
        return check_data(
            streams, renderer, tokenizer="tiny", validation=open_sets(held_out), **how
        )

    return check


def names(checked: DataCheck) -> dict[str, tuple[int, int]]:
    return {one.name: (one.count, one.of) for one in checked.findings}


def test_clean_data_has_no_finding(
    checked: Callable[..., DataCheck], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    rows = clean()
    result = checked(rows, clean(80)[60:])
    assert names(result) == {}
    stream = open_dataset(DatasetConfig(data_path=str(tmp_path / "train.jsonl")))
    counts = encode_dataset(stream, Renderer(tiny_tokenizer), cache_dir=tmp_path).counts
    numbers = result.numbers
    assert (numbers["tokens"], numbers["tree_tokens"]) == (counts.tokens, counts.tree_tokens)
    assert (numbers["rows"], numbers["completions"], numbers["turns"], numbers["prompts"]) == (
        60,
        120,
        60,
        60,
    )
    assert repr(checked(rows[:1]).numbers["ties"]) == "0"
    assert numbers["tokens_longest"] == counts.longest and numbers["style"]["longer"].count <= 60


def edited(*changes: tuple[int, Row]) -> list[Row]:
    rows = clean()
    for i, change in changes:
        rows[i] = rows[i] | change
    return rows


@pytest.mark.parametrize(
    ("change", "how", "reason"),
    [
        ({"chosen": "Yes.", "rejected": "Yes."}, {}, "20 identical completions"),
        ({"chosen": "", "rejected": ""}, {}, "20 identical completions"),
        ({"score_chosen": 1, "score_rejected": 1}, {}, "20 ties"),
        ({}, {"max_length": 8}, "20 too long"),
    ],
    ids=["identical", "empty", "ties", "too long"],
)
def test_data_of_which_train_keeps_nothing_are_refused_in_the_words_of_train(
    checked: Callable[..., DataCheck],
    tmp_path: Path,
    tiny_tokenizer: Any,
    change: Row,
    how: Row,
    reason: str,
) -> None:
    result = checked([row | change for row in clean(20)], **how)
    stream = open_dataset(DatasetConfig(data_path=str(tmp_path / "train.jsonl")))
    with pytest.raises(DataError, match="no comparison is left to learn from") as training:
        encode_dataset(stream, Renderer(tiny_tokenizer, **how), cache_dir=tmp_path)
    assert [str(error) for error in result.refused] == [str(training.value)]
    assert reason in str(training.value)


def swapped(row: Row) -> Row:
    return row | {"chosen": row["rejected"], "rejected": row["chosen"]}


UNANSWERED = {
    "prompt": text(900),
    "chosen": [
        {"role": "assistant", "content": text(901)},
        {"role": "user", "content": text(902, words=2)},
    ],
    "rejected": [{"role": "assistant", "content": text(903)}],
}
CALL = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
    }
]
SYSTEM_ON_ONE_SIDE = {
    "chosen": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": text(910)},
        {"role": "assistant", "content": text(911)},
    ],
    "rejected": [
        {"role": "user", "content": text(910)},
        {"role": "assistant", "content": text(912)},
    ],
}
LONG = [row | {"chosen": f"{row['chosen']} {text(i)}"} for i, row in enumerate(clean())]
MARKED = [row | {"chosen": f"**{row['chosen']}**"} for row in clean()]


@pytest.mark.parametrize(
    ("rows", "how", "expected"),
    [
        ([*clean(), *map(swapped, clean()[:3])], {}, {"contradictions": (6, 63)}),
        ([*clean(), *clean()[:4]], {}, {"duplicates": (4, 64)}),
        (edited((2, {"score_chosen": 1, "score_rejected": 1})), {}, {"ties": (1, 60)}),
        (
            edited((2, {"score_chosen": 1, "score_rejected": 5})),
            {},
            {"contradicted_scores": (1, 60)},
        ),
        ([*clean(59), UNANSWERED], {}, {"unanswered": (1, 120)}),
        ([*clean(59), SYSTEM_ON_ONE_SIDE], {}, {"other_prompts": (1, 60)}),
        (edited((2, {"chosen": "Yes.", "rejected": "Yes."})), {}, {"identical": (1, 120)}),
        (edited((2, {"rejected": ""}), (9, {"chosen": " \n"})), {}, {"empty": (2, 120)}),
        (edited((2, {"chosen": CALL})), {}, {}),
        (LONG, {}, {"longer": (60, 60)}),
        (MARKED, {}, {"style": (60, 60)}),
        (clean(), {"validation": [*clean(80)[60:], clean()[0]]}, {"validation_overlap": (1, 21)}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) and "style" not in value else None,
)
def test_a_planted_fault_is_found_and_no_other(
    checked: Callable[..., DataCheck], rows: list[Row], how: Row, expected: dict[str, Any]
) -> None:
    result = checked(rows, **how)
    others = {"longer"} if "style" in expected else set()
    assert {name: count for name, count in names(result).items() if name not in others} == expected
    assert all(one.why and one.fix for one in result.findings)


def test_mistyped_grades_of_ultrafeedback_are_counted(checked: Callable[..., DataCheck]) -> None:
    completions = [
        {"response": text(i), "overall_score": i, "fine-grained_score": 4.0} for i in range(2)
    ]
    rows = [{"instruction": text(i, words=9), "completions": completions} for i in range(10, 14)]
    mistyped = {"response": text(3), "overall_score": 10.0, "fine-grained_score": 1.5}
    rows[2] = rows[2] | {"completions": [*completions, mistyped]}
    finding = next(one for one in checked(rows).findings if one.name == "mistyped")
    assert (finding.count, finding.of, finding.severity) == (1, 9, "note")
    assert finding.places == " (train.jsonl:3)"


def test_broken_rows_are_named_and_the_others_are_checked(
    checked: Callable[..., DataCheck], tmp_path: Path
) -> None:
    rows: list[Any] = [*clean(), *map(swapped, clean()[:1])]
    rows[3:3] = ['{"prompt": ', {"prompt": "a", "chosen": "b"}, "[1]"]
    rows.insert(0, {"nothing": "known"})
    rows.insert(20, rows[19] | {"margin": float("nan")})
    result = checked(rows)
    assert names(result) == {"broken": (5, 66), "contradictions": (2, 61)}
    places = [str(error.where).rpartition(":")[2] for error in result.errors]
    assert places == ["1", "5", "6", "7", "21"] and result.findings[0].severity == "error"
    assert [error.field for error in result.errors] == [
        *("chosen",),
        None,
        "rejected",
        None,
        "margin",
    ]
    results = json.loads(write_check(tmp_path / "out", result).read_text())
    assert [one["where"] for one in results["broken"]] == [error.where for error in result.errors]
    assert (
        results["findings"][0]["fix"]
        and "train.jsonl:1, train.jsonl:5" in result.findings[0].places
    )


def test_broken_rows_of_a_validation_set_are_not_the_datas(
    checked: Callable[..., DataCheck],
) -> None:
    result = checked(clean(), [*clean(80)[60:], {"prompt": "a", "chosen": "b"}])
    assert names(result) == {"broken": (1, 21)} and result.numbers["broken"] == 0
    assert "1 of 21 rows of the validation sets" in result.findings[0].text
    assert [Path(str(error.where)).name for error in result.errors] == ["held.jsonl:21"]


@pytest.mark.slow
def test_real_data(shared_data: Path, tiny_tokenizer: Any) -> None:
    path = shared_data / "hh_harmless" / "train.jsonl.gz"
    result = check_data(
        open_sets([DatasetConfig(data_path=str(path))]), Renderer(tiny_tokenizer), tokenizer="tiny"
    )
    style = {name: one.value for name, one in result.numbers["style"].items()}
    assert result.numbers["rows"] == 1700 and not result.errors
    assert 0.5 < result.numbers["tree_tokens"] / result.numbers["tokens"] < 0.7
    assert style["longer"] < 0.5  # the harmless completion is brief
    assert {"empty"} == {finding.name for finding in result.findings}
