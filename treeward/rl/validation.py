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
    """The measurements. `watched`: the arguments of `OverOptimisationWatch.observe`. `samples`: lines of
    `samples.jsonl` without their step.
    """

    metrics: Mapping[str, float]
    watched: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]


def ranking_remark(run: GRPOSetup) -> str | None:
    """The sentence that warns of the metric that ranks checkpoints; None if it ranks them well."""
    if run.config.ranking_metric != "reward" or not run.rewards_move:
        return None
    gold = " or val:gold_reward" if run.rewards.has_gold else ""
    return (
        f"checkpointing.metric_name: {run.config.checkpointing.metric_name} ranks checkpoints by rewards whose scale "
        f"running statistics move, so that early and late ones do not compare: rank by val:raw_reward{gold}"
    )


def validate(run: GRPOSetup, *, should_stop: Callable[[], str | None] = lambda: None) -> Validation | None:
    """Complete, reward and measure every validation prompt; None if `should_stop` gave a reason on the way."""
    grpo = run.config.grpo
    size = grpo.val_batch_size or len(run.validation)
    groups: list[CompletionGroup] = []
    batches: list[dict[str, Tensor | None]] = []
    for number, start in enumerate(range(0, len(run.validation), size)):
        if should_stop():
            return None
        chosen = run.validation[start : start + size]
        batch = run.generator.generate(
            [one.prompt for one in chosen],
            [one.token_ids for one in chosen],
            num_completions=grpo.num_val_generations,
            seed=sampling_seed(grpo.seed, 0, number, validation=True),
        )
        found, measured = run.rewards.reward(batch, update=False), run.updater.measure(batch)
        groups += batch
        batches.append(
            {
                "reward": shaped_rewards(run.config, batch, found.rewards_PG),
                "raw_reward": found.raw_PG,
                "gold_reward": run.rewards.gold(batch) if run.rewards.has_gold else None,
                "kl": measured.kl_PG,
                "entropy": measured.entropy_PG,
            }
        )
    values: dict[str, Tensor] = {}
    for name in batches[0]:
        tensors = [tensor.cpu() for one in batches if (tensor := one[name]) is not None]
        if tensors:
            values[name] = torch.cat(tensors)
    return _summary(run, groups, values)


def _summary(run: GRPOSetup, groups: Sequence[CompletionGroup], values: Mapping[str, Tensor]) -> Validation:
    """`values`: by name one number for each completion, (P, G)."""
    lengths_PG, proxy_PG = completion_lengths(groups), values["raw_reward" if run.rewards_move else "reward"]
    means = {name: _mean(values_PG) for name, values_PG in values.items() if name != "entropy"} | {
        "proxy": _mean(proxy_PG),
        "entropy": _weighted_mean(values["entropy"], lengths_PG),
        "mean_gen_tokens_per_sample": float(lengths_PG.float().mean()),
        "truncation_rate": float(truncated_completions(groups).float().mean()),
        "num_failed": float((~values["reward"].isfinite()).sum()),
    }
    metrics = {f"validation/{name}": value for name, value in means.items() if value is not None}
    if len(set(run.validation_sets)) > 1:
        for name in dict.fromkeys(run.validation_sets):
            chosen = torch.tensor([of_set == name for of_set in run.validation_sets])
            for key in ("reward", "gold_reward"):
                if key in values and (mean := _mean(values[key][chosen])) is not None:
                    metrics[f"validation-{name}/{key}"] = mean
    watched = {
        "proxy_by_prompt": proxy_PG.nanmean(dim=1).numpy(),
        "gold_by_prompt": values["gold_reward"].nanmean(dim=1).numpy() if "gold_reward" in values else None,
        "length": means["mean_gen_tokens_per_sample"],
        "kl": means.get("kl"),
        "entropy": means["entropy"],
        "truncation_rate": means["truncation_rate"],
        "length_correlation": length_correlation(values["reward"].tolist(), lengths_PG.tolist()),
    }
    samples = [_sample(groups, values, p) for p in range(min(run.config.grpo.num_logged_samples, len(groups)))]
    return Validation(metrics, watched, samples)


def _sample(groups: Sequence[CompletionGroup], values: Mapping[str, Tensor], p: int) -> dict[str, Any]:
    def value(name: str, g: int) -> float | None:
        return float(values[name][p, g]) if name in values and values[name][p, g].isfinite() else None

    return {
        "prompt": [dict(message) for message in groups[p].prompt.messages],
        "completions": [
            {"text": completion.text}
            | {name: value(name, g) for name in ("reward", "raw_reward", "gold_reward", "kl")}
            | {"num_tokens": len(completion.token_ids), "truncated": completion.truncated}
            for g, completion in enumerate(groups[p].completions)
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
