"""Requests to reward servers and their responses, as the servers' own clients write and read them.

    dialect = DIALECTS["vllm"]
    body = dialect.body("text", [RenderedConversation(messages, text, ...)])
    [score.values for score in dialect.read(response)]      # the server's numbers for each conversation

Requests are those of verl, OpenRLHF and text-embeddings-inference's own client. They ask for raw scores where a dialect
has a parameter for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from treeward.data.conversation import AnyConversation, template_kwargs_of, to_json

Form = Literal["text", "bare", "tokens", "messages"]
"""What is sent: the text of the chat template, that text without its BOS (or CLS and SEP), its token ids, or the
messages."""


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation in every form; `completion`: the text of its last message."""

    messages: AnyConversation
    text: str
    bare: str
    tokens: Sequence[int]
    completion: str = ""


@dataclass(frozen=True, slots=True)
class ServerScore:
    """A server's numbers for one conversation, its count of tokens, and the hash of the contract that it reports."""

    values: Sequence[float | None]
    num_tokens: int | None = None
    contract: str | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """Two functions. `body(form, conversations)`: a request, without the model's name. `read`: the scores of a
    response; raises `LookupError`, `TypeError` or `ValueError` for another form.

    `forms`: what it accepts, that of its own clients first.
    """

    path: str
    forms: tuple[Form, ...]
    body: Callable[[Form, Sequence[RenderedConversation]], dict[str, Any]]
    read: Callable[[Any], list[ServerScore]]


def _sent(form: Form, conversations: Sequence[RenderedConversation]) -> list[Any]:
    contents = [getattr(conversation, form) for conversation in conversations]
    return contents if form in ("text", "bare") else [list(content) for content in contents]


def _vllm_body(form: Form, conversations: Sequence[RenderedConversation]) -> dict[str, Any]:
    sent = _sent(form, conversations)
    if form != "messages":
        return {"input": sent, "use_activation": False}
    body = {"messages": sent[0], "use_activation": False}
    variables = template_kwargs_of(conversations[0].messages)
    return body | ({"chat_template_kwargs": dict(variables)} if variables else {})


def _read_vllm(response: Any) -> list[ServerScore]:
    rows = sorted(response["data"], key=lambda row: row["index"])
    tokens = response.get("usage", {}).get("prompt_tokens") if len(rows) == 1 else None
    return [ServerScore(row["probs"], num_tokens=tokens) for row in rows]


def _read_sglang(response: Any) -> list[ServerScore]:
    rows = response if isinstance(response, list) else [response]
    return [ServerScore(row["embedding"], num_tokens=row.get("meta_info", {}).get("prompt_tokens")) for row in rows]


def _openrlhf_body(form: Form, conversations: Sequence[RenderedConversation]) -> dict[str, Any]:
    queries = _sent(form, conversations)
    prompts = [
        query[: query.rfind(chat.completion)] if chat.completion in query else query
        for query, chat in zip(queries, conversations, strict=True)
    ]
    return {"query": queries, "prompts": prompts, "labels": [""] * len(queries)}


def _read_tei(response: Any) -> list[ServerScore]:
    rows = response if response and isinstance(response[0], list) else [response]
    # TEI sorts by score; the labels are LABEL_0, LABEL_1, ...
    ordered = [sorted(row, key=lambda value: (len(value["label"]), value["label"])) for row in rows]
    return [ServerScore([value["score"] for value in row]) for row in ordered]


def _read_treeward(response: Any) -> list[ServerScore]:
    rows = sorted(response["data"], key=lambda row: row["index"])
    contract = response["contract"]
    return [ServerScore([row["score"]], num_tokens=row["num_tokens"] or None, contract=contract) for row in rows]


DIALECTS: Mapping[str, Dialect] = {
    "treeward": Dialect(
        "/v1/rewards",
        ("messages",),
        lambda form, chats: {
            "conversations": [to_json(chat.messages) for chat in chats],
            "on_error": "mask",
            "shaped": False,
        },
        _read_treeward,
    ),
    "vllm": Dialect("/classify", ("text", "bare", "tokens", "messages"), _vllm_body, _read_vllm),
    "sglang": Dialect(
        "/classify",
        ("text", "bare", "tokens"),
        lambda form, chats: {"input_ids" if form == "tokens" else "text": _sent(form, chats)},
        _read_sglang,
    ),
    "openrlhf": Dialect(
        "/get_reward",
        ("text", "bare"),
        _openrlhf_body,
        # A server may give each reward as a list of one.
        lambda response: [ServerScore(x if isinstance(x, list) else [x]) for x in response["rewards"]],
    ),
    "tei": Dialect(
        "/predict",
        ("text", "bare"),
        lambda form, chats: {"inputs": [[text] for text in _sent(form, chats)], "raw_scores": True, "truncate": False},
        _read_tei,
    ),
}
"""By name. vLLM and SGLang have more routes; the scores of all of them are made alike."""
