"""`validate`: the policy on prompts it is not trained on, the same ones every time, and what is watched there.

    result = validate(run, should_stop=lambda: stop.reason)
    result.metrics["validation/reward"], result.metrics["validation/kl"]
    result.samples                  # completions to the first prompts, for people

The completions are sampled with the same seeds every time, so that two validations of the same weights are the same,
and differences from one to the next are of the weights and not of luck.

`validation/proxy` is the reward on a scale that stays the same over the run: `validation/reward`, or where running
statistics move that, `validation/raw_reward`. The watch and the report look at this one.

Shapes: P prompts, G completions to each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from treeward.rl.advantages import shaped_rewards
from treeward.rl.experience import CompletionGroup, completion_lengths, truncated_completions
from treeward.rl.rollouts import sampling_seed
from treeward.rl.watch import length_correlation

if TYPE_CHECKING:
    from treeward.rl.setup import GRPOSetup

__all__ = ["Validation", "ranking_remark", "validate"]


@dataclass(frozen=True, slots=True)
class Validation:
    """What was measured. `watched`: the arguments of `OverOptimisationWatch.observe`. `samples`: lines of
    `samples.jsonl` without their step.
    """

    metrics: Mapping[str, float]
    watched: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]


def ranking_remark(run: GRPOSetup) -> str | None:
    """What is wrong with ranking checkpoints as configured; None where nothing is."""
    if run.config.ranking_metric != "reward" or not run.rewards_move:
        return None
    gold = " or val:gold_reward" if run.rewards.has_gold else ""
    return (
        f"checkpointing.metric_name: {run.config.checkpointing.metric_name} ranks checkpoints by rewards whose scale "
        f"running statistics move, so that early and late ones do not compare: rank by val:raw_reward{gold}"
    )


def validate(run: GRPOSetup, *, should_stop: Callable[[], str | None] = lambda: None) -> Validation | None:
    """Complete, reward and measure every validation prompt, or None where it is told to stop."""
    grpo = run.config.grpo
    size = grpo.val_batch_size or len(run.validation)
    parts: list[_Part] = []
    for number, start in enumerate(range(0, len(run.validation), size)):
        if should_stop():
            return None
        chosen = run.validation[start : start + size]
        groups = run.generator.generate(
            [one.prompt for one in chosen],
            [one.token_ids for one in chosen],
            num_completions=grpo.num_val_generations,
            seed=sampling_seed(grpo.seed, 0, number, validation=True),
        )
        found = run.rewards.reward(groups, update=False)
        measured = run.updater.measure(groups)
        parts.append(
            _Part(
                groups,
                shaped_rewards(run.config, groups, found.rewards_PG),
                found.raw_PG,
                run.rewards.gold(groups) if run.rewards.has_gold else None,
                measured.kl_PG,
                measured.entropy_PG,
            )
        )
    return _summed_up(run, _joined(parts))


@dataclass(frozen=True, slots=True)
class _Part:
    groups: list[CompletionGroup]
    rewards_PG: Tensor
    raw_PG: Tensor
    gold_PG: Tensor | None
    kl_PG: Tensor | None
    entropy_PG: Tensor


def _joined(parts: Sequence[_Part]) -> _Part:
    def together(tensors: Sequence[Tensor | None]) -> Tensor | None:
        there = [tensor.cpu() for tensor in tensors if tensor is not None]
        return torch.cat(there) if there else None

    rewards, raw = together([one.rewards_PG for one in parts]), together([one.raw_PG for one in parts])
    entropy = together([one.entropy_PG for one in parts])
    assert rewards is not None and raw is not None and entropy is not None
    return _Part(
        [group for one in parts for group in one.groups],
        rewards,
        raw,
        together([one.gold_PG for one in parts]),
        together([one.kl_PG for one in parts]),
        entropy,
    )


def _summed_up(run: GRPOSetup, part: _Part) -> Validation:
    lengths_PG = completion_lengths(part.groups)
    known_PG = part.rewards_PG.isfinite()
    proxy_PG = part.raw_PG if run.rewards_move else part.rewards_PG
    means = {
        "proxy": _mean(proxy_PG),
        "reward": _mean(part.rewards_PG),
        "raw_reward": _mean(part.raw_PG),
        "gold_reward": None if part.gold_PG is None else _mean(part.gold_PG),
        "kl": None if part.kl_PG is None else _mean(part.kl_PG),
        "entropy": _weighted_mean(part.entropy_PG, lengths_PG),
        "mean_gen_tokens_per_sample": float(lengths_PG.float().mean()),
        "truncation_rate": float(truncated_completions(part.groups).float().mean()),
        "num_failed": float((~known_PG).sum()),
    }
    metrics = {f"validation/{name}": value for name, value in means.items() if value is not None}
    if len(set(run.validation_sets)) > 1:
        of_set = np.asarray(run.validation_sets)
        for name in dict.fromkeys(run.validation_sets):
            chosen = torch.from_numpy(of_set == name)
            for key, values in (("reward", part.rewards_PG), ("gold_reward", part.gold_PG)):
                if values is not None and (mean := _mean(values[chosen])) is not None:
                    metrics[f"validation-{name}/{key}"] = mean
    watched = {
        "proxy_by_prompt": proxy_PG.nanmean(dim=1).numpy(),
        "gold_by_prompt": None if part.gold_PG is None else part.gold_PG.nanmean(dim=1).numpy(),
        "length": means["mean_gen_tokens_per_sample"],
        "kl": means["kl"],
        "entropy": means["entropy"],
        "truncation_rate": means["truncation_rate"],
        "length_correlation": length_correlation(part.rewards_PG.tolist(), lengths_PG.tolist()),
    }
    samples = [_sample(part, p) for p in range(min(run.config.grpo.num_logged_samples, len(part.groups)))]
    return Validation(metrics, watched, samples)


def _sample(part: _Part, p: int) -> dict[str, Any]:
    group = part.groups[p]

    def value(values_PG: Tensor | None, g: int) -> float | None:
        return None if values_PG is None or not values_PG[p, g].isfinite() else float(values_PG[p, g])

    return {
        "prompt": [dict(message) for message in group.prompt.messages],
        "completions": [
            {
                "text": completion.text,
                "reward": value(part.rewards_PG, g),
                "raw_reward": value(part.raw_PG, g),
                "gold_reward": value(part.gold_PG, g),
                "kl": value(part.kl_PG, g),
                "num_tokens": len(completion.token_ids),
                "truncated": completion.truncated,
            }
            for g, completion in enumerate(group.completions)
        ],
    }


def _mean(values: Tensor) -> float | None:
    finite = values[values.isfinite()]
    return float(finite.double().mean()) if len(finite) else None


def _weighted_mean(values_PG: Tensor, weights_PG: Tensor) -> float | None:
    """The mean over tokens of means over completions."""
    weights = torch.where(values_PG.isfinite(), weights_PG, 0).double()
    total = float(weights.sum())
    return float((values_PG.nan_to_num().double() * weights).sum()) / total if total else None
