"""`sft`: supervised fine-tuning of a policy on given completions, before reinforcement learning.

    groups = [(prompt_ids, [completion_ids, other_completion_ids]), ...]
    losses = sft(policy, groups, num_epochs=3, learning_rate=3e-3, groups_per_step=64, seed=0)

Each token of every completion weighs the same, and a prompt is computed once for all its completions. An instructed
policy does not need this step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from treeward.model.policy_model import PolicyModel
from treeward.tree.parts import plan_parts

__all__ = ["sft"]

CompletionsOf = tuple[Sequence[int], Sequence[Sequence[int]]]
"""The tokens of a prompt, and those of each completion to it."""


def sft(
    policy: PolicyModel,
    groups: Sequence[CompletionsOf],
    *,
    num_epochs: int,
    learning_rate: float,
    groups_per_step: int,
    seed: int,
    micro_batch_tokens: int = 4096,
    on_step: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> list[float]:
    """Minimise the mean of -log p over the tokens of the completions; returns it for each step, in nats.

    AdamW with a warm-up of a twentieth and a cosine decay to a tenth. `on_step` gets the step, the number of steps
    and the loss.
    """
    total_steps = num_epochs * math.ceil(len(groups) / groups_per_step)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.1, betas=(0.9, 0.98))
    warmup = max(1, total_steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / total_steps)),
    )
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    for _ in range(num_epochs):
        for chosen in torch.randperm(len(groups), generator=generator).split(groups_per_step):
            loss = _step(policy, [groups[i] for i in chosen.tolist()], micro_batch_tokens)
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss)
            on_step(len(losses), total_steps, loss)
    return losses


def _step(policy: PolicyModel, groups: Sequence[CompletionsOf], micro_batch_tokens: int) -> float:
    """The gradient of one step, left in the parameters; returns the loss."""
    sequences = [[[*prompt, *completion] for completion in completions] for prompt, completions in groups]
    num_tokens = sum(len(completion) for _, completions in groups for completion in completions)
    total = 0.0
    for parts in plan_parts(sequences, max_tokens=micro_batch_tokens, share=policy.layout == "tree"):
        found = policy.log_probs(
            [[sequences[part.group][i] for i in part.members] for part in parts],
            [[len(groups[part.group][0])] * len(part.members) for part in parts],
        )
        loss = -found.values_SL.sum() / num_tokens
        loss.backward()
        total += float(loss.detach())
    return total
