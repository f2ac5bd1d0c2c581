"""`PolicyLossConfig`: the loss of policy optimisation, in NeMo RL's names.

loss_fn:
  reference_policy_kl_penalty: 0.01
  ratio_clip_min: 0.2
  ratio_clip_max: 0.28        # clip-higher, Yu et al. 2025 (arXiv 2503.14476)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from treeward.config.base import Strict
from treeward.errors import ConfigError

__all__ = ["PolicyLossConfig"]


class PolicyLossConfig(Strict):
    """The clipped surrogate, and the penalty on leaving the reference policy."""

    switched_off_keys: ClassVar[Mapping[str, str]] = {
        "disable_ppo_ratio": "set loss_fn.force_on_policy_ratio=true for one update per batch without ratios",
        "use_cispo": "use the clipped surrogate: set loss_fn.use_cispo=false",
        "seq_logprob_error_in_loss": "set loss_fn.seq_logprob_error_in_loss=false: token_mult_prob_error is logged",
        "positive_example_nll_weight": "set loss_fn.positive_example_nll_weight=0",
        "truncated_importance_sampling_ratio_min": "set loss_fn.truncated_importance_sampling_type=tis, which has none",
    }
    other_forms: ClassVar[tuple[str, ...]] = ("use_kl_in_reward",)

    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of KL(policy || reference). 0: no penalty; the KL is measured all the same."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """How the KL is estimated from the sampled tokens (Schulman 2020); `k1` with `kl_in_reward` only, for its gradient
    as a loss is zero on average."""
    kl_in_reward: bool = False
    """The penalty is subtracted from the reward of an answer, before advantages, instead of being a term of the loss.
    NeMo RL's name is `use_kl_in_reward`."""
    kl_input_clamp_value: PositiveFloat | None = 20.0
    """Of the penalty in the loss: a token's log-ratio to the reference is clipped to this on either side before its KL
    is estimated. None: not, and not with `kl_in_reward`."""
    kl_output_clamp_value: PositiveFloat | None = 10.0
    """Of the penalty in the loss: a token's estimated KL is clipped to this on either side. None: not, and not with
    `kl_in_reward`."""
    ratio_clip_min: float = Field(default=0.2, ge=0.0, le=1.0)
    """The ratio of new to old probability is clipped from below at 1 - this."""
    ratio_clip_max: NonNegativeFloat = 0.2
    """The ratio is clipped from above at 1 + this."""
    ratio_clip_c: float | None = Field(default=None, gt=1.0)
    """Dual clip: the most that a negative advantage counts, as a multiple of it; usually 3 (Ye et al. 2019, arXiv
    1912.09729). None: no limit."""
    token_level_loss: bool = True
    """Every token of the batch counts the same. False: every answer does, whatever its length."""
    sequence_level_importance_ratios: bool = False
    """One ratio for a whole answer, the geometric mean of its tokens' (GSPO, Zheng et al. 2025, arXiv 2507.18071);
    needs `token_level_loss: false`."""
    use_importance_sampling_correction: bool = False
    """Weigh tokens by the trainer's probability over the generator's own, for a generator of other numerics."""
    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """The largest such weight. None: no limit."""
    truncated_importance_sampling_type: Literal["tis"] | None = None
    """Only checked: with `tis` and with None larger weights are cut to `truncated_importance_sampling_ratio`."""
    use_on_policy_kl_approximation: bool = False
    """Weigh a token's estimated KL by its new probability over that with which it was sampled."""
    force_on_policy_ratio: bool = False
    """Take the ratio as 1, with its gradient; needs one update per batch."""

    @model_validator(mode="before")
    @classmethod
    def _take_other_forms(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping) or "use_kl_in_reward" not in raw:
            return raw
        raw = dict(raw)
        theirs = raw.pop("use_kl_in_reward")
        if raw.setdefault("kl_in_reward", theirs) != theirs:
            raise ConfigError(
                "kl_in_reward and use_kl_in_reward contradict each other",
                field="kl_in_reward",
                got=f"kl_in_reward: {raw['kl_in_reward']}, use_kl_in_reward: {theirs}",
                need="one of the two",
            )
        return raw

    @model_validator(mode="after")
    def _kl_has_a_gradient(self) -> PolicyLossConfig:
        if self.reference_policy_kl_type == "k1" and not self.kl_in_reward and self.reference_policy_kl_penalty > 0:
            raise ConfigError(
                "k1 as a loss teaches nothing: its expected gradient is zero",
                field="reference_policy_kl_type",
                got="k1, kl_in_reward: false",
                need="k3 or k2 in the loss, or k1 in the reward",
                fix="set loss_fn.kl_in_reward=true, or loss_fn.reference_policy_kl_type=k3",
            )
        return self

    @model_validator(mode="after")
    def _ratios_fit(self) -> PolicyLossConfig:
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise ConfigError(
                "a ratio of whole answers needs a loss of whole answers",
                field="sequence_level_importance_ratios",
                got="true, token_level_loss: true",
                need="token_level_loss: false",
                fix="set loss_fn.token_level_loss=false",
            )
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1.0 + self.ratio_clip_max:
            raise ConfigError(
                "the dual clip is inside the clip",
                field="ratio_clip_c",
                got=f"{self.ratio_clip_c}, ratio_clip_max: {self.ratio_clip_max}",
                need="more than 1 + ratio_clip_max; usually 3",
                fix="set loss_fn.ratio_clip_c=3",
            )
        for key in ("truncated_importance_sampling_ratio", "truncated_importance_sampling_type"):
            if getattr(self, key) is not None and not self.use_importance_sampling_correction:
                raise ConfigError(
                    f"{key} limits a correction that is switched off",
                    field=key,
                    got=f"{getattr(self, key)}, use_importance_sampling_correction: false",
                    need="use_importance_sampling_correction: true, or null",
                    fix=f"set loss_fn.use_importance_sampling_correction=true, or loss_fn.{key}=null",
                )
        if self.truncated_importance_sampling_type and self.truncated_importance_sampling_ratio is None:
            raise ConfigError(
                "truncated_importance_sampling_type has no ratio to cut at",
                field="truncated_importance_sampling_ratio",
                got="null",
                need="a positive number, as 2.0",
            )
        return self
