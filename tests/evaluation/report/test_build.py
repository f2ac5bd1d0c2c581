"""The report's files: what is embedded, what is refused, what is written beside it."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_sample
from evaluated import preference, rated
from page_text import Page
from report_sample import HOSTILE, LLMBarLike, sample_report

from treeward.evaluation.best_of_n.analysis import analyse
from treeward.evaluation.best_of_n.bon_page import best_of_n_page
from treeward.evaluation.findings import summarize
from treeward.evaluation.page import evaluation_page
from treeward.evaluation.report import build
from treeward.evaluation.report.build import build_report, plain, write_report
from treeward.evaluation.report.charts import bar_chart
from treeward.evaluation.report.tables import cell_text, table_layout
from treeward.evaluation.results import Metric
from treeward.formatting import format_number
from treeward.rl.logged_run import RLRun
from treeward.rl.report import rl_page
from treeward.rl.watch import Alarm

DOCS = Path(__file__).parents[3] / "docs"


def report_of(kind: str, text: str) -> dict[str, Any]:
    """Keyword arguments of `build_report` for a page whose texts of users are all `text`."""
    message = {"role": text, "content": text}
    if kind == "evaluation":
        summaries = []
        for model in (text, "b"):
            examples = [
                rated(preference(text, text, [message], [text, text]), (1.0, None)),
                rated(preference("2", "other", [message] * 4, [text, "No."]), (1.0, 2.0)),
                rated(preference("3", "third", [message], [text, "No."]), (3.0, 2.0)),
            ]
            summaries.append(summarize(LLMBarLike(), tuple(examples), model))
        return {"template": "evaluation/page.html", "page": evaluation_page(summaries)}
    if kind == "best of n":
        result = analyse([[1.0, 2.0]] * 3, [[2.0, 1.0]] * 3, num_resamples=10)
        return {
            "template": "evaluation/best_of_n/bon_page.html",
            "page": best_of_n_page(result, text, text),
        }
    steps = {
        step: {"validation/reward": 1.0 * step, "validation/kl": 1.0 * step} for step in (0, 1)
    }
    sample = {"step": 1, "prompt": [message], "completions": [{"text": text, "truncated": True}]}
    alarm = Alarm("length_growth", 1, text)
    runs = [RLRun(name, steps, (sample,), (alarm,)) for name in (text, "b")]
    return {"template": "rl/report.html", "page": rl_page(runs)}


KINDS = ("evaluation", "best of n", "rl")


def test_written_json_has_the_numbers_of_the_page(tmp_path: Path) -> None:
    report = sample_report()
    page = write_report(tmp_path / "new" / "folder", **report, name="rl & more")
    assert sorted(path.name for path in page.parent.iterdir()) == [
        "rl & more.html",
        "rl & more.json",
    ]
    written = json.loads(
        (page.parent / "rl & more.json").read_text(encoding="utf-8"), parse_constant=pytest.fail
    )
    for name in ("title", "subtitle"):
        assert written.pop(name) == report[name]
    assert written == plain(report["page"])
    (suite,) = written["suites"]
    assert [model["name"] for model in suite["models"]] == list(report_sample.MODELS)
    assert suite["models"][0]["diagnostics"]["length"]["accuracy_gap"]["value"] > 0
    assert len(suite["examples"]) == report_sample.NUM_EXAMPLES
    link = next(
        attributes
        for _, attributes in Page(page.read_text()).tags
        if attributes.get("id") == "json"
    )
    assert link["download"] == "rl & more.json" and link["href"] == "rl%20%26%20more.json"


def test_texts_of_arrays_are_changed_as_others() -> None:
    value = {"a": np.array(["b", "c"]), "d": np.float64(0.5)}
    assert plain(value, str.upper) == {"A": ["B", "C"], "D": 0.5}


@pytest.fixture
def no_logs() -> Iterator[None]:
    """pytest-xdist cannot send a log with half of a surrogate pair: its worker would die."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def page_with(kind: str, text: str) -> Page:
    built = build_report(title=text, subtitle=text, **report_of(kind, text))
    built.encode()  # no half of a surrogate pair is left
    ours = re.sub("<script>.*?</script>", "", built, flags=re.DOTALL)
    assert not re.search("[\x00-\x08\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]", ours)
    charts = [text for tag, text in Page(ours).raw if tag == "script"]
    assert not re.search(
        "[\x00-\x08\u2028\u202e\ud800-\udfff]", "".join(map(texts_of_json, charts))
    )
    return Page(built)


@pytest.fixture(scope="module")
def harmless_page() -> Callable[[str], Page]:
    """The page of a kind, made once, whose texts are "a"."""
    return cache(partial(page_with, text="a"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_escapes_its_place(
    kind: str, text: str, harmless_page: Callable[[str], Page], no_logs: None
) -> None:
    hostile = page_with(kind, text)
    harmless = harmless_page(kind)
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in harmless.tags]
    if text.isprintable():
        assert any(text in one for one in hostile.texts)


def texts_of_json(script: str) -> str:
    """What a browser reads in it."""
    return json.dumps(json.loads(script), ensure_ascii=False)


@pytest.mark.slow
def test_the_charts_script_is_that_of_the_pinned_vega() -> None:
    sys.path.insert(0, str(DOCS))
    import vega_bundle

    embedded = Path(build.__file__).with_name("vega.js").read_text(encoding="utf-8")
    assert embedded == vega_bundle.bundle(), "python docs/vega_bundle.py"


def test_no_page_needs_v8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reserves gigabytes, which batch systems do not allow: the process would end by a
    signal."""
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
    words = " ".join(map(shlex.quote, [sys.executable, "-c", code, str(tmp_path)]))
    command = f"ulimit -v 8000000; exec {words}"
    environment = os.environ | {"PYTHONPATH": str(Path(report_sample.__file__).parent)}
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "vegaEmbed" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_policy_allows_these_scripts_and_nothing_else() -> None:
    page = Page(build_report(**sample_report()))
    policy = next(
        attributes["content"] for _, attributes in page.tags if attributes.get("http-equiv")
    )
    assert policy is not None and policy.startswith("default-src 'none'; ")
    allowed = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert "unsafe" not in allowed and "http" not in policy and "*" not in policy
    types = [attributes.get("type") for tag, attributes in page.tags if tag == "script"]
    scripts = [text for tag, text in page.raw if tag == "script"]
    ours = [text for text, kind in zip(scripts, types, strict=True) if kind is None]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in ours]
    assert (
        allowed == "script-src " + " ".join(f"'sha256-{digest}'" for digest in digests)
        and len(ours) == 3
    )
    addresses = set()
    for _, attributes in page.tags:
        for name in attributes.keys() & {"href", "src"}:
            addresses.add(str(attributes[name]))
    assert {one for one in addresses if not one.startswith("#")} == {"data:,", "report.json"}


def test_the_numbers_of_a_figure_have_one_number_of_decimals() -> None:
    shifts = {
        "padding": (-0.248, -0.359, -0.147),
        "space": (-0.0071, -0.0567, 0.035),
        "none": (0.00004, -0.1, 0.1),
    }
    metrics = {label: Metric(label, *numbers, 100) for label, numbers in shifts.items()}
    figure = bar_chart({"a model": metrics}, format="signed", reference=0, x_range=(-1, 1))
    shown = [row["words"] for row in figure.rows]
    assert shown[2] == "0.000  (\u22120.100 to +0.100, n = 100)"
    assert shown[1] == "\u22120.007  (\u22120.057 to +0.035, n = 100)"
    columns = table_layout(figure.columns, figure.rows)
    assert [cell_text(figure.rows[1], column)[0] for column in columns[2:]] == [
        "\u22120.007",
        "\u22120.057",
        "+0.035",
        "100",
    ]


@pytest.mark.parametrize(
    "absent", [None, float("nan"), -math.inf, np.float32("nan"), np.float64("inf")]
)
def test_an_unknown_number_is_null_in_the_json_and_a_dash_on_the_page(
    absent: Any, tmp_path: Path
) -> None:
    assert format_number(absent) == format_number(absent, "percent") == "–"
    result = analyse([[1.0, 2.0]] * 3, [[2.0, 1.0]] * 3, num_resamples=10)
    unknown = replace(result, correlation=Metric("correlation", absent, 0.25))
    page = best_of_n_page(unknown, "p", "g")
    page = replace(page, rows=[{**row, "best": absent} for row in page.rows])
    write_report(tmp_path, "evaluation/best_of_n/bon_page.html", "t", page)
    written = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert written["result"]["correlation"]["value"] is None and written["rows"][0]["best"] is None
    texts = [text.strip() for text in Page((tmp_path / "report.html").read_text()).texts]
    assert texts.count("–") == 1 + len(page.rows) and "95% interval +0.250 to –" in texts
