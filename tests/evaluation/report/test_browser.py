"""The report in a real browser: headless Chromium, driven through its DevTools protocol by playwright."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_sample import (
    EMPTY,
    HOSTILE,
    MODELS,
    NUM_EXAMPLES,
    SUBSETS,
    by_length,
    perfect,
    sample_report,
    sample_rows,
    summary,
)

from treeward.evaluation.report.blocks import FORMATS, format_number
from treeward.evaluation.report.build import write_report
from treeward.evaluation.writing import write_results

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the dev extra has it)")
expect = sync_api.expect
Visit = Callable[..., Any]


def count(page: Any, selector: str) -> int:
    return int(page.locator(selector).count())


def found(page: Any) -> str:
    return str(page.locator(".found").inner_text())


def test_nothing_is_said_loaded_or_run(visit: Visit) -> None:
    page = visit()
    assert page.title() == sample_report()["title"]
    assert page.evaluate("window.injected") is None
    assert page.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)") in ([], ["data:,"])


def test_the_policy_stops_what_the_page_was_never_meant_to_do(browser: Any, page_file: Path) -> None:
    page = browser.new_page()
    page.goto(page_file.as_uri())
    blocked = page.evaluate(
        """async () => {
            const blocked = [];
            addEventListener("securitypolicyviolation", (event) => blocked.push(event.effectiveDirective));
            await fetch("https://example.invalid/").catch(() => 0);
            const image = new Image();
            image.src = "https://example.invalid/pixel.png";
            const script = document.createElement("script");
            script.textContent = "window.injected = 1";
            document.body.append(script);
            await new Promise((done) => setTimeout(done, 50));
            return [blocked.sort(), window.injected];
        }"""
    )
    assert blocked == [["connect-src", "img-src", "script-src-elem"], None]
    page.close()


def test_every_figure_is_drawn(visit: Visit) -> None:
    page = visit()
    expected = {
        ".kind-headline .card": 5,
        ".kind-bars rect.bar": len(MODELS) * len(SUBSETS),
        ".kind-bars path.whisker": len(MODELS) * len(SUBSETS),
        ".kind-bars line.reference": 1,
        ".kind-histogram rect.bin": 64,
        ".kind-histogram path.outline": 2,
        ".kind-histogram line.reference": 1,
        ".kind-reliability circle.point": 18,  # 20 bins less the two without a frequency
        ".kind-reliability line.diagonal": 1,
        ".kind-curves path.line": 3,
        ".kind-curves path.band": 2,
        ".kind-curves circle.point": 24,
        ".kind-scatter path.fit": 2,
        ".kind-matrix td.cell": 9,
        ".kind-table tbody tr": 5,
        ".trouble": 0,
    }
    assert {selector: count(page, selector) for selector in expected} == expected
    for plot in page.locator(".plot").all():
        box = plot.bounding_box()
        assert box["width"] > 300 and box["height"] > 150, plot.get_attribute("aria-label")
    for marks in ("rect.bar", "rect.bin", "circle.point", "path.line", "path.band", "path.whisker"):
        sizes = page.locator(f".plot {marks}").evaluate_all(
            "(all) => all.map((mark) => mark.getBBox()).map((box) => Math.max(box.width, box.height))"
        )
        assert min(sizes) > 0, marks
    widths = page.locator(".kind-bars rect.bar").evaluate_all("(bars) => bars.map((bar) => +bar.getAttribute('width'))")
    values = [i["value"] for items in zip(*(s["items"] for s in block("bars")["series"]), strict=True) for i in items]
    scale = widths[0] / values[0]
    assert widths == pytest.approx([value * scale for value in values])
    assert page.locator(".kind-matrix td.cell").all_inner_texts()[2:] == [
        "33.0%",
        "82.0%",
        "64.0%",
        "–",
        "90.0%",
        "77.0%",
        "–",
    ]
    assert page.locator(".card-value").all_inner_texts()[2:] == ["8.3%", "+0.00250", "–"]


def block(kind: str) -> dict[str, Any]:
    return next(block for block in sample_report()["blocks"] if block["kind"] == kind)


def test_the_scatter_plot_has_its_points_and_their_texts(visit: Visit) -> None:
    page = visit()
    points = [p for series in block("scatter")["series"] for p in series["points"] if p["y"] is not None]
    canvas = page.locator(".kind-scatter canvas")
    assert canvas.get_attribute("data-points") == str(len(points))
    inked = canvas.evaluate(
        """(canvas) => {
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            let inked = 0;
            for (let i = 3; i < data.length; i += 4) inked += data[i] > 0;
            return inked / (data.length / 4);
        }"""
    )
    assert 0.01 < inked < 0.5
    plot = page.locator(".kind-scatter .plot")
    plot.focus()
    page.keyboard.press("End")
    longest = max(points, key=lambda point: point["x"])
    assert longest["id"] in page.locator("#tip").inner_text()
    assert longest["text"][:40].replace("\n", " ") in page.locator("#spoken").inner_text().replace("\n", " ")
    page.keyboard.press("Enter")
    assert longest["id"] in page.locator("#reader-title").inner_text()
    page.keyboard.press("Escape")
    assert not page.locator("#reader").is_visible()
    expect(plot).to_be_focused()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "characters of the completion" in page.locator("#tip").inner_text()
    page.mouse.move(2, 2)
    assert not page.locator("#tip").is_visible()


def test_groups_of_one_series_have_colours(visit: Visit, tmp_path: Path) -> None:
    def scatter(num_groups: int) -> dict[str, Any]:
        points = [{"x": n, "y": n % 5, "text": "t", "group": f"group {n % num_groups}"} for n in range(80)]
        return {"kind": "scatter", "title": f"{num_groups}", "series": [{"name": "a", "points": points}]}

    page = visit(write_report(tmp_path, "t", [scatter(num_groups) for num_groups in (1, 5, 12)], {}))
    legends = [figure.locator(".legend li").count() for figure in page.locator("figure").all()]
    assert legends == [0, 5, 0]  # a lone series needs no name; groups do, but not more of them than colours
    colours = page.locator("canvas").evaluate_all(
        """(all) => all.map((canvas) => {
            const known = [0, 1, 2, 3, 4, 5].map((index) => colour(`s${index}`).match(/\\d+/g).map(Number));
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            const seen = new Set();
            for (let i = 0; i < data.length; i += 4) {
                const off = known.map((rgb) => Math.max(...rgb.map((channel, k) => Math.abs(channel - data[i + k]))));
                if (data[i + 3] > 150 && Math.min(...off) < 5) seen.add(off.indexOf(Math.min(...off)));
            }
            return seen.size;
        })"""
    )
    assert colours == [1, 5, 1]


def test_every_figure_says_its_numbers_and_listens_to_keys(visit: Visit) -> None:
    page = visit()
    bars = page.locator(".kind-bars .plot")
    item = block("bars")["series"][1]["items"][3]
    said = f"{item['label']} {format_number(item['value'], 'percent')} ({format_number(item['low'], 'percent')} to "
    assert said in bars.get_attribute("aria-label")
    for plot in page.locator(".plot").all():
        assert len(plot.get_attribute("aria-label")) > 80
        plot.focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("#tip").is_visible()
        page.keyboard.press("Escape")
        assert not page.locator("#tip").is_visible()
    for numbers in page.locator("details.numbers").all():
        numbers.locator("summary").click()
        expect(numbers.locator("tbody tr").first).to_be_visible()
    assert count(page, ".kind-reliability tbody tr") == 20


def test_landmarks_headings_labels_and_focus(visit: Visit) -> None:
    page = visit()
    assert [count(page, tag) for tag in ("main", "nav", "body > header", "body > footer", "h1")] == [1] * 5
    levels = page.locator("h1, h2, h3, h4").evaluate_all(
        "(all) => all.filter((h) => h.offsetParent).map((h) => +h.tagName[1])"
    )
    assert levels[0] == 1 and all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
    names = page.locator("input, select, button, [role=img], [role=region], section, table, [role=table]").evaluate_all(
        """(all) => all.filter((node) => node.checkVisibility()).map((node) => [node.outerHTML.slice(0, 80),
            node.getAttribute("aria-label") || node.labels?.[0]?.textContent || node.caption?.textContent
            || document.getElementById(node.getAttribute("aria-labelledby"))?.textContent || node.textContent])"""
    )
    assert [html for html, name in names if not name.strip()] == []
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.evaluate("document.activeElement.id") == "json"


def test_filters_search_and_sorting(visit: Visit) -> None:
    rows = sample_rows()
    page = visit()
    assert found(page) == f"{NUM_EXAMPLES:,} of {NUM_EXAMPLES:,} rows"
    known = sorted(row["margin"] for row in rows if row["margin"] is not None)
    shown = page.locator(".rows .row").first
    assert format_number(known[0], "signed") in shown.inner_text()

    page.select_option("[data-filter=outcome]", "wrong")
    wrong = [row for row in rows if row["outcome"] == "wrong"]
    assert found(page) == f"{len(wrong):,} of {NUM_EXAMPLES:,} rows"
    page.select_option("[data-filter=subset]", SUBSETS[0])
    page.select_option("[data-filter=model]", MODELS[1])
    kept = [row for row in wrong if row["subset"] == SUBSETS[0] and row["model"] == MODELS[1]]
    assert found(page) == f"{len(kept):,} of {NUM_EXAMPLES:,} rows"
    assert set(page.locator(".rows .column.subset").all_inner_texts()) == {SUBSETS[0]}
    page.get_by_role("button", name="Clear filters").click()
    assert found(page) == f"{NUM_EXAMPLES:,} of {NUM_EXAMPLES:,} rows"

    page.fill("[data-filter=search]", 'Sourdough "in case 31"')
    hits = [row for row in rows if all(part in json.dumps(row).lower() for part in ("sourdough", "in case 31"))]
    assert len(hits) > 1
    expect(page.locator(".found")).to_have_text(f"{len(hits)} of {NUM_EXAMPLES:,} rows")
    page.fill("[data-filter=search]", "no example has these words")
    expect(page.locator(".nothing")).to_be_visible()
    page.fill("[data-filter=search]", "")
    expect(page.locator(".nothing")).to_be_hidden()

    page.locator(".list-head").get_by_role("button", name="Margin").click()
    assert format_number(known[-1], "signed") in page.locator(".rows .row").first.inner_text()
    assert page.locator(".list-head .margin").get_attribute("aria-sort") == "descending"
    page.select_option("[data-filter=order]", "closest")
    assert format_number(min(known, key=abs), "signed") in page.locator(".rows .row").first.inner_text()
    page.locator(".kind-table").get_by_role("button", name="Mean shift").click()
    changes = page.locator(".kind-table tbody th").all_inner_texts()
    assert changes == ["flattery", "markdown headings", "cut end", "repeated text", "refusal"]  # what is absent, last


def test_long_tables_and_long_cells_are_folded(visit: Visit, tmp_path: Path) -> None:
    columns = [{"key": "n", "label": "n", "format": "number"}, {"key": "text", "label": "Text"}]
    rows = [{"n": n, "text": f"begins {n} " + "and goes on " * 60 + "to the end"} for n in range(250)]
    page = visit(
        write_report(tmp_path, "t", [{"kind": "table", "title": "Long", "columns": columns, "rows": rows}], {})
    )
    assert count(page, "tbody tr") == 50
    page.get_by_role("button", name="Show all 250 rows").click()
    assert count(page, "tbody tr") == 250
    assert page.locator("tbody th").nth(12).inner_text() == "12"  # a column of whole numbers
    assert count(page, "tbody .words") == 0
    page.locator("tbody summary").nth(12).click()
    expect(page.locator("tbody .words")).to_have_text(rows[12]["text"])


def test_opening_a_row_shows_both_answers(visit: Visit) -> None:
    rows = sorted((row for row in sample_rows() if row["margin"] is not None), key=lambda row: row["margin"])
    page = visit()
    page.locator(".rows .open").nth(1).focus()
    page.keyboard.press("Enter")
    reader = page.locator("#reader")
    answers = reader.locator(".answer")
    assert answers.count() == len(rows[1]["completions"])
    for index, completion in enumerate(rows[1]["completions"]):
        assert answers.nth(index).locator(".words").inner_text() == completion[0]["content"]
        assert f"score {format_number(rows[1]['scores'][index], 'signed')}" in answers.nth(index).inner_text()
    assert "the model's choice" in answers.nth(1).inner_text()
    boxes = [answers.nth(index).bounding_box() for index in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert rows[1]["context"][-1]["content"] in reader.locator(".question").inner_text()
    page.keyboard.press("ArrowRight")
    assert answers.nth(0).locator(".words").inner_text() == rows[2]["completions"][0][0]["content"]
    page.keyboard.press("Escape")
    assert not reader.is_visible()
    expect(page.locator(".rows .row[data-index='2'] .open")).to_be_focused()  # where reading ended


def test_a_hostile_reply_is_only_text(visit: Visit) -> None:
    page = visit()
    for index, expected in enumerate(HOSTILE):
        page.fill("[data-filter=search]", f'"in case {2 * index}" {expected.split()[0]}')
        expect(page.locator(".rows .open").first).to_contain_text(re.compile(rf"case {2 * index}\b"))
        assert found(page) == f"1 of {NUM_EXAMPLES:,} rows"
        page.locator(".rows .open").first.click()
        words = page.locator("#reader .answer .words").first
        hidden = words.locator(".hidden-character").all_inner_texts()
        text = words.text_content()
        for label in hidden:
            text = text.replace(label, chr(int(label[2:], 16)), 1)
        assert text.encode("utf-8", "replace") == expected.encode("utf-8", "replace")
        assert ("U+202E" in hidden) == ("\u202e" in expected) and ("U+0000" in hidden) == ("\x00" in expected)
        assert words.locator("img, script, strong").count() == 0
        direction = words.evaluate("(node) => getComputedStyle(node).direction")
        assert direction == ("rtl" if "العالم" in expected else "ltr")
        page.keyboard.press("Escape")
    assert page.evaluate("window.injected") is None


def test_thousands_of_rows_are_a_window(visit: Visit, tmp_path: Path) -> None:
    rows = [{**row, "id": f"{row['id']}-{turn}"} for turn in range(12) for row in sample_rows()]
    for row in rows:
        row["completions"] = [[{"role": "assistant", "content": "short"}]] * 2
    file = write_report(tmp_path, "t", [{"kind": "examples", "title": "Examples", "source": "a"}], {"a": rows})
    page = visit(file)
    grid = page.locator("[role=table]")
    assert grid.get_attribute("aria-rowcount") == str(len(rows) + 1)
    assert count(page, ".rows .row") < 60
    page.locator(".list").evaluate("(list) => { list.scrollTop = list.scrollHeight; }")
    page.wait_for_selector(f".rows .row[data-index='{len(rows) - 1}']")
    assert count(page, ".rows .row") < 60
    page.locator(f".rows .row[data-index='{len(rows) - 1}'] .open").focus()
    page.keyboard.press("Home")
    page.wait_for_selector(".rows .row[data-index='0']")
    for _ in range(30):
        page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.closest('.row').dataset.index") == "30"
    assert page.evaluate(
        "(() => { const row = document.activeElement.getBoundingClientRect(), list = document.querySelector('.list')"
        ".getBoundingClientRect(); return row.top >= list.top && row.bottom <= list.bottom; })()"
    )
    order = page.locator(".rows .row").evaluate_all("(all) => all.map((row) => +row.dataset.index)")
    assert order == sorted(order)


LAYOUTS = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "phone": {"width": 375, "height": 812, "color_scheme": "dark", "has_touch": True},
    "narrow": {"width": 320, "height": 640},
    "wide": {"width": 2200},
    "print": {"width": 760},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_overflows(visit: Visit, name: str) -> None:
    page = visit(**LAYOUTS[name])
    if name == "print":
        page.emulate_media(media="print")
        page.wait_for_selector(".printed")
    width, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width <= room
    outside = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility()
            && !node.closest(".scroller, .visually-hidden, .skip")
            && node.getBoundingClientRect().right > innerWidth + 1)
            .map((node) => node.outerHTML.slice(0, 120))"""
    )
    assert outside == []
    cut = page.evaluate(
        """() => [...document.querySelectorAll(".plot text")].filter((text) => {
            const [a, b] = [text.getBoundingClientRect(), text.ownerSVGElement.getBoundingClientRect()];
            return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
        }).map((text) => text.textContent)"""
    )
    assert cut == []


def test_dark_by_preference_and_by_toggle(visit: Visit) -> None:
    def lightness(page: Any) -> float:
        return float(
            page.evaluate(
                "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0) / 765"
            )
        )

    page = visit(color_scheme="dark")
    assert lightness(page) < 0.15
    toggle = page.locator("#theme")
    toggle.click()
    assert toggle.inner_text() == "Theme: light" and lightness(page) > 0.9
    toggle.click()
    assert toggle.inner_text() == "Theme: dark" and lightness(page) < 0.15
    page.emulate_media(media="print")
    assert lightness(page) > 0.9
    page.emulate_media(media="screen", color_scheme="light")
    page.reload()
    assert toggle.inner_text() == "Theme: dark" and lightness(page) < 0.15  # remembered
    toggle.click()
    assert toggle.inner_text() == "Theme: auto" and lightness(page) > 0.9


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_on_shades_are_read(visit: Visit, scheme: str) -> None:
    ratios = visit(color_scheme=scheme).evaluate(
        """() => {
            const pen = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
            const luminance = (colour) => {
                pen.fillStyle = colour;
                pen.fillRect(0, 0, 1, 1);
                const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map((c) => c / 255)
                    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
                return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
            };
            return [...document.querySelectorAll(".matrix .cell")].map((cell) => {
                const style = getComputedStyle(cell);
                const [a, b] = [luminance(style.color), luminance(style.backgroundColor)];
                return Math.max(a, b) / Math.min(a, b);
            });
        }"""
    )
    assert len(ratios) == 9 and min(ratios) >= 4.5 and max(ratios) - min(ratios) > 2


def test_print_opens_the_first_examples(visit: Visit) -> None:
    page = visit(width=760)
    assert count(page, ".printed") == 0
    page.select_option("[data-filter=outcome]", "tie")
    page.emulate_media(media="print")
    page.wait_for_selector(".printed")
    ties = [row for row in sample_rows() if row["outcome"] == "tie"]
    assert count(page, ".printed") == 10 and count(page, ".printed .answer") >= 20
    assert ties[0]["completions"][0][0]["content"] in page.locator(".printed .words").all_inner_texts()
    for selector in (".list", ".toolbar", "#theme", ".contents"):
        assert not page.locator(selector).first.is_visible()
    page.emulate_media(media="screen")
    expect(page.locator(".printed")).to_have_count(0)
    assert page.pdf()[:5] == b"%PDF-"


def test_the_json_link_gives_every_number(visit: Visit, page_file: Path) -> None:
    page = visit()
    with page.expect_download() as download:
        page.locator("#json").click()
    assert download.value.suggested_filename == "report.json"
    assert Path(download.value.path()).read_bytes() == (page_file.parent / "report.json").read_bytes()


def test_without_scripts_the_headline_is_there(visit: Visit) -> None:
    page = visit(java_script_enabled=False)
    item = block("headline")["items"][0]
    text = page.locator("main").inner_text()
    assert item["label"] in text and format_number(item["value"], "percent") in text


def test_numbers_are_written_as_in_python(visit: Visit) -> None:
    values = [
        0,
        1,
        -1,
        0.5,
        0.7142857,
        -0.0314,
        12.3456,
        152,
        152.5,
        99.996,
        1234.6,
        1e6,
        -2.5e7,
        3.3e-5,
        1e-4,
        0.00213,
        0.099,
        2985,
    ]
    formats = [format for format in FORMATS if format != "text"]
    page = visit()
    assert page.evaluate(
        "([values, formats]) => values.map((v) => formats.map((f) => formatNumber(v, f)))", [values, formats]
    ) == [[format_number(value, format) for format in formats] for value in values]


def test_empty_and_odd_blocks_are_drawn(visit: Visit, tmp_path: Path) -> None:
    shifts = [
        {"label": "a very long label " * 8, "value": -0.4, "low": -2, "high": 0.1},
        {"label": "none", "value": None},
    ]
    points = [{"x": 3, "y": 3}, {"x": None, "y": 1}]
    blocks = [
        {"kind": "bars", "title": "No series", "series": []},
        {"kind": "bars", "title": "Shifts", "x_range": [-1, 1], "series": [{"name": "", "items": shifts}]},
        {"kind": "histogram", "title": "No counts", "edges": [0, 1], "series": [{"name": "a", "counts": [0]}]},
        {"kind": "reliability", "title": "No bins", "series": [{"name": "a", "bins": []}]},
        {"kind": "scatter", "title": "One point", "series": [{"name": "a", "points": points}]},
        {"kind": "curves", "title": "No point", "x_scale": "log", "series": [{"name": "a", "x": [1], "y": [None]}]},
        {"kind": "matrix", "title": "One cell", "rows": ["a"], "columns": ["b"], "values": [[7]], "format": "integer"},
        {"kind": "table", "title": "No rows", "columns": [{"key": "a", "label": "A"}], "rows": []},
        {"kind": "examples", "title": "No examples", "source": "none"},
        {"kind": "examples", "title": "Hardly a row", "source": "bare"},
    ]
    file = write_report(tmp_path, "t", blocks, {"none": [], "bare": [{"id": "x"}]})
    page = visit(file, width=375)
    assert count(page, ".trouble") == 0 and count(page, "section.block") == len(blocks)
    assert "NaN" not in page.content().split('id="report-data"')[0]
    page.locator(".rows .open").click()
    assert page.locator("#reader").is_visible()


@pytest.mark.parametrize("what", EMPTY)
def test_hardly_anything_to_report_is_drawn(visit: Visit, what: str, tmp_path: Path) -> None:
    page = visit(write_results(tmp_path, [EMPTY[what]()]), width=400)
    assert count(page, ".trouble") == 0 and count(page, ".kind-examples .row") > 0
    assert not re.search(r"\bNaN\b|undefined|\bInfinity\b", page.locator("main").inner_text())
    width, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert width <= room


def test_a_real_report_of_two_models_reads_and_is_reached(visit: Visit, tmp_path: Path) -> None:
    page = visit(write_results(tmp_path, [summary(by_length, "a"), summary(perfect, "b")]))
    first = page.locator("main section").first
    assert first.locator("li").all_inner_texts()[0].startswith("a on Best Of: overall")
    box = page.locator(".card").first.bounding_box()
    assert box["y"] + box["height"] < 900  # the verdicts and the first numbers are on the first screen
    strata = page.locator(".kind-bars", has=page.get_by_role("heading", name="Accuracy by which completion is longer"))
    assert [name.strip() for name in strata.locator(".legend li").all_inner_texts()] == ["a", "b"]
    colours = strata.locator("rect.bar").evaluate_all("(all) => all.map((bar) => getComputedStyle(bar).fill)")
    assert len(set(colours[:2])) == 2
    assert "a: The longer completion is right 100.0%" in strata.locator(".plot").get_attribute("aria-label")
    for link in page.locator(".contents a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    gap = page.locator("tr", has_text="Length gap in accuracy").first
    assert "+100.0 points" in gap.inner_text() and "+0.0 points" not in gap.inner_text()
    subsets = page.locator(".kind-bars", has=page.get_by_role("heading", name="Accuracy by subset"))
    assert subsets.locator("line.reference").count() == 4  # two subsets with a known chance, two models
    words = subsets.locator(".plot").get_attribute("aria-label")
    assert "hard 48.1%" in words and "chance 25%" in words and "chance 50%" in words


def test_contents_of_several_chapters_are_folded(visit: Visit, tmp_path: Path) -> None:
    parts = [{"kind": "table", "title": f"Part {n}", "columns": [{"key": "a"}], "rows": []} for n in range(3)]
    chapters = [
        block for name in ("One", "Two") for block in ({"kind": "text", "title": name, "markdown": "x"}, *parts)
    ]
    page = visit(write_report(tmp_path, "t", chapters, {}))
    links = page.locator(".contents a")
    assert links.count() == 8 and [link.inner_text() for link in links.all() if link.is_visible()] == ["One", "Two"]
    page.locator(".contents .parts summary").nth(1).click()
    assert links.nth(7).is_visible() and not links.nth(3).is_visible()
    links.nth(7).click()
    assert page.evaluate("location.hash") == links.nth(7).get_attribute("href")
    only = visit(write_report(tmp_path / "one", "t", chapters[:4], {}))
    assert only.locator(".contents a").nth(3).is_visible()


def test_curves_may_name_their_places_and_points(visit: Visit, tmp_path: Path) -> None:
    series = {"name": "a", "x": [0.0, 0.44, 1.1], "y": [0, 1, 2], "labels": ["n = 1", "n = 2", "n = 7"]}
    ticks = [{"x": 0.0, "label": "1"}, {"x": 0.44, "label": "2"}, {"x": 1.1, "label": "7"}]
    curves = {"kind": "curves", "title": "c", "x_label": "n", "x_ticks": ticks, "series": [series]}
    page = visit(write_report(tmp_path, "t", [curves], {}))
    assert page.locator(".plot text.tick").all_text_contents()[-3:] == ["1", "2", "7"]
    assert "n = 7: 2.000" in page.locator(".plot").get_attribute("aria-label")
    page.locator(".plot").focus()
    page.keyboard.press("End")
    assert page.locator("#tip").inner_text().startswith("a: n = 7")


def test_lists_and_long_tables_by_their_own_length(visit: Visit, tmp_path: Path) -> None:
    rows = [{"a": n} for n in range(9)]
    table = {"kind": "table", "title": "t", "columns": [{"key": "a", "format": "integer"}], "rows": rows, "most": 4}
    text = {"kind": "text", "markdown": "First.\n\n- **one** is `x`\n- two - three"}
    page = visit(write_report(tmp_path, "t", [text, table], {}))
    assert page.locator(".prose li").all_inner_texts() == ["one is x", "two - three"]
    assert count(page, ".prose strong") == 1 and count(page, "tbody tr") == 4
    page.get_by_role("button", name="Show all 9 rows").click()
    assert count(page, "tbody tr") == 9
