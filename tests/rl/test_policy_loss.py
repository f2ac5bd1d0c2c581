"""The policy loss against its formula written out for each token, and its gradients against numeric ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from treeward.rl.policy_loss import PolicyLossSettings, kl_estimate, policy_loss, token_weights

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
ADVANTAGES = torch.tensor([1.5, -2.0, 3.0, -0.25])


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    old = -torch.rand(4, 4) * 3
    new, reference = old + 0.5 * torch.randn(4, 4), old + 0.5 * torch.randn(4, 4)
    for tensor in (old, new, reference):
        tensor[~MASK] = torch.nan
    return new, old, reference


def written_out(new: Any, old: Any, reference: Any, settings: PolicyLossSettings) -> tuple[float, float]:
    total = weights = 0.0
    for s in range(4):
        tokens = [t for t in range(4) if MASK[s, t]]
        for t in tokens:
            weight = 1.0 if settings.reduction == "token" else 1.0 / len(tokens)
            a, ratio = float(ADVANTAGES[s]), math.exp(float(new[s, t] - old[s, t]))
            gain = min(ratio * a, min(max(ratio, 1 - settings.ratio_clip_min), 1 + settings.ratio_clip_max) * a)
            if settings.dual_clip is not None and a < 0:
                gain = max(gain, settings.dual_clip * a)
            x = float(new[s, t] - reference[s, t])
            kl = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[settings.kl_estimator]
            total += weight * (-gain + settings.kl_coefficient * kl)
            weights += weight
    return total, weights


@pytest.mark.parametrize(
    "settings",
    [
        PolicyLossSettings(),
        PolicyLossSettings(ratio_clip_min=0.1, ratio_clip_max=0.4, reduction="sequence"),
        PolicyLossSettings(dual_clip=1.1, kl_coefficient=0.3, kl_estimator="k1"),
        PolicyLossSettings(kl_coefficient=0.3, kl_estimator="k2", reduction="sequence"),
        PolicyLossSettings(kl_coefficient=0.3, kl_estimator="k3"),
    ],
)
def test_it_is_the_formula(settings: PolicyLossSettings) -> None:
    for seed in range(5):
        new, old, reference = batch(seed)
        want, denominator = written_out(new, old, reference, settings)
        loss = policy_loss(new, old, reference, ADVANTAGES, MASK, settings)
        assert float(loss.total) == pytest.approx(want, abs=1e-5)
        assert float(token_weights(MASK, settings.reduction)[1]) == pytest.approx(denominator)
        assert loss.num_tokens == 8


def test_gradients_are_finite_and_right() -> None:
    settings = PolicyLossSettings(kl_coefficient=0.2, dual_clip=3.0)
    new, old, reference = (tensor.double() for tensor in batch(1))
    new.requires_grad_(True)
    policy_loss(new, old, reference, ADVANTAGES.double(), MASK, settings).total.backward()
    assert new.grad is not None and not new.grad[~MASK].any() and new.grad.isfinite().all()
    for s, t in MASK.nonzero().tolist():
        ends = []
        for sign in (1, -1):
            moved = new.detach().clone()
            moved[s, t] += sign * 1e-6
            ends.append(float(policy_loss(moved, old, reference, ADVANTAGES.double(), MASK, settings).total))
        assert float(new.grad[s, t]) == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-5)


def test_sums_of_micro_batches_are_those_of_the_batch() -> None:
    new, old, reference = batch(2)
    for reduction in ("token", "sequence"):
        settings = PolicyLossSettings(kl_coefficient=0.1, reduction=reduction)  # type: ignore[arg-type]
        whole = policy_loss(new, old, reference, ADVANTAGES, MASK, settings)
        parts = [
            policy_loss(
                new[s : s + 1], old[s : s + 1], reference[s : s + 1], ADVANTAGES[s : s + 1], MASK[s : s + 1], settings
            )
            for s in range(4)
        ]
        assert float(whole.total) == pytest.approx(sum(float(part.total) for part in parts), abs=1e-5)
        assert whole.kl_sum == pytest.approx(sum(part.kl_sum for part in parts), abs=1e-5)
        assert whole.clipped == sum(part.clipped for part in parts)


def test_estimators_of_the_divergence() -> None:
    """Averaged over what the policy samples, k1 and k3 are the divergence; k2 is near it where it is small."""
    torch.manual_seed(0)
    logits, other = torch.randn(7), torch.randn(7)
    policy, reference = logits.log_softmax(0), (logits + 0.1 * other).log_softmax(0)
    exact = float((policy.exp() * (policy - reference)).sum())
    for estimator in ("k1", "k2", "k3"):
        mean = float((policy.exp() * kl_estimate(policy, reference, estimator)).sum())
        assert mean == pytest.approx(exact, rel=1e-4 if estimator != "k2" else 0.2)


def test_the_first_update_has_no_ratio() -> None:
    """On policy the loss is -A, nothing is clipped, and the gradient is that of REINFORCE."""
    old = batch(3)[1]
    new = old.clone().requires_grad_(True)
    loss = policy_loss(new, old, None, ADVANTAGES, MASK, PolicyLossSettings())
    loss.total.backward()
    assert loss.clipped == 0 and loss.old_kl_sum == 0 and loss.kl_sum == 0
    assert torch.equal(new.grad, torch.where(MASK, -ADVANTAGES[:, None], 0.0).expand(4, 4))
