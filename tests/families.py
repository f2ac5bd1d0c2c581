"""Tiny models of many families, and plain Hugging Face rows to compare treeward with.

The weights are drawn so that everything matters: matrices keep the size of what they multiply,
norms are not all one, biases and sinks are not zero. (With transformers' initialisation a tiny
model hardly attends at all, and a wrong mask would change its scores by less than any tolerance.)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from treeward.model.loading import classifier_class
from treeward.model.reward_model import RewardModel
from treeward.tree import attention
from treeward.tree.position_mask import PositionMask

VOCABULARY = 600
WINDOW = 6

_GQA = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_MOE = {"num_experts_per_tok": 2}
_WINDOW = {"sliding_window": WINDOW}

# model_type and what differs from COMMON; the sliding windows are short enough to cut every
# sequence of these tests
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_GQA},
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2_window": {
        "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 1, **_WINDOW,
        "use_sliding_window": True, "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **_GQA},
    "mistral": {"model_type": "mistral", **_GQA, **_WINDOW},
    "mixtral": {"model_type": "mixtral", **_GQA, **_MOE, "num_local_experts": 4,
                "sliding_window": None},
    "gemma2": {
        "model_type": "gemma2", **_GQA, **_WINDOW, "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 5,
    },
    "gemma3": {
        "model_type": "gemma3_text", **_GQA, **_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 5,
    },
    "phi3": {"model_type": "phi3", "num_attention_heads": 4, "num_key_value_heads": 2, **_WINDOW},
    # without **kwargs
    "stablelm": {"model_type": "stablelm", "num_attention_heads": 4, "num_key_value_heads": 2},
    "nemotron": {"model_type": "nemotron", **_GQA},
    "gpt_neox": {"model_type": "gpt_neox", "num_attention_heads": 4},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024},
    "gpt_oss": {
        "model_type": "gpt_oss", **_GQA, **_WINDOW, **_MOE, "num_local_experts": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3": {  # latent attention: its values have another dimension than its keys
        "model_type": "deepseek_v3", "num_attention_heads": 4, "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "n_routed_experts": 4,
        "n_shared_experts": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2,
        "rope_parameters": {  # which scale its attention too
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
            "original_max_position_embeddings": 256,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    },
}  # fmt: skip
CAUSAL_ONLY: dict[str, dict[str, Any]] = {  # transformers has no classifier for them
    "gemma3n": {  # its hidden states have one more dimension
        "model_type": "gemma3n_text", **_GQA, **_WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0],
    },
    "llama4": {
        "model_type": "llama4_text", **_GQA, "num_local_experts": 2, "num_experts_per_tok": 1,
        "intermediate_size_mlp": 64, "attn_temperature_tuning": False, "no_rope_layers": [1, 0],
        "layer_types": ["full_attention", "full_attention"],
    },
}  # fmt: skip
_GATED_DELTA = {
    **_GQA, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
_MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_chunk_size": 32,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
_KIMI = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "linear_head_dim": 8,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "model_max_length": 1024,
}  # fmt: skip
# Recurrent layers, of each kind first one family.
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"model_type": "qwen3_5_text", **_GATED_DELTA},
    "nemotron_h": {
        "model_type": "nemotron_h", **_GQA,
        "layers_block_type": ["mamba", "attention", "mamba", "moe"],
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12,
        "chunk_size": 32,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "mamba": {"model_type": "mamba", "state_size": 4, "expand": 2},
    "lfm2": {
        "model_type": "lfm2", "num_attention_heads": 4, "num_key_value_heads": 2,
        "layer_types": ["conv", "full_attention"],
    },
    "qwen3_next": {"model_type": "qwen3_next", **_GATED_DELTA, **_EXPERTS},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **_GATED_DELTA, **_EXPERTS},
    "olmo_hybrid": {"model_type": "olmo_hybrid", **_GATED_DELTA},
    "mamba2": {
        "model_type": "mamba2", "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 12,
        "expand": 2,
        "chunk_size": 32,
    },
    "bamba": {"model_type": "bamba", **_GQA, **_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {"model_type": "falcon_h1", **_GQA, **_MAMBA2, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        "model_type": "granitemoehybrid", **_GQA, **_MAMBA2, "layer_types": ["mamba", "attention"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    "zamba2": {
        "model_type": "zamba2", **_GQA, "num_hidden_layers": 4, "mamba_d_state": 12,
        "n_mamba_heads": 8,
        "mamba_headdim": 8, "mamba_ngroups": 2, "chunk_size": 32, "num_mem_blocks": 1,
        "attention_head_dim": 16,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "attention_hidden_size": 64,
        "use_mem_rope": True,
    },
    "falcon_mamba": {"model_type": "falcon_mamba", "state_size": 4, "expand": 2},
    "jamba": {
        "model_type": "jamba", **_GQA, "attn_layer_period": 2, "attn_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2, "mamba_d_state": 4, "use_mamba_kernels": False,
    },
    "lfm2_moe": {
        "model_type": "lfm2_moe", **_GQA, "layer_types": ["conv", "full_attention"],
        "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_dense_layers": 1,
    },
    "lfm3": {"model_type": "lfm3", **_GQA, "layer_types": ["conv", "full_attention"],
             "sliding_window": 16},
    "zamba": {
        "model_type": "zamba", **_GQA, "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_d_state": 4, "n_mamba_heads": 2, "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {"model_type": "kimi_linear", **_KIMI, "mlp_layer_types": ["dense", "sparse"]},
    "bailing_hybrid": {
        "model_type": "bailing_hybrid", **_KIMI, "first_k_dense_replace": 1, "num_expert_group": 1,
        "topk_group": 1,
    },
}  # fmt: skip
ROW_FAMILIES: dict[str, dict[str, Any]] = {
    "gptj": {"model_type": "gptj", "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4,
             "n_positions": 128},
    "bloom": {"model_type": "bloom", "n_layer": 2, "n_head": 4},
    "minimax": {
        "model_type": "minimax", **_GQA, **_MOE, "num_local_experts": 4, "block_size": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert", "num_attention_heads": 4},
    "roberta": {"model_type": "roberta", "num_attention_heads": 4, "pad_token_id": 1},
    "distilbert": {"model_type": "distilbert", "dim": 32, "hidden_dim": 64, "n_layers": 2,
                   "n_heads": 4},
}  # fmt: skip
ENCODER_RUN = (
    "policy.model_config=null",
    "policy.model_config={model_type: bert, hidden_size: 32, intermediate_size: 64, "
    "num_hidden_layers: 2, "
    "num_attention_heads: 4, max_position_embeddings: 512}",
    # else the bias has no gradient but rounding, which Adam makes large
    "rm.loss.center_rewards_coefficient=0.01",
)
"""Overrides of a tiny run, which make its model an encoder."""
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
    "num_labels": 1,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 0,
}


def config_of(family: str, **changes: Any) -> Any:
    fields = {**DECODERS, **CAUSAL_ONLY, **HYBRIDS, **ROW_FAMILIES, **ENCODERS}[family]
    known = AutoConfig.for_model(fields["model_type"])
    common = {name: value for name, value in _COMMON.items() if hasattr(known, name)}
    return AutoConfig.for_model(**{**common, **fields, **changes})


def tiny_model(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A plain Hugging Face sequence classifier with one label and telling weights."""
    config = config_of(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    return randomise(model.eval(), seed)


def causal_model(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The same as a causal language model."""
    config = config_of(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
    return randomise(model.eval(), seed)


class InFloat64(TorchFunctionMode):
    """What a model computes in float32 whatever its weights are (norms, softmax, the head) is
    computed in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {torch.float32: torch.float64}
        args = tuple(wide.get(x, x) if isinstance(x, torch.dtype) else x for x in args)
        kwargs = {
            key: wide.get(x, x) if isinstance(x, torch.dtype) else x
            for key, x in (kwargs or {}).items()
        }
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


def model_of(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A tiny model of any family, with a classifier made by treeward where transformers has
    none."""
    config = config_of(family, **changes)
    if type(config) in AutoModelForSequenceClassification._model_mapping:
        return tiny_model(family, seed=seed, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = classifier_class(config, False)._from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    return randomise(made.eval(), seed)


def rows_alone(hf: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """The last hidden state of one row at a time through the head: what plain transformers would
    do."""
    base = hf.base_model
    head = hf.score
    states = [
        base(input_ids=torch.tensor([list(s)]), use_cache=False).last_hidden_state[:, -1]
        for s in sequences
    ]
    return head(torch.cat(states))[:, 0]


def randomise(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if "A_log" in name:
                # Slow decays: with transformers' a state would not live to be inherited.
                weight.copy_(drawn.uniform_(0.02, 0.5, generator=generator).log())
            elif weight.dim() > 1:
                # in transposed layouts (GPT-2, experts) and square ones alike, about the size of
                # what is multiplied
                fan_in = (
                    1.0
                    if "emb" in name or "wte" in name or "wpe" in name
                    else min(weight.shape[-2:])
                )
                weight.copy_(drawn * fan_in**-0.5)
            elif "dt_bias" in name or name.endswith(".D"):
                continue
            elif name.endswith("sinks"):
                weight.copy_(drawn)
            else:
                weight.add_(0.2 * drawn)
        for name, module in model.named_modules():
            if name in ("score", "classifier"):
                for parameter in module.parameters():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 33**-0.5)
    return model


def plain_scores(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """The scores of plain Hugging Face, one unpadded row at a time, eager attention, the last token
    read."""
    config = model.config.get_text_config()
    pad = config.pad_token_id
    encoder = hasattr(model, "classifier")
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")
    # Without a padding token transformers reads at the last one, whatever it is.
    config.pad_token_id = pad if encoder else None
    try:
        rows = [torch.as_tensor([list(map(int, sequence))]) for sequence in sequences]
        options = {} if encoder else {"use_cache": False}
        return torch.cat([model(input_ids=row, **options).logits[:, 0] for row in rows])
    finally:
        config.pad_token_id = pad


def plain_log_probs(
    model: PreTrainedModel, sequence: Sequence[int], start: int, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the tokens from `start` on, and entropies, by the model's own forward of
    one row."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")  # a `PolicyModel` of it leaves its own
    logits = (
        model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0].float() / temperature
    )
    log_probs = logits.log_softmax(-1)
    picked = log_probs[:-1].gather(-1, torch.tensor(sequence)[1:, None])[:, 0]
    entropies = -(log_probs.exp() * log_probs).sum(-1)[:-1]
    return picked[start - 1 :], entropies[start - 1 :]


def gradients(model: torch.nn.Module, scores: Tensor) -> dict[str, Tensor]:
    """Gradients of a weighted sum of the scores, by parameter name; parameters without one are left
    out."""
    weights = torch.linspace(-1.0, 1.0, len(scores), device=scores.device) + 0.1
    model.zero_grad(set_to_none=True)
    (scores * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def score_error(got: Tensor, want: Tensor) -> float:
    """Largest difference, relative to the largest score (at least 1)."""
    got = got.detach()
    want = want.detach()
    return float((got - want).abs().max() / want.abs().max().clamp_min(1.0))


def gradient_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest difference over all tensors, each relative to its largest element.

    A gradient that is zero but for rounding (a bias on keys shifts every logit alike) is measured
    against a hundredth of the largest gradient of all.
    """
    assert got.keys() == want.keys()
    floor = 1e-2 * max(float(w.abs().max()) for w in want.values())
    return max(
        float((got[name] - w).abs().max()) / max(float(w.abs().max()), floor)
        for name, w in want.items()
    )


def assert_close(value: float, tolerance: float, what: str) -> None:
    assert value <= tolerance, f"{what}: off by {value:.2e}, more than {tolerance:.0e}"


def assert_tree_equals_rows(
    model: RewardModel, groups: Sequence[Sequence[Sequence[int]]], *, grads: float | None = 1e-5
) -> tuple[float, float]:
    """Scores (and gradients) of a batch equal those of plain rows; returns the two largest
    errors."""
    sequences = list(chain.from_iterable(groups))
    got = model(model.make_batch(groups))
    got_grads = gradients(model.hf, got) if grads is not None else {}
    want = plain_scores(model.hf, sequences)
    want_grads = gradients(model.hf, want) if grads is not None else {}
    of_scores = score_error(got, want)
    assert_close(of_scores, 1e-5, "scores")
    of_gradients = 0.0 if grads is None else gradient_error(got_grads, want_grads)
    assert_close(of_gradients, grads or 0.0, "gradients")
    return of_scores, of_gradients


def forest(seed: int = 0) -> list[list[list[int]]]:
    """Comparison groups with everything that a forest can hold; tokens from 3 up, so no padding,
    BOS or EOS.

    A prompt with four completions; several turns deep (a tree in a tree); identical completions;
    one that begins another; completions of one token; nothing shared at all; a single sequence.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return [
            int(token) for token in torch.randint(3, VOCABULARY, (length,), generator=generator)
        ]

    prompt = draw(14)
    deep = draw(9)
    short = draw(7)
    middle = deep + draw(5)
    inner = middle + draw(8)
    same = draw(6)
    long = draw(11)
    return [
        [prompt + draw(n) for n in (9, 4, 13, 7)],
        [deep + draw(6), middle + draw(3), inner + draw(1), inner + draw(10), middle + draw(2)],
        [short + same, short + same, short + draw(5)],
        [short[:3] + long, short[:3] + long[:4], short[:3] + long[:9]],
        [prompt[:5] + draw(1), prompt[:5] + draw(1)],
        [draw(8), draw(3)],
        [draw(1)],
        [draw(17)],
    ]


DENSE = "treeward_dense"
"""The reference of attention over trees: one mask over the whole row, and plain arithmetic."""


def dense_mask(mask: PositionMask) -> Tensor:
    """The mask of a whole row, bool (T, T)."""
    return torch.block_diag(
        *(mask.tree_mask(tree, torch.device("cpu")) for tree in mask.layout.trees)
    ).bool()


def _dense_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: PositionMask, *options: Any
) -> Tensor:
    return attention.written_out(query, key, value, dense_mask(mask).to(query.device), *options)


attention.AttentionInterface.register(DENSE, attention.layer_attention_of(_dense_attention))
attention.AttentionMaskInterface.register(DENSE, attention.mask_maker(PositionMask))
