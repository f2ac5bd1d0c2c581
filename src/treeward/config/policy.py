"""`PolicyConfig`: the model that is trained, and how. In a run of `treeward train` that is the
reward model.

    policy: {model_name: meta-llama/Llama-3.2-1B-Instruct, train_global_batch_size: 128}

A schedule may also be a list of PyTorch schedulers, with the steps at which one follows another as
its last entry: `[{name: torch.optim.lr_scheduler.LinearLR, kwargs: {...}}, {name: ...},
{milestones: [10]}]`.

`TrainedModelConfig` is what it has in common with the policy of GRPO
(`treeward.config.grpo_policy`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from treeward.config.base import Strict, as_yaml, instead_of
from treeward.config.loss import LOSSES, RewardModelType
from treeward.errors import ConfigError

DottedPath = Annotated[str, Field(pattern=r"\w\.\w")]
"""The dotted path of a class."""


class OptimizerConfig(Strict):
    """A class of `torch.optim`, or any other with its interface, and its arguments."""

    name: DottedPath = "torch.optim.AdamW"
    """Dotted path of the class."""
    kwargs: dict[str, Any] = Field(default_factory=lambda: {"lr": 3e-6})
    """Its arguments, with `lr`, the peak of the schedule."""

    @field_validator("kwargs")
    @classmethod
    def _check_kwargs(cls, kwargs: dict[str, Any]) -> dict[str, Any]:
        lr = kwargs.get("lr")
        if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr < math.inf:
            raise ConfigError(
                "there is no learning rate",
                field="lr",
                got=as_yaml(lr),
                need="a positive number, as 3.0e-6",
            )
        return kwargs


class NamedScheduleConfig(Strict):
    """A schedule over the whole run: warm up linearly, then stay or fall."""

    name: Literal["constant", "linear", "cosine"] = "linear"
    """After the warm-up the rate is `constant`, or falls to `min_lr_ratio` by the last step
    (`linear`, `cosine`)."""
    warmup_steps: NonNegativeInt | None = None
    """Optimiser steps of linear warm-up from zero. None: by `warmup_ratio`."""
    warmup_ratio: float | None = Field(default=None, ge=0.0, lt=1.0)
    """Warm-up as a fraction of all steps. None, and no `warmup_steps`: no warm-up."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """The last learning rate as a fraction of the peak."""

    def check(self) -> None:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise self.error("warmup_steps warmup_ratio", "at most one of them")


class TorchSchedulerConfig(Strict):
    """One class of `torch.optim.lr_scheduler` and its arguments."""

    name: DottedPath
    """Dotted path of the class, as `torch.optim.lr_scheduler.LinearLR`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, without the optimiser; steps are optimiser steps."""


class TorchScheduleConfig(Strict):
    """PyTorch schedulers, one after another."""

    schedulers: tuple[TorchSchedulerConfig, ...] = Field(min_length=1)
    """The schedulers in their order."""
    milestones: tuple[PositiveInt, ...] = ()
    """The optimiser steps at which the second and later schedulers begin."""

    def check(self) -> None:
        num_steps = len(self.schedulers) - 1
        rising = sorted(set(self.milestones))
        if len(self.milestones) != num_steps or list(self.milestones) != rising:
            need = f"{num_steps} rising steps: where each scheduler but the first begins"
            raise self.error("milestones", need)


def _schedule(raw: Any) -> Any:
    """The section of a schedule's name, of null (constant), of PyTorch schedulers, or of one of
    them."""
    if raw is None or isinstance(raw, str):
        raw = {"name": "constant" if raw is None else raw}
    if isinstance(raw, Mapping) and ("kwargs" in raw or "." in str(raw.get("name", ""))):
        raw = [raw]
    if isinstance(raw, Sequence):
        schedulers: list[Any] = []
        milestones: list[Any] = []
        for entry in raw:
            # NeMo RL writes the steps between the schedulers as an element of their list.
            if isinstance(entry, Mapping) and list(entry) == ["milestones"]:
                milestones.append(entry["milestones"])
            else:
                schedulers.append(entry)
        if len(milestones) > 1:
            raise ConfigError(
                "milestones are given more than once", got=milestones, need="one list of steps"
            )
        raw = {"schedulers": schedulers, "milestones": ()}
        if milestones:
            raw["milestones"] = milestones[0]
    if isinstance(raw, Strict):
        return raw
    if not isinstance(raw, Mapping):
        # Here: pydantic would tell it twice, of each kind of section, by names of its own.
        raise ConfigError(
            "this is no schedule",
            got=raw,
            need="constant, linear or cosine, its section, or a list of PyTorch schedulers",
        )
    keys = {str(key): value for key, value in raw.items()}
    if "schedulers" in keys:
        return TorchScheduleConfig(**keys)
    return NamedScheduleConfig(**keys)


SchedulerConfig = Annotated[NamedScheduleConfig | TorchScheduleConfig, BeforeValidator(_schedule)]


_MICRO_BATCH_TOKENS = 4096
_VOCAB_SIZE = 4096
_PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _long_name(precision: Any) -> str:
    # PyTorch prints its own as torch.bfloat16.
    name = str(precision)
    return _PRECISIONS.get(name, name.removeprefix("torch."))


Precision = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_long_name)]
"""The precisions of a model that is trained."""
ScoringDtype = Literal["float32", "bfloat16", "float16"]
"""The precisions of a reward model that only scores."""
ScoringPrecision = Annotated[ScoringDtype, BeforeValidator(_long_name)]


class ShardingConfig(Strict):
    """How the model is sharded over processes, and what is recomputed to save memory."""

    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: slower, with far less memory. Scoring keeps
    none anyway."""
    dp_replicate_size: PositiveInt = 1
    """Copies of the model (hybrid sharding): each is sharded over the processes divided by this.
    The number of nodes keeps the gathering of weights within a node."""
    tensor_parallel_size: PositiveInt = 1
    """Processes that compute each layer together, each some heads and columns; they must divide the
    heads."""


class ResourcesConfig(Strict):
    """The GPUs of a model's replicas or engines, each on one, or on `tensor_parallel_size`."""

    # NeMo RL's files have null in both, where generation is colocated.
    gpus_per_node: Annotated[NonNegativeInt, instead_of(None, 0)] = 1
    """GPUs on each node; where the machines have none, as many processes on CPUs. 0 (or null):
    none, the CPU."""
    num_nodes: Annotated[PositiveInt, instead_of(None, 1)] = 1
    """Nodes."""


class LoraConfig(Strict):
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): the model stays frozen, and a
    product of two small matrices trains beside each adapted linear layer; of a reward model the
    head trains too. For GRPO the frozen model is the KL reference as well, and costs no memory."""

    enabled: bool = False
    """Train adapters instead of the whole model."""
    dim: PositiveInt = 8
    """The rank of the adapters."""
    alpha: PositiveFloat = 32
    """The adapters' product is multiplied by alpha / dim."""
    match_all_linear: bool = True
    """Adapt every linear layer but the output layer, those whose weights a fused kernel of Mamba
    reads itself, and those of `exclude_modules`."""
    target_modules: tuple[str, ...] = ()
    """With `match_all_linear: false`: the layers, by the last part of a name (`q_proj`) or patterns
    (`*.mlp.*`). Empty: all but those of `exclude_modules`."""
    exclude_modules: tuple[str, ...] = ()
    """Layers that are not adapted, in the same form."""

    def check(self) -> None:
        # All layers or named ones; both at once, or neither, would be a guess.
        names_layers = self.target_modules or (self.exclude_modules and not self.match_all_linear)
        if self.enabled and self.match_all_linear == bool(names_layers):
            need = (
                "match_all_linear: true, or false with layers in target_modules or "
                "exclude_modules, as [q_proj]"
            )
            raise self.error("target_modules match_all_linear", need)


class PolicyDTensorConfig(ShardingConfig):
    """How the model is sharded over processes, what is recomputed to save memory, and its
    adapters."""

    cpu_offload: bool = False
    """Keep the optimiser's states and float32 weights in the host's memory: 12 bytes a parameter
    less on the GPU. With several processes also the weights and gradients, each of which is on the
    GPU only while a layer is computed."""
    lora_cfg: LoraConfig = LoraConfig()

    def check(self) -> None:
        if self.tensor_parallel_size > 1 and self.lora_cfg.enabled:
            keys = "tensor_parallel_size lora_cfg.enabled"
            need = "1 with adapters, which are not cut"
            fix = "save memory with activation_checkpointing or fewer "
            fix += "policy.train_micro_batch_tokens"
            raise self.error(keys, need, fix)


class ScoringTokenizerConfig(Strict):
    """The tokenizer, and how conversations are rendered. By default as the model was trained."""

    name: str | None = None
    """Hub name or folder. None: the model's own."""
    # NeMo RL writes "default" for the tokenizer's own.
    chat_template: Annotated[str | None, instead_of("default", None)] = None
    """A Jinja template, or the path of a file that holds one. None (or `default`): the model's
    own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed through to the chat template. None: those of the model's scoring contract, if it has
    one."""
    num_bos: Literal[0, 1, 2] | None = None
    """BOS tokens at the beginning of a conversation. None: as the model was trained; a new reward
    model gets one where its tokenizer adds one to any text."""

    @property
    def rendering(self) -> dict[str, Any]:
        """The arguments of a `Renderer` that do not follow the model."""
        return self.model_dump(
            include={"chat_template", "chat_template_kwargs", "num_bos"}, exclude_none=True
        )


class TokenizerConfig(ScoringTokenizerConfig):
    """The tokenizer, and how conversations are rendered."""

    name: str | None = None
    """Hub name or folder. None: that of `policy.model_name`; for a bare `model_config` one is
    trained on the data."""
    vocab_size: PositiveInt | None = None
    """Size of a tokenizer that is trained. None: the `vocab_size` of `model_config`, otherwise
    4096."""


class RewardModelConfig(Strict):
    """What kind of reward model it is."""

    # NeMo RL's files make a model a reward model by it; here there is no other kind.
    enabled: Literal[True] = True
    """Must be true."""
    reward_model_type: RewardModelType = "bradley_terry"
    """What scores mean, and so the loss: P(a is preferred to b) = sigmoid(score(a) - score(b)); the
    same over whole rankings (`plackett_luce`); a grade, `score` in the data (`regression`);
    several (`attributes`); or the probability that each step is right (`process`)."""
    attributes: tuple[str, ...] = ()
    """The grades that `attributes` learns, as [helpfulness, correctness]: keys of each completion,
    a head for each."""
    attribute_weights: dict[str, float] | Literal["mean"] = "mean"
    """How the heads make one score: a weight for each (0 where it has none), or their mean."""
    num_heads: PositiveInt = 1
    """Heads that learn the same score, each from other initial weights: the score is their mean,
    and their spread says where they agree. Not for `attributes`."""
    freeze_backbone: bool = False
    """Train the head alone. The backbone reads the data once, before the first step; the hidden
    states that the head reads are kept in `data.cache_dir`, also for later runs."""
    step_token: str | None = None
    """`process`: the mark after each step, at which the step is read. It must be one token of the
    tokenizer that no text and no chat template has. None: a token that the tokenizer keeps in
    reserve, as `<extra_0>` or `<|fim_pad|>`."""
    step_score: Literal["product", "min", "last"] = "product"
    """`process`: what the exported model makes of the probabilities of the steps."""

    @property
    def learns_steps(self) -> bool:
        """Whether it is a process reward model."""
        return LOSSES[self.reward_model_type].learns == "steps"

    @property
    def unit(self) -> str:
        """What an optimiser step has a number of, for a person."""
        return "problems" if self.learns_steps else "comparisons"

    @property
    def labels(self) -> tuple[str, ...]:
        """The grades that are learnt, one by each head; none where the data's order is."""
        if LOSSES[self.reward_model_type].learns != "grades":
            return ()
        return self.attributes or ("score",)

    @property
    def head_names(self) -> tuple[str, ...]:
        """The names of the heads; none for a single score without a grade, and for published
        models, which have own. Of a process reward model, those of TRL: a step is wrong, or
        right."""
        if self.learns_steps:
            return ("LABEL_0", "LABEL_1")
        if self.num_heads == 1:
            return self.labels
        return tuple(f"LABEL_{h}" for h in range(self.num_heads))


class TrainedModelConfig(Strict):
    """What a model that is trained needs, whatever it is trained for."""

    model_name: str | None = None
    """Hub name or folder of a causal language model or a sequence classifier."""
    architecture: dict[str, Any] | None = Field(default=None, alias="model_config")
    """Instead of `model_name`: a bare transformers configuration, as `{model_type: qwen3,
    hidden_size: 128, ...}`."""
    trust_remote_code: bool = False
    """Execute Python code that the model's repository brings. Off: nothing that is downloaded is
    executed."""
    tokenizer: TokenizerConfig = TokenizerConfig()

    train_global_batch_size: PositiveInt | None = None
    """How much one optimiser step learns from."""
    train_micro_batch_size: PositiveInt | None = None
    """Most comparisons in one forward pass; GRPO multiplies it by `max_total_sequence_length` for a
    budget."""
    train_micro_batch_tokens: PositiveInt | None = None
    """Most tokens in one forward pass, after sharing prefixes. None: 4096, unless
    `train_micro_batch_size` is given."""
    max_total_sequence_length: PositiveInt = 4096
    """Longest conversation, in tokens; longer completions are left out of training and counted,
    unless `data.truncation` says otherwise. Of GRPO, the longest prompt with its completion."""

    precision: Precision = "float32"
    """`float32` or `bfloat16` (also `fp32`, `bf16`): of weights and activations. The score head,
    the loss and the weights that the optimiser steps (masters) are float32 in any case."""
    load_in_4bit: bool = False
    """QLoRA: load the frozen weights of linear layers as nf4 of bitsandbytes, which needs
    `dtensor_cfg.lora_cfg`."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """`torch.set_float32_matmul_precision`: what a float32 matrix product may trade for speed."""
    deterministic: bool = False
    """Use only algorithms of PyTorch that give the same bits again, so that a resumed run on a GPU
    equals an undisturbed one; slower. On a CPU it does in any case."""
    attention: Literal["tree", "rows"] = "tree"
    """`tree` computes common prefixes once; `rows` pads plain rows, for comparison and for models
    that cannot share."""
    torch_compile: bool | None = None
    """Compile the decoder layers. None: where it can be done, which needs a GPU and a model that
    runs on trees and has heads of 16 numbers or more (Mamba 1 alone has no heads)."""
    use_liger_kernel: bool = False
    """Norms and gated MLPs by Liger's kernels. Needs CUDA and the extra `liger`."""

    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this norm. None: never."""
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = NamedScheduleConfig()
    """The learning-rate schedule; null is constant."""

    dtensor_cfg: PolicyDTensorConfig = PolicyDTensorConfig()

    @property
    def micro_batch_tokens(self) -> int | None:
        """The token budget of one forward pass; None if only `train_micro_batch_size` limits it."""
        if self.train_micro_batch_tokens is None and self.train_micro_batch_size is None:
            return _MICRO_BATCH_TOKENS
        return self.train_micro_batch_tokens

    @property
    def trains_backbone(self) -> bool:
        """Whether the weights that are loaded change, other than those of a score head."""
        return not self.dtensor_cfg.lora_cfg.enabled

    @property
    def trained_vocab_size(self) -> int | None:
        """The size of the tokenizer that is to be trained; None if a ready one is loaded."""
        if self.architecture is None or self.tokenizer.name is not None:
            return None
        return self.tokenizer.vocab_size or self.architecture.get("vocab_size") or _VOCAB_SIZE

    def check(self) -> None:
        if (self.model_name is None) == (self.architecture is None):
            need = "model_name, a hub name or a folder, or model_config to train from scratch"
            fix = "give policy.model_name or policy.model_config"
            raise self.error("model_name architecture", need, fix)
        architecture = self.architecture or {}
        if self.architecture is not None and not isinstance(architecture.get("model_type"), str):
            need = "with model_type, a model family of transformers, as qwen3 or llama"
            raise self.error("architecture", need)
        if self.load_in_4bit and not self.dtensor_cfg.lora_cfg.enabled:
            need = "adapters to train: 4-bit weights cannot be trained"
            fix = "set policy.dtensor_cfg.lora_cfg.enabled=true"
            raise self.error("load_in_4bit", need, fix)
        trained = self.trained_vocab_size
        # Rows of the embedding. More than tokens is no fault: models pad them to a round number.
        rows = architecture.get("vocab_size")
        if trained is None and self.tokenizer.vocab_size is not None:
            need = "no vocab_size, or policy.model_config with no policy.tokenizer.name"
            fix = "remove the size of a tokenizer that is trained: ~policy.tokenizer.vocab_size"
            raise self.error("tokenizer.vocab_size tokenizer.name", need, fix)
        if not isinstance(rows, int | None):
            raise self.error("architecture", "a whole number as vocab_size")
        if rows is not None and rows < (trained or 0):
            need = f"at most {rows}, the vocab_size of model_config"
            raise self.error("tokenizer.vocab_size", need)
        if self.use_liger_kernel and self.dtensor_cfg.tensor_parallel_size > 1:
            need = "false: Liger's kernels take whole weights"
            raise self.error("use_liger_kernel dtensor_cfg.tensor_parallel_size", need)


class PolicyConfig(TrainedModelConfig):
    """The model, its batches, its numerics and its optimiser."""

    train_global_batch_size: PositiveInt = 128
    """Comparisons per optimiser step."""
    reward_model_cfg: RewardModelConfig = RewardModelConfig()

    @property
    def trains_backbone(self) -> bool:
        return super().trains_backbone and not self.reward_model_cfg.freeze_backbone

    def check(self) -> None:
        super().check()
        key = "reward_model_cfg"
        kind = self.reward_model_cfg
        names = kind.attributes
        has_attributes = kind.reward_model_type == "attributes"
        if kind.learns_steps and kind.freeze_backbone:
            need = "false: the backbone's hidden states are kept for one read of each conversation"
            raise self.error(f"{key}.freeze_backbone {key}.reward_model_type", need)
        if kind.learns_steps and kind.num_heads > 1:
            need = "1 for the type process"
            raise self.error(f"{key}.num_heads {key}.reward_model_type", need)
        for name in ("step_token", "step_score"):
            default = RewardModelConfig.model_fields[name].default
            if not kind.learns_steps and getattr(kind, name) != default:
                need = "no such key, or the type process"
                raise self.error(f"{key}.{name} {key}.reward_model_type", need)
        if kind.freeze_backbone and self.dtensor_cfg.lora_cfg.enabled:
            keys = f"{key}.freeze_backbone dtensor_cfg.lora_cfg.enabled"
            need = "the head alone, or adapters with the head"
            raise self.error(keys, need, "set one of them to false")
        if has_attributes != bool(names) or len(set(names)) < len(names):
            need = "names of grades, each once, with type attributes alone"
            raise self.error(f"{key}.attributes {key}.reward_model_type", need)
        if isinstance(kind.attribute_weights, dict):
            for name in kind.attribute_weights.keys() - set(names):
                field = f"{key}.attribute_weights.{name}"
                raise ConfigError.unknown("a weight is of no attribute", name, names, field=field)
        if kind.num_heads > 1 and has_attributes:
            need = "1 for attributes, which have a head each: heads of one score are averaged"
            raise self.error(f"{key}.num_heads {key}.reward_model_type", need)
