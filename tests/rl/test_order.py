from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treeward.errors import ConfigError
from treeward.rl.order import PromptOrder

sizes = st.lists(st.integers(1, 12), min_size=1, max_size=3)
seeds = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(sizes, seeds, st.booleans(), st.integers(0, 3))
def test_every_prompt_comes_once_in_an_epoch(sizes: list[int], seed: int, shuffle: bool, epoch: int) -> None:
    order = PromptOrder(sizes, seed=seed, shuffle=shuffle)
    num_prompts = sum(sizes)
    assert order.prompts_per_epoch == num_prompts
    taken = order.take(epoch * num_prompts, num_prompts)
    assert sorted(taken) == list(range(num_prompts))
    if not shuffle:
        assert taken == list(range(num_prompts))


@settings(deadline=None)
@given(sizes, seeds, st.lists(st.integers(0, 40), max_size=6), st.integers(0, 50))
def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(
    sizes: list[int], seed: int, steps: list[int], start: int
) -> None:
    uninterrupted = PromptOrder(sizes, seed=seed).take(0, start + sum(steps))
    resumed, drawn = PromptOrder(sizes, seed=seed), start
    for count in steps:  # steps need not be alike: dynamic sampling draws more in some
        assert resumed.take(drawn, count) == uninterrupted[drawn : drawn + count]
        drawn += count


@settings(deadline=None)
@given(st.data(), sizes, seeds)
def test_a_weight_is_how_often_each_prompt_comes_in_an_epoch(data: st.DataObject, sizes: list[int], seed: int) -> None:
    weights = [data.draw(st.sampled_from([1.0, 2.0] if size == 1 else [0.5, 1.0, 1.5])) for size in sizes]
    order = PromptOrder(sizes, weights=weights, seed=seed)
    counts = Counter(order.take(order.prompts_per_epoch, order.prompts_per_epoch))
    first = 0
    for size, weight in zip(sizes, weights, strict=True):
        times = [counts[index] for index in range(first, first + size)]
        assert sum(times) == round(size * weight)
        assert all(int(weight) <= time <= int(weight) + 1 for time in times)
        first += size


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    order, other = (PromptOrder([50], seed=seed) for seed in (1, 2))
    assert len({tuple(taken) for taken in (order.take(0, 50), order.take(50, 50), other.take(0, 50))}) == 3


def test_what_is_drawn_goes_on_over_the_end_of_an_epoch() -> None:
    order = PromptOrder([3], seed=0, shuffle=False)
    assert order.take(2, 8) == [2, 0, 1, 2, 0, 1, 2, 0]
    assert order.take(1, 0) == []


def test_a_weight_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="leaves no prompt of its set"):
        PromptOrder([10, 5], weights=[0.01, 1.0], seed=0)
