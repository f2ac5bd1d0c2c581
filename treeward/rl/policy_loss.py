"""`policy_loss`: the clipped surrogate of policy optimisation with a KL penalty, as sums that are divided once.

    loss = policy_loss(logprobs_SL, old_SL, reference_SL, advantages_S, mask_SL, PolicyLossSettings())
    (loss.total / loss_denominator).backward()

Sums travel and denominators are global: a micro-batch's own mean would give the tokens of a short micro-batch more
weight than those of a long one.

Shapes: S sequences, L tokens of the longest completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from treeward.errors import ConfigError

__all__ = ["KLEstimator", "PolicyLoss", "PolicyLossSettings", "kl_estimate", "policy_loss", "token_weights"]

KLEstimator = Literal["k1", "k2", "k3"]
Reduction = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """Options of `policy_loss`; those of NeMo RL's `loss_fn` that have another name there are named in brackets.

    `ratio_clip_min`, `ratio_clip_max`: the ratio is clipped to [1 - min, 1 + max]. `dual_clip` (`ratio_clip_c`): c > 1,
    the most that a negative advantage counts; None for no limit. `kl_coefficient` (`reference_policy_kl_penalty`),
    `kl_estimator` (`reference_policy_kl_type`): of the penalty in the loss. `kl_input_clamp_value`,
    `kl_output_clamp_value`: bounds of the log-ratio and of the estimate in it, None for none. `reduction`
    (`token_level_loss`): "token", every token of the batch counts the same; "sequence", every completion does.
    `use_importance_sampling_correction`: weight the policy term by exp(old - generator's log-probability), at most
    `truncated_importance_sampling_ratio`. `sequence_level_importance_ratios`: one ratio, and one such weight, for each
    completion. `use_on_policy_kl_approximation`: weight the penalty by exp(new - generator's). `force_on_policy_ratio`:
    the ratio is 1 whatever the old policy was, with the gradient of the log-probability.

    Raises `ConfigError` for values out of range.
    """

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    dual_clip: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_input_clamp_value: float | None = None
    kl_output_clamp_value: float | None = None
    reduction: Reduction = "token"
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_ratio: float | None = None
    sequence_level_importance_ratios: bool = False
    use_on_policy_kl_approximation: bool = False
    force_on_policy_ratio: bool = False

    def __post_init__(self) -> None:
        for name, need, value, right in [
            ("ratio_clip_c", "more than 1", self.dual_clip, self.dual_clip is None or self.dual_clip > 1),
            *(
                (name, "more than 0, or null", value, value is None or value > 0)
                for name, value in [
                    ("kl_input_clamp_value", self.kl_input_clamp_value),
                    ("kl_output_clamp_value", self.kl_output_clamp_value),
                    ("truncated_importance_sampling_ratio", self.truncated_importance_sampling_ratio),
                ]
            ),
        ]:
            if not right:
                raise ConfigError(f"{name} is out of range", where=f"loss_fn.{name}", got=value, need=need)
        if self.truncated_importance_sampling_ratio is not None and not self.use_importance_sampling_correction:
            raise ConfigError(
                "there are no weights to truncate",
                where="loss_fn.truncated_importance_sampling_ratio",
                got=self.truncated_importance_sampling_ratio,
                fix="loss_fn.use_importance_sampling_correction=true, or truncated_importance_sampling_ratio=null",
            )

    @property
    def needs_generated(self) -> bool:
        """Whether the generator's log-probabilities are in the loss."""
        return self.use_importance_sampling_correction or (
            self.use_on_policy_kl_approximation and self.kl_coefficient != 0
        )


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`total`: the weighted sum that is differentiated; divide it by the denominator of the whole batch.

    The others are plain sums over tokens, without gradients, and their number: policy term, KL to the reference (k3)
    and to the old policy (k3), tokens whose ratio was clipped, weights against the generator's mismatch (1 each where
    they are not used) and the tokens of which one was not finite, and so counts as 0.
    """

    total: Tensor
    policy_sum: float
    kl_sum: float
    old_kl_sum: float
    clipped: float
    num_tokens: int
    correction_sum: float = 0.0
    not_finite: int = 0


def kl_estimate(
    logprobs: Tensor,
    reference: Tensor,
    estimator: KLEstimator,
    *,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """An estimate of KL(policy || reference) from tokens that the policy sampled, per token, with gradients.

    With x = log pi - log ref: k1 = x, unbiased, may be negative; k2 = x^2 / 2, biased, whose gradient is that of the
    true KL; k3 = exp(-x) - 1 + x, unbiased, never negative. Schulman 2020, "Approximating KL divergence". Of k1 the
    expected gradient as a loss is zero: it belongs into the reward.

    `input_clamp`, `output_clamp`: c > 0; x, and then the estimate, are limited to [-c, c], beyond which there is no
    gradient (NeMo RL, `calculate_kl`).
    """
    x = logprobs - reference
    if input_clamp is not None:
        x = x.clamp(-input_clamp, input_clamp)
    if estimator == "k1":
        estimate = x
    elif estimator == "k2":
        estimate = x.square() / 2
    else:
        estimate = torch.expm1(-x) + x
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)


def token_weights(mask_SL: Tensor, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """What each token counts, float32 (S, L), and what these sum to: the denominator, to be added up over the batch.

    "token": 1 each. "sequence": 1 / (tokens of the completion), so that the denominator is the number of completions
    with any.
    """
    mask = mask_SL.float()
    if reduction == "sequence":
        mask = mask / mask.sum(dim=1, keepdim=True).clamp_min(1)
        return mask, (mask_SL.any(dim=1)).sum().float()
    return mask, mask.sum()


def policy_loss(
    logprobs_SL: Tensor,
    old_SL: Tensor,
    reference_SL: Tensor | None,
    advantages_S: Tensor,
    mask_SL: Tensor,
    settings: PolicyLossSettings,
    *,
    generated_SL: Tensor | None = None,
) -> PolicyLoss:
    """sum_t w_t [-c_t min(rho_t A, clip(rho_t) A) + beta k_t KL_t], with rho_t = pi / pi_old of each token.

    w_t is `token_weights`; c_t and k_t are 1 unless the generator's log-probabilities gen_t are asked for:

    - With `dual_clip` c and A < 0 the policy term is at most -c A (Ye et al. 2020, arXiv 1912.09729). Asymmetric
      bounds: Yu et al. 2025 (arXiv 2503.14476).
    - `sequence_level_importance_ratios`: rho_t = exp(mean over the completion's tokens of log pi - log pi_old) for each
      of its tokens (GSPO, Zheng et al. 2025, arXiv 2507.18071, eq. 7). With reduction "sequence" that is GSPO's
      objective; with "token" each completion counts as often as it has tokens.
    - `force_on_policy_ratio`: rho_t = exp(log pi - its own value): 1, with the gradient of log pi; nothing is clipped.
    - `use_importance_sampling_correction`: c_t = exp(old_t - gen_t), with sequence-level ratios exp(sum over the
      completion of old_t - gen_t), and min(c_t, limit) with `truncated_importance_sampling_ratio` (Yao et al. 2025,
      "Your efficient RL framework secretly brings you off-policy RL training"). It does not weight the penalty.
    - `use_on_policy_kl_approximation`: k_t = exp(log pi - gen_t), without a gradient of its own.

    As in NeMo RL's `ClippedPGLossFn`, a weight that is not finite counts as 0. `old_SL`, `reference_SL`,
    `generated_SL`: float (S, L) without gradients; `reference_SL` None where there is no penalty, `generated_SL` where
    `settings.needs_generated` is not set. Masked tokens may hold anything.
    """
    mask = mask_SL.bool()
    # Masked before the arithmetic: an infinite value there would be NaN in the gradient.
    logprobs = torch.where(mask, logprobs_SL, 0.0)
    old = torch.where(mask, old_SL, 0.0)
    generated = None
    if settings.needs_generated:
        assert generated_SL is not None
        generated = torch.where(mask, generated_SL, 0.0).to(logprobs)
    weights, _ = token_weights(mask, settings.reduction)
    gain, clipped = _gain(logprobs, old, advantages_S[:, None].to(logprobs), mask, settings)
    correction, not_finite = _correction(old, generated, mask, settings)
    terms = -gain * correction
    kl_sum = 0.0
    if reference_SL is not None:
        reference = torch.where(mask, reference_SL, 0.0)
        if settings.kl_coefficient:
            kl = kl_estimate(
                logprobs,
                reference,
                settings.kl_estimator,
                input_clamp=settings.kl_input_clamp_value,
                output_clamp=settings.kl_output_clamp_value,
            )
            if settings.use_on_policy_kl_approximation:
                assert generated is not None
                kl_weights, more = _finite(torch.exp(logprobs.detach() - generated), mask)
                kl, not_finite = kl * kl_weights, not_finite | more
            terms = terms + settings.kl_coefficient * kl
        with torch.no_grad():
            kl_sum = float((kl_estimate(logprobs, reference, "k3") * mask).sum())
    with torch.no_grad():
        old_kl = (kl_estimate(old, logprobs, "k3") * mask).sum()
    return PolicyLoss(
        total=(terms * weights).sum(),
        policy_sum=float((-(gain * correction).detach() * mask).sum()),
        kl_sum=kl_sum,
        old_kl_sum=float(old_kl),
        clipped=float((clipped & mask).sum()),
        num_tokens=int(mask.sum()),
        correction_sum=float((correction * mask).sum()),
        not_finite=int(not_finite.sum()),
    )


def _gain(
    logprobs: Tensor, old: Tensor, advantages_S1: Tensor, mask: Tensor, settings: PolicyLossSettings
) -> tuple[Tensor, Tensor]:
    """The clipped gain of each token (S, L), and whether the clip took something from it."""
    difference = logprobs - (logprobs.detach() if settings.force_on_policy_ratio else old)
    if settings.sequence_level_importance_ratios and not settings.force_on_policy_ratio:
        mean_S1 = difference.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp_min(1)
        difference = mean_S1.expand_as(difference)
    ratio = torch.exp(difference)
    free = ratio * advantages_S1
    bounded = ratio.clamp(1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max) * advantages_S1
    gain = torch.minimum(free, bounded)
    clipped = free > gain
    if settings.dual_clip is not None:
        gain = torch.where(advantages_S1 < 0, torch.maximum(gain, settings.dual_clip * advantages_S1), gain)
    return gain, clipped


@torch.no_grad()
def _correction(
    old: Tensor, generated: Tensor | None, mask: Tensor, settings: PolicyLossSettings
) -> tuple[Tensor, Tensor]:
    """The weight of each token against sampling by the generator's numerics (S, L), and where it was not finite."""
    if not settings.use_importance_sampling_correction:
        return torch.ones_like(old), torch.zeros_like(mask)
    assert generated is not None
    difference = old - generated
    if settings.sequence_level_importance_ratios:
        difference = difference.sum(dim=1, keepdim=True).expand_as(difference)
    weights, not_finite = _finite(torch.exp(difference), mask)
    limit = settings.truncated_importance_sampling_ratio
    return weights if limit is None else weights.clamp_max(limit), not_finite


def _finite(weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    right = weights.isfinite()
    return torch.where(right, weights, 0.0), ~right & mask
