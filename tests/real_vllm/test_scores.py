"""An export of SmolLM2 behind a real vLLM: its scores are those of the contract, and our server
speaks as it does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from loopback import serving_on_loopback
from messages import chat

from treeward.client.verification import verify_server
from treeward.config.load import load_section
from treeward.config.server import ServerConfig
from treeward.serving.service import Service

pytestmark = pytest.mark.vllm

CHAT = chat("Which river flows through Prague?", "The Vltava.")


@pytest.fixture(scope="module")
def vllm(vllm_serve: Callable[..., Any], export: Path) -> Iterator[str]:
    with vllm_serve(export, "--dtype", "float32", "--max-model-len", "512") as (url, _):
        yield url


@pytest.fixture(scope="module")
def ours(export: Path) -> Iterator[str]:
    model = {"model": str(export), "name": "model", "device": "cpu", "max_length": 512}
    loaded = Service.load(load_section(ServerConfig, {"models": [model]}, where="server"))
    with contextlib.closing(loaded) as service, serving_on_loopback(service) as url:
        yield url


@pytest.mark.parametrize("form", ["text", "bare", "tokens", "messages"])
def test_its_scores_are_those_of_the_contract(vllm: str, export: Path, form: Any) -> None:
    result = verify_server(str(export), vllm, dialect="vllm", form=form)
    assert result.equal, result.first_difference
    assert (
        result.num_scores > 0
        and result.largest_difference is not None
        and result.largest_difference < 1e-4
    )


def shape(value: Any) -> Any:
    """The keys and types of a JSON value; a key with null is as none."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items()) if item is not None}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value).__name__


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": ("/classify", {"input": "a text"}),
    "texts": ("/classify", {"input": ["a text", "two"]}),
    "token ids": ("/classify", {"input": [5, 6, 7]}),
    "messages": ("/classify", {"messages": CHAT}),
    "raw scores": ("/classify", {"messages": CHAT, "use_activation": False}),
    "pooled": ("/pooling", {"input": "a text"}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_our_server_responds_with_the_same_fields_and_numbers(
    vllm: str, ours: str, name: str
) -> None:
    path, body = REQUESTS[name]
    theirs, own = (httpx.post(url + path, json={"model": "model", **body}) for url in (vllm, ours))
    assert theirs.status_code == own.status_code == 200, (theirs.text, own.text)
    want = theirs.json()
    got = own.json()
    # which ours lack, as docs/serving.md says
    want.get("usage", {}).pop("prompt_tokens_details", None)
    assert shape(want) == shape(got)
    for expected, observed in zip(want.get("data", ()), got.get("data", ()), strict=True):
        if "probs" in expected:
            assert observed["probs"] == pytest.approx(expected["probs"], abs=1e-4)
        else:
            assert observed["data"] == pytest.approx(expected["data"], abs=1e-4)


@pytest.mark.parametrize(
    "body",
    [
        {"input": "word " * 1000},  # longer than the model's limit
        {"input": []},
        {"messages": []},
        {},
        {"input": "a text", "model": "another"},
    ],
)
def test_what_one_refuses_the_other_refuses(vllm: str, ours: str, body: dict[str, Any]) -> None:
    theirs, own = (
        httpx.post(f"{url}/classify", json={"model": "model", **body}) for url in (vllm, ours)
    )
    assert 400 <= theirs.status_code < 500 and 400 <= own.status_code < 500, (theirs.text, own.text)
    assert own.json()["error"].keys() >= theirs.json()["error"].keys()
