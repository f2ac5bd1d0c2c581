"""`GRPOConfig`: group-relative policy optimisation, step by step: sampling, rewards, advantages, validation.

    grpo:
      num_prompts_per_step: 32
      num_generations_per_prompt: 16
      val_period: 10                 # steps
      gold_environment: judge        # watched, never trained on

A step samples `num_prompts_per_step` groups of answers, and learns from each of them `updates_per_batch` times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from treeward.config.backends import DisabledSection
from treeward.config.base import Strict
from treeward.config.rm import none_for
from treeward.errors import ConfigError

__all__ = ["AdvantageEstimatorConfig", "AlarmKind", "AsyncGRPOConfig", "GRPOConfig", "OverlongShapingConfig"]
__all__ += ["RewardScalingConfig", "WatchConfig"]

Estimator = Literal["grpo", "leave_one_out", "reinforce_plus_plus"]
AlarmKind = Literal["gold_falls", "kl_budget", "length_growth", "entropy_collapse", "truncation", "no_signal"]
Share = Annotated[float, Field(gt=0.0, le=1.0)]


class AdvantageEstimatorConfig(Strict):
    """How rewards become advantages, in the form of NeMo RL's newer files."""

    name: Estimator = "grpo"
    """`grpo`: reward less the group's mean, over the group's standard deviation (Shao et al. 2024); `leave_one_out`:
    less the mean of the other answers (Ahmadian et al. 2024); `reinforce_plus_plus`: less the group's mean, over the
    standard deviation of the whole batch (Hu et al. 2025)."""
    normalize_rewards: bool | None = None
    """Divide by the standard deviation. None: as `grpo.normalize_rewards` says for `grpo`; false for `leave_one_out`.
    `reinforce_plus_plus` always divides."""
    use_leave_one_out_baseline: bool | None = None
    """Of `grpo`: take the mean of the other answers. None: as `grpo.use_leave_one_out_baseline` says."""
    minus_baseline: bool = True
    """Of `reinforce_plus_plus`: compare with the mean of the group. False: with that of the whole batch."""

    @model_validator(mode="after")
    def _keys_fit_the_name(self) -> AdvantageEstimatorConfig:
        if self.name == "leave_one_out" and self.use_leave_one_out_baseline is False:
            raise ConfigError(
                "leave_one_out without the leave-one-out baseline",
                field="use_leave_one_out_baseline",
                got="false, name: leave_one_out",
                need="name: grpo, or no such key",
                fix="remove grpo.adv_estimator.use_leave_one_out_baseline",
            )
        if self.name == "reinforce_plus_plus" and self.normalize_rewards is False:
            raise ConfigError(
                "reinforce_plus_plus always divides by the standard deviation of the batch",
                field="normalize_rewards",
                got="false",
                need="true, or no such key",
                fix="for the difference alone set grpo.adv_estimator.name=grpo",
            )
        return self


class OverlongShapingConfig(Strict):
    """A penalty that grows over the last tokens before the limit (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13)."""

    switched_off_keys: ClassVar[Mapping[str, str]] = {
        "stop_properly_penalty_coef": "rewards of truncated answers are not scaled, which would praise bad ones: use "
        "grpo.truncated=penalty",
    }

    enabled: bool = False
    """Subtract the penalty."""
    overlong_buffer_length: PositiveInt = 128
    """Over so many tokens before `max_response_length` the penalty grows from 0 to its whole."""
    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """The whole penalty, at `max_response_length` and beyond."""
    max_response_length: PositiveInt | None = None
    """In tokens; or what a prompt leaves of `policy.max_total_sequence_length`, if that is less, for there its answers
    are cut. None: `policy.generation.max_new_tokens`, or that room."""


class RewardScalingConfig(Strict):
    """Rewards are clipped to a range, and the range is mapped to another by a line."""

    enabled: bool = False
    """Scale rewards, before any penalty."""
    source_min: FiniteFloat = 0.0
    """Smaller rewards are taken as this."""
    source_max: FiniteFloat = 1.0
    """Larger rewards are taken as this."""
    target_min: FiniteFloat = 0.0
    """What `source_min` becomes."""
    target_max: FiniteFloat = 1.0
    """What `source_max` becomes."""

    @model_validator(mode="after")
    def _ranges_rise(self) -> RewardScalingConfig:
        for side in ("source", "target"):
            low, high = getattr(self, f"{side}_min"), getattr(self, f"{side}_max")
            if low >= high:
                raise ConfigError(
                    f"the {side} range of reward_scaling does not rise",
                    field=f"{side}_min",
                    got=f"{side}_min: {low}, {side}_max: {high}",
                    need=f"{side}_min below {side}_max: a better answer has the higher reward",
                )
        return self


class AsyncGRPOConfig(DisabledSection):
    """Training while older answers are still being sampled: accepted while disabled."""

    reason = "asynchronous GRPO is not supported"
    remedy = "set grpo.async_grpo.enabled=false: every answer is of the policy that learns from it"


class WatchConfig(Strict):
    """When the run says that the policy exploits its reward (Gao et al. 2022, arXiv 2210.10760)."""

    enabled: bool = True
    """Watch every validation."""
    z: PositiveFloat = 3.0
    """How sure the test of a fall of gold is, over the whole run: the probability of a false alarm is that beyond z of
    a normal distribution, 0.00135 for 3."""
    min_validations: int = Field(default=3, ge=2)
    """No test before so many validations."""
    max_kl: PositiveFloat | None = None
    """Budget for KL(policy || reference). None: no budget."""
    max_length_growth: float | None = Field(default=2.0, gt=1.0)
    """Alarm when answers are so many times as long as at the first validation. None: never."""
    min_length_correlation: float = Field(default=0.3, ge=-1.0, le=1.0)
    """That alarm is raised only where reward and length correlate so much within groups, where that is known."""
    min_entropy_share: Share | None = 0.1
    """Alarm when entropy is below this share of that at the first validation. None: never."""
    max_truncation_rate: Share | None = 0.5
    """Alarm when a larger share of answers is cut off. None: never."""
    max_groups_without_signal: Share | None = 0.9
    """Alarm when the rewards are equal within a larger share of groups. None: never."""
    stop: bool = False
    """End the run at an alarm of a kind in `stop_on`."""
    stop_on: tuple[AlarmKind, ...] = ("gold_falls",)
    """Kinds of alarms."""


_FLAG = TypeAdapter(bool)


def _is_true(value: Any) -> bool:
    """Whether a key of the type `bool` would be true; what is no such value is refused by the key itself."""
    try:
        return _FLAG.validate_python(value)
    except ValidationError:
        return False


def _named(value: Any) -> Any:
    """One name or a list of names, as a mapping to weights."""
    if isinstance(value, str):
        return {value: 1.0}
    return dict.fromkeys(value, 1.0) if isinstance(value, list | tuple) else value


class GRPOConfig(Strict):
    """The length of the run, its groups, their rewards and advantages, and its validations."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        "calculate_advantages_on_gpu": "advantages are a few numbers",
        "deduplicate_multimodal_data": "prompts are text",
        "debug_payload_metrics": "there are no payloads",
    }
    switched_off_keys: ClassVar[Mapping[str, str]] = {
        "advantage_clip_low": "set grpo.advantage_clip_low=null: loss_fn.ratio_clip_c limits negative advantages",
        "advantage_clip_high": "set grpo.advantage_clip_high=null: grpo.advantage_std_floor limits advantages",
        "seq_logprob_error_threshold": "set it to null: token_mult_prob_error is logged",
        "val_start_at": "set grpo.val_start_at=-1: grpo.val_period says when to validate",
        "stop_at_validation_metric": "set it to null; grpo.watch.stop ends a run that exploits its reward",
        "stop_at_validation_threshold": "set it to null; grpo.watch.stop ends a run that exploits its reward",
        "invalid_tool_call_advantage": "set it to null: there are no tools",
        "malformed_thinking_advantage": "set it to null: use an environment with a rule for the form",
        "interleave_rollouts": "set it to false",
    }
    other_forms: ClassVar[tuple[str, ...]] = ("val_num_generations_per_prompt",)

    num_prompts_per_step: PositiveInt = 32
    """Groups in a step: prompts that are answered and learnt from."""
    num_generations_per_prompt: int = Field(default=16, ge=1)
    """Answers to each prompt, at least 2: they are each other's baseline."""
    max_rollout_turns: PositiveInt = 1
    """Must be 1: a prompt is answered once."""
    max_num_epochs: PositiveInt = 1
    """Passes over the training prompts: the run ends with the step that draws the last of them. Dynamic sampling draws
    more prompts for a step, so that it ends before the steps that the schedule spans."""
    max_num_steps: Annotated[PositiveInt | None, none_for(-1)] = None
    """Most steps, whatever the epochs say. None (or -1): no limit."""
    updates_per_batch: PositiveInt = 1
    """How often the answers of a step are learnt from."""
    seed: NonNegativeInt = 42
    """Determines the order of the prompts, what is sampled and every other draw."""

    normalize_rewards: bool = True
    """Divide advantages by the group's standard deviation."""
    use_leave_one_out_baseline: bool = False
    """A reward is compared with the mean of the group's other answers: G / (G - 1) times the difference to the mean of
    all."""
    adv_estimator: AdvantageEstimatorConfig = AdvantageEstimatorConfig()
    """How rewards become advantages; what it says itself precedes the two keys above."""
    advantage_std_floor: PositiveFloat = 1e-6
    """Added to the standard deviation before it divides."""

    environments: Annotated[dict[str, FiniteFloat] | None, BeforeValidator(_named)] = None
    """The environments that reward the answers to prompts that name none, with weights or as a list of names. None:
    `reward_model` if `env` has it, or else its only one."""
    missing_rewards: Literal["mask", "renormalise"] = "mask"
    """Of several environments: an answer that one of them could not reward has no reward (`mask`), or the weights of
    the others are scaled up to the sum of all (`renormalise`)."""
    environments_on_ray: tuple[str, ...] = ()
    """Environments that live in Ray actors, on the GPUs of their `resources`. The others are in this process, but for a
    reward model with several replicas, whose replicas are in Ray actors."""
    gold_environment: str | None = None
    """An environment whose reward is watched and never trained on: a stronger judge, or known truth."""
    environment_timeout_seconds: PositiveFloat = 600.0
    """The time that an environment may take for a step; what has no reward by then has none."""
    max_failed_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """If a larger share of the answers to a batch of prompts has no reward, the run stops at a saved state. A step is
    one batch, with dynamic sampling several."""
    reward_scaling: RewardScalingConfig = RewardScalingConfig()
    """Rewards are clipped to a range, and mapped to another."""
    reward_shaping: OverlongShapingConfig = OverlongShapingConfig()
    """A penalty for answers that come near the limit of their length."""

    overlong_filtering: bool = False
    """NeMo RL's name of `truncated: mask`."""
    truncated: Literal["keep", "mask", "penalty"] = "keep"
    """What becomes of answers that were cut off: learnt from as they are, left out of the loss, or `truncation_penalty`
    is subtracted from their reward."""
    truncation_penalty: PositiveFloat = 1.0
    """Of `truncated: penalty`. Subtracted, never multiplied: a factor would praise what has a negative reward."""
    use_dynamic_sampling: bool = False
    """Sample until there are `num_prompts_per_step` groups whose rewards differ (DAPO)."""
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """Of dynamic sampling: after so many batches of prompts the step goes on with the groups that it has."""
    batch_multiplier: float = Field(default=1.0, ge=1.0)
    """Of dynamic sampling: a batch has this many times `num_prompts_per_step` prompts."""
    async_grpo: AsyncGRPOConfig | None = AsyncGRPOConfig()
    """Must be disabled."""
    skip_reference_policy_logprobs_calculation: bool = False
    """Do without the reference: no KL is measured. Needs `loss_fn.reference_policy_kl_penalty: 0`."""

    val_period: Annotated[PositiveInt | None, none_for(0, -1)] = 10
    """Validate each time after so many steps. None (or 0): not on the way."""
    val_at_start: bool = False
    """Validate before the first step too."""
    val_at_end: bool = True
    """Validate after the last step too."""
    max_val_samples: Annotated[PositiveInt | None, none_for(-1)] = 256
    """Most prompts to validate on, always the same. None: all."""
    val_batch_size: PositiveInt | None = 256
    """Validation prompts that are answered and rewarded at a time. None: all."""
    num_val_generations: PositiveInt = 1
    """Answers to each validation prompt. NeMo RL's name is `val_num_generations_per_prompt`."""
    watch: WatchConfig = WatchConfig()
    """When the run says that the policy exploits its reward."""
    log_period: PositiveInt = 1
    """Log the metrics of training each time after so many steps."""
    num_logged_samples: NonNegativeInt = 8
    """Prompts of each validation whose answers are kept for the report, in `samples.jsonl`."""

    @property
    def estimator(self) -> Estimator:
        """How the baseline is taken, whichever key says so."""
        own = self.adv_estimator
        leave_one_out = own.use_leave_one_out_baseline
        if leave_one_out is None:
            leave_one_out = self.use_leave_one_out_baseline
        return "leave_one_out" if own.name == "grpo" and leave_one_out else own.name

    @property
    def divides_by_std(self) -> bool:
        """Whether advantages are divided by a standard deviation: the group's, or of REINFORCE++ the batch's."""
        own = self.adv_estimator
        if own.name == "reinforce_plus_plus":
            return True
        if own.normalize_rewards is not None:
            return own.normalize_rewards
        return self.normalize_rewards and own.name == "grpo"

    @property
    def advantage_settings(self) -> dict[str, Any]:
        """The arguments of `treeward.rl.advantages.AdvantageSettings`."""
        leave_one_out = self.estimator == "leave_one_out"
        return {
            "name": "grpo" if leave_one_out else self.estimator,
            "normalize_rewards": self.divides_by_std,
            "use_leave_one_out_baseline": leave_one_out,
            "minus_baseline": self.adv_estimator.minus_baseline,
            "std_floor": self.advantage_std_floor,
        }

    @property
    def answers_per_step(self) -> int:
        """Answers that a step learns from."""
        return self.num_prompts_per_step * self.num_generations_per_prompt

    @property
    def prompts_per_draw(self) -> int:
        """Prompts that are answered at a time, of which dynamic sampling keeps some."""
        return math.ceil(self.num_prompts_per_step * self.batch_multiplier)

    @property
    def validates(self) -> bool:
        """Whether there is ever a validation."""
        return self.val_period is not None or self.val_at_start or self.val_at_end

    @model_validator(mode="before")
    @classmethod
    def _take_other_forms(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        raw = dict(raw)
        for theirs, ours in (("val_num_generations_per_prompt", "num_val_generations"),):
            if theirs in raw:
                value = raw.pop(theirs)
                if raw.setdefault(ours, value) != value:
                    raise ConfigError(
                        f"{ours} and {theirs} contradict each other",
                        field=ours,
                        got=f"{ours}: {raw[ours]}, {theirs}: {value}",
                        need="one of the two",
                    )
        if _is_true(raw.get("overlong_filtering")) and raw.setdefault("truncated", "mask") != "mask":
            raise ConfigError(
                "overlong_filtering and truncated contradict each other",
                field="truncated",
                got=f"{raw['truncated']}, overlong_filtering: true",
                need="truncated: mask, which is what overlong_filtering means",
                fix="set grpo.overlong_filtering=false",
            )
        return raw

    @model_validator(mode="after")
    def _groups_have_a_baseline(self) -> GRPOConfig:
        if self.num_generations_per_prompt < 2:
            raise ConfigError(
                "a group of one answer has nothing to be compared with",
                field="num_generations_per_prompt",
                got=self.num_generations_per_prompt,
                need="at least 2: the advantage of an answer is its reward less the mean of its group",
                fix="set grpo.num_generations_per_prompt=8",
            )
        if self.max_rollout_turns != 1:
            raise ConfigError(
                "rollouts of several turns are not supported",
                field="max_rollout_turns",
                got=self.max_rollout_turns,
                need="1: a prompt is answered once",
                fix="set grpo.max_rollout_turns=1",
            )
        return self

    @model_validator(mode="after")
    def _dynamic_sampling_is_on(self) -> GRPOConfig:
        if self.batch_multiplier != 1.0 and not self.use_dynamic_sampling:
            raise ConfigError(
                "batch_multiplier draws prompts that nothing selects from",
                field="batch_multiplier",
                got=f"{self.batch_multiplier}, use_dynamic_sampling: false",
                need="1, or use_dynamic_sampling: true",
                fix="set grpo.use_dynamic_sampling=true, or grpo.batch_multiplier=1",
            )
        return self

    @model_validator(mode="after")
    def _environments_have_weights(self) -> GRPOConfig:
        if self.environments is None:
            return self
        if not self.environments:
            raise ConfigError(
                "no environment rewards the answers",
                field="environments",
                got="an empty list",
                need="names of sections of env, or null",
            )
        for name, weight in self.environments.items():
            if weight == 0.0:
                raise ConfigError(
                    "an environment of weight 0 rewards nothing",
                    field=f"environments.{name}",
                    got=weight,
                    need="another number",
                    fix=f"remove it; to watch it without training on it set grpo.gold_environment={name}",
                )
        return self
