"""The RL report in headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Visit, chromium, visiting
from rl_report_sample import HACKED, sample_runs, without_gold, write_run

from treeward.rl.report.build import write_rl_report
from treeward.rl.report.reading import RLRun


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rl_report")
    return write_rl_report(sample_runs(folder / "logs"), folder / "rl.html", title="GRPO against a reward model")


@pytest.fixture
def visit(browser: Any, page_file: Path) -> Iterator[Visit]:
    with visiting(browser, page_file) as open_page:
        yield open_page


def test_figures_alarms_and_samples_are_drawn(visit: Visit) -> None:
    page = visit()
    assert page.evaluate("window.injected") is None
    figure = page.locator("section", has=page.get_by_role("heading", name="Proxy and gold over the distance moved"))
    assert figure.locator("text", has_text="no KL: alarm").count() == 1
    lines = figure.locator(".mark-line path[stroke]").evaluate_all(
        "(all) => all.map((line) => [line.getAttribute('stroke'), line.getAttribute('stroke-dasharray')])"
    )
    assert len(lines) == len({tuple(line) for line in lines}) == 9 and len({colour for colour, _ in lines}) == 3
    assert figure.locator(".legend path").count() == 9
    label = figure.locator(".plot").get_attribute("aria-label")
    assert "no KL: gold: 0.000 at 0, " in label and label.endswith(".") and len(label) < 1500
    figure.locator("summary").first.click()
    assert figure.locator("tbody tr").count() > 20
    assert page.locator(".card").count() == 3
    assert page.locator(".sample").count() == 7 and page.locator(".sample[open] .completion").count() == 9


def test_the_reading_order_and_the_names_of_things(visit: Visit) -> None:
    page = visit(width=360, color_scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for sample in page.locator(".sample > summary").all()[1:]:
        sample.click()
    levels = page.locator("h1, h2, h3, h4").evaluate_all(
        "(all) => all.filter((h) => h.checkVisibility()).map((h) => +h.tagName[1])"
    )
    assert levels[0] == 1 and all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
    names = page.locator(".completion").evaluate_all("(all) => all.map((one) => one.getAttribute('aria-label'))")
    assert names[3:5] == ["no KL, step 0", "no KL, step 50"]
    assert "<img src=x onerror=" in page.locator(".sample").nth(3).locator(".words").first.inner_text()
    assert page.locator(".sample img, .sample script").count() == 0 and page.evaluate("window.injected") is None


def test_one_run_without_gold(visit: Visit, tmp_path: Path) -> None:
    run = RLRun.read("blind <b>", write_run(tmp_path / "logs", without_gold(HACKED)))
    page = visit(write_rl_report([run], tmp_path / "one.html", title="One"))
    assert "there is no gold reward" in page.locator(".prose").first.inner_text()
    assert page.locator("h4").count() == 0 and page.locator(".sample[open] .completion").count() == 3
