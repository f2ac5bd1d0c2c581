"""The policy loss against its formula written out for each token, and its gradients against numeric
ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from treeward.config.grpo import PolicyLossConfig
from treeward.rl.policy_loss import kl_penalty, policy_loss

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
ADVANTAGES = torch.tensor([1.5, -2.0, 3.0, -0.25])


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """New, old, reference's and generator's log-probabilities, float64; NaN where they are
    masked."""
    torch.manual_seed(seed)
    old = -torch.rand(4, 4, dtype=torch.float64) * 3
    tensors = [old, *(old + 0.5 * torch.randn(4, 4, dtype=torch.float64) for _ in range(3))]
    for tensor in tensors:
        tensor[~MASK] = torch.nan
    return tensors[1], old, tensors[2], tensors[3]


def clamped(value: float, limit: float | None) -> float:
    return value if limit is None else min(max(value, -limit), limit)


def corrected(old: Any, said: Any, tokens: list[int], t: int, settings: PolicyLossConfig) -> float:
    """The weight of token `t` of a completion, whose log-probabilities are given."""
    if not settings.use_importance_sampling_correction:
        return 1.0
    differences = [float(old[u] - said[u]) for u in tokens]
    weight = (
        math.exp(sum(differences))
        if settings.sequence_level_importance_ratios
        else math.exp(old[t] - said[t])
    )
    high = settings.truncated_importance_sampling_ratio or math.inf
    low = settings.truncated_importance_sampling_ratio_min or 0.0
    kind = settings.truncated_importance_sampling_type
    if kind == "icepop":
        return weight if low <= weight <= high else 0.0
    if kind == "seq-mask-tis":
        return weight if low <= math.exp(sum(differences) / len(tokens)) <= high else 0.0
    return min(max(weight, low), high)


def penalised(
    new: float, stopped: float, reference: float, said: float, settings: PolicyLossConfig
) -> float:
    """The penalty of a token. `stopped`: the value of `new` that has no gradient."""
    kind, _, unweighted = settings.reference_policy_kl_type.partition("_")
    x = clamped(new - reference, settings.kl_input_clamp_value)
    kl = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[kind]
    if not unweighted:
        moving = new if x == new - reference else stopped
        kl *= math.exp(moving - (said if settings.use_on_policy_kl_approximation else stopped))
    return clamped(kl, settings.kl_output_clamp_value)


def written_out(
    new: Any, old: Any, reference: Any, said: Any, settings: PolicyLossConfig, stopped: Any = None
) -> dict[str, float]:
    """The loss and the sums to report, one token after the other, in Python's own numbers.

    `stopped`: the values of `new` where they have no gradient.
    """
    stopped = new if stopped is None else stopped
    sums = dict.fromkeys(
        ("loss", "policy_sum", "kl_sum", "old_kl_sum", "clipped", "correction_sum"), 0.0
    )
    for s in range(4):
        tokens = [t for t in range(4) if MASK[s, t]]
        a = float(ADVANTAGES[s])
        by_completion = settings.sequence_level_importance_ratios
        for t in tokens:
            weight = 1.0 if settings.token_level_loss else 1.0 / len(tokens)
            ratio = math.exp(float(new[s, t] - old[s, t]))
            if by_completion:
                ratio = math.exp(sum(float(new[s, u] - old[s, u]) for u in tokens) / len(tokens))
            gain = min(
                ratio * a,
                min(max(ratio, 1 - settings.ratio_clip_min), 1 + settings.ratio_clip_max) * a,
            )
            sums["clipped"] += ratio * a != gain and not settings.force_on_policy_ratio
            if settings.ratio_clip_c is not None and a < 0:
                gain = max(gain, settings.ratio_clip_c * a)
            if settings.force_on_policy_ratio:
                gain = math.exp(float(new[s, t] - stopped[s, t])) * a
            correction = corrected(old[s], said[s], tokens, t, settings)
            gain *= correction
            sums["correction_sum"] += correction
            sums["policy_sum"] -= gain
            for name, y in (
                ("kl_sum", new[s, t] - reference[s, t]),
                ("old_kl_sum", old[s, t] - new[s, t]),
            ):
                sums[name] += math.exp(-float(y)) - 1 + float(y)  # k3, whatever the penalty is
            kl = penalised(
                *(float(values[s, t]) for values in (new, stopped, reference, said)), settings
            )
            beta = 0.0 if settings.kl_in_reward else settings.reference_policy_kl_penalty
            sums["loss"] += weight * (-gain + beta * kl)
    return sums


NO_PENALTY: dict[str, Any] = {"reference_policy_kl_penalty": 0.0}
PENALTY: dict[str, Any] = {
    "reference_policy_kl_penalty": 0.3, "kl_input_clamp_value": None, "kl_output_clamp_value": None
}  # fmt: skip
CORRECTED: dict[str, Any] = {"use_importance_sampling_correction": True}
BY_COMPLETION: dict[str, Any] = {
    "sequence_level_importance_ratios": True,
    "token_level_loss": False,
}
TRUNCATED: dict[str, Any] = {
    **CORRECTED,
    "truncated_importance_sampling_ratio": 1.3,
    "truncated_importance_sampling_ratio_min": 0.8,
}
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
        {
            **PENALTY,
            "kl_input_clamp_value": 0.6,
            "kl_output_clamp_value": 0.05,
            "token_level_loss": False,
        },
        {**PENALTY, **CORRECTED},
        {
            **NO_PENALTY,
            **CORRECTED,
            "truncated_importance_sampling_ratio": 1.2,
            "token_level_loss": False,
        },
        {**PENALTY, **BY_COMPLETION},
        {
            **NO_PENALTY,
            **BY_COMPLETION,
            "ratio_clip_min": 0.05,
            "ratio_clip_max": 0.01,
            "ratio_clip_c": 1.02,
        },
        {**NO_PENALTY, **BY_COMPLETION, **CORRECTED, "truncated_importance_sampling_ratio": 1.5},
        {**PENALTY, "reference_policy_kl_type": "k1"},
        {**PENALTY, "reference_policy_kl_type": "k2_unweighted"},
        {**PENALTY, "reference_policy_kl_type": "k3_unweighted", "kl_input_clamp_value": 0.3},
        {**PENALTY, "use_on_policy_kl_approximation": True, "kl_input_clamp_value": 0.3},
        {**PENALTY, "use_on_policy_kl_approximation": True, "reference_policy_kl_type": "k1"},
        {**PENALTY, "force_on_policy_ratio": True, "ratio_clip_min": 0.01, "ratio_clip_max": 0.01},
        {**NO_PENALTY, **BY_COMPLETION, "force_on_policy_ratio": True},
        {**NO_PENALTY, **TRUNCATED, "truncated_importance_sampling_type": "tis"},
        {**NO_PENALTY, **TRUNCATED, "truncated_importance_sampling_type": "icepop"},
        {**NO_PENALTY, **TRUNCATED, "truncated_importance_sampling_type": "seq-mask-tis"},
        {
            **NO_PENALTY,
            **BY_COMPLETION,
            **TRUNCATED,
            "truncated_importance_sampling_type": "icepop",
        },
    )
]


@pytest.mark.parametrize("settings", OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_it_is_the_formula(
    settings: PolicyLossConfig, dtype: torch.dtype, tolerance: float
) -> None:
    for seed in range(5):
        given = batch(seed)
        want = written_out(*given, settings)
        new, old, reference, said = (tensor.to(dtype) for tensor in given)
        total, sums = policy_loss(
            new, old, reference, ADVANTAGES, MASK, settings, generated_SL=said
        )
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
            ends.append(
                written_out(moved, old, reference, said, settings, stopped=new.detach())["loss"]
            )
        assert float(new.grad[s, t]) == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-5)


def test_weights_that_are_not_finite_count_as_zero() -> None:
    new, old, reference, said = batch(1)
    said[0, 1] = -torch.inf
    said[3, 2] = torch.nan
    settings = PolicyLossConfig(**NO_PENALTY, **CORRECTED, truncated_importance_sampling_ratio=2.0)
    total, sums = policy_loss(new, old, reference, ADVANTAGES, MASK, settings, generated_SL=said)
    without = MASK.clone()
    without[0, 1] = without[3, 2] = False
    rest_total, rest = policy_loss(
        new, old, reference, ADVANTAGES, without, settings, generated_SL=said
    )
    assert float(total) == pytest.approx(float(rest_total))
    assert sums.correction_sum == pytest.approx(rest.correction_sum)
    weights = torch.exp(old - said)[without].clamp_max(2.0)
    assert rest.correction_sum == pytest.approx(float(weights.sum()))


def test_a_weight_that_is_not_finite_has_no_gradient() -> None:
    new, old, reference, said = batch(1)
    said[0, 1] = -torch.inf
    said[3, 2] = torch.nan
    new.requires_grad_(True)
    settings = PolicyLossConfig(**PENALTY, use_on_policy_kl_approximation=True)
    total, _ = policy_loss(new, old, reference, torch.zeros(4), MASK, settings, generated_SL=said)
    total.backward()
    assert new.grad is not None and new.grad.isfinite().all()
    assert new.grad[0, 1] == new.grad[3, 2] == 0


@pytest.mark.parametrize(
    ("kind", "of_reference", "approximates"),
    [
        ("k1", False, False),
        ("k3", False, False),
        ("k1", False, True),
        ("k3", False, True),
        ("k2_unweighted", False, False),
        ("k3_unweighted", True, False),
    ],
)
def test_the_penalty_over_a_whole_vocabulary_has_the_gradient_of_a_divergence(
    kind: Any, of_reference: bool, approximates: bool
) -> None:
    """The mean over tokens as they are sampled: from the policy itself, or with the approximation
    from another one."""
    torch.manual_seed(0)
    logits, reference, other = (torch.randn(50, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_(True)
    log_probs = logits.log_softmax(dim=0)
    log_reference = reference.log_softmax(dim=0)
    log_other = other.log_softmax(dim=0)
    settings = PolicyLossConfig(
        reference_policy_kl_penalty=1.0,
        reference_policy_kl_type=kind,
        use_on_policy_kl_approximation=approximates,
        kl_input_clamp_value=None,
        kl_output_clamp_value=None,
    )
    sampler = log_other if approximates else log_probs.detach()
    penalty = kl_penalty(log_probs, log_reference, log_other, settings)
    (got,) = torch.autograd.grad((sampler.exp() * penalty).sum(), logits, retain_graph=True)
    first, second = (log_reference, log_probs) if of_reference else (log_probs, log_reference)
    divergence = (first.exp() * (first - second)).sum()
    (want,) = torch.autograd.grad(divergence, logits)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
