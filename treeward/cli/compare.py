"""`treeward compare`: whether one reward model is better than another on the same examples, and where they differ.

examples:
  treeward compare results/eval/mine results/eval/other
  treeward compare results/eval/mine/llmbar results/eval/other/llmbar --disagreements 30

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

from treeward.errors import ConfigError
from treeward.tables import Column, results_table

if TYPE_CHECKING:
    from treeward.evaluation.comparison import Comparison, PairedResult


def run(
    first: Annotated[str, typer.Argument(metavar="A", help="Evaluation of a model: a folder, or its examples.jsonl.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Evaluation of another model on the same examples.")],
    as_json: Annotated[bool, typer.Option("--json", help="Every number as JSON on standard output.")] = False,
    disagreements: Annotated[int, typer.Option(min=0, help="How many examples to show that only one has right.")] = 10,
) -> int:
    if Path(first).exists() and Path(second).exists() and Path(first).samefile(second):
        raise ConfigError("A and B are the same evaluation", where=first, need="two models")

    from treeward.evaluation.comparison import compare, read_evaluation

    found = compare(read_evaluation(first), read_evaluation(second), num_disagreements=disagreements)
    if as_json:
        sys.stdout.write(json.dumps(asdict(found), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        return 0
    _write_table(found)
    both, same = found.both_scored, found.same_outcome
    lines = [
        "",
        f"{_verdict(found.names, found.overall)} over {found.overall.count} examples.",
        *([f"{_verdict(found.names, both)} over the {both.count} that both could score."] if both else []),
        *found.notes,
        "",
        f"Same outcome: {same.value:.1%} ({same.low:.1%} to {same.high:.1%}) of {same.count} examples.",
        *_disagreements(found),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _verdict(names: tuple[str, str], result: PairedResult) -> str:
    better, worse = names if (result.difference.value or 0) > 0 else names[::-1]
    said = f"{better} is right more often than {worse}" if result.p_value < 0.05 else "Neither is shown to be better"
    return f"{said}: p = {result.p_value:.2g}"


def _write_table(comparison: Comparison) -> None:
    a, b = comparison.names
    columns = [
        *(Column("name", "set"), Column("count", "examples"), Column("a", a, ".1%"), Column("b", b, ".1%")),
        *(Column("less", "difference", "+.1%"), Column("interval", "95 % interval")),
        *(Column("only_first", f"only {a}"), Column("only_second", f"only {b}")),
        *(Column("p_value", "p", ".2g"), Column("adjusted_p_value", "p (Holm)", ".2g")),
    ]
    rows = []
    for one in filter(None, (comparison.overall, comparison.both_scored, *comparison.parts)):
        low, high = one.difference.low, one.difference.high
        values = {"a": one.first.value, "b": one.second.value, "less": one.difference.value}
        rows.append(asdict(one) | values | {"interval": None if low is None else f"{low:+.1%} to {high:+.1%}"})
    sys.stdout.write(results_table(rows, columns) + "\n")


def _disagreements(comparison: Comparison) -> list[str]:
    """Each in a few lines: whose choice is right, the prompt, and the two completions that it is between."""
    if not comparison.disagreements:
        return []
    lines = [
        "",
        f"The {len(comparison.disagreements)} of {comparison.num_disagreements} examples furthest apart that only one "
        "has right (margins in units of each model's root mean square; a negative one prefers the worse completion).",
    ]
    for one in comparison.disagreements:
        example = one.example
        right = comparison.names[0 if one.outcomes[0] == "right" else 1]
        pairs = zip(comparison.names, one.standardized_margins, strict=True)
        margins = ", ".join(f"{name} {margin:+.2f}" for name, margin in pairs)
        place = " / ".join(dict.fromkeys((one.suite, example.task_name)))
        lines += ["", f"{place}, id {example.id}: only {right} is right ({margins})"]
        better, worse = example.completions[one.better].messages, example.completions[one.worse].messages
        for name, messages in (("prompt", example.context), ("better", better), ("worse", worse)):
            text = str(messages[-1].get("content") or "") if messages else ""
            lines.append(f"  {name + ':':<7} {textwrap.shorten(text, 100, placeholder='...')}")
    return lines
