"""The demo of a judge from nothing to its table, with runs too short to learn anything."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "judge_demo.py"


@pytest.mark.slow
def test_the_demo_teaches_optimises_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(DEMO.parent))
    run = runpy.run_path(str(DEMO), run_name="demo")["run"]
    keys = ("rm.max_num_steps", "rm.val_period", "rm.val_batches", "checkpointing.save_period")
    quick = {
        "TAUGHT_EPOCHS": 1,
        "EXAMPLES": 12,
        "SHORTER": ["grpo.max_num_steps=1", "grpo.max_val_samples=8", "+data.train.max_samples=40"],
        "SHORTER_TRAINING": [f"{key}=4" for key in keys],
    }
    for name, value in quick.items():
        monkeypatch.setitem(run.__globals__, name, value)
    assert run() == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    names = ("quickstart-final", "taught", "learnt")
    for split in ("validation", "length_controlled"):
        assert all([split, name] in rows for name in names)
    assert (tmp_path / "results/judge_demo/judge/final/judge_contract.json").is_file()
