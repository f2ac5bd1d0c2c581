from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from messages import assistant, user, write_jsonl
from verbs import Command


def row(key: int, margin: float, *, subset: str) -> dict[str, Any]:
    """As `treeward eval` writes it."""
    return {
        "id": str(key),
        "subset": subset,
        "scores": [margin, 0.0],
        "ranks": [0, 1],
        "lengths": [5, 4],
        "num_tokens": [9, 8],
        "errors": [None, None],
        "context": [user(f"Question\n{key}?")],
        "completions": [[assistant(text)] for text in ("Good.", "Bad.")],
    }


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Of 40 examples one model has all right, the other has 30; the second subset is where they
    differ.
    """
    margins = {"mine": [1.0 + n for n in range(40)], "other": [1.0] * 30 + [-1.0] * 10}
    for name, own in margins.items():
        (tmp_path / name / "suite").mkdir(parents=True)
        rows = [row(n, margin, subset="easy" if n < 20 else "hard") for n, margin in enumerate(own)]
        write_jsonl(tmp_path / name / "suite" / "examples.jsonl", *rows)
    return tmp_path / "mine", tmp_path / "other"


def test_table(treeward: Command, models: tuple[Path, Path]) -> None:
    lines = treeward("compare", *models).out.splitlines()
    assert lines[0].split("  ")[0] == "set"
    assert "only mine" in lines[0]
    cells = {line.split()[0]: line.split() for line in lines[2:5]}
    assert cells["all"][1:5] == ["40", "100.0%", "75.0%", "+25.0%"]
    assert cells["all"][8:11] == ["10", "0", "0.002"]
    assert cells["hard"][1:5] == ["20", "100.0%", "50.0%", "+50.0%"]
    assert cells["hard"][-1] == "0.0039"
    assert cells["easy"][-2:] == ["1", "1"]
    text = "\n".join(lines)
    assert "mine is correct more often than other: p = 0.002 over 40 examples." in text
    assert "corrected for looking at 2 parts" in text


def test_json(treeward: Command, models: tuple[Path, Path]) -> None:
    content = json.loads(treeward("compare", *models, "--json").out)
    assert content["names"] == ["mine", "other"]
    assert content["overall"]["difference"]["value"] == 0.25
    assert content["overall"]["p_value"] == 2 / 2**10


def test_mistakes(treeward: Command, models: tuple[Path, Path], tmp_path: Path) -> None:
    assert "same evaluation" in treeward("compare", models[0], models[0]).err
    assert "no evaluation here" in treeward("compare", models[0], tmp_path / "absent").err
