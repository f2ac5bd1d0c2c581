"""`build_report`: blocks of numbers and the examples behind them as one HTML page that needs nothing else.

    write_report("out", "my-model", [{"kind": "headline", "items": [{"label": "accuracy", "value": 0.71}]}], {})
    # out/report.html (open it from the disk, send it by mail) and out/report.json with the same numbers

`blocks` has the kinds of blocks, `charts` makes figures of them, `page.html` is the page. Everything but the charts and
the table of examples is HTML when the page arrives. Charts are drawn by Vega (from vl-convert), and long tables by
DataTables (from itables); both are embedded once. The content security policy lets the page load nothing, and run only
these scripts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources, util
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markdown_it import MarkdownIt
from markupsafe import Markup

from treeward.evaluation.report.blocks import check_blocks, format_interval, format_number, is_number, plain
from treeward.evaluation.report.charts import THEME, draw
from treeward.evaluation.report.examples import OUTCOMES, example_rows, filters, messages, prompt_text
from treeward.storage import write_text

__all__ = ["build_report", "write_report"]

_FIGURES = ("bars", "histogram", "reliability", "scatter", "curves")
_MOST_ROWS = 50
_MOST_NUMBERS = 200
_LONG_TEXT, _LONG_COMPLETION = 280, 900
_WIDE_COLUMNS = 3
# Characters that are invisible or reorder their neighbours, and halves of surrogate pairs; not the joiners of emoji.
_HIDDEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)
_MARKDOWN = MarkdownIt("zero").enable(["backticks", "emphasis", "list"])


def build_report(
    title: str,
    blocks: Sequence[Mapping[str, Any]],
    examples: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    subtitle: str = "",
) -> str:
    """The page, as the text of an HTML file in UTF-8.

    `examples`: by the name that a block of kind `examples` gives as its `source`, rows of `examples.jsonl`.
    Raises `DataError` for a block that cannot be shown, naming the nearest kind or field.
    """
    return _page(_report(title, blocks, examples, subtitle), "report")


def write_report(
    folder: str | Path,
    title: str,
    blocks: Sequence[Mapping[str, Any]],
    examples: Mapping[str, Sequence[Mapping[str, Any]]],
    *,
    subtitle: str = "",
    name: str = "report",
) -> Path:
    """Write report.html and report.json into `folder`, which is made where it is not there; returns the page's path.

    `name` stands for "report" in both files' names. report.json: {"title", "subtitle", "blocks", "examples"}, None for
    a number that is not finite. A report that is already there is replaced whole or not at all. Raises as
    `build_report`.
    """
    report = _report(title, blocks, examples, subtitle)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{name}.json", json.dumps(report, allow_nan=False) + "\n")
    write_text(folder / f"{name}.html", _page(report, name))
    return folder / f"{name}.html"


def _report(
    title: str,
    blocks: Sequence[Mapping[str, Any]],
    examples: Mapping[str, Sequence[Mapping[str, Any]]],
    subtitle: str,
) -> dict[str, Any]:
    check_blocks(blocks, tuple(examples))
    return {
        "title": title,
        "subtitle": subtitle,
        "blocks": plain(blocks, "blocks"),
        "examples": plain(examples, "examples"),
    }


def _page(report: Mapping[str, Any], name: str) -> str:
    shown = _visible(report)
    sections, has_charts, has_tables = [], False, False
    for number, block in enumerate(shown["blocks"], start=1):
        section = dict(block) | {"id": f"block-{number}", "opens": block["kind"] == "text" and bool(block.get("title"))}
        if block["kind"] in _FIGURES:
            section["figure"] = draw(block)
            has_charts = True
        elif block["kind"] == "table":
            section |= {"long": len(block["rows"]) > block.get("most", _MOST_ROWS)}
            has_tables |= section["long"]
        elif block["kind"] == "examples":
            rows = shown["examples"][block["source"]]
            section |= {"examples": example_rows(rows), "filters": filters(rows)}
            has_tables = True
        sections.append(section)
    scripts = [
        *([_vega()] if has_charts else []),
        *([_datatables()] if has_tables else []),
        _own("page.js"),
    ]
    return _environment().get_template("page.html").render(
        report=shown,
        json_name=f"{name}.json",
        sections=sections,
        contents=_contents(sections),
        theme=THEME,
        style=Markup(_own("page.css")),
        table_style=Markup(_bundled("dt_bundle.css") if has_tables else ""),
        scripts=[Markup(script) for script in scripts],
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {' '.join(map(_hash, scripts))}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
    )  # fmt: skip


def _contents(sections: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The titles of the page: chapters, each with its parts."""
    entries: list[dict[str, Any]] = []
    in_chapter = False
    for one in sections:
        if not one.get("title") or one.get("folded"):
            continue
        if in_chapter and not one["opens"]:
            entries[-1]["parts"].append(one)
        else:
            entries.append({"section": one, "parts": []})
        in_chapter = in_chapter or one["opens"]
    return entries


# --- what the templates call -----------------------------------------------------------------------------------------


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("treeward.evaluation.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": format_number, "markdown": lambda text: Markup(_MARKDOWN.render(text))}
    environment.globals |= {
        "cell": _cell, "is_number": is_number, "interval": format_interval, "messages": messages, "shade": _shade,
        "table_layout": _table_layout, "prompt_text": prompt_text, "LONG": _LONG_COMPLETION, "MOST": _MOST_NUMBERS,
        "PAGE": _MOST_ROWS, "OUTCOMES": OUTCOMES,
    }  # fmt: skip
    return environment


def _table_layout(columns: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The columns with what their cells share: whole numbers have no decimals if the column has nothing else.

    `is_dense` of the first: with many columns, intervals stand below their values.
    """
    found = []
    with_interval = 0
    for column in columns:
        values = [row.get(column["key"]) for row in rows]
        form = column.get("format") or "text"
        cells = [value for value in values if isinstance(value, Mapping)]
        with_interval += any(is_number(cell.get("low")) for cell in cells)
        if form == "number" and not cells and all(value == round(value) for value in values if is_number(value)):
            form = "integer"
        found.append({
            "key": column["key"], "label": column.get("label") or column["key"], "format": form,
            "is_text": (column.get("format") or "text") == "text", "explains": column.get("explains"),
        })  # fmt: skip
    dense = with_interval > _WIDE_COLUMNS or len(columns) > 2 * _WIDE_COLUMNS
    return [{**column, "is_dense": dense} for column in found]


def _cell(value: Any, column: Mapping[str, Any]) -> dict[str, Any]:
    """A table's cell: its `value` and `range` as text, what it is ordered by, and the `rest` of a long text."""
    form = "number" if column["is_text"] else column["format"]
    if isinstance(value, Mapping):
        shown, interval = format_interval(value, value.get("format") or form)
        return {"value": shown, "range": interval, "order": value.get("value"), "rest": None}
    if value is None or isinstance(value, bool | int | float):
        shown = str(value).lower() if isinstance(value, bool) else format_number(value, form)
        return {"value": shown, "range": "", "order": value, "rest": None}
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    long = len(text) > _LONG_TEXT
    short = f"{' '.join(text[:_LONG_TEXT].split())}…" if long else text
    return {"value": short, "range": "", "order": None, "rest": text if long else None}


def _shade(block: Mapping[str, Any], value: Any) -> int:
    """How dark a cell of a matrix is, in percent."""
    known = [one for row in block["values"] for one in row if is_number(one)]
    usual = (0, 1) if block.get("format") == "percent" else (min(0, *known, 0), max(0, *known, 0))
    low, high = block.get("range") or usual
    share = (value - low) / ((high - low) or 1) if is_number(value) else 0.0
    return round(62 * float(min(max(share, 0.0), 1.0)))


def _visible(value: Any) -> Any:
    """`value` with every hidden character of its texts replaced by its name, as U+202E in brackets."""
    if isinstance(value, str):
        return _HIDDEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", value.replace("\r\n", "\n"))
    if isinstance(value, Mapping):
        return {_visible(key): _visible(item) for key, item in value.items()}
    return [_visible(item) for item in value] if isinstance(value, list) else value


# --- scripts ---------------------------------------------------------------------------------------------------------


@cache
def _vega() -> str:
    bundle = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # the default is missing in its stubs
    return f'"use strict";{_safe_script(bundle)}'


@cache
def _datatables() -> str:
    # A module's exports are no names of the page: the bundle's own end is replaced by one that makes them such.
    bundle = _bundled("dt_bundle.js")
    names = re.search(r"export\{.*?(\w+) as default.*?\}", bundle)
    assert names is not None, "itables has changed how its bundle exports DataTables"
    return _safe_script(f"(() => {{{bundle.replace(names[0], f'window.DataTable={names[1]};')}}})();")


def _bundled(name: str) -> str:
    spec = util.find_spec("itables")  # importing it would import pandas
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "html" / name).read_text(encoding="utf-8")


def _own(name: str) -> str:
    # Universal newlines: a carriage return would be normalised by the browser and the hash would not match.
    return resources.files("treeward.evaluation.report").joinpath(name).read_text(encoding="utf-8")


def _safe_script(text: str) -> str:
    return text.replace("<!--", "<\\!--").replace("</script", "<\\/script").replace("\r\n", "\n")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
