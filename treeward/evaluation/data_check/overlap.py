"""`find_overlap`: the examples of an evaluation that are in the training data.

    flags = find_overlap(examples, (preference for preference, _ in open_dataset(config)))
    flags[0].completion                             # the share of its words that the training data has

Texts are compared as words, letters and digits in lower case; a paraphrase or a translation is not found. Exact
duplicates are a whole context, and a whole completion of N words or more. Near duplicates are texts with 70 % of their
words or more in runs of N = 13 words (GPT-3: Brown et al. 2020, arXiv 2005.14165, appendix C; Llama 3: arXiv
2407.21783, section 5.1.4) that the training data has too, and a whole prompt: the context without system messages.
Memory holds 64-bit hashes of the evaluation's words and runs, and none of the training data, which is read once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeward.data.preference import Preference, last_text

NUM_WORDS = 13
_NEAR = 0.7

Hashes = NDArray[np.uint64]

# Chinese and Japanese have no spaces: there each character is a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no word of a run loses its weight modulo 2^64
_PROGRESS_EVERY = 256


@dataclass(frozen=True, slots=True)
class OverlapFlag:
    """What of one example is in the training data.

    `prompt`: the share of the prompt's words in common runs; `completion`: of the completion with the largest share; 1
    for a whole one. `is_exact`: whether there is an exact duplicate.
    """

    id: str
    prompt: float
    completion: float
    is_exact: bool

    @property
    def is_flagged(self) -> bool:
        """Whether it has an exact or near duplicate."""
        return self.is_exact or max(self.prompt, self.completion) >= _NEAR


@dataclass(frozen=True, slots=True)
class Overlap:
    """A flag for each example, in order. `name`: of the set of examples."""

    name: str
    flags: tuple[OverlapFlag, ...]

    @property
    def flagged(self) -> list[OverlapFlag]:
        """The flags of the examples with an exact or near duplicate, the exact ones first."""
        return sorted((flag for flag in self.flags if flag.is_flagged), key=lambda flag: not flag.is_exact)


def find_overlap(
    examples: Sequence[Preference],
    training: Iterable[Preference],
    *,
    num_words: int = NUM_WORDS,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[OverlapFlag]:
    """Read the training data once and flag the examples that it has. `num_words`: of a run. `on_progress` receives how
    many preferences were read."""
    texts = [_texts(example) for example in examples]
    all_runs = [_runs(words, num_words) for of_example in texts for words in of_example[1:]]
    runs = np.unique(np.concatenate([np.zeros(1, np.uint64), *all_runs]))
    wholes = {key for of_example in texts for key in _wholes(of_example, num_words)} - {None}
    is_in_training = np.zeros(len(runs), dtype=bool)
    training_wholes: set[int | None] = set()
    count = 0
    for count, preference in enumerate(training, start=1):
        training_texts = _texts(preference)
        training_wholes |= wholes.intersection(_wholes(training_texts, num_words))
        training_runs = np.concatenate([_runs(words, num_words) for words in training_texts[1:]])
        places = np.minimum(np.searchsorted(runs, training_runs), len(runs) - 1)
        is_in_training[places[runs[places] == training_runs]] = True
        if count % _PROGRESS_EVERY == 0:
            on_progress(count)
    on_progress(count)

    def share(words: Hashes, whole: int | None) -> float:
        if whole in training_wholes:
            return 1.0
        hits = np.flatnonzero(is_in_training[np.searchsorted(runs, _runs(words, num_words))])
        # +1 where a common run begins, -1 after its end: the sum so far is how many of them a word lies in
        steps = np.zeros(len(words) + 1, dtype=np.int64)
        np.add.at(steps, hits, 1)
        np.add.at(steps, hits + num_words, -1)
        return float((np.cumsum(steps)[:-1] > 0).mean()) if len(words) else 0.0

    flags = []
    for example, of_example in zip(examples, texts, strict=True):
        keys = _wholes(of_example, num_words)
        prompt, *completions = map(share, of_example[1:], keys[1:])
        is_exact = not training_wholes.isdisjoint([keys[0], *keys[2:]])
        flags.append(OverlapFlag(example.id, prompt, max(completions, default=0.0), is_exact))
    return flags


def _texts(preference: Preference) -> list[Hashes]:
    """Hashed words of the context, of the prompt (the context without system messages) and of each completion."""
    prompt = [message for message in preference.context if message.get("role") != "system"]
    parts = [preference.context, prompt, *(completion.messages for completion in preference.completions)]
    texts = ["\n".join(last_text([message]) for message in part) for part in parts]
    words = [_WORD.findall(text.casefold()) for text in texts]
    return [np.array([hash(word) for word in of_text], np.int64).view(np.uint64) for of_text in words]


def _wholes(texts: Sequence[Hashes], num_words: int) -> list[int | None]:
    """A hash of each text; None for a completion shorter than a run: many are "Yes.", which tells nothing."""
    return [hash((min(i, 2), words.tobytes())) if len(words) >= (num_words if i > 1 else 1) else None
            for i, words in enumerate(texts)]  # fmt: skip


def _runs(words: Hashes, num_words: int) -> Hashes:
    """Hashes of all runs of words (W,): sum_k w_(i+k) m^k modulo 2^64. (max(0, W - num_words + 1),)"""
    runs = np.zeros(max(0, len(words) - num_words + 1), np.uint64)
    power = 1
    for k in range(num_words if len(runs) else 0):
        runs += words[k : k + len(runs)] * np.uint64(power)
        power = power * _MULTIPLIER % (1 << 64)
    return runs
