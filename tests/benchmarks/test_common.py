"""Data of pretrained models, and the commands by which benchmarks/README.md measured them."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parents[2] / "benchmarks" / "README.md"
COMMANDS = re.findall(r"python benchmarks/(\w+)\.py (.*)", PAGE.read_text(encoding="utf-8"))


def test_a_pretrained_model_is_not_measured_on_bundled_data(benchmark: ModuleType) -> None:
    with pytest.raises(SystemExit, match="TREEWARD_SHARED_DATA"):
        benchmark.load_pairs(384, "some/model")
    with pytest.raises(SystemExit, match="TREEWARD_SHARED_DATA"):
        importlib.import_module("scoring").load_prompts("some/model")
    assert importlib.import_module("scoring").load_prompts("tiny")[0] == "bundled data"


@pytest.mark.parametrize(("name", "options"), COMMANDS)
def test_a_command_of_the_page_is_understood(
    name: str, options: str, benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table's training steps are of 384 tokens: those of 1,024 do not fit into the memory of
    its machine."""
    pytest.importorskip("trl")
    monkeypatch.setattr(sys, "argv", [name, *options.split()])
    arguments = importlib.import_module(name).parse()
    assert arguments.size == "FOLDER"
    assert name != "training_step" or arguments.longest == 384


def test_the_page_has_the_commands_of_its_table() -> None:
    assert {name for name, _ in COMMANDS} == {
        "training_step",
        "scoring",
        "policy_update",
        "grpo_step",
    }
