from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treeward.cli.main import main
from treeward.config.scoring import RewardShapingConfig
from treeward.model.contract import CONTRACT_FILE, RewardCalibration, ScoringContract, read_contract
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import Shaper

Write = Callable[..., Path]

BINARY = [
    {"prompt": f"{n} + {n + 1}?", "chosen": f"It is {2 * n + 1}." + " Really." * (n % 4 + 1)}
    | {"rejected": "I do not know that." * (n % 3)}
    for n in range(12)
]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture
def model(model_folder: Path, tmp_path: Path) -> Path:
    """A model folder with its contract, to write in."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def contract_of(folder: Path) -> ScoringContract:
    contract = read_contract(folder)
    assert contract is not None
    return contract


def calibration_of(folder: Path) -> RewardCalibration:
    calibration = contract_of(folder).calibration
    assert calibration is not None
    return calibration


def test_the_constants_reach_the_contract_and_from_there_the_rewards(
    model: Path, write_rows: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contract_of(model)
    data = write_rows("held_out.jsonl", BINARY)
    assert main(["calibrate", str(model), "--data", str(data), "--device", "cpu"]) == 0
    contract = contract_of(model)
    assert contract.model_copy(update={"calibration": None}) == before.model_copy(update={"calibration": None})
    scorer = Scorer.load(model, device="cpu")
    pairs = [(row["prompt"], row[key]) for row in BINARY for key in ("chosen", "rejected")]
    conversations = [[message("user", question), message("assistant", text)] for question, text in pairs]
    scores = scorer.score(conversations)
    shaper = Shaper(
        RewardShapingConfig(normalize_rewards=True, reward_clip=None),
        calibration=scorer.contract.calibration if scorer.contract else None,
    )
    rewards = np.array([one.value for one in shaper.shape(scores, conversations)], dtype=float)
    assert rewards.mean() == pytest.approx(0.0, abs=1e-4) and rewards.std() == pytest.approx(1.0, abs=1e-4)
    source = calibration_of(model).provenance
    assert source is not None and source.data == "held_out.jsonl" and source.num_comparisons == 12
    table = capsys.readouterr().out
    assert "comparisons" in table and f"{calibration_of(model).normalization.mean:.4f}" in table  # type: ignore[union-attr]


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["calibrate", *words]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_where_the_constants_cannot_be_kept_is_told_first(
    model: Path, write_rows: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(write_rows("in.jsonl", BINARY))]
    assert "cannot be kept" in refused(["org/no-such-model", *data], capsys)
    assert "trained on" in refused(["org/no-such-model", "--dataset-name", "Bundled"], capsys)  # its split is train
    (model / "model.safetensors").unlink()  # were the model loaded, this would be the error
    (model / CONTRACT_FILE).unlink()
    assert "verify" in refused([str(model), *data], capsys)
    assert "the option is no section" in refused([str(model), *data, "--shaping", "contract"], capsys)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([*BINARY, {"prompt": "?", "chosen": "Yes."}], "in.jsonl:13"),
        ([BINARY[0], *[row | {"chosen": "and so on " * 99} for row in BINARY]], "1 with two scored"),
    ],
)
def test_data_that_cannot_be_calibrated_on(
    rows: list[Any], words: str, model: Path, write_rows: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (model / CONTRACT_FILE).read_bytes()
    assert words in refused([str(model), "--data", str(write_rows("in.jsonl", rows)), "--device", "cpu"], capsys)
    assert (model / CONTRACT_FILE).read_bytes() == before
