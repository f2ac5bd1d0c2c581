from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from treeward.cli.main import main
from treeward.model.contract import CONTRACT_FILE, read_contract

Verify = Callable[..., tuple[int, str]]


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    """A model folder with its contract, to be damaged."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def damage(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8").replace("<|", "<["), encoding="utf-8")


def test_a_whole_folder(folder: Path, verify: Verify) -> None:
    code, text = verify(folder)
    assert code == 0 and "differs" not in text
    assert ": equal: 8 golden scores, to within" in text
    assert [line.split("  ")[0] for line in text.splitlines()[2:10]] == [
        "contract", "files", "template", "tokens", "read position", "precision", "activation", "weights",
    ]  # fmt: skip
    assert verify(folder, "--dtype", "bfloat16")[0] == 0


@pytest.fixture
def labelled(folder: Path) -> Path:
    """A folder without a contract, of a model with two labels."""
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = torch.cat([tensors["score.weight"], 0.5 * tensors["score.weight"].flip(1)])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"id2label": {"0": "helpful", "1": "brief"}, "label2id": {"helpful": 0, "brief": 1}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / CONTRACT_FILE).unlink()
    return folder


def test_several_labels_need_weights(labelled: Path, model_folder: Path, verify: Verify) -> None:
    for words in (["--write"], ["--write", "--head-weights", "helpful=1,helpful=2"]):  # never quietly a wrong head
        code, text = verify(labelled, *words)
        assert code == 2 and ("--head-weights NAME=1" in text or "each name once" in text)
        assert not (labelled / CONTRACT_FILE).exists()
    shutil.copy(model_folder / CONTRACT_FILE, labelled)  # of one head
    assert "helpful, brief" in verify(labelled, "--write", "--force")[1]
    (labelled / CONTRACT_FILE).unlink()
    assert verify(labelled, "--write", "--head-weights", "brief=0.25, helpful=1")[0] == 0
    contract = read_contract(labelled)
    assert contract is not None
    assert [(head.name, head.weight) for head in contract.heads] == [("helpful", 1.0), ("brief", 0.25)]
    for example in contract.golden:
        assert example.score == pytest.approx(example.heads[0] + 0.25 * example.heads[1])
    # What the contract says is kept, unless other weights are given.
    assert verify(labelled, "--write", "--force")[0] == 0 and read_contract(labelled) == contract
    assert verify(labelled, "--write", "--force", "--head-weights=helpful=-1,brief=2")[0] == 0
    after = read_contract(labelled)
    assert after is not None and [head.weight for head in after.heads] == [-1.0, 2.0]


def test_heads_are_weighted_on_the_command_line(
    labelled: Path, tmp_path: Path, write_rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows("rows.jsonl", [{"prompt": "2 + 2?", "chosen": "4.", "rejected": "It is 5."}])
    assert main(["score", str(labelled), "--data", str(rows)]) == 2
    said = capsys.readouterr().err
    assert f"{labelled}: the model has several heads" in said and "--head-weights helpful=1,brief=1" in said

    def scores(weights: str) -> list[float]:
        assert main(["score", str(labelled), "--data", str(rows), "--head-weights", weights]) == 0
        row = json.loads(capsys.readouterr().out)
        return list(row["scores"])

    helpful, brief, both = (np.array(scores(weights)) for weights in ("helpful=1", "0,1", "brief=2, helpful=-1"))
    assert both == pytest.approx(2 * brief - helpful, abs=1e-5) and not np.allclose(helpful, brief)
    output = tmp_path / "eval"
    words = ["eval", str(labelled), "--data", str(rows), "--output", str(output), "--head-weights", "1,0.5"]
    assert main(words) == 0 and "heads weighted 1,0.5" in (output / "report.html").read_text(encoding="utf-8")
    for bad in ("1,x", "1,nan"):
        assert main(["serve", str(labelled), "--head-weights", bad]) == 2
        assert "--head-weights: the weights of the heads cannot be read" in capsys.readouterr().err


def test_constants_of_a_contract_are_not_those_of_other_weights_of_heads(
    labelled: Path, write_rows: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{i} + 2?", "chosen": f"{i + 2}.", "rejected": "It is 50."} for i in range(20)]
    data = ["--data", str(write_rows("rows.jsonl", rows))]
    assert main(["verify", str(labelled), "--write", "--head-weights", "1,1"]) == 0
    assert main(["calibrate", str(labelled), *data, "--shaping", "{normalize_rewards: true}"]) == 0
    shaped = ["score", str(labelled), *data, "--shaping", "contract"]
    assert main(shaped) == 0
    capsys.readouterr()
    ensemble = ["score", str(labelled), str(labelled), *data, "--ensemble", "mean"]
    assert main(ensemble) == 0
    for words in (shaped, ["calibrate", str(labelled), *data], ensemble):
        assert main([*words, "--head-weights", "0,1"]) == 2
        assert re.search("weights of heads|0 of 2 models with a calibration", capsys.readouterr().err)


def test_json_and_nothing_to_compare(folder: Path, verify: Verify) -> None:
    code, text = verify(folder, "--json")
    result = json.loads(text)
    assert code == 0 and result["equal"] is True and result["first_difference"] is None
    assert len(result["checks"]) == 8 and result["largest_difference"] <= result["tolerance"]
    damage(folder)
    code, text = verify(folder, "--json")
    assert code == 1 and json.loads(text)["first_difference"] == "template"
    (folder / CONTRACT_FILE).unlink()
    code, text = verify(folder)
    assert code == 2 and "what differs first is the contract" in text and "not checked" in text


def test_a_contract_is_not_replaced_by_accident(folder: Path, verify: Verify) -> None:
    before = (folder / CONTRACT_FILE).read_bytes()
    damage(folder)
    code, text = verify(folder, "--write")
    assert code == 2 and "there is a contract already" in text and "--force" in text
    assert (folder / CONTRACT_FILE).read_bytes() == before
    assert verify(folder, "--force")[0] == 2 and verify(folder, "--write", "--force", "--head-weights", "x")[0] == 2
    assert verify(folder, "--write", "--force")[0] == 0  # the template is as it should be, then
    assert (folder / CONTRACT_FILE).read_bytes() != before
