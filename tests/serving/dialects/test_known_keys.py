"""Our own dialect refuses keys that it does not know; the others ignore them."""

from __future__ import annotations

from typing import Any

import pytest
from serving.dialects.conftest import CHATS

CONTEXT = CHATS[0][:1]


@pytest.mark.parametrize(
    ("route", "body", "key", "says"),
    [
        ("/v1/rewards", {"prompt": CONTEXT, "completions": ["4"]}, "prompt", "did you mean context?"),
        ("/v1/rewards", {"messages": CHATS[0]}, "messages", "did you mean conversations?"),
        ("/v1/rewards", {"context": CONTEXT, "completion": ["4"]}, "completion", "did you mean completions?"),
        ("/v1/rewards", {"conversations": CHATS, "shape": False}, "shape", "did you mean shaped?"),
        ("/v1/rewards", {"conversations": CHATS, "on_eror": "mask"}, "on_eror", "did you mean on_error?"),
        ("/v1/rewards", {"conversations": CHATS, "zzz": None}, "zzz", "It would be one of model, conversations,"),
        ("/v1/rewards/trace", {"prompt": CONTEXT, "completion": "4"}, "prompt", "did you mean context?"),
        ("/v1/rewards/trace", {"context": [], "completion": "4", "points": 3}, "points", "did you mean max_points?"),
    ],
)
def test_unknown_keys_are_refused(shared: Any, route: str, body: dict[str, Any], key: str, says: str) -> None:
    refused = shared("chatml").client.post(route, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (422, "invalid_request", key)
    assert says in error["message"]


def test_a_long_key_is_refused_briefly(shared: Any) -> None:
    refused = shared("chatml").client.post("/v1/rewards", json={"k" * 10_000: 1})
    assert refused.status_code == 422 and len(refused.content) < 700


@pytest.mark.parametrize(
    ("route", "body"), [("/v1/rewards", {"completions": ["4"]}), ("/v1/rewards/trace", {"completion": "4"})]
)
def test_completions_need_their_context(shared: Any, route: str, body: dict[str, Any]) -> None:
    client = shared("chatml").client
    refused = client.post(route, json=body)
    assert refused.status_code == 422 and refused.json()["error"]["param"] == "context"
    assert client.post(route, json={"context": [], **body}).status_code == 200


def test_whole_conversations_have_no_context(shared: Any) -> None:
    refused = shared("chatml").client.post("/v1/rewards", json={"conversations": CHATS, "context": CONTEXT})
    assert refused.status_code == 422 and refused.json()["error"]["param"] == "context"


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


def test_the_description_says_so(shared: Any) -> None:
    schemas = shared("chatml").client.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["RewardsBody"]["additionalProperties"] is False
    assert "additionalProperties" not in schemas["VllmBody"]
