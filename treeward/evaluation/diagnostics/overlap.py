"""`find_overlap`: the examples of an evaluation that were in the training data, and the accuracy without them.

    overlap = find_overlap(examples, (preference for preference, _ in open_dataset(config)))
    overlap.flags[0].kinds                            # ("prompt", "completion"): both were trained on
    compare_overlap(suite, scored, overlap).accuracy_clean   # the headline without the flagged examples

Texts are compared as words, letters and digits in lower case. Three kinds of duplicates are exact: a whole prompt,
a whole conversation (prompt and completion), a whole completion of N words or more. Near duplicates are texts with 70 %
of their words or more in runs of N = 13 words that the training data has too. Near duplicates of prompts ignore system
messages, which are the same everywhere: the same question after another system message is one, however short.

N = 13 is that of GPT-3 (Brown et al. 2020, arXiv 2005.14165, appendix C), which takes a single common run for a hit;
`any_run` is that number. The share of words in common runs, with a threshold, is the measure of Llama 3 (2024, arXiv
2407.21783, section 5.1.4) and of Singh et al. 2024 (arXiv 2411.03923), who compare such measures. A paraphrase or a
translation is not found.

Memory holds hashes of the evaluation's words and runs, about 17 bytes for each word, and none of the training data,
which is read once. Hashes have 64 bits: with 10^6 runs in the evaluation and 10^10 in training, the chance of a single
false match is about one in 2000.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

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

__all__ = ["OverlapDiagnostics", "OverlapFlag", "compare_overlap", "find_overlap", "words_of_text"]

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
    the largest share. 1 for an exact duplicate. `kinds`: why it is flagged, none where it is not. `any_run`: whether
    any text of it has a common run, or is an exact duplicate.
    """

    id: str
    subset: str
    prompt_coverage: float
    completion_coverage: float
    kinds: tuple[str, ...]
    any_run: bool


@dataclass(frozen=True, slots=True)
class OverlapDiagnostics:
    """A flag for each example, in order. `num_training`: preferences that were read."""

    flags: tuple[OverlapFlag, ...]
    num_training: int

    def metrics(self) -> tuple[Metric, ...]:
        """Shares of the examples: flagged at all, by kind, and with any common run."""
        shares = {"flagged": [bool(flag.kinds) for flag in self.flags]}
        shares |= {f"flagged_{kind}": [kind in flag.kinds for flag in self.flags] for kind in _KINDS}
        shares["any_run"] = [flag.any_run for flag in self.flags]
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
    index = _Index([_Texts.of(example.context, example.completions) for example in examples], num_words)
    count = 0
    for count, preference in enumerate(training, start=1):
        index.add(_Texts.of(preference.context, [completion.messages for completion in preference.completions]))
        if count % _PROGRESS_EVERY == 0:
            on_progress(count, 0)
    on_progress(count, 0)
    flags = [index.flag(i, example) for i, example in enumerate(examples)]
    return OverlapDiagnostics(tuple(flags), count)


def compare_overlap(
    suite: Suite, scored: Sequence[ScoredExample], overlap: OverlapDiagnostics, model: str = "model"
) -> Diagnostic:
    """The suite's headline over all examples, over those without a flag and over those with one."""
    flagged = {flag.id for flag in overlap.flags if flag.kinds}
    groups = {
        "accuracy": scored,
        "accuracy_clean": [one for one in scored if one.example.id not in flagged],
        "accuracy_flagged": [one for one in scored if one.example.id in flagged],
    }
    numbers = {name: replace(suite.summarize(own).headline, name=name) for name, own in groups.items()}
    labels = ("All", "Without a duplicate in training", "With a duplicate")
    note = (
        "Each n counts pairs of completions; an example that has a duplicate has it for all of its pairs."
        if suite.summarize(scored).unit == "pairs"
        else "Each n counts whole examples: right where every best completion is ahead of every other."
    )
    items = [bar_item(label, metric) for label, metric in zip(labels, numbers.values(), strict=True)]
    return Diagnostic(numbers, (bars_block("Accuracy and overlap", model, items, note),))


def words_of_text(text: str) -> list[str]:
    """The compared words of a text: in lower case, without punctuation; each character of Chinese."""
    return _WORD.findall(text.casefold())


@dataclass(frozen=True, slots=True)
class _Texts:
    """Hashed words of a context, of its prompt (the context without system messages) and of its completions."""

    context: Hashes
    prompt: Hashes
    completions: tuple[Hashes, ...]

    @classmethod
    def of(cls, context: Sequence[Message], completions: Iterable[Sequence[Message]]) -> _Texts:
        prompt = [message for message in context if message.get("role") != "system"]
        return cls(_hashed(context), _hashed(prompt), tuple(map(_hashed, completions)))


class _Index:
    """The runs and the whole texts of an evaluation, and which of them were met."""

    def __init__(self, texts: Sequence[_Texts], num_words: int) -> None:
        self._texts = texts
        self._num_words = num_words
        runs = [_runs(words, num_words) for one in texts for words in (one.prompt, *one.completions)]
        self._runs = np.unique(np.concatenate(runs)) if runs else np.zeros(0, np.uint64)
        self._met = np.zeros(len(self._runs), dtype=bool)
        self._wholes = {key: False for one in texts for key in self._keys(one)}

    def add(self, texts: _Texts) -> None:
        """Take a training comparison in."""
        for key in self._keys(texts):
            if key in self._wholes:
                self._wholes[key] = True
        if len(self._runs):
            found = np.concatenate([_runs(words, self._num_words) for words in (texts.prompt, *texts.completions)])
            places = np.minimum(np.searchsorted(self._runs, found), len(self._runs) - 1)
            self._met[places[self._runs[places] == found]] = True

    def flag(self, i: int, example: EvalExample) -> OverlapFlag:
        """The parts of the example that were met."""
        texts = self._texts[i]
        exact = {
            "prompt": self._has("context", texts.context),
            "conversation": any(self._has("conversation", texts.context, words) for words in texts.completions),
            "completion": any(self._is_exact(words) for words in texts.completions),
        }
        of_prompt = 1.0 if self._has("prompt", texts.prompt) else self._coverage(texts.prompt)
        shares = [1.0 if self._is_exact(words) else self._coverage(words) for words in texts.completions]
        of_completion = max(shares, default=0.0)
        kinds = [kind for kind, hit in exact.items() if hit]
        kinds += ["near_prompt"] if of_prompt >= _NEAR and not exact["prompt"] else []
        kinds += ["near_completion"] if of_completion >= _NEAR and not exact["completion"] else []
        any_run = of_prompt > 0 or of_completion > 0 or exact["conversation"]
        return OverlapFlag(example.id, example.subset, of_prompt, of_completion, tuple(kinds), any_run)

    def _has(self, kind: str, *texts: Hashes) -> bool:
        return self._wholes.get(_key(kind, *texts), False)

    def _is_exact(self, words: Hashes) -> bool:
        return len(words) >= self._num_words and self._has("completion", words)

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

    def _keys(self, texts: _Texts) -> list[bytes]:
        """Whole texts; a completion that is shorter than a run is no duplicate by itself: many are "Yes." """
        keys = [_key("context", texts.context)] if len(texts.context) else []
        keys += [_key("prompt", texts.prompt)] if len(texts.prompt) else []
        for completion in texts.completions:
            keys.append(_key("conversation", texts.context, completion))
            if len(completion) >= self._num_words:
                keys.append(_key("completion", completion))
        return keys


def _hashed(messages: Sequence[Message]) -> Hashes:
    words = (word for message in messages for word in words_of_text(completion_text([message])))
    return np.array([_word_hash(word) for word in words], dtype=np.uint64)


@lru_cache(maxsize=1 << 18)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def _runs(words: Hashes, num_words: int) -> Hashes:
    """Hashes of all runs of words (W,): sum_k w_(i+k) m^k modulo 2^64. (max(0, W - num_words + 1),)"""
    count = len(words) - num_words + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    found = np.zeros(count, np.uint64)
    power = 1
    for k in range(num_words):
        found += words[k : k + count] * np.uint64(power)
        power = power * _MULTIPLIER % (1 << 64)
    return found


def _key(kind: str, *texts: Hashes) -> bytes:
    digest = hashlib.blake2b(kind.encode(), digest_size=12)
    for words in texts:
        digest.update(len(words).to_bytes(8, "little") + words.tobytes())
    return digest.digest()
