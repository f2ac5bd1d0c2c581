"""A report in headless Chromium, driven through its DevTools protocol by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_sample import sample_report

from treeward.evaluation.report.build import write_report

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
FLAGS = [
    "--no-sandbox",  # the only page is our own, and a container's root has no sandbox
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Of a module, not of the session: while it lives, its event loop runs in this thread.
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the dev extra has it)")
    if CHROMIUM is None:
        pytest.skip("no Chromium on the PATH (CHROMIUM names one)")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report"), **sample_report())


@pytest.fixture
def visit(browser: Any, page_file: Path) -> Iterator[Visit]:
    """Opens the report; at the end of the test the browser must have had nothing to say and nothing to load."""
    contexts, said, asked = [], [], []

    def open_page(file: Path = page_file, *, width: int = 1280, height: int = 900, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        if options.get("java_script_enabled", True):
            page.locator(".plot:not(:has(svg))").first.wait_for(state="detached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert all(url.startswith(("file://", "data:,", "blob:")) and url.endswith((".html", "data:,")) for url in asked), (
        asked
    )
