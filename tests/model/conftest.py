from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def save(tmp_path: Path, tiny_tokenizer: Any) -> Callable[..., Path]:
    """Saves a model with the tiny tokenizer as a folder that anyone could have made."""

    def to_folder(model: Any, tokenizer: Any = tiny_tokenizer) -> Path:
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return to_folder
