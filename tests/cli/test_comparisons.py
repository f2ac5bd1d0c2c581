"""How `eval` and `calibrate` are told what a file of comparisons is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from verbs import Command

from treeward.cli.comparisons import dataset_config
from treeward.errors import ConfigError

KEYS = ["prompt_key=question", "chosen_key=yes", "rejected_key=no"]


def test_options_are_keys_of_a_dataset() -> None:
    config = dataset_config("d.jsonl", None, None, [*KEYS, "subset=none-such", "subset=preference"])
    assert config.prompt_key == "question" and config.subset == "preference"
    own = dataset_config("d.jsonl", "my.Set", None, ["kwargs.depth=3", "kwargs.name=a"])
    assert own.kwargs == {"depth": 3, "name": "a"}
    with pytest.raises(ConfigError, match="did you mean prompt_key"):
        dataset_config("d.jsonl", "BinaryPreferenceDataset", None, ["promt_key=question"])


@pytest.mark.parametrize("verb", ["eval", "calibrate"])
def test_the_commands_read_what_training_reads_with_its_keys(
    verb: str, treeward: Command, own_model: Path, write_rows: Callable[..., Path]
) -> None:
    rows = [{"question": f"{n} + 1?", "yes": f"It is {n + 1}.", "no": "No idea." * (n % 3 + 1)} for n in range(12)]
    words = [verb, own_model, "--data", write_rows("d.jsonl", rows), "--device", "cpu"]
    assert treeward(*words, *(word for option in KEYS for word in ("--data-option", option))).code == 0
    ended = treeward(*words)
    assert ended.code == 2 and "--data-option prompt_key=question" in ended.err
