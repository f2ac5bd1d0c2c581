"""The RL report in headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Visit, chromium, visiting
from rl_report_sample import sample_runs

from treeward.rl.report import write_rl_report

pytestmark = pytest.mark.slow  # a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Visit]:
    page = write_rl_report(sample_runs(tmp_path / "logs"), tmp_path / "rl.html", title="GRPO against a reward model")
    with visiting(browser, page) as open_page:
        yield open_page


def test_figures_alarms_and_samples_are_drawn(visit: Visit) -> None:
    page = visit(width=360, color_scheme="dark")
    assert page.evaluate("[window.injected, document.documentElement.scrollWidth <= 360]") == [None, True]
    figure = page.locator("section", has=page.get_by_role("heading", name="Gold over the distance moved"))
    assert figure.locator("text", has_text="no KL: alarm").count() == 1
    lines = figure.locator(".mark-line path[stroke]").evaluate_all(
        "(all) => all.map((line) => [line.getAttribute('stroke'), line.getAttribute('stroke-dasharray')])"
    )
    assert len(lines) == len({colour for colour, _ in lines}) == 3
    assert page.locator(".sample").count() == 7 and page.locator(".sample[open] .completion").count() == 9
    names = page.locator(".completion").evaluate_all("(all) => all.map((one) => one.getAttribute('aria-label'))")
    assert names[3:5] == ["no KL, step 0", "no KL, step 50"]
    page.locator(".sample > summary").nth(3).click()
    assert "<img src=x onerror=" in page.locator(".sample").nth(3).locator(".words").first.inner_text()
    assert page.locator(".sample img, .sample script").count() == 0 and page.evaluate("window.injected") is None
