"""Which rows a step sees is a function of the step, and every row has its turn."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeward.config.run import RMConfig
from treeward.errors import ConfigError
from treeward.training.order import EpochOrder, planned_steps

sizes = st.lists(st.integers(1, 12), min_size=1, max_size=3)
batch_sizes = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("most", "steps"), [(500, 120), (120, 120), (50, 50), (None, 120)])
def test_a_run_says_when_its_data_ends_first(
    most: int | None, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "treeward.training"):
        assert planned_steps(RMConfig(max_num_epochs=3, max_num_steps=most), 120, "rm") == steps
    said = (
        "The data ends after 120 steps (rm.max_num_epochs=3): rm.max_num_steps=500 is never reached"
    )
    assert (said in caplog.text) == (most == 500)


def epoch_of(order: EpochOrder, size: int, epoch: int) -> list[tuple[int, int]]:
    start = epoch * order.steps_per_epoch(size)
    rows: list[Any] = []
    for step in range(start, start + order.steps_per_epoch(size)):
        rows += order.batch(step, size)
    return rows


@given(st.data(), sizes, batch_sizes, seeds, st.booleans())
def test_a_weight_is_how_often_each_row_comes_in_an_epoch(
    data: st.DataObject, sizes: list[int], size: int, seed: int, shuffle: bool
) -> None:
    # Half of a single row would be none at all.
    weights = []
    for size in sizes:
        choices = [1.0, 2.0, 3.0] if size == 1 else [0.5, 1.0, 1.5, 2.0]
        weights.append(data.draw(st.sampled_from(choices)))
    counts = Counter(
        epoch_of(EpochOrder(sizes, weights=weights, seed=seed, shuffle=shuffle), size, 1)
    )
    for dataset, (length, weight) in enumerate(zip(sizes, weights, strict=True)):
        times = [counts[dataset, row] for row in range(length)]
        assert sum(times) == round(length * weight)
        assert all(int(weight) <= time <= int(weight) + 1 for time in times)
    plain = epoch_of(EpochOrder(sizes, seed=seed, shuffle=shuffle), size, 2)
    everything = []
    for dataset, length in enumerate(sizes):
        everything += [(dataset, row) for row in range(length)]
    assert sorted(plain) == everything and (shuffle or plain == everything)


@given(sizes, batch_sizes, seeds, st.integers(0, 40))
def test_what_the_steps_have_seen_is_counted(
    sizes: list[int], size: int, seed: int, steps: int
) -> None:
    order = EpochOrder(sizes, seed=seed)
    lengths = [len(order.batch(step, size)) for step in range(steps)]
    assert order.num_seen(steps, size) == sum(lengths) and all(
        0 < length <= size for length in lengths
    )


def test_a_half_is_another_half_each_epoch_and_not_the_beginning_of_the_file() -> None:
    order = EpochOrder([40], weights=[0.5], seed=3, shuffle=False)
    first = order.batch(0, 20)
    second = order.batch(1, 20)
    assert len(first) == len(second) == 20 and first != second
    assert set(first) != {(0, row) for row in range(20)}
    with pytest.raises(ConfigError, match="leaves no comparison of its set"):
        EpochOrder([10], weights=[0.01], seed=0)
    with pytest.raises(ConfigError, match="leaves no prompt of its set") as caught:
        EpochOrder([10], weights=[0.01], seed=0, together=2, what="prompt")
    assert "sets of [10] prompts" in str(caught.value)


@given(sizes, seeds, st.lists(st.integers(0, 40), max_size=6), st.integers(0, 50))
def test_rows_are_drawn_one_epoch_after_the_other_whatever_each_step_takes(
    sizes: list[int], seed: int, steps: list[int], start: int
) -> None:
    order = EpochOrder(sizes, seed=seed)
    num_rows = sum(sizes)
    assert sorted(order.take(2 * num_rows, num_rows)) == list(range(num_rows))
    uninterrupted = order.take(0, start + sum(steps))
    resumed = EpochOrder(sizes, seed=seed)
    drawn = start
    for count in steps:  # steps need not be alike: dynamic sampling draws more in some
        assert resumed.take(drawn, count) == uninterrupted[drawn : drawn + count]
        drawn += count
    plain = EpochOrder([3], seed=0, shuffle=False)
    assert plain.take(2, 8) == [2, 0, 1, 2, 0, 1, 2, 0] and plain.take(1, 0) == []
