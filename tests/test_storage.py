from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from treeward.storage import folder_lock, write_text


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
