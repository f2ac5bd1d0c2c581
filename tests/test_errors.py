"""What errors propose."""

import pickle
from pathlib import Path

import pytest

from treeward.errors import ConfigError, nearest_path


@pytest.mark.parametrize(
    ("missing", "near"),
    [
        ("nosuch.jsonl", None),
        ("tain.jsonl", "train.jsonl"),
        ("train.json", "train.jsonl"),
        ("reslts/final", "results/final"),
    ],
)
def test_a_suffix_alone_is_no_likeness(tmp_path: Path, missing: str, near: str | None) -> None:
    for name in ("null.jsonl", "train.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "results" / "final").mkdir(parents=True)
    assert nearest_path(tmp_path / missing) == (None if near is None else str(tmp_path / near))


def test_a_name_that_is_too_long_has_none_near(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert nearest_path(tmp_path / "dat" / ("a" * 300)) is None


def test_an_error_at_another_place_still_says_that_null_was_given() -> None:
    error = ConfigError("there is no learning rate", field="lr", got=None)
    assert str(error.but(where="run.yaml")) == f"run.yaml: {error}"
    # Also where another process has raised it.
    assert str(pickle.loads(pickle.dumps(error)).but(where="run.yaml")) == f"run.yaml: {error}"
    assert "got" not in str(ConfigError("there is no learning rate").but(where="run.yaml"))


@pytest.mark.parametrize("value", ["two\nlines", "over\rwritten", "\x1b[2Jgone", "half \ud83d", ""])
def test_a_value_is_one_line_that_can_be_written(value: str) -> None:
    [_, line] = str(ConfigError("no such name", got=value)).splitlines()
    assert line == f"  got:   {value!r}" and line.isprintable()
