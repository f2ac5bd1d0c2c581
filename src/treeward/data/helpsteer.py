"""Rows of NVIDIA's HelpSteer sets: two responses and a grade of the one against the other.

row = {"context": [...], "response1": "4", "response2": "5", "overall_preference": -3}
from_helpsteer3_row(row, "rows.jsonl:1")
# the first is much better: its rank is 0, the strength 3
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treeward.data.columns import EVERY_CONVERSATION
from treeward.data.conversation import as_messages
from treeward.data.preference import (
    DATASET_NAME_FIX,
    Completion,
    Preference,
    number_of,
    preference_of,
    required,
)
from treeward.errors import DataError

_HELPSTEER3_KEYS = ("context", "response1", "response2", "overall_preference")
_HELPSTEER2_KEYS = ("prompt", "response_1", "response_2", "preference_strength")


def from_helpsteer3_row(
    values: Mapping[str, Any],
    where: str,
    *,
    task_name: str = "preference",
) -> Preference:
    """A row of a prompt, two responses and a preference from -3 (the first is much better) to 3; 0
    is a tie.

    The strength is 1, 2 or 3. The keys are those of nvidia/HelpSteer3, or of nvidia/HelpSteer2's
    preferences.
    """
    keys = _HELPSTEER2_KEYS if "response_1" in values else _HELPSTEER3_KEYS
    prompt_key, first_key, second_key, grade_key = keys
    need = f"a row of {', '.join(keys)}; or another format, as {DATASET_NAME_FIX}"
    prompt = required(values, prompt_key, where, need)
    first_text = required(values, first_key, where, need)
    second_text = required(values, second_key, where, need)
    raw_grade = required(values, grade_key, where, need)
    context = as_messages(prompt, prompt_key, "user", where)
    first = as_messages(first_text, first_key, "assistant", where)
    second = as_messages(second_text, second_key, "assistant", where)
    grade = number_of(raw_grade, grade_key, where)
    # 0.5 is in no range, so only whole numbers pass.
    if grade is None or grade not in range(-3, 4):
        need = f"a whole number from -3 ({first_key} is much better) to 3 ({second_key} is)"
        raise DataError(
            "a grade is not valid",
            where=where,
            field=grade_key,
            got=raw_grade,
            need=need,
        )
    if grade in (1, 2, 3):
        better, worse = second, first
    else:
        better, worse = first, second
    is_tie = grade == 0
    completions = (Completion(0, better), Completion(0 if is_tie else 1, worse))
    # The row's own `strength` or `margin`, if it has one, is not what the grade says.
    columns = {name: values.get(name) for name in EVERY_CONVERSATION}
    columns["strength"] = None if is_tie else abs(grade)
    return preference_of(columns, where, context, completions, task_name)
