"""`RunningStatistics`: those of all numbers, in any order. The log of rewards is tested as NeMo Gym uses it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeward.serving.running import RunningStatistics

SCORES = st.floats(-100, 100)


@given(st.lists(st.lists(SCORES, max_size=6), max_size=6), st.randoms())
@settings(max_examples=50)
def test_running_statistics(batches: list[list[float]], random: Any) -> None:
    seen = [value for batch in batches for value in batch]
    ordered, shuffled = RunningStatistics(), RunningStatistics()
    for batch in batches:
        ordered.update(batch)
        shuffled.update(random.sample(batch, len(batch)))
    for statistics in (ordered, shuffled):
        assert statistics.count == len(seen)
        if seen:
            assert statistics.mean == pytest.approx(np.mean(seen), abs=1e-10)
            assert statistics.std == pytest.approx(np.std(seen), abs=1e-6)
    far = RunningStatistics()
    for i in range(1000):  # a small spread of large numbers
        far.update([1e6 + i / 1000])
    assert far.std == pytest.approx(np.std(np.arange(1000) / 1000), rel=1e-6)
