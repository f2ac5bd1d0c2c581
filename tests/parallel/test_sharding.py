"""Models that several processes compute together have the values and gradients of the whole
model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from families import causal_model, forest, gradient_error, model_of, score_error, tiny_model
from torch import Tensor, nn

from treeward.config.policy import LoraConfig, OptimizerConfig, ShardingConfig
from treeward.errors import ConfigError
from treeward.model.checks import check_before_training
from treeward.model.loading import load_classifier
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
_TEMPERATURE = 0.7


class Case(NamedTuple):
    kind: str
    family: str
    changes: dict[str, Any] = {}
    layout: Any = "tree"
    recomputed: bool = False
    adapted: bool = False
    cpu_offload: bool = False

    def build(self) -> RewardModel | PolicyModel:
        model: RewardModel | PolicyModel
        if self.kind == "reward":
            model = RewardModel(model_of(self.family, **self.changes), layout=self.layout)
        else:
            model = PolicyModel(
                causal_model(self.family, **self.changes), layout=self.layout, chunk_tokens=7
            )
        model.train()
        if self.recomputed:
            model.recompute_activations()
        if self.adapted:
            add_adapters(model, LoraConfig(enabled=True, dim=4), seed=1)
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    nn.init.normal_(
                        weight, std=0.02, generator=torch.Generator().manual_seed(len(name))
                    )
        return model


BIASED = {"attention_bias": True, "mlp_bias": True}
CUT = [
    Case("reward", "llama", BIASED),
    Case("reward", "qwen2", recomputed=True),
    Case("reward", "qwen3", recomputed=True),
    Case("reward", "qwen3", layout="rows"),
    Case("reward", "mistral"),
    Case("reward", "gemma2"),
    Case("reward", "gemma3"),
    Case("reward", "phi3"),
    Case("reward", "gpt_neox", recomputed=True),
    Case("policy", "llama"),
    Case("policy", "qwen2", TIED, recomputed=True),
    Case("policy", "qwen3", TIED, recomputed=True),
    Case("policy", "mistral", TIED, layout="rows"),
    Case("policy", "gemma2", TIED),
]
"""By heads and columns; in four processes by FSDP too."""
SHARDED = [
    Case("reward", "qwen3", cpu_offload=True),
    Case("policy", "llama", TIED),
    Case("policy", "llama", TIED, adapted=True),
    Case("reward", "gptj", layout="rows"),
    Case("reward", "bert", layout="encoder"),
    Case("reward", "mixtral"),
    Case("reward", "llama", recomputed=True),
    Case("policy", "qwen3", recomputed=True),
    Case("reward", "llama", adapted=True),
]
"""By FSDP alone."""
SOME_SHARDED = SHARDED[:3]
RECURRENT_CUT = [
    Case("reward", "qwen3_5"),
    Case("policy", "qwen3_5", TIED, recomputed=True),
    Case("reward", "olmo_hybrid"),
    Case("reward", "kimi_linear", {"mlp_layer_types": ["dense", "dense"]}),
]
"""transformers cuts the rest of these, and their recurrent layers are whole in each process."""
RECURRENT_SHARDED = [
    Case("reward", "qwen3_5"),
    Case("policy", "lfm2"),
    Case("reward", "nemotron_h"),
    Case("policy", "mamba"),
    Case("reward", "kimi_linear"),
    Case("reward", "mamba", recomputed=True),
    Case("policy", "nemotron_h", recomputed=True),
    Case("policy", "qwen3_5", recomputed=True, adapted=True),
]


def _backward(model: RewardModel | PolicyModel, of: slice) -> list[Tensor]:
    """Outputs of these groups, whose weighted sum is the loss; a group weighs the same wherever it
    is computed."""
    groups = list(enumerate(forest()))[of]
    if isinstance(model, RewardModel):
        outputs = [model(model.make_batch([group for _, group in groups]))]
        losses = outputs[0].split([len(group) for _, group in groups])
    else:
        starts = [[max(1, min(map(len, group)) // 2)] * len(group) for _, group in groups]
        found = model.log_probs(
            [group for _, group in groups], starts, temperature=_TEMPERATURE, entropies=True
        )
        assert found.entropies_SL is not None
        outputs = [found.values_SL, found.entropies_SL]
        losses = found.values_SL.sum(dim=1).split([len(group) for _, group in groups])
    loss = sum(
        (torch.linspace(-1, 1, len(one)) * (at + 1) * one).sum()
        for (at, _), one in zip(groups, losses, strict=True)
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    return [output.detach() for output in outputs]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: whole(one.grad).clone()
        for name, one in model.named_parameters()
        if one.grad is not None
    }


def _gradients_off(part: nn.Module, full: nn.Module) -> float:
    """A sharded weight that is not used may have a gradient, which is zero."""
    got = _gradients(part)
    want = _gradients(full)
    assert not any(got[name].any() for name in got.keys() - want.keys())
    return gradient_error({name: got[name] for name in want}, want)


def compare(num_tensor: int, cases: str, num_copies: int = 1) -> dict[str, list[float]]:
    """For each case the errors of outputs, gradients, their norm, clipped gradients, and, after a
    step, of weights and outputs, so what was gathered before is gathered anew."""
    mesh = make_mesh(ShardingConfig(tensor_parallel_size=num_tensor, dp_replicate_size=num_copies))
    own = slice(mesh.data_rank, None, mesh.data_size)
    errors = {}
    for case in globals()[cases]:
        full = case.build()
        part = case.build()
        cut(part, mesh)
        if mesh.data_size > 1:
            shard(part, mesh, dtype=torch.float32, cpu_offload=case.cpu_offload)
        for parameter in part.parameters():  # what a checkpoint takes for this process's part
            local, place = own_part(parameter)
            assert torch.equal(local, whole(parameter)[place])
        if isinstance(part, RewardModel):  # as a validation does, before the first gradient
            part.score_tokens([[1, 2, 3]])
        want_outputs = _backward(case.build(), own)
        _backward(full, slice(None))
        outputs = _backward(part, own)
        found = [max(map(score_error, outputs, want_outputs)), _gradients_off(part, full)]
        norms = [clip_grad_norm_(model.parameters(), 0.1) for model in (full, part)]
        found += [abs(norms[1] / norms[0] - 1), _gradients_off(part, full)]
        for model in (full, part):
            build_optimizer(model, OptimizerConfig(kwargs={"lr": 0.01, "eps": 0.01})).step()
        weights = []
        for model in (full, part):
            weights.append({name: one.detach() for name, one in model.named_parameters()})
        found.append(
            max(score_error(whole(one), weights[0][name]) for name, one in weights[1].items())
        )
        found.append(max(map(score_error, _backward(part, own), _backward(full, own))))
        errors[str(case)] = found
    return errors


def in_bfloat16() -> list[Any]:
    """Of a model that computes in bfloat16: its dtypes, and how far it is from one whose weights
    are bfloat16."""
    case = Case("reward", "qwen3")
    mesh = make_mesh(ShardingConfig())
    plain = case.build()
    own = case.build()
    sharded = case.build()
    for model in (plain, own):
        model.cast(torch.bfloat16)
    shard(sharded, mesh, dtype=torch.bfloat16)
    _backward(plain, slice(None))
    share = slice(mesh.data_rank, None, mesh.data_size)
    [got], [want] = _backward(sharded, share), _backward(own, share)
    dtypes = set()
    for weight in sharded.parameters():
        dtypes.add(str(weight.dtype))
        if weight.grad is not None:
            dtypes.add(str(weight.grad.dtype))
    return [sorted(dtypes), str(got.dtype), score_error(got, want), _gradients_off(sharded, plain)]


@pytest.mark.slow
def test_values_and_gradients_with_fsdp(run_processes: Callable[..., list[Any]]) -> None:
    for errors in run_processes("test_sharding:compare", 4, 2, "CUT", timeout=400):
        assert_exact(errors)


@pytest.mark.slow
@pytest.mark.parametrize("num_copies", [1, 2])
def test_fsdp_over_four_processes_and_in_copies(
    run_processes: Callable[..., list[Any]], num_copies: int
) -> None:
    for errors in run_processes("test_sharding:compare", 4, 1, "SOME_SHARDED", num_copies):
        assert_exact(errors)


def recurrent() -> list[dict[str, list[float]]]:
    """Models with recurrent layers, cut and sharded."""
    return [compare(2, "RECURRENT_CUT"), compare(1, "RECURRENT_SHARDED")]


@pytest.mark.slow
def test_recurrent_layers_in_two_processes(run_processes: Callable[..., list[Any]]) -> None:
    for of_process in run_processes("test_sharding:recurrent", 2, timeout=400):
        for errors in of_process:
            assert_exact(errors)


def assert_exact(errors: dict[str, list[float]]) -> None:
    assert {name: of for name, of in errors.items() if not max(of) <= TOLERANCE} == {}


def score() -> list[list[float]]:
    """Scores of the whole model, of its parts, of its parts with a cache that is empty, and that is
    full."""
    hf = tiny_model("qwen3")
    whole = RewardModel(hf)
    part = RewardModel(tiny_model("qwen3"))
    cut(part, make_mesh(ShardingConfig(tensor_parallel_size=2)))
    generator = torch.Generator().manual_seed(0)
    prompt, *ends = (
        torch.randint(3, 600, (n,), generator=generator).tolist() for n in (40, 5, 9, 1)
    )
    sequences = [prompt + end for end in ends]
    cache = PrefixCache(2**20)
    options: dict[str, Any] = {"cache": cache, "prompt_lengths": [40] * 3}
    found = [whole.score_tokens(sequences), part.score_tokens(sequences)]
    found += [part.score_tokens(sequences, **options) for _ in range(2)]
    # one head of two in each layer
    assert cache.num_reused_tokens == 3 * 40 and cache.num_bytes == 2 * 2 * 40 * 8 * 4
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
        RewardModel(model_of("nemotron_h")),
    ]
    told = []
    for model in models:
        with pytest.raises(ConfigError) as caught:
            cut(model, of_four)
        told.append(str(caught.value))
    return told


def read_in_parts(folder: str) -> list[list[float]]:
    """Scores of a model on the disk: in one process, and of its parts, each of which reads its
    own."""
    tokenizer = load_tokenizer(folder)
    sequences = [[5, 6, 7, 8, 9], [5, 6, 10]]
    whole = load_classifier(folder, tokenizer=tokenizer).model
    found = [whole.score_tokens(sequences)]
    mesh = make_mesh(ShardingConfig(tensor_parallel_size=2))
    part = load_classifier(folder, tokenizer=tokenizer, on_meta=True).model
    cut(part, mesh)
    shard(part, mesh, dtype=torch.float32)
    part.fill("cpu")
    check_before_training(part, sequences, tokenizer)
    found.append(part.score_tokens(sequences))
    return [values.flatten().tolist() for values in found]


def everything(folder: str) -> list[Any]:
    return [
        compare(2, "CUT"),
        compare(1, "SHARDED"),
        in_bfloat16(),
        score(),
        read_in_parts(folder),
        refusals(),
    ]


@pytest.mark.slow
def test_two_processes(
    run_processes: Callable[..., list[Any]], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    tiny_model("qwen3", num_hidden_layers=3).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    results = run_processes("test_sharding:everything", 2, str(tmp_path), timeout=400)
    for of_cut, of_sharded, (dtypes, dtype, off, gradients_off), *_ in results:
        assert_exact(of_cut)
        assert_exact(of_sharded)
        assert (
            dtypes == ["torch.float32"]
            and dtype == "torch.float32"
            and off < 1e-2
            and gradients_off < 0.1
        )
    *_, (whole, *others), (stored, *parts), told = results[0]
    for values in parts:
        assert values == pytest.approx(stored, abs=TOLERANCE)
    for values in others:
        assert values == pytest.approx(whole, abs=TOLERANCE)
    for text, reason in zip(
        told,
        (
            "GPT2ForSequenceClassification",
            "moe_tp_experts",
            "num_key_value_heads=1",
            "out_features",
            "lora_cfg",
            "NemotronHForSequenceClassification",
        ),
        strict=True,
    ):
        assert reason in text and "policy.dtensor_cfg.tensor_parallel_size" in text, text
