"""An answer to another prompt, as the worst answer to this one.

    for preference, where in WithNonContextual(stream):
        preference.non_contextual                 # messages, or None where there is none to give

A reward model that has only seen answers to the prompt never had to learn that an answer must be one: what it likes
besides (length, politeness, a format) it also likes in an answer to another question, and a policy that is trained
against it finds that out. A good answer of another prompt, ranked below all of the prompt's own, takes this away
(Liu et al. 2024, "RRM", arXiv 2409.13156). On a prefix tree it costs its own tokens and no prompt's.

Whether a comparison is kept is decided by its own completions alone, in `encoding`, where the answer is added.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING

from treeward.data.preference import Message, Preference, last_text

if TYPE_CHECKING:
    from treeward.data.datasets import PreferenceStream

__all__ = ["WithNonContextual"]

_WINDOW = 4096
"""Comparisons whose best answers are at hand: data of any size can be streamed."""

_TRIES = 16
"""Draws for one answer; data in which few prompts differ may have none to give."""


class WithNonContextual:
    """A stream of preferences in which each has a good answer to another prompt, where one is found.

    It is a best answer of the last 4096 comparisons (for the first ones, of the first 4096). Prompts are the same where
    their last user messages are, letter case and punctuation aside. Roles must fit: the answer follows what it would
    have followed, and has the messages that this comparison's answers have. The same data gives the same draw.
    """

    def __init__(self, stream: PreferenceStream) -> None:
        self._stream = stream

    @property
    def name(self) -> str:
        return self._stream.name

    @property
    def fingerprint(self) -> str:
        return f"{self._stream.fingerprint}+non-contextual 1"

    def __iter__(self) -> Iterator[tuple[Preference, str]]:
        rows = iter(self._stream)
        head = list(islice(rows, _WINDOW))
        window = deque((preference for preference, _ in head), maxlen=_WINDOW)
        generator = random.Random(0)
        for number, (preference, where) in enumerate(chain(head, rows)):
            if number >= _WINDOW:
                window.append(preference)
            yield replace(preference, non_contextual=_drawn(preference, window, generator)), where


def _drawn(preference: Preference, window: deque[Preference], generator: random.Random) -> tuple[Message, ...] | None:
    known = [completion.messages for completion in preference.completions]
    for _ in range(_TRIES):
        other = window[generator.randrange(len(window))]
        best = min(other.completions, key=lambda completion: completion.rank).messages
        if best not in known and _question(other) != _question(preference) and _shape(other) == _shape(preference):
            return best
    return None


def _question(preference: Preference) -> str:
    """The words of the last user message, or of the whole completion where it brings the question itself."""
    asked = [message for message in preference.context if message["role"] == "user"]
    text = last_text(asked[-1:] or preference.completions[0].messages[:1])
    return " ".join(re.findall(r"\w+", text.lower()))


def _shape(preference: Preference) -> tuple[str | None, list[str]]:
    """The role that an answer follows, and those of its own messages."""
    before = preference.context[-1]["role"] if preference.context else None
    return before, [message["role"] for message in preference.completions[0].messages]
