"""`treeward compare`: whether one reward model is better than another on the same examples, and where they differ.

examples:
  treeward compare results/eval/mine results/eval/other
  treeward compare results/eval/mine/llmbar/examples.jsonl results/eval/other/llmbar/examples.jsonl --disagreements 30

A and B are folders that `treeward eval` wrote for one model each, or one
examples.jsonl of them. Examples are matched by suite and id; the difference is
A's accuracy less B's, with its 95 % interval.
"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treeward.data.preference import last_text
from treeward.errors import ConfigError
from treeward.tables import Column, results_table

if TYPE_CHECKING:
    from treeward.evaluation.comparison import Comparison


def run(
    first: Annotated[str, typer.Argument(metavar="A", help="Evaluation of a model: a folder, or its examples.jsonl.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Evaluation of another model on the same examples.")],
    as_json: Annotated[bool, typer.Option("--json", help="Every number as JSON on standard output.")] = False,
    disagreements: Annotated[int, typer.Option(min=0, help="How many examples to show that only one has right.")] = 10,
) -> int:
    if Path(first).exists() and Path(second).exists() and Path(first).samefile(second):
        raise ConfigError("A and B are the same evaluation", where=first, need="two models")

    from treeward.evaluation.comparison import compare, read_evaluation

    comparison = compare(read_evaluation(first), read_evaluation(second), num_disagreements=disagreements)
    if as_json:
        sys.stdout.write(json.dumps(asdict(comparison), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        return 0
    a, b = comparison.names
    overall = comparison.overall
    better, worse = (a, b) if (overall.difference.value or 0) > 0 else (b, a)
    verdict = "Neither is shown to be better"
    if overall.p_value < 0.05:
        verdict = f"{better} is right more often than {worse}"
    lines = [
        _table(comparison),
        "",
        f"{verdict}: p = {overall.p_value:.2g} over {overall.count} examples.",
        *comparison.notes,
        *_disagreements(comparison),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _table(comparison: Comparison) -> str:
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
        low, high = result.difference.low, result.difference.high
        interval = None if low is None else f"{low:+.1%} to {high:+.1%}"
        values = {"a": result.first.value, "b": result.second.value, "less": result.difference.value}
        rows.append(asdict(result) | values | {"interval": interval})
    return results_table(rows, columns)


def _disagreements(comparison: Comparison) -> list[str]:
    """Each in a few lines: whose choice is right, the prompt, and its best and its worst completion."""
    if not comparison.disagreements:
        return []
    lines = [
        "",
        f"The {len(comparison.disagreements)} of {comparison.num_disagreements} examples furthest apart that only one "
        "has right (margins in units of each model's root mean square; a negative one prefers the worse completion).",
    ]
    for item in comparison.disagreements:
        example, right = item.example, comparison.names[0 if item.first_is_right else 1]
        pairs = zip(comparison.names, item.standardized_margins, strict=True)
        margins = ", ".join(f"{name} {margin:+.2f}" for name, margin in pairs)
        place = " / ".join(dict.fromkeys((item.suite, example.task_name)))
        lines += ["", f"{place}, id {example.id}: only {right} is right ({margins})"]
        ranked = sorted(example.completions, key=lambda completion: completion.rank)
        texts = {"prompt": example.context, "better": ranked[0].messages, "worse": ranked[-1].messages}
        for name, messages in texts.items():
            text = textwrap.shorten(last_text(messages), 100, placeholder="...")
            lines.append(f"  {name + ':':<7} {text}")
    return lines
