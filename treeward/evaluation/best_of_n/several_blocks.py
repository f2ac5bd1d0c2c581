"""Several proxies side by side for people: tables, JSON and blocks of the report.

results_table(by_size(compared), by_size_columns(compared))       # a row per n, a column per proxy
results_table(by_proxy(compared), by_proxy_columns(compared))     # a row per proxy, at the largest n
shown = blocks_of_several(compared, "better-model")
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from treeward.evaluation.best_of_n.analysis import BestOfN
from treeward.evaluation.best_of_n.blocks import (
    EXAMPLES_SOURCE,
    counted,
    curve_block,
    decimals,
    gold_in_words,
    left_out,
    legend,
    table_rows,
    to_json,
)
from treeward.evaluation.best_of_n.several import ComparedProxy
from treeward.evaluation.results import Metric
from treeward.tables import Column

__all__ = ["blocks_of_several", "by_proxy", "by_proxy_columns", "by_size", "by_size_columns", "several_to_json"]


def by_size_columns(compared: Sequence[ComparedProxy]) -> list[Column]:
    """The columns of `by_size`: n, KL, gold of each proxy's choice, and of the best."""
    form = _gold_format(compared)
    golds = [Column(f"gold_{i}", title=f"gold: {one.name}", format=form) for i, one in enumerate(compared)]
    return [
        Column("n"),
        Column("kl", title="KL, nats", format=".3f"),
        *golds,
        Column("best", title="best gold", format=form),
    ]


def by_size(compared: Sequence[ComparedProxy]) -> list[dict[str, Any]]:
    """A row for n = 1, 2, 4, ... and the largest n."""
    rows = []
    for of_each in zip(*(table_rows(one.result) for one in compared), strict=True):
        row = {name: of_each[0][name] for name in ("n", "kl", "best")}
        rows.append(row | {f"gold_{i}": one["gold"] for i, one in enumerate(of_each)})
    return rows


def by_proxy_columns(compared: Sequence[ComparedProxy]) -> list[Column]:
    """The columns of `by_proxy`."""
    form, n = _gold_format(compared), compared[0].result.max_n
    signed = form.replace(",", "+,", 1)
    return [
        Column("proxy"),
        Column("gold", title=f"gold at n = {n}", format=form),
        Column("difference", title="less the first's", format=signed),
        Column("low", title="95 % from", format=signed),
        Column("high", title="to", format=signed),
        Column("regret", format=form),
        Column("normalised_regret", title="lost of possible", format=".1%"),
        Column("gap", title="gap, in SD", format=".3f"),
        Column("peak", title="highest at n"),
        Column("state", title="over-optimisation"),
    ]


def by_proxy(compared: Sequence[ComparedProxy]) -> list[dict[str, Any]]:
    """A row per proxy, at the largest n."""
    rows = []
    for one in compared:
        result, difference = one.result, one.difference or Metric("difference", None)
        row: dict[str, Any] = {"proxy": one.name, "peak": result.verdict.peak, "state": result.verdict.state}
        row |= {name: result.curves[name].mean[-1] for name in ("gold", "regret", "normalised_regret", "gap")}
        rows.append(row | {"difference": difference.value, "low": difference.low, "high": difference.high})
    return rows


def several_to_json(compared: Sequence[ComparedProxy]) -> list[dict[str, Any]]:
    """For each proxy its name, what `to_json` gives, and the `difference` from the first, null for the first."""
    return [
        {"proxy": one.name}
        | to_json(one.result)
        | {"difference": None if one.difference is None else asdict(one.difference)}
        for one in compared
    ]


def blocks_of_several(compared: Sequence[ComparedProxy], gold: str) -> list[dict[str, Any]]:
    """Blocks of the report; `gold` is the name of what scored it."""
    best = [(compared[0].result, "best_gain", "best possible gold")]
    return [
        {"kind": "text", "title": "Best of n", "markdown": _introduction(compared, gold)},
        {"kind": "headline", "items": [_item(one) for one in compared]},
        curve_block(
            "Over-optimisation",
            "Gold gained over one sample by what each proxy chooses among n, in standard deviations within a prompt; "
            "and what choosing by gold would reach.",
            "standard deviations",
            [*_of_each(compared, "gold_gain"), *best],
        ),
        curve_block(
            "What each proxy believes",
            "The same gain by the proxy's own score: the more it is above that of gold, the more it is misled.",
            "standard deviations",
            _of_each(compared, "proxy_gain"),
        ),
        curve_block(
            "Regret",
            "By how much gold of the proxy's choice is below that of the best of the n.",
            "regret, in units of gold",
            _of_each(compared, "regret"),
        ),
        _table("Proxies side by side", by_proxy_columns(compared), by_proxy(compared)) | {"note": legend(gold)},
        _table("Gold by n", by_size_columns(compared), by_size(compared)),
        {"kind": "examples", "title": "Where a proxy chose badly", "source": EXAMPLES_SOURCE},
    ]


def _gold_format(compared: Sequence[ComparedProxy]) -> str:
    return max((decimals(one.result, ("gold", "best")) for one in compared), key=len)


def _of_each(compared: Sequence[ComparedProxy], curve: str) -> list[tuple[BestOfN, str, str]]:
    return [(one.result, curve, one.name) for one in compared]


def _introduction(compared: Sequence[ComparedProxy], gold: str) -> str:
    counts = compared[0].result.counts
    verdicts = [f"`{one.name}`: {one.result.verdict.sentence}" for one in compared]
    differences = [_compared(one, compared[0]) for one in compared[1:]]
    samples = (
        f"{counted(counts['num_samples'], 'sample')} of {counted(counts['num_prompts'], 'prompt')}, the same for every "
        f"proxy; gold is `{gold}`.{gold_in_words(gold)}{left_out(compared[0].result)}"
    )
    return "\n\n".join([*differences, *verdicts, samples])


def _compared(one: ComparedProxy, first: ComparedProxy) -> str:
    difference, n = one.difference, one.result.max_n
    if difference is None or difference.value is None:
        return f"`{one.name}` cannot be compared with `{first.name}`."
    if difference.low is None or difference.high is None:
        return f"At n = {n} gold of `{one.name}` differs from that of `{first.name}` by {difference.value:+.3g}."
    verb = "helps" if difference.low > 0 else "harms" if difference.high < 0 else "is not shown to differ"
    span = f"{difference.value:+.3g} ({difference.low:+.3g} to {difference.high:+.3g})"
    return f"`{one.name}` **{verb}**: gold at n = {n} less that of `{first.name}` is {span}."


def _item(one: ComparedProxy) -> dict[str, Any]:
    gain = one.result.at("gold_gain", one.result.max_n)
    note = "in standard deviations within a prompt"
    numbers = {"value": gain.value, "low": gain.low, "high": gain.high, "count": gain.count}
    return {"label": f"gold gained by {one.name}", **numbers, "format": "signed", "note": note}


def _table(title: str, columns: Sequence[Column], rows: list[dict[str, Any]]) -> dict[str, Any]:
    formats = {"n": "integer", "peak": "integer", "normalised_regret": "percent", "proxy": "text", "state": "text"}
    formats["difference"] = formats["low"] = formats["high"] = "signed"
    shown = [
        {"key": one.key, "label": one.title or one.key, "format": formats.get(one.key, "number")} for one in columns
    ]
    return {"kind": "table", "title": title, "columns": shown, "rows": rows}
