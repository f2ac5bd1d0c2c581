"""The policy loss against its formula written out for each token, and its gradients against numeric ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from treeward.config.grpo import PolicyLossConfig
from treeward.rl.policy_loss import policy_loss

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
ADVANTAGES = torch.tensor([1.5, -2.0, 3.0, -0.25])


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """New, old, reference's and generator's log-probabilities, float64; NaN where they are masked."""
    torch.manual_seed(seed)
    old = -torch.rand(4, 4, dtype=torch.float64) * 3
    tensors = [old, *(old + 0.5 * torch.randn(4, 4, dtype=torch.float64) for _ in range(3))]
    for tensor in tensors:
        tensor[~MASK] = torch.nan
    return tensors[1], old, tensors[2], tensors[3]


def clamped(value: float, limit: float | None) -> float:
    return value if limit is None else min(max(value, -limit), limit)


def written_out(new: Any, old: Any, reference: Any, said: Any, settings: PolicyLossConfig) -> dict[str, float]:
    """The loss and the sums to report, one token after the other, in Python's own numbers."""
    sums = dict.fromkeys(("loss", "policy_sum", "kl_sum", "old_kl_sum", "clipped", "correction_sum"), 0.0)
    for s in range(4):
        tokens = [t for t in range(4) if MASK[s, t]]
        a = float(ADVANTAGES[s])
        by_completion = settings.sequence_level_importance_ratios
        for t in tokens:
            weight = 1.0 if settings.token_level_loss else 1.0 / len(tokens)
            ratio = math.exp(float(new[s, t] - old[s, t]))
            correction = math.exp(float(old[s, t] - said[s, t]))
            if by_completion:
                ratio = math.exp(sum(float(new[s, u] - old[s, u]) for u in tokens) / len(tokens))
                correction = math.exp(sum(float(old[s, u] - said[s, u]) for u in tokens))
            gain = min(ratio * a, min(max(ratio, 1 - settings.ratio_clip_min), 1 + settings.ratio_clip_max) * a)
            sums["clipped"] += ratio * a != gain
            if settings.ratio_clip_c is not None and a < 0:
                gain = max(gain, settings.ratio_clip_c * a)
            if settings.use_importance_sampling_correction:
                correction = min(correction, settings.truncated_importance_sampling_ratio or math.inf)
            else:
                correction = 1.0
            gain *= correction
            sums["correction_sum"] += correction
            sums["policy_sum"] -= gain
            for name, y in (("kl_sum", new[s, t] - reference[s, t]), ("old_kl_sum", old[s, t] - new[s, t])):
                sums[name] += math.exp(-float(y)) - 1 + float(y)  # k3, whatever the penalty is
            x = clamped(float(new[s, t] - reference[s, t]), settings.kl_input_clamp_value)
            kl = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[settings.reference_policy_kl_type]
            kl = clamped(kl, settings.kl_output_clamp_value)
            beta = 0.0 if settings.kl_in_reward else settings.reference_policy_kl_penalty
            sums["loss"] += weight * (-gain + beta * kl)
    return sums


NO_PENALTY: dict[str, Any] = {"reference_policy_kl_penalty": 0.0}
PENALTY: dict[str, Any] = {
    "reference_policy_kl_penalty": 0.3, "kl_input_clamp_value": None, "kl_output_clamp_value": None
}  # fmt: skip
CORRECTED: dict[str, Any] = {"use_importance_sampling_correction": True}
BY_COMPLETION: dict[str, Any] = {"sequence_level_importance_ratios": True, "token_level_loss": False}
OPTIONS = [
    PolicyLossConfig(**options)
    for options in (
        NO_PENALTY,
        {**NO_PENALTY, "ratio_clip_min": 0.1, "ratio_clip_max": 0.4, "token_level_loss": False},
        {**PENALTY, "ratio_clip_c": 1.25},
        {**PENALTY, "reference_policy_kl_type": "k2", "token_level_loss": False},
        {**PENALTY, "kl_in_reward": True, "reference_policy_kl_type": "k1"},
        {**PENALTY, "kl_input_clamp_value": 0.3},
        {**PENALTY, "kl_output_clamp_value": 0.1},
        {**PENALTY, "kl_input_clamp_value": 0.6, "kl_output_clamp_value": 0.05, "token_level_loss": False},
        {**PENALTY, **CORRECTED},
        {**NO_PENALTY, **CORRECTED, "truncated_importance_sampling_ratio": 1.2, "token_level_loss": False},
        {**PENALTY, **BY_COMPLETION},
        {**NO_PENALTY, **BY_COMPLETION, "ratio_clip_min": 0.05, "ratio_clip_max": 0.01, "ratio_clip_c": 1.02},
        {**NO_PENALTY, **BY_COMPLETION, **CORRECTED, "truncated_importance_sampling_ratio": 1.5},
    )
]


@pytest.mark.parametrize("settings", OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_it_is_the_formula(settings: PolicyLossConfig, dtype: torch.dtype, tolerance: float) -> None:
    for seed in range(5):
        given = batch(seed)
        want = written_out(*given, settings)
        new, old, reference, said = (tensor.to(dtype) for tensor in given)
        total, sums = policy_loss(new, old, reference, ADVANTAGES, MASK, settings, generated_SL=said)
        # the weights are float32
        at_most = max(tolerance, 1e-6 if not settings.token_level_loss else 0)
        assert float(total) == pytest.approx(want.pop("loss"), abs=at_most)
        assert {name: float(getattr(sums, name)) for name in want} == pytest.approx(want, rel=1e-5)
        assert sums.tokens == 8


@pytest.mark.parametrize("settings", OPTIONS)
def test_gradients_are_the_slopes_of_the_formula(settings: PolicyLossConfig) -> None:
    new, old, reference, said = batch(1)
    new.requires_grad_(True)
    policy_loss(new, old, reference, ADVANTAGES, MASK, settings, generated_SL=said)[0].backward()
    assert new.grad is not None and not new.grad[~MASK].any() and new.grad.isfinite().all()
    for s, t in MASK.nonzero().tolist():
        ends = []
        for sign in (1, -1):
            moved = new.detach().clone()
            moved[s, t] += sign * 1e-6
            ends.append(written_out(moved, old, reference, said, settings)["loss"])
        assert float(new.grad[s, t]) == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-5)


def test_weights_that_are_not_finite_count_as_zero() -> None:
    new, old, reference, said = batch(1)
    said[0, 1], said[3, 2] = -torch.inf, torch.nan
    settings = PolicyLossConfig(**NO_PENALTY, **CORRECTED, truncated_importance_sampling_ratio=2.0)
    total, sums = policy_loss(new, old, reference, ADVANTAGES, MASK, settings, generated_SL=said)
    without = MASK.clone()
    without[0, 1] = without[3, 2] = False
    rest_total, rest = policy_loss(new, old, reference, ADVANTAGES, without, settings, generated_SL=said)
    assert float(total) == pytest.approx(float(rest_total))
    assert sums.correction_sum == pytest.approx(rest.correction_sum)
    weights = torch.exp(old - said)[without].clamp_max(2.0)
    assert rest.correction_sum == pytest.approx(float(weights.sum()))
