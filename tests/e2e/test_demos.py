"""The demos and the notebook of examples/ from nothing to their tables, with runs too short to
learn anything."""

from __future__ import annotations

import gzip
import json
import runpy
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
QUESTIONS = ("Is the moon far?", "Where is the rain?", "Why does snow fall?")
SHORTER_TRAINING = [
    f"{key}=4"
    for key in ("rm.max_num_steps", "rm.val_period", "rm.val_batches", "checkpointing.save_period")
]


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """A function: the names of a demo, some with other values; `["run"]()` runs it in an empty
    folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    (tmp_path / "examples").symlink_to(EXAMPLES)

    def load(name: str, **quick: Any) -> dict[str, Any]:
        run = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="demo")["run"]
        run.__globals__.update(quick)
        names: dict[str, Any] = run.__globals__
        return names

    return load


@pytest.mark.slow
def test_a_judge_is_taught_optimised_and_compared(
    demo: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter = ["grpo.max_num_steps=1", "grpo.max_val_samples=8", "+data.train.max_samples=40"]
    quick = {
        "TAUGHT_EPOCHS": 1,
        "EXAMPLES": 12,
        "SHORTER": shorter,
        "SHORTER_TRAINING": SHORTER_TRAINING,
    }
    assert demo("judge_demo", **quick)["run"]() == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    for split in ("validation", "length_controlled"):
        assert all([split, name] in rows for name in ("quickstart", "taught", "learnt"))
    assert (tmp_path / "results/judge_demo/judge/final/judge_contract.json").is_file()


@pytest.mark.slow
def test_a_process_reward_model_is_compared_with_one_of_outcomes(
    demo: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = {"NUM_TRAINED": 12, "NUM_HELD_OUT": 6, "SHORTER": SHORTER_TRAINING}
    assert demo("process_demo", **quick)["run"]() == 0
    out = capsys.readouterr().out
    for name in ("the process reward model", "the model of outcomes", "the majority", "the truth"):
        assert name in out
    assert (tmp_path / "results/process_demo/steps/final/reward_contract.json").is_file()


@pytest.mark.slow
def test_rlhf_makes_everything_it_needs_and_reports(
    demo: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shorter = [
        "grpo.max_num_steps=2",
        "grpo.max_val_samples=8",
        "policy.generation.max_new_tokens=16",
    ]
    run = demo("rlhf_demo", SFT_EPOCHS=1, SHORTER=shorter, SHORTER_TRAINING=SHORTER_TRAINING)["run"]
    assert run() == 0
    names = ("close", "hacked", "cured")
    rows = [
        line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith(names)
    ]
    assert rows == list(map(list, product(names, ("0", "2"))))
    page = (tmp_path / "results/rlhf_demo/report.html").read_text(encoding="utf-8")
    assert all(name in page for name in names)
    made = (tmp_path / "results/rlhf_demo/sft/model.safetensors").stat().st_mtime_ns
    assert run() == 0  # again: what is done stands
    assert (tmp_path / "results/rlhf_demo/sft/model.safetensors").stat().st_mtime_ns == made


@pytest.mark.slow
def test_a_judge_of_criteria_is_taught_and_both_runs_show_what_they_give_up(
    demo: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is learnt in two steps: the tables and the page have every criterion."""
    shorter = [
        "grpo.max_num_steps=2",
        "grpo.max_val_samples=8",
        "policy.generation.max_new_tokens=16",
    ]
    names = demo("rubric_demo", JUDGE_EPOCHS=1, JUDGED_ROWS=40, SFT_EPOCHS=1, SHORTER=shorter)
    assert names["run"]() == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    criteria = ("right", "format", "courteous")
    rows = [line[:2] for line in printed if line[:1] in (["sum"], ["gdpo"])]
    assert rows == list(map(list, product(("sum", "gdpo"), criteria)))
    # The table of the judge, whose completions are all of the validation set.
    assert [line[0] for line in printed if line[-1:] == ["968"]] == list(criteria)
    page = (tmp_path / "results/rubric_demo/report.html").read_text(encoding="utf-8")
    assert "Components of gold" in page and "rubric/courteous" in page
    made = (tmp_path / "results/rubric_demo/judge/model.safetensors").stat().st_mtime_ns
    assert names["run"]() == 0  # again: what is done stands
    assert (tmp_path / "results/rubric_demo/judge/model.safetensors").stat().st_mtime_ns == made


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def transcripts(count: int) -> list[dict[str, Any]]:
    """The shorter completion is the better one in two of three."""
    asked = [f"\n\nHuman: {QUESTIONS[n % 3]}\n\nAssistant: " for n in range(count)]
    texts = []
    for n in range(count):
        texts.append(("Yes.", "Yes, and no.") if n % 3 else ("It is so far away.", "No."))
    return [
        {"chosen": q + better, "rejected": q + worse}
        for q, (better, worse) in zip(asked, texts, strict=True)
    ]


@pytest.mark.slow
def test_a_real_model_is_trained_evaluated_and_its_table_has_the_numbers_of_the_rows(
    demo: Callable[..., Any],
    policy_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    """A tiny one in its place."""
    shared = tmp_path / "shared"
    results = tmp_path / "results/real_demo"
    write(shared / "hh_harmless/train.jsonl.gz", transcripts(48))
    write(shared / "hh_harmless/validation.jsonl.gz", transcripts(12))
    pair = {"input": "Say yes.", "output_1": "Yes.", "output_2": "No, never.", "label": 1}
    write(shared / "llmbar/natural.jsonl.gz", [pair] * 4)
    monkeypatch.setenv("TREEWARD_SHARED_DATA", str(shared))
    shutil.copytree(policy_folder, tmp_path / ".models/smollm2-135m-instruct")
    names = demo("real_demo", SHORTER=["policy.max_total_sequence_length=64"])
    assert names["run"]() == 0
    printed = capsys.readouterr().out
    found = list(names["rows"]())
    judges = [*names["MODELS"].values(), "the shorter completion"]
    want = []
    for suite, count in (("llmbar", 4), ("validation", 12)):
        want += [(suite, judge, count) for judge in judges]
    assert [(row["set"], row["judge"], row["count"]) for row in found] == want
    rules = {row["set"]: row for row in found if row["judge"] == "the shorter completion"}
    assert (rules["llmbar"]["right"], rules["validation"]["right"]) == (1.0, pytest.approx(2 / 3))
    assert all(
        row["low"] <= row["right"] <= row["high"] and row["judge"] in printed for row in found
    )
    page = (results / "eval/report.html").read_text(encoding="utf-8")
    assert "model" in page and "frozen" in page
    prompts = (results / "data/train_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(prompts[0])["messages"] == [{"role": "user", "content": QUESTIONS[0]}]
    made = (results / "model/final/model.safetensors").stat().st_mtime_ns
    assert names["run"]() == 0  # again: what is done stands
    assert (results / "model/final/model.safetensors").stat().st_mtime_ns == made


NOTEBOOK = EXAMPLES / "first_reward_model.ipynb"


@pytest.mark.slow  # most of it is the report's charts
def test_the_notebook_runs_and_shows_what_its_text_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert names["outcome"].validation["held_out"]["accuracy"] > 0.7
    assert "likes longer completions" in names["model"]["verdict"]
    assert sum(names["bonus"]) > 0
