"""A report in headless Chromium, driven through its DevTools protocol by playwright."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Visit, chromium, visiting
from report_sample import sample_report

from treeward.evaluation.report.build import write_report


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Of a module, not of the session: while it lives, its event loop runs in this thread.
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report"), **sample_report())


@pytest.fixture
def visit(browser: Any, page_file: Path) -> Iterator[Visit]:
    with visiting(browser, page_file) as open_page:
        yield open_page
