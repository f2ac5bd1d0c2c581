"""Rows of a better and a worse completion.

    from_binary_row({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, "pairs.csv:2")

The prompt may be in a column of its own, or in both sides, which are then whole conversations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treeward.data.columns import check_promptless, context_of, shown_keys
from treeward.data.conversation import Messages, as_messages
from treeward.data.preference import (
    Completion,
    Preference,
    check_continues,
    first_with_value,
    holds_prompt,
    number_of,
    preference_of,
    required,
    split_common_prefix,
)
from treeward.data.turns import is_transcript
from treeward.errors import DataError

_NEED_COMPLETION = "a completion; prompt_key, chosen_key and rejected_key name the keys"


def from_binary_row(
    values: Mapping[str, Any],
    where: str,
    *,
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    task_name: str = "preference",
) -> Preference:
    """A row of a prompt, a chosen and a rejected completion; reads `margin`, `task_name`,
    `score_chosen` and `score_rejected` too.

    Each is text or messages. Rows of whole conversations need no prompt, nor do rows with no other
    text than these two. Equal scores are a tie.
    """
    keys = (chosen_key, rejected_key)
    chosen_value = required(values, chosen_key, where, _NEED_COMPLETION)
    chosen = as_messages(chosen_value, chosen_key, "assistant", where)
    rejected_value = required(values, rejected_key, where, _NEED_COMPLETION)
    rejected = as_messages(rejected_value, rejected_key, "assistant", where)
    context = context_of(values, where)
    # Both are whole conversations, and a column with their prompt only repeats it.
    if holds_prompt(chosen, context) and holds_prompt(rejected, context):
        context, (chosen, rejected) = split_common_prefix([chosen, rejected])
    elif context is None:
        # Two texts may be completions whose prompt nobody kept; messages or a transcript that begin
        # with the assistant have lost theirs.
        for value in (chosen_value, rejected_value):
            if is_transcript(value) or not isinstance(value, str):
                raise DataError(
                    "the row has no prompt",
                    where=where,
                    field="prompt",
                    got=shown_keys(values),
                    need="a prompt, or whole conversations on both sides",
                    fix="set prompt_key to the prompt's column",
                )
        score_keys = [*_side_scores(chosen_key), *_side_scores(rejected_key)]
        check_promptless(values, (*keys, *score_keys), where)
        context = ()
    else:
        check_continues(context, chosen, chosen_key, where)
        check_continues(context, rejected, rejected_key, where)
    return two_sided(values, where, context, (chosen, rejected), keys, task_name)


def from_conversations_row(
    values: Mapping[str, Any],
    where: str,
    *,
    task_name: str = "preference",
) -> Preference:
    """A row of `chosen` and `rejected` whose `prompt` repeats a part of these whole conversations,
    as Tulu 3's."""
    return from_binary_row({**values, "prompt": None}, where, task_name=task_name)


def two_sided(
    values: Mapping[str, Any],
    where: str,
    context: Messages,
    sides: tuple[Messages, Messages],
    keys: tuple[str, str],
    task_name: str,
) -> Preference:
    """A preference of two `sides`, the better one first, with the row's scores of their `keys`.
    Equal scores are a tie."""
    scores = []
    for key in keys:
        score_key = first_with_value(values, _side_scores(key))
        score = None
        if score_key is not None:
            score = number_of(values[score_key], score_key, where)
        scores.append(score)
    better_score, worse_score = scores
    is_tie = better_score is not None and better_score == worse_score
    # `chosen` stays the better one even if its score is lower: the log counts it.
    better = Completion(0, sides[0], better_score)
    worse = Completion(0 if is_tie else 1, sides[1], worse_score)
    return preference_of(values, where, context, (better, worse), task_name)


def _side_scores(key: str) -> list[str]:
    """The names of the score of the side under `key`."""
    return [f"score_{key}", f"{key}_score", f"{key}_rating", f"{key}-rating"]
