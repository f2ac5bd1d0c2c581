"""`HttpGenerator`: completions sampled by a server of vLLM, of SGLang, or any that speaks OpenAI's completions.

    section = GenerationConfig(backend="vllm", url="http://localhost:8000", model="policy", weight_sync="folder")
    generator = HttpGenerator(policy, tokenizer, section, folder=Path("/shared/weights"))
    generator.load_weights(policy, 0)
    groups = generator.generate(prompts, prompt_ids, num_completions=8, seed=1)

Prompts are sent, and completions are read, as token ids: the trainer learns from the tokens that were sampled. A server
that fails, or whose response does not fit the request, is a `GenerationError` within `timeout_seconds`.

- vLLM: `/v1/completions` with `return_token_ids` (0.10.2 and later). The seed of a completion is the request's plus its
  index. Log-probabilities are those of the raw logits at temperature 1, or with `--logprobs-mode processed_logprobs`
  those after temperature, top-k and top-p.
- SGLang: `/generate` with `input_ids`, one for each completion with its own seed, which the server heeds with
  `--enable-deterministic-inference`. Log-probabilities are at the temperature, before top-k and top-p, unless
  `SGLANG_RETURN_ORIGINAL_LOGPROB` is set.
- openai: `/v1/completions` as OpenAI describes it: text without token ids, which is tokenized again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, Field, NonNegativeInt, TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase

from treeward.config.grpo_policy import GenerationConfig
from treeward.http import ServerError, run_async
from treeward.model.export import export_policy
from treeward.model.policy_model import PolicyModel
from treeward.openai_client import check_openai, key_from, openai_client, post
from treeward.rl.experience import CompletionGroup, Prompt, SampledCompletion
from treeward.rl.generation import CompletionReader, GenerationError, Generator, completion_budgets, end_ids_of
from treeward.rl.weight_sync import FolderSync, WeightSync, sync_function

if TYPE_CHECKING:
    from openai import AsyncOpenAI

__all__ = ["HttpGenerator"]

logger = logging.getLogger(__name__)

_PROBE_TEXT, _PROBE_TOKENS = "The quick brown fox", 16
_PROBE_SAMPLING = {"top_k": None, "top_p": 1.0, "stop_token_ids": None, "stop_strings": None}
_FIXES = {
    None: "start the server again, and resume the run",
    400: "see the server's message; prompt and completion must fit into the server's longest sequence",
    401: "name the environment variable with the server's key: policy.generation.api_key_env",
    404: "check policy.generation.url, model and backend",
}
_Token = Annotated[NonNegativeInt, Field(strict=True)]
# A server that computes in bfloat16 may give log-probabilities a little above 0.
_LogProb = Annotated[float, Field(strict=True, le=1e-2, allow_inf_nan=False)]
_Reason = Annotated[
    Literal["stop", "length"],
    BeforeValidator(lambda reason: reason.get("type") if isinstance(reason, Mapping) else reason),
]


class HttpGenerator(Generator):
    """See `Generator`. `server`: the section `policy.generation`. `end_ids`: as for `LocalGenerator`.

    The section's `weight_sync` says how the server gets new weights. "none": it keeps its own. "folder": the weights
    are written to `folder` by `export`, and the server loads them: SGLang by `/update_weights_from_disk`; vLLM by the
    worker's `reload_weights(weights_path=...)` through `/collective_rpc`, which needs VLLM_SERVER_DEV_MODE=1 in the
    server's environment. Otherwise the dotted path of a function.

    After each change of the weights (with "none", only at first) the log-probabilities of one completion are compared
    with the policy's own. That finds another model, and weights that were not loaded or loaded wrongly; one small step
    is less than the rounding of a server in bfloat16.
    """

    def __init__(
        self,
        policy: PolicyModel,
        tokenizer: PreTrainedTokenizerBase,
        server: GenerationConfig,
        *,
        max_total_tokens: int | None = None,
        end_ids: Sequence[int] | None = None,
        folder: Path | None = None,
        export: Callable[[PolicyModel, Path], None] | None = None,
    ) -> None:
        check_openai()
        assert server.url is not None and server.backend != "hf"
        self.policy, self.tokenizer, self.server = policy, tokenizer, server
        self.max_total_tokens = max_total_tokens
        self.reader = CompletionReader(tokenizer, end_ids_of(policy, tokenizer, end_ids), server)
        self.version: int | None = None
        self._url = server.url.rstrip("/").removesuffix("/v1")
        self._key = key_from(server.api_key_env, field="api_key_env")
        # vLLM's log-probabilities are those before top-k and top-p, or after, as it was started; SGLang's are before.
        self._comparable = server.backend == "sglang" or (server.top_k is None and server.top_p == 1.0)
        if not self._comparable:
            logger.warning(
                "With top_k or top_p %s gives log-probabilities after top_k and top_p, or at temperature 1, and does "
                "not say which: they are not used, so train/token_mult_prob_error is not known.", server.backend,
            )  # fmt: skip
        self._vocabulary = int(policy.hf.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
        self._sync: WeightSync | None = None
        if server.weight_sync_method == "folder":
            assert folder is not None
            template = str(getattr(tokenizer, "chat_template", None) or "")
            write = export or (lambda model, path: export_policy(model, tokenizer, path, chat_template=template))
            self._sync = FolderSync(folder, write, lambda path, version: run_async(self._announce(path, version)))
        elif server.weight_sync_method != "none":
            self._sync = sync_function(server.weight_sync_method)
        self._first_version: int | None = None
        self._compared = self._stale_logged = False

    def generate(
        self, prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], *, num_completions: int, seed: int
    ) -> list[CompletionGroup]:
        """See `Generator`. The completions of a prompt are one request. It is up to the server to heed the seed."""
        budgets = completion_budgets(prompts, prompt_ids, self.server, self.policy, self.max_total_tokens)
        requests = [
            _Request(tuple(ids), num_completions, budgets[p], _seed(seed, p), prompts[p].where)
            for p, ids in enumerate(prompt_ids)
        ]
        served = run_async(self._all(requests, self.server, log_probs=self._comparable))
        return [
            CompletionGroup(prompt, request.prompt_ids, tuple(self._completion(one) for one in completions))
            for prompt, request, completions in zip(prompts, requests, served, strict=True)
        ]

    def load_weights(self, policy: PolicyModel, version: int) -> None:
        """Give the server the weights and compare. Raises `GenerationError` where it has others afterwards."""
        self.version, tolerance = version, self.server.probe_tolerance
        if self._sync is not None:
            self._sync(policy, version)
        elif self._first_version is None:
            self._first_version = version
        elif version != self._first_version and not self._stale_logged:
            self._stale_logged = True
            logger.warning(
                "The server still samples from the weights of version %d, and the policy is at version %d: completions "
                "are off-policy, more with every update. Set loss_fn.use_importance_sampling_correction=true, or give "
                "the server the weights (weight_sync: folder).", self._first_version, version,
            )  # fmt: skip
        # One comparison is enough with a server that keeps its weights, and one warning with one that says nothing.
        is_repeated = self._compared and (self._sync is None or self.server.backend == "openai")
        if tolerance is not None and not is_repeated:
            self._compare(policy, tolerance)
            self._compared = True

    def close(self) -> None:
        """Remove the weights that were written."""
        if isinstance(self._sync, FolderSync):
            self._sync.close()

    def _client(self) -> AsyncOpenAI:
        seconds, retries = self.server.timeout_seconds, self.server.max_retries
        return openai_client(self._url, api_key=self._key, timeout_seconds=seconds, max_retries=retries)

    async def _all(
        self, requests: Sequence[_Request], sampling: GenerationConfig, *, log_probs: bool
    ) -> list[list[_Served]]:
        slots = asyncio.Semaphore(self.server.max_concurrency)
        async with self._client() as client:

            async def one(request: _Request) -> list[_Served]:
                async with slots:
                    path, body = _request_of(request, sampling, self.reader.end_ids, log_probs=log_probs)
                    reply = await self._post(client, path, body, str(request))
                    return self._read(reply, path, request, log_probs=log_probs)

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(request)) for request in requests]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _post(self, client: AsyncOpenAI, path: str, body: Mapping[str, Any], asked: str) -> Any:
        seconds = self.server.timeout_seconds
        try:
            return await post(client, path, body, total_seconds=seconds)
        except ServerError as error:
            need = (
                f"a server of {self.server.backend} that answers in {seconds:g} s (policy.generation.timeout_seconds)"
            )
            raise GenerationError(
                f"the generator has failed: {error.summary}",
                where=error.where,
                got=f"{error.got}; asked for {asked}",
                need=error.need or need,
                fix=_FIXES.get(error.status, "look at the server's log"),
            ) from error

    def _read(self, reply: Any, path: str, request: _Request, *, log_probs: bool) -> list[_Served]:
        backend = self.server.backend
        try:
            completions = _completions_of(backend, reply, request, log_probs=log_probs)
            for completion in completions:
                completion.check(request, self._vocabulary)
        except ValidationError as error:
            place, text = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
            need = f"the completions of a server of {backend}"
            raise self._wrong(path, f"{place}: {text}", str(request), need) from None
        except ValueError as error:
            raise self._wrong(path, str(error), str(request), f"the completions of a server of {backend}") from None
        is_text_accepted = backend == "openai" and self.server.retokenize
        if any(one.token_ids is None for one in completions) and not is_text_accepted:
            raise GenerationError(
                "the generator does not say which tokens it sampled",
                where=self._url + path,
                got=f"text without token ids; asked for {request}",
                need="token ids: text that is tokenized again can be other tokens than were sampled",
                fix="serve with vLLM 0.10.2 or later (backend vllm) or SGLang (backend sglang), or set retokenize",
            )
        return completions

    def _wrong(self, path: str, got: str, asked: str, need: str) -> GenerationError:
        return GenerationError(
            "the generator's response does not fit the request",
            where=self._url + path,
            got=f"{got}; asked for {asked}",
            need=need,
            fix="check policy.generation.backend and the server's version and log",
        )

    def _completion(self, served: _Served) -> SampledCompletion:
        if served.token_ids is not None:
            return self.reader.completion(served.token_ids, served.log_probs, truncated=served.truncated)
        tokens = list(self.tokenizer(served.text, add_special_tokens=False).input_ids)
        end = self.tokenizer.eos_token_id
        if not served.truncated and not self.server.stop_strings and end in self.reader.end_ids:
            tokens.append(end)
        return self.reader.completion(tokens, None, truncated=served.truncated)

    async def _announce(self, folder: Path, version: int) -> None:
        asked = f"the weights of version {version} in {folder} to be loaded"
        async with self._client() as client:
            if self.server.backend == "sglang":
                path = "/update_weights_from_disk"
                body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
                reply = await self._post(client, path, body, asked)
                if not isinstance(reply, Mapping) or reply.get("success") is not True:
                    raise self._wrong(path, json.dumps(reply)[:300], asked, "success: true")
                return
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            try:
                await self._post(client, "/collective_rpc", body, asked)
                await self._post(client, "/reset_prefix_cache", {}, asked)  # it was computed with the weights before
            except GenerationError as error:
                fix = "start vLLM with VLLM_SERVER_DEV_MODE=1, in a version whose reload_weights takes weights_path"
                raise GenerationError(error.summary, where=error.where, got=error.got, fix=fix) from error

    def _compare(self, policy: PolicyModel, tolerance: float) -> None:
        """Compare the server's log-probabilities of a completion, sampled from all tokens, with the policy's."""
        if self.server.backend == "openai":
            logger.warning(
                "Whether %s has the policy's weights is not known: it gives no log-probabilities.", self._url
            )
            return
        ids = list(self.tokenizer(_PROBE_TEXT, add_special_tokens=False).input_ids) or [min(self.reader.end_ids)]
        request = _Request(tuple(ids), 1, _PROBE_TOKENS, 0, "the comparison of the weights")
        sampling = self.server.model_copy(update=_PROBE_SAMPLING)
        [[completion]] = run_async(self._all([request], sampling, log_probs=True))
        temperatures = {self.server.temperature} if self._comparable else {self.server.temperature, 1.0}
        apart = min(_apart(policy, ids, completion, temperature) for temperature in temperatures)
        if apart <= tolerance:
            return
        error = GenerationError(
            "the server's log-probabilities are not those of the policy",
            where=self._url,
            got=f"a mean difference of {apart:.3g} nats, after the weights of version {self.version}"
            + ("" if completion.version is None else f"; the server says version {completion.version}"),
            need=f"at most {tolerance:g}",
            fix="check that the server serves this model, has loaded these weights, and gives log-probabilities at the "
            "temperature (vLLM: --logprobs-mode processed_logprobs; SGLang: no SGLANG_RETURN_ORIGINAL_LOGPROB)",
        )
        if self._sync is not None:
            raise error
        logger.warning("%s", error)


@dataclass(frozen=True, slots=True)
class _Request:
    """`num_completions` completions of at most `most` tokens to one prompt. `where`: the prompt's place."""

    prompt_ids: tuple[int, ...]
    num_completions: int
    most: int
    seed: int
    where: str | None

    def __str__(self) -> str:
        asked = f"{self.num_completions} completions of at most {self.most} tokens"
        place = "" if self.where is None else f" ({self.where})"
        return f"{asked} to a prompt of {len(self.prompt_ids)}{place}"


class _Served(NamedTuple):
    """A completion as the server gives it. `token_ids`: None where it gives only `text`. `version`: of the weights,
    where the server says it.
    """

    token_ids: list[int] | None
    log_probs: list[float] | None
    truncated: bool
    text: str = ""
    version: str | None = None

    def check(self, request: _Request, vocabulary: int) -> None:
        ids = self.token_ids or []
        if max(ids, default=0) >= vocabulary:
            raise ValueError(f"the token id {max(ids)}, where the policy has {vocabulary} tokens")
        if len(ids) > request.most:
            raise ValueError(f"{len(ids)} tokens, at most {request.most} were allowed")
        if self.log_probs is not None and len(self.log_probs) != len(ids):
            raise ValueError(f"{len(self.log_probs)} log-probabilities for {len(ids)} tokens")


class _LogProbs(BaseModel):
    token_logprobs: list[_LogProb] | None = None


class _Choice(BaseModel):
    """One completion of `/v1/completions`."""

    index: Annotated[int, Field(strict=True)]
    finish_reason: _Reason
    text: str | None = None
    token_ids: list[_Token] | None = None
    prompt_token_ids: list[_Token] | None = None
    logprobs: _LogProbs | None = None


class _Choices(BaseModel):
    choices: list[_Choice]


class _MetaInfo(BaseModel):
    finish_reason: _Reason
    output_token_logprobs: list[tuple[_LogProb, _Token, Any]] | None = None
    weight_version: Annotated[str | None, BeforeValidator(lambda one: None if one is None else str(one))] = None


class _Part(BaseModel):
    """One completion of SGLang's `/generate`."""

    meta_info: _MetaInfo
    output_ids: list[_Token] | None = None
    text: str | None = None


_PARTS = TypeAdapter(list[_Part])


def _request_of(
    request: _Request, config: GenerationConfig, end_ids: Collection[int], *, log_probs: bool
) -> tuple[str, dict[str, Any]]:
    """The path and the JSON of the request. It sets every parameter that a server has a default of its own for."""
    common: dict[str, Any] = {"temperature": config.temperature, "top_p": config.top_p}
    if config.stop_strings:
        common["stop"] = list(config.stop_strings)
    extended = {
        "top_k": config.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": sorted(end_ids),
        "skip_special_tokens": False,
    }
    if config.backend == "sglang":
        sampling = {"max_new_tokens": request.most, **common, **extended}
        seeds = range(request.seed, request.seed + request.num_completions)
        return "/generate", {
            "input_ids": [list(request.prompt_ids)] * request.num_completions,
            "sampling_params": [{**sampling, "sampling_seed": seed} for seed in seeds],
            "return_logprob": log_probs,
        }
    body: dict[str, Any] = {
        "model": config.model,
        "prompt": list(request.prompt_ids),
        "n": request.num_completions,
        "max_tokens": request.most,
        "seed": request.seed,
        **common,
    }
    if log_probs and config.backend == "vllm":
        body["logprobs"] = 1
    if config.backend == "vllm":
        body |= {**extended, "return_token_ids": True}
    return "/v1/completions", body


def _completions_of(backend: str, reply: Any, request: _Request, *, log_probs: bool) -> list[_Served]:
    """The completions, in the order of the request. Raises `ValueError` for anything but a response to it."""
    if backend == "sglang":
        parts = _PARTS.validate_python(reply if isinstance(reply, list) else [reply])
        read = [_of_sglang(part, log_probs) for part in parts]
    else:
        choices = sorted(_Choices.model_validate(reply).choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(len(choices))):
            raise ValueError(f"choices with the indices {[choice.index for choice in choices]}")
        read = [_of_completions(choice, request, log_probs and backend == "vllm") for choice in choices]
    if len(read) != request.num_completions:
        raise ValueError(f"{len(read)} completions instead of {request.num_completions}")
    return read


def _of_completions(choice: _Choice, request: _Request, log_probs: bool) -> _Served:
    if choice.prompt_token_ids is not None and tuple(choice.prompt_token_ids) != request.prompt_ids:
        raise ValueError("a completion of another prompt than was sent: prompt_token_ids differ")
    said, truncated = (choice.logprobs or _LogProbs()).token_logprobs, choice.finish_reason == "length"
    if choice.token_ids is not None and log_probs and said is None:
        raise ValueError("no list logprobs.token_logprobs")
    return _Served(choice.token_ids, said if log_probs else None, truncated, choice.text or "")


def _of_sglang(part: _Part, log_probs: bool) -> _Served:
    meta, ids, said = part.meta_info, part.output_ids, None
    if log_probs:
        if meta.output_token_logprobs is None:
            raise ValueError("no list meta_info.output_token_logprobs")
        said, sampled = [one[0] for one in meta.output_token_logprobs], [one[1] for one in meta.output_token_logprobs]
        # A token that is trimmed from output_ids, such as a stop token, was sampled nevertheless.
        if ids is not None and ids != sampled[: len(ids)]:
            raise ValueError("output_ids are others than those of output_token_logprobs")
        ids = sampled
    return _Served(ids, said, meta.finish_reason == "length", part.text or "", version=meta.weight_version)


def _apart(policy: PolicyModel, ids: list[int], completion: _Served, temperature: float) -> float:
    """The mean absolute difference of the log-probabilities."""
    assert completion.token_ids is not None and completion.log_probs is not None
    if not completion.token_ids:
        return 0.0
    training = policy.training
    policy.eval()
    with torch.no_grad():
        own = policy.log_probs([[ids + completion.token_ids]], [[len(ids)]], temperature=temperature).values_SL[0]
    policy.train(training)
    return float((own.float().cpu() - torch.tensor(completion.log_probs)).abs().mean())


def _seed(seed: int, prompt: int) -> int:
    """The seed of a prompt's request; the server adds the completion's index. It fits into signed 32 bits."""
    return int(np.random.SeedSequence([seed % 2**64, prompt]).generate_state(1)[0]) >> 2
