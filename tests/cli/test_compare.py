from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from verbs import call

from treeward.cli import compare
from treeward.errors import ConfigError, DataError


def row(key: int, margin: float | None, *, subset: str = "chat") -> dict[str, object]:
    """As `treeward eval` writes it."""
    return {
        "id": str(key),
        "subset": subset,
        "scores": [margin, None if margin is None else 0.0],
        "ranks": [0, 1],
        "lengths": [5, 4],
        "num_tokens": [9, 8],
        "errors": [None, None],
        "context": [{"role": "user", "content": f"Question\n{key}?"}],
        "completions": [[{"role": "assistant", "content": text}] for text in ("Good.", "Bad.")],
    }


def write(folder: Path, rows: Sequence[dict[str, object]]) -> Path:
    folder.mkdir(parents=True)
    (folder / "examples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return folder.parent


def run(*words: str | Path) -> int:
    return call(compare.run, *words)


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Of 40 examples one model has all right, the other has 30; the second subset is where they differ."""
    subsets = ["easy" if n < 20 else "hard" for n in range(40)]
    mine = [row(n, 1.0 + n, subset=subsets[n]) for n in range(40)]
    other = [row(n, -1.0 if n >= 30 else 1.0, subset=subsets[n]) for n in range(40)]
    return write(tmp_path / "mine" / "suite", mine), write(tmp_path / "other" / "suite", other)


@pytest.mark.slow
def test_table(models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*models, "--disagreements", "3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "set" and "only mine" in lines[0]
    cells = {line.split()[0]: line.split() for line in lines[2:5]}
    assert cells["all"][1:5] == ["40", "100.0%", "75.0%", "+25.0%"]
    assert cells["all"][8:11] == ["10", "0", "0.002"]
    assert cells["hard"][1:5] == ["20", "100.0%", "50.0%", "+50.0%"] and cells["hard"][-1] == "0.0039"
    assert cells["easy"][-2:] == ["1", "1"]
    text = "\n".join(lines)
    assert "mine is right more often than other: p = 0.002 over 40 examples." in text
    assert "p (Holm) is corrected for looking at 2 parts." in text
    assert "The 3 of 10 examples furthest apart" in text
    assert lines[-4].startswith("suite / hard, id 37: only mine is right (mine +") and ", other -" in lines[-4]
    assert [" ".join(line.split()) for line in lines[-3:]] == ["prompt: Question 37?", "better: Good.", "worse: Bad."]


def test_json(models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*models, "--json", "--disagreements", "0") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["names"] == ["mine", "other"]
    assert content["overall"]["difference"]["value"] == 0.25
    assert content["overall"]["p_value"] == 2 / 2**10
    assert (content["disagreements"], content["num_disagreements"]) == ([], 10)


def test_mistakes(models: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="same evaluation"):
        run(models[0], models[0])
    with pytest.raises(DataError, match="no evaluation here"):
        run(models[0], tmp_path / "absent")
