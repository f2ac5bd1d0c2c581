"""`HttpGenerator`: completions sampled by a server of vLLM, of SGLang, or whatever speaks OpenAI's completions.

    server = ServerSettings("http://localhost:8000", backend="vllm", model="policy")
    generator = HttpGenerator(policy, tokenizer, server, GenerationSettings(max_new_tokens=1024), weight_sync="folder",
                              folder=Path("/shared/weights"))
    generator.load_weights(policy, 0)
    groups = generator.generate(prompts, prompt_ids, num_completions=8, seed=1)

Prompts go as token ids and completions come as token ids: the trainer learns from the tokens that were sampled.
`treeward.rl.completions` says what is asked of which server. A server that fails, or sends something else than
was asked for, is a `GenerationError` within `timeout_seconds`, and no completion is ever made up.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from treeward.client.http import Background, Connection, RewardServerError
from treeward.errors import ConfigError
from treeward.model.policy_loading import export_policy
from treeward.model.policy_model import PolicyModel
from treeward.rl.completions import (
    Aborted,
    Backend,
    CompletionRequest,
    Malformed,
    NoTokenIds,
    ServedCompletion,
    completions_of,
    request_of,
)
from treeward.rl.experience import CompletionGroup, Prompt, SampledCompletion
from treeward.rl.generation import CompletionReader, GenerationError, GenerationSettings, end_ids_of, rooms
from treeward.rl.weight_sync import FolderSync, StaleWeights, WeightSync, sync_function

__all__ = ["HttpGenerator", "ServerSettings"]

logger = logging.getLogger(__name__)

_PROBE_TEXT, _PROBE_TOKENS = "The quick brown fox", 16
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
_FIXES = {
    400: "see what the server says; a prompt and its completion must fit into the server's own longest sequence",
    401: "name the environment variable with the server's key: policy.generation.api_key_env",
    403: "name the environment variable with the server's key: policy.generation.api_key_env",
    404: "check policy.generation.url, model and backend",
    422: "check that policy.generation.backend is the server's kind, and its version",
}


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where completions come from. `url`: with or without `/v1`. `model`: its name there. `api_key_env`: the
    environment variable with the key. `timeout_seconds`: for one request, with all its repetitions. `max_concurrency`:
    requests at a time, one for each prompt. `retokenize`: accept text without token ids and tokenize it, which can give
    other tokens than were sampled; `HttpGenerator.retokenized` counts. `probe_tolerance`: mean difference of the
    server's log-probabilities from the policy's own, in nats; None: they are not compared.
    """

    url: str
    backend: Backend = "vllm"
    model: str | None = None
    api_key_env: str | None = None
    timeout_seconds: float = 600.0
    max_concurrency: int = 64
    max_retries: int = 8
    retokenize: bool = False
    probe_tolerance: float | None = 0.1


class HttpGenerator:
    """See `Generator`. `end_ids`: as for `LocalGenerator`. `weight_sync`: how the server gets new weights.

    "none": not at all. "folder": the weights are written to `folder`, by `export`, and the server loads them: SGLang by
    `/update_weights_from_disk`; vLLM by the worker's `reload_weights(weights_path=...)`, which only a server that was
    started with VLLM_SERVER_DEV_MODE=1 takes orders for (`/collective_rpc`). Else a function, or its dotted path.

    After each of them, with "none" at first only, the server is asked for a completion, and the policy for its
    log-probabilities. That finds another model, or weights that were not loaded or loaded wrongly; one small step is
    less than what a server in bfloat16 rounds. Raises `ConfigError` for settings that contradict each other.
    """

    def __init__(
        self,
        policy: PolicyModel,
        tokenizer: PreTrainedTokenizerBase,
        server: ServerSettings,
        settings: GenerationSettings | None = None,
        *,
        end_ids: Sequence[int] | None = None,
        weight_sync: str | WeightSync = "none",
        folder: Path | None = None,
        export: Callable[[PolicyModel, Path], None] | None = None,
    ) -> None:
        self.policy, self.tokenizer, self.server = policy, tokenizer, server
        self.settings = settings or GenerationSettings()
        self.reader = CompletionReader(tokenizer, end_ids_of(policy, tokenizer, end_ids), self.settings)
        self.version: int | None = None
        self._compared = False
        self.retokenized = self.retokenized_apart = 0
        """Completions that came as text, and those of them that have another number of tokens than the server says."""
        _check(server, self.settings)
        self._comparable = _are_comparable(server, self.settings)
        self._vocabulary = int(policy.hf.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
        self._connection = Connection(
            server.url.rstrip("/").removesuffix("/v1"),
            token=_key(server.api_key_env),
            max_retries=server.max_retries,
            max_connections=server.max_concurrency,
        )
        self._background = Background()
        self._sync = self._make_sync(weight_sync, folder, export)

    def generate(
        self, prompts: Sequence[Prompt], prompt_ids: Sequence[Sequence[int]], *, num_completions: int, seed: int
    ) -> list[CompletionGroup]:
        """See `Generator`. A prompt's completions are one request. The seed is the server's to heed."""
        most = rooms(prompts, prompt_ids, self.settings, self.policy)
        requests = [
            CompletionRequest(tuple(ids), num_completions, most[p], _seed(seed, p)) for p, ids in enumerate(prompt_ids)
        ]
        served = self._background.run(self._all(requests, [prompt.where for prompt in prompts]))
        return [
            CompletionGroup(prompt, request.prompt_ids, tuple(self._completion(one) for one in completions))
            for prompt, request, completions in zip(prompts, requests, served, strict=True)
        ]

    def load_weights(self, policy: PolicyModel, version: int) -> None:
        """Give the server the weights and compare. Raises `GenerationError` where it has others afterwards."""
        self._sync(policy, version)
        self.version = version
        # A server that keeps its weights is compared with those it was started with; and one warning is enough that
        # there is nothing to compare.
        once = isinstance(self._sync, StaleWeights) or not self._says_log_probs
        if self.server.probe_tolerance is not None and not (once and self._compared):
            self._compare(policy)
            self._compared = True

    def metrics(self) -> dict[str, float]:
        """See `Generator`. Nothing where text is not accepted."""
        if not self.server.retokenize:
            return {}
        return {"num_retokenized": float(self.retokenized), "num_retokenized_apart": float(self.retokenized_apart)}

    def close(self) -> None:
        """End the connections, and remove the weights that were written."""
        self._background.close()
        if isinstance(self._sync, FolderSync):
            self._sync.close()

    async def _all(
        self, requests: Sequence[CompletionRequest], wheres: Sequence[str | None]
    ) -> list[list[ServedCompletion]]:
        slots = asyncio.Semaphore(self.server.max_concurrency)

        async def one(request: CompletionRequest, where: str | None) -> list[ServedCompletion]:
            async with slots:
                return await self._ask(request, where)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*each)) for each in zip(requests, wheres, strict=True)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _ask(
        self, request: CompletionRequest, where: str | None, settings: GenerationSettings | None = None
    ) -> list[ServedCompletion]:
        settings = settings or replace(self.settings, log_probs=self.settings.log_probs and self._comparable)
        backend = self.server.backend
        path, body = request_of(backend, self.server.model, request, settings, self.reader.end_ids)
        asked = str(request) if where is None else f"{request} ({where})"
        until = time.monotonic() + self.server.timeout_seconds
        attempt = 0
        while True:
            reply = await self._post(path, body, asked, until)
            try:
                completions = completions_of(
                    backend, reply, request, vocabulary=self._vocabulary, log_probs=settings.log_probs
                )
            except Aborted as error:
                pause = _pause(attempt)
                attempt += 1
                if attempt > self.server.max_retries or time.monotonic() + pause >= until:
                    raise self._wrong(path, f"{error}, {attempt} times", asked, "completions that end") from None
                await asyncio.sleep(pause)
                continue
            except NoTokenIds as error:
                raise self._without_ids(path, str(error), asked) from None
            except Malformed as error:
                raise self._wrong(path, str(error), asked, f"the completions of a server of {backend}") from None
            if any(completion.token_ids is None for completion in completions) and not self.server.retokenize:
                raise self._without_ids(path, "text without token ids", asked)
            return completions

    async def _post(
        self, path: str, body: Mapping[str, Any], asked: str, until: float, *, may_be_empty: bool = False
    ) -> Any:
        """The JSON of the response. `Connection` repeats what it can; 500 is an engine that may be restarting."""
        content = json.dumps(body).encode()
        attempt = 0
        while True:
            try:
                return (await self._connection.post(path, content, until=until)).json
            except RewardServerError as error:
                if error.status == 200 and may_be_empty:
                    return None
                pause = _pause(attempt)
                attempt += 1
                again = error.status == 500 and attempt <= self.server.max_retries
                if again and time.monotonic() + pause < until:
                    await asyncio.sleep(pause)
                    continue
                no_response = error.status is None
                raise GenerationError(
                    f"the generator has failed: {error.summary}",
                    where=error.where,
                    got=f"{error.got}; asked for {asked}",
                    need=(no_response and error.need)
                    or f"a server of {self.server.backend} that responds in {self._seconds}",
                    fix=_FIXES.get(
                        error.status or 0,
                        "start the server again, and resume the run" if no_response else "look at the server's log",
                    ),
                ) from error

    @property
    def _says_log_probs(self) -> bool:
        return self.server.backend != "openai" and self.settings.log_probs

    @property
    def _seconds(self) -> str:
        return f"{self.server.timeout_seconds:g} s (policy.generation.timeout_seconds)"

    def _wrong(self, path: str, got: str, asked: str, need: str) -> GenerationError:
        return GenerationError(
            "the generator sends something else than it was asked for",
            where=self._connection.url + path,
            got=f"{got}; asked for {asked}",
            need=need,
            fix="check policy.generation.backend and the server's version and log",
        )

    def _without_ids(self, path: str, got: str, asked: str) -> GenerationError:
        return GenerationError(
            "the generator does not say which tokens it sampled",
            where=self._connection.url + path,
            got=f"{got}; asked for {asked}",
            need="token ids: text that is tokenized again can be other tokens than were sampled",
            fix="serve with vLLM 0.10.2 or later (backend vllm) or SGLang (backend sglang), or accept it: retokenize",
        )

    def _completion(self, served: ServedCompletion) -> SampledCompletion:
        if served.token_ids is not None:
            log_probs = served.log_probs if self.settings.log_probs else None
            return self.reader.completion(served.token_ids, log_probs, truncated=served.truncated)
        tokens = list(self.tokenizer(served.text, add_special_tokens=False).input_ids)
        self.retokenized += 1
        # The server may count the end of the turn, which has no text.
        counts = (None, len(tokens), len(tokens) + (not served.truncated))
        self.retokenized_apart += served.num_tokens not in counts
        end = self.tokenizer.eos_token_id
        if not served.truncated and not self.settings.stop_strings and end in self.reader.end_ids:
            tokens.append(end)
        return self.reader.completion(tokens, None, truncated=served.truncated)

    def _make_sync(
        self, sync: str | WeightSync, folder: Path | None, export: Callable[[PolicyModel, Path], None] | None
    ) -> WeightSync:
        if not isinstance(sync, str):
            return sync
        if sync == "none":
            return StaleWeights()
        if sync != "folder":
            return sync_function(sync)
        if folder is None or self.server.backend == "openai":
            raise ConfigError(
                "the weights cannot go by a folder",
                field="weight_sync",
                got=f"folder: {folder}, backend: {self.server.backend}",
                need="a folder that the server sees too, and backend vllm or sglang",
            )
        return FolderSync(folder, export or self._export, self._announce)

    def _export(self, policy: PolicyModel, folder: Path) -> None:
        template = str(getattr(self.tokenizer, "chat_template", None) or "")
        export_policy(policy, self.tokenizer, folder, chat_template=template)

    def _announce(self, folder: Path, version: int) -> None:
        until = time.monotonic() + self.server.timeout_seconds
        asked = f"the weights of version {version} in {folder} to be loaded"

        def ask(path: str, body: Mapping[str, Any]) -> Any:
            return self._background.run(self._post(path, body, asked, until, may_be_empty=True))

        if self.server.backend == "sglang":
            path = "/update_weights_from_disk"
            reply = ask(path, {"model_path": str(folder), "weight_version": str(version), "flush_cache": True})
            if not isinstance(reply, Mapping) or reply.get("success") is not True:
                raise self._wrong(path, json.dumps(reply)[:300], asked, "success: true")
            return
        try:
            ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            ask("/reset_prefix_cache", {})  # what was cached was computed with the weights before
        except GenerationError as error:
            error_fix = "start vLLM with VLLM_SERVER_DEV_MODE=1, in a version whose reload_weights takes weights_path"
            raise GenerationError(
                "vLLM does not load the weights", where=error.where, got=error.got, need=error.need, fix=error_fix
            ) from error

    def _compare(self, policy: PolicyModel) -> None:
        """The server's log-probabilities of a completion of its own, with the policy's."""
        if not self._says_log_probs:
            logger.warning("Whether %s has the policy's weights is not known: it gives no log-probabilities.",
                           self._connection.url)  # fmt: skip
            return
        ids = list(self.tokenizer(_PROBE_TEXT, add_special_tokens=False).input_ids) or [min(self.reader.end_ids)]
        request = CompletionRequest(tuple(ids), 1, _PROBE_TOKENS, seed=0)
        temperature = self.settings.temperature or 1.0
        settings = GenerationSettings(max_new_tokens=_PROBE_TOKENS, temperature=temperature)
        (completion,) = self._background.run(self._ask(request, "the comparison of the weights", settings))
        assert completion.token_ids is not None and completion.log_probs is not None
        apart = self._apart(policy, ids, completion, temperature)
        tolerance = self.server.probe_tolerance
        assert tolerance is not None
        stale_version = completion.version not in (None, "default", str(self.version)) and isinstance(
            self._sync, FolderSync
        )
        if apart <= tolerance and not stale_version:
            return
        raw = temperature != 1.0 and self._apart(policy, ids, completion, 1.0) <= tolerance
        if raw and not self._comparable:
            return
        error = GenerationError(
            "the server's log-probabilities are not those of the policy",
            where=self._connection.url,
            got=f"{apart:.3g} nats apart in the mean, after the weights of version {self.version}"
            + (f"; the server says version {completion.version}" if stale_version else ""),
            need=f"at most {tolerance:g}",
            fix=_RAW_FIX if raw else "check that the server serves this model and has loaded these weights",
        )
        if isinstance(self._sync, StaleWeights) and not raw:
            logger.warning("%s", error)
            return
        raise error

    def _apart(self, policy: PolicyModel, ids: list[int], completion: ServedCompletion, temperature: float) -> float:
        """Mean of |difference|."""
        assert completion.token_ids is not None and completion.log_probs is not None
        if not completion.token_ids:
            return 0.0
        training = policy.training
        policy.eval()
        with torch.no_grad():
            own = policy.log_probs([[ids + completion.token_ids]], [[len(ids)]], temperature=temperature).values_SL[0]
        policy.train(training)
        return float((own.float().cpu() - torch.tensor(completion.log_probs)).abs().mean())


_RAW_FIX = (
    "they are those at temperature 1: start vLLM with --logprobs-mode processed_logprobs, or SGLang without "
    "SGLANG_RETURN_ORIGINAL_LOGPROB"
)


def _check(server: ServerSettings, settings: GenerationSettings) -> None:
    if server.backend != "openai":
        return
    problems = {
        "model": (server.model is None, server.model, "the name of the model at the server"),
        "top_k": (settings.top_k is not None, settings.top_k, "no top_k: OpenAI's completions have none"),
        "stop_token_ids": (bool(settings.stop_token_ids), settings.stop_token_ids, "stop_strings instead"),
    }
    for field, (wrong, got, need) in problems.items():
        if wrong:
            raise ConfigError("backend openai cannot do this", field=field, got=got, need=need)


def _are_comparable(server: ServerSettings, settings: GenerationSettings) -> bool:
    """Whether the server's log-probabilities are those at the temperature, before top-k and top-p.

    vLLM's are one or the other, as it was started; SGLang's are both.
    """
    filtered = settings.top_k is not None or settings.top_p not in (None, 1.0)
    if server.backend != "sglang" and filtered and settings.log_probs:
        logger.warning(
            "With top_k or top_p %s gives log-probabilities after top_k and top_p, or at temperature 1, and does not "
            "say which: they are not used, so train/token_mult_prob_error is not known.",
            server.backend,
        )
        return False
    return True


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(
            "the server's key is not in the environment",
            field="api_key_env",
            got=f"no {variable}",
            need="the name of an environment variable that holds the key",
            fix=f"export {variable}=...",
        )
    return value


def _seed(seed: int, prompt: int) -> int:
    """Of a prompt's request; the server adds the completion's index. A signed integer of 32 bits will hold it."""
    return int(np.random.SeedSequence([seed % 2**64, prompt]).generate_state(1)[0]) >> 2


def _pause(attempt: int) -> float:
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**attempt)
