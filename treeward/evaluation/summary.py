"""`summarize`: from scored examples to every number of an evaluation, and `write_results`: from numbers to files.

    summaries = [summarize(scored_suite) for scored_suite in scored_suites]
    write_results(Path("results/eval"), summaries)          # results.json, report.html, report.json

`results.json` holds for each model and suite the suite's own numbers (headline, sections, subsets), the statistics of
any comparisons, and the diagnostics, each with its interval and its number of examples.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from treeward.errors import DataError
from treeward.evaluation.chapters import chapter, opening
from treeward.evaluation.diagnostics.length import diagnose_length
from treeward.evaluation.diagnostics.overlap import OverlapDiagnostics, compare_overlap
from treeward.evaluation.diagnostics.pairs import statistics_of
from treeward.evaluation.diagnostics.scores import describe_scores
from treeward.evaluation.diagnostics.style import diagnose_style
from treeward.evaluation.drift import SuiteDrift
from treeward.evaluation.examples import ScoredExample, to_row
from treeward.evaluation.findings import standing, verdict
from treeward.evaluation.report.build import write_report
from treeward.evaluation.results import Block, Diagnostic, SuiteResult
from treeward.evaluation.running import ScoredSuite
from treeward.storage import write_text
from treeward.version import VERSION

__all__ = ["Summary", "report_blocks", "summarize", "write_results"]


@dataclass(frozen=True, slots=True)
class Summary:
    """Every number of one model in one suite.

    `chance`: the headline of random scores, `chances` that of each section and subset; None: not known. `caveat`: of
    the suite, said beside the verdict. `without_overlap`: the accuracy with and without duplicates of training data.
    """

    model: str
    suite: str
    title: str
    result: SuiteResult
    statistics: Diagnostic
    length: Diagnostic
    style: Diagnostic
    scores: Diagnostic
    examples: tuple[ScoredExample, ...]
    chance: float | None
    chances: Mapping[str, float | None]
    perturbations: Diagnostic | None = None
    overlap: OverlapDiagnostics | None = None
    without_overlap: Diagnostic | None = None
    caveat: str | None = None

    @property
    def diagnostics(self) -> dict[str, Diagnostic | OverlapDiagnostics]:
        """The diagnostics that were made, by their names in `results.json`."""
        names = ("length", "style", "scores", "perturbations", "overlap", "without_overlap")
        return {name: one for name in names if (one := getattr(self, name)) is not None}


def summarize(
    scored: ScoredSuite, *, perturbations: Diagnostic | None = None, overlap: OverlapDiagnostics | None = None
) -> Summary:
    """The numbers of one model in one suite."""
    suite, examples, model = scored.suite, scored.examples, scored.model
    result = suite.summarize(examples)
    statistics = statistics_of(examples, result, model, name=f"{model} on {suite.name}")
    without_overlap = None
    if overlap is not None:  # in the headline's own unit and with its ties, so that both say the same of all examples
        tie = 0.5 if suite.tie_policy == "half" else 0.0
        without_overlap = compare_overlap(examples, overlap, model, unit=result.unit, tie=tie)
    return Summary(
        model=model,
        suite=suite.name,
        title=suite.title or suite.name,
        result=result,
        statistics=statistics,
        length=diagnose_length(examples, model),
        style=diagnose_style(examples, model),
        scores=describe_scores(examples, model, temperature=statistics.temperature.value),
        examples=examples,
        chance=suite.chance(),
        chances={part.name: suite.chance(part.name) for part in (*result.sections, *result.subsets)},
        perturbations=perturbations,
        overlap=overlap,
        without_overlap=without_overlap,
        caveat=suite.caveat,
    )


def write_results(
    output: Path,
    summaries: Sequence[Summary],
    *,
    report: bool = True,
    drift: Sequence[SuiteDrift] = (),
    subtitle: str = "",
) -> Path:
    """Write results.json and, unless switched off, the report; returns the path to look at.

    `drift`: of checkpoints, suite by suite. `subtitle`: what a reader must know of the scores, below the title.
    Raises `DataError` where they cannot be written.
    """
    content: dict[str, Any] = {
        "treeward_version": VERSION,
        "date": datetime.now(UTC).date().isoformat(),
        "results": [_plain(summary) for summary in summaries],
    }
    content |= {"notes": subtitle} if subtitle else {}
    content |= {"drift": [one.plain() for one in drift]} if drift else {}
    path = output / "results.json"
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        if report:
            title = "Evaluation of " + ", ".join(dict.fromkeys(summary.model for summary in summaries))
            path = write_report(output, title, report_blocks(summaries, drift), _rows(summaries), subtitle=subtitle)
    except OSError as error:
        raise DataError("the results cannot be written", where=str(output), got=str(error)) from error
    return path


def report_blocks(summaries: Sequence[Summary], drift: Sequence[SuiteDrift] = ()) -> list[Block]:
    """The report: the findings first, then the changes between checkpoints, then each suite in turn."""
    suites = list(dict.fromkeys(summary.suite for summary in summaries))
    blocks = opening(summaries, next((one.export() for one in drift if one.final_is is not None), None))
    blocks += [block for one in drift for block in one.blocks()]
    for suite in suites:
        blocks += chapter([one for one in summaries if one.suite == suite], only=len(summaries) == 1)
    return blocks


def _rows(summaries: Sequence[Summary]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each suite's table of examples: the most confident mistakes first."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for summary in summaries:
        own = rows.setdefault(summary.suite, [])
        own += [to_row(one) | {"model": summary.model} for one in summary.examples]
    for own in rows.values():
        own.sort(key=lambda row: (row["margin"] is None, row["margin"] or 0.0))
    return rows


def _plain(summary: Summary) -> dict[str, Any]:
    return {
        "model": summary.model,
        "suite": summary.suite,
        "verdict": verdict(summary).replace("**", "", 2),
        "chance": summary.chance,
        "standing": standing(summary.result, summary.chance),
        "caveat": summary.caveat,
        **{key: value for key, value in dataclasses.asdict(summary.result).items() if key != "suite"},
        "statistics": list(map(dataclasses.asdict, summary.statistics.metrics())),
        "reliability": summary.statistics.details["reliability"],
        "diagnostics": {
            name: list(map(dataclasses.asdict, one.metrics())) for name, one in summary.diagnostics.items()
        },
    }
