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


def test_several_labels_need_weights(labelled: Path, model_folder: Path, treeward: Command) -> None:
    def write(*words: str, code: int = 0) -> str:
        ended = treeward("verify", labelled, "--write", *words)
        assert ended.code == code
        return ended.err

    assert "--head-weights NAME=1" in write(code=2)  # never quietly a wrong head
    assert "each name once" in write("--head-weights", "helpful=1,helpful=2", code=2)
    assert not (labelled / CONTRACT_FILE).exists()
    shutil.copy(model_folder / CONTRACT_FILE, labelled)  # of one head
    assert "helpful, brief" in write("--force", code=2)
    (labelled / CONTRACT_FILE).unlink()
    write("--head-weights", "brief=0.25, helpful=1")
    contract = contract_of(labelled)
    assert [(head.name, head.weight) for head in contract.heads] == [
        ("helpful", 1.0),
        ("brief", 0.25),
    ]
    for example in contract.golden:
        assert example.score == pytest.approx(example.heads[0] + 0.25 * example.heads[1])
    write("--force")
    assert contract_of(labelled) == contract, "what it says is kept, unless other weights are given"
    write("--force", "--head-weights=helpful=-1,brief=2")
    assert [head.weight for head in contract_of(labelled).heads] == [-1.0, 2.0]


def test_heads_are_weighted_on_the_command_line(
    labelled: Path,
    tmp_path: Path,
    write_rows: Callable[..., Path],
    treeward: Command,
) -> None:
    data = (
        "--data",
        write_rows("rows.jsonl", [{"prompt": "2 + 2?", "chosen": "4.", "rejected": "It is 5."}]),
    )
    ended = treeward("score", labelled, *data)
    assert ended.code == 2
    assert f"{labelled}: the model has several heads" in ended.err
    assert "--head-weights helpful=1,brief=1" in ended.err

    def scores(weights: str) -> list[float]:
        return list(
            json.loads(treeward("score", labelled, *data, "--head-weights", weights).out)["scores"],
        )

    helpful, brief, both = (np.array(scores(weights)) for weights in ("helpful=1", "0,1", "brief=2, helpful=-1"))
    assert both == pytest.approx(2 * brief - helpful, abs=1e-5)
    assert not np.allclose(helpful, brief)
    assert (
        treeward(
            "eval",
            labelled,
            *data,
            "--output",
            tmp_path / "eval",
            "--head-weights",
            "1,0.5",
        ).code
        == 0
    )
    assert "head_weights" in (tmp_path / "eval" / "report.html").read_text(encoding="utf-8")
    for bad in ("1,x", "1,nan"):
        ended = treeward("serve", labelled, "--head-weights", bad)
        assert "--head-weights: the weights of the heads cannot be read" in ended.err


def test_constants_of_a_contract_are_not_those_of_other_weights_of_heads(
    labelled: Path,
    write_rows: Callable[..., Path],
    treeward: Command,
) -> None:
    rows = [{"prompt": f"{i} + 2?", "chosen": f"{i + 2}.", "rejected": "It is 50."} for i in range(20)]
    data = ("--data", write_rows("rows.jsonl", rows))
    shaped = ("score", f"{{models: {labelled}, shaping: {{normalize_rewards: true}}}}", *data)
    ensemble = ("score", f"{{models: [{labelled}, {labelled}], ensemble: mean}}", *data)
    for words in (
        ("verify", labelled, "--write", "--head-weights", "1,1"),
        ("calibrate", labelled, *data),
        *(shaped, ensemble),
    ):
        assert treeward(*words).code == 0
    for words in (shaped, ("calibrate", labelled, *data), ensemble):
        ended = treeward(*words, "--head-weights", "0,1")
        assert ended.code == 2
        assert re.search(
            "needs a mean|weights of heads|0 of 2 models",
            ended.err,
        )


def test_json_and_nothing_to_compare(own_model: Path, treeward: Command) -> None:
    ended = treeward("verify", own_model, "--json")
    result = json.loads(ended.out)
    assert ended.code == 0
    assert result["equal"] is True
    assert result["first_difference"] is None
    parts = [
        "contract",
        "files",
        "template",
        "tokens",
        "read position",
        "precision",
        "activation",
        "weights",
    ]
    assert [check["part"] for check in result["checks"]] == parts
    assert result["num_scores"] == 8
    assert result["largest_difference"] <= result["tolerance"]
    assert treeward("verify", own_model, "--dtype", "bfloat16").code == 0
    damage(own_model)
    ended = treeward("verify", own_model, "--json")
    assert ended.code == 1
    assert json.loads(ended.out)["first_difference"] == "template"
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
    assert contract_of(own_model).scores_sha256 == before.scores_sha256, "rows that were kept stay usable"


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
    assert treeward("verify", own_model, "--write", "--force").code == 0  # the template is as it should be, then
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
