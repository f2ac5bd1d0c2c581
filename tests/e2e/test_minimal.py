"""The two examples that show the whole from top to bottom are read first: they run, and learn what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"

REWARD_MODEL = {'read_comparisons("train")': 'read_comparisons("validation")', "NUM_STEPS = 104": "NUM_STEPS = 13"}
"""What makes the example short: less data, and fewer steps."""
GRPO = {
    'bundled_path("train")': 'bundled_path("validation")',
    "epochs=2": "epochs=1",
    "NUM_STEPS = 40": "NUM_STEPS = 5",
}


def shown_by(name: str, folder: Path, shorter: dict[str, str] | None = None) -> str:
    """What the example prints, after the replacements of `shorter` in its text."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    for old, new in (shorter or {}).items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / name).write_text(text, encoding="utf-8")
    for helper in ("gold.py", "imitation.py", "world.json"):
        (folder / helper).write_bytes((EXAMPLES / helper).read_bytes())
    run = subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True, check=True)
    return run.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern, text)]


@pytest.mark.parametrize(
    ("name", "shorter", "shown"),
    [
        ("minimal.py", REWARD_MODEL, r"step  13  loss \d\.\d+  \d+ tokens computed instead of \d+"),
        ("minimal_grpo.py", GRPO, r"step  5  reward \d\.\d+  KL \d\.\d+"),
    ],
)
def test_it_runs(name: str, shorter: dict[str, str], shown: str, tmp_path: Path) -> None:
    assert re.search(shown, shown_by(name, tmp_path, shorter))


@pytest.mark.slow
def test_the_reward_model_learns_the_data_and_its_bias(tmp_path: Path) -> None:
    shown = shown_by("minimal.py", tmp_path)
    plain, controlled = numbers(r"([\d.]+)%", shown)
    assert plain >= 90.0
    assert controlled <= plain - 5.0
    for computed, rows in re.findall(r"(\d+) tokens computed instead of (\d+)", shown):
        assert int(computed) < 0.7 * int(rows)


@pytest.mark.slow
def test_the_policy_learns_the_rule(tmp_path: Path) -> None:
    rewards = numbers(r"reward ([\d.]+)", shown_by("minimal_grpo.py", tmp_path))
    assert len(rewards) == 8
    assert max(rewards[-3:]) > rewards[0] + 0.1
