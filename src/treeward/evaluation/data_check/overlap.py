"""`find_overlap`: the examples of an evaluation that are in the training data.

    flags = find_overlap(examples, (preference for preference, _ in open_dataset(config)))
    flags[0].completion                 # the share of its words that the training data has

Texts are compared as words, letters and digits in lower case; a paraphrase or a translation is not
found. An example is flagged where 70 % of the words of its prompt or of a completion are in runs of
13 words (GPT-3: Brown et al. 2020, arXiv 2005.14165, appendix C; Llama 3: arXiv 2407.21783, section
5.1.4) that the training data has too. A shorter prompt is one run; a shorter completion has none,
as many are "Yes.", which tells nothing. Memory holds hashes of the evaluation's runs, and none of
the training data, which is read once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from treeward.data.conversation import SYSTEM_ROLES, Message, last_text
from treeward.data.preference import Preference

_RUN = 13  # words
_NEAR = 0.7  # the share of words in runs from which an example is flagged
_PROGRESS_EVERY = 256  # preferences

# Chinese and Japanese have no spaces: there each character is a word.
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+"
)


@dataclass(frozen=True, slots=True)
class OverlapFlag:
    """The shares of one example's words that are in the training data: of its prompt, without
    system messages, and of the completion with the largest share."""

    id: str
    prompt: float
    completion: float

    @property
    def is_flagged(self) -> bool:
        return max(self.prompt, self.completion) >= _NEAR


@dataclass(frozen=True, slots=True)
class Overlap:
    """A flag for each example, in order. `name`: of the set of examples."""

    name: str
    flags: tuple[OverlapFlag, ...]

    @property
    def flagged(self) -> list[OverlapFlag]:
        """The flags of the examples that are in the training data, the surest first."""
        flagged = (flag for flag in self.flags if flag.is_flagged)
        return sorted(flagged, key=lambda flag: -max(flag.prompt, flag.completion))


def find_overlap(
    examples: Sequence[Preference],
    training: Iterable[Preference],
    *,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[OverlapFlag]:
    """Read the training data once and flag the examples that it has. `on_progress` receives how
    many preferences were read."""
    runs_of_examples = [_runs(example) for example in examples]
    evaluation_runs: set[int] = set()
    for runs_of_texts in runs_of_examples:
        for runs in runs_of_texts:
            evaluation_runs.update(runs)
    shared_runs: set[int] = set()  # those that the training data has too
    count = 0
    for count, preference in enumerate(training, start=1):
        for runs in _runs(preference):
            shared_runs |= evaluation_runs.intersection(runs)
        if count % _PROGRESS_EVERY == 0:
            on_progress(count)
    on_progress(count)

    def share(runs: list[int]) -> float:
        """The share of a text's words that are in runs that the training data has too."""
        shared_words: set[int] = set()  # by their places: runs overlap
        for i, run in enumerate(runs):
            if run in shared_runs:
                shared_words.update(range(i, i + _RUN))
        # The last run begins `_RUN - 1` words before the end. A short prompt is one run, and so
        # has as many words here as a run.
        num_words = len(runs) + _RUN - 1
        return len(shared_words) / num_words

    flags = []
    for example, runs_of_texts in zip(examples, runs_of_examples, strict=True):
        prompt, *completions = map(share, runs_of_texts)
        flags.append(OverlapFlag(example.id, prompt, max(completions, default=0.0)))
    return flags


def _runs(preference: Preference) -> list[list[int]]:
    """Hashes of the runs of words of the prompt and of each completion, one run for each word that
    begins one."""
    # A system message is in every row, and no overlap.
    prompt = []
    for message in preference.context:
        if message.get("role") not in SYSTEM_ROLES:
            prompt.append(message)
    prompt_words = _words(prompt)
    prompt_runs = _hashes(prompt_words)
    if prompt_words and not prompt_runs:
        prompt_runs = [hash(prompt_words)]  # a short prompt is one run
    completion_runs = []
    for completion in preference.completions:
        completion_runs.append(_hashes(_words(completion.messages)))
    return [prompt_runs, *completion_runs]


def _hashes(words: tuple[str, ...]) -> list[int]:
    # Python's hash differs from process to process, and both sides are hashed in this one.
    num_runs = len(words) - _RUN + 1
    return [hash(words[i : i + _RUN]) for i in range(num_runs)]


def _words(messages: Sequence[Message]) -> tuple[str, ...]:
    text = "\n".join(last_text([message]) for message in messages)
    return tuple(_WORD.findall(text.casefold()))
