"""What `treeward check-labels` shows: sentences, a table, labels.jsonl and the report.

    write_label_check(Path("results/labels"), numbers, lines, examples, model="...", data="...")

`label_page.html` has the words of the report that are not sentences of the terminal too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeward.evaluation.label_check.label_numbers import (
    FlippedLabels,
    LabelNumbers,
    SourceNumbers,
)
from treeward.evaluation.label_check.planted_flips import TYPICAL_SHARE
from treeward.evaluation.report.build import write_report
from treeward.evaluation.report.charts import Line
from treeward.evaluation.results import Metric
from treeward.formatting import format_number
from treeward.storage import write_text
from treeward.tables import Column

_NOTABLE = 0.1
"""By how much the longer side must lose more often among suspects than elsewhere to be told."""


@dataclass(frozen=True, slots=True)
class LabelPage:
    """The numbers of the report. `sentences`: what the terminal says too. `bound`: the curve of the
    upper bound over the share of pairs that are the surest. `flips`, `sources`: rows of tables.
    `examples`: the most suspicious pairs with their texts. `num_unread`: pairs without a margin."""

    model: str
    data: str
    numbers: LabelNumbers
    sentences: tuple[str, ...]
    bound: tuple[Line, ...]
    flips: tuple[dict[str, Any], ...]
    sources: tuple[dict[str, Any], ...]
    examples: Sequence[Mapping[str, Any]]
    num_unread: int

    @property
    def typical(self) -> FlippedLabels:
        """What is found of the share of flips that stands for all."""
        return _typical_flips(self.numbers.overall)


def write_label_check(folder: Path, page: LabelPage, lines: Sequence[Mapping[str, Any]]) -> Path:
    """Write labels.jsonl, report.json and report.html; returns the path of the last. Raises
    `DataError` where the report cannot be written, and `OSError` for the lines."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_text(folder / "labels.jsonl", text)
    return write_report(
        folder,
        "evaluation/label_check/label_page.html",
        f"Labels: {page.data}",
        page,
        subtitle=f"read by {page.model}",
    )


def label_page(
    numbers: LabelNumbers,
    examples: Sequence[Mapping[str, Any]],
    *,
    model: str,
    data: str,
    num_unread: int,
) -> LabelPage:
    """The page. `model`, `data`: their names."""
    curve = numbers.curve
    labels = [f"the {format_number(point.share, 'percent')} surest" for point in curve]
    bounds = [point.bound for point in curve]
    # Over per cent: an axis of a chart has plain numbers.
    places = [100 * point.share for point in curve]
    values = [bound.value for bound in bounds]
    lows = [bound.low for bound in bounds]
    highs = [bound.high for bound in bounds]
    line = Line("upper bound", places, values, lows, highs, labels)
    sources = [_source_row(name, source) for name, source in numbers.sources.items()]
    return LabelPage(
        model=model,
        data=data,
        numbers=numbers,
        sentences=label_sentences(numbers, num_unread),
        bound=(line,),
        flips=tuple(_flip_row(flips) for flips in numbers.overall.flips),
        sources=tuple(sources),
        examples=examples,
        num_unread=num_unread,
    )


FLIP_COLUMNS = (
    Column("share", "labels flipped on purpose", "percent"),
    Column("count", "pairs"),
    Column("auroc", "AUROC", ".3f"),
    Column("precision", "found, of as many as flipped", "percent"),
    Column("suspect_recall", "flipped that are suspects", "percent"),
    Column("suspect_precision", "suspects that are flipped", "percent"),
)


def flip_rows(numbers: LabelNumbers) -> list[dict[str, Any]]:
    """A row of plain numbers for each share of labels that is flipped on purpose."""
    rows = []
    for flips in numbers.overall.flips:
        row = _flip_row(flips)
        for key, cell in row.items():
            if isinstance(cell, Metric):
                row[key] = cell.value
        rows.append(row)
    return rows


def _flip_row(flips: FlippedLabels) -> dict[str, Any]:
    return {
        "share": flips.share,
        "count": flips.auroc.count,
        "auroc": flips.auroc.value,
        "precision": flips.precision,
        "suspect_recall": flips.suspect_recall,
        "suspect_precision": flips.suspect_precision,
    }


def _source_row(name: str, source: SourceNumbers) -> dict[str, Any]:
    count = source.accuracy.count or 0
    flips = _typical_flips(source)
    return {
        "source": name,
        "count": count,
        "accuracy": source.accuracy,
        "auroc": flips.auroc.value,
        "precision": flips.precision,
        "suspects": source.num_suspects,
        "share": source.num_suspects / max(count, 1),
    }


def label_sentences(numbers: LabelNumbers, num_unread: int = 0) -> tuple[str, ...]:
    """What the numbers say, and what they do not."""
    accuracy = numbers.accuracy
    pairs = f"{numbers.num_pairs:,} pairs of {numbers.num_prompts:,} prompts"
    agreement = (
        f"A head that has not seen a pair's prompt agrees with {_percent(accuracy.value)} of the "
        f"labels ({_percent(accuracy.low)} to {_percent(accuracy.high)}; {pairs})."
    )
    sentences = [agreement]
    if num_unread > 0:
        sentences.append(
            f"{num_unread:,} pairs were not read, as they are too long or have equal tokens: they "
            "are kept."
        )
    if not numbers.is_informed:
        sentences.append(
            "That may be chance: random labels would agree as often in some data. This model "
            "hardly sees what the labels say, so nothing is proposed. Try another --model, or more "
            "pairs."
        )
        return tuple(sentences)
    sentences.append(
        f"At most {_percent(numbers.bound.high)} of the labels are wrong (95 % confidence), if "
        "errors fall on pairs whatever their texts. This is an upper bound and no estimate: the "
        "head's own mistakes are in it, and agreement alone cannot tell a worse head from worse "
        "labels."
    )
    suspects = numbers.suspects
    if suspects.count == 0:
        sentences.append("No pair is a suspect, so nothing is proposed.")
        return tuple(sentences)
    sentences.append(
        f"{suspects.count:,} pairs ({_percent(suspects.value)}) are suspects, and proposed to be "
        "dropped. A label looks wrong too where the model does not see what the label is about: "
        "read them before you drop them."
    )
    if not is_precise(numbers):
        typical = _typical_flips(numbers.overall)
        precision = typical.suspect_precision
        sentence = f"Most suspects may be right: when {_percent(typical.share)} of the labels were "
        sentence += "flipped on purpose, "
        if precision.value is None:
            sentence += "there were no suspects at all."
        else:
            sentence += (
                f"{_percent(typical.suspect_recall.value)} of these were suspects, and only "
                f"{_percent(precision.value)} of the suspects were flipped."
            )
        sentences.append(f"{sentence} On such data dropping them did not help (docs/labels.md).")
    among = numbers.longer_lost["suspects"].value
    overall = numbers.longer_lost["all pairs"].value
    if among is not None and overall is not None and among - overall > _NOTABLE:
        sentences.append(
            f"The longer completion is the worse one in {_percent(among)} of the suspects, and in "
            f"{_percent(overall)} of all pairs: this head likes length, and accuses honest labels "
            "of it."
        )
    return tuple(sentences)


def is_precise(numbers: LabelNumbers) -> bool:
    """Whether there are suspects, and at least half of them were flipped after `TYPICAL_SHARE` of
    the labels was."""
    if numbers.suspects.count == 0:
        return False
    precision = _typical_flips(numbers.overall).suspect_precision.value
    return precision is not None and precision >= 0.5


def _typical_flips(source: SourceNumbers) -> FlippedLabels:
    for flips in source.flips:
        if flips.share == TYPICAL_SHARE:
            return flips
    raise AssertionError("it is one of the shares")


def _percent(share: float | None) -> str:
    return format_number(share, "percent")
