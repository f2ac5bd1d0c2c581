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
from treeward.errors import DataError
from treeward.evaluation.data_check.findings import Finding, Overlap, findings_of, numbers_of
from treeward.evaluation.data_check.reading import read_data, rows_of
from treeward.evaluation.diagnostics.overlap import find_overlap


@dataclass(frozen=True)
class DataCheck:
    """The results of a check. `numbers`: see `findings.numbers_of`. `tokenizer`: whose tokens are counted. `streams`:
    the data, to show rows of it."""

    files: tuple[str, ...]
    tokenizer: str
    numbers: dict[str, Any]
    findings: list[Finding]
    errors: list[DataError]
    overlaps: list[Overlap]
    streams: tuple[RowDataset, ...]


def open_sets(configs: Sequence[DatasetConfig]) -> tuple[RowDataset, ...]:
    """The sets, their formats told by the first rows that are sound."""
    return tuple(open_dataset(recognised(config, skip_broken=True)) for config in configs)


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
    on_progress: Callable[[str, int], None] = lambda what, done: None,
) -> DataCheck:
    """Check training data, alone and against validation sets and benchmarks.

    `renderer`: without a limit of the length. `tokenizer`: its name, for the reader. `max_length`, `truncation`: of the
    run that is to train on the data.
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
    return DataCheck(
        files=tuple(stream.name for stream in streams),
        tokenizer=tokenizer,
        numbers=numbers,
        findings=findings_of(data, numbers, max_length=max_length, truncation=truncation, overlaps=overlaps),
        errors=data.errors,
        overlaps=overlaps,
        streams=tuple(streams),
    )
