"""Blocks of a report that several diagnostics show, and the names in words of every number.

    metrics_table("Length", "my-model", length.metrics())            # {"kind": "table", ...}
    label_of("slope_given_rank")                                     # Label("Score per 100 characters, ...", ...)
    side_by_side(["a", "b"], [a.length.blocks("a"), b.length.blocks("b")])

`results.json` keeps the raw names. The report renders what it is given; `treeward.evaluation.report` has the kinds of
block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from treeward.evaluation.results import Metric

__all__ = ["LABELS", "Label", "accuracy_bars", "bar_item", "label_of", "metrics_table", "number_cell", "side_by_side"]


class Label(NamedTuple):
    """A number in words: what it is called, its format in a report, how it is read."""

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
            "AUROC", _NUMBER, "how often a best reply to any prompt outscores any other reply: 0.5 is chance"
        ),
        "kendall_tau": Label(
            "Kendall's tau", _SIGNED, "order of three replies or more: 1 right, 0 random, -1 reversed"
        ),
        "ece": Label("Calibration error (ECE)", _PERCENT, "mean distance of sigmoid(margin) from how often it holds"),
        "ece_fitted": Label(
            "Calibration error, rescaled", _PERCENT, "the same, with margins divided by the temperature"
        ),
        "brier": Label("Brier score", _NUMBER, "squared error of sigmoid(margin): 0 is perfect, 0.25 a coin"),
        "temperature": Label(
            "Fitted temperature", _NUMBER, "above 1 margins are too sure of themselves, below 1 too shy"
        ),
        "worst_subset": Label("Worst subset", _PERCENT, "the lowest accuracy of all subsets"),
        # length
        "pearson": Label("Correlation of score and length", _SIGNED, "Pearson's, over replies to all prompts"),
        "spearman": Label("Rank correlation of score and length", _SIGNED, "Spearman's, over replies to all prompts"),
        "slope": Label("Score per 100 characters", _SIGNED, "within prompts; better replies may be longer, too"),
        "slope_given_rank": Label(
            "Score per 100 characters, quality held fixed", _SIGNED, "the length bias: 0 for a model without one"
        ),
        "relative_slope": Label(
            "Length bias in standard deviations",
            _SIGNED,
            "the line above, in standard deviations of the scores of one prompt's replies",
        ),
        "longer_is_right": Label("Better reply is the longer", _PERCENT, "of the data, not of the model"),
        "accuracy_longer_right": Label("Accuracy, longer reply is right", _PERCENT, "high if it likes length"),
        "accuracy_shorter_right": Label("Accuracy, shorter reply is right", _PERCENT, "low if it likes length"),
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
            "the line above, in standard deviations of the scores of one prompt's replies",
        ),
        "effect_of_100_characters": Label("Score per 100 characters", _SIGNED, "at equal rank and markdown"),
        "effect_of_headings": Label("Score per heading", _SIGNED, _COUNTED),
        "effect_of_list_items": Label("Score per list item", _SIGNED, _COUNTED),
        "effect_of_bold": Label("Score per bold text", _SIGNED, _COUNTED),
        "effect_of_code": Label("Score per piece of code", _SIGNED, _COUNTED),
        "effect_of_table_rows": Label("Score per table row", _SIGNED, _COUNTED),
        "more_markdown_is_right": Label("Better reply has more markdown", _PERCENT, "of the data, not of the model"),
        "accuracy_more_markdown_right": Label("Accuracy, more markdown is right", _PERCENT, "high if it likes it"),
        "accuracy_less_markdown_right": Label("Accuracy, less markdown is right", _PERCENT, "low if it likes it"),
        "accuracy_similar_markdown": Label("Accuracy, similar markdown", _PERCENT, "no help from markdown"),
        "style_controlled_accuracy": Label(
            "Style-controlled accuracy", _PERCENT, "mean of more right and less right; 50 % if it only likes markdown"
        ),
        # scores
        "score_mean": Label("Mean score", _NUMBER, "of all replies"),
        "score_std": Label("Standard deviation of the scores", _NUMBER, "of all replies"),
        "saturated": Label(
            "Saturated pairs", _PERCENT, "margin above 5 temperatures, right or wrong: as sure as 99.3 % or more"
        ),
        "saturated_wrong": Label(
            "Wrong pairs that are saturated", _PERCENT, "of the wrong ones, those that it is as sure of"
        ),
        "repeated_scores": Label("Repeated scores", _PERCENT, "replies whose exact score another text has too"),
        # checkpoints
        "shift": Label("Shift of the mean score", _SIGNED, "second less first"),
        "relative_shift": Label("Shift in standard deviations", _SIGNED, "in units of the first"),
        "scale_ratio": Label("Spread of the second by the first", _NUMBER, "1 is no change"),
        "rank_correlation": Label("Rank correlation", _SIGNED, "Spearman's, of the scores of all replies"),
        "correlation": Label("Correlation", _SIGNED, "Pearson's, of the scores of all replies"),
        "order_agreement": Label("Pairs that both order alike", _PERCENT, "of replies with different ranks"),
        "psi": Label(
            "Change of the distribution",
            _NUMBER,
            "how differently the scores are spread over ten bins (population stability index): below 0.1 small, above "
            "0.25 large",
        ),
        "shape_psi": Label("Change of its shape", _NUMBER, "the same, once both have mean 0 and deviation 1"),
        # rewrites
        "robust_accuracy": Label("Robust accuracy", _PERCENT, "right as it is and under every rewrite of style"),
        # overlap
        "flagged": Label("Exact or near duplicate", _PERCENT, "any of the kinds below"),
        "flagged_prompt": Label("Same prompt", _PERCENT, "word for word"),
        "flagged_conversation": Label("Same prompt with a reply", _PERCENT, "word for word"),
        "flagged_reply": Label("Same reply", _PERCENT, "word for word, if it is as long as a run of words"),
        "flagged_near_prompt": Label("Near duplicate of a prompt", _PERCENT, "most words are in runs of training"),
        "flagged_near_reply": Label("Near duplicate of a reply", _PERCENT, "most words are in runs of training"),
        "any_run": Label("Any run of words in common", _PERCENT, "says little by itself"),
        "accuracy_clean": Label("Accuracy without duplicates", _PERCENT, "to be quoted if the next is higher"),
        "accuracy_flagged": Label("Accuracy of the duplicates", _PERCENT, "may be learnt by heart"),
    }
)
"""By the name in `results.json`."""

# Of more models each one's own figures are a page of their own.
_MOST_OPEN = 3
_SHARED_PROMPTS = "The interval is over "
_TABLE_NOTE = "Ranges are 95 % intervals; where replies share prompts they allow for it."


def label_of(name: str) -> Label:
    """The label of a metric; of a name without one the name itself, as words and a plain number."""
    return LABELS.get(name) or Label(name.replace("_", " "), _NUMBER, "")


def accuracy_bars(
    title: str,
    model: str,
    items: Mapping[str, Metric],
    note: str | None = None,
    reference: float | None = 0.5,
    item_note: str | None = None,
) -> dict[str, Any]:
    """Accuracies by label as a `bars` block with one series, chance marked. `item_note`: of this model, at each bar."""
    return {
        "kind": "bars",
        "title": title,
        "note": note,
        "x_range": [0, 1],
        "reference": reference,
        "format": "percent",
        "series": [{"name": model, "items": [bar_item(label, metric, item_note) for label, metric in items.items()]}],
    }


def bar_item(label: str, metric: Metric, note: str | None = None) -> dict[str, Any]:
    """A metric as an item of a `bars` block."""
    item = {"label": label, "value": metric.value, "low": metric.low, "high": metric.high, "count": metric.count}
    return item if note is None else item | {"note": note}


def number_cell(metric: Metric) -> dict[str, Any]:
    """A metric as a cell of a table, written in its own format."""
    return bar_item("", metric) | {"format": label_of(metric.name).format}


def metrics_table(title: str, model: str, metrics: Sequence[Metric], note: str | None = None) -> dict[str, Any]:
    """Metrics as a `table` block: in words, the value with its interval, how it is read. `metric` is the raw name."""
    rows = []
    for metric in metrics:
        label = label_of(metric.name)
        own = _own_note(metric)
        how = "" if metric.value is None else label.explanation
        rows.append(
            {
                "metric": metric.name,
                "label": label.text,
                _column(model): number_cell(metric),
                "note": "; ".join(filter(None, (how, own))),
                "notes": {model: own},
            }
        )
    return {
        "kind": "table",
        "title": title,
        "note": " ".join(filter(None, (note, _TABLE_NOTE))),
        "columns": [
            {"key": "label", "label": "Number", "format": "text"},
            {"key": _column(model), "label": model, "format": "number"},
            {"key": "note", "label": "How to read it", "format": "text", "explains": "label"},
        ],
        "rows": rows,
    }


def side_by_side(models: Sequence[str], blocks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The blocks of several models as those of one report, in the order of the first model's.

    Bars, reliability diagrams and tables of metrics of one title become one with all models in it; what has no common
    axis stays apart, with the model in its title, and of more than three models folded. Of one model the blocks are as
    they are.
    """
    if len(models) == 1:
        return list(blocks[0])
    groups: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for model, own in zip(models, blocks, strict=True):
        for block in own:
            groups.setdefault((block["kind"], block.get("title", "")), []).append((model, block))
    merged = []
    for (kind, title), group in groups.items():
        first = group[0][1]
        if kind in ("bars", "reliability"):
            series = [one for _, block in group for one in block["series"]]
            merged.append(first | {"series": series} | _common_range([block for _, block in group]))
        elif kind == "table" and all("metric" in row for _, block in group for row in block["rows"]):
            merged.append(_one_table(group))
        else:
            folded = {"folded": True} if len(models) > _MOST_OPEN else {}
            merged += [block | {"title": f"{title}: {model}"} | folded for model, block in group]
    return merged


def _own_note(metric: Metric) -> str:
    """What is to be said of this number alone, to go on after a semicolon; on shared prompts the table has a note."""
    note = metric.note or ""
    if note.startswith(_SHARED_PROMPTS):
        return ""
    return note[0].lower() + note[1:-1] if note.endswith(".") else note


def _common_range(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ranges = [block["x_range"] for block in blocks if block.get("x_range")]
    return {"x_range": [min(low for low, _ in ranges), max(high for _, high in ranges)]} if ranges else {}


def _one_table(group: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    for model, block in group:
        for row in block["rows"]:
            kept = rows.setdefault(row["metric"], dict(row))
            kept[_column(model)] = row[_column(model)]
            kept["notes"] = kept["notes"] | row["notes"]
    for name, row in rows.items():
        said = set(row["notes"].values())
        own = [f"{model}: {note}" for model, note in row["notes"].items() if note] if len(said) > 1 else said
        row["note"] = "; ".join(filter(None, (label_of(name).explanation, *own)))
    label, _, note = group[0][1]["columns"]
    columns = [label, *({"key": _column(model), "label": model, "format": "number"} for model, _ in group), note]
    return group[0][1] | {"columns": columns, "rows": list(rows.values())}


def _column(model: str) -> str:
    """The key of a model's column, whatever the model is called."""
    return f"value of {model}"
