"""`PolicyConfig`: the model that is trained, and how.

    policy:
      model_name: meta-llama/Llama-3.2-1B-Instruct
      train_global_batch_size: 128          # comparisons per optimiser step
      max_total_sequence_length: 4096       # tokens

The section is called `policy` as in the configs of RL toolkits. In a run of `treeward train` it holds the reward model.
`TrainedModelConfig` is what that has in common with the policy of GRPO (`treeward.config.grpo_policy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, model_validator

from treeward.config.base import Strict
from treeward.config.optimisation import NamedScheduleConfig, OptimizerConfig, SchedulerConfig
from treeward.errors import ConfigError

__all__ = ["DEFAULT_MICRO_BATCH_TOKENS", "DEFAULT_VOCAB_SIZE", "BatchingConfig", "PolicyConfig", "Precision"]
__all__ += ["RewardModelConfig", "ScoringTokenizerConfig", "ShardingConfig", "TokenizerConfig", "TrainedModelConfig"]
__all__ += ["take_batching_budget"]

DEFAULT_MICRO_BATCH_TOKENS = 4096
DEFAULT_VOCAB_SIZE = 4096

_PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}

Precision = Annotated[
    Literal["float32", "bfloat16"],
    BeforeValidator(lambda name: _PRECISIONS.get(name, name) if isinstance(name, str) else name),
]


class ShardingConfig(Strict):
    """How the model is sharded over processes, and what is recomputed to save memory."""

    _can_offload: ClassVar[bool] = False
    _saves_memory: ClassVar[str] = "activation checkpointing and a smaller policy.train_micro_batch_tokens save memory"

    enabled: bool = True
    """Has no effect in one process, which is all that is supported yet."""
    activation_checkpointing: bool = False
    """Keep one activation per layer and compute the others again in the backward pass: slower, with far less memory."""
    cpu_offload: bool = False
    """Not supported yet: must be false."""
    tensor_parallel_size: PositiveInt = 1
    """Not supported yet: must be 1."""
    context_parallel_size: PositiveInt = 1
    """Not supported yet: must be 1."""
    custom_parallel_plan: str | None = None
    """Not supported yet: must be null."""

    def check(self) -> None:
        for key in ("tensor_parallel_size", "context_parallel_size", "custom_parallel_plan", "cpu_offload"):
            default = ShardingConfig.model_fields[key].default
            is_given = getattr(self, key) != default and not (key == "cpu_offload" and self._can_offload)
            need = "null" if default is None else str(default).lower()
            self.refuse(is_given, f"{key} is not supported yet", key, need=need, fix=self._saves_memory)


class DTensorConfig(ShardingConfig):
    """How the model is sharded over processes, and what is recomputed to save memory."""


class BatchingConfig(Strict):
    """NeMo RL's sections on batching. Micro-batches are always filled to a token budget, and trees are always packed;
    an enabled section sets the budget."""

    enabled: bool = False
    """True: `train_mb_tokens` is the budget of a forward pass, instead of a number of sequences."""
    train_mb_tokens: PositiveInt | None = None
    """Tokens of a forward pass. None: the budget stays as it is."""


def take_batching_budget(raw: Any, tokens_key: str, size_key: str) -> Any:
    """Set `tokens_key` from an enabled batching section, unless it is given; such configs carry `size_key` too, and
    mean that the budget replaces it."""
    if not isinstance(raw, Mapping) or raw.get(tokens_key) is not None:
        return raw
    for name in ("dynamic_batching", "sequence_packing"):
        section = raw.get(name)
        if isinstance(section, Mapping) and section.get("enabled") and section.get("train_mb_tokens") is not None:
            return {**raw, tokens_key: section["train_mb_tokens"], size_key: None}
    return raw


class ScoringTokenizerConfig(Strict):
    """The tokenizer, and how conversations are rendered. By default as the model was trained."""

    name: str | None = None
    """Hub name or folder. None: the model's own."""
    chat_template: Annotated[str | None, BeforeValidator(lambda text: None if text == "default" else text)] = None
    """A Jinja template, or the path of a file that holds one. None (or `default`): the model's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed through to the chat template. None: those of the model's scoring contract, if it has one."""


class TokenizerConfig(ScoringTokenizerConfig):
    """The tokenizer, and how conversations are rendered."""

    name: str | None = None
    """Hub name or folder. None: that of `policy.model_name`; for a bare `model_config`, a tokenizer is trained on the
    training data."""
    vocab_size: PositiveInt | None = None
    """Size of a tokenizer that is trained. None: the `vocab_size` of `model_config`, otherwise 4096."""


class RewardModelConfig(Strict):
    """What kind of reward model it is."""

    enabled: Literal[True] = True
    """Must be true."""
    reward_model_type: Literal["bradley_terry"] = "bradley_terry"
    """One score per conversation; P(a is preferred to b) = sigmoid(score(a) - score(b))."""


class TrainedModelConfig(Strict):
    """What a model that is trained needs, whatever it is trained for."""

    model_name: str | None = None
    """Hub name or folder of a causal language model or a sequence classifier."""
    architecture: dict[str, Any] | None = Field(default=None, alias="model_config")
    """Instead of `model_name`: a bare transformers configuration, as `{model_type: qwen3, hidden_size: 128, ...}`,
    initialised from the seed."""
    trust_remote_code: bool = False
    """Execute Python code that the model's repository brings. Off: nothing that is downloaded is executed."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer, and how conversations are rendered."""

    train_global_batch_size: PositiveInt | None = None
    """How much one optimiser step learns from."""
    train_micro_batch_size: PositiveInt | None = None
    """Most comparisons in one forward pass. None: only `train_micro_batch_tokens` limits it."""
    train_micro_batch_tokens: PositiveInt | None = None
    """Most tokens in one forward pass, counted after sharing prefixes; one conversation alone may exceed it.
    None: 4096, unless `train_micro_batch_size` is given."""
    max_total_sequence_length: PositiveInt = 4096
    """Longest conversation, in tokens."""

    precision: Precision = "float32"
    """`float32` or `bfloat16` (also `fp32`, `bf16`). The score head is float32 in any case."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """`torch.set_float32_matmul_precision`: what a float32 matrix product may trade for speed."""
    attention: Literal["tree", "rows"] = "tree"
    """`tree` computes common prefixes once; `rows` pads plain rows, for comparison and for models that cannot share."""
    activation_checkpointing_enabled: bool = False
    """Older spelling of `dtensor_cfg.activation_checkpointing`; either of them switches it on."""

    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this norm. None: never."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimiser."""
    scheduler: SchedulerConfig = NamedScheduleConfig()
    """The learning-rate schedule; null is constant."""

    dtensor_cfg: ShardingConfig = ShardingConfig()
    """How the model is sharded."""
    dynamic_batching: BatchingConfig = BatchingConfig()
    """Accepted in either state: micro-batches are always filled to a token budget."""
    sequence_packing: BatchingConfig = BatchingConfig()
    """Accepted in either state: trees are always packed."""

    @property
    def activation_checkpointing(self) -> bool:
        """Whether activations are computed again in the backward pass."""
        return self.activation_checkpointing_enabled or self.dtensor_cfg.activation_checkpointing

    @property
    def micro_batch_tokens(self) -> int | None:
        """The token budget of one forward pass; None if only `train_micro_batch_size` limits it."""
        if self.train_micro_batch_tokens is None and self.train_micro_batch_size is None:
            return DEFAULT_MICRO_BATCH_TOKENS
        return self.train_micro_batch_tokens

    @property
    def trained_vocab_size(self) -> int | None:
        """The size of the tokenizer that is to be trained; None if a ready one is loaded."""
        if self.architecture is None or self.tokenizer.name is not None:
            return None
        return self.tokenizer.vocab_size or self.architecture.get("vocab_size") or DEFAULT_VOCAB_SIZE

    @model_validator(mode="before")
    @classmethod
    def _take_the_budget_of_batching_sections(cls, raw: Any) -> Any:
        return take_batching_budget(raw, "train_micro_batch_tokens", "train_micro_batch_size")

    def check(self) -> None:
        architecture, trained = self.architecture or {}, self.trained_vocab_size
        is_neither = self.model_name is None and self.architecture is None
        self.refuse(is_neither, "there is no model", "model_name", need="a hub name or a folder")
        self.refuse(
            self.model_name is not None and self.architecture is not None,
            "model_name and model_config exclude each other",
            "model_name",
            need="no policy.model_config to load a model, or no policy.model_name to train one from scratch",
        )
        if self.architecture is not None and not isinstance(architecture.get("model_type"), str):
            got, need = architecture.get("model_type"), "a model type of transformers, as qwen3 or llama"
            summary = "a bare model_config does not say its family"
            raise ConfigError(summary, field="model_config.model_type", got=got, need=need)
        size, whole = self.train_micro_batch_size, self.train_global_batch_size
        self.refuse(
            size is not None and whole is not None and size > whole,
            "train_micro_batch_size is larger than train_global_batch_size",
            "train_micro_batch_size train_global_batch_size",
            need="at most as many in a forward pass as in an optimiser step",
        )
        self.refuse(
            trained is None and self.tokenizer.vocab_size is not None,
            "vocab_size is given for a tokenizer that is not trained",
            "tokenizer.vocab_size tokenizer.name",
            need="no such key, or policy.model_config with no policy.tokenizer.name",
        )
        rows = architecture.get("vocab_size")
        self.refuse(
            trained is not None and isinstance(rows, int) and rows < trained,
            "the tokenizer has more tokens than the model has embeddings",
            "tokenizer.vocab_size",
            need=f"at most {rows} tokens, the vocab_size of model_config",
        )


class PolicyConfig(TrainedModelConfig):
    """The model, its batches, its numerics and its optimiser."""

    train_global_batch_size: PositiveInt = 128
    """Comparisons per optimiser step."""
    dtensor_cfg: DTensorConfig = DTensorConfig()
    """How the model is sharded."""
    reward_model_cfg: RewardModelConfig = RewardModelConfig()
    """What kind of reward model is trained."""
