from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`treeward plan` silences the log of its process and hides its GPUs; other tests come after it in this one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    loggers = [logging.getLogger(name) for name in ("treeward", "torch")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
