"""What servers of completions are asked, and what is read of their responses: token ids, never text.

    request = CompletionRequest((5, 7), num_completions=4, most=64, seed=1)
    path, body = request_of("vllm", "policy", request, settings, end_ids={2})
    completions = completions_of("vllm", reply, request, vocabulary=32000)

vLLM: `/v1/completions` with `return_token_ids` (0.10.2 and later; before, `return_tokens_as_token_ids`, which is asked
for too). A completion's seed is the request's plus its index. Log-probabilities are those of the raw logits, whatever
the temperature, unless the server was started with `--logprobs-mode processed_logprobs`: then after temperature, top-k
and top-p. SGLang: `/generate` with `input_ids`, one for each completion with a seed of its own, which it heeds with
`--enable-deterministic-inference`; log-probabilities are at the temperature, before top-k and top-p, unless
`SGLANG_RETURN_ORIGINAL_LOGPROB` is set. openai: `/v1/completions` as OpenAI describes it, which has no token ids: what
was sampled cannot be had of it, only text to tokenize again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from treeward.rl.generation import GenerationSettings

__all__ = [
    "Aborted",
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
"""A log-probability may be so much above 0: of a server that computes in bfloat16."""


class Malformed(Exception):
    """The server's response is not what it should be."""


class NoTokenIds(Malformed):
    """The server's completion has text, and not the ids of the tokens that were sampled."""


class Aborted(Exception):
    """The server has ended a completion for reasons of its own; it can be asked again."""


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
    """What a server gives. `token_ids`: None where it has but `text`, whose tokens it says `num_tokens` are.

    `version`: of the weights, where it says so.
    """

    token_ids: list[int] | None
    log_probs: list[float] | None
    truncated: bool
    text: str = ""
    num_tokens: int | None = None
    version: str | None = None


def request_of(
    backend: Backend,
    model: str | None,
    request: CompletionRequest,
    settings: GenerationSettings,
    end_ids: Collection[int],
) -> tuple[str, dict[str, Any]]:
    """The path and the JSON of the request. Whatever a server has defaults of its own for is said."""
    top_p = 1.0 if settings.top_p is None else settings.top_p
    stops = {"stop": list(settings.stop_strings)} if settings.stop_strings else {}
    if backend == "sglang":
        sampling = {
            "max_new_tokens": request.most,
            "temperature": settings.temperature,
            "top_p": top_p,
            "top_k": settings.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(end_ids),
            "skip_special_tokens": False,
            **stops,
        }
        return "/generate", {
            "input_ids": [list(request.prompt_ids)] * request.num_completions,
            "sampling_params": [
                {**sampling, "sampling_seed": request.seed + g} for g in range(request.num_completions)
            ],
            "return_logprob": settings.log_probs,
        }
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(request.prompt_ids),
        "n": request.num_completions,
        "max_tokens": request.most,
        "temperature": settings.temperature,
        "top_p": top_p,
        "seed": request.seed,
        **stops,
    }
    if settings.log_probs or backend == "openai":
        body["logprobs"] = 1
    if backend == "vllm":
        body |= {
            "top_k": settings.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(end_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
    return "/v1/completions", body


def completions_of(
    backend: Backend, reply: Any, request: CompletionRequest, *, vocabulary: int, log_probs: bool = True
) -> list[ServedCompletion]:
    """The completions in order, whatever order the server gives them in. `vocabulary`: the policy's number of tokens.

    Raises `Malformed` for what is not the completion to the request, `NoTokenIds` where it holds text alone and the
    backend should say more, `Aborted` for a completion that the server broke off.
    """
    if backend == "sglang":
        parts = reply if isinstance(reply, list) else [reply]
        read = [_of_sglang(part, log_probs) for part in map(_mapping, parts)]
    else:
        choices = [_mapping(choice) for choice in _list(_mapping(reply).get("choices"), "choices")]
        if all(isinstance(choice.get("index"), int) for choice in choices):
            choices.sort(key=lambda choice: int(choice["index"]))
            if [choice["index"] for choice in choices] != list(range(len(choices))):
                raise Malformed(f"choices with the indices {[choice['index'] for choice in choices]}")
        read = [_of_completions(choice, request, log_probs, strict=backend == "vllm") for choice in choices]
    if len(read) != request.num_completions:
        raise Malformed(f"{len(read)} completions instead of {request.num_completions}")
    for completion in read:
        _check(completion, request, vocabulary)
    return read


def _of_completions(
    choice: Mapping[str, Any], request: CompletionRequest, log_probs: bool, *, strict: bool
) -> ServedCompletion:
    truncated = _truncated(choice.get("finish_reason"))
    asked = choice.get("prompt_token_ids")
    if asked is not None and list(asked) != list(request.prompt_ids):
        raise Malformed("a completion to another prompt than was sent: prompt_token_ids differ")
    said = choice.get("logprobs")
    said = said if isinstance(said, Mapping) else {}
    names, numbers = said.get("tokens"), said.get("token_logprobs")
    ids, text = choice.get("token_ids"), choice.get("text")
    if ids is None and names is not None:
        named = [_NAMED_ID.fullmatch(str(name)) for name in names]
        ids = [int(name[1]) for name in named if name is not None] if all(named) and (named or not text) else None
    if ids is None:
        if strict or not isinstance(text, str):
            raise NoTokenIds("a completion without token_ids")
        count = len(names) if isinstance(names, list) else None
        return ServedCompletion(None, None, truncated, text, count)
    return ServedCompletion(
        _list(ids, "token_ids"),
        _list(numbers, "logprobs.token_logprobs") if log_probs and (strict or numbers is not None) else None,
        truncated,
        text if isinstance(text, str) else "",
    )


def _of_sglang(part: Mapping[str, Any], log_probs: bool) -> ServedCompletion:
    meta = _mapping(part.get("meta_info"))
    reason = meta.get("finish_reason")
    truncated = _truncated(reason.get("type") if isinstance(reason, Mapping) else reason)
    ids, said = part.get("output_ids"), None
    if log_probs:
        triples = _list(meta.get("output_token_logprobs"), "meta_info.output_token_logprobs")
        if not all(isinstance(triple, Sequence) and len(triple) >= 2 for triple in triples):
            raise Malformed("meta_info.output_token_logprobs are not pairs of a number and a token id")
        said, sampled = [triple[0] for triple in triples], [triple[1] for triple in triples]
        # what is trimmed of output_ids, as a stop token may be, was sampled nevertheless
        if ids is not None and list(ids) != sampled[: len(ids)]:
            raise Malformed("output_ids are others than those of output_token_logprobs")
        ids = sampled
    if ids is None:
        raise NoTokenIds("a completion without output_ids")
    version = meta.get("weight_version")
    text = part.get("text")
    return ServedCompletion(
        _list(ids, "output_ids"),
        said,
        truncated,
        text if isinstance(text, str) else "",
        version=None if version is None else str(version),
    )


def _truncated(reason: Any) -> bool:
    if reason in ("stop", "length"):
        return bool(reason == "length")
    if reason in (None, "abort", "error", "load"):
        raise Aborted(f"finish_reason {reason}")
    raise Malformed(f"finish_reason {reason!r}")


def _check(completion: ServedCompletion, request: CompletionRequest, vocabulary: int) -> None:
    ids, said = completion.token_ids, completion.log_probs
    if ids is None:
        return
    wrong = next((i for i in ids if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocabulary), None)
    if wrong is not None:
        raise Malformed(f"the token id {wrong!r}, where the policy has {vocabulary} tokens")
    if len(ids) > request.most:
        raise Malformed(f"{len(ids)} tokens where at most {request.most} were asked for")
    if said is None:
        return
    if len(said) != len(ids):
        raise Malformed(f"{len(said)} log-probabilities for {len(ids)} tokens")
    if not all(isinstance(x, int | float) and math.isfinite(x) and x <= _ROUNDING for x in said):
        raise Malformed("log-probabilities that are none: not finite, or above 0")


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise Malformed(f"{type(value).__name__} where an object should be")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise Malformed(f"no list {name}")
    return value
