"""The notebook for first contact runs from top to bottom, in an empty folder, and shows what its text says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_reward_model.ipynb"


@pytest.mark.slow  # most of it is the report's charts
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert names["outcome"].validation["held_out"]["accuracy"] > 0.7 and names["outcome"].warning is None
    assert "likes longer completions" in names["report"]["blocks"][0]["markdown"]
    assert sum(names["bonus"]) > 0


def test_its_links_are_there() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    for page in ("pretrained-backbone.md", "scoring.md", "training.md"):
        assert f"../docs/{page}" in text and (NOTEBOOK.parents[1] / "docs" / page).is_file()
