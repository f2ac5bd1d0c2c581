"""The report of an evaluation, block by block: what to know first, then a chapter for each suite.

    blocks = [*opening(summaries), *chapter(summaries_of_one_suite)]
    write_report(folder, "Evaluation of my-model", blocks, rows)

The opening fits a screen: the findings in words, the headline numbers with intervals and chance, the worst subset. In
a chapter the models stand side by side wherever they have a common axis; figures come first, then the examples, then
every number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from treeward.evaluation.diagnostics.blocks import bar_item, metrics_table, side_by_side
from treeward.evaluation.diagnostics.replies import collect_pairs
from treeward.evaluation.diagnostics.strata import left_out_note, strata_of
from treeward.evaluation.findings import findings, has_worst_subset, verdict
from treeward.evaluation.results import Metric, SuiteResult
from treeward.evaluation.statistics import ReliabilityBin
from treeward.evaluation.suites.rmbench import STYLES

if TYPE_CHECKING:
    from treeward.evaluation.summary import Statistics, Summary

__all__ = ["chapter", "headline_label", "opening"]

_MARGIN_BINS = 40
# More than these are a table, not cards.
_MOST_CARDS = 6


def opening(summaries: Sequence[Summary], further: str | None = None) -> list[dict[str, Any]]:
    """What is read first: findings or, of several, a verdict each and `further` words; then headline numbers."""
    if len(summaries) == 1:
        (only,) = summaries
        return [{"kind": "text", "markdown": findings(only)}, {"kind": "headline", "items": _cards(only)}]
    suites = list(dict.fromkeys(one.suite for one in summaries))
    summaries = sorted(summaries, key=lambda one: suites.index(one.suite))
    said = [*map(verdict, summaries), *([] if further is None else [further])]
    blocks: list[dict[str, Any]] = [{"kind": "text", "markdown": "\n".join(f"- {one}" for one in said)}]
    if len(summaries) <= _MOST_CARDS:
        items = [_card(f"{one.title}: {one.model}", one.result.headline, one.chance, _counts(one)) for one in summaries]
        blocks.append({"kind": "headline", "items": items})
    return [*blocks, _glance(summaries)]


def chapter(summaries: Sequence[Summary], *, only: bool = False) -> list[dict[str, Any]]:
    """The chapter of one suite. `only`: nothing else is in the report, so that the opening has said the findings."""
    first, models = summaries[0], [summary.model for summary in summaries]
    said = [_about(one) if only else findings(one) for one in summaries]
    bars = [
        _accuracies(name, summaries, of_models)
        for name, of_models in _parts(summaries).items()
        if any(len(metrics) > 1 for metrics in of_models)
    ]
    diagnosed = side_by_side(models, [_diagnosed(one) for one in summaries])
    numbers = side_by_side(models, [_numbers(one) for one in summaries])
    numbers += [block for block in diagnosed if _is_numbers(block)]
    shared = next((one.overlap for one in summaries if one.overlap is not None), None)
    examples = {
        "kind": "examples",
        "title": "The examples",
        "note": "The most confident mistakes first. A row opens with both answers side by side.",
        "source": first.suite,
    }
    return [
        {"kind": "text", "title": first.title, "markdown": "\n\n".join(said)},
        *bars,
        *(block for block in diagnosed if not _is_numbers(block)),
        *_margins(summaries),
        examples,
        *([] if shared is None else shared.blocks()),
        *numbers,
    ]


def _cards(summary: Summary) -> list[dict[str, Any]]:
    """The numbers of a single model in a single suite that say whether it can be trusted."""
    length, statistics = summary.length, summary.statistics
    worst, left = statistics.worst_subset, left_out_note(length.num_left_out)
    items = [
        _card(summary.result.headline.name.capitalize(), summary.result.headline, summary.chance, _counts(summary)),
        *_of_scored(summary),
        _card(
            "Length-controlled accuracy",
            length.length_controlled_accuracy,
            0.5,
            _sentences("as if the longer reply were right as often as the shorter", left),
        ),
        _card(
            "Length gap in accuracy",
            length.accuracy_gap,
            None,
            _sentences(
                f"{_plain(length.accuracy_longer_right)} where the longer reply is right, "
                f"{_plain(length.accuracy_shorter_right)} where the shorter is",
                left,
            ),
        )
        | {"format": "points"},
    ]
    if has_worst_subset(summary.result):
        items.append(_card("Worst subset", worst, summary.chances.get(worst.note or ""), worst.note))
    if summary.perturbations is not None:
        robust = summary.perturbations.robust_accuracy
        items.append(_card("Robust accuracy", robust, None, "right as it is and under every change of style"))
    items.append(_card("Calibration error", statistics.ece, None, _rescaled(statistics)))
    return items


def _rescaled(statistics: Statistics) -> str | None:
    """What a temperature does for calibration, where it does any good: it is fitted to the likelihood, not to this."""
    before, after, scale = (one.value for one in (statistics.ece, statistics.ece_fitted, statistics.temperature))
    if before is None or after is None or scale is None or after >= before:
        return None
    return f"off by {_plain(statistics.ece_fitted)} once margins are divided by {scale:.2f}"


def _sentences(first: str, second: str | None) -> str:
    return first if second is None else f"{first}; {second.removesuffix('.')}"


def _of_scored(summary: Summary) -> list[dict[str, Any]]:
    """The headline without the examples that lack a score, which is what is compared with chance."""
    scored = summary.result.headline_of_scored
    if scored is None:
        return []
    left = summary.result.num_examples - summary.result.num_failed
    label = f"{summary.result.headline.name.capitalize()} of the scored"
    return [_card(label, scored, summary.chance, f"{left:,} examples; the others have no score")]


def headline_label(results: Sequence[SuiteResult]) -> str:
    """What the headlines of some suites are called together."""
    names = {result.headline.name for result in results}
    return names.pop().capitalize() if len(names) == 1 else "Headline"


def _card(label: str, metric: Metric, chance: float | None, note: str | None) -> dict[str, Any]:
    card = bar_item(label, metric) | {"format": "percent"}
    card |= {} if chance is None else {"reference": chance}
    return card if note is None else card | {"note": note}


def _glance(summaries: Sequence[Summary]) -> dict[str, Any]:
    """A row for each model and suite."""
    columns = {
        "headline": headline_label([one.result for one in summaries]),
        "scored": "of the scored",
        "length": "Length-controlled",
        "gap": "Length gap",
        "worst": "Worst subset",
        "ece": "Calibration error",
        "robust": "Robust",
    }
    rows = []
    for one in summaries:
        worst = one.statistics.worst_subset
        cells = {
            "headline": one.result.headline,
            "scored": one.result.headline_of_scored,
            "length": one.length.length_controlled_accuracy,
            "gap": one.length.accuracy_gap,
            "worst": worst if len(one.result.subsets) > 1 else None,
            "ece": one.statistics.ece,
            "robust": None if one.perturbations is None else one.perturbations.robust_accuracy,
        }
        row: dict[str, Any] = {"suite": one.title, "model": one.model, "failed": one.result.num_failed}
        row |= {key: None if metric is None else _short(metric, key) for key, metric in cells.items()}
        rows.append(row)
    numbers = [key for key in columns if any(row[key] is not None for row in rows)]
    return {
        "kind": "table",
        "title": "At a glance",
        "note": "Ranges are 95 % intervals. No score: examples that the model could not score; they count as wrong. "
        "Length-controlled: pairs of replies; the mean of where the longer reply is right and where the shorter is, "
        "and the length gap their difference; pairs without a score are left out. Robust: right as it is and under "
        "every change of style.",
        "columns": [
            {"key": "suite", "label": "Suite", "format": "text"},
            {"key": "model", "label": "Model", "format": "text"},
            {"key": "failed", "label": "No score", "format": "integer"},
            *({"key": key, "label": columns[key], "format": "percent"} for key in numbers),
        ],
        "rows": rows,
    }


def _short(metric: Metric, key: str) -> dict[str, Any]:
    cell = {"value": metric.value, "low": metric.low, "high": metric.high}
    return cell | {"format": "points" if key == "gap" else "percent"}


def _parts(summaries: Sequence[Summary]) -> dict[str, list[tuple[Metric, ...]]]:
    """Sections and subsets of each model; once where they are the same."""
    sections, subsets = ([getattr(one.result, name) for one in summaries] for name in ("sections", "subsets"))
    if sections == subsets or not any(sections):
        return {"Accuracy by subset": subsets}
    return {"Accuracy by section": sections, "Accuracy by subset": subsets}


def _accuracies(title: str, summaries: Sequence[Summary], of_models: Sequence[Sequence[Metric]]) -> dict[str, Any]:
    """Bars with chance: one line where it is the same for all of them, else one for each that has it."""
    chances = {m.name: s.chances[m.name] for s, own in zip(summaries, of_models, strict=True) for m in own}
    same = len(set(chances.values())) == 1
    series = [
        {
            "name": summary.model,
            "items": [
                bar_item(m.name, m) | ({} if same or chances[m.name] is None else {"reference": chances[m.name]})
                for m in metrics
            ],
        }
        for summary, metrics in zip(summaries, of_models, strict=True)
    ]
    reference = next(iter(chances.values())) if same else None
    unknown = [name for name, chance in chances.items() if chance is None]
    note = f"What chance comes to is not known for {', '.join(unknown)}." if unknown else None
    return {
        "kind": "bars", "title": title, "note": note, "x_range": [0, 1], "format": "percent", "reference": reference,
        "series": series,
    }  # fmt: skip


def _diagnosed(summary: Summary) -> list[dict[str, Any]]:
    """The figures and tables of one model's diagnostics."""
    blocks: list[dict[str, Any]] = []
    if (matrix := summary.result.details.get("matrix")) is not None:  # RM-Bench
        blocks.append(
            {
                "kind": "matrix",
                "title": "Right answer in one style against wrong in another",
                "note": "Accuracy. Above the diagonal the wrong answer is the fancier one: these are the hard pairs.",
                "rows": [f"right, {style}" for style in STYLES],
                "columns": [f"wrong, {style}" for style in STYLES],
                "values": matrix,
                "format": "percent",
                "range": [0, 1],
            }
        )
    bars, *rest = summary.length.blocks(summary.model)
    blocks += [bars, _outcomes_by_length(summary), *rest]
    blocks += summary.style.blocks(summary.model)
    blocks += [] if summary.perturbations is None else summary.perturbations.blocks(summary.model)
    if summary.statistics.margins:
        blocks.append(
            {
                "kind": "reliability",
                "title": "How sure, and how often right",
                "note": "On the diagonal sigmoid(margin) is a probability; below it the model is too sure of itself.",
                "series": [{"name": summary.model, "bins": _bins(summary.statistics.reliability)}],
            }
        )
    blocks += summary.scores.blocks(summary.model)
    blocks += [] if summary.without_overlap is None else summary.without_overlap.blocks(summary.model)
    return blocks


def _numbers(summary: Summary) -> list[dict[str, Any]]:
    metrics = summary.statistics.metrics()
    metrics = metrics if len(summary.result.subsets) > 1 else tuple(m for m in metrics if m.name != "worst_subset")
    return [metrics_table("Pairs and calibration in numbers", summary.model, metrics)]


def _is_numbers(block: Mapping[str, Any]) -> bool:
    return block["kind"] == "table" and all("metric" in row for row in block["rows"])


def _margins(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    edges = _edges([margin for summary in summaries for margin in summary.statistics.margins])
    if not edges:
        return []
    return [
        {
            "kind": "histogram",
            "title": "Margins",
            "note": "Score of the better reply less that of the other, for each pair: left of 0 is wrong.",
            "edges": edges,
            "x_label": "margin",
            "y_label": "pairs",
            "mark": 0,
            "series": [
                {"name": s.model, "counts": np.histogram(s.statistics.margins, edges)[0].tolist()} for s in summaries
            ],
        }
    ]


def _outcomes_by_length(summary: Summary) -> dict[str, Any]:
    """Where it goes wrong: outcome of each pair by which reply is the longer, as shares of a row."""
    pairs = collect_pairs(summary.examples)
    longer, shorter, similar = strata_of(pairs.better, pairs.worse)
    rows = {"better is longer": longer, "about as long": similar, "better is shorter": shorter}
    kinds = [pairs.margins > 0, pairs.margins == 0, pairs.margins < 0, ~np.isfinite(pairs.margins)]
    return {
        "kind": "matrix",
        "title": "What becomes of a pair",
        "note": "Shares of each row's pairs; lengths within 10 % of the longer are about as long.",
        "rows": [f"{name} ({_pairs(int(where.sum()))})" for name, where in rows.items()],
        "columns": ["right", "tie", "wrong", "no score"],
        "values": [
            [float((where & kind).sum() / where.sum()) if where.any() else None for kind in kinds]
            for where in rows.values()
        ],
        "format": "percent",
        "range": [0, 1],
    }


def _pairs(count: int) -> str:
    return f"{count:,} pair{'' if count == 1 else 's'}"


def _edges(margins: Sequence[float]) -> list[float]:
    """Edges of bins that hold all margins, one of them at 0."""
    if not margins:
        return []
    low, high = min(*margins, 0.0), max(*margins, 0.0)
    width = (high - low) / _MARGIN_BINS or 1.0
    first, last = int(np.floor(low / width)), max(int(np.ceil(high / width)), 1)
    return [width * i for i in range(first, last + 1)]


def _bins(bins: Sequence[ReliabilityBin]) -> list[dict[str, Any]]:
    return [
        {
            "probability": one["mean_probability"],
            "frequency": one["frequency"],
            "low": one["interval"][0],
            "high": one["interval"][1],
            "count": one["count"],
        }
        for one in bins
    ]


def _counts(summary: Summary) -> str:
    result = summary.result
    parts = [f"{result.num_examples:,} example{'s' if result.num_examples != 1 else ''}"]
    if result.unit == "pairs" and result.headline.count not in (None, result.num_examples):
        parts = [f"{_pairs(result.headline.count)} of {parts[0]}"]
    parts += [f"{result.num_ties:,} tie{'s' if result.num_ties != 1 else ''}"] if result.num_ties else []
    if result.num_failed:
        parts += [f"{result.num_failed:,} without a score, counted as wrong"]
    return ", ".join(parts)


def _about(summary: Summary) -> str:
    return " ".join(filter(None, (f"{_counts(summary)}.", summary.result.headline.note)))


def _plain(metric: Metric) -> str:
    return "-" if metric.value is None else f"{metric.value:.1%}"
