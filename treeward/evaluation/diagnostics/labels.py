"""The label of every number of a report, and the table that shows them.

metrics_table("Length in numbers", {"my-model": length.metrics()})     # {"kind": "table", ...}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from treeward.evaluation.report.blocks import bar_item, table_block
from treeward.evaluation.results import Block, Metric

__all__ = ["LABELS", "metrics_table"]

_COUNTED = "at equal rank and length, the other marks held fixed"

LABELS: Mapping[str, tuple[str, str, str]] = {
    # of any comparisons
    "accuracy": ("Accuracy", "percent", "pairs in the right order; ties and missing scores count as wrong"),
    "pair_accuracy": ("Pairs in the right order", "percent", "ties and missing scores count as wrong"),
    "ties": ("Ties", "percent", "pairs whose two scores are the same"),
    "auroc": ("AUROC", "number", "how often a best completion outscores any other of any prompt: 0.5 is chance"),
    "kendall_tau": ("Kendall's tau", "signed", "order of three completions or more: 1 right, 0 random, -1 reversed"),
    "ece": ("Calibration error (ECE)", "percent", "mean distance of sigmoid(margin) from how often it holds"),
    "ece_fitted": ("Calibration error, rescaled", "percent", "the same, with margins divided by the temperature"),
    "brier": ("Brier score", "number", "squared error of sigmoid(margin): 0 is perfect, 0.25 a coin"),
    "temperature": ("Fitted temperature", "number", "above 1 the margins are overconfident, below 1 underconfident"),
    "worst_subset": ("Worst subset", "percent", "the lowest accuracy of all subsets"),
    # length
    "pearson": ("Correlation of score and length", "signed", "Pearson's, over completions of all prompts"),
    "spearman": ("Rank correlation of score and length", "signed", "Spearman's, over completions of all prompts"),
    "slope": ("Score per 100 characters", "signed", "within prompts; better completions may be longer, too"),
    "slope_given_rank": ("Score per 100 characters, quality held fixed", "signed", "the length bias: 0 is fair"),
    "relative_slope": ("Length bias in standard deviations", "signed", "of the scores of one prompt's completions"),
    "longer_is_right": ("Better completion is the longer", "percent", "of the data alone"),
    "accuracy_longer_right": ("Accuracy, longer completion is right", "percent", "high if it likes length"),
    "accuracy_shorter_right": ("Accuracy, shorter completion is right", "percent", "low if it likes length"),
    "accuracy_similar_length": ("Accuracy, similar lengths", "percent", "within 10 %: no help from length"),
    "accuracy_gap": ("Length gap in accuracy", "points", "longer right less shorter right: 0 is fair"),
    "length_controlled_accuracy": ("Length-controlled accuracy", "percent", "mean of both: 50 % for this liking alone"),
    # style
    "density_effect": ("Score per markdown mark in 100 words", "signed", "at equal rank and length; 0 is fair"),
    "relative_density_effect": ("Markdown bias in standard deviations", "signed", "of scores of the same prompt"),
    "effect_of_100_characters": ("Score per 100 characters", "signed", "at equal rank and markdown"),
    "effect_of_headings": ("Score per heading", "signed", _COUNTED),
    "effect_of_list_items": ("Score per list item", "signed", _COUNTED),
    "effect_of_bold": ("Score per bold text", "signed", _COUNTED),
    "effect_of_code": ("Score per piece of code", "signed", _COUNTED),
    "effect_of_table_rows": ("Score per table row", "signed", _COUNTED),
    "more_markdown_is_right": ("Better completion has more markdown", "percent", "of the data, not of the model"),
    "accuracy_more_markdown_right": ("Accuracy, more markdown is right", "percent", "high if it likes it"),
    "accuracy_less_markdown_right": ("Accuracy, less markdown is right", "percent", "low if it likes it"),
    "accuracy_similar_markdown": ("Accuracy, similar markdown", "percent", "no help from markdown"),
    "markdown_gap": ("Markdown gap in accuracy", "points", "more right less less right: 0 is fair"),
    "style_controlled_accuracy": ("Style-controlled accuracy", "percent", "mean of both: 50 % for this liking alone"),
    # scores
    "score_mean": ("Mean score", "number", "of all completions"),
    "score_std": ("Standard deviation of the scores", "number", "of all completions"),
    "saturated": ("Saturated pairs", "percent", "margin above 5 temperatures, as sure as 99.3 % or more"),
    "saturated_wrong": ("Wrong pairs that are saturated", "percent", "of the wrong pairs"),
    # rewrites
    "robust_accuracy": ("Robust accuracy", "percent", "right before and after every rewrite of style"),
    # overlap
    "flagged": ("Exact or near duplicate", "percent", "any of the kinds below"),
    "flagged_prompt": ("Same prompt", "percent", "word for word"),
    "flagged_conversation": ("Same prompt with a completion", "percent", "word for word"),
    "flagged_completion": ("Same completion", "percent", "word for word, if it is as long as a run of words"),
    "flagged_near_prompt": ("Near duplicate of a prompt", "percent", "most words are in common runs"),
    "flagged_near_completion": ("Near duplicate of a completion", "percent", "most words are in common runs"),
}
"""By the name in `results.json`: the name in a report, the format, and how to read it."""

_SHARED_PROMPTS = "The interval is over "
_TABLE_NOTE = "Ranges are 95 % intervals; they allow for completions that share a prompt."


def metrics_table(title: str, metrics: Mapping[str, Sequence[Metric]], note: str | None = None) -> Block:
    """The metrics of each model as a `table` block: label, a column of values for each model, how to read them."""
    by_name: dict[str, dict[str, Metric]] = {}
    for model, own in metrics.items():
        for metric in own:
            by_name.setdefault(metric.name, {})[model] = metric
    columns = {"label": ("Number", "text")} | {f"value of {model}": (model, "number") for model in metrics}
    rows = [_row(name, of_models) for name, of_models in by_name.items()]
    block = table_block(title, columns, rows, " ".join(filter(None, (note, _TABLE_NOTE))))
    how = {"key": "note", "label": "How to read it", "format": "text", "explains": "label"}
    return block | {"columns": [*block["columns"], how]}


def _row(name: str, of_models: Mapping[str, Metric]) -> Block:
    label, form, explanation = LABELS[name]
    notes = {model: _own_note(metric) for model, metric in of_models.items()}
    own = [f"{model}: {note}" for model, note in notes.items() if note]
    own = own if len(set(notes.values())) > 1 else [next(iter(notes.values()))]
    how = explanation if any(metric.value is not None for metric in of_models.values()) else ""
    cells = {f"value of {model}": bar_item("", metric) | {"format": form} for model, metric in of_models.items()}
    return {"metric": name, "label": label, **cells, "note": "; ".join(filter(None, (how, *own)))}


def _own_note(metric: Metric) -> str:
    """The note of this number alone, to go on after a semicolon; the table has the note on shared prompts."""
    note = metric.note or ""
    if note.startswith(_SHARED_PROMPTS):
        return ""
    return note[0].lower() + note[1:-1] if note.endswith(".") else note
