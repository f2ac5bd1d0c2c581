r"""`treeward eval`: score suites or comparisons with reward models, and say what they have learnt.

examples:
  treeward eval results/quickstart/final --data held_out.jsonl --output results/eval
  treeward eval MODEL --suite rewardbench=downloads/rewardbench,rmbench --output results/eval \
      --perturbations 100
  treeward eval MODEL --suite rewardbench --perturbations 500 --rewrites reword \
      --output results/eval-reword
  treeward eval results/rm/step_*/model results/rm/final --data held_out.jsonl \
      --output results/eval-checkpoints
  treeward eval "{models: [MODEL, OTHER_MODEL], ensemble: worst}" --data held_out.jsonl \
      --output results/eval-ensemble
  treeward eval MODEL --suite llmbar \
      "{type: judge, base_url: http://localhost:8000/v1, model: qwen, mode: pairwise}"

A suite is read from the hub, or from a copy as rewardbench=FOLDER; `published` is those that model
cards report, as published=FOLDER with a copy of each. A judge is an environment
(docs/environments.md). An example without a score counts as wrong, and the exit code is 1.
docs/evaluation.md explains the report.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treeward.cli.comparisons import (
    DataOptions,
    DatasetName,
    Split,
    choosing_split,
    dataset_config,
    split_option,
)
from treeward.cli.options import (
    ModelOptions,
    candidate,
    model_section,
    output_folder,
    with_model_options,
)
from treeward.errors import ConfigError
from treeward.progress import ShownProgress
from treeward.tables import Column, results_table

if TYPE_CHECKING:
    from treeward.evaluation.diagnostics.agreement import CostAndAgreement
    from treeward.evaluation.findings import Summary

_FILE_SUFFIXES = re.compile(r"(\.(jsonl|json|csv|parquet|arrow|gz))+$")
_COLUMNS = [
    Column("model"),
    Column("suite"),
    Column("part"),
    Column("value", format="percent"),
    Column("low", "95 % from", "percent"),
    Column("high", "to", "percent"),
    Column("count", "of"),
]


@with_model_options
@choosing_split(split_option)
def run(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Reward models: folders, hub names, or sections as {type: judge, ...}.",
        ),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=FOLDER],...",
            help="Benchmarks: rewardbench, rewardbench2, ppepreference, ppecorrectness, rmb, "
            "rmbench, judgebench, llmbar, ifrewardbench, processbench; or published, the first "
            "seven.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Comparisons of your own, in any format of docs/data.md, or labels of steps.",
        ),
    ] = None,
    dataset_name: DatasetName = None,
    split: Split = None,
    data_option: DataOptions = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="The folder for the report, the results and a row for each example."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Use the first N examples of each suite."),
    ] = None,
    perturbations: Annotated[
        int | None,
        typer.Option(min=1, help="Rewrite so many examples of each suite, to test style biases."),
    ] = None,
    rewrites: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="How --perturbations rewrites: usual (the default), reword (as reWordBench, where "
            "that needs no model), or single rewrites of docs/evaluation.md.",
        ),
    ] = None,
    *,
    options: ModelOptions,
) -> int:
    # Before hours of scoring.
    folder = output_folder(output)
    if data_option and not (data or dataset_name):
        raise ConfigError(
            "there are no comparisons for the option",
            where="--data-option",
            got=data_option,
            need="--data or --dataset-name",
        )
    suites = _suites(suite or [], data or [], dataset_name, split, data_option)
    sections = [model_section(text) for text in models or []]
    chosen_rewrites = _chosen_rewrites(rewrites, perturbations, sections)
    # Before suites are read: errors of a model come first.
    candidates = [candidate(section, "MODEL", options) for section in sections]

    # Imports that take seconds come after the checks of the options.
    from treeward.evaluation.session import run_evaluation

    with ShownProgress() as progress:
        summaries, report = run_evaluation(
            candidates,
            suites,
            folder,
            limit=limit,
            num_perturbations=perturbations,
            rewrites=chosen_rewrites,
            on_progress=progress.show,
        )
    _tell(summaries)
    if report is not None:
        sys.stdout.write(f"\nThe report is {report}\n")
    for summary in summaries:
        # Done in part: an example without a score counts as wrong.
        if summary.result.headline.value is None or summary.result.num_failed > 0:
            return 1
    return 0


def _chosen_rewrites(
    rewrites: str | None, perturbations: int | None, sections: Sequence[dict[str, Any]]
) -> tuple[str, ...]:
    """The names of the rewrites that are asked for. Raises `ConfigError` for unknown ones, and for
    options that do not fit each other or the models."""
    from treeward.evaluation.diagnostics.rewrites import rewrites_of

    chosen = rewrites_of(rewrites or "usual")
    if rewrites and not perturbations:
        raise ConfigError(
            "no example is rewritten",
            where="--rewrites",
            got=rewrites,
            need="--perturbations N, how many examples of each suite",
        )
    if perturbations and any("type" in section for section in sections):
        raise ConfigError(
            "an environment may reward by comparing, so it cannot score rewritten completions",
            where="--perturbations",
            need="reward models alone",
        )
    return chosen


def _tell(summaries: Sequence[Summary]) -> None:
    """Write the table, a sentence on each model, and what judges used and agree on."""
    from treeward.evaluation.findings import criteria_finding, usage_finding, verdict
    from treeward.evaluation.page import judge_costs

    rows: list[dict[str, Any]] = []
    for summary in summaries:
        # The headline's row has no part.
        parts = {"": summary.result.headline}
        for section in summary.result.sections:
            parts[section.name] = section
        controlled = summary.length.length_controlled_accuracy
        if controlled.count:  # else there are no pairs of which one is longer
            parts["length-controlled"] = controlled
        for name, part in parts.items():
            row = {"model": summary.model, "suite": summary.suite.name, "part": name}
            rows.append(row | asdict(part))
    sys.stdout.write(results_table(rows, _COLUMNS) + "\n")
    for summary in summaries:
        sys.stdout.write(f"\n{verdict(summary)}\n")
    for summary in summaries:
        usage = usage_finding(summary.usage)
        if usage:
            sys.stdout.write(f"\n{summary.model} on {summary.suite.name}: {usage}\n")
        criteria = criteria_finding(summary.components)
        if criteria:
            sys.stdout.write(f"\n{summary.model} on {summary.suite.name}: {criteria}\n")
    # One table for each suite that a judge has seen.
    by_suite: dict[str, list[Summary]] = {}
    for summary in summaries:
        by_suite.setdefault(summary.suite.name, []).append(summary)
    for name, of_suite in by_suite.items():
        costs = judge_costs(of_suite)
        if costs:
            sys.stdout.write(f"\n{_costs_table(name, costs)}\n")


def _costs_table(suite: str, costs: Sequence[CostAndAgreement]) -> str:
    """What each model has used on a suite, and how often it says the same as each other one."""
    columns = [
        Column("number", title=""),
        Column("model", title=f"on {suite}"),
        Column("num_requests", title="requests"),
        Column("num_prompt_tokens", title="tokens read"),
        Column("num_completion_tokens", title="written"),
        Column("seconds", format=",.1f"),
        Column("verdicts", title="with a score", format="percent"),
        Column("both_orders", title="both orders alike", format="percent"),
    ]
    rows: list[dict[str, Any]] = []
    for number, cost in enumerate(costs, 1):
        row = {"number": number, "model": cost.model, "both_orders": cost.both_orders}
        row |= cost.usage
        row["verdicts"] = cost.verdicts.value
        for name, metric in cost.agreement.items():
            row[f"with {name}"] = metric.value
        rows.append(row)
    if len(costs) > 1:
        # By numbers: the names of models would make the table too wide.
        for number, cost in enumerate(costs, 1):
            title = f"agrees with {number}"
            columns.append(Column(f"with {cost.model}", title=title, format="percent"))
    return results_table(rows, columns)


def _suites(
    named: list[str],
    data: list[str],
    name: str | None,
    split: str | None,
    options: list[str] | None,
) -> list[tuple[Any, str | None]]:
    """The suites with their folders, and the files of data, or the dataset called `name`, as
    suites.
    """
    from treeward.evaluation.suites import get_suite, published_suites, suite_of_data

    suites: list[tuple[Any, str | None]] = []
    # An option may be repeated, or hold several names with commas.
    for text in ",".join(named).split(","):
        if text:
            suite, _, source = text.strip().partition("=")
            if suite == "published":
                suites += published_suites(source or None)
            else:
                suites.append((get_suite(suite), source or None))
    paths: list[str | None] = [*data]
    if not paths and name is not None:
        paths = [None]  # a dataset that brings its own data
    for path in paths:
        plain = _FILE_SUFFIXES.sub("", Path(path or str(name)).name) or "data"
        if split is not None:
            plain = f"{plain}-{split}"
        # The name becomes that of a folder.
        called = re.sub(r"[^\w.-]+", "-", plain)
        suites.append((suite_of_data(called, dataset_config(path, name, split, options)), None))
    if not suites:
        raise ConfigError(
            "there is nothing to evaluate on",
            where="--suite, --data",
            got="neither",
            need="suites, as --suite rewardbench, or comparisons, as --data FILE",
        )
    return suites
