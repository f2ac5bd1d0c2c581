"""`VllmEngine`: an engine of vLLM in a Ray actor; the only place that makes and calls one.

    engine = ray.remote(VllmEngine).options(num_gpus=2).remote()
    options = engine_options(config, max_model_len=1024, dtype="bfloat16")
    ray.get(engine.start.remote(files, "nccl", options))
    sampling = sampling_parameters(request, config, [0], log_probs=True)
    ray.get(engine.generate.remote([[1, 2, 3]], [sampling]))

Written from the documentation and code of vLLM 0.29 to 0.32.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from treeward.config.grpo_policy import GenerationConfig
from treeward.rl.served_generation import CompletionRequest


class VllmEngine:
    """The Ray actor: `vllm.LLM`, made by `start` rather than at once, so that its errors reach the
    caller."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._folder = tempfile.TemporaryDirectory()

    def start(self, files: Mapping[str, bytes], backend: str, options: Mapping[str, Any]) -> None:
        """Make the engine. `files`: the model's folder without weights; `backend`: of the weight
        transfer."""
        # Of torchrun, where it has started Ray.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        for name, data in files.items():
            (Path(self._folder.name) / name).write_bytes(data)
        try:
            transfer = WeightTransferConfig(backend=backend)
            self._llm = LLM(model=self._folder.name, weight_transfer_config=transfer, **options)
        except ValidationError as error:  # Ray cannot pickle it
            messages = []
            for problem in error.errors():
                field = ".".join(map(str, problem["loc"]))
                messages.append(f"{field}: {problem['msg']}".removeprefix(": "))
            raise ValueError("; ".join(messages)) from error

    def call(self, method: str, *args: Any) -> None:
        """Call a method of the engine. Raises `RuntimeError` if it returns False, as resetting a
        used cache does."""
        if getattr(self._llm, method)(*args) is False:
            raise RuntimeError("the engine refuses")

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: Sequence[Mapping[str, Any]],
    ) -> list[list[Any]]:
        """The completions of each prompt, by index, in the form of `Served`."""
        from vllm import SamplingParams

        if not prompts:
            return []  # more engines than prompts
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        parameters = [SamplingParams(**request_sampling) for request_sampling in sampling]
        completions: list[list[Any]] = []
        for reply in self._llm.generate(inputs, parameters, use_tqdm=False):
            in_order = sorted(reply.outputs, key=attrgetter("index"))
            completions.append([_served(completion) for completion in in_order])
        return completions


def _served(completion: Any) -> dict[str, Any]:
    # Plain values, which the main process checks as a `Served`.
    ids = list(completion.token_ids)
    log_probs = None
    if completion.logprobs is not None:
        # Each step has a dictionary of tokens, the sampled one among them.
        log_probs = []
        for i, step in zip(ids, completion.logprobs, strict=True):
            log_probs.append(step[i].logprob)
    return {"token_ids": ids, "log_probs": log_probs, "finish_reason": completion.finish_reason}


def engine_options(
    server: GenerationConfig,
    *,
    max_model_len: int | None,
    dtype: str,
) -> dict[str, Any]:
    """The arguments of `vllm.LLM`, without the model."""
    engine = server.vllm_cfg
    # Named, because vLLM chooses Ray's executor by itself within a placement group of Ray.
    executor = "uni"
    if engine.tensor_parallel_size > 1:
        executor = "mp"
    # Raw: at temperature 1, before top-k and top-p. Processed: at the temperature, after them.
    logprobs_mode = "processed_logprobs"
    if server.temperature == 1.0:
        logprobs_mode = "raw_logprobs"
    return {
        "tensor_parallel_size": engine.tensor_parallel_size,
        "distributed_executor_backend": executor,
        "dtype": dtype,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "max_model_len": max_model_len,
        "enable_sleep_mode": server.colocated.enabled,
        "logprobs_mode": logprobs_mode,
        "load_format": "dummy",  # the run gives the weights
        "generation_config": "vllm",  # every parameter of the sampling is given
        "seed": 0,
    }


def sampling_parameters(
    request: CompletionRequest, config: GenerationConfig, end_ids: Sequence[int], *, log_probs: bool
) -> dict[str, Any]:
    """The arguments of `vllm.SamplingParams`; `logprobs: 0` asks for the sampled token's alone."""
    return {
        "n": request.num_completions,
        "seed": request.seed,
        "max_tokens": request.most,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k or -1,
        "stop": list(config.stop_strings or ()),
        "stop_token_ids": list(end_ids),
        "skip_special_tokens": False,
        "logprobs": 0 if log_probs else None,
    }
