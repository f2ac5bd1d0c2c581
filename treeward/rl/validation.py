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

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from treeward.rl.advantages import shaped_rewards
from treeward.rl.experience import CompletionGroup, completion_lengths, truncated_completions
from treeward.rl.rollouts import sampling_seed
from treeward.rl.watch import length_correlation

if TYPE_CHECKING:
    from treeward.rl.setup import GRPOSetup

__all__ = ["Validation", "validate"]

_SAMPLED = ("reward", "raw_reward", "gold_reward", "kl")


class Validation(NamedTuple):
    """`watched`: the arguments of `OverOptimisationWatch.observe`. `samples`: lines of `samples.jsonl` without their
    step.
    """

    metrics: Mapping[str, float]
    watched: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]


def validate(run: GRPOSetup, *, should_stop: Callable[[], str | None] = lambda: None) -> Validation | None:
    """Complete, reward and measure every validation prompt; None if `should_stop` gave a reason on the way."""
    grpo = run.config.grpo
    size = grpo.val_batch_size or len(run.validation)
    groups: list[CompletionGroup] = []
    found: dict[str, list[Tensor]] = defaultdict(list)
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
        groups += batch
        rewards, measured = run.rewards.reward(batch, update=False), run.updater.measure(batch)
        found["reward"].append(shaped_rewards(run.config, batch, rewards.rewards_PG))
        found["raw_reward"].append(rewards.raw_PG)
        found["entropy"].append(measured.entropy_PG)
        if run.rewards.has_gold:
            found["gold_reward"].append(run.rewards.gold(batch))
        if measured.kl_PG is not None:
            found["kl"].append(measured.kl_PG)
    return _summary(run, groups, {name: torch.cat(tensors) for name, tensors in found.items()})


def _summary(run: GRPOSetup, groups: Sequence[CompletionGroup], values: Mapping[str, Tensor]) -> Validation:
    """`values`: by name one number for each completion, (P, G)."""
    lengths_PG, proxy_PG = completion_lengths(groups), values["raw_reward" if run.rewards_move else "reward"]
    means = {name: _mean(values_PG) for name, values_PG in values.items()} | {
        "proxy": _mean(proxy_PG),
        "entropy": _mean(values["entropy"], lengths_PG),
        "mean_gen_tokens_per_sample": float(lengths_PG.float().mean()),
        "truncation_rate": float(truncated_completions(groups).float().mean()),
        "num_failed": float((~values["reward"].isfinite()).sum()),
    }
    metrics = {f"validation/{name}": value for name, value in means.items() if value is not None}
    names = dict.fromkeys(run.validation_sets)
    for name in names if len(names) > 1 else ():
        chosen = torch.tensor([of_set == name for of_set in run.validation_sets])
        for key in ("reward", "gold_reward"):
            if key in values and (mean := _mean(values[key][chosen])) is not None:
                metrics[f"validation-{name}/{key}"] = mean
    watched = {
        "proxy_by_prompt": proxy_PG.nanmean(dim=1).numpy(),
        "gold_by_prompt": values["gold_reward"].nanmean(dim=1).numpy() if "gold_reward" in values else None,
        "length": means["mean_gen_tokens_per_sample"],
        "length_correlation": length_correlation(values["reward"], lengths_PG),
    } | {name: means.get(name) for name in ("kl", "entropy", "truncation_rate")}
    samples = [_sample(groups[p], values, p) for p in range(min(run.config.grpo.num_logged_samples, len(groups)))]
    return Validation(metrics, watched, samples)


def _sample(group: CompletionGroup, values: Mapping[str, Tensor], p: int) -> dict[str, Any]:
    def measured(g: int) -> dict[str, float | None]:
        found = {name: values[name][p, g] if name in values else torch.tensor(torch.nan) for name in _SAMPLED}
        return {name: float(value) if value.isfinite() else None for name, value in found.items()}

    return {
        "prompt": [dict(message) for message in group.prompt.messages],
        "completions": [
            {"text": one.text, **measured(g), "num_tokens": len(one.token_ids), "truncated": one.truncated}
            for g, one in enumerate(group.completions)
        ],
    }


def _mean(values_PG: Tensor, weights_PG: Tensor | None = None) -> float | None:
    """Of the finite values, weighted; None where there are none."""
    weights = torch.where(values_PG.isfinite(), 1 if weights_PG is None else weights_PG, 0).double()
    total = float(weights.sum())
    return float((values_PG.nan_to_num().double() * weights).sum()) / total if total else None
