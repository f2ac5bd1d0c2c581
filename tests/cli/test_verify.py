from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from messages import edit_json, replace_text
from safetensors.torch import load_file, save_file
from signed import contract_of
from verbs import Command

from treeward.model.contract import CONTRACT_FILE


def damage(folder: Path) -> None:
    replace_text(folder / "chat_template.jinja", "<|", "<[")


@pytest.fixture
def labelled(own_model: Path) -> Path:
    """A folder without a contract, of a model with two labels."""
    tensors = load_file(own_model / "model.safetensors")
    tensors["score.weight"] = torch.cat(
        [tensors["score.weight"], 0.5 * tensors["score.weight"].flip(1)],
    )
    save_file(tensors, own_model / "model.safetensors", metadata={"format": "pt"})
    labels = {"id2label": {"0": "helpful", "1": "brief"}, "label2id": {"helpful": 0, "brief": 1}}
    edit_json(own_model / "config.json", **labels)
    (own_model / CONTRACT_FILE).unlink()
    return own_model


@pytest.fixture
def write(labelled: Path, treeward: Command) -> Callable[..., str]:
    """`treeward verify --write` of the folder: what it says, with this exit code."""

    def write(*words: str, code: int = 0) -> str:
        ended = treeward("verify", labelled, "--write", *words)
        assert ended.code == code
        return ended.err

    return write


def test_several_labels_need_weights(labelled: Path, write: Callable[..., str]) -> None:
    assert "--head-weights NAME=1" in write(code=2), "never quietly a wrong head"
    assert "each name once" in write("--head-weights", "helpful=1,helpful=2", code=2)
    assert not (labelled / CONTRACT_FILE).exists()


def test_a_contract_of_one_head_does_not_say_the_weights_of_two(
    labelled: Path,
    model_folder: Path,
    write: Callable[..., str],
) -> None:
    shutil.copy(model_folder / CONTRACT_FILE, labelled)
    assert "helpful, brief" in write("--force", code=2)


def test_golden_scores_are_of_the_weighted_heads(
    labelled: Path,
    write: Callable[..., str],
) -> None:
    write("--head-weights", "brief=0.25, helpful=1")
    contract = contract_of(labelled)
    heads = [(head.name, head.weight) for head in contract.heads]
    assert heads == [("helpful", 1.0), ("brief", 0.25)]
    for example in contract.golden:
        assert example.score == pytest.approx(example.heads[0] + 0.25 * example.heads[1])


def test_weights_are_kept_unless_others_are_given(
    labelled: Path,
    write: Callable[..., str],
) -> None:
    write("--head-weights", "brief=0.25, helpful=1")
    contract = contract_of(labelled)
    write("--force")
    assert contract_of(labelled) == contract
    write("--force", "--head-weights=helpful=-1,brief=2")
    assert [head.weight for head in contract_of(labelled).heads] == [-1.0, 2.0]
    write("--force", "--head-weights=mean")
    assert [head.weight for head in contract_of(labelled).heads] == [0.5, 0.5]
    assert "the model has heads" in write("--force", "--head-weights=min", code=2)


@pytest.fixture
def one_comparison(write_rows: Callable[..., Path]) -> Path:
    row = {"prompt": "2 + 2?", "chosen": "4.", "rejected": "It is 5."}
    return write_rows("rows.jsonl", [row])


def test_a_model_of_several_heads_is_not_scored_without_weights(
    labelled: Path,
    one_comparison: Path,
    treeward: Command,
) -> None:
    ended = treeward("score", labelled, "--data", one_comparison)
    assert ended.code == 2
    assert f"{labelled}: the model has several heads" in ended.err
    assert "--head-weights helpful=1,brief=1" in ended.err


def test_heads_are_weighted_on_the_command_line(
    labelled: Path,
    one_comparison: Path,
    treeward: Command,
) -> None:
    def scores(weights: str) -> np.ndarray:
        words = ("score", labelled, "--data", one_comparison, "--head-weights", weights)
        return np.array(json.loads(treeward(*words).out)["scores"])

    helpful = scores("helpful=1")
    brief = scores("0,1")
    both = scores("brief=2, helpful=-1")
    assert both == pytest.approx(2 * brief - helpful, abs=1e-5)
    assert not np.allclose(helpful, brief)


def test_the_report_says_the_weights(
    labelled: Path,
    one_comparison: Path,
    tmp_path: Path,
    treeward: Command,
) -> None:
    words = ("eval", labelled, "--data", one_comparison, "--output", tmp_path / "eval")
    assert treeward(*words, "--head-weights", "1,0.5").code == 0
    assert "head_weights" in (tmp_path / "eval" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("weights", ["1,x", "1,nan"])
def test_weights_that_cannot_be_read(weights: str, labelled: Path, treeward: Command) -> None:
    ended = treeward("serve", labelled, "--head-weights", weights)
    assert "--head-weights: the weights of the heads cannot be read" in ended.err


def test_constants_of_a_contract_are_not_those_of_other_weights_of_heads(
    labelled: Path,
    write_rows: Callable[..., Path],
    treeward: Command,
) -> None:
    rows = []
    for i in range(20):
        rows.append({"prompt": f"{i} + 2?", "chosen": f"{i + 2}.", "rejected": "It is 50."})
    data = ("--data", write_rows("rows.jsonl", rows))
    shaped = ("score", f"{{models: {labelled}, shaping: {{normalize_rewards: true}}}}", *data)
    ensemble = ("score", f"{{models: [{labelled}, {labelled}], ensemble: mean}}", *data)
    calibrate = ("calibrate", labelled, *data)
    sign = ("verify", labelled, "--write", "--head-weights", "1,1")
    for words in (sign, calibrate, shaped, ensemble):
        assert treeward(*words).code == 0
    for words in (shaped, calibrate, ensemble):
        ended = treeward(*words, "--head-weights", "0,1")
        assert ended.code == 2
        assert re.search("needs a mean|weights of heads|0 of 2 models", ended.err)


PARTS = [
    "contract",
    "files",
    "template",
    "tokens",
    "read position",
    "precision",
    "activation",
    "weights",
    "spread",
]


def test_json_has_every_part_and_the_largest_difference(own_model: Path, treeward: Command) -> None:
    ended = treeward("verify", own_model, "--json")
    assert ended.code == 0
    result = json.loads(ended.out)
    assert result["equal"] is True
    assert result["first_difference"] is None
    assert [check["part"] for check in result["checks"]] == PARTS
    assert result["num_scores"] == 8
    assert result["largest_difference"] <= result["tolerance"]


def test_bfloat16_has_a_tolerance_of_its_own(own_model: Path, treeward: Command) -> None:
    assert treeward("verify", own_model, "--dtype", "bfloat16").code == 0


def test_a_difference_is_exit_code_1(own_model: Path, treeward: Command) -> None:
    damage(own_model)
    ended = treeward("verify", own_model, "--json")
    assert ended.code == 1
    assert json.loads(ended.out)["first_difference"] == "template"


def test_nothing_to_compare_is_exit_code_2(own_model: Path, treeward: Command) -> None:
    (own_model / CONTRACT_FILE).unlink()
    ended = treeward("verify", own_model)
    assert ended.code == 2
    assert "what differs first is the contract" in ended.out
    assert "not checked" in ended.out


def test_another_readme_is_told_and_harmless(own_model: Path, treeward: Command) -> None:
    readme = own_model / "README.md"
    readme.write_text("# A model\n", encoding="utf-8")
    assert treeward("verify", own_model, "--write", "--force").code == 0
    before = contract_of(own_model)
    ended = treeward("verify", own_model)
    assert ended.code == 0
    assert "README.md" not in ended.out
    readme.write_text("# B model\n", encoding="utf-8")
    ended = treeward("verify", own_model, "--json")
    [files] = [check for check in json.loads(ended.out)["checks"] if check["part"] == "files"]
    assert ended.code == 0
    assert files["state"] == "equal"
    assert "README.md is not the one that was signed, which no score depends on" in files["summary"]
    assert treeward("verify", own_model, "--write", "--force").code == 0
    assert contract_of(own_model).readme_sha256 != before.readme_sha256
    # Rows that were kept stay usable.
    assert contract_of(own_model).scores_sha256 == before.scores_sha256


def test_a_contract_is_not_replaced_by_accident(own_model: Path, treeward: Command) -> None:
    before = (own_model / CONTRACT_FILE).read_bytes()
    damage(own_model)
    ended = treeward("verify", own_model, "--write")
    assert ended.code == 2
    assert "there is a contract already" in ended.err
    assert "--force" in ended.err
    for words in (["--force"], ["--write", "--force", "--head-weights", "x"]):
        assert treeward("verify", own_model, *words).code == 2
    assert (own_model / CONTRACT_FILE).read_bytes() == before
    # What the folder holds is what should be, then.
    assert treeward("verify", own_model, "--write", "--force").code == 0
    assert (own_model / CONTRACT_FILE).read_bytes() != before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--force"], "the option needs --write"),
        (["--model", "m"], "the option needs --against URL"),
        (["--dialect", "vllm"], "the option needs --against URL"),
        (["--token-env", "T"], "the option needs --against URL"),
        (["--against", "http://localhost:1", "--write"], "the option does not go with --against"),
    ],
)
def test_options_that_would_have_no_effect(
    words: list[str],
    message: str,
    own_model: Path,
    treeward: Command,
) -> None:
    ended = treeward("verify", own_model, *words)
    assert ended.code == 2
    assert message in ended.err
