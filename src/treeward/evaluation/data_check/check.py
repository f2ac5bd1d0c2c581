"""`check_data`: read preference data, and say what is wrong with it before a model is trained on
it.

    streams = open_sets([DatasetConfig(data_path="train.jsonl")])
    checked = check_data(streams, Renderer(tokenizer), tokenizer="my-model")
    write_check(Path("results/data"), checked)      # results.json

The data are read once, and once more where overlap is looked for; no text of theirs is kept. What
they are compared with, validation sets and benchmarks, is held in memory.
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
from treeward.evaluation.data_check.data_findings import (
    Finding,
    broken_rows,
    findings_of,
    numbers_of,
)
from treeward.evaluation.data_check.overlap import Overlap, find_overlap
from treeward.evaluation.data_check.reading import (
    DataRead,
    read_comparisons,
    read_held_out,
    rows_of,
)
from treeward.storage import write_text
from treeward.version import VERSION

# The tokenizer of a check without a model. Its counts are estimates, so a part of the data will do.
_TEXTS_TO_TRAIN = 6000
_CHARACTERS_TO_TRAIN = 10_000  # of each text
_VOCABULARY = 8192
_EXCERPT = 400  # characters of a refused value


@dataclass(frozen=True)
class DataCheck:
    """The results of a check. `numbers`: see `numbers_of`. `tokenizer`: whose tokens are counted.
    `errors`: those of the first broken rows. `refused`: the error of each set that `train` refuses,
    because it keeps none of its comparisons."""

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
    """The renderer of a tokenizer that is trained on the first texts. `template`: the renderer's
    other arguments."""
    # Broken rows are passed over: the pass after this one sets its own `broken`, and counts them.
    for stream in streams:
        stream.broken = lambda error: None
    first_texts = islice(texts_of(streams), _TEXTS_TO_TRAIN)
    texts = (text[:_CHARACTERS_TO_TRAIN] for text in first_texts)
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

    `renderer`: without a limit of the length. `tokenizer`: its name, for the reader. `max_length`:
    tokens of the longest completion that training keeps.
    """
    data = read_comparisons(
        streams,
        renderer,
        ties=ties,
        max_length=max_length,
        on_progress=partial(on_progress, "reading"),
    )
    benchmarks = benchmarks or {}
    held_out = DataRead()
    # Names with their examples. A list, because two files may have one name.
    sets: list[tuple[str, Sequence[Preference]]] = []
    num_sound = 0
    for stream in validation:
        preferences = read_held_out(stream, renderer, held_out, ties=ties, max_length=max_length)
        num_sound += len(preferences)
        _, _, file_name = stream.name.rpartition("/")
        sets.append((file_name, preferences))
    broken = broken_rows(held_out, num_sound, "rows of the validation sets")
    sets += benchmarks.items()
    overlaps: list[Overlap] = []
    if sets:
        # All sets are looked for at once, so that the data are read only once more.
        all_examples: list[Preference] = []
        for _, examples in sets:
            all_examples += examples
        training = (preference for preference, _ in rows_of(streams))
        progress = partial(on_progress, "looking for overlap")
        flags = iter(find_overlap(all_examples, training, on_progress=progress))
        for name, examples in sets:
            overlaps.append(Overlap(name, tuple(islice(flags, len(examples)))))
    numbers = numbers_of(data)
    findings = findings_of(data, numbers, overlaps=overlaps, benchmarks=benchmarks)
    if broken.count:
        findings.insert(0, broken)
    return DataCheck(
        files=tuple(stream.name for stream in streams),
        tokenizer=tokenizer,
        numbers=numbers,
        findings=findings,
        errors=[*data.errors, *held_out.errors],
        refused=[*data.refused, *held_out.refused],
        overlaps=overlaps,
    )


def summary_rows(checked: DataCheck) -> list[dict[str, Any]]:
    """The numbers that everybody asks for first."""
    numbers = checked.numbers
    rows = numbers["rows"]
    tokens = numbers["tokens"]
    longer = numbers["style"]["longer"]
    num_longer = round((longer.value or 0.0) * (longer.count or 0))
    # What is counted, how many there are, and of how many; None where that is no share.
    counts: list[tuple[str, int, int | None]] = [
        ("comparisons", rows, None),
        ("broken rows", numbers["broken"], rows + numbers["broken"]),
        ("different prompts", numbers["prompts"], None),
        ("completions", numbers["completions"], None),
        ("messages of the prompts", numbers["turns"], None),
        ("tokens", tokens, None),
        ("tokens of the longest conversation", numbers["tokens_longest"], None),
        ("tokens that a prefix tree saves", tokens - numbers["tree_tokens"], tokens),
        ("ties", numbers["ties"], rows),
        ("repeated comparisons", numbers["duplicates"], rows),
        ("contradicted labels", numbers["contradictions"], rows),
        ("pairs in which the better completion is longer", num_longer, longer.count),
    ]
    for overlap in checked.overlaps:
        what = f"examples of {overlap.name} in the data"
        counts.append((what, len(overlap.flagged), len(overlap.flags)))
    table = []
    for what, number, total in counts:
        share = None if total is None else number / max(1, total)
        table.append({"what": what, "number": number, "share": share})
    return table


def write_check(folder: Path, checked: DataCheck) -> Path:
    """Write results.json, which has every number and the rows concerned; returns its path. Raises
    `OSError`."""
    style = [dataclasses.asdict(metric) for metric in checked.numbers["style"].values()]
    findings = []
    for finding in checked.findings:
        # Properties are no fields of a dataclass.
        advice = {"why": finding.why, "fix": finding.fix}
        findings.append(dataclasses.asdict(finding) | advice)
    flags = []
    for overlap in checked.overlaps:
        for flag in overlap.flagged:
            flags.append({"set": overlap.name} | dataclasses.asdict(flag))
    refused = [_error_row(error) for error in checked.refused]
    broken = [_error_row(error) for error in checked.errors]
    content = {
        "treeward_version": VERSION,
        "files": checked.files,
        "tokenizer": checked.tokenizer,
        "numbers": checked.numbers | {"style": style},
        "findings": findings,
        "overlap": flags,
        "refused": refused,
        "broken": broken,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "results.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return folder / "results.json"


def _error_row(error: DataError) -> dict[str, Any]:
    """An error as an object of results.json."""
    return {
        "where": error.where,
        "field": error.field,
        "need": error.need,
        "fix": error.fix,
        "problem": error.summary,
        "got": None if error.got is None else str(error.got)[:_EXCERPT],
    }
