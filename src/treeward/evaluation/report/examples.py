"""The examples behind a report's numbers, as its table shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from treeward.data.conversation import Message, last_text
from treeward.evaluation.report.intervals import is_number
from treeward.formatting import ABSENT

OUTCOMES = {
    "wrong": "✗ wrong",
    "tie": "= tie",
    "right": "✓ correct",
    "failed": "! failed",
    "none": "· no order",
}
"""The outcomes of an example in the order of the table, and how they are shown."""


def example_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `examples.jsonl` with a `model`, as the table shows them.

    `share`: the size of a row's margin over that of the widest, for the bar beside it. `rank`: the
    order of its outcome.
    """
    widest = 0.0
    for row in rows:
        # An example without scores has no margin.
        if is_number(row.get("margin")):
            widest = max(widest, abs(row["margin"]))
    order = list(OUTCOMES)
    shown_rows = []
    for row in rows:
        outcome = row.get("outcome") or "none"
        margin = row.get("margin")
        shown = {
            "outcome": outcome,
            "rank": order.index(outcome),
            "margin": margin,
            "share": abs(margin) / widest if margin else 0.0,
            "context": messages(row.get("context")),
            "prompt": prompt_text(row.get("context")),
            "completions": _completions(row),
        }
        for key in ("id", "subset", "model"):
            shown[key] = ABSENT if row.get(key) is None else str(row[key])
        shown_rows.append(shown)
    return shown_rows


def messages(value: Sequence[Message] | None) -> list[dict[str, str]]:
    """Messages as role and text; the calls of tools, which are no text, as JSON below it."""
    shown = []
    for message in value or ():
        lines = [last_text([message])]
        if message.get("tool_calls"):
            lines.append(json.dumps(message["tool_calls"], ensure_ascii=False))
        shown.append({"role": message.get("role", ""), "text": "\n".join(filter(None, lines))})
    return shown


def prompt_text(context: Sequence[Message] | None) -> str:
    """The last message of the user, or the last of all."""
    shown = messages(context)
    for message in reversed(shown):
        if message["role"] == "user":
            return message["text"]
    return shown[-1]["text"] if shown else ""


def _completions(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The completions by rank, each with its name, whether it is better, and its numbers."""
    ranks = row.get("ranks") or []
    distinct_ranks = sorted(set(ranks))
    known_scores = [score for score in row.get("scores") or () if score is not None]
    highest = max(known_scores, default=None)
    columns = []
    for name in ("completions", "scores", "lengths", "num_tokens", "errors", "steps"):
        columns.append(row.get(name) or ())
    shown = []
    # `zip_longest`, because a row may lack a column.
    by_completion = enumerate(zip_longest(*columns))
    for i, (completion, score, length, num_tokens, error, steps) in by_completion:
        place = 0
        is_better = False
        name = "Tied" if len(ranks) > 1 else "Completion"
        if i < len(ranks) and len(distinct_ranks) > 1:
            # Ranks of a row need not be 0, 1, 2: two of them may be 1 and 5.
            place = distinct_ranks.index(ranks[i])
            is_better = place == 0
            if len(distinct_ranks) > 2:
                name = f"Rank {place + 1} of {len(distinct_ranks)}"
            else:
                name = "Better completion" if is_better else "Worse completion"
        shown.append(
            {
                "name": name,
                "is_better": is_better,
                "place": place,
                "score": score,
                "length": length,
                "is_chosen": len(ranks) > 1 and score is not None and score == highest,
                "num_tokens": num_tokens,
                "error": error,
                "steps": steps or (),
                "messages": messages(completion),
            }
        )
    # The better one stands at the left, whatever the order in the file.
    return sorted(shown, key=lambda completion: completion["place"])
