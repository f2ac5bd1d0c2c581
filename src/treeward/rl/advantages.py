"""From rewards to advantages: how much better a completion is than expected, from the completions
beside it.

    rewards_PG = shaped_rewards(config, groups, rewards_PG)     # scaled, less penalties of length
    advantages(rewards_PG, GRPOConfig())                        # (P, G), compared in each group
    component_advantages(rewards_PG, components, config.grpo)   # (P, G), GDPO
    used_completions(groups, rewards_PG.isfinite(), config.grpo)    # which of them are learnt from

A missing reward is NaN: it enters no mean and no std, and its completion's advantage is 0.
Penalties are subtracted, never multiplied: a factor below 1 would raise a negative reward.

Shapes: P prompts, G completions to each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from treeward.config.grpo import AdvantageEstimatorConfig, GRPOConfig, RewardScalingConfig
from treeward.config.grpo_run import GRPORunConfig
from treeward.errors import ConfigError
from treeward.rl.generation import CompletionGroup, completion_lengths, truncated_completions

STD_FLOOR = 1e-6
"""Added to a standard deviation before the division."""
_TRL_FLOOR = 1e-4
"""The same in TRL's `GRPOTrainer` (1.16)."""


def shaped_rewards(
    config: GRPORunConfig,
    groups: Sequence[CompletionGroup],
    rewards_PG: Tensor,
) -> Tensor:
    """Rewards scaled, less what the length of a completion costs, (P, G); NaN stays NaN.

    - `reward_scaling`: clipped to [source_min, source_max], and that mapped linearly to
      [target_min, target_max].
    - `reward_shaping`: less penalty * max(0, length - (max - buffer)) / buffer, DAPO's soft
      overlong punishment (Yu et al. 2025, arXiv 2503.14476, eq. 13), which grows on beyond `max` as
      NeMo RL's does. `max` is `max_response_length`, or the room that the prompt leaves in
      `max_total_sequence_length`, if that is less.
    """
    shaping = config.grpo.reward_shaping
    # Scaled first, so that the penalty is in the units of the scaled rewards.
    rewards_PG = scaled_rewards(rewards_PG, config.grpo.reward_scaling)
    if shaping.enabled:
        prompt_lengths_P1 = torch.tensor([[len(group.prompt_ids)] for group in groups])
        room_P1 = config.policy.max_total_sequence_length - prompt_lengths_P1
        longest_P1 = room_P1.clamp_max(config.max_response_length)
        # Where the room is less than the buffer, the penalty grows from the first token on.
        buffer_P1 = longest_P1.clamp_max(shaping.overlong_buffer_length)
        share = (completion_lengths(groups) - (longest_P1 - buffer_P1)) / buffer_P1
        rewards_PG = rewards_PG - shaping.overlong_buffer_penalty * share.clamp_min(0)
    return rewards_PG


def scaled_rewards(rewards_PG: Tensor, scaling: RewardScalingConfig) -> Tensor:
    """Rewards, or components of them, as `reward_scaling` maps them; NaN stays NaN."""
    if not scaling.enabled:
        return rewards_PG
    clipped = rewards_PG.clamp(scaling.source_min, scaling.source_max)
    share = (clipped - scaling.source_min) / (scaling.source_max - scaling.source_min)
    return scaling.target_min + share * (scaling.target_max - scaling.target_min)


def advantages(rewards_PG: Tensor, config: GRPOConfig) -> Tensor:
    """The advantage of each completion, float32 (P, G); 0 where it has no reward (NaN).

    With n rewards r_i in a group, mean and std those of the group, std with n - 1 in its
    denominator, and a floor of 1e-6 (`STD_FLOOR`):

    - grpo: (r_i - mean) / (std + floor) (Shao et al. 2024, arXiv 2402.03300). Without
      `normalize_rewards` it is not divided: Dr. GRPO (Liu et al. 2025, arXiv 2503.20783).
    - leave_one_out: r_i - sum_{j != i} r_j / (n - 1) = (r_i - mean) n / (n - 1): RLOO (Kool et al.
      2019; Ahmadian et al. 2024, arXiv 2402.14740). With `use_leave_one_out_baseline` and
      `normalize_rewards` it is divided by the std of all n. (NeMo RL takes the std of the others:
      it differs from completion to completion, and is 0 for the only completion that is better than
      the rest.)
    - reinforce_plus_plus: d_i / (std_batch + floor), with d_i = r_i - mean and std_batch = sqrt(sum
      d^2 / (N - 1)) over the N rewards of the batch, so that a group of nearly equal rewards is not
      blown up: REINFORCE++ with a baseline (Hu et al. 2025, arXiv 2501.03262). Without
      `minus_baseline`, d_i = r_i - mean of the batch.

    Where the rewards that are compared (of the group; of the batch without `minus_baseline`) are
    all equal, every advantage is exactly 0, whatever the floor. At last advantages are cut to
    [`advantage_clip_low`, `advantage_clip_high`].
    """
    return _clipped(_unclipped(rewards_PG, config), config)


def component_advantages(
    rewards_PG: Tensor,
    components: Mapping[str, Tensor],
    config: GRPOConfig,
    own_weights: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The advantages from several rewards, float32 (P, G): GDPO (Liu et al. 2026, arXiv
    2601.05242).

    `rewards_PG`: their sums, NaN where one has failed; only that is read of them. `components`:
    rewards by name, (P, G), NaN for missing. `own_weights` (P, G): how much each counts in the
    rewards, which the weights of the configuration replace; 1 without either. Each is normalised in its group as by
    `advantages`; A = sum_k w_k A_k; the result is (A - mean) / std of the batch, std with n - 1.
    A missing component adds 0 to its completion's sum, and enters no mean and no std. A completion
    without any component has the advantage 0, and is not counted in the batch.

    - gdpo, as NeMo RL: a floor of 1e-6 under the std of a group, none under that of the batch; what
      does not vary is not divided. With `use_leave_one_out_baseline` mean and std are those of the
      other completions of the group, so that the std differs from completion to completion.
    - normalize_then_sum, as TRL: 1e-4 is added to both.

    Raises `ConfigError` for weights that do not fit the components.
    """
    has_failed = not bool(rewards_PG.isfinite().all())
    weights = component_weights(list(components), config.adv_estimator, has_failed=has_failed)
    is_trl = config.adv_estimator.name == "normalize_then_sum"
    floor = _TRL_FLOOR if is_trl else STD_FLOOR
    sums = torch.zeros_like(rewards_PG, dtype=torch.float64)
    is_known = torch.zeros_like(sums, dtype=torch.bool)
    for name, weight in weights.items():
        values = components[name]
        rewards = torch.where(values.isfinite(), values.double(), torch.nan)
        is_known |= rewards.isfinite()
        if config.use_leave_one_out_baseline:
            normalised = _against_others(rewards, divides=config.normalize_rewards)
        else:
            normalised = _centred(rewards)
            if config.normalize_rewards:
                normalised = normalised / (_std(normalised, rewards.isfinite(), dim=1) + floor)
        if own_weights is not None and config.adv_estimator.reward_weights is None:
            sums += own_weights[name].double() * normalised
        else:
            sums += weight * normalised
    # Over the batch as one row of completions.
    centred = torch.where(is_known, sums - sums[is_known].mean(), 0.0)
    std = _std(centred.flatten(), is_known.flatten(), dim=0)
    if is_trl:
        centred = centred / (std + floor)
    elif float(std) > 0.0:
        centred = centred / std
    return _clipped(centred, config)


def component_weights(
    names: Sequence[str], estimator: AdvantageEstimatorConfig, *, has_failed: bool = False
) -> dict[str, float]:
    """The weight of each component that is learnt from, by name.

    `names`: the components that the rewards have. `has_failed`: some rewards have failed, so that a
    component may be missing in a whole batch; it is left out then. Raises `ConfigError` for fewer
    than two, for a list of another length, and for a name that no reward has.
    """
    chosen = estimator.reward_weights
    weights: dict[str, float] = {}
    # With a slash are details, as `judge/label_mass`, and the components of a hybrid's members,
    # which stand for themselves in the member's reward. Only a mapping can name them.
    rewards = sorted(name for name in names if "/" not in name)
    if isinstance(chosen, Mapping):
        weights = {name: weight for name, weight in chosen.items() if weight != 0.0}
    elif chosen is None:
        weights = dict.fromkeys(rewards, 1.0)
    elif len(chosen) == len(rewards):
        weights = dict(zip(rewards, chosen, strict=True))
    missing = sorted(weights.keys() - set(names))
    if has_failed and not isinstance(chosen, tuple):
        return {name: weight for name, weight in weights.items() if name in names}
    if len(weights) >= 2 and not missing:
        return weights
    got = ", ".join(sorted(names)) or "rewards without components"
    if missing:
        got = f"no {', '.join(missing)} among {got}"
    raise ConfigError(
        f"{estimator.name} cannot weigh the components of the rewards",
        field="grpo.adv_estimator.reward_weights",
        got=got,
        need="two components or more, each with a weight",
        fix="rewards with components come from several members of a hybrid environment, several "
        "heads of a reward model, several criteria of a rubric, or a function that returns "
        "reward/<name> for each",
    )


def _clipped(advantages_PG: Tensor, config: GRPOConfig) -> Tensor:
    low = config.advantage_clip_low
    high = config.advantage_clip_high
    if low is not None:
        advantages_PG = advantages_PG.clamp_min(low)
    if high is not None:
        advantages_PG = advantages_PG.clamp_max(high)
    return advantages_PG.float()


def _unclipped(rewards_PG: Tensor, config: GRPOConfig) -> Tensor:
    """The advantages by the estimator, float64 (P, G)."""
    rewards = torch.where(rewards_PG.isfinite(), rewards_PG.double(), torch.nan)
    count_P1 = rewards.isfinite().sum(dim=1, keepdim=True)
    estimator = config.adv_estimator.name
    # The formulas are in the docstring of `advantages`.
    if estimator == "reinforce_plus_plus":
        if config.adv_estimator.minus_baseline:
            centred = _centred(rewards)
        else:
            # The whole batch as one group.
            centred = _centred(rewards.reshape(1, -1)).reshape(rewards.shape)
        std = (centred.square().sum() / (count_P1.sum() - 1).clamp_min(1)).sqrt()
        return centred / (std + STD_FLOOR)
    centred = _centred(rewards)
    # At least 1: a group with one reward has no others, and its centred reward is 0.
    others_P1 = (count_P1 - 1).clamp_min(1)
    result = centred
    if estimator == "leave_one_out" or config.use_leave_one_out_baseline:
        # (r_i - mean) n / (n - 1), without the sum over the others.
        result = centred * count_P1 / others_P1
    if config.normalize_rewards:
        std_P1 = (centred.square().sum(dim=1, keepdim=True) / others_P1).sqrt()
        result = result / (std_P1 + STD_FLOOR)
    return result


def _std(centred: Tensor, is_known: Tensor, *, dim: int) -> Tensor:
    """The std of known values, which are given less their mean, with n - 1 in its denominator."""
    others = (is_known.sum(dim=dim, keepdim=True) - 1).clamp_min(1)
    squares = centred.square().sum(dim=dim, keepdim=True)
    return (squares / others).sqrt()


def _against_others(rewards_PG: Tensor, *, divides: bool) -> Tensor:
    """(r_i - mean) / std of the known rewards j != i of the group, as NeMo RL; 0 for missing ones.

    Where the others are equal, or are fewer than two, the difference is not divided.
    """
    num_completions = rewards_PG.shape[1]
    is_other = ~torch.eye(num_completions, dtype=torch.bool)
    # One row for each completion: the rewards of the others.
    others_PGG = torch.where(is_other, rewards_PG[:, None, :], torch.nan)
    is_known = others_PGG.isfinite()
    differences = rewards_PG - others_PGG.nanmean(dim=2)
    if divides:
        rows = others_PGG.reshape(-1, num_completions)
        std = _std(_centred(rows), rows.isfinite(), dim=1).reshape(rewards_PG.shape)
        differences = torch.where(std > 0.0, differences / (std + STD_FLOOR), differences)
    has_baseline = rewards_PG.isfinite() & is_known.any(dim=2)
    return torch.where(has_baseline & informative_groups(rewards_PG)[:, None], differences, 0.0)


def informative_groups(rewards_PG: Tensor) -> Tensor:
    """Which groups have two rewards that differ, bool (P,): the others teach nothing."""
    has_reward_PG = rewards_PG.isfinite()
    if has_reward_PG.shape[1] == 0:
        return has_reward_PG.any(dim=1)  # amax refuses groups without completions
    # Not by a std: that of equal rewards can be above 0 by rounding.
    high = rewards_PG.masked_fill(~has_reward_PG, -torch.inf).amax(dim=1)
    low = rewards_PG.masked_fill(~has_reward_PG, torch.inf).amin(dim=1)
    return (has_reward_PG.sum(dim=1) > 1) & (high > low)


def rewarded(
    rewards_PG: Tensor, components: Mapping[str, Tensor], estimator: AdvantageEstimatorConfig
) -> Tensor:
    """Which completions have something to learn from, bool (P, G): a reward or, where the estimator
    takes components, one of those that it weighs. Raises as `component_weights`."""
    if not estimator.takes_components:
        return rewards_PG.isfinite()
    is_rewarded_PG = torch.zeros_like(rewards_PG, dtype=torch.bool)
    has_failed = not bool(rewards_PG.isfinite().all())
    for name in component_weights(list(components), estimator, has_failed=has_failed):
        is_rewarded_PG |= components[name].isfinite()
    return is_rewarded_PG


def used_completions(
    groups: Sequence[CompletionGroup],
    is_rewarded_PG: Tensor,
    config: GRPOConfig,
) -> Tensor:
    """Which completions to learn from, bool (P, G): those with a reward and at least one token.

    `overlong_filtering` also leaves out truncated completions, whose rewards still count in the
    baseline of their group (Yu et al. 2025, arXiv 2503.14476, section 3.4).
    """
    # Without a token there is no log-probability to learn from.
    used = is_rewarded_PG & (completion_lengths(groups) > 0)
    if config.overlong_filtering:
        used &= ~truncated_completions(groups)
    return used


def _centred(rewards_PG: Tensor) -> Tensor:
    """Rewards less the mean of their row; 0 for missing rewards. Rows of equal rewards give exactly
    0: the rounding of their mean, divided by a tiny std, would become 1.
    """
    mean_P1 = rewards_PG.nanmean(dim=1, keepdim=True)
    differ_P1 = informative_groups(rewards_PG)[:, None]
    return torch.where(rewards_PG.isfinite() & differ_P1, rewards_PG - mean_P1, 0.0)


def length_correlation(rewards_PG: Tensor, lengths_PG: Tensor) -> float | None:
    """How reward and length go together within groups: Pearson's correlation of both less their
    group's means.

    Completions whose reward is not finite are left out. None where nothing varies within any group.
    """
    is_rewarded_PG = rewards_PG.isfinite()

    def centred(values_PG: Tensor) -> Tensor:
        known_PG = values_PG.double().where(is_rewarded_PG, torch.nan)
        return (known_PG - known_PG.nanmean(dim=1, keepdim=True)).nan_to_num()

    r_PG = centred(rewards_PG)
    n_PG = centred(lengths_PG)
    spread = float((r_PG**2).sum().sqrt() * (n_PG**2).sum().sqrt())
    if spread == 0.0:
        return None
    return float((r_PG * n_PG).sum()) / spread
