"""`write_results`: from summaries to results.json, report.json and report.html.

    write_results(Path("results/eval"), [summarize(suite, scored, "my-model")])

The first screen of the report has the findings in words and the headline numbers. Then each suite
has a chapter, where the models stand side by side: figures come first, then the examples, then
every number. `page.html` has the words. `results.json` holds for each model and suite the suite's
own numbers and the diagnostics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from treeward.evaluation.diagnostics.agreement import CostAndAgreement, costs_and_agreement
from treeward.evaluation.diagnostics.components import ComponentsSummary, ComponentStatistics
from treeward.evaluation.diagnostics.rewrites import REWRITES
from treeward.evaluation.findings import Summary, findings, standing, verdict
from treeward.evaluation.report.build import write_report
from treeward.evaluation.report.charts import Line
from treeward.evaluation.report.intervals import known_ends
from treeward.evaluation.results import Metric, SuiteResult, to_row
from treeward.version import VERSION

_MOST_COMPONENTS = 30
"""In the report; results.json has all of them."""


@dataclass(frozen=True, slots=True)
class ModelInSuite:
    """What the report has of one model in one suite.

    `verdict` and `findings`: sentences. `diagnostics`: the metrics of each, by their names in
    `results.json`. `reliability`: how often a prediction was right over how sure it was; None
    without predictions. `worst_chance`: what a guess reaches in the worst subset. `components`: of
    the rewards of an environment.
    """

    name: str
    verdict: str
    findings: tuple[str, ...]
    result: SuiteResult
    diagnostics: Mapping[str, Mapping[str, Metric]]
    reliability: Line | None
    worst_chance: float | None
    components: ComponentsSummary | None

    @property
    def frequent_components(self) -> list[ComponentStatistics]:
        """The most frequent components, which a reader can take in."""
        if self.components is None:
            return []
        return list(self.components.components.values())[:_MOST_COMPONENTS]

    @property
    def numbers(self) -> dict[str, Metric]:
        """The metrics of all diagnostics. A single subset is not the worst one."""
        numbers: dict[str, Metric] = {}
        for metrics in self.diagnostics.values():
            numbers |= metrics
        if len(self.result.subsets) < 2:
            del numbers["worst_subset"]
        return numbers

    @property
    def has_uneven_subsets(self) -> bool:
        """Whether one of its subsets is worse than another."""
        values = {subset.value for subset in self.result.subsets if subset.value is not None}
        return len(values) > 1


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The accuracies of each model by section or subset. `chance`: the one that most of them
    have."""

    by: Literal["section", "subset"]
    series: Mapping[str, Mapping[str, Metric]]
    chance: float | None


@dataclass(frozen=True, slots=True)
class SuitePage:
    """The chapter of one suite.

    `chance`: what a guess reaches. `examples`: rows of `examples.jsonl` with a `model`. `costs`: of
    each model, where one of them is a judge.
    """

    name: str
    title: str
    chance: float | None
    models: tuple[ModelInSuite, ...]
    breakdowns: tuple[Breakdown, ...]
    examples: Sequence[Mapping[str, Any]]
    costs: tuple[CostAndAgreement, ...] = ()

    @property
    def has_pairs(self) -> bool:
        """Whether a pair of a better and a worse completion was scored: labels of steps have
        none."""
        by_model = self.diagnostic("length").values()
        return any(metric.count for metrics in by_model for metric in metrics.values())

    def diagnostic(self, name: str) -> dict[str, Mapping[str, Metric]]:
        """The metrics of a diagnostic by model, of those that have it."""
        return {
            model.name: model.diagnostics[name]
            for model in self.models
            if name in model.diagnostics
        }

    def rewrites(self, number: str) -> dict[str, dict[str, Metric]]:
        """A number of each rewrite, as "relative_shift", by model and by the rewrite's label;
        rewrites that changed no text are left out."""
        by_model: dict[str, dict[str, Metric]] = {}
        for model, metrics in self.diagnostic("perturbations").items():
            by_label = {}
            for name, rewrite in REWRITES.items():
                shift = metrics.get(f"{name}_relative_shift")
                key = f"{name}_{number}"
                if shift is not None and shift.count and key in metrics:
                    by_label[rewrite.label] = metrics[key]
            by_model[model] = by_label
        return by_model

    @property
    def rewritten_pairs(self) -> list[dict[str, Any]]:
        """A row for each model and each rewrite that changes both completions of a pair: the
        accuracy before and after, and how many pairs have another winner."""
        after = self.rewrites("accuracy_after")
        flips = self.rewrites("flips")
        rows = []
        for model, by_label in self.rewrites("accuracy_before").items():
            for label, before in by_label.items():
                if before.count:
                    row = {"rewrite": label, "model": model, "before": before}
                    row["after"] = after[model][label]
                    row["flips"] = flips[model][label]
                    rows.append(row)
        return rows

    @property
    def reach_of_shifts(self) -> float:
        """The largest shift by a rewrite, whatever its sign, or 1 if there is none."""
        reach = 0.0
        for metrics in self.rewrites("relative_shift").values():
            for metric in metrics.values():
                reach = max([reach, *map(abs, known_ends(metric))])
        return reach or 1.0  # an axis of no length cannot be drawn

    @property
    def reliabilities(self) -> list[Line]:
        """The reliability curves of the models that have one."""
        return [model.reliability for model in self.models if model.reliability is not None]


@dataclass(frozen=True, slots=True)
class EvaluationPage:
    """The numbers of the report."""

    suites: tuple[SuitePage, ...]

    @property
    def results(self) -> list[tuple[SuitePage, ModelInSuite]]:
        """Every model in every suite."""
        results = []
        for suite in self.suites:
            for model in suite.models:
                results.append((suite, model))
        return results

    @property
    def damages(self) -> list[str]:
        """The labels of the rewrites that take something away, of those that were made."""
        labels: set[str] = set()
        for suite in self.suites:
            for by_label in suite.rewrites("relative_shift").values():
                labels |= set(by_label)
        damages = [rewrite.label for rewrite in REWRITES.values() if rewrite.kind == "damage"]
        return [label for label in damages if label in labels]

    @property
    def headlines(self) -> set[str]:
        """The names of the suites' headlines."""
        return {model.result.headline.name for _, model in self.results}


def write_results(output: Path, summaries: Sequence[Summary], *, subtitle: str = "") -> Path:
    """Write results.json and the report; returns the path of the report.

    `subtitle`: what a reader must know of the scores, below the title. Raises `DataError` where
    they cannot be written.
    """
    results = []
    for summary in summaries:
        chance = summary.suite.chance()
        numbers = dataclasses.asdict(summary.result)
        del numbers["suite"]  # it is the second key already
        diagnostics = {}
        for name, diagnostic in summary.diagnostics.items():
            metrics = diagnostic.numbers.values()
            diagnostics[name] = [dataclasses.asdict(metric) for metric in metrics]
        results.append(
            {
                "model": summary.model,
                "suite": summary.suite.name,
                "verdict": verdict(summary),
                "chance": chance,
                "standing": standing(summary.result, chance),
                **numbers,
                "diagnostics": diagnostics,
                **_costs_and_components(summary, summaries),
            }
        )
    content: dict[str, Any] = {
        "treeward_version": VERSION,
        "date": datetime.now(UTC).date().isoformat(),
        "results": results,
    }
    if subtitle:
        content["notes"] = subtitle
    # A model of several suites is named once.
    models = dict.fromkeys(summary.model for summary in summaries)
    return write_report(
        output,
        "evaluation/page.html",
        f"Evaluation of {', '.join(models)}",
        evaluation_page(summaries),
        subtitle=subtitle,
        files={"results.json": content},
    )


def _costs_and_components(summary: Summary, summaries: Sequence[Summary]) -> dict[str, Any]:
    """What a model has used and whom it agrees with, and the components of its rewards, as
    results.json has them."""
    content: dict[str, Any] = {}
    costs = judge_costs([one for one in summaries if one.suite is summary.suite])
    # Seconds are of one session: without a judge, whose requests are paid for, results are those of
    # an evaluation that was never interrupted, to the byte.
    if costs or summary.components is not None:
        content["usage"] = dict(summary.usage)
    for row in costs:
        if row.model == summary.model:
            content["verdicts"] = dataclasses.asdict(row.verdicts)
            content["agreement"] = {
                name: dataclasses.asdict(metric) for name, metric in row.agreement.items()
            }
    if summary.components is not None:
        content["components"] = dataclasses.asdict(summary.components)
    return content


def judge_costs(summaries: Sequence[Summary]) -> tuple[CostAndAgreement, ...]:
    """What each model has used on one suite and whom it agrees with; empty where none is a
    judge."""
    if not any(summary.is_judge for summary in summaries):
        return ()
    scored = {summary.model: summary.examples for summary in summaries}
    usage = {summary.model: summary.usage for summary in summaries}
    return tuple(costs_and_agreement(scored, usage))


def evaluation_page(summaries: Sequence[Summary]) -> EvaluationPage:
    """The numbers of the report on these models and suites."""
    by_suite: dict[str, list[Summary]] = {}
    for summary in summaries:
        by_suite.setdefault(summary.suite.name, []).append(summary)
    return EvaluationPage(tuple(_suite_page(of_suite) for of_suite in by_suite.values()))


def _suite_page(summaries: Sequence[Summary]) -> SuitePage:
    first = summaries[0]
    models = []
    for order, summary in enumerate(summaries):
        diagnostics = {}
        for name, diagnostic in summary.diagnostics.items():
            diagnostics[name] = diagnostic.numbers
        model = ModelInSuite(
            name=summary.model,
            verdict=verdict(summary),
            findings=findings(summary),
            result=summary.result,
            diagnostics=diagnostics,
            reliability=_reliability(summary, order) if summary.reliability else None,
            # The note of the worst subset is its name.
            worst_chance=summary.suite.chance(summary.statistics.worst_subset.note),
            components=summary.components,
        )
        models.append(model)
    sections = {model.name: _by_name(model.result.sections) for model in models}
    subsets = {model.name: _by_name(model.result.subsets) for model in models}
    breakdowns = []
    # Where sections and subsets are the same, they are shown once.
    if sections != subsets and any(len(metrics) > 1 for metrics in sections.values()):
        breakdowns.append(Breakdown("section", sections, _common_chance(first, sections)))
    if any(len(metrics) > 1 for metrics in subsets.values()):
        breakdowns.append(Breakdown("subset", subsets, _common_chance(first, subsets)))
    examples = []
    for summary in summaries:
        examples += [to_row(example) | {"model": summary.model} for example in summary.examples]
    # The most confident mistakes first, and at the end what has no margin.
    examples.sort(key=lambda row: (row["margin"] is None, row["margin"] or 0.0))
    return SuitePage(
        name=first.suite.name,
        title=first.title,
        chance=first.suite.chance(),
        models=tuple(models),
        breakdowns=tuple(breakdowns),
        examples=examples,
        costs=judge_costs(summaries),
    )


def _by_name(metrics: Sequence[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


def _common_chance(summary: Summary, series: Mapping[str, Mapping[str, Metric]]) -> float | None:
    """What a guess reaches in most of these sections or subsets."""
    chances = []
    for metrics in series.values():
        chances += [summary.suite.chance(name) for name in metrics]
    # Where chance is not known of most, the line is at that of the others.
    return max(chances, key=lambda chance: (chance is not None, chances.count(chance)))


def _reliability(summary: Summary, order: int) -> Line:
    """`order`: the number of its colour and dash."""
    x = []
    y = []
    low = []
    high = []
    labels = []
    for bin in summary.reliability:
        x.append(bin["mean_probability"])
        y.append(bin["frequency"])
        low.append(bin["interval"][0])
        high.append(bin["interval"][1])
        labels.append(f"predicted {bin['mean_probability']:.1%}, n = {bin['count']}")
    return Line(summary.model, x, y, low, high, labels, colour=order, dash=order)
