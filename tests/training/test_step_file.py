"""A file of JSON lines is that of a run that was never killed."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from treeward.errors import ConfigError, DataError
from treeward.training.step_file import StepFile, read_steps


def written(path: Path, steps: range, *, resume_step: int | None = None) -> None:
    file = StepFile(path, resume_step=resume_step)
    for step in steps:
        file.append({"step": step, "text": f"answer to {step}"})
        file.append({"step": step, "text": "ünïcode 🙂"})
    file.close()


def test_lines_are_there_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "samples.jsonl"
    file = StepFile(path)
    for step in range(3):
        file.append({"step": step})
        assert read_steps(path) == [{"step": n} for n in range(step + 1)]
    file.close()


@pytest.mark.parametrize("tail", ["", '{"step": 7, "te', '{"step": 6, "text": "late"}', '{"step": 9}\n'])
@pytest.mark.parametrize("resume_step", [-1, 0, 3, 5, 20])
def test_a_resumed_file_equals_that_of_a_run_that_was_not_killed(tmp_path: Path, tail: str, resume_step: int) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    written(whole, range(9))
    written(killed, range(min(resume_step, 5) + 3))
    with killed.open("a") as file:
        file.write(tail if resume_step < 6 else "")
    written(killed, range(resume_step + 1, 9), resume_step=resume_step)
    if resume_step < 6:
        assert killed.read_bytes() == whole.read_bytes()
    else:
        assert len(read_steps(killed)) == 16  # nothing was cut
    assert not list(tmp_path.glob("*.tmp"))


def test_a_new_run_keeps_the_files_of_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for number in range(3):
        written(path, range(number + 1))
    assert [len(read_steps(tmp_path / name)) for name in ("samples.1.jsonl", "samples.2.jsonl", "samples.jsonl")] == [
        2,
        4,
        6,
    ]
    StepFile(tmp_path / "new.jsonl", resume_step=4).close()  # nothing was written before the checkpoint
    assert read_steps(tmp_path / "new.jsonl") == []


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"text": 1}', '{"step": "3"}', '{"step": 1.5}'])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(DataError) as caught:
        read_steps(path)
    assert f"{path}:2" in str(caught.value) and line in str(caught.value)
    with pytest.raises(DataError):
        StepFile(path, resume_step=1)
    assert len(path.read_text().splitlines()) == 3  # it is as it was


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    file = StepFile(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ConfigError, match=r"samples\.jsonl cannot be written") as caught:
            for step in range(100):
                file.append({"step": step, "text": "x" * 90})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "make room" in str(caught.value)
    assert path.stat().st_size == sum(len(json.dumps(one)) + 1 for one in read_steps(path)) <= 1000
    file.append({"step": 200})
    file.close()
    assert [one["step"] for one in read_steps(path)] == [*range(len(read_steps(path)) - 1), 200]


def test_what_json_does_not_hold_is_refused(tmp_path: Path) -> None:
    file = StepFile(tmp_path / "samples.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        file.append({"step": 1, "reward": float("nan")})
    file.close()
    assert (tmp_path / "samples.jsonl").read_bytes() == b""
