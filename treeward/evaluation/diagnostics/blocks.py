"""Blocks of a report that several diagnostics show, and the label of every number.

    metrics_table("Length in numbers", {"my-model": length.metrics()})     # {"kind": "table", ...}
    label_of("slope_given_rank")                                           # Label("Score per 100 characters, ...", ...)
    side_by_side(["a", "b"], [of_a.figures, of_b.figures])

`treeward.evaluation.report.blocks` has the kinds of block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from treeward.evaluation.results import Block, Metric

__all__ = ["LABELS", "Label", "bar_item", "bars_block", "label_of", "metrics_table", "side_by_side", "table_block"]


class Label(NamedTuple):
    """The name of a number in a report, its format, and how to read it."""

    text: str
    format: str
    explanation: str


_PERCENT, _POINTS, _NUMBER, _SIGNED = "percent", "points", "number", "signed"
_COUNTED = "at equal rank and length, the other marks held fixed"

LABELS: Mapping[str, Label] = MappingProxyType(
    {
        # of any comparisons
        "accuracy": Label("Accuracy", _PERCENT, "pairs in the right order; ties and missing scores count as wrong"),
        "pair_accuracy": Label("Pairs in the right order", _PERCENT, "ties and missing scores count as wrong"),
        "ties": Label("Ties", _PERCENT, "pairs whose two scores are the same"),
        "auroc": Label(
            "AUROC", _NUMBER, "how often a best completion of any prompt outscores any other completion: 0.5 is chance"
        ),
        "kendall_tau": Label(
            "Kendall's tau", _SIGNED, "order of three completions or more: 1 right, 0 random, -1 reversed"
        ),
        "ece": Label("Calibration error (ECE)", _PERCENT, "mean distance of sigmoid(margin) from how often it holds"),
        "ece_fitted": Label(
            "Calibration error, rescaled", _PERCENT, "the same, with margins divided by the temperature"
        ),
        "brier": Label("Brier score", _NUMBER, "squared error of sigmoid(margin): 0 is perfect, 0.25 a coin"),
        "temperature": Label(
            "Fitted temperature", _NUMBER, "above 1 the margins are overconfident, below 1 underconfident"
        ),
        "worst_subset": Label("Worst subset", _PERCENT, "the lowest accuracy of all subsets"),
        # length
        "pearson": Label("Correlation of score and length", _SIGNED, "Pearson's, over completions of all prompts"),
        "spearman": Label(
            "Rank correlation of score and length", _SIGNED, "Spearman's, over completions of all prompts"
        ),
        "slope": Label("Score per 100 characters", _SIGNED, "within prompts; better completions may be longer, too"),
        "slope_given_rank": Label(
            "Score per 100 characters, quality held fixed", _SIGNED, "the length bias: 0 for a model without one"
        ),
        "relative_slope": Label(
            "Length bias in standard deviations",
            _SIGNED,
            "the line above, in standard deviations of the scores of one prompt's completions",
        ),
        "longer_is_right": Label("Better completion is the longer", _PERCENT, "of the data alone"),
        "accuracy_longer_right": Label("Accuracy, longer completion is right", _PERCENT, "high if it likes length"),
        "accuracy_shorter_right": Label("Accuracy, shorter completion is right", _PERCENT, "low if it likes length"),
        "accuracy_similar_length": Label("Accuracy, similar lengths", _PERCENT, "within 10 %: no help from length"),
        "accuracy_gap": Label("Length gap in accuracy", _POINTS, "longer right less shorter right: 0 is fair"),
        "length_controlled_accuracy": Label(
            "Length-controlled accuracy",
            _PERCENT,
            "mean of longer right and shorter right; 50 % if it only likes length",
        ),
        # style
        "density_effect": Label("Score per markdown mark in 100 words", _SIGNED, "at equal rank and length; 0 is fair"),
        "relative_density_effect": Label(
            "Markdown bias in standard deviations",
            _SIGNED,
            "the line above, in standard deviations of the scores of one prompt's completions",
        ),
        "effect_of_100_characters": Label("Score per 100 characters", _SIGNED, "at equal rank and markdown"),
        "effect_of_headings": Label("Score per heading", _SIGNED, _COUNTED),
        "effect_of_list_items": Label("Score per list item", _SIGNED, _COUNTED),
        "effect_of_bold": Label("Score per bold text", _SIGNED, _COUNTED),
        "effect_of_code": Label("Score per piece of code", _SIGNED, _COUNTED),
        "effect_of_table_rows": Label("Score per table row", _SIGNED, _COUNTED),
        "more_markdown_is_right": Label(
            "Better completion has more markdown", _PERCENT, "of the data, not of the model"
        ),
        "accuracy_more_markdown_right": Label("Accuracy, more markdown is right", _PERCENT, "high if it likes it"),
        "accuracy_less_markdown_right": Label("Accuracy, less markdown is right", _PERCENT, "low if it likes it"),
        "accuracy_similar_markdown": Label("Accuracy, similar markdown", _PERCENT, "no help from markdown"),
        "markdown_gap": Label("Markdown gap in accuracy", _POINTS, "more right less less right: 0 is fair"),
        "style_controlled_accuracy": Label(
            "Style-controlled accuracy", _PERCENT, "mean of more right and less right; 50 % if it only likes markdown"
        ),
        # scores
        "score_mean": Label("Mean score", _NUMBER, "of all completions"),
        "score_std": Label("Standard deviation of the scores", _NUMBER, "of all completions"),
        "saturated": Label(
            "Saturated pairs", _PERCENT, "margin above 5 temperatures, right or wrong: as sure as 99.3 % or more"
        ),
        "saturated_wrong": Label("Wrong pairs that are saturated", _PERCENT, "of the wrong pairs"),
        # checkpoints
        "shift": Label("Shift of the mean score", _SIGNED, "second less first"),
        "relative_shift": Label("Shift in standard deviations", _SIGNED, "in units of the first"),
        "scale_ratio": Label("Spread of the second by the first", _NUMBER, "1 is no change"),
        "rank_correlation": Label("Rank correlation", _SIGNED, "Spearman's, of the scores of all completions"),
        "order_agreement": Label("Pairs that both order alike", _PERCENT, "of completions with different ranks"),
        # rewrites
        "robust_accuracy": Label("Robust accuracy", _PERCENT, "right before and after every rewrite of style"),
        # overlap
        "flagged": Label("Exact or near duplicate", _PERCENT, "any of the kinds below"),
        "flagged_prompt": Label("Same prompt", _PERCENT, "word for word"),
        "flagged_conversation": Label("Same prompt with a completion", _PERCENT, "word for word"),
        "flagged_completion": Label("Same completion", _PERCENT, "word for word, if it is as long as a run of words"),
        "flagged_near_prompt": Label("Near duplicate of a prompt", _PERCENT, "most words are in common runs"),
        "flagged_near_completion": Label("Near duplicate of a completion", _PERCENT, "most words are in common runs"),
        "any_run": Label("Any run of words in common", _PERCENT, "says little by itself"),
        "accuracy_clean": Label("Accuracy without duplicates", _PERCENT, "to be quoted if the next is higher"),
        "accuracy_flagged": Label("Accuracy of the duplicates", _PERCENT, "may be learnt by heart"),
    }
)
"""By the name in `results.json`."""

# Figures of a single model are folded in reports of more models.
_MOST_OPEN = 3
_SHARED_PROMPTS = "The interval is over "
_TABLE_NOTE = "Ranges are 95 % intervals; they allow for completions that share a prompt."


def label_of(name: str) -> Label:
    """The label of a metric; for a name without one, the name as words and a plain number."""
    return LABELS.get(name) or Label(name.replace("_", " "), _NUMBER, "")


def bar_item(label: str, metric: Metric, note: str | None = None) -> dict[str, Any]:
    """A metric as an item of a `bars` or `headline` block."""
    item = {"label": label, "value": metric.value, "low": metric.low, "high": metric.high, "count": metric.count}
    return item if note is None else item | {"note": note}


def bars_block(title: str, model: str, items: Sequence[dict[str, Any]], note: str | None = None, **more: Any) -> Block:
    """Items of one model as a `bars` block from 0 to 1; `more`: fields of the block in place of these."""
    series = [{"name": model, "items": list(items)}]
    axis: Block = {"x_range": [0, 1], "reference": 0.5, "format": "percent"}
    return {"kind": "bars", "title": title, "note": note, "series": series} | axis | more


def table_block(
    title: str,
    columns: Mapping[str, tuple[str, str]],
    rows: Sequence[Mapping[str, Any]],
    note: str | None = None,
    **more: Any,
) -> Block:
    """Rows as a `table` block; `columns`: label and format by key. `more`: further fields of the block."""
    shown = [{"key": key, "label": label, "format": format} for key, (label, format) in columns.items()]
    return {"kind": "table", "title": title, "note": note, "columns": shown, "rows": list(rows)} | more


def metrics_table(title: str, metrics: Mapping[str, Sequence[Metric]], note: str | None = None) -> Block:
    """The metrics of each model as a `table` block: label, a column of values for each model, how to read them."""
    by_name: dict[str, dict[str, Metric]] = {}
    for model, own in metrics.items():
        for metric in own:
            by_name.setdefault(metric.name, {})[model] = metric
    return {
        "kind": "table",
        "title": title,
        "note": " ".join(filter(None, (note, _TABLE_NOTE))),
        "columns": [
            {"key": "label", "label": "Number", "format": "text"},
            *({"key": _column(model), "label": model, "format": "number"} for model in metrics),
            {"key": "note", "label": "How to read it", "format": "text", "explains": "label"},
        ],
        "rows": [_row(name, of_models) for name, of_models in by_name.items()],
    }


def _row(name: str, of_models: Mapping[str, Metric]) -> dict[str, Any]:
    label = label_of(name)
    notes = {model: _own_note(metric) for model, metric in of_models.items()}
    own = [f"{model}: {note}" for model, note in notes.items() if note]
    own = own if len(set(notes.values())) > 1 else [next(iter(notes.values()))]
    how = label.explanation if any(metric.value is not None for metric in of_models.values()) else ""
    cells = {_column(model): bar_item("", metric) | {"format": label.format} for model, metric in of_models.items()}
    return {"metric": name, "label": label.text, **cells, "note": "; ".join(filter(None, (how, *own)))}


def _own_note(metric: Metric) -> str:
    """The note of this number alone, to go on after a semicolon; the table has the note on shared prompts."""
    note = metric.note or ""
    if note.startswith(_SHARED_PROMPTS):
        return ""
    return note[0].lower() + note[1:-1] if note.endswith(".") else note


def _column(model: str) -> str:
    """The key of a model's column, whatever the model is called."""
    return f"value of {model}"


def side_by_side(models: Sequence[str], figures: Sequence[Sequence[Block]]) -> list[Block]:
    """The figures of several models as those of one report, in the order of the first model's.

    Bars and reliability diagrams of one title become one with all models in it; others have the model in their title,
    and are folded where there are more than three models.
    """
    if len(models) == 1:
        return list(figures[0])
    groups: dict[tuple[str, str], list[tuple[str, Block]]] = {}
    for model, own in zip(models, figures, strict=True):
        for block in own:
            groups.setdefault((block["kind"], block["title"]), []).append((model, block))
    merged: list[Block] = []
    for (kind, title), group in groups.items():
        blocks = [block for _, block in group]
        if kind in ("bars", "reliability"):
            ranges = [block["x_range"] for block in blocks if block.get("x_range")]
            common = {"x_range": [min(low for low, _ in ranges), max(high for _, high in ranges)]} if ranges else {}
            merged.append(blocks[0] | {"series": [one for block in blocks for one in block["series"]]} | common)
        else:
            folded = {"folded": True} if len(models) > _MOST_OPEN else {}
            merged += [block | {"title": f"{title}: {model}"} | folded for model, block in group]
    return merged
