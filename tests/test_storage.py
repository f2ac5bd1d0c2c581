from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from treeward.storage import atomic_file, folder_lock, write_text


def test_a_kill_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_text(path, "old\n")
    code = (
        "import os, sys; from pathlib import Path; from treeward.storage import atomic_file\n"
        "with atomic_file(Path(sys.argv[1])) as stream:\n"
        "    stream.write('half'); stream.flush(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert path.read_text() == "old\n"


def test_one_holder_of_a_folder(tmp_path: Path) -> None:
    with folder_lock(tmp_path) as first, folder_lock(tmp_path) as second:
        assert (first, second) == (True, False)
    with folder_lock(tmp_path) as again:
        assert again


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_text(path, "old\n")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as stream:
        stream.write(str(1 / 0))
    assert path.read_text() == "old\n" and list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could leave the name of an empty file."""
    done: list[str] = []
    fsync = os.fsync
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append("fsync") or fsync(descriptor))
    monkeypatch.setattr(
        os, "replace", lambda source, target: done.append("replace") or replace(source, target)
    )
    write_text(tmp_path / "run.json", "new\n")
    assert done == ["fsync", "replace", "fsync"]  # the last one is of the folder
