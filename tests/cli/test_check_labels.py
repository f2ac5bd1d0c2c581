"""`treeward check-labels`: its page and its file agree, and a second start is exact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WORDS
from page_text import Page
from safetensors.torch import load_file, save_file
from verbs import Command, Ended

from treeward.model.reward_model import RewardModel

Write = Callable[..., Path]
Check = Callable[..., Ended]


def rows(count: int) -> list[dict[str, Any]]:
    """The better completion ends with sun, the worse with rain."""
    made = []
    for n in range(count):
        start = f"{WORDS[n % 14]} {WORDS[(3 * n) % 13]} {n}"
        made.append(
            {"prompt": f"Name {n}.", "chosen": f"{start} sun.", "rejected": f"{start} rain."}
        )
    return made


def flipped(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"chosen": row["rejected"], "rejected": row["chosen"]}


@pytest.fixture
def check(treeward: Command, policy_folder: Path, tmp_path: Path) -> Check:
    def run(data: Path, *words: str, output: str = "out") -> Ended:
        options = ["--model", policy_folder, "--output", tmp_path / output]
        return treeward("check-labels", data, *options, f"data.cache_dir={tmp_path}/cache", *words)

    return run


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_planted_flips_come_first_and_page_and_file_agree(
    check: Check, write_rows: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [flipped(row) if n % 20 == 7 else row for n, row in enumerate(rows(100))]
    wrong = {f"data.jsonl:{n + 1}" for n in range(100) if n % 20 == 7}
    hostile = "<script>alert(1)</script> \u202e"
    data[7] = data[7] | {"prompt": hostile}
    path = write_rows("data.jsonl", data)
    ended = check(path)
    assert ended.code == 0, ended.err
    out = tmp_path / "out"
    lines = read_lines(out / "labels.jsonl")
    assert len(lines) == 100 and len({line["pair"] for line in lines}) == 100
    assert {line["where"].rpartition("/")[2] for line in lines[:5]} == wrong
    proposed = {line["where"].rpartition("/")[2] for line in lines if line["proposal"] == "drop"}
    # Confident learning names those that are surer than the labels are on average.
    assert proposed and proposed <= wrong
    ratios = [line["margin"] / line["spread"] for line in lines]
    assert ratios == sorted(ratios)

    page = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert [row["pair"] for row in page["examples"]] == [line["pair"] for line in lines]
    assert [row["margin"] for row in page["examples"]] == pytest.approx(ratios)
    assert [row["model"] for row in page["examples"]] == [line["proposal"] for line in lines]
    assert page["numbers"]["suspects"]["count"] == len(proposed)
    html = (out / "report.html").read_text(encoding="utf-8")
    assert "<script>alert(1)" not in html and "\u202e" not in html
    text = Page(html).text
    for sentence in page["sentences"]:
        assert sentence in text
        assert sentence in " ".join(ended.out.split())

    # The features are there: a second start does not ask the model, and says the same.
    monkeypatch.setattr(RewardModel, "features", None)
    assert check(path, output="again").code == 0
    assert read_lines(tmp_path / "again" / "labels.jsonl") == lines


def test_copies_and_contradictions_are_held_out_together(
    check: Check, write_rows: Write, tmp_path: Path
) -> None:
    alone = rows(40)
    # Whole conversations without a prompt, whose fold cannot be told by one.
    data = [*rows(40), alone[0], flipped(alone[1])]
    assert check(write_rows("data.jsonl", data)).code == 0
    lines = read_lines(tmp_path / "out" / "labels.jsonl")
    by_place = {line["where"].rpartition(":")[2]: line for line in lines}
    assert len(lines) == 41, "a copy is the same pair"
    # The same head has read both orders, and knows neither label.
    assert by_place["2"]["margin"] == pytest.approx(-by_place["42"]["margin"], abs=1e-6)
    assert by_place["2"]["spread"] == pytest.approx(by_place["42"]["spread"])


def test_a_pair_that_was_not_read_has_a_line(
    check: Check, write_rows: Write, tmp_path: Path
) -> None:
    long = {"prompt": "rain " * 300, "chosen": "yes", "rejected": "no"}
    ended = check(write_rows("data.jsonl", [*rows(40), long]))
    assert "1 pairs were not read" in " ".join(ended.out.split())
    # All labels are right, so that there is nothing to train without.
    assert "No pair is a suspect" in ended.out and "Train without" not in ended.out
    last = read_lines(tmp_path / "out" / "labels.jsonl")[-1]
    assert last["margin"] is None and last["proposal"] == "keep"


def test_a_model_to_which_all_completions_are_alike_is_told_of(
    treeward: Command, write_rows: Write, policy_folder: Path, tmp_path: Path
) -> None:
    blind = shutil.copytree(policy_folder, tmp_path / "blind")
    for path in blind.glob("*.safetensors"):
        weights = {name: torch.zeros_like(weight) for name, weight in load_file(path).items()}
        save_file(weights, path, metadata={"format": "pt"})
    data = write_rows("data.jsonl", rows(40))
    words = ["--model", blind, "--output", tmp_path / "out", f"data.cache_dir={tmp_path}/cache"]
    ended = treeward("check-labels", data, *words)
    assert ended.code == 0, ended.err
    assert "nothing is proposed" in " ".join(ended.out.split())
    page = json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert [row["margin"] for row in page["examples"]] == [0.0] * 40


def test_mistakes_are_told(
    check: Check, treeward: Command, write_rows: Write, policy_folder: Path, tmp_path: Path
) -> None:
    few = check(write_rows("few.jsonl", rows(6)))
    assert few.code == 2
    assert "too few prompts" in few.err and "6 different prompts with 6 pairs" in few.err
    nothing = treeward("check-labels", "--model", policy_folder, "--output", tmp_path / "out")
    assert nothing.code == 2 and "there is nothing to check" in nothing.err
    absent = check(tmp_path / "absent.jsonl")
    assert absent.code == 2 and "no such file or folder" in absent.err
    data = write_rows("data.jsonl", rows(40))
    misspelt = check(data, "policy.precison=float32")
    assert misspelt.code == 2 and "policy.precision" in misspelt.err
    trained = check(data, "policy.reward_model_cfg.freeze_backbone=false")
    assert trained.code == 2 and "only a head is fitted" in trained.err
    # Pairs that are dropped would have given their lines to others.
    assert check(data).code == 0
    lines = read_lines(tmp_path / "out" / "labels.jsonl")
    lines[0]["proposal"] = "drop"
    labelled = check(data, f"data.labels={write_rows('labels.jsonl', lines)}")
    assert labelled.code == 2 and "the labels of the data are checked" in labelled.err


def test_what_it_writes_is_what_train_takes(
    check: Check, treeward: Command, write_rows: Write, policy_folder: Path, tmp_path: Path
) -> None:
    data = [flipped(row) if n % 20 == 7 else row for n, row in enumerate(rows(100))]
    path = write_rows("data.jsonl", data)
    assert check(path).code == 0
    labels = tmp_path / "out" / "labels.jsonl"
    num_dropped = sum(line["proposal"] == "drop" for line in read_lines(labels))
    assert num_dropped > 0
    words = ["train", "--model", policy_folder, "--data", path]
    options = [
        f"data.labels={labels}",
        f"data.cache_dir={tmp_path}/cache",
        "rm.max_num_steps=1",
        f"checkpointing.checkpoint_dir={tmp_path}/rm",
        f"logger.log_dir={tmp_path}/logs",
    ]
    ended = treeward(*words, *options)
    assert ended.code == 0, ended.err
    logged = json.loads((tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()[0])
    counted = [value for key, value in logged.items() if key.endswith("dropped_suspects")]
    assert 0 < sum(counted) <= num_dropped
    # Labels of other data are refused.
    labels.write_text("".join(labels.read_text().splitlines(keepends=True)[5:]))
    refused = treeward(*words, *options, f"checkpointing.checkpoint_dir={tmp_path}/rm2")
    assert refused.code == 2
    assert "the labels do not fit the data" in refused.err and "check-labels" in refused.err
