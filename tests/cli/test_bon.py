from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verbs import call

from treeward.cli import bon
from treeward.errors import CheckpointError, ConfigError, DataError
from treeward.evaluation.best_of_n.analysis import analyse
from treeward.scoring.scorer import Scorer

Write = Callable[..., Path]

TOO_LONG = "and so on " * 60
COMPLETIONS = ["4.", "It is 5.", "I do not know.", "Four, of course.", "4"]


def run(*words: str | Path) -> int:
    return call(bon.run, *words)


@pytest.fixture
def samples(write_rows: Write) -> Path:
    """Twelve prompts with five completions each, their gold scores, their lengths and a ground truth."""
    rows = []
    for i in range(12):
        completions = COMPLETIONS[i % 3 :] + COMPLETIONS[: i % 3]
        row = {"prompt": f"{i} + {4 - i}?", "responses": completions, "ground_truth": "4"}
        row |= {"gold_scores": [0.1 * i, 1.0, -0.5, 0.25 * i, 0.0], "n": [len(text) for text in completions]}
        rows.append(row)
    return write_rows("samples.jsonl", rows)


def result_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "bon.json").read_text(encoding="utf-8"))
    return found


def scores_of(folder: Path, name: str) -> list[list[float | None]]:
    """The kept scores of the rater whose file begins so."""
    (path,) = (path for path in (folder / "scores").glob(f"{name}*.jsonl"))
    return [json.loads(line)["scores"] for line in path.read_text(encoding="utf-8").splitlines()]


def penalised(model: Path, coefficient: float, name: str = "penalised") -> str:
    section = {"length_penalty": {"coefficient": coefficient, "threshold": 0, "unit": "characters"}}
    return json.dumps({"name": name, "model": str(model), "shaping": section})


def test_a_model_against_numbers_of_the_rows(
    model_folder: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run("--proxy", model_folder, "--data", samples, "--output", output, "--device", "cpu") == 0
    found = result_of(output)
    scorer = Scorer.load(model_folder, device="cpu")
    proxy, gold = [], []
    for row in map(json.loads, samples.read_text(encoding="utf-8").splitlines()):
        scores = scorer.score_completions([{"role": "user", "content": row["prompt"]}], row["responses"])
        proxy.append([score.score for score in scores])
        gold.append(row["gold_scores"])
    expected = analyse(proxy, gold)
    assert found["n"] == [1, 2, 3, 4, 5]
    for name in ("gold", "proxy", "regret"):
        assert found["curves"][name]["mean"] == pytest.approx(expected.curves[name].mean, abs=1e-5)
    assert found["verdict"]["sentence"] == expected.verdict.sentence
    assert (found["proxy"], found["gold"]) == (str(model_folder), "gold_scores")
    printed = capsys.readouterr().out
    assert found["verdict"]["sentence"] in printed and "regret" in printed
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "Over-optimisation" in page and "gold_scores" in page


def test_a_rule_sees_the_other_columns(samples: Path, tmp_path: Path) -> None:
    output, gold = tmp_path / "out", "{type: rules, rule: exact_match, extract: '[45]'}"
    assert run("--proxy", "n", "--gold", gold, "--data", samples, "--output", output) == 0
    rows = map(json.loads, samples.read_text(encoding="utf-8").splitlines())
    expected = [[float(text in ("4.", "4")) for text in row["responses"]] for row in rows]
    assert scores_of(output, "type-rules") == expected


def test_what_has_no_score_is_counted_and_never_a_number(
    model_folder: Path, write_rows: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "2 + 2?", "responses": ["4", "5", TOO_LONG + "word " * i], "n": [1, 2, 3]} for i in range(3)]
    rows = [row | {"gold_scores": [1, 0, None]} for row in rows]
    rows += [{"prompt": "1 + 1?", "responses": ["2", "3"], "n": [1, 2], "gold_scores": [1, None]}]
    output, data = tmp_path / "out", write_rows("in.jsonl", rows)
    arguments = ("--data", data, "--max-n", "2", "--output")
    assert run("--proxy", model_folder, *arguments, output) == 1
    counts = result_of(output)["counts"]
    assert counts["num_without_proxy"] == 3 and counts["num_without_gold"] == 4
    assert counts["num_prompts"] == 3 and counts["num_prompts_with_fewer_samples"] == 1
    assert "3 samples are left out: proxy: too long to score" in caplog.text
    assert "4 samples are left out: gold: gold_scores is null" in caplog.text
    assert "1 prompts have fewer than 2 scored samples" in caplog.text


@pytest.mark.parametrize(
    ("proxy", "gold", "message"),
    [
        ("{modle: M}", "n", "did you mean model"),
        ("{model: M, ensemble: wurst}", "n", "worst"),
        ("n", "n", "proxy and gold are the same"),
        ("gold_score", "math", "did you mean gold_scores"),
        ("n", "{type: rules", "is no section"),
        ("n", "{type: ruless, rule: math}", "did you mean rules"),
    ],
)
def test_wrong_proxies_and_golds_are_told_before_anything_is_scored(
    model_folder: Path, samples: Path, tmp_path: Path, proxy: str, gold: str, message: str
) -> None:
    output = tmp_path / "out"
    with pytest.raises(ConfigError, match=message):
        run("--proxy", proxy.replace("M", str(model_folder)), "--gold", gold, "--data", samples, "--output", output)
    assert not output.exists()


def test_a_wrong_row_is_told_before_anything_else(samples: Path, tmp_path: Path) -> None:
    last = {"prompt": "?", "responses": ["a", "b"], "n": [1, 2], "gold_scores": [1]}
    with samples.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(last) + "\n")
    with pytest.raises(DataError, match="has no gold_scores with a number for each") as caught:
        run("--proxy", "n", "--data", samples, "--output", tmp_path / "out")
    assert f"{samples}:13" in str(caught.value) and not (tmp_path / "out").exists()


def test_scores_of_another_shaping_model_or_file_are_not_mixed(
    model_folder: Path, samples: Path, tmp_path: Path
) -> None:
    arguments = ("--data", samples, "--output", tmp_path / "out")
    assert run("--proxy", penalised(model_folder, 0.5), *arguments) == 0
    with pytest.raises(CheckpointError, match="another shaping"):
        run("--proxy", penalised(model_folder, 0.25), *arguments)
    with pytest.raises(CheckpointError, match="dtype float32 -> bfloat16"):
        run("--proxy", penalised(model_folder, 0.5), *arguments, "--dtype", "bfloat16")
    with samples.open("a", encoding="utf-8") as stream:
        stream.write(samples.read_text(encoding="utf-8").splitlines()[0] + "\n")
    with pytest.raises(CheckpointError, match="another data"):
        run("--proxy", penalised(model_folder, 0.5), *arguments)
