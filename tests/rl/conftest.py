"""What tests of the loop share: the configuration of a run of seconds, and what a run came to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

WORDS = ("sun", "moon", "rain", "wind", "snow", "leaf", "root", "seed", "tree", "bark", "moss", "fern", "bird", "nest")


@pytest.fixture
def write_prompts(tmp_path: Path) -> Callable[[str, Iterable[Any]], str]:
    """Write rows of `PromptDataset`; a text is a prompt."""

    def write(name: str, rows: Iterable[Any]) -> str:
        path = tmp_path / name
        lines = (json.dumps({"prompt": row} if isinstance(row, str) else row) for row in rows)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def tiny_grpo(tmp_path: Path, write_prompts: Callable[[str, Iterable[Any]], str]) -> Callable[..., Any]:
    """A function that makes the configuration of a run of seconds in `tmp_path`; overrides as on the command line."""
    from treeward.config.load import load_grpo_config

    write_prompts("train.jsonl", [f"Say {first} and {second}." for first in WORDS for second in WORDS[:3]])
    write_prompts("held_out.jsonl", [f"Sing of {word}." for word in WORDS])

    def make(*overrides: str) -> Any:
        file = tmp_path / "run.yaml"
        file.write_text(TINY_GRPO.format(folder=tmp_path), encoding="utf-8")
        return load_grpo_config(file, overrides)

    return make


@pytest.fixture(scope="session")
def result_of() -> Callable[[Path], dict[str, Any]]:
    """What a run came to: what it logged but for times, its alarms, and the weights that it exported."""
    from safetensors.torch import load_file

    def lines(path: Path) -> list[str]:
        """As text, so that NaN equals NaN."""
        return [
            repr({key: value for key, value in json.loads(line).items() if key != "time" and "timing/" not in key})
            for line in path.read_text(encoding="utf-8").splitlines()
        ]

    def read(folder: Path) -> dict[str, Any]:
        final = folder / "checkpoints" / "final" / "model.safetensors"
        weights = {name: tensor.numpy().tobytes() for name, tensor in load_file(final).items()}
        logs = folder / "logs"
        alarms = logs / "alarms.json"
        return {
            "metrics": lines(logs / "metrics.jsonl"),
            "samples": lines(logs / "samples.jsonl"),
            "alarms": alarms.read_text(encoding="utf-8"),
            "weights": weights,
        }

    return read


TINY_GRPO = """
grpo: {{num_prompts_per_step: 4, num_generations_per_prompt: 4, max_num_epochs: 9, max_num_steps: 6, val_period: 2,
       max_val_samples: 6, seed: 7, num_logged_samples: 2}}
loss_fn: {{reference_policy_kl_penalty: 0.01}}
policy:
  model_config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
                 num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 128}}
  tokenizer: {{vocab_size: 300}}
  train_micro_batch_tokens: 256
  max_total_sequence_length: 96
  precision: float32
  optimizer: {{kwargs: {{lr: 1.0e-2}}}}
  scheduler: {{name: constant, warmup_steps: 0}}
  generation: {{max_new_tokens: 8}}
data:
  train: {{dataset_name: PromptDataset, data_path: {folder}/train.jsonl}}
  validation: {{dataset_name: PromptDataset, data_path: {folder}/held_out.jsonl}}
env: {{planted: {{type: custom, function: planted.vowels}}}}
checkpointing: {{checkpoint_dir: {folder}/checkpoints, save_period: 2, keep_top_k: 2, metric_name: "val:reward"}}
logger: {{log_dir: {folder}/logs}}
"""
