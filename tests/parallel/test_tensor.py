"""Models that several processes compute together have the values and gradients of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import causal_model, forest, gradient_error, score_error, tiny_model
from torch import Tensor

from treeward.config.policy import LoraConfig, OptimizerConfig, ShardingConfig
from treeward.errors import ConfigError
from treeward.model.checks import check_before_training
from treeward.model.loading import load_reward_model
from treeward.model.lora import add_adapters
from treeward.model.policy_model import PolicyModel
from treeward.model.pretrained import load_tokenizer
from treeward.model.reward_model import RewardModel
from treeward.model.shards import own_part, whole
from treeward.parallel.mesh import make_mesh
from treeward.parallel.sharding import clip_grad_norm_, shard
from treeward.parallel.tensor import cut
from treeward.training.optimisation import build_optimizer
from treeward.tree.prefix import PrefixCache

TOLERANCE = 1e-5
TIED = {"tie_word_embeddings": True, "vocab_size": 601}  # an odd number of tokens
THREE = {"num_hidden_layers": 3}
_TEMPERATURE = 0.7

# kind, family, changes of its configuration, layout, sequence_parallel, what is computed again
CASES: list[tuple[str, str, dict[str, Any], str, bool, bool]] = [
    ("reward", "llama", {"attention_bias": True, "mlp_bias": True}, "tree", False, False),
    ("reward", "qwen2", {}, "tree", False, True),
    ("reward", "qwen3", {}, "tree", False, True),
    ("reward", "qwen3", {}, "rows", False, False),
    ("reward", "mistral", {}, "tree", False, False),
    ("reward", "gemma2", {}, "tree", False, False),
    ("reward", "gemma3", {}, "tree", False, False),
    ("reward", "phi3", {}, "tree", False, False),
    ("reward", "gpt_neox", {}, "tree", False, True),
    ("reward", "llama", THREE | {"attention_bias": True, "mlp_bias": True}, "tree", True, True),
    ("reward", "qwen3", THREE, "tree", True, True),
    ("reward", "qwen3", THREE, "rows", True, False),
    ("reward", "gemma3", THREE | {"layer_types": ["sliding_attention"] * 3}, "tree", True, False),
    ("reward", "gpt_neox", THREE, "tree", True, True),
    ("policy", "llama", {}, "tree", False, False),
    ("policy", "qwen2", TIED, "tree", False, True),
    ("policy", "qwen3", TIED | THREE, "tree", True, True),
    ("policy", "mistral", TIED, "rows", False, False),
    ("policy", "gemma2", TIED, "tree", False, False),
]


def _build(kind: str, family: str, changes: dict[str, Any], layout: Any, recomputed: bool) -> RewardModel | PolicyModel:
    model: RewardModel | PolicyModel
    if kind == "reward":
        model = RewardModel(tiny_model(family, **changes), layout=layout)
    else:
        model = PolicyModel(causal_model(family, **changes), layout=layout, chunk_tokens=7)
    model.train()
    if recomputed:
        model.recompute_activations()
    return model


def _backward(model: RewardModel | PolicyModel, of: slice) -> list[Tensor]:
    """Outputs of these groups, whose weighted sum is the loss; a group weighs the same wherever it is computed."""
    groups = list(enumerate(forest()))[of]
    if isinstance(model, RewardModel):
        outputs = [model(model.make_batch([group for _, group in groups]))]
        losses = outputs[0].split([len(group) for _, group in groups])
    else:
        starts = [[max(1, min(map(len, group)) // 2)] * len(group) for _, group in groups]
        found = model.log_probs([group for _, group in groups], starts, temperature=_TEMPERATURE, entropies=True)
        assert found.entropies_SL is not None
        outputs = [found.values_SL, found.entropies_SL]
        losses = found.values_SL.sum(dim=1).split([len(group) for _, group in groups])
    loss = sum(
        (torch.linspace(-1, 1, len(one)) * (at + 1) * one).sum() for (at, _), one in zip(groups, losses, strict=True)
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    return [output.detach() for output in outputs]


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: whole(one.grad).clone() for name, one in model.named_parameters() if one.grad is not None}


def compare(num_tensor: int) -> dict[str, list[float]]:
    """For each case the errors of outputs, gradients, their norm, clipped gradients, and weights after a step."""
    mesh, errors = make_mesh(ShardingConfig(tensor_parallel_size=num_tensor)), {}
    own = slice(mesh.data_rank, None, mesh.data_size)
    for kind, family, changes, layout, sequence_parallel, recomputed in CASES:
        full, part = (_build(kind, family, changes, layout, recomputed) for _ in range(2))
        want_outputs = _backward(full, slice(None))
        want = _gradients(full)
        if mesh.data_size > 1:
            want_outputs = _backward(_build(kind, family, changes, layout, recomputed), own)
        cut(part, mesh, sequence_parallel=sequence_parallel)
        if mesh.data_size > 1:
            shard(part, mesh, dtype=torch.float32)
        for parameter in part.parameters():  # what a checkpoint takes for this process's part
            local, place = own_part(parameter)
            assert torch.equal(local, whole(parameter)[place])
        outputs = _backward(part, own)
        got = _gradients(part)
        of_outputs = max(score_error(a, b) for a, b in zip(outputs, want_outputs, strict=True))
        norms = [clip_grad_norm_(model.parameters(), 0.1) for model in (full, part)]
        of_norms, of_clipped = abs(norms[1] / norms[0] - 1), gradient_error(_gradients(part), _gradients(full))
        for model in (full, part):
            build_optimizer(model, OptimizerConfig(kwargs={"lr": 0.1, "eps": 0.01})).step()
        weights = [{name: one.detach() for name, one in model.named_parameters()} for model in (full, part)]
        of_weights = max(score_error(whole(one), weights[0][name]) for name, one in weights[1].items())
        name = f"{kind} {family} {layout} sequence={sequence_parallel} {recomputed}"
        errors[name] = [of_outputs, gradient_error(got, want), of_norms, of_clipped, of_weights]
    return errors


@pytest.mark.slow
def test_values_and_gradients_with_fsdp(run_processes: Callable[..., list[Any]]) -> None:
    for errors in run_processes("test_tensor:compare", 4, 2, timeout=400):
        assert {name: of for name, of in errors.items() if not max(of) <= TOLERANCE} == {}


def score() -> list[list[float]]:
    """Scores of the whole model, of its parts, of its parts with a cache that is empty, and that is full."""
    hf = tiny_model("qwen3")
    whole, part = RewardModel(hf), RewardModel(tiny_model("qwen3"))
    cut(part, make_mesh(ShardingConfig(tensor_parallel_size=2)))
    generator = torch.Generator().manual_seed(0)
    prompt, *ends = (torch.randint(3, 600, (n,), generator=generator).tolist() for n in (40, 5, 9, 1))
    sequences, cache = [prompt + end for end in ends], PrefixCache(2**20)
    options: dict[str, Any] = {"cache": cache, "prompt_lengths": [40] * 3}
    found = [whole.score_tokens(sequences), part.score_tokens(sequences)]
    found += [part.score_tokens(sequences, **options) for _ in range(2)]
    assert cache.num_reused_tokens == 3 * 40 and cache.num_bytes == 2 * 2 * 40 * 8 * 4  # one head of two in each layer
    return [values.flatten().tolist() for values in found]


def refusals() -> list[str]:
    """What a layout that cannot be is told."""
    of_four = make_mesh(ShardingConfig(tensor_parallel_size=2))
    adapted = RewardModel(tiny_model("llama"))
    add_adapters(adapted, LoraConfig(enabled=True), seed=0)
    models = [
        RewardModel(tiny_model("gpt2")),
        RewardModel(tiny_model("mixtral")),
        RewardModel(tiny_model("llama", num_key_value_heads=1)),
        RewardModel(tiny_model("llama", intermediate_size=65)),
        adapted,
    ]
    told = []
    for model in models:
        with pytest.raises(ConfigError) as caught:
            cut(model, of_four)
        told.append(str(caught.value))
    return told


def read_in_parts(folder: str) -> list[list[float]]:
    """Scores of a model on the disk: in one process, and of its parts, each of which reads its own."""
    tokenizer, sequences = load_tokenizer(folder), [[5, 6, 7, 8, 9], [5, 6, 10]]
    whole = load_reward_model(folder, tokenizer=tokenizer).model
    found = [whole.score_tokens(sequences)]
    mesh = make_mesh(ShardingConfig(tensor_parallel_size=2))
    for sequence_parallel in (False, True):
        part = load_reward_model(folder, tokenizer=tokenizer, on_meta=True).model
        cut(part, mesh, sequence_parallel=sequence_parallel)
        shard(part, mesh, dtype=torch.float32)
        part.fill("cpu")
        check_before_training(part, sequences, tokenizer)
        found.append(part.score_tokens(sequences))
    return [values.flatten().tolist() for values in found]


def everything(folder: str) -> list[Any]:
    return [compare(2), score(), read_in_parts(folder), refusals()]


@pytest.mark.slow
def test_two_processes(run_processes: Callable[..., list[Any]], tmp_path: Path, tiny_tokenizer: Any) -> None:
    tiny_model("qwen3", num_hidden_layers=3).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    results = run_processes("test_tensor:everything", 2, str(tmp_path), timeout=400)
    for errors, *_ in results:
        assert {name: of for name, of in errors.items() if not max(of) <= TOLERANCE} == {}
    _, (whole, *others), (stored, *parts), told = results[0]
    for values in parts:
        assert values == pytest.approx(stored, abs=TOLERANCE)
    for values in others:
        assert values == pytest.approx(whole, abs=TOLERANCE)
    for text, reason in zip(
        told,
        ("GPT2ForSequenceClassification", "moe_tp_experts", "num_key_value_heads=1", "out_features", "lora_cfg"),
        strict=True,
    ):
        assert reason in text and "policy.dtensor_cfg.tensor_parallel_size" in text, text
