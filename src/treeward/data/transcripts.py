r"""Transcripts of Human and Assistant, as Anthropic's hh-rlhf has them.

parse_transcript("\n\nHuman: 2 + 2?\n\nAssistant: 4")
# a message of the user, and one of the assistant
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treeward.data.conversation import Messages
from treeward.data.pairs import two_sided
from treeward.data.preference import (
    DATASET_NAME_FIX,
    Preference,
    required,
    split_common_prefix,
)
from treeward.data.turns import is_transcript, turns_of_transcript
from treeward.errors import DataError

_FORM = '"\\n\\nHuman: ...\\n\\nAssistant: ..."'


def are_transcripts(values: Mapping[str, Any]) -> bool:
    """Whether both sides of a pair are transcripts.

    With a prompt, a completion may begin with a speaker's name without being one.
    """
    sides = (values["chosen"], values["rejected"])
    if not all(is_transcript(side) for side in sides):
        return False
    has_prompt = values.get("prompt") or values.get("context")
    return not has_prompt or all(side.startswith("\n\nHuman:") for side in sides)


def from_transcripts(
    values: Mapping[str, Any],
    where: str,
    *,
    task_name: str = "preference",
) -> Preference:
    """A row of two whole transcripts; see `parse_transcript`."""
    keys = ("chosen", "rejected")
    conversations = []
    for key in keys:
        text = required(values, key, where, f"a transcript: {_FORM}")
        conversations.append(parse_transcript(text, where, key))
    context, (better, worse) = split_common_prefix(conversations)
    return two_sided(values, where, context, (better, worse), keys, task_name)


def parse_transcript(text: Any, where: str | None = None, field: str = "transcript") -> Messages:
    """The messages of a transcript; see `turns_of_transcript`. Raises `DataError` for text before
    the first turn."""
    turns = turns_of_transcript(text) if isinstance(text, str) else None
    if turns is None:
        raise DataError(
            "a transcript is not text that begins with a turn",
            where=where,
            field=field,
            got=text,
            need=_FORM,
            fix=DATASET_NAME_FIX,
        )
    return tuple(turns)
