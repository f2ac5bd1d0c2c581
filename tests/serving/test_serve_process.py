"""`treeward serve` as a process: when it listens, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from loopback import wait_until
from messages import chat

CHAT = chat("2 + 2?", "4")

# In place of `treeward`: a model that scores nothing until a file is there.
HELD = """
import os, sys, time
from treeward.cli.main import main
from treeward.scoring.scorer import Scorer

score = Scorer.score_prepared

def score_later(self, items, **options):
    while not os.path.exists({gate!r}):
        time.sleep(0.01)
    return score(self, items, **options)

Scorer.score_prepared = score_later
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_signal_under_load(served_folder: Path, tmp_path: Path) -> None:
    """30 requests wait when it comes: all are answered, nothing new is accepted, and the exit code
    is 0.
    """
    words = ["serve", str(served_folder), "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", HELD.format(gate=str(tmp_path / "gate")), *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    serving = next(line for line in process.stderr if "Serving" in line)
    url = re.search(r"at (http://\S+)", serving)[1]  # type: ignore[index]

    def ask() -> int:
        return httpx.post(
            f"{url}/v1/rewards",
            json={"conversations": [CHAT] * 4},
            timeout=120,
        ).status_code

    def listens() -> bool:
        try:
            return bool(httpx.get(f"{url}/health"))
        except httpx.TransportError:
            return False

    with ThreadPoolExecutor(30) as threads:
        accepted = [threads.submit(ask) for _ in range(30)]
        wait_until(
            lambda: "\ntreeward_queued_conversations 120.0" in httpx.get(f"{url}/metrics").text,
        )
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not listens())
        (tmp_path / "gate").touch()
        assert [one.result() for one in accepted] == [200] * 30
    said = process.stderr.read()
    assert process.wait(60) == 0, said
    assert said.splitlines()[-1].endswith("Shut down."), said
