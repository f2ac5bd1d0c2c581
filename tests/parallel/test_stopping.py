from __future__ import annotations

import signal

import pytest

from treeward.parallel import stopping
from treeward.parallel.stopping import StopRequest


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_a_request(number: signal.Signals, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.reason is None
        signal.raise_signal(number)
        assert stop.reason == number.name
        assert stop.exit_code == code
        # The second one is for whoever had it before: it ends the process.
        assert signal.getsignal(number) == before
    assert signal.getsignal(number) == before
    assert f"{number.name}: finishing this step" in capfd.readouterr().err


def test_the_deadline_counts_from_the_construction_or_from_the_command_that_started_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert StopRequest(deadline_seconds=0.0).reason == "checkpoint_must_save_by"
    assert StopRequest(deadline_seconds=0.0).exit_code == 0
    assert StopRequest(deadline_seconds=1e6).reason is None
    monkeypatch.setattr(stopping, "seconds_before", 1e6)
    assert StopRequest(deadline_seconds=1e6).reason == "checkpoint_must_save_by"
