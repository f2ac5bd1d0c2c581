"""Reasoning in a completion: `<think>...</think>`, and the text without it.

without_reasoning("<think>2 and 2 is 4.</think>It is 4.")  # "It is 4."
without_reasoning("2 and 2 is 4.</think>It is 4.")         # the same: the prompt had opened it
without_reasoning("<think>2 and 2 is")                     # "": cut off before the answer
"""

from __future__ import annotations

import re

REASONING_START = "<think>"
REASONING_END = "</think>"
_BLOCK = re.compile(f"{REASONING_START}(.*?){REASONING_END}", re.DOTALL)


def split_reasoning(text: str) -> tuple[str, str] | None:
    """The reasoning that a text begins with, and the answer after it; None for a text without a
    whole block there."""
    text = text.lstrip()
    block = _BLOCK.match(text)
    return None if block is None else (block[1].strip(), text[block.end() :].lstrip())


def without_reasoning(text: str) -> str:
    """The text without its reasoning: blocks, everything up to a lone end, and everything after a
    lone start."""
    text = _BLOCK.sub("", text)
    # What is left of an end was reasoning too: its start is in the prompt, or within the block
    # before.
    text = text.rpartition(REASONING_END)[2]
    return text.partition(REASONING_START)[0]


def split_answer(text: str) -> tuple[str, str]:
    """What stands before the answer, and the answer; together they are the text. Reasoning that
    does not end is before an empty answer."""
    before, end, _ = text.rpartition(REASONING_END)
    if not end and text.lstrip().startswith(REASONING_START):
        return text, ""
    answer = text[len(before) + len(end) :]
    if end:
        answer = answer.lstrip()
    return text[: len(text) - len(answer)], answer
