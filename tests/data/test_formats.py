"""Every format of rows is told by its keys, and read the same by training, by scoring and by a
server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import assistant, user

from treeward.config.data import DatasetConfig
from treeward.config.dataset_table import COMPARISONS, Form, KnownDataset
from treeward.data.datasets import KnownRows, open_dataset
from treeward.data.formats import conversations_of, recognise, scored_columns
from treeward.data.preference import Preference
from treeward.data.sources import read_rows
from treeward.errors import DataError
from treeward.scoring.rows import chunks_of

ASK = user("2 + 2?")
FOUR = assistant("4")
FIVE = assistant("5")
TURNS = [user("Hi"), assistant("Hello"), ASK]
Write = Callable[..., Path]


def ranks(*ranks: int) -> dict[str, Any]:
    completions = [
        {"rank": rank, "completion": [end]} for rank, end in zip(ranks, (FOUR, FIVE), strict=True)
    ]
    return {"context": [ASK], "completions": completions}


def side(chosen: str, rejected: str) -> dict[str, Any]:
    head = "\n\nHuman: 2 + 2?\n\nAssistant: "
    return {"chosen": head + chosen, "rejected": head + rejected}


USUAL = [(0, "4"), (1, "5")]
ULTRA = {
    "source": "x",
    "instruction": "2 + 2?",
    "models": ["a", "b"],
    "completions": [
        {"response": "4", "overall_score": 7.5, "fine-grained_score": 1.0, "model": "a"},
        {"response": "5", "overall_score": 8.0, "fine-grained_score": 4.0, "model": "b"},
    ],
}
BINARIZED = {"prompt_id": "1", "messages": [ASK, FOUR], "score_chosen": 8.0, "score_rejected": 8.0}
PREFERRED = {"response_1": "4", "response_2": "5", "preference_strength": -1, "split": "train"}
FORMATS: dict[str, tuple[list[dict[str, Any]], str, list[tuple[int, Any]]]] = {
    "ranks": ([ranks(0, 1)], "PreferenceDataset", USUAL),
    "text of a prompt": (
        [{"prompt": "2 + 2?", "responses": ["4", "5"], "scores": [1, 3]}],
        "PreferenceDataset",
        [(1, "4"), (0, "5")],
    ),
    "scores": (
        [
            {
                "prompt": "2 + 2?",
                "completions": [{"completion": "4", "score": 2}, {"completion": "5", "score": 2}],
            }
        ],
        "PreferenceDataset",
        [(0, "4"), (0, "5")],
    ),
    "whole conversations": (
        [{"completions": [[ASK, FOUR], [ASK, FIVE]], "scores": [2, 1]}],
        "PreferenceDataset",
        USUAL,
    ),
    "TRL, text": (
        [{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}],
        "BinaryPreferenceDataset",
        USUAL,
    ),
    "TRL, messages": (
        [{"prompt": [ASK], "chosen": [FOUR], "rejected": [FIVE]}],
        "BinaryPreferenceDataset",
        USUAL,
    ),
    "TRL, implicit prompt": (
        [{"chosen": [ASK, FOUR], "rejected": [ASK, FIVE]}],
        "BinaryPreferenceDataset",
        USUAL,
    ),
    "context": (
        [{"context": "2 + 2?", "chosen": "4", "rejected": "5"}],
        "BinaryPreferenceDataset",
        USUAL,
    ),
    "transcripts": ([side("4", "5")], "HHTranscripts", USUAL),
    "UltraFeedback": (
        [{"instruction": "2 + 2?", "completions": [], "models": []}, ULTRA],
        "UltraFeedback",
        [(1, "4"), (0, "5")],
    ),
    "UltraFeedback, binarized": (
        [{"prompt": "2 + 2?", "chosen": [ASK, FOUR], "rejected": [ASK, FIVE], **BINARIZED}],
        "BinaryPreferenceDataset",
        [(0, "4"), (0, "5")],
    ),
    "HelpSteer2": (
        [
            {"prompt": prompt, "response": text, "helpfulness": grade, "verbosity": 2}
            for prompt, text, grade in (("2 + 2?", "4", 1), ("2 + 2?", "5", 4), ("alone", "5", 4))
        ],
        "HelpSteer2",
        [(1, "4"), (0, "5")],
    ),
    "HelpSteer2, preferences": ([{"prompt": "2 + 2?", **PREFERRED}], "HelpSteer3", USUAL),
    "HelpSteer3": (
        [{"context": [ASK], "response1": "4", "response2": "5", "overall_preference": 3}],
        "HelpSteer3",
        [(0, "5"), (1, "4")],
    ),
}


@pytest.mark.parametrize(("rows", "name", "want"), FORMATS.values(), ids=FORMATS)
def test_a_file_is_taken_for_its_format(
    rows: list[Any],
    name: str,
    want: Any,
    write_rows: Write,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    path = str(write_rows("rows.jsonl", rows))
    ((auto, where),) = open_dataset(DatasetConfig(data_path=path))
    ((named, _),) = open_dataset(
        DatasetConfig(data_path=path, dataset_name=name, prompt_key=key_of(rows[0])),
    )
    assert f"rows.jsonl: read as {name}" in caplog.text and auto == named
    assert auto.task_name == rows[0].get("category_path", name)
    assert list(auto.context) == [ASK] and where.startswith(f"{path}:")
    assert [(c.rank, c.messages[0]["content"]) for c in auto.completions] == want
    assert ("fewer than two completions" in caplog.text) == (
        len(rows) > 1 and name != "HelpSteer2" or len(rows) == 3
    )
    scored = []
    for row in rows:
        if row.get("completions") != []:
            scored += conversations_of(row, "x:1")
    completions = sorted(auto.completions, key=lambda c: c.messages[0]["content"])
    assert [[*auto.context, *c.messages] for c in completions] == scored[: len(completions)]


@pytest.mark.parametrize(
    ("row", "parser"),
    [
        ({"chosen": "4", "rejected": "5"}, "pairs.from_binary_row"),
        ({"completions": ["4", "5"], "scores": [2, 1]}, "preference.preference_from_dict"),
    ],
)
def test_a_format_may_have_a_prompt_column_of_its_own(
    row: dict[str, Any],
    parser: str,
    write_rows: Write,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    row = {**row, "ask": "2 + 2?"}
    keys = tuple(key for key in row if key not in ("ask", "scores"))
    known = KnownDataset(
        name="Asked", rows=(), parser=parser, forms=(Form(keys, ("ask",)),), prompt="ask"
    )
    monkeypatch.setattr("treeward.data.formats.COMPARISONS", (known, *COMPARISONS))
    assert recognise(row, "x:1") == "Asked"
    rows = KnownRows(DatasetConfig(data_path=str(write_rows("rows.jsonl", [row]))), known)
    rows.name_unread_columns()
    ((trained, _),) = rows
    assert list(trained.context) == [ASK] and "'ask'" not in caplog.text
    assert conversations_of(row, "x:1") == trained.conversations
    assert "ask" in scored_columns(row, "x:1")
    # The column that a configuration names goes first.
    path = str(write_rows("named.jsonl", [{**row, "other": "1 + 1?"}]))
    ((named, _),) = KnownRows(DatasetConfig(data_path=path, prompt_key="other"), known)
    assert list(named.context) == [user("1 + 1?")]


def key_of(row: dict[str, Any]) -> str:
    return "context" if "chosen" in row and "context" in row else "prompt"


@pytest.mark.parametrize("keys", ["score_{}", "{}_score", "{}_rating", "{}-rating"])
@pytest.mark.parametrize(
    "row",
    [side("4", "5"), {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}],
)
def test_the_scores_of_both_sides_are_kept_and_equal_ones_are_a_tie(
    keys: str,
    row: dict[str, Any],
    parse: Callable[..., Preference],
) -> None:
    for scores, want in {(8, 5): (0, 1), (5, 8): (0, 1), ("7.5", 7.5): (0, 0)}.items():
        given = dict(zip((keys.format("chosen"), keys.format("rejected")), scores, strict=True))
        completions = parse("auto", row | given).completions
        assert tuple(one.rank for one in completions) == want
        assert [one.score for one in completions] == [float(score) for score in scores]


def test_turns_within_the_prompt_of_helpsteer2(parse: Callable[..., Preference]) -> None:
    prompt = "Hi\n<extra_id_1>Assistant\nHello\n<extra_id_1>User\n2 + 2?"
    row = {"prompt": prompt, "response_1": "4", "response_2": "5", "preference_strength": -1}
    assert list(parse("auto", row).context) == TURNS
    assert conversations_of({"prompt": prompt, "response": "4"}, "x:1") == [[*TURNS, FOUR]]


def test_two_texts_need_no_prompt_unless_a_key_may_be_one(parse: Callable[..., Preference]) -> None:
    """TRL's form of text with an implicit prompt."""
    row = {
        "chosen": "The sky is blue.",
        "rejected": "The sky is green.",
        "score_chosen": 2,
        "score_rejected": 1,
    }
    assert parse("auto", row).context == () and conversations_of(row, "x:1")[0] == [
        assistant("The sky is blue."),
    ]
    with pytest.raises(DataError, match="no prompt(?s:.*)prompt_key=frage"):
        parse("auto", row | {"frage": "What colour?"})
    named = parse("auto", row | {"frage": "What colour?"}, prompt_key="frage")
    assert named.context == (user("What colour?"),)


@pytest.mark.parametrize(
    "lost",
    [{}, {"prompt": " "}, {"prompt": [{"role": "system", "content": "Be"}]}],
)
def test_a_row_without_its_prompt_deviates_from_the_first(
    lost: dict[str, Any],
    write_rows: Write,
) -> None:
    """In training and in scoring; a file without any prompt is read as one."""
    row = {"chosen": "4", "rejected": "5"}
    path = str(
        write_rows(
            "rows.jsonl",
            [{"prompt": "2 + 2?", **row}, row | lost, {"prompt": "2 + 2?", **row}],
        )
    )
    stream = open_dataset(DatasetConfig(data_path=path))
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl:2(?s:.*)no prompt, and the first row has one(?s:.*)in every row",
    ):
        list(stream)
    errors: list[DataError] = []
    stream.broken = errors.append
    assert [where for _, where in stream] == [f"{path}:1", f"{path}:3"] and len(errors) == 1
    (chunk,) = chunks_of(read_rows(path))
    assert len(chunk.requests) == 1 and chunk.error is not None and chunk.error.where == f"{path}:2"
    path = str(write_rows("rows.jsonl", [row, row, {"prompt": "2 + 2?", **row}]))
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl:3(?s:.*)only later rows(?s:.*)fix the first row",
    ):
        list(open_dataset(DatasetConfig(data_path=path)))


def test_completions_that_hold_the_prompt_are_whole_conversations(
    parse: Callable[..., Preference],
) -> None:
    """Else the prompt would be there twice."""
    row = {"prompt": "2 + 2?", "completions": [[ASK, FOUR], [ASK, FIVE]], "scores": [2, 1]}
    read_as = parse("auto", row)
    assert read_as.context == (ASK,) and [one.messages for one in read_as.completions] == [
        (FOUR,),
        (FIVE,),
    ]
    assert conversations_of(row, "x:1") == [[ASK, FOUR], [ASK, FIVE]]
    with pytest.raises(DataError, match=r"holds the prompt(?s:.*)completions\[1\]"):
        parse("auto", row | {"completions": ["4", [ASK, FIVE]]})
    assert conversations_of({"prompt": "2 + 2?", "response": [ASK, FOUR]}, "x:1") == [[ASK, FOUR]]


def test_a_part_of_the_prompt_is_not_lost(
    parse: Callable[..., Preference],
    write_rows: Write,
) -> None:
    """Dolly's columns, and Alpaca's, whose first row may have no input."""
    with pytest.raises(DataError, match="two prompts(?s:.*)context and instruction"):
        conversations_of({"instruction": "Add.", "context": "2 and 2", "response": "4"}, "x:1")
    pair = {"prompt": "2 + 2?", "instruction": "Add.", "chosen": "4", "rejected": "5"}
    for name in ("auto", "BinaryPreferenceDataset"):
        with pytest.raises(DataError, match="two prompts(?s:.*)prompt_key=prompt"):
            parse(name, pair)
        assert parse(name, pair, prompt_key="prompt").context == (ASK,)
    row = {"instruction": "Add.", "input": "", "chosen": "4", "rejected": "5"}
    path = write_rows("rows.jsonl", [row, row | {"input": "2 and 2"}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2(?s:.*)input would be lost"):
        list(open_dataset(DatasetConfig(data_path=str(path))))
    with pytest.raises(DataError, match="input would be lost"):
        conversations_of({"instruction": "Add.", "input": "2 and 2", "response": "4"}, "x:1")


def test_an_unknown_format_names_the_ways_out(parse: Callable[..., Preference]) -> None:
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl:1(?s:.*)no known format(?s:.*)\['good'\](?s:.*)data\.prompt_key",
    ):
        parse("auto", {"good": "4"})
    with pytest.raises(
        DataError,
        match=r"no rank and no score(?s:.*)completions\[0\](?s:.*)or a score for each",
    ):
        parse("auto", {"prompt": "2 + 2?", "completions": ["4", "5"]})


def test_a_part_of_a_message_that_is_neither_text_nor_an_object() -> None:
    row = {"prompt": [user("2 + 2?")], "chosen": [ASK, assistant([1])], "rejected": [ASK, FOUR]}  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"rows:1(?s:.*)chosen\[1\]\.content\[0\](?s:.*)got: +1"):
        conversations_of(row, "rows:1")
