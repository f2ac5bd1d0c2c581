"""Answers to other prompts, as the worst answers to this one.

    for preference, where in WithNonContextual(stream, num_answers=1): ...

A reward model that has only seen answers to the prompt never had to learn that an answer must be one: what it likes
besides (length, politeness, a format) it also likes in an answer to another question, and a policy that is trained
against it finds that out. Adding good answers of other prompts, ranked below all of the prompt's own, takes this away
(Liu et al. 2024, "RRM", arXiv 2409.13156). On a prefix tree such an answer costs its own tokens and no prompt's.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING

from treeward.data.preference import Completion, Preference

if TYPE_CHECKING:
    from treeward.data.datasets import PreferenceStream

__all__ = ["WithNonContextual"]

_WINDOW = 4096
"""Comparisons whose best answers are at hand: data of any size can be streamed."""

_TRIES = 16
"""Draws for one answer; data in which few prompts have answers of their own may have none to give."""


class WithNonContextual:
    """A stream of preferences in which each has `num_answers` answers to other prompts, drawn without replacement.

    They are best answers of the last 4096 comparisons (for the first ones, of the first 4096), never of the same
    context and never equal to an answer that is there, and share one rank below the worst. The same data gives the
    same draw. A comparison for which none is found stays as it is.
    """

    def __init__(self, stream: PreferenceStream, num_answers: int) -> None:
        self._stream, self._num_answers = stream, num_answers

    @property
    def name(self) -> str:
        return self._stream.name

    @property
    def fingerprint(self) -> str:
        return f"{self._stream.fingerprint}+{self._num_answers} non-contextual, 1"

    def __iter__(self) -> Iterator[tuple[Preference, str]]:
        rows = iter(self._stream)
        head = list(islice(rows, _WINDOW))
        window = deque((preference for preference, _ in head), maxlen=_WINDOW)
        generator = random.Random(0)
        for number, (preference, where) in enumerate(chain(head, rows)):
            if number >= _WINDOW:
                window.append(preference)
            yield self._extended(preference, window, generator), where

    def _extended(self, preference: Preference, window: deque[Preference], generator: random.Random) -> Preference:
        known = [completion.messages for completion in preference.completions]
        rank = max(completion.rank for completion in preference.completions) + 1
        added: list[Completion] = []
        for _ in range(self._num_answers * _TRIES):
            if len(added) == self._num_answers:
                break
            other = window[generator.randrange(len(window))]
            best = min(other.completions, key=lambda completion: completion.rank)
            if other.context != preference.context and best.messages not in known:
                known.append(best.messages)
                added.append(Completion(rank, best.messages))
        return replace(preference, completions=(*preference.completions, *added)) if added else preference
