"""An update on trees is that of a plain loop over rows: the same weights after several steps."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCABULARY, config_of, randomise
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from treeward.errors import ModelError
from treeward.model.policy_model import PolicyModel
from treeward.rl.experience import Answer, AnswerGroup, Prompt
from treeward.rl.policy_loss import PolicyLossSettings
from treeward.rl.update import PolicyUpdater

PROMPTS, ANSWERS = 3, 4


def causal(family: str = "qwen3") -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager", dtype=torch.float32)
    return randomise(model.eval())


def experience(seed: int = 0) -> tuple[list[AnswerGroup], Tensor, Tensor]:
    generator = np.random.default_rng(seed)
    draw = lambda n: tuple(int(i) for i in generator.integers(3, VOCABULARY, n))  # noqa: E731
    groups = []
    for _ in range(PROMPTS):
        prompt = draw(int(generator.integers(4, 12)))
        answers = tuple(Answer(draw(int(generator.integers(1, 9))), "", False) for _ in range(ANSWERS))
        groups.append(AnswerGroup(Prompt(()), prompt, answers))
    used = torch.ones(PROMPTS, ANSWERS, dtype=torch.bool)
    used[0, 1] = False
    return groups, torch.from_numpy(generator.normal(size=(PROMPTS, ANSWERS))).float(), used


def row_log_probs(model: PreTrainedModel, group: AnswerGroup, g: int) -> Tensor:
    sequence = [*group.prompt_ids, *group.answers[g].token_ids]
    logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0].log_softmax(-1)
    picked = logits[:-1].gather(-1, torch.tensor(sequence)[1:, None])[:, 0]
    return picked[len(group.prompt_ids) - 1 :]


def plain_updates(
    model: PreTrainedModel, reference: PreTrainedModel, optimizer: Any, data: Any, settings: PolicyLossSettings
) -> None:
    """Written out: two passes over the batch, in parts of two prompts, one row at a time."""
    groups, advantages, used = data
    with torch.no_grad():
        old = [[row_log_probs(model, group, g) for g in range(ANSWERS)] for group in groups]
        ref = [[row_log_probs(reference, group, g) for g in range(ANSWERS)] for group in groups]
    for _ in range(2):
        for part in ([0, 1], [2]):
            losses, tokens, answers = [], 0, 0
            for p in part:
                for g in range(ANSWERS):
                    if not used[p, g]:
                        continue
                    new = row_log_probs(model, groups[p], g)
                    ratio, a = (new - old[p][g]).exp(), advantages[p, g]
                    low, high = 1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max
                    gain = torch.minimum(ratio * a, ratio.clamp(low, high) * a)
                    x = new - ref[p][g]
                    term = -gain + settings.kl_coefficient * ((-x).exp() - 1 + x)
                    losses.append(term.sum() if settings.reduction == "token" else term.mean())
                    tokens, answers = tokens + len(new), answers + 1
            loss = torch.stack(losses).sum() / (tokens if settings.reduction == "token" else answers)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("reduction", ["token", "sequence"])
@pytest.mark.parametrize("micro_batch_tokens", [10, 4096])
def test_weights_after_several_steps_are_those_of_plain_rows(reduction: Any, micro_batch_tokens: int) -> None:
    settings = PolicyLossSettings(kl_coefficient=0.1, ratio_clip_max=0.3, reduction=reduction)
    hf, reference = causal(), causal()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(1.02)
    other = copy.deepcopy(hf)
    updater = PolicyUpdater(
        PolicyModel(hf),
        torch.optim.SGD(hf.parameters(), lr=0.05),
        reference=PolicyModel(copy.deepcopy(reference)),
        settings=settings,
        micro_batch_tokens=micro_batch_tokens,
        prompts_per_update=2,
        updates_per_batch=2,
    )
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    start = {name: p.detach().clone() for name, p in hf.named_parameters()}
    for step in range(3):
        data = experience(step)
        metrics = updater.update(*data)
        assert metrics.updates == 4
        plain_updates(other, reference, optimizer, data, settings)
    moved = max(float((p - start[name]).abs().max()) for name, p in hf.named_parameters())
    apart = max(float((p - q).abs().max()) for p, q in zip(hf.parameters(), other.parameters(), strict=True))
    assert moved > 1e-2 and apart < 1e-5, (moved, apart)


def test_prompts_are_computed_once_and_not_more_often_than_needed() -> None:
    groups, advantages, used = experience()
    tree = sum(group.num_tree_tokens for group in groups)
    for updates, passes in ((1, 1), (2, 3)):  # from the second update on the old policy is another
        hf = causal()
        updater = PolicyUpdater(PolicyModel(hf), torch.optim.SGD(hf.parameters(), lr=0.0), updates_per_batch=updates)
        metrics = updater.update(groups, advantages, used)
        assert metrics.computed_tokens == passes * tree
        assert metrics.row_tokens == passes * sum(group.num_row_tokens for group in groups)
        assert metrics.old_kl_sum == pytest.approx(0.0, abs=1e-6) and metrics.clipped == 0


def test_answers_that_are_not_used_change_nothing() -> None:
    groups, advantages, used = experience()
    ends = []
    for value in (5.0, -7.0):
        hf = causal()
        changed = advantages.clone()
        changed[0, 1] = value
        PolicyUpdater(PolicyModel(hf), torch.optim.SGD(hf.parameters(), lr=0.1)).update(groups, changed, used)
        ends.append(torch.cat([p.detach().flatten() for p in hf.parameters()]))
    assert torch.equal(*ends)
    hf = causal()
    nothing = PolicyUpdater(PolicyModel(hf), torch.optim.SGD(hf.parameters(), lr=0.1)).update(
        groups, advantages, torch.zeros_like(used)
    )
    assert nothing.updates == 0


def test_the_mismatch_with_the_generator_is_measured() -> None:
    groups, advantages, used = experience()
    hf = causal()
    said = []
    with torch.no_grad():
        for group in groups:
            answers = [
                Answer(a.token_ids, "", False, tuple((row_log_probs(hf, group, g) + 0.1).tolist()))
                for g, a in enumerate(group.answers)
            ]
            said.append(AnswerGroup(group.prompt, group.prompt_ids, tuple(answers)))
    for updates in (1, 2):
        updater = PolicyUpdater(PolicyModel(hf), torch.optim.SGD(hf.parameters(), lr=0.0), updates_per_batch=updates)
        metrics = updater.update(said, advantages, used)
        assert metrics.means()["token_mult_prob_error"] == pytest.approx(math.exp(0.1), abs=1e-4)
        assert metrics.mismatch_tokens == sum(len(a.token_ids) for group in groups for a in group.answers)


def test_a_loss_that_is_not_finite_leaves_the_weights() -> None:
    groups, advantages, used = experience()
    hf = causal()
    before = [p.detach().clone() for p in hf.parameters()]
    advantages[1, 1] = torch.inf
    with pytest.raises(ModelError, match="not finite"):
        PolicyUpdater(PolicyModel(hf), torch.optim.SGD(hf.parameters(), lr=0.1)).update(groups, advantages, used)
    assert all(torch.equal(p, q) for p, q in zip(before, hf.parameters(), strict=True))
