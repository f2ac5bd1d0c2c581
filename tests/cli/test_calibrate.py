from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treeward.cli.main import main
from treeward.config.reward_shaping import RewardCalibration, RewardShapingConfig
from treeward.model.contract import CONTRACT_FILE, ScoringContract, read_contract
from treeward.scoring.golden import sign_folder
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import Shaper

Write = Callable[..., Path]

QUESTIONS = [f"{n} + {n + 1}?" for n in range(12)]
BINARY = [
    {
        "prompt": text,
        "chosen": f"It is {2 * n + 1}." + " Really." * (n % 4 + 1),
        "rejected": "I do not know that." * (n % 3),
    }
    for n, text in enumerate(QUESTIONS)
]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def in_form(form: str, row: dict[str, str]) -> dict[str, Any]:
    """One of the binary rows as another format has it."""
    question, chosen, rejected = (row[key] for key in ("prompt", "chosen", "rejected"))
    asked, answers = [message("user", question)], [[message("assistant", text)] for text in (chosen, rejected)]
    match form:
        case "rank":
            ends = [{"rank": rank, "completion": end} for rank, end in enumerate(answers)]
            return {"context": asked, "completions": ends}
        case "whole conversations":
            return {"chosen": asked + answers[0], "rejected": asked + answers[1]}
        case "transcripts":
            return {key: f"\n\nHuman: {question}\n\nAssistant: {row[key]}" for key in ("chosen", "rejected")}
        case "helpsteer3":
            return {"context": asked, "response1": rejected, "response2": chosen, "overall_preference": 2}
    return row


@pytest.fixture(scope="module")
def signed_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signed") / "model"
    shutil.copytree(model_folder, folder)
    sign_folder(folder, renderer=Scorer.load(folder, device="cpu", max_length=96).renderer)
    return folder


@pytest.fixture
def model(signed_folder: Path, tmp_path: Path) -> Path:
    """A model folder with its contract, to write in."""
    return Path(shutil.copytree(signed_folder, tmp_path / "model"))


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


@pytest.mark.parametrize("form", ["rank", "whole conversations", "transcripts", "helpsteer3"])
def test_any_format_gives_the_same_constants(form: str, model: Path, write_rows: Write) -> None:
    rows = [row for row in BINARY if row["rejected"]]
    found = []
    for name, written in (("binary", rows), ("other", [in_form(form, row) for row in rows])):
        words = ["calibrate", str(model), "--data", str(write_rows(f"{name}.jsonl", written)), "--device", "cpu"]
        assert main(words) == 0
        found.append(calibration_of(model))
    assert found[0].temperature is not None and found[1].temperature is not None
    assert found[0].temperature.value == pytest.approx(found[1].temperature.value, rel=1e-4)
    assert found[0].normalization is not None and found[1].normalization is not None
    assert found[0].normalization.std == pytest.approx(found[1].normalization.std, abs=1e-6)
    assert found[0].length_curve is not None and found[1].length_curve is not None
    assert found[0].length_curve.lengths == found[1].length_curve.lengths


def test_a_calibration_is_replaced_and_the_log_says_so(
    model: Path, write_rows: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["calibrate", str(model), "--device", "cpu", "--length-unit", "characters", "--data"]
    assert main([*words, str(write_rows("first.jsonl", BINARY[:6]))]) == 0
    assert "is replaced" not in capsys.readouterr().err
    assert main([*words, str(write_rows("second.jsonl", BINARY))]) == 0
    assert "first.jsonl" in (log := capsys.readouterr().err) and "is replaced" in log
    calibration = calibration_of(model)
    assert calibration.provenance is not None and calibration.provenance.data == "second.jsonl"
    assert calibration.length_curve is not None and calibration.length_curve.unit == "characters"


def test_a_file_of_its_own_leaves_the_model_alone(model: Path, write_rows: Write, tmp_path: Path) -> None:
    before = (model / CONTRACT_FILE).read_bytes()
    output = tmp_path / "deep" / "calibration.json"
    words = ["calibrate", str(model), "--data", str(write_rows("in.jsonl", BINARY)), "--device", "cpu"]
    assert main([*words, "--output", str(output)]) == 0
    assert (model / CONTRACT_FILE).read_bytes() == before
    assert main(words) == 0
    assert RewardCalibration.model_validate(json.loads(output.read_text(encoding="utf-8"))) == calibration_of(model)


def test_a_dataset_that_brings_its_own_data(model: Path) -> None:
    words = ["calibrate", str(model), "--dataset-name", "Bundled", "--split", "length_controlled", "--device", "cpu"]
    assert main(words) == 0
    source = calibration_of(model).provenance
    assert source is not None and source.data == "Bundled[length_controlled]" and source.num_comparisons == 400
    assert source.num_failed > 0  # the model reads 96 tokens


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["calibrate", *words]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_where_the_constants_cannot_be_kept_is_told_first(
    model: Path, write_rows: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(write_rows("in.jsonl", BINARY))]
    assert "no folder" in (error := refused(["org/no-such-model", *data], capsys)) and "--output" in error
    (model / "model.safetensors").unlink()  # were the model loaded, this would be the error
    (model / CONTRACT_FILE).unlink()
    assert CONTRACT_FILE in (error := refused([str(model), *data], capsys)) and "--output" in error


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(model: Path, write_rows: Write, capsys: pytest.CaptureFixture[str]) -> None:
    model.chmod(0o500)
    error = refused([str(model), "--data", str(write_rows("in.jsonl", BINARY))], capsys)
    model.chmod(0o700)
    assert "cannot be written" in error and "--output" in error


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "there are no rows"),
        ([{"text": "hello"}], "no known format"),
        ([BINARY[0]], "too few comparisons"),
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


def test_arguments_that_say_too_little(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there are no comparisons" in refused([str(model)], capsys)
    assert "no_such_file.jsonl" in refused([str(model), "--data", "no_such_file.jsonl"], capsys)
    assert "did you mean Bundled" in refused([str(model), "--dataset-name", "Bundle"], capsys)
