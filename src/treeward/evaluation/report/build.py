"""`write_report`: a template and its numbers become one HTML page that needs nothing else.

    write_report("out", "evaluation/best_of_n/bon_page.html", "Best of n: my-model", page)
    # out/report.html (open it from the disk, send it by mail) and out/report.json with the same
    # numbers

A page is a frozen dataclass of numbers. Its template has the words and the layout: it extends
`base.html`, which is the frame of every page, and uses the parts in `macros.html`. Charts come from
`charts`. They are drawn by Vega (`vega.js`, which `docs/vega_bundle.py` makes), and the table of
examples by DataTables (from itables), both embedded. The content security policy lets the page load
nothing, and run only these.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources, util
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from treeward.errors import DataError
from treeward.evaluation.report import charts, examples, intervals, tables
from treeward.formatting import format_number
from treeward.storage import write_text

_MOST_NUMBERS = 200  # rows of a figure's table; the JSON has all of them
_LONG_COMPLETION = 900  # characters; a longer completion is folded, and a reader opens the rest
# Characters that are invisible or reorder their neighbours, and halves of surrogate pairs; not the
# joiners of emoji.
_HIDDEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)


def write_report(
    folder: str | Path,
    template: str,
    title: str,
    page: Any,
    *,
    subtitle: str = "",
    name: str = "report",
    files: Mapping[str, Any] | None = None,
) -> Path:
    """Write report.html and report.json into `folder`, which is made where it is not there; returns
    the page's path.

    `page`: the dataclass of the template's numbers. `name` stands for "report" in both files'
    names. `files`: further JSON files by name, written first. Raises `DataError` where they cannot
    be written.
    """
    folder = Path(folder)
    numbers = {"title": title, "subtitle": subtitle} | plain(page)
    try:
        # The page comes last: who waits for it finds its numbers beside it.
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in (files or {}).items():
            write_text(folder / file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        write_text(folder / f"{name}.json", json.dumps(numbers, allow_nan=False) + "\n")
        html = build_report(template, title, page, subtitle=subtitle, name=name)
        write_text(folder / f"{name}.html", html)
    except OSError as error:
        raise DataError(
            "the results cannot be written",
            where=str(folder),
            got=str(error),
            need="a folder that can be written",
        ) from error
    return folder / f"{name}.html"


def build_report(
    template: str, title: str, page: Any, *, subtitle: str = "", name: str = "report"
) -> str:
    """The page, as the text of an HTML file in UTF-8."""
    return (
        _environment()
        .get_template(template)
        .render(
            page=page,
            title=title,
            subtitle=subtitle,
            json_name=f"{name}.json",
            document=Document(),
        )
    )


def plain(value: Any, of_text: Callable[[str], str] = str) -> Any:
    """`value` as JSON holds it: dataclasses become objects, arrays of numpy become lists, and
    numbers that are not finite become None.

    `of_text`: applied to every text.
    """
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        value = {field.name: getattr(value, field.name) for field in fields}
    if isinstance(value, Mapping):
        return {of_text(str(key)): plain(item, of_text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, of_text) for item in value]
    if isinstance(value, str):
        return of_text(value)
    # An array of numpy, or one of its numbers.
    if hasattr(value, "tolist"):
        return plain(value.tolist(), of_text)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True, slots=True)
class Heading:
    """`parts`: those of a chapter."""

    id: str
    title: str
    level: int
    parts: list[Heading] = field(default_factory=list)


class Document:
    """What a page turns out to have while its template is rendered: headings, which its contents
    list, and the scripts that it needs."""

    def __init__(self) -> None:
        self.headings: list[Heading] = []
        self.scripts: list[Markup] = []
        self.table_style = Markup("")
        self._num_headings = 0
        self._chapter: Heading | None = None

    def chapter(self, title: str) -> Heading:
        """A heading of the second level, to which the parts after it belong."""
        # The first level is the page's title.
        self._chapter = self._heading(title, 2)
        self.headings.append(self._chapter)
        return self._chapter

    def part(self, title: str, *, is_listed: bool = True) -> Heading:
        """The heading of a part of a chapter, or before the first chapter. `is_listed`: in the
        contents."""
        heading = self._heading(title, 2 if self._chapter is None else 3)
        siblings = self.headings if self._chapter is None else self._chapter.parts
        if is_listed:
            siblings.append(heading)
        return heading

    def _heading(self, title: str, level: int) -> Heading:
        self._num_headings += 1
        return Heading(f"part-{self._num_headings}", title, level)

    def need_charts(self) -> None:
        """The page has a chart."""
        # From a file: vl-convert, which has it too, starts V8, and that ends the process where its
        # address space is limited.
        self._add(f'"use strict";{_safe_script(_resource("vega.js"))}')

    def need_table(self) -> None:
        """The page has a table of examples."""
        self.table_style = Markup(_bundled("dt_bundle.css"))
        self._add(_datatables())

    def finish(self) -> None:
        """The page's own script comes after those of the libraries."""
        self._add(_resource("page.js"))

    def _add(self, script: str) -> None:
        # Each once, however many charts there are. It is not escaped, because it is text of ours
        # and of libraries, and none of a user.
        if script not in self.scripts:
            self.scripts.append(Markup(script))

    @property
    def policy(self) -> str:
        """The content security policy: these scripts and nothing else."""
        allowed = []
        for script in self.scripts:
            digest = hashlib.sha256(script.encode()).digest()
            allowed.append(f"'sha256-{base64.b64encode(digest).decode()}'")
        return (
            "default-src 'none'; style-src 'unsafe-inline'; "
            f"script-src {' '.join(allowed)}; img-src data:; base-uri 'none'; form-action 'none'"
        )


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        # The whole package, because each template lies beside the code that fills it.
        loader=jinja2.PackageLoader("treeward", "."),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,  # a misspelt number is an error, and not an empty cell
        trim_blocks=True,
        lstrip_blocks=True,
        # `{% do %}` calls a method of `document` without writing its value.
        extensions=["jinja2.ext.do"],
    )
    environment.filters |= {
        "number": format_number,
        # For a script of the page, where `<` could end the script: it is escaped.
        "json": lambda value: jinja2.utils.htmlsafe_json_dumps(plain(value, _visible)),
    }
    environment.globals |= {
        "is_number": intervals.is_number,
        "interval_text": intervals.interval_text,
        "bar_chart": charts.bar_chart,
        "curve_chart": charts.curve_chart,
        "chart_theme": charts.THEME,
        "column": tables.TableColumn,
        "table_layout": tables.table_layout,
        "cell_text": tables.cell_text,
        "example_rows": examples.example_rows,
        "messages": examples.messages,
        "prompt_text": examples.prompt_text,
        "OUTCOMES": examples.OUTCOMES,
        "MOST_NUMBERS": _MOST_NUMBERS,
        "LONG_COMPLETION": _LONG_COMPLETION,
        "style": Markup(_resource("page.css")),
    }
    return environment


def _visible(value: Any) -> Any:
    """What a template puts on the page: every hidden character of a text becomes its name, as
    U+202E in brackets."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return _HIDDEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", value.replace("\r\n", "\n"))


@cache
def _datatables() -> str:
    # The bundle is a module, whose exports the page's script could not name. So its last statement,
    # the export, becomes an assignment to the window.
    bundle = _bundled("dt_bundle.js")
    bundle = re.sub(r"export\{.*?(\w+) as default.*?\}", r"window.DataTable=\1;", bundle)
    return _safe_script(f"(() => {{{bundle}}})();")


@cache
def _bundled(name: str) -> str:
    spec = util.find_spec("itables")  # importing it would import pandas
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / "html" / name).read_text(encoding="utf-8")


def _resource(name: str) -> str:
    # `read_text` makes every line end "\n". A browser does the same to a carriage return, and the
    # hash of the policy would not be that of what it runs.
    return resources.files("treeward.evaluation.report").joinpath(name).read_text(encoding="utf-8")


def _safe_script(text: str) -> str:
    # In HTML both of these would end or change the script wherever they are in it, within a text
    # of JavaScript too.
    return text.replace("<!--", "<\\!--").replace("</script", "<\\/script").replace("\r\n", "\n")
