"""`HttpGenerator`: completions sampled by a server of vLLM or of SGLang.

    server = {"url": "http://localhost:8000", "model": "policy", "weight_folder": "/dev/shm/w"}
    section = GenerationConfig(backend="vllm", **server)
    generator = HttpGenerator(policy, tokenizer, section, end_ids)
    generator.load_weights(policy, 0)
    groups = generator.generate(prompts, prompt_ids, num_completions=8, seed=1)

Prompts and completions travel as token ids: the trainer learns from the tokens that were sampled. A
server that fails, or whose response does not fit the request, is a `GenerationError` within
`timeout_seconds`.

- vLLM: `/v1/completions` with `return_token_ids` (0.10.2 and later). The seed of a completion is
  the request's plus its index. Log-probabilities are those of the raw logits at temperature 1, or
  with `--logprobs-mode processed_logprobs` those after temperature, top-k and top-p.
- SGLang: `/generate` with `input_ids`, one for each completion with its own seed, which the server
  heeds with `--enable-deterministic-inference`. Log-probabilities are at the temperature, before
  top-k and top-p, unless `SGLANG_RETURN_ORIGINAL_LOGPROB` is set.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeward import processes
from treeward.config.grpo_policy import GenerationConfig
from treeward.http import ServerError, run_async
from treeward.model.export import export_model
from treeward.model.policy_model import PolicyModel
from treeward.openai_client import check_openai, key_from, openai_client, post
from treeward.rl.generation import GenerationError
from treeward.rl.served_generation import CompletionRequest, Served, ServedGenerator

if TYPE_CHECKING:
    from openai import AsyncOpenAI


class HttpGenerator(ServedGenerator):
    """See `Generator`.

    New weights are written to `weight_folder/version-N`, with `chat_template`, and the server loads
    them: SGLang by `/update_weights_from_disk`; vLLM by the worker's
    `reload_weights(weights_path=...)` through `/collective_rpc`, which needs VLLM_SERVER_DEV_MODE=1
    in the server's environment. The folder belongs to one run and keeps the version that the server
    has.

    After each change of the weights the log-probabilities of short completions are compared with
    the policy's own. That finds another model, and weights that were not loaded, in whole or in
    part; one small step is less than the rounding of bfloat16.
    """

    def __post_init__(self) -> None:
        check_openai()
        super().__post_init__()
        server = self.config
        assert server.url is not None
        assert server.weight_folder is not None
        assert server.backend != "hf"
        # Each path that is asked begins with its own version, or has none, as SGLang's `/generate`.
        self._url = server.url.rstrip("/").removesuffix("/v1")
        self._key = key_from(server.api_key_env, field="api_key_env")
        self._folder = Path(server.weight_folder).resolve()
        self._weights: Path | None = None

    def ask(
        self, requests: Sequence[CompletionRequest], sampling: GenerationConfig, *, log_probs: bool
    ) -> list[list[Served]]:
        return run_async(self._all(requests, sampling, log_probs))

    def load_weights(self, policy: PolicyModel, version: int) -> None:
        """Give the server the weights and compare. Raises `GenerationError` where it has others
        afterwards."""
        self.version = version
        target = self._folder / f"version-{version}"
        # A run that was killed has left its weights.
        processes.on_main(lambda: self._clear_weights(keep=self._weights))
        export_model(policy, self.tokenizer, target, chat_template=self.chat_template)
        processes.on_main(lambda: run_async(self._announce(target, version)))
        self._weights = target
        processes.on_main(lambda: self._clear_weights(keep=target))
        self.compare(policy, where=self._url)

    def close(self) -> None:
        """Remove the weights that this run has written, also before it was killed."""
        if processes.is_main():
            self._clear_weights(keep=None)

    def _clear_weights(self, *, keep: Path | None) -> None:
        for folder in self._folder.glob("version-*"):
            # The folder is named by the user, and may hold what is not of a run: version-final.
            if folder != keep and folder.name.removeprefix("version-").isdigit():
                shutil.rmtree(folder, ignore_errors=True)

    async def _announce(self, folder: Path, version: int) -> None:
        description = f"the weights of version {version} in {folder} to be loaded"
        unseen = (
            f"the server does not see the folder, or its log says what else is wrong: let it see "
            f"{folder} under this path (policy.generation.weight_folder), then give the same "
            "command again"
        )
        fixes: dict[int | None, str] = {400: unseen, 500: unseen}
        if self.config.backend == "sglang":
            requests: dict[str, dict[str, Any]] = {
                "/update_weights_from_disk": {
                    "model_path": str(folder),
                    "weight_version": str(version),
                    "flush_cache": True,
                },
            }
        else:
            version_needed = "a version whose reload_weights takes weights_path"
            fixes[404] = f"start vLLM with VLLM_SERVER_DEV_MODE=1, in {version_needed}"
            requests = {
                "/collective_rpc": {
                    "method": "reload_weights",
                    "kwargs": {"weights_path": str(folder)},
                },
                # The cache was computed with the old weights, for running requests too.
                "/reset_prefix_cache?reset_running_requests=true": {},
            }
        # A load that failed is not repeated: it leaves vLLM without weights, and the next
        # completion ends its engine.
        async with self._client(max_retries=0) as client:
            for path, body in requests.items():
                reply = await self._post(client, path, body, description, fixes)
                # SGLang says with status 200 that it has failed.
                if isinstance(reply, Mapping) and reply.get("success", True) is not True:
                    raise self._wrong(path, f"{reply!s:.300}", description)

    def _client(self, max_retries: int) -> AsyncOpenAI:
        return openai_client(
            self._url,
            api_key=self._key,
            timeout_seconds=self.config.timeout_seconds,
            max_retries=max_retries,
        )

    async def _all(
        self, requests: Sequence[CompletionRequest], sampling: GenerationConfig, log_probs: bool
    ) -> list[list[Served]]:
        # Time is counted per request, so one that waits for a slot has not begun.
        slots = asyncio.Semaphore(self.config.max_concurrency)
        async with self._client(self.config.max_retries) as client:

            async def one(request: CompletionRequest) -> list[Served]:
                async with slots:
                    end_ids = self.reader.end_ids
                    path, body = _request_of(request, sampling, end_ids, log_probs=log_probs)
                    reply = await self._post(client, path, body, request.description, {})
                    return self._read(reply, path, request, log_probs)

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(request)) for request in requests]
            except BaseExceptionGroup as errors:
                # The first failure has cancelled the other requests, so it alone says why.
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _post(
        self,
        client: AsyncOpenAI,
        path: str,
        body: Mapping[str, Any],
        description: str,
        fixes: Mapping[int | None, str],
    ) -> Any:
        seconds = self.config.timeout_seconds
        try:
            return await post(client, path, body, total_seconds=seconds)
        except ServerError as error:
            need = error.need
            if need is None and error.status is None:
                limit = f"{seconds:g} s (policy.generation.timeout_seconds)"
                need = f"an answer of {self.config.backend} in {limit}"
            otherwise = "check policy.generation.url, model and backend, and the server's log"
            raise GenerationError(
                f"the generator has failed: {error.summary}",
                where=error.where,
                got=f"{error.got}; asked for {description}",
                need=need,
                fix=fixes.get(error.status, otherwise),
            ) from error

    def _read(
        self,
        reply: Any,
        path: str,
        request: CompletionRequest,
        log_probs: bool,
    ) -> list[Served]:
        """The completions, in the order of the request. Raises `GenerationError` for any other
        response."""
        try:
            if self.config.backend == "sglang":
                # SGLang answers a request for one completion without a list.
                parts = [reply]
                if isinstance(reply, list):
                    parts = reply
                completions = [_of_sglang(part, log_probs) for part in parts]
            else:
                choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
                indices = [choice["index"] for choice in choices]
                if indices != list(range(len(choices))):
                    raise ValueError(f"choices with the indices {indices}")
                completions = []
                for choice in choices:
                    if choice.get("prompt_token_ids") not in (None, request.prompt_ids):
                        raise ValueError(
                            "completions of another prompt than was sent: prompt_token_ids differ",
                        )
                    completion = {
                        "token_ids": choice.get("token_ids"),
                        "finish_reason": choice.get("finish_reason"),
                    }
                    # Without token ids its log-probabilities do not matter: it is refused below.
                    if log_probs and completion["token_ids"] is not None:
                        completion["log_probs"] = choice["logprobs"]["token_logprobs"]
                    completions.append(completion)
            if any(completion["token_ids"] is None for completion in completions):
                raise ValueError("text without token ids (vLLM gives them from 0.10.2 on)")
            return self.checked(completions, request, log_probs=log_probs)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            got = f"{type(error).__name__}: {error}"
            raise self._wrong(path, got, request.description) from None

    def _wrong(self, path: str, got: str, description: str) -> GenerationError:
        return GenerationError(
            "the generator's response does not fit the request",
            where=self._url + path,
            got=f"asked for {description}; {got}",
            need=f"the response of a server of {self.config.backend}",
            fix="check policy.generation.backend and the server's version and log",
        )


def _request_of(
    request: CompletionRequest,
    config: GenerationConfig,
    end_ids: Collection[int],
    *,
    log_probs: bool,
) -> tuple[str, dict[str, Any]]:
    """The path and the JSON of the request. It sets every parameter that has a default in a
    server."""
    sampling: dict[str, Any] = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k or -1,  # none, to both servers
        # Without these, both servers take what the model's generation_config.json says.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": sorted(end_ids),
        "skip_special_tokens": False,
    }
    if config.stop_strings:
        sampling["stop"] = list(config.stop_strings)
    if config.backend == "sglang":
        sampling["max_new_tokens"] = request.most
        seeds = range(request.seed, request.seed + request.num_completions)
        return "/generate", {
            "input_ids": [request.prompt_ids] * request.num_completions,
            "sampling_params": [{**sampling, "sampling_seed": seed} for seed in seeds],
            "return_logprob": log_probs,
        }
    body = {
        "model": config.model,
        "prompt": request.prompt_ids,
        "max_tokens": request.most,
        "n": request.num_completions,
        "seed": request.seed,
        "return_token_ids": True,
        **sampling,
    }
    if log_probs:
        body["logprobs"] = 1
    return "/v1/completions", body


def _of_sglang(part: Mapping[str, Any], log_probs: bool) -> dict[str, Any]:
    meta = part["meta_info"]
    ids = part.get("output_ids")
    completion = {"token_ids": ids, "finish_reason": meta["finish_reason"]["type"]}
    if log_probs:
        entries = meta["output_token_logprobs"]
        sampled_ids = [entry[1] for entry in entries]
        completion["log_probs"] = [entry[0] for entry in entries]
        # A token that is trimmed from output_ids, such as a stop token, was sampled nevertheless.
        completion["token_ids"] = sampled_ids
        if ids is not None and ids != sampled_ids[: len(ids)]:
            raise ValueError("output_ids are others than those of output_token_logprobs")
    return completion
