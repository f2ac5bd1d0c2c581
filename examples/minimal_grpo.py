"""GRPO from top to bottom: sample -> reward -> advantage -> loss -> step.

    python examples/minimal_grpo.py

This is the core of `treeward grpo` in one file, to be read and changed: no configuration, no
checkpoints, no report. A small policy first imitates the bundled data's completions, good and bad
ones alike (supervised fine-tuning). Then it is optimised against a rule that knows the true quality
of a completion: right or wrong, in the format that was asked for, courteous. To optimise against a
reward model instead, put its scores in the place of `gold_quality`:
`treeward.Scorer.load("results/quickstart/final").score_completions(context, completions)`.
"""

from __future__ import annotations

import json
import random

import torch
from gold import gold_quality
from imitation import SMALL_POLICY, imitate

from treeward.config.grpo import GRPOConfig, PolicyLossConfig
from treeward.data.bundled import bundled_path
from treeward.data.rendering import Renderer
from treeward.data.tokenizers import train_tokenizer
from treeward.model.loading import build_policy
from treeward.rl.advantages import advantages
from treeward.rl.policy_loss import policy_loss
from treeward.rl.sampling import SampledRow, sample, uniforms

PROMPTS_PER_STEP = 16
COMPLETIONS_PER_PROMPT = 8
MAX_NEW_TOKENS = 48
NUM_STEPS = 40
LEARNING_RATE = 1e-4

rows = [json.loads(line) for line in bundled_path("train").read_text(encoding="utf-8").splitlines()]
texts = [message["content"] for row in rows for message in row["context"]]
texts += [item["completion"][0]["content"] for row in rows for item in row["completions"]]
tokenizer = train_tokenizer(texts, vocab_size=4096)
renderer = Renderer(tokenizer)
policy = build_policy(SMALL_POLICY, tokenizer, seed=0).model

# Supervised fine-tuning, so that there is something to optimise. A prompt is computed once for all
# its completions.
groups = []
for row in rows:
    prompt = renderer.encode_prompt(row["context"])
    chats = [[*row["context"], *item["completion"]] for item in row["completions"]]
    groups.append([(prompt, renderer.encode(chat)[len(prompt) :]) for chat in chats])
policy.train()
imitate(policy, groups, epochs=2)

# The reference is the policy before its first step. The loss keeps the policy near it.
reference = build_policy(SMALL_POLICY, tokenizer, seed=0).model
reference.load_state_dict(policy.state_dict())
reference.eval()

loss_config = PolicyLossConfig(reference_policy_kl_penalty=0.01)
optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
prompts = [row["context"] for row in rows]
for step in range(NUM_STEPS):
    chosen = random.Random(step).sample(prompts, PROMPTS_PER_STEP)

    # Sample. The rows of a prompt share its keys and values.
    policy.eval()
    samples: list[list[SampledRow]] = []
    for p, context in enumerate(chosen):
        prompt_ids = tuple(renderer.encode_prompt(context))
        random_numbers = [
            uniforms(step, p, g, MAX_NEW_TOKENS) for g in range(COMPLETIONS_PER_PROMPT)
        ]
        samples.append(
            [SampledRow(prompt_ids, MAX_NEW_TOKENS, numbers) for numbers in random_numbers]
        )
    sample(
        policy,
        [row for group in samples for row in group],
        ended=lambda token_ids: token_ids[-1] == tokenizer.eos_token_id,
    )

    # Reward each completion by itself, (P, G).
    rewards_PG = torch.zeros(PROMPTS_PER_STEP, COMPLETIONS_PER_PROMPT)
    for p, context in enumerate(chosen):
        for g, row in enumerate(samples[p]):
            completion = str(tokenizer.decode(row.token_ids, skip_special_tokens=True))
            rewards_PG[p, g] = gold_quality(context, completion)

    # How much better than the others of its group: (reward - mean) / std.
    advantages_PG = advantages(rewards_PG, GRPOConfig())

    # Learn. The completions of a prompt are one tree, so that the prompt is computed once here too.
    policy.train()
    sequences = [[[*row.prompt_ids, *row.token_ids] for row in group] for group in samples]
    prompt_lengths = [[len(row.prompt_ids) for row in group] for group in samples]
    with torch.no_grad():
        reference_SL = reference.log_probs(sequences, prompt_lengths).values_SL
    log_probs = policy.log_probs(sequences, prompt_lengths)
    total, sums = policy_loss(
        log_probs.values_SL,
        log_probs.values_SL.detach(),  # one step a batch, so the policy that sampled is the policy itself
        reference_SL,
        advantages_PG.flatten(),
        log_probs.mask_SL,
        loss_config,
    )
    (total / log_probs.mask_SL.sum()).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 5 == 0:
        print(f"step {step + 1:2}  reward {rewards_PG.mean():.3f}  KL {sums.means()['kl']:.4f}")
