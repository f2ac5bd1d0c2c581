"""`treeward grpo`: parse, import, call, and print the outcome."""

from __future__ import annotations

import shlex
import sys

from treeward.cli.options import ConfigFile, Overrides
from treeward.cli.train import what_was_saved
from treeward.config.load import load_grpo_config
from treeward.config.preflight import check_inputs

EXAMPLES = """\
examples:
  treeward grpo --config examples/configs/grpo_rm_1B.yaml env.reward_model.model_name=results/rm/final
  treeward grpo --config run.yaml loss_fn.reference_policy_kl_penalty=0.05 grpo.num_generations_per_prompt=8

The same command resumes a run that was stopped. Every key: docs/config.md."""


def run(config: ConfigFile, overrides: Overrides = None) -> int:
    loaded = load_grpo_config(config, overrides or [])
    check_inputs(loaded)

    from treeward.rl.grpo import grpo  # torch: seconds, once the config is sound

    outcome = grpo(loaded)
    for name, value in outcome.validation.items():
        sys.stdout.write(f"{name:>40}  {value:.4f}\n")
    for alarm in outcome.alarms:
        sys.stdout.write(f"\nAlarm after step {alarm.step}: {alarm.sentence}\n")
    if outcome.report is not None:
        sys.stdout.write(f"\nThe report of the run:  {shlex.quote(str(outcome.report))}\n")
    if outcome.model_folder is not None:
        folder = shlex.quote(str(outcome.model_folder))
        sys.stdout.write(f"The policy of step {outcome.model_step} of {outcome.total_steps} is in {folder}\n")
    if outcome.interrupted_by:
        sys.stderr.write(
            f"Stopped after step {outcome.step} of {outcome.total_steps} ({outcome.interrupted_by}). "
            f"{what_was_saved(outcome.step, loaded.checkpointing)}\n"
        )
    return outcome.exit_code
