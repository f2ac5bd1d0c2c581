"""How the clients of each dialect ask for scores, and how they read them: the shape of their requests, transcribed.

Each `Client` has the route, the body for a batch of conversations in one of the forms that its dialect has, and what
the client itself does with the JSON that comes back. Sources: vLLM's pooling examples; verl's reward loop (of 2025 and
2026); SGLang's native and OpenAI routes; OpenRLHF's remote reward models; slime's remote_rm; TEI's types.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Client:
    """`form`: of what it sends, texts, token ids or messages. `at_once`: whether a request may hold several."""

    name: str
    route: str
    form: str
    body: Callable[[list[Any]], dict[str, Any]]
    read: Callable[[Any], list[float]]
    at_once: bool = True


def _probs(answer: Any) -> list[float]:
    return [row["probs"][0] for row in sorted(answer["data"], key=lambda row: row["index"])]


def _decoded(text: str, order: str = "<") -> float:
    (value,) = struct.unpack(f"{order}f", base64.b64decode(text))
    return float(value)


def _user_and_reply(chat: Sequence[dict[str, str]]) -> dict[str, Any]:
    return {"prompt": list(chat[:-1]), "response": chat[-1]["content"], "label": "42"}


CLIENTS = [
    Client(
        "vllm_example",
        "/classify",
        "texts",
        lambda texts: {"model": "rm", "input": texts, "use_activation": False},
        _probs,
    ),
    Client(
        "vllm_without_special_tokens",
        "/classify",
        "texts",
        lambda texts: {"model": "rm", "input": texts, "use_activation": False, "add_special_tokens": False},
        _probs,
    ),
    Client(
        "vllm_token_ids",
        "/classify",
        "ids",
        lambda ids: {"model": "rm", "input": ids, "truncate_prompt_tokens": -1, "user": "u", "priority": 0},
        _probs,
    ),
    Client(
        "vllm_messages",
        "/classify",
        "messages",
        lambda chats: {
            "model": "rm",
            "messages": chats[0],
            "add_generation_prompt": False,
            "add_special_tokens": False,
        },
        _probs,
        at_once=False,
    ),
    Client(
        "verl_vllm_2025",
        "/classify",
        "texts",
        lambda texts: {"model": "models/rm", "input": texts[0], "activation": False},
        lambda answer: [answer["data"][-1]["probs"][-1]],
        at_once=False,
    ),
    Client(
        "verl_vllm",
        "/classify",
        "texts_without_bos",
        lambda texts: {"model": "models/rm", "input": texts[0], "use_activation": False},
        lambda answer: [answer["data"][-1]["probs"][-1]],
        at_once=False,
    ),
    Client(
        "verl_sglang",
        "/v1/embeddings",
        "texts_without_bos",
        lambda texts: {"model": "models/rm", "input": texts[0]},
        lambda answer: [answer["data"][-1]["embedding"][-1]],
        at_once=False,
    ),
    Client(
        "vllm_pooling",
        "/pooling",
        "texts",
        lambda texts: {"model": "rm", "input": texts, "task": "classify", "use_activation": False},
        lambda answer: [row["data"][0] for row in answer["data"]],
    ),
    Client(
        "vllm_pooling_messages",
        "/pooling",
        "messages",
        lambda chats: {"model": "rm", "messages": chats[0]},
        lambda answer: [row["data"][0] for row in answer["data"]],
        at_once=False,
    ),
    Client(
        "vllm_pooling_base64",
        "/pooling",
        "ids",
        lambda ids: {"input": ids, "encoding_format": "base64", "embed_dtype": "float32", "endianness": "little"},
        lambda answer: [_decoded(row["data"]) for row in answer["data"]],
    ),
    Client(
        "vllm_pooling_big_endian",
        "/pooling",
        "texts",
        lambda texts: {"input": texts, "encoding_format": "base64", "endianness": "big"},
        lambda answer: [_decoded(row["data"], ">") for row in answer["data"]],
    ),
    Client(
        "sglang_texts",
        "/classify",
        "texts",
        lambda texts: {"model": "rm", "text": texts},
        lambda answer: [row["embedding"][0] for row in answer],
    ),
    Client(
        "sglang_one_text",
        "/classify",
        "texts",
        lambda texts: {"text": texts[0]},
        lambda answer: [answer["embedding"][0]],
        at_once=False,
    ),
    Client(
        "sglang_token_ids",
        "/classify",
        "ids",
        lambda ids: {"input_ids": ids},
        lambda answer: [row["embedding"][0] for row in answer],
    ),
    Client(
        "sglang_embeddings",
        "/v1/embeddings",
        "texts",
        lambda texts: {"model": "default", "input": texts, "encoding_format": "float"},
        lambda answer: [row["embedding"][0] for row in answer["data"]],
    ),
    Client(
        "sglang_embeddings_base64",
        "/v1/embeddings",
        "ids",
        lambda ids: {"model": "rm", "input": ids, "encoding_format": "base64"},
        lambda answer: [_decoded(row["embedding"]) for row in answer["data"]],
    ),
    Client(
        "openrlhf_2024",
        "/get_reward",
        "texts",
        lambda texts: {"query": texts},
        lambda answer: answer["rewards"],
    ),
    Client(
        "openrlhf",
        "/get_reward",
        "texts",
        lambda texts: {"query": texts, "prompts": [text[:9] for text in texts], "labels": ["" for _ in texts]},
        lambda answer: answer["scores"] if answer["scores"] == answer["rewards"] else [],
    ),
    Client(
        "slime",
        "/slime",
        "texts",
        lambda texts: {"prompt": texts[0][:12], "response": texts[0][12:], "label": "42"},
        lambda answer: [answer],
        at_once=False,
    ),
    Client(
        "slime_messages",
        "/slime",
        "messages",
        lambda chats: _user_and_reply(chats[0]),
        lambda answer: [answer],
        at_once=False,
    ),
    Client(
        "tei_batch",
        "/predict",
        "texts",
        lambda texts: {"inputs": [[text] for text in texts], "raw_scores": True, "truncate": False},
        lambda answer: [row[0]["score"] for row in answer],
    ),
    Client(
        "tei_one",
        "/predict",
        "texts",
        lambda texts: {"inputs": texts[0]},
        lambda answer: [answer[0]["score"]],
        at_once=False,
    ),
    Client(
        "tei_one_in_a_list",
        "/predict",
        "texts",
        lambda texts: {"inputs": texts[:1], "raw_scores": True},
        lambda answer: [answer[0]["score"]],
        at_once=False,
    ),
    Client(
        "ours",
        "/v1/rewards",
        "messages",
        lambda chats: {"model": "rm", "conversations": chats},
        lambda answer: [row["reward"] for row in answer["data"]],
    ),
]
