r"""`treeward grpo`: parse, import, call, and print the outcome.

examples:
  treeward grpo --config grpo_rm_1B env.reward_model.model_name=results/rm/final
  treeward grpo --config run.yaml loss_fn.reference_policy_kl_penalty=0.05 \
      grpo.num_generations_per_prompt=8

To resume a run, type the same command again. docs/grpo.md explains the output; docs/config.md has
every key.
"""

from __future__ import annotations

import shlex
import sys

from treeward.cli.comparisons import choosing_split, split_key
from treeward.cli.options import ConfigFile, Overrides
from treeward.cli.train import tell_interrupted
from treeward.config.load import load_grpo_config
from treeward.config.preflight import check_inputs
from treeward.formatting import metric_text


def run(config: ConfigFile, overrides: Overrides = None) -> int:
    loaded = load_grpo_config(config, overrides or [])
    check_inputs(loaded)

    # These import torch, which takes seconds: a faulty configuration is told before.
    from treeward.parallel.launch import launch
    from treeward.rl.grpo import grpo

    with choosing_split(split_key(loaded.data)):
        outcome = launch(grpo, loaded)
    # The main process of several has it, and writes.
    if outcome is None:
        return 0
    lines = []
    for name, value in outcome.validation.items():
        lines.append(f"{name:>40}  {metric_text(name, value)}")
    for alarm in outcome.alarms:
        lines.append(f"\nAlarm after step {alarm.step}: {alarm.sentence}")
    if outcome.report is not None:
        lines.append(f"\nThe report of the run:  {shlex.quote(str(outcome.report))}")
    if outcome.model_folder is not None:
        folder = shlex.quote(str(outcome.model_folder))
        step = f"{outcome.model_step} of {outcome.total_steps}"
        lines.append(f"The policy of step {step} is in {folder}")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if outcome.interrupted_by:
        tell_interrupted(outcome, loaded.checkpointing)
    return outcome.exit_code
