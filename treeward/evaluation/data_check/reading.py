"""`read_data`: one pass over preference data, and what it leaves: sums, and a few numbers for each row and pair.

    data = read_data(streams, Renderer(tokenizer))
    data.sums["ties"], data.column("longest")

No text is kept: a row leaves 34 bytes and a pair of different ranks 13, whatever their lengths. Texts are compared by
hashes of 64 bits: among a million rows the chance of a single false match is one in 30 million.

Shapes: N rows (comparisons), P pairs of a better and a worse completion of one row.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeward.data.datasets import RowDataset
from treeward.data.encoding import Rules, Ties, encode_rows, portions
from treeward.data.preference import Message, Messages, Preference, last_text
from treeward.data.rendering import Renderer
from treeward.errors import DataError
from treeward.evaluation.diagnostics.biases import markdown_density

MOST_KEPT = 1000
"""Errors of broken rows, and rows of a finding, that are kept; all are counted."""
_MOST_CHARACTERS = 2**20
"""A longer text is read as far as this: it is beyond all limits, and to count the tokens of 50 MB took a minute."""

_REFUSAL = re.compile(
    r"\b(?:sorry|apologi[sz]e|unable to|I (?:can(?:'|’)?t|cannot|won(?:'|’)t)|as an AI)\b", re.IGNORECASE
)

TRAITS: Mapping[str, tuple[str, Callable[[str], float]]] = {
    "longer": ("is the longer", len),
    "more_markdown": ("has more markdown", markdown_density),
    "more_refusals": ("apologises or refuses more", lambda text: len(_REFUSAL.findall(text))),
    "more_questions": ("asks more questions", lambda text: text.count("?")),
    "more_exclamations": ("has more exclamation marks", lambda text: text.count("!")),
}
"""What may tell the better completion from the worse one without being quality: by name, in words, and of a text."""

_ROW_COLUMNS = {"source": "H", "place": "I", "digest": "q", "prompt": "q", "longest": "i", "needed": "i", "shared": "i"}
_PAIR_COLUMNS = {"pair": "q", "first_is_better": "b", "row": "I"}


@dataclass
class DataRead:
    """What a pass over preference data leaves.

    `sums`: by name. Columns (N,): where a row stands (`where`); `digest`, equal for rows with the same prompt,
    completions and ranks; `prompt`; tokens of the `longest` conversation; the longest that must fit, so that two
    completions of different rank do (`needed`); tokens that all conversations share
    (`shared`); these three are 0 in rows that say nothing. Columns (P,): `pair`, equal for the same two completions of
    the same prompt; `first_is_better`, 0 or 1; `row`. `errors`: the first ones of broken rows. `noted`: the first rows
    of findings, by name. `stopped`: sets that could not be read to their end.
    """

    sums: Counter[str] = field(default_factory=Counter)
    errors: list[DataError] = field(default_factory=list)
    noted: dict[str, list[str]] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    columns: dict[str, array[Any]] = field(
        default_factory=lambda: {name: array(kind) for name, kind in (_ROW_COLUMNS | _PAIR_COLUMNS).items()}
    )

    def column(self, name: str) -> NDArray[Any]:
        """A column as an array."""
        return np.frombuffer(self.columns[name], dtype=self.columns[name].typecode)

    def where(self, row: int) -> str:
        """File and line of a row."""
        return f"{[*self.sources][self.columns['source'][row]]}{self.columns['place'][row] or ''}"

    def broken(self, error: DataError) -> None:
        """Count the error of a row."""
        self.sums["broken"] += 1
        if len(self.errors) < MOST_KEPT:
            self.errors.append(error)


def read_data(
    streams: Sequence[RowDataset],
    renderer: Renderer,
    *,
    ties: Ties = "drop",
    on_progress: Callable[[int], object] = lambda done: None,
) -> DataRead:
    """Read every row. `renderer`: without a limit of the length."""
    data, rules = DataRead(), Rules(ties, keep_rest=True)
    for rows in portions(rows_of(streams, data)):
        for (preference, where), record in _encoded(rows, renderer, rules, data):
            _add_row(data, preference, where, record)
        on_progress(data.sums["rows"])
    return data


def rows_of(streams: Iterable[RowDataset], data: DataRead | None = None) -> Iterator[tuple[Preference, str]]:
    """The sound rows of all sets; `data` counts the others."""
    data = DataRead() if data is None else data
    for stream in streams:
        stream.broken = data.broken
        try:
            for preference, where in stream:
                ends = tuple(replace(end, messages=_shortened(end.messages)) for end in preference.completions)
                yield replace(preference, context=_shortened(preference.context), completions=ends, id=where), where
        except DataError as error:  # of the file, not of one row
            data.broken(error)
            data.stopped.append(stream.name)


def _shortened(messages: Messages) -> Messages:
    most = _MOST_CHARACTERS
    return tuple(m | {"content": m["content"][:most]} if len(m.get("content") or "") > most else m for m in messages)


def _encoded(
    rows: Sequence[tuple[Preference, str]], renderer: Renderer, rules: Rules, data: DataRead
) -> list[tuple[tuple[Preference, str], dict[str, Any]]]:
    """The rows with their records of `encode_rows`; those that the template refuses are broken."""
    try:
        return list(zip(rows, encode_rows(rows, renderer, rules), strict=True))
    except DataError as error:
        if len(rows) > 1:
            return [encoded for row in rows for encoded in _encoded([row], renderer, rules, data)]
        data.broken(error)
        return []


def _add_row(data: DataRead, preference: Preference, where: str, record: Mapping[str, Any]) -> None:
    completions, ranks = preference.completions, preference.ranks
    prompt, keys = key_of(preference.context), [key_of(completion.messages) for completion in completions]
    texts = [last_text(completion.messages) for completion in completions]
    counts = {
        "ties": int(len(ranks) > 1 and len(set(ranks)) == 1),
        "empty": sum(not text.strip() for text in texts),
        "identical": record["deduplicated"] or int(record["outcome"] == "dropped_identical"),
    }
    for name, count in counts.items():
        places = data.noted.setdefault(name, [])
        if count and len(places) < MOST_KEPT:
            places.append(where)
    data.sums.update(
        counts,
        rows=1,
        completions=len(completions),
        turns=len(preference.context),
        **{name: record[name] for name in ("tokens", "tree_tokens", "tied_pairs")},
    )
    ids, sizes = record["token_ids"], list(map(len, record["token_ids"]))
    digest = hash((prompt, frozenset(zip(keys, ranks, strict=True))))
    source = where.rstrip("0123456789")
    row = {
        "source": data.sources.setdefault(source, len(data.sources)),
        "place": int(where[len(source) :] or 0),
        "digest": digest,
        "prompt": prompt if preference.context else digest,
        "longest": max(sizes, default=0),
        "needed": _needed(sizes, record["ranks"]),
        "shared": len(os.path.commonprefix([of_one.tolist() for of_one in ids])) if len(ids) > 1 else 0,
    }
    for name, value in row.items():
        data.columns[name].append(value)
    _add_pairs(data, prompt, keys, texts, ranks)


def _add_pairs(data: DataRead, prompt: int, keys: Sequence[int], texts: Sequence[str], ranks: Sequence[int]) -> None:
    row = len(data.columns["digest"]) - 1
    amounts = [[amount_of(text) for _, amount_of in TRAITS.values()] for text in texts]
    for a, b in itertools.permutations(range(len(keys)), 2):
        if ranks[a] >= ranks[b] or keys[a] == keys[b]:
            continue
        data.columns["pair"].append(hash((prompt, min(keys[a], keys[b]), max(keys[a], keys[b]))))
        data.columns["first_is_better"].append(keys[a] < keys[b])
        data.columns["row"].append(row)
        for name, better, worse in zip(TRAITS, amounts[a], amounts[b], strict=True):
            if better != worse:
                data.sums[f"{name} in {'better' if better > worse else 'worse'}"] += 1


def _needed(sizes: Sequence[int], ranks: Sequence[int]) -> int:
    """The least limit in tokens at which `data.truncation: drop` keeps two completions of different rank."""
    in_order = sorted(zip(sizes, ranks, strict=True))
    return next((size for size, rank in in_order if rank != in_order[0][1]), 0)


def key_of(messages: Sequence[Message]) -> int:
    """The same number for the same messages, in every process."""
    parts = [(message["role"], message.get("content"), message.get("tool_calls")) for message in messages]
    digest = hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
