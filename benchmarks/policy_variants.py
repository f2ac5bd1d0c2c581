"""One update of a policy as each program makes it, and the completions that all of them learn from.

    work = make_work(prompts, tokenizer, Setting(completions=8, prompt=128, completion=128), 4)
    variant = our_variant(PolicyModel, policy, reference, work)
    variant.update()                  # what `policy_update.py` times
    loss, gradients = variant.gradients()

`our_variant` is treeward on trees or on packed rows. `grouper_variant` and `trl_update` call
PrefixGrouper and GRPOTrainer as their own code does.

Shapes: P prompts, G completions to each, S completions of a micro-batch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    TRL_PENALTY,
)
from datasets import Dataset
from grouper import GroupedBatch, GroupedPolicy
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import pad

from treeward.config.grpo import GRPOConfig as GRPOSection
from treeward.config.grpo import PolicyLossConfig
from treeward.config.policy import OptimizerConfig
from treeward.data.conversation import Message
from treeward.data.encoding import count_tree_tokens
from treeward.data.prompt_sets import Prompt
from treeward.data.rendering import Renderer
from treeward.model.policy_model import PolicyModel
from treeward.rl.advantages import advantages
from treeward.rl.generation import CompletionGroup, SampledCompletion
from treeward.rl.policy_loss import UpdateMetrics, policy_loss
from treeward.rl.update import PolicyUpdater
from treeward.training.optimisation import build_optimizer
from treeward.tree.batch import TreeBatch
from treeward.tree.plan import plan_micro_batches
from treeward.tree.token_tree import TokenIds

BETA = 0.05
MICRO_BATCH_TOKENS = 4096
LEARNING_RATE = 1e-6
Gradients = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Setting:
    """G completions to each prompt, and tokens of prompts and (at most) of completions."""

    completions: int
    prompt: int
    completion: int


@dataclass(frozen=True, slots=True)
class Work:
    """What one update learns from: P groups with their advantages (P, G)."""

    groups: tuple[CompletionGroup, ...]
    advantages_PG: Tensor

    @property
    def alone(self) -> Work:
        """The same with every completion in a group of its own."""
        groups = []
        for g in self.groups:
            for completion in g.completions:
                groups.append(CompletionGroup(g.prompt, g.prompt_ids, (completion,)))
        return Work(tuple(groups), self.advantages_PG.reshape(-1, 1))

    @property
    def num_tokens(self) -> int:
        """Of the completions."""
        return sum(
            len(completion.token_ids) for group in self.groups for completion in group.completions
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """`log_probs`: of all completions without gradients (ours): the tokens computed. `update`: one
    step.

    `gradients`: of the policy as it is, before clipping, without a step; with the loss.
    """

    update: Callable[[], object]
    gradients: Callable[[], tuple[float, Gradients]]
    log_probs: Callable[[], int] = lambda: 0


class PackedRows(PolicyModel):
    """Every completion is a tree of its own: what packing without sharing costs."""

    def pack(self, groups: Sequence[Sequence[TokenIds]], **_: object) -> TreeBatch:
        return TreeBatch.from_groups(
            [[sequence] for group in groups for sequence in group], min_shared=1 << 30
        )


def make_work(
    prompts: Sequence[tuple[str, list[str]]],
    tokenizer: PreTrainedTokenizerBase,
    setting: Setting,
    num_prompts: int,
) -> Work:
    """Completions cut where generation would have stopped; prompts with as many earlier turns as
    their length takes."""
    renderer = Renderer(tokenizer)
    groups: list[CompletionGroup] = []
    for n, (prompt, texts) in enumerate(prompts):
        if len(groups) == num_prompts or len(texts) < setting.completions:
            continue
        context: list[Message] = []
        prompt_ids: list[int] = []
        k = n
        while len(prompt_ids) < setting.prompt:
            k = (k + 1) % len(prompts)
            turn = [
                {"role": "user", "content": prompts[k][0]},
                {"role": "assistant", "content": prompts[k][1][0]},
            ]
            context = [*turn, *context]
            prompt_ids = _ids(renderer.encode([*context, {"role": "user", "content": prompt}]))
        kept = prompt_ids[-setting.prompt :]
        completions = [
            _ids(tokenizer(text, add_special_tokens=False)["input_ids"])
            for text in texts[: setting.completions]
        ]
        cut = [
            SampledCompletion(
                tuple(ids[: setting.completion]), "", truncated=len(ids) > setting.completion
            )
            for ids in completions
        ]
        groups.append(
            CompletionGroup(
                Prompt(({"role": "user", "content": prompt},), {}), tuple(kept), tuple(cut)
            )
        )
    rewards_PG = torch.randn(
        len(groups), setting.completions, generator=torch.Generator().manual_seed(0)
    )
    return Work(tuple(groups), advantages(rewards_PG, GRPOSection()))


def _ids(tokens: Iterable[Any]) -> list[int]:
    return [int(token) for token in tokens]


def moved(reference: PreTrainedModel) -> PreTrainedModel:
    """A policy whose matrices have left their reference a little, for a penalty with a gradient.
    With noise in gains Gemma's tokens are 50 nats off, where it overflows."""
    policy = deepcopy(reference)
    generator = torch.Generator(policy.device).manual_seed(1)
    with torch.no_grad():
        for parameter in (p for p in policy.parameters() if p.dim() > 1):
            noise = torch.randn(parameter.shape, generator=generator, device=policy.device)
            parameter.add_(noise, alpha=0.05 * float(parameter.std()))
    return policy


def our_variant(
    kind: type[PolicyModel],
    policy: PreTrainedModel,
    reference: PreTrainedModel,
    work: Work,
    *,
    dtype: torch.dtype = torch.float32,
) -> Variant:
    model = kind(deepcopy(policy), layout="tree")
    own = reference if dtype == torch.float32 else deepcopy(reference)  # one for all: memory
    frozen = kind(own, layout="tree")
    model.cast(dtype)
    frozen.cast(dtype)
    loss = PolicyLossConfig(reference_policy_kl_penalty=BETA, **TRL_PENALTY)
    used_PG = torch.ones_like(work.advantages_PG, dtype=torch.bool)
    sizes = [tree_tokens(group) for group in work.groups]
    plan = plan_micro_batches(sizes, max_tokens=MICRO_BATCH_TOKENS)

    def updater(optimizer: torch.optim.Optimizer, max_grad_norm: float | None) -> PolicyUpdater:
        return PolicyUpdater(
            model,
            optimizer,
            reference=frozen,
            loss=loss,
            micro_batch_tokens=MICRO_BATCH_TOKENS,
            max_grad_norm=max_grad_norm,
        )

    timed = updater(build_optimizer(model, OptimizerConfig(kwargs={"lr": LEARNING_RATE})), 1.0)

    def learn(with_updater: PolicyUpdater) -> UpdateMetrics:
        return with_updater.learn(work.groups, work.advantages_PG, used_PG)

    def gradients() -> tuple[float, Gradients]:
        found: Gradients = {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.register_step_pre_hook(lambda *_: found.update(_gradients(model.hf)))
        return learn(updater(optimizer, None)).means()["loss"], found

    @torch.no_grad()
    def log_probs() -> int:
        computed = 0
        for members in plan:
            groups = [work.groups[i] for i in members]
            lengths = [[len(group.prompt_ids)] * len(group.completions) for group in groups]
            computed += model.log_probs(
                [sequences_of(group) for group in groups], lengths
            ).num_computed_tokens
        return computed

    model.train()
    return Variant(lambda: learn(timed), gradients, log_probs)


def grouper_variant(
    policy: PreTrainedModel, reference: PreTrainedModel, work: Work, *, all_logits: bool
) -> Variant:
    model = GroupedPolicy(deepcopy(policy), all_logits=all_logits)
    frozen = GroupedPolicy(deepcopy(reference).requires_grad_(False), all_logits=all_logits)
    loss = PolicyLossConfig(reference_policy_kl_penalty=BETA, **TRL_PENALTY)
    plan = plan_micro_batches(
        [tree_tokens(group) for group in work.groups], max_tokens=MICRO_BATCH_TOKENS
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    model.train()

    def backward() -> Tensor:
        total = torch.zeros((), device=policy.device)
        for members in plan:
            batch = GroupedBatch.from_groups(
                [work.groups[i] for i in members], policy.device, torch.float32
            )
            with torch.no_grad():
                reference_SL = frozen.log_probs(batch)
            values_SL = model.log_probs(batch)
            advantages_S = work.advantages_PG[members].flatten().to(values_SL)
            part, _ = policy_loss(
                values_SL, values_SL.detach(), reference_SL, advantages_S, batch.mask_SL, loss
            )
            (part / work.num_tokens).backward()
            total += part.detach() / work.num_tokens
        return total

    def gradients() -> tuple[float, Gradients]:
        total = float(backward())
        found = _gradients(model.hf)
        model.zero_grad()
        return total, found

    def update() -> None:
        backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Variant(update, gradients)


def trl_update(
    policy: PreTrainedModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    work: Work,
    *,
    default: bool,
    kind: Any = GRPOTrainer,
) -> Variant:
    """TRL's trainer, or a subclass of it, given the completions as its own.

    `folder`: the reference. `default`: bfloat16, activation checkpointing.
    """
    hf = deepcopy(policy)
    hf.set_attn_implementation("sdpa")
    hf.config._name_or_path = str(folder)  # where it reads its reference
    num_completions = len(work.groups[0].completions)
    rows = [(group, completion) for group in work.groups for completion in group.completions]
    options: dict[str, Any] = {} if default else {"bf16": False, "gradient_checkpointing": False}
    batch_size = GRPOConfig.per_device_train_batch_size  # its default
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        report_to=[],
        use_cpu=policy.device.type == "cpu",
        beta=BETA,
        # a differentiable weight on the penalty: another objective, at the same cost
        use_bias_correction_kl=False,
        num_generations=num_completions,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=len(rows) // batch_size,
        **options,
    )
    trainer = kind(
        model=hf,
        reward_funcs=lambda **_: [],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "unused"}] * len(work.groups)),
        processing_class=tokenizer,
    )
    trainer._generate_and_score_completions = partial(
        _trl_batch, trainer, rows, work.advantages_PG.flatten()
    )
    # What `trainer.train()` does before its first step:
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    if default:
        hf.gradient_checkpointing_enable(config.gradient_checkpointing_kwargs)
    model = trainer.accelerator.prepare_model(hf)
    optimizer = torch.optim.AdamW(hf.parameters(), lr=LEARNING_RATE, fused=True)
    hf.train()

    def backward() -> list[Tensor]:
        num_tokens = torch.tensor(work.num_tokens, device=hf.device)
        return [
            trainer.training_step(model, None, num_tokens)
            for _ in range(config.gradient_accumulation_steps)
        ]

    def gradients() -> tuple[float, Gradients]:
        loss = sum(map(float, backward()))
        found = _gradients(hf)
        hf.zero_grad()
        return loss, found

    def update() -> None:
        backward()
        torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Variant(update, gradients)


@torch.no_grad()
def _trl_batch(
    trainer: GRPOTrainer,
    rows: Sequence[tuple[CompletionGroup, SampledCompletion]],
    advantages_S: Tensor,
    _: object,
) -> dict[str, Tensor]:
    """What GRPOTrainer makes of generated tokens, in its own way: its padding, its reference's
    log-probabilities."""
    padding = trainer._tokenizer.pad_token_id
    device = trainer.accelerator.device
    prompts = [torch.tensor(group.prompt_ids, device=device) for group, _ in rows]
    completions = [torch.tensor(completion.token_ids, device=device) for _, completion in rows]
    batch = {
        "prompt_ids": pad(prompts, padding_value=padding, padding_side="left"),
        "prompt_mask": pad(
            [torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left"
        ),
        "completion_ids": pad(completions, padding_value=padding, padding_side="right"),
        "completion_mask": pad(
            [torch.ones_like(ids) for ids in completions], padding_value=0, padding_side="right"
        ),
        "advantages": advantages_S.to(device),
        "num_items_in_batch": torch.tensor(sum(map(len, completions)), device=device),
    }
    batch["ref_per_token_logps"] = trainer._get_per_token_logps_and_entropies(
        trainer.ref_model,
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
        batch["completion_ids"].shape[1],
        trainer.args.per_device_train_batch_size,
    )[0]
    return batch


def _gradients(model: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def sequences_of(group: CompletionGroup) -> list[list[int]]:
    return [list(group.sequence(g)) for g in range(len(group.completions))]


def tree_tokens(group: CompletionGroup) -> int:
    """Tokens when each is computed once."""
    return count_tree_tokens(
        [np.asarray(sequence, dtype=np.int32) for sequence in sequences_of(group)]
    )
