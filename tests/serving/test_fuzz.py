"""The server against its own OpenAPI description, and against bodies that no description foresees.

TREEWARD_FUZZ_EXAMPLES=200 looks for longer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks as openapi_checks
from starlette.testclient import TestClient

from treeward.config.server import ServerConfig
from treeward.serving import dialects
from treeward.serving.app import create_app
from treeward.serving.service import Service


def described_routes() -> dict[str, Any]:
    """The routes of all dialects, with the example of a body that each has in its description."""
    app = FastAPI()
    app.include_router(dialects.router)
    routes = {}
    for path, operations in app.openapi()["paths"].items():
        # A path with a parameter is another name of a route.
        if "post" in operations and "{" not in path:
            content = operations["post"]["requestBody"]["content"]["application/json"]
            routes[path] = content["example"]
    return routes


ROUTES = described_routes()
# The server accepts no other names.
LOCAL = {"host": "localhost"}
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
HOSTILE_BODIES = [
    b"",
    b"null",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'"\\ud800"',
    b"\xff\xfe",
    b'{"input":1e999}',
]
EXAMPLES = int(os.environ.get("TREEWARD_FUZZ_EXAMPLES", "8"))


JUDGED_ROUTES = ("/compare",)
"""Routes that need a judge."""


@pytest.fixture(scope="module")
def judge_client(judge_section: dict[str, Any]) -> Iterator[Any]:
    service = Service.load(ServerConfig.model_validate({"judge": judge_section}))
    with TestClient(
        create_app(service),
        base_url="http://localhost",
        raise_server_exceptions=False,
    ) as client:
        yield client
    service.close()


@pytest.fixture(scope="module")
def client_of(client: Any, judge_client: Any) -> Callable[[str], Any]:
    """The client of a server that has what the route needs."""
    return lambda route: judge_client if route in JUDGED_ROUTES else client


@pytest.fixture(scope="module")
def app(client: Any) -> Any:
    return client.app


def check_documented(document: Any, route: str, response: Any) -> None:
    """A status that the route documents, JSON of the schema that goes with it, and no failure of
    the server.
    """
    operation = document["paths"][route]["post"]
    assert response.status_code < 500, response.text
    assert str(response.status_code) in operation["responses"], (
        response.status_code,
        response.text,
    )
    assert response.headers["content-type"] == "application/json"
    content = operation["responses"][str(response.status_code)]["content"]
    schema = content["application/json"]["schema"]
    jsonschema.validate(response.json(), {**schema, "components": document["components"]})


@pytest.mark.parametrize("route", ROUTES)
def test_the_server_is_as_it_describes_itself(route: str, client_of: Callable[[str], Any]) -> None:
    app = client_of(route).app
    operation = schemathesis.openapi.from_asgi("/openapi.json", app, headers=LOCAL)[route]["POST"]
    for mode in GenerationMode:

        @seed(1)
        @settings(max_examples=EXAMPLES, **SETTINGS)
        @given(case=operation.as_strategy(generation_mode=mode))
        def conforms(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, headers=LOCAL)

        conforms()


@pytest.mark.parametrize("route", ROUTES)
def test_whatever_is_sent_gets_a_documented_response(
    route: str, client_of: Callable[[str], Any]
) -> None:
    client = client_of(route)
    document = client.get("/openapi.json").json()
    content = json.dumps(ROUTES[route]).encode()

    @seed(3)
    @settings(max_examples=EXAMPLES, **SETTINGS)
    @given(
        start=st.integers(0, 60),
        noise=st.binary(max_size=12),
        kind=st.sampled_from(["application/json", "x/y"]),
    )
    def responds(start: int, noise: bytes, kind: str) -> None:
        noisy = content[:start] + noise + content[start + 1 :]
        response = client.post(route, content=noisy, headers={"content-type": kind})
        check_documented(document, route, response)

    check_documented(document, route, client.post(route, json=ROUTES[route]))
    responds()
    for hostile in HOSTILE_BODIES:
        check_documented(document, route, client.post(route, content=hostile))
    assert client.post(route, json=ROUTES[route]).status_code == 200, "the server lives"


def test_every_route_is_tried(app: Any) -> None:
    paths = app.openapi()["paths"]
    posted = {path for path, operations in paths.items() if "post" in operations}
    assert {path for path in posted if "{" not in path} == set(ROUTES)


def test_every_parameter_of_a_path_is_documented(app: Any) -> None:
    for path, operations in app.openapi()["paths"].items():
        places = [parameter["in"] for parameter in operations.get("post", {}).get("parameters", [])]
        assert "{" not in path or "path" in places, path


def test_metrics_are_documented_as_text(app: Any) -> None:
    response = app.openapi()["paths"]["/metrics"]["get"]["responses"]["200"]
    assert response["content"].keys() == {"text/plain"}


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_is_in_the_guides(route: str) -> None:
    pages = Path(__file__).parents[2].glob("docs/*.md")
    assert any(route in page.read_text(encoding="utf-8") for page in pages)


@pytest.mark.parametrize("route", ROUTES)
def test_every_response_of_a_route_is_documented_as_json(route: str, app: Any) -> None:
    responses = app.openapi()["paths"][route]["post"]["responses"]
    statuses = {"200", "401", "404", "413", "422", "429", "500", "503", "504"}
    assert responses.keys() >= statuses
    for status, response in responses.items():
        assert "application/json" in response["content"], status


@pytest.mark.parametrize("route", ROUTES)
def test_our_own_routes_have_a_schema_of_their_response(route: str, app: Any) -> None:
    operation = app.openapi()["paths"][route]["post"]
    # The clients of the other dialects know theirs.
    if operation["tags"] in (["treeward"], ["NeMo Gym"]):
        assert operation["responses"]["200"]["content"]["application/json"]["schema"]
