"""A reward model from top to bottom: pairs -> trees -> scores -> Bradley-Terry loss -> step.

    python examples/minimal.py

This is the core of `treeward train` in one file, to be read and changed: no configuration, no
checkpoints, no report. It trains a small model from scratch on the bundled data, and shows what
that data plants: the model likes long completions too much. To start from a real model, take model
and tokenizer from `treeward.model.loading`: `load_classifier("HuggingFaceTB/SmolLM2-135M-Instruct",
head_seed=0)`, with a learning rate of 1e-5.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import torch

from treeward.data.bundled import bundled_path
from treeward.data.preference import Preference, preference_from_dict
from treeward.data.rendering import Renderer
from treeward.data.tokenizers import train_tokenizer
from treeward.losses import bradley_terry, ranked_pairs
from treeward.model.loading import build_reward_model

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LEARNING_RATE = 2e-3
COMPARISONS_PER_STEP = 32
NUM_STEPS = 104  # one epoch is 3,500 / 32 = 110 steps


def read_comparisons(split: str) -> list[Preference]:
    """A comparison is a context and two or more completions, each with its rank: lower is
    better."""
    path = bundled_path(split)
    comparisons = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        comparisons.append(preference_from_dict(json.loads(line), where=f"{path.name}:{number}"))
    return comparisons


training = read_comparisons("train")

# The model: a Hugging Face sequence classifier with one label, called on trees.
texts = (message["content"] for item in training for chat in item.conversations for message in chat)
tokenizer = train_tokenizer(texts, vocab_size=4096)
model = build_reward_model(MODEL, tokenizer, seed=0).model

# A conversation is rendered and tokenized as a whole, so that its tokens are those that a plain row
# would have.
renderer = Renderer(tokenizer)


def score(comparisons: Sequence[Preference]) -> tuple[torch.Tensor, int, int]:
    """The scores (S,) of all completions, one comparison after another; tokens computed, and tokens
    of plain rows."""
    groups = [[renderer.encode(chat) for chat in item.conversations] for item in comparisons]
    # Each group becomes a tree. Its prompt is in the batch once, however many completions continue
    # it.
    batch = model.make_batch(groups)
    return model(batch), batch.num_computed_tokens, batch.num_row_tokens


def accuracy(comparisons: Sequence[Preference]) -> float:
    """The share of pairs whose better completion has the higher score."""
    model.eval()
    num_right = num_pairs = 0
    for start in range(0, len(comparisons), COMPARISONS_PER_STEP):
        chunk = comparisons[start : start + COMPARISONS_PER_STEP]
        with torch.no_grad():
            scores_S, _, _ = score(chunk)
        pairs = ranked_pairs([item.ranks for item in chunk])
        num_right += int((scores_S[pairs.better_P] > scores_S[pairs.worse_P]).sum())
        num_pairs += len(pairs.better_P)
    model.train()
    return num_right / num_pairs


optimizer = torch.optim.AdamW(
    model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.98)
)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
    optimizer, NUM_STEPS - 5, eta_min=LEARNING_RATE / 10
)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[5])
order = random.Random(0).sample(range(len(training)), len(training))
model.train()
for step in range(NUM_STEPS):
    chosen = [training[i] for i in order[step * COMPARISONS_PER_STEP :][:COMPARISONS_PER_STEP]]
    scores_S, computed_tokens, row_tokens = score(chosen)
    # Completions of equal rank are no pair; each comparison weighs the same, however many pairs it
    # has.
    pairs = ranked_pairs([item.ranks for item in chosen])
    loss = bradley_terry(scores_S, pairs) / pairs.num_units
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if (step + 1) % 13 == 0:
        print(
            f"step {step + 1:3}  loss {loss.item():.3f}  "
            f"{computed_tokens} tokens computed instead of {row_tokens} in plain rows"
        )

print(
    f"accuracy on held-out comparisons:            {accuracy(read_comparisons('validation')):.1%}"
)
print(
    f"the same where length says nothing about it: {accuracy(read_comparisons('length_controlled')):.1%}"
)
