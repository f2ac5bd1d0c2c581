"""`treeward eval`: score suites or comparisons with reward models, and say what they have learnt.

examples:
  treeward eval results/quickstart/final --data held_out.jsonl --output results/eval
  treeward eval MODEL --suite rewardbench=downloads/rewardbench,rmbench --output results/eval --perturbations 100
  treeward eval results/rm/step_*/model results/rm/final --data held_out.jsonl --output results/eval-checkpoints
  treeward eval "{models: [MODEL, OTHER_MODEL], ensemble: worst}" --data held_out.jsonl --output results/eval-ensemble
  treeward eval MODEL "{type: judge, base_url: http://localhost:8000/v1, model: qwen, mode: pairwise}" --suite llmbar

Suites: rewardbench, rewardbench2, rmbench, judgebench, llmbar, from the hub or a copy.
A judge is an environment (docs/environments.md); what it used is told below the table.
An example without a score counts as wrong, and the exit code is 1.
"""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from treeward.cli.comparisons import DataOptions, DatasetName, Split, choosing_split, dataset_config, split_option
from treeward.cli.options import ModelOptions, candidate, model_section, output_folder, with_model_options
from treeward.errors import ConfigError
from treeward.progress import ShownProgress
from treeward.tables import Column, results_table

_COLUMNS = [
    *(Column(key) for key in ("model", "suite", "part")),
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
        typer.Argument(metavar="MODEL", help="Folders, hub names, or sections as {type: judge, ...}."),
    ] = None,
    suite: Annotated[list[str] | None, typer.Option(metavar="NAME[=FOLDER],...", help="Suites to run.")] = None,
    data: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Comparisons, as training reads them.")] = None,
    dataset_name: DatasetName = None,
    split: Split = None,
    data_option: DataOptions = None,
    output: Annotated[str | None, typer.Option(metavar="DIR", help="Where rows, results and the report go.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="The first N examples of each suite.")] = None,
    perturbations: Annotated[int | None, typer.Option(min=1, help="Rewrite so many examples of each suite.")] = None,
    *,
    options: ModelOptions,
) -> int:
    folder = output_folder(output)
    if data_option and not (data or dataset_name):
        need = "--data or --dataset-name"
        raise ConfigError("there are no comparisons for the option", where="--data-option", got=data_option, need=need)
    suites = _suites(suite or [], data or [], dataset_name, split, data_option)
    sections = [model_section(text) for text in models or []]
    if perturbations and any("type" in section for section in sections):
        problem = "an environment may reward by comparing, and is not asked about rewritten completions"
        raise ConfigError(problem, where="--perturbations", need="reward models alone")
    candidates = [candidate(section, "MODEL", options) for section in sections]  # errors before suites are read

    from treeward.evaluation.findings import usage_finding, verdict
    from treeward.evaluation.session import run_evaluation

    with ShownProgress() as progress:
        summaries, report = run_evaluation(
            candidates,
            suites,
            folder,
            limit=limit,
            num_perturbations=perturbations,
            on_progress=progress.show,
        )
    rows: list[dict[str, Any]] = []
    for summary in summaries:
        parts = {"": summary.result.headline, **{section.name: section for section in summary.result.sections}}
        parts["length-controlled"] = summary.length.length_controlled_accuracy
        rows += (
            {"model": summary.model, "suite": summary.suite.name, "part": name} | asdict(part)
            for name, part in parts.items()
        )
    sys.stdout.write(results_table(rows, _COLUMNS) + "\n")
    for summary in summaries:
        sys.stdout.write("\n" + verdict(summary) + "\n")
    for summary in summaries:
        if usage := usage_finding(summary.result.details.get("usage", {})):
            sys.stdout.write(f"\n{summary.model} on {summary.suite.name}: {usage}\n")
    if report is not None:
        sys.stdout.write(f"\nThe report is {report}\n")
    results = [summary.result for summary in summaries]
    has_result = all(result.headline.value is not None for result in results)
    return 0 if has_result and not any(result.num_failed for result in results) else 1


def _suites(
    named: list[str], data: list[str], name: str | None, split: str | None, options: list[str] | None
) -> list[tuple[Any, str | None]]:
    """The suites with their folders, and the files of comparisons, or the dataset called `name`, as suites."""
    from treeward.evaluation.suites import PreferenceSuite, get_suite

    suites: list[tuple[Any, str | None]] = []
    for text in filter(None, ",".join(named).split(",")):
        suite, _, source = text.strip().partition("=")
        suites.append((get_suite(suite), source or None))
    paths: list[str | None] = [*data] or ([None] if name is not None else [])
    for path in paths:
        plain = re.sub(r"(\.(jsonl|json|csv|parquet|arrow|gz))+$", "", Path(path or str(name)).name) or "data"
        called = re.sub(r"[^\w.-]+", "-", plain if split is None else f"{plain}-{split}")
        suites.append((PreferenceSuite(called, dataset_config(path, name, split, options)), None))
    if not suites:
        need = "suites, as --suite rewardbench, or comparisons, as --data FILE"
        raise ConfigError("there is nothing to evaluate on", where="--suite, --data", got="neither", need=need)
    return suites
