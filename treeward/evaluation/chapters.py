"""The report of an evaluation, block by block: the findings first, then a chapter for each suite.

    blocks = [*opening(summaries), *chapter(summaries_of_one_suite)]
    write_report(folder, "Evaluation of my-model", blocks, rows)

The opening fits a screen: the findings in words, the headline numbers with intervals and chance, the worst subset. In
a chapter the models stand side by side wherever they have a common axis; figures come first, then the examples, then
every number.
"""

from __future__ import annotations

from collections.abc import Sequence

from treeward.evaluation.diagnostics.biases import left_out_note
from treeward.evaluation.diagnostics.labels import metrics_table
from treeward.evaluation.findings import findings, has_worst_subset, verdict
from treeward.evaluation.report.blocks import bar_item, table_block
from treeward.evaluation.results import Block, Metric
from treeward.evaluation.suites.benchmarks import STYLES
from treeward.evaluation.summary import Summary

_MOST_CARDS = 6  # more than these are a table


def opening(summaries: Sequence[Summary]) -> list[Block]:
    """The first screen: findings or, of several, a verdict each; then headline numbers."""
    names = {summary.result.headline.name for summary in summaries}
    name = names.pop().capitalize() if len(names) == 1 else "Headline"
    if len(summaries) == 1:
        (only,) = summaries
        return [{"kind": "text", "markdown": findings(only)}, {"kind": "headline", "items": _cards(only, name)}]
    suites = list(dict.fromkeys(one.suite for one in summaries))
    summaries = sorted(summaries, key=lambda one: suites.index(one.suite))
    blocks: list[Block] = [{"kind": "text", "markdown": "\n".join(f"- {verdict(one)}" for one in summaries)}]
    if len(summaries) <= _MOST_CARDS:
        items = [_cards(one, f"{one.title}: {one.model}")[0] for one in summaries]
        blocks.append({"kind": "headline", "items": items})
    rows: list[Block] = []
    for one in summaries:
        row: Block = {"suite": one.title, "model": one.model, "failed": one.result.num_failed}
        rows.append(row | {card["label"]: card | {"count": None} for card in _cards(one, name)})
    columns = {"suite": ("Suite", "text"), "model": ("Model", "text"), "failed": ("No score", "integer")}
    columns |= {label: (label, "percent") for row in rows for label in row if label not in columns}
    note = (
        "Ranges are 95 % intervals. No score: examples that the model could not score; they count as wrong. "
        "Length-controlled: the mean of the accuracies where the longer and where the shorter completion is right, and "
        "the length gap their difference; both over pairs, without those that lack a score. Robust: right before and "
        "after every change of style."
    )
    return [*blocks, table_block("At a glance", columns, rows, note)]


def _cards(summary: Summary, name: str) -> list[Block]:
    """The numbers of a model in a suite that say whether it can be trusted; `name`: of the suite's headline."""
    length, statistics, result = summary.length, summary.statistics, summary.result
    left_out = (left_out_note(length.num_left_out) or "").removesuffix(".")
    longer, shorter = ("-" if one.value is None else f"{one.value:.1%}"
                       for one in (length.accuracy_longer_right, length.accuracy_shorter_right))  # fmt: skip
    gap = f"{longer} where the longer completion is right, {shorter} where the shorter is"
    controlled = "as if the longer completion were right as often as the shorter"
    items = [_card(name, result.headline, summary.chance, _counts(summary))]
    if result.headline_of_scored is not None:
        note = f"{result.num_examples - result.num_failed:,} examples; the others have no score"
        items.append(_card(f"{name} of the scored", result.headline_of_scored, summary.chance, note))
    items += [
        _card("Length-controlled accuracy", length.length_controlled_accuracy, 0.5, controlled, left_out),
        _card("Length gap in accuracy", length.accuracy_gap, None, gap, left_out) | {"format": "points"},
    ]
    if has_worst_subset(result):
        worst = statistics.worst_subset
        items.append(_card("Worst subset", worst, summary.chances.get(worst.note or ""), worst.note or ""))
    if summary.perturbations is not None:
        failed = summary.perturbations.num_left_out
        robust = ("right before and after every change of style", f"{failed:,} texts have no score" if failed else "")
        items.append(_card("Robust accuracy", summary.perturbations.robust_accuracy, None, *robust))
    before, after, scale = (one.value for one in (statistics.ece, statistics.ece_fitted, statistics.temperature))
    helps = before is not None and after is not None and scale is not None and after < before
    rescaled = f"off by {after:.1%} once margins are divided by {scale:.2f}" if helps else ""
    return [*items, _card("Calibration error", statistics.ece, None, rescaled)]


def _card(label: str, metric: Metric, chance: float | None, *notes: str) -> Block:
    card = bar_item(label, metric, "; ".join(filter(None, notes)) or None) | {"format": "percent"}
    return card if chance is None else card | {"reference": chance}


def _counts(summary: Summary) -> str:
    result = summary.result

    def counted(count: int, noun: str) -> str:
        return f"{count:,} {noun}{'' if count == 1 else 's'}"

    if result.mostly_failed:
        return result.scored
    said = counted(result.num_examples, "example")
    if result.unit == "pairs" and result.headline.count not in (None, result.num_examples):
        said = f"{counted(result.headline.count or 0, 'pair')} of {said}"
    said += f", {counted(result.num_ties, 'tie')}" if result.num_ties else ""
    return said + (f", {result.num_failed:,} without a score, counted as wrong" if result.num_failed else "")


def chapter(summaries: Sequence[Summary], *, only: bool = False) -> list[Block]:
    """The chapter of one suite. `only`: nothing else is in the report, so the opening has the findings already."""
    first = summaries[0]
    said = [" ".join(filter(None, (f"{_counts(one)}.", one.result.headline.note))) if only else findings(one)
            for one in summaries]  # fmt: skip
    metrics = {one.model: [m for own in one.diagnostics.values() for m in own.metrics()] for one in summaries}
    if len(first.result.subsets) < 2:
        metrics = {model: [m for m in own if m.name != "worst_subset"] for model, own in metrics.items()}
    note = "The most confident mistakes first. A row opens with both completions side by side."
    return [
        {"kind": "text", "title": first.title, "markdown": "\n\n".join(said)},
        *_accuracies(summaries),
        *_figures(summaries),
        {"kind": "examples", "title": "The examples", "note": note, "source": first.suite},
        metrics_table("Every number", metrics),
    ]


def _accuracies(summaries: Sequence[Summary]) -> list[Block]:
    """Bars of sections and subsets, once where they are the same, with the most common chance."""
    sections, subsets = ([getattr(one.result, name) for one in summaries] for name in ("sections", "subsets"))
    parts = {"Accuracy by section": sections, "Accuracy by subset": subsets}
    if sections == subsets or not any(sections):
        del parts["Accuracy by section"]
    blocks: list[Block] = []
    for title, of_models in parts.items():
        if not any(len(metrics) > 1 for metrics in of_models):
            continue
        chances = {m.name: s.chances[m.name] for s, own in zip(summaries, of_models, strict=True) for m in own}
        common = max(chances.values(), key=lambda chance: (chance is not None, list(chances.values()).count(chance)))
        others = [name if chance is None else f"{name} ({chance:.0%})" for name, chance in chances.items()
                  if chance != common]  # fmt: skip
        series = [
            {"name": summary.model, "items": [bar_item(m.name, m) for m in metrics]}
            for summary, metrics in zip(summaries, of_models, strict=True)
        ]
        note = f"Chance is another, or not known, for {', '.join(others)}." if others else None
        block: Block = {"kind": "bars", "title": title, "note": note, "x_range": [0, 1], "format": "percent"}
        blocks.append(block | {"reference": common, "series": series})
    return blocks


def _figures(summaries: Sequence[Summary]) -> list[Block]:
    """The figures of every diagnostic: the series of all models in one, what has no series one below the other."""
    groups: dict[str, list[tuple[str, Block]]] = {}
    for one in summaries:
        figures = [figure for diagnostic in one.diagnostics.values() for figure in diagnostic.figures]
        for block in (*_style_matrix(one), *figures):
            groups.setdefault(block["title"], []).append((one.model, block))
    merged: list[Block] = []
    for title, group in groups.items():
        first = group[0][1]
        if "series" in first:
            reach = [end for _, block in group for end in block.get("x_range") or ()]
            common = {"x_range": [min(reach), max(reach)]} if reach else {}
            merged.append(first | {"series": [own for _, block in group for own in block["series"]]} | common)
        elif all(block == first for _, block in group):
            merged.append(first)
        else:
            merged += [block | {"title": f"{title}: {model}"} for model, block in group]
    return merged


def _style_matrix(summary: Summary) -> list[Block]:
    """RM-Bench's matrix of styles; nothing for other suites."""
    matrix = summary.result.details.get("matrix")
    if matrix is None:
        return []
    title = "Right completion in one style against wrong in another"
    note = "Accuracy. Above the diagonal the wrong completion is the fancier one: these are the hard pairs."
    columns = {"right": ("Right completion", "text")} | {style: (f"Wrong: {style}", "percent") for style in STYLES}
    rows = [{"right": style} | dict(zip(STYLES, values, strict=True))
            for style, values in zip(STYLES, matrix, strict=True)]  # fmt: skip
    return [table_block(title, columns, rows, note)]
