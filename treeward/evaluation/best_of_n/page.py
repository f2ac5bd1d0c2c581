"""The results of best-of-n for people, of one proxy or of several: a table, sentences, JSON, and the report.

print(results_table(*table(results)))                      # {name of the proxy: BestOfN}
print(legend("gold"), *sentences(results))
write(folder, results, "gold", "samples.jsonl")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from treeward.evaluation.best_of_n.analysis import BestOfN
from treeward.evaluation.report.blocks import bar_item, curves_block, headline_block, table_block, text_block
from treeward.evaluation.report.build import write_report
from treeward.evaluation.results import Block
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
_GAINS = (
    f"Gain over one sample, {_IN_SD}, of what a proxy chooses among n: by gold and (dashed) by itself, and what "
    "choosing by gold would reach (what gold lacks of that is the regret). Where gold falls while the proxy rises, "
    "the proxy is being exploited."
)

Results = Mapping[str, BestOfN]
"""The result of each proxy, by its name."""


def write(folder: Path, results: Results, gold: str, data: str) -> Path:
    """Write `bon.json` and the report; returns the report's path. `gold`: its name; `data`: that of the samples' file.

    Raises `DataError` where they cannot be written.
    """
    numbers = [{"proxy": name} | to_json(result) for name, result in results.items()]
    content = {"gold": gold, "data": data} | (numbers[0] if len(numbers) == 1 else {"proxies": numbers})
    title = next(iter(results)) if len(results) == 1 else f"{len(results)} proxies"
    subtitle = f"gold: {gold}; samples: {data}"
    blocks = list(report_blocks(results, gold))
    return write_report(folder, f"Best of n: {title}", blocks, {}, subtitle=subtitle, files={"bon.json": content})


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
                row = {"name": name, "n": n, "kl": result.kl[i]}
                row |= {key: curve.mean[i] for key, curve in result.curves.items()}
                rows.append(row | {"low": result.curves["gold"].low[i], "high": result.curves["gold"].high[i]})
    columns = [Column(key, title, form) for key, (title, _, form) in _COLUMNS.items()]
    return rows, columns if len(results) > 1 else columns[1:]


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
    assert difference is not None
    sentence = f"gold at n = {result.max_n} less that of {first} is {difference.value:+.3g}"
    if difference.low is None or difference.high is None:
        return f"{name}: {sentence}."
    verb = "helps" if difference.low > 0 else "harms" if difference.high < 0 else "is not shown to differ"
    return f"{name} {verb}: {sentence} ({difference.low:+.3g} to {difference.high:+.3g})."


# --- the report ------------------------------------------------------------------------------------------------------


def report_blocks(results: Results, gold: str) -> Iterator[Block]:
    """Blocks of the report; `gold` is the name of what scored it."""
    first = next(iter(results.values()))
    left_out = {
        "samples without a proxy score": first.counts["num_without_proxy"],
        "samples without a gold score": first.counts["num_without_gold"],
        f"prompts with fewer than {first.max_n} scored samples": first.counts["num_prompts_with_fewer_samples"],
    }
    missing = ", ".join(f"{count:,} {what}" for what, count in left_out.items() if count)
    samples = f"Samples: {first.counts['num_samples']:,}, of {first.counts['num_prompts']:,} prompts; gold is `{gold}`."
    samples += f" Left out: {missing}." if missing else ""
    yield text_block("\n\n".join([*sentences(results), samples]), title="Best of n")
    yield headline_block(list(_headline(results)))
    yield _gains(results)
    rows, columns = table(results)
    yield table_block(
        "Best of n in numbers", {column.key: _COLUMNS[column.key][:2] for column in columns}, rows, legend(gold)
    )


def _headline(results: Results) -> Iterator[Block]:
    for name, result in results.items():
        n, prefix = result.max_n, f"{name}: " if len(results) > 1 else ""
        lost, of_lost = result.at("normalised_regret", n), "0 % by gold, 100 % at random"
        yield bar_item(f"{prefix}gold gained at n = {n}", result.at("gold_gain", n), _IN_SD, format="signed")
        yield bar_item(f"{prefix}lost of what was possible", lost, of_lost, format="percent")
        yield bar_item(f"{prefix}correlation with gold", result.correlation, "within prompts", format="signed")


def _gains(results: Results) -> Block:
    """The curves over the square root of KL."""
    series: list[Block] = []
    for colour, (name, result) in enumerate(results.items()):
        series.append(_series(result, "gold_gain", f"{name}: gold", colour=colour))
        series.append(_series(result, "proxy_gain", f"{name}: by itself", colour=colour, dash=_DASHED, dots=False))
    first = next(iter(results.values()))
    series.append(_series(first, "best_gain", "best possible gold", colour=len(results)))
    ticks = [
        {"x": x, "label": f"{n:,}"}
        for n, x in zip(first.sizes, np.sqrt(first.kl).tolist(), strict=True)
        if n == first.max_n or (n & (n - 1) == 0 and 3 * n <= 2 * first.max_n)
    ]
    label = "n, spaced by the square root of KL(n)"
    return curves_block(
        "Over-optimisation", series, _GAINS, x_label=label, x_ticks=ticks, y_label="standard deviations"
    )


def _series(result: BestOfN, key: str, name: str, **look: Any) -> Block:
    """One curve; `look`: its colour, dash and dots."""
    curve = result.curves[key]
    return {
        "name": name,
        "x": np.sqrt(result.kl).tolist(),
        "y": list(curve.mean),
        "low": list(curve.low),
        "high": list(curve.high),
        "labels": [f"n = {n:,}" for n in result.sizes],
        **look,
    }
