"""The server against its own OpenAPI description, and against bodies that no description foresees.

TREEWARD_FUZZ_EXAMPLES=200 looks for longer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks as openapi_checks

ROUTES = {  # with what a client might send
    "/v1/rewards": {"conversations": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]},
    "/classify": {"model": "tiny", "input": ["a"], "use_activation": False, "truncate_prompt_tokens": 9},
    "/pooling": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "/v1/embeddings": {"model": "tiny", "input": [[3, 4], [5]], "encoding_format": "float"},
    "/get_reward": {"query": ["a b", "c"], "prompts": ["a", "c"], "labels": ["", None]},
    "/slime": {"prompt": [{"role": "user", "content": "a"}], "response": "b", "label": None},
    "/predict": {"inputs": [["a"], ["b"]], "raw_scores": False, "truncate": True},
    "/verify": {
        "responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]},
        "response": {
            "output": [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "o"},
                {"role": "assistant", "content": "b", "tool_calls": [{"id": "q", "function": {"name": "g"}}]},
            ]
        },
        "reward": 1.0,
        "reward_threshold": 0.5,
    },
    "/seed_session": {"resources_session_id": "a"},
    "/close_session": {"resources_session_id": "a"},
    "/aggregate_metrics": {"verify_responses": [{"_ng_task_index": 0, "reward": 1.0, "response": {"usage": {"t": 1}}}]},
}
LOCAL = {"host": "localhost"}  # the server answers no other names
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.generate, Phase.shrink],
}
EXAMPLES = int(os.environ.get("TREEWARD_FUZZ_EXAMPLES", "8"))


@pytest.fixture(scope="module")
def app(client: Any) -> Any:
    return client.app


def check_documented(document: Any, route: str, response: Any) -> None:
    """A status that the route documents, JSON of the schema that goes with it, and no failure of the server."""
    operation = document["paths"][route]["post"]
    assert response.status_code < 500, response.text
    assert str(response.status_code) in operation["responses"], (response.status_code, response.text)
    assert response.headers["content-type"] == "application/json"
    schema = operation["responses"][str(response.status_code)]["content"]["application/json"]["schema"]
    jsonschema.validate(response.json(), {**schema, "components": document["components"]})


@pytest.mark.parametrize("route", ROUTES)
def test_the_server_is_as_it_describes_itself(route: str, app: Any) -> None:
    operation = schemathesis.openapi.from_asgi("/openapi.json", app, headers=LOCAL)[route]["POST"]
    for mode in GenerationMode:

        @seed(1)
        @settings(max_examples=EXAMPLES, **SETTINGS)
        @given(case=operation.as_strategy(generation_mode=mode))
        def conforms(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, headers=LOCAL)

        conforms()


@pytest.mark.parametrize("route", ROUTES)
def test_whatever_is_sent_gets_a_documented_response(route: str, client: Any) -> None:
    document, content = client.get("/openapi.json").json(), json.dumps(ROUTES[route]).encode()

    @seed(3)
    @settings(max_examples=EXAMPLES, **SETTINGS)
    @given(start=st.integers(0, 60), noise=st.binary(max_size=12), kind=st.sampled_from(["application/json", "x/y"]))
    def responds(start: int, noise: bytes, kind: str) -> None:
        noisy = content[:start] + noise + content[start + 1 :]
        check_documented(document, route, client.post(route, content=noisy, headers={"content-type": kind}))

    check_documented(document, route, client.post(route, json=ROUTES[route]))
    responds()
    for hostile in (b"", b"null", b"[" * 100_000, b'{"a":' * 50_000, b'"\\ud800"', b"\xff\xfe", b'{"input":1e999}'):
        check_documented(document, route, client.post(route, content=hostile))
    assert client.post(route, json=ROUTES[route]).status_code == 200


def test_every_route_is_tried_and_documented(app: Any) -> None:
    document = app.openapi()["paths"]
    for path in document:  # a path's parameter is documented, or the path is not
        assert "{" not in path or any(one["in"] == "path" for one in document[path]["post"]["parameters"])
    assert document["/metrics"]["get"]["responses"]["200"]["content"].keys() == {"text/plain"}
    assert {path for path, routes in document.items() if "post" in routes and "{" not in path} == set(ROUTES)
    pages = [Path(__file__).parents[2] / "docs" / name for name in ("serving.md", "nemo_gym.md", "openrlhf.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for route in ROUTES:
        assert route in text, f"{route} is not in docs/serving.md, docs/nemo_gym.md or docs/openrlhf.md"
        responses = document[route]["post"]["responses"]
        is_own = document[route]["post"]["tags"] in (["treeward"], ["NeMo Gym"])
        assert responses["200"]["content"]["application/json"]["schema"] or not is_own, f"{route} has no schema"
        assert responses.keys() >= {"200", "401", "404", "413", "422", "429", "500", "503", "504"}
        for status, response in responses.items():
            assert "application/json" in response["content"], (route, status)
