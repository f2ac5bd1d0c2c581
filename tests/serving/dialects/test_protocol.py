"""What each dialect accepts, refuses and writes: the forms that its clients read, and never a
number for no score.
"""

from __future__ import annotations

from typing import Any

import pytest
from serving.dialects.clients import CLIENTS
from serving.dialects.conftest import CHATS

from treeward.scoring.score import Score


def message_of(got: Any) -> str:
    error = got["error"]
    return str(error if isinstance(error, str) else error["message"])


def test_vllms_response_has_all_that_its_clients_read(shared: Any) -> None:
    served = shared("chatml")
    got = served.client.post("/classify", json={"model": "rm", "input": served.texts[:2]}).json()
    assert got["id"].startswith("classify-")
    assert (got["object"], got["model"]) == ("list", "rm")
    assert got["created"] == pytest.approx(served.service.started, abs=3600)
    rows = [(row["index"], row["label"], row["num_classes"]) for row in got["data"]]
    assert rows == [(0, "LABEL_0", 1), (1, "LABEL_0", 1)]
    tokens = sum(map(len, served.ids[:2]))
    assert got["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}


def test_vllms_pooling_names_its_objects(shared: Any) -> None:
    served = shared("chatml")
    pooled = served.client.post("/pooling", json={"input": served.ids[0]}).json()
    assert pooled["id"].startswith("pooling-")
    assert pooled["data"][0]["object"] == "pooling"


@pytest.mark.parametrize(
    ("route", "body", "what"),
    [
        ("/classify", {}, "the body needs one of input"),
        ("/classify", {"input": []}, "a text to score"),
        ("/classify", {"input": [[3, -1]]}, "ids from 0"),
        ("/classify", {"input": "word " * 400}, "too long to score"),
        ("/classify", {"messages": CHATS[0], "chat_template": "{{ messages }}"}, "chat_template"),
        (
            "/classify",
            {"messages": CHATS[0], "chat_template_kwargs": {"tokenize": False}},
            "chat_template_kwargs",
        ),
        ("/get_reward", {"query": ["a", "b"], "prompts": ["a"]}, "1 prompts for 2 queries"),
        (
            "/slime",
            {"prompt": [{"role": 5, "content": "a"}], "response": "b"},
            "a text or messages",
        ),
        ("/predict", {"inputs": ["a", "b"]}, "are a pair"),
    ],
)
def test_what_cannot_be_scored_as_asked_is_refused(
    route: str,
    body: Any,
    what: str,
    shared: Any,
) -> None:
    refused = shared("chatml").client.post(route, json=body)
    assert refused.status_code == 422
    assert what in message_of(refused.json())


def test_a_missing_score_is_never_a_number(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = shared("chatml")
    none = [Score(None, error="not finite")]
    monkeypatch.setattr(
        served.service.batcher.scorers["rm"],
        "score_prepared",
        lambda items, on_error: none * len(items),
    )
    for client in CLIENTS:
        items = {"messages": CHATS, "ids": served.ids}.get(client.form, served.texts)
        response = served.client.post(client.route, json=client.body(items))
        assert response.status_code == 500, client.name
        assert "not finite" in message_of(response.json())
        if client.route == "/predict":
            assert response.json()["error_type"] == "Backend"


def test_sglangs_clients_may_call_the_only_model_anything(shared: Any) -> None:
    served = shared("chatml")
    got = served.client.post(
        "/v1/embeddings",
        json={"model": "/checkpoints/rm-7b", "input": served.texts[0]},
    )
    assert got.json()["model"] == "rm"


def test_too_many_texts_are_told_in_teis_form(serve: Any) -> None:
    served = serve(max_queued=2)
    refused = served.client.post("/predict", json={"inputs": [["a"], ["b"], ["c"]]})
    assert refused.status_code == 413
    assert refused.json()["error_type"] == "Validation"


def test_a_deadline_is_told_in_teis_form(serve: Any) -> None:
    late = serve(deadline_seconds=1e-6).client.post("/predict", json={"inputs": "a"})
    assert late.status_code == 504
    assert late.json()["error_type"] == "Overloaded"
    assert int(late.headers["Retry-After"]) >= 1


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"context": "4?", "completions": [CHATS[0], "4"]}, "completions"),
        ({"conversations": CHATS, "on_eror": "mask"}, "on_eror"),
        ({"conversations": CHATS, "context": CHATS[0][:1]}, "context"),
        ({"k" * 10_000: 1}, "k" * 100),
    ],
)
def test_unknown_and_missing_keys_are_refused(shared: Any, body: dict[str, Any], key: str) -> None:
    refused = shared("chatml").client.post("/v1/rewards", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (422, "invalid_request", key)
    assert len(refused.content) < 700
