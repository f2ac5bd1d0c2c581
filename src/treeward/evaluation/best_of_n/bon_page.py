"""What `treeward bon` shows of a `BestOfN`: a table on the terminal, bon.json, and the report.

    rows, columns = table(result)
    write(Path("results/bon"), result, proxy="my-model", gold="gold_scores", data="samples.jsonl")

`bon_page.html` has the words of the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treeward.evaluation.best_of_n.analysis import BestOfN
from treeward.evaluation.report.build import write_report
from treeward.evaluation.report.charts import DASHED, DOTTED, SOLID, Line, Place
from treeward.tables import Column

_COLUMNS = (
    Column("n", "n"),
    Column("kl", "KL, nats", ".3f"),
    Column("proxy", "by the proxy"),
    Column("gold", "gold"),
    Column("low", "95 % from"),
    Column("high", "to"),
    Column("best", "best gold"),
)
LEGEND = (
    "KL, in nats, is how far choosing among n is from one sample; best gold is that of choosing by "
    "gold."
)
"""What the columns mean: for below a table."""


@dataclass(frozen=True, slots=True)
class BestOfNPage:
    """The numbers of the report. `proxy`, `gold`: the names of the two models that scored.

    `rows`: see `table`. `gains`: curves over sqrt(KL(n)), in standard deviations within a prompt;
    `ticks`: some n on that axis. The correlation of proxy and gold is in `result`.
    """

    proxy: str
    gold: str
    result: BestOfN
    rows: Sequence[dict[str, Any]]
    gains: Sequence[Line]
    ticks: Sequence[Place]


def write(folder: Path, result: BestOfN, proxy: str, gold: str, data: str) -> Path:
    """Write `bon.json` and the report; returns the report's path. `proxy`, `gold`: their names;
    `data`: the file's.

    Raises `DataError` where they cannot be written.
    """
    content = {"gold": gold, "data": data, "proxy": proxy} | to_json(result)
    return write_report(
        folder,
        "evaluation/best_of_n/bon_page.html",
        f"Best of n: {proxy}",
        best_of_n_page(result, proxy, gold),
        subtitle=f"gold: {gold}; samples: {data}",
        files={"bon.json": content},
    )


def to_json(result: BestOfN) -> dict[str, Any]:
    """Every number, as JSON has them."""
    content = asdict(result)
    sizes = content.pop("sizes")
    return {"n": sizes, "sentence": result.sentence, **content}


def table(result: BestOfN) -> tuple[list[dict[str, Any]], Sequence[Column]]:
    """A row for n = 1, 2, 4, ... and the largest n."""
    gold = result.curves["gold"]
    rows = []
    for i, n in enumerate(result.sizes):
        if not _is_power_of_two(n) and n != result.max_n:
            continue
        row: dict[str, Any] = {"n": n, "kl": result.kl[i]}
        for name, curve in result.curves.items():
            row[name] = curve.mean[i]
        rows.append(row | {"low": gold.low[i], "high": gold.high[i]})
    return rows, _COLUMNS


def best_of_n_page(result: BestOfN, proxy: str, gold: str) -> BestOfNPage:
    """The numbers of the report; `proxy` and `gold` are the names of what scored."""
    rows, _ = table(result)
    # Over the square root of KL gold and proxy rise in straight lines at first (Gao et al. 2022).
    places = np.sqrt(result.kl).tolist()
    ticks = []
    for n, x in zip(result.sizes, places, strict=True):
        # The names of the last power of two and of the largest n would run into each other.
        is_far_from_largest = 3 * n <= 2 * result.max_n
        if n == result.max_n or (_is_power_of_two(n) and is_far_from_largest):
            ticks.append(Place(x, f"{n:,}"))
    gains = [
        _line(result, "gold_gain", f"{proxy}: gold", places),
        _line(result, "proxy_gain", f"{proxy}: by itself", places, dash=DASHED, dots=False),
        _line(result, "best_gain", "best possible gold", places, colour=1, dash=DOTTED),
    ]
    return BestOfNPage(proxy, gold, result, rows, gains, ticks)


def _is_power_of_two(n: int) -> bool:
    return n.bit_count() == 1


def _line(
    result: BestOfN,
    key: str,
    name: str,
    places: Sequence[float],
    *,
    colour: int = 0,
    dash: int = SOLID,
    dots: bool | None = None,
) -> Line:
    curve = result.curves[key]
    labels = [f"n = {n:,}" for n in result.sizes]
    return Line(name, places, curve.mean, curve.low, curve.high, labels, colour, dash, dots)
