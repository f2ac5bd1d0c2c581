"""The requests and answers of reward servers, as their own clients write and read them.

    dialect = DIALECTS["vllm"]
    path, body = dialect.path, dialect.body("rm", "text", [Asked(text, ...)])
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

__all__ = ["DIALECTS", "FORMS", "Asked", "Dialect", "Form", "Given"]

Form = Literal["text", "bare", "tokens", "messages"]
FORMS: tuple[Form, ...] = ("text", "bare", "tokens", "messages")
"""Forms of a conversation: the text of the chat template, that text without its BOS (or CLS and SEP), its token ids,
and the messages."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation in every form; `reply`: the text of its completion, where it is text."""

    messages: Sequence[Message]
    text: str
    bare: str
    tokens: Sequence[int]
    reply: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """A server's answer about one conversation: numbers (with `labels`, if it has them) and its count of tokens.

    `contract`: the hash of the scoring contract that the server reports.
    """

    values: tuple[float | None, ...]
    labels: tuple[str, ...] = ()
    num_tokens: int | None = None
    contract: str | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """`forms`: the forms it accepts, that of its own clients first. `read` raises `LookupError`, `TypeError` or
    `ValueError` for an answer of another form.

    `one_by_one`: forms of which a request holds one conversation. `lists_models`: it has /v1/models, and its requests
    name a model.
    """

    path: str
    forms: tuple[Form, ...]
    body: Callable[[str | None, Form, Sequence[Asked]], dict[str, Any]]
    read: Callable[[Any], list[Given]]
    one_by_one: frozenset[Form] = frozenset()
    lists_models: bool = False


def _contents(form: Form, asked: Sequence[Asked]) -> list[Any]:
    return [list(getattr(one, form)) if form in ("tokens", "messages") else getattr(one, form) for one in asked]


def _named(model: str | None) -> dict[str, Any]:
    return {} if model is None else {"model": model}


def _vllm_body(model: str | None, form: Form, asked: Sequence[Asked]) -> dict[str, Any]:
    contents = _contents(form, asked)
    what = {"messages": contents[0]} if form == "messages" else {"input": contents}
    return {**_named(model), **what, "use_activation": False}


def _read_vllm(reply: Any) -> list[Given]:
    rows = sorted(reply["data"], key=lambda row: row["index"])
    tokens = reply.get("usage", {}).get("prompt_tokens") if len(rows) == 1 else None
    return [Given(tuple(row["probs"]), num_tokens=tokens) for row in rows]


def _sglang_body(model: str | None, form: Form, asked: Sequence[Asked]) -> dict[str, Any]:
    return {**_named(model), "input_ids" if form == "tokens" else "text": _contents(form, asked)}


def _read_sglang(reply: Any) -> list[Given]:
    rows = reply if isinstance(reply, list) else [reply]
    return [Given(tuple(row["embedding"]), num_tokens=row.get("meta_info", {}).get("prompt_tokens")) for row in rows]


def _openrlhf_body(model: str | None, form: Form, asked: Sequence[Asked]) -> dict[str, Any]:
    queries = _contents(form, asked)
    prompts = [
        query[: query.rfind(one.reply)] if one.reply in query else query
        for query, one in zip(queries, asked, strict=True)
    ]
    return {"query": queries, "prompts": prompts, "labels": [""] * len(queries)}


def _read_openrlhf(reply: Any) -> list[Given]:
    # A server may give each reward as a list of one.
    rewards = reply["rewards"]
    return [Given(tuple(one) if isinstance(one, list) else (one,)) for one in rewards]


def _tei_body(model: str | None, form: Form, asked: Sequence[Asked]) -> dict[str, Any]:
    return {"inputs": [[text] for text in _contents(form, asked)], "raw_scores": True, "truncate": False}


def _read_tei(reply: Any) -> list[Given]:
    rows = reply if reply and isinstance(reply[0], list) else [reply]
    given = []
    for row in rows:
        ordered = sorted(row, key=lambda one: _number_of(one["label"]))  # TEI sorts by score
        labels = tuple(str(one["label"]) for one in ordered)
        given.append(Given(tuple(one["score"] for one in ordered), labels))
    return given


def _number_of(label: str) -> int:
    match = re.search(r"\d+$", label)
    return int(match[0]) if match else 0


def _treeward_body(model: str | None, form: Form, asked: Sequence[Asked]) -> dict[str, Any]:
    return {**_named(model), "conversations": _contents(form, asked), "on_error": "mask", "shaped": False}


def _read_treeward(reply: Any) -> list[Given]:
    return [
        Given((row["score"],), num_tokens=row["num_tokens"] or None, contract=reply["contract"])
        for row in sorted(reply["data"], key=lambda row: row["index"])
    ]


DIALECTS: Mapping[str, Dialect] = {
    "treeward": Dialect("/v1/rewards", ("messages",), _treeward_body, _read_treeward),
    "vllm": Dialect(
        "/classify",
        ("text", "bare", "tokens", "messages"),
        _vllm_body,
        _read_vllm,
        one_by_one=frozenset({"messages"}),
        lists_models=True,
    ),
    "sglang": Dialect("/classify", ("text", "bare", "tokens"), _sglang_body, _read_sglang, lists_models=True),
    "openrlhf": Dialect("/get_reward", ("text", "bare"), _openrlhf_body, _read_openrlhf),
    "tei": Dialect("/predict", ("text", "bare"), _tei_body, _read_tei),
}
"""By name. vLLM and SGLang have more routes; the scores of all of them are made alike."""
