from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeward.errors import ConfigError
from treeward.training.order import EpochOrder, TrainingOrder

# The order is one of rows, whatever they are: here a row says which it is.
sizes = st.lists(st.integers(1, 12), min_size=1, max_size=3)
batch_sizes = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)


def order_of(sizes: list[int], **options: Any) -> TrainingOrder:
    rows: list[Any] = [[(dataset, row) for row in range(size)] for dataset, size in enumerate(sizes)]
    return TrainingOrder(rows, **options)


def epoch_of(order: TrainingOrder, epoch: int) -> list[Any]:
    start = epoch * order.steps_per_epoch
    return [row for step in range(start, start + order.steps_per_epoch) for row in order.comparisons(step)]


@settings(deadline=None)
@given(sizes, batch_sizes, seeds, st.booleans(), st.integers(0, 3))
def test_an_epoch_holds_every_comparison_exactly_once(
    sizes: list[int], batch_size: int, seed: int, shuffle: bool, epoch: int
) -> None:
    order = order_of(sizes, seed=seed, batch_size=batch_size, shuffle=shuffle)
    seen = epoch_of(order, epoch)
    assert Counter(seen) == Counter((d, row) for d, size in enumerate(sizes) for row in range(size))
    if not shuffle:
        assert seen == sorted(seen)


@settings(deadline=None)
@given(st.data(), sizes, batch_sizes, seeds)
def test_a_weight_is_how_often_each_comparison_comes_in_an_epoch(
    data: st.DataObject, sizes: list[int], batch_size: int, seed: int
) -> None:
    # Half of a single row would be none at all.
    weights = [data.draw(st.sampled_from([1.0, 2.0, 3.0] if size == 1 else [0.5, 1.0, 1.5, 2.0])) for size in sizes]
    order = order_of(sizes, weights=weights, seed=seed, batch_size=batch_size, shuffle=data.draw(st.booleans()))
    counts = Counter(epoch_of(order, 1))
    for dataset, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        times = [counts[dataset, row] for row in range(size)]
        assert sum(times) == round(size * weight)
        assert all(int(weight) <= time <= int(weight) + 1 for time in times)


@settings(deadline=None)
@given(sizes, batch_sizes, seeds, st.integers(0, 40))
def test_episodes_count_what_the_steps_have_seen(sizes: list[int], batch_size: int, seed: int, steps: int) -> None:
    order = order_of(sizes, seed=seed, batch_size=batch_size)
    assert order.episodes(steps) == sum(len(order.comparisons(step)) for step in range(steps))
    assert all(0 < len(order.comparisons(step)) <= batch_size for step in range(steps))


def test_a_half_is_another_half_each_epoch_and_not_the_beginning_of_the_file() -> None:
    order = order_of([40], weights=[0.5], seed=3, batch_size=20, shuffle=False)
    first, second = order.comparisons(0), order.comparisons(1)
    assert len(first) == len(second) == 20
    assert first != second
    assert set(first) != {(0, row) for row in range(20)}


def test_weights_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="leaves no comparison of its set"):
        order_of([10], weights=[0.01], seed=0, batch_size=4)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 40), max_size=6),
    st.integers(0, 50),
)
def test_rows_are_drawn_one_epoch_after_the_other_whatever_each_step_takes(
    sizes: list[int], seed: int, steps: list[int], start: int
) -> None:
    order, num_rows = EpochOrder(sizes, seed=seed), sum(sizes)
    assert sorted(order.take(2 * num_rows, num_rows)) == list(range(num_rows))
    uninterrupted = order.take(0, start + sum(steps))
    resumed, drawn = EpochOrder(sizes, seed=seed), start
    for count in steps:  # steps need not be alike: dynamic sampling draws more in some
        assert resumed.take(drawn, count) == uninterrupted[drawn : drawn + count]
        drawn += count
    plain = EpochOrder([3], seed=0, shuffle=False)
    assert plain.take(2, 8) == [2, 0, 1, 2, 0, 1, 2, 0] and plain.take(1, 0) == []
