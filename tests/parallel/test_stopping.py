from __future__ import annotations

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
