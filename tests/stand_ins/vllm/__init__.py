"""A stand-in for the package vllm, with the classes and calls of vLLM 0.29 to 0.32 that treeward
uses.

`LLM` samples from a small model of transformers, with whatever weights it was handed: random ones
at first. It refuses what vLLM refuses, and what would sample from stale weights: an unknown
argument, a sleeping engine, weights that are missing or unknown, a prefix cache of the weights
before. Settings that do not fit are pydantic's errors, as vLLM's are, which cannot be pickled.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydantic
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from treeward.model.policy_model import PolicyModel
from treeward.rl.sampling import SampledRow, sample, uniforms
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import receive

__version__ = "0.32.0"


@dataclass
class SamplingParams:
    n: int = 1
    seed: int | None = None
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool = True
    logprobs: int | None = None


@dataclass
class _Logprob:
    logprob: float


@pydantic.dataclasses.dataclass
class _ModelConfig:
    max_model_len: int | None
    derived_max_model_len: int

    @pydantic.model_validator(mode="after")
    def check(self) -> _ModelConfig:
        if (self.max_model_len or 0) > self.derived_max_model_len:
            raise ValueError(
                f"User-specified max_model_len ({self.max_model_len}) is greater than the "
                "derived one"
            )
        return self


@dataclass
class LLM:
    model: str
    _: KW_ONLY
    weight_transfer_config: WeightTransferConfig
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    distributed_executor_backend: str = "uni"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    enforce_eager: bool = False
    enable_sleep_mode: bool = False
    logprobs_mode: str = "raw_logprobs"
    load_format: str = "auto"
    generation_config: str = "auto"
    seed: int = 0
    trust_remote_code: bool = False
    hang_while: str = ""
    """Of the stand-in alone: a file; while it is there, nothing is sampled."""
    kept_in: str = ""
    """Of the stand-in alone: a folder that gets the weights after each update, as
    `ENGINE-UPDATE.safetensors`."""
    keeps_head: bool = False
    """Of the stand-in alone: the second update and later ones leave the output head as it is."""
    loses_one: bool = False
    """Of the stand-in alone: each prompt gets one completion less than was asked for."""
    holds_blocks: bool = False
    """Of the stand-in alone: blocks of the prefix cache are held, so it is not reset."""
    awake: set[str] = field(default_factory=lambda: {"weights", "kv_cache"})

    def __post_init__(self) -> None:
        if self.gpu_memory_utilization > 0.95:
            raise ValueError("Free memory on device is less than desired GPU memory utilization")
        assert self.load_format == "dummy" and self.logprobs_mode in (
            "raw_logprobs",
            "processed_logprobs",
        )
        config = AutoConfig.from_pretrained(self.model)
        _ModelConfig(self.max_model_len, config.max_position_embeddings)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        with torch.random.fork_rng():
            torch.manual_seed(12345)
            self.hf = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, self.dtype)
            ).eval()
        self._transfer: Any = None
        self._received: set[str] | None = None
        self._cached = self._stale = False
        self._updates = 0

    # weights

    def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> None:
        self._transfer = receive(
            self.weight_transfer_config.backend, request["init_info"], self.tensor_parallel_size
        )

    def start_weight_update(self) -> None:
        assert "weights" in self.awake and self._transfer is not None and self._received is None
        self._received = set()

    @torch.no_grad()
    def update_weights(self, request: Mapping[str, Any]) -> None:
        assert self._received is not None
        state = self.hf.state_dict()
        head = copy.deepcopy(self.hf.lm_head)
        for name, weight in self._transfer(request["update_info"]):
            assert weight.dtype == getattr(torch, self.dtype), f"{name} is {weight.dtype}"
            state[name].copy_(weight)
            self._received.add(name)
        if self.keeps_head and self._updates:
            self.hf.lm_head = head

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert self._received is not None
        tied = {"lm_head.weight"} if self.hf.config.tie_word_embeddings else set()
        missing = set(self.hf.state_dict()) - self._received - tied
        assert not missing, f"no weights for {sorted(missing)[:3]}"
        self._received = None
        self._stale = self._cached
        self._updates += 1
        if self.kept_in:
            save_file(
                self.hf.state_dict(),
                Path(self.kept_in) / f"{os.getpid()}-{self._updates}.safetensors",
            )

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        if self.holds_blocks:
            return False
        self._cached = self._stale = False
        return True

    # sleep

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        assert self.enable_sleep_mode and level == 1
        self.awake = set()
        self.reset_prefix_cache()

    def wake_up(self, tags: list[str] | None = None) -> None:
        tags = tags or ["weights", "kv_cache"]
        assert self.awake.isdisjoint(tags), f"{tags} are awake: vLLM wakes nothing then"
        self.awake |= set(tags)

    # sampling

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Mapping[str, list[int]]],
        sampling_params: Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"} and self._received is None
        assert not self._stale, "the prefix cache is of other weights"
        assert sampling_params is not None
        self._cached = True
        while self.hang_while and Path(self.hang_while).exists():
            time.sleep(0.05)
        policy = PolicyModel(self.hf)
        return [
            SimpleNamespace(
                prompt_token_ids=asked["prompt_token_ids"],
                outputs=[
                    self._completion(policy, asked["prompt_token_ids"], one, g)
                    for g in self._indices(one)
                ],
            )
            for asked, one in zip(prompts, sampling_params, strict=True)
        ]

    def _indices(self, one: SamplingParams) -> list[int]:
        return list(reversed(range(int(self.loses_one), one.n)))

    def _completion(
        self, policy: PolicyModel, ids: list[int], one: SamplingParams, index: int
    ) -> Any:
        assert self.max_model_len is None or len(ids) + one.max_tokens <= self.max_model_len
        ends = set(one.stop_token_ids or ())
        stops = list(one.stop or ())

        def ended(tokens: list[int]) -> bool:
            return tokens[-1] in ends or any(
                stop in self.tokenizer.decode(tokens) for stop in stops
            )

        assert one.seed is not None
        row = SampledRow(
            tuple(ids), one.max_tokens, uniforms(one.seed + index, 0, 0, one.max_tokens)
        )
        top_k = one.top_k if one.top_k > 0 else None
        sample(
            policy, [row], ended=ended, temperature=one.temperature, top_k=top_k, top_p=one.top_p
        )
        said = row.log_probs
        if self.logprobs_mode == "raw_logprobs":
            said = policy.log_probs([[ids + row.token_ids]], [[len(ids)]]).values_SL[0].tolist()
        steps = [{i: _Logprob(log_prob)} for i, log_prob in zip(row.token_ids, said, strict=True)]
        return SimpleNamespace(
            index=index,
            token_ids=row.token_ids,
            text=self.tokenizer.decode(row.token_ids),
            finish_reason="stop" if ended(row.token_ids) else "length",
            logprobs=None if one.logprobs is None else steps,
        )
