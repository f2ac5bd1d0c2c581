"""The end of a run: its report agrees with what it printed, and its folder carries what rewards are made of."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from treeward.cli.main import main
from treeward.errors import DataError
from treeward.model.contract import read_contract
from treeward.scoring.scorer import Scorer
from treeward.scoring.verification import verify
from treeward.training.train import train

REPORT = "evaluation.enabled=true"
SIZES = {"all": 30, "some": 7}


def results(folder: Path) -> dict[str, Any]:
    """The results of each set by its name."""
    return {one["suite"]: one for one in json.loads((folder / "results.json").read_text())["results"]}


def rows_of(folder: Path) -> list[str]:
    (file,) = folder.glob("*/held_out/examples.jsonl")
    return file.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_the_report_has_the_accuracies_that_training_printed(
    tiny_run: Callable[..., Any], tmp_path: Path, write_rows: Callable[..., Path]
) -> None:
    rows = [{"prompt": f"{n} + 1?", "chosen": f"It is {n + 1}.", "rejected": "No."} for n in range(30)]
    sets = [f"{{data_path: {write_rows(f'{name}.jsonl', rows[:size])}, name: {name}}}" for name, size in SIZES.items()]
    validation = f"data.validation=[{', '.join(sets)}]"
    config = tiny_run(REPORT, validation, "rm.val_batches=null", "checkpointing.metric_name=null")
    outcome = train(config, show_progress=False)
    assert outcome.exit_code == 0 and outcome.report == tmp_path / "checkpoints" / "report" / "report.html"
    found = results(outcome.report.parent)
    assert outcome.validation_sizes == SIZES
    for name, means in outcome.validation.items():
        assert found[name]["num_examples"] == outcome.validation_sizes[name]
        assert found[name]["num_failed"] == 0
        assert found[name]["headline"]["value"] == pytest.approx(means["accuracy"], abs=1e-6)


@pytest.mark.slow
def test_a_report_that_is_missing_is_written_and_no_row_is_scored_again(
    tiny_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    without = train(tiny_run("rm.max_num_steps=2"), show_progress=False)
    assert without.report is None and not (without.model_folder.parent / "report").exists()
    config = tiny_run("rm.max_num_steps=2", REPORT)
    outcome = train(config, show_progress=False)
    assert outcome.report is not None and outcome.report.exists() and outcome.step == 2
    numbers = results(outcome.report.parent)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("scored again")

    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "score", never)
        outcome.report.unlink()  # as in a run that was killed before it was written: no row is scored again
        assert train(config, show_progress=False) == outcome
    assert outcome.report.exists() and results(outcome.report.parent) == numbers


@pytest.mark.slow
def test_a_signal_stops_the_evaluation_and_the_same_command_goes_on(
    tiny_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["rm.max_num_steps=2", "rm.val_batches=null", REPORT]
    tiny_run()
    command = ["train", "--config", str(tmp_path / "run.yaml"), *words]
    scored: list[int] = []
    score = Scorer.score

    def score_then_stop(self: Scorer, conversations: Any, **options: Any) -> Any:
        scored.append(len(conversations))
        if len(scored) == 2:
            signal.raise_signal(signal.SIGTERM)
        return score(self, conversations, **options)

    monkeypatch.setattr(Scorer, "score", score_then_stop)
    assert main(command) == 143
    captured = capfd.readouterr()
    assert "SIGTERM: finishing this step" in captured.err
    assert f"is in {tmp_path / 'checkpoints' / 'final'}" in captured.out
    assert "The report was stopped (SIGTERM). The same command goes on with it." in captured.err
    folder = tmp_path / "checkpoints" / "report"
    assert not (folder / "report.html").exists() and len(rows_of(folder)) == 128
    scored[:] = [0, 0]
    assert main(command) == 0
    rows = rows_of(folder)
    assert len(rows) == 400 and sum(scored) == sum(len(json.loads(row)["scores"]) for row in rows[128:])
    assert str(folder / "report.html") in capfd.readouterr().out


def test_a_suite_that_cannot_be_read_stops_the_run_before_it_trains(
    tiny_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="allenai/reward-bench"):
        train(tiny_run(REPORT, "evaluation.suites=rewardbench"), show_progress=False)
    assert not (tmp_path / "checkpoints").exists()


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
