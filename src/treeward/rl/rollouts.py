"""`collect`: the experience of a step: prompts are drawn, completions are sampled and rewarded.

    rollouts = collect(run, step=17, drawn=544)
    rollouts.groups, rollouts.rewards_PG, rollouts.used_PG
    rollouts.prompts_drawn          # more than the groups where dynamic sampling left some out

Everything follows from the seed, the step and how many prompts were drawn before: a step that is
taken again, after a kill, samples the same completions from the same weights.

    result = validate(run, should_stop=lambda: stop.reason)     # on prompts that are held out

A validation completes the same prompts with the same seeds every time, so the same weights give the
same numbers.

Shapes: P prompts, G completions to each.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from treeward import processes
from treeward.data.conversation import template_columns
from treeward.errors import ModelError
from treeward.rl.advantages import (
    component_weights,
    informative_groups,
    length_correlation,
    rewarded,
    scaled_rewards,
    shaped_rewards,
    used_completions,
)
from treeward.rl.environment_runner import (
    GroupRewards,
    environment_metrics,
    failure_summary,
    most_frequent,
)
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
    """The groups of a step. `rewards_PG`: the rewards to optimise, NaN for none; `components`:
    those that they are made of, by name; `weights`: how much each counts from which is learnt, None
    where the estimator takes no components; `used_PG`: which completions to learn from. `metrics`:
    over all sampled completions, as logged; `watched`: for the watch. `samples`: as in
    `PolicyValidation`.
    """

    groups: list[CompletionGroup]
    rewards_PG: Tensor
    components: Mapping[str, Tensor]
    weights: Mapping[str, Tensor] | None
    used_PG: Tensor
    prompts_drawn: int
    metrics: Mapping[str, float]
    watched: Mapping[str, float | None]
    samples: Sequence[Mapping[str, Any]]


class PolicyValidation(NamedTuple):
    """`watched`: the arguments of `OverOptimisationWatch.observe`. `samples`: lines of
    `samples.jsonl` without their step.
    """

    metrics: Mapping[str, float]
    watched: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]


def collect(run: GRPOSetup, *, step: int, drawn: int) -> Rollouts:
    """The rollouts of the step after `step` steps, in which `drawn` prompts were drawn.

    With dynamic sampling batches of prompts are drawn until there are enough groups whose rewards
    differ (DAPO, Yu et al. 2025, arXiv 2503.14476). Passes on the errors of generator and
    environments, and raises `ModelError` where too many completions have no reward or no group has
    two rewards that differ.
    """
    grpo = run.config.grpo
    batch = _sampled(run, step, drawn)
    # Over all that was sampled: the groups that dynamic sampling keeps are not typical.
    metrics = _metrics(batch)
    weights = processes.on_main(partial(_weights, batch.rewards_PG, batch.own_weights, run))
    metrics["train/groups_without_signal"] = _share_without_signal(batch, weights)
    correlation = length_correlation(batch.rewards_PG, completion_lengths(batch.groups))
    if grpo.use_dynamic_sampling:
        wanted = grpo.num_prompts_per_step
        kept = informative_groups(batch.rewards_PG).nonzero().flatten().tolist()[:wanted]
        processes.on_main(lambda: _check_signal(kept, wanted, len(batch.draws)))
        batch = batch.of_groups(kept)

    measurements = {"reward": batch.rewards_PG, "raw_reward": batch.raw_PG}
    rewarding = batch.seconds_of_rewards
    if grpo.gold_environment is not None:
        # Of the groups that are kept alone, unlike the metrics above.
        started = time.monotonic()
        gold = processes.on_main(lambda: run.rewards.gold(batch.groups))
        measurements["gold_reward"] = gold.rewards_PG
        metrics["train/gold_reward"] = float(gold.rewards_PG.nanmean())
        rewarding += time.monotonic() - started
    # Again, of the groups that are learnt from.
    weights = processes.on_main(partial(_weights, batch.rewards_PG, batch.own_weights, run))
    is_rewarded_PG = rewarded(batch.rewards_PG, batch.components, weights)
    used_PG = used_completions(batch.groups, is_rewarded_PG, grpo)
    metrics["train/num_masked"] = float((is_rewarded_PG & ~used_PG).sum())
    finite_metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    finite_metrics["timing/train/generation"] = batch.seconds_of_generation
    finite_metrics["timing/train/rewards"] = rewarding
    return Rollouts(
        groups=batch.groups,
        rewards_PG=batch.rewards_PG,
        components=batch.components,
        weights=weights,
        used_PG=used_PG,
        prompts_drawn=batch.prompts_drawn,
        metrics=finite_metrics,
        watched={
            "groups_without_signal": finite_metrics["train/groups_without_signal"],
            "length_correlation": correlation,
        },
        samples=_samples(batch.groups, measurements, batch.components),
    )


@dataclass(frozen=True)
class _Batch:
    """What a step has sampled, in one draw of prompts or several.

    `rewards_PG`: shaped. `components`: of the rewards, by name, scaled where they are learnt from,
    and `own_weights`: how much each counts in them; NaN and 1 in a draw without it. The seconds are
    of all draws.
    """

    groups: list[CompletionGroup]
    draws: Sequence[GroupRewards]
    rewards_PG: Tensor
    raw_PG: Tensor
    components: Mapping[str, Tensor]
    own_weights: Mapping[str, Tensor]
    prompts_drawn: int
    seconds_of_generation: float
    seconds_of_rewards: float

    def of_groups(self, kept: Sequence[int]) -> _Batch:
        """The batch with these groups alone."""
        return replace(
            self,
            groups=[self.groups[i] for i in kept],
            rewards_PG=self.rewards_PG[kept],
            raw_PG=self.raw_PG[kept],
            components={name: values_PG[kept] for name, values_PG in self.components.items()},
            own_weights={name: weights_PG[kept] for name, weights_PG in self.own_weights.items()},
        )


def _sampled(run: GRPOSetup, step: int, drawn: int) -> _Batch:
    """Completions with their rewards, of one draw of prompts; with dynamic sampling of as many as
    it takes, or may take. Arguments and errors as of `collect`."""
    grpo = run.config.grpo
    wanted = grpo.num_prompts_per_step
    # Prompts that belong together, as the two questions about a comparison, are drawn together.
    together = run.prompts.together
    # Without the rounding of floats, of which 50 x 1.1 is more than 55.
    num_units = round(wanted * grpo.batch_multiplier / together, ndigits=6)
    count = math.ceil(num_units) * together
    most_draws = grpo.dynamic_sampling_max_gen_batches if grpo.use_dynamic_sampling else 1
    generation = 0.0
    rewarding = 0.0
    groups: list[CompletionGroup] = []
    draws: list[GroupRewards] = []
    rewards_PG = torch.empty(0, grpo.num_generations_per_prompt)
    while len(draws) < most_draws and int(informative_groups(rewards_PG).sum()) < wanted:
        started = time.monotonic()
        indices = run.order.take(drawn + len(draws) * count, count)
        prompts = [run.prompts.prompts[i] for i in indices]
        prompt_ids = [run.prompts.token_ids[i].tolist() for i in indices]
        batch = run.generator.generate(
            prompts,
            prompt_ids,
            num_completions=grpo.num_generations_per_prompt,
            seed=sampling_seed(grpo.seed, step, len(draws)),
        )
        sampled = time.monotonic()
        # The main process alone has the environments; all get their rewards, or their error.
        draw = processes.on_main(partial(run.rewards.reward, batch))
        processes.on_main(partial(_check_failures, draw, run))
        draws.append(draw)
        groups += batch
        shaped_PG = shaped_rewards(run.config, batch, draw.rewards_PG)
        rewards_PG = torch.cat([rewards_PG, shaped_PG])
        generation += sampled - started
        rewarding += time.monotonic() - sampled
    components = {}
    own_weights = {}
    for name, values_PG in _components(draws).items():
        components[name] = values_PG
        # Where only their sum is learnt from, they are in no range that the sum is clipped to.
        if grpo.adv_estimator.takes_components:
            components[name] = scaled_rewards(values_PG, grpo.reward_scaling)
        weights = [draw.weights.get(name, torch.ones_like(draw.rewards_PG)) for draw in draws]
        own_weights[name] = torch.cat(weights)
    return _Batch(
        groups=groups,
        draws=draws,
        rewards_PG=rewards_PG,
        raw_PG=torch.cat([draw.raw_PG for draw in draws]),
        components=components,
        own_weights=own_weights,
        prompts_drawn=len(draws) * count,
        seconds_of_generation=generation,
        seconds_of_rewards=rewarding,
    )


def sampling_seed(seed: int, step: int, draw: int, *, validation: bool = False) -> int:
    """The seed of one call of the generator; validations and steps never share one."""
    sequence = np.random.SeedSequence([seed, int(validation), step, draw])
    [state] = sequence.generate_state(1, np.uint64)
    return int(state >> 1)  # fits into signed 64 bits


def _components(draws: Sequence[GroupRewards]) -> dict[str, Tensor]:
    """The components of all draws by name, NaN in a draw that does not have them."""
    names = dict.fromkeys(name for draw in draws for name in draw.components)
    components = {}
    for name in names:
        parts = []
        for draw in draws:
            unknown_PG = torch.full_like(draw.rewards_PG, torch.nan)
            parts.append(draw.components.get(name, unknown_PG))
        components[name] = torch.cat(parts)
    return components


def _weights(
    rewards_PG: Tensor, own_weights: Mapping[str, Tensor], run: GRPOSetup
) -> dict[str, Tensor] | None:
    """The weights of the components that are learnt from; None where the estimator takes none. In
    the main process, whose environments know what rows bring."""
    estimator = run.config.grpo.adv_estimator
    if not estimator.takes_components:
        return None
    return component_weights(
        own_weights,
        estimator,
        row_components=run.rewards.row_components,
        has_failed=not bool(rewards_PG.isfinite().all()),
    )


def _check_failures(rewards: GroupRewards, run: GRPOSetup) -> None:
    most = run.config.grpo.max_failed_share
    num_completions = rewards.rewards_PG.numel()
    weights = _weights(rewards.rewards_PG, rewards.weights, run)
    is_rewarded_PG = rewarded(rewards.rewards_PG, rewards.components, weights)
    failed_share = int((~is_rewarded_PG).sum()) / max(num_completions, 1)
    if failed_share > most:
        summary = failure_summary(rewards.failures)
        raise ModelError(
            "too many completions have no reward",
            got=f"{failed_share:.0%} of {num_completions}; {summary}",
            need=f"at most {most:.0%} (grpo.max_failed_share)",
            fix="fix the environment and start the same command again: it repeats this step",
        )


def _metrics(batch: _Batch) -> dict[str, float]:
    """The metrics of all completions that a step has sampled; NaN for missing values."""
    groups = batch.groups
    rewards_PG = batch.rewards_PG
    rewards = rewards_PG[rewards_PG.isfinite()]
    reward_std = math.nan
    if len(rewards) > 0:  # torch warns of a std of nothing
        reward_std = float(rewards.std(unbiased=False))
    num_prompt_tokens = sum(len(group.prompt_ids) for group in groups)
    metrics = {
        "train/reward": float(rewards.mean()),
        "train/reward_std": reward_std,
        "train/raw_reward": float(batch.raw_PG.nanmean()),
        "train/mean_gen_tokens_per_sample": float(completion_lengths(groups).float().mean()),
        "train/truncation_rate": float(truncated_completions(groups).float().mean()),
        "train/mean_prompt_length": num_prompt_tokens / len(groups),
        "train/num_failed": float(rewards_PG.numel() - len(rewards)),
        "train/num_groups_sampled": float(len(groups)),
        **environment_metrics(batch.draws),
    }
    num_known = {name: int(values.isfinite().sum()) for name, values in batch.components.items()}
    for name in most_frequent(num_known):
        values_PG = batch.components[name]
        # Of the groups that have it: other prompts may have other criteria.
        has_it_P = values_PG.isfinite().any(dim=1)
        share = float(informative_groups(values_PG[has_it_P]).float().mean())
        metrics[f"train/component_without_signal/{name}"] = 1 - share
    return metrics


def _share_without_signal(batch: _Batch, weights: Mapping[str, Tensor] | None) -> float:
    """The share of groups that teach nothing, because their rewards are equal; or, with `weights`,
    each component that counts."""
    if weights is None:
        has_signal_P = informative_groups(batch.rewards_PG)
    else:
        has_signal_P = torch.zeros(len(batch.groups), dtype=torch.bool)
        for name, weights_PG in weights.items():
            counts_P = (weights_PG != 0.0).any(dim=1)
            has_signal_P |= counts_P & informative_groups(batch.components[name])
    return 1 - float(has_signal_P.float().mean())


def _check_signal(kept: Sequence[int], wanted: int, num_draws: int) -> None:
    if len(kept) < wanted:
        logger.warning(
            "Dynamic sampling found %d of %d groups in %d batches.",
            len(kept),
            wanted,
            num_draws,
        )
    if not kept:
        raise ModelError(
            "no group has two rewards that differ: there is nothing to learn from",
            where="grpo.use_dynamic_sampling",
            got=f"{num_draws} batches of prompts",
            fix="raise policy.generation.temperature, or see whether the rewards are saturated",
        )


def validate(
    run: GRPOSetup,
    *,
    should_stop: Callable[[], str | None] = lambda: None,
) -> PolicyValidation | None:
    """Complete, reward and measure every validation prompt; None if `should_stop` gave a reason on
    the way."""
    grpo = run.config.grpo
    groups: list[CompletionGroup] = []
    measurements: dict[str, list[Tensor]] = defaultdict(list)
    draws: list[GroupRewards] = []
    gold_draws: list[GroupRewards] = []
    for number, start in enumerate(range(0, len(run.validation), _VALIDATION_BATCH)):
        if should_stop():
            return None
        chosen = run.validation[start : start + _VALIDATION_BATCH]
        prompts = [prompt for prompt, _ in chosen]
        prompt_ids = [token_ids for _, token_ids in chosen]
        batch = run.generator.generate(
            prompts,
            prompt_ids,
            num_completions=grpo.num_val_generations,
            # Without the step: equal weights give equal completions at every validation.
            seed=sampling_seed(grpo.seed, 0, number, validation=True),
        )
        groups += batch
        draw = processes.on_main(partial(run.rewards.reward, batch))
        draws.append(draw)
        kl_PG, entropy_PG = run.updater.measure(batch)
        measurements["reward"].append(shaped_rewards(run.config, batch, draw.rewards_PG))
        measurements["raw_reward"].append(draw.raw_PG)
        measurements["entropy"].append(entropy_PG)
        if grpo.gold_environment is not None:
            gold = processes.on_main(partial(run.rewards.gold, batch))
            gold_draws.append(gold)
            measurements["gold_reward"].append(gold.rewards_PG)
        if kl_PG is not None:
            measurements["kl"].append(kl_PG)

    values = {name: torch.cat(tensors) for name, tensors in measurements.items()}
    summary = _summary(run, groups, values, _components(draws), _components(gold_draws))
    metrics = dict(summary.metrics)
    for name, value in environment_metrics([*draws, *gold_draws]).items():
        # Its other metrics are left to the steps: the mean of its rewards is `raw_reward` here.
        if "/component/" in name:
            metrics[f"validation/{name}"] = value
    return summary._replace(metrics=metrics)


def _summary(
    run: GRPOSetup,
    groups: Sequence[CompletionGroup],
    values: Mapping[str, Tensor],
    components: Mapping[str, Tensor],
    gold_components: Mapping[str, Tensor],
) -> PolicyValidation:
    """`values`, `components` and `gold_components`: by name, one number per completion, (P, G)."""
    lengths_PG = completion_lengths(groups)
    means = {name: _mean(values_PG) for name, values_PG in values.items()}
    # The entropy of a completion is a mean over its tokens: this one is over all tokens.
    means["entropy"] = _mean(values["entropy"], lengths_PG)
    means["mean_gen_tokens_per_sample"] = float(lengths_PG.float().mean())
    means["truncation_rate"] = float(truncated_completions(groups).float().mean())
    means["num_failed"] = float((~values["reward"].isfinite()).sum())
    metrics = {f"validation/{name}": value for name, value in means.items() if value is not None}

    set_names = list(dict.fromkeys(run.validation_sets))
    if len(set_names) > 1:  # else the metrics above are those of the set
        for set_name in set_names:
            is_in_set_P = torch.tensor([name == set_name for name in run.validation_sets])
            for key in ("reward", "gold_reward"):
                if key not in values:
                    continue
                mean = _mean(values[key][is_in_set_P])
                if mean is not None:
                    metrics[f"validation-{set_name}/{key}"] = mean

    gold_by_prompt = None
    if "gold_reward" in values:
        gold_by_prompt = values["gold_reward"].nanmean(dim=1).numpy()
    watched = {
        "proxy_by_prompt": values["reward"].nanmean(dim=1).numpy(),
        "gold_by_prompt": gold_by_prompt,
        "components_by_prompt": _by_prompt(components),
        "gold_components_by_prompt": _by_prompt(gold_components),
        "length": means["mean_gen_tokens_per_sample"],
        "length_correlation": length_correlation(values["reward"], lengths_PG),
        "kl": means.get("kl"),
        "entropy": means["entropy"],
        "truncation_rate": means["truncation_rate"],
    }
    return PolicyValidation(metrics, watched, _samples(groups, values, components))


def _by_prompt(components: Mapping[str, Tensor]) -> dict[str, Any]:
    """The means of each prompt, (P,), of the components that are measured."""
    num_known = {name: int(values_PG.isfinite().sum()) for name, values_PG in components.items()}
    means = {}
    for name in most_frequent(num_known):
        means[name] = components[name].nanmean(dim=1).numpy()
    return means


def _samples(
    groups: Sequence[CompletionGroup],
    values: Mapping[str, Tensor],
    components: Mapping[str, Tensor],
) -> list[dict[str, Any]]:
    """The first groups with their measurements, as JSON: None for missing values, and of the
    components those that a completion has."""
    samples: list[dict[str, Any]] = []
    # The first ones: in every validation they are the same prompts, which the report lays side by
    # side.
    for p, group in enumerate(groups[:LOGGED_PROMPTS]):
        completions: list[dict[str, Any]] = []
        for g, completion in enumerate(group.completions):
            line: dict[str, Any] = {"text": completion.text}
            for name in _SAMPLED:
                line[name] = None
                if name in values and values[name][p, g].isfinite():
                    line[name] = float(values[name][p, g])
            parts = {name: float(values_PG[p, g]) for name, values_PG in components.items()}
            known = {name: value for name, value in parts.items() if math.isfinite(value)}
            if known:
                line["components"] = known
            line["num_tokens"] = len(completion.token_ids)
            line["truncated"] = completion.truncated
            completions.append(line)
        samples.append(
            {
                "prompt": [dict(message) for message in group.prompt.messages],
                **template_columns(group.prompt.template_kwargs),
                "completions": completions,
            }
        )
    return samples


def _mean(values_PG: Tensor, weights_PG: Tensor | None = None) -> float | None:
    """The weighted mean of the finite values; None if there are none."""
    if weights_PG is None:
        weights_PG = torch.ones_like(values_PG)
    # Missing values are NaN, and 0 times NaN is NaN: they leave by `where` and `nan_to_num`.
    weights = torch.where(values_PG.isfinite(), weights_PG, 0).double()
    total = float(weights.sum())
    if total == 0:
        return None
    return float((values_PG.nan_to_num().double() * weights).sum()) / total
