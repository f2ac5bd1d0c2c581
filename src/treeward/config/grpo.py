"""`GRPOConfig` and `PolicyLossConfig`: group-relative policy optimisation, from sampling to the loss.

    grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, val_period: 10, gold_environment: judge}
    loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.28}

A step samples `num_prompts_per_step` groups of completions, and learns from each group `updates_per_batch` times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from treeward.config.base import Limit, Period, Strict
from treeward.config.run import ScheduleConfig

Estimator = Literal["grpo", "leave_one_out", "reinforce_plus_plus"]
AlarmKind = Literal["gold_falls", "kl_budget", "length_growth", "entropy_collapse", "truncation", "no_signal"]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


class PolicyLossConfig(Strict):
    """The clipped surrogate, and the penalty on leaving the reference policy."""

    other_names: ClassVar[Mapping[str, str]] = {"use_kl_in_reward": "kl_in_reward"}

    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of KL(policy || reference). 0: no penalty; the KL is still measured."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL from the sampled tokens (Schulman 2020). `k1` needs `kl_in_reward`."""
    kl_in_reward: bool = False
    """Subtract the penalty from the reward instead of adding it to the loss; also called `use_kl_in_reward`."""
    kl_input_clamp_value: PositiveFloat | None = 20.0
    """Clip a token's log-ratio to the reference to this absolute value. None disables; ignored with `kl_in_reward`."""
    kl_output_clamp_value: PositiveFloat | None = 10.0
    """Clip a token's estimated KL to this absolute value. None disables; ignored with `kl_in_reward`."""
    ratio_clip_min: float = Field(default=0.2, ge=0.0, le=1.0)
    """The ratio of new to old probability is clipped below at 1 - this."""
    ratio_clip_max: NonNegativeFloat = 0.2
    """The ratio is clipped above at 1 + this."""
    ratio_clip_c: float | None = Field(default=None, gt=1.0)
    """Dual clip: the largest multiple of a negative advantage, usually 3 (Ye et al. 2019). None: no limit."""
    token_level_loss: bool = True
    """Every token of the batch has the same weight. False: every completion has, whatever its length."""
    sequence_level_importance_ratios: bool = False
    """One ratio for a completion, the geometric mean over its tokens (GSPO). Needs `token_level_loss: false`."""
    use_importance_sampling_correction: bool = False
    """Weight tokens by the trainer's probability over the generator's, for a generator with other numerics."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """The largest such weight; larger ones are cut to it. None: no limit."""

    def check(self) -> None:
        if self.reference_policy_kl_type == "k1" and self.reference_policy_kl_penalty > 0 and not self.kl_in_reward:
            need = "k3 or k2, or k1 in the reward: as a loss k1 has an expected gradient of zero"
            fix = "set loss_fn.kl_in_reward=true, or loss_fn.reference_policy_kl_type=k3"
            raise self.error("reference_policy_kl_type kl_in_reward", need, fix)
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise self.error("sequence_level_importance_ratios token_level_loss", "token_level_loss: false")
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1.0 + self.ratio_clip_max:
            raise self.error("ratio_clip_c ratio_clip_max", "more than 1 + ratio_clip_max; usually 3")
        if self.truncated_importance_sampling_ratio is not None and not self.use_importance_sampling_correction:
            keys = "truncated_importance_sampling_ratio use_importance_sampling_correction"
            raise self.error(keys, "use_importance_sampling_correction: true, or no ratio")


class AdvantageEstimatorConfig(Strict):
    """How rewards become advantages."""

    other_forms: ClassVar[tuple[str, ...]] = ("normalize_rewards", "use_leave_one_out_baseline")
    """NeMo RL's places of keys of `grpo`."""

    name: Estimator = "grpo"
    """`grpo`: (reward - mean) / std of the group (Shao et al. 2024); `leave_one_out`: reward - mean of the others
    (Ahmadian et al. 2024); `reinforce_plus_plus`: (reward - mean) / std of the batch (Hu et al. 2025)."""
    minus_baseline: bool = True
    """With `reinforce_plus_plus`: subtract the mean of the group. False: subtract the mean of the whole batch."""


class OverlongShapingConfig(Strict):
    """A penalty that grows over the last tokens before the limit (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13)."""

    enabled: bool = False
    """Subtract the penalty."""
    overlong_buffer_length: PositiveInt = 128
    """The penalty grows from 0 to its maximum over this number of tokens before `max_response_length`."""
    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """The maximum penalty, at `max_response_length` and beyond."""
    max_response_length: PositiveInt | None = None
    """Tokens of a completion at which the penalty reaches its maximum. None: as many as a completion may have."""


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
    """When the run raises an alarm because the policy exploits its reward (Gao et al. 2022, arXiv 2210.10760)."""

    z: PositiveFloat = 3.0
    """Threshold of the test for a fall of the gold reward, in standard deviations; 3 has 0.00135 false alarms a run."""
    max_kl: PositiveFloat | None = None
    """Budget for KL(policy || reference). None: no budget."""
    max_length_growth: float | None = Field(default=2.0, gt=1.0)
    """Alarm when completions are this many times as long as at the first validation. None: never."""
    stop_on: tuple[AlarmKind, ...] = ()
    """Kinds of alarms that end the run, as `[gold_falls]`."""


class GRPOConfig(ScheduleConfig):
    """The length of the run, its groups, their rewards and advantages, and its validations."""

    other_names: ClassVar[Mapping[str, str]] = {"val_num_generations_per_prompt": "num_val_generations"}

    num_prompts_per_step: PositiveInt = 32
    """Groups in a step: prompts that are completed and learnt from."""
    num_generations_per_prompt: int = Field(default=16, ge=2)
    """Completions of each prompt, at least 2: the advantage of a completion is relative to its group."""
    updates_per_batch: PositiveInt = 1
    """Passes over the completions of a step."""
    normalize_rewards: bool = True
    """Divide advantages by the group's standard deviation; false with `adv_estimator: {name: leave_one_out}`. NeMo RL
    has this key and the next one in `adv_estimator` too, which counts."""
    use_leave_one_out_baseline: bool = False
    """Subtract the mean reward of the other completions of the group instead of the mean of all."""
    adv_estimator: AdvantageEstimatorConfig = AdvantageEstimatorConfig()

    gold_environment: str | None = None
    """An environment whose reward is watched and never trained on: a stronger judge, or known truth."""
    max_failed_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """The run ends if a larger share of the completions of a batch has no reward."""
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    reward_shaping: OverlongShapingConfig = OverlongShapingConfig()

    overlong_filtering: bool = False
    """Truncated completions are left out of the loss; their rewards stay in the mean of their group."""
    use_dynamic_sampling: bool = False
    """Sample until there are `num_prompts_per_step` groups whose rewards differ (DAPO)."""
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """Dynamic sampling: after this number of batches the step goes on with the groups that it has."""
    batch_multiplier: float = Field(default=1.0, ge=1.0)
    """Dynamic sampling: a batch has this many times `num_prompts_per_step` prompts."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Run without a reference policy: no KL is measured. Needs `loss_fn.reference_policy_kl_penalty: 0`."""

    val_period: Period = 10
    """Steps from one validation to the next. None (or 0): no validation before the end."""
    max_val_samples: Limit = 256
    """Most prompts to validate on, always the same ones. None: all."""
    num_val_generations: PositiveInt = 1
    """Completions of each validation prompt. NeMo RL's name is `val_num_generations_per_prompt`."""
    watch: WatchConfig = WatchConfig()

    @property
    def completions_per_step(self) -> int:
        """Completions that a step learns from."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @model_validator(mode="before")
    @classmethod
    def _take_keys_of_the_estimator(cls, raw: Any) -> Any:
        section = raw.get("adv_estimator") if isinstance(raw, Mapping) else None
        if not isinstance(section, Mapping):
            return raw
        keys = {key: section[key] for key in AdvantageEstimatorConfig.other_forms if section.get(key) is not None}
        if section.get("name") == "leave_one_out":
            keys = {"normalize_rewards": False} | keys
        kept = {key: value for key, value in section.items() if key not in AdvantageEstimatorConfig.other_forms}
        return {**raw, **keys, "adv_estimator": kept}

    def check(self) -> None:
        if self.batch_multiplier != 1.0 and not self.use_dynamic_sampling:
            raise self.error("batch_multiplier use_dynamic_sampling", "1, or use_dynamic_sampling: true")
