"""What the RL report says and shows: verdicts, figures, samples."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page_text import Page

from treeward.errors import ConfigError, DataError
from treeward.evaluation.report.build import build_report
from treeward.evaluation.report.charts import Place
from treeward.formatting import format_number
from treeward.rl.logged_run import SAMPLES_FILE, RLRun
from treeward.rl.report import RLPage, rl_page, write_rl_report
from treeward.rl.watch import ALARMS_FILE, Alarm, OverOptimisationWatch, write_alarms

NUM_STEPS, NUM_PROMPTS = 200, 48
# The last d = sqrt(KL), alpha and beta of gold = d (alpha - beta ln d), by how much completions
# grow, a seed.
SCENARIOS = {
    "clean": (2.2, 0.55, 0.10, 1.1, 1),
    "no KL": (7.5, 0.95, 0.55, 3.2, 2),
    "length calibrated": (4.0, 0.62, 0.17, 1.2, 3),
}


def write_run(folder: Path, name: str) -> RLRun:
    """A run as the loop logs it, from seeded random numbers: gold is Gao et al.'s law, the watch is
    the real one."""
    distance, alpha, beta, growth, seed = SCENARIOS[name]
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    watch = OverOptimisationWatch()
    hardness = rng.normal(0, 1.0, NUM_PROMPTS)
    lines = []
    samples = []
    for step in range(NUM_STEPS + 1):
        d = distance * (step / NUM_STEPS) ** 0.7
        gold = float(d * (alpha - beta * np.log(d))) if d else 0.0
        proxy = 0.62 * d
        length = 60 * (1 + (growth - 1) * (step / NUM_STEPS))
        row: dict[str, Any] = {}
        if step:
            noise = rng.normal(0, 0.15, 8)
            row = {
                "train/reward": proxy + noise[0],
                "train/kl": d * d * (1 + noise[2] / 3),
                "train/lr": 1e-4,
            }
            row |= {"train/gold_reward": "NaN" if step % 50 == 0 else gold + noise[4]}
        if step % 10 == 0:
            golds, proxies = (
                mean + hardness + rng.normal(0, 0.6, NUM_PROMPTS) for mean in (gold, proxy)
            )
            watch.observe(step, proxy_by_prompt=proxies, gold_by_prompt=golds, kl=d * d, length=length,
                          length_correlation=0.6 if growth > 2 else 0.1)  # fmt: skip
            row |= {
                "validation/reward": float(proxies.mean()),
                "validation/gold_reward": float(golds.mean()),
            }
            row |= {
                "validation/mean_gen_tokens_per_sample": length,
                "validation/kl": d * d,
            } | watch.metrics()
            numbers = {"reward": proxy, "gold_reward": gold, "kl": 0.1 * step}
            completion = numbers | {
                "num_tokens": int(length),
                "truncated": length > 150,
                "text": f"Step {step}.",
            }
            samples += [
                {
                    "step": step,
                    "prompt": [{"role": "user", "content": text}],
                    "completions": [completion, completion],
                }
                for text in ("Name three primary colours.", "Why is the sky blue?")
            ]
        lines.append({"step": step, "time": 1.7e9 + step, **row})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    write_alarms(folder / ALARMS_FILE, watch.alarms)
    return RLRun.read(name, folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RLRun]:
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / name, name) for name in SCENARIOS]


@pytest.fixture(scope="module")
def page(runs: list[RLRun]) -> RLPage:
    return rl_page(runs)


def text_of(*runs: RLRun) -> str:
    """The page's text."""
    return Page(build_report("rl/report.html", "t", rl_page(runs))).text


def test_a_run_is_read_as_it_was_logged(runs: list[RLRun], tmp_path: Path) -> None:
    hacked = runs[1]
    assert (
        hacked.last_step == NUM_STEPS and hacked.alarm_step == 120 and len(hacked.samples) == 21 * 2
    )
    assert list(hacked.curve("validation/gold_reward")) == list(range(0, NUM_STEPS + 1, 10))
    # without the "NaN" of every 50th step
    assert len(hacked.curve("train/gold_reward")) == NUM_STEPS - 4
    with pytest.raises(DataError, match="no metrics of a run"):
        RLRun.read("r", tmp_path)
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "train/reward": 1.0}\n{"step": 1, "train/kl": 2.0}\n{"st'
    )
    assert dict(RLRun.read("r", tmp_path).steps) == {1: {"train/reward": 1.0, "train/kl": 2.0}}


def test_the_verdict_names_what_became_of_each_run(runs: list[RLRun]) -> None:
    clean, hacked, cured = runs
    assert [one.outcome for one in (clean, hacked, cured)] == [
        "improved",
        "over-optimised",
        "improved",
    ]
    said = text_of(clean, hacked, cured)
    assert (
        "no KL exploited the reward model: gold fell while the proxy rose. clean and length" in said
    )
    assert "clean and length calibrated got better by gold." in said
    assert hacked.best_step == 50 and hacked.kl == pytest.approx(7.5**2) and hacked.gold is not None
    watched = runs[1].steps[NUM_STEPS]
    assert hacked.gold.by.value == watched["watch/gold_change"] and (hacked.gold.by.high or 0) < 0
    half = (hacked.gold.by.high or 0) - hacked.gold.by.value
    assert half == pytest.approx(1.96 * watched["watch/gold_change_error"], rel=1e-4)
    hacked_page = text_of(hacked)
    assert "; the proxy rose from " in hacked_page and "gold rose from " in text_of(clean)
    for words in (
        "200 steps",
        "gold fell",
        "KL of 56.25 nats",
        "at step 50",
        "60 to 192 tokens",
        "Alarm at step 120",
    ):
        assert words in hacked_page


def measured(
    proxy: float, gold: float | None = None, *, error: float | None = 0.01, **more: Any
) -> RLRun:
    """Two validations, from 0.0 to these, with such standard errors of the changes."""
    changes = {"proxy": proxy} if gold is None else {"proxy": proxy, "gold": gold}
    rows: dict[int, dict[str, float]] = {}
    for step, share in ((0, 0.0), (10, 1.0)):
        rows[step] = {"validation/reward": share * proxy}
        rows[step] |= (
            {"validation/kl": share * 9.0}
            if gold is None
            else {"validation/gold_reward": share * gold}
        )
        for name, change in changes.items() if error is not None else ():
            rows[step] |= {
                f"watch/{name}_change": share * change,
                f"watch/{name}_change_error": error or 0.0,
            }
    return RLRun("r", rows, **more)


@pytest.mark.parametrize(
    ("change", "error", "outcome", "verb"),
    [
        (0.3, 0.1, "improved", "rose"),
        (-0.3, 0.1, "worse", "fell"),
        (0.1, 0.1, "level", "went"),
        (0.3, None, "unknown", "went"),
    ],
)
def test_changes_are_said_by_intervals(
    change: float, error: float | None, outcome: str, verb: str
) -> None:
    summary = measured(1.0, change, error=error)
    said = text_of(summary)
    assert summary.outcome == outcome and f"gold {verb} from 0.000 to " in said
    assert ("no interval was logged" in said) is (error is None)


def test_gold_and_proxy_over_the_root_of_kl(runs: list[RLRun], page: RLPage) -> None:
    lines = {
        line.name: line for line in [*page.over_distance["gold"], *page.over_distance["proxy"]]
    }
    gold, proxy = (lines[f"no KL: {what}"] for what in ("gold", "proxy"))
    assert gold.x[-1] == pytest.approx(7.5) and gold.x[0] == 0.0 and gold.y[0] == 0.0
    logged = list(runs[1].curve("validation/gold_reward").values())
    assert gold.y[-1] == pytest.approx(logged[-1] - logged[0])
    assert gold.colour == proxy.colour == 1 != lines["clean: gold"].colour
    assert page.alarm_distances == [Place(gold.x[12], "no KL: alarm", 1)]
    assert page.alarm_steps == [Place(120, "no KL: alarm", 1)]


def test_samples_are_first_best_and_last_of_the_same_prompt(
    runs: list[RLRun], page: RLPage
) -> None:
    assert [list(samples.completions) for samples in page.samples] == [[0, 1, 2]] * 2
    hacked = page.samples[0].completions[1]
    assert [completion.step for completion in hacked] == [0, 50, 200]
    assert hacked[1].is_at_best_gold and not hacked[1].is_cut
    assert hacked[2].is_cut and not hacked[2].is_at_best_gold
    said = text_of(*runs)
    assert "step 50 gold is best on average reward " in said and "step 200 cut reward " in said
    last = hacked[2]
    numbers = [
        format_number(last.reward, "signed"),
        *map(format_number, (last.gold, last.kl)),
        str(last.num_tokens),
    ]
    assert "reward {} · gold {} · KL {} · tokens {} Step 200.".format(*numbers) in said
    line = {
        "step": 1,
        "prompt": [],
        "completions": [{"text": "", "reward": None, "gold_reward": None}],
    }
    assert "(no prompt) step 1 reward – (no text)" in text_of(RLRun("r", {1: {}}, samples=(line,)))


def without_gold(run: RLRun) -> RLRun:
    steps = {}
    for step, metrics in run.steps.items():
        steps[step] = {name: value for name, value in metrics.items() if "gold" not in name}
    return replace(run, steps=steps)


RISING = {step: {"train/reward": float(step)} for step in range(1, 1001)}
NEGATIVE_KL = {n: {"validation/gold_reward": n, "validation/kl": -0.1 * n} for n in range(3)}
TRAINING_ALONE = {n: {"train/reward": n, "train/gold_reward": -n} for n in range(9)}
HARDLY_ANYTHING = {
    "one step": RLRun("", {1: {"train/reward": 0.5}}),
    "many steps": RLRun("", RISING),
    "nothing finite": RLRun(
        "", {1: {"train/reward": math.nan}, 2: {"validation/reward": math.inf}}
    ),
    "no reward": RLRun("", {1: {"train/loss": 0.5}}, alarms=(Alarm("truncation", 1, "Cut."),)),
    "one validation": RLRun("", {0: {"validation/gold_reward": 1.0, "validation/kl": 0.1}}),
    "negative KL": RLRun("", NEGATIVE_KL),
    "training alone": RLRun("", TRAINING_ALONE),
}


@pytest.mark.parametrize("name", HARDLY_ANYTHING)
def test_a_run_with_hardly_anything_is_shown(name: str) -> None:
    text_of(replace(HARDLY_ANYTHING[name], name=name))


def test_a_long_curve_has_the_means_of_neighbours() -> None:
    (line,) = rl_page([HARDLY_ANYTHING["many steps"]]).over_steps["reward"]
    assert len(line.x) == 60 and line.x == line.y


def test_a_run_without_gold_shows_the_proxy_alone(runs: list[RLRun]) -> None:
    text = text_of(without_gold(runs[1]))
    assert "Proxy over the distance moved" in text
    assert "Gold reward" not in text


def test_a_run_without_validations_says_so() -> None:
    assert "no two validations" in text_of(HARDLY_ANYTHING["training alone"])


def test_runs_side_by_side_are_one_page_and_its_numbers(runs: list[RLRun], tmp_path: Path) -> None:
    named = [replace(run, name=name) for name, run in HARDLY_ANYTHING.items()]
    named.append(replace(without_gold(runs[1]), name="blind"))
    page = write_rl_report(named, tmp_path / "new" / "rl.html", title="All")
    assert sorted(path.name for path in page.parent.iterdir()) == ["rl.html", "rl.json"]
    assert json.loads(page.with_suffix(".json").read_text())["title"] == "All"


def test_no_run_and_two_of_one_name_are_refused(tmp_path: Path) -> None:
    run = HARDLY_ANYTHING["one step"]
    for wrong in ([], [run, run]):
        with pytest.raises(ConfigError):
            write_rl_report(wrong, tmp_path / "rl.html", title="t")


def with_components(folder: Path) -> RLRun:
    """The proxy, one component and that of gold rise, and another component of each falls, over 40
    prompts."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    watch = OverOptimisationWatch()
    lines = []
    for step in (0, 10):
        moved = step / 10
        form = 0.2 + 0.6 * moved + rng.normal(0, 0.05, 40)
        truth = 0.8 - 0.3 * moved + rng.normal(0, 0.05, 40)
        components = {"form": form, "truth": truth, "judge/label_mass": np.ones(40)}
        gold_components = {"form": form - 0.1, "tact": 1 - form}
        watch.observe(
            step,
            proxy_by_prompt=form + truth,
            components_by_prompt=components,
            gold_components_by_prompt=gold_components,
        )
        line = {"step": step, "time": 1.7e9, "validation/reward": float((form + truth).mean())}
        for name, values in components.items():
            line[f"validation/mixed_env/component/{name}"] = float(values.mean())
        for name, values in gold_components.items():
            line[f"validation/gold/component/{name}"] = float(values.mean())
        lines.append(line | watch.metrics())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RLRun.read("mixed", folder)


def test_components_that_fall_while_the_proxy_rises_are_named(tmp_path: Path) -> None:
    run = with_components(tmp_path / "run")
    assert {name: change.verb for name, change in run.components.items()} == {
        "mixed/form": "rose",
        "mixed/truth": "fell",
    }
    gold_verbs = {name: change.verb for name, change in run.gold_components.items()}
    assert gold_verbs == {"form": "rose", "tact": "fell"}
    page = rl_page([run])
    [summary] = page.runs
    assert summary.sacrificed == ["mixed/truth", "gold/tact"]
    low, high = page.change_range("gold")
    assert -0.7 < low < -0.6 and 0.6 < high < 0.7
    text = text_of(run)
    assert "While the proxy rose, mixed/truth and gold/tact fell." in text
    assert "gold/form rose from 0.09" in text
    assert "Components of the proxy" in text and "Components of gold" in text
    assert "mixed/form rose from 0.19" in text
    assert "label_mass" not in text.partition("Over the steps")[0]


def test_a_component_of_several_environments_has_no_interval_of_both(tmp_path: Path) -> None:
    """Prompts of two environments, whose rewards have a component of one name: the watch pairs all
    prompts, and one rises while the other falls."""
    rows = []
    for step in (0, 10):
        rows.append(
            {
                "step": step,
                "validation/reward": 0.5 + step / 100,
                "validation/math_env/component/form": 0.2 + step / 20,
                "validation/code_env/component/form": 0.9 - step / 20,
                "validation/code_env/component/tests": 0.1 + step / 20,
                "watch/component/form_change": 0.1,
                "watch/component/form_change_error": 0.01,
                "watch/component/tests_change": 0.5,
                "watch/component/tests_change_error": 0.01,
            }
        )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    components = RLRun.read("two", tmp_path).components
    changes = {name: change.by.value for name, change in components.items()}
    assert changes == pytest.approx({"math/form": 0.5, "code/form": -0.5, "code/tests": 0.5})
    verbs = {name: change.verb for name, change in components.items()}
    assert verbs == {"math/form": "went", "code/form": "went", "code/tests": "rose"}


def test_a_run_without_components_has_no_place_for_them(runs: list[RLRun]) -> None:
    assert "Components" not in text_of(*runs)


def test_criteria_of_the_last_completions_are_held_against_gold(tmp_path: Path) -> None:
    """All completions have "form", which teaches nothing, and those with "truth" have less gold."""
    folder = tmp_path / "run"
    folder.mkdir()
    lines = []
    for step in (0, 10):
        line = {
            "step": step,
            "time": 1.7e9,
            "validation/reward": 1.0,
            "validation/gold_reward": 0.5,
        }
        lines.append(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    samples = []
    for step, truth in ((0, 0.0), (10, 1.0)):
        for number in range(3):
            completions = []
            for gold in (0.2, 0.7):
                parts = {"form": 1.0, "truth": truth if gold < 0.5 else 0.0}
                completions.append(
                    {"text": "It is.", "reward": 1.0, "gold_reward": gold, "components": parts}
                )
            prompt = [{"role": "user", "content": f"Question {number}"}]
            samples.append({"step": step, "prompt": prompt, "completions": completions})
    (folder / SAMPLES_FILE).write_text("".join(json.dumps(line) + "\n" for line in samples))
    run = RLRun.read("rubric", folder)
    assert run.criteria is not None
    assert run.criteria.components["form"].always_met == 1.0
    assert run.criteria.components["truth"].agreement.value == 0.0
    assert run.criteria.components["truth"].agreement.count == 3
    assert "The parts of the last rewards" in text_of(run)
