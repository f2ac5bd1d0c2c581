"""`find_overlap`: the examples of an evaluation that were in the training data, and the accuracy without them.

    overlap = find_overlap(examples, (preference for preference, _ in open_dataset(config)))
    overlap.flags[0].kinds                            # ("prompt", "completion"): both were trained on
    compare_overlap(suite, scored, overlap).accuracy_clean   # the headline without the flagged examples

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
from treeward.evaluation.diagnostics.labels import metrics_table
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.report.blocks import bar_item, bars_block, table_block
from treeward.evaluation.results import Block, Diagnostic, Metric
from treeward.evaluation.statistics import accuracy_metric
from treeward.evaluation.suites.interface import Suite

__all__ = ["OverlapDiagnostics", "OverlapFlag", "compare_overlap", "find_overlap"]

NUM_WORDS = 13
_NEAR = 0.7

Hashes = NDArray[np.uint64]

# Chinese and Japanese have no spaces: there each character is a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no word of a run loses its weight modulo 2^64
_PROGRESS_EVERY = 256
_MOST_LISTED = 200
_LARGE_SHARE = 0.25
_EXACT = frozenset(("prompt", "conversation", "completion"))
_KINDS = {
    "prompt": "exact prompt",
    "conversation": "exact prompt with a completion",
    "completion": "exact completion",
    "near_prompt": "near duplicate of a prompt",
    "near_completion": "near duplicate of a completion",
}


@dataclass(frozen=True, slots=True)
class OverlapFlag:
    """The parts of one example that are in the training data.

    `prompt_coverage`: the share of the prompt's words in common runs; `completion_coverage`: of the completion with
    the largest share. 1 for an exact duplicate. `kinds`: why it is flagged, none where it is not.
    """

    id: str
    subset: str
    prompt_coverage: float
    completion_coverage: float
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OverlapDiagnostics:
    """A flag for each example, in order. `num_training`: preferences that were read."""

    flags: tuple[OverlapFlag, ...]
    num_training: int

    def metrics(self) -> tuple[Metric, ...]:
        """Shares of the examples: flagged at all, and by kind."""
        shares = {"flagged": [bool(flag.kinds) for flag in self.flags]}
        shares |= {f"flagged_{kind}": [kind in flag.kinds for flag in self.flags] for kind in _KINDS}
        return tuple(accuracy_metric([float(hit) for hit in hits], name) for name, hits in shares.items())

    @property
    def flagged(self) -> float:
        """The share of examples with an exact or near duplicate; 0 of no examples."""
        return sum(bool(flag.kinds) for flag in self.flags) / max(1, len(self.flags))

    @property
    def exact(self) -> float:
        """The share of examples with a duplicate word for word."""
        return sum(bool(_EXACT & set(flag.kinds)) for flag in self.flags) / max(1, len(self.flags))

    @property
    def templated(self) -> bool:
        """Whether duplicates are many and hardly any of them exact, as where texts are made from templates."""
        return self.flagged >= _LARGE_SHARE and self.exact < self.flagged / 2

    def finding(self) -> str:
        """The shares in words: how many, and whether it is memory or only the data's templates."""
        count = f"{len(self.flags):,} examples"
        if not self.flagged:
            return f"None of {count} has a duplicate among {self.num_training:,} training comparisons."
        said = (
            f"{self.flagged:.1%} of {count} have a duplicate among {self.num_training:,} training comparisons: "
            f"{self.exact:.1%} word for word, the others share most of their words in runs of {NUM_WORDS} or more."
        )
        if self.templated:
            return (
                f"{said} So many near duplicates with so few exact ones are expected of templated data, whose "
                "sentences recur by construction; there they are no sign of memory."
            )
        if self.flagged >= _LARGE_SHARE:
            return f"{said} The model was trained on these examples: quote none of the numbers as held out."
        return said

    def blocks(self) -> list[Block]:
        """The blocks of a report: a table of shares, and the flagged examples if there are any."""
        shares = metrics_table("Overlap with the training data", {"examples": self.metrics()}, self.finding())
        flagged = [flag for flag in self.flags if flag.kinds]
        flagged.sort(key=lambda flag: (-max(flag.prompt_coverage, flag.completion_coverage), flag.id))
        columns = {"id": ("Example", "text"), "subset": ("Subset", "text"), "why": ("Why", "text")}
        columns |= {"prompt_coverage": ("Prompt", "percent"), "completion_coverage": ("Completion", "percent")}
        rows = [asdict(flag) | {"why": ", ".join(map(_KINDS.__getitem__, flag.kinds))} for flag in flagged]
        title = "Examples with a duplicate in the training data"
        return [shares, table_block(title, columns, rows[:_MOST_LISTED], most=10)] if flagged else [shares]


def find_overlap(
    examples: Sequence[EvalExample],
    training: Iterable[Preference],
    *,
    num_words: int = NUM_WORDS,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> OverlapDiagnostics:
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
    return OverlapDiagnostics(tuple(flags), count)


def compare_overlap(
    suite: Suite, scored: Sequence[ScoredExample], overlap: OverlapDiagnostics, model: str = "model"
) -> Diagnostic:
    """The suite's headline over all examples, over those without a flag and over those with one."""
    flagged = {flag.id for flag in overlap.flags if flag.kinds}
    groups = {
        "accuracy": ("All", scored),
        "accuracy_clean": ("Without a duplicate in training", [o for o in scored if o.example.id not in flagged]),
        "accuracy_flagged": ("With a duplicate", [one for one in scored if one.example.id in flagged]),
    }
    numbers = {name: replace(suite.summarize(own).headline, name=name) for name, (_, own) in groups.items()}
    note = (
        "Each n counts pairs of completions; an example that has a duplicate has it for all of its pairs."
        if suite.summarize(scored).unit == "pairs"
        else "Each n counts whole examples: right where every best completion is ahead of every other."
    )
    items = [bar_item(label, numbers[name]) for name, (label, _) in groups.items()]
    return Diagnostic(numbers, (bars_block("Accuracy and overlap", model, items, note),))


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
        self._wholes = {key: False for one in texts for key in one.keys(num_words)}

    def add(self, texts: _Texts) -> None:
        """Take a training comparison in."""
        for key in texts.keys(self._num_words):
            if key in self._wholes:
                self._wholes[key] = True
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
        return self._wholes.get(hash((kind, *(words.tobytes() for words in texts))), False)

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
