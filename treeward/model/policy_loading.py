"""From a name to a `PolicyModel`, and back to a folder: causal language models that are optimised or compared with.

    loaded = load_policy("Qwen/Qwen2.5-0.5B-Instruct")
    loaded = build_policy({"model_type": "qwen3", "hidden_size": 128, ...}, tokenizer, seed=42)
    export_policy(loaded.model, loaded.tokenizer, Path("results/grpo/final"), chat_template=renderer.chat_template)
    AutoModelForCausalLM.from_pretrained("results/grpo/final")

Only safetensors are read, and remote code runs only where `trust_remote_code` asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from treeward.errors import ModelError
from treeward.model.checks import tree_or_rows
from treeward.model.export import write_folder
from treeward.model.lora import plain_state
from treeward.model.policy_model import DEFAULT_CHUNK_TOKENS, PolicyModel
from treeward.model.pretrained import bare_model, load_tokenizer, load_weights, read_config


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A policy with its tokenizer."""

    model: PolicyModel
    tokenizer: PreTrainedTokenizerBase


def load_policy(
    name: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype = torch.float32,
    attention: Literal["tree", "rows"] = "tree",
    device: torch.device | str = "cpu",
    config_overrides: Mapping[str, Any] | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    trust_remote_code: bool = False,
) -> LoadedPolicy:
    """Load a causal language model from a folder or the hub.

    `dtype`: of the weights. `attention`: "tree" (falls back to rows, and says so, where the model cannot share a
    prefix) or "rows". `config_overrides`: fields of its configuration that are set to other values. `chunk_tokens`:
    predicted tokens whose logits are in memory at a time. Raises `ModelError` for a missing or unusable checkpoint.
    """
    config = read_config(str(name), trust_remote_code)
    _check_is_causal(config, str(name))
    for field, value in (config_overrides or {}).items():
        if not hasattr(config, field):
            raise ModelError(
                "the model's configuration has no such field",
                where="policy.hf_config_overrides",
                field=field,
                got=value,
                need=f"a field of {type(config).__name__}",
            )
        setattr(config, field, value)
    tokenizer = tokenizer or load_tokenizer(str(name), trust_remote_code=trust_remote_code)
    hf, missing = load_weights(
        AutoModelForCausalLM, str(name), config=config, dtype=dtype, trust_remote_code=trust_remote_code
    )
    if missing:
        raise ModelError("weights are missing from the checkpoint", where=str(name), got=missing[:8])
    return _loaded(hf, tokenizer, str(name), attention, device, chunk_tokens)


def build_policy(
    model_config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    attention: Literal["tree", "rows"] = "tree",
    device: torch.device | str = "cpu",
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> LoadedPolicy:
    """A policy with random weights from a bare configuration (`model_type` and its fields), for small experiments.

    The vocabulary size and special tokens are the tokenizer's. Raises `ConfigError` for an unknown model type or field.
    """
    hf = bare_model(AutoModelForCausalLM.from_config, model_config, tokenizer, seed=seed)
    return _loaded(hf, tokenizer, "policy.model_config", attention, device, chunk_tokens)


def export_policy(
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    chat_template: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a folder that plain transformers loads; the caller makes it atomic. Adapters are merged into the weights.

    `dtype`: None for the weights'. The policy stays as it is.
    """
    changes = {"dtype": dtype or policy.hf.dtype}
    state = plain_state(policy, dtype)
    write_folder(policy.hf, tokenizer, folder, state=state, changes=changes, chat_template=chat_template)


def _loaded(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    attention: Literal["tree", "rows"],
    device: torch.device | str,
    chunk_tokens: int,
) -> LoadedPolicy:
    hf.eval()
    hf.to(device)  # type: ignore[arg-type]
    embeddings = hf.get_input_embeddings()
    if isinstance(embeddings, nn.Embedding):
        embeddings.padding_idx = None  # a policy is never padded, and its padding token may be its end of turn
    model = PolicyModel(hf, layout=tree_or_rows(hf, attention), chunk_tokens=chunk_tokens)
    if len(tokenizer) > model.num_embeddings:
        raise ModelError(
            "the tokenizer has more tokens than the policy has embeddings",
            where=name,
            got=f"{len(tokenizer)} tokens, {model.num_embeddings} embeddings",
            need="the tokenizer that the model was trained with",
        )
    return LoadedPolicy(model, tokenizer)


def _check_is_causal(config: PreTrainedConfig, name: str) -> None:
    known: Any = AutoModelForCausalLM._model_mapping
    if type(config) in known and any("SequenceClassification" in text for text in config.architectures or ()):
        raise ModelError(
            "this is a classifier, as reward models are: it cannot write completions",
            where=name,
            got=", ".join(config.architectures or ()),
            need="a causal language model as policy.model_name",
        )
    if type(config) not in known and not hasattr(config, "auto_map"):
        raise ModelError(
            "transformers has no causal language model of this family",
            where=name,
            got=config.model_type,
            need="a decoder that predicts the next token",
        )
