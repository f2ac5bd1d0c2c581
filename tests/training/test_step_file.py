"""A file of JSON lines is that of a run that was never killed."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from treeward.errors import ConfigError, DataError
from treeward.training.step_file import StepFile, read_steps


def written(path: Path, steps: range, *, resume_step: int | None = None) -> None:
    file = StepFile(path, resume_step=resume_step)
    for step in steps:
        file.append({"step": step, "text": f"completion {step}"})
        file.append({"step": step, "text": "ünïcode 🙂"})
        assert read_steps(path)[-1]["step"] == step  # as soon as it is appended
    file.close()


@pytest.mark.parametrize("tail", ["", '{"step": 7, "te', '{"step": 6, "text": "late"}', '{"step": 9}\n', "\x00\x00"])
@pytest.mark.parametrize("resume_step", [-1, 3, 5])
def test_a_resumed_file_equals_that_of_a_run_that_was_not_killed(tmp_path: Path, tail: str, resume_step: int) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    written(whole, range(9))
    written(killed, range(resume_step + 3))
    with killed.open("a") as file:
        file.write(tail)
    written(killed, range(resume_step + 1, 9), resume_step=resume_step)
    assert killed.read_bytes() == whole.read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_new_run_keeps_the_files_of_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for number in range(3):
        written(path, range(number + 1))
    names = ("samples.1.jsonl", "samples.2.jsonl", "samples.jsonl")
    assert [len(read_steps(tmp_path / name)) for name in names] == [2, 4, 6]


def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str = '{"step": "3"}') -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(DataError) as caught:
        StepFile(path, resume_step=1)
    assert f"{path}:2" in str(caught.value) and line in str(caught.value)
    assert len(path.read_text().splitlines()) == 3  # it is as it was


def test_a_full_disk_is_told_and_the_file_goes_on_when_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    file = StepFile(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(ConfigError, match=r"samples\.jsonl cannot be written(?s:.*)make room"):
            for step in range(100):
                file.append({"step": step, "text": "x" * 90})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.close()
    kept = len(read_steps(path))
    file = StepFile(path, resume_step=99)
    file.append({"step": 200})
    assert [one["step"] for one in read_steps(path)] == [*range(kept), 200]
