"""`build_report`: blocks of numbers and the examples behind them as one HTML page that needs nothing else.

    write_report("out", "my-model", [{"kind": "headline", "items": [{"label": "accuracy", "value": 0.71}]}], {})
    # out/report.html (open it from the disk, send it by mail) and out/report.json with the same numbers

`charts` makes figures of blocks, `page.html` is the page. Charts are drawn by Vega (`vega.js`, which
`docs/vega_bundle.py` makes), and the table of examples by DataTables (from itables), both embedded. The content
security policy lets the page load nothing, and run only these.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources, util
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jinja2
from markdown_it import MarkdownIt
from markupsafe import Markup

from treeward.data.conversation import Message, last_text
from treeward.errors import DataError
from treeward.evaluation.report.blocks import format_interval, is_number, plain
from treeward.evaluation.report.charts import THEME, draw
from treeward.evaluation.results import Block
from treeward.formatting import ABSENT, format_number
from treeward.storage import write_text

Examples = Mapping[str, Sequence[Mapping[str, Any]]]

_MOST_NUMBERS = 200
_LONG_COMPLETION = 900
_WIDE_COLUMNS = 3
# Characters that are invisible or reorder their neighbours, and halves of surrogate pairs; not the joiners of emoji.
_HIDDEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)
_MARKDOWN = MarkdownIt("zero").enable(["backticks", "emphasis", "list"])


def write_report(
    folder: str | Path,
    title: str,
    blocks: Sequence[Block],
    examples: Examples,
    *,
    subtitle: str = "",
    name: str = "report",
    files: Mapping[str, Any] | None = None,
) -> Path:
    """Write report.html and report.json into `folder`, which is made where it is not there; returns the page's path.

    `name` stands for "report" in both files' names. `files`: further JSON files by name, written first. Raises
    `DataError` where they cannot be written.
    """

    report = {"title": title, "subtitle": subtitle, "blocks": blocks, "examples": examples}
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in (files or {}).items():
            write_text(folder / file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        write_text(folder / f"{name}.json", json.dumps(plain(report), allow_nan=False) + "\n")
        write_text(folder / f"{name}.html", build_report(**report, name=name))  # type: ignore[arg-type]
    except OSError as error:
        need = "a folder that can be written"
        raise DataError("the results cannot be written", where=str(folder), got=str(error), need=need) from error
    return folder / f"{name}.html"


def build_report(
    title: str, blocks: Sequence[Block], examples: Examples, *, subtitle: str = "", name: str = "report"
) -> str:
    """The page, as the text of an HTML file in UTF-8.

    `examples`: by the name that a block of kind `examples` gives as its `source`, rows of `examples.jsonl`.
    """
    shown = plain({"title": title, "subtitle": subtitle, "blocks": blocks, "examples": examples}, _visible)
    sections = list(_sections(shown["blocks"], shown["examples"]))
    has_examples = any(section["kind"] == "examples" for section in sections)
    scripts = [_vega()] if any("figure" in section for section in sections) else []
    scripts += [*([_datatables()] if has_examples else []), _resource("page.js")]
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return _environment().get_template("page.html").render(
        report=shown,
        json_name=f"{name}.json",
        sections=sections,
        theme=THEME,
        style=Markup(_resource("page.css")),
        table_style=Markup(_bundled("dt_bundle.css") if has_examples else ""),
        scripts=[Markup(script) for script in scripts],
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
    )  # fmt: skip


def _visible(text: str) -> str:
    """The text with every hidden character replaced by its name, as U+202E in brackets."""
    return _HIDDEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", text.replace("\r\n", "\n"))


def _sections(blocks: Sequence[Block], examples: Examples) -> Iterator[Block]:
    """The blocks with what the template needs to show them; `is_part`: the id of the chapter that they belong to."""
    chapter = None
    for number, block in enumerate(blocks, start=1):
        opens = block["kind"] == "text" and bool(block.get("title"))
        section = block | {"id": f"block-{number}", "opens": opens, "is_part": None if opens else chapter}
        chapter = section["id"] if opens else chapter
        if block["kind"] in ("bars", "curves"):
            section["figure"] = draw(block)
        elif block["kind"] == "examples":
            section["examples"] = example_rows(examples[block["source"]])
        yield section


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
        "cell": _cell, "is_number": is_number, "interval": format_interval, "messages": messages,
        "table_layout": _table_layout, "prompt_text": prompt_text, "LONG": _LONG_COMPLETION, "MOST": _MOST_NUMBERS,
        "OUTCOMES": OUTCOMES,
    }  # fmt: skip
    return environment


def _table_layout(columns: Sequence[Block], rows: Sequence[Block]) -> list[Block]:
    """The columns with what their cells share: whole numbers have no decimals if the column has nothing else.

    `is_dense`: with many columns, intervals stand below their values. `is_wide`: on a narrow screen each row is a list,
    because its cells do not fit side by side.
    """
    layout, with_interval = [], 0
    for column in columns:
        values, form = [row.get(column["key"]) for row in rows], column.get("format") or "text"
        with_interval += any(isinstance(value, Mapping) and is_number(value.get("low")) for value in values)
        is_whole = all(is_number(value) and value == round(value) for value in values if value is not None)
        shown = "integer" if form == "number" and is_whole else form
        label = column.get("label") or column["key"]
        layout.append({**column, "label": label, "format": shown, "is_text": form == "text"})
    dense = with_interval > _WIDE_COLUMNS or len(columns) > 2 * _WIDE_COLUMNS
    side_by_side = [column for column in columns if not column.get("explains")]
    wide = len(side_by_side) > _WIDE_COLUMNS
    return [column | {"is_dense": dense, "is_wide": wide} for column in layout]


def _cell(value: Any, column: Block) -> Block:
    """A table's cell: its `value` and `range` as text."""
    if isinstance(value, str):
        return {"value": value, "range": ""}
    item = value if isinstance(value, Mapping) else {"value": value}
    form = item.get("format") or ("number" if column["is_text"] else column["format"])
    shown, interval = format_interval(item, form, size=column.get("size"))
    return {"value": shown, "range": interval}


@cache
def _vega() -> str:
    return f'"use strict";{_safe_script(_resource("vega.js"))}'


@cache
def _datatables() -> str:
    # A module's exports are no names of the page: the bundle's own end is replaced by one that makes them such.
    bundle = re.sub(r"export\{.*?(\w+) as default.*?\}", r"window.DataTable=\1;", _bundled("dt_bundle.js"))
    return _safe_script(f"(() => {{{bundle}}})();")


def _bundled(name: str) -> str:
    spec = util.find_spec("itables")  # importing it would import pandas
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "html" / name).read_text(encoding="utf-8")


def _resource(name: str) -> str:
    # Universal newlines: a carriage return would be normalised by the browser and the hash would not match.
    return resources.files("treeward.evaluation.report").joinpath(name).read_text(encoding="utf-8")


def _safe_script(text: str) -> str:
    return text.replace("<!--", "<\\!--").replace("</script", "<\\/script").replace("\r\n", "\n")


OUTCOMES = {"wrong": "✗ wrong", "tie": "= tie", "right": "✓ right", "failed": "! failed", "none": "· no order"}
"""The outcomes of an example in the order of the table, and how they are shown."""


def example_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows as the page's table shows them; `share` is the size of the margin, the widest of all being 1."""
    widest = max((abs(row["margin"]) for row in rows if is_number(row.get("margin"))), default=1.0) or 1.0
    shown_rows = []
    for row in rows:
        margin, outcome = row.get("margin"), row.get("outcome") or "none"
        shown = {key: ABSENT if row.get(key) is None else str(row[key]) for key in ("id", "subset", "model")}
        shown_rows.append(shown | {
            "outcome": outcome, "rank": list(OUTCOMES).index(outcome),
            "margin": margin, "share": abs(margin or 0.0) / widest,
            "context": messages(row.get("context")), "prompt": prompt_text(row.get("context")),
            "completions": _completions(row),
        })  # fmt: skip
    return shown_rows


def messages(value: Sequence[Message] | None) -> list[dict[str, str]]:
    """Messages as role and text."""
    return [{"role": message.get("role", ""), "text": last_text([message])} for message in value or ()]


def prompt_text(context: Any) -> str:
    """The last message of the user, or the last of all."""
    shown = messages(context)
    last = shown[-1]["text"] if shown else ""
    return next((message["text"] for message in reversed(shown) if message["role"] == "user"), last)


def _completions(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The completions by rank, each with its name, whether it is better, and its numbers."""
    ranks = row.get("ranks") or []
    distinct = sorted(set(ranks))
    highest = max((score for score in row.get("scores") or () if score is not None), default=None)
    columns = (row.get(name) or () for name in ("completions", "scores", "lengths", "num_tokens", "errors"))
    shown = []
    for i, (completion, score, length, num_tokens, error) in enumerate(zip_longest(*columns)):
        place = distinct.index(ranks[i]) if i < len(ranks) and len(distinct) > 1 else None
        name = "Tied" if len(ranks) > 1 else "Completion"
        if place is not None:
            name = "Worse completion" if place else "Better completion"
            name = f"Rank {place + 1} of {len(distinct)}" if len(distinct) > 2 else name
        shown.append({
            "name": name, "is_better": place == 0, "place": place or 0, "score": score, "length": length,
            "is_chosen": len(ranks) > 1 and score is not None and score == highest, "num_tokens": num_tokens,
            "error": error, "messages": messages(completion),
        })  # fmt: skip
    return sorted(shown, key=lambda completion: completion["place"])
