"""How reward servers are asked for scores, and how their answers are read: as their clients do it.

    dialect = DIALECTS["vllm"]
    path, body = dialect.path, dialect.body("rm", "text", [Asked(text, ...)])
    [one.values for one in dialect.read(reply)]      # the numbers of each conversation, as the server gives them

Requests are those of the clients in use (verl, OpenRLHF, text-embeddings-inference's own), and ask for raw scores where
a dialect has a word for it.
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
"""What is sent: the text that the chat template writes, that text without its BOS (or CLS and SEP), its token ids, or
the messages."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation in every form; `reply`: the text of its answer, where it is text."""

    messages: Sequence[Message]
    text: str
    bare: str
    tokens: Sequence[int]
    reply: str = ""


@dataclass(frozen=True, slots=True)
class Given:
    """What a server gives for a conversation: its numbers, by label where labels are named, and the tokens it counted.

    `contract`: the hash of the scoring contract that the server says it serves.
    """

    values: tuple[float | None, ...]
    labels: tuple[str, ...] = ()
    num_tokens: int | None = None
    contract: str | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """`forms`: what it can be sent, that of its clients first. `read` raises what a wrong answer makes it raise.

    `one_by_one`: forms of which a request holds a single conversation. `lists_models`: whether it has /v1/models and
    its requests name one.
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


def _read_vllm(answer: Any) -> list[Given]:
    rows = sorted(answer["data"], key=lambda row: row["index"])
    tokens = answer.get("usage", {}).get("prompt_tokens") if len(rows) == 1 else None
    return [Given(tuple(row["probs"]), num_tokens=tokens) for row in rows]


def _sglang_body(model: str | None, form: Form, asked: Sequence[Asked]) -> dict[str, Any]:
    return {**_named(model), "input_ids" if form == "tokens" else "text": _contents(form, asked)}


def _read_sglang(answer: Any) -> list[Given]:
    rows = answer if isinstance(answer, list) else [answer]
    return [Given(tuple(row["embedding"]), num_tokens=row.get("meta_info", {}).get("prompt_tokens")) for row in rows]


def _openrlhf_body(model: str | None, form: Form, asked: Sequence[Asked]) -> dict[str, Any]:
    queries = _contents(form, asked)
    prompts = [
        query[: query.rfind(one.reply)] if one.reply in query else query
        for query, one in zip(queries, asked, strict=True)
    ]
    return {"query": queries, "prompts": prompts, "labels": [""] * len(queries)}


def _read_openrlhf(answer: Any) -> list[Given]:
    # A server may give each reward as a list of one.
    rewards = answer["rewards"]
    return [Given(tuple(one) if isinstance(one, list) else (one,)) for one in rewards]


def _tei_body(model: str | None, form: Form, asked: Sequence[Asked]) -> dict[str, Any]:
    return {"inputs": [[text] for text in _contents(form, asked)], "raw_scores": True, "truncate": False}


def _read_tei(answer: Any) -> list[Given]:
    rows = answer if answer and isinstance(answer[0], list) else [answer]
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


def _read_treeward(answer: Any) -> list[Given]:
    return [
        Given((row["score"],), num_tokens=row["num_tokens"] or None, contract=answer["contract"])
        for row in sorted(answer["data"], key=lambda row: row["index"])
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
