"""What the demos of policies share: a small architecture, and the supervised step before policy
optimisation."""

import logging
import math

import torch

from treeward.model.policy_model import PolicyModel
from treeward.tree.plan import plan_parts

# The tokens of each prompt and of its completion. What prompts of a group begin with is computed
# once.
Group = list[tuple[list[int], list[int]]]

SMALL_POLICY = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def imitate(
    policy: PolicyModel,
    groups: list[Group],
    *,
    epochs: int,
    learning_rate: float = 4e-3,
    groups_per_step: int = 64,
    log_period: int = 50,
) -> None:
    """Minimise the mean of -log p over the tokens of completions, of each group on one tree.

    AdamW with a warm-up of a twentieth and a cosine decay to a tenth.
    """
    total_steps = epochs * math.ceil(len(groups) / groups_per_step)
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=learning_rate, weight_decay=0.1, betas=(0.9, 0.98)
    )
    warmup, generator = max(1, total_steps // 20), torch.Generator().manual_seed(0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / total_steps)),
    )
    step = 0
    for _ in range(epochs):
        for chosen in torch.randperm(len(groups), generator=generator).split(groups_per_step):
            batch = [groups[i] for i in chosen.tolist()]
            sequences = [
                [[*prompt, *completion] for prompt, completion in group] for group in batch
            ]
            num_tokens = sum(len(completion) for group in batch for _, completion in group)
            total = 0.0
            for parts in plan_parts(sequences, max_tokens=4096):
                trees = [[sequences[part.group][i] for i in part.members] for part in parts]
                starts = [[len(batch[part.group][i][0]) for i in part.members] for part in parts]
                loss = -policy.log_probs(trees, starts).values_SL.sum() / num_tokens
                loss.backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % log_period == 0 or step == total_steps:
                logging.getLogger("treeward").info(
                    "sft: step %d/%d  loss %.3f", step, total_steps, total
                )
