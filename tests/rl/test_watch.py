"""The alarm for reward over-optimisation: how often it is wrong, and how soon it is right."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from treeward.config.grpo import WatchConfig
from treeward.errors import ConfigError, DataError
from treeward.rl.advantages import length_correlation
from treeward.rl.watch import OverOptimisationWatch, read_alarms, write_alarms


def kinds(watch: OverOptimisationWatch) -> list[str]:
    return [alarm.kind for alarm in watch.alarms]


def first_alarm(settings: WatchConfig, golds: np.ndarray, proxies: np.ndarray) -> int | None:
    """The index of the validation that raises gold_falls; golds (T, P) and proxies (T, P) by
    prompt."""
    watch = OverOptimisationWatch(settings)
    observed = enumerate(zip(golds, proxies, strict=True))
    return next(
        (t for t, (g, p) in observed if watch.observe(t, gold_by_prompt=g, proxy_by_prompt=p)), None
    )


def runs(
    curve: np.ndarray, count: int, *, num_prompts: int = 64, noise: float = 1.0, seed: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Golds and proxies of `count` runs: mean `curve` (T,), prompts that differ (the same in each),
    and noise."""
    rng = np.random.default_rng(seed)
    shape = (len(curve), num_prompts)
    for _ in range(count):
        hardness = rng.normal(0, 3.0, num_prompts)
        gold = curve[:, None] + hardness + rng.normal(0, noise, shape)
        proxy = np.linspace(0, 4, len(curve))[:, None] + hardness + rng.normal(0, noise, shape)
        yield gold, proxy


@pytest.mark.slow
@pytest.mark.parametrize(("z", "level"), [(3.0, 0.00135), (1.645, 0.05)])
def test_runs_whose_gold_stays_flat_are_hardly_ever_accused(z: float, level: float) -> None:
    count = 100
    accused = sum(
        first_alarm(WatchConfig(z=z), *run) is not None for run in runs(np.zeros(30), count)
    )
    # A run is accused with probability `level` at most: more than this many happen once in a
    # thousand such tests.
    assert accused <= stats.binom.ppf(0.999, count, level)


def hacking_curve(length: int = 30, alpha: float = 1.2, beta: float = 0.75) -> np.ndarray:
    """Gao et al.'s RL form d (alpha - beta ln d) over d = sqrt(KL)."""
    d = np.linspace(0.05, 8, length)
    return d * (alpha - beta * np.log(d))


def test_a_planted_rise_and_fall_is_reported_soon_after_its_peak() -> None:
    curve = hacking_curve()
    peak = int(curve.argmax())
    assert 3 < peak < 15 and curve[-1] < curve[0]
    late = [first_alarm(WatchConfig(), *run) for run in runs(curve, 40)]
    assert len(late) == 40 and None not in late
    assert min(late) > peak
    # Noise of 1 on 64 prompts: paired standard errors of 0.18. About 0.9 must have gone, of a peak
    # of 1.37.
    lost = [curve[peak] - curve[t] for t in late]
    assert np.median(lost) < 1.0 and max(lost) < 1.6


SPREAD = np.tile([-1.0, 1.0], 50)
"""Of 100 prompts, around a mean; its standard error is 1 / sqrt(99)."""


def test_the_threshold_is_the_one_that_is_documented() -> None:
    """T falls at p = (1 - Phi(z)) 2 / ((t - 1) t (t + 1)), just above it raises nothing."""
    needed = -stats.t.ppf(stats.norm.sf(3.0) * 2 / (4 * 5 * 6), 99)
    for factor, expected in ((0.999, []), (1.001, ["gold_falls"])):
        watch = OverOptimisationWatch()
        for t, gold in enumerate([0.0, 10.0, 10.0, 10.0, 10.0 - factor * needed / np.sqrt(99)]):
            values = gold + (SPREAD if t == 4 else 0 * SPREAD)
            watch.observe(10 * t, proxy_by_prompt=t + SPREAD, gold_by_prompt=values)
        assert kinds(watch) == expected
    alarm = watch.alarms[0]
    assert alarm.step == 40 and watch.metrics()["watch/gold_fall_error"] == pytest.approx(
        1 / np.sqrt(99)
    )
    for words in (
        "from its best, 10 at step 10,",
        "the proxy rose by 3, from 1 to 4",
        "validation 5 asks for",
    ):
        assert words in alarm.sentence


def test_gold_that_falls_with_the_proxy_is_no_over_optimisation() -> None:
    watch = OverOptimisationWatch()
    for t, (proxy, gold) in enumerate([(1.0, 1.0), (3.0, 3.0), (2.0, 2.0), (2.9, -5.0)]):
        assert watch.observe(t, proxy_by_prompt=proxy + SPREAD, gold_by_prompt=gold + SPREAD) == []
    (alarm,) = watch.observe(4, proxy_by_prompt=3.1 + SPREAD, gold_by_prompt=SPREAD - 5)
    assert alarm.kind == "gold_falls"


def test_prompts_that_failed_are_left_out_of_both_sides() -> None:
    rng = np.random.default_rng(3)
    hardness = rng.normal(0, 10, 64)
    golds = hardness + rng.normal(0, 0.1, (5, 64)) + np.array([0.0, 0, 0, 0, -0.5])[:, None]
    golds[1:4, np.argsort(hardness)[:20]] = np.nan  # the hard ones: means without them are higher
    watch = OverOptimisationWatch()
    for t, gold in enumerate(golds[:4]):
        assert watch.observe(t, proxy_by_prompt=np.full(64, t), gold_by_prompt=gold) == []
    (alarm,) = watch.observe(4, proxy_by_prompt=np.full(64, 9.0), gold_by_prompt=golds[4])
    assert alarm.kind == "gold_falls" and watch.metrics()["watch/gold_fall"] == pytest.approx(
        0.5, abs=0.1
    )


@pytest.mark.parametrize(
    ("kind", "calm", "trouble"),
    [
        ("kl_budget", {"kl": 4.9}, {"kl": 5.1}),
        ("entropy_collapse", {"entropy": 0.11}, {"entropy": 0.09}),
        ("truncation", {"truncation_rate": 0.5}, {"truncation_rate": 0.51}),
        ("no_signal", {"groups_without_signal": 0.9}, {"groups_without_signal": 0.95}),
        ("length_growth", {"length": 199.0}, {"length": 201.0}),
        (
            "length_growth",
            {"length": 201.0, "length_correlation": 0.1},
            {"length": 201.0, "length_correlation": 0.5},
        ),
        ("length_growth", {"length": 201.0, "proxy_by_prompt": [-1.0]}, {"length": 201.0}),
        ("length_growth", {"length": 201.0, "gold_by_prompt": [0.0]}, {"length": 201.0}),
        ("length_growth", {"length": 199.0}, {"length": 201.0, "gold_by_prompt": [math.nan]}),
    ],
)
def test_signs_are_raised_once_and_may_stop_the_run(
    kind: Any, calm: dict[str, Any], trouble: dict[str, Any]
) -> None:
    for stop_on in (("gold_falls",), (kind,)):
        watch = OverOptimisationWatch(WatchConfig(max_kl=5.0, stop_on=stop_on))
        assert watch.observe(0, proxy_by_prompt=[0.0], length=100.0, entropy=1.0, kl=0.0) == []
        assert watch.observe(1, **{"proxy_by_prompt": [1.0], **calm}) == []
        (alarm,) = watch.observe(2, **{"proxy_by_prompt": [1.0], **trouble})
        assert alarm.kind == kind and alarm.step == 2 and "a sign, no proof" in alarm.sentence
        assert alarm.stops is (kind in stop_on)
        assert watch.observe(3, **{"proxy_by_prompt": [1.0], **trouble}) == []
        assert watch.active == {kind} and watch.metrics()["watch/alarm"] == 1.0
        assert watch.observe(4, **{"proxy_by_prompt": [1.0], **calm}) == []
        assert watch.active == frozenset() and watch.metrics()["watch/alarm"] == 0.0


def test_what_is_logged_is_paired_with_the_first_and_the_best() -> None:
    golds = np.array([[0.0, 10.0, 20.0], [2.0, 13.0, 21.0], [1.0, 11.0, 21.0]])
    watch = OverOptimisationWatch()
    for t, gold in enumerate(golds):
        watch.observe(t, gold_by_prompt=gold, proxy_by_prompt=gold * 2)
    logged = {name.removeprefix("watch/"): value for name, value in watch.metrics().items()}
    assert logged["gold_change"] == pytest.approx(1.0) and logged["proxy_change"] == pytest.approx(
        2.0
    )
    assert logged["gold_change_error"] == pytest.approx(0.0, abs=1e-12)  # each prompt rose by 1
    assert logged["gold_fall"] == pytest.approx(1.0)
    assert logged["gold_fall_error"] == pytest.approx(np.std([1, 2, 0], ddof=1) / np.sqrt(3))
    assert logged["gold_error"] == pytest.approx(np.std(golds[2], ddof=1) / np.sqrt(3))


def test_a_resumed_watch_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    gold, proxy = next(runs(hacking_curve(), 1, seed=5))
    gold[3, 5] = np.nan
    whole = OverOptimisationWatch()
    saved = OverOptimisationWatch()
    for t in range(30):
        for watch in (whole, saved):
            watch.observe(t, gold_by_prompt=gold[t], proxy_by_prompt=proxy[t], length=10.0, entropy=2.0 - t / 15, kl=t,
                          truncation_rate=t / 30)  # fmt: skip
        state = json.loads(json.dumps(saved.state_dict()))
        saved = OverOptimisationWatch()
        saved.load_state_dict(state)
    assert {"gold_falls", "truncation", "entropy_collapse"} <= set(kinds(whole))
    # NaN equals NaN
    assert (
        repr(saved.state_dict()) == repr(whole.state_dict()) and saved.metrics() == whole.metrics()
    )
    path = tmp_path / "alarms.json"
    write_alarms(path, whole.alarms)
    assert read_alarms(path) == whole.alarms
    path.write_text('[{"kind": "gold_falls"}]')
    with pytest.raises(DataError, match="not a file of alarms"):
        read_alarms(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_alarms(tmp_path / "absent" / "alarms.json", [])


def test_length_correlation_is_within_groups() -> None:
    rewards = [[1.0, 2.0, 3.0], [10.0, 9.0, float("nan")]]
    lengths = [[100, 90, 80], [1, 2, 500]]
    r = np.array([-1, 0, 1, 0.5, -0.5])
    n = np.array([10, 0, -10, -0.5, 0.5])
    assert length_correlation(torch.as_tensor(rewards), torch.as_tensor(lengths)) == pytest.approx(
        np.corrcoef(r, n)[0, 1]
    )
    assert length_correlation(torch.tensor([[1.0, 1.0]]), torch.tensor([[3, 4]])) is None
