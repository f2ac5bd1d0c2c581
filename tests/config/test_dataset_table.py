"""Every entry of the table can be opened: its functions exist and take what it gives them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from treeward.config.data import DatasetConfig, PromptSetConfig
from treeward.config.dataset_table import (
    COMPARISON_SETS,
    COMPARISONS,
    PROMPTS,
    STEP_FORMATS,
    KnownDataset,
)
from treeward.data.formats import conversations_of, recognise
from treeward.data.registry import function_of

ENTRIES = [(known, DatasetConfig) for known in (*COMPARISONS, *STEP_FORMATS)]
ENTRIES += [(known, PromptSetConfig) for known in PROMPTS]


@pytest.mark.parametrize(
    ("known", "section"), ENTRIES, ids=lambda value: getattr(value, "name", "")
)
def test_its_functions_exist_and_take_its_arguments(known: KnownDataset, section: Any) -> None:
    assert set(known.options) <= section.model_fields.keys()
    arguments = [*known.options, *known.arguments]
    if section is DatasetConfig:
        arguments.append("task_name")
    signature = inspect.signature(function_of(known.parser))
    signature.bind({}, where="rows.jsonl:1", **dict.fromkeys(arguments))
    if known.prepare is not None:
        inspect.signature(function_of(known.prepare)).bind(iter([]), None)
    if known.condition is not None:
        inspect.signature(function_of(known.condition)).bind({})


@pytest.mark.parametrize("known", COMPARISONS, ids=lambda known: known.name)
def test_no_entry_hides_another(known: KnownDataset) -> None:
    """A row with the keys of a form alone is told as its set: those before it need keys that it has
    not."""
    if known.condition is not None:
        return
    for form in known.forms:
        assert recognise(dict.fromkeys(form.keys, "2"), "rows.jsonl:1") == known.name


def test_what_score_reads_follows_from_the_forms() -> None:
    for known in COMPARISONS:
        for form in known.forms:
            row: dict[str, Any] = {"prompt": "2 + 2?"}
            row |= {column: f"{column} it is" for column in form.completions}
            if len(form.completions) == 1 and known.rating is None:
                row |= {column: ["4", "5"] for column in form.completions}
            texts = [conversation[-1]["content"] for conversation in conversations_of(row, "x:1")]
            want = [row[column] for column in form.completions]
            assert texts == want or [texts] == want


def test_sets_that_others_are_validated_on_exist() -> None:
    names = [known.name for known in PROMPTS]
    for known in PROMPTS:
        assert known.validated_on is None or known.validated_on in names
    assert "auto" not in COMPARISON_SETS, "it is not a set, but the question which one"
