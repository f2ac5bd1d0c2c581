"""One small reward model for all tests of environments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from families import tiny_model

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
