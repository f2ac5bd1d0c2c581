"""`GRPOPolicyConfig`: the policy that GRPO trains, and how completions are sampled.

    policy:
      model_name: Qwen/Qwen2.5-1.5B
      generation: {backend: hf, max_new_tokens: 512, temperature: 1.0}

With `backend: vllm` or `sglang` and a `url`, a server samples, and gets the weights of the policy.
With `backend: vllm` and no `url` the run starts engines of vLLM by itself.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from treeward.config.base import FilePath, Period, Strict, TextOrTexts
from treeward.config.policy import Precision, ResourcesConfig, TrainedModelConfig


class ColocatedConfig(Strict):
    """Whether generation shares the GPUs of training."""

    enabled: bool = True
    """Generation and training take turns on the same GPU. False: a server at `url`, or vLLM engines
    that the run starts on the GPUs of `resources`."""
    resources: ResourcesConfig = ResourcesConfig(gpus_per_node=0)


class VllmConfig(Strict):
    """The vLLM engines that the run starts; a server at `url` has settings of its own."""

    tensor_parallel_size: PositiveInt = 1
    """GPUs of one engine, all of one node. Colocated: it divides the number of processes."""
    precision: Precision | None = None
    """`bfloat16` or `float32`, of weights and arithmetic, in which the policy sends them. None:
    `bfloat16`."""
    gpu_memory_utilization: float = Field(default=0.6, gt=0.0, le=1.0)
    """The share of each GPU that an engine takes for weights and keys and values."""
    max_model_len: PositiveInt | None = None
    """Longest prompt and completion, in tokens. None: `policy.max_total_sequence_length`."""
    enforce_eager: bool = False
    """Compute without CUDA graphs: slower, with less memory and a faster start."""
    kv_cache_dtype: str = "auto"
    """Number format of keys and values, as vLLM calls it. `auto`: that of `precision`."""


class GenerationConfig(Strict):
    """How completions are sampled, and by what."""

    backend: Literal["hf", "vllm", "sglang"] = "hf"
    """`hf`: the policy itself samples. `vllm`, `sglang`: the server at `url`. `vllm` without a
    `url`: engines that the run starts; colocated, where vLLM is not installed, and `sglang` without
    a `url`: the policy itself."""
    url: str | None = Field(default=None, pattern="^https?://.+")
    """Address of the server, as `http://127.0.0.1:8000/v1`, with or without the version."""
    model: str | None = None
    """Name of the model at the server. None: `policy.model_name`."""
    api_key_env: str | None = None
    """Environment variable that holds the key of the server; the key itself never stands in a
    configuration."""
    max_new_tokens: PositiveInt | None = None
    """Longest completion, in tokens, where the prompt leaves that much room. None: all the room."""
    temperature: PositiveFloat = 1.0
    """Temperature of the sampling; log-probabilities are taken at this temperature too."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the most probable tokens with this total probability. 1: from all tokens."""
    top_k: Period = None
    """Sample from this number of most probable tokens. None (or -1): from all tokens."""
    stop_token_ids: tuple[NonNegativeInt, ...] | None = None
    """Tokens that end a completion, beside those of the model."""
    stop_strings: TextOrTexts | None = None
    """Texts that end a completion."""
    batch_size: PositiveInt = 64
    """Most completions that are sampled at once; NeMo RL's name is
    `policy.generation_batch_size`."""
    timeout_seconds: PositiveFloat = 600.0
    """Time limit of a request to the server; of engines, for each `max_concurrency` requests
    together."""
    max_concurrency: PositiveInt = 64
    """Most requests to the server at a time."""
    max_retries: NonNegativeInt = 8
    """Further attempts of a request to the server that failed."""
    probe_tolerance: PositiveFloat | None = None
    """Largest mean difference, in nats, of log-probabilities of sampler and policy after an update.
    None: 0.001 where both compute in float32, as far as is known, else 0.12."""
    weight_folder: FilePath | None = None
    """The folder from which the server loads new weights, which both see under this path. None:
    `weights` in `checkpointing.checkpoint_dir`."""
    vllm_cfg: VllmConfig = VllmConfig()
    vllm_kwargs: dict[str, Any] = {}
    """Further arguments of `vllm.LLM`, passed on as they are, as `{enable_expert_parallel:
    true}`."""
    colocated: ColocatedConfig = ColocatedConfig()

    @property
    def starts_engines(self) -> bool:
        """Whether the run starts engines of vLLM; colocated ones only where vLLM is installed."""
        # NeMo RL's files ask for colocated engines, and run here without vLLM too.
        is_installed = importlib.util.find_spec("vllm") is not None
        return (
            self.backend == "vllm"
            and self.url is None
            and (is_installed or not self.colocated.enabled)
        )

    @property
    def gives_log_probs(self) -> bool:
        """Whether server or engines give log-probabilities at the temperature and before top-k and
        top-p; others are not used. SGLang's are those; a server of vLLM does not say whether they
        are; engines give raw ones at 1."""
        is_raw = self.backend == "sglang" or (self.starts_engines and self.temperature == 1.0)
        return is_raw or (self.top_k is None and self.top_p == 1.0)

    @property
    def num_engines(self) -> int:
        """How many engines the run starts."""
        if self.colocated.enabled:
            return 1
        resources = self.colocated.resources
        # By node: an engine does not reach over two of them.
        return resources.gpus_per_node // self.vllm_cfg.tensor_parallel_size * resources.num_nodes

    def check(self) -> None:
        # The other way round nothing is contradicted: false is the default of `vllm_cfg`.
        if self.vllm_cfg.enforce_eager and not self.vllm_kwargs.get("enforce_eager", True):
            keys = "vllm_cfg.enforce_eager vllm_kwargs"
            raise self.error(keys, "the same value in both", "remove it from vllm_kwargs")
        if self.backend == "hf" and self.url is not None:
            need = "backend: vllm or sglang, or no url: backend hf samples in this process"
            raise self.error("url backend", need)
        if self.url is not None or self.colocated.enabled:
            return
        if self.backend != "vllm":
            need = "a url, as http://127.0.0.1:8000/v1; or backend: vllm; or backend: hf and "
            need += "colocated.enabled: true"
            raise self.error("url backend colocated.enabled", need)
        gpus = self.colocated.resources.gpus_per_node
        if gpus == 0 or gpus % self.vllm_cfg.tensor_parallel_size != 0:
            keys = "colocated.resources.gpus_per_node vllm_cfg.tensor_parallel_size url"
            need = "GPUs of each node for vLLM's engines, a multiple of tensor_parallel_size; or "
            need += "the url of a server"
            raise self.error(keys, need)


class GRPOPolicyConfig(TrainedModelConfig):
    """The policy, its batches, its numerics, its optimiser and its generation."""

    model_name: str | None = None
    """Hub name or folder of a causal language model."""
    train_global_batch_size: PositiveInt | None = None
    """Completions per optimiser step, in whole groups that divide a step. None: all of a step."""
    hf_config_overrides: dict[str, Any] = {}
    """Keys of the loaded model's configuration to change, as `{rope_parameters: {rope_theta:
    500000.0}}`."""
    generation: GenerationConfig = GenerationConfig()

    @property
    def micro_batch_tokens(self) -> int:
        """The token budget of one forward pass."""
        padded_tokens = (self.train_micro_batch_size or 0) * self.max_total_sequence_length
        return super().micro_batch_tokens or padded_tokens

    def check(self) -> None:
        super().check()
        if self.hf_config_overrides and self.architecture is not None:
            raise self.error("hf_config_overrides", "these keys in policy.model_config")
        if (self.generation.max_new_tokens or 0) > self.max_total_sequence_length:
            need = "at most policy.max_total_sequence_length"
            fix = "set policy.generation.max_new_tokens=null"
            raise self.error("generation.max_new_tokens max_total_sequence_length", need, fix)
        # A model by name says in its own file how many positions it has.
        model_keys = {**(self.architecture or {}), **self.hf_config_overrides}
        positions = model_keys.get("max_position_embeddings")
        if isinstance(positions, int) and positions < self.max_total_sequence_length:
            raise self.error(
                "max_total_sequence_length", f"at most {positions}, the positions of the model"
            )
