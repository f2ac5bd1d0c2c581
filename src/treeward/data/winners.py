"""Rows of two completions and the name of the better one, as LLMBar and LMArena have them.

    row = {"input": "2 + 2?", "output_1": "4", "output_2": "5", "label": 1}
    from_winner_row(row, "rows.jsonl:1")
    row = {"conversation_a": [...], "conversation_b": [...], "winner": "model_b"}
    from_winner_row(row, "rows.jsonl:2")

The two sides have one name with the suffixes a and b, 1 and 2, or 0 and 1. The winner is named by
its suffix, by its column, by its model, or is a tie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treeward.config.dataset_table import COMPARISON_SETS, Form
from treeward.data.columns import check_promptless, context_of
from treeward.data.conversation import as_messages, is_list
from treeward.data.preference import (
    Completion,
    Preference,
    before,
    preference_of,
    required,
    split_common_prefix,
)
from treeward.errors import DataError

# LMArena's several releases spell a tie of two bad completions in several ways.
_TIES = ("tie", "both_bad", "bothbad", "tie_(bothbad)", "tie_(both_bad)")


def from_winner_row(
    values: Mapping[str, Any],
    where: str,
    *,
    task_name: str = "preference",
) -> Preference:
    """Two sides with a prompt, or two whole conversations; the winner's rank is 0. Raises
    `DataError`."""
    keys = {name for name, value in values.items() if value is not None}
    forms = COMPARISON_SETS["WinnerDataset"].forms
    # A row without any form gets the errors of the first one.
    form = next((form for form in forms if keys.issuperset(form.keys)), forms[0])
    first, second = form.completions
    (winner,) = form.others
    need = "two sides, as output_1 and output_2, and the better one, as label: 1"
    sides = {}
    for name in (first, second):
        sides[name] = as_messages(required(values, name, where, need), name, "assistant", where)
    context = context_of(values, where)
    if context is None:
        if any(side[0]["role"] == "assistant" for side in sides.values()):
            models = (f"model_{first[-1]}", f"model_{second[-1]}")
            check_promptless(values, (*form.keys, *models), where)
        context = ()
    # Arena's two conversations repeat the prompt, beside which there may be a column with it.
    context = before(context, sides, where)
    ends = list(sides.values())
    if not context and all(side[0]["role"] != "assistant" for side in ends):
        context, ends = split_common_prefix(ends)
    verdict = required(values, winner, where, need)
    ranks = _ranks(verdict, form, values, where)
    completions = []
    for rank, messages in zip(ranks, ends, strict=True):
        completions.append(Completion(rank, messages))
    return preference_of(values, where, context, completions, task_name)


def _ranks(verdict: Any, form: Form, values: Mapping[str, Any], where: str) -> tuple[int, int]:
    """The ranks of the two sides by the row's verdict. Raises `DataError` for one that names
    neither, or both."""
    first, second = form.completions
    (winner,) = form.others
    if isinstance(verdict, float) and verdict.is_integer():
        verdict = int(verdict)  # 1.0 of a column of numbers with a gap
    text = str(verdict).strip().lower().replace(" ", "_")
    if text in _TIES:
        return 0, 0
    named = []
    for side, ranks in ((first, (0, 1)), (second, (1, 0))):
        suffix = side[-1]
        model = values.get(f"model_{suffix}")
        # A row may name its models; a conversation under "model_a" is none.
        is_model = verdict == model and not is_list(verdict)
        if is_model or text in (suffix, f"model_{suffix}", side):
            named.append(ranks)
    if len(named) == 1:
        return named[0]
    names = f"{first[-1]} or {second[-1]}, {first} or {second}, or tie"
    summary = f"{winner} names none of the two sides"
    if named:
        # Two completions of one model, by its name.
        summary = f"{winner} names both sides"
    raise DataError(summary, where=where, field=winner, got=verdict, need=names)
