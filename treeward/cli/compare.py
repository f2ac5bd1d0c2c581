"""`treeward compare`: whether one reward model is better than another on the same examples, and where they differ."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treeward.errors import ConfigError
from treeward.tables import Column, results_table

if TYPE_CHECKING:
    from treeward.evaluation.comparison import Comparison, Disagreement, PairedResult
    from treeward.evaluation.results import Metric

__all__ = ["EXAMPLES", "run"]

EXAMPLES = """\
examples:
  treeward compare results/eval/mine results/eval/other
  treeward compare results/eval/mine/llmbar results/eval/other/llmbar --disagreements 30 --width 400

A and B are folders that `treeward eval` wrote for one model each, or one
examples.jsonl of them. Examples are matched by suite and id; the difference is
A's accuracy less B's, with its 95 % interval."""


def run(
    first: Annotated[str, typer.Argument(metavar="A", help="Evaluation of a model: a folder, or its examples.jsonl.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Evaluation of another model on the same examples.")],
    as_json: Annotated[bool, typer.Option("--json", help="Every number as JSON on standard output.")] = False,
    disagreements: Annotated[
        int, typer.Option(min=0, metavar="N", help="Examples to show that only one model has right.")
    ] = 10,
    width: Annotated[int, typer.Option(min=0, metavar="N", help="Characters of each text; 0 for all of them.")] = 100,
    resamples: Annotated[int, typer.Option(min=100, metavar="N", help="Resamples of the intervals.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resampling.")] = 0,
) -> int:
    if Path(first).exists() and Path(second).exists() and Path(first).samefile(second):
        raise ConfigError("A and B are the same evaluation", where=first, need="two models")

    from treeward.evaluation.comparison import compare, notes, read_evaluation, to_json

    comparison = compare(
        read_evaluation(first),
        read_evaluation(second),
        num_disagreements=disagreements,
        num_resamples=resamples,
        seed=seed,
    )
    if as_json:
        text = json.dumps(to_json(comparison), indent=2, ensure_ascii=False, allow_nan=False)
    else:
        text = _text(comparison, notes(comparison), width or None)
    sys.stdout.write(text + "\n")
    return 0


def _text(comparison: Comparison, notes: list[str], width: int | None) -> str:
    ascii_only = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    a, b = comparison.names
    columns: list[str | Column] = [
        "set",
        "examples",
        Column("first", a, ".1%"),
        Column("second", b, ".1%"),
        Column("difference", format="+.1%"),
        Column("interval", "95 % interval"),
        Column("only_first", f"only {a}"),
        Column("only_second", f"only {b}"),
        Column("p", format=".2g"),
        Column("p_holm", "p (Holm)", ".2g"),
    ]
    several = len(comparison.suites) > 1
    rows = [_row("all", comparison.overall)]
    for suite in comparison.suites:
        if several:
            rows.append(_row(str(suite.suite), suite))
        subsets = [subset for subset in comparison.subsets if subset.suite == suite.suite]
        if len(subsets) > 1:
            prefix = f"{suite.suite} / " if several else ""
            rows.extend(_row(prefix + str(subset.subset), subset) for subset in subsets)
    parts = [results_table(rows, columns, ascii_only=ascii_only), "\n".join([_verdict(comparison), *notes])]
    parts.append("\n".join(_agreement(comparison)))
    if comparison.disagreements:
        parts.append(_intro(comparison))
        parts += [_disagreement(one, (a, b), width) for one in comparison.disagreements]
    return "\n\n".join(parts)


def _intro(comparison: Comparison) -> str:
    """What the examples below are, of how many, and where the others are that the table counts."""
    shown, found = len(comparison.disagreements), comparison.num_disagreements
    without = comparison.overall.only_first + comparison.overall.only_second - found
    more = f" {without} more cannot be placed: the other model has no score for them." if without else ""
    return (
        f"The {shown} of {found} examples furthest apart that only one has right (margins in units of each model's root"
        f" mean square; a negative one prefers the worse answer).{more}"
    )


def _row(name: str, result: PairedResult) -> dict[str, Any]:
    low, high = result.difference.low, result.difference.high
    return {
        "set": name,
        "examples": result.count,
        "first": result.first.value,
        "second": result.second.value,
        "difference": result.difference.value,
        "interval": None if low is None or high is None else f"{low:+.1%} to {high:+.1%}",
        "only_first": result.only_first,
        "only_second": result.only_second,
        "p": result.p_value,
        "p_holm": result.adjusted_p_value,
    }


def _verdict(comparison: Comparison) -> str:
    overall = comparison.overall
    if overall.p_value >= 0.05:
        return f"Neither is shown to be better: p = {overall.p_value:.2g} over {overall.count} examples."
    better, worse = comparison.names if (overall.difference.value or 0) > 0 else comparison.names[::-1]
    return f"{better} is right more often than {worse}: p = {overall.p_value:.2g} over {overall.count} examples."


def _agreement(comparison: Comparison) -> list[str]:
    agreement = comparison.agreement
    return [
        f"Same outcome: {_metric(agreement.same_outcome, '.1%')} of {agreement.same_outcome.count} examples; "
        f"Cohen's kappa {_metric(agreement.kappa, '.2f')}.",
        f"Rank correlation of their margins: {_metric(agreement.margin_correlation, '.2f')}, over "
        f"{agreement.margin_correlation.count} examples that both could score.",
    ]


def _metric(metric: Metric, form: str) -> str:
    if metric.value is None:
        return "not defined"
    if metric.low is None or metric.high is None:
        return format(metric.value, form)
    return f"{metric.value:{form}} ({metric.low:{form}} to {metric.high:{form}})"


def _disagreement(one: Disagreement, names: tuple[str, str], width: int | None) -> str:
    """The example in a few lines: whose choice is right, what was asked, and the two answers that it is between."""
    example = one.example
    place = " / ".join(dict.fromkeys((one.suite, example.subset)))
    right = names[0] if one.outcomes[0] == "right" else names[1]
    margins = ", ".join(f"{name} {margin:+.2f}" for name, margin in zip(names, one.standardized_margins, strict=True))
    texts = {
        "prompt": _one_line(example.context[-1:], width),
        "better": _one_line(example.completions[one.better][-1:], width),
        "worse": _one_line(example.completions[one.worse][-1:], width),
    }
    lines = (f"  {name + ':':<7} {text}" for name, text in texts.items())
    return "\n".join([f"{place}, id {example.id}: only {right} is right ({margins})", *lines])


def _one_line(messages: Sequence[Mapping[str, Any]], width: int | None) -> str:
    text = " ".join(" ".join(str(message.get("content") or "") for message in messages).split())
    return text if width is None or len(text) <= width else text[: max(width - 3, 0)] + "..."
