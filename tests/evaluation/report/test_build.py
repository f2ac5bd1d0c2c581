"""The report's file: what is embedded, what is refused, what is written beside it."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import itertools
import json
import math
import re
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_sample import HOSTILE, sample_report

from treeward.errors import DataError
from treeward.evaluation.report.blocks import BLOCK_KINDS, format_number
from treeward.evaluation.report.build import build_report, write_report


class Page(html.parser.HTMLParser):
    """The elements of a page and the text of its scripts and style sheet, as a parser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.raw.append((tag, ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in ("script", "style"):
            tag, text = self.raw[-1]
            self.raw[-1] = (tag, text + data)
        else:
            self.texts.append(data)


def table(rows: list[dict[str, Any]], title: str = "t") -> dict[str, Any]:
    return {"kind": "table", "title": title, "columns": [{"key": "a", "label": "A"}], "rows": rows}


def test_written_json_equals_the_blocks_and_what_is_embedded(tmp_path: Path) -> None:
    report = sample_report()
    page = write_report(tmp_path / "new" / "folder", **report)
    assert page == tmp_path / "new" / "folder" / "report.html"
    assert sorted(path.name for path in page.parent.iterdir()) == ["report.html", "report.json"]
    written = json.loads((page.parent / "report.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert written["title"] == report["title"] and written["subtitle"] == report["subtitle"]
    assert written["examples"] == report["examples"]
    assert [block["kind"] for block in written["blocks"]] == [block["kind"] for block in report["blocks"]]
    histogram = next(block for block in report["blocks"] if block["kind"] == "histogram")
    same = next(block for block in written["blocks"] if block["kind"] == "histogram")
    assert same["edges"] == histogram["edges"].tolist()
    assert same["series"][1]["counts"] == histogram["series"][1]["counts"].tolist()
    embedded = Page(page.read_text(encoding="utf-8")).raw[1]
    assert json.loads(embedded[1]) == written


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_escapes_its_place(text: str) -> None:
    page_text = build_report(
        text,
        [
            {"kind": "headline", "items": [{"label": text, "value": 1.0}]},
            {"kind": "text", "markdown": text},
            table([{"a": text}], text),
            {"kind": "examples", "title": text, "source": text},
        ],
        {text: [{"id": text, "subset": text, "completions": [[{"role": text, "content": text}]]}]},
        subtitle=text,
    )
    page_text.encode()  # no half of a surrogate pair is left
    page = Page(page_text)
    empty = Page(build_report("t", [table([{"a": 1}])], {}))
    inside = {"table", "tr", "th", "td"}  # the headline for readers without scripts
    assert [tag for tag, _ in page.tags if tag not in inside] == [tag for tag, _ in empty.tags if tag not in inside]
    assert len(page.raw) == 3
    data = json.loads(page.raw[1][1])
    assert data["title"] == data["blocks"][1]["markdown"] == text
    assert data["examples"][text][0]["completions"][0][0]["content"] == text
    assert not re.search("[\x00-\x08\x7f-\x9f\u2028\u2029\u202a-\u202e]", page.raw[1][1])
    assert not re.search("[\x00-\x08\x7f-\x9f\ud800-\udfff]", page_text)
    if "\x07" not in text:
        assert text in page.texts  # the heading, whole


def test_the_policy_allows_this_style_and_script_and_nothing_else() -> None:
    page = Page(build_report("t", [], {}))
    policy = next(attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    for tag, text in (page.raw[0], page.raw[2]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    addresses = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("href", "src")]
    assert sorted(map(str, addresses)) == ["#main", "data:,", "report.json"]


def test_both_files_may_have_another_name(tmp_path: Path) -> None:
    page = write_report(tmp_path, "t", [table([{"a": 1}])], {}, name="rl & more")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rl & more.html", "rl & more.json"]
    link = next(attributes for tag, attributes in Page(page.read_text()).tags if attributes.get("id") == "json")
    assert link["href"] == link["download"] == "rl & more.json"


def test_our_own_files_hold_nothing_that_ends_their_element() -> None:
    for file in resources.files("treeward.evaluation.report").iterdir():
        if file.name.endswith((".js", ".css")):
            text = file.read_text(encoding="utf-8")
            assert "</s" not in text.lower() and "<!--" not in text
            assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("absent", [None, float("nan"), float("inf"), -math.inf, np.float32("nan"), np.float64("inf")])
def test_what_is_no_number_is_none_in_the_json_and_a_dash_to_read(absent: Any, tmp_path: Path) -> None:
    assert format_number(absent) == format_number(absent, "percent") == "–"
    items = [{"label": "accuracy", "value": absent, "low": 0.25, "format": "percent"}]
    write_report(tmp_path, "t", [{"kind": "headline", "items": items}, table([{"a": absent}])], {})
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["blocks"][0]["items"][0]["value"] is None and written["blocks"][1]["rows"] == [{"a": None}]
    assert "<td>– (25.0% to –)</td>" in (tmp_path / "report.html").read_text()


def test_numbers_read_as_numbers() -> None:
    cases = {
        (0.7142, "percent"): "71.4%",
        (-0.031, "percent"): "−3.1%",
        (1234567, "integer"): "1,234,567",
        (152.0, "number"): "152",
        (0.0025, "signed"): "+0.00250",
        (-1.5, "number"): "−1.500",
        (-0.00000001, "percent"): "0.0%",
        (2.5e-6, "number"): "2.50e−6",
        (0.0, "signed"): "0.000",
    }
    assert {case: format_number(*case) for case in cases} == cases


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"kind": "histgram", "title": "t"}, "did you mean histogram"),
        ({"title": "t"}, "one of headline, text"),
        ({"kind": "bars", "title": "t", "series": [], "referance": 0.5}, "did you mean reference"),
        ({"kind": "bars", "title": "t"}, "lacks series"),
        (
            {"kind": "table", "title": "t", "columns": [{"key": "a", "format": "percentage"}], "rows": []},
            "did you mean percent",
        ),
        ({"kind": "examples", "title": "t", "source": "reward_bench"}, "did you mean rewardbench"),
        ({"kind": "histogram", "title": "t", "edges": [0, 1, 2], "series": [{"name": "a", "counts": [1]}]}, "2 values"),
        ({"kind": "matrix", "title": "t", "rows": ["a"], "columns": ["b", "c"], "values": [[1]]}, "values[0]"),
        ({"kind": "curves", "title": "t", "series": [{"name": "a", "x": [1, 2], "y": [1]}]}, "series[0].x"),
        ({"kind": "scatter", "title": "t", "series": [{"points": []}]}, "series[0].name"),
        ({"kind": "samples", "title": "t", "items": [{"rows": []}]}, "lacks prompt"),
        (
            {
                "kind": "samples",
                "title": "t",
                "items": [
                    {
                        "prompt": [],
                        "rows": [
                            {
                                "answers": [
                                    {
                                        "label": "a",
                                        "text": "b",
                                        "numbers": [{"label": "c", "value": 1, "format": "sign"}],
                                    }
                                ]
                            }
                        ],
                    }
                ],
            },
            "items[0].rows[0].answers[0]",
        ),
        ({"kind": "text", "markdown": "x", "note": object()}, "blocks[1].note"),
    ],
)
def test_a_block_that_cannot_be_shown_is_refused(block: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)) as raised:
        build_report("t", [{"kind": "text", "markdown": "fine"}, block], {"rewardbench": []})
    assert str(raised.value).startswith("blocks[1]")


def test_the_sample_shows_every_kind() -> None:
    assert {block["kind"] for block in sample_report()["blocks"]} == set(BLOCK_KINDS)


def luminances(colours: str) -> list[float]:
    channels = [
        [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in re.findall(r"#[0-9a-f]{6}", colours)
    ]
    return [sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), map(linear, rgb), strict=True)) for rgb in channels]


def linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def palette() -> dict[str, str]:
    css = resources.files("treeward.evaluation.report").joinpath("page.css").read_text(encoding="utf-8")
    return dict(re.findall(r"--(\w+): light-dark\(([^)]*)\)", css))


@pytest.mark.parametrize(("theme", "name"), [(0, "light"), (1, "dark")])
def test_text_and_marks_have_contrast(theme: int, name: str) -> None:
    light = {key: luminances(colours)[theme] for key, colours in palette().items()}
    ratio = {
        (a, b): (max(light[a], light[b]) + 0.05) / (min(light[a], light[b]) + 0.05)
        for a, b in itertools.permutations(light, 2)
    }
    for paper in ("paper", "surface", "sunken"):  # WCAG 2.2, 1.4.3 and 1.4.11
        for text in ("ink", "soft", "accent", "right", "wrong", "tied"):
            assert ratio[text, paper] >= 4.5, (name, text, paper)
    for mark in ("s0", "s1", "s2", "s3", "s4", "s5", "edge", "focus"):
        assert ratio[mark, "paper"] >= 3 and ratio[mark, "surface"] >= 3, (name, mark)


# Machado, Oliveira and Fernandes (2009), severity 1.
VISION = {
    "normal": np.eye(3),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "tritanopia": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("vision", VISION)
def test_series_are_told_apart_without_some_cones(vision: str, theme: int) -> None:
    to_cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
    to_lab = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    points = []
    for index in range(6):
        colour = re.findall(r"#[0-9a-f]{6}", palette()[f"s{index}"])[theme]
        rgb = np.array([linear(int(colour[i : i + 2], 16) / 255) for i in (1, 3, 5)])
        points.append(to_lab @ np.cbrt(to_cones @ np.clip(VISION[vision] @ rgb, 0, 1)))
    distance = {(a, b): float(np.linalg.norm(points[a] - points[b])) for a, b in itertools.combinations(range(6), 2)}
    assert min(distance.values()) > 0.095, distance  # in Oklab; 0.02 is just seen side by side
