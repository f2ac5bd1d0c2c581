from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from messages import chat
from signed import contract_of
from verbs import Command

from treeward.config.scoring import RewardShapingConfig
from treeward.formatting import format_number
from treeward.model.contract import CONTRACT_FILE, write_contract
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import Shaper

Write = Callable[..., Path]

ROWS = [
    {"prompt": f"{n} + {n + 1}?", "chosen": f"It is {2 * n + 1}." + " Really." * (n % 4 + 1)}
    | {"rejected": "I do not know that." * (n % 3)}
    for n in range(12)
]


def test_the_constants_reach_the_contract_and_from_there_the_rewards(
    treeward: Command,
    own_model: Path,
    write_rows: Write,
) -> None:
    before = contract_of(own_model)
    ended = treeward(
        "calibrate",
        own_model,
        "--data",
        write_rows("held_out.jsonl", ROWS),
        "--device",
        "cpu",
    )
    assert ended.code == 0
    contract = contract_of(own_model)
    calibration = contract.calibration
    assert contract.model_copy(update={"calibration": before.calibration}) == before
    assert calibration is not None
    assert calibration.normalization is not None
    chats = [chat(row["prompt"], row[key]) for row in ROWS for key in ("chosen", "rejected")]
    shaper = Shaper(
        RewardShapingConfig(normalize_rewards=True, reward_clip=None),
        calibration=calibration,
    )
    shaped = shaper.shape(Scorer.load(own_model, device="cpu").score(chats), chats)
    rewards = np.array([one.value for one in shaped], dtype=float)
    assert rewards.mean() == pytest.approx(0.0, abs=1e-4)
    assert rewards.std() == pytest.approx(
        1.0,
        abs=1e-4,
    )
    source = calibration.provenance
    assert source is not None
    assert source.data == "held_out.jsonl"
    assert source.num_comparisons == 12
    assert format_number(calibration.normalization.mean) in ended.out


def test_where_the_constants_cannot_be_kept_is_told_first(
    treeward: Command,
    own_model: Path,
    write_rows: Write,
) -> None:
    data = ["--data", write_rows("in.jsonl", ROWS)]
    assert "cannot be kept" in treeward("calibrate", "org/no-such-model", *data).err
    # its split is train
    own = treeward(
        "calibrate",
        "org/no-such-model",
        "--dataset-name",
        "Bundled",
    )
    assert "trained on" in own.err
    (own_model / "model.safetensors").unlink()  # were the model loaded, this would be the error
    (own_model / CONTRACT_FILE).unlink()
    assert "verify" in treeward("calibrate", own_model, *data).err


def test_a_spread_reaches_the_contract_and_the_scores(
    treeward: Command, own_model: Path, write_rows: Write
) -> None:
    held_out = write_rows("held_out.jsonl", ROWS)
    other = [{**row, "prompt": f"And {row['prompt']}"} for row in ROWS]
    trained_on = write_rows("train.jsonl", other)
    words = ["calibrate", own_model, "--data", held_out, "--trained-on", trained_on]
    ended = treeward(*words, "--device", "cpu")
    assert ended.code == 0, ended.err
    for name in ("ECE", "ELCE, EUCE", "ranking score, beta 0.2", "AUROC", "with a temperature"):
        assert name in ended.out
    contract = contract_of(own_model)
    assert contract.spread is not None and contract.calibration is not None
    assert contract.spread.trained_on.data == "train.jsonl"
    assert contract.spread.held_out == contract.calibration.provenance
    [score] = Scorer.load(own_model, device="cpu").score([chat("2 + 3?", "It is 5.")])
    assert score.spread is not None and score.spread > 0
    scored = treeward("score", own_model, "--data", held_out, "--device", "cpu")
    assert '"spreads": [' in scored.out
    # The constants alone can be fitted again; a contract that is written anew has neither.
    assert treeward("calibrate", own_model, "--data", held_out, "--device", "cpu").code == 0
    assert contract_of(own_model).spread == contract.spread
    again = treeward("verify", own_model, "--write", "--force", "--device", "cpu")
    assert again.code == 0 and "Its spread is left out" in again.err
    assert contract_of(own_model).spread is None and "nothing reads the folder" in again.out


def test_data_that_cannot_give_a_spread_is_told(
    treeward: Command, own_model: Path, write_rows: Write
) -> None:
    held_out = write_rows("held_out.jsonl", ROWS)
    words = ["calibrate", own_model, "--data", held_out, "--device", "cpu", "--trained-on"]
    assert "those that the model was trained on" in treeward(*words, held_out).err
    assert "not a section" in treeward(*words, "{data_path: [}").err
    section = "{dataset_name: Bundled, split: validation, no_such_key: 1}"
    assert "no_such_key" in treeward(*words, section).err
    # Before the work: no constants are fitted first.
    before = contract_of(own_model)
    write_contract(before.model_copy(update={"calibration": None}), own_model)
    assert "no such file" in treeward(*words, "no_such_file.jsonl").err
    assert contract_of(own_model).calibration is None


@pytest.mark.parametrize("content", [None, b"damaged"])
def test_a_spread_that_cannot_be_read_is_fitted_again(
    treeward: Command, spread_folder: Path, tmp_path: Path, write_rows: Write, content: bytes | None
) -> None:
    folder = Path(shutil.copytree(spread_folder, tmp_path / "model"))
    before = contract_of(folder).spread
    assert before is not None
    if content is None:
        (folder / before.file).unlink()
    else:
        (folder / before.file).write_bytes(content)
    held_out = write_rows("held_out.jsonl", ROWS)
    trained_on = write_rows("train.jsonl", [{**row, "prompt": "?" + row["prompt"]} for row in ROWS])
    words = ["calibrate", folder, "--data", held_out, "--device", "cpu"]
    # Without --trained-on the spread stays, so it must be whole; the error has the way out.
    refused = treeward(*words)
    assert refused.code == 2 and "--trained-on TRAIN" in refused.err
    ended = treeward(*words, "--trained-on", trained_on)
    assert ended.code == 0, ended.err
    [score] = Scorer.load(folder, device="cpu").score([chat("2 + 3?", "It is 5.")])
    assert score.spread is not None and score.spread > 0
