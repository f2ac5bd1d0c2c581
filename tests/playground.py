"""The playground in a browser, as a test uses it.

with chromium() as browser, serving([model]) as url, visiting(browser, url) as visit:
    page = visit()
    write(page, ["Four.", "Five."])
    score(page)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from chromium import Pages
from loopback import serving_on_loopback

from treeward.config.load import load_section
from treeward.config.server import ServerConfig
from treeward.scoring.scorer import PreparedScorer
from treeward.serving.models import ServedModel
from treeward.serving.service import Service

__all__ = [
    "COMPLETIONS",
    "PROMPT",
    "Visits",
    "expect",
    "score",
    "serving",
    "settled",
    "visiting",
    "write",
]

expect = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed (the dev extra has it)"
).expect
PROMPT = "How do I boil an egg so that the yolk stays soft?"
COMPLETIONS = ["Boil it for six minutes, then cool it.", "I do not know \U0001f642 that.", "Yes!"]


@contextmanager
def serving(
    pairs: list[tuple[ServedModel, PreparedScorer]], *, token: str | None = None
) -> Iterator[str]:
    sections = [{"model": "x", "name": model.name} for model, _ in pairs]
    service = Service.of(pairs, load_section(ServerConfig, {"models": sections}, where="server"))
    with serving_on_loopback(service, token=token) as address:
        yield f"{address}/"


class Visits(Pages):
    def __init__(self, browser: Any, url: str) -> None:
        super().__init__(browser)
        self.url = url

    def __call__(self, address: str | None = None, **options: Any) -> Any:
        page = self.open(address or self.url, **options)
        expect(page.locator("html[data-ready]")).to_have_count(1)
        return page


@contextmanager
def visiting(browser: Any, url: str) -> Iterator[Visits]:
    """Opens the page; at the end the browser must have had nothing to say, nor asked anyone
    else."""
    visits = Visits(browser, url)
    yield visits
    visits.close()
    assert visits.said == []
    assert all(address.startswith((url, "blob:", "data:,")) for address in visits.asked), (
        visits.asked
    )


def write(page: Any, completions: list[str] = COMPLETIONS, prompt: str = PROMPT) -> None:
    page.get_by_label("Text of turn 1").fill(prompt)
    while page.locator("#completions textarea").count() < len(completions):
        page.get_by_role("button", name="Add a completion").click()
    for i, completion in enumerate(completions, start=1):
        page.get_by_label(f"Text of completion {i}", exact=True).fill(completion)


def score(page: Any) -> None:
    page.get_by_role("button", name="Score").click()
    settled(page)


def settled(page: Any) -> None:
    expect(page.locator("#score:not([aria-busy])")).to_have_count(1)
    expect(page.locator("#results")).to_be_visible()
