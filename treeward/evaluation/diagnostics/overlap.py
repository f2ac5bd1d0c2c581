"""`find_overlap`: the examples of an evaluation that were in the training data, and the accuracy without them.

    overlap = find_overlap(examples, (preference for preference, _ in open_dataset(config)))
    overlap.flags[0].kinds                            # ("prompt", "completion"): both were trained on
    diagnose_overlap(suite, scored, overlap).accuracy_clean   # the headline without the flagged examples

Texts are compared as words, letters and digits in lower case. Three kinds of duplicates are exact: a whole prompt,
a whole conversation (prompt and completion), a whole completion of N words or more. Near duplicates are texts with 70 %
of their words or more in runs of N = 13 words that the training data has too. Near duplicates of prompts ignore system
messages, which are the same everywhere: the same question after another system message is one, however short.

N = 13 is that of GPT-3 (Brown et al. 2020, arXiv 2005.14165, appendix C). The share of words in common runs, with a
threshold, is the measure of Llama 3 (2024, arXiv 2407.21783, section 5.1.4) and of Singh et al. 2024 (arXiv
2411.03923), who compare such measures. A paraphrase or a translation is not found.

Memory holds hashes of the evaluation's words and runs, about 17 bytes for each word, and none of the training data,
which is read once. Hashes have 64 bits: with 10^6 runs in the evaluation and 10^10 in training, the chance of a single
false match is about one in 2000.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treeward.data.preference import Message, Preference
from treeward.evaluation.diagnostics.completions import completion_text
from treeward.evaluation.diagnostics.labels import LABELS
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.report.blocks import bar_item, bars_block, table_block
from treeward.evaluation.results import Diagnostic
from treeward.evaluation.statistics import accuracy_metric
from treeward.evaluation.suites.interface import Suite

__all__ = ["Overlap", "OverlapFlag", "diagnose_overlap", "find_overlap"]

NUM_WORDS = 13
_NEAR = 0.7

Hashes = NDArray[np.uint64]

# Chinese and Japanese have no spaces: there each character is a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no word of a run loses its weight modulo 2^64
_PROGRESS_EVERY = 256
_MOST_LISTED = 200
_LARGE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class OverlapFlag:
    """The parts of one example that are in the training data.

    `kinds`: why it is flagged, none where it is not: prompt, conversation, completion (exact), near_prompt,
    near_completion. `prompt_coverage`: the share of the prompt's words in common runs; `completion_coverage`: of the
    completion with the largest share. 1 for an exact duplicate.
    """

    id: str
    subset: str
    prompt_coverage: float
    completion_coverage: float
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Overlap:
    """A flag for each example, in order. `num_training`: preferences that were read."""

    flags: tuple[OverlapFlag, ...]
    num_training: int


def find_overlap(
    examples: Sequence[EvalExample],
    training: Iterable[Preference],
    *,
    num_words: int = NUM_WORDS,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Overlap:
    """Read the training data once and flag the examples that it has.

    `num_words`: of a run. `on_progress` receives how many preferences were read, and 0, for the total is not known.
    """
    texts = [_texts(example.context, example.completions) for example in examples]
    index = _Index(texts, num_words)
    count = 0
    for count, preference in enumerate(training, start=1):
        index.add(_texts(preference.context, [completion.messages for completion in preference.completions]))
        if count % _PROGRESS_EVERY == 0:
            on_progress(count, 0)
    on_progress(count, 0)
    flags = [index.flag(example, own) for example, own in zip(examples, texts, strict=True)]
    return Overlap(tuple(flags), count)


def diagnose_overlap(
    suite: Suite, scored: Sequence[ScoredExample], overlap: Overlap, model: str = "model"
) -> Diagnostic:
    """The shares of examples with a duplicate, and the suite's headline over those without and those with one.

    `flagged`: with an exact or near duplicate; `flagged_exact`: with one word for word.
    """
    flagged = {flag.id: any(not kind.startswith("near") for kind in flag.kinds) for flag in overlap.flags if flag.kinds}
    shares = {"flagged": set(flagged), "flagged_exact": {id for id, is_exact in flagged.items() if is_exact}}
    numbers = {
        name: accuracy_metric([float(flag.id in ids) for flag in overlap.flags], name) for name, ids in shares.items()
    }
    for name, hit in (("accuracy_clean", False), ("accuracy_flagged", True)):
        own = [one for one in scored if (one.example.id in flagged) == hit]
        numbers[name] = replace(suite.summarize(own).headline, name=name)
    items = [bar_item(LABELS[name][0], numbers[name]) for name in ("accuracy_clean", "accuracy_flagged")]
    unit = "pairs of completions" if suite.summarize(scored).unit == "pairs" else "whole examples"
    note = f"{_in_words(numbers['flagged'].value or 0.0, numbers['flagged_exact'].value or 0.0, overlap)} Each n counts"
    bars = bars_block("Overlap with the training data", model, items, f"{note} {unit}.")
    columns = {"id": ("Example", "text"), "subset": ("Subset", "text"), "why": ("Why", "text")}
    columns |= {"prompt_coverage": ("Prompt", "percent"), "completion_coverage": ("Completion", "percent")}
    rows = [asdict(flag) | {"why": ", ".join(flag.kinds).replace("_", " ")} for flag in overlap.flags if flag.kinds]
    rows.sort(key=lambda row: (-max(row["prompt_coverage"], row["completion_coverage"]), row["id"]))
    table = table_block("Examples with a duplicate in the training data", columns, rows[:_MOST_LISTED], most=10)
    return Diagnostic(numbers, (bars, table) if rows else (bars,))


def _in_words(flagged: float, exact: float, overlap: Overlap) -> str:
    """How many have a duplicate, and whether it is memory or only the data's templates."""
    count = f"{len(overlap.flags):,} examples"
    if not flagged:
        return f"None of {count} has a duplicate among {overlap.num_training:,} training comparisons."
    said = (
        f"{flagged:.1%} of {count} have a duplicate among {overlap.num_training:,} training comparisons: "
        f"{exact:.1%} word for word, the others share most of their words in runs of {NUM_WORDS} or more."
    )
    if flagged < _LARGE_SHARE:
        return said
    if exact < flagged / 2:
        return (
            f"{said} So many near duplicates with so few exact ones are expected of templated data: no sign of memory."
        )
    return f"{said} The model was trained on these examples: quote none of the numbers as held out."


class _Texts(NamedTuple):
    """Hashed words of a context, of its prompt (the context without system messages) and of its completions."""

    context: Hashes
    prompt: Hashes
    completions: tuple[Hashes, ...]

    def keys(self, num_words: int) -> list[Hashable]:
        """Whole texts; a completion that is shorter than a run is no duplicate by itself: many are "Yes." """
        keys: list[Hashable] = [("context", self.context.tobytes()), ("prompt", self.prompt.tobytes())]
        for words in self.completions:
            keys.append(("conversation", self.context.tobytes(), words.tobytes()))
            keys += [("completion", words.tobytes())] if len(words) >= num_words else []
        return list(map(hash, keys))


class _Index:
    """The runs and the whole texts of an evaluation, and which of them were met."""

    def __init__(self, texts: Sequence[_Texts], num_words: int) -> None:
        self._num_words = num_words
        runs = [_runs(words, num_words) for one in texts for words in (one.prompt, *one.completions)]
        self._runs = np.unique(np.concatenate([np.zeros(1, np.uint64), *runs]))
        self._met = np.zeros(len(self._runs), dtype=bool)
        self._wholes = {key for one in texts for key in one.keys(num_words)}
        self._met_wholes: set[Hashable] = set()

    def add(self, texts: _Texts) -> None:
        """Take a training comparison in."""
        self._met_wholes |= self._wholes.intersection(texts.keys(self._num_words))
        found = np.concatenate([_runs(words, self._num_words) for words in (texts.prompt, *texts.completions)])
        places = np.minimum(np.searchsorted(self._runs, found), len(self._runs) - 1)
        self._met[places[self._runs[places] == found]] = True

    def flag(self, example: EvalExample, texts: _Texts) -> OverlapFlag:
        """The parts of the example that were met."""
        is_whole = [self._has("completion", words) for words in texts.completions]
        exact = {
            "prompt": len(texts.context) > 0 and self._has("context", texts.context),
            "conversation": any(self._has("conversation", texts.context, words) for words in texts.completions),
            "completion": any(is_whole),
        }
        is_prompt = len(texts.prompt) > 0 and self._has("prompt", texts.prompt)
        of_prompt = 1.0 if is_prompt else self._coverage(texts.prompt)
        shares = [max(float(w), self._coverage(words)) for w, words in zip(is_whole, texts.completions, strict=True)]
        of_completion = max(shares, default=0.0)
        kinds = [kind for kind, hit in exact.items() if hit]
        kinds += ["near_prompt"] if of_prompt >= _NEAR and not exact["prompt"] else []
        kinds += ["near_completion"] if of_completion >= _NEAR and not exact["completion"] else []
        return OverlapFlag(example.id, example.subset, of_prompt, of_completion, tuple(kinds))

    def _has(self, kind: str, *texts: Hashes) -> bool:
        return hash((kind, *(words.tobytes() for words in texts))) in self._met_wholes

    def _coverage(self, words: Hashes) -> float:
        """The share of words (W,) in a run that was met; 0 for a text shorter than a run."""
        runs = _runs(words, self._num_words)
        if len(runs) == 0:
            return 0.0
        hits = np.flatnonzero(self._met[np.searchsorted(self._runs, runs)])
        # +1 where a met run begins, -1 after its end: the sum so far is how many of them a word lies in
        steps = np.zeros(len(words) + 1, dtype=np.int64)
        np.add.at(steps, hits, 1)
        np.add.at(steps, hits + self._num_words, -1)
        return float((np.cumsum(steps)[:-1] > 0).mean())


def _texts(context: Sequence[Message], completions: Iterable[Sequence[Message]]) -> _Texts:
    prompt = [message for message in context if message.get("role") != "system"]
    return _Texts(_hashed(context), _hashed(prompt), tuple(map(_hashed, completions)))


def _hashed(messages: Sequence[Message]) -> Hashes:
    text = "\n".join(completion_text([message]) for message in messages)
    return np.array([hash(word) for word in _WORD.findall(text.casefold())], dtype=np.int64).view(np.uint64)


def _runs(words: Hashes, num_words: int) -> Hashes:
    """Hashes of all runs of words (W,): sum_k w_(i+k) m^k modulo 2^64. (max(0, W - num_words + 1),)"""
    found = np.zeros(max(0, len(words) - num_words + 1), np.uint64)
    power = 1
    for k in range(num_words if len(found) else 0):
        found += words[k : k + len(found)] * np.uint64(power)
        power = power * _MULTIPLIER % (1 << 64)
    return found
