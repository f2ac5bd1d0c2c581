"""One small reward model for all tests of environments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from families import tiny_model
from loopback import serving_on_loopback
from signed import write_signed_model

from treeward.data.rendering import Renderer


@pytest.fixture(scope="session")
def make_folder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A function that writes a random reward model, without a contract."""

    def make(seed: int = 0, **changes: Any) -> str:
        folder = tmp_path_factory.mktemp("model")
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.chat_template = Renderer(tokenizer).chat_template
        tokenizer.save_pretrained(folder)
        tiny_model("qwen3", seed=seed, **changes).save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def folder(make_folder: Callable[..., str]) -> str:
    """A random reward model."""
    return make_folder()


@pytest.fixture(scope="session")
def signed_folder(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed reward model."""
    return write_signed_model(tmp_path_factory.mktemp("signed") / "rm", tiny_tokenizer, seed=5, max_length=160)


@pytest.fixture(scope="session")
def served(signed_folder: Path) -> Iterator[str]:
    """The address of a server of the signed model: as it is (`rm`), and shaped by constants (`shaped`)."""
    from treeward.config.server import ServerConfig
    from treeward.serving.service import Service

    constants = {"normalize_rewards": True, "reward_mean": 1.0, "reward_std": 0.5}
    shapings = {"rm": None, "shaped": constants}
    one = {"model": str(signed_folder), "device": "cpu"}
    models = [{**one, "name": name, "shaping": shaping} for name, shaping in shapings.items()]
    service = Service.load(ServerConfig.model_validate({"models": models}))
    with serving_on_loopback(service, token="a-token") as url:
        yield url
    service.close()
