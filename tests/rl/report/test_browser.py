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
    assert page.evaluate("window.injected") is None and page.locator(".trouble").count() == 0
    figure = page.locator("section", has=page.get_by_role("heading", name="Proxy and gold over the distance moved"))
    assert figure.locator("path.line").count() == 9
    assert figure.locator("line.reference.coloured").count() == 1
    assert figure.locator("text.reference-label").text_content() == "no KL: alarm"
    strokes = figure.locator("path.line").evaluate_all(
        "(all) => all.map((line) => [getComputedStyle(line).stroke, line.getAttribute('stroke-dasharray')])"
    )
    assert len({stroke for stroke, _ in strokes}) == 3 and len({tuple(one) for one in strokes}) == 9
    swatches = figure.locator(".legend .swatch .line").evaluate_all(
        "(all) => all.map((line) => [getComputedStyle(line).stroke, line.getAttribute('stroke-dasharray')])"
    )
    assert swatches == strokes  # the legend tells them apart as the plot does
    assert page.locator(".card").count() == 3
    assert page.locator(".sample").count() == 7 and page.locator(".sample[open] .answer").count() == 9


def test_the_reading_order_and_the_names_of_things(visit: Visit) -> None:
    page = visit()
    for sample in page.locator(".sample > summary").all()[1:]:
        sample.click()
    levels = page.locator("h1, h2, h3, h4").evaluate_all(
        "(all) => all.filter((h) => h.checkVisibility()).map((h) => +h.tagName[1])"
    )
    assert levels[0] == 1 and all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
    names = page.locator(".answer").evaluate_all("(all) => all.map((one) => one.getAttribute('aria-label'))")
    assert names[3:5] == ["no KL, step 0", "no KL, step 50"]
    plot = page.locator(".plot").first
    label = plot.get_attribute("aria-label")
    assert "no KL: gold: 0.000 at 0, " in label and label.endswith(".") and len(label) < 1500
    plot.focus()
    page.keyboard.press("End")
    assert page.locator("#tip").is_visible() and page.locator("#spoken").inner_text()
    numbers = page.locator("details.numbers").first
    numbers.locator("summary").click()
    numbers.locator("tbody tr").first.wait_for()  # the table is made at an event that comes after the click
    assert numbers.locator("tbody tr").count() > 20


def test_samples_open_by_key_and_show_text_as_text(visit: Visit) -> None:
    page = visit()
    summaries = page.locator(".sample > summary")
    summaries.nth(3).focus()
    page.keyboard.press("Enter")
    shown = page.locator(".sample").nth(3).locator(".words").first.inner_text()
    assert "<img src=x onerror=" in shown
    assert page.evaluate("window.injected") is None
    assert page.locator(".sample img, .sample script").count() == 0


def test_narrow_dark_printed_and_without_scripts(visit: Visit) -> None:
    narrow = visit(width=360, color_scheme="dark")
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 360
    assert narrow.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
    page = visit()
    page.emulate_media(media="print")
    page.locator("html[data-printing]").wait_for(state="attached")
    assert page.locator(".sample[open]").count() == 7
    assert page.locator(".sample details:not([open])").count() == 0
    page.emulate_media(media="screen")
    page.locator("html[data-printing]").wait_for(state="detached")
    assert page.locator(".sample[open]").count() == 1
    plain = visit(java_script_enabled=False)
    assert (
        "Gold: no KL" in plain.locator("noscript").inner_text() and "rl.json" in plain.locator("noscript").inner_text()
    )


def test_the_numbers_are_given_under_their_name(visit: Visit) -> None:
    page = visit()
    with page.expect_download() as download:
        page.locator("#json").click()
    assert download.value.suggested_filename == "rl.json"


def test_one_run_without_gold(visit: Visit, tmp_path: Path) -> None:
    run = RLRun.read("**blind** <b>", write_run(tmp_path / "logs", without_gold(HACKED)))
    page = visit(write_rl_report([run], tmp_path / "one.html", title="One"))
    assert "there is no gold reward" in page.locator(".prose").first.inner_text()
    assert page.locator("h4").count() == 0 and page.locator(".sample[open] .answer").count() == 3
