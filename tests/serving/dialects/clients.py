"""How the clients of each dialect ask for scores, and how they read them: the shape of their
requests, transcribed.

Each `Client` has the route, the body for a batch of conversations in one of the forms that its
dialect has, and what the client itself does with the JSON that comes back. Sources: vLLM's pooling
examples; verl's reward loop (of 2025 and 2026); SGLang's native and OpenAI routes; OpenRLHF's
remote reward models; slime's remote_rm; TEI's types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Client:
    """`form`: of what it sends, texts, token ids or messages. `at_once`: whether a request may hold
    several.
    """

    name: str
    route: str
    form: str
    body: Callable[[list[Any]], dict[str, Any]]
    read: Callable[[Any], list[float]]
    at_once: bool = True


def _probs(got: Any) -> list[float]:
    return [row["probs"][0] for row in sorted(got["data"], key=lambda row: row["index"])]


def _pooled(got: Any) -> list[float]:
    return [row["data"][0] for row in got["data"]]


def _embedded(got: Any) -> list[float]:
    rows = got["data"] if isinstance(got, dict) else got
    return [row["embedding"][0] for row in rows]


_RAW = {"model": "rm", "use_activation": False}
_ONE: dict[str, Any] = {"at_once": False}

CLIENTS = [
    Client("vllm_example", "/classify", "texts", lambda texts: {**_RAW, "input": texts}, _probs),
    Client(
        "vllm_token_ids",
        "/classify",
        "ids",
        lambda ids: {"input": ids, "truncate_prompt_tokens": -1},
        _probs,
    ),
    Client(
        "vllm_messages",
        "/classify",
        "messages",
        lambda chats: {"messages": chats[0]},
        _probs,
        **_ONE,
    ),
    Client(
        "verl_vllm",
        "/classify",
        "texts_without_bos",
        lambda texts: {"model": "models/rm", "input": texts[0], "use_activation": False},
        lambda got: [got["data"][-1]["probs"][-1]],
        at_once=False,
    ),
    Client(
        "verl_sglang",
        "/v1/embeddings",
        "texts_without_bos",
        lambda texts: {"model": "models/rm", "input": texts[0]},
        lambda got: [got["data"][-1]["embedding"][-1]],
        at_once=False,
    ),
    Client(
        "vllm_pooling",
        "/pooling",
        "texts",
        lambda texts: {**_RAW, "input": texts, "task": "classify"},
        _pooled,
    ),
    Client(
        "vllm_pooling_messages",
        "/pooling",
        "messages",
        lambda chats: {"messages": chats[0]},
        _pooled,
        **_ONE,
    ),
    Client(
        "vllm_pooling_ids",
        "/pooling",
        "ids",
        lambda ids: {"input": ids, "encoding_format": "float"},
        _pooled,
    ),
    Client(
        "sglang_texts",
        "/classify",
        "texts",
        lambda texts: {"model": "rm", "text": texts},
        _embedded,
    ),
    Client(
        "sglang_one_text",
        "/classify",
        "texts",
        lambda texts: {"text": texts[0]},
        lambda got: got["embedding"],
        **_ONE,
    ),
    Client("sglang_token_ids", "/classify", "ids", lambda ids: {"input_ids": ids}, _embedded),
    Client(
        "sglang_embeddings",
        "/v1/embeddings",
        "texts",
        lambda texts: {"input": texts},
        _embedded,
    ),
    Client(
        "sglang_embedded_ids",
        "/v1/embeddings",
        "ids",
        lambda ids: {"model": "rm", "input": ids},
        _embedded,
    ),
    Client(
        "openrlhf",
        "/get_reward",
        "texts",
        lambda texts: {
            "query": texts,
            "prompts": [text[:9] for text in texts],
            "labels": ["" for _ in texts],
        },
        lambda got: got["scores"] if got["scores"] == got["rewards"] else [],
    ),
    Client(
        "slime",
        "/slime",
        "texts",
        lambda texts: {"prompt": texts[0][:12], "response": texts[0][12:], "label": "42"},
        lambda got: [got],
        at_once=False,
    ),
    Client(
        "slime_messages",
        "/slime",
        "messages",
        lambda chats: {
            "prompt": list(chats[0][:-1]),
            "response": chats[0][-1]["content"],
            "label": "42",
        },
        lambda got: [got],
        at_once=False,
    ),
    Client(
        "tei_batch",
        "/predict",
        "texts",
        lambda texts: {"inputs": [[text] for text in texts], "raw_scores": True, "truncate": False},
        lambda got: [row[0]["score"] for row in got],
    ),
    Client(
        "tei_one",
        "/predict",
        "texts",
        lambda texts: {"inputs": texts[0]},
        lambda got: [got[0]["score"]],
        **_ONE,
    ),
    Client(
        "ours",
        "/v1/rewards",
        "messages",
        lambda chats: {"model": "rm", "conversations": chats},
        lambda got: [row["reward"] for row in got["data"]],
    ),
]
