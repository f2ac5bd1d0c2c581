"""The results of a data check: results.json with every number, report.html with its report.json.

write_check(Path("results/data"), checked)      # returns the path of the page
summary_rows(checked)                           # what, number and share: the short table of the terminal
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeward.data.datasets import RowDataset
from treeward.data.preference import last_text
from treeward.errors import DataError
from treeward.evaluation.data_check.findings import Finding, Overlap
from treeward.evaluation.data_check.reading import TRAITS, rows_of
from treeward.evaluation.report.blocks import bar_item, bars_block, table_block
from treeward.evaluation.report.build import write_report
from treeward.evaluation.results import Block, Metric
from treeward.storage import write_text
from treeward.version import VERSION

_MOST_SHOWN = 50  # rows of one finding, with their texts
_EXCERPT = 400


@dataclass(frozen=True)
class DataCheck:
    """What a check found. `numbers`: see `findings.numbers_of`; `lengths`: `findings.losses_at`. `tokenizer`: whose
    tokens are counted. `streams`: the data, to show rows of it."""

    files: tuple[str, ...]
    tokenizer: str
    numbers: dict[str, Any]
    lengths: list[dict[str, Any]]
    findings: list[Finding]
    errors: list[DataError]
    overlaps: list[Overlap]
    streams: tuple[RowDataset, ...]


def summary_rows(checked: DataCheck) -> list[dict[str, Any]]:
    """The numbers that everybody asks for first."""
    numbers, longer = checked.numbers, checked.numbers["style"]["longer"]
    rows, completions, tokens = numbers["rows"], numbers["completions"], numbers["tokens"]
    listed: list[tuple[str, int, int | None]] = [
        ("comparisons", rows, None),
        ("broken rows", numbers["broken"], rows + numbers["broken"]),
        ("different prompts", numbers["prompts"], None),
        ("completions", completions, None),
        ("messages of the prompts", numbers["turns"], None),
        ("tokens", tokens, None),
        ("tokens of the longest conversation", numbers["tokens_longest"], None),
        ("tokens that a prefix tree saves", tokens - numbers["tree_tokens"], tokens),
        *((f"completions with a grade {name}", count, completions) for name, count in numbers["grades"].items()),
        ("ties", numbers["ties"], rows),
        ("repeated comparisons", numbers["duplicates"], rows),
        ("contradicted labels", numbers["contradictions"], rows),
        ("completions that seem cut short", numbers["stops_early"], completions),
        ("pairs in which the better completion is longer", _counted(longer), longer.count),
        *((f"examples of {one.name} in the data", len(one.flagged), len(one.flags)) for one in checked.overlaps),
    ]
    return [{"what": what, "number": number, "share": None if of is None else number / max(1, of)}
            for what, number, of in listed]  # fmt: skip


def _counted(share: Metric) -> int:
    return round((share.value or 0.0) * (share.count or 0))


def write_check(folder: Path, checked: DataCheck) -> Path:
    """Write results.json, report.json and report.html; returns the path of the page."""
    content = {
        "treeward_version": VERSION,
        "files": checked.files,
        "tokenizer": checked.tokenizer,
        "numbers": checked.numbers | {"style": list(map(dataclasses.asdict, checked.numbers["style"].values()))},
        "lengths": checked.lengths,
        "findings": [dataclasses.asdict(one) | {"why": one.why, "fix": one.fix} for one in checked.findings],
        "overlap": [{"set": one.name} | dataclasses.asdict(flag) for one in checked.overlaps for flag in one.flagged],
        "broken": list(map(_error, checked.errors)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "results.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    title, subtitle = f"Data check of {', '.join(checked.files)}", f"Tokens of {checked.tokenizer}."
    return write_report(folder, title, list(_blocks(checked)), {}, subtitle=subtitle)


def _blocks(checked: DataCheck) -> Iterator[Block]:
    said = [f"- **{one.text}** {one.why} {one.fix}" for one in checked.findings]
    yield {"kind": "text", "markdown": "\n".join(said) or "Nothing was found."}
    columns = {"what": ("What", "text"), "number": ("Number", "integer"), "share": ("Share", "percent")}
    yield table_block("Numbers", columns, summary_rows(checked))
    items = [bar_item(f"{TRAITS[name][0]}", metric) for name, metric in checked.numbers["style"].items()]
    note = "Of the pairs of one prompt that differ in it; 50% is even. Intervals: as many pairs as prompts, at most."
    yield bars_block("The better completion ...", {", ".join(checked.files): items}, note)
    titles = {"dropped": "Comparisons left out", "too_long": "With a completion too long"}
    titles["identical_if_cut"] = "Same if cut at the end"
    columns = {"length": ("Tokens at most", "integer")} | {name: (said, "percent") for name, said in titles.items()}
    note = "Left out: with data.truncation=drop. The last column is for toolkits that cut the end of a conversation."
    yield table_block("Limits of the length", columns, checked.lengths, note)
    if checked.errors:
        columns = {name: (name.capitalize(), "text") for name in ("where", "problem", "field", "got", "need", "fix")}
        yield table_block("Broken rows", columns, list(map(_error, checked.errors)), most=10)
    for one in checked.overlaps:
        columns = {"id": ("Example", "text"), "prompt": ("Of the prompt", "percent")}
        columns["completion"] = ("Of a completion", "percent")
        rows = list(map(dataclasses.asdict, one.flagged[:_MOST_SHOWN]))
        note = "The share of words that the data has in the same runs."
        yield from [table_block(f"Examples of {one.name} in the data", columns, rows, note, most=10)] if rows else []
    yield from _row_tables(checked)


def _row_tables(checked: DataCheck) -> Iterator[Block]:
    """The first rows of each finding that names rows of the data, with their texts."""
    of_rows = [one for one in checked.findings if one.rows and one.name != "broken" and "overlap" not in one.name]
    texts = _excerpts(checked.streams, {where for one in of_rows for where in one.rows[:_MOST_SHOWN]})
    names = {"where": "Row", "prompt": "Prompt", "better": "Better", "worse": "Worse"}
    for one in of_rows:
        columns = {name: (label, "text") for name, label in names.items()}
        rows = [{"where": where.rpartition("/")[2], **texts.get(where, {})} for where in one.rows[:_MOST_SHOWN]]
        yield table_block(one.name.replace("_", " ").capitalize(), columns, rows, one.text, most=10)


def _excerpts(streams: Iterable[RowDataset], wanted: set[str]) -> dict[str, dict[str, str]]:
    """Prompt, best and worst completion of the rows, which are read again."""
    found: dict[str, dict[str, str]] = {}
    for preference, where in rows_of(streams) if wanted else ():
        if where in wanted:
            by_rank = sorted(preference.completions, key=lambda one: one.rank)
            sides = {"prompt": preference.context, "better": by_rank[0].messages, "worse": by_rank[-1].messages}
            found[where] = {name: last_text(messages)[:_EXCERPT] for name, messages in sides.items()}
            if len(found) == len(wanted):
                break
    return found


def _error(error: DataError) -> dict[str, Any]:
    got = None if error.got is None else str(error.got)[:_EXCERPT]
    return {"where": error.where, "problem": error.summary, "field": error.field, "got": got, "need": error.need,
            "fix": error.fix}  # fmt: skip
