"""`GenerationConfig`: how answers are sampled, and by what.

    policy:
      generation:
        backend: hf                # the policy itself, in this process
        max_new_tokens: 512
        temperature: 1.0

With `backend: vllm`, `sglang` or `openai` and a `url`, a server samples that is given the policy's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from treeward.config.base import Strict
from treeward.errors import ConfigError

__all__ = ["ColocatedConfig", "GenerationConfig", "GenerationResourcesConfig", "VllmConfig"]

_HTTP_BACKENDS = ("vllm", "sglang", "openai")
_SERVER = "the settings of a server are given to the server"

_Texts = Annotated[tuple[str, ...], BeforeValidator(lambda texts: (texts,) if isinstance(texts, str) else texts)]


class GenerationResourcesConfig(Strict):
    """The GPUs that generation has to itself."""

    gpus_per_node: PositiveInt | None = None
    """GPUs for generation, on each of its nodes. None: none are given."""
    num_nodes: PositiveInt | None = None
    """Nodes for generation, in a cluster of several. None: none are given."""


class ColocatedConfig(Strict):
    """Whether generation shares the GPUs of training."""

    enabled: bool = True
    """Generation and training take turns on the same GPUs. False: a server generates on GPUs of its own."""
    resources: GenerationResourcesConfig = GenerationResourcesConfig()
    """Those GPUs; not read while `enabled` is true."""


class VllmConfig(Strict):
    """Of NeMo RL's section only what would change the numbers is read."""

    model_config = ConfigDict(extra="allow")

    precision: str | None = None
    """Of the generator's weights; an eight-bit format is not supported."""

    @model_validator(mode="after")
    def _is_not_fp8(self) -> VllmConfig:
        if self.precision is not None and "8" in self.precision:
            raise ConfigError(
                "generation in eight bits is not supported",
                field="precision",
                got=self.precision,
                need="bfloat16 or float32, as policy.precision",
                fix="set policy.generation.vllm_cfg.precision=bfloat16",
            )
        return self


class GenerationConfig(Strict):
    """How answers are sampled, and by what."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        "vllm_kwargs": _SERVER,
        "sglang_cfg": _SERVER,
        "sglang_kwargs": _SERVER,
        "mcore_generation_config": "there is no Megatron generator",
        "val_temperature": "validation samples as training does",
    }

    backend: Literal["hf", "vllm", "sglang", "openai"] = "hf"
    """`hf`: the policy itself, in this process. `vllm`, `sglang`, `openai`: the server at `url`; where no `url` is
    given, as in NeMo RL's files, the policy itself samples, and the log says so."""
    url: str | None = None
    """The server's address, as `http://127.0.0.1:8000/v1`, with or without the version."""
    model: str | None = None
    """The name of the model at the server. None: `policy.model_name`."""
    api_key_env: str | None = None
    """The environment variable that holds the server's key; the key itself never stands in a configuration."""
    max_new_tokens: PositiveInt | None = None
    """Longest answer, in tokens. None: the room that the prompt leaves in `policy.max_total_sequence_length`; more
    than that is never sampled."""
    temperature: PositiveFloat = 1.0
    """Log-probabilities are those at this temperature."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the most probable tokens of this total probability. 1: from all."""
    top_k: Annotated[PositiveInt | None, BeforeValidator(lambda k: None if k in (0, -1) else k)] = None
    """Sample from the so many most probable tokens. None (or -1): from all."""
    stop_token_ids: tuple[NonNegativeInt, ...] | None = None
    """Tokens that end an answer, beside those of the model. None: only the model's."""
    stop_strings: _Texts | None = None
    """Texts that end an answer. None: none."""
    batch_size: PositiveInt | None = None
    """Most answers that are sampled at once. None: `policy.generation_batch_size`."""
    timeout_seconds: PositiveFloat = 600.0
    """The time that one request to the server may take."""
    max_concurrency: PositiveInt = 64
    """Most requests to the server at a time."""
    max_retries: NonNegativeInt = 8
    """Further attempts of a request that failed."""
    retokenize: bool = False
    """Accept answers of a server that sends text without token ids; tokenized again it may be other tokens."""
    probe_tolerance: PositiveFloat | None = 0.1
    """How far the server's log-probabilities may be from the policy's own, in nats on average, after it was given the
    weights; beyond it the run stops. None: they are not compared."""
    weight_sync: str | None = None
    """How the server gets the policy's weights: `folder`, which both see under one path; `none`, not at all; or the
    dotted path of a function that is called with the policy and its version. None: `folder` for `vllm` and `sglang`,
    `none` for `openai`."""
    weight_folder: str | None = None
    """That folder. None: `weights` in `checkpointing.checkpoint_dir`."""
    continuous_batching: bool | Literal["auto"] = False
    """Of `hf`: an answer starts when another has ended, by transformers' paged batches; `auto`: on CUDA with
    flash attention and half-precision weights. The answers to a prompt then depend on what is sampled beside them."""
    vllm_cfg: VllmConfig = VllmConfig()
    """NeMo RL's section: a server has its own settings; of these only what would change the numbers is read."""
    colocated: ColocatedConfig = ColocatedConfig()
    """Whether generation shares the GPUs of training."""

    @property
    def weight_sync_method(self) -> str:
        """`folder`, `none` or the dotted path of a function."""
        return self.weight_sync or ("none" if self.backend == "openai" else "folder")

    @property
    def is_remote(self) -> bool:
        """Whether a server samples."""
        return self.url is not None

    @model_validator(mode="before")
    @classmethod
    def _no_megatron(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping) and raw.get("backend") == "megatron":
            raise ConfigError(
                "treeward has no Megatron generator",
                field="backend",
                got="megatron",
                need="hf, vllm, sglang or openai",
                fix="set policy.generation.backend=hf",
            )
        return raw

    @model_validator(mode="after")
    def _url_fits_the_backend(self) -> GenerationConfig:
        if self.backend == "openai" and self.url is None:
            raise ConfigError(
                "backend openai needs the address of a server",
                field="url",
                got="null",
                need="a url, as http://127.0.0.1:8000/v1",
                fix="give policy.generation.url, or set policy.generation.backend=hf",
            )
        if self.backend == "hf" and self.url is not None:
            raise ConfigError(
                "url is given, and backend hf samples in this process",
                field="url",
                got=self.url,
                need=f"backend: {', '.join(_HTTP_BACKENDS)}, or no url",
                fix="set policy.generation.backend=vllm, or policy.generation.url=null",
            )
        if self.weight_sync not in (None, "none", "folder") and "." not in self.weight_sync:
            raise ConfigError(
                "weight_sync is not known",
                field="weight_sync",
                got=self.weight_sync,
                need="folder, none, or the dotted path of a function, as my_module.broadcast",
            )
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError("url is no address", field="url", got=self.url, need="http://... or https://...")
        return self

    @model_validator(mode="after")
    def _own_gpus_have_a_server(self) -> GenerationConfig:
        if self.colocated.enabled:
            return self
        own = self.colocated.resources
        if own.gpus_per_node is None and own.num_nodes is None:
            raise ConfigError(
                "generation is to have GPUs of its own, and colocated.resources gives it none",
                field="colocated.resources.gpus_per_node",
                got="null, colocated.enabled: false",
                need="a number of GPUs, or of nodes in colocated.resources.num_nodes",
                fix="set policy.generation.colocated.resources.gpus_per_node, or "
                "policy.generation.colocated.enabled=true",
            )
        if self.url is None:
            raise ConfigError(
                "generation on GPUs of its own needs a server that runs there",
                field="colocated.enabled",
                got=f"false, backend: {self.backend}, url: null",
                need=f"backend: {' or '.join(_HTTP_BACKENDS)}, with a url",
                fix="start the server and give policy.generation.url, or set policy.generation.colocated.enabled=true",
            )
        return self
