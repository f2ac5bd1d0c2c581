"""The table of examples: rows of `examples.jsonl` as `page.html` shows them, and what they can be filtered by."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treeward.evaluation.report.blocks import ABSENT, is_number

__all__ = ["OUTCOMES", "example_rows", "filters", "messages", "prompt_text"]

OUTCOMES = {"wrong": "✗ wrong", "tie": "= tie", "right": "✓ right", "failed": "! failed", "none": "· no order"}
"""The outcomes of an example in the order of the table, and how they are shown."""


def example_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows as the page's table shows them; `share` is the size of the margin, the widest of all being 1."""
    widest = max((abs(row["margin"]) for row in rows if is_number(row.get("margin"))), default=1.0) or 1.0
    # An example is disputed where one model has it right and another has not, though both have scored it.
    scored = {(str(row.get("id")), row["outcome"] == "right")
              for row in rows if row.get("outcome") not in ("failed", None)}  # fmt: skip
    disputed = {id for id, count in Counter(id for id, _ in scored).items() if count > 1}
    found = []
    for row in rows:
        gap, margin, outcome = _length_gap(row), row.get("margin"), row.get("outcome") or "none"
        shown = {key: ABSENT if row.get(key) is None else str(row[key]) for key in ("id", "subset", "model")}
        found.append(shown | {
            "outcome": outcome, "rank": list(OUTCOMES).index(outcome),
            "margin": margin, "share": abs(margin or 0.0) / widest,
            "gap": gap, "shown_gap": ABSENT if gap is None else f"{gap:+,.0f}".replace("-", "\N{MINUS SIGN}"),
            "models": "disagree" if str(row.get("id")) in disputed else "agree",
            "context": messages(row.get("context")), "prompt": prompt_text(row.get("context")),
            "completions": _completions(row),
        })  # fmt: skip
    return found


def filters(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What shown rows can be narrowed to: a label, the key of the rows, and values with how many rows each has."""
    found = []
    for label, key in (("Outcome", "outcome"), ("Subset", "subset"), ("Model", "model"), ("Models", "models")):
        counts = Counter(row[key] for row in rows)
        order = [name for name in OUTCOMES if name in counts] if key == "outcome" else sorted(counts)
        if key == "models":  # the number is of examples
            counts = Counter({"disagree": len({row["id"] for row in rows if row[key] == "disagree"})})
            order = [*+counts]
        if len(order) > (key != "models"):
            names = OUTCOMES | {"disagree": "models disagree"}
            options = [{"value": one, "label": names.get(one, one), "count": counts[one]} for one in order]
            found.append({"label": label, "key": key, "options": options})
    return found


def messages(value: Any) -> list[dict[str, str]]:
    """Messages as role and text, whatever their content is."""
    given = [value] if isinstance(value, str) else value or []
    return [
        {"role": "", "text": one} if isinstance(one, str) else
        {"role": str(one.get("role") or ""), "text": _text(one.get("content"))}
        for one in given
    ]  # fmt: skip


def prompt_text(context: Any) -> str:
    """The last message of the user, or the last of all."""
    told = messages(context)
    return next((one["text"] for one in reversed(told) if one["role"] == "user"), told[-1]["text"] if told else "")


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(
            part if isinstance(part, str) else str(part.get("text") or json.dumps(part)) for part in content
        )
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)


def _length_gap(row: Mapping[str, Any]) -> float | None:
    """Characters that the best-ranked completions have more than the others, on average."""
    ranks, lengths = np.array(row.get("ranks") or []), np.array(row.get("lengths") or [])
    if len(ranks) != len(lengths) or len(set(ranks.tolist())) < 2:
        return None
    best = ranks == ranks.min()
    return float(np.round(lengths[best].mean() - lengths[~best].mean()))


def _completions(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The completions by rank, each with its name, whether it is better, and its numbers."""
    given = row.get("completions") or []
    num = len(given)
    ranks, scores, lengths, tokens, errors = (
        [*(row.get(name) or []), *[None] * num][:num] for name in ("ranks", "scores", "lengths", "num_tokens", "errors")
    )
    distinct = sorted(set(ranks) - {None})
    known = [score for score in scores if score is not None]
    found = []
    for i in sorted(range(num), key=lambda i: (ranks[i] is not None, ranks[i])):
        if len(distinct) < 2:
            name = "Tied" if num > 1 else "Completion"
        elif len(distinct) == 2:
            name = "Better completion" if ranks[i] == distinct[0] else "Worse completion"
        else:
            name = f"Rank {distinct.index(ranks[i]) + 1} of {len(distinct)}"
        found.append({
            "name": name, "is_better": len(distinct) > 1 and ranks[i] == distinct[0],
            "is_chosen": num > 1 and scores[i] is not None and scores[i] == max(known), "score": scores[i],
            "length": lengths[i], "num_tokens": tokens[i], "error": errors[i], "messages": messages(given[i]),
        })  # fmt: skip
    return found
