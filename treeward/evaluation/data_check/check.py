"""`check_data`: read preference data, and say what is wrong with it before a model is trained on it.

    checked = check_data([DatasetConfig(data_path="train.jsonl")], Renderer(tokenizer), tokenizer="my-model")
    [finding.text for finding in checked.findings]

The training data are read once in flat memory (`reading`), once more where overlap is looked for and once for the page.
What they are compared with, validation sets and benchmarks, is held in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from treeward.config.data import DatasetConfig
from treeward.data.datasets import RowDataset, open_dataset, recognised
from treeward.data.encoding import Ties
from treeward.data.preference import Preference
from treeward.data.rendering import Renderer
from treeward.data.tokenizers import texts_of, train_tokenizer
from treeward.errors import DataError
from treeward.evaluation.data_check.findings import Finding, Overlap, findings_of, losses_at, numbers_of
from treeward.evaluation.data_check.reading import read_data, rows_of
from treeward.evaluation.diagnostics.overlap import find_overlap

_LENGTHS = (512, 1024, 2048, 4096, 8192)

_TEXTS_FOR_TOKENIZER, _CHARACTERS_FOR_TOKENIZER, _VOCABULARY = 6000, 10_000, 8192


@dataclass(frozen=True)
class DataCheck:
    """The results of a check. `numbers`: see `findings.numbers_of`; `lengths`: `findings.losses_at`. `tokenizer`: whose
    tokens are counted. `streams`: the data, to show rows of it."""

    files: tuple[str, ...]
    tokenizer: str
    numbers: dict[str, Any]
    lengths: list[dict[str, Any]]
    findings: list[Finding]
    errors: list[DataError]
    overlaps: list[Overlap]
    streams: tuple[RowDataset, ...]


def open_sets(configs: Sequence[DatasetConfig]) -> tuple[RowDataset, ...]:
    """The sets, their formats told by the first rows that are sound."""
    return tuple(open_dataset(recognised(config, skip_broken=True)) for config in configs)


def own_renderer(streams: Sequence[RowDataset], **template: Any) -> Renderer:
    """Of a tokenizer of 8,192 tokens that is trained on the first texts: its counts are estimates for any other.

    `template`: arguments of `Renderer`.
    """
    for stream in streams:
        stream.broken = lambda error: None
    texts = (text[:_CHARACTERS_FOR_TOKENIZER] for text in islice(texts_of(streams), _TEXTS_FOR_TOKENIZER))
    return Renderer(train_tokenizer(texts, vocab_size=_VOCABULARY), **template)


def check_data(
    streams: Sequence[RowDataset],
    renderer: Renderer,
    *,
    tokenizer: str,
    validation: Sequence[RowDataset] = (),
    benchmarks: Mapping[str, Sequence[Preference]] | None = None,
    ties: Ties = "drop",
    max_length: int | None = None,
    truncation: str = "drop",
    max_lengths: Sequence[int] | None = None,
    on_progress: Callable[[str, int], None] = lambda what, done: None,
) -> DataCheck:
    """Check training data, alone and against validation sets and benchmarks.

    `renderer`: without a limit of the length. `tokenizer`: its name, for the reader. `max_length`, `truncation`: of the
    run that is to train on the data; `max_lengths`: limits to say the cost of.
    """
    data = read_data(streams, renderer, ties=ties, on_progress=lambda done: on_progress("reading", done))
    sets = [
        (stream.name.rpartition("/")[2], [preference for preference, _ in rows_of([stream], data)], False)
        for stream in validation
    ]
    sets += [(name, list(examples), True) for name, examples in (benchmarks or {}).items()]
    overlaps = []
    if sets:
        examples = [example for _, of_set, _ in sets for example in of_set]
        training = (preference for preference, _ in rows_of(streams))
        overlap = find_overlap(examples, training, on_progress=lambda done, _: on_progress("looking for overlap", done))
        flags = iter(overlap.flags)
        for name, of_set, is_benchmark in sets:
            overlaps.append(Overlap(name, tuple(islice(flags, len(of_set))), is_benchmark))
    numbers = numbers_of(data)
    limits = sorted({*(max_lengths or _LENGTHS), *([] if max_length is None else [max_length])})
    if max_lengths is None:  # one that keeps all is enough
        limits = [n for below, n in zip([0, *limits], limits, strict=False) if below < numbers["tokens_longest"]]
    return DataCheck(
        files=tuple(stream.name for stream in streams),
        tokenizer=tokenizer,
        numbers=numbers,
        lengths=losses_at(data, limits),
        findings=findings_of(data, numbers, max_length=max_length, truncation=truncation, overlaps=overlaps),
        errors=data.errors,
        overlaps=overlaps,
        streams=tuple(streams),
    )
