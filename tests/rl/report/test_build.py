"""What the RL report says and shows, as blocks: verdicts, figures, samples, settings."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rl_report_sample import HACKED, NUM_STEPS, sample_runs, without_gold, write_run

from treeward.errors import ConfigError, DataError
from treeward.evaluation.results import Metric
from treeward.rl.report.build import report_blocks, write_rl_report
from treeward.rl.report.findings import Change, advice, opening, scales_remark, sum_up
from treeward.rl.report.reading import RLRun
from treeward.rl.watch import Alarm, AlarmKind


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RLRun]:
    return sample_runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def blocks(runs: list[RLRun]) -> list[dict[str, Any]]:
    return report_blocks(runs)


def block(blocks: list[dict[str, Any]], title: str) -> dict[str, Any]:
    return next(one for one in blocks if one.get("title") == title)


def titles(blocks: list[dict[str, Any]]) -> list[str]:
    return [one["title"] for one in blocks if one.get("title")]


def test_a_run_is_read_as_it_was_logged(runs: list[RLRun], tmp_path: Path) -> None:
    hacked = runs[1]
    assert hacked.last_step == NUM_STEPS and hacked.alarm_step == 120 and len(hacked.samples) == 21 * 7
    assert list(hacked.curve("validation/gold_reward")) == list(range(0, NUM_STEPS + 1, 10))
    assert len(hacked.curve("train/gold_reward")) == NUM_STEPS - 4  # without the "NaN" of every 50th step
    assert hacked.setting("policy.optimizer.kwargs.lr") == 1e-4 and hacked.setting("policy.model_name.x") is None
    assert runs[2].settings()["env.reward_model.reward_shaping.length_calibration"] == "true"
    with pytest.raises(DataError, match="no metrics of a run"):
        RLRun.read("r", tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/reward": 1.0}\n{"step": 1, "train/kl": 2.0}\n{"st')
    assert dict(RLRun.read("r", tmp_path).steps) == {1: {"train/reward": 1.0, "train/kl": 2.0}}


def test_the_verdict_names_what_became_of_each_run(runs: list[RLRun]) -> None:
    clean, hacked, cured = map(sum_up, runs)
    assert [one.outcome for one in (clean, hacked, cured)] == ["improved", "over-optimised", "improved"]
    said = opening([clean, hacked, cured])
    assert said.startswith("**no KL** exploited the reward model")
    assert "**clean** and **length calibrated** got better by gold" in said
    assert hacked.best_step == 50 and hacked.kl == pytest.approx(7.5**2) and hacked.gold is not None
    watched = runs[1].steps[NUM_STEPS]
    assert hacked.gold.by.value == watched["watch/gold_change"] and (hacked.gold.by.high or 0) < 0
    half = (hacked.gold.by.high or 0) - hacked.gold.by.value
    assert half == pytest.approx(1.96 * watched["watch/gold_change_error"], rel=1e-4)
    assert "; the proxy rose from " in hacked.sentence() and "gold rose from " in clean.sentence()
    best = list(runs[1].curve("validation/gold_reward").values())
    course = f"gold rose from {best[0]:.4f} to {best[5]:.3f} at step 50, then fell to −"
    assert course in hacked.sentence() and "Gold was best" in clean.sentence()
    unsure = {**runs[1].steps, 50: {**runs[1].steps[50], "watch/gold_change_error": 10.0}}
    assert "gold went from" in sum_up(replace(runs[1], steps=unsure)).sentence()
    for words in ("200 steps", "KL of 56.25 nats", "60 to 192 tokens", "Alarm at step 120: gold falls"):
        assert words in hacked.sentence()
    todo = " ".join(advice(hacked))
    for words in ("step 50", "reference_policy_kl_penalty", "optimizer.kwargs.lr", "length_calibration"):
        assert words in todo
    assert "ensemble" in todo and advice(clean) == []
    assert advice(cured) == ["Gold was at its best at the end: more steps may gain more."]


@pytest.mark.parametrize(("low", "high", "verb"), [(0.1, 0.3, "rose"), (-0.3, -0.1, "fell"), (-0.1, 0.1, "went"),
                                                   (None, None, "went")])  # fmt: skip
def test_a_course_claims_no_more_than_its_interval(low: float | None, high: float | None, verb: str) -> None:
    change = Change(1.0, 2.0, Metric("change", 1.0, low, high))
    assert change.course() == f"{verb} from 1.000 to 2.000"
    assert ("no interval was logged" in change.size()) is (low is None)


def test_without_gold_there_are_signs_at_most(tmp_path: Path) -> None:
    run = RLRun.read("blind", write_run(tmp_path / "r", without_gold(HACKED)))
    summary, found = sum_up(run), report_blocks([run])
    assert summary.gold is None and summary.outcome == "unknown"
    assert "there is no gold reward" in opening([summary])
    assert "signs of over-optimisation in **blind**" in opening([summary])
    assert "completions grow with the reward" in summary.sentence()
    assert "Proxy over the distance moved" in titles(found) and "Gold reward" not in titles(found)
    assert any("grpo.gold_environment" in text for text in advice(summary))
    assert found[1]["items"][0]["label"] == "Proxy, change"


def measured(
    proxy: float, gold: float | None = None, *, error: float | None = 0.01, tokens: float = 10.0, **more: Any
) -> RLRun:
    """Two validations; from 0.0 and 10 tokens to these, with such standard errors of the changes."""
    rows: dict[int, dict[str, float]] = {}
    for step, share in ((0, 0.0), (10, 1.0)):
        changes = {"proxy": share * proxy} | ({} if gold is None else {"gold": share * gold})
        rows[step] = {
            "validation/reward": share * proxy,
            "validation/proxy": share * proxy,
            "validation/kl": share * 9.0,
            "validation/mean_gen_tokens_per_sample": 10.0 + share * (tokens - 10.0),
        } | ({} if gold is None else {"validation/gold_reward": share * gold})
        if error is not None:
            for name, change in changes.items():
                rows[step] |= {f"watch/{name}_change": change, f"watch/{name}_change_error": error}
    return RLRun("r", rows, **more)


@pytest.mark.parametrize(
    ("change", "error", "outcome"),
    [(0.3, 0.1, "improved"), (-0.3, 0.1, "worse"), (0.1, 0.1, "level"), (0.3, None, "unknown")],
)
def test_a_change_of_gold_is_said_where_its_interval_says_it(change: float, error: float | None, outcome: str) -> None:
    summary = sum_up(measured(1.0, change, error=error))
    assert summary.outcome == outcome and ("no interval was logged" in summary.sentence()) is (error is None)


@pytest.mark.parametrize(
    ("kind", "proxy", "is_sign"),
    [
        ("kl_budget", 1.0, True), ("length_growth", 1.0, True), ("entropy_collapse", 1.0, True),
        ("kl_budget", -1.0, False), ("kl_budget", 0.01, False), ("truncation", 1.0, False), ("no_signal", 1.0, False),
    ],
)  # fmt: skip
def test_signs_are_alarms_of_three_kinds_where_the_proxy_rose(kind: AlarmKind, proxy: float, is_sign: bool) -> None:
    summary = sum_up(measured(proxy, alarms=(Alarm(kind, 10, "Said.", {}),)))
    assert ("signs of over-optimisation in **r**." in opening([summary])) is is_sign
    assert "**Alarm at step 10: " in summary.sentence()


def test_where_the_proxy_fell_too_the_policy_broke() -> None:
    words = ("The policy broke", "Completions grew", "ensemble")
    (broke,) = advice(sum_up(measured(-4.0, -0.4, tokens=60.0)))
    assert broke.startswith(words[0])
    cases = {
        (False, True, True): measured(4.0, -0.4, tokens=60.0),
        (False, False, False): measured(-4.0, -0.4, error=2.1, alarms=(Alarm("kl_budget", 10, "Far.", {}),)),
        (True, False, False): measured(-4.0),
    }
    for expected, run in cases.items():
        assert tuple(any(word in one for one in advice(sum_up(run))) for word in words) == expected
    assert not any(words[0] in one for one in advice(sum_up(measured(-4.0, 0.4))))


def test_gold_that_failed_everywhere_is_not_said_to_be_missing() -> None:
    config = {"grpo": {"gold_environment": "judge"}}
    failed = measured(1.0, config=config)
    said = "Whether **r** got better cannot be said: the gold reward gave no value."
    assert opening([sum_up(failed)]) == said and "the run printed it" in advice(sum_up(failed))[0]
    once = {**failed.steps, 10: {**failed.steps[10], "validation/gold_reward": 0.5}}
    few = sum_up(replace(failed, steps=once))
    assert "too few values to compare" in opening([few]) and advice(few) == []


def test_a_run_whose_completions_were_rewarded_alike_learnt_nothing() -> None:
    def silent(shares: list[float], **config: Any) -> RLRun:
        rows = {n: {"train/reward": 0.0, "train/groups_without_signal": share} for n, share in enumerate(shares, 1)}
        return RLRun("r", rows, config={"grpo": {"adv_estimator": config}})

    summary = sum_up(silent([1.0] * 19 + [0.5]))
    assert "**At 19 of 20 steps nothing was learnt from rewards: " in summary.sentence()
    assert "have to differ in reward" in advice(summary)[0]
    for shares in ([1.0, 1.0, 0.5], [0.99] * 9, []):
        assert "nothing was learnt" not in sum_up(silent([*shares, 0.0])).sentence()
    batch = silent([1.0] * 4, name="reinforce_plus_plus", minus_baseline=False)
    assert "nothing was learnt" not in sum_up(batch).sentence()  # groups differ from one another


def test_proxy_and_gold_are_over_the_root_of_kl_with_the_law_that_was_planted(
    runs: list[RLRun], blocks: list[dict[str, Any]]
) -> None:
    figure = block(blocks, "Proxy and gold over the distance moved")
    of = {series["name"]: series for series in figure["series"]}
    gold, proxy, law = (of[f"no KL: {what}"] for what in ("gold", "proxy", "gold, fitted law"))
    assert gold["x"][-1] == pytest.approx(7.5) and gold["x"][0] == 0.0 and gold["y"][0] == 0.0
    logged = list(runs[1].curve("validation/gold_reward").values())
    assert gold["y"][-1] == pytest.approx(logged[-1] - logged[0])
    assert gold["colour"] == proxy["colour"] == law["colour"] == 1 != of["clean: gold"]["colour"]
    assert len({one["dash"] for one in (gold, proxy, law)}) == 3
    planted = 7.5 * (HACKED.alpha - HACKED.beta * math.log(7.5))
    assert law["y"][-1] == pytest.approx(planted, abs=0.3) and "highest at 2." in figure["note"]
    assert figure["lines"] == [{"x": gold["x"][12], "label": "no KL: alarm", "colour": 1}]


def validations(golds: list[float], *, kls: list[float] | None = None, scale: float = 1.0, name: str = "r") -> RLRun:
    kls = kls or [float(n * n) for n in range(len(golds))]
    rows = {}
    for n, (gold, kl) in enumerate(zip(golds, kls, strict=True)):
        rows[10 * n] = {"validation/proxy": scale * n, "validation/reward": scale * n}
        rows[10 * n] |= {"validation/gold_reward": gold, "validation/kl": kl}
    return RLRun(name, rows)


LAW = [0.0] + [d * (1.0 - 0.4 * math.log(d)) for d in range(1, 8)]


@pytest.mark.parametrize(
    ("golds", "kls", "expected"),
    [
        (LAW, None, True),
        (LAW[:5], None, False),  # four points
        (LAW[1:], [float(n * n) for n in range(1, 8)], False),  # no validation at the start
        ([0.0, 1, -1, 1, -1, 1, -1, 1], None, False),  # no law describes this
        (LAW, [0.0, 1, 1, 1, 1, 1, 1, -1.0], False),  # all points at one distance
    ],
)
def test_a_law_is_fitted_only_where_it_can_be(golds: list[float], kls: list[float] | None, expected: bool) -> None:
    figure = next(one for one in report_blocks([validations(golds, kls=kls)]) if "distance" in one.get("title", ""))
    assert ("gold, fitted law" in [one["name"] for one in figure["series"]]) is expected


def test_runs_that_went_far_apart_share_logarithmic_axes() -> None:
    near = validations(LAW, kls=[0.01 * n * n for n in range(8)], name="near")
    found = report_blocks([near, validations(LAW, name="far")])
    figure = block(found, "Proxy and gold over the distance moved")
    assert figure["x_scale"] == "log" and "logarithmic" in figure["x_label"] and "the axis is log" in figure["note"]
    of = {series["name"]: series for series in figure["series"]}
    assert all(x > 0 for one in of.values() for x in one["x"])
    assert of["far: gold"]["x"] == [1, 2, 3, 4, 5, 6, 7] and of["far: gold"]["y"] == pytest.approx(LAW[1:])
    assert of["near: proxy"]["labels"][0] == "step 10, distance 0.100"
    assert of["far: gold, fitted law"]["y"][-1] == pytest.approx(LAW[-1], abs=1e-6)
    assert block(found, "KL to the reference")["y_scale"] == "symlog"
    alone = report_blocks([validations(LAW)])
    assert block(alone, "Proxy and gold over the distance moved")["x_scale"] == "linear"
    apart = [one for one in titles(report_blocks([validations([0.0, 0.1, 0.2])])) if "distance" in one]
    assert apart == ["Gold over the distance moved", "Proxy over the distance moved"]  # scales that differ


def test_rewards_that_move_are_shown_on_a_scale_that_stays() -> None:
    """The shaped reward stays near 0 while the raw one rises from 1 to 3; the watch has seen the raw one."""
    rows = {}
    for n in range(3):
        of_validation = {"proxy": 1.0 + n, "raw_reward": 1.0 + n, "reward": 0.1 * n, "kl": float(n)}
        rows[10 * n] = {f"validation/{name}": value for name, value in of_validation.items()}
        rows[10 * n] |= {"train/reward": 0.2, "train/raw_reward": 1.5 + n, "watch/proxy_error": 0.2}
        rows[10 * n] |= {"watch/proxy_change": float(n), "watch/proxy_change_error": 0.1}
    run = RLRun("r", rows)
    assert "the proxy rose from 1.000 to 3.000" in sum_up(run).sentence()
    assert "reward before shaping" in sum_up(run).sentence()
    found = report_blocks([run])
    assert block(found, "Proxy over the distance moved")["series"][0]["y"] == [0.0, 1.0, 2.0]
    validation, training = block(found, "Proxy")["series"]
    assert validation["y"] == [1.0, 2.0, 3.0] and training["y"] == [1.5, 2.5, 3.5]
    assert validation["high"] == pytest.approx([y + 0.392 for y in validation["y"]], abs=1e-4)
    moving = block(found, "Reward as it is optimised")["series"]
    assert moving[0]["y"] == [0.0, 0.1, 0.2] and "low" not in moving[0]
    assert "Proxy, before shaping" not in titles(found)


def test_proxies_of_different_rewards_are_not_to_be_compared(runs: list[RLRun], blocks: list[dict[str, Any]]) -> None:
    said = "Proxies of different runs do not compare"
    assert said in blocks[0]["markdown"] and scales_remark(runs[:2]) == ""  # another KL penalty moves no scale
    config = {**runs[0].config, "env": {**runs[0].config["env"], "g": {"n": 1}}, "grpo": {"gold_environment": "g"}}
    gold = replace(runs[0], name="other gold", config=config)
    assert scales_remark([runs[0], gold]) == ""
    scaled = replace(gold, config={**runs[0].config, "grpo": {"reward_scaling": {"enabled": True, "target_max": 2.0}}})
    assert scales_remark([runs[0], scaled]).startswith(said)


def test_curves_of_many_steps_are_means_of_neighbours() -> None:
    rows = {step: {"train/reward": float(step), "train/num_failed": 0.0} for step in range(1, 1001)}
    rows[500]["train/reward"] = math.nan
    found = report_blocks([RLRun("r", rows)])
    (series,) = block(found, "Proxy")["series"]
    assert len(series["x"]) == 60 and series["x"] == series["y"] and series["x"][0] == 9.0
    assert block(found, "Rewards that failed")["folded"]  # nothing but zeros
    assert "Entropy of the policy" not in titles(found)


def test_samples_are_first_best_and_last_of_the_same_prompt(blocks: list[dict[str, Any]]) -> None:
    samples = block(blocks, "Prompts and completions")
    assert len(samples["items"]) == 7
    for item in samples["items"]:
        assert [row["name"] for row in item["rows"]] == ["clean", "no KL", "length calibrated"]
    _, hacked, cured = (row["completions"] for row in samples["items"][0]["rows"])
    assert [completion["label"] for completion in hacked] == ["step 0", "step 50", "step 200"]
    assert hacked[1]["flags"] == ["gold is best on average"] and hacked[2]["flags"] == ["cut"]
    assert [number["label"] for number in hacked[2]["numbers"]] == ["reward", "gold", "KL", "tokens"]
    assert [one["label"] for one in cured] == ["step 0", "step 100", "step 200"]  # best at the end: the middle
    assert "before shaping" in [number["label"] for number in cured[2]["numbers"]]
    line = {"step": 1, "prompt": [], "completions": [{"text": "", "reward": None, "gold_reward": None}]}
    (item,) = block(report_blocks([RLRun("r", {1: {}}, samples=(line,))]), "Prompts and completions")["items"]
    (completion,) = item["rows"][0]["completions"]  # a reward that failed shows as a dash
    assert completion["numbers"] == [{"label": "reward", "value": None, "format": "signed"}]


def test_settings_that_differ_come_first(runs: list[RLRun], blocks: list[dict[str, Any]]) -> None:
    differing = {row["setting"]: row for row in block(blocks, "What differs")["rows"]}
    assert "loss_fn.reference_policy_kl_penalty" in differing and "policy.model_name" not in differing
    calibration = differing["env.reward_model.reward_shaping.length_calibration"]
    assert (calibration["run0"], calibration["run2"]) == (None, "true")
    every = block(blocks, "All settings")
    assert every["folded"] and "policy.model_name" in [row["setting"] for row in every["rows"]]
    config = dict(runs[0].config)
    pair = [replace(runs[0], name=name, config=config | {"logger": {"log_dir": name}}) for name in "ab"]
    assert "What differs" not in titles(report_blocks(pair))  # folders are no difference


def test_runs_with_hardly_anything_are_shown(tmp_path: Path) -> None:
    cases = {
        "one step": RLRun("", {1: {"train/reward": 0.5}}),
        "nothing finite": RLRun("", {1: {"train/reward": math.nan}, 2: {"validation/reward": math.inf}}),
        "no reward": RLRun("", {1: {"train/loss": 0.5}}, alarms=(Alarm("truncation", 1, "Cut.", {}),)),
        "one validation": validations([1.0], kls=[0.1]),
        "negative KL": validations([0.0, 1.0, 2.0], kls=[0.0, -0.1, -0.2]),
        "training alone": RLRun("", {n: {"train/reward": n, "train/gold_reward": -n} for n in range(9)}),
    }
    named = [replace(run, name=name) for name, run in cases.items()]
    for run in named:
        report_blocks([run])
    assert "training batches" in sum_up(cases["training alone"]).sentence()
    page = write_rl_report(named, tmp_path / "new" / "rl.html", title="All")
    assert sorted(path.name for path in page.parent.iterdir()) == ["rl.html", "rl.json"]
    assert json.loads(page.with_suffix(".json").read_text())["title"] == "All"
    for wrong in ([], [named[0], named[0]]):
        with pytest.raises(ConfigError):
            write_rl_report(wrong, page, title="t")
