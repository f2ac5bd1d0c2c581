"""`GRPOPolicyConfig`: the policy that GRPO trains, and how completions are sampled.

    policy: {model_name: Qwen/Qwen2.5-1.5B, generation: {backend: hf, max_new_tokens: 512, temperature: 1.0}}

With `backend: vllm`, `sglang` or `openai` and a `url`, a server samples, and gets the weights of the policy.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from treeward.config.base import Period, Strict, TextOrTexts
from treeward.config.policy import TrainedModelConfig


class ColocatedConfig(Strict):
    """Whether generation shares the GPUs of training."""

    enabled: bool = True
    """Generation and training take turns on the same GPU. False: a server at `url` generates on GPUs of its own."""


class GenerationConfig(Strict):
    """How completions are sampled, and by what."""

    backend: Literal["hf", "vllm", "sglang", "openai"] = "hf"
    """`hf`, and any without a `url`: the policy itself samples. `vllm`, `sglang`, `openai`: the server at `url`."""
    url: str | None = Field(default=None, pattern="^https?://.+")
    """Address of the server, as `http://127.0.0.1:8000/v1`, with or without the version."""
    model: str | None = None
    """Name of the model at the server. None: `policy.model_name`."""
    api_key_env: str | None = None
    """Environment variable that holds the key of the server; the key itself never stands in a configuration."""
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
    batch_size: PositiveInt | None = None
    """Most completions that are sampled at once. None: `policy.generation_batch_size`."""
    timeout_seconds: PositiveFloat = 600.0
    """Time limit of one request to the server."""
    max_concurrency: PositiveInt = 64
    """Most requests to the server at a time."""
    max_retries: NonNegativeInt = 8
    """Further attempts of a request that failed."""
    retokenize: bool = False
    """Accept completions without token ids, whose text is tokenized again, which may give other tokens."""
    probe_tolerance: PositiveFloat | None = 0.1
    """Largest mean difference, in nats, of log-probabilities of server and policy after an update. None: any."""
    weight_sync: str | None = Field(default=None, pattern=r"^(none|folder|.+\..+)$")
    """How the server gets weights: `folder`, `none`, or a function's path. None: `folder`, for `openai` `none`."""
    weight_folder: str | None = None
    """That folder. None: `weights` in `checkpointing.checkpoint_dir`."""
    vllm_cfg: dict[str, Any] = {}
    """NeMo RL's settings of vLLM: a server has its own. Only `precision` is checked, which cannot be eight bits."""
    colocated: ColocatedConfig = ColocatedConfig()

    @property
    def weight_sync_method(self) -> str:
        """`folder`, `none` or the dotted path of a function."""
        return self.weight_sync or ("none" if self.backend == "openai" else "folder")

    def check(self) -> None:
        need = "backend: vllm, sglang or openai, or no url: backend hf samples in this process"
        self.refuse(self.backend == "hf" and self.url is not None, "url backend", need)
        needs_server = self.backend == "openai" or not self.colocated.enabled
        need = "a url, as http://127.0.0.1:8000/v1; or backend: hf and colocated.enabled: true"
        self.refuse(self.url is None and needs_server, "url backend colocated.enabled", need)
        self.refuse("8" in str(self.vllm_cfg.get("precision")), "vllm_cfg", "precision: bfloat16, float32 or null")
        is_openai = self.backend == "openai"
        self.refuse(is_openai and self.top_k is not None, "top_k backend", "no top_k with backend openai")
        self.refuse(is_openai and self.stop_token_ids, "stop_token_ids backend", "stop_strings with backend openai")
        need = "none, or module.function, with backend openai"
        self.refuse(is_openai and self.weight_sync == "folder", "weight_sync backend", need)


class GRPOPolicyConfig(TrainedModelConfig):
    """The policy, its batches, its numerics, its optimiser and its generation."""

    train_global_batch_size: PositiveInt | None = None
    """Completions per optimiser step, in whole groups that divide a step. None: all of a step."""
    generation_batch_size: PositiveInt = 64
    """Most completions that are sampled at once, where `generation.batch_size` is null."""
    logprob_chunk_size: PositiveInt | None = None
    """Predicted tokens whose logits are in memory at a time. None: 1024."""
    hf_config_overrides: dict[str, Any] = {}
    """Keys of the loaded model's configuration to change, as `{rope_parameters: {rope_theta: 500000.0}}`."""
    generation: GenerationConfig = GenerationConfig()

    @property
    def micro_batch_tokens(self) -> int:
        """The token budget of one forward pass."""
        of_a_size = (self.train_micro_batch_size or 0) * self.max_total_sequence_length
        return super().micro_batch_tokens or of_a_size

    def check(self) -> None:
        super().check()
        is_bare, need = self.hf_config_overrides and self.architecture is not None, "these keys in policy.model_config"
        self.refuse(is_bare, "hf_config_overrides", need)
        longest, new = self.max_total_sequence_length, self.generation.max_new_tokens
        need, fix = "at most policy.max_total_sequence_length", "set policy.generation.max_new_tokens=null"
        self.refuse((new or 0) > longest, "generation.max_new_tokens max_total_sequence_length", need, fix)
        positions = {**(self.architecture or {}), **self.hf_config_overrides}.get("max_position_embeddings")
        is_longer = isinstance(positions, int) and positions < longest
        self.refuse(is_longer, "max_total_sequence_length", f"at most {positions}, the positions of the model")
