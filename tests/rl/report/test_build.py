"""What the RL report says and shows, as blocks: verdicts, figures, samples, settings."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rl_report_sample import CLEAN, HACKED, NUM_STEPS, sample_runs, without_gold, write_run

from treeward.errors import ConfigError, DataError
from treeward.evaluation.report.blocks import check_blocks
from treeward.rl.report.build import report_blocks, write_rl_report
from treeward.rl.report.findings import KINDS, Change, advice, opening, scales_remark, sum_up
from treeward.rl.report.reading import RLRun
from treeward.rl.watch import Alarm, AlarmKind


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RLRun]:
    return sample_runs(tmp_path_factory.mktemp("runs"))


def run_of(rows: dict[int, dict[str, float]], **more: Any) -> RLRun:
    return RLRun("r", rows, **more)


def block(blocks: list[dict[str, Any]], title: str) -> dict[str, Any]:
    return next(one for one in blocks if one.get("title") == title)


def titles(blocks: list[dict[str, Any]]) -> list[str]:
    return [one["title"] for one in blocks if one.get("title")]


def test_a_run_is_read_as_it_was_logged(runs: list[RLRun]) -> None:
    hacked = runs[1]
    assert hacked.last_step == NUM_STEPS and hacked.alarm_step == 120
    gold = hacked.curve("validation/gold_reward")
    assert gold.steps == tuple(range(0, NUM_STEPS + 1, 10)) and gold.at(15) is None
    assert gold.latest(15) == gold.at(10) == gold.values[1]
    training = hacked.curve("train/gold_reward")
    assert training.num_missing == 4 and len(training.steps) == NUM_STEPS - 4  # the "NaN" of every 50th step
    assert hacked.curve("no", "train/lr").values[0] == 1e-4
    assert hacked.setting("policy.optimizer.kwargs.lr") == 1e-4 and hacked.setting("policy.model_name.x") is None
    assert runs[2].settings()["env.reward_model.reward_shaping.length_calibration"] == "true"
    assert len(hacked.samples) == 21 * 7


def test_a_folder_without_metrics_and_lines_that_are_no_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no metrics of a run"):
        RLRun.read("r", tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/reward": 1.0}\n{"step": 1, "train/kl": 2.0}\n{"st')
    run = RLRun.read("r", tmp_path)
    assert dict(run.steps) == {1: {"train/reward": 1.0, "train/kl": 2.0}}
    for wrong in ('{"step": 3}', '{"step": 3, "prompt": [], "completions": [{"reward": 1}]}'):
        (tmp_path / "samples.jsonl").write_text(wrong + "\n")
        with pytest.raises(DataError, match="not a logged sample") as raised:
            RLRun.read("r", tmp_path)
        assert "samples.jsonl, step 3" in str(raised.value)


def test_the_verdict_names_what_became_of_each_run(runs: list[RLRun]) -> None:
    clean, hacked, cured = map(sum_up, runs)
    assert [one.outcome for one in (clean, hacked, cured)] == ["improved", "over-optimised", "improved"]
    said = opening([clean, hacked, cured])
    assert said.startswith("**no KL** exploited the reward model")
    assert "**clean** and **length calibrated** got better by gold" in said
    assert hacked.best_step == 50 and hacked.kl == pytest.approx(7.5**2)
    assert hacked.gold is not None and hacked.proxy is not None and hacked.gold.high is not None
    assert hacked.gold.high < 0 < (hacked.proxy.low or 0)
    watched = runs[1].steps[NUM_STEPS]
    assert hacked.gold.value == watched["watch/gold_change"]
    assert (hacked.gold.low or 0) + hacked.gold.high == pytest.approx(2 * hacked.gold.value)
    assert hacked.gold.high - hacked.gold.value == pytest.approx(1.96 * watched["watch/gold_change_error"], rel=1e-4)
    assert hacked.fall == pytest.approx(watched["watch/gold_fall"])
    assert "; the proxy rose from " in hacked.sentence() and "gold rose from " in clean.sentence()
    best = hacked.run.curve("validation/gold_reward").values
    assert f"gold rose from {best[0]:.4f} to {best[5]:.3f} at step 50, then fell to" in hacked.sentence().replace(
        "−", "-"
    )
    unsure = dict(runs[1].steps)
    unsure[50] = {**unsure[50], "watch/gold_change_error": 10.0}
    assert "gold went from" in sum_up(replace(runs[1], steps=unsure)).sentence()
    assert "(−" in hacked.sentence().split("then fell to ")[1]
    assert "Gold was best" in clean.sentence() and "Gold was best" not in hacked.sentence()
    for words in ("200 steps", "KL of 56.25 nats", "at step 50", "60 to 192 tokens", "Alarm at step 120: gold falls"):
        assert words in hacked.sentence()
    todo = " ".join(advice(hacked))
    for words in ("step 50", "reference_policy_kl_penalty` (it was 0.0)", "lr` (it was 0.0001)", "length_calibration"):
        assert words in todo
    assert "ensemble" in todo and advice(clean) == []
    assert advice(cured) == ["Gold was at its best at the end: more steps may gain more."]


@pytest.mark.parametrize(
    ("change", "error", "outcome"),
    [(0.3, 0.1, "improved"), (-0.3, 0.1, "worse"), (0.1, 0.1, "level"), (0.3, None, "unknown")],
)
def test_a_change_is_said_where_its_interval_says_it(change: float, error: float | None, outcome: str) -> None:
    last = {"validation/reward": 1.0, "validation/gold_reward": change}
    if error is not None:
        last |= {"watch/gold_change": change, "watch/gold_change_error": error}
    summary = sum_up(run_of({0: {"validation/reward": 0.0, "validation/gold_reward": 0.0}, 5: last}))
    assert summary.outcome == outcome
    assert ("no interval was logged" in summary.sentence()) is (error is None) or outcome != "unknown"
    check_blocks(report_blocks([summary.run]), ())


def test_without_gold_there_are_signs_at_most(tmp_path: Path) -> None:
    run = RLRun.read("blind", write_run(tmp_path / "r", without_gold(HACKED)))
    summary = sum_up(run)
    assert summary.gold is None and summary.outcome == "unknown"
    said = opening([summary])
    assert "there is no gold reward" in said and "signs of over-optimisation in **blind**" in said
    assert "completions grow with the reward" in summary.sentence()
    blocks = report_blocks([run])
    assert "Proxy over the distance moved" in titles(blocks) and "Gold reward" not in titles(blocks)
    assert any("grpo.gold_environment" in text for text in advice(summary))
    assert [item["label"] for item in blocks[1]["items"]][0] == "Proxy, change"


def measured(
    proxy: float, gold: float | None = None, *, error: float = 0.01, tokens: float = 10.0, **more: Any
) -> RLRun:
    """Two validations; from 0.0 and 10 tokens to these, with such standard errors of the changes."""
    rows: dict[int, dict[str, float]] = {}
    for step, share in ((0, 0.0), (10, 1.0)):
        rows[step] = {
            "validation/reward": share * proxy,
            "validation/kl": share * 9.0,
            "validation/mean_gen_tokens_per_sample": 10.0 + share * (tokens - 10.0),
            "watch/proxy_change": share * proxy,
            "watch/proxy_change_error": error,
        }
        if gold is not None:
            rows[step] |= {
                "validation/gold_reward": share * gold,
                "watch/gold_change": share * gold,
                "watch/gold_change_error": error,
            }
    return run_of(rows, **more)


@pytest.mark.parametrize(
    ("kind", "proxy", "is_sign"),
    [
        ("kl_budget", 1.0, True), ("length_growth", 1.0, True), ("entropy_collapse", 1.0, True),
        ("kl_budget", -1.0, False), ("kl_budget", 0.01, False), ("entropy_collapse", -1.0, False),
        ("truncation", 1.0, False), ("no_signal", 1.0, False),
    ],
)  # fmt: skip
def test_signs_are_alarms_of_three_kinds_where_the_proxy_rose(kind: AlarmKind, proxy: float, is_sign: bool) -> None:
    run = measured(proxy, alarms=(Alarm(kind, 10, "Said.", {}),))
    said = opening([sum_up(run)])
    assert ("signs of over-optimisation in **r**." in said) is is_sign
    assert (f"The watch found in **r** that {KINDS[kind]}." in said) is not is_sign
    assert f"**Alarm at step 10: {KINDS[kind]}.**" in sum_up(run).sentence()
    check_blocks(report_blocks([run]), ())


def test_a_sign_and_another_alarm_are_told_apart() -> None:
    both = measured(1.0, alarms=(Alarm("truncation", 0, "Cut.", {}), Alarm("kl_budget", 10, "Far.", {})))
    cut = replace(both, name="cut", alarms=both.alarms[:1])
    said = opening([sum_up(both), sum_up(cut)])
    assert "signs of over-optimisation in **r**. The watch found in **r** and **cut** that completions are cut." in said
    assert "budget" not in said


def test_where_the_proxy_fell_too_the_policy_broke() -> None:
    settings = {"policy": {"optimizer": {"kwargs": {"lr": 1e3}}}, "loss_fn": {"reference_policy_kl_penalty": 0.01}}
    broke = "The policy broke"
    fell = sum_up(measured(-4.0, -0.4, tokens=60.0, config=settings))
    first, *others = advice(fell)
    assert first.startswith(broke) and "lr` (it was 1000.0)" in first and "kl_penalty` (it was 0.01)" in first
    assert others == []
    rose = advice(sum_up(measured(4.0, -0.4, tokens=60.0)))
    assert [any(word in one for one in rose) for word in (broke, "Completions grew", "ensemble")] == [False, True, True]
    level = advice(sum_up(measured(-4.0, -0.4, error=2.1, tokens=60.0, alarms=(Alarm("kl_budget", 10, "Far.", {}),))))
    assert [any(word in one for one in level) for word in (broke, "Completions grew", "ensemble")] == [False] * 3
    assert level[0].startswith("Hold the policy nearer")
    assert advice(sum_up(measured(-4.0)))[0].startswith(broke)  # without gold
    of_level_gold = advice(sum_up(measured(-4.0, 0.0)))
    assert of_level_gold[0].startswith(broke) and not any("raise `policy.optimizer" in one for one in of_level_gold)
    assert not any(broke in one for one in advice(sum_up(measured(-4.0, 0.4))))


def test_gold_that_failed_everywhere_is_not_said_to_be_missing() -> None:
    config = {"grpo": {"gold_environment": "judge"}}
    failed = measured(1.0, config=config)
    said = opening([sum_up(failed)])
    assert said == "Whether **r** got better cannot be said: the gold reward gave no value."
    (todo,) = advice(sum_up(failed))
    assert "grpo.gold_environment: judge" in todo and "the run printed it" in todo and "Give a gold" not in todo
    nan = {step: {**row, "validation/gold_reward": math.nan} for step, row in failed.steps.items()}
    assert opening([sum_up(replace(failed, steps=nan))]) == said
    once = {**failed.steps, 10: {**failed.steps[10], "validation/gold_reward": 0.5}}
    few = sum_up(replace(failed, steps=once))
    assert "too few values to compare" in opening([few]) and advice(few) == []
    none = measured(1.0, config={"grpo": {"gold_environment": None}})
    assert "there is no gold reward" in opening([sum_up(none)]) and "Give a gold reward" in advice(sum_up(none))[-1]


def silent(shares: list[float], config: dict[str, Any] | None = None, **metrics: float) -> RLRun:
    rows = {
        n: {"train/reward": 0.0, "train/groups_without_signal": share} | metrics for n, share in enumerate(shares, 1)
    }
    return run_of(rows, config=config or {})


def test_a_run_whose_completions_were_rewarded_alike_learnt_nothing() -> None:
    run = silent([1.0] * 4)
    summary = sum_up(run)
    assert opening([summary]).startswith("**r** learnt nothing from rewards: at every step no group")
    assert "cannot be said" not in opening([summary])
    nothing = "**Nothing was learnt from rewards: at every step all completions of a group were rewarded alike"
    assert f"{nothing}.**" in summary.sentence()
    assert "have to differ in reward" in advice(summary)[0]
    check_blocks(report_blocks([run]), ())
    assert f"{nothing}.**" in sum_up(silent([1.0])).sentence()
    assert f"{nothing}, or their rewards failed.**" in sum_up(silent([1.0] * 4, **{"train/num_failed": 1.0})).sentence()

    nearly = sum_up(silent([1.0] * 19 + [0.5]))
    assert "**At 19 of 20 steps nothing was learnt from rewards: " in nearly.sentence()
    assert "learnt nothing" not in opening([nearly]) and "Most groups teach nothing" in advice(nearly)[0]
    for shares in ([1.0, 1.0, 0.5], [0.99] * 9, []):
        assert "othing was learnt" not in sum_up(silent([*shares, 0.0])).sentence()
    batch = {"grpo": {"adv_estimator": {"name": "reinforce_plus_plus", "minus_baseline": False}}}
    assert "othing was learnt" not in sum_up(silent([1.0] * 4, batch)).sentence()  # groups differ from one another
    ignored = {"grpo": {"adv_estimator": {"name": "grpo", "minus_baseline": False}}}
    assert nothing in sum_up(silent([1.0] * 4, ignored)).sentence()

    level = measured(0.0, 0.0)
    rows = {step: {**row, "train/groups_without_signal": 1.0} for step, row in level.steps.items()}
    watched = sum_up(replace(level, steps=rows, alarms=(Alarm("no_signal", 10, "Said.", {}),)))
    assert nothing in watched.sentence() and not any("Train for longer" in one for one in advice(watched))


def test_proxy_and_gold_are_over_the_root_of_kl_with_the_law_that_was_planted(runs: list[RLRun]) -> None:
    figure = block(report_blocks(runs), "Proxy and gold over the distance moved")
    of = {series["name"]: series for series in figure["series"]}
    gold, proxy, law = (of[f"no KL: {what}"] for what in ("gold", "proxy", "gold, fitted law"))
    assert gold["x"][-1] == pytest.approx(7.5) and gold["x"][0] == 0.0 and gold["y"][0] == 0.0
    logged = runs[1].curve("validation/gold_reward").values
    assert gold["y"][-1] == pytest.approx(logged[-1] - logged[0])
    assert gold["colour"] == proxy["colour"] == law["colour"] == 1 != of["clean: gold"]["colour"]
    assert len({one["dash"] for one in (gold, proxy, law)}) == 3
    planted = 7.5 * (HACKED.alpha - HACKED.beta * math.log(7.5))
    assert law["y"][-1] == pytest.approx(planted, abs=0.3) and law["y"][0] == 0.0
    assert "highest at 2." in figure["note"]
    (mark,) = figure["lines"]
    assert mark["x"] == gold["x"][12] and mark["colour"] == 1 and mark["label"] == "no KL: alarm"
    assert "no KL: gold: 0.000 at 0" in figure["spoken"]


def validations(golds: list[float], *, kls: list[float] | None = None, scale: float = 1.0) -> RLRun:
    kls = kls or [float(n * n) for n in range(len(golds))]
    return run_of({
        10 * n: {"validation/reward": scale * n, "validation/gold_reward": gold, "validation/kl": kl}
        for n, (gold, kl) in enumerate(zip(golds, kls, strict=True))
    })  # fmt: skip


def test_a_law_is_fitted_only_where_it_can_be() -> None:
    law = [0.0] + [d * (1.0 - 0.4 * math.log(d)) for d in range(1, 8)]

    def is_fitted(run: RLRun) -> bool:
        return "gold, fitted law" in [one["name"] for one in report_blocks([run])[2]["series"]]

    assert is_fitted(validations(law))
    assert not is_fitted(validations(law[:5]))  # four points
    assert not is_fitted(validations(law[1:], kls=[n * n for n in range(1, 8)]))  # no validation at the start
    assert not is_fitted(validations([0.0, 1, -1, 1, -1, 1, -1, 1]))  # no law describes this
    assert not is_fitted(validations(law, kls=[0.0, 1, 1, 1, 1, 1, 1, -1.0]))  # all points at one distance


@pytest.mark.parametrize(("low", "high", "verb"), [(0.1, 0.3, "rose"), (-0.3, -0.1, "fell"), (-0.1, 0.1, "went"),
                                                   (None, None, "went")])  # fmt: skip
def test_a_course_claims_no_more_than_its_interval(low: float | None, high: float | None, verb: str) -> None:
    assert Change(1.0, 2.0, 1.0, low, high).course() == f"{verb} from 1.000 to 2.000"


def test_runs_that_went_far_apart_share_a_logarithmic_axis() -> None:
    law = [0.0] + [d * (1.0 - 0.4 * math.log(d)) for d in range(1, 8)]
    near = replace(validations(law, kls=[0.01 * n * n for n in range(8)]), name="near")
    far = replace(validations(law), name="far")
    figure = block(report_blocks([near, far]), "Proxy and gold over the distance moved")
    assert figure["x_scale"] == "log" and "logarithmic" in figure["x_label"] and "the axis is log" in figure["note"]
    of = {series["name"]: series for series in figure["series"]}
    assert all(x > 0 for one in of.values() for x in one["x"])
    assert of["far: gold"]["x"] == [1, 2, 3, 4, 5, 6, 7] and of["far: gold"]["y"] == pytest.approx(law[1:])
    assert of["near: proxy"]["labels"][0] == "step 10, distance 0.100"
    fitted = of["far: gold, fitted law"]
    assert fitted["x"][-1] == pytest.approx(7) and fitted["y"][-1] == pytest.approx(law[-1], abs=1e-6)
    closer = replace(validations(law, kls=[0.25 * n * n for n in range(8)]), name="closer")
    figure = block(report_blocks([closer, far]), "Proxy and gold over the distance moved")
    assert figure["x_scale"] == "linear" and figure["series"][0]["x"][0] == 0.0


def test_one_run_far_from_the_reference_does_not_hide_the_others() -> None:
    golds = [0.0, 0.1, 0.2]
    runs = [
        replace(validations(golds, kls=[0.0, 1.0, top]), name=name)
        for name, top in (("near", 8.0), ("far", 400.0), ("nearer", 4.0))
    ]
    closer = block(report_blocks(runs), "KL to the reference, without far")
    assert [(one["name"], one["colour"]) for one in closer["series"]] == [
        ("near: validation", 0),
        ("nearer: validation", 2),
    ]
    assert "KL to the reference, without near" not in titles(report_blocks([runs[0], runs[2]]))
    assert [one for one in titles(report_blocks(runs[1:2])) if "KL" in one] == ["KL to the reference"]


def test_rewards_that_move_are_shown_on_a_scale_that_stays() -> None:
    """The shaped reward stays near 0 while the raw one rises from 1 to 3; the watch has seen the raw one."""
    rows = {}
    for n in range(3):
        rows[10 * n] = {
            "validation/proxy": 1.0 + n,
            "validation/raw_reward": 1.0 + n,
            "validation/reward": 0.1 * n,
            "validation/kl": float(n),
            "train/reward": 0.2,
            "train/raw_reward": 1.5 + n,
            "watch/proxy_change": float(n),
            "watch/proxy_change_error": 0.1,
            "watch/proxy_error": 0.2,
        }
    run = run_of(rows)
    proxy = sum_up(run).proxy
    assert proxy is not None and (proxy.first, proxy.last, proxy.value) == (1.0, 3.0, 2.0)
    assert "the proxy rose from 1.000 to 3.000" in sum_up(run).sentence()
    assert "reward before shaping" in sum_up(run).sentence()
    blocks = report_blocks([run])
    assert block(blocks, "Proxy over the distance moved")["series"][0]["y"] == [0.0, 1.0, 2.0]
    validation, training = block(blocks, "Proxy")["series"]
    assert validation["y"] == [1.0, 2.0, 3.0] and training["y"] == [1.5, 2.5, 3.5]
    assert validation["high"] == pytest.approx([y + 0.392 for y in validation["y"]], abs=1e-4)
    assert "running statistics" in block(blocks, "Proxy")["note"]
    moving = block(blocks, "Reward after running statistics")["series"]
    assert (
        moving[0]["y"] == [0.0, 0.1, 0.2] and "low" not in moving[0] and "Proxy, before shaping" not in titles(blocks)
    )
    older = run_of({step: {k: v for k, v in row.items() if k != "validation/proxy"} for step, row in rows.items()})
    assert older.proxy("validation").values == (0.0, 0.1, 0.2) and older.proxy("train").values[0] == 0.2
    assert "Reward after running statistics" not in titles(report_blocks([older]))


def test_proxies_of_different_rewards_are_not_to_be_compared(runs: list[RLRun]) -> None:
    said = "Proxies of different runs do not compare"
    blocks = report_blocks(runs)
    places = (blocks[0]["markdown"], *(block(blocks, title)["note"] for title in ("The runs side by side", "Proxy")))
    assert all(said in place for place in places)
    assert "do not compare" not in report_blocks(runs[:2])[0]["markdown"]  # another KL penalty moves no scale
    gold = replace(
        runs[0],
        name="other gold",
        config={**runs[0].config, "env": {**runs[0].config["env"], "g": {"n": 1}}, "grpo": {"gold_environment": "g"}},
    )
    assert scales_remark([runs[0], gold]) == ""
    scaled = replace(gold, config={**runs[0].config, "grpo": {"reward_scaling": {"enabled": True, "target_max": 2.0}}})
    assert scales_remark([runs[0], scaled]).startswith(said)
    assert scales_remark([replace(runs[0], config={}), runs[2]]) == ""  # what is not known is not said


def test_folders_are_no_difference(runs: list[RLRun]) -> None:
    config = dict(runs[0].config)
    pair = [replace(runs[0], name=name, config=config | {"logger": {"log_dir": name}}) for name in "ab"]
    blocks = report_blocks(pair)
    assert "What differs" not in titles(blocks) and "but for folders" in block(blocks, "Settings")["markdown"]


def test_scales_that_differ_have_figures_of_their_own() -> None:
    golds = [0.0, 0.1, 0.2]
    assert [one for one in titles(report_blocks([validations(golds)])) if "distance" in one] == [
        "Gold over the distance moved",
        "Proxy over the distance moved",
    ]
    together = report_blocks([validations(golds, scale=0.1)])
    assert [one for one in titles(together) if "distance" in one] == ["Proxy and gold over the distance moved"]


def test_curves_of_many_steps_are_means_of_neighbours() -> None:
    rows = {step: {"train/reward": float(step), "train/num_failed": 0.0} for step in range(1, 1001)}
    rows[500]["train/reward"] = math.nan
    blocks = report_blocks([run_of(rows)])
    (series,) = block(blocks, "Proxy")["series"]
    assert len(series["x"]) == 59 and series["x"] == series["y"]  # 999 values, 17 each
    assert series["x"][0] == 9.0
    assert "At 1 step it is not a finite number" in block(blocks, "Proxy")["note"]
    assert block(blocks, "Rewards that failed")["folded"]  # nothing but zeros
    assert "mean of up to 17" in block(blocks, "Over the steps")["markdown"]
    assert "Proxy, before shaping" not in titles(blocks) and "Entropy of the policy" not in titles(blocks)


def test_shaping_that_changes_rewards_shows_both(runs: list[RLRun]) -> None:
    before = block(report_blocks(runs), "Proxy, before shaping")
    assert [one["name"] for one in before["series"]] == ["length calibrated: validation", "length calibrated: training"]


def test_bands_are_of_the_logged_errors(runs: list[RLRun]) -> None:
    validation = block(report_blocks(runs), "Gold reward")["series"][2]
    error = runs[1].curve("watch/gold_error").values
    assert validation["name"] == "no KL: validation"
    assert validation["high"][3] - validation["y"][3] == pytest.approx(1.96 * error[3], rel=1e-4)


def test_samples_are_first_best_and_last_of_the_same_prompt(runs: list[RLRun]) -> None:
    samples = block(report_blocks(runs), "Prompts and completions")
    assert len(samples["items"]) == 7
    for item in samples["items"]:
        assert [row["name"] for row in item["rows"]] == ["clean", "no KL", "length calibrated"]
    hacked = samples["items"][0]["rows"][1]["completions"]
    assert [completion["label"] for completion in hacked] == ["step 0", "step 50", "step 200"]
    assert hacked[1]["flags"] == ["gold is best on average"] and hacked[2]["flags"] == ["cut"]
    assert [number["label"] for number in hacked[2]["numbers"]] == ["reward", "gold", "KL", "tokens"]
    cured = samples["items"][0]["rows"][2]["completions"]
    assert [completion["label"] for completion in cured] == [
        "step 0",
        "step 100",
        "step 200",
    ]  # best at the end: the middle
    assert "before shaping" in [number["label"] for number in cured[2]["numbers"]]


def test_a_reward_that_failed_shows_as_a_dash() -> None:
    completion = {"text": "", "reward": None, "gold_reward": None}
    run = run_of({1: {"train/reward": 1.0}}, samples=({"step": 1, "prompt": [], "completions": [completion]},))
    (item,) = block(report_blocks([run]), "Prompts and completions")["items"]
    assert item["rows"][0]["completions"] == [
        {
            "label": "step 1",
            "text": "",
            "numbers": [{"label": "reward", "value": None, "format": "signed"}],
            "flags": [],
        }
    ]


def test_settings_that_differ_come_first(runs: list[RLRun]) -> None:
    blocks = report_blocks(runs)
    differing = [row["setting"] for row in block(blocks, "What differs")["rows"]]
    assert "loss_fn.reference_policy_kl_penalty" in differing and "policy.model_name" not in differing
    calibration = next(row for row in block(blocks, "What differs")["rows"] if "calibration" in row["setting"])
    assert (calibration["run0"], calibration["run2"]) == (None, "true")
    every = block(blocks, "All settings")
    assert every["folded"] and "policy.model_name" in [row["setting"] for row in every["rows"]]
    assert "What differs" not in titles(report_blocks(runs[:1]))


def test_runs_with_hardly_anything_are_shown(tmp_path: Path) -> None:
    alarm = Alarm("truncation", 1, "Cut.", {})
    cases = {
        "one step": run_of({1: {"train/reward": 0.5}}),
        "nothing finite": run_of({1: {"train/reward": math.nan}, 2: {"validation/reward": math.inf}}),
        "no reward": run_of({1: {"train/loss": 0.5}}, alarms=(alarm,)),
        "one validation": run_of({1: {"validation/reward": 0.5, "validation/gold_reward": 1.0, "validation/kl": 0.1}}),
        "no KL": run_of({1: {"validation/reward": 0.5}, 2: {"validation/reward": 0.6}}),
        "negative KL": validations([0.0, 1.0, 2.0], kls=[0.0, -0.1, -0.2]),
        "training alone": run_of({n: {"train/reward": n, "train/gold_reward": -n} for n in range(9)}),
        "watch alone": run_of({1: {"watch/alarm": 0.0}, 2: {"watch/alarm": 1.0}}),
    }
    named = [replace(run, name=name) for name, run in cases.items()]
    for run in named:
        page = write_rl_report([run], tmp_path / f"{run.name}.html", title=run.name)
        json.loads(page.with_suffix(".json").read_text())
    assert "training batches" in sum_up(cases["training alone"]).sentence()
    assert cases["watch alone"].alarm_step == 2
    write_rl_report(named, tmp_path / "all.html", title="All")


def test_the_page_and_its_numbers_have_the_name_that_was_asked_for(runs: list[RLRun], tmp_path: Path) -> None:
    page = write_rl_report(runs, tmp_path / "new" / "rl.html", title="Three")
    assert page == tmp_path / "new" / "rl.html"
    assert sorted(path.name for path in page.parent.iterdir()) == ["rl.html", "rl.json"]
    assert 'href="rl.json" download="rl.json"' in page.read_text()
    for wrong, path in (([], page), ([runs[0], runs[0]], page), (runs, tmp_path / "rl")):
        with pytest.raises(ConfigError):
            write_rl_report(wrong, path, title="t")


def test_a_clean_scenario_has_no_alarm(runs: list[RLRun]) -> None:
    assert runs[0].alarms == () and runs[0].alarm_step is None and CLEAN.name == runs[0].name
