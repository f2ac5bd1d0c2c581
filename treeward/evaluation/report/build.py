"""`build_report`: blocks of numbers and the examples behind them as one HTML page that needs nothing else.

    write_report("out", "my-model", [{"kind": "headline", "items": [{"label": "accuracy", "value": 0.71}]}], {})
    # out/report.html (open it from the disk, send it by mail) and out/report.json with the same numbers

The block kinds are in `treeward.evaluation.report.blocks`. The page loads nothing, and its content security policy
lets it load nothing: one style sheet and one script, allowed by their hashes, and the data as JSON in which every
character that could end the element, start another or reorder the text is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from treeward.evaluation.report.blocks import check_blocks, format_number, plain

__all__ = ["build_report", "write_report"]

# One script, in the order in which one part uses the other.
_SCRIPTS = ("elements.js", "plots.js", "figures.js", "examples.js", "samples.js", "page.js")

# What ends a script element, line separators, control and format characters (they reorder the text for whoever reads
# the source), byte order marks, and surrogates, which UTF-8 cannot encode.
_UNSAFE = re.compile("[<>&\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff0-\uffff]")


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
    page = folder / f"{name}.html"
    for path, text in ((folder / f"{name}.json", _safe_json(report) + "\n"), (page, _page(report, name))):
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(text, encoding="utf-8", newline="\n")
        os.replace(partial, path)
    return page


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
    style = _resource("page.css")
    script = "\n".join(map(_resource, _SCRIPTS))
    parts = {
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "title": _text(report["title"]),
        "subtitle": _text(report["subtitle"]),
        "json": _text(f"{name}.json"),
        "style": style,
        "headline": _headline(report["blocks"]),
        "data": _safe_json(report),
        "script": script,
    }
    # One pass: what was filled in is never searched for placeholders again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _resource("page.html"))


def _safe_json(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _text(text: str) -> str:
    """`text` for the body of the page: markup escaped, format characters as references, controls replaced."""
    text = re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)
    return _UNSAFE.sub(lambda match: f"&#x{ord(match[0]):x};", html.escape(text).replace("&", "\0")).replace("\0", "&")


def _headline(blocks: Sequence[Mapping[str, Any]]) -> str:
    """The headline numbers as a table, for readers whose browser runs no scripts."""
    rows = []
    for item in (item for block in blocks if block["kind"] == "headline" for item in block["items"]):
        value, low, high = (
            format_number(item.get(key), item.get("format", "number")) for key in ("value", "low", "high")
        )
        interval = f" ({low} to {high})" if item.get("low") is not None else ""
        rows.append(f'<tr><th scope="row">{_text(str(item["label"]))}</th><td>{value}{interval}</td></tr>')
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _resource(name: str) -> str:
    # Universal newlines: a carriage return would be normalised by the browser and the hash would not match.
    return resources.files("treeward.evaluation.report").joinpath(name).read_text(encoding="utf-8")
