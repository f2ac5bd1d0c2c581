"""How the model is spread and batched: the sections that NeMo RL's configs carry for its backends.

What treeward does by itself is accepted in either state (trees are always packed); what it cannot do yet is accepted
while it is off and refused, with the reason, when it is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, PositiveFloat, PositiveInt, model_validator

from treeward.config.base import Strict
from treeward.errors import ConfigError

__all__ = ["DTensorConfig", "DisabledSection", "DynamicBatchingConfig", "LoraConfig", "MegatronConfig"]
__all__ += ["PolicyDTensorConfig", "PolicyDynamicBatchingConfig", "PolicyPackingConfig", "SequencePackingConfig"]
__all__ += ["ShardingConfig"]


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


class DisabledLoraConfig(DisabledSection):
    """Low-rank adapters: accepted while disabled."""

    reason = "low-rank adapters of a reward model are not supported yet"
    remedy = "set policy.dtensor_cfg.lora_cfg.enabled=false: the whole model is trained"


class LoraConfig(Strict):
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): the policy is its frozen model and a product of two
    small matrices beside each adapted linear layer. The frozen model is the KL reference too, and costs no memory."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        "use_triton": "the adapters are plain matrix products",
        "dropout_position": "there is no dropout",
    }

    enabled: bool = False
    """Train adapters instead of the whole model."""
    dim: PositiveInt = 8
    """The rank of the adapters."""
    alpha: PositiveFloat = 32
    """The adapters' product is multiplied by alpha / dim."""
    match_all_linear: bool = True
    """Adapt every linear layer but the output layer and those of `exclude_modules`."""
    target_modules: tuple[str, ...] = ()
    """With `match_all_linear: false`: the layers to adapt, by the last part of their names (`q_proj`) or by patterns
    with `*` (`*.mlp.*`)."""
    exclude_modules: tuple[str, ...] = ()
    """Layers that are not adapted, in the same form."""
    lora_A_init: Literal["xavier", "uniform"] = "xavier"
    """How the first matrix is drawn: Xavier's normal distribution, or Kaiming's uniform one. The second begins at zero,
    so that training starts from the model itself."""
    dropout: float = 0.0
    """Must be 0: with dropout the policy of the update is not the one that sampled the answers, and the first ratio
    would not be 1."""

    @model_validator(mode="after")
    def _adapts_something(self) -> LoraConfig:
        if not self.enabled:
            return self
        if self.dropout != 0.0:
            raise ConfigError(
                "adapters have no dropout in reinforcement learning",
                field="dropout",
                got=self.dropout,
                need="0: otherwise the policy of the update is not the one that sampled, and ratios are noise",
                fix="set policy.dtensor_cfg.lora_cfg.dropout=0",
            )
        if self.match_all_linear and self.target_modules:
            raise ConfigError(
                "match_all_linear and target_modules contradict each other",
                field="target_modules",
                got=f"{list(self.target_modules)}, match_all_linear: true",
                need="one of the two",
                fix="set policy.dtensor_cfg.lora_cfg.match_all_linear=false to adapt only these",
            )
        if not self.match_all_linear and not self.target_modules:
            raise ConfigError(
                "no layer is adapted",
                field="target_modules",
                got="an empty list, match_all_linear: false",
                need="layers, as [q_proj, v_proj], or match_all_linear: true",
            )
        return self


class ShardingConfig(Strict):
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

    @model_validator(mode="after")
    def _refuse_what_is_not_there_yet(self) -> ShardingConfig:
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


class DTensorConfig(ShardingConfig):
    """How the model is sharded over processes, and what is recomputed or moved to save memory."""

    lora_cfg: DisabledLoraConfig = DisabledLoraConfig()
    """Must be disabled."""


class PolicyDTensorConfig(ShardingConfig):
    """How the policy is sharded over processes, what is recomputed to save memory, and its adapters."""

    lora_cfg: LoraConfig = LoraConfig()
    """Low-rank adapters."""


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


class PolicyDynamicBatchingConfig(DynamicBatchingConfig):
    """Accepted in either state: micro-batches are always filled to a token budget."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        **DynamicBatchingConfig.ignored_keys,
        "logprob_mb_tokens": "log-probabilities without gradients are computed in the micro-batches of training",
    }


class PolicyPackingConfig(SequencePackingConfig):
    """Accepted in either state: the answers to a prompt are always packed into one tree."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        **SequencePackingConfig.ignored_keys,
        **PolicyDynamicBatchingConfig.ignored_keys,
        "fuse_loss": "the loss reads one log-probability per token",
    }
