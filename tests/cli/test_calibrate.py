from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from messages import chat
from signed import contract_of
from verbs import Command

from treeward.config.scoring import RewardShapingConfig
from treeward.formatting import format_number
from treeward.model.contract import CONTRACT_FILE
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
