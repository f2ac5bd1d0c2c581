from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from treeward.errors import ConfigError, DataError, ModelError
from treeward.training import setup as training_setup
from treeward.training.checkpoints import Checkpoint
from treeward.training.setup import set_up
from treeward.training.train import train


def test_a_run_is_ready(tiny_run: Callable[..., Any]) -> None:
    setup = set_up(tiny_run())
    assert (setup.total_steps, setup.model.layout) == (6, "tree")
    assert list(setup.training_sets) == ["Bundled"] and list(setup.validation_sets) == ["held_out"]
    assert setup.validation_limit == 16 and setup.validation_sizes == {"held_out": 16}
    assert {parameter.dtype for parameter in setup.model.parameters()} == {torch.float32}


def test_conversations_longer_than_the_model_are_refused(tiny_run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="longer than the model's positions") as caught:
        set_up(tiny_run("policy.max_total_sequence_length=1024"))
    assert caught.value.fix == "policy.max_total_sequence_length=512"


def test_a_vocabulary_without_the_bytes_is_refused(tiny_run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="vocabulary is too small"):
        set_up(tiny_run("policy.tokenizer.vocab_size=100"))


def test_a_resumed_run_has_and_saves_the_tokenizer_of_its_checkpoint(tiny_run: Callable[..., Any]) -> None:
    folder = train(tiny_run("rm.max_num_steps=2"), show_progress=False).model_folder
    assert folder is not None
    before = {path.name: path.read_bytes() for path in (folder.parent / "step_2" / "model").glob("*token*")}
    train(tiny_run("rm.max_num_steps=4"), show_progress=False)
    after = {path.name: path.read_bytes() for path in (folder.parent / "step_4" / "model").glob("*token*")}
    assert before == after and "tokenizer_config.json" in before
    checkpoint = Checkpoint(folder.parent / "step_2", 2)
    first, again = set_up(tiny_run()), set_up(tiny_run(), checkpoint)
    assert again.renderer.fingerprint == first.renderer.fingerprint
    assert again.tokenizer.get_vocab() == first.tokenizer.get_vocab()


def test_files_that_are_not_there_are_told_before_the_hub_is_asked(
    tiny_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def load_tokenizer(name: str, **_: Any) -> Any:
        asked.append(name)
        raise ModelError("the hub does not answer", where=name)

    monkeypatch.setattr(training_setup, "load_tokenizer", load_tokenizer)
    options = ["~policy.model_config", "+policy.model_name=org/model", "policy.tokenizer.vocab_size=null"]
    missing = {"dataset_name": "PreferenceDataset", "data_path": str(tmp_path / "none.jsonl"), "split": None}
    for role, value in (("train", missing), ("validation", [missing | {"name": "held_out"}])):
        with pytest.raises(DataError, match=r"none\.jsonl"):
            set_up(tiny_run(f"data.{role}={json.dumps(value)}", *options))
    assert asked == []
    with pytest.raises(ModelError, match="does not answer"):
        set_up(tiny_run(*options))
    assert asked == ["org/model"]
