from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from treeward.errors import ConfigError
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
