"""`diagnose_style`: how much of a reward model's score is the markdown of the completion.

    style = diagnose_style(scored)
    style.density_effect              # Metric: score per markdown mark in 100 words, at equal rank and length
    style.style_controlled_accuracy   # Metric: 0.5 for a model that always prefers the completion with more markdown

The effects are those of a regression within prompts (`treeward.evaluation.diagnostics.completions`), after the style
control of the Chatbot Arena (Li, Angelopoulos and Chiang 2024, "Does style matter?"), which regresses preferences on
length and counts of headings, lists and bold text. Marks inside a code block do not count, as there. The accuracies are
those where the better completion has more markdown for its length, less, or about as much.

RM-Bench sets the same completions in three styles against each other: `treeward.evaluation.suites.rmbench`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from treeward.evaluation.diagnostics.blocks import bar_item, bars_block
from treeward.evaluation.diagnostics.completions import (
    collect_completions,
    collect_pairs,
    completion_text,
    in_standard_deviations,
    regress_within_prompts,
)
from treeward.evaluation.diagnostics.strata import left_out_note, stratify
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Diagnostic

__all__ = ["MarkdownCounts", "count_markdown", "diagnose_style"]

_STRATA_NAMES = (
    "more_markdown_is_right",
    "accuracy_more_markdown_right",
    "accuracy_less_markdown_right",
    "accuracy_similar_markdown",
    "markdown_gap",
    "style_controlled_accuracy",
)
_KINDS = ("headings", "list_items", "bold", "code", "table_rows")

_FENCED = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+\S", re.MULTILINE)
_LIST_ITEM = re.compile(r"^[ \t]*(?:[-*+]|\d{1,3}[.)])[ \t]+\S", re.MULTILINE)
_BOLD = re.compile(r"\*\*(?=\S)[^\n]+?(?<=\S)\*\*|(?<!\w)__(?=\S)[^\n]+?(?<=\S)__(?!\w)")
_INLINE_CODE = re.compile(r"`[^`\n]+`")
_TABLE_ROW = re.compile(r"^[ \t]*\|.+\|[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MarkdownCounts:
    """The markdown of a text; `code`: code blocks and inline code; `density`: all marks per 100 words."""

    headings: int
    list_items: int
    bold: int
    code: int
    table_rows: int
    density: float


def diagnose_style(scored: Sequence[ScoredExample], model: str = "model") -> Diagnostic:
    """The style diagnostics of scored examples; `effect_of_...` are score per mark, all kinds fitted together."""
    counts = {
        (i, j): count_markdown(completion_text(completion))
        for i, one in enumerate(scored)
        for j, completion in enumerate(one.example.completions)
    }
    completions, pairs = collect_completions(scored), collect_pairs(scored)
    own = [counts[key] for key in zip(completions.examples.tolist(), completions.completions.tolist(), strict=True)]
    fixed = np.column_stack([completions.places, completions.lengths / 100])
    densities = np.array([one.density for one in own], np.float64)
    density, *_ = regress_within_prompts(
        completions.scores,
        np.column_stack([densities, fixed]),
        completions.prompts,
        ["density_effect", "place", "length"],
    )
    marks = np.array([[getattr(one, kind) for kind in _KINDS] for one in own], np.float64).reshape(-1, len(_KINDS))
    names = ["place", "effect_of_100_characters", *(f"effect_of_{kind}" for kind in _KINDS)]
    _, *effects = regress_within_prompts(
        completions.scores, np.column_stack([fixed, marks]), completions.prompts, names
    )
    better, worse = (
        np.array([counts[i, int(j)].density for i, j in zip(pairs.examples.tolist(), side, strict=True)], np.float64)
        for side in pairs.sides.T
    )
    strata = stratify(pairs, better, worse, _STRATA_NAMES)
    relative = in_standard_deviations(density, completions, "relative_density_effect")
    shown = {
        "More markdown is right": strata["accuracy_more_markdown_right"],
        "Less markdown is right": strata["accuracy_less_markdown_right"],
        "About as much": strata["accuracy_similar_markdown"],
        "Style-controlled": strata["style_controlled_accuracy"],
    }
    left_out = left_out_note(pairs.num_failed)
    bars = bars_block(
        "Accuracy by which completion has more markdown",
        model,
        [bar_item(label, metric, left_out) for label, metric in shown.items()],
        "Without a bias the first two are alike; a model that only likes markdown has 100 %, 0 % and 50 %. "
        "Style-controlled is their mean. Each n counts pairs of completions that both have a score.",
    )
    numbers = {metric.name: metric for metric in (density, relative, *effects)} | strata
    return Diagnostic(numbers, (bars,), pairs.num_failed)


def count_markdown(text: str) -> MarkdownCounts:
    """Count the markdown of a text."""
    prose, num_blocks = _FENCED.subn(" ", text)
    headings, items = len(_HEADING.findall(prose)), len(_LIST_ITEM.findall(prose))
    bold, rows = len(_BOLD.findall(prose)), len(_TABLE_ROW.findall(prose))
    code = num_blocks + len(_INLINE_CODE.findall(prose))
    words = max(1, len(text.split()))
    return MarkdownCounts(headings, items, bold, code, rows, 100 * (headings + items + bold + code + rows) / words)
