"""`policy_loss`: the clipped surrogate of policy optimisation with a KL penalty, as sums that are
divided once.

    config = PolicyLossConfig()
    total, sums = policy_loss(log_probs_SL, old_SL, reference_SL, advantages_S, mask_SL, config)
    (total / denominator).backward()

Sums travel and denominators are global: a micro-batch's own mean would give the tokens of a short
micro-batch more weight than those of a long one. So a batch can be cut into micro-batches anywhere
between completions.

Shapes: S completions, L tokens of the longest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from treeward import processes
from treeward.config.grpo import KLPenalty, PolicyLossConfig

KLEstimator = Literal["k1", "k2", "k3"]
ESTIMATORS: Mapping[KLPenalty, KLEstimator] = {
    "k1": "k1",
    "k2": "k2",
    "k2_unweighted": "k2",
    "k3": "k3",
    "k3_unweighted": "k3",
}
"""A penalty -> its estimator."""
Sum = float | Tensor


@dataclass(slots=True)
class UpdateMetrics:
    """Sums over tokens, of micro-batches and of updates, without gradients; `means` divides them.

    They stay on the device until `read`. `kl_sum`: KL to the reference (k3); `old_kl_sum`: to the
    old policy (k3). `clipped`: tokens with a clipped ratio. `correction_sum`: weights against the
    generator's mismatch, 1 each if unused. `tokens`: counted once per update. `entropy_tokens`:
    tokens with a measured entropy. `mismatch_sum`: exp
    |trainer's less generator's log-probability| of `mismatch_tokens`, before the first update.
    """

    loss_sum: Sum = 0.0
    policy_sum: Sum = 0.0
    kl_sum: Sum = 0.0
    old_kl_sum: Sum = 0.0
    clipped: Sum = 0.0
    entropy_sum: Sum = 0.0
    entropy_tokens: Sum = 0
    correction_sum: Sum = 0.0
    tokens: Sum = 0
    updates: int = 0
    grad_norm_sum: float = 0.0
    mismatch_sum: Sum = 0.0
    mismatch_tokens: int = 0
    computed_tokens: int = 0
    row_tokens: int = 0

    def __add__(self, other: UpdateMetrics) -> UpdateMetrics:
        totals = {}
        for field in fields(self):
            totals[field.name] = getattr(self, field.name) + getattr(other, field.name)
        return UpdateMetrics(**totals)

    def read(self) -> UpdateMetrics:
        """The sums as numbers; waits for the device once."""
        tensors: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                tensors[field.name] = value.double()
        if not tensors:
            return self
        numbers = torch.stack(list(tensors.values())).tolist()
        return replace(self, **dict(zip(tensors, numbers, strict=True)))

    def over(self, group: ProcessGroup | None) -> UpdateMetrics:
        """The sums over the processes of `group` (None: all), as numbers."""
        if processes.size() == 1:
            return self.read()
        local = asdict(self.read())
        local_N = torch.tensor(list(local.values()), dtype=torch.float64)
        totals = {}
        for name, total in zip(local, processes.summed(local_N, group).tolist(), strict=True):
            totals[name] = type(local[name])(total)  # counts stay integers
        return UpdateMetrics(**totals)

    def means(self) -> dict[str, float]:
        """The means by their logged names, without missing values."""
        sums = self.read()
        updates = sums.updates if sums.tokens else 0
        quotients = {
            "policy_loss": (sums.policy_sum, sums.tokens),
            "kl": (sums.kl_sum, sums.tokens),
            "old_kl": (sums.old_kl_sum, sums.tokens),
            "clip_fraction": (sums.clipped, sums.tokens),
            "entropy": (sums.entropy_sum, sums.entropy_tokens),
            "sampling_importance_ratio": (sums.correction_sum, sums.tokens),
            "loss": (sums.loss_sum, updates),
            "grad_norm": (sums.grad_norm_sum, updates),
            "token_mult_prob_error": (sums.mismatch_sum, sums.mismatch_tokens),
        }
        return {name: float(total / count) for name, (total, count) in quotients.items() if count}


def kl_estimate(log_probs: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """An estimate of KL(policy || reference) from tokens that the policy sampled, per token, with
    gradients.

    With x = log pi - log ref: k1 = x, unbiased, may be negative; k2 = x^2 / 2, biased; k3 = exp(-x)
    - 1 + x, unbiased, never negative. Schulman 2020, "Approximating KL divergence".
    """
    return _estimate(log_probs - reference, estimator)


def _estimate(x: Tensor, estimator: KLEstimator) -> Tensor:
    match estimator:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            return torch.expm1(-x) + x


def kl_penalty(
    log_probs: Tensor,
    reference: Tensor,
    generated: Tensor | None,
    config: PolicyLossConfig,
) -> Tensor:
    """The penalty on KL(policy || reference) of each token, without its coefficient, with
    gradients.

    An estimate that is averaged over sampled tokens has two gradients: that of the estimate, and
    that of the probability with which the token was sampled. The second one is left out by a plain
    estimate, so that k1 has an expected gradient of 0, k2 that of KL(policy || reference) and k3
    that of KL(reference || policy) (Tang and Munos 2025, arXiv 2506.09477): `k2_unweighted` and
    `k3_unweighted`. Here k1, k2 and k3 are multiplied by a weight that brings the second one back,
    as in NeMo RL since June 2026:

    - exp(log pi - stopped log pi), which is 1 and has the gradient of log pi. The gradient of k3 is
      then x grad log pi.
    - with `use_on_policy_kl_approximation` exp(log pi - log gen), whatever policy has sampled the
      token.

    x is limited to `kl_input_clamp_value`, beyond which nothing has a gradient, and the weighted
    estimate to `kl_output_clamp_value`. A weight that is not finite counts as 0.
    """
    x = log_probs - reference
    limited = x
    if config.kl_input_clamp_value is not None:
        limited = x.clamp(-config.kl_input_clamp_value, config.kl_input_clamp_value)
    estimator = ESTIMATORS[config.reference_policy_kl_type]
    estimate = _estimate(limited, estimator)
    is_weighted = config.reference_policy_kl_type in ("k1", "k2", "k3")
    if is_weighted:
        if config.use_on_policy_kl_approximation:
            assert generated is not None
            weight = _weights(log_probs - generated)
        else:
            weight = torch.exp(log_probs - log_probs.detach())
        # Where x is cut the weight has no gradient either: nothing pulls a token further.
        is_free = x == limited
        estimate = torch.where(is_free, weight, weight.detach()) * estimate
    if config.kl_output_clamp_value is not None:
        estimate = estimate.clamp(-config.kl_output_clamp_value, config.kl_output_clamp_value)
    return estimate


def policy_loss(
    log_probs_SL: Tensor,
    old_SL: Tensor,
    reference_SL: Tensor | None,
    advantages_S: Tensor,
    mask_SL: Tensor,
    config: PolicyLossConfig,
    *,
    generated_SL: Tensor | None = None,
) -> tuple[Tensor, UpdateMetrics]:
    """sum_t w_t [-c_t min(rho_t A, clip(rho_t) A) + beta KL_t], with rho_t = pi / pi_old of each
    token.

    Returns this sum, to be divided by the denominator of the whole batch, and the sums to report.
    With `token_level_loss` w_t is 1, and the denominator is the number of tokens; otherwise 1 /
    (tokens of the completion), and the number of completions with any. c_t is 1 unless the
    generator's log-probabilities gen_t are asked for:

    - clip is to [1 - `ratio_clip_min`, 1 + `ratio_clip_max`] (asymmetric: Yu et al. 2025, arXiv
      2503.14476). With `ratio_clip_c` c and A < 0 the policy term is at most -c A (Ye et al. 2020,
      arXiv 1912.09729).
    - `sequence_level_importance_ratios`: rho_t = exp(mean over the completion's tokens of log pi -
      log pi_old) for each of its tokens (GSPO, Zheng et al. 2025, arXiv 2507.18071, eq. 7).
    - `force_on_policy_ratio`: rho_t = exp(log pi - stopped log pi), which is 1, without any clip.
    - `use_importance_sampling_correction`: c_t = exp(old_t - gen_t), with sequence-level ratios
      exp(sum over the completion of old_t - gen_t). It does not weight the penalty. With
      `truncated_importance_sampling_type`
      - tis (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
        training"): c_t is cut to [`truncated_importance_sampling_ratio_min`,
        `truncated_importance_sampling_ratio`];
      - icepop: c_t is 0 outside these limits;
      - seq-mask-tis: c_t is 0 for every token of a completion with exp(mean of old_t - gen_t)
        outside these limits.
    - KL_t: see `kl_penalty`.

    As in NeMo RL's `ClippedPGLossFn`, a weight that is not finite counts as 0. `old_SL`,
    `reference_SL`, `generated_SL`: float (S, L) without gradients; `reference_SL` None where there
    is no penalty, `generated_SL` where it is not needed. Masked tokens may hold anything.
    """
    mask = mask_SL.bool()
    # Masked before the arithmetic: an infinite value there would be NaN in the gradient.
    log_probs = torch.where(mask, log_probs_SL, 0.0)
    old = torch.where(mask, old_SL, 0.0)
    generated = None
    if generated_SL is not None:
        generated = torch.where(mask, generated_SL, 0.0).to(log_probs)
    # w_t: the denominator of the whole batch is the caller's, and follows the same setting.
    weights = mask.float()
    if not config.token_level_loss:
        weights = weights / weights.sum(dim=1, keepdim=True).clamp_min(1)
    gain, clipped = _gain(log_probs, old, advantages_S[:, None].to(log_probs), mask, config)
    correction = _correction(old, generated, mask, config)
    terms = -gain * correction
    # Sums in float64: float32 would lose single tokens beside those of a large batch.
    sums = UpdateMetrics(
        policy_sum=(terms.detach() * mask).sum(dtype=torch.float64),
        clipped=(clipped & mask).sum(dtype=torch.float64),
        correction_sum=(correction * mask).sum(dtype=torch.float64),
        tokens=mask.sum(dtype=torch.float64),
    )
    if reference_SL is not None:
        reference = torch.where(mask, reference_SL, 0.0)
        beta = config.reference_policy_kl_penalty
        if beta and not config.kl_in_reward:
            terms = terms + beta * kl_penalty(log_probs, reference, generated, config)
        # Reported as k3 whatever is penalised, so that runs with other penalties can be compared.
        kl_SL = kl_estimate(log_probs.detach(), reference, "k3") * mask
        sums.kl_sum = kl_SL.sum(dtype=torch.float64)
    # The old policy has sampled the tokens, so this is KL(old || policy).
    old_kl_SL = kl_estimate(old, log_probs.detach(), "k3") * mask
    sums.old_kl_sum = old_kl_SL.sum(dtype=torch.float64)
    return (terms * weights).sum(), sums


def _gain(
    log_probs: Tensor, old: Tensor, advantages_S1: Tensor, mask: Tensor, config: PolicyLossConfig
) -> tuple[Tensor, Tensor]:
    """The clipped gain of each token (S, L), and whether the clip lowered it."""
    if config.force_on_policy_ratio:
        ratio = torch.exp(log_probs - log_probs.detach())
        return ratio * advantages_S1, torch.zeros_like(mask)
    difference = log_probs - old
    if config.sequence_level_importance_ratios:
        mean_S1 = difference.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp_min(1)
        difference = mean_S1.expand_as(difference)
    # PPO's pessimistic bound, min(rho A, clip(rho) A): Schulman et al. 2017, arXiv 1707.06347,
    # eq. 7.
    ratio = torch.exp(difference)
    free = ratio * advantages_S1
    bounded = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max) * advantages_S1
    gain = torch.minimum(free, bounded)
    # Before the dual clip, which raises the gain again.
    clipped = free > gain
    # With A < 0 the minimum has no lower bound: a token that has become likely has an unlimited
    # loss. The dual clip gives it one.
    if config.ratio_clip_c is not None:
        lowest = config.ratio_clip_c * advantages_S1
        gain = torch.where(advantages_S1 < 0, torch.maximum(gain, lowest), gain)
    return gain, clipped


@torch.no_grad()
def _correction(
    old: Tensor,
    generated: Tensor | None,
    mask: Tensor,
    config: PolicyLossConfig,
) -> Tensor:
    """The weight of each token against sampling by the generator's numerics (S, L)."""
    if not config.use_importance_sampling_correction:
        return torch.ones_like(old)
    assert generated is not None
    difference = old - generated
    if config.sequence_level_importance_ratios:
        difference = difference.sum(dim=1, keepdim=True).expand_as(difference)
    weights = _weights(difference)
    high = config.truncated_importance_sampling_ratio
    if high is None:  # neither cut nor masked
        return weights
    low = config.truncated_importance_sampling_ratio_min or 0.0
    match config.truncated_importance_sampling_type:
        case "icepop":
            is_kept = (low <= weights) & (weights <= high)
        case "seq-mask-tis":
            # Of tokens: the configuration refuses sequence-level ratios beside it.
            length_S1 = mask.sum(dim=1, keepdim=True).clamp_min(1)
            mean_S1 = difference.sum(dim=1, keepdim=True) / length_S1
            ratio_S1 = _weights(mean_S1)
            is_kept = (low <= ratio_S1) & (ratio_S1 <= high)
        case _:
            return weights.clamp(low, high)
    return torch.where(is_kept, weights, 0.0)


def _weights(differences: Tensor) -> Tensor:
    """exp of differences of log-probabilities, with gradients; 0 where it is not finite."""
    is_finite = torch.exp(differences.detach()).isfinite()
    # Replaced before the exponential: 0 times its infinite slope would be NaN in the gradient.
    weights = torch.exp(torch.where(is_finite, differences, 0.0))
    return torch.where(is_finite, weights, 0.0)
