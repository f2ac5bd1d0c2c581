"""What tests of the server share: a signed model in a folder, a service on it, and a client of its
application.

Dialects are tested through `client`, whose requests reach the application without a socket.
`asgi_client(service)` makes such a client of another service: `make_service` builds one with other
settings.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from loopback import serving_on_loopback
from messages import chat
from signed import write_signed_model

from treeward.config.load import load_section
from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.scoring.score import Score
from treeward.scoring.scorer import Scorer
from treeward.serving.models import ServedModel, load_served
from treeward.serving.service import Service


@pytest.fixture(scope="session")
def served_folder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed decoder with random weights that reads 160 tokens."""
    return write_signed_model(
        tmp_path_factory.mktemp("served") / "tiny",
        tiny_tokenizer,
        seed=11,
        max_length=160,
    )


@pytest.fixture(scope="session")
def served(served_folder: Path) -> tuple[ServedModel, Scorer]:
    """The model of `served_folder`, under the name `tiny`, and its scorer; tests do not change
    them.
    """
    section = ServedModelConfig(models=(str(served_folder),), name="tiny", device="cpu")
    model, scorer = load_served(section, ServerConfig(models=(section,)))
    assert isinstance(scorer, Scorer)
    return model, scorer


@pytest.fixture(scope="session")
def served_scorer(served: tuple[ServedModel, Scorer]) -> Scorer:
    """The scorer of `tiny`."""
    return served[1]


@pytest.fixture
def make_service(
    served_folder: Path,
    served: tuple[ServedModel, Scorer],
) -> Iterator[Callable[..., Service]]:
    """A function that makes a service; keywords are keys of `ServerConfig`. Without `models` it
    serves `tiny`.
    """

    services: list[Service] = []

    def make(**settings: Any) -> Service:
        given = settings.pop("models", None)
        tiny = ServedModelConfig(models=(str(served_folder),), name="tiny", device="cpu")
        models = given or (tiny,)
        if all(isinstance(model, ServedModelConfig) for model in models):
            config = ServerConfig(models=tuple(models), **settings)
        else:
            config = load_section(ServerConfig, {"models": models, **settings}, where="server")
        services.append(Service.load(config) if given else Service.of([served], config))
        return services[-1]

    yield make
    for service in services:
        service.close()


@pytest.fixture
def service(make_service: Callable[..., Service]) -> Service:
    """A service of `tiny` with the default settings, for a test that counts or changes it."""
    return make_service()


@pytest.fixture
def asgi_client() -> Iterator[Callable[..., Any]]:
    """A function that makes a client of a service (`token` as `create_app` takes it); its methods
    are those of httpx: `client.post("/v1/rewards", json={...})`.
    """
    from starlette.testclient import TestClient

    from treeward.serving.app import create_app

    with ExitStack() as open_clients:

        def make(service: Service, *, token: str | None = None) -> Any:
            client = TestClient(
                create_app(service, token=token),
                base_url="http://localhost",
                raise_server_exceptions=False,
            )
            return open_clients.enter_context(client)

        yield make


@pytest.fixture
def own_client(service: Service, asgi_client: Callable[..., Any]) -> Any:
    """A client of `service`."""
    return asgi_client(service)


@pytest.fixture(scope="session")
def judge_section(policy_folder: Path) -> dict[str, Any]:
    """The section of a judge in this process, which gives every question a verdict: its model has
    random weights and reads 256 tokens."""
    return {
        "model": str(policy_folder),
        "verdict": "label",
        "use_logprobs": True,
        "dtype": "float32",
        "device": "cpu",
        "system_prompt": "Judge.",
        "template": "{conversation}{completion_a}{completion_b}",
    }


@pytest.fixture(scope="session")
def client(served: tuple[ServedModel, Scorer]) -> Iterator[Any]:
    """A client of a service of `tiny` that all tests share."""
    from starlette.testclient import TestClient

    from treeward.serving.app import create_app

    service = Service.of([served], ServerConfig(models=(ServedModelConfig(models=("tiny",)),)))
    with TestClient(
        create_app(service),
        base_url="http://localhost",
        raise_server_exceptions=False,
    ) as shared:
        yield shared
    service.close()


@pytest.fixture
def serve_on_loopback() -> Iterator[Callable[..., str]]:
    """A function that serves a service at a real address (`token` as `create_app` takes it), and
    gives its URL.
    """
    with ExitStack() as running:
        yield lambda service, token=None: running.enter_context(
            serving_on_loopback(service, token=token),
        )


@pytest.fixture(scope="session")
def conversations() -> list[list[dict[str, str]]]:
    """Eight conversations about two prompts, four completions of each."""
    prompts = ["Name a river in Peru, please.", "How do I boil an egg so that the yolk stays soft?"]
    completions = [
        "The Amazon.",
        "I do not know that.",
        "Boil it for six minutes, then cool it in cold water.",
        "Yes!",
    ]
    return [chat(prompt, completion) for prompt in prompts for completion in completions]


@pytest.fixture
def held_model(served_scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The model scores nothing until this is set."""
    gate = threading.Event()
    score = served_scorer.score_prepared

    def wait_and_score(items: Any, **options: Any) -> list[Score]:
        assert gate.wait(600)
        return score(items, **options)

    monkeypatch.setattr(served_scorer, "score_prepared", wait_and_score)
    yield gate
    gate.set()
