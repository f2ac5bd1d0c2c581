"""`collect`: what a step learns from; prompts are drawn, completions are sampled and rewarded.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from treeward.config.grpo_run import GRPORunConfig
from treeward.data.prompt_encoding import EncodedPrompt
from treeward.errors import ModelError
from treeward.rl.advantages import informative_groups
from treeward.rl.experience import CompletionGroup
from treeward.rl.overlong import (
    completion_lengths,
    less_overlong_penalty,
    less_truncation_penalty,
    scaled,
    truncated_completions,
    used_completions,
)
from treeward.rl.rewarding import GroupRewards
from treeward.rl.watch import length_correlation

if TYPE_CHECKING:
    from treeward.rl.setup import GRPORun

__all__ = ["Rollouts", "adjusted", "collect", "sampling_seed"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The groups of a step. `rewards_PG`: what is optimised, NaN where there is no reward; `raw_PG`: before any
    shaping; `used_PG`: which completions are learnt from. `metrics`: of all that was sampled. `seconds`: by phase.
    """

    groups: list[CompletionGroup]
    rewards_PG: Tensor
    raw_PG: Tensor
    known_PG: Tensor
    used_PG: Tensor
    gold_PG: Tensor | None
    prompts_drawn: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    length_correlation: float | None = None


@dataclass(slots=True)
class _Draws:
    """What came of the draws of a step so far."""

    groups: list[CompletionGroup] = field(default_factory=list)
    found: list[GroupRewards] = field(default_factory=list)
    adjusted: list[Tensor] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"generation": 0.0, "rewards": 0.0})


def collect(run: GRPORun, *, step: int, drawn: int) -> Rollouts:
    """The rollouts of the step after `step` steps, in which `drawn` prompts were drawn.

    Raises what generator and environments raise, and `ModelError` where too many completions have no reward or no group
    has two rewards that differ.
    """
    grpo = run.config.grpo
    draws, counted = _Draws(), run.generator.metrics()
    num_draws = num_informative = 0
    count = grpo.prompts_per_draw if grpo.use_dynamic_sampling else grpo.num_prompts_per_step
    while num_informative < grpo.num_prompts_per_step:
        prompts = [run.prompts[i] for i in run.order.take(drawn + num_draws * count, count)]
        _draw(run, prompts, sampling_seed(grpo.seed, step, num_draws), draws)
        num_draws += 1
        num_informative += int(informative_groups(draws.adjusted[-1], draws.found[-1].known_PG).sum())
        if not grpo.use_dynamic_sampling or num_draws == grpo.dynamic_sampling_max_gen_batches:
            break
    rewards_PG = torch.cat(draws.adjusted)
    raw_PG = torch.cat([one.raw_PG for one in draws.found])
    known_PG = torch.cat([one.known_PG for one in draws.found])
    has_signal = informative_groups(rewards_PG, known_PG)
    metrics = _metrics(run.config, draws.groups, rewards_PG, raw_PG, known_PG, has_signal)
    metrics |= _over_draws([one.metrics for one in draws.found])
    metrics |= {f"train/{name}": n - counted[name] for name, n in run.generator.metrics().items()}
    kept = list(range(len(draws.groups)))
    if grpo.use_dynamic_sampling:
        kept = has_signal.nonzero().flatten().tolist()[: grpo.num_prompts_per_step]
        _check_signal(kept, grpo.num_prompts_per_step, num_draws)
    groups = [draws.groups[i] for i in kept]
    started = time.monotonic()
    gold_PG = run.rewards.gold(groups) if run.rewards.has_gold else None
    draws.seconds["rewards"] += time.monotonic() - started
    if gold_PG is not None and bool(gold_PG.isfinite().any()):
        metrics["train/gold_reward"] = float(gold_PG.nanmean())
    used_PG = used_completions(groups, known_PG[kept], truncated=grpo.truncated)
    metrics["train/num_masked"] = float((known_PG[kept] & ~used_PG).sum())
    lengths = completion_lengths(draws.groups)
    return Rollouts(
        groups,
        rewards_PG[kept],
        raw_PG[kept],
        known_PG[kept],
        used_PG,
        gold_PG,
        num_draws * count,
        metrics,
        draws.seconds,
        length_correlation(rewards_PG.tolist(), lengths.tolist()),
    )


def adjusted(config: GRPORunConfig, groups: Sequence[CompletionGroup], rewards_PG: Tensor) -> Tensor:
    """Rewards scaled, less what the length of a completion costs, as `grpo` says; NaN stays NaN.

    The overlong penalty is measured from where a completion is cut: after what its own prompt leaves room for, if that
    is less than `max_response_length`.
    """
    grpo = config.grpo
    if grpo.reward_scaling.enabled:
        rewards_PG = scaled(rewards_PG, **grpo.reward_scaling.model_dump(exclude={"enabled"}))
    if grpo.truncated == "penalty":
        rewards_PG = less_truncation_penalty(rewards_PG, truncated_completions(groups), penalty=grpo.truncation_penalty)
    if grpo.reward_shaping.enabled and groups:
        rewards_PG = torch.stack(
            [
                _less_overlong(config, group, rewards_G, lengths_G)
                for group, rewards_G, lengths_G in zip(groups, rewards_PG, completion_lengths(groups), strict=True)
            ]
        )
    return rewards_PG


def _less_overlong(config: GRPORunConfig, group: CompletionGroup, rewards_G: Tensor, lengths_G: Tensor) -> Tensor:
    shaping = config.grpo.reward_shaping
    room = config.policy.max_total_sequence_length - len(group.prompt_ids)
    longest = min(config.max_response_length, room)
    return less_overlong_penalty(
        rewards_G,
        lengths_G,
        max_response_length=longest,
        buffer_length=min(shaping.overlong_buffer_length, longest),
        penalty=shaping.overlong_buffer_penalty,
    )


def sampling_seed(seed: int, step: int, draw: int, *, validation: bool = False) -> int:
    """The seed of one call of the generator; validations and steps never share one."""
    return int(np.random.SeedSequence([seed, int(validation), step, draw]).generate_state(1, np.uint64)[0] >> 1)


def _draw(run: GRPORun, prompts: Sequence[EncodedPrompt], seed: int, draws: _Draws) -> None:
    started = time.monotonic()
    groups = run.generator.generate(
        [one.prompt for one in prompts],
        [one.token_ids for one in prompts],
        num_completions=run.config.grpo.num_generations_per_prompt,
        seed=seed,
    )
    sampled = time.monotonic()
    found = run.rewards.reward(groups)
    draws.seconds["generation"] += sampled - started
    draws.seconds["rewards"] += time.monotonic() - sampled
    failed = 1 - float(found.known_PG.float().mean())
    if failed > run.config.grpo.max_failed_share:
        first = next(iter(found.errors.items()), None)
        raise ModelError(
            "too many completions have no reward",
            got=f"{failed:.0%} of {found.known_PG.numel()}"
            + ("" if first is None else f"; {first[1].count} x {first[0]} ({first[1].example})"),
            need=f"at most {run.config.grpo.max_failed_share:.0%} (grpo.max_failed_share)",
            fix="mend the environment and start the same command again: it resumes before this step",
        )
    draws.groups += groups
    draws.found.append(found)
    draws.adjusted.append(adjusted(run.config, groups, found.rewards_PG))


def _metrics(
    config: GRPORunConfig,
    groups: Sequence[CompletionGroup],
    rewards_PG: Tensor,
    raw_PG: Tensor,
    known_PG: Tensor,
    has_signal_P: Tensor,
) -> dict[str, float]:
    lengths = completion_lengths(groups).float()
    rewards = rewards_PG[known_PG]
    found = {
        "train/reward": float(rewards.mean()) if len(rewards) else math.nan,
        "train/reward_std": float(rewards.std(unbiased=False)) if len(rewards) else math.nan,
        "train/raw_reward": float(raw_PG.nanmean()),
        "train/mean_gen_tokens_per_sample": float(lengths.mean()),
        "train/truncation_rate": float(truncated_completions(groups).float().mean()),
        "train/mean_prompt_length": sum(len(group.prompt_ids) for group in groups) / len(groups),
        "train/groups_without_signal": 1 - float(has_signal_P.float().mean()),
        "train/num_failed": float((~known_PG).sum()),
        "train/num_groups_sampled": float(len(groups)),
    }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _over_draws(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of environments over all draws of a step, from those of each."""
    if len(found) == 1:
        return dict(found[0])
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for one in found for name in one):
        label, _, kind = name.partition("/")
        there = [one for one in found if name in one]
        values = np.array([one[name] for one in there])
        counts = np.array([max(one[f"{label}/num_samples"] - one[f"{label}/num_failed"], 1) for one in there])
        if kind in ("num_samples", "num_failed"):
            metrics[name] = float(values.sum())
        elif kind in ("min_reward", "max_reward"):
            metrics[name] = float(values.min() if kind == "min_reward" else values.max())
        elif kind == "std_reward":
            means = np.array([one[f"{label}/mean_reward"] for one in there])
            between = (means - np.average(means, weights=counts)) ** 2
            metrics[name] = math.sqrt(float(np.average(values**2 + between, weights=counts)))
        else:
            metrics[name] = float(np.average(values, weights=counts))
    return metrics


def _check_signal(kept: Sequence[int], wanted: int, num_draws: int) -> None:
    if not kept:
        raise ModelError(
            "no group has two rewards that differ: there is nothing to learn from",
            where="grpo.use_dynamic_sampling",
            got=f"{num_draws} batches of prompts whose completions are all rewarded alike",
            need="a prompt with a better and a worse completion",
            fix="raise policy.generation.temperature, or look at the rewards: they may be saturated",
        )
    if len(kept) < wanted:
        logger.warning("Dynamic sampling found %d of %d groups in %d batches.", len(kept), wanted, num_draws)
