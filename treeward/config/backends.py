"""How the model is spread and batched: the sections that NeMo RL's configs carry for its backends.

What treeward does by itself is accepted in either state (trees are always packed); what it cannot do yet is accepted
while it is off and refused, with the reason, when it is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import ConfigDict, PositiveInt, model_validator

from treeward.config.base import Strict
from treeward.errors import ConfigError

__all__ = ["DTensorConfig", "DisabledSection", "DynamicBatchingConfig", "MegatronConfig", "SequencePackingConfig"]


class DisabledSection(Strict):
    """A section of another toolkit: anything goes while it is disabled, and enabling it is an error."""

    model_config = ConfigDict(extra="allow")

    reason: ClassVar[str]
    """Why it cannot be enabled: the error's summary."""
    remedy: ClassVar[str]

    enabled: bool = False
    """Must be false; the section's other keys are then not read."""

    @model_validator(mode="after")
    def _is_disabled(self) -> DisabledSection:
        if self.enabled:
            raise ConfigError(self.reason, field="enabled", got="true", need="false", fix=self.remedy)
        return self


class MegatronConfig(DisabledSection):
    """Megatron-Core: accepted while disabled."""

    reason = "treeward has no Megatron backend"
    remedy = "set policy.megatron_cfg.enabled=false: the model runs on PyTorch's own parallelism"


class LoraConfig(DisabledSection):
    """Low-rank adapters: accepted while disabled."""

    reason = "low-rank adapters are not supported yet"
    remedy = "set policy.dtensor_cfg.lora_cfg.enabled=false: the whole model is trained"


class DTensorConfig(Strict):
    """How the model is sharded over processes, and what is recomputed or moved to save memory."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        "_v2": "there is one implementation",
        "clear_cache_every_n_steps": "micro-batches are planned to one size, so the allocator does not fragment",
        "env_vars": "the environment is set where the command is started",
    }

    enabled: bool = True
    """Has no effect in one process, which is all that is supported yet."""
    activation_checkpointing: bool = False
    """Keep one activation per layer and compute the others again in the backward pass: slower, far less memory."""
    cpu_offload: bool = False
    """Not supported yet: must be false."""
    sequence_parallel: bool = False
    """Has no effect while `tensor_parallel_size` is 1."""
    tensor_parallel_size: PositiveInt = 1
    """Not supported yet: must be 1."""
    context_parallel_size: PositiveInt = 1
    """Not supported yet: must be 1."""
    custom_parallel_plan: str | None = None
    """Not supported yet: must be null."""
    lora_cfg: LoraConfig = LoraConfig()
    """Not supported yet: must be disabled."""

    @model_validator(mode="after")
    def _refuse_what_is_not_there_yet(self) -> DTensorConfig:
        supported: dict[str, Any] = {
            "tensor_parallel_size": 1,
            "context_parallel_size": 1,
            "cpu_offload": False,
            "custom_parallel_plan": None,
        }
        for key, value in supported.items():
            if getattr(self, key) != value:
                shown = "null" if value is None else str(value).lower()
                raise ConfigError(
                    f"{key} is not supported yet",
                    field=key,
                    got=getattr(self, key),
                    need=shown,
                    fix=f"set policy.dtensor_cfg.{key}={shown}; activation checkpointing and a smaller "
                    "policy.train_micro_batch_tokens save memory",
                )
        return self


class DynamicBatchingConfig(Strict):
    """Accepted in either state: micro-batches are always filled to a token budget."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        "logprob_mb_tokens": "training a reward model computes no log-probabilities",
        "sequence_length_round": "packed trees are not padded",
    }

    enabled: bool = False
    """True: `train_mb_tokens` is the budget, instead of `policy.train_micro_batch_size`."""
    train_mb_tokens: PositiveInt | None = None
    """Becomes `policy.train_micro_batch_tokens` where that is null and the section is enabled."""


class SequencePackingConfig(DynamicBatchingConfig):
    """Accepted in either state: trees are always packed into one row."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        **DynamicBatchingConfig.ignored_keys,
        "algorithm": "the planner packs in an order that the seed determines",
        "fuse_loss": "the loss reads one score per branch",
        "max_sequences_per_bin": "the token budget alone limits a micro-batch",
    }
