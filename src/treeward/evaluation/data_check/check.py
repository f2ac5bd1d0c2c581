"""`check_data`: read preference data, and say what is wrong with it before a model is trained on it.

    checked = check_data(open_sets([DatasetConfig(data_path="train.jsonl")]), Renderer(tokenizer), tokenizer="my-model")
    write_check(Path("results/data"), checked)      # results.json

The data are read once, and once more where overlap is looked for; no text of theirs is kept. What they are compared
with, validation sets and benchmarks, is held in memory.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from treeward.config.data import DatasetConfig, Ties
from treeward.data.datasets import RowDataset, open_dataset, recognised
from treeward.data.preference import Preference
from treeward.data.rendering import Renderer
from treeward.data.tokenizers import texts_of, train_tokenizer
from treeward.errors import DataError
from treeward.evaluation.data_check.findings import (
    DataRead,
    Finding,
    broken_rows,
    findings_of,
    numbers_of,
    read_comparisons,
    read_held_out,
    rows_of,
)
from treeward.evaluation.data_check.overlap import Overlap, find_overlap
from treeward.storage import write_text
from treeward.version import VERSION

_TEXTS_TO_TRAIN, _CHARACTERS_TO_TRAIN, _VOCABULARY = 6000, 10_000, 8192
_EXCERPT = 400  # characters


@dataclass(frozen=True)
class DataCheck:
    """The results of a check. `numbers`: see `findings.numbers_of`. `tokenizer`: whose tokens are counted. `refused`:
    the error of each set that `train` refuses, because it keeps none of its comparisons."""

    files: tuple[str, ...]
    tokenizer: str
    numbers: dict[str, Any]
    findings: list[Finding]
    errors: list[DataError]
    refused: list[DataError]
    overlaps: list[Overlap]


def open_sets(configs: Sequence[DatasetConfig]) -> tuple[RowDataset, ...]:
    """The sets, their formats told by the first rows that are sound."""
    return tuple(open_dataset(recognised(config, skip_broken=True)) for config in configs)


def trained_renderer(streams: Sequence[RowDataset], **template: Any) -> Renderer:
    """The renderer, with the arguments `template`, of a tokenizer that is trained on the first texts."""
    for stream in streams:
        stream.broken = lambda error: None
    texts = (text[:_CHARACTERS_TO_TRAIN] for text in islice(texts_of(streams), _TEXTS_TO_TRAIN))
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
    on_progress: Callable[[str, int], None] = lambda what, done: None,
) -> DataCheck:
    """Check training data, alone and against validation sets and benchmarks.

    `renderer`: without a limit of the length. `tokenizer`: its name, for the reader. `max_length`: tokens of the
    longest completion that training keeps.
    """
    progress_of_reading = partial(on_progress, "reading")
    data = read_comparisons(streams, renderer, ties=ties, max_length=max_length, on_progress=progress_of_reading)
    benchmarks, held_out = benchmarks or {}, DataRead()
    sets: list[tuple[str, list[Preference]]] = []
    for stream in validation:
        preferences = read_held_out(stream, renderer, held_out, ties=ties, max_length=max_length)
        sets.append((stream.name.rpartition("/")[2], preferences))
    broken = broken_rows(held_out, sum(len(of_set) for _, of_set in sets), "rows of the validation sets")
    sets += [(name, list(examples)) for name, examples in benchmarks.items()]
    overlaps: list[Overlap] = []
    if sets:
        examples = [example for _, of_set in sets for example in of_set]
        training = (preference for preference, _ in rows_of(streams))
        progress = partial(on_progress, "looking for overlap")
        flags = iter(find_overlap(examples, training, on_progress=progress))
        overlaps = [Overlap(name, tuple(islice(flags, len(of_set)))) for name, of_set in sets]
    numbers = numbers_of(data)
    findings = findings_of(data, numbers, overlaps=overlaps, benchmarks=benchmarks)
    return DataCheck(
        files=tuple(stream.name for stream in streams),
        tokenizer=tokenizer,
        numbers=numbers,
        findings=[broken, *findings] if broken.count else findings,
        errors=[*data.errors, *held_out.errors],
        refused=[*data.refused, *held_out.refused],
        overlaps=overlaps,
    )


def summary_rows(checked: DataCheck) -> list[dict[str, Any]]:
    """The numbers that everybody asks for first."""
    numbers, longer = checked.numbers, checked.numbers["style"]["longer"]
    rows, completions, tokens = numbers["rows"], numbers["completions"], numbers["tokens"]
    num_longer = round((longer.value or 0.0) * (longer.count or 0))
    counts: list[tuple[str, int, int | None]] = [
        ("comparisons", rows, None),
        ("broken rows", numbers["broken"], rows + numbers["broken"]),
        ("different prompts", numbers["prompts"], None),
        ("completions", completions, None),
        ("messages of the prompts", numbers["turns"], None),
        ("tokens", tokens, None),
        ("tokens of the longest conversation", numbers["tokens_longest"], None),
        ("tokens that a prefix tree saves", tokens - numbers["tree_tokens"], tokens),
        ("ties", numbers["ties"], rows),
        ("repeated comparisons", numbers["duplicates"], rows),
        ("contradicted labels", numbers["contradictions"], rows),
        ("pairs in which the better completion is longer", num_longer, longer.count),
        *((f"examples of {sets.name} in the data", len(sets.flagged), len(sets.flags)) for sets in checked.overlaps),
    ]
    return [
        {"what": what, "number": number, "share": None if of is None else number / max(1, of)}
        for what, number, of in counts
    ]


def write_check(folder: Path, checked: DataCheck) -> Path:
    """Write results.json, which has every number and the rows concerned; returns its path. Raises `OSError`."""
    style = [dataclasses.asdict(metric) for metric in checked.numbers["style"].values()]
    content = {
        "treeward_version": VERSION,
        "files": checked.files,
        "tokenizer": checked.tokenizer,
        "numbers": checked.numbers | {"style": style},
        "findings": [
            dataclasses.asdict(finding) | {"why": finding.why, "fix": finding.fix} for finding in checked.findings
        ],
        "overlap": [
            {"set": overlap.name} | dataclasses.asdict(flag) for overlap in checked.overlaps for flag in overlap.flagged
        ],
        "refused": [_error_row(error) for error in checked.refused],
        "broken": [_error_row(error) for error in checked.errors],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "results.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return folder / "results.json"


def _error_row(error: DataError) -> dict[str, Any]:
    """An error as an object of results.json."""
    got = None if error.got is None else str(error.got)[:_EXCERPT]
    place = {name: getattr(error, name) for name in ("where", "field", "need", "fix")}
    return {**place, "problem": error.summary, "got": got}
