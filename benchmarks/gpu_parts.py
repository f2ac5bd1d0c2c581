"""The parts of `gpu.py`: each is a function that adds rows to a report as it measures them.

The shapes are those of real models with random weights, in bfloat16 where nothing else is said:
Qwen2.5-0.5B, Llama-3.2-1B, Llama-3.1-8B (`common.SIZES`). Comparisons are those of HH harmless, or
drawn with its lengths.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    VOCAB_SIZE,
    build,
    flops,
    load_pairs,
    peak_bytes,
    print_profile,
    seconds_of,
    shared_data,
    use_device,
    utilisation,
)
from flash_rows import FlashBatch, FlashRows
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from treeward.config.policy import LoraConfig
from treeward.data.prompt_sets import Prompt
from treeward.data.tokenizers import train_tokenizer
from treeward.model.lora import add_adapters
from treeward.model.reward_model import RewardModel
from treeward.rl.generation import CompletionGroup, SampledCompletion
from treeward.tree.batch import TreeBatch

Pair = tuple[list[int], list[int]]

TREE = "treeward, tree"
QUANTILES = (0, 5, 10, 25, 50, 75, 90, 95, 99)
PREFIX_TOKENS = (9, 13, 15, 30, 95, 169, 269, 352, 520)
OWN_TOKENS = (1, 7, 10, 17, 32, 61, 102, 130, 230)
"""Of HH harmless with a vocabulary of 8192: what the two completions of a comparison share, and
what each adds."""

Errors = dict[str, tuple[float, float]]
Made = tuple[PreTrainedModel, Callable[[list[Pair]], Tensor]]
"""A model, and its step."""

ONE_LEVEL = "flash-pref's scheme: one level shared, FlashAttention"

NUM_SEEDS = 3
SLACK = 1.5
"""An error of a tree that is larger than so many times that of plain rows is named."""

# What tests/families.py changes where a kernel for GPUs would refuse its tiny heads.
_REAL_HEADS = {
    "qwen2": {"hidden_size": 256}, "qwen2_window": {"hidden_size": 256},
    "phi3": {"hidden_size": 256},
    "gpt_neox": {"hidden_size": 256}, "gpt2": {"n_embd": 256},
    "deepseek_v3": {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}  # fmt: skip


@dataclass
class Report:
    """Rows go to a file at once: a part that is ended keeps what it has measured."""

    device: torch.device
    tiny: bool
    rows: Path
    profile: bool = False

    def sizes(self, *names: str) -> list[str]:
        """Which shapes are measured: these, or a tiny one."""
        return ["tiny"] if self.tiny else list(names)

    def plan(self, setting: str, variants: Sequence[str]) -> None:
        """What will be measured; without a later `add` the table says that it was not."""
        for variant in variants:
            self._write({"setting": setting, "variant": variant})

    def add(self, setting: str, variant: str, **cells: Any) -> None:
        """`seconds`, `row_tokens` (of the plain rows), `utilisation`, `peak`, `note`; all may be
        left out."""
        self._write({"setting": setting, "variant": variant, **cells})

    def _write(self, row: dict[str, Any]) -> None:
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @contextmanager
    def attempt(self, setting: str, variant: str) -> Iterator[None]:
        """What fails is a note in the table, and its memory is free for the next one."""
        try:
            yield
        except Exception as error:
            self.add(setting, variant, note=_line(error))
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


def _line(error: BaseException) -> str:
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text[:160]}"


# -- exactness


class _Doubles(TorchFunctionMode):
    """Whatever a model computes in float32 in any case (norms, softmax, rotary encoding) is
    computed in float64."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def double(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        function = torch.Tensor.double if function is torch.Tensor.float else function
        return function(
            *map(double, args), **{key: double(value) for key, value in (kwargs or {}).items()}
        )


def exactness(report: Report) -> None:
    """Trees and padded rows of plain transformers against float64, of every family of the tests."""
    families = [*_tests().DECODERS, *_tests().HYBRIDS][: 3 if report.tiny else None]
    errors: dict[str, dict[str, Errors]] = {name: {} for name in ("bfloat16", "float32")}
    failed: dict[str, list[str]] = {name: [] for name in errors}
    for name in errors:
        report.plan(name, ["plain rows", TREE])
    # Each compiles kernels of its own, with one processor.
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = {}
        for name in errors:
            for family in families:
                future = pool.submit(_errors, family, name, str(report.device))
                waiting[future] = (name, family)
        for done in as_completed(waiting):
            name, family = waiting[done]
            try:
                errors[name][family] = done.result()
            except Exception as error:
                failed[name].append(f"{family} ({_line(error)})")
            for variant in ("plain rows", TREE):
                report.add(
                    name, variant, note=_verdict(errors[name], variant, len(families), failed[name])
                )


def _tests() -> Any:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    return importlib.import_module("families")


def _errors(family: str, dtype: str, device: str) -> Errors:
    """The largest errors of scores and of gradients, of plain rows and of trees: medians over
    several models.

    In bfloat16 a token may go to another expert of a mixture, here or there: one model shows
    nothing.
    """
    drawn = [_errors_of(family, dtype, use_device(device), seed) for seed in range(NUM_SEEDS)]
    medians: Errors = {}
    for variant in ("plain rows", TREE):
        of_scores = statistics.median(errors[variant][0] for errors in drawn)
        of_gradients = statistics.median(errors[variant][1] for errors in drawn)
        medians[variant] = (of_scores, of_gradients)
    return medians


def _errors_of(family: str, dtype: str, device: torch.device, seed: int) -> Errors:
    families = _tests()
    generator = torch.Generator().manual_seed(seed)
    prompt, *own = (
        torch.randint(3, families.VOCABULARY, (n,), generator=generator).tolist()
        for n in (150, 30, 70, 9)
    )
    groups = [*families.forest(seed), [prompt + ids for ids in own]]
    fields = {**families.DECODERS, **families.HYBRIDS}[family]
    changes = _REAL_HEADS.get(family, {})
    # Mamba 2 has heads too, of a recurrence.
    if "head_dim" in fields and "num_attention_heads" in fields:
        changes = {"head_dim": 64}
    model = RewardModel(families.model_of(family, seed=seed, **changes).to(device))
    model.cast(getattr(torch, dtype))

    def run(of: RewardModel) -> tuple[Tensor, dict[str, Tensor]]:
        scores = of(of.make_batch(groups))
        gradients = families.gradients(of.hf, scores)
        return scores.detach().double(), {
            name: gradient.double() for name, gradient in gradients.items()
        }

    exact = deepcopy(model.hf).double()
    if exact._can_set_experts_implementation():
        exact.set_experts_implementation("eager")  # others know no float64
    with _Doubles():
        want, want_gradients = run(RewardModel(exact, layout="rows"))
    found = {}
    for variant, of in (("plain rows", RewardModel(model.hf, layout="rows")), (TREE, model)):
        got, gradients = run(of)
        found[variant] = (
            families.score_error(got, want),
            families.gradient_error(gradients, want_gradients),
        )
    return found


def _verdict(
    errors: Mapping[str, Errors], variant: str, num_families: int, failed: list[str]
) -> str:
    of = {family: found[variant] for family, found in errors.items()}
    rows = {family: found["plain rows"] for family, found in errors.items()}
    note = f"{len(of)} of {num_families} families"
    for i, what in enumerate(("scores", "gradients")):
        if of:
            worst = max(of, key=lambda family: of[family][i])
            note += f"; {what} off by at most {of[worst][i]:.1e} ({worst})"
    if variant == TREE and of:
        more = []
        for family in of:
            for i, what in enumerate(("scores", "gradients")):
                if of[family][i] > SLACK * rows[family][i]:
                    times = of[family][i] / rows[family][i]
                    more.append(f"{family} ({what} {times:.1f} x)")
        note += f"; more than {SLACK} x that of rows: {', '.join(more) or 'none'}"
    return note + (f"; failed: {', '.join(failed)}" if failed else "")


# -- training


def training(report: Report) -> None:
    """Steps of a reward model: forward, backward, clipping, AdamW; first ours, then what it is
    compared with."""
    from training_step import our_variant, trl_variant
    from trl.trainer.reward_config import RewardConfig

    from treeward.compat import trl as trees

    source, tokenizer, pairs = comparisons(report.tiny)
    attention = (
        "flash_attention_2" if find_spec("flash_attn") and report.device.type == "cuda" else "sdpa"
    )

    def make(size: str) -> RewardModel:
        return build(size, tokenizer, report.device, torch.bfloat16).train()

    def tree(size: str, *, compiled: bool = False) -> Made:
        model = make(size)
        if compiled:
            model.compile_layers()
        return model.hf, our_variant(model, partial(_scores, model))[0]

    def packed(size: str) -> Made:
        model = make(size)
        return model.hf, our_variant(model, lambda batch: model(_packed(batch).to(report.device)))[
            0
        ]

    def flash(size: str, *, share: bool) -> Made:
        model = make(size)
        return model.hf, our_variant(model, FlashRows(model, share=share))[0]

    def trl(size: str, dtype: torch.dtype, **options: Any) -> Made:
        hf = make(size).hf.to(dtype)  # type: ignore[arg-type]
        return hf, trl_variant(hf, tokenizer, pairs, attention, **options)[0]

    fast: dict[str, Any] = {"dtype": torch.bfloat16, "gradient_checkpointing": False}
    variants: dict[str, Callable[[str], Made]] = {
        TREE: tree,
        f"{TREE}, compiled layers": partial(tree, compiled=True),
        "packed rows, FlashAttention": partial(flash, share=False),
        f"TRL RewardTrainer, bfloat16 weights; {attention}": partial(trl, **fast),
        f"TRL RewardTrainer, its default: float32 weights, checkpointing; {attention}": partial(
            trl, dtype=torch.float32
        ),
        ONE_LEVEL: partial(flash, share=True),
        "treeward, packed rows": packed,
        f"{TREE}, in TRL's RewardTrainer, its default": partial(
            trl, dtype=torch.float32, kind=trees.RewardTrainer
        ),
    }
    missing = {"flash-pref itself": _why_no_flash_pref()}
    if "padding_free" in RewardConfig.__dataclass_fields__:
        variants["TRL RewardTrainer, padding-free"] = partial(trl, padding_free=True, **fast)
    else:
        missing["TRL RewardTrainer, padding-free"] = (
            f"TRL {version('trl')} does not offer it for reward models"
        )
    count = 2 if report.tiny else 32
    batches = [pairs[n : n + count] for n in range(0, len(pairs) - count + 1, count)]
    settings = {
        size: f"{size}, {count} comparisons, {source}" for size in report.sizes("0.5b", "1b")
    }
    for setting in settings.values():
        report.plan(setting, list(variants))
        for name, note in missing.items():
            report.add(setting, name, note=note)
    for size, setting in settings.items():
        for name, variant in variants.items():
            with report.attempt(setting, name):
                measure_steps(report, setting, name, *variant(size), batches)


def measure_steps(
    report: Report,
    setting: str,
    name: str,
    hf: PreTrainedModel,
    step: Callable[[list[Pair]], Tensor],
    batches: list[list[Pair]],
    passes: tuple[float, float, float] = (3, 3, 3),
) -> None:
    """Median seconds of a step, after steps that compile."""
    warmup, rounds = (1, 2) if report.tiny else (4, 10)
    losses = [step(batches[n % len(batches)]) for n in range(warmup)]
    chosen = [batches[n % len(batches)] for n in range(warmup, warmup + rounds)]
    seconds = [seconds_of(partial(step, batch), report.device) for batch in chosen]
    peak = peak_bytes(partial(step, chosen[0]), report.device)
    rows = [_work(batch, share=False) for batch in chosen]
    computed = (
        [_work(batch, share=True) for batch in chosen]
        if name.startswith((TREE, ONE_LEVEL))
        else rows
    )
    tokens, pairs = (sum(values) for values in zip(*computed, strict=True))
    report.add(
        setting,
        name,
        seconds=statistics.median(seconds),
        row_tokens=sum(tokens for tokens, _ in rows) / rounds,
        utilisation=utilisation(
            flops(hf, tokens, pairs, passes=passes), sum(seconds), report.device, torch.bfloat16
        ),
        peak=peak,
        note=f"first loss {float(losses[0]):.4f}",
    )
    if report.profile and name == TREE:
        print_profile(f"{name}, {setting}", partial(step, chosen[0]), report.device)


def _scores(model: RewardModel, batch: Sequence[Pair]) -> Tensor:
    return model(model.make_batch(batch))  # type: ignore[no-any-return]


def _packed(batch: Sequence[Pair]) -> TreeBatch:
    return TreeBatch.from_groups([[ids] for pair in batch for ids in pair], min_shared=1 << 30)


def _work(batch: Sequence[Pair], *, share: bool) -> tuple[int, int]:
    """Tokens, and pairs of a query and a key."""
    positions_T = FlashBatch.from_groups(batch, torch.device("cpu"), share=share).positions_T
    return len(positions_T), int((positions_T + 1).sum())


def _why_no_flash_pref() -> str:
    # It replaces functions of transformers by name, and refuses where their signatures are others.
    if find_spec("flash_pref") is None or find_spec("flash_attn") is None:
        return "flash-pref 0.1.1 needs FlashAttention-2 and transformers < 4.52"
    return f"flash-pref {version('flash-pref')} needs transformers < 4.52, here it is {version('transformers')}"


# -- scoring


def scoring(report: Report) -> None:
    """K completions of a prompt: trees, and plain transformers one by one and in padded batches of
    8."""
    from scoring import load_prompts, make_groups, measure

    _, prompts = load_prompts()
    tokenizer = _tokenizer(prompts)
    size = report.sizes("1b")[0]
    model = build(size, tokenizer, report.device, torch.bfloat16).eval()
    names = {
        "tree": TREE,
        "padded": "transformers, padded batches of 8",
        "one": "transformers, one by one",
    }
    num_prompts, rounds = (1, 1) if report.tiny else (6, 3)
    for k, earlier in ((8, 0), (16, 0), (8, 1000), (16, 1000)):
        if shared_data():
            groups = make_groups(prompts, tokenizer, k, earlier, num_prompts)
            source = "alpaca_eval"
        else:
            groups = draw_groups(num_prompts, k, earlier or 110)
            source = "drawn"
        setting = f"{size}, K = {k}, {'long' if earlier else 'short'} prompts, {source}"
        report.plan(setting, list(names.values()))
        with report.attempt(setting, TREE):
            row = measure(model, tokenizer, groups, k, rounds)
            tokens = sum(len(ids) for group in groups for ids in group)
            for key, name in names.items():
                report.add(setting, name, seconds=row["seconds"][key], row_tokens=tokens)
            note = f"{row['shared']:.2f} row tokens a tree token; scores differ by at most {row['difference']:.1e}"
            report.add(setting, TREE, seconds=row["seconds"]["tree"], row_tokens=tokens, note=note)


# -- policy updates


def policy_updates(report: Report) -> None:
    """Whole updates with a KL penalty; in float32 all must have the same loss and gradients."""
    import policy_update as updates
    from policy_variants import Setting, Work, make_work
    from scoring import load_prompts

    _, prompts = load_prompts()
    tokenizer = _tokenizer(prompts)
    size = report.sizes("0.5b")[0]
    num_prompts = 2 if report.tiny else 4
    rounds = 1 if report.tiny else 3
    names = {
        "float32": {
            updates.TREE: TREE,
            updates.PACKED: "treeward, packed rows",
            updates.GROUPER: "PrefixGrouper",
            updates.TRL: "TRL GRPOTrainer",
        },
        "bfloat16": {
            updates.TREE_BF16: TREE,
            updates.TRL_DEFAULT: "TRL GRPOTrainer, its default, with checkpointing",
        },
    }
    for length in (128,) if report.tiny else (128, 512):
        settings = {
            kind: f"{size}, {num_prompts} prompts of {length} tokens, 8 completions, {kind}"
            for kind in names
        }
        for kind, variants in names.items():
            report.plan(settings[kind], list(variants.values()))
        with report.attempt(settings["float32"], TREE):
            if shared_data():
                shape = Setting(8, length, 128)
                work = make_work(prompts, tokenizer, shape, num_prompts)
            else:
                work = _drawn_work(Work, length, num_prompts)
            limit = updates.EXACT if report.device.type == "cpu" else 1e-4
            row = updates.measure(size, tokenizer, work, rounds, device=report.device, exact=limit)
            for kind, variants in names.items():
                for name, shown in variants.items():
                    off = row.get(f"difference {name}")
                    note = (
                        None
                        if off is None
                        else f"loss and gradients differ by {off:.1e} from the float32 tree's"
                    )
                    seconds = row[f"ms update {name}"] / 1000
                    tokens = row["row tokens"]
                    report.add(settings[kind], shown, seconds=seconds, row_tokens=tokens, note=note)


def _drawn_work(kind: Any, length: int, num_prompts: int) -> Any:
    prompt = Prompt(({"role": "user", "content": "drawn"},), {})
    groups = []
    for group in draw_groups(num_prompts, 8, length):
        completions = []
        for ids in group:
            token_ids = tuple(ids[length:][:128])
            completions.append(SampledCompletion(token_ids, "", truncated=False))
        groups.append(CompletionGroup(prompt, tuple(group[0][:length]), tuple(completions)))
    return kind(
        tuple(groups), torch.randn(num_prompts, 8, generator=torch.Generator().manual_seed(0))
    )


# -- one step of 8B with adapters


def lora_8b(report: Report) -> None:
    """A step that trains adapters of rank 32 beside every linear layer, and the head."""
    from training_step import our_variant

    source, tokenizer, pairs = comparisons(report.tiny)
    size = report.sizes("8b")[0]
    count = 2 if report.tiny else 16
    setting = f"{size}, LoRA of rank 32, {count} comparisons, {source}"
    report.plan(setting, [TREE, f"{TREE}, checkpointing"])
    batches = [pairs[n : n + count] for n in range(0, len(pairs) - count + 1, count)]
    for name in (f"{TREE}, checkpointing", TREE):
        with report.attempt(setting, name):
            model = build(size, tokenizer, report.device, torch.bfloat16).train()
            add_adapters(model, LoraConfig(enabled=True, dim=32), seed=0)
            if name != TREE:
                model.recompute_activations()
            step, _ = our_variant(model, partial(_scores, model))
            # nothing is multiplied for gradients of frozen weights
            measure_steps(report, setting, name, model.hf, step, batches, passes=(2, 3, 2))
            del model, step


# -- data


def comparisons(tiny: bool) -> tuple[str, PreTrainedTokenizerBase, list[Pair]]:
    """(where they are from, a tokenizer for its padding token, shuffled pairs of token ids)."""
    if shared_data() is None or tiny:
        pairs = [(chosen, rejected) for chosen, rejected in draw_groups(640, 2, None)]
        return "drawn with HH's lengths", _tokenizer([("a prompt", ["a completion"])]), pairs
    source, tokenizer, pairs = load_pairs(longest=1024)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    return source, tokenizer, [pairs[i] for i in order]


def draw_groups(count: int, size: int, prompt: int | None) -> list[list[list[int]]]:
    """Random tokens: groups of completions with the lengths of HH's, to prompts of its lengths or
    of one."""
    generator = np.random.default_rng(0)

    def length(quantiles: Sequence[int]) -> int:
        return int(np.interp(generator.uniform(0, 99), QUANTILES, quantiles))

    def ids(n: int) -> list[int]:
        drawn: list[int] = generator.integers(10, 250, n).tolist()
        return drawn

    groups = []
    for _ in range(count):
        common = ids(prompt or length(PREFIX_TOKENS))
        groups.append([[*common, *ids(length(OWN_TOKENS))] for _ in range(size)])
    return groups


def _tokenizer(prompts: Sequence[tuple[str, list[str]]]) -> PreTrainedTokenizerBase:
    return train_tokenizer(
        (text for prompt, texts in prompts for text in (prompt, *texts)), vocab_size=VOCAB_SIZE
    )


PARTS: dict[str, tuple[Callable[[Report], None], int]] = {
    "exactness": (exactness, 90),
    "training": (training, 200),
    "scoring": (scoring, 50),
    "policy updates": (policy_updates, 100),
    "8B with LoRA": (lora_8b, 70),
}
"""In this order, each with its box of seconds."""


def run_part(name: str, device: str, *, tiny: bool, rows: Path, profile: bool) -> None:
    """One part, in this process."""
    PARTS[name][0](Report(use_device(device), tiny, rows, profile))
