"""The report of several models in a real browser: nothing is cut off, what they disagree on is found, folds open."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_sample import perfect, summary

from treeward.evaluation.report.build import write_report
from treeward.evaluation.writing import write_results

Visit = Callable[..., Any]


def sometimes(n: int, text: str) -> float | None:
    """Right where n is even, without a score where it is 4."""
    return None if n == 4 else float(("right" in text) == (n % 2 == 0))


def test_what_models_disagree_on_is_a_filter_and_rows_have_their_id(visit: Visit, tmp_path: Path) -> None:
    page = visit(write_results(tmp_path, [summary(perfect, "a", count=12), summary(sometimes, "b", count=12)]))
    assert page.locator(".found").inner_text() == "24 of 24 rows"
    # b is wrong in the six odd ones; the fourth it has not scored, which is no opinion.
    option = page.locator("[data-filter=outcome] option[value=disagree]")
    assert option.inner_text() == "models disagree (6 examples)"
    page.select_option("[data-filter=outcome]", "disagree")
    assert page.locator(".found").inner_text() == "12 of 24 rows"
    ids = page.locator(".rows .column.id").all_inner_texts()
    assert ids == [id for n in ("1", "3", "5", "7", "9", "11") for id in (n, n)]  # one model's below the other's
    assert set(page.locator(".rows .row").first.locator(".badge").all_inner_texts()) <= {"✗ wrong", "✓ right"}
    page.get_by_role("button", name="Clear filters").click()
    assert page.locator(".found").inner_text() == "24 of 24 rows"
    same = visit(write_results(tmp_path / "same", [summary(perfect, "a", count=12), summary(perfect, "b", count=12)]))
    assert same.locator("option[value=disagree]").count() == 0


@pytest.mark.parametrize("width", [1280, 1500])
def test_the_glance_has_all_its_columns_in_sight(visit: Visit, tmp_path: Path, width: int) -> None:
    path = write_results(tmp_path, [summary(perfect, "a-model"), summary(sometimes, "another-model-final")])
    page = visit(path, width=width)
    glance = page.locator(".kind-table").first
    assert glance.get_by_role("heading", name="At a glance").count() == 1
    room = glance.locator(".scroller").evaluate("(node) => [node.scrollWidth, node.clientWidth]")
    assert room[0] <= room[1]
    heads = [head.strip(" ↕") for head in glance.locator("thead th").all_inner_texts()]
    assert heads.index("No score") < heads.index("Overall") < heads.index("of the scored") < len(heads) - 1


@pytest.mark.parametrize("width", [390, 1280])
def test_explanations_stand_below_the_names_where_there_is_no_room_beside_them(
    visit: Visit, tmp_path: Path, width: int
) -> None:
    page = visit(write_results(tmp_path, [summary(perfect, name) for name in ("one", "two", "three")]), width=width)
    table = page.locator(".kind-table", has=page.get_by_role("heading", name="Length in numbers"))
    rows, heads = table.locator("tbody tr"), table.locator("thead th:visible")
    narrow = width < 600
    assert [head.strip(" ↕") for head in heads.all_inner_texts()][-1] == ("three" if narrow else "How to read it")
    explanation = rows.first.locator(".explanation")
    assert explanation.is_visible() is narrow
    if narrow:  # three lines of a value and its interval, or of a name and its fold, and no more
        assert max(row.bounding_box()["height"] for row in rows.all()) < 150
        explanation.locator("summary").click()
        assert "over completions of all prompts" in explanation.inner_text()
        room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert room[0] <= room[1]


def test_the_characters_of_a_point_are_a_whole_number(visit: Visit, tmp_path: Path) -> None:
    page = visit(write_results(tmp_path, [summary(perfect)]))
    figure = page.locator(".kind-scatter").first
    figure.locator(".plot").focus()
    page.keyboard.press("Home")
    assert "characters of the completion 6 · score" in page.locator("#tip").inner_text()
    figure.locator(".numbers summary").click()
    figure.locator(".numbers table").wait_for()
    assert "Mean characters of the completion" in figure.locator(".numbers").inner_text()


def test_what_each_of_many_models_has_for_itself_is_folded(visit: Visit, tmp_path: Path) -> None:
    page = visit(write_results(tmp_path, [summary(perfect, name, count=20) for name in "abcd"]))
    folded = page.locator(".block.folded", has=page.get_by_role("heading", name="Score against length: c"))
    assert folded.count() == 1 and folded.locator(".plot").count() == 0
    links = page.locator(".contents a").all_text_contents()
    assert "Accuracy by which completion is longer" in links and not any(
        "Score against length" in link for link in links
    )
    folded.locator("summary").click()
    folded.locator(".plot svg").wait_for()
    assert folded.locator(".note").inner_text().startswith("A point is a completion.")
    folded.locator("summary").first.click()
    folded.locator("summary").first.click()
    assert folded.locator(".plot").count() == 1  # made once
    three = visit(write_results(tmp_path / "three", [summary(perfect, name, count=20) for name in "abc"]))
    assert three.locator(".block.folded").count() == 0


def test_a_wide_table_has_its_intervals_below_the_values(visit: Visit, tmp_path: Path) -> None:
    cell = {"value": 0.5, "low": 0.4, "high": 0.6}

    def table(count: int) -> dict[str, Any]:
        columns = [{"key": str(n), "label": f"Column {n}", "format": "percent"} for n in range(count)]
        return {
            "kind": "table",
            "title": f"{count}",
            "columns": columns,
            "rows": [{str(n): cell for n in range(count)}],
        }

    page = visit(write_report(tmp_path, "t", [table(3), table(4)], {}))
    assert [page.locator("table").nth(n).get_attribute("class") for n in (0, 1)] == [None, "dense"]
