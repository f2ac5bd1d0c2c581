"""Loaders of small configurations, written into a file of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treeward.config.load import load_config, load_grpo_config
from treeward.errors import ConfigError

RM = "policy: {model_name: m}\ndata: {train_data_path: t.jsonl}\n"
GRPO = """
policy: {model_name: m, max_total_sequence_length: 64}
data: {dataset_name: PromptDataset, train_data_path: t.jsonl, val_data_path: v.jsonl}
env:
  reward_model: {model_name: rm}
  math: {}
  shape: {type: rules, rule: regex, pattern: "</think>"}
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Any]:
    """`load("rm" or "grpo" or a text, *overrides)`: the configuration of a file `run.yaml`."""

    def load(text: str, *overrides: str) -> Any:
        path = tmp_path / "run.yaml"
        path.write_text({"rm": RM, "grpo": GRPO}.get(text, text), encoding="utf-8")
        return (load_grpo_config if text == "grpo" or "env:" in text else load_config)(
            path, overrides
        )

    return load


@pytest.fixture
def mistake(load: Callable[..., Any]) -> Callable[..., ConfigError]:
    """The error of what `load` refuses."""

    def mistake(*words: str) -> ConfigError:
        with pytest.raises(ConfigError) as caught:
            load(*words)
        return caught.value

    return mistake
