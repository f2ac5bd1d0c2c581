from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import read_jsonl, write_jsonl
from verbs import Command

from treeward.evaluation.best_of_n.analysis import analyse
from treeward.scoring.scorer import Scorer

Write = Callable[..., Path]

COMPLETIONS = ["4.", "It is 5.", "I do not know.", "Four, of course.", "4"]


@pytest.fixture
def samples(write_rows: Write) -> Path:
    """Twelve prompts with five completions each, their gold scores, their lengths and a ground
    truth.
    """
    rows = []
    for i in range(12):
        completions = COMPLETIONS[i % 3 :] + COMPLETIONS[: i % 3]
        row = {"prompt": f"{i} + {4 - i}?", "responses": completions, "ground_truth": "4"}
        row |= {
            "gold_scores": [0.1 * i, 1.0, -0.5, 0.25 * i, 0.0],
            "n": [len(text) for text in completions],
        }
        rows.append(row)
    return write_rows("samples.jsonl", rows)


def test_a_model_against_numbers_of_the_rows(
    treeward: Command,
    model_folder: Path,
    samples: Path,
    tmp_path: Path,
) -> None:
    ended = treeward(
        "bon",
        "--proxy",
        model_folder,
        "--data",
        samples,
        "--output",
        tmp_path / "out",
        "--device",
        "cpu",
    )
    assert ended.code == 0
    result = json.loads((tmp_path / "out" / "bon.json").read_text(encoding="utf-8"))
    scorer = Scorer.load(model_folder, device="cpu")
    rows = read_jsonl(samples)
    proxy = []
    for row in rows:
        scores = scorer.score_completions(row["prompt"], row["responses"])
        proxy.append([score.score for score in scores])
    expected = analyse(proxy, [row["gold_scores"] for row in rows])
    assert result["n"] == [1, 2, 3, 4, 5]
    for name in ("gold", "proxy", "best"):
        assert result["curves"][name]["mean"] == pytest.approx(expected.curves[name].mean, abs=1e-5)
    assert result["sentence"] == expected.sentence
    assert (result["proxy"], result["gold"]) == (model_folder.name, "gold_scores")
    assert result["sentence"] in ended.out
    assert "best gold" in ended.out
    assert "gold_scores" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_rule_sees_the_other_columns(treeward: Command, samples: Path, tmp_path: Path) -> None:
    gold = "{type: rules, rule: exact_match, extract: '[45]'}"
    words = ("bon", "--proxy", "n", "--gold", gold, "--data", samples, "--output", tmp_path)
    assert treeward(*words).code == 0
    expected = []
    for row in read_jsonl(samples):
        expected.append([float(text in ("4.", "4")) for text in row["responses"]])
    assert [row["scores"] for row in read_jsonl(tmp_path / "rules" / "examples.jsonl")] == expected


def test_kept_scores_are_of_the_split_and_the_columns(
    treeward: Command, samples: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    rows = read_jsonl(samples)
    for row in rows:
        row["second"] = row["prompt"] + " Please."
    write_jsonl(folder / "train.jsonl", *rows)
    write_jsonl(folder / "validation.jsonl", *rows[::-1])
    gold = "{type: rules, rule: exact_match, extract: '[45]'}"
    words = ["bon", "--proxy", "n", "--gold", gold, "--output", tmp_path / "out"]
    words += ["--data", folder, "--data-option"]
    assert treeward(*words, "split=train").code == 0
    for others in (["split=validation"], ["split=train", "--data-option", "prompt_key=second"]):
        ended = treeward(*words, *others)
        assert ended.code == 2 and "another data" in ended.err


@pytest.mark.parametrize("changed", ["rewards_of_mine.py", "helpers_of_mine.py", None])
def test_rewards_of_a_function_that_has_changed_are_not_mixed(
    changed: str | None,
    treeward: Command,
    samples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helpers_of_mine.py").write_text("def size(text): return float(len(text))")
    own = tmp_path / "rewards_of_mine.py"
    own.write_text(
        "from helpers_of_mine import size\ndef mine(prompt, response): return size(response)\n",
    )
    gold = f"{{type: custom, function: '{own}:mine', name: mine}}"
    words = ("bon", "--proxy", "n", "--gold", gold, "--data", samples, "--output", tmp_path / "out")
    assert treeward(*words).code == 0
    if changed is not None:
        with (tmp_path / changed).open("a") as file:
            file.write("\n# another rule\n")
    monkeypatch.delitem(sys.modules, "helpers_of_mine")
    ended = treeward(*words)
    assert ended.code == (0 if changed is None else 2)
    assert ("another code" in ended.err) == (changed is not None)


def test_what_has_no_score_is_counted_and_never_a_number(
    treeward: Command,
    model_folder: Path,
    write_rows: Write,
    tmp_path: Path,
) -> None:
    too_long = "and so on " * 60
    three = {"responses": ["4", "5", too_long], "gold_scores": [1, 0, None]}
    rows: list[dict[str, Any]] = [{"prompt": f"{i}?", **three} for i in range(3)]
    rows += [{"prompt": "1 + 1?", "responses": ["2", "3"], "gold_scores": [1, None]}]
    words = ("--data", write_rows("in.jsonl", rows), "--max-n", 2, "--output", tmp_path)
    ended = treeward("bon", "--proxy", model_folder, *words)
    assert ended.code == 1
    counts = json.loads((tmp_path / "bon.json").read_text(encoding="utf-8"))["counts"]
    assert counts["num_without_proxy"] == 3
    assert counts["num_without_gold"] == 4
    assert counts["num_prompts"] == 3
    assert counts["num_prompts_with_fewer_samples"] == 1
    assert "3 of 4 examples have no score (too long to score" in ended.err
    assert "4 samples have no score of gold_scores and are left out" in ended.err
    assert "1 prompts have fewer than 2 scored samples" in ended.err


def test_a_wrong_row_is_told_before_anything_else(
    treeward: Command,
    samples: Path,
    tmp_path: Path,
) -> None:
    last = {"prompt": "?", "responses": ["a", "b"], "n": [1, 2], "gold_scores": [1]}
    with samples.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(last) + "\n")
    ended = treeward("bon", "--proxy", "n", "--data", samples, "--output", tmp_path / "out")
    assert f"{samples}:13: " in ended.err
    assert "has no gold_scores with a number for each" in ended.err
    assert ended.code == 2
    assert not (tmp_path / "out").exists()
