"""Adapters compute on trees what peft computes on plain rows; the frozen model is the reference;
nothing is lost.

Folders of PEFT's adapters are models: their base with the adapters merged, as reward model and as
policy.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import causal_model, config_of, gradient_error, plain_log_probs
from messages import edit_json
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from treeward import Scorer
from treeward.cli.main import main
from treeward.config.policy import LoraConfig
from treeward.errors import CheckpointError, ConfigError, ModelError
from treeward.model.checks import check_policy
from treeward.model.export import export_model, exported_weights
from treeward.model.loading import load_classifier, load_policy
from treeward.model.lora import (
    AdapterReference,
    adapted_layers,
    adapter_state,
    add_adapters,
    is_quantized,
    load_adapters,
    save_adapters,
    without_adapters,
)
from treeward.model.policy_model import PolicyModel

CONFIG = LoraConfig(enabled=True, dim=4, alpha=12)
TIED = {"qwen3": {"tie_word_embeddings": True}}
GROUPS = [
    [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [5, 6, 7, 12, 13, 14, 15]],
    [[20, 21, 22, 23], [20, 21, 24]],
]
STARTS = [[3, 3, 3], [2, 2]]


def row_log_probs(model: Any) -> list[torch.Tensor]:
    """The log-probabilities of all sequences, one at a time in plain transformers."""
    rows = []
    for group, starts in zip(GROUPS, STARTS, strict=True):
        rows += [plain_log_probs(model, sequence, starts[0])[0] for sequence in group]
    return rows


CHUNK = 4
"""The same wherever bits are compared: how a matrix product rounds depends on its size."""


def adapted(
    hf: PreTrainedModel, config: LoraConfig = CONFIG, *, fresh: bool = False, seed: int = 1
) -> PolicyModel:
    """With adapters that matter, as after some training, unless they are to be fresh."""
    policy = PolicyModel(hf, chunk_tokens=CHUNK)
    add_adapters(policy, config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapter_state(policy).items():
            if "lora_B" in name and not fresh:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return policy


def assert_as_rows(policy: PolicyModel, model: Any, tolerance: float = 2e-5) -> None:
    with torch.no_grad():
        got = policy.log_probs(GROUPS, STARTS)
        rows = row_log_probs(model)
    for values, row in zip(got.values_SL, rows, strict=True):
        assert float((values[: len(row)] - row).abs().max()) < tolerance


def peft_model(folder: Path, hf: PreTrainedModel, *, trainable: bool = False) -> Any:
    """Saved adapters, as anybody loads them."""
    return peft.PeftModel.from_pretrained(hf, str(folder), is_trainable=trainable)


@pytest.mark.parametrize(
    "family",
    ["qwen3", "gpt2", "phi3", "mixtral", "gemma2", "deepseek_v3", "qwen3_5", "mamba", "lfm2"],
)
def test_values_and_gradients_are_those_of_peft_on_plain_rows(family: str, tmp_path: Path) -> None:
    changes = TIED.get(family, {})
    policy = adapted(causal_model(family, **changes))
    save_adapters(policy, tmp_path)
    model = peft_model(tmp_path, causal_model(family, **changes), trainable=True)
    got = policy.log_probs(GROUPS, STARTS)
    assert_as_rows(policy, model)
    with without_adapters(policy), torch.no_grad():
        assert (
            float((policy.log_probs(GROUPS, STARTS).values_SL - got.values_SL).abs().max()) > 0.01
        )
    weights = torch.linspace(-1, 1, got.values_SL.numel()).reshape(got.values_SL.shape)
    (got.values_SL * weights).sum().backward()
    rows = row_log_probs(model)
    torch.stack(
        [(row * weights[i, : len(row)]).sum() for i, row in enumerate(rows)]
    ).sum().backward()
    trained = {
        n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.requires_grad
    }
    ours = {name: weight.grad for name, weight in adapter_state(policy).items()}
    assert all(grad is not None and bool(grad.any()) for grad in ours.values())
    assert gradient_error(ours, trained) < 1e-5  # type: ignore[arg-type]
    for name, weight in policy.hf.named_parameters():
        assert (weight.grad is not None) == weight.requires_grad, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_fresh_adapter_changes_no_bit(family: str, dtype: torch.dtype) -> None:
    hf = causal_model(family).to(dtype)
    before = {name: weight.detach().clone() for name, weight in hf.named_parameters()}
    with torch.no_grad():
        want = PolicyModel(hf, chunk_tokens=CHUNK).log_probs(GROUPS, STARTS).values_SL
        policy = adapted(hf, fresh=True)
        assert torch.equal(policy.log_probs(GROUPS, STARTS).values_SL, want)
    assert {weight.dtype for weight in adapter_state(policy).values()} == {torch.float32}
    state = dict(exported_weights(policy, None))
    for name, weight in before.items():
        assert torch.equal(state[name], weight), name
        assert state[name].dtype == dtype
    adapters = {name: torch.randn(weight.shape) for name, weight in adapter_state(policy).items()}
    with torch.no_grad():
        for name, weight in adapter_state(policy).items():
            weight.copy_(adapters[name])
    merged = dict(exported_weights(policy, torch.float32))
    for name, weight in before.items():
        first, second = (
            adapters.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight")
            for x in "AB"
        )
        # alpha / dim is 3; nothing is rounded to the base's dtype
        if first is not None and second is not None:
            delta = 3 * (second.double() @ first.double())
            torch.testing.assert_close(
                merged[name].double(),
                weight.double() + (delta.T if family == "gpt2" else delta),
                rtol=1e-5,
                atol=1e-5,
            )


ATTENTION: set[str] = set()
DENSE: set[str] = set()
for layer in range(2):
    ATTENTION |= {f"model.layers.{layer}.self_attn.{part}_proj" for part in "qkvo"}
    DENSE |= {f"model.layers.{layer}.mlp.{part}_proj" for part in ("gate", "up", "down")}


def layers_of(family: str = "llama", **fields: Any) -> set[str]:
    """The layers that have adapters, which are all that trains."""
    policy = adapted(causal_model(family), LoraConfig(enabled=True, **fields))
    layers = set()
    for name in adapter_state(policy):
        layers.add(name.removeprefix("base_model.model.").rsplit(".", 2)[0])
    trained = set()
    for name, weight in policy.hf.named_parameters():
        assert weight.requires_grad == (".lora_" in name)
        if weight.requires_grad:
            trained.add(name)
    assert len(trained) == 2 * len(layers)
    return layers


def test_all_linear_layers_are_adapted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "treeward"):
        assert layers_of() == ATTENTION | DENSE
    assert (
        "14 layers: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj." in caplog.text
    )


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_are_not_adapted(family: str) -> None:
    assert layers_of(family) == ATTENTION


def test_dense_layers_with_the_names_of_experts_are_not_adapted() -> None:
    layers = layers_of("deepseek_v3")
    assert layers and not any("mlp" in name for name in layers)


def test_excluded_layers_are_not_adapted() -> None:
    only = {"match_all_linear": False}
    assert layers_of(exclude_modules=("*.mlp.*",)) == ATTENTION
    assert layers_of(**only, exclude_modules=("*.mlp.*",)) == ATTENTION
    layers = layers_of(exclude_modules=("q_proj", "1.self_attn.k_proj", "*.mlp.*"))
    queries = {name for name in ATTENTION if "q_proj" in name}
    assert layers == ATTENTION - queries - {"model.layers.1.self_attn.k_proj"}


def test_named_layers_alone_are_adapted() -> None:
    layers = layers_of(match_all_linear=False, target_modules=("*.0.mlp.*", "v_proj"))
    assert layers == {name for name in ATTENTION | DENSE if "0.mlp" in name or "v_proj" in name}


def test_layers_whose_weights_a_fused_kernel_reads_have_no_adapters() -> None:
    def last_names(family: str) -> set[str]:
        layers = adapted_layers(adapted(causal_model(family), LoraConfig(enabled=True)))
        return {name.rpartition(".")[2] for name in layers}

    # Mamba 1's kernel reads three weights, Mamba 2's one.
    assert last_names("mamba") == {"in_proj"}
    assert last_names("mamba2") == {"in_proj"}
    # A gated delta net, and a short convolution, call their output layers.
    assert "out_proj" in last_names("qwen3_5")
    assert "out_proj" in last_names("lfm2")


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "llama",
            {"target_modules": ("query",)},
            r"no linear layer has this name(?s:.*)target_modules(?s:.*)q_proj",
        ),
        ("llama", {"match_all_linear": True, "exclude_modules": ("*",)}, "no layer is adapted"),
        ("llama", {"target_modules": ("lm_head",)}, "takes no adapter(?s:.*)lm_head"),
        (
            "deepseek_v3",
            {"target_modules": ("up_proj", "o_proj")},
            "takes no adapter(?s:.*)up_proj",
        ),
        ("bamba", {"target_modules": ("out_proj",)}, "a fused kernel reads(?s:.*)mamba.out_proj"),
        ("jamba", {"target_modules": ("x_proj",)}, "a fused kernel reads(?s:.*)mamba.x_proj"),
    ],
)
def test_what_cannot_be_adapted(family: str, fields: dict[str, Any], message: str) -> None:
    hf = causal_model(family)
    with pytest.raises((ConfigError, ModelError), match=message):
        adapted(hf, LoraConfig(**{"enabled": True, "match_all_linear": False, **fields}))


def test_the_reference_is_the_frozen_model() -> None:
    hf = causal_model("qwen3")
    plain = copy.deepcopy(hf)
    policy = adapted(hf)
    reference = AdapterReference(policy)
    with torch.no_grad():
        want = PolicyModel(plain, chunk_tokens=CHUNK).log_probs(
            GROUPS, STARTS, temperature=0.8, entropies=True
        )
        on = policy.log_probs(GROUPS, STARTS)
    got = reference.log_probs(GROUPS, STARTS, temperature=0.8, entropies=True)
    assert not got.values_SL.requires_grad and torch.equal(got.values_SL, want.values_SL)
    assert got.entropies_SL is not None and want.entropies_SL is not None
    assert torch.equal(got.entropies_SL, want.entropies_SL)
    with pytest.raises(RuntimeError, match="stop"), without_adapters(policy):
        raise RuntimeError("stop")
    with torch.no_grad():
        assert torch.equal(policy.log_probs(GROUPS, STARTS).values_SL, on.values_SL)
    assert all(weight.requires_grad for weight in adapter_state(policy).values())


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mixtral", "gemma2"])
def test_merged_weights_are_a_plain_model(family: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    changes = TIED.get(family, {})
    policy = adapted(causal_model(family, **changes))
    before = copy.deepcopy(policy.hf.state_dict())
    export_model(policy, tiny_tokenizer, tmp_path, chat_template="x")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert_as_rows(policy, plain)
    assert not list(tmp_path.glob("adapter*"))
    for name, weight in policy.hf.state_dict().items():
        assert torch.equal(weight, before[name]), name
    check_policy(policy, [[5, 6, 7, 8, 9], [3, 4, 5, 6]])


def test_loading_puts_back_the_bits(tmp_path: Path) -> None:
    policy = adapted(causal_model("qwen3"))
    save_adapters(policy, tmp_path / "saved")
    other = adapted(causal_model("qwen3"), seed=9)
    load_adapters(other, tmp_path / "saved")
    for name, weight in adapter_state(policy).items():
        assert (
            torch.equal(weight, adapter_state(other)[name])
            and adapter_state(other)[name].requires_grad
        )
    with torch.no_grad():
        one, two = (p.log_probs(GROUPS, STARTS).values_SL for p in (policy, other))
    assert torch.equal(one, two)
    few = LoraConfig(
        enabled=True, dim=4, alpha=12, match_all_linear=False, target_modules=["q_proj"]
    )
    save_adapters(adapted(causal_model("qwen3"), few), tmp_path / "few")
    with pytest.raises(CheckpointError, match=r"lack layers of the model(?s:.*)layers\.0"):
        load_adapters(other, tmp_path / "few")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_adapters(other, tmp_path / "nothing")
    (tmp_path / "saved" / "adapter_model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_adapters(other, tmp_path / "saved")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_policy_of_four_bits_is_exported_as_it_computes(
    family: str, save: Callable[..., Path], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """gpt2 keeps its weights turned; the layers without adapters have four bits too."""
    hf = load_policy(save(causal_model(family)), load_in_4bit=True).model.hf
    dense = {
        name
        for name, module in causal_model(family).named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }
    assert {name for name, module in hf.named_modules() if is_quantized(module)} == dense - {
        "lm_head"
    }
    assert {weight.dtype for weight in hf.parameters()} == {torch.uint8, torch.float32}
    exclude = ("0.mlp.c_proj",) if family == "gpt2" else ("0.self_attn.o_proj",)
    policy = adapted(hf, CONFIG.model_copy(update={"exclude_modules": exclude})).eval()
    export_model(policy, tiny_tokenizer, tmp_path / "merged", chat_template="{{ messages }}")
    assert_as_rows(policy, AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    save_adapters(policy, tmp_path / "adapters")
    # beside weights that never had four bits they are another model
    with pytest.raises(AssertionError):
        assert_as_rows(policy, peft_model(tmp_path / "adapters", causal_model(family)))
    load_policy(tmp_path / "adapters")
    with pytest.raises(ModelError, match="4 bits(?s:.*)merge_and_unload"):
        load_policy(tmp_path / "adapters", load_in_4bit=True)


CONVERSATION = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
]


@pytest.fixture
def adapters(policy_folder: Path, tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """Saves adapters of a kind on `policy_folder`, as TRL does; their folder, and the model that
    peft computes with."""

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


def test_a_folder_of_adapters_is_a_reward_model(
    adapters: Any, write_rows: Callable[..., Path], tmp_path: Path
) -> None:
    folder, model = adapters("SEQ_CLS")
    rows = write_rows("rows.jsonl", [{"messages": CONVERSATION}])
    output = tmp_path / "scores.jsonl"
    assert main(["score", str(folder), "--data", str(rows), "--output", str(output)]) == 0
    ids = Scorer.load(folder).renderer.encode(CONVERSATION)
    assert json.loads(output.read_text())["score"] == pytest.approx(
        float(logits(model, ids)), abs=1e-5
    )
    trained = load_classifier(folder, head_seed=1).model  # its head is not drawn anew
    saved = load_file(folder / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert torch.equal(trained.head.weight, saved) and all(
        one.requires_grad for one in trained.parameters()
    )
    half = load_classifier(folder, dtype=torch.bfloat16).model
    assert half.head.weight.dtype == torch.float32 and half.hf.dtype == torch.bfloat16
    with pytest.raises(ModelError, match="cannot write completions"):
        load_policy(folder)


def test_a_folder_of_adapters_is_a_policy(adapters: Any, tmp_path: Path) -> None:
    folder, model = adapters("CAUSAL_LM")
    loaded = load_policy(folder)
    ids = loaded.tokenizer.encode("Two words.")
    assert float((logits(loaded.model.hf, ids) - logits(model, ids)).abs().max()) < 1e-4
    with pytest.raises(ModelError, match="no reward head"):
        load_classifier(folder)
    assert load_classifier(folder, head_seed=1).model.num_heads == 1
    # their base is that policy, not its base
    add_adapters(loaded.model, LoraConfig(enabled=True), seed=1)
    save_adapters(loaded.model, tmp_path / "next")
    again = load_policy(tmp_path / "next").model.hf
    assert float((logits(again, ids) - logits(model, ids)).abs().max()) < 1e-4


def test_weights_that_nobody_trained_are_no_scores(
    adapters: Any, save: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    # the head has adapters, and its own weights were not saved
    folder, _ = adapters("FEATURE_EXTRACTION")
    with pytest.raises(ModelError, match="no reward head"):
        Scorer.load(folder)
    # without the pooler that a classifier draws, and peft does not save
    encoder = save(AutoModelForMaskedLM.from_config(config_of("bert")))
    folder, _ = adapters("SEQ_CLS", encoder, target_modules=["query"])
    with pytest.raises(ModelError, match=r"weights are missing(?s:.*)pooler"):
        Scorer.load(folder)
    assert main(["verify", str(folder), "--write"]) == 2
    assert "this is a folder of adapters" in capsys.readouterr().err


def test_a_quantised_base_and_tied_embeddings_are_not_merged(
    adapters: Any, save: Callable[..., Path], policy_folder: Path, tmp_path: Path
) -> None:
    tied = save(causal_model("qwen3", vocab_size=600, tie_word_embeddings=True))
    folder, _ = adapters("CAUSAL_LM", tied, target_modules=["lm_head"])
    with pytest.raises(ModelError, match=r"cannot be merged(?s:.*)one tensor in the base"):
        load_policy(folder)
    folder, _ = adapters("SEQ_CLS")
    base = shutil.copytree(policy_folder, tmp_path / "quantised")
    quantised = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    edit_json(base / "config.json", quantization_config=quantised)
    rebased(folder, base)
    with pytest.raises(ModelError, match=r"quantised(?s:.*)full precision"):
        Scorer.load(folder)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder, base: rebased(folder, base / "gone"),
            "base model of these adapters is not there(?s:.*)gone",
        ),
        (lambda folder, base: rebased(folder, None), "base model of these adapters is not there"),
        (lambda folder, base: rebased(folder, folder), "the folder itself"),
        (
            lambda folder, base: (folder / "adapter_model.safetensors").unlink(),
            r"cannot be merged(?s:.*)SequenceClassi",
        ),
    ],
)
def test_folders_of_adapters_that_are_refused(
    adapters: Any, policy_folder: Path, spoil: Callable[..., None], message: str
) -> None:
    folder, _ = adapters("SEQ_CLS")
    spoil(folder, policy_folder)
    with pytest.raises(ModelError, match=message):
        Scorer.load(folder)


def rebased(folder: Path, base: Path | None) -> None:
    edit_json(folder / "adapter_config.json", base_model_name_or_path=base and str(base))


def test_adapters_that_lack_layers_are_refused(tmp_path: Path) -> None:
    save_adapters(adapted(causal_model("qwen3")), tmp_path / "saved")
    file = tmp_path / "saved" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(min(tensors))
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="lack layers of the model"):
        load_adapters(adapted(causal_model("qwen3")), tmp_path / "saved")
