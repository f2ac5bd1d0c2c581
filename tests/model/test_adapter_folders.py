"""Folders of PEFT's adapters are models: their base with the adapters merged, as reward model and as policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import causal_model, config_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from treeward import Scorer, load_policy
from treeward.cli.main import main
from treeward.config.policy import LoraConfig
from treeward.errors import ModelError
from treeward.model.loading import load_reward_model
from treeward.model.lora import add_adapters, save_adapters

CONVERSATION = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]


@pytest.fixture
def adapters(policy_folder: Path, tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Saves adapters of a kind on `policy_folder`, as TRL does; their folder, and the model that peft computes with."""

    def make(task: str, base: Path = policy_folder, **settings: Any) -> tuple[Path, Any]:
        writes = task == "CAUSAL_LM"
        model_class = AutoModelForCausalLM if writes else AutoModelForSequenceClassification
        torch.manual_seed(3)
        hf = model_class.from_pretrained(base, **({} if writes else {"num_labels": 1}))
        settings = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | settings
        model = peft.get_peft_model(hf, peft.LoraConfig(task_type=task, **settings)).eval()
        model.save_pretrained(tmp_path / task, save_embedding_layers=False)
        return tmp_path / task, model

    return make


def logits(hf: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0]  # type: ignore[no-any-return]


def test_a_reward_model(adapters: Any, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    folder, model = adapters("SEQ_CLS")
    rows, output = write_rows("rows.jsonl", [{"messages": CONVERSATION}]), tmp_path / "scores.jsonl"
    assert main(["score", str(folder), "--data", str(rows), "--output", str(output)]) == 0
    ids = Scorer.load(folder).renderer.encode(CONVERSATION)
    assert json.loads(output.read_text())["score"] == pytest.approx(float(logits(model, ids)), abs=1e-5)
    trained = load_reward_model(folder, head_seed=1).model  # its head is not drawn anew
    saved = load_file(folder / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert torch.equal(trained.head.weight, saved) and all(one.requires_grad for one in trained.parameters())
    half = load_reward_model(folder, dtype=torch.bfloat16).model
    assert half.head.weight.dtype == torch.float32 and half.hf.dtype == torch.bfloat16


def test_a_policy(adapters: Any, tmp_path: Path) -> None:
    folder, model = adapters("CAUSAL_LM")
    loaded = load_policy(folder)
    ids = loaded.tokenizer.encode("Two words.")
    assert float((logits(loaded.model.hf, ids) - logits(model, ids)).abs().max()) < 1e-4
    with pytest.raises(ModelError, match="no reward head"):
        load_reward_model(folder)
    assert load_reward_model(folder, head_seed=1).model.num_heads == 1
    add_adapters(loaded.model, LoraConfig(enabled=True), seed=1)  # their base is that policy, not its base
    save_adapters(loaded.model, tmp_path / "next")
    again = load_policy(tmp_path / "next").model.hf
    assert float((logits(again, ids) - logits(model, ids)).abs().max()) < 1e-4


def test_weights_that_nobody_trained_are_no_scores(
    adapters: Any, tiny_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = adapters("FEATURE_EXTRACTION")  # the head has adapters, and its own weights were not saved
    with pytest.raises(ModelError, match="no reward head"):
        Scorer.load(folder)
    encoder = tmp_path / "encoder"  # without the pooler that a classifier draws, and peft does not save
    AutoModelForMaskedLM.from_config(config_of("bert")).save_pretrained(encoder)
    tiny_tokenizer.save_pretrained(encoder)
    folder, _ = adapters("SEQ_CLS", encoder, target_modules=["query"])
    with pytest.raises(ModelError, match=r"weights are missing(?s:.*)pooler"):
        Scorer.load(folder)
    assert main(["verify", str(folder), "--write"]) == 2
    assert "this is a folder of adapters" in capsys.readouterr().err


def test_a_quantised_base_and_tied_embeddings_are_not_merged(
    adapters: Any, tiny_tokenizer: Any, policy_folder: Path, tmp_path: Path
) -> None:
    tied = tmp_path / "tied"
    causal_model("qwen3", vocab_size=600, tie_word_embeddings=True).save_pretrained(tied)
    tiny_tokenizer.save_pretrained(tied)
    folder, _ = adapters("CAUSAL_LM", tied, target_modules=["lm_head"])
    with pytest.raises(ModelError, match=r"cannot be merged(?s:.*)one tensor in the base"):
        load_policy(folder)
    folder, _ = adapters("SEQ_CLS")
    base = shutil.copytree(policy_folder, tmp_path / "quantised")
    settings = json.loads((base / "config.json").read_text())
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(settings | {"quantization_config": quantised}))
    rebased(folder, base)
    with pytest.raises(ModelError, match=r"quantised(?s:.*)full precision"):
        Scorer.load(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder, base: rebased(folder, base / "gone"), "base model of these adapters is not there(?s:.*)gone"),
        (lambda folder, base: rebased(folder, None), "base model of these adapters is not there"),
        (
            lambda folder, base: (folder / "adapter_model.safetensors").unlink(),
            r"cannot be merged(?s:.*)SequenceClassi",
        ),
        (lambda folder, base: rebased(folder, folder), "the folder itself"),
        (lambda folder, base: None, None),
    ],
)
def test_refusals(adapters: Any, policy_folder: Path, spoil: Callable[..., None], message: str | None) -> None:
    folder, _ = adapters("SEQ_CLS")
    spoil(folder, policy_folder)
    if message is None:
        with pytest.raises(ModelError, match="cannot write completions"):
            load_policy(folder)
        return
    with pytest.raises(ModelError, match=message):
        Scorer.load(folder)


def rebased(folder: Path, base: Path | None) -> None:
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"base_model_name_or_path": base and str(base)}))
