"""A report's page as a reader's program sees it: `Page(html).tags`, `.raw`, `.texts`, `.text`,
`.rows`."""

from __future__ import annotations

import html.parser


class Page(html.parser.HTMLParser):
    """The elements of a page, the text of its scripts and style sheets, and all other text.

    `text`: all other text with single spaces. `rows`: the cells of the rows of all tables.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.rows: list[list[str]] = []
        self.in_cell = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.raw.append((tag, ""))
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_data(self, data: str) -> None:
        if self.cdata_elem in ("script", "style"):
            self.raw[-1] = (self.raw[-1][0], self.raw[-1][1] + data)
        else:
            self.texts.append(data)
            if self.in_cell:
                self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td"):
            self.in_cell = False

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())
