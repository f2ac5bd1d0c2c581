"""Requests to reward servers and their replies, as the servers' own clients write and read them.

    dialect = DIALECTS["vllm"]
    path, body = dialect.path, dialect.body("rm", "text", [RenderedConversation(messages, text, ...)])
    [one.values for one in dialect.read(reply)]      # the server's numbers for each conversation

Requests are those of verl, OpenRLHF and text-embeddings-inference's own client. They ask for raw scores where a dialect
has a parameter for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from treeward.data.preference import Message

__all__ = ["DIALECTS", "Dialect", "Form", "RenderedConversation", "ServerScore"]

Form = Literal["text", "bare", "tokens", "messages"]
"""What is sent: the text of the chat template, that text without its BOS (or CLS and SEP), its token ids, or the
messages."""


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation in every form; `completion`: the text of its last message."""

    messages: Sequence[Message]
    text: str
    bare: str
    tokens: Sequence[int]
    completion: str = ""


@dataclass(frozen=True, slots=True)
class ServerScore:
    """A server's numbers for one conversation (with `labels`, if it has them), and its count of tokens.

    `contract`: the hash of the scoring contract that the server reports.
    """

    values: tuple[float | None, ...]
    labels: tuple[str, ...] = ()
    num_tokens: int | None = None
    contract: str | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """`forms`: the forms it accepts, that of its own clients first. `read` raises `LookupError`, `TypeError` or
    `ValueError` for a reply in another form.

    `lists_models`: the server has /v1/models, and requests name a model.
    """

    path: str
    forms: tuple[Form, ...]
    body: Callable[[str | None, Form, Sequence[RenderedConversation]], dict[str, Any]]
    read: Callable[[Any], list[ServerScore]]
    lists_models: bool = False


def _contents(form: Form, conversations: Sequence[RenderedConversation]) -> list[Any]:
    contents = [getattr(one, form) for one in conversations]
    return contents if form in ("text", "bare") else [list(content) for content in contents]


def _named(model: str | None) -> dict[str, Any]:
    return {} if model is None else {"model": model}


def _vllm_body(model: str | None, form: Form, conversations: Sequence[RenderedConversation]) -> dict[str, Any]:
    contents = _contents(form, conversations)
    what = {"messages": contents[0]} if form == "messages" else {"input": contents}
    return {**_named(model), **what, "use_activation": False}


def _read_vllm(reply: Any) -> list[ServerScore]:
    rows = sorted(reply["data"], key=lambda row: row["index"])
    tokens = reply.get("usage", {}).get("prompt_tokens") if len(rows) == 1 else None
    return [ServerScore(tuple(row["probs"]), num_tokens=tokens) for row in rows]


def _sglang_body(model: str | None, form: Form, conversations: Sequence[RenderedConversation]) -> dict[str, Any]:
    return {**_named(model), "input_ids" if form == "tokens" else "text": _contents(form, conversations)}


def _read_sglang(reply: Any) -> list[ServerScore]:
    rows = reply if isinstance(reply, list) else [reply]
    return [
        ServerScore(tuple(row["embedding"]), num_tokens=row.get("meta_info", {}).get("prompt_tokens")) for row in rows
    ]


def _openrlhf_body(model: str | None, form: Form, conversations: Sequence[RenderedConversation]) -> dict[str, Any]:
    queries = _contents(form, conversations)
    prompts = [
        query[: query.rfind(one.completion)] if one.completion in query else query
        for query, one in zip(queries, conversations, strict=True)
    ]
    return {"query": queries, "prompts": prompts, "labels": [""] * len(queries)}


def _read_openrlhf(reply: Any) -> list[ServerScore]:
    # A server may give each reward as a list of one.
    return [ServerScore(tuple(one) if isinstance(one, list) else (one,)) for one in reply["rewards"]]


def _tei_body(model: str | None, form: Form, conversations: Sequence[RenderedConversation]) -> dict[str, Any]:
    return {"inputs": [[text] for text in _contents(form, conversations)], "raw_scores": True, "truncate": False}


def _read_tei(reply: Any) -> list[ServerScore]:
    scores = []
    for row in reply if reply and isinstance(reply[0], list) else [reply]:
        ordered = sorted(row, key=lambda one: _label_number(one["label"]))  # TEI sorts by score
        labels = tuple(str(one["label"]) for one in ordered)
        scores.append(ServerScore(tuple(one["score"] for one in ordered), labels))
    return scores


def _label_number(label: str) -> int:
    match = re.search(r"\d+$", label)
    return int(match[0]) if match else 0


def _treeward_body(model: str | None, form: Form, conversations: Sequence[RenderedConversation]) -> dict[str, Any]:
    return {**_named(model), "conversations": _contents(form, conversations), "on_error": "mask", "shaped": False}


def _read_treeward(reply: Any) -> list[ServerScore]:
    return [
        ServerScore((row["score"],), num_tokens=row["num_tokens"] or None, contract=reply["contract"])
        for row in sorted(reply["data"], key=lambda row: row["index"])
    ]


DIALECTS: Mapping[str, Dialect] = {
    "treeward": Dialect("/v1/rewards", ("messages",), _treeward_body, _read_treeward),
    "vllm": Dialect("/classify", ("text", "bare", "tokens", "messages"), _vllm_body, _read_vllm, lists_models=True),
    "sglang": Dialect("/classify", ("text", "bare", "tokens"), _sglang_body, _read_sglang, lists_models=True),
    "openrlhf": Dialect("/get_reward", ("text", "bare"), _openrlhf_body, _read_openrlhf),
    "tei": Dialect("/predict", ("text", "bare"), _tei_body, _read_tei),
}
"""By name. vLLM and SGLang have more routes; the scores of all of them are made alike."""
