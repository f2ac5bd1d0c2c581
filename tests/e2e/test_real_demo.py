"""The demo of a real model, with a tiny one in its place: all is made, and the table has the numbers of the rows."""

from __future__ import annotations

import gzip
import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTIONS = ("Is the moon far?", "Where is the rain?", "Why does snow fall?")


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return runpy.run_path(str(EXAMPLES / "real_demo.py"), run_name="demo")["run"].__globals__  # type: ignore[no-any-return]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def transcripts(count: int) -> list[dict[str, Any]]:
    """The shorter completion is the better one in two of three."""
    asked = [f"\n\nHuman: {QUESTIONS[n % 3]}\n\nAssistant: " for n in range(count)]
    texts = [("Yes.", "Yes, and no.") if n % 3 else ("It is so far away.", "No.") for n in range(count)]
    return [{"chosen": q + better, "rejected": q + worse} for q, (better, worse) in zip(asked, texts, strict=True)]


@pytest.mark.slow
def test_the_demo_trains_evaluates_and_counts(
    demo: dict[str, Any], policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    shared = tmp_path / "shared"
    write(shared / "hh_harmless/train.jsonl.gz", transcripts(48))
    write(shared / "hh_harmless/validation.jsonl.gz", transcripts(12))
    pair = {"input": "Say yes.", "output_1": "Yes.", "output_2": "No, never.", "label": 1}
    write(shared / "llmbar/natural.jsonl.gz", [pair] * 4)
    monkeypatch.setenv("TREEWARD_SHARED_DATA", str(shared))
    shutil.copytree(policy_folder, tmp_path / ".models/smollm2-135m-instruct")
    monkeypatch.setitem(demo, "SHORTER", ["policy.max_total_sequence_length=64"])
    assert demo["run"]() == 0
    printed = capsys.readouterr().out
    found = list(demo["rows"]())
    assert [(row["set"], row["judge"], row["count"]) for row in found] == [
        (suite, judge, count)
        for suite, count in (("llmbar", 4), ("validation", 12))
        for judge in (*demo["MODELS"].values(), "the shorter completion")
    ]
    rules = {row["set"]: row for row in found if row["judge"] == "the shorter completion"}
    assert (rules["llmbar"]["right"], rules["validation"]["right"]) == (1.0, pytest.approx(2 / 3))
    assert all(row["low"] <= row["right"] <= row["high"] and row["judge"] in printed for row in found)
    page = (tmp_path / "results/real_demo/eval/report.html").read_text(encoding="utf-8")
    assert "model" in page and "frozen" in page
    prompts = (tmp_path / "results/real_demo/data/train_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(prompts[0])["messages"] == [{"role": "user", "content": QUESTIONS[0]}]
    made = (tmp_path / "results/real_demo/model/final/model.safetensors").stat().st_mtime_ns
    assert demo["run"]() == 0  # again: what is done stands
    assert (tmp_path / "results/real_demo/model/final/model.safetensors").stat().st_mtime_ns == made


def test_without_data_it_says_where_from(
    demo: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setitem(demo, "hf_hub_download", refuse)
    monkeypatch.delenv("TREEWARD_SHARED_DATA", raising=False)
    assert demo["run"]() == 1
    assert "TREEWARD_SHARED_DATA" in capsys.readouterr().out
    monkeypatch.setenv("TREEWARD_SHARED_DATA", "elsewhere")
    assert demo["run"]() == 1
    assert "There is no elsewhere/hh_harmless/train.jsonl.gz" in capsys.readouterr().out
    assert not Path("results").exists()


def test_the_run_of_grpo_takes_the_demo_files() -> None:
    training, grpo = (
        yaml.safe_load((EXAMPLES / f"configs/{name}.yaml").read_text(encoding="utf-8"))
        for name in ("real_demo", "grpo_real_demo")
    )
    assert grpo["env"]["reward_model"]["model_name"] == f"{training['checkpointing']['checkpoint_dir']}/final"
    assert grpo["policy"]["model_name"] == training["policy"]["model_name"]
    train = Path(training["data"]["train"]["data_path"])
    assert grpo["data"]["train"]["data_path"] == str(train.with_name(f"{train.stem}_prompts.jsonl"))
