from __future__ import annotations

import gzip
import itertools
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treeward.data.sources import Row
from treeward.data.synthetic import bundled_path
from treeward.errors import CheckpointError, ConfigError, DataError
from treeward.evaluation.best_of_n import (
    BestOfN,
    SampledPrompt,
    analyse,
    expected_best_of,
    fit_gao,
    kl_of_best_of,
    selection_weights,
    size_of_kl,
)
from treeward.evaluation.best_of_n.blocks import EXAMPLES_SOURCE, blocks, examples, table_rows, to_json
from treeward.evaluation.best_of_n.samples import (
    SampledRow,
    by_field,
    by_gold_quality,
    by_scorer,
    fields_of,
    sample_file,
    sampled_rows,
    score_samples,
)
from treeward.evaluation.best_of_n.selection import curve_sizes
from treeward.evaluation.report.build import build_report
from treeward.scoring.score import Conversation, OnError, Score


def best_of_every_subset(proxy: Sequence[float], gold: Sequence[float], n: int) -> float:
    """The mean gold of the choice, over all subsets of n; equal proxies are chosen from with equal chances."""
    chosen = []
    for subset in itertools.combinations(range(len(proxy)), n):
        top = max(proxy[i] for i in subset)
        chosen.append(np.mean([gold[i] for i in subset if proxy[i] == top]))
    return float(np.mean(chosen))


def gaussian_prompts(
    rng: np.random.Generator, num: int, samples: int, *, correlation: float = 0.5, spread: float = 1.0
) -> list[SampledPrompt]:
    proxy = rng.normal(size=(num, samples))
    noise = rng.normal(size=(num, samples))
    gold = correlation * proxy + math.sqrt(1 - correlation**2) * noise + spread * rng.normal(size=(num, 1))
    return [SampledPrompt(p.tolist(), g.tolist()) for p, g in zip(proxy, gold, strict=True)]


def law_prompts(alpha: float, beta: float, form: str, num: int = 12, samples: int = 12) -> list[SampledPrompt]:
    """Prompts whose gold curve is exactly the law, each with a level of its own."""
    sizes = range(1, samples + 1)
    d = np.sqrt(kl_of_best_of(list(sizes)))
    bent = d if form == "bon" else np.log(np.where(d > 0, d, 1))
    by_rank = np.linalg.solve(selection_weights(samples, sizes), d * (alpha - beta * bent))
    prompts = []
    for i in range(num):
        order = np.random.default_rng(i).permutation(samples)
        prompts.append(SampledPrompt(order.astype(float).tolist(), (by_rank[order] + i).tolist()))
    return prompts


# --- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_the_estimate_is_the_mean_over_all_subsets(num_samples: int) -> None:
    rng = np.random.default_rng(num_samples)
    proxy, gold = rng.normal(size=num_samples).tolist(), rng.normal(size=num_samples).tolist()
    sizes = range(1, num_samples + 1)
    expected = [best_of_every_subset(proxy, gold, n) for n in sizes]
    assert expected_best_of(proxy, gold, sizes) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "proxy",
    [[1.0, 1.0, 0.0, 2.0, 2.0, 2.0, -1.0], [0.0] * 7, [3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0], [0.0, -0.0, 1, 1, 1, 2, 2]],
)
def test_equal_proxies_are_chosen_from_at_random(proxy: list[float]) -> None:
    gold = np.random.default_rng(0).normal(size=7)
    sizes = range(1, 8)
    expected = [best_of_every_subset(proxy, gold.tolist(), n) for n in sizes]
    found = expected_best_of(proxy, gold, sizes)
    assert found == pytest.approx(expected, abs=1e-12)
    order = [3, 5, 0, 6, 1, 4, 2]  # nor does it matter which of the equal ones stands first
    assert expected_best_of([proxy[i] for i in order], gold[order], sizes) == pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 64, 1000, 2048, 4095, 4096])
def test_the_weights_are_exact_for_thousands_of_samples(n: int) -> None:
    num = 4096
    found = selection_weights(num, [n])[0]
    assert found.sum() == pytest.approx(1.0, abs=1e-11)
    assert (found[: n - 1] == 0).all()
    whole = math.comb(num, n)
    for i in {n, n + 1, (n + num) // 2, num - 1, num} & set(range(n, num + 1)):
        expected = float(Fraction(math.comb(i - 1, n - 1), whole))
        assert found[i - 1] == pytest.approx(expected, rel=1e-11, abs=1e-300)


def test_n_is_within_the_samples() -> None:
    for n in (0, 6):
        with pytest.raises(ConfigError, match="1 to 5"):
            selection_weights(5, [1, n])


def test_kl_and_its_inverse() -> None:
    assert kl_of_best_of([1, 2, 4]) == pytest.approx([0.0, math.log(2) - 0.5, math.log(4) - 0.75])
    assert size_of_kl(kl_of_best_of([1, 2, 100, 10**6])) == pytest.approx([1, 2, 100, 10**6], rel=1e-6)
    assert float(size_of_kl(1e6)) == math.inf


def test_kl_is_that_of_the_distribution_of_the_best() -> None:
    n, grid = 5, (np.arange(200_000) + 0.5) / 200_000  # quantiles of the proxy; the best has the density n u^(n-1)
    density = n * grid ** (n - 1)
    assert float(kl_of_best_of(n)) == pytest.approx(np.mean(density * np.log(density)), abs=1e-6)


def test_the_sizes_of_curves() -> None:
    assert curve_sizes(2) == (1, 2)
    assert curve_sizes(16) == tuple(range(1, 17))
    sizes = curve_sizes(4096)
    assert sizes[:64] == tuple(range(1, 65)) and sizes[-1] == 4096 and len(sizes) == 64 + 16 * 6
    assert {128, 256, 512, 1024, 2048} <= set(sizes)
    assert curve_sizes(65)[-2:] == (64, 65)


# --- the laws of Gao et al. ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "alpha", "beta"), [("bon", 1.2, 0.4), ("bon", 0.3, -0.1), ("rl", 0.9, 0.5)])
def test_a_planted_law_is_found(form: Any, alpha: float, beta: float) -> None:
    d = np.linspace(0.2, 3.0, 40)
    bent = d if form == "bon" else np.log(d)
    law = fit_gao(d, d * (alpha - beta * bent), form)
    assert (law.alpha, law.beta) == pytest.approx((alpha, beta), abs=1e-9)
    noise = 0.01 * np.random.default_rng(0).normal(size=40)
    noisy = fit_gao(d, d * (alpha - beta * bent) + noise, form)
    assert (noisy.alpha, noisy.beta) == pytest.approx((alpha, beta), abs=0.02)


def test_the_peak_of_a_law() -> None:
    d = np.linspace(0.01, 6, 60_000)
    for form in ("bon", "rl"):
        law = fit_gao([0.5, 1.0, 2.0], [0.4, 0.6, 0.3], form)  # type: ignore[arg-type]
        assert law.peak_distance == pytest.approx(d[np.argmax(law.gain(d))], abs=1e-3)
        assert law.gain([0.0]) == pytest.approx([0.0])
        rising = fit_gao([0.5, 1.0, 2.0], [0.5, 1.1, 2.6], form)  # type: ignore[arg-type]
        assert rising.peak_distance is None
    assert fit_gao([0.5, 1.0, 2.0], [-0.5, -1.1, -2.6]).peak_distance == 0.0


def test_it_does_not_matter_where_the_points_lie_densely() -> None:
    """A curve that is no law: its fit is that of the curve, not of the places where it was looked at."""
    curve = lambda d: np.sin(d)  # noqa: E731
    even = np.linspace(0.01, 3, 300)
    uneven = np.concatenate([np.linspace(0.01, 1, 30), np.linspace(1.001, 3, 600)])
    a, b = fit_gao(even, curve(even)), fit_gao(uneven, curve(uneven))
    assert (a.alpha, a.beta) == pytest.approx((b.alpha, b.beta), abs=3e-3)


@pytest.mark.parametrize("d", [[1.0, 2.0], [0.0, 1.0, 2.0], [1.0, 3.0, 2.0], [1.0, 2.0, math.nan]])
def test_points_without_a_law(d: list[float]) -> None:
    with pytest.raises(ConfigError, match="no law"):
        fit_gao(d, [0.1] * len(d))


@pytest.mark.parametrize("form", ["bon", "rl"])
def test_planted_laws_are_found_from_samples(form: Any) -> None:
    result = analyse(law_prompts(0.8, 0.45, form), num_resamples=50)
    fitted = result.law(form)
    assert fitted is not None
    assert (fitted.alpha.value, fitted.beta.value) == pytest.approx((0.8, 0.45), abs=1e-6)
    assert fitted.r_squared == pytest.approx(1.0)
    peak = 0.8 / 0.9 if form == "bon" else math.exp(0.8 / 0.45 - 1)
    assert fitted.peak.value == pytest.approx(float(size_of_kl(peak**2)), rel=1e-5)
    if form == "bon":
        assert result.verdict.peak == round(float(size_of_kl(peak**2)))
        assert fitted.peak.note is None
    else:
        assert fitted.peak.value > 12 and fitted.peak.note and "extrapolation" in fitted.peak.note
    other = result.law("rl" if form == "bon" else "bon")
    assert other is not None and other.r_squared is not None and other.r_squared < 0.9999


# --- the analysis ----------------------------------------------------------------------------------------------------


def test_gold_as_proxy_has_no_regret_and_none_or_less_has_more() -> None:
    rng = np.random.default_rng(1)
    gold = rng.normal(size=(30, 8))

    def regret(proxy: Any) -> list[float]:
        prompts = [SampledPrompt(p.tolist(), g.tolist()) for p, g in zip(proxy, gold, strict=True)]
        result = analyse(prompts, num_resamples=20)
        assert result.curves["normalised_regret"].mean[0] is None  # of one there is nothing to choose
        return [float(value) for value in result.curves["normalised_regret"].mean[1:] if value is not None]

    assert regret(gold) == pytest.approx([0.0] * 7, abs=1e-12)
    assert regret(np.zeros_like(gold)) == pytest.approx([1.0] * 7)
    assert all(value > 1.5 for value in regret(-gold))


def test_curves_are_means_over_prompts_in_their_units() -> None:
    prompts = gaussian_prompts(np.random.default_rng(2), 20, 6)
    scaled = [SampledPrompt([10 * p + 3 for p in one.proxy], [100 * g - 7 for g in one.gold]) for one in prompts]  # type: ignore[operator]
    a, b = analyse(prompts, num_resamples=100), analyse(scaled, num_resamples=100)
    assert a.curves["gold"].mean[0] == pytest.approx(np.mean([one.gold for one in prompts]))
    last = [one.gold[int(np.argmax(one.proxy))] for one in prompts]  # type: ignore[arg-type]
    assert a.at("gold", 6).value == pytest.approx(np.mean(last))  # type: ignore[arg-type]
    best = [max(one.gold) for one in prompts]  # type: ignore[type-var]
    assert a.at("best", 6).value == pytest.approx(np.mean(best))  # type: ignore[arg-type]
    assert a.at("regret", 6).value == pytest.approx(np.mean(best) - np.mean(last))  # type: ignore[arg-type]
    assert b.at("gold", 3).value == pytest.approx(100 * a.at("gold", 3).value - 7)  # type: ignore[operator]
    for name in ("gold_gain", "proxy_gain", "gap", "normalised_regret"):
        for size in (2, 6):
            one, other = a.at(name, size), b.at(name, size)
            assert (one.value, one.low, one.high) == pytest.approx((other.value, other.low, other.high))
    assert a.correlation.value == pytest.approx(b.correlation.value)


def test_gains_and_gap_are_those_of_normal_scores() -> None:
    """With normal scores the proxy gains E max of n, and gold the correlation times that."""
    result = analyse(gaussian_prompts(np.random.default_rng(3), 1500, 8, correlation=0.6), num_resamples=50)
    highest_of_8 = 1.4236  # the expected largest of 8 standard normals
    assert result.at("proxy_gain", 8).value == pytest.approx(highest_of_8, abs=0.06)
    assert result.at("gold_gain", 8).value == pytest.approx(0.6 * highest_of_8, abs=0.09)
    assert result.at("gap", 8).value == pytest.approx(0.4 * highest_of_8, abs=0.09)
    assert result.correlation.value == pytest.approx(0.6, abs=0.03)


def test_a_sample_without_a_score_is_left_out_and_counted() -> None:
    prompts = gaussian_prompts(np.random.default_rng(4), 15, 6)
    with_holes = [
        SampledPrompt([*one.proxy[:3], None, 5.0, *one.proxy[3:]], [*one.gold[:3], -9.0, None, *one.gold[3:]])
        for one in prompts
    ]
    plain, found = analyse(prompts, num_resamples=50), analyse(with_holes, num_resamples=50)
    assert found.curves == plain.curves
    assert found.counts["num_without_proxy"] == found.counts["num_without_gold"] == 15
    assert plain.counts["num_without_proxy"] == 0


def test_the_same_prompts_stand_behind_every_n() -> None:
    rng = np.random.default_rng(5)
    prompts = gaussian_prompts(rng, 40, 6)
    few = SampledPrompt([1.0, None, 2.0], [100.0, 100.0, 100.0])
    result = analyse([*prompts, few], num_resamples=20)
    assert result.max_n == 6 and result.counts["num_prompts_with_fewer_samples"] == 1
    assert result.curves["gold"].mean == analyse(prompts, num_resamples=20).curves["gold"].mean
    assert analyse([*prompts[:9], few], num_resamples=20).max_n == 2  # a tenth is too much to leave out
    assert analyse([*prompts[:9], few], max_n=6, num_resamples=20).counts["num_prompts"] == 9
    with pytest.raises(ConfigError, match="max_n"):
        analyse(prompts, max_n=7)


def test_what_cannot_be_analysed() -> None:
    with pytest.raises(DataError, match="no prompt has two samples"):
        analyse([SampledPrompt([1.0, None], [0.5, 0.5])])
    with pytest.raises(DataError, match="no prompt has two samples"):
        analyse([])
    with pytest.raises(DataError, match="one of each"):
        analyse([SampledPrompt([1.0, 2.0], [0.5], where="x.jsonl:1")])
    with pytest.raises(DataError, match=r"x.jsonl:2: a score is not finite"):
        analyse([SampledPrompt([1.0, math.inf], [0.5, 0.5], where="x.jsonl:2")])


def test_rows_of_one_prompt_are_drawn_together() -> None:
    prompts = gaussian_prompts(np.random.default_rng(6), 25, 5)
    rows = [SampledPrompt(p.proxy, p.gold, cluster=f"prompt {i}") for i, p in enumerate(prompts) for _ in range(4)]
    once, four_times = analyse(prompts, num_resamples=200), analyse(rows, num_resamples=200)
    assert four_times.counts["num_clusters"] == 25 and four_times.counts["num_prompts"] == 100
    a, b = once.at("gold", 5), four_times.at("gold", 5)
    assert (a.low, a.high) == pytest.approx((b.low, b.high))
    assert once.verdict.p_value == four_times.verdict.p_value


def test_intervals_hold_what_they_promise() -> None:
    rng = np.random.default_rng(7)
    truth = 0.5 * 1.4236
    runs = [analyse(gaussian_prompts(rng, 40, 8), num_resamples=300).at("gold", 8) for _ in range(250)]
    covered = np.mean([one.low <= truth <= one.high for one in runs])  # type: ignore[operator]
    assert 0.90 <= covered <= 0.98


def test_intervals_of_few_prompts_are_wide_enough() -> None:
    """The plain percentile interval of 12 prompts holds the truth in 89 of 100 of these runs."""
    rng = np.random.default_rng(13)
    truth = 0.5 * 1.4236
    runs = [analyse(gaussian_prompts(rng, 12, 8), num_resamples=300).at("gold", 8) for _ in range(250)]
    assert np.mean([one.low <= truth <= one.high for one in runs]) >= 0.92  # type: ignore[operator]


def test_one_prompt_has_no_interval_and_few_have_no_certainty() -> None:
    one = analyse(gaussian_prompts(np.random.default_rng(8), 1, 8))
    assert set(one.curves["gold"].low) == {None} and one.verdict.p_value is None
    few = analyse(law_prompts(0.8, 0.45, "bon", num=9))
    assert few.verdict.state == "unclear" and few.verdict.p_value is None
    assert "9 prompts are too few" in few.verdict.sentence
    assert few.curves["gold"].low[3] is not None
    assert few.correlation.value is not None and few.correlation.low is None
    assert analyse(law_prompts(0.8, 0.45, "bon", num=10)).correlation.low is not None


def test_one_of_a_kind_is_singular() -> None:
    falling = SampledPrompt([1.0, 2.0, 3.0, 4.0], [0.0, 2.0, 1.0, -1.0])
    short = SampledPrompt([1.0, None, 2.0], [1.0, 1.0, 1.0])
    one = analyse([falling, short], max_n=4)
    assert "but 1 prompt is too few to say more" in one.verdict.sentence
    said = blocks(one, "p", "g")[0]["markdown"]
    assert "4 samples of 1 prompt; the proxy is" in said
    assert "Left out: 1 sample without a proxy score, 1 prompt with fewer than 4 scored samples." in said
    two = blocks(analyse([falling, falling, short, short], max_n=4), "p", "g")[0]["markdown"]
    assert "8 samples of 2 prompts;" in two and "2 samples without a proxy score, 2 prompts with fewer" in two


# --- is there over-optimisation? -------------------------------------------------------------------------------------


def over_optimised(rng: np.random.Generator, num: int, samples: int, fall: float) -> list[SampledPrompt]:
    """Gold rises with the proxy up to a point and falls beyond it."""
    proxy = rng.normal(size=(num, samples))
    gold = np.where(proxy < 1.0, proxy, 1.0 - fall * (proxy - 1.0)) + rng.normal(size=(num, samples))
    return [SampledPrompt(p.tolist(), g.tolist()) for p, g in zip(proxy, gold, strict=True)]


def test_over_optimisation_is_seen() -> None:
    result = analyse(over_optimised(np.random.default_rng(9), 150, 64, 3.0), num_resamples=500)
    verdict = result.verdict
    assert verdict.state == "seen" and 2 <= verdict.peak <= 20
    assert verdict.p_value is not None and verdict.p_value < 0.01
    assert verdict.drop_at_least is not None and 0 < verdict.drop_at_least < verdict.drop
    assert verdict.sentence.startswith(f"Over-optimisation is seen: gold is highest at n = {verdict.peak}")
    falls = analyse([SampledPrompt(p.proxy, [-x for x in p.proxy]) for p in law_prompts(1, 0, "bon")])  # type: ignore[operator]
    assert falls.verdict.peak == 1 and "falls from the start" in falls.verdict.sentence


def test_no_over_optimisation_is_seen_where_gold_rises() -> None:
    result = analyse(gaussian_prompts(np.random.default_rng(10), 80, 12, correlation=0.9), num_resamples=500)
    assert result.verdict.state == "not seen" and result.verdict.peak == 12 and result.verdict.drop == 0.0
    assert result.verdict.p_value is not None and result.verdict.p_value > 0.5
    assert "gold is highest there" in result.verdict.sentence and "may be chance" not in result.verdict.sentence


def test_a_proxy_that_knows_nothing_is_seldom_accused() -> None:
    """The highest of many points is always above the last: that alone must not count as evidence."""
    rng = np.random.default_rng(11)
    runs = [analyse(gaussian_prompts(rng, 30, 10, correlation=0.0), num_resamples=300) for _ in range(100)]
    accused = np.mean([run.verdict.state == "seen" for run in runs])
    assert accused <= 0.06
    positive = np.mean([(run.verdict.drop_at_least or 0.0) > 0.0 for run in runs])
    assert positive <= 0.085
    assert {"unclear", "not seen"} <= {run.verdict.state for run in runs}


def test_numbers_that_are_all_equal() -> None:
    for result in (
        analyse([SampledPrompt([1.0, 2.0, 3.0, 4.0, 5.0], [0.1] * 5)] * 12),
        analyse([SampledPrompt([0.3] * 5, [1.0, 2.0, 3.0, 4.0, 5.0])] * 12),
    ):
        assert result.verdict.state == "not seen"
        assert "gold is the same at every n" in result.verdict.sentence
        json.dumps(to_json(result), allow_nan=False)
        assert result.correlation.value is None
    assert result.curves["gold"].mean == pytest.approx([3.0] * 5)
    assert result.curves["proxy_gain"].mean[2] is None


# --- real answers ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alpaca(shared_data: Path) -> BestOfN:
    """400 instructions with 12 to 16 models' answers; the proxy is their length, gold a judge's preference."""
    rows: list[dict[str, Any]] = []
    for split in ("train", "validation"):
        with gzip.open(shared_data / "alpaca_eval" / f"{split}.jsonl.gz", "rt", encoding="utf-8") as stream:
            rows += [json.loads(line) for line in stream]
    prompts = []
    for row in rows:
        lengths = [float(len(answer["output"])) for answer in row["outputs"]]
        prompts.append(SampledPrompt(lengths, [answer["preference_over_gpt4"] for answer in row["outputs"]]))
    for i in (0, 17):
        one = prompts[i]
        for n in (2, 3):
            found = expected_best_of(one.proxy, one.gold, [n])[0]  # type: ignore[arg-type]
            assert found == pytest.approx(best_of_every_subset(one.proxy, one.gold, n), abs=1e-12)  # type: ignore[arg-type]
    return analyse(prompts)


def test_length_as_a_proxy_of_a_judge_of_real_answers(alpaca: BestOfN) -> None:
    """The judge likes long answers: choosing the longest of 16 gains about half of what could be gained."""
    assert alpaca.max_n == 16 and alpaca.counts["num_prompts"] == 399
    assert alpaca.counts["num_prompts_with_fewer_samples"] == 1
    gold = [alpaca.at("gold", n) for n in (1, 4, 16)]
    assert [one.value for one in gold] == pytest.approx([0.0728, 0.1413, 0.2715], abs=1e-3)
    assert all(one.low < one.value < one.high for one in gold)  # type: ignore[operator]
    assert alpaca.at("best", 16).value == pytest.approx(0.448, abs=1e-3)
    share = alpaca.at("normalised_regret", 16)
    assert share.value == pytest.approx(0.471, abs=1e-3)
    assert 0.37 < share.low < 0.42 and 0.52 < share.high < 0.57  # type: ignore[operator]
    assert alpaca.correlation.value == pytest.approx(0.267, abs=1e-3)
    assert alpaca.verdict.state == "not seen" and alpaca.verdict.peak == 16


# --- samples ---------------------------------------------------------------------------------------------------------


class ByLength:
    """Scores a conversation by the length of its answer; one that says nothing it cannot score."""

    def __init__(self) -> None:
        self.num_scored = 0

    def score(
        self, conversations: Sequence[Conversation], *, where: Sequence[str] | None = None, on_error: OnError = "raise"
    ) -> list[Score]:
        self.num_scored += len(conversations)
        texts = [conversation[-1]["content"] for conversation in conversations]
        return [Score(float(len(text))) if text else Score(None, error="empty") for text in texts]


def read(*values: dict[str, Any]) -> list[SampledRow]:
    return list(sampled_rows(Row(one, f"in.jsonl:{i}") for i, one in enumerate(values, 1)))


USER = {"role": "user", "content": "[2] + 2?"}
ANSWERS = [[{"role": "assistant", "content": text}] for text in ("4.", "Five.")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "[2] + 2?", "responses": ["4.", "Five."]},
        {"prompt": "[2] + 2?", "completions": ["4.", "Five."]},
        {"prompt": [USER], "responses": ANSWERS},
        {"context": [USER], "completions": [{"rank": 0, "completion": ANSWERS[0]}, {"completion": ANSWERS[1]}]},
        {"messages": [USER], "responses": ["4.", "Five."]},
        {"messages": json.dumps([USER]), "responses": json.dumps(["4.", "Five."])},
        {"prompt": "[2] + 2?", "chosen": "4.", "rejected": "Five."},
        {"chosen": [USER, *ANSWERS[0]], "rejected": [USER, *ANSWERS[1]], "prompt": None},
    ],
)
def test_every_shape_of_row(row: dict[str, Any]) -> None:
    (found,) = read({**row, "ground_truth": "4"})
    assert found.conversations == [[USER, *answer] for answer in ANSWERS]
    assert found.context == [USER]
    assert found.info == {"ground_truth": "4"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER, *ANSWERS[0]]}, "no samples"),
        ({"responses": ["4."]}, "one prompt and one list"),
        ({"prompt": "?", "messages": [USER], "responses": ["4."]}, "one prompt and one list"),
        ({"prompt": "?", "responses": ["4."], "completions": ["4."]}, "one prompt and one list"),
        ({"prompt": "?", "responses": "4."}, "not a list of completions"),
        ({"text": "?"}, "nothing to score"),
    ],
)
def test_rows_without_samples_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f"in.jsonl:1: .*{message}"):
        read(row)


def test_fields() -> None:
    completions = [{"rank": rank, "completion": answer, "score": 1.5 - rank} for rank, answer in enumerate(ANSWERS)]
    others = {"judge": [1, None], "note": "[a", "id": [7], "ok": [True, False]}
    (found,) = read({"context": [USER], "completions": completions, **others})
    assert fields_of(found) == ["judge", "ok", "rank", "score"]
    assert [grade.value for grade in by_field("score")([found])[0]] == [1.5, 0.5]
    assert [grade.value for grade in by_field("rank")([found])[0]] == [0.0, -1.0]  # the lower rank is the better
    judged = by_field("judge")([found])[0]
    assert judged[0].value == 1.0 and judged[1].value is None and judged[1].error == "judge is null"
    assert by_field("x")(read({"prompt": "?", "responses": ["a"], "x": "[NaN]"}))[0][0].error == "the number is nan"
    (pair,) = read({"prompt": "?", "chosen": "4.", "rejected": "5."})
    assert fields_of(pair) == ["rank"]
    assert [grade.value for grade in by_field("rank")([pair])[0]] == [0.0, -1.0]
    for name in ("id", "note", "nothing"):
        with pytest.raises(DataError, match=f"in.jsonl:1: the row has no {name}"):
            by_field(name)([found])


def test_scores_belong_to_their_samples() -> None:
    rows = read(
        *[{"prompt": f"{i}?", "responses": ["x" * (i + j) for j in range(3)], "g": [3, 2, 1]} for i in range(500)]
    )
    scored = list(score_samples(rows, by_scorer(ByLength()), by_field("g")))
    assert [one.row for one in scored] == list(range(500))
    assert all(one.proxy == [i or None, i + 1, i + 2] for i, one in enumerate(scored))
    assert scored[0].errors == {"proxy: empty": 1}
    assert (scored[5].best, scored[5].chosen) == (0, 2)
    assert (scored[0].best, scored[0].chosen) == (1, 2)  # the first has no proxy score
    assert [one[-1]["content"] for one in scored[5].completions] == ["x" * 5, "x" * 7]
    assert len({one.cluster for one in scored}) == 500
    result = analyse([one.prompt for one in scored])
    assert result.counts["num_without_proxy"] == 1 and result.counts["num_prompts_with_fewer_samples"] == 1


def test_gold_quality_is_that_of_the_bundled_data() -> None:
    lines = bundled_path("validation").read_text(encoding="utf-8").splitlines()[:20]
    rows = read(*map(json.loads, lines))
    assert by_gold_quality()(rows) == by_field("score")(rows)
    with pytest.raises(DataError, match="in.jsonl:1: the last user turn asks nothing"):
        by_gold_quality()(read({"prompt": "Why?", "responses": ["So.", "No."]}))


def test_an_interrupted_scoring_goes_on(tmp_path: Path) -> None:
    rows = read(*[{"prompt": f"{i}?", "responses": ["é", "bb"], "g": [i, 1]} for i in range(6)])
    expected = list(score_samples(rows, by_scorer(ByLength()), by_field("g")))
    identity = {"data": "d", "proxy": "p", "gold": "g"}
    with sample_file(tmp_path / "out", identity) as file:
        assert file.kept == []
        for one in expected[:3]:
            file.add(one)
    path = tmp_path / "out" / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-10])  # killed while it wrote the third row
    with sample_file(tmp_path / "out", identity) as file:
        assert file.kept == expected[:2]
        for one in expected[2:]:
            file.add(one)
    with sample_file(tmp_path / "out", identity) as file:
        assert file.kept == expected
    with pytest.raises(CheckpointError, match="another proxy"):
        sample_file(tmp_path / "out", {**identity, "proxy": "q" * 30}).__enter__()


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_the_report_takes_the_blocks() -> None:
    rng = np.random.default_rng(12)
    rows = read(
        *[
            {
                "prompt": f"{i}?",
                "responses": ["x" * int(k) for k in rng.permutation(9)],
                "g": rng.normal(size=9).tolist(),
            }
            for i in range(30)
        ]
    )
    scored = list(score_samples(rows, by_scorer(ByLength()), by_field("g")))
    result = analyse([one.prompt for one in scored], num_resamples=50)
    found = blocks(result, "length", "g")
    shown = examples(scored, "length")
    assert (
        result.verdict.sentence in found[0]["markdown"] and "30 samples without a proxy score" in found[0]["markdown"]
    )
    assert {"headline", "curves", "table", "examples"} <= {block["kind"] for block in found}
    page = build_report("Best of n", found, {EXAMPLES_SOURCE: shown})
    assert "length" in page
    regrets = [row["suite_data"]["gold"][0] - row["suite_data"]["gold"][1] for row in shown]
    assert regrets == sorted(regrets, reverse=True) and min(regrets) > 0
    assert {"worse", "at least"} >= {"worse" if "worse" in row["subset"] else "at least" for row in shown}
    assert all(len(row["completions"]) == 2 and row["scores"][0] <= row["scores"][1] for row in shown)
    assert [row["n"] for row in table_rows(result)] == [1, 2, 4, 8]
    content = to_json(result)
    json.dumps(content, allow_nan=False)
    assert content["n"] == list(range(1, 9)) and len(content["curves"]["gold"]["mean"]) == 8
