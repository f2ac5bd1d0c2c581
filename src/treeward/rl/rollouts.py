"""`collect`: the experience of a step: prompts are drawn, completions are sampled and rewarded.

    rollouts = collect(run, step=17, drawn=544)
    rollouts.groups, rollouts.rewards_PG, rollouts.used_PG
    rollouts.prompts_drawn                  # more than the groups where dynamic sampling left some out

Everything follows from the seed, the step and how many prompts were drawn before: a step that is taken again, after a
kill, samples the same completions from the same weights.

    result = validate(run, should_stop=lambda: stop.reason)     # the policy on prompts that it is not trained on

A validation completes the same prompts with the same seeds every time, so the same weights give the same numbers.

Shapes: P prompts, G completions to each.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treeward import processes
from treeward.data.conversation import template_columns
from treeward.errors import ModelError
from treeward.rl.advantages import informative_groups, length_correlation, shaped_rewards, used_completions
from treeward.rl.environment_runner import GroupRewards, environment_metrics, failure_summary
from treeward.rl.generation import CompletionGroup, completion_lengths, truncated_completions

if TYPE_CHECKING:
    from treeward.rl.setup import GRPOSetup

logger = logging.getLogger(__name__)

_VALIDATION_BATCH = 256
"""Prompts between two looks at whether the run should stop."""
LOGGED_PROMPTS = 8
"""Prompts of each validation, or step, whose completions are kept for the report."""
_SAMPLED = ("reward", "raw_reward", "gold_reward", "kl")


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The groups of a step. `rewards_PG`: the rewards to optimise, NaN for none; `used_PG`: which completions to learn
    from. `metrics`: over all sampled completions, as logged; `watched`: for the watch. `samples`: as in
    `PolicyValidation`.
    """

    groups: list[CompletionGroup]
    rewards_PG: Tensor
    used_PG: Tensor
    prompts_drawn: int
    metrics: Mapping[str, float]
    watched: Mapping[str, float | None]
    samples: Sequence[Mapping[str, Any]]


class PolicyValidation(NamedTuple):
    """`watched`: the arguments of `OverOptimisationWatch.observe`. `samples`: lines of `samples.jsonl` without their
    step.
    """

    metrics: Mapping[str, float]
    watched: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]


def collect(run: GRPOSetup, *, step: int, drawn: int) -> Rollouts:
    """The rollouts of the step after `step` steps, in which `drawn` prompts were drawn.

    With dynamic sampling batches of prompts are drawn until there are enough groups whose rewards differ (DAPO, Yu et
    al. 2025, arXiv 2503.14476). Passes on the errors of generator and environments, and raises `ModelError` where too
    many completions have no reward or no group has two rewards that differ.
    """
    grpo = run.config.grpo
    wanted, is_dynamic = grpo.num_prompts_per_step, grpo.use_dynamic_sampling
    together = run.prompts.together
    count = math.ceil(wanted * grpo.batch_multiplier / together) * together
    most_draws = grpo.dynamic_sampling_max_gen_batches if is_dynamic else 1
    generation = rewarding = 0.0
    groups: list[CompletionGroup] = []
    draws: list[GroupRewards] = []
    rewards_PG = torch.empty(0, grpo.num_generations_per_prompt)
    while len(draws) < most_draws and int(informative_groups(rewards_PG).sum()) < wanted:
        started = time.monotonic()
        indices = run.order.take(drawn + len(draws) * count, count)
        batch = run.generator.generate(
            [run.prompts.prompts[i] for i in indices],
            [run.prompts.token_ids[i].tolist() for i in indices],
            num_completions=grpo.num_generations_per_prompt,
            seed=sampling_seed(grpo.seed, step, len(draws)),
        )
        sampled = time.monotonic()
        draws.append(processes.on_main(partial(run.rewards.reward, batch)))
        processes.on_main(lambda: _check_failures(draws[-1], grpo.max_failed_share))
        groups += batch
        rewards_PG = torch.cat([rewards_PG, shaped_rewards(run.config, batch, draws[-1].rewards_PG)])
        generation, rewarding = generation + sampled - started, rewarding + time.monotonic() - sampled
    metrics = _metrics(groups, rewards_PG, draws)
    raw_PG = torch.cat([draw.raw_PG for draw in draws])
    correlation = length_correlation(rewards_PG, completion_lengths(groups))
    if is_dynamic:
        kept = informative_groups(rewards_PG).nonzero().flatten().tolist()[:wanted]
        processes.on_main(lambda: _check_signal(kept, wanted, len(draws)))
        groups, rewards_PG, raw_PG = [groups[i] for i in kept], rewards_PG[kept], raw_PG[kept]
    measurements = {"reward": rewards_PG, "raw_reward": raw_PG}
    if grpo.gold_environment is not None:
        started = time.monotonic()
        measurements["gold_reward"] = processes.on_main(lambda: run.rewards.gold(groups))
        metrics["train/gold_reward"] = float(measurements["gold_reward"].nanmean())
        rewarding += time.monotonic() - started
    used_PG = used_completions(groups, rewards_PG, grpo)
    metrics["train/num_masked"] = float((rewards_PG.isfinite() & ~used_PG).sum())
    finite_metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    finite_metrics |= {"timing/train/generation": generation, "timing/train/rewards": rewarding}
    watched = {
        "groups_without_signal": finite_metrics["train/groups_without_signal"],
        "length_correlation": correlation,
    }
    samples = _samples(groups, measurements)
    return Rollouts(groups, rewards_PG, used_PG, len(draws) * count, finite_metrics, watched, samples)


def sampling_seed(seed: int, step: int, draw: int, *, validation: bool = False) -> int:
    """The seed of one call of the generator; validations and steps never share one."""
    return int(np.random.SeedSequence([seed, int(validation), step, draw]).generate_state(1, np.uint64)[0] >> 1)


def _check_failures(rewards: GroupRewards, most: float) -> None:
    num, failed = rewards.rewards_PG.numel(), len(rewards.failures)
    if failed / max(num, 1) > most:
        raise ModelError(
            "too many completions have no reward",
            got=f"{failed / num:.0%} of {num}; {failure_summary(rewards.failures)}",
            need=f"at most {most:.0%} (grpo.max_failed_share)",
            fix="mend the environment and start the same command again: it resumes before this step",
        )


def _metrics(groups: Sequence[CompletionGroup], rewards_PG: Tensor, draws: Sequence[GroupRewards]) -> dict[str, float]:
    """The metrics of all completions that a step sampled, in one draw or several; NaN for missing values."""
    rewards = rewards_PG[rewards_PG.isfinite()]
    return {
        "train/reward": float(rewards.mean()),
        "train/reward_std": float(rewards.std(unbiased=False)) if len(rewards) else math.nan,
        "train/raw_reward": float(torch.cat([draw.raw_PG for draw in draws]).nanmean()),
        "train/mean_gen_tokens_per_sample": float(completion_lengths(groups).float().mean()),
        "train/truncation_rate": float(truncated_completions(groups).float().mean()),
        "train/mean_prompt_length": sum(len(group.prompt_ids) for group in groups) / len(groups),
        "train/groups_without_signal": 1 - float(informative_groups(rewards_PG).float().mean()),
        "train/num_failed": float(rewards_PG.numel() - len(rewards)),
        "train/num_groups_sampled": float(len(groups)),
    } | environment_metrics(draws)


def _check_signal(kept: Sequence[int], wanted: int, num_draws: int) -> None:
    if len(kept) < wanted:
        logger.warning("Dynamic sampling found %d of %d groups in %d batches.", len(kept), wanted, num_draws)
    if not kept:
        raise ModelError(
            "no group has two rewards that differ: there is nothing to learn from",
            where="grpo.use_dynamic_sampling",
            got=f"{num_draws} batches of prompts",
            fix="raise policy.generation.temperature, or look at the rewards: they may be saturated",
        )


def validate(run: GRPOSetup, *, should_stop: Callable[[], str | None] = lambda: None) -> PolicyValidation | None:
    """Complete, reward and measure every validation prompt; None if `should_stop` gave a reason on the way."""
    grpo = run.config.grpo
    groups: list[CompletionGroup] = []
    measurements: dict[str, list[Tensor]] = defaultdict(list)
    draws: list[GroupRewards] = []
    for number, start in enumerate(range(0, len(run.validation), _VALIDATION_BATCH)):
        if should_stop():
            return None
        chosen = run.validation[start : start + _VALIDATION_BATCH]
        batch = run.generator.generate(
            [prompt for prompt, _ in chosen],
            [token_ids for _, token_ids in chosen],
            num_completions=grpo.num_val_generations,
            seed=sampling_seed(grpo.seed, 0, number, validation=True),
        )
        groups += batch
        draws.append(processes.on_main(partial(run.rewards.reward, batch)))
        kl_PG, entropy_PG = run.updater.measure(batch)
        measurements["reward"].append(shaped_rewards(run.config, batch, draws[-1].rewards_PG))
        measurements["raw_reward"].append(draws[-1].raw_PG)
        measurements["entropy"].append(entropy_PG)
        if grpo.gold_environment is not None:
            measurements["gold_reward"].append(processes.on_main(partial(run.rewards.gold, batch)))
        if kl_PG is not None:
            measurements["kl"].append(kl_PG)
    summary = _summary(run, groups, {name: torch.cat(tensors) for name, tensors in measurements.items()})
    parts = {name: value for name, value in environment_metrics(draws).items() if "/component/" in name}
    return summary._replace(metrics={**summary.metrics, **{f"validation/{name}": v for name, v in parts.items()}})


def _summary(run: GRPOSetup, groups: Sequence[CompletionGroup], values: Mapping[str, Tensor]) -> PolicyValidation:
    """`values`: by name, one number per completion, (P, G)."""
    lengths_PG = completion_lengths(groups)
    means = {name: _mean(values_PG) for name, values_PG in values.items()} | {
        "entropy": _mean(values["entropy"], lengths_PG),
        "mean_gen_tokens_per_sample": float(lengths_PG.float().mean()),
        "truncation_rate": float(truncated_completions(groups).float().mean()),
        "num_failed": float((~values["reward"].isfinite()).sum()),
    }
    metrics = {f"validation/{name}": value for name, value in means.items() if value is not None}
    names = dict.fromkeys(run.validation_sets)
    for name in names if len(names) > 1 else ():
        chosen = torch.tensor([set_name == name for set_name in run.validation_sets])
        for key in ("reward", "gold_reward"):
            if key in values and (mean := _mean(values[key][chosen])) is not None:
                metrics[f"validation-{name}/{key}"] = mean
    watched = {
        "proxy_by_prompt": values["reward"].nanmean(dim=1).numpy(),
        "gold_by_prompt": values["gold_reward"].nanmean(dim=1).numpy() if "gold_reward" in values else None,
        "length": means["mean_gen_tokens_per_sample"],
        "length_correlation": length_correlation(values["reward"], lengths_PG),
    } | {name: means.get(name) for name in ("kl", "entropy", "truncation_rate")}
    return PolicyValidation(metrics, watched, _samples(groups, values))


def _samples(groups: Sequence[CompletionGroup], values: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """The first groups with their measurements."""

    def measured(p: int, g: int) -> dict[str, float | None]:
        values_by_name = {name: values[name][p, g] if name in values else torch.tensor(torch.nan) for name in _SAMPLED}
        return {name: float(value) if value.isfinite() else None for name, value in values_by_name.items()}

    return [
        {
            "prompt": [dict(message) for message in group.prompt.messages],
            **template_columns(group.prompt.template_kwargs),
            "completions": [
                {
                    "text": completion.text,
                    **measured(p, g),
                    "num_tokens": len(completion.token_ids),
                    "truncated": completion.truncated,
                }
                for g, completion in enumerate(group.completions)
            ],
        }
        for p, group in enumerate(groups[:LOGGED_PROMPTS])
    ]


def _mean(values_PG: Tensor, weights_PG: Tensor | None = None) -> float | None:
    """The weighted mean of the finite values; None if there are none."""
    weights = torch.where(values_PG.isfinite(), 1 if weights_PG is None else weights_PG, 0).double()
    total = float(weights.sum())
    return float((values_PG.nan_to_num().double() * weights).sum()) / total if total else None
