"""`read_comparisons`: one pass over preference data, and what it leaves to be said.

    data = read_comparisons(streams, Renderer(tokenizer))
    data.sums["rows"], data.longest, data.errors

No text is kept: a row leaves its place, and a pair of different ranks a hash. Texts are compared by
hashes of 64 bits: among a million rows the chance of a single false match is one in 30 million.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treeward.config.data import Ties
from treeward.data.conversation import Message, Messages, last_text
from treeward.data.datasets import RowDataset
from treeward.data.encoding import (
    Rules,
    encode_rows,
    nothing_left_error,
    portions,
)
from treeward.data.encoding_counts import EncodingCounts
from treeward.data.preference import (
    Preference,
    contradicts_scores,
    differs_in_prompt,
    num_unanswered,
)
from treeward.data.rendering import Renderer
from treeward.errors import DataError
from treeward.evaluation.diagnostics.biases import markdown_density

MOST_KEPT = 1000
"""Errors of broken rows, and rows of a finding, that are kept; all are counted."""
_MOST_CHARACTERS = 2**20
"""A longer text is read as far as this: it is beyond all limits, and to count the tokens of 50 MB
took a minute."""

TRAITS: Mapping[str, tuple[str, Callable[[str], float]]] = {
    "longer": ("is the longer", len),
    "more_markdown": ("has more markdown", markdown_density),
}
"""What may tell the better completion from the worse one without being quality: by name, in words,
and of a text."""


@dataclass
class DataRead:
    """What a pass over preference data leaves.

    `sums`: counts by name. `longest`: tokens of the longest conversation. `errors`: the errors of
    the first broken rows. `noted`: the places of the first rows of each finding. `stopped`: sets
    that could not be read to their end. `refused`: `train`'s error of each set of which it would
    keep nothing. `places`: file and line of each row. `prompts`: their hashes. `comparisons`:
    hashes of the prompt with its completions and ranks. `labels`: by the hash of two completions of
    a prompt, each row that ranks them, and whether the one of the smaller hash is the better.
    """

    sums: Counter[str] = field(default_factory=Counter)
    longest: int = 0
    errors: list[DataError] = field(default_factory=list)
    noted: dict[str, list[str]] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    refused: list[DataError] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    prompts: set[int] = field(default_factory=set)
    comparisons: set[int] = field(default_factory=set)
    labels: dict[int, list[tuple[int, bool]]] = field(default_factory=dict)

    def broken(self, error: DataError) -> None:
        """Count the error of a row."""
        self.sums["broken"] += 1
        if len(self.errors) < MOST_KEPT:
            self.errors.append(error)


def read_comparisons(
    streams: Sequence[RowDataset],
    renderer: Renderer,
    *,
    ties: Ties = "drop",
    max_length: int | None = None,
    on_progress: Callable[[int], object] = lambda done: None,
) -> DataRead:
    """Read every row. `renderer`: without a limit of the length. `max_length`: tokens of the
    longest completion that training keeps; None for no limit."""
    data = DataRead()
    for stream in streams:
        training = _Training(stream, ties, max_length)
        for rows in portions(rows_of([stream], data)):
            for (preference, where), record in _encoded(rows, renderer, training.rules, data):
                _add_row(data, preference, where, record)
                training.add(record)
            on_progress(data.sums["rows"])
        # The set knows them once it has been read.
        _note(data, "mistyped", stream.left_out)
        data.refused.extend(training.refusal())
    return data


def read_held_out(
    stream: RowDataset,
    renderer: Renderer,
    data: DataRead,
    *,
    ties: Ties = "drop",
    max_length: int | None = None,
) -> list[Preference]:
    """The sound rows of a validation set; `data` counts the broken ones, and the set if training
    keeps none of it."""
    training = _Training(stream, ties, max_length)
    preferences: list[Preference] = []
    for rows in portions(rows_of([stream], data)):
        for (preference, _), record in _encoded(rows, renderer, training.rules, data):
            preferences.append(preference)
            training.add(record)
    data.refused.extend(training.refusal())
    return preferences


class _Training:
    """What training would do with the rows of a set: how many it keeps, and why it drops the
    others."""

    def __init__(self, stream: RowDataset, ties: Ties, max_length: int | None) -> None:
        self.rules = Rules(ties, tuple(stream.config.attributes))
        self._name = stream.name
        self._max_length = max_length
        self._outcomes: Counter[str] = Counter()
        self._longest = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a row by its record of `encode_rows`."""
        outcome: str = record["outcome"]
        if outcome == "kept" and self._max_length is not None:
            # The renderer of a check has no limit: training would leave longer completions out.
            fitting_ranks = []
            for ids, rank in zip(record["token_ids"], record["ranks"], strict=True):
                if len(ids) <= self._max_length:
                    fitting_ranks.append(rank)
            if not self.rules.is_enough(fitting_ranks):
                outcome = "dropped_too_long"
        self._outcomes[outcome] += 1
        self._longest = max(self._longest, record["longest"])

    def refusal(self) -> list[DataError]:
        """The error that `train` ends with, if it keeps none of the rows; else nothing."""
        if "kept" in self._outcomes:
            return []
        counts = EncodingCounts(
            read=self._outcomes.total(), longest=self._longest, **self._outcomes
        )
        return [nothing_left_error(self._name, counts, self.rules.attributes)]


def rows_of(
    streams: Iterable[RowDataset], data: DataRead | None = None
) -> Iterator[tuple[Preference, str]]:
    """The sound rows of all sets; `data` counts the others."""
    if data is None:
        data = DataRead()
    for stream in streams:
        stream.broken = data.broken
        try:
            for preference, where in stream:
                completions = []
                for completion in preference.completions:
                    completions.append(replace(completion, messages=_cut(completion.messages)))
                cut = replace(
                    preference,
                    context=_cut(preference.context),
                    completions=tuple(completions),
                    id=where,  # findings name rows by their places
                )
                yield cut, where
        except DataError as error:  # of the file, not of one row
            data.broken(error)
            data.stopped.append(stream.name)


def _cut(messages: Messages) -> Messages:
    """The messages without text beyond `_MOST_CHARACTERS`."""
    cut_messages = []
    for message in messages:
        content = message.get("content")
        if content is not None and len(content) > _MOST_CHARACTERS:
            message = message | {"content": content[:_MOST_CHARACTERS]}
        cut_messages.append(message)
    return tuple(cut_messages)


def _encoded(
    rows: Sequence[tuple[Preference, str]], renderer: Renderer, rules: Rules, data: DataRead
) -> list[tuple[tuple[Preference, str], dict[str, Any]]]:
    """The rows with their records of `encode_rows`; those that the template refuses are broken."""
    try:
        return list(zip(rows, encode_rows(rows, renderer, rules), strict=True))
    except DataError as error:
        if len(rows) == 1:
            data.broken(error)
            return []
        # One of them is refused: each is encoded alone.
        encoded = []
        for row in rows:
            encoded += _encoded([row], renderer, rules, data)
        return encoded


def _add_row(data: DataRead, preference: Preference, where: str, record: Mapping[str, Any]) -> None:
    """Count a row, its findings and its pairs."""
    completions = preference.completions
    ranks = preference.ranks
    prompt = key_of(preference.context, preference.template_kwargs)
    keys = []
    texts = []
    num_empty = 0
    for completion in completions:
        text = last_text(completion.messages)
        keys.append(key_of(completion.messages))
        texts.append(text)
        # A call of a tool may stand alone.
        if not text.strip() and not completion.messages[-1].get("tool_calls"):
            num_empty += 1
    # The order of the completions is no difference between two comparisons.
    comparison = hash((prompt, frozenset(zip(keys, ranks, strict=True))))
    num_identical = record["deduplicated"]
    if record["outcome"] == "dropped_identical":
        # The record of a comparison that is dropped does not say how many.
        num_identical = num_identical or 1
    counts = {
        "ties": int(len(ranks) > 1 and len(set(ranks)) == 1),
        "empty": num_empty,
        "identical": num_identical,
        "duplicates": int(comparison in data.comparisons),
        "contradicted_scores": int(contradicts_scores(completions)),
        "unanswered": num_unanswered(completions),
        "other_prompts": int(differs_in_prompt(completions)),
    }
    for name, count in counts.items():
        _note(data, name, [where] * count)
    data.sums.update(
        rows=1,
        completions=len(completions),
        turns=len(preference.context),
        tokens=record["tokens"],
        tree_tokens=record["tree_tokens"],
    )
    data.comparisons.add(comparison)
    # A comparison without a prompt is a prompt of its own.
    data.prompts.add(prompt if preference.context else comparison)
    for token_ids in record["token_ids"]:
        data.longest = max(data.longest, len(token_ids))
    _add_pairs(data, prompt, keys, texts, ranks)
    data.places.append(where)


def _note(data: DataRead, name: str, places: Sequence[str]) -> None:
    """Count a finding once for each place, and keep the first rows of it."""
    data.sums[name] += len(places)
    rows = data.noted.setdefault(name, [])
    for where in dict.fromkeys(places):
        if len(rows) < MOST_KEPT:
            rows.append(where)


def _add_pairs(
    data: DataRead, prompt: int, keys: Sequence[int], texts: Sequence[str], ranks: Sequence[int]
) -> None:
    """Count for each ordered pair of completions which one is the better, and which has more of
    each trait. `keys`: hashes of the completions."""
    amounts: dict[str, list[float]] = {}
    for name, (_, amount_of) in TRAITS.items():
        amounts[name] = [amount_of(text) for text in texts]
    row = len(data.places)  # its place is added after its pairs
    for better, worse in itertools.permutations(range(len(keys)), 2):
        # Of two equal texts neither can be the better, whatever their ranks.
        if ranks[better] >= ranks[worse] or keys[better] == keys[worse]:
            continue
        # The same pair in another row has the same key, whichever is the better there.
        first, second = sorted((keys[better], keys[worse]))
        label = (row, keys[better] == first)
        data.labels.setdefault(hash((prompt, first, second)), []).append(label)
        for name, of_texts in amounts.items():
            if of_texts[better] > of_texts[worse]:
                data.sums[f"{name} in better"] += 1
            elif of_texts[better] < of_texts[worse]:
                data.sums[f"{name} in worse"] += 1


def key_of(messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None) -> int:
    """The same number for the same messages and variables of the template, in every process."""
    parts: list[Any] = []
    for message in messages:
        parts.append((message["role"], message.get("content"), message.get("tool_calls")))
    if template_kwargs:
        parts.append(template_kwargs)
    # Python's own hash of a text differs from process to process. A lone surrogate is no UTF-8.
    digest = hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
