"""`treeward train`: parse, import, call, and print the outcome."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from treeward.cli.options import ConfigFile, Overrides, write_table
from treeward.config.checkpointing import CheckpointingConfig
from treeward.config.load import load_config
from treeward.config.preflight import check_inputs

if TYPE_CHECKING:
    from treeward.training.train import TrainingOutcome


EXAMPLES = """\
examples:
  treeward train --config examples/configs/quickstart.yaml
  treeward train --config examples/configs/rm.yaml policy.model_name=Qwen/Qwen2.5-1.5B rm.max_num_steps=200
  treeward train --config run.yaml data.train_data_path=train.jsonl ~data.val_data_path +policy.max_grad_norm=0.5

The same command resumes a run that was stopped. Every key: docs/config.md."""


def run(config: ConfigFile, overrides: Overrides = None) -> int:
    loaded = load_config(config, overrides or [])
    check_inputs(loaded)

    from treeward.training.export import result_columns, result_rows  # torch: seconds, once the config is sound
    from treeward.training.train import train

    outcome = train(loaded)
    if outcome.interrupted_by and outcome.model_folder is None:
        sys.stderr.write(
            f"Stopped after step {outcome.step} of {outcome.total_steps} ({outcome.interrupted_by}). "
            f"{what_was_saved(outcome.step, loaded.checkpointing)}\n"
        )
        return outcome.exit_code
    if outcome.validation:
        sys.stdout.write("\n")
        write_table(result_rows(outcome.validation_sizes, outcome.validation), result_columns(outcome.choice))
    if outcome.model_folder is not None:
        folder = shlex.quote(str(outcome.model_folder))
        sys.stdout.write(
            f"\nThe model of step {outcome.model_step} of {outcome.total_steps} is in {folder}\n"
            f"{_how_chosen(outcome)}"
            f"Score with it:  treeward score {folder} --data FILE.jsonl --output scores.jsonl\n"
        )
    if outcome.report is not None:
        from treeward.training.reporting import report_findings, reported_sets

        sys.stdout.write(f"What it has learnt:  {shlex.quote(str(outcome.report))}\n")
        sys.stdout.write("".join(f"\n{one.verdict}\n" for one in reported_sets(outcome.report)))
        sys.stdout.write(_finding(report_findings(outcome.report)))
    if outcome.interrupted_by:
        sys.stderr.write(f"The report was stopped ({outcome.interrupted_by}). The same command goes on with it.\n")
    return outcome.exit_code


def _how_chosen(outcome: TrainingOutcome) -> str:
    """How the model was chosen, and why the numbers above are better than on new data, a line each."""
    lines, choice = [], outcome.choice
    if choice is not None and choice.among_several:
        sets = ", ".join(choice.sets)
        lines.append(f"It is the best of {choice.num_checkpoints} checkpoints by {choice.name}; chosen on {sets}, its "
                     "numbers there are better than on new data.\n")  # fmt: skip
    for name, count in outcome.num_trained_on.items():
        if count:
            size = outcome.validation_sizes.get(name)
            lines.append(
                f"{count} of {size} comparisons of {name} are in the training data too: no test of new data.\n"
            )
    return "".join(lines)


def _finding(findings: dict[str, str]) -> str:
    """The worst finding of a report, and which other sets have one."""
    if not findings:
        return ""
    (first, finding), *others = findings.items()
    too = f" The report says it of {', '.join(name for name, _ in others)} too." if others else ""
    return f"\nOn {first}: {finding}{too}\n"


def what_was_saved(step: int, checkpointing: CheckpointingConfig) -> str:
    """Whether a run that was interrupted after `step` steps can go on."""
    if not checkpointing.enabled:
        return "Nothing was saved: checkpointing.enabled is false."
    if step == 0:
        return "There was nothing to save yet. The same command starts again."
    if not checkpointing.save_optimizer:
        return "Saved without the optimiser (checkpointing.save_optimizer is false): the run cannot be resumed."
    return "Saved. The same command goes on from here."
