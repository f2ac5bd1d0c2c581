"""How `eval` and `calibrate` are told what a file of comparisons is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from treeward.cli.comparisons import dataset_config
from treeward.cli.main import main
from treeward.data.datasets import open_dataset
from treeward.errors import ConfigError

Write = Callable[..., Path]

ROWS = [{"question": f"{n} + 1?", "yes": f"It is {n + 1}.", "no": "No idea." * (n % 3 + 1)} for n in range(12)]
KEYS = ["prompt_key=question", "chosen_key=yes", "rejected_key=no"]


def test_options_are_keys_of_a_dataset(write_rows: Write) -> None:
    data = str(write_rows("d.jsonl", ROWS))
    config = dataset_config(data, None, None, [*KEYS, "subset=none-such", "subset=preference"])
    assert config.dataset_name == "BinaryPreferenceDataset" and config.subset == "preference"
    assert config.chosen_key == "yes"
    own = ["kwargs.depth=3", "kwargs.name=a"]
    assert dataset_config(data, "my.Set", None, own).kwargs == {"depth": 3, "name": "a"}
    assert len(list(open_dataset(dataset_config(data, None, None, KEYS)))) == 12
    with pytest.raises(ConfigError, match="did you mean prompt_key"):
        dataset_config(data, "BinaryPreferenceDataset", None, ["promt_key=question"])


@pytest.mark.parametrize("verb", ["eval", "calibrate"])
def test_the_commands_read_what_training_reads_with_its_keys(
    verb: str, model_folder: Path, write_rows: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = shutil.copytree(model_folder, tmp_path / "model"), str(write_rows("d.jsonl", ROWS))
    words = [verb, str(folder), "--data", data, "--device", "cpu"]
    assert main([*words, *(word for option in KEYS for word in ("--data-option", option))]) == 0
    capsys.readouterr()
    assert main(words) == 2
    assert "--data-option prompt_key=question" in capsys.readouterr().err
