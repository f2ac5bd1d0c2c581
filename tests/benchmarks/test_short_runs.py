"""Each benchmark runs from its command line, as `make benchmark` and `make soak` call it; here for
a few seconds.

Some read real data, where they are; the others the bundled ones, whose tokenizer is trained in a
second.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SHORT = {
    "training_step.py": "--size tiny --pairs 2 --rounds 1",
    "scoring.py": "--size tiny --prompts 1 --rounds 1",
    "policy_update.py": "--size tiny --prompts 2 --rounds 1 --completions 4 --prompt-tokens 128",
    "trl_dropin.py": "--size tiny --pairs 2 --prompts 2 --completions 4 --rounds 1 --prompt-tokens 128",
    "grpo_step.py": "--size tiny --prompts 2 --completions 4 --prompt-tokens 20 --new-tokens 8 --rounds 1",
    "serving.py": "--size tiny --requests 16 --rounds 1 --connections 1 8",
    "planning.py": "--comparisons 10_000",
    "two_processes.py": "--rounds 1 --steps 3 --hidden-size 64",
    "hybrids.py": "lfm2 --prompts 64 --completions 2 --rounds 1",
    "rubrics.py": "--size tiny --prompts 1 --completions 2 --criteria 2 --rounds 1",
    "labels.py": "--size tiny --steps 2 --seeds 1 --rounds 1",
    "wrong_labels.py": "--rows 120 --steps 2 --seeds 2 --shares 0.2",
    "spread.py": "--seeds 1 --steps 4 --comparisons 40",
    "process_tokens.py": "--problems 2",
    "check_data.py": "--rows 300",
    "soak.py": "--minutes 0.1 --clients 8",
    "gpu.py": "--tiny --minutes 20 --box 400",
}
ON_REAL_DATA = ("training_step.py", "labels.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_a_short_run_succeeds(name: str, tmp_path: Path) -> None:
    if name in ("policy_update.py", "trl_dropin.py", "gpu.py"):
        pytest.importorskip("trl")
    command = [sys.executable, str(FOLDER / name), *SHORT[name].split()]
    if name == "gpu.py":
        command += ["--output", str(tmp_path / "table.md")]
    environment = (
        dict(os.environ)
        if name in ON_REAL_DATA
        else {**os.environ, "TREEWARD_SHARED_DATA": "nowhere"}
    )
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1300, check=False, env=environment
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "PROBLEM" not in done.stdout and done.stdout.strip()
    unmeasured = [line for line in done.stdout.splitlines() if "not measured" in line]
    assert all("not offer it" in line or "flash-pref 0.1.1 needs" in line for line in unmeasured), (
        unmeasured
    )
    assert "; failed:" not in done.stdout


def test_every_benchmark_has_a_short_run() -> None:
    commands = {
        path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")
    }
    assert commands == set(SHORT)
