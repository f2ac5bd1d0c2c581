"""Several proxies of best-of-n: the same samples for each, paired differences, gold asked once, the report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from treeward.data.sources import Row
from treeward.errors import DataError
from treeward.evaluation.best_of_n import SampledPrompt, analyse_several, expected_best_of, same_samples
from treeward.evaluation.best_of_n.blocks import EXAMPLES_SOURCE, blocks, legend, table_columns
from treeward.evaluation.best_of_n.samples import by_field, by_known, sampled_rows, score_samples
from treeward.evaluation.best_of_n.several_blocks import blocks_of_several, by_proxy, by_size, several_to_json
from treeward.evaluation.report.build import build_report


def test_proxies_differ_by_themselves_alone() -> None:
    rng = np.random.default_rng(20)
    gold = rng.normal(size=(30, 6))
    good, bad = gold + 0.5 * rng.normal(size=gold.shape), rng.normal(size=gold.shape)
    of_good = [SampledPrompt(p.tolist(), g.tolist()) for p, g in zip(good, gold, strict=True)]
    of_bad = [SampledPrompt([None, *p.tolist()[1:]], g.tolist()) for p, g in zip(bad, gold, strict=True)]
    shared = same_samples({"good": of_good, "bad": of_bad})
    for one, before in zip(shared["good"], of_good, strict=True):
        assert one.proxy == [None, *before.proxy[1:]] and one.gold == before.gold
    found = analyse_several({"good": of_good, "bad": of_bad, "good again": of_good}, num_resamples=500)
    assert [one.name for one in found] == ["good", "bad", "good again"] and found[0].difference is None
    assert {one.result.max_n for one in found} == {5}
    assert len({one.result.curves["best"].mean for one in found}) == 1
    for n in (2, 5):
        chosen = [expected_best_of(p[1:], g[1:], [n])[0] for p, g in zip(bad, gold, strict=True)]
        assert found[1].result.at("gold", n).value == pytest.approx(np.mean(chosen))
    difference, again = found[1].difference, found[2].difference
    assert difference is not None and again is not None
    last = [one.result.at("gold", 5).value or 0.0 for one in found]
    assert difference.value == pytest.approx(last[1] - last[0]) and difference.count == 30
    assert difference.high is not None and difference.high < 0
    assert (again.value, again.low, again.high) == (0.0, 0.0, 0.0)
    # Paired: narrower than two curves that know nothing of each other.
    a, b = (one.result.at("gold", 5) for one in found[:2])
    assert difference.low is not None and None not in (a.low, a.high, b.low, b.high)
    assert difference.high - difference.low < (a.high - a.low) + (b.high - b.low)  # type: ignore[operator]


def test_the_report_of_several_proxies_says_which_helps() -> None:
    rng = np.random.default_rng(23)
    gold = rng.normal(size=(40, 8))
    proxies = {
        "noise": rng.normal(size=gold.shape),
        "gold": gold,
        "other noise": rng.normal(size=gold.shape),
        "-": -gold,
    }
    prompts = {
        name: [SampledPrompt(p.tolist(), g.tolist()) for p, g in zip(proxy, gold, strict=True)]
        for name, proxy in proxies.items()
    }
    compared = analyse_several(prompts, num_resamples=300)
    shown = blocks_of_several(compared, "judge")
    words = shown[0]["markdown"]
    assert "`gold` **helps**" in words and "`-` **harms**" in words
    assert "`other noise` **is not shown to differ**" in words and "`noise` **" not in words
    assert all(one.result.verdict.sentence in words for one in compared) and "gold is `judge`" in words
    build_report("Best of n", shown, {EXAMPLES_SOURCE: []})
    assert [row["proxy"] for row in by_proxy(compared)] == list(proxies)
    assert [(row["n"], row["gold_1"] == row["best"]) for row in by_size(compared)] == [(n, True) for n in (1, 2, 4, 8)]
    json.dumps(several_to_json(compared), allow_nan=False)


def test_rows_of_one_prompt_are_drawn_together_for_the_difference_too() -> None:
    rng = np.random.default_rng(21)
    first = [SampledPrompt(rng.normal(size=5).tolist(), rng.normal(size=5).tolist()) for _ in range(25)]
    other = [replace(one, proxy=rng.normal(size=5).tolist()) for one in first]
    once = analyse_several({"a": first, "b": other}, num_resamples=300)[1].difference
    rows = {
        name: [replace(p, cluster=f"prompt {i}") for i, p in enumerate(prompts) for _ in range(4)]
        for name, prompts in (("a", first), ("b", other))
    }
    four_times = analyse_several(rows, num_resamples=300)[1].difference
    assert once is not None and four_times is not None
    assert (once.low, once.high) == pytest.approx((four_times.low, four_times.high))


def test_proxies_of_other_samples_are_not_compared() -> None:
    one = [SampledPrompt([1.0, 2.0], [0.0, 1.0], where="x:1")]
    for other, message in (
        ([], "not scored the same prompts"),
        ([SampledPrompt([1.0, 2.0], [0.0, 2.0], where="x:1")], "x:1: the proxies have not scored the same samples"),
        ([SampledPrompt([1.0], [0.0, 1.0], where="x:1")], "x:1: the proxies have not scored the same samples"),
    ):
        with pytest.raises(DataError, match=message):
            same_samples({"a": one, "b": other})


def test_gold_of_rows_that_are_scored_is_not_asked_again() -> None:
    numbers = {"responses": ["a", "b", "c"], "p": [1, 2, 3]}
    given = [{"prompt": f"{i}?", "g": [i, None, 2], **numbers} for i in range(4)]
    rows = list(sampled_rows(Row(row, f"in.jsonl:{i}") for i, row in enumerate(given, 1)))
    scored = list(score_samples(rows[:2], by_field("p"), by_field("g")))
    asked: list[int] = []

    def otherwise() -> Any:
        asked.append(0)
        return lambda many: asked.extend(row.number for row in many) or by_field("g")(many)

    gold = by_known(scored, otherwise)
    assert gold(rows[:2]) == by_field("g")(rows[:2]) and asked == []
    assert gold([rows[2], rows[0], rows[3]]) == by_field("g")([rows[2], rows[0], rows[3]])
    assert gold(rows) == by_field("g")(rows)
    assert asked == [0, 2, 3, 2, 3]  # loaded once


def test_the_words_of_the_tables_are_explained_and_ranks_as_gold_have_their_sign() -> None:
    prompts = [SampledPrompt([0.1 * i, 0.5, 0.3], [0.0, -1.0, -0.1 * i]) for i in range(12)]
    compared = analyse_several({"a": prompts, "b": prompts}, num_resamples=50)
    result = compared[0].result
    explained = legend("gold_scores")
    assert all(word in explained for word in ("KL, in nats", "Regret", "lost of possible", "SD", "100 % at random"))
    assert "rank" not in explained and "0 for rank 0, the best, and -1 for rank 1" in legend("rank")
    titles = [column.title or column.key for column in table_columns(result)]
    assert {"KL, nats", "lost of possible", "gap, in SD"} <= set(titles)
    for shown, name in ((blocks(result, "p", "rank"), "Best of n in numbers"),
                        (blocks_of_several(compared, "rank"), "Proxies side by side")):  # fmt: skip
        table = next(one for one in shown if one.get("title") == name)
        assert table["note"] == legend("rank") and "with the other sign" in shown[0]["markdown"]
    assert "other sign" not in blocks(result, "p", "gold_scores")[0]["markdown"]
