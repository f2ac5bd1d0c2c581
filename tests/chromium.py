"""Headless Chromium for tests that look at a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Visit", "chromium", "visiting"]

Visit = Callable[..., Any]
"""`visit(file, width=1280, height=900, **options of the context)`: a page of playwright's."""

_EXECUTABLE = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None
)
_FLAGS = [
    "--no-sandbox",  # the only page is our own, and a container's root has no sandbox
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright's; skips where there is none. While it lives, its event loop runs in this thread."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the dev extra has it)")
    if _EXECUTABLE is None:
        pytest.skip("no Chromium on the PATH (CHROMIUM names one)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_EXECUTABLE, headless=True, args=_FLAGS)
        yield browser
        browser.close()


@contextmanager
def visiting(browser: Any, page_file: Path) -> Iterator[Visit]:
    """Opens reports, `page_file` if no other is named; at the end the browser must have had nothing to say and nothing
    to load."""
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
            page.locator("html[data-drawn]").wait_for(state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == [], said
    assert all(url.startswith(("file://", "data:,", "blob:")) and url.endswith((".html", "data:,")) for url in asked), (
        asked
    )
