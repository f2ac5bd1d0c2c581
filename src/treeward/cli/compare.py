"""`treeward compare`: whether one reward model is better than another on the same examples.

examples:
  treeward compare results/eval/mine results/eval/other
  treeward compare results/eval/mine/llmbar/examples.jsonl results/eval/other/llmbar/examples.jsonl

`treeward eval` writes a folder for each model. The difference is A's accuracy less B's on the same
examples, with its 95 % interval.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treeward.errors import ConfigError
from treeward.tables import Column, results_table

if TYPE_CHECKING:
    from treeward.evaluation.comparison import ModelComparison


def run(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", help="The evaluation of a model: its folder, or its examples.jsonl."
        ),
    ],
    second: Annotated[
        str,
        typer.Argument(metavar="B", help="The evaluation of another model, on the same examples."),
    ],
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print every number as JSON."),
    ] = False,
) -> int:
    # Two names of one folder, too.
    if Path(first).exists() and Path(second).exists() and Path(first).samefile(second):
        raise ConfigError(
            "A and B are the same evaluation",
            where=first,
            need="evaluations of two models",
        )

    # Imports that take seconds come after the checks of the options.
    from treeward.evaluation.comparison import compare, read_evaluation

    comparison = compare(read_evaluation(first), read_evaluation(second))
    if as_json:
        text = json.dumps(asdict(comparison), indent=2, ensure_ascii=False, allow_nan=False)
        sys.stdout.write(f"{text}\n")
        return 0
    a, b = comparison.names
    overall = comparison.overall
    verdict = "Neither is shown to be better"
    # The level of 5 % fits the intervals of 95 % in the table.
    if overall.p_value < 0.05:
        better, worse = a, b
        if (overall.difference.value or 0) <= 0:
            better, worse = b, a
        verdict = f"{better} is correct more often than {worse}"
    sentence = f"{verdict}: p = {overall.p_value:.2g} over {overall.count} examples."
    lines = [_table(comparison), "", sentence, *comparison.notes]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _table(comparison: ModelComparison) -> str:
    """The accuracies of both, overall and of each set, with their difference."""
    a, b = comparison.names
    columns = [
        Column("name", "set"),
        Column("count", "examples"),
        Column("a", a, ".1%"),
        Column("b", b, ".1%"),
        Column("less", "difference", "+.1%"),
        Column("interval", "95 % interval"),
        Column("only_first", f"only {a}"),
        Column("only_second", f"only {b}"),
        Column("p_value", "p", ".2g"),
        Column("adjusted_p_value", "p (Holm)", ".2g"),
    ]
    rows = []
    for result in (comparison.overall, *comparison.parts):
        low = result.difference.low
        high = result.difference.high
        interval = None
        if low is not None:
            interval = f"{low:+.1%} to {high:+.1%}"
        values = {
            "a": result.first.value,
            "b": result.second.value,
            "less": result.difference.value,
            "interval": interval,
        }
        rows.append(asdict(result) | values)
    return results_table(rows, columns)
