"""The report's files: what is embedded, what is refused, what is written beside it."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_sample
from report_sample import HOSTILE, sample_report

from treeward.evaluation.report import build
from treeward.evaluation.report.blocks import bars_block, plain
from treeward.evaluation.report.build import build_report, write_report
from treeward.formatting import format_number

DOCS = Path(__file__).parents[3] / "docs"


class Page(html.parser.HTMLParser):
    """The elements of a page, the text of its scripts and style sheets, and all other text."""

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
            self.raw[-1] = (self.raw[-1][0], self.raw[-1][1] + data)
        else:
            self.texts.append(data)


def table(rows: list[dict[str, Any]], title: str = "t") -> dict[str, Any]:
    return {"kind": "table", "title": title, "columns": [{"key": "a", "label": "A"}], "rows": rows}


def test_written_json_equals_the_blocks(tmp_path: Path) -> None:
    report = sample_report()
    page = write_report(tmp_path / "new" / "folder", **report, name="rl & more")
    assert sorted(path.name for path in page.parent.iterdir()) == ["rl & more.html", "rl & more.json"]
    written = json.loads((page.parent / "rl & more.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert {name: written[name] for name in ("title", "subtitle")} == {n: report[n] for n in ("title", "subtitle")}
    assert written["examples"] == report["examples"] and written["blocks"] == plain(report["blocks"])
    curves = [block for block in written["blocks"] if block["kind"] == "curves"][-1]
    assert isinstance(curves["series"][0]["x"], list) and isinstance(curves["series"][0]["x"][0], int)
    link = next(attributes for _, attributes in Page(page.read_text()).tags if attributes.get("id") == "json")
    assert link["download"] == "rl & more.json" and link["href"] == "rl%20%26%20more.json"


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_escapes_its_place(text: str) -> None:
    def page(text: str, body: str) -> Page:
        example = {"id": text, "subset": text, "model": text, "completions": [[{"role": text, "content": body}]]}
        curves = {
            "kind": "curves",
            "title": text,
            "x_label": text,
            "x_ticks": [{"x": 0, "label": text}],
            "lines": [{"x": 0, "label": text}],
            "series": [{"name": text, "x": [0, 1], "y": [0, 1]}],
        }
        blocks = [
            {"kind": "headline", "items": [{"label": text, "value": 1.0, "note": text}]},
            {"kind": "text", "markdown": body},
            {**table([{"a": text}], text), "note": text},
            curves,
            {"kind": "samples", "title": text, "items": [{"prompt": [{"role": text, "content": text}], "rows": [
                {"name": text, "completions": [{"label": text, "text": body, "flags": [text]}]}]}]},
            {"kind": "examples", "title": text, "source": text},
        ]  # fmt: skip
        built = build_report(text, blocks, {text: [example, {**example, "model": "b"}]}, subtitle=text)
        built.encode()  # no half of a surrogate pair is left
        ours = re.sub("<script>.*?</script>", "", built, flags=re.DOTALL)
        assert not re.search("[\x00-\x08\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]", ours)
        return Page(built)

    hostile, plain_one = page(text, "x"), page("a", "x")
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain_one.tags]
    told = page("a", text)
    assert {tag for tag, _ in told.tags} <= {tag for tag, _ in plain_one.tags} | {"code", "strong"}
    if text.isprintable():
        assert any(text in one for one in told.texts)


def test_the_charts_script_is_that_of_the_pinned_vega() -> None:
    sys.path.insert(0, str(DOCS))
    import vega_bundle

    embedded = Path(build.__file__).with_name("vega.js").read_text(encoding="utf-8")
    assert embedded == vega_bundle.bundle(), "python docs/vega_bundle.py"


def test_no_page_needs_v8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reserves gigabytes, which batch systems do not allow: the process would end by a signal."""
    monkeypatch.setitem(sys.modules, "vl_convert", None)  # an import raises
    page = write_report(tmp_path, **sample_report())
    assert "vegaEmbed" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_page_is_made_where_address_space_is_limited(tmp_path: Path) -> None:
    """As batch systems limit it (`ulimit -v`)."""
    code = """
import sys
from report_sample import sample_report
from treeward.evaluation.report.build import write_report
print(write_report(sys.argv[1], **sample_report()))
"""
    command = (
        f"ulimit -v 8000000; exec {shlex.quote(sys.executable)} -c {shlex.quote(code)} {shlex.quote(str(tmp_path))}"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(report_sample.__file__).parent)}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "vegaEmbed" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_policy_allows_these_scripts_and_nothing_else() -> None:
    page = Page(build_report(**sample_report()))
    policy = next(attributes["content"] for _, attributes in page.tags if attributes.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'; ")
    allowed = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert "unsafe" not in allowed and "http" not in policy and "*" not in policy
    types = [attributes.get("type") for tag, attributes in page.tags if tag == "script"]
    scripts = [text for tag, text in page.raw if tag == "script"]
    ours = [text for text, kind in zip(scripts, types, strict=True) if kind is None]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in ours]
    assert allowed == "script-src " + " ".join(f"'sha256-{digest}'" for digest in digests) and len(ours) == 3
    addresses = {
        str(value) for _, attributes in page.tags for name, value in attributes.items() if name in ("href", "src")
    }
    assert {one for one in addresses if not one.startswith("#")} == {"data:,", "report.json"}


def test_the_numbers_of_a_figure_have_one_number_of_decimals() -> None:
    shifts = {"padding": (-0.248, -0.359, -0.147), "space": (-0.0071, -0.0567, 0.035), "none": (0.00004, -0.1, 0.1)}
    items = [
        {"label": label, "value": value, "low": low, "high": high, "count": 100}
        for label, (value, low, high) in shifts.items()
    ]
    series = {"a model": items}
    block = bars_block("Shifts", series, format="signed", reference=0, x_range=[-1, 1])
    page = build_report("A report", [block], {})
    chart = re.findall(r'<div class="plot"[^>]*><script type="application/json">(.*?)</script>', page)[0]
    shown = re.findall(r'"words": "([^"]*)"', chart)
    assert "0.000  (\\u22120.100 to +0.100, n = 100)" in shown
    assert "\\u22120.007  (\\u22120.057 to +0.035, n = 100)" in shown
    cells = re.findall(r'<td class="numeric"[^>]*>([^<]*)', page)
    assert cells[4:8] == ["\u22120.007", "\u22120.057", "+0.035", "100"]


@pytest.mark.parametrize("absent", [None, float("nan"), -math.inf, np.float32("nan"), np.float64("inf")])
def test_an_unknown_number_is_null_in_the_json_and_a_dash_on_the_page(absent: Any, tmp_path: Path) -> None:
    assert format_number(absent) == format_number(absent, "percent") == "–"
    items = [{"label": "accuracy", "value": absent, "low": 0.25, "format": "percent"}]
    write_report(tmp_path, "t", [{"kind": "headline", "items": items}, table([{"a": absent}])], {})
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["blocks"][0]["items"][0]["value"] is None and written["blocks"][1]["rows"] == [{"a": None}]
    texts = [text.strip() for text in Page((tmp_path / "report.html").read_text()).texts]
    assert texts.count("–") == 2 and "95% interval 25.0% to –" in texts
