"""`summarize`: from scored examples to every number of an evaluation, and to the blocks of its report.

    summaries = [summarize(scored_suite) for scored_suite in evaluate(models, suites)]
    write_results(Path("results/eval"), summaries)          # results.json, report.html, report.json

`results.json` holds for each model and suite the suite's own numbers (headline, sections, subsets), the statistics that
hold for any comparisons, and the diagnostics, each with its interval and with how many examples it is of.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from treeward.errors import DataError
from treeward.evaluation.chapters import chapter, opening
from treeward.evaluation.diagnostics.length import LengthDiagnostics, diagnose_length
from treeward.evaluation.diagnostics.overlap import OverlapComparison, OverlapDiagnostics, compare_overlap
from treeward.evaluation.diagnostics.perturbations import PerturbationDiagnostics
from treeward.evaluation.diagnostics.replies import collect_pairs
from treeward.evaluation.diagnostics.scores import ScoreDiagnostics, describe_scores
from treeward.evaluation.diagnostics.style import StyleDiagnostics, diagnose_style
from treeward.evaluation.drift import SuiteDrift
from treeward.evaluation.examples import ScoredExample, to_row
from treeward.evaluation.findings import standing, verdict
from treeward.evaluation.gates import auroc_of_best, kendall_taus
from treeward.evaluation.report.build import write_report
from treeward.evaluation.results import Metric, SuiteResult
from treeward.evaluation.running import ScoredSuite
from treeward.evaluation.statistics import (
    ReliabilityBin,
    accuracy_metric,
    brier,
    cluster_bootstrap,
    expected_calibration_error,
    pair_confidences,
    reliability_curve,
)
from treeward.scoring.calibration import fit_temperature
from treeward.version import VERSION

__all__ = ["Statistics", "Summary", "report_blocks", "statistics_of", "summarize", "write_results"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Statistics:
    """What holds for any comparisons: over ordered pairs, ties and failures counting as wrong in the accuracy.

    `temperature`: at which sigma(margin / T) predicts these pairs best; None where none does. Calibration (`ece`,
    `brier`, `reliability`) is of the scores as they are, `ece_fitted` at that temperature. `auroc`: of best-ranked
    replies against the others over all prompts, which asks more than pairs do. `kendall_tau`: mean over examples with
    more than two replies. `margins`: of the pairs, in order, without failures.
    """

    pair_accuracy: Metric
    ties: Metric
    auroc: Metric
    kendall_tau: Metric
    ece: Metric
    ece_fitted: Metric
    brier: Metric
    temperature: Metric
    worst_subset: Metric
    reliability: tuple[ReliabilityBin, ...] = ()
    margins: tuple[float, ...] = ()

    def metrics(self) -> tuple[Metric, ...]:
        """All numbers, in the order of the fields."""
        values = (getattr(self, name) for name in self.__slots__)
        return tuple(value for value in values if isinstance(value, Metric))


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that is known of one model in one suite.

    `chance`: what the headline comes to by chance, `chances` what each section and subset does; None: not known.
    `caveat`: of the suite, what is said beside the verdict.
    """

    model: str
    suite: str
    title: str
    result: SuiteResult
    statistics: Statistics
    length: LengthDiagnostics
    style: StyleDiagnostics
    scores: ScoreDiagnostics
    examples: tuple[ScoredExample, ...]
    chance: float | None
    chances: Mapping[str, float | None]
    perturbations: PerturbationDiagnostics | None = None
    overlap: OverlapDiagnostics | None = None
    without_overlap: OverlapComparison | None = None
    caveat: str | None = None

    @property
    def diagnostics(self) -> dict[str, tuple[Metric, ...]]:
        """The numbers of each diagnostic that was made."""
        made: dict[str, Any] = {
            "length": self.length,
            "style": self.style,
            "scores": self.scores,
            "perturbations": self.perturbations,
            "overlap": self.overlap,
            "without_overlap": self.without_overlap,
        }
        return {name: one.metrics() for name, one in made.items() if one is not None}


def summarize(
    scored: ScoredSuite,
    *,
    perturbations: PerturbationDiagnostics | None = None,
    overlap: OverlapDiagnostics | None = None,
) -> Summary:
    """The numbers of one model in one suite."""
    examples = scored.examples
    result = scored.suite.summarize(examples)
    statistics = statistics_of(examples, result, name=f"{scored.model} on {scored.suite.name}")
    return Summary(
        model=scored.model,
        suite=scored.suite.name,
        title=scored.suite.title or scored.suite.name,
        result=result,
        statistics=statistics,
        length=diagnose_length(examples),
        style=diagnose_style(examples),
        scores=describe_scores(examples, temperature=statistics.temperature.value),
        examples=examples,
        chance=scored.suite.chance(),
        chances={part.name: scored.suite.chance(part.name) for part in (*result.sections, *result.subsets)},
        perturbations=perturbations,
        overlap=overlap,
        without_overlap=None if overlap is None else _without_overlap(scored, result, overlap),
        caveat=scored.suite.caveat,
    )


def _without_overlap(scored: ScoredSuite, result: SuiteResult, overlap: OverlapDiagnostics) -> OverlapComparison:
    """In the headline's own unit and with its ties, so that both say the same of all examples."""
    tie = 0.5 if scored.suite.tie_policy == "half" else 0.0
    return compare_overlap(scored.examples, overlap, unit=result.unit, tie=tie)


def statistics_of(
    scored: Sequence[ScoredExample], result: SuiteResult | None = None, *, name: str | None = None
) -> Statistics:
    """The numbers of any scored comparisons. `result`: where the worst subset is looked up. `name`: for the log."""
    pairs = collect_pairs(scored)
    known = np.isfinite(pairs.margins)
    margins = pairs.margins[known]
    clusters = pairs.prompts[known].tolist()
    fitted = fit_temperature(margins, name=name) if len(margins) else None
    confidences, outcomes = pair_confidences(margins)
    after = None
    if fitted is not None:
        after = expected_calibration_error(*pair_confidences(margins, fitted.value))
    return Statistics(
        pair_accuracy=accuracy_metric(pairs.outcomes.tolist(), "pair_accuracy", pairs.prompts.tolist(), of="pairs"),
        ties=accuracy_metric((margins == 0).astype(float).tolist(), "ties", clusters, of="pairs"),
        auroc=_auroc(scored),
        kendall_tau=_kendall(scored),
        ece=Metric("ece", expected_calibration_error(confidences, outcomes), count=len(margins)),
        ece_fitted=Metric("ece_fitted", after, count=len(margins), note="at the fitted temperature"),
        brier=Metric("brier", brier(confidences, outcomes), count=len(margins)),
        temperature=_temperature(None if fitted is None else fitted.value, len(margins)),
        worst_subset=_worst(result),
        reliability=tuple(reliability_curve(confidences, outcomes)),
        margins=tuple(margins.tolist()),
    )


def _temperature(value: float | None, count: int) -> Metric:
    note = "there is none: the better replies do not score higher on average" if value is None and count else None
    return Metric("temperature", value, count=count, note=note)


def _auroc(scored: Sequence[ScoredExample]) -> Metric:
    value, count = auroc_of_best(scored)
    return Metric("auroc", value, count=count)


def _kendall(scored: Sequence[ScoredExample]) -> Metric:
    taus = kendall_taus(scored)
    if not taus:
        return Metric("kendall_tau", None, count=0, note="there are no examples of more than two replies")
    low, high = cluster_bootstrap(taus, range(len(taus)))
    return Metric("kendall_tau", float(np.mean(taus)), low, high, len(taus))


def _worst(result: SuiteResult | None) -> Metric:
    known = [subset for subset in (result.subsets if result else ()) if subset.value is not None]
    if not known:
        return Metric("worst_subset", None)
    worst = min(known, key=lambda subset: (subset.value or 0.0, subset.name))
    return dataclasses.replace(worst, name="worst_subset", note=worst.name)


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
    content = {
        "treeward_version": VERSION,
        "date": datetime.now(UTC).date().isoformat(),
        "results": [_plain(summary) for summary in summaries],
    }
    content |= {"notes": subtitle} if subtitle else {}
    content |= {"drift": [one.plain() for one in drift]} if drift else {}
    path = output / "results.json"
    try:
        output.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, path)
        if report:
            blocks = report_blocks(summaries, drift)
            path = write_report(output, _title(summaries), blocks, _rows(summaries), subtitle=subtitle)
    except OSError as error:
        raise DataError("the results cannot be written", where=str(output), got=str(error)) from error
    return path


def report_blocks(summaries: Sequence[Summary], drift: Sequence[SuiteDrift] = ()) -> list[dict[str, Any]]:
    """The report: what to know first, what changed between checkpoints, then each suite in turn."""
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
        "statistics": [dataclasses.asdict(metric) for metric in summary.statistics.metrics()],
        "reliability": list(summary.statistics.reliability),
        "diagnostics": {
            name: [dataclasses.asdict(metric) for metric in metrics] for name, metrics in summary.diagnostics.items()
        },
    }


def _title(summaries: Sequence[Summary]) -> str:
    return "Evaluation of " + ", ".join(dict.fromkeys(summary.model for summary in summaries))
