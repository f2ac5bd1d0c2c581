"""A policy update on prefix trees against treeward's own packed rows, TRL's GRPOTrainer and PrefixGrouper.

    python benchmarks/policy_update.py [--size xs|s|m|l | --model FOLDER] [--float32] [--completions 4 8 16]
                                        [--prompt-tokens 128 512] [--prompts 4] [--rounds 5] [--json FILE]
                                        [--device cuda] [--profile]

Real completions of many models to real prompts (alpaca_eval), prompts as long as the completions and four times as
long. Two things are timed: log-probabilities without gradients, and a whole update with a KL penalty: the reference,
forward, backward, clipping and fused AdamW. "Packed rows" is the same code with every completion a tree of its own, in
micro-batches of as many tokens. For TRL it is the peer's own padding, reference pass, shuffling, `training_step` and
loss (`dapo`, its default: the mean over all tokens, as ours; without its correction of the penalty's gradient, which
costs nothing), without its data loader, generation and logging. `grouper.py` says how PrefixGrouper is called: as its
README does, and with our head, loss and micro-batches, which leaves its attention and its padding to compare.

Before anything is timed, loss and gradients of the float32 variants must be equal to 1e-5 (of a pretrained model 1e-4).
"By FLOPs" is what the operations of backbone, attention and head come to: the head computes every completion token
either way, so less can be saved than the ratio of row tokens to tree tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    SIZES,
    TRL_PENALTY,
    VOCAB_SIZE,
    add_model,
    add_options,
    build_causal,
    describe,
    flops,
    interleave,
    model_name,
    print_profile,
    tokenizer_of,
    use_device,
)
from datasets import Dataset
from grouper import GroupedBatch, GroupedPolicy
from scoring import load_prompts
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
from treeward.tables import Column, results_table
from treeward.training.optimisation import build_optimizer
from treeward.tree.batch import TreeBatch
from treeward.tree.plan import plan_micro_batches
from treeward.tree.token_tree import TokenIds

GATE_SHARE, GATE_TRL, GATE_GROUPER = 0.9, 2.0, 1.8
"""Of the ratio of row tokens to tree tokens; x TRL at 8 completions and prompts as long as completions; x PrefixGrouper
at 8 completions."""

EXACT, EXACT_PRETRAINED = 1e-5, 1e-4
BETA = 0.05
MICRO_BATCH_TOKENS = 4096
LEARNING_RATE = 1e-6

TREE, PACKED, TREE_BF16 = "tree", "packed rows", "tree, bfloat16"
TRL, TRL_DEFAULT = "TRL, float32", "TRL, default"
GROUPER, GROUPER_OUR_HEAD = "PrefixGrouper", "PrefixGrouper, our head"
FLOAT32 = (PACKED, TRL, GROUPER, GROUPER_OUR_HEAD)

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
        groups = tuple(
            CompletionGroup(g.prompt, g.prompt_ids, (completion,))
            for g in self.groups
            for completion in g.completions
        )
        return Work(groups, self.advantages_PG.reshape(-1, 1))

    @property
    def num_tokens(self) -> int:
        """Of the completions."""
        return sum(
            len(completion.token_ids) for group in self.groups for completion in group.completions
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """`log_probs`: of all completions without gradients (ours): the tokens computed. `update`: one step.

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


def main() -> None:
    arguments = parse()
    device = use_device(arguments.device)
    data, prompts = load_prompts(arguments.size)
    texts = (text for prompt, completions in prompts for text in (prompt, *completions))
    tokenizer = tokenizer_of(arguments.size, texts, arguments.vocabulary)
    print(f"{data}, {model_name(arguments.size)}, {len(tokenizer)} tokens, {describe(device)}")
    print(
        f"{arguments.prompts} prompts an update, micro-batches of {MICRO_BATCH_TOKENS} computed tokens"
    )
    rows = []
    for prompt, completions in product(arguments.prompt_tokens, arguments.completions):
        work = make_work(prompts, tokenizer, Setting(completions, prompt, 128), arguments.prompts)
        rows.append(
            measure(arguments.size, tokenizer, work, arguments.rounds, device=device, profile=arguments.profile,
                    few=arguments.float32, exact=EXACT if arguments.size in SIZES else EXACT_PRETRAINED)
        )  # fmt: skip
        if arguments.json is not None:  # after each: a run takes long
            arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print_tables(rows)


def make_work(
    prompts: Sequence[tuple[str, list[str]]],
    tokenizer: PreTrainedTokenizerBase,
    setting: Setting,
    num_prompts: int,
) -> Work:
    """Completions cut where generation would have stopped; prompts with as many earlier turns as their length takes."""
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


def measure(
    size: str,
    tokenizer: PreTrainedTokenizerBase,
    work: Work,
    rounds: int,
    warmup: int = 1,
    *,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    profile: bool = False,
    exact: float = EXACT,
    few: bool = False,
) -> dict[str, Any]:
    """Everything about one setting; `few`: without PrefixGrouper and bfloat16. Raises `RuntimeError` where variants do
    not compute the same."""
    reference = build_causal(size, tokenizer, device)
    policy = moved(reference)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        variants = {
            TREE: our_variant(PolicyModel, policy, reference, work),
            PACKED: our_variant(PackedRows, policy, reference, work.alone),
            TRL: trl_update(policy, Path(folder), tokenizer, work, default=False),
        }
        if not few:
            variants |= {
                TREE_BF16: our_variant(PolicyModel, policy, reference, work, dtype=torch.bfloat16),
                TRL_DEFAULT: trl_update(policy, Path(folder), tokenizer, work, default=True),
                GROUPER: _grouper(policy, reference, work, all_logits=True),
                GROUPER_OUR_HEAD: _grouper(policy, reference, work, all_logits=False),
            }
    differences = check_exact(variants, exact)
    calls: dict[str, Callable[[int], object]] = {
        **{
            f"log_probs {name}": partial(_ignore_round, variants[name].log_probs)
            for name in (TREE, PACKED)
        },
        **{
            f"update {name}": partial(_ignore_round, variant.update)
            for name, variant in variants.items()
        },
    }
    seconds = interleave(calls, rounds, warmup, device)
    if profile:
        print_profile("an update on trees", variants[TREE].update, device)
    counts = count_tokens(work, policy)
    row: dict[str, Any] = {
        "completions": len(work.groups[0].completions),
        "prompt": len(work.groups[0].prompt_ids),
        "completion": work.num_tokens / sum(len(group.completions) for group in work.groups),
        **counts,
        **{f"difference {name}": difference for name, difference in differences.items()},
        **{f"ms {name}": 1000 * statistics.median(values) for name, values in seconds.items()},
    }
    for what, base, ours in [
        ("log_probs", PACKED, TREE),
        ("update", PACKED, TREE),
        ("update", TRL, TREE),
        ("update", TRL_DEFAULT, TREE_BF16),
        ("update", GROUPER, TREE),
        ("update", GROUPER_OUR_HEAD, TREE),
    ]:
        if base in variants:
            row[f"{what} x {base}"] = _ratio(seconds[f"{what} {base}"], seconds[f"{what} {ours}"])
    return row


def _ignore_round(call: Callable[[], object], number: int) -> object:
    return call()


def moved(reference: PreTrainedModel) -> PreTrainedModel:
    """A policy whose matrices have left their reference a little, for a penalty with a gradient. With noise in gains
    Gemma's tokens are 50 nats off, where it overflows."""
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
    sizes = [_tree_tokens(group) for group in work.groups]
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
                [_sequences(group) for group in groups], lengths
            ).num_computed_tokens
        return computed

    model.train()
    return Variant(lambda: learn(timed), gradients, log_probs)


def _grouper(
    policy: PreTrainedModel, reference: PreTrainedModel, work: Work, *, all_logits: bool
) -> Variant:
    model = GroupedPolicy(deepcopy(policy), all_logits=all_logits)
    frozen = GroupedPolicy(deepcopy(reference).requires_grad_(False), all_logits=all_logits)
    loss = PolicyLossConfig(reference_policy_kl_penalty=BETA, **TRL_PENALTY)
    plan = plan_micro_batches(
        [_tree_tokens(group) for group in work.groups], max_tokens=MICRO_BATCH_TOKENS
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
        use_bias_correction_kl=False,  # a differentiable weight on the penalty: another objective, at the same cost
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
    """What GRPOTrainer makes of generated tokens, in its own way: its padding, its reference's log-probabilities."""
    padding, device = trainer._tokenizer.pad_token_id, trainer.accelerator.device
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


def check_exact(variants: dict[str, Variant], limit: float = EXACT) -> dict[str, float]:
    """How far each is off from the tree: the larger of the relative differences of loss and gradient.

    Raises `RuntimeError` where a float32 variant is off by more than `limit`.
    """
    loss, gradients = variants[TREE].gradients()
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    found = {}
    for name, variant in variants.items():
        if name == TREE:
            continue
        other_loss, others = variant.gradients()
        if others.keys() != gradients.keys():
            raise RuntimeError(
                f"{name} has gradients of other parameters: {others.keys() ^ gradients.keys()}"
            )
        off = torch.stack(
            [(others[key] - gradient).norm() for key, gradient in gradients.items()]
        ).norm()
        found[name] = max(abs(other_loss - loss) / abs(loss), float(off / norm))
        if name in FLOAT32 and not found[name] <= limit:
            raise RuntimeError(
                f"{name} is off by {found[name]:.1e}: loss {other_loss} for {loss}, limit {limit}"
            )
    return found


def _sequences(group: CompletionGroup) -> list[list[int]]:
    return [list(group.sequence(g)) for g in range(len(group.completions))]


def _tree_tokens(group: CompletionGroup) -> int:
    """Tokens when each is computed once."""
    return count_tree_tokens(
        [np.asarray(sequence, dtype=np.int32) for sequence in _sequences(group)]
    )


def count_tokens(work: Work, policy: PreTrainedModel) -> dict[str, float]:
    """Tokens of the backbone and of the head, and the saving that they, and all operations, allow."""
    rows = sum(group.num_row_tokens for group in work.groups)
    trees = sum(map(_tree_tokens, work.groups))
    lengths = [len(sequence) for group in work.groups for sequence in _sequences(group)]
    # what completions share is predicted once
    heads = trees - sum(len(group.prompt_ids) for group in work.groups)
    completions = [completion for group in work.groups for completion in group.completions]
    padded = max(len(group.prompt_ids) for group in work.groups) + max(
        len(completion.token_ids) for completion in completions
    )
    batches = [TreeBatch.from_groups([_sequences(group)]) for group in work.groups]
    row_pairs = sum(length * (length + 1) // 2 for length in lengths)
    tree_pairs = sum(int((batch.layout.positions_T + 1).sum()) for batch in batches)
    found = {
        "row tokens": rows,
        "tree tokens": trees,
        "padded tokens": len(completions) * padded,
        "row head tokens": work.num_tokens,
        "tree head tokens": heads,
        "tokens": rows / trees,
    }
    # An update has two forward passes (the reference's too) and a backward of two; in it attention is computed 2.5
    # times and the head's logits once more.
    for what, passes in [("log_probs", (1.0, 1.0, 1.0)), ("update", (4.0, 4.5, 5.0))]:
        by_rows = flops(policy, rows, row_pairs, work.num_tokens, passes)
        found[f"{what} by FLOPs"] = by_rows / flops(policy, trees, tree_pairs, heads, passes)
    return found


def _ratio(base: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """(of the medians, least, most of a round)."""
    rounds = [b / o for b, o in zip(base, other, strict=True)]
    return statistics.median(base) / statistics.median(other), min(rounds), max(rounds)


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    shown = []
    for row in rows:
        ratios = {
            key: "{:.2f} ({:.2f}..{:.2f})".format(*value)
            for key, value in row.items()
            if " x " in key
        }
        shares = {
            f"{what} share": row[f"{what} x {PACKED}"][0] / row["tokens"]
            for what in ("log_probs", "update")
        }
        shown.append(row | ratios | shares)
    setting = [
        Column("completions", title="G"),
        Column("prompt"),
        Column("completion", format=".0f"),
    ]
    print("\nAgainst treeward's own packed rows (median over rounds, and least..most)\n")
    print(
        results_table(
            shown,
            [
                *setting,
                Column("tokens", title="row / tree tokens", format=".2f"),
                Column("log_probs by FLOPs", title="by FLOPs", format=".2f"),
                Column(f"log_probs x {PACKED}", title="log-probabilities x"),
                Column("log_probs share", title="of the tokens", format=".0%"),
                Column("update by FLOPs", title="by FLOPs", format=".2f"),
                Column(f"update x {PACKED}", title="update x"),
                Column("update share", title="of the tokens", format=".0%"),
                Column(f"difference {PACKED}", title="difference", format=".1e"),
            ],
        )
    )
    print(
        "\nAgainst the update of PrefixGrouper and of GRPOTrainer, whose default is bfloat16 with checkpointing\n"
    )
    columns = [
        Column(f"ms update {TREE}", title="ms, float32", format=".0f"),
        Column(f"ms update {GROUPER}", title="PrefixGrouper ms", format=".0f"),
        Column(f"update x {GROUPER}", title="x PrefixGrouper"),
        Column(f"update x {GROUPER_OUR_HEAD}", title="x it with our head"),
        Column(f"difference {GROUPER}", title="difference", format=".1e"),
        Column(f"ms update {TRL}", title="TRL ms", format=".0f"),
        Column(f"update x {TRL}", title="x TRL"),
        Column(f"difference {TRL}", title="difference", format=".1e"),
        Column(f"ms update {TREE_BF16}", title="ms, bfloat16", format=".0f"),
        Column(f"ms update {TRL_DEFAULT}", title="TRL's default ms", format=".0f"),
        Column(f"update x {TRL_DEFAULT}", title="x TRL's default"),
    ]
    print(
        results_table(shown, [*setting, *(column for column in columns if column.key in shown[0])])
    )
    print()
    for gate, passed in gates(rows):
        print(f"{'passed' if passed else 'MISSED'}  {gate}")


def gates(rows: Sequence[dict[str, Any]]) -> list[tuple[str, bool]]:
    """What is promised, and whether it was kept."""
    found = []
    for row in rows:
        setting = f"{row['completions']} completions, prompts of {row['prompt']}"
        for what in ("log_probs", "update"):
            share = row[f"{what} x {PACKED}"][0] / row["tokens"]
            allowed = row[f"{what} by FLOPs"] / row["tokens"]
            gate = f"{what}, {setting}: {share:.0%} of the saving of tokens (by FLOPs at most {allowed:.0%})"
            found.append((f"{gate}; promised {GATE_SHARE:.0%}", share >= GATE_SHARE))
        if row["completions"] == 8 and row["prompt"] <= 1.25 * row["completion"]:
            for base in [base for base in (TRL, TRL_DEFAULT) if f"update x {base}" in row]:
                times = row[f"update x {base}"][0]
                found.append(
                    (
                        f"update, {setting}: {times:.2f} x {base}; promised {GATE_TRL:.0f} x",
                        times >= GATE_TRL,
                    )
                )
        if row["completions"] == 8 and f"update x {GROUPER}" in row:
            times = row[f"update x {GROUPER}"][0]
            found.append(
                (
                    f"update, {setting}: {times:.2f} x {GROUPER}; goal {GATE_GROUPER}",
                    times >= GATE_GROUPER,
                )
            )
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model(
        parser,
        few="only trees, packed rows and TRL in float32, for models of which few fit into memory",
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=VOCAB_SIZE,
        help="of the tokenizer: how much the head costs",
    )
    parser.add_argument(
        "--prompts", type=int, default=4, help="an update; with 4 completions each, an even number"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--completions", type=int, nargs="+", default=[4, 8, 16], help="to each prompt"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        nargs="+",
        default=[128, 512],
        help="completions have at most 128",
    )
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
