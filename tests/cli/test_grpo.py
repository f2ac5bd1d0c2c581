"""`treeward grpo`: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from treeward.cli.main import main

CONFIG = """
grpo: {{num_prompts_per_step: 2, num_generations_per_prompt: 2, max_num_steps: 2, val_period: 1, seed: 7}}
policy:
  model_config: {{model_type: qwen3, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
                 num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 128}}
  tokenizer: {{vocab_size: 300}}
  max_total_sequence_length: 96
  precision: float32
  optimizer: {{kwargs: {{lr: 1.0e-3}}}}
  generation: {{max_new_tokens: 4}}
data:
  train: {{dataset_name: PromptDataset, data_path: {folder}/train.jsonl}}
  validation: {{dataset_name: PromptDataset, data_path: {folder}/held_out.jsonl}}
env: {{planted: {{type: custom, function: planted.vowels}}}}
checkpointing: {{checkpoint_dir: {folder}/the checkpoints}}
logger: {{log_dir: {folder}/logs}}
"""


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., int]:
    """`treeward grpo` of a tiny configuration, with overrides."""
    for name in ("train", "held_out"):
        rows = [{"prompt": f"Say {name} {n}."} for n in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path), encoding="utf-8")
    return lambda *words: main(["grpo", "--config", str(tmp_path / "run.yaml"), *words])


def test_a_run_ends_with_its_results_and_where_they_are(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command() == 0
    printed = capsys.readouterr()
    final = tmp_path / "the checkpoints" / "final"
    assert f"The policy of step 2 of 2 is in '{final}'\n" in printed.out  # quoted as a shell needs it
    assert f"The report of the run:  '{tmp_path / 'the checkpoints' / 'report.html'}'" in printed.out
    assert re.search(r"^ +validation/reward +\d\.\d{4}$", printed.out, re.MULTILINE)
    assert "validation after step 1: reward" in printed.err and "2 of 2 steps" in printed.err
    assert "Traceback" not in printed.err
    assert command() == 0  # it is done
    again = capsys.readouterr()
    assert "The policy of step 2 of 2" in again.out and "All 2 steps are done" in again.err
    assert re.search(r"^ +validation/reward +\d\.\d{4}$", again.out, re.MULTILINE)


def test_alarms_are_printed(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command("grpo.watch={max_truncation_rate: 0.01, stop: true, stop_on: [truncation]}") == 0
    out = capsys.readouterr().out
    assert re.search(r"^Alarm after step 1: \d+% of the completions reach the length limit", out, re.MULTILINE)
    assert "The policy of step 1 of 2" in out


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("grpo.num_generations_per_prompt=1", "at least 2"),
        ("env.planted.function=planted.fails", "too many completions have no reward"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], word: str, message: str
) -> None:
    assert command(word) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "treeward grpo: " in captured.err
