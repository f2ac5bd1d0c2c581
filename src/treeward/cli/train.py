r"""`treeward train`: parse, import, call, and print the outcome.

examples:
  treeward train --model Qwen/Qwen2.5-0.5B-Instruct --data pairs.csv --dry-run
  treeward train --config quickstart
  treeward train --config rm policy.model_name=Qwen/Qwen2.5-1.5B rm.max_num_steps=200
  treeward train --config run.yaml data.train_data_path=train.jsonl ~data.val_data_path \
      +policy.max_grad_norm=0.5

--model and --data need no configuration. The command then chooses the format of the data, the
held-out part, the learning rate, the batch size and the precision, and prints them. Change one by
an override. With --config, --model and --data replace the model and the data of the file.

To resume a run, type the same command again. cluster.gpus_per_node=8 trains on eight GPUs.
docs/training.md explains the output; docs/config.md has every key.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treeward.cli.comparisons import choosing_split, split_key
from treeward.cli.options import OptionalConfigFile, Overrides
from treeward.config.checkpointing import CheckpointingConfig
from treeward.config.first_run import choose, named_values, values_of
from treeward.config.load import load_file
from treeward.config.preflight import check_inputs
from treeward.config.run import RewardModelRunConfig
from treeward.errors import ConfigError
from treeward.tables import results_table

if TYPE_CHECKING:
    from treeward.training.loop import Outcome
    from treeward.training.train import TrainingOutcome

ModelName = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="The model to start from: a folder or hub name."),
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE", help="Comparisons, in any format of docs/data.md."),
]
Validation = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Comparisons to validate on; default: a part of --data."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the settings, the data and the memory, and stop.")
]


def run(
    overrides: Overrides = None,
    config: OptionalConfigFile = None,
    model: ModelName = None,
    data: Data = None,
    validation: Validation = None,
    dry_run: DryRun = False,
) -> int:
    if config is None and (model is None or data is None):
        raise ConfigError(
            "there is nothing to train",
            where="command line",
            need="--model MODEL with --data FILE, or --config FILE",
        )
    if validation is not None and data is None:
        raise ConfigError(
            "--validation belongs to --data",
            where="command line",
            need="--data FILE too",
        )
    loaded = load_file(
        RewardModelRunConfig,
        config,
        overrides or (),
        values=named_values(model, data, validation),
    )
    check_inputs(loaded)
    if model is not None or data is not None:
        loaded = _with_choices(loaded, overrides or (), config, model, data, validation)
    if dry_run:
        return _tell_dry_run(loaded)

    # These import torch, which takes seconds: a faulty configuration is told before.
    from treeward.parallel.launch import launch
    from treeward.training.card import result_columns, result_rows
    from treeward.training.train import train

    with choosing_split(split_key(loaded.data)):
        outcome = launch(train, loaded)
    # The main process of several has it, and writes.
    if outcome is None:
        return 0
    # A table of an unfinished run would look like a result.
    if outcome.interrupted_by:
        tell_interrupted(outcome, loaded.checkpointing)
        return outcome.exit_code
    if outcome.validation:
        rows = result_rows(outcome.validation_sizes, outcome.validation)
        columns = result_columns(loaded.ranking_metric, loaded.policy.reward_model_cfg)
        sys.stdout.write(f"\n{results_table(rows, columns)}\n")
    lines = [f"\n{name}: {sentence}" for name, sentence in outcome.learnt.items()]
    if outcome.model_folder is not None:
        lines += _model_lines(outcome, outcome.model_folder, loaded)
    if outcome.upload_error is not None:
        problem = "the model is not on the hub, and the same command tries again"
        lines.append(f"WARNING: {problem}. {outcome.upload_error}")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return outcome.exit_code


def _model_lines(
    outcome: TrainingOutcome,
    model_folder: Path,
    loaded: RewardModelRunConfig,
) -> list[str]:
    """Where the model is, what it is worth, and what can be done with it."""
    # The lines below are copied into a shell.
    folder = shlex.quote(str(model_folder))
    step = f"{outcome.model_step} of {outcome.total_steps}"
    lines = [f"\nThe model of step {step} is in {folder}"]
    lines += [f"{name}: {caveat}" for name, caveat in outcome.caveats.items()]
    # Commands that score with it would invite to do so.
    if outcome.is_collapsed:
        remedy = "Try a lower policy.optimizer.kwargs.lr or a longer warm-up"
        lines += [
            "It is collapsed: it gives everything the same score. Do not score with it.",
            f"{remedy}, and look at the data: treeward check-data.",
        ]
        return lines
    limit = f"It was trained on conversations of at most {loaded.max_sequence_length} tokens"
    longer = "scored with a warning, or refused by --max-length"
    if loaded.data.truncation == "truncate_left":
        longer = "cut, as then"
    lines += [
        f"{limit}; longer ones are {longer}.",
        f"Score with it:  treeward score {folder} --data FILE.jsonl --output scores.jsonl",
        f"Report on it:   treeward eval {folder} --data FILE.jsonl --output results/eval",
    ]
    return lines


def _with_choices(
    loaded: RewardModelRunConfig,
    overrides: Sequence[str],
    config: str | None,
    model: str | None,
    data: str | None,
    validation: str | None,
) -> RewardModelRunConfig:
    """The configuration with what --model and --data leave open, which is told."""
    # It imports torch, which takes seconds.
    from treeward.planning.facts import facts_of

    # The choices follow from facts of the model and the data.
    facts = facts_of(loaded)
    choices = choose(
        loaded,
        facts,
        model=model is not None,
        data=data is not None,
        run=config is None,
    )
    values = values_of(choices, named_values(model, data, validation))
    # Once more, because the user's overrides go before what was chosen.
    chosen = load_file(RewardModelRunConfig, config, overrides, values=values)
    # Only the first process of torchrun writes what was chosen.
    if os.environ.get("RANK", "0") != "0":
        return chosen
    # What the user says was not chosen here.
    overridden = {text.lstrip("+~").partition("=")[0] for text in overrides}
    shown = [choice for choice in choices if choice.key not in overridden]
    width = max((len(choice.text) for choice in shown), default=0)
    sys.stdout.write("Chosen; the same command takes other values of these keys:\n")
    for choice in shown:
        # An override, which can be copied into the command and changed.
        sys.stdout.write(f"  {choice.text:{width}}  # {choice.why}\n")
    # Before what the processes of the run write.
    sys.stdout.flush()
    return chosen


def _tell_dry_run(loaded: RewardModelRunConfig) -> int:
    """Plan the first batch, write what it holds, and return the exit code."""
    import torch

    from treeward.planning.dry_run import dry_run

    device = None
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
    # The kind of GPU decides what fits, which is not told here, and no size.
    found = dry_run(loaded, "cpu" if device is None else "h100")
    first = found.first
    lines = [f"{name}: {summary}" for name, summary in found.rows.items()]
    lines.append(f"Steps: {found.steps:,}")
    kind = loaded.policy.reward_model_cfg
    if kind.freeze_backbone:
        # The head learns from hidden states that are kept: no step runs the backbone.
        lines.append("The backbone is frozen: it reads all data once, before the first step.")
        lines.append(f"The first step: {first.comparisons} {kind.unit}, of the head alone")
    else:
        sizes = f"{first.tokens:,} tokens ({first.row_tokens:,} as plain rows)"
        lines.append(
            f"The first step: {first.comparisons} {kind.unit}, {sizes}; "
            f"forward passes: {first.passes}",
        )
    if found.memory is None:
        lines.append(f"Memory: not planned, because the run has {found.why_no_memory}.")
    else:
        parts = []
        for name, size in found.memory.memory.items():
            if name != "peak":
                parts.append(f"{name} {size / 1e9:.2f}")
        peak = f"{found.memory.memory['peak'] / 1e9:.2f} GB"
        if found.memory.unknown is None:
            peak += " at most"
        else:
            peak += f" and the activations of {found.memory.unknown}, which are not known,"
        if device is not None:
            peak += f" of the {device.total_memory / 1e9:.0f} GB of {device.name}"
        lines.append(f"Memory: {peak} ({', '.join(parts)})")
    lines.append("Nothing was trained: the same command without --dry-run trains.")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def tell_interrupted(outcome: Outcome, checkpointing: CheckpointingConfig) -> None:
    """Say on standard error whether a run that was interrupted can go on."""
    if not checkpointing.enabled:
        saved = "Nothing was saved: checkpointing.enabled is false."
    elif outcome.step == 0:
        saved = "There was nothing to save yet. The same command starts again."
    else:
        saved = "Saved. The same command resumes the run."
    by = outcome.interrupted_by
    sys.stderr.write(
        f"Stopped after step {outcome.step} of {outcome.total_steps} ({by}). {saved}\n",
    )
