"""The demo of RLHF from nothing to its report, with runs too short to learn anything."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "rlhf_demo.py"


@pytest.mark.slow
def test_the_demo_makes_everything_it_needs_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(DEMO.parent))
    demo = runpy.run_path(str(DEMO), run_name="demo")
    run = demo["run"]
    quick = {
        "SFT_EPOCHS": 1,
        "SHORTER": ["grpo.max_num_steps=2", "grpo.max_val_samples=8", "policy.generation.max_new_tokens=16"],
        "SHORTER_TRAINING": [
            f"{key}=4" for key in ("rm.max_num_steps", "rm.val_period", "rm.val_batches", "checkpointing.save_period")
        ],
    }
    for name, value in quick.items():
        monkeypatch.setitem(run.__globals__, name, value)
    assert run() == 0
    printed = capsys.readouterr().out
    assert [line.split()[:2] for line in printed.splitlines() if line.startswith(("close", "hacked", "cured"))] == [
        [name, step] for name in ("close", "hacked", "cured") for step in ("0", "2")
    ]
    page = (tmp_path / "results/rlhf_demo/report.html").read_text(encoding="utf-8")
    assert all(name in page for name in ("close", "hacked", "cured"))
    made = (tmp_path / "results/rlhf_demo/sft/model.safetensors").stat().st_mtime_ns
    assert run() == 0  # again: what is done stands
    assert (tmp_path / "results/rlhf_demo/sft/model.safetensors").stat().st_mtime_ns == made
