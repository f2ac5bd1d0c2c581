"""The report in a real browser: headless Chromium, driven through its DevTools protocol by
playwright."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Visit, visiting
from report_sample import (
    HOSTILE,
    MODELS,
    NUM_EXAMPLES,
    SUBSETS,
    sample_report,
    sample_rl_report,
    sample_rows,
)

from treeward.evaluation.diagnostics.biases import STYLE
from treeward.evaluation.report.build import write_report
from treeward.formatting import format_number

pytestmark = pytest.mark.slow  # a browser

sync_api = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed (the dev extra has it)"
)
expect = sync_api.expect
FIRST = "table.examples tbody tr >> nth=0"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("report"), **sample_report())


@pytest.fixture(scope="module")
def rl_page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("rl"), **sample_rl_report())


@pytest.fixture
def visit(browser: Any, page_file: Path) -> Iterator[Visit]:
    with visiting(browser, page_file) as open_page:
        yield open_page


def count(page: Any, selector: str) -> int:
    return int(page.locator(selector).count())


def shown(page: Any) -> str:
    return str(page.locator(".dt-info").first.inner_text())


def test_every_figure_is_drawn_and_nothing_is_loaded_or_run(visit: Visit) -> None:
    page = visit()
    assert page.title() == sample_report()["title"] and page.evaluate("window.injected") is None
    (suite,) = sample_report()["page"].suites
    num_points = sum(len(line.x) for line in suite.reliabilities)
    expected = {
        ".card": len(MODELS),
        ".kind-bars .layer_0_marks path": len(MODELS)
        * (len(SUBSETS) + 4 + num_shown(suite, "style")),
        ".square .mark-symbol path": 2 * num_points,  # dots, and room for the pointer
        ".kind-curves .mark-area path": len(MODELS),
        "table.examples tbody tr": 25,
    }
    assert {selector: count(page, selector) for selector in expected} == expected
    widths = page.locator(".kind-bars .layer_0_marks path").evaluate_all(
        "(all) => all.map((bar) => bar.getBBox().width)"
    )
    (subsets,) = suite.breakdowns
    values = []
    for metrics in subsets.series.values():
        values += [metric.value for metric in metrics.values()]
    expected_widths = [value * widths[0] / values[0] for value in values]
    assert widths[: len(values)] == pytest.approx(expected_widths, rel=1e-3)
    bars, whiskers = (
        page.locator(f".kind-bars .layer_{layer}_marks {mark}").evaluate_all(
            "(all) => all.map((mark) => mark.getBoundingClientRect()).map((box) => box.top + "
            "box.height / 2)"
        )
        for layer, mark in ((0, "path"), (1, "line"))
    )
    assert bars == pytest.approx(whiskers, abs=1)  # an interval lies in the middle of its bar
    shown_headlines = page.locator(".card-value").all_inner_texts()
    headlines = [model.result.headline.value for _, model in sample_report()["page"].results]
    assert shown_headlines == [format_number(value, "percent") for value in headlines]


def num_shown(suite: Any, diagnostic: str) -> int:
    """How many of the four strata have a value, of the first model."""
    metrics = suite.models[0].diagnostics[diagnostic]
    return sum(metrics[name].value is not None for name in STYLE.accuracies)


def test_a_page_of_runs_shows_hostile_completions_as_text(visit: Visit, rl_page_file: Path) -> None:
    page = visit(rl_page_file)
    assert page.evaluate("window.injected") is None
    page.locator("details.sample").evaluate_all(
        "(all) => all.forEach((fold) => { fold.open = true; })"
    )
    texts = page.locator(".completion .words").all_inner_texts()
    assert [texts.count(text) for text in HOSTILE if text.isprintable()] == [len(MODELS)] * 4
    assert count(page, ".kind-curves .mark-line path") == 2 + 2 * len(MODELS) + len(MODELS)


def test_filters_search_and_sorting(visit: Visit) -> None:
    rows = sample_rows()
    page = visit()
    assert f"of {NUM_EXAMPLES:,} entries" in shown(page)
    known = sorted(row["margin"] for row in rows if row["margin"] is not None)
    expect(page.locator(FIRST)).to_contain_text(format_number(known[0], "signed"))
    page.select_option("[data-key=outcome]", "wrong")
    wrong = [row for row in rows if row["outcome"] == "wrong"]
    assert f"of {len(wrong):,} entries" in shown(page)
    page.select_option("[data-key=subset]", SUBSETS[0])
    page.select_option("[data-key=model]", MODELS[1])
    kept = [row for row in wrong if row["subset"] == SUBSETS[0] and row["model"] == MODELS[1]]
    assert f"of {len(kept):,} entries" in shown(page)
    assert set(page.locator("table.examples td.subset").all_inner_texts()) == {SUBSETS[0]}
    for key in ("outcome", "subset", "model"):
        page.select_option(f"[data-key={key}]", "")
    page.locator(".dt-search input").fill('Sourdough "in case 1"')
    hits = []
    for row in rows:
        text = json.dumps(row).lower()
        if "sourdough" in text and "in case 1" in text:
            hits.append(row)
    assert len(hits) > 1
    expect(page.locator(".dt-info")).to_contain_text(f"of {len(hits)} entries")
    page.locator(".dt-search input").fill("no example has these words")
    expect(page.locator("table.examples tbody")).to_have_text(
        "No example matches. Fewer words or filters find more."
    )
    page.locator(".dt-search input").fill("")
    page.locator("table.examples th", has_text="Margin").click()
    # examples without a score are last
    expect(page.locator(FIRST)).to_contain_text(format_number(known[-1], "signed"))
    expect(page.locator("table.examples th.margin")).to_have_attribute("aria-sort", "descending")


LAYOUTS: dict[str, dict[str, Any]] = {
    "light": {},
    "phone": {"width": 375, "height": 812, "color_scheme": "dark", "has_touch": True},
    "narrow": {"width": 320, "height": 640},
}


@pytest.mark.parametrize("kind", ["evaluation", "rl"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_overflows_and_axe_finds_nothing_wrong(
    visit: Visit, rl_page_file: Path, name: str, kind: str
) -> None:
    if kind == "rl":
        page = visit(rl_page_file, **LAYOUTS[name])
    else:
        page = visit(**LAYOUTS[name])
        page.locator("table.examples .open").nth(1).click()
    width, room = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert width <= room
    outside = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility()
            && !node.closest(".scroller, .visually-hidden, .skip, svg")
            && node.getBoundingClientRect().right > innerWidth + 1).map((node) => node.outerHTML.slice(0, 120))"""
    )
    assert outside == []
    cut = page.evaluate(
        """() => [...document.querySelectorAll(".plot text")].filter((text) => {
            const [a, b] = [text.getBoundingClientRect(), text.ownerSVGElement.getBoundingClientRect()];
            return a.left < b.left - 2 || a.right > b.right + 2;
        }).map((text) => text.textContent)"""
    )
    assert cut == []
    if name in ("light", "phone"):
        axe = pytest.importorskip(
            "axe_playwright_python.sync_playwright", reason="the dev extra has it"
        ).Axe()
        result = axe.run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"][:200]) for one in result] == []


def test_tables_on_a_phone_are_read_without_scrolling_sideways(visit: Visit) -> None:
    page = visit(width=390)
    for fold in page.locator("details.numbers summary").all():
        fold.click()
    overflowing = page.locator(".wide").evaluate_all(
        """(all) => all.filter((table) => table.scrollWidth > table.closest(".scroller").clientWidth)
            .map((table) => table.innerText.slice(0, 80))"""
    )
    assert count(page, ".wide") > 0 and overflowing == []
    cell = page.locator(".wide tbody td").first
    label = cell.evaluate("(cell) => getComputedStyle(cell, '::before').content")
    # each number has the name of its column beside it
    assert label == json.dumps(cell.get_attribute("data-label"))


def test_whiskers_are_seen_on_bars_and_few_points_make_a_small_chart(visit: Visit) -> None:
    page = visit(width=1200)
    bar = page.locator(".kind-bars .layer_0_marks path").first
    assert float(bar.get_attribute("fill-opacity")) <= 0.5
    box = page.locator(".plot.square").first.bounding_box()
    assert box["width"] <= 320 and box["height"] <= 320


def test_without_scripts_the_numbers_are_there(visit: Visit) -> None:
    page = visit(java_script_enabled=False)
    text = page.locator("main").inner_text()
    gap = sample_report()["page"].suites[0].models[0].numbers["accuracy_gap"]
    assert (
        MODELS[0] in text
        and format_number(gap.value, "points") in text
        and "Charts and the table of examples need" in text
    )
