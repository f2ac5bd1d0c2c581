"""`write_results`: from summaries to results.json, report.json and report.html.

    write_results(Path("results/eval"), [summarize(suite, scored, "my-model")])

`results.json` holds for each model and suite the suite's own numbers (headline, sections, subsets) and the diagnostics,
each with its interval and its number of examples.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from treeward.errors import DataError
from treeward.evaluation.chapters import chapter, opening
from treeward.evaluation.examples import to_row
from treeward.evaluation.findings import standing, verdict
from treeward.evaluation.report.build import write_report
from treeward.evaluation.results import Block
from treeward.evaluation.summary import Summary
from treeward.storage import write_text
from treeward.version import VERSION


def write_results(output: Path, summaries: Sequence[Summary], *, subtitle: str = "") -> Path:
    """Write results.json and the report; returns the path of the report.

    `subtitle`: what a reader must know of the scores, below the title. Raises `DataError` where they cannot be written.
    """
    content: dict[str, Any] = {
        "treeward_version": VERSION,
        "date": datetime.now(UTC).date().isoformat(),
        "results": [_plain(summary) for summary in summaries],
    }
    content |= {"notes": subtitle} if subtitle else {}
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_text(output / "results.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        title = "Evaluation of " + ", ".join(dict.fromkeys(summary.model for summary in summaries))
        return write_report(output, title, report_blocks(summaries), _rows(summaries), subtitle=subtitle)
    except OSError as error:
        raise DataError("the results cannot be written", where=str(output), got=str(error)) from error


def report_blocks(summaries: Sequence[Summary]) -> list[Block]:
    """The report: the findings first, then each suite in turn."""
    suites = list(dict.fromkeys(summary.suite for summary in summaries))
    blocks = opening(summaries)
    for suite in suites:
        blocks += chapter([one for one in summaries if one.suite == suite], only=len(summaries) == 1)
    return blocks


def _rows(summaries: Sequence[Summary]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each suite's table of examples: the most confident mistakes first."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for summary in summaries:
        own = rows.setdefault(summary.suite, [])
        own += [to_row(one) | {"model": summary.model} for one in summary.examples]
    for own in rows.values():
        own.sort(key=lambda row: (row["margin"] is None, row["margin"] or 0.0))
    return rows


def _plain(summary: Summary) -> dict[str, Any]:
    return {
        "model": summary.model,
        "suite": summary.suite,
        "verdict": verdict(summary).replace("**", "", 2),
        "chance": summary.chance,
        "standing": standing(summary.result, summary.chance),
        "caveat": summary.caveat,
        **{key: value for key, value in dataclasses.asdict(summary.result).items() if key != "suite"},
        "diagnostics": {
            name: list(map(dataclasses.asdict, one.metrics())) for name, one in summary.diagnostics.items()
        },
    }
