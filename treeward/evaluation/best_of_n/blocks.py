"""The results of best-of-n for people, of one proxy or of several: tables, JSON, and the report.

for rows, columns in tables(results):                      # {name of the proxy: BestOfN}
    results_table(rows, columns)
write(folder, results, "gold", "samples.jsonl", scores, gold_scores)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from treeward.data.sources import read_rows
from treeward.errors import DataError
from treeward.evaluation.best_of_n.analysis import BestOfN
from treeward.evaluation.best_of_n.laws import GaoLaw
from treeward.evaluation.best_of_n.samples import SampledRow, sampled_rows
from treeward.evaluation.examples import EvalExample, ScoredExample, to_row
from treeward.evaluation.report.build import write_report
from treeward.evaluation.results import Block, Metric
from treeward.scoring.score import Score
from treeward.storage import write_text
from treeward.tables import Column

EXAMPLES_SOURCE = "best_of_n"
_FORMATS = {"n": "integer", "peak": "integer", "normalised_regret": "percent", "proxy": "text", "state": "text"}
_SIGNED = ("difference", "difference_low", "difference_high")
_MOST_EXAMPLES = 200
_IN_SD = "in standard deviations within a prompt"

Results = Mapping[str, BestOfN]
"""The result of each proxy, by its name."""
Table = tuple[list[dict[str, Any]], list[Column]]


def write(
    folder: Path,
    results: Results,
    gold: str,
    data: str,
    scores: Mapping[str, Sequence[Sequence[Score]]],
    of_gold: Sequence[Sequence[Score]],
) -> Path:
    """Write `bon.json` and the report; returns the report's path.

    `gold`: its name. `scores`, `of_gold`: of every sample, by proxy and by gold. Raises `DataError` where they cannot
    be written.
    """
    content: dict[str, Any] = {"gold": gold, "data": data}
    every = [{"proxy": name} | to_json(result) for name, result in results.items()]
    content |= every[0] if len(every) == 1 else {"proxies": every}
    title = next(iter(results)) if len(results) == 1 else f"{len(results)} proxies"
    try:
        write_text(folder / "bon.json", json.dumps(content, indent=2, allow_nan=False) + "\n")
        return write_report(
            folder,
            f"Best of n: {title}",
            blocks(results, gold),
            {EXAMPLES_SOURCE: examples(data, scores, of_gold)},
            subtitle=f"gold: {gold}; samples: {data}",
        )
    except OSError as error:
        need = "a folder that can be written"
        raise DataError("the result cannot be written", where=str(folder), got=str(error), need=need) from error


def to_json(result: BestOfN) -> dict[str, Any]:
    """Every number, as JSON has them."""
    content = asdict(result)
    return {"n": content.pop("sizes"), **content}


# --- tables ----------------------------------------------------------------------------------------------------------


def tables(results: Results) -> list[Table]:
    """One proxy: a row for each n. Several: gold of each by n, and each proxy at the largest n."""
    every = list(results.values())
    of_proxy, form = _decimals(every, ("proxy",)), _decimals(every, ("gold", "best"))
    n, kl, best = Column("n"), Column("kl", title="KL, nats", format=".3f"), Column("best", "best gold", form)
    shared = [
        Column("regret", format=form),
        Column("normalised_regret", title="lost of possible", format=".1%"),
        Column("gap", title="gap, in SD", format=".3f"),
    ]
    rows = [_rows(result) for result in every]
    if len(every) == 1:
        gold = [Column("gold", format=form), Column("low", "95 % from", form), Column("high", "to", form)]
        return [(rows[0], [n, kl, Column("proxy", format=of_proxy), *gold, best, *shared])]
    golds = [Column(f"gold_{i}", title=f"gold: {name}", format=form) for i, name in enumerate(results)]
    by_size = [own[0] | {f"gold_{i}": one["gold"] for i, one in enumerate(own)} for own in zip(*rows, strict=True)]
    last = Column("gold", title=f"gold at n = {every[0].max_n}", format=form)
    signed = form.replace(",", "+,", 1)
    titles = zip(_SIGNED, ("less the first's", "95 % from", "to"), strict=True)
    differences = [Column(key, title, signed) for key, title in titles]
    peak = [Column("peak", title="highest at n"), Column("state", title="over-optimisation")]
    return [
        (by_size, [n, kl, *golds, best]),
        ([_at_the_end(*one) for one in results.items()], [Column("proxy"), last, *differences, *shared, *peak]),
    ]


def legend(gold: str) -> str:
    """What the columns of the tables mean, and how the gold of that name is counted: for below a table."""
    return (
        "KL, in nats, is how far choosing among n is from one sample. Regret is the best gold less the gold of the "
        "choice; lost of possible is its part of what choosing could gain: 0 % by gold, 100 % at random. The gap is "
        f"the gain of the proxy less that of gold, in standard deviations (SD) within a prompt.{_of_ranks(gold)}"
    )


def _of_ranks(gold: str) -> str:
    sentence = " Gold is the rank with the other sign, so that higher is better: 0 for rank 0, the best, and -1 for "
    return f"{sentence}rank 1." if gold == "rank" else ""


def _decimals(results: Sequence[BestOfN], names: Sequence[str]) -> str:
    """The format that shows four digits of the largest number of some curves."""
    values = [value for result in results for name in names for value in result.curves[name].mean]
    largest = max((abs(value) for value in values if value), default=1.0)
    return f",.{max(0, 3 - math.floor(math.log10(largest)))}f"


def _rows(result: BestOfN) -> list[dict[str, Any]]:
    """A row for n = 1, 2, 4, ... and the largest n."""
    rows = []
    for i, n in enumerate(result.sizes):
        if n & (n - 1) == 0 or n == result.max_n:
            gold = result.curves["gold"]
            values = {name: curve.mean[i] for name, curve in result.curves.items()}
            rows.append({"n": n, "kl": result.kl[i], **values, "low": gold.low[i], "high": gold.high[i]})
    return rows


def _at_the_end(name: str, result: BestOfN) -> dict[str, Any]:
    difference = result.difference or Metric("difference", None)
    values = (difference.value, difference.low, difference.high)
    row = _rows(result)[-1] | dict(zip(_SIGNED, values, strict=True))
    return row | {"proxy": name, "peak": result.verdict.peak, "state": result.verdict.state}


# --- the report ------------------------------------------------------------------------------------------------------


def blocks(results: Results, gold: str) -> list[Block]:
    """Blocks of the report; `gold` is the name of what scored it."""
    (first, one), *others = results.items()
    best = (one, "best_gain", "best possible gold")
    gains = [(result, "gold_gain", name) for name, result in results.items()]
    believed = [(result, "proxy_gain", name) for name, result in results.items()]
    regrets = [(result, "regret", name) for name, result in results.items()]
    regret_note = "By how much gold of the proxy's choice is below that of the best of the n."
    if not others:
        own = [(one, "proxy_gain", f"proxy: {first}"), (one, "gold_gain", f"gold: {gold}"), best]
        note = (
            f"Gain over one sample, {_IN_SD}, of what the proxy chooses among n: by the proxy, by gold, and what "
            "choosing by gold would reach. Where gold falls while the proxy rises, the proxy is being exploited."
        )
        curves = [_curves("Over-optimisation", note, "standard deviations", own), _laws(one)]
    else:
        note = (
            f"Gold gained over one sample by what each proxy chooses among n, {_IN_SD}; and what choosing by gold would"
            " reach."
        )
        beliefs = "The same gain by the proxy's own score: the more it is above that of gold, the more it is misled."
        curves = [
            _curves("Over-optimisation", note, "standard deviations", [*gains, best]),
            _curves("What each proxy believes", beliefs, "standard deviations", believed),
        ]
    titles = ["Best of n in numbers"] if not others else ["Gold by n", "Proxies side by side"]
    return [
        {"kind": "text", "title": "Best of n", "markdown": _introduction(results, gold)},
        {"kind": "headline", "items": _headline(results)},
        *curves,
        _curves("Regret", regret_note, "regret, in units of gold", regrets),
        *(_table(*one, legend(gold)) for one in zip(titles, tables(results), strict=True)),
        {"kind": "examples", "title": "Where the proxy chose badly", "source": EXAMPLES_SOURCE},
    ]


def _introduction(results: Results, gold: str) -> str:
    (first, result), *others = results.items()
    counts = result.counts
    said = [f"`{first}`: **{result.verdict.sentence}**", *(f"`{name}`: {one.verdict.sentence}" for name, one in others)]
    said = [*(_helps(name, one, first) for name, one in others), *said]
    parts = [
        f"{counts[key]:,} {what}"
        for key, what in (
            ("num_without_proxy", "samples without a proxy score"),
            ("num_without_gold", "samples without a gold score"),
            ("num_prompts_with_fewer_samples", f"prompts with fewer than {result.max_n} scored samples"),
        )
        if counts[key]
    ]
    left_out = f" Left out: {', '.join(parts)}." if parts else ""
    samples = f"Samples: {counts['num_samples']:,}, of {counts['num_prompts']:,} prompts; gold is `{gold}`."
    return "\n\n".join([*said, f"{samples}{_of_ranks(gold)}{left_out}"])


def _helps(name: str, result: BestOfN, first: str) -> str:
    difference = result.difference
    assert difference is not None and difference.value is not None
    start, n = f"`{name}`", f"gold at n = {result.max_n} less that of `{first}` is {difference.value:+.3g}"
    if difference.low is None or difference.high is None:
        return f"{start}: {n}."
    verb = "helps" if difference.low > 0 else "harms" if difference.high < 0 else "is not shown to differ"
    return f"{start} **{verb}**: {n} ({difference.low:+.3g} to {difference.high:+.3g})."


def _headline(results: Results) -> list[dict[str, Any]]:
    (_, one), *others = results.items()
    n = one.max_n
    if others:
        items = [(f"gold gained by {name}", own.at("gold_gain", n), "signed", _IN_SD) for name, own in results.items()]
    else:
        items = [
            (f"Gold gained at n = {n}", one.at("gold_gain", n), "signed", _IN_SD),
            (f"Regret at n = {n}", one.at("regret", n), "number", "gold of the best of n less gold of the chosen"),
            ("Lost of what was possible", one.at("normalised_regret", n), "percent", "0 % by gold, 100 % at random"),
            (f"Proxy ahead of gold at n = {n}", one.at("gap", n), "signed", _IN_SD),
            ("Correlation within prompts", one.correlation, "signed", "of proxy and gold"),
        ]
    return [
        {"label": label, "value": number.value, "low": number.low, "high": number.high, "count": number.count}
        | {"format": form, "note": note}
        for label, number, form, note in items
    ]


def _curves(title: str, note: str, y_label: str, series: Sequence[tuple[BestOfN, str, str]]) -> Block:
    """Curves over the square root of KL: of each series the result, which of its curves, and its name."""
    result = series[0][0]
    roots = dict(zip(result.sizes, np.sqrt(result.kl).tolist(), strict=True))
    named = [n for n in result.sizes if n & (n - 1) == 0 and 3 * n <= 2 * result.max_n] + [result.max_n]
    return {
        "kind": "curves",
        "title": title,
        "note": note,
        "x_label": "n, spaced by the square root of KL(n)",
        "x_ticks": [{"x": roots[n], "label": f"{n:,}"} for n in named],
        "y_label": y_label,
        "series": [
            {"name": name, "x": list(roots.values()), "y": list(curve.mean), "low": list(curve.low)}
            | {"high": list(curve.high), "labels": [f"n = {n:,}" for n in roots]}
            for one, key, name in series
            for curve in [one.curves[key]]
        ],
    }


def _laws(result: BestOfN) -> Block:
    """Measured gold with the laws that are fitted to it."""
    note = "There are too few n to fit a law."
    if fitted := result.laws.get("bon"):
        peak = "rises on and on" if fitted.peak is None else f"peaks at n = {fitted.peak:,.0f}"
        note = (
            f"d is the square root of KL. The law of best-of-n has alpha = {fitted.alpha:.3g} and "
            f"beta = {fitted.beta:.3g} and {peak}; measured gold peaks at n = {result.verdict.peak}."
        )
    block = _curves("Gold, and the laws fitted to it", note, "gold", [(result, "gold", "measured")])
    x, start = np.linspace(0.0, float(np.sqrt(result.kl[-1])), 60), result.curves["gold"].mean[0] or 0.0
    names = {"bon": "d (alpha - beta d)", "rl": "d (alpha - beta ln d)"}
    for form, one in result.laws.items():
        law = GaoLaw(form, one.alpha, one.beta)
        block["series"].append({"name": names[form], "x": x.tolist(), "y": (start + law.gain(x)).tolist()})
    return block


def _table(title: str, table: Table, note: str) -> Block:
    rows, columns = table
    shown = [{"key": one.key, "label": one.title or one.key, "format": _format(one.key)} for one in columns]
    return {"kind": "table", "title": title, "note": note, "columns": shown, "rows": rows}


def _format(key: str) -> str:
    return "signed" if key in _SIGNED else _FORMATS.get(key, "number")


def examples(
    data: str, scores: Mapping[str, Sequence[Sequence[Score]]], of_gold: Sequence[Sequence[Score]]
) -> list[dict[str, Any]]:
    """Rows for the report's examples: the best by gold beside what a proxy chose, largest regret first."""
    found: list[tuple[float, int, str, int, int]] = []
    for name, every in scores.items():
        for number, (proxy, gold) in enumerate(zip(every, of_gold, strict=True)):
            known = [i for i, pair in enumerate(zip(proxy, gold, strict=True)) if None not in (p.score for p in pair)]
            best = max(known, key=lambda i: gold[i].score or 0.0, default=0)
            chosen = max(known, key=lambda i: proxy[i].score or 0.0, default=0)
            regret = (gold[best].score or 0.0) - (gold[chosen].score or 0.0) if known else 0.0
            found.append((regret, number, name, best, chosen))
    worst = sorted((one for one in found if one[0] > 0.0), key=lambda one: -one[0])[:_MOST_EXAMPLES]
    needed = {number for _, number, *_ in worst}
    rows = {row.number: row for row in sampled_rows(read_rows(data)) if row.number in needed}
    return [
        _example(rows[number], scores[name][number], of_gold[number], (best, chosen)) | {"model": name}
        for _, number, name, best, chosen in worst
    ]


def _example(row: SampledRow, proxy: Sequence[Score], gold: Sequence[Score], shown: tuple[int, int]) -> dict[str, Any]:
    golds = [gold[i].score for i in shown]
    known = [g.score for p, g in zip(proxy, gold, strict=True) if p.score is not None and g.score is not None]
    below = (golds[1] or 0.0) < float(np.mean(known))
    completions = [row.conversations[i][len(row.context) :] for i in shown]
    example = EvalExample(
        id=f"row {row.number + 1}",
        subset="chosen is worse than the average sample" if below else "chosen is at least average",
        context=tuple(row.context),
        completions=tuple(map(tuple, completions)),
        ranks=(0, 1),
        suite_data={"gold": golds},
        where=row.where,
    )
    lengths = tuple(len(str(completion[-1].get("content") or "")) for completion in completions)
    return to_row(ScoredExample(example, tuple(proxy[i].score for i in shown), lengths, ()))
