"""`treeward score --workers`: two workers of Ray Data write what one process writes, whatever
happens to them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from treeward.cli.main import main
from treeward.scoring.scorer import Scorer

ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"What is {i // 3} plus two? " * 3,
        "responses": ["Two.", "It is " * (i % 7 or i % 70)],
        "id": i,
    }
    for i in range(600)
]


@pytest.fixture
def score(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, bytes]]:
    """`treeward score` of a file: its exit code, and the file that it wrote or wrote in part."""

    def run(
        model: str, data: str, *options: str, output: str = "scores.jsonl"
    ) -> tuple[int, bytes]:
        path = tmp_path / output
        code = main(["score", model, "--data", data, "--output", str(path), *options])
        return code, (
            path if path.exists() else path.with_name("scores.partial.jsonl")
        ).read_bytes()

    return run


@pytest.mark.slow
def test_two_workers_go_on_where_one_process_stopped(
    score: Any,
    signed_model: Any,
    ray: Any,
    write_rows: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bytes, failed rows too; rows of a prompt are in one chunk, and it is scored in any
    process alike."""
    data = str(write_rows("in.jsonl", ROWS))
    model = f"{{models: {signed_model()}, shaping: {{length_penalty: {{threshold: 9}}}}}}"
    code, want = score(model, data, output="want.jsonl")
    assert code == 1 and b"too long to score" in want  # some rows have no score
    calls = []
    whole = Scorer.score

    def interrupted(self: Scorer, *arguments: Any, **keys: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(self, *arguments, **keys)

    monkeypatch.setattr(Scorer, "score", interrupted)
    assert score(model, data)[0] == 130
    assert (tmp_path / "scores.partial.jsonl").read_bytes().count(b"\n") == 256
    assert score(model, data, "--workers", "2") == (code, want)
    assert not (tmp_path / "scores.partial.jsonl").exists()


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_nothing(
    score: Any,
    signed_model: Any,
    ray: Any,
    write_rows: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Of an ensemble, and of the rows before a wrong one, which is named."""
    data = str(write_rows("in.jsonl", [*ROWS * 3, "{not json", *ROWS]))
    members = f"[{signed_model()}, {signed_model(seed=4)}]"
    model = f"{{models: {members}, ensemble: {{method: worst, standardize: false}}}}"
    code, want = score(model, data)
    assert code == 2 and want.count(b"\n") == 1800
    rows = tmp_path / "scores.partial.jsonl"
    rows.unlink()
    has_ended = threading.Event()
    killed = []

    def kill_one() -> None:
        """Once there are rows."""
        while not (rows.exists() and rows.stat().st_size) and not has_ended.wait(0.01):
            pass
        workers = [
            one
            for one in psutil.process_iter(["cmdline"])
            if "_Worker" in " ".join(one.info["cmdline"] or ())
        ]
        killed.append(workers[0].pid)
        os.kill(workers[0].pid, signal.SIGKILL)

    accident = threading.Thread(target=kill_one)
    accident.start()
    try:
        assert score(model, data, "--workers", "2") == (code, want)
    finally:
        has_ended.set()
        accident.join()
    error = capfd.readouterr().err
    assert killed and f"{data}:1801" in error and "Traceback" not in error
