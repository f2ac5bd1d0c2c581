from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

import pytest

from treeward.parallel import stopping
from treeward.parallel.stopping import StopRequest


def test_the_deadline_counts_from_the_construction_or_from_the_command_that_started_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert StopRequest(deadline_seconds=0.0).reason == "checkpoint_must_save_by"
    assert StopRequest(deadline_seconds=0.0).exit_code == 0
    assert StopRequest(deadline_seconds=1e6).reason is None
    monkeypatch.setattr(stopping, "seconds_before", 1e6)
    assert StopRequest(deadline_seconds=1e6).reason == "checkpoint_must_save_by"


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_ctrl_c_leaves_at_once(first: signal.Signals) -> None:
    with StopRequest() as stop:
        signal.raise_signal(first)
        assert (stop.agree(), stop.exit_code) == (first.name, 128 + first)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_second_sighup_changes_nothing_until_the_run_has_left() -> None:
    """The shell and the kernel send one each when a terminal closes."""
    before = signal.getsignal(signal.SIGHUP)
    with StopRequest() as stop:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGHUP):
            signal.raise_signal(number)
        assert stop.agree() == "SIGTERM"
    assert signal.getsignal(signal.SIGHUP) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_was_ignored_before_stays_ignored(number: signal.Signals) -> None:
    """As in the background of a script, and under nohup."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(number)
            assert stop.agree() is None
    finally:
        signal.signal(number, before)


def test_a_run_whose_terminal_was_closed_goes_on_to_save() -> None:
    """What it prints meanwhile goes nowhere; to the closed terminal it would be an error."""
    terminal, descriptor = pty.openpty()
    code = (
        "import os, signal, time; from treeward.parallel.stopping import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    print('ready', flush=True)\n"
        "    while not stop.agree(): time.sleep(0.01)\n"
        "    print('saved', flush=True)\n"
        "os._exit(stop.exit_code)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=descriptor, stderr=descriptor)
    os.close(descriptor)
    assert os.read(terminal, 5) == b"ready"
    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 129
