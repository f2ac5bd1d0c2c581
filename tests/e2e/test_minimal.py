"""The two examples that show the whole from top to bottom are read first: they run, and learn what
they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def shown_by(name: str, folder: Path) -> str:
    """What the example prints."""
    words = [sys.executable, str(EXAMPLES / name)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True).stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


def test_the_reward_model_learns_the_data_and_its_bias(tmp_path: Path) -> None:
    shown = shown_by("minimal.py", tmp_path)
    plain, controlled = numbers(r"([\d.]+)%", shown)
    assert plain >= 90.0
    assert controlled <= plain - 3.0
    for computed, rows in re.findall(r"(\d+) tokens computed instead of (\d+)", shown):
        assert int(computed) < 0.7 * int(rows)


def test_the_policy_learns_the_rule(tmp_path: Path) -> None:
    rewards = numbers(r"reward ([\d.]+)", shown_by("minimal_grpo.py", tmp_path))
    assert len(rewards) == 8
    assert max(rewards[-3:]) > rewards[0] + 0.1
