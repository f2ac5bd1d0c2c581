"""The table of examples: rows of `examples.jsonl` as `page.html` shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from treeward.evaluation.report.blocks import ABSENT, is_number

OUTCOMES = {"wrong": "✗ wrong", "tie": "= tie", "right": "✓ right", "failed": "! failed", "none": "· no order"}
"""The outcomes of an example in the order of the table, and how they are shown."""


def example_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows as the page's table shows them; `share` is the size of the margin, the widest of all being 1."""
    widest = max((abs(row["margin"]) for row in rows if is_number(row.get("margin"))), default=1.0) or 1.0
    shown_rows = []
    for row in rows:
        margin, outcome = row.get("margin"), row.get("outcome") or "none"
        shown = {key: ABSENT if row.get(key) is None else str(row[key]) for key in ("id", "subset", "model")}
        shown_rows.append(shown | {
            "outcome": outcome, "rank": list(OUTCOMES).index(outcome),
            "margin": margin, "share": abs(margin or 0.0) / widest,
            "context": messages(row.get("context")), "prompt": prompt_text(row.get("context")),
            "completions": _completions(row),
        })  # fmt: skip
    return shown_rows


def messages(value: Any) -> list[dict[str, str]]:
    """Messages as role and text, whatever their content is."""
    return [
        {"role": "", "text": message} if isinstance(message, str) else
        {"role": str(message.get("role") or ""), "text": _text(message.get("content"))}
        for message in ([value] if isinstance(value, str) else value or [])
    ]  # fmt: skip


def prompt_text(context: Any) -> str:
    """The last message of the user, or the last of all."""
    shown = messages(context)
    last = shown[-1]["text"] if shown else ""
    return next((message["text"] for message in reversed(shown) if message["role"] == "user"), last)


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(
            part if isinstance(part, str) else str(part.get("text") or json.dumps(part)) for part in content
        )
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)


def _completions(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The completions by rank, each with its name, whether it is better, and its numbers."""
    ranks = row.get("ranks") or []
    distinct = sorted(set(ranks))
    highest = max((score for score in row.get("scores") or () if score is not None), default=None)
    columns = (row.get(name) or () for name in ("completions", "scores", "lengths", "num_tokens", "errors"))
    shown = []
    for i, (completion, score, length, num_tokens, error) in enumerate(zip_longest(*columns)):
        place = distinct.index(ranks[i]) if i < len(ranks) and len(distinct) > 1 else None
        name = "Tied" if len(ranks) > 1 else "Completion"
        if place is not None:
            name = "Worse completion" if place else "Better completion"
            name = f"Rank {place + 1} of {len(distinct)}" if len(distinct) > 2 else name
        shown.append({
            "name": name, "is_better": place == 0, "place": place or 0, "score": score, "length": length,
            "is_chosen": len(ranks) > 1 and score is not None and score == highest, "num_tokens": num_tokens,
            "error": error, "messages": messages(completion),
        })  # fmt: skip
    return sorted(shown, key=lambda completion: completion["place"])
