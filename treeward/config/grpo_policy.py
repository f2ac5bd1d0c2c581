"""`GRPOPolicyConfig`: the policy that GRPO trains, and how its answers are sampled.

policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 512          # answers per optimiser step
  max_total_sequence_length: 1024       # tokens of prompt and answer
  generation: {max_new_tokens: 512}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import PositiveInt, model_validator

from treeward.config.backends import PolicyDTensorConfig, PolicyDynamicBatchingConfig, PolicyPackingConfig
from treeward.config.generation import GenerationConfig
from treeward.config.policy import DEFAULT_MICRO_BATCH_TOKENS, TokenizerConfig, TrainedModelConfig
from treeward.errors import ConfigError

__all__ = ["GRPOPolicyConfig"]


class GRPOPolicyConfig(TrainedModelConfig):
    """The policy, its batches, its numerics, its optimiser and its generation."""

    _batch_unit: ClassVar[str] = "answers"

    ignored_keys: ClassVar[Mapping[str, str]] = {
        "logprob_batch_size": "log-probabilities without gradients are computed in the micro-batches of training",
        "offload_optimizer_for_logprob": "the optimiser's state stays where it is",
        "make_sequence_length_divisible_by": "packed trees are not padded",
        "refit_buffer_size_gb": "weights are handed to a server as files",
    }
    switched_off_keys: ClassVar[Mapping[str, str]] = {
        "reward_model_cfg": "train a reward model with `treeward train`; the reward of GRPO is env.reward_model",
        "draft": "set policy.draft.enabled=false: answers are sampled token by token",
        "router_replay": "set policy.router_replay.enabled=false",
    }

    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer, and how prompts are rendered for the policy; environments render them for their own models."""
    train_global_batch_size: PositiveInt | None = None
    """Answers that one optimiser step learns from: a multiple of `grpo.num_generations_per_prompt` that divides the
    answers of a step, `grpo.num_prompts_per_step` times `grpo.num_generations_per_prompt`. None: all of them."""
    train_micro_batch_size: PositiveInt | None = None
    """Stands for `train_micro_batch_tokens` where that is null: so many times `max_total_sequence_length`."""
    train_micro_batch_tokens: PositiveInt | None = None
    """Most tokens in one forward and backward pass, counted after sharing prompts; the answers to one prompt are never
    parted, and may exceed it. None: 4096, unless `train_micro_batch_size` is given."""
    max_total_sequence_length: PositiveInt = 4096
    """Longest prompt with its answer, in tokens."""

    generation_batch_size: PositiveInt = 64
    """Most answers that are sampled at once where `generation.batch_size` says nothing."""
    logprob_chunk_size: PositiveInt | None = None
    """Predicted tokens whose logits are in memory at a time. None: 1024."""
    hf_config_overrides: dict[str, Any] = {}
    """Keys of the configuration of `model_name` that are changed when it is loaded, as
    `{rope_parameters: {rope_type: default, rope_theta: 500000.0}}`; a `model_config` says its own."""
    generation: GenerationConfig = GenerationConfig()
    """How answers are sampled, and by what."""
    dtensor_cfg: PolicyDTensorConfig = PolicyDTensorConfig()
    """How the policy is sharded, and its low-rank adapters."""
    dynamic_batching: PolicyDynamicBatchingConfig = PolicyDynamicBatchingConfig()
    """Accepted in either state: micro-batches are always filled to a token budget."""
    sequence_packing: PolicyPackingConfig = PolicyPackingConfig()
    """Accepted in either state: trees are always packed."""

    @model_validator(mode="before")
    @classmethod
    def _lora_stands_in_dtensor_cfg(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and "lora_cfg" in raw:
            raise ConfigError(
                "lora_cfg stands in dtensor_cfg",
                field="lora_cfg",
                got=raw["lora_cfg"],
                need="policy.dtensor_cfg.lora_cfg",
                fix="move the section to policy.dtensor_cfg.lora_cfg",
            )
        return raw

    @property
    def micro_batch_tokens(self) -> int:
        """The token budget of one forward pass."""
        if self.train_micro_batch_tokens is None and self.train_micro_batch_size is not None:
            return self.train_micro_batch_size * self.max_total_sequence_length
        return self.train_micro_batch_tokens or DEFAULT_MICRO_BATCH_TOKENS

    @property
    def generated_at_once(self) -> int:
        """Most answers that are sampled at once."""
        return self.generation.batch_size or self.generation_batch_size

    @model_validator(mode="after")
    def _overrides_are_of_a_model(self) -> GRPOPolicyConfig:
        if self.hf_config_overrides and self.architecture is not None:
            raise ConfigError(
                "hf_config_overrides change a model that is loaded, and model_config builds one",
                field="hf_config_overrides",
                got=f"{self.hf_config_overrides}, with policy.model_config",
                need="one of the two",
                fix="give these keys in policy.model_config",
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> GRPOPolicyConfig:
        longest, new = self.max_total_sequence_length, self.generation.max_new_tokens
        if new is not None and new > longest:
            raise ConfigError(
                "generation.max_new_tokens is larger than max_total_sequence_length",
                field="generation.max_new_tokens",
                got=f"{new} tokens, policy.max_total_sequence_length: {longest}",
                need="at most policy.max_total_sequence_length; prompt and answer share it",
                fix="set policy.generation.max_new_tokens=null for what the prompt leaves",
            )
        key = "hf_config_overrides" if "max_position_embeddings" in self.hf_config_overrides else "model_config"
        known = self.hf_config_overrides if key == "hf_config_overrides" else self.architecture or {}
        positions = known.get("max_position_embeddings")
        if isinstance(positions, int) and positions < longest:
            raise ConfigError(
                "max_total_sequence_length is larger than the positions of the model",
                field="max_total_sequence_length",
                got=f"{longest} tokens, policy.{key}.max_position_embeddings: {positions}",
                need=f"at most {positions}",
                fix=f"set policy.max_total_sequence_length={positions}",
            )
        return self
