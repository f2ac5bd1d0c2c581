from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_text import Page

from treeward.data.sources import Row
from treeward.evaluation.best_of_n.analysis import (
    BestOfN,
    analyse,
    expected_best_of,
    selection_weights,
)
from treeward.evaluation.best_of_n.bon_page import table, to_json, write
from treeward.evaluation.best_of_n.samples import Samples, sampled_rows


def best_of_every_subset(proxy: Sequence[float], gold: Sequence[float], n: int) -> float:
    """The mean gold of the choice, over all subsets of n; equal proxies are chosen from with equal
    chances."""
    chosen = []
    for subset in itertools.combinations(range(len(proxy)), n):
        top = max(proxy[i] for i in subset)
        chosen.append(np.mean([gold[i] for i in subset if proxy[i] == top]))
    return float(np.mean(chosen))


def analysed(proxy: Any, gold: Any, **options: Any) -> BestOfN:
    """The result of arrays or lists."""
    if isinstance(proxy, np.ndarray):
        proxy = proxy.tolist()
    if isinstance(gold, np.ndarray):
        gold = gold.tolist()
    return analyse(proxy, gold, **options)


def gaussian_prompts(
    rng: np.random.Generator, num: int, samples: int, *, correlation: float = 0.5
) -> tuple[Any, Any]:
    """Proxy and gold scores (num, samples); each prompt has a level of its own."""
    proxy = rng.normal(size=(num, samples))
    noise = rng.normal(size=(num, samples))
    return proxy, correlation * proxy + math.sqrt(1 - correlation**2) * noise + rng.normal(
        size=(num, 1)
    )


def peaked_prompts(num: int = 12, samples: int = 12) -> tuple[Any, Any]:
    """Prompts whose gold is highest at n = 5, each with a level of its own."""
    sizes = tuple(range(1, samples + 1))
    by_rank = np.linalg.solve(selection_weights(samples, sizes), [-0.1 * abs(n - 5) for n in sizes])
    orders = [np.random.default_rng(i).permutation(samples) for i in range(num)]
    return np.array(orders, float), np.array([by_rank[order] + i for i, order in enumerate(orders)])


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(-2, 2), st.integers(-9, 9)), min_size=1, max_size=7),
    st.randoms(),
)
def test_the_estimate_is_the_mean_over_all_subsets(
    samples: list[tuple[int, int]], random: Any
) -> None:
    """Equal proxies are chosen from at random, whatever their order."""
    sizes = range(1, len(samples) + 1)
    expected = [best_of_every_subset(*zip(*samples, strict=True), n) for n in sizes]
    random.shuffle(samples)
    assert expected_best_of(*zip(*samples, strict=True), sizes) == pytest.approx(
        expected, abs=1e-12
    )


def test_curves_are_means_over_prompts_in_their_units() -> None:
    proxy, gold = gaussian_prompts(np.random.default_rng(2), 20, 6)
    a = analysed(proxy, gold, num_resamples=100)
    b = analysed(10 * proxy + 3, 100 * gold - 7, num_resamples=100)
    last = gold[np.arange(20), proxy.argmax(axis=1)]
    best = gold.max(axis=1)
    values = [a.at(name, n).value for name, n in (("gold", 1), ("gold", 6), ("best", 6))]
    assert values == pytest.approx([gold.mean(), last.mean(), best.mean()])
    assert b.at("gold", 3).value == pytest.approx(100 * (a.at("gold", 3).value or 0) - 7)
    for name in ("gold_gain", "proxy_gain", "best_gain"):
        one = a.at(name, 6)
        other = b.at(name, 6)
        assert (one.value, one.low, one.high) == pytest.approx((other.value, other.low, other.high))
    assert a.correlation.value == pytest.approx(b.correlation.value)


def test_samples_and_prompts_that_are_left_out_are_counted() -> None:
    proxy, gold = (scores.tolist() for scores in gaussian_prompts(np.random.default_rng(4), 40, 6))
    holes = (
        [[*row[:3], None, 5.0, *row[3:]] for row in proxy],
        [[*row[:3], -9.0, None, *row[3:]] for row in gold],
    )
    few = [1.0, None, 2.0], [100.0, 100.0, 100.0]
    plain = analysed(proxy, gold, num_resamples=50)
    result = analysed([*holes[0], few[0]], [*holes[1], few[1]], num_resamples=50)
    # the same prompts stand behind every n
    assert result.curves == plain.curves and result.max_n == 6
    assert result.counts["num_without_proxy"] == 41 and result.counts["num_without_gold"] == 40
    assert result.counts["num_prompts_with_fewer_samples"] == 1
    ten = [*proxy[:9], few[0]], [*gold[:9], few[1]]
    assert analysed(*ten, num_resamples=20).max_n == 2  # a tenth is too much to leave out
    assert analysed(*ten, max_n=6, num_resamples=20).counts["num_prompts"] == 9


def test_rows_of_one_prompt_are_drawn_together() -> None:
    rng = np.random.default_rng(6)
    proxy, gold = gaussian_prompts(rng, 25, 5)
    once = analysed(proxy, gold, num_resamples=200)
    four_times = analysed(
        proxy.repeat(4, axis=0),
        gold.repeat(4, axis=0),
        prompts=[f"prompt {i // 4}" for i in range(100)],
        num_resamples=200,
    )
    assert four_times.counts["num_clusters"] == 25 and four_times.counts["num_prompts"] == 100
    a = once.at("gold", 5)
    b = four_times.at("gold", 5)
    assert (a.low, a.high) == pytest.approx((b.low, b.high))
    assert once.lead.value == pytest.approx(four_times.lead.value)


def test_where_gold_is_highest_and_by_how_much() -> None:
    """Gold rises with the proxy up to a point and falls beyond it."""
    rng = np.random.default_rng(9)
    proxy = rng.normal(size=(150, 64))
    gold = np.where(proxy < 1.0, proxy, 1.0 - 3.0 * (proxy - 1.0)) + rng.normal(size=proxy.shape)
    result = analysed(proxy, gold, num_resamples=500)
    peak, last = (result.at("gold", n).value for n in (result.peak, 64))
    assert 2 <= result.peak <= 20 and peak is not None and last is not None
    assert (
        result.lead.value == pytest.approx(peak - last)
        and result.lead.low is not None
        and result.lead.low > 0
    )
    assert re.fullmatch(
        rf"Gold is highest at n = {result.peak}, \S+ \(\S+ to \S+\) above n = 64\.", result.sentence
    )
    falls = analysed(proxy[:12, :12], -proxy[:12, :12])
    assert falls.peak == 1 and "highest at n = 1," in falls.sentence
    rises = analysed(proxy[:12, :12], proxy[:12, :12])
    assert rises.peak == 12 and rises.sentence.endswith("above n = 1.")
    assert analysed(*peaked_prompts(num=9)).correlation.low is None


def test_the_report(tmp_path: Path) -> None:
    proxy, gold = (scores.tolist() for scores in peaked_prompts())
    with_failed = [[None, *row] for row in proxy]
    with_gold = [[1.0, *row] for row in gold]
    result = analyse(with_failed, with_gold, num_resamples=50)
    page = write(tmp_path, result, "length", "grades", "samples.jsonl")
    text = Page(page.read_text(encoding="utf-8")).text
    assert result.sentence in text and "Left out: 12 samples without a proxy score." in text
    assert "gold is grades." in text and "length: by itself" in text
    numbers = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert numbers["result"]["peak"] == 5 and len(numbers["gains"][0]["y"]) == 12
    rows, columns = table(result)
    assert [row["n"] for row in rows] == [1, 2, 4, 8, 12]
    assert [column.key for column in columns][:3] == ["n", "kl", "proxy"]
    content = json.loads(json.dumps(to_json(result), allow_nan=False))
    assert content["n"] == list(range(1, 13)) and len(content["curves"]["gold"]["mean"]) == 12
    assert content["peak"] == 5


def read(*values: dict[str, Any]) -> list[Samples]:
    return list(sampled_rows(Row(one, f"in.jsonl:{i}") for i, one in enumerate(values, 1)))


USER = {"role": "user", "content": "[2] + 2?"}
COMPLETIONS = [[{"role": "assistant", "content": text}] for text in ("4.", "Five.")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "[2] + 2?", "responses": ["4.", "Five."]},
        {
            "context": [USER],
            "completions": [
                {"rank": 0, "completion": COMPLETIONS[0]},
                {"completion": COMPLETIONS[1]},
            ],
        },
        {"messages": json.dumps([USER]), "responses": json.dumps(["4.", "Five."])},
        {"chosen": [USER, *COMPLETIONS[0]], "rejected": [USER, *COMPLETIONS[1]], "prompt": None},
    ],
)
def test_samples_and_the_columns_beside_them(row: dict[str, Any]) -> None:
    (found,) = read({**row, "ground_truth": "4"})
    samples = found.example
    assert samples.conversations == [[USER, *completion] for completion in COMPLETIONS]
    assert samples.context == (USER,) and samples.info == {"ground_truth": "4"}


def test_the_distance_of_best_of_n_from_sampling_in_closed_form() -> None:
    """KL(n) = ln n - (n - 1) / n, of Stiennon et al. 2020, appendix G.3."""
    result = analysed(*gaussian_prompts(np.random.default_rng(0), 12, 4))
    assert result.sizes == (1, 2, 3, 4)
    assert [result.kl[0], result.kl[1], result.kl[3]] == pytest.approx(
        [0.0, math.log(2) - 0.5, math.log(4) - 0.75]
    )
