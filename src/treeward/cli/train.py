"""`treeward train`: parse, import, call, and print the outcome.

examples:
  treeward train --config quickstart
  treeward train --config rm policy.model_name=Qwen/Qwen2.5-1.5B rm.max_num_steps=200
  treeward train --config run.yaml data.train_data_path=train.jsonl ~data.val_data_path +policy.max_grad_norm=0.5

The same command resumes a run that was stopped. With cluster.gpus_per_node=8, or under torchrun, it runs on several
processes. Every key: docs/config.md.
"""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from treeward.cli.options import ConfigFile, Overrides
from treeward.config.checkpointing import CheckpointingConfig
from treeward.config.load import load_config
from treeward.config.preflight import check_inputs
from treeward.tables import results_table

if TYPE_CHECKING:
    from treeward.training.loop import Outcome


def run(config: ConfigFile, overrides: Overrides = None) -> int:
    loaded = load_config(config, overrides or [])
    check_inputs(loaded)

    from treeward.parallel.launch import launch  # torch: seconds, once the config is sound
    from treeward.training.card import result_columns, result_rows
    from treeward.training.train import train

    outcome = launch(train, loaded)
    if outcome is None:
        return 0  # of several processes the main one tells
    if outcome.interrupted_by:
        tell_interrupted(outcome, loaded.checkpointing)
        return outcome.exit_code
    if outcome.validation:
        rows = result_rows(outcome.validation_sizes, outcome.validation)
        sys.stdout.write(f"\n{results_table(rows, result_columns(loaded))}\n")
    lines = [f"\n{name}: {said}" for name, said in outcome.learnt.items()]
    caveats = [f"{name}: {caveat}" for name, caveat in outcome.caveats.items()]
    if outcome.model_folder is not None:
        folder = shlex.quote(str(outcome.model_folder))
        lines += [f"\nThe model of step {outcome.model_step} of {outcome.total_steps} is in {folder}", *caveats]
        limit = f"It was trained on conversations of at most {loaded.max_sequence_length} tokens; longer ones are"
        is_cut = loaded.data.truncation == "truncate_left"
        lines.append(f"{limit} {'cut, as then' if is_cut else 'scored with a warning, or refused by --max-length'}.")
        lines.append(f"Score with it:  treeward score {folder} --data FILE.jsonl --output scores.jsonl")
        lines.append(f"Report on it:   treeward eval {folder} --data FILE.jsonl --output results/eval")
    if outcome.upload_error is not None:
        lines.append(f"WARNING: the model is not on the hub, and the same command tries again. {outcome.upload_error}")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return outcome.exit_code


def tell_interrupted(outcome: Outcome, checkpointing: CheckpointingConfig) -> None:
    """Say on standard error whether a run that was interrupted can go on."""
    if not checkpointing.enabled:
        saved = "Nothing was saved: checkpointing.enabled is false."
    elif outcome.step == 0:
        saved = "There was nothing to save yet. The same command starts again."
    else:
        saved = "Saved. The same command goes on from here."
    by = outcome.interrupted_by
    sys.stderr.write(f"Stopped after step {outcome.step} of {outcome.total_steps} ({by}). {saved}\n")
