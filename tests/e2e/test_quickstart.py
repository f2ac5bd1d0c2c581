"""`make quickstart`, as a newcomer runs it: in a process and a folder of its own, twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def quickstart(folder: Path) -> str:
    command = [sys.executable, str(REPOSITORY / "examples" / "quickstart.py")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def test_it_learns_the_data_and_its_bias_and_may_be_repeated(tmp_path: Path) -> None:
    first = quickstart(tmp_path)
    lines = (tmp_path / "logs" / "quickstart" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = [record for record in map(json.loads, lines) if "eval/rm/accuracy" in record][-1]
    plain, controlled = (last[f"validation-{name}/accuracy"] for name in ("plain", "length_controlled"))
    assert plain >= 0.90
    assert controlled <= plain - 0.05, "the planted length bias is not seen"
    assert "Put the answer in square brackets" in first and "Next" in first
    again = quickstart(tmp_path)
    assert again == first  # nothing is trained again, and the exported model scores as before
