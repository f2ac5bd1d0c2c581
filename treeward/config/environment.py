"""`RewardModelEnvironmentConfig`: a reward model as the environment of an RL loop, and where it runs.

    env:
      reward_model:
        model_name: results/rm/final
        precision: bfloat16
        batch_size: 32                              # conversations in one forward pass
        resources: {gpus_per_node: 2, num_nodes: 1} # two replicas share the load

The keys are those of NeMo RL's reward-model environment. What it lists as unsupported (dynamic batching, packed
sequences, offloading to the CPU) works here; a model sharded over several GPUs does not yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, NonNegativeInt, PositiveFloat, PositiveInt, Tag, model_validator

from treeward.config.base import Strict
from treeward.config.ensemble import EnsembleConfig
from treeward.config.policy import (
    BatchingConfig,
    Precision,
    RewardModelConfig,
    ScoringTokenizerConfig,
    ShardingConfig,
    take_batching_budget,
)
from treeward.config.reward_shaping import ShapingOrContract

__all__ = ["ResourcesConfig", "RewardModelEnvironmentConfig"]

# Error locations leave out tags in angle brackets.
_OneOrSeveral = Annotated[
    Annotated[str, Tag("<one>")] | Annotated[tuple[str, ...], Tag("<several>")],
    Discriminator(lambda raw: "<several>" if isinstance(raw, list | tuple) else "<one>"),
]


class ResourcesConfig(Strict):
    """The GPUs that replicas of the model run on, one replica on each."""

    gpus_per_node: NonNegativeInt = 1
    """Replicas on each node, each with its GPU where the machines have any; 0 is on the CPU in any case."""
    num_nodes: PositiveInt = 1
    """Nodes."""


class ScoringDTensorConfig(ShardingConfig):
    """How the model is sharded, and what is moved to save memory."""

    _can_offload: ClassVar[bool] = True
    _saves_memory: ClassVar[str] = (
        "each GPU of `resources` holds a replica of the whole model; precision: bfloat16, cpu_offload and a smaller "
        "batch_size save memory"
    )

    enabled: bool = True
    """Has no effect while `tensor_parallel_size` is 1."""
    cpu_offload: bool = False
    """Keep the weights in the CPU's memory and move them to the GPU for each step only, to leave room for the policy.
    Without a GPU it has no effect."""
    activation_checkpointing: bool = False
    """Has no effect: scoring keeps no activations."""


class RewardModelEnvironmentConfig(Strict):
    """A reward model as the environment of an RL loop."""

    other_forms: ClassVar[tuple[str, ...]] = ("cpu_offload", "activation_checkpointing")

    enabled: bool = True
    """Use this environment. It must be true where the environment is made in Python."""
    model_name: _OneOrSeveral
    """Folder or hub name of a reward model; several of them need `ensemble`."""
    tokenizer: ScoringTokenizerConfig = ScoringTokenizerConfig()
    """The tokenizer, and how conversations are rendered."""
    trust_remote_code: bool = False
    """Execute Python code that the model's repository brings. Off: nothing that is downloaded is executed."""
    reward_model_cfg: RewardModelConfig = RewardModelConfig()
    """What kind of reward model it is."""
    head_weights: tuple[float, ...] | None = None
    """Weight of each head in the score, for a model with several heads. None: as in its scoring contract."""

    precision: Precision = "bfloat16"
    """Number format of the backbone's weights, `bfloat16` or `float32` (also `bf16`, `fp32`). The head is float32 in
    any case. Scores differ between the two by the rounding of the weights."""
    batch_size: PositiveInt | None = None
    """Most conversations in one forward pass. None: only `batch_tokens` limits it."""
    batch_tokens: PositiveInt | None = None
    """Most tokens in one forward pass, counted after sharing prefixes. None: 4096, unless `batch_size` is given."""
    max_model_len: PositiveInt | None = None
    """Longest conversation, in tokens. None: as in the model's scoring contract,
    otherwise all of its positions."""
    truncation: Literal["drop", "truncate_left", "error"] | None = None
    """Longer conversations have no reward (`drop`), lose the oldest tokens of their context (`truncate_left`), or are
    an error (`error`). None: as in the model's scoring contract."""

    reward_shaping: ShapingOrContract | None = None
    """How scores become rewards; `contract` takes the section of the model's scoring contract. None: a reward is the
    score."""
    ensemble: EnsembleConfig | None = None
    """How the scores of several models or heads become one."""

    resources: ResourcesConfig = ResourcesConfig()
    """The GPUs that replicas of the model run on."""
    num_replicas: PositiveInt | None = None
    """Replicas of the model, which share the load. None: one for each GPU of `resources`, otherwise
    one."""
    cpus_per_replica: PositiveFloat = 1.0
    """CPUs that Ray reserves for a replica; also its threads where it has no GPU."""
    max_retries: NonNegativeInt = 3
    """Further attempts of a part of a step after its worker died. Ray restarts the worker."""
    worker_timeout_seconds: PositiveFloat | None = None
    """Time limit of a worker for its part of a step; then it is killed, and the part is tried again. None: no limit.
    Has no effect where the model runs in the caller's process."""
    start_timeout_seconds: PositiveFloat = 1800.0
    """Time limit for placing the workers and loading the model."""
    on_failure: Literal["mask", "raise"] = "mask"
    """Samples without a reward are NaN, with the reason in the metadata (`mask`), or the step fails (`raise`)."""

    dtensor_cfg: ScoringDTensorConfig = ScoringDTensorConfig()
    """How the model is sharded, and what is moved to save memory."""
    dynamic_batching: BatchingConfig = BatchingConfig()
    """Accepted in either state: a forward pass is always filled up to a limit."""
    sequence_packing: BatchingConfig = BatchingConfig()
    """Accepted in either state: conversations are always packed."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model, or each of an ensemble."""
        return (self.model_name,) if isinstance(self.model_name, str) else self.model_name

    @property
    def num_workers(self) -> int:
        """Replicas of the model."""
        return self.num_replicas or max(self.resources.gpus_per_node, 1) * self.resources.num_nodes

    @model_validator(mode="before")
    @classmethod
    def _take_other_forms(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        raw = dict(raw)
        for key in cls.other_forms:
            sharding = raw.get("dtensor_cfg") or {}
            if key in raw and isinstance(sharding, Mapping):
                raw["dtensor_cfg"] = {key: raw.pop(key), **sharding}
        return take_batching_budget(raw, "batch_tokens", "batch_size")

    def check(self) -> None:
        names = self.model_names
        self.refuse(not self.enabled, "this environment is switched off", "enabled", need="true")
        self.refuse(not names, "there is no model", "model_name", need="a folder or hub name")
        self.refuse(
            len(names) > 1 and (self.ensemble is None or self.ensemble.over != "models"),
            "model_name names several models, and no ensemble over models combines their scores",
            "model_name ensemble",
            need="one model, or an `ensemble` section with over: models",
        )
        is_extra = len(names) > 1 and self.tokenizer != ScoringTokenizerConfig()
        summary = "the models of an ensemble use their own tokenizers and templates"
        self.refuse(is_extra, summary, "tokenizer", need="no such section")
        gpus = self.resources.gpus_per_node * self.resources.num_nodes
        is_given = "resources" in self.model_fields_set and self.num_replicas is not None
        self.refuse(
            is_given and gpus not in (0, self.num_replicas),
            "num_replicas and resources contradict each other",
            "num_replicas resources.gpus_per_node resources.num_nodes",
            need="a replica for each GPU, or resources.gpus_per_node: 0 for replicas on the CPU",
        )
