"""`diagnose_style`: how much of a reward model's score is the dress of the reply.

    style = diagnose_style(scored)
    style.density_effect              # Metric: score per markdown mark in 100 words, at equal rank and length
    style.style_controlled_accuracy   # Metric: 0.5 for a model that always prefers the reply with more markdown
    style.metrics(), style.blocks("my-model")

The effects are those of a regression within prompts (`treeward.evaluation.diagnostics.replies`), after the style
control of the Chatbot Arena (Li, Angelopoulos and Chiang 2024, "Does style matter?"), which regresses preferences on
length and counts of headings, lists and bold text. What stands in a code block is no markdown here, as there.

RM-Bench sets the same replies in three styles against each other: `treeward.evaluation.suites.rmbench`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treeward.evaluation.diagnostics.blocks import accuracy_bars, metrics_table
from treeward.evaluation.diagnostics.replies import (
    collect_pairs,
    collect_replies,
    in_standard_deviations,
    regress_within_prompts,
    reply_text,
)
from treeward.evaluation.diagnostics.strata import left_out_note, stratify
from treeward.evaluation.examples import ScoredExample
from treeward.evaluation.results import Metric

__all__ = ["MarkdownCounts", "StyleDiagnostics", "count_markdown", "diagnose_style"]

_FENCED = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+\S", re.MULTILINE)
_LIST_ITEM = re.compile(r"^[ \t]*(?:[-*+]|\d{1,3}[.)])[ \t]+\S", re.MULTILINE)
_BOLD = re.compile(r"\*\*(?=\S)[^\n]+?(?<=\S)\*\*|(?<!\w)__(?=\S)[^\n]+?(?<=\S)__(?!\w)")
_INLINE_CODE = re.compile(r"`[^`\n]+`")
_TABLE_ROW = re.compile(r"^[ \t]*\|.+\|[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class MarkdownCounts:
    """What of markdown a text has; `code`: code blocks and inline code; `density`: all marks per 100 words."""

    headings: int
    list_items: int
    bold: int
    code: int
    table_rows: int
    density: float


@dataclass(frozen=True, slots=True)
class StyleDiagnostics:
    """Markdown and score.

    `density_effect`: score per markdown mark in 100 words; `relative_density_effect`: the same in standard deviations
    of the scores within a prompt; `effects`: score per 100 characters, heading, list item, bold text, code and table
    row, all of them together. Rank, and for density the length too, are held fixed. The accuracies are those where the
    better reply has more markdown for its length, less, or about as much; `style_controlled_accuracy` is the mean of
    the first two. They are of scored pairs; `num_left_out` others are not in them.
    """

    density_effect: Metric
    relative_density_effect: Metric
    effects: tuple[Metric, ...]
    more_markdown_is_right: Metric
    accuracy_more_markdown_right: Metric
    accuracy_less_markdown_right: Metric
    accuracy_similar_markdown: Metric
    style_controlled_accuracy: Metric
    num_left_out: int

    def metrics(self) -> tuple[Metric, ...]:
        """All numbers, in the order of the fields."""
        values = [getattr(self, name) for name in self.__slots__]
        flat = (m for value in values for m in (value if isinstance(value, tuple) else (value,)))
        return tuple(m for m in flat if isinstance(m, Metric))

    def blocks(self, model: str = "model") -> list[dict[str, Any]]:
        """The blocks of a report: strata, table."""
        strata = {
            "More markdown is right": self.accuracy_more_markdown_right,
            "Less markdown is right": self.accuracy_less_markdown_right,
            "About as much": self.accuracy_similar_markdown,
            "Style-controlled": self.style_controlled_accuracy,
        }
        note = (
            "Without a bias the first two are alike; a model that only likes markdown has 100 %, 0 % and 50 %. "
            "Style-controlled is their mean. Each n counts pairs of replies that both have a score."
        )
        how = (
            "These compare replies as the data have them, with their own few marks. What markdown does that is put "
            "into a reply which has none is another question, answered by rewrites (with --perturbations): where the "
            "two differ, a policy will meet the rewrites' answer."
        )
        return [
            accuracy_bars(
                "Accuracy by which reply has more markdown",
                model,
                strata,
                note,
                item_note=left_out_note(self.num_left_out),
            ),
            metrics_table("Style in numbers", model, self.metrics(), how),
        ]


def diagnose_style(scored: Sequence[ScoredExample]) -> StyleDiagnostics:
    """The style diagnostics of scored examples."""
    counts = {
        (i, j): count_markdown(reply_text(completion))
        for i, one in enumerate(scored)
        for j, completion in enumerate(one.example.completions)
    }
    replies, pairs = collect_replies(scored), collect_pairs(scored)
    of_replies = [counts[i, j] for i, j in zip(replies.examples.tolist(), replies.completions.tolist(), strict=True)]
    fixed = np.column_stack([replies.places, replies.lengths / 100])
    density, *_ = regress_within_prompts(
        replies.scores,
        np.column_stack([np.array([c.density for c in of_replies]), fixed]),
        replies.prompts,
        ["density_effect", "place", "length"],
    )
    kinds = ("headings", "list_items", "bold", "code", "table_rows")
    table = np.array([[getattr(c, kind) for kind in kinds] for c in of_replies], dtype=np.float64).reshape(
        -1, len(kinds)
    )
    names = ["place", "effect_of_100_characters", *(f"effect_of_{kind}" for kind in kinds)]
    _, *effects = regress_within_prompts(replies.scores, np.column_stack([fixed, table]), replies.prompts, names)
    better, worse = (
        np.array([counts[i, int(j)].density for i, j in zip(pairs.examples.tolist(), side, strict=True)], np.float64)
        for side in pairs.sides.T
    )
    strata = stratify(pairs, better, worse)
    return StyleDiagnostics(
        density_effect=density,
        relative_density_effect=in_standard_deviations(density, replies, "relative_density_effect"),
        effects=tuple(effects),
        more_markdown_is_right=replace(strata.share_more, name="more_markdown_is_right"),
        accuracy_more_markdown_right=replace(strata.better_has_more, name="accuracy_more_markdown_right"),
        accuracy_less_markdown_right=replace(strata.better_has_less, name="accuracy_less_markdown_right"),
        accuracy_similar_markdown=replace(strata.similar, name="accuracy_similar_markdown"),
        style_controlled_accuracy=replace(strata.controlled, name="style_controlled_accuracy"),
        num_left_out=strata.num_left_out,
    )


def count_markdown(text: str) -> MarkdownCounts:
    """Count the markdown of a text."""
    prose, num_blocks = _FENCED.subn(" ", text)
    headings, items = len(_HEADING.findall(prose)), len(_LIST_ITEM.findall(prose))
    bold, rows = len(_BOLD.findall(prose)), len(_TABLE_ROW.findall(prose))
    code = num_blocks + len(_INLINE_CODE.findall(prose))
    words = max(1, len(text.split()))
    return MarkdownCounts(headings, items, bold, code, rows, 100 * (headings + items + bold + code + rows) / words)
