"""Ctrl-C is never lost: wherever it comes, the command ends with 130 and nothing is replaced."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treeward.cli.interrupts import check_interrupts, heeding_interrupts
from treeward.cli.main import main
from treeward.model.contract import CONTRACT_FILE
from treeward.scoring.golden import sign_folder
from treeward.scoring.scorer import Scorer


class Interrupting:
    """Python drops what is raised while it is deleted, and prints `Exception ignored in ...`."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def dropped() -> None:
    Interrupting()


def swallowed() -> None:
    with contextlib.suppress(BaseException):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("lost", [dropped, swallowed])
def test_a_lost_interrupt_is_raised_again(lost: Callable[[], None]) -> None:
    reached = []

    @heeding_interrupts
    def run() -> int:
        lost()
        check_interrupts()
        reached.append("after the check")
        return 0

    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not reached and (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before
    check_interrupts()  # of an earlier command nothing is left


def test_what_python_drops_comes_again_without_being_asked_for() -> None:
    reached = []

    @heeding_interrupts
    def run() -> int:
        dropped()
        for number in range(1000):  # work that knows nothing of interrupts
            reached.append(number)
            time.sleep(0.001)
        return 0

    with pytest.raises(KeyboardInterrupt):
        run()
    assert len(reached) < 1000


def test_one_that_is_swallowed_at_the_very_end_is_the_exit_code() -> None:
    @heeding_interrupts
    def run() -> int:
        swallowed()
        return 0

    with pytest.raises(KeyboardInterrupt):
        run()


def test_an_error_that_comes_of_an_interrupt_is_one() -> None:
    @heeding_interrupts
    def run() -> int:
        swallowed()
        raise ModuleNotFoundError("as transformers says of an import that was cut short")

    with pytest.raises(KeyboardInterrupt):
        run()
    broken = heeding_interrupts(lambda: [][0])
    with pytest.raises(IndexError):
        broken()


def test_other_exceptions_that_cannot_be_raised_are_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)

    class Broken:
        def __del__(self) -> None:
            raise ZeroDivisionError

    @heeding_interrupts
    def run() -> int:
        Broken()
        return 7

    assert run() == 7 and [one.exc_type for one in seen] == [ZeroDivisionError]


def test_where_interrupts_are_ignored_they_stay_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = heeding_interrupts(lambda: signal.raise_signal(signal.SIGINT) or 3)
        assert run() == 3 and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("lost", [dropped, swallowed])
def test_calibrate_that_was_interrupted_during_its_imports_replaces_nothing(
    lost: Callable[[], None],
    model_folder: Path,
    write_rows: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    sign_folder(folder, renderer=Scorer.load(folder, device="cpu", max_length=96).renderer)
    rows = [{"prompt": f"{n}?", "chosen": f"It is {n}.", "rejected": "No." * (n % 3 + 1)} for n in range(6)]
    data = write_rows("held_out.jsonl", rows)
    import_module = importlib.import_module

    def interrupted(name: str, *arguments: Any) -> Any:
        if name == "treeward.scoring.calibration":
            lost()
        return import_module(name, *arguments)

    before = (folder / CONTRACT_FILE).read_bytes()
    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["calibrate", str(folder), "--data", str(data), "--device", "cpu"]) == 130
    assert (folder / CONTRACT_FILE).read_bytes() == before
    assert "interrupted" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["calibrate", str(folder), "--data", str(data), "--device", "cpu"]) == 0
    assert (
        json.loads((folder / CONTRACT_FILE).read_text())["calibration"]
        and (folder / CONTRACT_FILE).read_bytes() != before
    )
