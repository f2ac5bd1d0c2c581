"""A policy learns to imitate: the loss is that of plain rows, and it falls."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families import config_of, randomise
from transformers import AutoModelForCausalLM

from treeward.model.policy_model import PolicyModel
from treeward.rl.sft import sft

GROUPS = [
    ([5, 6, 7], [[8, 9, 10], [8, 11]]),
    ([12, 13], [[14]]),
    ([15, 16, 17, 18], [[19, 20, 21, 22], [23], [19, 24]]),
]


def policy() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf = AutoModelForCausalLM.from_config(config_of("qwen3"), attn_implementation="eager", dtype=torch.float32)
    return randomise(hf.eval())


def plain_loss(hf: Any) -> torch.Tensor:
    """The mean over all tokens of completions, one row at a time."""
    terms = []
    for prompt, completions in GROUPS:
        for completion in completions:
            row = torch.tensor([[*prompt, *completion]])
            logits = hf(input_ids=row, use_cache=False).logits[0].log_softmax(-1)
            terms.append(-logits[:-1].gather(-1, row[0, 1:, None])[len(prompt) - 1 :, 0])
    return torch.cat(terms).mean()


@pytest.mark.parametrize("micro_batch_tokens", [8, 4096])
def test_a_step_is_that_of_plain_rows(micro_batch_tokens: int) -> None:
    hf = policy()
    other = copy.deepcopy(hf)
    losses = sft(
        PolicyModel(hf), GROUPS, num_epochs=1, learning_rate=1e-3, groups_per_step=3, seed=0,
        micro_batch_tokens=micro_batch_tokens,
    )  # fmt: skip
    loss = plain_loss(other)
    assert losses == [pytest.approx(float(loss.detach()), abs=1e-5)]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.98)).step()
    for ours, theirs in zip(hf.parameters(), other.parameters(), strict=True):
        # Adam's first step is the sign of the gradient: where that is rounding, so is the step.
        assert float((ours - theirs).detach().abs().quantile(0.99)) < 1e-5


def test_completions_are_learnt_and_seeds_decide() -> None:
    told: list[tuple[int, int]] = []
    runs = []
    for seed in (0, 0, 1):
        hf = policy()
        losses = sft(
            PolicyModel(hf), GROUPS, num_epochs=40, learning_rate=1e-2, groups_per_step=2, seed=seed,
            on_step=lambda step, steps, loss: told.append((step, steps)),
        )  # fmt: skip
        runs.append(losses)
    assert runs[0] == runs[1] != runs[2]
    assert len(runs[0]) == 80 and told[:80] == [(n, 80) for n in range(1, 81)]
    # Two completions begin alike and part, so not everything can be known.
    assert runs[0][0] > 3 and sum(runs[0][-4:]) / 4 < 0.8
