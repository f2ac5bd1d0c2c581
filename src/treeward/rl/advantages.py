"""From rewards to advantages: how much better a completion is than expected, from the completions
beside it.

    rewards_PG = shaped_rewards(config, groups, rewards_PG)     # scaled, less penalties of length
    advantages(rewards_PG, GRPOConfig())                        # (P, G), compared in each group
    component_advantages(rewards_PG, components, weights, config.grpo)     # (P, G), GDPO
    used_completions(groups, rewards_PG.isfinite(), config.grpo)    # which of them are learnt from

A missing reward is NaN: it enters no mean and no std, and its completion's advantage is 0.
Penalties are subtracted, never multiplied: a factor below 1 would raise a negative reward.

Shapes: P prompts, G completions to each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

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
    rewards = torch.where(rewards_PG.isfinite(), rewards_PG.double(), torch.nan)
    count_P1 = rewards.isfinite().sum(dim=1, keepdim=True)
    estimator = config.adv_estimator.name
    if estimator == "reinforce_plus_plus":
        if config.adv_estimator.minus_baseline:
            centred = _centred(rewards)
        else:
            # The whole batch as one group.
            centred = _centred(rewards.reshape(1, -1)).reshape(rewards.shape)
        std = (centred.square().sum() / (count_P1.sum() - 1).clamp_min(1)).sqrt()
        return _clipped(centred / (std + STD_FLOOR), config)
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
    return _clipped(result, config)


def component_advantages(
    rewards_PG: Tensor,
    components: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    config: GRPOConfig,
) -> Tensor:
    """The advantages from several rewards, float32 (P, G): GDPO (Liu et al. 2026, arXiv
    2601.05242).

    `rewards_PG`: their sums, of which the shape alone is read. `components`: rewards by name, (P,
    G), NaN for missing. `weights`, as of `component_weights`: how much each counts, (P, G). Each is
    normalised in its group as by `advantages`; A = sum_k w_k A_k; the result is (A - mean) / std of
    the batch, std with n - 1. A missing component adds 0 to its completion's sum, and enters no
    mean and no std. A completion without any component has the advantage 0, and is not counted in
    the batch.

    - gdpo, as NeMo RL: a floor of 1e-6 under the std of a group, none under that of the batch; what
      does not vary is not divided. With `use_leave_one_out_baseline` mean and std are those of the
      other completions of the group, so that the std differs from completion to completion.
    - normalize_then_sum, as TRL: 1e-4 is added to both.
    """
    is_trl = config.adv_estimator.name == "normalize_then_sum"
    floor = _TRL_FLOOR if is_trl else STD_FLOOR
    is_known = rewarded(rewards_PG, components, weights)
    sums = torch.zeros_like(rewards_PG, dtype=torch.float64)
    for name, weights_PG in weights.items():
        values = components[name]
        rewards = torch.where(values.isfinite(), values.double(), torch.nan)
        if config.use_leave_one_out_baseline:
            normalised = _against_others(rewards, divides=config.normalize_rewards)
        else:
            normalised = _centred(rewards)
            if config.normalize_rewards:
                normalised = normalised / (_std(normalised, rewards.isfinite(), dim=1) + floor)
        sums += weights_PG.double() * normalised
    # Over the batch as one row of completions.
    centred = torch.where(is_known, sums - sums[is_known].mean(), 0.0)
    std = _std(centred.flatten(), is_known.flatten(), dim=0)
    if is_trl:
        centred = centred / (std + floor)
    elif float(std) > 0.0:
        centred = centred / std
    return _clipped(centred, config)


def component_weights(
    own_weights: Mapping[str, Tensor],
    estimator: AdvantageEstimatorConfig,
    *,
    row_components: Collection[str] = (),
    has_failed: bool = False,
) -> dict[str, Tensor]:
    """How much each component counts that a batch is learnt from, (P, G) by name.

    `own_weights`: how much each component of the batch counts in its rewards, (P, G), which the
    weights of the configuration replace. `row_components`: those that come with the rows of the
    data, as the criteria of rubrics, so that a batch may lack some. `has_failed`: some rewards of
    the batch have failed, so that it may lack any. What may be lacking is left out. Raises
    `ConfigError` for fewer than two components, for a list of another length, and for a name that
    no reward has.
    """
    chosen = estimator.reward_weights
    known = set(own_weights).union(row_components)
    # With a slash are details, as `score/spread`, and the components of a hybrid's members,
    # which stand for themselves in the member's reward. Only a mapping can name them.
    rewards = sorted(name for name in known if "/" not in name)
    numbers: dict[str, float] = {}
    if isinstance(chosen, Mapping):
        numbers = {name: number for name, number in chosen.items() if number != 0.0}
    elif chosen is None:
        numbers = dict.fromkeys(rewards, 1.0)
    elif len(chosen) == len(rewards):
        numbers = dict(zip(rewards, chosen, strict=True))
    # Failures cannot excuse a list: without all names it says nothing.
    is_excused = has_failed and not isinstance(chosen, tuple)
    missing = sorted(numbers.keys() - known)
    if not is_excused and (len(numbers) < 2 or missing):
        raise _misfit(estimator, known, missing)
    weights = {}
    for name, number in numbers.items():
        if name not in own_weights:
            continue
        weights[name] = own_weights[name]
        if chosen is not None:
            weights[name] = torch.full_like(own_weights[name], number)
    return weights


def _misfit(
    estimator: AdvantageEstimatorConfig, known: Collection[str], missing: Sequence[str]
) -> ConfigError:
    got = ", ".join(sorted(known)) or "rewards without components"
    if missing:
        got = f"no {', '.join(missing)} among {got}"
    fix = (
        "rewards with components come from several members of a hybrid environment, several "
        "heads of a reward model, several criteria of a rubric, or a function that returns "
        "reward/<name> for each"
    )
    if isinstance(estimator.reward_weights, tuple):
        fix += "; where some may fail, a mapping of names and weights goes on with the others"
    return ConfigError(
        f"{estimator.name} cannot weigh the components of the rewards",
        field="grpo.adv_estimator.reward_weights",
        got=got,
        need="two components or more, each with a weight",
        fix=fix,
    )


def _clipped(advantages_PG: Tensor, config: GRPOConfig) -> Tensor:
    low = config.advantage_clip_low
    high = config.advantage_clip_high
    if low is not None:
        advantages_PG = advantages_PG.clamp_min(low)
    if high is not None:
        advantages_PG = advantages_PG.clamp_max(high)
    return advantages_PG.float()


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
    rewards_PG: Tensor,
    components: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None,
) -> Tensor:
    """Which completions have something to learn from, bool (P, G): one of the components with
    `weights`, as of `component_weights`; without weights the reward."""
    if weights is None:
        return rewards_PG.isfinite()
    is_rewarded_PG = torch.zeros_like(rewards_PG, dtype=torch.bool)
    for name in weights:
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
        # In float64 the sum of equal float32 numbers is exact, and so is their mean: where nothing
        # varies the spread below is 0, and not the rounding of it.
        known_PG = values_PG.double().where(is_rewarded_PG, torch.nan)
        return (known_PG - known_PG.nanmean(dim=1, keepdim=True)).nan_to_num()

    r_PG = centred(rewards_PG)
    n_PG = centred(lengths_PG)
    spread = float((r_PG**2).sum().sqrt() * (n_PG**2).sum().sqrt())
    if spread == 0.0:
        return None
    return float((r_PG * n_PG).sum()) / spread
