"""Requests to servers of completions, and what is read of their answers: token ids, never text.

    request = CompletionRequest((5, 7), num_completions=4, most=64, seed=1)
    path, body = request_of("vllm", request, section, end_ids={2})
    completions = completions_of("vllm", reply, request, vocabulary=32000)

vLLM: `/v1/completions` with `return_token_ids` (0.10.2 and later; earlier versions have `return_tokens_as_token_ids`,
which is sent too). The seed of a completion is the request's plus its index. Log-probabilities are those of the raw
logits at temperature 1, unless the server was started with `--logprobs-mode processed_logprobs`: then after
temperature, top-k and top-p. SGLang: `/generate` with `input_ids`, one for each completion with a seed of its own; it
heeds the seeds with `--enable-deterministic-inference`. Log-probabilities are at the temperature, before top-k and
top-p, unless `SGLANG_RETURN_ORIGINAL_LOGPROB` is set. openai: `/v1/completions` as OpenAI describes it, which has no
token ids, only text to tokenize again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from treeward.config.grpo_policy import GenerationConfig

__all__ = [
    "Backend",
    "CompletionRequest",
    "Malformed",
    "NoTokenIds",
    "ServedCompletion",
    "completions_of",
    "request_of",
]

Backend = Literal["vllm", "sglang", "openai"]

_NAMED_ID = re.compile(r"token_id:(\d+)")
_ROUNDING = 1e-2
"""A server that computes in bfloat16 may give log-probabilities so much above 0."""


class Malformed(Exception):
    """The server's answer does not have the form, or the numbers, of an answer to the request."""


class NoTokenIds(Malformed):
    """The server's answer has text, and not the ids of the tokens that were sampled."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """`num_completions` completions of at most `most` tokens to one prompt."""

    prompt_ids: tuple[int, ...]
    num_completions: int
    most: int
    seed: int

    def __str__(self) -> str:
        return f"{self.num_completions} completions of at most {self.most} tokens to a prompt of {len(self.prompt_ids)}"


@dataclass(frozen=True, slots=True)
class ServedCompletion:
    """A completion as the server gives it. `token_ids`: None where it gives only `text`, of `num_tokens` tokens.

    `version`: of the weights, where the server says it.
    """

    token_ids: list[int] | None
    log_probs: list[float] | None
    truncated: bool
    text: str = ""
    num_tokens: int | None = None
    version: str | None = None


def request_of(
    backend: Backend,
    request: CompletionRequest,
    config: GenerationConfig,
    end_ids: Collection[int],
    *,
    log_probs: bool = True,
) -> tuple[str, dict[str, Any]]:
    """The path and the JSON of the request. It sets every parameter that a server has a default of its own for."""
    stops = {"stop": list(config.stop_strings)} if config.stop_strings else {}
    own_sampling = {
        "top_k": config.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": sorted(end_ids),
        "skip_special_tokens": False,
    }
    if backend == "sglang":
        sampling = {
            "max_new_tokens": request.most,
            "temperature": config.temperature,
            "top_p": config.top_p,
            **own_sampling,
            **stops,
        }
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
        "temperature": config.temperature,
        "top_p": config.top_p,
        "seed": request.seed,
        **stops,
    }
    if log_probs or backend == "openai":
        body["logprobs"] = 1
    if backend == "vllm":
        body |= {**own_sampling, "return_token_ids": True, "return_tokens_as_token_ids": True}
    return "/v1/completions", body


def completions_of(
    backend: Backend, reply: Any, request: CompletionRequest, *, vocabulary: int, log_probs: bool = True
) -> list[ServedCompletion]:
    """The completions in the order of the request. `vocabulary`: the policy's number of tokens.

    Raises `Malformed` for anything but an answer to the request, and `NoTokenIds` where vLLM or SGLang sends text
    alone.
    """
    try:
        if backend == "sglang":
            read = [_of_sglang(part, log_probs) for part in (reply if isinstance(reply, list) else [reply])]
        else:
            choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
            if [choice["index"] for choice in choices] != list(range(len(choices))):
                raise Malformed(f"choices with the indices {[choice['index'] for choice in choices]}")
            read = [_of_completions(choice, request, log_probs, strict=backend == "vllm") for choice in choices]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Malformed(f"another form of answer: {error!r}") from error
    if len(read) != request.num_completions:
        raise Malformed(f"{len(read)} completions instead of {request.num_completions}")
    for completion in read:
        _check(completion, request, vocabulary)
    return read


def _of_completions(
    choice: Mapping[str, Any], request: CompletionRequest, log_probs: bool, *, strict: bool
) -> ServedCompletion:
    prompt_ids = choice.get("prompt_token_ids")
    if prompt_ids is not None and list(prompt_ids) != list(request.prompt_ids):
        raise Malformed("a completion of another prompt than was sent: prompt_token_ids differ")
    truncated = _truncated(choice["finish_reason"])
    said = choice.get("logprobs") or {}
    names, numbers = said.get("tokens"), said.get("token_logprobs")
    ids, text = choice.get("token_ids"), choice.get("text")
    if ids is None and names is not None:  # the form of older versions of vLLM
        named = [_NAMED_ID.fullmatch(str(name)) for name in names]
        ids = [int(name[1]) for name in named if name is not None] if all(named) and (named or not text) else None
    if ids is None:
        if strict or not isinstance(text, str):
            raise NoTokenIds("a completion without token_ids")
        return ServedCompletion(None, None, truncated, text, None if names is None else len(names))
    if log_probs and strict and numbers is None:
        raise Malformed("no list logprobs.token_logprobs")
    return ServedCompletion(
        list(ids), list(numbers) if log_probs and numbers is not None else None, truncated, text or ""
    )


def _of_sglang(part: Mapping[str, Any], log_probs: bool) -> ServedCompletion:
    meta = part["meta_info"]
    reason = meta["finish_reason"]
    truncated = _truncated(reason["type"] if isinstance(reason, Mapping) else reason)
    ids, said = part.get("output_ids"), None
    if log_probs:
        pairs = meta["output_token_logprobs"]
        said, sampled = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        # A token that is trimmed from output_ids, such as a stop token, was sampled nevertheless.
        if ids is not None and list(ids) != sampled[: len(ids)]:
            raise Malformed("output_ids are others than those of output_token_logprobs")
        ids = sampled
    if ids is None:
        raise NoTokenIds("a completion without output_ids")
    version = meta.get("weight_version")
    return ServedCompletion(
        list(ids), said, truncated, part.get("text") or "", version=None if version is None else str(version)
    )


def _truncated(reason: Any) -> bool:
    if reason not in ("stop", "length"):
        raise Malformed(f"finish_reason {reason!r}: the server broke the completion off")
    return bool(reason == "length")


def _check(completion: ServedCompletion, request: CompletionRequest, vocabulary: int) -> None:
    ids, said = completion.token_ids, completion.log_probs
    if ids is None:
        return
    wrong = next((i for i in ids if type(i) is not int or not 0 <= i < vocabulary), None)
    if wrong is not None:
        raise Malformed(f"the token id {wrong!r}, where the policy has {vocabulary} tokens")
    if len(ids) > request.most:
        raise Malformed(f"{len(ids)} tokens, at most {request.most} were allowed")
    if said is None:
        return
    if len(said) != len(ids):
        raise Malformed(f"{len(said)} log-probabilities for {len(ids)} tokens")
    if not all(isinstance(x, int | float) and math.isfinite(x) and x <= _ROUNDING for x in said):
        raise Malformed("log-probabilities that are not finite, or above 0")
