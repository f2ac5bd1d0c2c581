"""`GRPOConfig` and `PolicyLossConfig`: group-relative policy optimisation, from sampling to the
loss.

    grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, val_period: 10}
    loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.28}

A step samples `num_prompts_per_step` groups of completions, and learns from each group
`updates_per_batch` times.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from treeward.config.base import Limit, Period, Strict
from treeward.config.run import ScheduleConfig

Estimator = Literal["grpo", "leave_one_out", "reinforce_plus_plus", "gdpo", "normalize_then_sum"]
KLPenalty = Literal["k1", "k2", "k3", "k2_unweighted", "k3_unweighted"]
Truncation = Literal["tis", "icepop", "seq-mask-tis"]
AlarmKind = Literal[
    "gold_falls", "kl_budget", "length_growth", "entropy_collapse", "truncation", "no_signal"
]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


class PolicyLossConfig(Strict):
    """The clipped surrogate, and the penalty on leaving the reference policy."""

    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of KL(policy || reference). 0: no penalty; the KL is still measured."""
    reference_policy_kl_type: KLPenalty = "k3"
    """Estimator of the KL from the sampled tokens (Schulman 2020). `k1`, `k2` and `k3` are weighted
    by the probability of the token, as in NeMo RL, so that `k1` and `k3` have the gradient of
    KL(policy || reference). `k2_unweighted` and `k3_unweighted` are the plain estimates of TRL and
    of the GRPO paper."""
    use_on_policy_kl_approximation: bool = False
    """Weight the estimate by the policy's probability over the generator's, which also corrects for
    completions that an older policy or another program sampled. False: the weight is 1, and only
    its gradient counts."""
    kl_in_reward: bool = False
    """Subtract the penalty from the reward instead of adding it to the loss; also called
    `use_kl_in_reward`."""
    kl_input_clamp_value: PositiveFloat | None = 20.0
    """Clip a token's log-ratio to the reference to this absolute value. None disables; ignored with
    `kl_in_reward`."""
    kl_output_clamp_value: PositiveFloat | None = 10.0
    """Clip a token's estimated KL to this absolute value. None disables; ignored with
    `kl_in_reward`."""
    ratio_clip_min: float = Field(default=0.2, ge=0.0, le=1.0)
    """The ratio of new to old probability is clipped below at 1 - this."""
    ratio_clip_max: NonNegativeFloat = 0.2
    """The ratio is clipped above at 1 + this."""
    ratio_clip_c: float | None = Field(default=None, gt=1.0)
    """Dual clip: the largest multiple of a negative advantage, usually 3 (Ye et al. 2019). None: no
    limit."""
    token_level_loss: bool = True
    """Every token of the batch has the same weight. False: every completion has, whatever its
    length."""
    sequence_level_importance_ratios: bool = False
    """One ratio for a completion, the geometric mean over its tokens (GSPO). Needs
    `token_level_loss: false`."""
    force_on_policy_ratio: bool = False
    """The ratio is 1 and nothing is clipped, whatever `sequence_level_importance_ratios` says.
    Needs one update from the completions of a step."""
    use_importance_sampling_correction: bool = False
    """Weight tokens by the trainer's probability over the generator's, for a generator with other
    numerics."""
    truncated_importance_sampling_type: Truncation | None = None
    """What happens to a weight outside the limits. `tis`, also None: it is cut to the nearer limit.
    `icepop`: it becomes 0. `seq-mask-tis`: all weights of a completion become 0 whose geometric
    mean is outside the limits; other completions keep theirs uncut."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """The largest such weight. None: no limit."""
    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None
    """The least such weight. `icepop` and `seq-mask-tis` need it; None: 0."""

    @property
    def needs_generator_log_probs(self) -> bool:
        """Whether the loss reads the generator's log-probabilities."""
        penalises = self.reference_policy_kl_penalty > 0 and not self.kl_in_reward
        return self.use_importance_sampling_correction or (
            penalises and self.use_on_policy_kl_approximation
        )

    def check(self) -> None:
        if self.use_on_policy_kl_approximation and self.reference_policy_kl_type.endswith(
            "_unweighted"
        ):
            keys = "reference_policy_kl_type use_on_policy_kl_approximation"
            raise self.error(keys, "k1, k2 or k3: the others have no weight")
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise self.error(
                "sequence_level_importance_ratios token_level_loss", "token_level_loss: false"
            )
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1.0 + self.ratio_clip_max:
            raise self.error(
                "ratio_clip_c ratio_clip_max", "more than 1 + ratio_clip_max; usually 3"
            )
        # The truncation of the importance weights.
        kind = self.truncated_importance_sampling_type
        high = self.truncated_importance_sampling_ratio
        low = self.truncated_importance_sampling_ratio_min
        is_given = kind is not None or high is not None or low is not None
        # Without the correction there is no weight to truncate.
        if is_given and not self.use_importance_sampling_correction:
            first = "truncated_importance_sampling_type"
            if high is not None:
                first = "truncated_importance_sampling_ratio"
            keys = f"{first} use_importance_sampling_correction"
            raise self.error(keys, "use_importance_sampling_correction: true, or no truncation")
        if is_given and high is None:
            keys = "truncated_importance_sampling_ratio truncated_importance_sampling_type"
            raise self.error(keys, "the largest weight, as 2.0")
        # These drop what is outside of the limits, and not only what is above.
        if kind in ("icepop", "seq-mask-tis") and low is None:
            keys = "truncated_importance_sampling_ratio_min truncated_importance_sampling_type"
            raise self.error(keys, "the least weight, as 0.5")
        if low is not None and high is not None and low > high:
            keys = "truncated_importance_sampling_ratio_min truncated_importance_sampling_ratio"
            raise self.error(keys, "at most truncated_importance_sampling_ratio")
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            keys = "truncated_importance_sampling_type sequence_level_importance_ratios"
            raise self.error(
                keys, "tis or icepop: with sequence-level ratios a completion has one weight"
            )


class AdvantageEstimatorConfig(Strict):
    """How rewards become advantages."""

    name: Estimator = "grpo"
    """`grpo`: (reward - mean) / std of the group (Shao et al. 2024); `leave_one_out`: reward - mean
    of the others (Ahmadian et al. 2024); `reinforce_plus_plus`: (reward - mean) / std of the batch
    (Hu et al. 2025). With `gdpo` each component of the reward is normalised in its group, and their
    weighted sum over the batch (Liu et al. 2026), as in NeMo RL; `normalize_then_sum` is the same
    with TRL's constants."""
    minus_baseline: bool = True
    """With `reinforce_plus_plus`: subtract the mean of the group. False: subtract the mean of the
    whole batch."""
    reward_weights: dict[str, float] | tuple[float, ...] | None = None
    """With `gdpo` and `normalize_then_sum`: the components and their weights, as `{correct: 1.0,
    format: 0.5}`; others are not learnt from. A list, as in NeMo RL, has the components in
    alphabetical order. A batch may lack criteria of a rubric, and components whose rewards have
    failed; a name that no reward has is an error. None: all components, each with its weight in the
    reward: that of a member of a hybrid, the points of a rubric's criterion without their sign,
    else 1. Only a mapping reaches details, whose names have a slash."""

    @property
    def takes_components(self) -> bool:
        """Whether it learns from the components of the rewards, one by one."""
        return self.name in ("gdpo", "normalize_then_sum")

    def check(self) -> None:
        weights = self.reward_weights
        if weights is None:
            return
        if not self.takes_components:
            raise self.error("reward_weights name", "name: gdpo or normalize_then_sum")
        values = weights.values() if isinstance(weights, dict) else weights
        if sum(value != 0.0 for value in values) < 2:
            need = "weights of two components or more: of one, the others are the same as grpo"
            raise self.error("reward_weights", need)


class OverlongShapingConfig(Strict):
    """A penalty that grows over the last tokens before the limit (DAPO, Yu et al. 2025, arXiv
    2503.14476, eq. 13), and on beyond it, as in NeMo RL."""

    enabled: bool = False
    """Subtract the penalty."""
    overlong_buffer_length: PositiveInt = 128
    """The penalty grows from 0 to `overlong_buffer_penalty` over this number of tokens before
    `max_response_length`."""
    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """The penalty at `max_response_length`."""
    max_response_length: PositiveInt | None = None
    """Tokens of a completion that cost `overlong_buffer_penalty`. None: as many as a completion may
    have."""


class RewardScalingConfig(Strict):
    """Rewards are clipped to a source range, which is mapped linearly to a target range."""

    enabled: bool = False
    """Scale rewards, before any penalty."""
    source_min: float = 0.0
    """Smaller rewards are raised to this."""
    source_max: float = 1.0
    """Larger rewards are cut to this."""
    target_min: float = 0.0
    """The reward that `source_min` becomes."""
    target_max: float = 1.0
    """The reward that `source_max` becomes."""

    def check(self) -> None:
        for low, high in (("source_min", "source_max"), ("target_min", "target_max")):
            if getattr(self, low) >= getattr(self, high):
                raise self.error(f"{low} {high}", f"{low} below {high}")


class WatchConfig(Strict):
    """When the run raises an alarm because the policy exploits its reward (Gao et al. 2022, arXiv
    2210.10760)."""

    z: PositiveFloat = 3.0
    """Threshold of the test for a fall of the gold reward, in standard deviations; 3 has 0.00135
    false alarms a run."""
    max_kl: PositiveFloat | None = None
    """Budget for KL(policy || reference). None: no budget."""
    max_length_growth: float | None = Field(default=2.0, gt=1.0)
    """Alarm when completions are this many times as long as at the first validation. None:
    never."""
    stop_on: tuple[AlarmKind, ...] = ()
    """Kinds of alarms that end the run, as `[gold_falls]`."""


class GRPOConfig(ScheduleConfig):
    """The length of the run, its groups, their rewards and advantages, and its validations."""

    num_prompts_per_step: PositiveInt = 32
    """Groups in a step: prompts that are completed and learnt from."""
    num_generations_per_prompt: int = Field(default=16, ge=2)
    """Completions of each prompt, at least 2: the advantage of a completion is relative to its
    group."""
    updates_per_batch: PositiveInt = 1
    """Passes over the completions of a step."""
    normalize_rewards: bool = True
    """Divide advantages by the group's standard deviation; false with `adv_estimator: {name:
    leave_one_out}`. NeMo RL has this key and the next one in `adv_estimator` too, which counts."""
    use_leave_one_out_baseline: bool = False
    """Subtract the mean reward of the other completions of the group instead of the mean of all."""
    adv_estimator: AdvantageEstimatorConfig = AdvantageEstimatorConfig()
    advantage_clip_low: float | None = None
    """Smaller advantages are raised to this. None: no limit."""
    advantage_clip_high: float | None = None
    """Larger advantages are cut to this. None: no limit."""

    gold_environment: str | None = None
    """An environment whose reward is watched and never trained on: a stronger judge, or known
    truth."""
    max_failed_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """The run ends if a larger share of the completions of a batch has no reward."""
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    reward_shaping: OverlongShapingConfig = OverlongShapingConfig()

    overlong_filtering: bool = False
    """Truncated completions are left out of the loss; their rewards stay in the mean of their
    group."""
    seq_logprob_error_threshold: float | None = Field(default=None, gt=1.0)
    """Leave completions out of the loss whose `token_mult_prob_error` is larger: the mean over
    their tokens of exp |trainer's less generator's log-probability|. Their rewards stay in the mean
    of their group. None: no limit."""
    use_dynamic_sampling: bool = False
    """Sample until there are `num_prompts_per_step` groups whose rewards differ (DAPO)."""
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """Dynamic sampling: after this number of batches the step goes on with the groups that it
    has."""
    batch_multiplier: float = Field(default=1.0, ge=1.0)
    """Dynamic sampling: a batch has this many times `num_prompts_per_step` prompts."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Run without a reference policy: no KL is measured. Needs
    `loss_fn.reference_policy_kl_penalty: 0`."""

    val_period: Period = 10
    """Steps from one validation to the next. None (or 0): no validation before the end."""
    val_start_at: Period = None
    """No validation by `val_period` before this step. None (or -1): from the first on."""
    max_val_samples: Limit = 256
    """Most prompts to validate on, always the same ones. None: all."""
    val_batch_size: PositiveInt | None = None
    """`max_val_samples` is lowered to a multiple of this number of prompts, as in NeMo RL. None: it
    is not."""
    num_val_generations: PositiveInt = 1
    """Completions of each validation prompt. NeMo RL's name is `val_num_generations_per_prompt`."""
    watch: WatchConfig = WatchConfig()

    @property
    def completions_per_step(self) -> int:
        """Completions that a step learns from."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def most_val_prompts(self) -> int | None:
        """Most prompts to validate on; None for no limit."""
        if self.max_val_samples is None or self.val_batch_size is None:
            return self.max_val_samples
        return self.max_val_samples // self.val_batch_size * self.val_batch_size

    def is_validated(self, step: int) -> bool:
        return super().is_validated(step) and step >= (self.val_start_at or 0)  # None: from 0

    def check(self) -> None:
        if self.batch_multiplier != 1.0 and not self.use_dynamic_sampling:
            raise self.error(
                "batch_multiplier use_dynamic_sampling", "1, or use_dynamic_sampling: true"
            )
        if self.most_val_prompts == 0:
            need = "at most max_val_samples: there would be no prompt to validate on"
            raise self.error("val_batch_size max_val_samples", need, "set grpo.val_batch_size=null")
        self._check_components()
        low = self.advantage_clip_low
        high = self.advantage_clip_high
        if low is not None and high is not None and low >= high:
            keys = "advantage_clip_low advantage_clip_high"
            need = "advantage_clip_low below advantage_clip_high"
            raise self.error(keys, need, "set one of the two to null")

    def _check_components(self) -> None:
        estimator = self.adv_estimator.name
        if not self.adv_estimator.takes_components:
            return
        if self.reward_shaping.enabled:
            need = f"false: {estimator} reads the components, and the penalty is of their sum"
            fix = "reward the length by a component of its own"
            raise self.error("reward_shaping.enabled adv_estimator.name", need, fix)
        if estimator == "normalize_then_sum" and self.use_leave_one_out_baseline:
            need = "false, or gdpo: TRL's formula subtracts the mean of the group"
            raise self.error("use_leave_one_out_baseline adv_estimator.name", need)
        if estimator == "normalize_then_sum" and not self.normalize_rewards:
            need = "true, or gdpo: TRL's formula always divides by the group's std"
            raise self.error("normalize_rewards adv_estimator.name", need)
