"""Strata: an interval is not narrower because two pairs share a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from treeward.evaluation.diagnostics.replies import Pairs
from treeward.evaluation.diagnostics.strata import Strata, stratify


def strata(prompts: list[int]) -> Strata:
    """30 pairs whose better reply is longer, all right, and 30 whose better reply is shorter, 29 of them right."""
    margins = np.array([1.0] * 59 + [-1.0])
    better, worse = np.repeat([200.0, 50.0], 30), np.full(60, 100.0)
    numbers = np.arange(60)
    sides = np.tile([0, 1], (60, 1))
    pairs = Pairs(margins, better, worse, np.array(prompts), numbers, sides)
    return stratify(pairs, better, worse)


def test_a_shared_prompt_does_not_make_a_stratum_that_is_all_right_certain() -> None:
    apart, shared = strata(list(range(60))), strata([*range(59), 0])
    # Resampling alone can hardly make the 59 right ones wrong, and says 0.95 and more.
    for name in ("controlled", "gap"):
        one, other = getattr(apart, name), getattr(shared, name)
        assert one.value == other.value
        assert one.value == pytest.approx({"controlled": 59 / 60, "gap": 1 / 30}[name])
        assert other.low <= one.low + 0.01 and other.high >= one.high - 0.01
