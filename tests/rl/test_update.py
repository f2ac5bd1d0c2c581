"""An update on trees is that of a plain loop over rows: the same losses, gradients and weights
after several steps."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCABULARY, causal_model, plain_log_probs
from no_syncs import ATTENTION, NoSyncs
from sampled import Recorded
from torch import Tensor
from transformers import PreTrainedModel

from treeward.config.grpo import PolicyLossConfig
from treeward.errors import ModelError
from treeward.model.policy_model import PolicyModel
from treeward.rl.generation import CompletionGroup, Prompt, SampledCompletion, completion_lengths
from treeward.rl.policy_loss import policy_loss
from treeward.rl.update import PolicyUpdater

PROMPTS, COMPLETIONS = 3, 4


def moved(hf: PreTrainedModel) -> PreTrainedModel:
    """Another model, near this one."""
    other = copy.deepcopy(hf)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.02)
    return other


def experience(seed: int = 0) -> tuple[list[CompletionGroup], Tensor, Tensor]:
    generator = np.random.default_rng(seed)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(int(i) for i in generator.integers(3, VOCABULARY, length))

    groups = []
    for _ in range(PROMPTS):
        prompt = draw(int(generator.integers(4, 12)))
        drawn = [draw(int(generator.integers(1, 9))) for _ in range(COMPLETIONS)]
        groups.append(
            CompletionGroup(
                Prompt(()), prompt, tuple(SampledCompletion(one, "", False) for one in drawn)
            )
        )
    used = torch.ones(PROMPTS, COMPLETIONS, dtype=torch.bool)
    used[0, 1] = False
    return groups, torch.from_numpy(generator.normal(size=(PROMPTS, COMPLETIONS))).float(), used


def row_log_probs(
    model: PreTrainedModel, group: CompletionGroup, g: int, temperature: float = 1.0
) -> Tensor:
    sequence = [*group.prompt_ids, *group.completions[g].token_ids]
    return plain_log_probs(model, sequence, len(group.prompt_ids), temperature)[0]


def all_log_probs(model: PreTrainedModel, group: CompletionGroup) -> list[Tensor]:
    return [row_log_probs(model, group, g) for g in range(len(group.completions))]


def said_by(
    hf: PreTrainedModel, groups: Sequence[CompletionGroup], offset: float, noise: float = 0.0
) -> list[CompletionGroup]:
    """The same groups, with log-probabilities of a generator that is off."""
    torch.manual_seed(0)
    said = []
    with torch.no_grad():
        for group in groups:
            rows = all_log_probs(hf, group)
            completions = [
                replace(a, log_probs=tuple((row + offset + noise * torch.randn(len(row))).tolist()))
                for a, row in zip(group.completions, rows, strict=True)
            ]
            said.append(replace(group, completions=tuple(completions)))
    return said


def plain_updates(
    model: PreTrainedModel,
    reference: PreTrainedModel,
    optimizer: Recorded,
    data: Any,
    settings: PolicyLossConfig,
    passes: int,
) -> list[float]:
    """Written out: passes over the batch, in parts of some prompts, one row at a time. Returns the
    losses."""
    groups, advantages, used = data
    with torch.no_grad():
        old = [all_log_probs(model, group) for group in groups]
        ref = [all_log_probs(reference, group) for group in groups]
    found = []
    for part in [(0, 1), (2,)] * passes:
        losses = []
        tokens = 0
        completions = 0
        for p in part:
            for g, completion in enumerate(groups[p].completions):
                if not used[p, g] or not completion.token_ids:
                    continue
                new = row_log_probs(model, groups[p], g)
                said = (
                    None
                    if completion.log_probs is None
                    else torch.tensor(completion.log_probs)[None]
                )
                # for one completion; tests of its own compare it with the formula
                term, _ = policy_loss(
                    new[None], old[p][g][None], ref[p][g][None], advantages[p, g][None],
                    torch.ones(1, len(new)),
                    settings,
                    generated_SL=said if settings.use_importance_sampling_correction else None,
                )  # fmt: skip
                losses.append(term)
                tokens = tokens + len(new)
                completions = completions + 1
        loss = torch.stack(losses).sum() / (tokens if settings.token_level_loss else completions)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def weights(hf: PreTrainedModel) -> Tensor:
    return torch.cat([p.detach().flatten() for p in hf.parameters()])


PENALTY: dict[str, Any] = {
    "reference_policy_kl_penalty": 0.1, "kl_input_clamp_value": None, "kl_output_clamp_value": None
}  # fmt: skip
SEVERAL = {
    "token": PolicyLossConfig(**PENALTY, ratio_clip_max=0.3),
    "sequence": PolicyLossConfig(**PENALTY, ratio_clip_min=2e-3, ratio_clip_max=2e-3,
                                 token_level_loss=False),
    "truncated": PolicyLossConfig(**PENALTY, use_importance_sampling_correction=True,
                                  token_level_loss=False,
                                  truncated_importance_sampling_ratio=1.1),
    "gspo": PolicyLossConfig(sequence_level_importance_ratios=True, token_level_loss=False,
                             ratio_clip_min=0.01,
                             ratio_clip_max=0.01, reference_policy_kl_penalty=0.0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "micro_batch_tokens", "passes"),
    [("token", 10, 2), ("sequence", 4096, 1), ("truncated", 10, 2), ("gspo", 4096, 2)],
)
def test_several_steps_are_those_of_plain_rows(
    name: str, micro_batch_tokens: int, passes: int
) -> None:
    settings = SEVERAL[name]
    hf = causal_model("qwen3")
    reference = moved(hf)
    other = copy.deepcopy(hf)
    optimizer = Recorded(hf)
    plain_optimizer = Recorded(other)
    updater = PolicyUpdater(
        PolicyModel(hf), optimizer, reference=PolicyModel(copy.deepcopy(reference)), loss=settings,
        micro_batch_tokens=micro_batch_tokens, prompts_per_update=2, updates_per_batch=passes,
    )  # fmt: skip
    start = weights(hf)
    clipped = 0.0
    for step in range(3):
        groups, advantages, used = experience(step)
        groups[2] = replace(
            groups[2], completions=(*groups[2].completions[:3], SampledCompletion((), "", False))
        )
        data = said_by(other, groups, 0.05, noise=0.2), advantages, used
        metrics = updater.learn(*data)
        clipped += metrics.clipped
        assert metrics.updates == 2 * passes
        losses = plain_updates(other, reference, plain_optimizer, data, settings, passes)
        assert metrics.loss_sum == pytest.approx(sum(losses), abs=4e-5)
    for ours, theirs in zip(optimizer.gradients, plain_optimizer.gradients, strict=True):
        assert float((ours - theirs).abs().max()) < 1e-5
    assert float((weights(hf) - start).abs().max()) > 5e-3 and clipped > 0
    assert float((weights(hf) - weights(other)).abs().max()) < 1e-5


@pytest.mark.parametrize("layout", ["tree", "rows"])
def test_a_group_larger_than_the_budget_is_split(
    layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In evaluate, measure and update alike; only a larger completion runs alone."""
    groups, advantages, used = experience()
    budget = 18
    sizes = []
    log_probs = PolicyModel.log_probs

    def counted(model: PolicyModel, *args: Any, **options: Any) -> Any:
        found = log_probs(model, *args, **options)
        sizes.append((found.num_computed_tokens, len(found.values_SL)))
        return found

    monkeypatch.setattr(PolicyModel, "log_probs", counted)
    results = []
    for tokens in (4096, budget):
        hf = causal_model("qwen3")
        optimizer = Recorded(hf)
        updater = PolicyUpdater(
            PolicyModel(hf, layout=layout), optimizer,
            reference=PolicyModel(moved(hf), layout=layout),
            loss=SEVERAL["sequence"], micro_batch_tokens=tokens, updates_per_batch=2,
        )  # fmt: skip
        sizes.clear()
        evaluated = updater.evaluate(groups, for_reward=True)
        metrics = updater.update(evaluated, advantages, used)
        kl_PG, entropy_PG = updater.measure(groups)
        assert evaluated.kl_PG is not None and kl_PG is not None
        results.append((metrics.loss_sum, evaluated.kl_PG, kl_PG, entropy_PG, *optimizer.gradients))
    assert (
        all(tokens <= budget or completions == 1 for tokens, completions in sizes)
        and len(sizes) > 5 * PROMPTS
    )
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6, abs=1e-7)
    for whole, parts in zip(results[0][1:], results[1][1:], strict=True):
        assert float((whole - parts).abs().max()) < 2e-6 * max(float(whole.abs().max()), 1.0)


@pytest.mark.parametrize(
    ("num_groups", "unused"), [(3, ()), (3, (0, 1)), (3, (0, 1, 2)), (1, ()), (0, ())]
)
def test_a_schedule_goes_on_whatever_the_groups_of_a_batch_are_worth(
    num_groups: int, unused: tuple[int, ...]
) -> None:
    groups, advantages, used = experience()
    groups[0] = replace(groups[0], completions=(SampledCompletion((), "", False),) * COMPLETIONS)
    used[list(unused)] = False
    hf = causal_model("qwen3")
    start = weights(hf)
    steps = list[int]()
    updater = PolicyUpdater(
        PolicyModel(hf), Recorded(hf), reference=PolicyModel(causal_model("qwen3")),
        prompts_per_update=2,
        updates_per_batch=3, on_step=lambda: steps.append(1),
    )  # fmt: skip
    metrics = updater.learn(groups[:num_groups], advantages[:num_groups], used[:num_groups])
    # the first group has no tokens
    parts = [p for p in ((1,), (2,)) if p[0] < num_groups and p[0] not in unused]
    assert len(steps) == 3 * -(-num_groups // 2) and metrics.updates == 3 * len(parts)
    assert bool(metrics.tokens) == (not torch.equal(weights(hf), start)) == bool(parts)
    assert len(updater.measure(groups[:num_groups])[1]) == num_groups


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_to_the_reference_and_entropy_of_each_completion(estimator: Any) -> None:
    groups, advantages, used = experience()
    hf = causal_model("qwen3")
    updater = PolicyUpdater(
        PolicyModel(hf), torch.optim.SGD(hf.parameters(), lr=0.0), reference=PolicyModel(moved(hf)),
        temperature=0.8,
        loss=PolicyLossConfig(reference_policy_kl_type=estimator, kl_in_reward=True),
        micro_batch_tokens=30,
    )  # fmt: skip
    evaluated = updater.evaluate(groups, for_reward=True)
    kl_PG, entropy_PG = updater.measure(groups)
    assert evaluated.kl_PG is not None and kl_PG is not None
    with torch.no_grad():
        for p, group in enumerate(groups):
            for g, completion in enumerate(group.completions):
                x = (
                    row_log_probs(hf, group, g, 0.8) - row_log_probs(moved(hf), group, g, 0.8)
                ).double()
                k = {"k1": x, "k2": x * x / 2, "k3": (-x).exp() - 1 + x}
                assert float(evaluated.kl_PG[p, g]) == pytest.approx(
                    float(k[estimator].sum()), abs=1e-5
                )
                assert float(kl_PG[p, g]) == pytest.approx(float(k["k3"].sum()), abs=1e-5)
                _, entropies = plain_log_probs(
                    hf, [*group.prompt_ids, *completion.token_ids], len(group.prompt_ids), 0.8
                )
                assert float(entropy_PG[p, g]) == pytest.approx(float(entropies.mean()), abs=1e-5)
    # what was computed for the reward serves as the old policy, and is counted once
    metrics = updater.update(evaluated, advantages, used)
    assert metrics.old_kl_sum == pytest.approx(0.0, abs=1e-5)
    lengths = completion_lengths(groups)
    assert metrics.means()["entropy"] == pytest.approx(
        float((entropy_PG * lengths)[used].sum() / lengths[used].sum())
    )
    again = updater.update(evaluated, advantages, used, entropies=False)
    assert again.computed_tokens == metrics.computed_tokens and "entropy" not in again.means()


def test_the_mismatch_with_the_generator_is_measured() -> None:
    groups, advantages, used = experience()
    hf = causal_model("qwen3")
    said = said_by(hf, groups, 0.1)
    all_tokens = int(completion_lengths(groups).sum())
    for updates, tokens in (
        (1, all_tokens - len(groups[0].completions[1].token_ids)),
        (2, all_tokens),
    ):
        updater = PolicyUpdater(
            PolicyModel(hf), torch.optim.SGD(hf.parameters(), lr=0.0), updates_per_batch=updates
        )
        metrics = updater.learn(said, advantages, used)
        assert metrics.means()["token_mult_prob_error"] == pytest.approx(math.exp(0.1), abs=1e-4)
        assert metrics.mismatch_tokens == tokens
        assert updater.measure(groups)[0] is None  # without a reference there is no KL
    assert "token_mult_prob_error" not in updater.learn(groups, advantages, used).means()
    with pytest.raises(ModelError, match="no log-probabilities of its own"):
        PolicyUpdater(PolicyModel(hf), Recorded(hf), loss=SEVERAL["truncated"]).evaluate(groups)


def test_a_loss_that_is_not_finite_leaves_the_weights(caplog: pytest.LogCaptureFixture) -> None:
    groups, advantages, used = experience()
    hf = causal_model("qwen3")
    before = weights(hf)
    advantages[1, 1] = torch.inf
    updater = PolicyUpdater(
        PolicyModel(hf), torch.optim.SGD(hf.parameters(), lr=0.1), prompts_per_update=1
    )
    metrics = updater.learn(groups, advantages, used)
    assert (updater.skipped.total, updater.skipped.in_a_row) == (1, 0) and math.isfinite(
        metrics.means()["loss"]
    )
    assert (
        caplog.text.count("or its gradient is not finite") == caplog.text.count(": skipped.") == 1
    )
    assert metrics.updates == len(groups) - 1 and not torch.equal(weights(hf), before)
    before = weights(hf)
    updater.prompts_per_update = None
    for _ in range(4):
        assert "loss" not in updater.learn(groups, advantages, used).means()
    with pytest.raises(ModelError, match="not finite(?s:.*)number 5 in a row"):
        updater.learn(groups, advantages, used)
    assert torch.equal(weights(hf), before) and all(p.grad is None for p in hf.parameters())
    advantages[1, 1] = 1.0
    updater.learn(groups, advantages, used)
    assert (updater.skipped.total, updater.skipped.in_a_row) == (5, 0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("loss", ["several", "truncated"])
def test_the_host_waits_for_nothing_within_a_micro_batch(device: str, loss: str) -> None:
    hf = causal_model("qwen3", head_dim=16).to(device)  # the smallest heads of FlexAttention
    settings = PolicyLossConfig() if loss == "several" else SEVERAL["truncated"]
    updater = PolicyUpdater(
        PolicyModel(hf), Recorded(hf), reference=PolicyModel(moved(hf)), loss=settings
    )
    groups, advantages, used = experience()
    evaluated = updater.evaluate(said_by(hf, groups, 0.1))
    (batch,) = updater.micro_batches(evaluated.groups, [(p, g) for p, g in used.nonzero().tolist()])
    advantages = advantages.to(device)
    excused = (*ATTENTION, "treeward/tree/batch.py")  # which plan on the host
    try:
        for mode in ("default", "error"):  # the first time fills the caches of kernels
            if device == "cuda":
                torch.cuda.set_sync_debug_mode(mode)
            with NoSyncs(excused) if device == "cpu" else contextlib.nullcontext():
                loss_sum, sums = updater.micro_batch_loss(
                    evaluated, batch, advantages, entropies=True
                )
                loss_sum.backward()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(sums.means()["entropy"])
