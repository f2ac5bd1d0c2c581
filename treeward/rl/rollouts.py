"""`collect`: the experience of a step: prompts are drawn, completions are sampled and rewarded.

    rollouts = collect(run, step=17, drawn=544)
    rollouts.groups, rollouts.rewards_PG, rollouts.used_PG
    rollouts.prompts_drawn                  # more than the groups where dynamic sampling left some out

Everything follows from the seed, the step and how many prompts were drawn before: a step that is taken again, after a
kill, samples the same completions from the same weights.

Shapes: P prompts, G completions to each.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from treeward.environments.interface import Reward
from treeward.errors import ModelError
from treeward.rl.advantages import informative_groups, shaped_rewards, used_completions
from treeward.rl.environment_runner import GroupRewards, environment_metrics, failure_summary
from treeward.rl.experience import CompletionGroup, completion_lengths, truncated_completions
from treeward.rl.watch import length_correlation

if TYPE_CHECKING:
    from treeward.rl.setup import GRPOSetup

__all__ = ["Rollouts", "collect", "sampling_seed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The groups of a step. `rewards_PG`: those to optimise, NaN where there is none; `raw_PG`: before any shaping;
    `used_PG`: which completions are learnt from. `metrics`: of all that was sampled. `seconds`: by phase.
    """

    groups: list[CompletionGroup]
    rewards_PG: Tensor
    raw_PG: Tensor
    used_PG: Tensor
    prompts_drawn: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    length_correlation: float | None = None


def collect(run: GRPOSetup, *, step: int, drawn: int) -> Rollouts:
    """The rollouts of the step after `step` steps, in which `drawn` prompts were drawn.

    With dynamic sampling batches of prompts are drawn until there are enough groups whose rewards differ (DAPO, Yu et
    al. 2025, arXiv 2503.14476). Raises what generator and environments raise, and `ModelError` where too many
    completions have no reward or no group has two rewards that differ.
    """
    grpo = run.config.grpo
    count = grpo.prompts_per_draw if grpo.use_dynamic_sampling else grpo.num_prompts_per_step
    most_draws = grpo.dynamic_sampling_max_gen_batches if grpo.use_dynamic_sampling else 1
    seconds = {"generation": 0.0, "rewards": 0.0}
    groups: list[CompletionGroup] = []
    found: list[GroupRewards] = []
    shaped: list[Tensor] = []
    while len(found) < most_draws:
        indices = run.order.take(drawn + len(found) * count, count)
        started = time.monotonic()
        prompts = [run.prompts[i] for i in indices]
        batch = run.generator.generate(
            [one.prompt for one in prompts],
            [one.token_ids for one in prompts],
            num_completions=grpo.num_generations_per_prompt,
            seed=sampling_seed(grpo.seed, step, len(found)),
        )
        sampled = time.monotonic()
        found.append(run.rewards.reward(batch))
        _check_failures(run, found[-1])
        groups += batch
        shaped.append(shaped_rewards(run.config, batch, found[-1].rewards_PG))
        seconds["generation"] += sampled - started
        seconds["rewards"] += time.monotonic() - sampled
        if sum(int(informative_groups(one).sum()) for one in shaped) >= grpo.num_prompts_per_step:
            break
    rewards_PG, raw_PG = torch.cat(shaped), torch.cat([one.raw_PG for one in found])
    metrics = _metrics(groups, rewards_PG, raw_PG, found)
    correlation = length_correlation(rewards_PG.tolist(), completion_lengths(groups).tolist())
    if grpo.use_dynamic_sampling:
        kept = informative_groups(rewards_PG).nonzero().flatten().tolist()[: grpo.num_prompts_per_step]
        _check_signal(kept, grpo.num_prompts_per_step, len(found))
        groups, rewards_PG, raw_PG = [groups[i] for i in kept], rewards_PG[kept], raw_PG[kept]
    if run.rewards.has_gold:
        started = time.monotonic()
        gold_PG = run.rewards.gold(groups)
        seconds["rewards"] += time.monotonic() - started
        if bool(gold_PG.isfinite().any()):
            metrics["train/gold_reward"] = float(gold_PG.nanmean())
    used_PG = used_completions(groups, rewards_PG, grpo)
    metrics["train/num_masked"] = float((rewards_PG.isfinite() & ~used_PG).sum())
    return Rollouts(groups, rewards_PG, raw_PG, used_PG, len(found) * count, metrics, seconds, correlation)


def sampling_seed(seed: int, step: int, draw: int, *, validation: bool = False) -> int:
    """The seed of one call of the generator; validations and steps never share one."""
    return int(np.random.SeedSequence([seed, int(validation), step, draw]).generate_state(1, np.uint64)[0] >> 1)


def _check_failures(run: GRPOSetup, found: GroupRewards) -> None:
    failed = len(found.failures) / max(found.rewards_PG.numel(), 1)
    if failed > run.config.grpo.max_failed_share:
        raise ModelError(
            "too many completions have no reward",
            got=f"{failed:.0%} of {found.rewards_PG.numel()}; {failure_summary(found.failures)}",
            need=f"at most {run.config.grpo.max_failed_share:.0%} (grpo.max_failed_share)",
            fix="mend the environment and start the same command again: it resumes before this step",
        )


def _metrics(
    groups: Sequence[CompletionGroup], rewards_PG: Tensor, raw_PG: Tensor, found: Sequence[GroupRewards]
) -> dict[str, float]:
    """Of all that was sampled in a step, in one draw or several."""
    by_environment: dict[str, list[Reward]] = defaultdict(list)
    for one in found:
        for label, environment_rewards in one.by_environment.items():
            by_environment[label] += environment_rewards
    rewards = rewards_PG[rewards_PG.isfinite()]
    metrics = {
        "train/reward": float(rewards.mean()) if len(rewards) else math.nan,
        "train/reward_std": float(rewards.std(unbiased=False)) if len(rewards) else math.nan,
        "train/raw_reward": float(raw_PG.nanmean()),
        "train/mean_gen_tokens_per_sample": float(completion_lengths(groups).float().mean()),
        "train/truncation_rate": float(truncated_completions(groups).float().mean()),
        "train/mean_prompt_length": sum(len(group.prompt_ids) for group in groups) / len(groups),
        "train/groups_without_signal": 1 - float(informative_groups(rewards_PG).float().mean()),
        "train/num_failed": float(rewards_PG.numel() - len(rewards)),
        "train/num_groups_sampled": float(len(groups)),
    }
    known = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return known | environment_metrics(by_environment)


def _check_signal(kept: Sequence[int], wanted: int, num_draws: int) -> None:
    if not kept:
        raise ModelError(
            "no group has two rewards that differ: there is nothing to learn from",
            where="grpo.use_dynamic_sampling",
            got=f"{num_draws} batches of prompts, each with equal rewards for all its completions",
            need="a prompt with a better and a worse completion",
            fix="raise policy.generation.temperature, or look at the rewards: they may be saturated",
        )
    if len(kept) < wanted:
        logger.warning("Dynamic sampling found %d of %d groups in %d batches.", len(kept), wanted, num_draws)
