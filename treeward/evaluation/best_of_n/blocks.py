"""The result of best-of-n for people: a table, JSON, and blocks and examples of the report.

results_table(table_rows(result), table_columns(result))
shown = blocks(result, "my-model", "better-model")
write_report(folder, "my-model", shown, {EXAMPLES_SOURCE: examples(scored, "my-model")})
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from treeward.evaluation.best_of_n.analysis import BestOfN
from treeward.evaluation.best_of_n.samples import ScoredRow
from treeward.evaluation.examples import EvalExample, ScoredExample, to_row
from treeward.evaluation.results import Metric
from treeward.tables import Column

__all__ = ["EXAMPLES_SOURCE", "blocks", "curve_block", "decimals", "examples", "left_out", "table_columns"]
__all__ += ["counted", "gold_in_words", "legend", "table_rows", "to_json"]

EXAMPLES_SOURCE = "best_of_n"
_FORMATS = {"n": "integer", "normalised_regret": "percent"}
_MOST_EXAMPLES = 200
_AXIS = "n, spaced by the square root of KL(n)"


def table_columns(result: BestOfN) -> list[Column]:
    """The columns of `table_rows`, with as many decimals as the numbers need."""
    of_proxy, of_gold = (decimals(result, names) for names in (("proxy",), ("gold", "best")))
    return [
        Column("n"),
        Column("kl", title="KL, nats", format=".3f"),
        Column("proxy", format=of_proxy),
        Column("gold", format=of_gold),
        Column("low", title="95 % from", format=of_gold),
        Column("high", title="to", format=of_gold),
        Column("best", title="best gold", format=of_gold),
        Column("regret", format=of_gold),
        Column("normalised_regret", title="lost of possible", format=".1%"),
        Column("gap", title="gap, in SD", format=".3f"),
    ]


def legend(gold: str) -> str:
    """What the columns of the tables mean, and how the gold of that name is counted: for below a table."""
    return (
        "KL, in nats, is how far choosing among n is from one sample. Regret is the best gold less the gold of the "
        "choice; lost of possible is its part of what choosing could gain: 0 % by gold, 100 % at random. The gap is "
        f"the gain of the proxy less that of gold, in standard deviations (SD) within a prompt.{gold_in_words(gold)}"
    )


def gold_in_words(gold: str) -> str:
    """A sentence that begins with a space on a gold whose numbers are not those of the data; nothing of others."""
    if gold != "rank":
        return ""
    return " Gold is the rank with the other sign, so that higher is better: 0 for rank 0, the best, and -1 for rank 1."


def decimals(result: BestOfN, names: Sequence[str]) -> str:
    """The format that shows four digits of the largest number of some curves."""
    largest = max((abs(value) for name in names for value in result.curves[name].mean if value), default=1.0)
    return f",.{max(0, 3 - math.floor(math.log10(largest)))}f"


def table_rows(result: BestOfN) -> list[dict[str, Any]]:
    """A row for n = 1, 2, 4, ... and the largest n."""
    rows = []
    for i, n in enumerate(result.sizes):
        if n & (n - 1) == 0 or n == result.max_n:
            row: dict[str, Any] = {"n": n, "kl": result.kl[i]}
            row |= {name: curve.mean[i] for name, curve in result.curves.items()}
            gold = result.curves["gold"]
            rows.append(row | {"low": gold.low[i], "high": gold.high[i]})
    return rows


def to_json(result: BestOfN) -> dict[str, Any]:
    """Every number, as JSON has them."""
    return {
        "counts": dict(result.counts),
        "verdict": asdict(result.verdict),
        "n": list(result.sizes),
        "kl": list(result.kl),
        "curves": {name: asdict(curve) for name, curve in result.curves.items()},
        "correlation": asdict(result.correlation),
        "laws": {
            fitted.law.form: {
                "alpha": asdict(fitted.alpha),
                "beta": asdict(fitted.beta),
                "peak": asdict(fitted.peak),
                "r_squared": fitted.r_squared,
            }
            for fitted in result.laws
        },
    }


def blocks(result: BestOfN, proxy: str, gold: str) -> list[dict[str, Any]]:
    """Blocks of the report; `proxy` and `gold` are the names of what scored."""
    return [
        {"kind": "text", "title": "Best of n", "markdown": _introduction(result, proxy, gold)},
        {"kind": "headline", "items": _headline(result)},
        curve_block(
            "Over-optimisation",
            "Gain over one sample, in standard deviations within a prompt, of what the proxy chooses among n: "
            "by the proxy, by gold, and what choosing by gold would reach. "
            "Where gold falls while the proxy rises, the proxy is being exploited.",
            "standard deviations",
            [
                (result, "proxy_gain", f"proxy: {proxy}"),
                (result, "gold_gain", f"gold: {gold}"),
                (result, "best_gain", "best possible gold"),
            ],
        ),
        {
            "kind": "curves",
            "title": "Gold, and the laws fitted to it",
            "note": _laws(result),
            "x_label": _AXIS,
            "x_ticks": _ticks(result),
            "y_label": "gold",
            "series": [_series(result, "gold", "measured"), *_fitted_series(result)],
        },
        curve_block(
            "Regret",
            "By how much gold of the proxy's choice is below that of the best of the n.",
            "regret, in units of gold",
            [(result, "regret", "regret")],
        ),
        {
            "kind": "table",
            "title": "Best of n in numbers",
            "note": legend(gold),
            "columns": [
                {"key": one.key, "label": one.title or one.key, "format": _FORMATS.get(one.key, "number")}
                for one in table_columns(result)
            ],
            "rows": table_rows(result),
        },
        {"kind": "examples", "title": "Where the proxy chose badly", "source": EXAMPLES_SOURCE},
    ]


def examples(scored: Iterable[ScoredRow], proxy: str) -> list[dict[str, Any]]:
    """Rows for the report's block of examples: the best by gold beside what the proxy chose, largest regret first."""
    found: list[tuple[float, dict[str, Any]]] = []
    for one in scored:
        if one.best is None or one.chosen is None:
            continue
        regret = (one.gold[one.best] or 0.0) - (one.gold[one.chosen] or 0.0)
        if regret > 0.0:
            found.append((regret, _example(one, one.best, one.chosen) | {"model": proxy}))
    found.sort(key=lambda item: -item[0])
    return [row for _, row in found[:_MOST_EXAMPLES]]


def _example(one: ScoredRow, best: int, chosen: int) -> dict[str, Any]:
    known = [gold for gold, proxy in zip(one.gold, one.proxy, strict=True) if gold is not None and proxy is not None]
    below = (one.gold[chosen] or 0.0) < float(np.mean(known))
    example = EvalExample(
        id=f"row {one.row + 1}",
        subset="chosen is worse than the average sample" if below else "chosen is at least average",
        context=tuple(one.context),
        completions=tuple(tuple(completion) for completion in one.completions),
        ranks=(0, 1),
        suite_data={"gold": [one.gold[best], one.gold[chosen]]},
        where=one.where,
    )
    lengths = tuple(len(str(completion[-1].get("content") or "")) for completion in example.completions)
    return to_row(ScoredExample(example, (one.proxy[best], one.proxy[chosen]), lengths, ()))


def _introduction(result: BestOfN, proxy: str, gold: str) -> str:
    counts = result.counts
    return (
        f"**{result.verdict.sentence}** {counted(counts['num_samples'], 'sample')} of "
        f"{counted(counts['num_prompts'], 'prompt')}; "
        f"the proxy is `{proxy}`, gold is `{gold}`.{gold_in_words(gold)}{left_out(result)}"
    )


def counted(count: int, noun: str) -> str:
    """ "1 prompt", "2 prompts"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def left_out(result: BestOfN) -> str:
    """A sentence that begins with a space on the samples and prompts that are left out; nothing where none is."""
    counts = result.counts
    parts = [
        f"{counted(counts[key], noun)} {what}"
        for key, noun, what in (
            ("num_without_proxy", "sample", "without a proxy score"),
            ("num_without_gold", "sample", "without a gold score"),
            ("num_prompts_with_fewer_samples", "prompt", f"with fewer than {result.max_n} scored samples"),
        )
        if counts[key]
    ]
    return f" Left out: {', '.join(parts)}." if parts else ""


def curve_block(title: str, note: str, y_label: str, series: Sequence[tuple[BestOfN, str, str]]) -> dict[str, Any]:
    """A block of curves over the square root of KL: of each series the result, which of its curves, and its name."""
    shown = [_series(*one) for one in series]
    ticks = _ticks(series[0][0])
    return {
        "kind": "curves", "title": title, "note": note, "x_label": _AXIS, "x_ticks": ticks, "y_label": y_label,
        "series": shown,
    }  # fmt: skip


def _ticks(result: BestOfN) -> list[dict[str, Any]]:
    """Where n = 1, 2, 4, ... and the largest n lie on the axis."""
    named = [n for n in result.sizes if n & (n - 1) == 0 and 3 * n <= 2 * result.max_n] + [result.max_n]
    return [{"x": float(np.sqrt(result.kl[result.sizes.index(n)])), "label": f"{n:,}"} for n in named]


def _headline(result: BestOfN) -> list[dict[str, Any]]:
    n = result.max_n
    rise = result.at("gold_gain", n)
    items = [
        (f"Gold gained at n = {n}", rise, "signed", "in standard deviations within a prompt"),
        (f"Regret at n = {n}", result.at("regret", n), "number", "gold of the best of n less gold of the chosen"),
        ("Lost of what was possible", result.at("normalised_regret", n), "percent", "0 % by gold, 100 % at random"),
        (f"Proxy ahead of gold at n = {n}", result.at("gap", n), "signed", "in standard deviations within a prompt"),
        ("Correlation within prompts", result.correlation, "signed", "of proxy and gold"),
    ]
    return [_item(label, metric, form, note) for label, metric, form, note in items]


def _item(label: str, metric: Metric, form: str, note: str) -> dict[str, Any]:
    numbers = {"value": metric.value, "low": metric.low, "high": metric.high, "count": metric.count}
    return {"label": label, **numbers, "format": form, "note": note}


def _series(result: BestOfN, curve: str, name: str) -> dict[str, Any]:
    found = result.curves[curve]
    x = np.sqrt(result.kl).tolist()
    names = [f"n = {n:,}" for n in result.sizes]
    return {
        "name": name, "x": x, "y": list(found.mean), "low": list(found.low), "high": list(found.high), "labels": names
    }  # fmt: skip


def _fitted_series(result: BestOfN) -> list[Mapping[str, Any]]:
    start = result.curves["gold"].mean[0] or 0.0
    x = np.linspace(0.0, float(np.sqrt(result.kl[-1])), 60)
    names = {"bon": "d (alpha - beta d)", "rl": "d (alpha - beta ln d)"}
    return [
        {"name": names[one.law.form], "x": x.tolist(), "y": (start + one.law.gain(x)).tolist()} for one in result.laws
    ]


def _laws(result: BestOfN) -> str:
    fitted = result.law("bon")
    if fitted is None:
        return "There are too few n to fit a law."
    peak = "rises on and on" if fitted.peak.value is None else f"peaks at n = {fitted.peak.value:,.0f}"
    return (
        f"d is the square root of KL. The law of best-of-n has alpha = {fitted.law.alpha:.3g} and "
        f"beta = {fitted.law.beta:.3g} and {peak}; measured gold peaks at n = {result.verdict.peak}."
    )
