"""`treeward eval`: score suites or comparisons with reward models, and say what they have learnt."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from treeward.cli.comparisons import add_data_option, advice_of_a_command, data_options, dataset_config
from treeward.cli.interrupts import check_interrupts, heeding_interrupts
from treeward.cli.model_arguments import (
    RewardModels,
    add_model_arguments,
    add_reward_arguments,
    ensemble_section,
    fixed_shaping,
    model_options,
    positive,
)
from treeward.errors import ConfigError

__all__ = ["EXAMPLES", "add_arguments", "run"]

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

Suites: rewardbench, rewardbench2, rmbench, judgebench, llmbar, from the hub or, as NAME=FOLDER, from a copy. The same
command goes on where it was interrupted. OUTPUT/report.html is the report, OUTPUT/results.json has its numbers, and
OUTPUT/MODEL/SUITE/examples.jsonl a row for each example. The exit code is 1 where an example has no score (too long,
refused by the template): it counts as wrong, and a warning says how many there are and why."""

_STEP = re.compile(r"step_(\d+)")
_LONGEST_NAME = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="folders or hub names of reward models")
    parser.add_argument(
        "--checkpoints", default=None, metavar="RUN_DIR", help="the checkpoints of a training run, and how they drift"
    )
    parser.add_argument("--suite", action="append", default=[], metavar="NAME[=FOLDER],...", help="suites to run")
    parser.add_argument(
        "--data", action="append", default=[], metavar="FILE", help="comparisons in any format that training reads"
    )
    parser.add_argument("--dataset-name", default=None, metavar="NAME", help="format of --data; default: seen in it")
    parser.add_argument("--split", default=None, help="split of --data, or of a dataset that brings its own")
    add_data_option(parser)
    parser.add_argument("--output", default=None, metavar="DIR", help="where rows, results and the report go")
    parser.add_argument("--limit", type=positive, default=None, metavar="N", help="the first N examples of each suite")
    parser.add_argument(
        "--tie-policy", choices=("strict", "half"), default="strict", help="what a tie counts: nothing, or half"
    )
    parser.add_argument(
        "--perturbations",
        type=positive,
        default=None,
        metavar="N",
        help="rewrite the replies of N examples of each suite",
    )
    parser.add_argument(
        "--training-data",
        action="append",
        default=[],
        metavar="FILE",
        help="comparisons of training, to look for in the suites",
    )
    parser.add_argument("--no-report", action="store_true", help="results.json only")
    add_reward_arguments(parser)
    add_model_arguments(parser)


@heeding_interrupts
def run(arguments: argparse.Namespace) -> int:
    options = model_options(arguments)
    suites = _suites(arguments)
    options_of_data = data_options(arguments.data_option)
    training_data = [dataset_config(path, None, None, options_of_data) for path in arguments.training_data]
    candidates = _candidates(arguments, options)  # what cannot be is told before suites are read
    session = importlib.import_module("treeward.evaluation.session")
    from treeward.progress import ShownProgress

    with ShownProgress(check_interrupts) as progress, advice_of_a_command():
        done = session.run_evaluation(
            candidates,
            suites,
            None if arguments.output is None else Path(arguments.output),
            limit=arguments.limit,
            num_perturbations=arguments.perturbations,
            training_data=training_data,
            drift=arguments.checkpoints is not None,
            report=not arguments.no_report,
            on_progress=progress.show,
        )
    check_interrupts()
    _print(done.summaries)
    _print_drift(done.drift)
    if done.path is not None:
        sys.stdout.write(f"\n{'The report is' if done.path.suffix == '.html' else 'The results are'} {done.path}\n")
    return 1 if any(one.result.num_failed for one in done.summaries) else 0


def _candidates(arguments: argparse.Namespace, options: Mapping[str, Any]) -> list[Any]:
    """The checkpoints in order, then the models; with an ensemble of models they are one."""
    session = importlib.import_module("treeward.evaluation.session")
    folder_names = importlib.import_module("treeward.evaluation.running").folder_names
    ensemble = None if arguments.ensemble is None else ensemble_section(arguments.ensemble)
    shaping = fixed_shaping(arguments.shaping)
    checkpoints = {} if arguments.checkpoints is None else _checkpoints(Path(arguments.checkpoints))
    if not arguments.models and not checkpoints:
        raise ConfigError(
            "there is no model to evaluate", where="MODEL", got="none", need="a model, or --checkpoints RUN_DIR"
        )
    check_local = importlib.import_module("treeward.model.pretrained").check_local
    for model in arguments.models:
        check_local(model)  # the last one too, before hours of the first
    names = {model: name for name, model in checkpoints.items()}
    names |= {model: name for model, name in folder_names(arguments.models).items() if model not in names}
    if ensemble is not None and ensemble.over == "models":
        if checkpoints:
            raise ConfigError(
                "an ensemble is one model, and checkpoints are compared with each other",
                where="--ensemble, --checkpoints",
                need="one of them, or an ensemble of heads as {over: heads}",
                fix="to make an ensemble of checkpoints, name them as models: RUN_DIR/step_100/model ...",
            )
        groups = [tuple(arguments.models)]
    else:
        groups = [(model,) for model in names]
    candidates = []
    for models in groups:
        rewards = RewardModels(models, ensemble, shaping)
        shaper = rewards.check_alone(trust_remote_code=arguments.trust_remote_code)
        name = _name_of_rewards(rewards, [names[model] for model in models])
        is_plain = ensemble is None and shaping is None
        candidates.append(
            session.Candidate(
                name,
                partial(_load, rewards, options),
                published_name=models[0] if is_plain and not Path(models[0]).exists() else None,
                note=_note(rewards, shaper),
                in_drift=models[0] in checkpoints.values(),
            )
        )
    return candidates


def _load(rewards: RewardModels, options: Mapping[str, Any]) -> tuple[Any, str]:
    scorer = rewards.load_rewards(options)
    identity = importlib.import_module("treeward.evaluation.session").scorer_identity
    return scorer, identity(scorer, rewards.models[0])


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


def _suites(arguments: argparse.Namespace) -> list[tuple[Any, str | None]]:
    module = importlib.import_module("treeward.evaluation.suites")
    found: list[tuple[Any, str | None]] = []
    for text in ",".join(arguments.suite).split(","):
        name, _, source = text.strip().partition("=")
        if name:
            found.append((module.get_suite(name, tie_policy=arguments.tie_policy), source or None))
    data = arguments.data or ([None] if arguments.dataset_name is not None else [])
    options = data_options(arguments.data_option)
    if options and not data and not arguments.training_data:
        raise ConfigError(
            "there is no --data that this could be about", where="--data-option", got=arguments.data_option
        )
    if data:
        for path in data:
            config = dataset_config(path, arguments.dataset_name, arguments.split, options)
            name = _name_of(path or arguments.dataset_name, arguments.split)
            found.append((module.PreferenceSuite(name, config, tie_policy=arguments.tie_policy), None))
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
    tables = importlib.import_module("treeward.tables")
    rows = []
    for one in summaries:
        for metric, part in [(one.result.headline, ""), *((m, m.name) for m in one.result.sections)]:
            rows.append({"model": one.model, "suite": one.suite, "part": part, "value": metric.value,
                         "low": metric.low, "high": metric.high, "count": metric.count})  # fmt: skip
        controlled = one.length.length_controlled_accuracy
        rows.append({"model": one.model, "suite": one.suite, "part": "length-controlled", "value": controlled.value,
                     "low": controlled.low, "high": controlled.high, "count": controlled.count})  # fmt: skip
    columns = [
        *(tables.Column(key) for key in ("model", "suite", "part")),
        tables.Column("value", format=".3f"),
        tables.Column("low", title="95 % from", format=".3f"),
        tables.Column("high", title="to", format=".3f"),
        tables.Column("count", title="of"),
    ]
    _write_table(rows, columns)


def _print_drift(drift: list[Any]) -> None:
    tables = importlib.import_module("treeward.tables")
    rows = []
    for one in drift:
        for step in one.steps:
            found = {} if step.drift is None else {m.name: m.value for m in step.drift.metrics()}
            rows.append({"suite": one.suite, "from": step.before, "to": step.after} | found)
    columns = [
        *(tables.Column(key) for key in ("suite", "from", "to")),
        tables.Column("order_agreement", title="pairs alike", format=".3f"),
        tables.Column("scale_ratio", title="spread x", format=".3f"),
        tables.Column("shift", title="scores moved", format="+.3f"),
        tables.Column("rank_correlation", title="rank correlation", format=".3f"),
    ]
    if rows:
        sys.stdout.write("\n")
        _write_table(rows, columns)


def _write_table(rows: list[dict[str, Any]], columns: list[Any]) -> None:
    can_draw = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    table = importlib.import_module("treeward.tables").results_table(rows, columns, ascii_only=not can_draw)
    sys.stdout.write(table + "\n")
