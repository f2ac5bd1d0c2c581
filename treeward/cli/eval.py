"""`treeward eval`: score suites or comparisons with reward models, and say what they have learnt."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from treeward.cli.comparisons import DataOptions, advice_of_a_command, data_options, dataset_config
from treeward.cli.options import (
    BatchTokens,
    Device,
    Dtype,
    Ensemble,
    MaxLength,
    RewardModels,
    Shaping,
    Truncation,
    TrustRemoteCode,
    Unchecked,
    ensemble_section,
    fixed_shaping,
    loading_options,
    scoring_options,
    write_table,
)
from treeward.errors import ConfigError
from treeward.progress import ShownProgress
from treeward.tables import Column

if TYPE_CHECKING:
    from treeward.evaluation.session import Candidate

__all__ = ["EXAMPLES", "run"]

EXAMPLES = """\
examples:
  treeward eval results/quickstart/final --data held_out.jsonl --output results/eval
  treeward eval results/quickstart/final --dataset-name Bundled --split length_controlled --output results/eval
  treeward eval MODEL --data held_out.jsonl --data-option prompt_key=question --output results/eval
  treeward eval MODEL OTHER_MODEL --suite rewardbench,rewardbench2 --output results/eval
  treeward eval MODEL --suite llmbar=downloads/llmbar,rmbench --output results/eval --perturbations 100
  treeward eval --checkpoints results/rm --data held_out.jsonl --output results/eval-checkpoints
  treeward eval MODEL OTHER_MODEL --ensemble worst --data held_out.jsonl --output results/eval-ensemble
  treeward eval MODEL --shaping contract --data held_out.jsonl --output results/eval-shaped

Suites: rewardbench, rewardbench2, rmbench, judgebench, llmbar, from the hub or, as
NAME=FOLDER, from a copy. The same command goes on where it was interrupted.
OUTPUT/report.html is the report, OUTPUT/results.json has its numbers, and
OUTPUT/MODEL/SUITE/examples.jsonl a row for each example. The exit code is 1 where an
example has no score (too long, refused by the template): it counts as wrong, and a
warning says how many there are and why."""

_STEP = re.compile(r"step_(\d+)")
_LONGEST_NAME = 100


def run(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help="Folders or hub names of reward models.")
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(metavar="RUN_DIR", help="The checkpoints of a training run, and how they drift.")
    ] = None,
    suite: Annotated[list[str] | None, typer.Option(metavar="NAME[=FOLDER],...", help="Suites to run.")] = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Comparisons in any format that training reads.")
    ] = None,
    dataset_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Format of --data; default: seen in it.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of --data, or of a dataset that brings its own.")] = None,
    data_option: DataOptions = None,
    output: Annotated[str | None, typer.Option(metavar="DIR", help="Where rows, results and the report go.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="The first N examples of each suite.")] = None,
    tie_policy: Annotated[Literal["strict", "half"], typer.Option(help="A tie counts nothing, or half.")] = "strict",
    perturbations: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rewrite the completions of N examples of each suite.")
    ] = None,
    training_data: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Training comparisons to look for in the suites.")
    ] = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="results.json only.")] = False,
    shaping: Shaping = None,
    ensemble: Ensemble = None,
    batch_tokens: BatchTokens = None,
    max_length: MaxLength = None,
    truncation: Truncation = None,
    unchecked: Unchecked = False,
    device: Device = None,
    dtype: Dtype = "float32",
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    options_of_data = data_options(data_option or [])
    if options_of_data and not data and not dataset_name and not training_data:
        raise ConfigError("there is no --data for these options", where="--data-option", got=data_option)
    suites = _suites(suite or [], data or [], dataset_name, split, options_of_data, tie_policy)
    training = [dataset_config(path, None, None, options_of_data) for path in training_data or []]
    options = loading_options(device, dtype, trust_remote_code)
    options |= scoring_options(batch_tokens, max_length, truncation, unchecked)
    candidates = _candidates(models or [], checkpoints, ensemble, shaping, options)  # errors before suites are read

    from treeward.evaluation.session import run_evaluation

    with ShownProgress() as progress, advice_of_a_command():
        done = run_evaluation(
            candidates,
            suites,
            None if output is None else Path(output),
            limit=limit,
            num_perturbations=perturbations,
            training_data=training,
            drift=checkpoints is not None,
            report=not no_report,
            on_progress=progress.show,
        )
    _print(done.summaries)
    _print_drift(done.drift)
    if done.path is not None:
        sys.stdout.write(f"\n{'The report is' if done.path.suffix == '.html' else 'The results are'} {done.path}\n")
    return 1 if any(one.result.num_failed for one in done.summaries) else 0


def _candidates(
    models: list[str], run_dir: str | None, ensemble: str | None, shaping: str | None, options: Mapping[str, Any]
) -> list[Candidate]:
    """The checkpoints in order, then the models; with an ensemble of models they are one."""
    from treeward.evaluation.running import folder_names
    from treeward.evaluation.session import Candidate
    from treeward.model.pretrained import check_local

    section = None if ensemble is None else ensemble_section(ensemble)
    fixed = fixed_shaping(shaping)
    checkpoints = {} if run_dir is None else _checkpoints(Path(run_dir))
    if not models and not checkpoints:
        raise ConfigError(
            "there is no model to evaluate", where="MODEL", got="none", need="a model, or --checkpoints RUN_DIR"
        )
    for model in models:
        check_local(model)  # the last one too, before hours of the first
    names = {model: name for name, model in checkpoints.items()}
    names |= {model: name for model, name in folder_names(models).items() if model not in names}
    groups = [(model,) for model in names]
    if section is not None and section.over == "models":
        if checkpoints:
            raise ConfigError(
                "an ensemble is one model, and checkpoints are compared with each other",
                where="--ensemble, --checkpoints",
                need="one of them, or an ensemble of heads as {over: heads}",
                fix="to make an ensemble of checkpoints, name them as models: RUN_DIR/step_100/model ...",
            )
        groups = [tuple(models)]  # type: ignore[list-item]
    candidates = []
    for members in groups:
        rewards = RewardModels(members, section, fixed)
        shaper = rewards.check_alone(trust_remote_code=options["trust_remote_code"])
        is_plain = section is None and fixed is None
        candidates.append(
            Candidate(
                _name_of_rewards(rewards, [names[model] for model in members]),
                partial(_load, rewards, options),
                published_name=members[0] if is_plain and not Path(members[0]).exists() else None,
                note=_note(rewards, shaper),
                in_drift=members[0] in checkpoints.values(),
            )
        )
    return candidates


def _load(rewards: RewardModels, options: Mapping[str, Any]) -> Any:
    from treeward.evaluation.session import scorer_identity

    scorer = rewards.load_rewards(options)
    return scorer, scorer_identity(scorer, rewards.models[0])


def _checkpoints(folder: Path) -> dict[str, str]:
    """The models of a run's checkpoints by name, in the order of their steps, and `final` last."""
    if not folder.is_dir():
        raise ConfigError(
            "there is no such run", where="--checkpoints", got=str(folder), need="a run's checkpoint_dir, a folder"
        )
    inside = sorted(path.name for path in folder.iterdir() if path.is_dir())
    steps = sorted((int(match[1]), name) for name in inside if (match := _STEP.fullmatch(name)))
    found = {name: folder / name / "model" for _, name in steps}
    if "final" in inside:
        found["final"] = folder / "final"
    if absent := [str(path) for path in found.values() if not path.is_dir()]:
        raise ConfigError("a checkpoint holds no model", where="--checkpoints", got=f"no folder {absent[0]}")
    if not found:
        raise ConfigError(
            "the folder has no checkpoints",
            where="--checkpoints",
            got=f"{folder} with {', '.join(inside[:10]) or 'no folders'}{', ...' if len(inside) > 10 else ''}",
            need="folders step_N, as in checkpointing.checkpoint_dir of a training run",
        )
    return {name: str(path) for name, path in found.items()}


def _name_of_rewards(rewards: RewardModels, names: list[str]) -> str:
    """Of the candidate's folder: worst-of-a-b, a-shaped, ..."""
    name = "-".join(names)
    if rewards.ensemble is not None:
        if len(name) > _LONGEST_NAME:
            name = f"{len(names)}-models"
        heads = "heads-of-" if rewards.ensemble.over == "heads" else ""
        name = f"{rewards.ensemble.method}-of-{heads}{name}"
    return name if rewards.shaping is None else f"{name}-shaped"


def _note(rewards: RewardModels, shaper: Any) -> str | None:
    """What a reader of the report must know of the numbers that are ranked."""
    parts = []
    if rewards.ensemble is not None:
        members = "its heads" if rewards.ensemble.over == "heads" else ", ".join(rewards.models)
        parts.append(f"{rewards.ensemble.method} of {members}")
    if shaper is not None:
        section = json.dumps(shaper.config.model_dump(mode="json", exclude_defaults=True)).replace('"', "")
        parts.append(f"rewards, shaped by {section}, in the place of scores")
    return "; ".join(parts) or None


def _suites(
    named: list[str],
    data: list[str],
    dataset_name: str | None,
    split: str | None,
    options: Mapping[str, Any],
    tie_policy: Literal["strict", "half"],
) -> list[tuple[Any, str | None]]:
    from treeward.evaluation.suites import PreferenceSuite, get_suite

    found: list[tuple[Any, str | None]] = []
    for text in ",".join(named).split(","):
        name, _, source = text.strip().partition("=")
        if name:
            found.append((get_suite(name, tie_policy=tie_policy), source or None))
    paths: list[str | None] = [*data] or ([None] if dataset_name is not None else [])
    for path in paths:
        config = dataset_config(path, dataset_name, split, options)
        name = _name_of(path or str(dataset_name), split)
        found.append((PreferenceSuite(name, config, tie_policy=tie_policy), None))
    if not found:
        raise ConfigError(
            "there is nothing to evaluate on",
            where="--suite, --data",
            got="neither",
            need="suites, as --suite rewardbench, or comparisons, as --data FILE",
        )
    return found


def _name_of(path: str, split: str | None) -> str:
    name = re.sub(r"(\.(jsonl|json|csv|parquet|arrow|gz))+$", "", Path(path).name) or "data"
    return re.sub(r"[^\w.-]+", "-", name if split is None else f"{name}-{split}")


def _print(summaries: list[Any]) -> None:
    rows = []
    for one in summaries:
        for metric, part in [(one.result.headline, ""), *((m, m.name) for m in one.result.sections)]:
            rows.append({"model": one.model, "suite": one.suite, "part": part, "value": metric.value,
                         "low": metric.low, "high": metric.high, "count": metric.count})  # fmt: skip
        controlled = one.length.length_controlled_accuracy
        rows.append({"model": one.model, "suite": one.suite, "part": "length-controlled", "value": controlled.value,
                     "low": controlled.low, "high": controlled.high, "count": controlled.count})  # fmt: skip
    columns = [
        *(Column(key) for key in ("model", "suite", "part")),
        Column("value", format=".3f"),
        Column("low", title="95 % from", format=".3f"),
        Column("high", title="to", format=".3f"),
        Column("count", title="of"),
    ]
    write_table(rows, columns)


def _print_drift(drift: list[Any]) -> None:
    rows = []
    for one in drift:
        for step in one.steps:
            found = {} if step.drift is None else {m.name: m.value for m in step.drift.metrics()}
            rows.append({"suite": one.suite, "from": step.before, "to": step.after} | found)
    columns = [
        *(Column(key) for key in ("suite", "from", "to")),
        Column("order_agreement", title="pairs alike", format=".3f"),
        Column("scale_ratio", title="spread x", format=".3f"),
        Column("shift", title="scores moved", format="+.3f"),
        Column("rank_correlation", title="rank correlation", format=".3f"),
    ]
    if rows:
        sys.stdout.write("\n")
        write_table(rows, columns)
