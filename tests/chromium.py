"""Headless Chromium for tests that look at a page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Pages", "Visit", "chromium", "visiting"]

Visit = Callable[..., Any]
"""`visit(file, width=1280, height=900, **options of the context)`: a page of playwright's."""

_EXECUTABLE = os.environ.get("CHROMIUM") or next(
    filter(
        None,
        map(
            shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
        ),
    ),
    None,
)
_FLAGS = [
    "--no-sandbox",  # the only page is our own, and a container's root has no sandbox
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright's; skips where there is none. While it lives, its event loop runs in
    this thread."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (the dev extra has it)"
    )
    if _EXECUTABLE is None:
        pytest.skip("no Chromium on the PATH (CHROMIUM names one)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=_EXECUTABLE, headless=True, args=_FLAGS
        )
        yield browser
        browser.close()


class Pages:
    """Pages of one test. `said`: what their console had; `asked`: the addresses of all their
    requests."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.contexts = list[Any]()
        self.said = list[str]()
        self.asked = list[str]()

    def open(self, address: str, *, width: int = 1280, height: int = 900, **options: Any) -> Any:
        context = self.browser.new_context(viewport={"width": width, "height": height}, **options)
        self.contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(address)
        return page

    def close(self) -> None:
        for context in self.contexts:
            context.close()


@contextmanager
def visiting(browser: Any, page_file: Path) -> Iterator[Visit]:
    """Opens reports, `page_file` if no other is named; at the end the browser must have had nothing
    to say and nothing to load."""
    pages = Pages(browser)

    def visit(file: Path = page_file, **options: Any) -> Any:
        page = pages.open(file.as_uri(), **options)
        if options.get("java_script_enabled", True):
            page.locator("html[data-drawn]").wait_for(state="attached")
        return page

    yield visit
    pages.close()
    assert pages.said == [], pages.said
    own = ("file://", "data:,", "blob:")
    assert all(url.startswith(own) and url.endswith((".html", "data:,")) for url in pages.asked), (
        pages.asked
    )
