"""`treeward eval` from a file to the report, and what it says of wrong input."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_judge import FakeJudge, completion, places
from messages import read_jsonl
from safetensors.torch import load_file, save_file
from verbs import Command

from treeward.cli.options import ModelOptions, candidate
from treeward.scoring.scorer import Scorer

Write = Callable[..., Path]

ROWS = [
    {
        "prompt": f"What is {n} + 1?",
        "chosen": f"It is {n + 1}.",
        "rejected": "I do not know, and I shall not find out.",
    }
    for n in range(30)
]


def results_of(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))["results"]


def test_from_a_file_to_the_report(
    treeward: Command,
    model_folder: Path,
    write_rows: Write,
    tmp_path: Path,
) -> None:
    data = write_rows("held_out.jsonl", ROWS)
    output = tmp_path / "eval"
    words = ("eval", model_folder, "--data", data, "--output", output, "--perturbations", 5)
    ended = treeward(*words)
    assert ended.code == 0
    assert all(text in ended.out for text in ("held_out", "length-controlled", "report.html"))
    accuracy = r"on held_out: accuracy .*% \(.* to .*\)"
    verdict = "(better|worse|not significantly better) than chance"
    assert re.search(f"{accuracy}; {verdict}", ended.out)
    (file,) = output.glob("*/held_out/examples.jsonl")
    rows = read_jsonl(file)
    scorer = Scorer.load(model_folder, device="cpu")
    want = scorer.score(
        [[*rows[7]["context"], *completion] for completion in rows[7]["completions"]],
    )
    assert {row["subset"] for row in rows} == {"all"}  # no name of a class
    assert rows[7]["scores"] == pytest.approx([score.score for score in want], abs=1e-5)
    (result,) = results_of(output)
    right = sum(row["scores"][0] > row["scores"][1] for row in rows)
    headline = result["headline"]
    assert headline["value"] == pytest.approx(right / 30)
    assert headline["count"] == 30
    assert headline["low"] < right / 30 < headline["high"] or right in (0, 30)
    assert set(result["diagnostics"]) == {"length", "style", "perturbations", "statistics"}
    assert "<script" in (output / "report.html").read_text()
    assert (output / "report.json").is_file()
    before = file.read_bytes()
    assert treeward(*words).code == 0
    assert file.read_bytes() == before


def test_rewrites_are_chosen_by_name(
    treeward: Command, model_folder: Path, write_rows: Write, tmp_path: Path
) -> None:
    data = write_rows("held_out.jsonl", ROWS)
    words = ("eval", model_folder, "--data", data, "--output", tmp_path / "eval")
    ended = treeward(*words, "--perturbations", 5, "--rewrites", "quotes,empty")
    assert ended.code == 0
    (result,) = results_of(tmp_path / "eval")
    names = {metric["name"] for metric in result["diagnostics"]["perturbations"]}
    assert "quotes_flips" in names and "empty_relative_shift" in names
    assert not any(name.startswith("padding") for name in names)
    (file,) = (tmp_path / "eval").glob("*/held_out/perturbations.jsonl")
    for row in read_jsonl(file):
        texts = [completion[-1]["content"] for completion in row["completions"]]
        assert len(texts) == 6
        assert sum(text.startswith('"') and text.endswith('"') for text in texts) == 2
    misspelt = treeward(*words, "--perturbations", 5, "--rewrites", "qoutes")
    assert misspelt.code == 2 and "did you mean quotes?" in misspelt.err
    # Without a number of examples it would do nothing.
    alone = treeward(*words, "--rewrites", "quotes")
    assert alone.code == 2 and "--perturbations N" in alone.err


def test_a_conversation_without_a_score_counts_as_wrong_and_is_told(
    treeward: Command,
    model_folder: Path,
    write_rows: Write,
    tmp_path: Path,
) -> None:
    unscored = {"prompt": "word " * 300, "chosen": "Yes.", "rejected": "No."}
    words = ("eval", model_folder, "--data", write_rows("d.jsonl", [*ROWS, unscored]))
    assert treeward(*words, "--output", tmp_path / "eval").code == 1
    (result,) = results_of(tmp_path / "eval")
    assert result["num_failed"] == 1
    assert result["headline"]["count"] == 31
    assert "30 of 31 scored" in result["verdict"]
    write_rows("d.jsonl", [unscored])
    ended = treeward(*words)  # nothing was scored, which is no accuracy of 0 %
    assert ended.code == 1
    assert "no result, 0 of 1 scored" in ended.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there are no models"),
        (["MODEL", "/nowhere/model"], "there is no such folder"),
        (["MODEL", "--suite", "rewardbnch"], "did you mean rewardbench"),
        (["MODEL", "MODEL"], "two of one name"),
        (["{modle: x}"], "did you mean model"),
        (["MODEL", "{model: /nowhere/model}"], "there is no such folder"),
        (["{type: judge, model: x, mode: best}"], "mode"),
        (["{type: judge, model: x}", "--perturbations", "3"], "cannot score rewritten completions"),
        (["{[}"], "the text in braces is not a section"),
    ],
)
def test_what_cannot_be_is_told_before_a_suite_is_read(
    words: list[str],
    message: str,
    treeward: Command,
    model_folder: Path,
    write_rows: Write,
    tmp_path: Path,
) -> None:
    words = [str(model_folder) if word == "MODEL" else word for word in words]
    ended = treeward("eval", *words, "--data", write_rows("d.jsonl", ROWS[:3]))
    assert ended.code == 2
    assert message in ended.err
    assert "Traceback" not in ended.err
    assert "Reading" not in ended.err
    assert "Loading" not in ended.err


def test_a_judge_is_evaluated_like_a_model_with_its_cost_and_position_bias(
    treeward: Command,
    model_folder: Path,
    write_rows: Write,
    tmp_path: Path,
) -> None:
    def answer(request: dict[str, Any]) -> Any:
        first, _ = places(request)
        # By what it says; of one question by its place, which is a tie.
        is_tie = "11 + 1" in request["messages"][1]["content"]
        says = "[[A]]" if first.startswith("It is") or is_tie else "[[B]]"
        return 200, completion(says) | {"usage": {"prompt_tokens": 50, "completion_tokens": 4}}

    data = write_rows("held_out.jsonl", ROWS)
    output = tmp_path / "eval"
    endpoint = FakeJudge(answer)
    section = {
        "type": "judge",
        "base_url": endpoint.url,
        "model": "org/m",
        "api_key_env": None,
        "mode": "pairwise",
    }
    words = ("eval", json.dumps(section), model_folder, "--data", data, "--output", output)
    ended = treeward(*words)
    printed = " ".join(ended.out.split())
    assert ended.code == 0
    assert "judge-pairwise-m on held_out: 60 requests, 3,000 tokens read and 240 written" in printed
    bias = "the first place is worth +0.033; 3.3% of pairs change their winner with the order"
    assert bias in printed
    found = {one["model"]: one for one in results_of(output)}
    own = found.pop("judge-pairwise-m")
    # The tie counts as wrong.
    assert own["headline"]["value"] == pytest.approx(29 / 30)
    usage = own["usage"]
    assert usage["num_requests"] == 60
    assert usage["seconds"] > 0
    assert usage["judge/position_bias"] == pytest.approx(1 / 30)
    [model] = found.values()
    assert "num_requests" not in model["usage"]
    assert model["usage"]["num_prompt_tokens"] > 0
    assert "As a judge: 60 requests" in (output / "report.html").read_text("utf-8")
    rows = read_jsonl(output / "judge-pairwise-m" / "held_out" / "examples.jsonl")
    assert rows[0]["judgements"] == ["[[A]]\n\n[[B]]"] * 2
    # its rows are kept, and what they show
    assert treeward(*words).code == 0
    assert len(endpoint.requests) == 60
    assert f"As a judge: {bias}" in (output / "report.html").read_text("utf-8")
    two = treeward(
        "eval",
        *(json.dumps(section | {"name": name}) for name in ("a", "b")),
        "--data",
        data,
    )
    assert two.code == 0
    assert "a on held_out: 60 requests" in two.out
    assert "b on held_out: 60" in two.out
    endpoint.server.__exit__()


def test_kept_verdicts_are_of_the_judge_that_is_in_the_folder_now(
    policy_folder: Path, tmp_path: Path
) -> None:
    judge = tmp_path / "judge"
    shutil.copytree(policy_folder, judge)
    section = {"type": "judge", "model": str(judge), "use_logprobs": True, "dtype": "float32"}
    _, first = candidate(dict(section), "MODEL", ModelOptions()).load()
    _, again = candidate(dict(section), "MODEL", ModelOptions()).load()
    assert first == again
    weights = load_file(judge / "model.safetensors")
    save_file(
        {name: 2 * weight for name, weight in weights.items()},
        judge / "model.safetensors",
        metadata={"format": "pt"},
    )
    _, trained_anew = candidate(dict(section), "MODEL", ModelOptions()).load()
    assert trained_anew != first
