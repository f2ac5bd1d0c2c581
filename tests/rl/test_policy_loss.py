"""The policy loss against its formula written out for each token, and its gradients against numeric ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from treeward.errors import ConfigError
from treeward.rl.policy_loss import PolicyLossSettings, kl_estimate, policy_loss, token_weights

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


def written_out(new: Any, old: Any, reference: Any, said: Any, settings: PolicyLossSettings) -> tuple[float, float]:
    """One token after the other, in Python's own numbers."""
    total = denominator = 0.0
    for s in range(4):
        tokens = [t for t in range(4) if MASK[s, t]]
        a = float(ADVANTAGES[s])
        by_completion = settings.sequence_level_importance_ratios
        for t in tokens:
            weight = 1.0 if settings.reduction == "token" else 1.0 / len(tokens)
            ratio = math.exp(float(new[s, t] - old[s, t]))
            correction = math.exp(float(old[s, t] - said[s, t]))
            if by_completion:
                ratio = math.exp(sum(float(new[s, u] - old[s, u]) for u in tokens) / len(tokens))
                correction = math.exp(sum(float(old[s, u] - said[s, u]) for u in tokens))
            gain = min(ratio * a, min(max(ratio, 1 - settings.ratio_clip_min), 1 + settings.ratio_clip_max) * a)
            if settings.force_on_policy_ratio:
                gain = a
            if settings.dual_clip is not None and a < 0:
                gain = max(gain, settings.dual_clip * a)
            if settings.use_importance_sampling_correction:
                gain *= min(correction, settings.truncated_importance_sampling_ratio or math.inf)
            x = clamped(float(new[s, t] - reference[s, t]), settings.kl_input_clamp_value)
            kl = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[settings.kl_estimator]
            kl = clamped(kl, settings.kl_output_clamp_value)
            if settings.use_on_policy_kl_approximation:
                kl *= math.exp(float(new[s, t] - said[s, t]))
            total += weight * (-gain + settings.kl_coefficient * kl)
            denominator += weight
    return total, denominator


OPTIONS = [
    PolicyLossSettings(),
    PolicyLossSettings(ratio_clip_min=0.1, ratio_clip_max=0.4, reduction="sequence"),
    PolicyLossSettings(dual_clip=1.1, kl_coefficient=0.3, kl_estimator="k1"),
    PolicyLossSettings(kl_coefficient=0.3, kl_estimator="k2", reduction="sequence"),
    PolicyLossSettings(kl_coefficient=0.3, kl_estimator="k3"),
    PolicyLossSettings(kl_coefficient=0.3, kl_input_clamp_value=0.3),
    PolicyLossSettings(kl_coefficient=0.3, kl_output_clamp_value=0.1, kl_estimator="k1"),
    PolicyLossSettings(kl_coefficient=0.3, kl_input_clamp_value=0.6, kl_output_clamp_value=0.05, reduction="sequence"),
    PolicyLossSettings(kl_coefficient=0.3, use_importance_sampling_correction=True),
    PolicyLossSettings(
        use_importance_sampling_correction=True, truncated_importance_sampling_ratio=1.2, reduction="sequence"
    ),
    PolicyLossSettings(kl_coefficient=0.3, use_on_policy_kl_approximation=True),
    PolicyLossSettings(sequence_level_importance_ratios=True, reduction="sequence", kl_coefficient=0.3),
    PolicyLossSettings(sequence_level_importance_ratios=True, ratio_clip_min=0.05, ratio_clip_max=0.1, dual_clip=1.02),
    PolicyLossSettings(
        sequence_level_importance_ratios=True,
        use_importance_sampling_correction=True,
        truncated_importance_sampling_ratio=1.5,
    ),
    PolicyLossSettings(force_on_policy_ratio=True, kl_coefficient=0.3, use_importance_sampling_correction=True),
    PolicyLossSettings(force_on_policy_ratio=True, sequence_level_importance_ratios=True, reduction="sequence"),
]


@pytest.mark.parametrize("settings", OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_it_is_the_formula(settings: PolicyLossSettings, dtype: torch.dtype, tolerance: float) -> None:
    for seed in range(5):
        given = batch(seed)
        want, denominator = written_out(*given, settings)
        new, old, reference, said = (tensor.to(dtype) for tensor in given)
        loss = policy_loss(new, old, reference, ADVANTAGES, MASK, settings, generated_SL=said)
        # the weights are float32
        assert float(loss.total) == pytest.approx(
            want, abs=max(tolerance, 1e-6 if settings.reduction != "token" else 0)
        )
        assert float(token_weights(MASK, settings.reduction)[1]) == pytest.approx(denominator)
        assert loss.num_tokens == 8 and loss.not_finite == 0


@pytest.mark.parametrize("settings", OPTIONS)
def test_gradients_are_the_slopes_of_the_formula(settings: PolicyLossSettings) -> None:
    """Those of the weights that are constants are not in them: these are kept while a token is moved."""
    new, old, reference, said = batch(1)
    new.requires_grad_(True)
    policy_loss(new, old, reference, ADVANTAGES, MASK, settings, generated_SL=said).total.backward()
    assert new.grad is not None and not new.grad[~MASK].any() and new.grad.isfinite().all()
    for s, t in MASK.nonzero().tolist():
        ends = []
        for sign in (1, -1):
            moved, fixed = new.detach().clone(), said.clone()
            moved[s, t] += sign * 1e-6
            if settings.use_on_policy_kl_approximation:
                fixed[s, t] += sign * 1e-6  # exp(new - generator's) stays
            ends.append(written_out(moved, old, reference, fixed, settings)[0])
        slope = (ends[0] - ends[1]) / 2e-6
        if settings.force_on_policy_ratio:  # whose slope is that of the log-probability
            weight = 1.0 if settings.reduction == "token" else 1.0 / int(MASK[s].sum())
            gain = float(ADVANTAGES[s])
            if settings.use_importance_sampling_correction:
                gain *= math.exp(float(old[s, t] - said[s, t]))
            slope -= weight * gain
        assert float(new.grad[s, t]) == pytest.approx(slope, abs=1e-5)


def test_masked_tokens_may_be_infinite() -> None:
    new, old, reference, said = batch(1)
    new = new.masked_fill(~MASK, -torch.inf).requires_grad_(True)
    settings = PolicyLossSettings(kl_coefficient=0.2, use_on_policy_kl_approximation=True)
    loss = policy_loss(new, old, reference, ADVANTAGES, MASK, settings, generated_SL=said)
    loss.total.backward()
    assert loss.total.isfinite() and new.grad is not None and new.grad.isfinite().all()


def test_weights_that_are_not_finite_count_as_zero_and_are_counted() -> None:
    new, old, reference, said = batch(1)
    said[0, 1], said[3, 2] = -torch.inf, torch.nan
    settings = PolicyLossSettings(use_importance_sampling_correction=True, truncated_importance_sampling_ratio=2.0)
    loss = policy_loss(new, old, reference, ADVANTAGES, MASK, settings, generated_SL=said)
    without = MASK.clone()
    without[0, 1] = without[3, 2] = False
    rest = policy_loss(new, old, reference, ADVANTAGES, without, settings, generated_SL=said)
    assert float(loss.total) == pytest.approx(float(rest.total)) and loss.not_finite == 2
    assert loss.correction_sum == pytest.approx(rest.correction_sum) and rest.not_finite == 0
    weights = torch.exp(old - said)[without].clamp_max(2.0)
    assert rest.correction_sum == pytest.approx(float(weights.sum()))


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("ratio_clip_c", {"dual_clip": 1.0}),
        ("kl_input_clamp_value", {"kl_input_clamp_value": 0.0}),
        ("kl_output_clamp_value", {"kl_output_clamp_value": -1.0}),
        (
            "truncated_importance_sampling_ratio",
            {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 0.0},
        ),
        ("truncated_importance_sampling_ratio", {"truncated_importance_sampling_ratio": 2.0}),
    ],
)
def test_values_out_of_range_are_refused(key: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"loss_fn.{key}"):
        PolicyLossSettings(**options)


def test_what_needs_the_generator() -> None:
    assert PolicyLossSettings(use_importance_sampling_correction=True).needs_generated
    assert PolicyLossSettings(use_on_policy_kl_approximation=True, kl_coefficient=0.1).needs_generated
    assert not PolicyLossSettings(use_on_policy_kl_approximation=True).needs_generated


def test_sums_of_micro_batches_are_those_of_the_batch() -> None:
    new, old, reference, _ = batch(2)
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
    old = batch(3)[1].float()
    new = old.clone().requires_grad_(True)
    loss = policy_loss(new, old, None, ADVANTAGES, MASK, PolicyLossSettings())
    loss.total.backward()
    assert loss.clipped == 0 and loss.old_kl_sum == 0 and loss.kl_sum == 0
    assert torch.equal(new.grad, torch.where(MASK, -ADVANTAGES[:, None], 0.0).expand(4, 4))
