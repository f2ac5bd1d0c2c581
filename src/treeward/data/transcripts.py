r"""Transcripts of Human and Assistant, as Anthropic's hh-rlhf has them.

parse_transcript("\n\nHuman: 2 + 2?\n\nAssistant: 4")
# a message of the user, and one of the assistant
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from treeward.data.conversation import Messages, is_transcript
from treeward.data.pairs import two_sided
from treeward.data.preference import (
    DATASET_NAME_FIX,
    Preference,
    required,
    split_common_prefix,
)
from treeward.errors import DataError

_FORM = '"\\n\\nHuman: ...\\n\\nAssistant: ..."'
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLE_OF_SPEAKER = {"Human": "user", "Assistant": "assistant"}


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
    r"""The messages of `"\n\nHuman: ...\n\nAssistant: ..."`; roles alternate.

    The same speaker's name after a blank line belongs to the content: joining `f"\n\n{speaker}:
    {content}"` gives the transcript back. Raises `DataError` for text before the first turn.
    """
    transcript = text if isinstance(text, str) else ""
    if is_transcript(transcript) and not transcript.startswith("\n\n"):
        transcript = f"\n\n{transcript.lstrip()}"
    # `split` gives the text before the first turn, then the speaker and the content of each.
    head, *parts = _TURN.split(transcript)
    if head.strip() or not parts:
        raise DataError(
            "a transcript is not text that begins with a turn",
            where=where,
            field=field,
            got=text,
            need=_FORM,
            fix=DATASET_NAME_FIX,
        )
    turns: list[tuple[str, str]] = []
    # Two turns of one speaker are one: people write "Human:" into their texts.
    for speaker, content in zip(parts[::2], parts[1::2], strict=True):
        if turns and turns[-1][0] == speaker:
            turns[-1] = (speaker, f"{turns[-1][1]}\n\n{speaker}:{content}")
        else:
            turns.append((speaker, content.removeprefix(" ")))
    messages = []
    for speaker, content in turns:
        messages.append({"role": _ROLE_OF_SPEAKER[speaker], "content": content})
    return tuple(messages)
