"""`policy_loss`: the clipped surrogate of policy optimisation with a KL penalty, as sums that are divided once.

    loss = policy_loss(logprobs_SL, old_SL, reference_SL, advantages_S, mask_SL, PolicyLossSettings())
    (loss.total / loss_denominator).backward()
    metrics += loss.metrics

Sums travel and denominators are global: a micro-batch's own mean would give the tokens of a short micro-batch more
weight than those of a long one.

Shapes: S sequences, L tokens of the longest answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["KLEstimator", "PolicyLoss", "PolicyLossSettings", "kl_estimate", "policy_loss", "token_weights"]

KLEstimator = Literal["k1", "k2", "k3"]
Reduction = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class PolicyLossSettings:
    """`ratio_clip_min`, `ratio_clip_max`: the ratio is clipped to [1 - min, 1 + max]. `dual_clip`: c > 1, the most that
    a negative advantage counts; None for no limit. `kl_coefficient`, `kl_estimator`: of the penalty in the loss.
    `reduction`: "token", every token of the batch counts the same; "sequence", every answer does.
    """

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    dual_clip: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    reduction: Reduction = "token"


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`total`: the weighted sum that is differentiated; divide it by the denominator of the whole batch.

    The others are plain sums over tokens, without gradients, and their number: policy term, KL to the reference (k3)
    and to the old policy (k3), tokens whose ratio was clipped.
    """

    total: Tensor
    policy_sum: float
    kl_sum: float
    old_kl_sum: float
    clipped: float
    num_tokens: int


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """An estimate of KL(policy || reference) from tokens that the policy sampled, per token, with gradients.

    With x = log pi - log ref: k1 = x, unbiased, may be negative; k2 = x^2 / 2, biased, whose gradient is that of the
    true KL; k3 = exp(-x) - 1 + x, unbiased, never negative. Schulman 2020, "Approximating KL divergence". Of k1 the
    expected gradient as a loss is zero: it belongs into the reward.
    """
    x = logprobs - reference
    if estimator == "k1":
        return x
    if estimator == "k2":
        return x.square() / 2
    return torch.expm1(-x) + x


def token_weights(mask_SL: Tensor, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """What each token counts, float32 (S, L), and what these sum to: the denominator, to be added up over the batch.

    "token": 1 each. "sequence": 1 / (tokens of the answer), so that the denominator is the number of answers with any.
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
) -> PolicyLoss:
    """sum_t w_t [-min(rho A, clip(rho) A) + beta KL_t], with rho = pi / pi_old of each token.

    With `dual_clip` c and A < 0 the first term is at most -c A (Ye et al. 2020, arXiv 1912.09729). Asymmetric bounds:
    Yu et al. 2025 (arXiv 2503.14476). `old_SL`, `reference_SL`: without gradients; `reference_SL` None where there is
    no penalty. Masked tokens may hold anything.
    """
    mask = mask_SL.bool()
    # Masked before the arithmetic: an infinite value there would be NaN in the gradient.
    logprobs = torch.where(mask, logprobs_SL, 0.0)
    old = torch.where(mask, old_SL, 0.0)
    advantages_S1 = advantages_S[:, None].to(logprobs)
    difference = logprobs - old
    ratio = torch.exp(difference)
    clipped = ratio.clamp(1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max)
    gain = torch.minimum(ratio * advantages_S1, clipped * advantages_S1)
    if settings.dual_clip is not None:
        gain = torch.where(advantages_S1 < 0, torch.maximum(gain, settings.dual_clip * advantages_S1), gain)
    weights, _ = token_weights(mask, settings.reduction)
    terms = -gain
    kl_sum = 0.0
    if reference_SL is not None:
        reference = torch.where(mask, reference_SL, 0.0)
        if settings.kl_coefficient:
            terms = terms + settings.kl_coefficient * kl_estimate(logprobs, reference, settings.kl_estimator)
        with torch.no_grad():
            kl_sum = float((kl_estimate(logprobs, reference, "k3") * mask).sum())
    with torch.no_grad():
        outside = (ratio * advantages_S1 > clipped * advantages_S1) & mask
        old_kl = (kl_estimate(old, logprobs, "k3") * mask).sum()
    return PolicyLoss(
        total=(terms * weights).sum(),
        policy_sum=float((-gain.detach() * mask).sum()),
        kl_sum=kl_sum,
        old_kl_sum=float(old_kl),
        clipped=float(outside.sum()),
        num_tokens=int(mask.sum()),
    )
