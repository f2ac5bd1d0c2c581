"""A tensor of a checkpoint that a model would leave unused is an error with its name; no head is
drawn in its place."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from families import causal_model, config_of, randomise, tiny_model
from messages import edit_json
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from treeward.errors import ModelError
from treeward.model.loading import load_classifier, load_policy

ROW = torch.ones(1, 32)
SQUARE = torch.ones(32, 32)
HEADS: Mapping[str, tuple[str, dict[str, torch.Tensor]]] = {
    "a stranger's": ("RewardModelOfAStranger", {"regression_head.weight": ROW}),
    "TRL": ("LlamaForCausalLM", {"v_head.summary.weight": ROW, "v_head.summary.bias": ROW[0]}),
    "Athene-RM": ("AtheneForSequenceClassification", {"v_head.weight": ROW}),
    "Ziya": ("LlamaRewardModelOfZiya", {"value_head.weight": ROW, "value_head.bias": ROW[0]}),
}
"""The architecture and the head of published reward models that no adapter reads."""

Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path, tiny_tokenizer: Any) -> Save:
    def to_folder(
        model: Any, more: Mapping[str, torch.Tensor], architecture: str | None = None
    ) -> Path:
        model.save_pretrained(tmp_path)
        tiny_tokenizer.save_pretrained(tmp_path)
        file = tmp_path / "model.safetensors"
        save_file(
            {**load_file(file), **{key: one.clone() for key, one in more.items()}},
            file,
            metadata={"format": "pt"},
        )
        edit_json(
            tmp_path / "config.json", **({"architectures": [architecture]} if architecture else {})
        )
        return tmp_path

    return to_folder


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_nobody_reads_is_named(kind: str, save: Save) -> None:
    architecture, head = HEADS[kind]
    folder = save(causal_model("llama"), head, architecture)
    first = sorted(head)[0]
    for options in ({}, {"head_seed": 3}, {"head_seed": 3, "on_meta": True}):
        with pytest.raises(ModelError, match=rf"does not use(?s:.*){first}.* like a head"):
            load_classifier(folder, **options).model.fill("cpu")


@pytest.mark.parametrize(
    ("architecture", "name", "reason"),
    [
        ("LlamaForProcessRewardModel", "published", "process reward model is not known"),
        ("Qwen2ForTokenClassification", "published", "process reward model is not known"),
        ("LlamaForCausalLM", "GPM-Llama-3.1-8B", "compares pairs"),
    ],
)
def test_a_model_without_a_score_is_refused_by_name(
    architecture: str, name: str, reason: str, save: Save
) -> None:
    head = {
        "score.0.weight": SQUARE,
        "score.0.bias": SQUARE[0],
        "score.2.weight": SQUARE[:2],
        "score.2.bias": ROW[0],
    }
    saved = save(causal_model("llama"), head, architecture)
    folder = shutil.copytree(saved, saved / name)
    for options in ({}, {"head_seed": 3}, {"head_seed": 3, "on_meta": True}):
        with pytest.raises(ModelError, match=rf"{reason}(?s:.*)docs/reward_models\.md"):
            load_classifier(folder, **options)


@pytest.mark.parametrize("file", ["value_head.safetensors", "value_head.bin"])
def test_a_head_in_a_file_of_its_own_is_named(file: str, save: Save) -> None:
    """LLaMA-Factory's, beside a language model; a policy has no use for it."""
    folder = save(causal_model("llama"), {})
    (folder / file).touch()
    for options in ({}, {"head_seed": 3}, {"head_seed": 3, "on_meta": True}):
        with pytest.raises(ModelError, match=rf"does not use(?s:.*){file}.* like a head"):
            load_classifier(folder, **options).model.fill("cpu")
    load_policy(folder)


def test_another_tensor_is_named_too(save: Save) -> None:
    folder = save(tiny_model("llama"), {"model.layers.1.self_attn.q_proj.bias": ROW[0]})
    with pytest.raises(
        ModelError, match=r"does not use(?s:.*)layers\.1\.self_attn\.q_proj\.bias"
    ) as raised:
        load_classifier(folder)
    assert "head" not in str(raised.value.got)
    folder = save(causal_model("llama"), HEADS["TRL"][1])
    for on_meta in (False, True):
        with pytest.raises(ModelError, match="v_head"):
            load_policy(folder, on_meta=on_meta).model.fill("cpu")


@pytest.mark.parametrize(
    ("model", "more", "architecture"),
    [
        (
            lambda: causal_model("llama"),
            {"model.layers.0.self_attn.rotary_emb.inv_freq": ROW[0]},
            None,
        ),
        (lambda: tiny_model("llama"), {"lm_head.weight": torch.ones(600, 32)}, None),
        (lambda: causal_model("gpt2"), {"transformer.h.0.attn.bias": SQUARE.bool()}, None),
        (lambda: causal_model("llama"), {}, "AModelOfTheirs"),
        (lambda: randomise(AutoModelForMaskedLM.from_config(config_of("bert"))), {}, None),
    ],
    ids=[
        "old buffers",
        "a classifier with a language head",
        "masks",
        "no class of transformers",
        "bert",
    ],
)
@pytest.mark.parametrize("on_meta", [False, True])
def test_what_the_family_knows_may_be_left(
    model: Callable[[], Any],
    more: Mapping[str, torch.Tensor],
    architecture: str | None,
    on_meta: bool,
    save: Save,
) -> None:
    load_classifier(save(model(), more, architecture), head_seed=3, on_meta=on_meta).model.fill(
        "cpu"
    )
