"""The end of a run: its report agrees with what it printed, and its folder carries what rewards are made of."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from treeward.cli.main import main
from treeward.model.contract import read_contract
from treeward.scoring.verification import verify
from treeward.training.train import train

SHAPING = "reward_shaping={length_calibration: true, normalize_rewards: true}"


@pytest.mark.slow
def test_the_contract_of_a_run_carries_its_shaping(tiny_run: Callable[..., Any], tmp_path: Path) -> None:
    """Fitted on scores in float32 also where the run was in bfloat16, as `treeward calibrate` does."""
    options = (SHAPING, "rm.max_num_steps=2", "rm.val_batches=null", "policy.precision=bfloat16")
    outcome = train(tiny_run(*options), show_progress=False)
    folder = outcome.model_folder
    assert folder is not None
    contract = read_contract(folder)
    assert contract is not None and contract.reward_shaping is not None and contract.reward_shaping.length_calibration
    assert contract.calibration is not None and contract.calibration.length_curve is not None
    provenance = contract.calibration.provenance
    assert provenance is not None and provenance.num_comparisons == 400 and "held_out" in provenance.data
    assert verify(folder, device="cpu").equal
    calibrated = Path(shutil.copytree(folder, tmp_path / "again"))
    assert main(["calibrate", str(calibrated), "--dataset-name", "Bundled", "--split", "length_controlled"]) == 0
    again = read_contract(calibrated)
    assert contract.calibration.normalization is not None
    assert again is not None and again.calibration is not None and again.calibration.normalization is not None
    want = again.calibration.normalization.model_dump()
    assert contract.calibration.normalization.model_dump() == pytest.approx(want, rel=1e-5)
    card = (folder / "README.md").read_text(encoding="utf-8")
    how = re.search(r"AutoModelForSequenceClassification\.from_pretrained\(.*?\)", card)
    assert how is not None
    plain = eval(how.group(), {"AutoModelForSequenceClassification": AutoModelForSequenceClassification,
                               "THIS_FOLDER": folder})  # fmt: skip
    for example in contract.golden:
        score = float(plain(torch.tensor([example.token_ids])).logits)
        assert abs(score - example.score) <= contract.tolerance.float32
