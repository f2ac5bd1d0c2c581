r"""Texts that mark their turns: transcripts of Human and Assistant, and prompts of HelpSteer2.

turns_of_transcript("\n\nHuman: 2 + 2?\n\nAssistant: 4")
# a message of the user, and one of the assistant
turns_of_prompt("\n\nHuman: 2 + 2?\n\nAssistant:")
# a message of the user: the completion follows
"""

from __future__ import annotations

import re
from typing import Any

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLE_OF_SPEAKER = {"Human": "user", "Assistant": "assistant"}
_HELPSTEER_TURN = re.compile(r"\n?<extra_id_1>(User|Assistant)\n")


def is_transcript(value: Any) -> bool:
    """Whether it is text that begins with a turn of Human or Assistant."""
    return isinstance(value, str) and value.lstrip().startswith(("Human:", "Assistant:"))


def turns_of_transcript(text: str) -> list[dict[str, Any]] | None:
    r"""The messages of `"\n\nHuman: ...\n\nAssistant: ..."`; roles alternate. None for text before
    the first turn.

    The same speaker's name after a blank line belongs to the content: joining `f"\n\n{speaker}:
    {content}"` gives the transcript back.
    """
    if is_transcript(text) and not text.startswith("\n\n"):
        text = f"\n\n{text.lstrip()}"
    # `split` gives the text before the first turn, then the speaker and the content of each.
    head, *parts = _TURN.split(text)
    if head.strip() or not parts:
        return None
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
    return messages


def turns_of_prompt(text: str) -> list[dict[str, Any]] | None:
    r"""The messages of a prompt that marks its turns: a transcript up to `"\n\nAssistant:"`, which
    the completion follows, or HelpSteer2's `"\n<extra_id_1>Assistant\n"` between turns. None for
    any other text."""
    if is_transcript(text) and text.rstrip().endswith("\n\nAssistant:"):
        messages = turns_of_transcript(text) or []
        before = messages[:-1]
        # Two turns of the assistant were joined: then the last is not empty.
        if before and not messages[-1]["content"].strip():
            return before
        return None
    if not _HELPSTEER_TURN.search(text):
        return None
    # `split` gives the text before the first mark, then the role and the text of each turn.
    first_text, *parts = _HELPSTEER_TURN.split(text)
    messages = [{"role": "user", "content": first_text}]
    for role, content in zip(parts[::2], parts[1::2], strict=True):
        messages.append({"role": role.lower(), "content": content})
    return messages
