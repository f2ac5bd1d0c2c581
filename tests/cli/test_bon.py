from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verbs import call

from treeward.cli import bon
from treeward.data.synthetic import bundled_path
from treeward.errors import CheckpointError, ConfigError, DataError, ModelError
from treeward.evaluation.best_of_n import SampledPrompt, analyse
from treeward.evaluation.best_of_n.blocks import to_json

Write = Callable[..., Path]

TOO_LONG = "and so on " * 60
RESPONSES = ["4.", "It is 5.", "I do not know.", "Four, of course.", "4"]


def run(*words: str | Path) -> int:
    return call(bon.run, *words)


@pytest.fixture
def samples(write_rows: Write) -> Path:
    """Twelve prompts with five responses each, their gold scores and a ground truth."""
    rows = [
        {
            "prompt": f"{i} + {4 - i}?",
            "responses": RESPONSES[i % 3 :] + RESPONSES[: i % 3],
            "gold_scores": [0.1 * i, 1.0, -0.5, 0.25 * i, 0.0],
            "ground_truth": "4",
        }
        for i in range(12)
    ]
    return write_rows("samples.jsonl", rows)


def kept_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_model_against_numbers_of_the_rows(
    model_folder: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from treeward.scoring.scorer import Scorer

    output = tmp_path / "out"
    assert run("--proxy", model_folder, "--data", samples, "--output", output, "--device", "cpu") == 0
    found = json.loads((output / "bon.json").read_text(encoding="utf-8"))
    scorer = Scorer.load(model_folder, device="cpu")
    prompts = []
    for row in map(json.loads, samples.read_text(encoding="utf-8").splitlines()):
        scores = scorer.score_completions([{"role": "user", "content": row["prompt"]}], row["responses"])
        prompts.append(SampledPrompt([score.score for score in scores], row["gold_scores"]))
    for kept, prompt in zip(kept_rows(output), prompts, strict=True):
        assert kept["proxy"] == pytest.approx(prompt.proxy, abs=1e-5) and kept["gold"] == prompt.gold
    expected = to_json(analyse(prompts))
    assert found["n"] == [1, 2, 3, 4, 5]
    for name in ("gold", "proxy", "regret"):
        assert found["curves"][name]["mean"] == pytest.approx(expected["curves"][name]["mean"], abs=1e-5)
    assert found["verdict"]["sentence"] == expected["verdict"]["sentence"]
    assert (found["proxy"], found["gold"]) == (str(model_folder), "gold_scores")
    printed = capsys.readouterr().out
    assert found["verdict"]["sentence"] in printed and "regret" in printed
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "Over-optimisation" in page and "gold_scores" in page
    assert json.loads((output / "report.json").read_text(encoding="utf-8"))["examples"]["best_of_n"]


def test_a_model_against_a_model(model_folder: Path, samples: Path, write_rows: Write, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    data = write_rows("with_lengths.jsonl", [row | {"n": [len(text) for text in row["responses"]]} for row in rows])
    assert run("--proxy", "n", "--gold", model_folder, "--data", data, "--output", tmp_path / "a") == 0
    assert run("--proxy", model_folder, "--gold", "n", "--data", data, "--output", tmp_path / "b") == 0
    for one, other in zip(kept_rows(tmp_path / "a"), kept_rows(tmp_path / "b"), strict=True):
        assert one["proxy"] == other["gold"] == [len(text) for text in rows[one["row"]]["responses"]]
        assert one["gold"] == pytest.approx(other["proxy"], abs=1e-5)


@pytest.mark.parametrize(
    "gold", ["{type: rules, rule: exact_match, extract: '[45]'}", "{type: rules, rule: math}", "math"]
)
def test_a_rule_sees_the_other_columns(samples: Path, tmp_path: Path, gold: str) -> None:
    assert run("--proxy", "gold_scores", "--gold", gold, "--data", samples, "--output", tmp_path / "out") == 0
    right = {"4.", "4"}
    for row, kept in zip(samples.read_text(encoding="utf-8").splitlines(), kept_rows(tmp_path / "out"), strict=True):
        assert kept["gold"] == [float(text in right) for text in json.loads(row)["responses"]]


def test_gold_of_the_bundled_world_is_that_of_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bundled_path("length_controlled")
    for gold in ("synthetic", "score"):
        assert run("--proxy", "rank", "--gold", gold, "--data", data, "--output", tmp_path / gold) == 0
    one, other = (json.loads((tmp_path / gold / "bon.json").read_text()) for gold in ("synthetic", "score"))
    assert one["curves"] == other["curves"]
    assert one["curves"]["regret"]["mean"] == pytest.approx([0.0, 0.0])  # ranks are by gold
    assert one["counts"]["num_prompts_with_equal_proxies"] > 0


def test_what_has_no_score_is_counted_and_never_a_number(
    model_folder: Path, write_rows: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "2 + 2?", "responses": ["4", "5", TOO_LONG], "gold_scores": [1, 0, None]} for _ in range(3)]
    rows += [{"prompt": "1 + 1?", "responses": ["2", "3"], "gold_scores": [1, None]}]
    output = tmp_path / "out"
    arguments = ("--proxy", model_folder, "--data", write_rows("in.jsonl", rows), "--output", output)
    assert run(*arguments, "--max-n", "2") == 1
    assert [row["proxy"][2:] for row in kept_rows(output)] == [[None]] * 3 + [[]]
    counts = json.loads((output / "bon.json").read_text())["counts"]
    assert counts["num_without_proxy"] == 3 and counts["num_without_gold"] == 4
    assert counts["num_prompts"] == 3 and counts["num_prompts_with_fewer_samples"] == 1
    assert "3 samples are left out: proxy: too long to score" in caplog.text
    assert "4 samples are left out: gold: gold_scores is null" in caplog.text
    assert "1 prompts have fewer than 2 scored samples" in caplog.text
    assert "counts" in (output / "bon.json").read_text() and "NaN" not in (output / "bon.json").read_text()


def test_reasons_are_told_where_nothing_is_left(
    model_folder: Path, write_rows: Write, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_rows("in.jsonl", [{"prompt": "?", "responses": [TOO_LONG, TOO_LONG], "gold_scores": [1, 0]}])
    with pytest.raises(DataError, match="no prompt has two samples"):
        run("--proxy", model_folder, "--data", data)
    assert "2 samples are left out: proxy: too long" in caplog.text


def test_an_interrupted_run_goes_on(model_folder: Path, samples: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = ("--proxy", model_folder, "--data", samples, "--output", output)
    assert run(*arguments) == 0
    whole, result = kept_rows(output), json.loads((output / "bon.json").read_text())
    lines = (output / "samples.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    marked = json.loads(lines[1]) | {"where": "of the first run"}
    (output / "samples.jsonl").write_text("".join([lines[0], json.dumps(marked) + "\n", lines[2][:50]]))
    assert run(*arguments) == 0
    again = kept_rows(output)
    assert again[1].pop("where") == "of the first run" and whole[1].pop("where")
    for one, other in zip(again, whole, strict=True):
        assert one.pop("proxy") == pytest.approx(other.pop("proxy"), abs=1e-5)
        assert one == other
    mean = json.loads((output / "bon.json").read_text())["curves"]["proxy"]["mean"]
    assert mean == pytest.approx(result["curves"]["proxy"]["mean"], abs=1e-5)


def test_rows_of_other_scores_are_not_mixed(model_folder: Path, samples: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert run("--proxy", model_folder, "--data", samples, "--output", output) == 0
    with pytest.raises(CheckpointError, match="gold field gold_scores -> "):
        run("--proxy", model_folder, "--gold", "math", "--data", samples, "--output", output)
    with pytest.raises(CheckpointError, match="another proxy"):
        run("--proxy", model_folder, "--data", samples, "--output", output, "--dtype", "bfloat16")
    with samples.open("a", encoding="utf-8") as stream:
        stream.write(samples.read_text(encoding="utf-8").splitlines()[0] + "\n")
    with pytest.raises(CheckpointError, match="another data"):
        run("--proxy", model_folder, "--data", samples, "--output", output)


def penalised(model: Path, coefficient: float, name: str = "penalised") -> str:
    section = {"length_penalty": {"coefficient": coefficient, "threshold": 0, "unit": "characters"}}
    return json.dumps({"name": name, "model": str(model), "shaping": section})


def proxies_of(output: Path) -> dict[str, Any]:
    found = json.loads((output / "bon.json").read_text(encoding="utf-8"))
    assert set(found) == {"gold", "data", "proxies"}
    return {one["proxy"]: one for one in found["proxies"]}


def test_several_proxies_on_the_same_samples(
    model_folder: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, alone = tmp_path / "out", tmp_path / "alone"
    shaped = penalised(model_folder, 0.5)
    worst = json.dumps({"models": [str(model_folder)] * 2, "ensemble": {"method": "worst", "standardize": False}})
    arguments = ("--data", samples, "--device", "cpu")
    assert run("--proxy", model_folder, "--proxy", shaped, "--proxy", worst, *arguments, "--output", output) == 0
    assert run("--proxy", model_folder, *arguments, "--output", alone) == 0
    printed = capsys.readouterr().out
    found = proxies_of(output)
    own, of_worst = str(model_folder), f"worst of {model_folder}, {model_folder}"
    assert list(found) == [own, "penalised", of_worst]
    one = json.loads((alone / "bon.json").read_text(encoding="utf-8"))
    for name in ("gold", "regret", "proxy_gain"):
        assert found[own]["curves"][name]["mean"] == pytest.approx(one["curves"][name]["mean"], abs=1e-5)
    # What the shaping takes off is in the kept scores, and a model that stands twice in an ensemble is itself.
    folders = {
        json.loads((f / "samples.identity.json").read_text())["proxy"]: f for f in output.iterdir() if f.is_dir()
    }
    assert len(folders) == 3
    rows = {key.split(" ")[0]: kept_rows(folder) for key, folder in folders.items()}
    for plain, less, both, row in zip(
        rows["contract"], rows["penalised"], rows["worst"], map(json.loads, samples.open()), strict=True
    ):
        expected = [p - 0.5 * len(text) for p, text in zip(plain["proxy"], row["responses"], strict=True)]
        assert less["proxy"] == pytest.approx(expected, abs=1e-4)
        assert both["proxy"] == pytest.approx(plain["proxy"], abs=1e-5)
        assert plain["gold"] == less["gold"] == both["gold"] == row["gold_scores"]
    assert found[own]["difference"] is None
    difference = found["penalised"]["difference"]
    assert difference["value"] == pytest.approx(
        found["penalised"]["curves"]["gold"]["mean"][-1] - found[own]["curves"]["gold"]["mean"][-1], abs=1e-9
    )
    assert difference["low"] <= difference["value"] <= difference["high"]
    assert found[of_worst]["difference"]["value"] == pytest.approx(0.0, abs=1e-6)
    for name in found:
        assert f"{name}: {found[name]['verdict']['sentence']}" in printed
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    series = {b["title"]: [s["name"] for s in b["series"]] for b in report["blocks"] if b["kind"] == "curves"}
    assert series["Over-optimisation"] == [*found, "best possible gold"]
    assert series["Regret"] == list(found)
    assert {row["model"] for row in report["examples"]["best_of_n"]} == set(found)


def test_a_sample_that_one_proxy_cannot_score_counts_for_none(
    model_folder: Path, write_rows: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"prompt": f"{i} + 2?", "responses": ["4", "5", TOO_LONG], "n": [1, 2, 3], "gold_scores": [1, 0, 7 + i]}
        for i in range(3)
    ]
    output = tmp_path / "out"
    data = write_rows("in.jsonl", rows)
    assert run("--proxy", "n", "--proxy", model_folder, "--data", data, "--output", output) == 1
    found = proxies_of(output)
    for one in found.values():
        assert one["n"] == [1, 2] and one["counts"]["num_without_proxy"] == 3
        assert one["curves"]["gold"]["mean"][0] == 0.5  # of the two that both have scored
    assert found["n"]["curves"]["gold"]["mean"][1] == 0.0
    assert f"3 samples are left out: {model_folder}, proxy: too long" in caplog.text


def test_several_proxies_go_on_and_one_more_asks_gold_of_no_row_again(
    model_folder: Path, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treeward.scoring.scorer import Scorer

    asked: list[int] = []
    load = Scorer.load

    def counting(name: Any, **options: Any) -> Any:
        scorer = load(name, **options)
        if str(name) == str(model_folder):
            score = scorer.score
            monkeypatch.setattr(scorer, "score", lambda many, **more: asked.append(len(many)) or score(many, **more))
        return scorer

    monkeypatch.setattr(Scorer, "load", counting)
    rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    data = tmp_path / "lengths.jsonl"
    lengths = [row | {"n": [len(text) for text in row["responses"]], "m": [1, 2, 3, 4, 5]} for row in rows]
    data.write_text("".join(json.dumps(row) + "\n" for row in lengths), encoding="utf-8")
    output = tmp_path / "out"
    arguments = ("--gold", model_folder, "--data", data, "--output", output)
    assert run("--proxy", "n", "--proxy", "m", *arguments) == 0
    assert sum(asked) == 60  # twelve prompts, five samples: for the first proxy, not for the second
    whole = proxies_of(output)
    kept = (output / "m" / "samples.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (output / "m" / "samples.jsonl").write_text("".join(kept[:4]) + kept[4][:30], encoding="utf-8")
    assert run("--proxy", "n", "--proxy", "m", *arguments) == 0
    assert proxies_of(output) == whole and sum(asked) == 60
    assert run("--proxy", "gold_scores", "--proxy", "m", "--proxy", "n", *arguments) == 0
    assert list(proxies_of(output)) == ["gold_scores", "m", "n"] and sum(asked) == 60


def test_another_shaping_or_ensemble_under_the_same_name_is_another_proxy(
    model_folder: Path, samples: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    ensemble = {"method": "uncertainty", "standardize": False, "uncertainty_coefficient": 0.1}
    several = {"name": "e", "models": [str(model_folder)] * 2, "ensemble": ensemble}
    arguments = ("--data", samples, "--output", output)
    assert run("--proxy", penalised(model_folder, 0.5, "p"), "--proxy", json.dumps(several), *arguments) == 0
    with pytest.raises(CheckpointError, match="another proxy"):
        run("--proxy", penalised(model_folder, 0.25, "p"), "--proxy", json.dumps(several), *arguments)
    several["ensemble"] = ensemble | {"uncertainty_coefficient": 0.2}
    with pytest.raises(CheckpointError, match="another proxy"):
        run("--proxy", penalised(model_folder, 0.5, "p"), "--proxy", json.dumps(several), *arguments)
    alone = tmp_path / "alone"
    assert run("--proxy", penalised(model_folder, 0.5), "--data", samples, "--output", alone) == 0
    assert json.loads((alone / "bon.json").read_text())["proxy"] == "penalised"
    with pytest.raises(CheckpointError, match="another proxy"):
        run("--proxy", penalised(model_folder, 0.25), "--data", samples, "--output", alone)
    with pytest.raises(CheckpointError, match="the scores of one proxy alone"):
        run("--proxy", model_folder, "--proxy", penalised(model_folder, 0.5), "--data", samples, "--output", alone)


def test_a_shaping_of_the_contract_is_that_of_the_time(model_folder: Path, samples: Path, tmp_path: Path) -> None:
    from treeward.model.contract import CONTRACT_FILE

    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    contract = json.loads((model / CONTRACT_FILE).read_text())
    proxy = json.dumps({"name": "c", "model": str(model), "shaping": "contract"})
    arguments = ("--data", samples, "--output", tmp_path / "out")
    with pytest.raises(ConfigError, match="has no reward shaping"):
        run("--proxy", proxy, *arguments)
    for coefficient, expected in ((0.5, 0), (0.25, None)):
        penalty = {"length_penalty": {"coefficient": coefficient, "threshold": 0, "unit": "characters"}}
        (model / CONTRACT_FILE).write_text(json.dumps(contract | {"reward_shaping": penalty}))
        if expected is None:
            with pytest.raises(CheckpointError, match="another proxy"):
                run("--proxy", proxy, *arguments)
        else:
            assert run("--proxy", proxy, *arguments) == expected


@pytest.mark.parametrize(
    ("proxy", "message"),
    [
        ("{modle: M}", "has no type"),
        ("{model: M, shapping: contract}", "did you mean shaping"),
        ("{model: M, models: [M]}", "the models are not named"),
        ("{models: []}", "the models are not named"),
        ("{models: M}", "the models are not named"),
        ("{models: [M, M]}", "nothing says how their scores become one"),
        ("{models: [M, nowhere], ensemble: worst}", "this is no model"),
        ("{model: M, ensemble: wurst}", "worst"),
        ("{model: M, shaping: {length_penalti: 1}}", "length_penalty"),
        ("{model: M, shaping: {normalize_rewards: true, running: true}}", "order of the rows"),
        ("{model: M, shaping: {reference: par}}", "reference completions"),
        ("{name: 3, model: M}", "the name is not text"),
        ("M", "two proxies have one name"),
    ],
)
def test_wrong_proxies_are_told_before_anything_is_scored(
    model_folder: Path, samples: Path, tmp_path: Path, proxy: str, message: str
) -> None:
    output = tmp_path / "out"
    given = proxy.replace("M", str(model_folder))
    with pytest.raises(ConfigError, match=message):
        run("--proxy", model_folder, "--proxy", given, "--data", samples, "--output", output)
    assert not output.exists()


def test_gold_may_be_shaped_and_is_no_proxy_under_another_name(
    model_folder: Path, samples: Path, tmp_path: Path
) -> None:
    gold = penalised(model_folder, 0.5, "gold")
    assert run("--proxy", model_folder, "--gold", gold, "--data", samples, "--output", tmp_path / "out") == 0
    with pytest.raises(ConfigError, match="proxy and gold are the same"):
        run("--proxy", "gold_scores", "--proxy", penalised(model_folder, 0.5), "--gold", gold, "--data", samples)


@pytest.mark.parametrize(
    ("proxy", "gold", "message"),
    [
        ("gold_score", "math", "did you mean gold_scores"),
        ("gold_scores", "gold_scores", "proxy and gold are the same"),
        ("gold_scores", "sintetic", "did you mean synthetic"),
        ("gold_scores", "{rule: math}", "has no type"),
        ("gold_scores", "{type: ruless, rule: math}", "did you mean rules"),
        ("gold_scores", "{type: rules, rule: maths}", "rule"),
        ("gold_scores", "{type: rules", "cannot be read"),
        ("gold_scores", "/nowhere/model", "no model, no environment"),
        ("gold_scores", "prompt", "no field"),
    ],
)
def test_what_a_proxy_and_a_gold_are(samples: Path, proxy: str, gold: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("--proxy", proxy, "--gold", gold, "--data", samples)


def test_gold_must_be_named_or_in_the_rows(write_rows: Write) -> None:
    data = write_rows("in.jsonl", [{"prompt": "?", "responses": ["a", "b"], "p": [1, 2]}])
    with pytest.raises(ConfigError, match="nothing says what gold is"):
        run("--proxy", "p", "--data", data)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"prompt": "?", "responses": ["a", "b"], "gold_scores": [1]}, "has no gold_scores with a number for each"),
        ({"prompt": "?", "gold_scores": [1]}, "nothing to score"),
        ("{not json", "JSON"),
    ],
)
def test_a_wrong_row_is_told_before_anything_else(
    model_folder: Path, samples: Path, tmp_path: Path, last: Any, message: str
) -> None:
    with samples.open("a", encoding="utf-8") as stream:
        stream.write((last if isinstance(last, str) else json.dumps(last)) + "\n")
    with pytest.raises(DataError, match=message) as caught:
        run("--proxy", model_folder, "--data", samples, "--output", tmp_path / "out")
    assert f"{samples}:13" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_none_is_told(samples: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no_model"):
        (tmp_path / "no_model").mkdir()
        run("--proxy", tmp_path / "no_model", "--data", samples)


def test_an_output_that_cannot_be_written_is_told(model_folder: Path, samples: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        run("--proxy", model_folder, "--data", samples, "--output", samples / "out")


def test_reasons_that_differ_in_numbers_are_told_once(
    model_folder: Path, write_rows: Write, caplog: pytest.LogCaptureFixture
) -> None:
    long = [{"prompt": f"{i}?", "responses": ["Yes.", "No.", "word " * (100 + 10 * i)], "gold_scores": [1, 0, 2]}
            for i in range(12)]  # fmt: skip
    assert run("--proxy", model_folder, "--data", write_rows("s.jsonl", long), "--device", "cpu") == 1
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    (reasons,) = [text for text in said if text.startswith("12 samples")]
    assert "too long to score" in reasons and "and 11 like it with other numbers" in reasons
