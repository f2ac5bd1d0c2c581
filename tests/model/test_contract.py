"""`reward_contract.json`: what it must hold, and what is said where it does not."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from signed import contract_of

from treeward.errors import ModelError
from treeward.model.contract import CONTRACT_FILE, RewardCalibration, read_contract, write_contract


def test_what_is_written_is_read(model_folder: Path, tmp_path: Path) -> None:
    assert read_contract(tmp_path) is None and read_contract("someone/on-the-hub") is None
    signed = read_contract(model_folder)
    assert signed is not None
    rendering = signed.rendering.model_copy(update={"chat_template_kwargs": {"tone": "é"}})
    contract = signed.model_copy(update={"rendering": rendering})
    path = write_contract(contract, tmp_path)
    again = read_contract(str(tmp_path))
    assert (
        path == tmp_path / CONTRACT_FILE
        and read_contract(tmp_path) == contract == again
        and again is not None
    )
    assert "é" in path.read_text(encoding="utf-8")
    assert (
        stat.S_IMODE(path.stat().st_mode) & 0o044
    ) == 0o044  # others may read the model, so this too
    other = contract.model_copy(update={"treeward_version": "0.0"})
    assert other.scores_sha256 != contract.scores_sha256 == again.scores_sha256
    write_contract(other, tmp_path)
    assert read_contract(tmp_path) == other and [file.name for file in tmp_path.iterdir()] == [
        CONTRACT_FILE
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged"),
        ("{}", "damaged"),
        (
            '{"version": 99}',
            "another version(?s:.*)field: version(?s:.*)99(?s:.*)need:  2(?s:.*)--write --force",
        ),
    ],
)
def test_files_that_are_no_contract(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / CONTRACT_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=f"{CONTRACT_FILE}: (?s:.*){message}"):
        read_contract(tmp_path)


@pytest.mark.parametrize("damage", ["[" * 100_000, "negative", "huge", "many"])
def test_a_contract_that_others_wrote_is_bounded(
    damage: str, model_folder: Path, tmp_path: Path
) -> None:
    """Each is an error that names the file."""
    file = tmp_path / CONTRACT_FILE
    content = json.loads((model_folder / CONTRACT_FILE).read_text())
    if damage == "negative":
        content["golden"][0]["token_ids"] = [-1]
    elif damage == "huge":
        content["golden"][0]["token_ids"] = [2**64]
    elif damage == "many":
        content["golden"] *= 101  # 100 are the most
    file.write_text(damage if damage.startswith("[") else json.dumps(content))
    with pytest.raises(ModelError, match="damaged") as caught:
        read_contract(tmp_path)
    assert str(file) in str(caught.value) and len(str(caught.value)) < 2000


def test_a_calibration_does_not_change_the_hash_of_scores(model_folder: Path) -> None:
    contract = contract_of(model_folder)
    assert contract.calibration is None
    calibrated = contract.model_copy(update={"calibration": RewardCalibration()})
    assert calibrated.scores_sha256 == contract.scores_sha256
