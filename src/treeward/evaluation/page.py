"""`write_results`: from summaries to results.json, report.json and report.html.

    write_results(Path("results/eval"), [summarize(suite, scored, "my-model")])

The first screen of the report has the findings in words and the headline numbers. Then each suite has a chapter, where
the models stand side by side: figures come first, then the examples, then every number. `results.json` holds for each
model and suite the suite's own numbers and the diagnostics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from treeward.evaluation.diagnostics.biases import LENGTH, STYLE, Trait
from treeward.evaluation.diagnostics.perturbations import REWRITES
from treeward.evaluation.findings import Summary, findings, standing, verdict
from treeward.evaluation.report.blocks import (
    bar_item,
    bars_block,
    curves_block,
    headline_block,
    table_block,
    text_block,
)
from treeward.evaluation.report.build import write_report
from treeward.evaluation.results import Block, Diagnostic, Metric, to_row
from treeward.version import VERSION

_MOST_CARDS = 6  # more than these are a table

_GLANCE = (
    "Ranges are 95 % intervals. No score: examples that the model could not score; they count as wrong. "
    "Length-controlled: the mean of the accuracies where the longer and where the shorter completion is right, and "
    "the length gap their difference; both over pairs, without those that lack a score. Robust: right before and "
    "after every change of style."
)
_FAIR = (
    "Without a bias the first two are alike; a model that only likes {} has 100 %, 0 % and 50 %. The last is their "
    "mean. Each n counts pairs of completions that both have a score."
)
_OF_LENGTH = f"{_FAIR.format('length')} Similar is within 10 % of the longer."
_OF_STYLE = (
    f"{_FAIR.format('markdown')} These are completions with the markdown that they have, often few marks. Rewrites "
    "(--perturbations) add it to completions that have none; where the two differ, a policy will meet the rewrites."
)
_DAMAGES = ", ".join(rewrite.label for rewrite in REWRITES.values() if rewrite.kind == "damage")
_OF_SHIFT = (
    "In mean margins: at 1, the rewrite moves the score as much as the data's completions differ. Changes of style "
    f"should be near 0, damage ({_DAMAGES}) below it."
)
_OF_FLIPS = "A rewrite hardly makes a worse completion the better one: a lost pair is a way to fool the model."

LABELS: Mapping[str, tuple[str, str, str]] = {
    # of any comparisons
    "pair_accuracy": ("Pairs in the right order", "percent", "ties and missing scores count as wrong"),
    "ties": ("Ties", "percent", "pairs whose two scores are the same"),
    "kendall_tau": ("Kendall's tau", "signed", "order of three completions or more: 1 right, 0 random, -1 reversed"),
    "group_accuracy": ("Comparisons all in order", "percent", "every pair of the comparison is right"),
    "best_of_k": ("Best completion scores highest", "percent", "a missing score or a tie with others is wrong"),
    "mse": ("Squared error of grades", "number", "mean over the grades of the data, and over attributes"),
    "pearson": ("Correlation with grades", "signed", "1 is a straight line; mean over attributes"),
    "ece": ("Calibration error (ECE)", "percent", "mean distance of sigmoid(margin) from how often it holds"),
    "ece_fitted": ("Calibration error, rescaled", "percent", "the same, with margins divided by the temperature"),
    "temperature": ("Fitted temperature", "number", "above 1 the margins are overconfident, below 1 underconfident"),
    "worst_subset": ("Worst subset", "percent", "the lowest accuracy of all subsets"),
    "score_mean": ("Mean score", "number", "of all completions"),
    "score_std": ("Standard deviation of the scores", "number", "of all completions"),
    # length
    "longer_is_right": ("Better completion is the longer", "percent", "of the data alone"),
    "accuracy_longer_right": ("Longer completion is right", "percent", "accuracy: high if it likes length"),
    "accuracy_shorter_right": ("Shorter completion is right", "percent", "accuracy: low if it likes length"),
    "accuracy_similar_length": ("Similar lengths", "percent", "accuracy within 10 %: no help from length"),
    "accuracy_gap": ("Length gap in accuracy", "points", "longer right less shorter right: 0 is fair"),
    "length_controlled_accuracy": ("Length-controlled accuracy", "percent", "mean of both: 50 % for this liking alone"),
    # style
    "more_markdown_is_right": ("Better completion has more markdown", "percent", "of the data alone"),
    "accuracy_more_markdown_right": ("More markdown is right", "percent", "accuracy: high if it likes markdown"),
    "accuracy_less_markdown_right": ("Less markdown is right", "percent", "accuracy: low if it likes markdown"),
    "accuracy_similar_markdown": ("Similar markdown", "percent", "accuracy: no help from markdown"),
    "markdown_gap": ("Markdown gap in accuracy", "points", "more right less less right: 0 is fair"),
    "style_controlled_accuracy": ("Style-controlled accuracy", "percent", "mean of both: 50 % for this liking alone"),
    # rewrites
    "accuracy": ("Rewritten pairs, before", "percent", "pairs in the right order; ties count as wrong"),
    "robust_accuracy": ("Robust accuracy", "percent", "right before and after every rewrite of style"),
}
"""By the name in `results.json`: the name in a report, the format, and how to read it."""


def write_results(output: Path, summaries: Sequence[Summary], *, subtitle: str = "") -> Path:
    """Write results.json and the report; returns the path of the report.

    `subtitle`: what a reader must know of the scores, below the title. Raises `DataError` where they cannot be written.
    """
    content: dict[str, Any] = {
        "treeward_version": VERSION,
        "date": datetime.now(UTC).date().isoformat(),
        "results": [_numbers(summary) for summary in summaries],
    }
    content |= {"notes": subtitle} if subtitle else {}
    rows: dict[str, list[dict[str, Any]]] = {}  # of each suite's table of examples
    for summary in summaries:
        rows.setdefault(summary.suite.name, []).extend(
            to_row(example) | {"model": summary.model} for example in summary.examples
        )
    for of_suite in rows.values():  # the most confident mistakes first
        of_suite.sort(key=lambda row: (row["margin"] is None, row["margin"] or 0.0))
    title = "Evaluation of " + ", ".join(dict.fromkeys(summary.model for summary in summaries))
    blocks, files = report_blocks(summaries), {"results.json": content}
    return write_report(output, title, blocks, rows, subtitle=subtitle, files=files)


def report_blocks(summaries: Sequence[Summary]) -> list[Block]:
    """The report: the findings first, then each suite in turn."""
    suites: dict[str, list[Summary]] = {}
    for summary in summaries:
        suites.setdefault(summary.suite.name, []).append(summary)
    [first, *others] = in_order = list(chain.from_iterable(suites.values()))
    if others:
        blocks = list(_opening_of_several(in_order))
    else:
        cards = _cards(first, first.result.headline.name.capitalize())
        blocks = [text_block(findings(first)), headline_block(cards)]
    for of_suite in suites.values():
        blocks += _chapter(of_suite, is_alone=not others)
    return blocks


def _numbers(summary: Summary) -> dict[str, Any]:
    return {
        "model": summary.model,
        "suite": summary.suite.name,
        "verdict": verdict(summary).replace("**", "", 2),
        "chance": summary.suite.chance(),
        "standing": standing(summary.result, summary.suite.chance()),
        **{key: value for key, value in dataclasses.asdict(summary.result).items() if key != "suite"},
        "diagnostics": {
            name: [dataclasses.asdict(metric) for metric in diagnostic.numbers.values()]
            for name, diagnostic in summary.diagnostics.items()
        },
    }


def _opening_of_several(summaries: Sequence[Summary]) -> Iterator[Block]:
    """A verdict for each model in each suite, and their numbers in one table."""
    yield text_block("\n".join(f"- {verdict(summary)}" for summary in summaries))
    if len(summaries) <= _MOST_CARDS:
        yield headline_block([_cards(summary, f"{summary.title}: {summary.model}")[0] for summary in summaries])
    names = {summary.result.headline.name for summary in summaries}
    name = names.pop().capitalize() if len(names) == 1 else "Headline"
    columns = {"suite": ("Suite", "text"), "model": ("Model", "text"), "failed": ("No score", "integer")}
    rows: list[Block] = []
    for summary in summaries:
        cards = {card["label"]: card | {"count": None} for card in _cards(summary, name)}
        columns |= {label: (label, "percent") for label in cards if label not in columns}
        row: Block = {"suite": summary.title, "model": summary.model, "failed": summary.result.num_failed}
        rows.append(row | cards)
    yield table_block("At a glance", columns, rows, _GLANCE)


def _cards(summary: Summary, name: str) -> list[Block]:
    """The numbers of a model in a suite that say whether it can be trusted; `name`: of the suite's headline."""
    length, statistics, result = summary.length, summary.statistics, summary.result
    cards = [_card(name, result.headline, summary.suite.chance(), _counts(summary))]
    controlled = "as if the longer completion were right as often as the shorter"
    cards.append(_card("Length-controlled accuracy", length.length_controlled_accuracy, 0.5, controlled))
    longer, shorter = (
        "-" if metric.value is None else f"{metric.value:.1%}"
        for metric in (length.accuracy_longer_right, length.accuracy_shorter_right)
    )
    gap = f"{longer} where the longer completion is right, {shorter} where the shorter is"
    cards.append(_card("Length gap in accuracy", length.accuracy_gap, None, gap) | {"format": "points"})
    if len({subset.value for subset in result.subsets if subset.value is not None}) > 1:
        worst = statistics.worst_subset
        cards.append(_card("Worst subset", worst, summary.suite.chance(worst.note), worst.note or ""))
    if summary.perturbations is not None:
        robust = "right before and after every change of style"
        cards.append(_card("Robust accuracy", summary.perturbations.robust_accuracy, None, robust))
    before, after, scale = statistics.ece.value, statistics.ece_fitted.value, statistics.temperature.value
    rescaled = ""
    if before is not None and after is not None and scale is not None and after < before:
        rescaled = f"off by {after:.1%} once margins are divided by {scale:.2f}"
    return [*cards, _card("Calibration error", statistics.ece, None, rescaled)]


def _card(label: str, metric: Metric, chance: float | None, *notes: str) -> Block:
    card = bar_item(label, metric, "; ".join(filter(None, notes)) or None, format="percent")
    return card if chance is None else card | {"reference": chance}


def _counts(summary: Summary) -> str:
    result = summary.result

    def counted(count: int, noun: str) -> str:
        return f"{count:,} {noun}{'' if count == 1 else 's'}"

    text = counted(result.num_examples, "example")
    if result.unit == "pairs" and result.headline.count not in (None, result.num_examples):
        text = f"{counted(result.headline.count or 0, 'pair')} of {text}"
    text += f", {counted(result.num_ties, 'tie')}" if result.num_ties else ""
    return text + (f", {result.scored}" if result.num_failed else "")


def _chapter(summaries: Sequence[Summary], *, is_alone: bool) -> Iterator[Block]:
    """The chapter of one suite. `is_alone`: nothing else is in the report, so the opening has the findings already."""
    first = summaries[0]
    if is_alone:
        texts = [" ".join(filter(None, (f"{_counts(first)}.", first.result.headline.note)))]
    else:
        texts = [findings(summary) for summary in summaries]
    yield text_block("\n\n".join(texts), title=first.title)
    yield from _accuracies(summaries)
    yield from _figures(summaries)
    note = "The most confident mistakes first. A row opens with both completions side by side."
    yield {"kind": "examples", "title": "The examples", "note": note, "source": first.suite.name}
    metrics = {
        summary.model: [
            metric for diagnostic in summary.diagnostics.values() for metric in diagnostic.numbers.values()
            if metric.name != "worst_subset" or len(first.result.subsets) > 1
        ]
        for summary in summaries
    }  # fmt: skip
    yield metrics_table("Every number", metrics)


def _accuracies(summaries: Sequence[Summary]) -> Iterator[Block]:
    """Bars of sections and subsets, once where they are the same, with the most common chance."""
    sections = [summary.result.sections for summary in summaries]
    subsets = [summary.result.subsets for summary in summaries]
    parts = {"Accuracy by section": sections, "Accuracy by subset": subsets}
    if sections == subsets or not any(sections):
        del parts["Accuracy by section"]
    for title, metrics_of_models in parts.items():
        if not any(len(metrics) > 1 for metrics in metrics_of_models):
            continue
        series = {
            summary.model: [bar_item(metric.name, metric) for metric in metrics]
            for summary, metrics in zip(summaries, metrics_of_models, strict=True)
        }
        chances = [summaries[0].suite.chance(metric.name) for metric in chain.from_iterable(metrics_of_models)]
        common = max(chances, key=lambda chance: (chance is not None, chances.count(chance)))
        yield bars_block(title, series, "The line is chance, that of most bars.", reference=common)


def _figures(summaries: Sequence[Summary]) -> Iterator[Block]:
    """The figures of every diagnostic, each with the models that have its numbers."""
    lengths = {summary.model: summary.length for summary in summaries}
    yield _strata("Accuracy by which completion is longer", LENGTH, lengths, _OF_LENGTH)
    styles = {summary.model: summary.style for summary in summaries}
    yield _strata("Accuracy by which completion has more markdown", STYLE, styles, _OF_STYLE)
    rewritten = {summary.model: summary.perturbations for summary in summaries if summary.perturbations is not None}
    if rewritten:
        shifts, flips = (
            {
                model: [bar_item(rewrite.label, made.numbers[f"{name}_{what}"]) for name, rewrite in REWRITES.items()]
                for model, made in rewritten.items()
            }
            for what in ("relative_shift", "rejected_flips")
        )
        items = list(chain.from_iterable(shifts.values()))
        reach = max((abs(item[end]) for item in items for end in ("value", "low", "high") if item[end]), default=1.0)
        span = [-reach, reach]
        yield bars_block("Score shift by rewrite", shifts, _OF_SHIFT, format="signed", reference=0, x_range=span)
        title = "Right pairs lost when the worse completion is rewritten"
        yield bars_block(title, flips, _OF_FLIPS, reference=None)
    reliabilities = [
        {"name": summary.model} | summary.statistics.points for summary in summaries if summary.statistics.points
    ]
    if reliabilities:
        yield curves_block(
            "How sure, and how often right",
            reliabilities,
            "On the diagonal sigmoid(margin) is a probability; below it the model is overconfident.",
            x_label="predicted probability",
            y_label="how often it was right",
            format="percent",
            is_square=True,
        )


def _strata(title: str, trait: Trait, diagnostics: Mapping[str, Diagnostic], note: str) -> Block:
    series = {
        model: [bar_item(LABELS[name][0], diagnostic.numbers[name]) for name in trait.accuracies]
        for model, diagnostic in diagnostics.items()
    }
    return bars_block(title, series, note)


def metrics_table(title: str, metrics: Mapping[str, Sequence[Metric]]) -> Block:
    """The metrics that have a label as a `table` block: label, a column of values for each model, how to read them."""
    by_name: dict[str, dict[str, Metric]] = {}
    for model, of_model in metrics.items():
        for metric in of_model:
            by_name.setdefault(metric.name, {})[model] = metric
    columns = {"label": ("Number", "text")} | {f"value of {model}": (model, "number") for model in metrics}
    rows: list[Block] = []
    for name in filter(LABELS.__contains__, by_name):
        label, form, explanation = LABELS[name]
        notes = {model: metric.note for model, metric in by_name[name].items() if metric.note}
        is_common = len(by_name[name]) == 1 or len(set(notes.values())) == 1
        said = list(notes.values())[:1] if is_common else [f"{model}: {note}" for model, note in notes.items()]
        cells = {f"value of {model}": bar_item("", metric, format=form) for model, metric in by_name[name].items()}
        rows.append({"metric": name, "label": label, **cells, "note": " ".join([f"{explanation}.", *said])})
    block = table_block(title, columns, rows, "Ranges are 95 % intervals; they allow for completions of one prompt.")
    how = {"key": "note", "label": "How to read it", "format": "text", "explains": "label"}
    return block | {"columns": [*block["columns"], how]}
