"""A whole GRPO step, sampling included, against the whole step of TRL's GRPOTrainer.

    python benchmarks/grpo_step.py [--size xs|s|m|l | --model FOLDER] [--prompts 8] [--completions 8]
                                    [--prompt-tokens 90] [--new-tokens 64] [--rounds 3] [--float32] [--json FILE]
                                    [--device cuda] [--profile]

A step draws the prompts, samples the completions, rewards them (a count of letters, which costs
nothing), computes the reference's log-probabilities, and updates: forward, backward, clipping,
AdamW. Both sides start from the same weights and have the same prompts, token by token, and as many
new tokens for each: no completion ends early. Treeward's side is `treeward.rl.grpo`'s own step with
what it logs; TRL's is its `training_step` as often as it accumulates gradients, without its data
loader and logging, with a KL penalty as ours and otherwise its defaults: its batches of 8, and in
"TRL, default" bfloat16 with activation checkpointing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import (
    add_model,
    add_options,
    build_causal,
    describe,
    interleave,
    model_name,
    print_profile,
    tokenizer_of,
    use_device,
)
from datasets import Dataset
from scoring import load_prompts
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from treeward.config.load import load_grpo_config
from treeward.rl.generation import LocalGenerator
from treeward.rl.grpo import GRPORun
from treeward.rl.setup import set_up_grpo
from treeward.tables import Column, results_table

GOAL = 4.0
"""x TRL in float32."""

BETA = 0.05
LEARNING_RATE = 1e-6
TREE, TREE_BF16, TRL, TRL_DEFAULT = "treeward", "treeward, bfloat16", "TRL, float32", "TRL, default"

CONFIG = """
grpo: {{num_prompts_per_step: {prompts}, num_generations_per_prompt: {completions}, max_num_epochs: 100000,
       max_num_steps: 100000, val_period: 0}}
loss_fn: {{reference_policy_kl_penalty: {beta}, reference_policy_kl_type: k3_unweighted}}
policy:
  model_name: {folder}
  train_micro_batch_tokens: 4096
  max_total_sequence_length: {length}
  precision: {precision}
  optimizer: {{kwargs: {{lr: {rate}}}}}
  scheduler: {{name: constant, warmup_steps: 0}}
  generation: {{max_new_tokens: {new_tokens}}}
data: {{train: {{dataset_name: PromptDataset, data_path: {folder}/prompts.jsonl}}}}
env: {{letters: {{type: custom, function: "grpo_step:letters"}}}}
checkpointing: {{enabled: false, checkpoint_dir: {folder}/checkpoints}}
logger: {{log_dir: {folder}/logs}}
"""

Prompts = list[list[int]]
Timed = dict[str, float]


def letters(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """The reward of both sides."""
    return [float(str(completion).count("e")) for completion in completions]


def main() -> None:
    arguments = parse()
    device = use_device(arguments.device)
    data, found = load_prompts(arguments.size)
    texts = (text for prompt, completions in found for text in (prompt, *completions))
    tokenizer = tokenizer_of(arguments.size, texts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_causal(arguments.size, tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _write_prompts(folder, [prompt for prompt, _ in found], tokenizer, arguments)
        runs = {TREE: _ours(folder, arguments, "float32")}
        prompts = [ids.tolist() for ids in runs[TREE].setup.prompts.token_ids]
        trainers = {TRL: _trl(folder, tokenizer, prompts, arguments, default=False)}
        calls: dict[str, Callable[[int], object]] = {
            TREE: lambda n: runs[TREE].step(n + 1),
            TRL: lambda _: trainers[TRL][1](),
        }
        if not arguments.float32:
            runs[TREE_BF16] = _ours(folder, arguments, "bfloat16")
            trainers[TRL_DEFAULT] = _trl(folder, tokenizer, prompts, arguments, default=True)
            calls[TREE_BF16] = lambda n: runs[TREE_BF16].step(n + 1)
            calls[TRL_DEFAULT] = lambda _: trainers[TRL_DEFAULT][1]()
        print(
            f"{data}, {model_name(arguments.size)}, {len(tokenizer)} tokens, {describe(device)}; "
            f"{arguments.prompts} prompts of {arguments.prompt_tokens} tokens, "
            f"{arguments.completions} completions of "
            f"{arguments.new_tokens}"
        )
        seconds = interleave(calls, arguments.rounds, device=device)
        print_ratios(seconds)
        after = arguments.rounds + 2
        with measured(_parts_of_ours(runs[TREE]), device) as ours:
            runs[TREE].step(after)
        with measured(_parts_of_trl(trainers[TRL][0]), device) as theirs:
            trainers[TRL][1]()
        print_parts(ours, theirs)
        lengths = trainers[TRL][0]._metrics["train"]["completions/mean_length"]
        if set(lengths) != {arguments.new_tokens}:
            raise RuntimeError(
                f"TRL's completions have {lengths} tokens on average, not {arguments.new_tokens}"
            )
        if arguments.profile:
            print_profile("a step of treeward", lambda: runs[TREE].step(after + 1), device)
        for run in runs.values():
            run.close()
    if arguments.json is not None:
        found_json = {"seconds": seconds, TREE: ours, TRL: theirs}
        arguments.json.write_text(json.dumps(found_json, indent=1) + "\n", encoding="utf-8")


def _write_prompts(
    folder: Path,
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    arguments: argparse.Namespace,
) -> None:
    """Prompts of more tokens than needed; they are cut later."""
    lines = []
    k = 0
    for _ in range(arguments.prompts):
        text = texts[k % len(texts)]
        while len(tokenizer(text)["input_ids"]) < arguments.prompt_tokens:
            k += 1
            text += "\n" + texts[k % len(texts)]
        k += 1
        lines.append(json.dumps({"prompt": text}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")


def _ours(folder: Path, arguments: argparse.Namespace, precision: str) -> GRPORun:
    """A run that is set up as `treeward grpo` does, its prompts cut, its completions without an
    end."""
    file = folder / f"{precision}.yaml"
    longest = max(
        len(line) for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    )
    values = {
        **vars(arguments),
        "folder": folder,
        "precision": precision,
        "beta": BETA,
        "rate": LEARNING_RATE,
    }
    file.write_text(
        CONFIG.format(**values, length=min(8192, longest + arguments.new_tokens)), encoding="utf-8"
    )
    setup = set_up_grpo(load_grpo_config(file, ()))
    cut = tuple(ids[-arguments.prompt_tokens :] for ids in setup.prompts.token_ids)
    generation = setup.config.policy.generation
    generator = LocalGenerator(setup.policy, setup.tokenizer, generation, end_ids=[])
    return GRPORun(
        replace(setup, prompts=replace(setup.prompts, token_ids=cut), generator=generator)
    )


def _trl(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    arguments: argparse.Namespace,
    *,
    default: bool,
) -> tuple[GRPOTrainer, Callable[[], None]]:
    """TRL's trainer and its step. `default`: bfloat16, activation checkpointing."""
    num_rows = arguments.prompts * arguments.completions
    batch_size = GRPOConfig.per_device_train_batch_size  # its default
    options: dict[str, Any] = {} if default else {"bf16": False, "gradient_checkpointing": False}
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        report_to=[],
        use_cpu=arguments.device == "cpu" or not torch.cuda.is_available(),
        beta=BETA,
        num_generations=arguments.completions,
        max_completion_length=arguments.new_tokens,
        generation_kwargs={"min_new_tokens": arguments.new_tokens},
        per_device_train_batch_size=min(batch_size, num_rows),
        gradient_accumulation_steps=max(1, num_rows // batch_size),
        learning_rate=LEARNING_RATE,
        **options,
    )
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=hf,
        reward_funcs=letters,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": str(p)} for p in range(len(prompts))]),
        processing_class=tokenizer,
    )

    def tokens_of(prompts_of_rows: list[str]) -> Any:
        return [prompts[int(p)] for p in prompts_of_rows], None, {}

    trainer._tokenize_prompts = tokens_of  # type: ignore[method-assign, assignment]
    # What `trainer.train()` does before its first step:
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    if default:
        hf.gradient_checkpointing_enable(config.gradient_checkpointing_kwargs)
    trainer.model_wrapped = model = trainer.accelerator.prepare_model(hf)
    trainer.optimizer = optimizer = torch.optim.AdamW(hf.parameters(), lr=LEARNING_RATE, fused=True)
    hf.train()
    rows = [{"prompt": str(p)} for p in range(len(prompts)) for _ in range(arguments.completions)]

    def step() -> None:
        for _ in range(config.gradient_accumulation_steps):
            trainer.training_step(model, rows, None)
        torch.nn.utils.clip_grad_norm_(hf.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return trainer, step


def _parts_of_ours(run: GRPORun) -> list[tuple[str, object, str]]:
    setup = run.setup
    return [
        ("sampling", setup.generator, "generate"),
        ("rewards", setup.rewards, "reward"),
        ("reference, old policy", setup.updater, "evaluate"),
        ("forward", setup.updater, "micro_batch_loss"),
        ("optimiser", setup.updater.optimizer, "step"),
    ]


def _parts_of_trl(trainer: GRPOTrainer) -> list[tuple[str, object, str]]:
    return [
        ("sampling", trainer, "_generate"),
        ("rewards", trainer, "_calculate_rewards"),
        ("reference and forward", trainer, "_get_per_token_logps_and_entropies"),
        ("optimiser", trainer.optimizer, "step"),
    ]


@contextmanager
def measured(parts: Sequence[tuple[str, object, str]], device: torch.device) -> Iterator[Timed]:
    """Seconds that methods take, by name, and what is left of the whole; the device is idle before
    and after each."""
    took: Timed = {name: 0.0 for name, _, _ in parts}
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            wait()
            start = time.perf_counter()
            result = call(*args, **kwargs)
            wait()
            took[name] += time.perf_counter() - start
            return result

        return within

    for name, owner, method in parts:
        setattr(owner, method, timed(name, getattr(owner, method)))
    started = time.perf_counter()
    yield took
    wait()
    whole = time.perf_counter() - started
    for _, owner, method in parts:
        delattr(owner, method)
    took["backward and the rest"] = whole - sum(took.values())


def print_ratios(seconds: dict[str, list[float]]) -> None:
    rows = []
    for base, tree in ((TRL, TREE), (TRL_DEFAULT, TREE_BF16)):
        if base not in seconds:
            continue
        rounds = [b / o for b, o in zip(seconds[base], seconds[tree], strict=True)]
        medians = statistics.median(seconds[tree]), statistics.median(seconds[base])
        spread = f"{statistics.median(rounds):.2f} ({min(rounds):.2f}..{max(rounds):.2f})"
        rows.append(
            {"name": tree, "base": base, "ours": medians[0], "theirs": medians[1], "x": spread}
        )
    columns = [
        Column("name", title="step of"),
        Column("ours", title="s", format=".2f"),
        Column("base", title="against"),
        Column("theirs", title="s", format=".2f"),
        Column("x", title="times faster"),
    ]
    print(results_table(rows, columns))
    rounds = [b / o for b, o in zip(seconds[TRL], seconds[TREE], strict=True)]
    times = statistics.median(rounds)
    print(
        (
            f"\n{'passed' if times >= GOAL else 'MISSED'}  {times:.2f} x a step of TRL in "
            f"float32; goal {GOAL:.0f} x"
        ),
        flush=True,
    )


def print_parts(ours: Timed, theirs: Timed) -> None:
    print("\nWhere the time of one step in float32 goes\n")
    shares = []
    for of, took in ((TREE, ours), (TRL, theirs)):
        total = sum(took.values())
        for name, value in took.items():
            shares.append({"name": name, "of": of, "s": value, "share": value / total})
    shown = [Column("of", title="of"), Column("name", title="part"), Column("s", format=".2f")]
    print(results_table(shares, [*shown, Column("share", format=".0%")]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model(parser, few="without TRL's default and bfloat16")
    parser.add_argument("--prompts", type=int, default=8, help="a step")
    parser.add_argument(
        "--completions",
        type=int,
        default=8,
        help="to each prompt; with the prompts a multiple of 8",
    )
    parser.add_argument("--prompt-tokens", type=int, default=90)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    add_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
