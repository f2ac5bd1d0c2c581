"""Our own dialect refuses keys that it does not know; the others ignore them."""

from __future__ import annotations

from typing import Any

import pytest
from serving.dialects.conftest import CHATS

CONTEXT = CHATS[0][:1]


@pytest.mark.parametrize(
    ("route", "body", "key"),
    [
        ("/v1/rewards", {"prompt": CONTEXT, "completions": ["4"]}, "prompt"),
        ("/v1/rewards", {"conversations": CHATS, "on_eror": "mask"}, "on_eror"),
        ("/v1/rewards/trace", {"context": [], "completion": "4", "points": 3}, "points"),
        ("/v1/rewards", {"completions": ["4"]}, "context"),
        ("/v1/rewards/trace", {"completion": "4"}, "context"),
        ("/v1/rewards", {"conversations": CHATS, "context": CONTEXT}, "context"),
        ("/v1/rewards", {"k" * 10_000: 1}, "k" * 100),
    ],
)
def test_unknown_and_missing_keys_are_refused(shared: Any, route: str, body: dict[str, Any], key: str) -> None:
    refused = shared("chatml").client.post(route, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (422, "invalid_request", key)
    assert len(refused.content) < 700


def test_a_context_may_be_empty(shared: Any) -> None:
    client = shared("chatml").client
    assert client.post("/v1/rewards", json={"context": [], "completions": ["4"]}).status_code == 200
    assert client.post("/v1/rewards/trace", json={"context": [], "completion": "4"}).status_code == 200


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/classify", {"input": "TEXT"}),
        ("/classify", {"text": "TEXT"}),
        ("/pooling", {"input": "TEXT"}),
        ("/v1/embeddings", {"input": "TEXT"}),
        ("/get_reward", {"query": "TEXT"}),
        ("/predict", {"inputs": "TEXT"}),
        ("/slime", {"prompt": "TEXT", "response": ""}),
    ],
)
def test_the_other_dialects_ignore_them(shared: Any, route: str, body: dict[str, Any]) -> None:
    served = shared("chatml")
    filled = {key: served.texts[0] if value == "TEXT" else value for key, value in body.items()}
    assert served.client.post(route, json={**filled, "of_another_server": 1}).status_code == 200
