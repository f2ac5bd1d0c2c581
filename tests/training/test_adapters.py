"""A reward model trained by adapters: it learns, goes on exactly, and is exported, scored and
loaded as any other."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import WORDS
from killed_run import assert_same_run, killed_before_step
from transformers import AutoModelForSequenceClassification

from treeward import Scorer
from treeward.cli.main import main
from treeward.errors import CheckpointError
from treeward.model.loading import load_classifier
from treeward.model.lora import add_adapters, is_quantized, load_adapters
from treeward.training.train import train

QUESTION = [{"role": "user", "content": "Name the sun."}]
ANSWERS = ["A warm sun.", "The wind, and rain."]


def plain_scores(model: Any, sequences: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack(
            [
                model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 0]
                for ids in sequences
            ]
        )


@pytest.fixture
def options(policy_folder: Path, write_rows: Callable[..., Path]) -> tuple[str, ...]:
    """Which completion is the better one is planted: the one with the sun in it."""
    rows = []
    for a, b in product(WORDS, WORDS):
        row = {"prompt": f"Name the {a}.", "chosen": f"A {b} sun.", "rejected": f"A {b} rain."}
        rows.append(row)
    path = write_rows("planted.jsonl", rows)
    return (
        "policy.model_config=null",
        "policy.tokenizer.vocab_size=null",
        f"policy.model_name={policy_folder}",
        "policy.max_total_sequence_length=128",
        "policy.optimizer.kwargs.lr=0.01",
        "policy.scheduler=null",
        "policy.dtensor_cfg.lora_cfg={enabled: true, dim: 4, alpha: 8}",
        f"data.train={{dataset_name: BinaryPreferenceDataset, data_path: {path}, split: null}}",
        (
            f"data.validation=[{{dataset_name: BinaryPreferenceDataset, data_path: {path}, name: "
            f"held_out}}]"
        ),
        "rm={max_num_steps: 24, val_period: 8, val_batches: 2, val_global_batch_size: 8, seed: 7}",
        "checkpointing.save_period=8",
        "checkpointing.metric_name=null",
    )


@pytest.mark.slow
@pytest.mark.parametrize("load_in_4bit", [False, True], ids=["lora", "qlora"])
def test_a_run_learns_goes_on_exactly_and_exports_what_it_has_trained(
    load_in_4bit: bool,
    options: tuple[str, ...],
    tiny_runs: Callable[[Path], Callable[..., Any]],
    policy_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(name: str, *more: str) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        return train(tiny_runs(tmp_path / name)(*options, *more), show_progress=False)

    options += (f"policy.load_in_4bit={load_in_4bit}".lower(),)
    outcome = run("whole")
    assert outcome.validation["held_out"]["accuracy"] == 1.0
    with killed_before_step(12):
        run("killed")
    with pytest.raises(CheckpointError, match=r"other settings(?s:.*)lora_cfg\.dim: got 2, need 4"):
        run("killed", "policy.dtensor_cfg.lora_cfg.dim=2")
    run("killed")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")

    final = tmp_path / "whole" / "checkpoints" / "final"
    assert main(["verify", str(final)]) == 0
    assert "quantization_config" not in json.loads((final / "config.json").read_text())
    scorer = Scorer.load(final)
    sequences = [
        scorer.renderer.encode([*QUESTION, {"role": "assistant", "content": text}])
        for text in ANSWERS
    ]
    want = torch.tensor([score.score for score in scorer.score_completions(QUESTION, ANSWERS)])
    assert float(want[0] - want[1]) > 1  # the rule, on a longer completion too
    merged = AutoModelForSequenceClassification.from_pretrained(final)
    assert float((plain_scores(merged, sequences) - want).abs().max()) < 1e-5
    # What was trained, as it computed: adapters beside the base, of four bits or not.
    trained = load_classifier(policy_folder, head_seed=1, load_in_4bit=load_in_4bit).model
    config = tiny_runs(tmp_path)(*options)
    adapter = tmp_path / "whole" / "checkpoints" / "step_24" / "adapter"
    add_adapters(trained, config.policy.dtensor_cfg.lora_cfg, seed=1)
    load_adapters(trained, adapter)
    assert sum(map(is_quantized, trained.modules())) == (14 if load_in_4bit else 0)
    with torch.no_grad():
        assert float((trained(trained.make_batch([sequences])) - want).abs().max()) < 1e-5
    # the folder of adapters, as anybody loads it: with the head that was trained
    if not load_in_4bit:
        anybody = peft.AutoPeftModelForSequenceClassification.from_pretrained(
            str(adapter), num_labels=1
        ).eval()
        assert float((plain_scores(anybody, sequences) - want).abs().max()) < 1e-5
        scores = Scorer.load(adapter).score_completions(QUESTION, ANSWERS)
        assert [score.score for score in scores] == pytest.approx(want.tolist(), abs=1e-5)
