"""The results of best-of-n for people, of one proxy or of several: a table, sentences, JSON, and the report.

write_table(*table(results))                               # {name of the proxy: BestOfN}
print(legend("gold"), *sentences(results))
write(folder, results, "gold", "samples.jsonl")
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from treeward.errors import DataError
from treeward.evaluation.best_of_n.analysis import BestOfN
from treeward.evaluation.report.blocks import bar_item, table_block
from treeward.evaluation.report.build import write_report
from treeward.evaluation.results import Block
from treeward.storage import write_text
from treeward.tables import Column

_IN_SD = "in standard deviations within a prompt"
_DASHED = 1
_COLUMNS = {
    "name": ("proxy", "text", None),
    "n": ("n", "integer", None),
    "kl": ("KL, nats", "number", ".3f"),
    "proxy": ("by the proxy", "number", None),
    "gold": ("gold", "number", None),
    "low": ("95 % from", "number", None),
    "high": ("to", "number", None),
    "best": ("best gold", "number", None),
    "regret": ("regret", "number", None),
    "normalised_regret": ("lost of possible", "percent", ".1%"),
}
"""The columns of the table: the heading, the format in the report, and the format on a terminal."""

Results = Mapping[str, BestOfN]
"""The result of each proxy, by its name."""


def write(folder: Path, results: Results, gold: str, data: str) -> Path:
    """Write `bon.json` and the report; returns the report's path. `gold`: its name; `data`: that of the samples' file.

    Raises `DataError` where they cannot be written.
    """
    every = [{"proxy": name} | to_json(result) for name, result in results.items()]
    content = {"gold": gold, "data": data} | (every[0] if len(every) == 1 else {"proxies": every})
    title = next(iter(results)) if len(results) == 1 else f"{len(results)} proxies"
    try:
        write_text(folder / "bon.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
        about = f"gold: {gold}; samples: {data}"
        return write_report(folder, f"Best of n: {title}", blocks(results, gold), {}, subtitle=about)
    except OSError as error:
        need = "a folder that can be written"
        raise DataError("the result cannot be written", where=str(folder), got=str(error), need=need) from error


def to_json(result: BestOfN) -> dict[str, Any]:
    """Every number, as JSON has them."""
    content = asdict(result)
    return {"n": content.pop("sizes"), **content}


def table(results: Results) -> tuple[list[dict[str, Any]], list[Column]]:
    """A row for n = 1, 2, 4, ... and the largest n, of each proxy in turn."""
    rows = []
    for i, n in enumerate(next(iter(results.values())).sizes):
        for name, result in results.items():
            if n & (n - 1) == 0 or n == result.max_n:
                values = {key: curve.mean[i] for key, curve in result.curves.items()}
                ends = {"low": result.curves["gold"].low[i], "high": result.curves["gold"].high[i]}
                rows.append({"name": name, "n": n, "kl": result.kl[i], **values, **ends})
    shown = {key: one for key, one in _COLUMNS.items() if key != "name" or len(results) > 1}
    return rows, [Column(key, title, form) for key, (title, _, form) in shown.items()]


def legend(gold: str) -> str:
    """What the columns of the table mean, and how the gold of that name is counted: for below a table."""
    of_ranks = " Gold is the rank with the other sign, so that higher is better: 0 for rank 0, the best, -1 for rank 1."
    return (
        "KL, in nats, is how far choosing among n is from one sample. Regret is the best gold less the gold of the "
        "choice; lost of possible is its part of what choosing could gain: 0 % by gold, 100 % at random."
        f"{of_ranks if gold == 'rank' else ''}"
    )


def sentences(results: Results) -> list[str]:
    """The verdict on each proxy; before them, of several, whether each helps beside the first."""
    (first, only), *others = results.items()
    if not others:
        return [only.verdict.sentence]
    helps = [_helps(name, result, first) for name, result in others]
    return [*helps, *(f"{name}: {result.verdict.sentence}" for name, result in results.items())]


def _helps(name: str, result: BestOfN, first: str) -> str:
    difference = result.difference
    assert difference is not None and difference.value is not None
    said = f"gold at n = {result.max_n} less that of {first} is {difference.value:+.3g}"
    if difference.low is None or difference.high is None:
        return f"{name}: {said}."
    verb = "helps" if difference.low > 0 else "harms" if difference.high < 0 else "is not shown to differ"
    return f"{name} {verb}: {said} ({difference.low:+.3g} to {difference.high:+.3g})."


# --- the report ------------------------------------------------------------------------------------------------------


def blocks(results: Results, gold: str) -> list[Block]:
    """Blocks of the report; `gold` is the name of what scored it."""
    gains: list[Block] = []
    for colour, (name, result) in enumerate(results.items()):
        gains.append(_series(result, "gold_gain", f"{name}: gold", colour=colour))
        gains.append(_series(result, "proxy_gain", f"{name}: by itself", colour=colour, dash=_DASHED, dots=False))
    first = next(iter(results.values()))
    gains.append(_series(first, "best_gain", "best possible gold", colour=len(results)))
    note = (
        f"Gain over one sample, {_IN_SD}, of what a proxy chooses among n: by gold and (dashed) by itself, and what "
        "choosing by gold would reach (what gold lacks of that is the regret). Where gold falls while the proxy rises, "
        "the proxy is being exploited."
    )
    rows, columns = table(results)
    shown = {one.key: _COLUMNS[one.key][:2] for one in columns}
    return [
        {"kind": "text", "title": "Best of n", "markdown": _introduction(results, gold)},
        {"kind": "headline", "items": _headline(results)},
        _curves(first, note, gains),
        table_block("Best of n in numbers", shown, rows, legend(gold)),
    ]


def _introduction(results: Results, gold: str) -> str:
    result = next(iter(results.values()))
    missing = {
        "num_without_proxy": "samples without a proxy score",
        "num_without_gold": "samples without a gold score",
        "num_prompts_with_fewer_samples": f"prompts with fewer than {result.max_n} scored samples",
    }
    counts = result.counts
    left_out = ", ".join(f"{counts[key]:,} {what}" for key, what in missing.items() if counts[key])
    samples = f"Samples: {counts['num_samples']:,}, of {counts['num_prompts']:,} prompts; gold is `{gold}`."
    return "\n\n".join([*sentences(results), samples + (f" Left out: {left_out}." if left_out else "")])


def _headline(results: Results) -> list[Block]:
    items = []
    for name, result in results.items():
        n, prefix = result.max_n, f"{name}: " if len(results) > 1 else ""
        lost, of_lost = result.at("normalised_regret", n), "0 % by gold, 100 % at random"
        items += [
            bar_item(f"{prefix}gold gained at n = {n}", result.at("gold_gain", n), _IN_SD) | {"format": "signed"},
            bar_item(f"{prefix}lost of what was possible", lost, of_lost) | {"format": "percent"},
            bar_item(f"{prefix}correlation with gold", result.correlation, "within prompts") | {"format": "signed"},
        ]
    return items


def _series(result: BestOfN, key: str, name: str, **look: Any) -> Block:
    """One curve over the square root of KL; `look`: its colour, dash and dots."""
    curve, labels = result.curves[key], [f"n = {n:,}" for n in result.sizes]
    ends = {"low": list(curve.low), "high": list(curve.high)}
    return {"name": name, "x": np.sqrt(result.kl).tolist(), "y": list(curve.mean), "labels": labels, **ends, **look}


def _curves(result: BestOfN, note: str, series: Sequence[Block]) -> Block:
    roots = zip(result.sizes, np.sqrt(result.kl).tolist(), strict=True)
    named = [(n, x) for n, x in roots if n == result.max_n or (n & (n - 1) == 0 and 3 * n <= 2 * result.max_n)]
    return {
        "kind": "curves",
        "title": "Over-optimisation",
        "note": note,
        "x_label": "n, spaced by the square root of KL(n)",
        "x_ticks": [{"x": x, "label": f"{n:,}"} for n, x in named],
        "y_label": "standard deviations",
        "series": list(series),
    }
