"""The tables of data sets in `docs/data.md` and `docs/process_rewards.md`, from
`config/dataset_table.py`; a test holds the pages to it.

python docs/data_tables.py    # writes both
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from treeward.config.dataset_table import COMPARISONS, PROMPTS, STEP_FORMATS, KnownDataset

PAGE = Path(__file__).parent / "data.md"
STEPS_PAGE = Path(__file__).parent / "process_rewards.md"


def data_tables(page: str) -> str:
    """The page with its tables, between `<!-- begin NAME -->` and `<!-- end NAME -->`, generated
    anew."""
    formats = ["| Keys of a row | Read by `dataset_name` | `score` adds |", "|---|---|---|"]
    # Forms of one's own files first; within them the order in which a row is compared with them.
    for known in sorted(COMPARISONS, key=lambda known: known.brings_data):
        if not known.forms:
            continue
        added = "`scores`" if known.rating is None else "`score`"
        for row in known.rows:
            formats.append(f"| {row} | `{known.name}` | {added} |")
    page = _with_table(page, "formats", formats)

    hub = ["| `dataset_name` | Data | Splits |", "|---|---|---|"]
    for known in COMPARISONS:
        if known.brings_data:
            hub.append(f"| {_names(known)} | {_source(known)} | {_splits(known)} |")
    page = _with_table(page, "hub", hub)

    prompts = ["| `dataset_name` | A row | Without a `data_path` |", "|---|---|---|"]
    for known in PROMPTS:
        source = f"{_source(known)}, {_splits(known)}" if known.brings_data else ""
        for row in known.rows:
            prompts.append(f"| {_names(known)} | {row} | {source} |")
    return _with_table(page, "prompts", prompts)


def step_table(page: str) -> str:
    """The page about process reward models with its table generated anew."""
    lines = ["| Keys of a row | Read by `dataset_name` |", "|---|---|"]
    for known in STEP_FORMATS:
        for row in known.rows:
            lines.append(f"| {row} | `{known.name}` |")
    return _with_table(page, "steps", lines)


def _names(known: KnownDataset) -> str:
    return ", ".join(f"`{name}`" for name in (known.name, *known.aliases))


def _source(known: KnownDataset) -> str:
    return known.hub_path or "comes with treeward"


def _splits(known: KnownDataset) -> str:
    splits = dict.fromkeys([known.train_split, *known.validation_splits.values()])
    return ", ".join(f"`{split}`" for split in splits)


def _with_table(page: str, name: str, lines: Iterable[str]) -> str:
    begin = f"<!-- begin {name} -->"
    end = f"<!-- end {name} -->"
    head, rest = page.split(begin, 1)
    _, tail = rest.split(end, 1)
    table = "\n".join(lines)
    return f"{head}{begin}\n\n{table}\n\n{end}{tail}"


if __name__ == "__main__":
    PAGE.write_text(data_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    STEPS_PAGE.write_text(step_table(STEPS_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
