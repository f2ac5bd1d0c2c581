"""The report of an evaluation, block by block: the findings first, then a chapter for each suite.

    blocks = [*opening(summaries), *chapter(summaries_of_one_suite)]
    write_report(folder, "Evaluation of my-model", blocks, rows)

The opening fits a screen: the findings in words, the headline numbers with intervals and chance, the worst subset. In
a chapter the models stand side by side wherever they have a common axis; figures come first, then the examples, then
every number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treeward.evaluation.diagnostics.biases import left_out_note, strata_of
from treeward.evaluation.diagnostics.completions import collect_pairs
from treeward.evaluation.diagnostics.labels import metrics_table
from treeward.evaluation.findings import findings, has_worst_subset, verdict
from treeward.evaluation.report.blocks import bar_item, table_block
from treeward.evaluation.results import Block, Metric, SuiteResult
from treeward.evaluation.suites.rmbench import STYLES
from treeward.evaluation.summary import Summary

__all__ = ["chapter", "opening"]

_MARGIN_BINS = 40
_MOST_CARDS = 6  # more than these are a table
_MOST_OPEN = 3  # of more models, figures of a single one are folded
_OF_STYLE = (
    "These compare completions with the markdown that they have, often few marks. Markdown added to a completion that "
    "has none is another question, answered by rewrites (with --perturbations): where the two differ, a policy will "
    "meet the rewrites' answer."
)
_NUMBERS = {
    "statistics": ("Pairs and calibration in numbers", None),
    "length": ("Length in numbers", None),
    "style": ("Style in numbers", _OF_STYLE),
    "perturbations": ("Rewritten completions in numbers", None),
    "scores": ("Scores in numbers", None),
}
"""The tables of numbers at the end of a chapter, by diagnostic: title and note."""


# --- the opening -----------------------------------------------------------------------------------------------------


def opening(summaries: Sequence[Summary], further: str | None = None) -> list[Block]:
    """The first screen: findings or, of several, a verdict each and `further` words; then headline numbers."""
    if len(summaries) == 1:
        (only,) = summaries
        return [
            {"kind": "text", "markdown": findings(only)},
            {"kind": "headline", "items": _cards(only, _headline_label([only.result]))},
        ]
    suites = list(dict.fromkeys(one.suite for one in summaries))
    summaries = sorted(summaries, key=lambda one: suites.index(one.suite))
    said = [*map(verdict, summaries), *([] if further is None else [further])]
    blocks: list[Block] = [{"kind": "text", "markdown": "\n".join(f"- {one}" for one in said)}]
    if len(summaries) <= _MOST_CARDS:
        items = [_card(f"{one.title}: {one.model}", one.result.headline, one.chance, _counts(one)) for one in summaries]
        blocks.append({"kind": "headline", "items": items})
    return [*blocks, _glance(summaries)]


def _cards(summary: Summary, name: str) -> list[Block]:
    """The numbers of a model in a suite that say whether it can be trusted; `name`: of the suite's headline."""
    length, statistics, result = summary.length, summary.statistics, summary.result
    worst = statistics.worst_subset
    left_out = (left_out_note(length.num_left_out) or "").removesuffix(".")
    longer, shorter = (
        "-" if one.value is None else f"{one.value:.1%}"
        for one in (length.accuracy_longer_right, length.accuracy_shorter_right)
    )
    of_gap = f"{longer} where the longer completion is right, {shorter} where the shorter is"
    of_controlled = "as if the longer completion were right as often as the shorter"
    of_gap, of_controlled = ("; ".join(filter(None, (note, left_out))) for note in (of_gap, of_controlled))
    items = [_card(name, result.headline, summary.chance, _counts(summary))]
    if (scored := result.headline_of_scored) is not None:
        note = f"{result.num_examples - result.num_failed:,} examples; the others have no score"
        items.append(_card(f"{name} of the scored", scored, summary.chance, note))
    items += [
        _card("Length-controlled accuracy", length.length_controlled_accuracy, 0.5, of_controlled),
        _card("Length gap in accuracy", length.accuracy_gap, None, of_gap) | {"format": "points"},
    ]
    if has_worst_subset(result):
        items.append(_card("Worst subset", worst, summary.chances.get(worst.note or ""), worst.note))
    if summary.perturbations is not None:
        robust = summary.perturbations.robust_accuracy
        items.append(_card("Robust accuracy", robust, None, "right before and after every change of style"))
    before, after, scale = (one.value for one in (statistics.ece, statistics.ece_fitted, statistics.temperature))
    helps = after is not None and scale is not None and after < (before or 0.0)
    rescaled = f"off by {after:.1%} once margins are divided by {scale:.2f}" if helps else None
    return [*items, _card("Calibration error", statistics.ece, None, rescaled)]


def _card(label: str, metric: Metric, chance: float | None, note: str | None) -> Block:
    card = bar_item(label, metric, note) | {"format": "percent"}
    return card if chance is None else card | {"reference": chance}


def _headline_label(results: Sequence[SuiteResult]) -> str:
    """What the headlines of some suites are called together."""
    names = {result.headline.name for result in results}
    return names.pop().capitalize() if len(names) == 1 else "Headline"


def _glance(summaries: Sequence[Summary]) -> Block:
    """A row for each model and suite, with the numbers that a single model has as cards."""
    name = _headline_label([one.result for one in summaries])
    rows: list[Block] = []
    for one in summaries:
        cards = _cards(one, name)
        row: Block = {"suite": one.title, "model": one.model, "failed": one.result.num_failed}
        rows.append(row | {card["label"]: card | {"count": None} for card in cards})
    columns = {"suite": ("Suite", "text"), "model": ("Model", "text"), "failed": ("No score", "integer")}
    columns |= {label: (label, "percent") for row in rows for label in row if label not in columns}
    return table_block(
        "At a glance",
        columns,
        rows,
        "Ranges are 95 % intervals. No score: examples that the model could not score; they count as wrong. "
        "Length-controlled: the mean of the accuracies where the longer and where the shorter completion is right, and "
        "the length gap their difference; both over pairs, without those that lack a score. Robust: right before and "
        "after every change of style.",
    )


# --- a chapter -------------------------------------------------------------------------------------------------------


def chapter(summaries: Sequence[Summary], *, only: bool = False) -> list[Block]:
    """The chapter of one suite. `only`: nothing else is in the report, so the opening has the findings already."""
    first = summaries[0]
    said = [" ".join(filter(None, (f"{_counts(one)}.", one.result.headline.note))) if only else findings(one)
            for one in summaries]  # fmt: skip
    shared = next((one.overlap for one in summaries if one.overlap is not None), None)
    examples: Block = {
        "kind": "examples",
        "title": "The examples",
        "note": "The most confident mistakes first. A row opens with both completions side by side.",
        "source": first.suite,
    }
    return [
        {"kind": "text", "title": first.title, "markdown": "\n\n".join(said)},
        *_accuracies(summaries),
        *_side_by_side(summaries),
        *_margins(summaries),
        examples,
        *([] if shared is None else shared.blocks()),
        *_numbers(summaries),
    ]


def _side_by_side(summaries: Sequence[Summary]) -> list[Block]:
    """The figures of each model: bars and reliability diagrams with all models in one, others one below the other."""
    groups: dict[tuple[str, str], list[tuple[str, Block]]] = {}
    for one in summaries:
        strata, *rest = one.length.figures
        made = (one.style, one.perturbations, one.statistics, one.scores, one.without_overlap)
        further = [figure for diagnostic in made if diagnostic is not None for figure in diagnostic.figures]
        for block in (*_style_matrix(one), strata, _outcomes_by_length(one), *rest, *further):
            groups.setdefault((block["kind"], block["title"]), []).append((one.model, block))
    merged: list[Block] = []
    for (kind, title), group in groups.items():
        blocks = [block for _, block in group]
        if len(summaries) == 1:
            merged += blocks
        elif kind in ("bars", "reliability"):
            ranges = [block["x_range"] for block in blocks if block.get("x_range")]
            common = {"x_range": [min(low for low, _ in ranges), max(high for _, high in ranges)]} if ranges else {}
            merged.append(blocks[0] | {"series": [one for block in blocks for one in block["series"]]} | common)
        else:
            folded = len(summaries) > _MOST_OPEN
            merged += [block | {"title": f"{title}: {model}", "folded": folded} for model, block in group]
    return merged


def _numbers(summaries: Sequence[Summary]) -> list[Block]:
    """A table of every number of each diagnostic."""
    tables = []
    for name, (title, note) in _NUMBERS.items():
        metrics = {}
        for one in summaries:
            diagnostic = getattr(one, name)
            own = () if diagnostic is None else diagnostic.metrics()
            if name == "perturbations":
                own = own[:2]  # the figures have the others, rewrite by rewrite
            hidden = "" if len(one.result.subsets) > 1 else "worst_subset"
            metrics[one.model] = [metric for metric in own if metric.name != hidden]
        if any(metrics.values()):
            tables.append(metrics_table(title, metrics, note))
    return tables


def _accuracies(summaries: Sequence[Summary]) -> list[Block]:
    """Bars of sections and subsets, once where they are the same."""
    sections, subsets = ([getattr(one.result, name) for one in summaries] for name in ("sections", "subsets"))
    parts = {"Accuracy by section": sections, "Accuracy by subset": subsets}
    if sections == subsets or not any(sections):
        del parts["Accuracy by section"]
    return [_bars(title, summaries, own) for title, own in parts.items() if any(len(one) > 1 for one in own)]


def _bars(title: str, summaries: Sequence[Summary], of_models: Sequence[Sequence[Metric]]) -> Block:
    """Bars with chance: one line where it is the same for all of them, else one for each that has it."""
    chances = {m.name: s.chances[m.name] for s, own in zip(summaries, of_models, strict=True) for m in own}
    same = len(set(chances.values())) == 1
    unknown = [name for name, chance in chances.items() if chance is None]
    series = []
    for summary, metrics in zip(summaries, of_models, strict=True):
        own = {} if same else {name: {"reference": chance} for name, chance in chances.items() if chance is not None}
        items = [bar_item(metric.name, metric) | own.get(metric.name, {}) for metric in metrics]
        series.append({"name": summary.model, "items": items})
    return {
        "kind": "bars",
        "title": title,
        "note": f"Chance is not known for {', '.join(unknown)}." if unknown else None,
        "x_range": [0, 1],
        "format": "percent",
        "reference": next(iter(chances.values())) if same else None,
        "series": series,
    }


def _style_matrix(summary: Summary) -> list[Block]:
    """RM-Bench's matrix of styles; nothing for other suites."""
    matrix = summary.result.details.get("matrix")
    title = "Right completion in one style against wrong in another"
    note = "Accuracy. Above the diagonal the wrong completion is the fancier one: these are the hard pairs."
    rows, columns = ([f"{side}, {style}" for style in STYLES] for side in ("right", "wrong"))
    return [] if matrix is None else [_matrix(title, note, rows, columns, matrix)]


def _matrix(
    title: str, note: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]]
) -> Block:
    """A matrix of shares."""
    names = {"rows": list(rows), "columns": list(columns), "values": values}
    return {"kind": "matrix", "title": title, "note": note, **names, "format": "percent"}


def _outcomes_by_length(summary: Summary) -> Block:
    """Outcome of each pair by which completion is the longer, as shares of a row."""
    pairs = collect_pairs(summary.examples)
    longer, shorter, similar = strata_of(pairs.better, pairs.worse)
    rows = {"better is longer": longer, "about as long": similar, "better is shorter": shorter}
    kinds = [pairs.margins > 0, pairs.margins == 0, pairs.margins < 0, ~np.isfinite(pairs.margins)]
    return _matrix(
        "What becomes of a pair",
        "Shares of each row's pairs; lengths within 10 % of the longer are about as long.",
        [f"{name} ({_counted(int(where.sum()), 'pair')})" for name, where in rows.items()],
        ["right", "tie", "wrong", "no score"],
        [
            [float((where & kind).sum() / where.sum()) if where.any() else None for kind in kinds]
            for where in rows.values()
        ],
    )


def _margins(summaries: Sequence[Summary]) -> list[Block]:
    margins = {one.model: collect_pairs(one.examples).with_scores.margins for one in summaries}
    every = np.concatenate(list(margins.values()))
    if not len(every):
        return []
    low, high = min(every.min(), 0.0), max(every.max(), 0.0)
    width = float(high - low) / _MARGIN_BINS or 1.0  # bins of this width, with an edge at 0
    edges = [width * i for i in range(int(np.floor(low / width)), max(int(np.ceil(high / width)), 1) + 1)]
    series = [{"name": model, "counts": np.histogram(own, edges)[0].tolist()} for model, own in margins.items()]
    block: Block = {
        "kind": "histogram",
        "title": "Margins",
        "note": "Score of the better completion less that of the other, for each pair: left of 0 is wrong.",
        "edges": edges,
        "x_label": "margin",
        "y_label": "pairs",
        "mark": 0,
        "series": series,
    }
    return [block]


def _counts(summary: Summary) -> str:
    result = summary.result
    said = _counted(result.num_examples, "example")
    if result.unit == "pairs" and result.headline.count not in (None, result.num_examples):
        said = f"{_counted(result.headline.count, 'pair')} of {said}"
    said += f", {_counted(result.num_ties, 'tie')}" if result.num_ties else ""
    return said + (f", {result.num_failed:,} without a score, counted as wrong" if result.num_failed else "")


def _counted(count: int | None, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
