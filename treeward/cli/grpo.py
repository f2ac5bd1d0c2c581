"""`treeward grpo`: parse, import, call, and say what came of it."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys

from treeward.cli.interrupts import check_interrupts, heeding_interrupts
from treeward.cli.train import what_was_saved
from treeward.config.load import load_grpo_config
from treeward.config.preflight import check_inputs

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
examples:
  treeward grpo --config examples/configs/grpo_rm_1B.yaml env.reward_model.model_name=results/rm/final
  treeward grpo --config run.yaml loss_fn.reference_policy_kl_penalty=0.05 grpo.num_generations_per_prompt=8

The same command resumes a run that was stopped. Every key: docs/config.md."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="the YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override keys of the file; ~key removes one")


@heeding_interrupts
def run(arguments: argparse.Namespace) -> int:
    config = load_grpo_config(arguments.config, arguments.overrides)
    check_inputs(config)
    loop = importlib.import_module("treeward.rl.grpo")  # torch: seconds, and only if the config is sound
    outcome = loop.grpo(config)
    check_interrupts()
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
            f"{what_was_saved(outcome.step, config.checkpointing)}\n"
        )
    return int(outcome.exit_code)
