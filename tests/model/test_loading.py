"""From folders and bare configurations to models: heads, padding tokens, number formats, and clear
refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    CAUSAL_ONLY,
    causal_model,
    config_of,
    forest,
    plain_log_probs,
    randomise,
    score_error,
    tiny_model,
)
from messages import edit_json, replace_text
from safetensors.torch import load_file, save_file
from signed import SIZES
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, ModelError
from treeward.model.export import export_model
from treeward.model.heads import head_name
from treeward.model.loading import build_reward_model, load_classifier, load_policy
from treeward.model.policy_model import PolicyModel
from treeward.model.pretrained import load_tokenizer, read_config

LLAMA = {"model_type": "llama", **SIZES}


def causal_lm(family: str = "llama", **changes: Any) -> Any:
    """A language model, saved and loaded by people who never heard of reward models."""
    return randomise(AutoModelForCausalLM.from_config(config_of(family, num_labels=2, **changes)))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_causal_lm_gets_one_label_and_a_head_drawn_from_the_seed(
    family: str, save: Callable[..., Path]
) -> None:
    lm = causal_lm(family)
    folder = save(lm)
    torch.manual_seed(1)
    loaded = load_classifier(folder, head_seed=5)
    torch.manual_seed(2)
    again = load_classifier(folder, head_seed=5)
    other = load_classifier(folder, head_seed=6)
    head = loaded.model.head.weight
    assert head.shape == (1, 32) and head.dtype == torch.float32
    drawn = torch.randn(1, 32, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(head.detach(), drawn / 33**0.5)
    assert torch.equal(head, again.model.head.weight) and not torch.equal(
        head, other.model.head.weight
    )
    assert loaded.model.hf.config.num_labels == 1
    backbone = dict(lm.base_model.named_parameters())
    for name, weight in loaded.model.backbone.named_parameters():
        assert torch.equal(weight, backbone[name]), name


def test_missing_weights_and_nan_are_refused(save: Callable[..., Path]) -> None:
    folder = save(tiny_model("llama"))
    file = folder / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    weights = load_file(file)
    broken = weights.pop(name)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"weights are missing(?s:.*)up_proj"):
        load_classifier(folder)
    broken[0, 0] = torch.nan
    save_file({**weights, name: broken}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"NaN or infinity(?s:.*)up_proj"):
        load_classifier(folder)


def test_broken_files_are_refused(save: Callable[..., Path]) -> None:
    folder = save(tiny_model("llama"))
    config = folder / "config.json"
    weights = folder / "model.safetensors"
    text = config.read_text(encoding="utf-8")
    for wrong, message in (
        (text.replace('"hidden_size": 32', '"hidden_size": "wide"'), "expected int"),
        ("{", ""),
    ):
        config.write_text(wrong, encoding="utf-8")
        with pytest.raises(ModelError, match=rf"cannot be loaded(?s:.*){message}"):
            load_classifier(folder)
    config.write_text(text, encoding="utf-8")
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_classifier(folder)
    weights.unlink()
    # it is never unpickled
    torch.save(tiny_model("llama").state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"cannot be loaded(?s:.*)safetensors"):
        load_classifier(folder)


def tokenizer_with(tiny_tokenizer: Any, **special: Any) -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    for name, value in special.items():
        setattr(tokenizer, name, value)
    return tokenizer


@pytest.mark.parametrize("pad", ["<|endoftext|>", None])
def test_padding_that_is_the_end_of_text_gets_a_token_of_its_own(
    pad: str | None, save: Callable[..., Path], tiny_tokenizer: Any
) -> None:
    """A spare padding token of the vocabulary is taken (here `<|pad|>`)."""
    folder = save(tiny_model("llama"), tokenizer_with(tiny_tokenizer, pad_token=pad))
    loaded = load_classifier(folder)
    assert loaded.tokenizer.pad_token == "<|pad|>" and loaded.model.num_embeddings == 600
    assert (
        loaded.model.hf.config.pad_token_id
        == loaded.tokenizer.pad_token_id
        != loaded.tokenizer.eos_token_id
    )


def test_the_end_of_turn_is_trained_where_it_was_the_padding_token(
    save: Callable[..., Path], tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """PyTorch gives an embedding's `padding_idx` no gradient; fresh and loaded again, the two
    models train alike."""
    tokenizer = tokenizer_with(tiny_tokenizer, pad_token="<|endoftext|>")
    end = tokenizer.eos_token_id
    fresh = load_classifier(
        save(tiny_model("llama", pad_token_id=end, eos_token_id=end), tokenizer)
    )
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    export_model(fresh.model, fresh.tokenizer, tmp_path / "resumed", chat_template=template)
    resumed = load_classifier(tmp_path / "resumed")
    for layout in ("tree", "rows"):
        gradients = []
        for model in (fresh.model, resumed.model):
            model.layout = layout
            model.zero_grad()
            model(model.make_batch([[[5, 6, end], [5, 7, 8, end]]])).sum().backward()
            gradients.append(model.hf.get_input_embeddings().weight.grad)
        assert gradients[0][end].abs().max() > 0, layout
        assert torch.equal(gradients[0], gradients[1]), layout


def test_without_a_spare_one_the_vocabulary_grows(
    save: Callable[..., Path], tiny_tokenizer: Any
) -> None:
    tokenizer = tokenizer_with(tiny_tokenizer, pad_token="<|endoftext|>")
    files = save(tiny_model("llama"), tokenizer)
    replace_text(files / "tokenizer.json", "<|pad|>", "<|other|>")
    torch.manual_seed(1)
    loaded = load_classifier(files, head_seed=4)
    assert loaded.tokenizer.pad_token == "<|treeward_pad|>" and loaded.tokenizer.pad_token_id == 600
    assert loaded.model.num_embeddings == 601 == loaded.model.hf.config.vocab_size
    with pytest.raises(ModelError, match="token 600(?s:.*)0 to 599"):  # nobody has trained this row
        loaded.model.score_tokens([[5, 600]])
    torch.manual_seed(2)
    again = load_classifier(files, head_seed=4)
    assert torch.equal(
        loaded.model.hf.get_input_embeddings().weight, again.model.hf.get_input_embeddings().weight
    )


def test_several_ends_of_text(save: Callable[..., Path], tiny_tokenizer: Any) -> None:
    """Llama 3 has three; none of them may pad."""
    pad = tiny_tokenizer.pad_token_id
    folder = save(tiny_model("llama", eos_token_id=[0, pad, 5]))
    loaded = load_classifier(folder)
    assert loaded.tokenizer.pad_token == "<|treeward_pad|>"
    assert (
        load_classifier(save(tiny_model("llama", eos_token_id=[0, 5]))).tokenizer.pad_token
        == "<|pad|>"
    )


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("granite", "tree"),
        ("cohere2", "tree"),
        ("gemma3n", "tree"),
        ("llama4", "tree"),
        ("mamba", "tree"),
    ],
)
def test_families_without_a_sequence_classifier(
    family: str, layout: str, save: Callable[..., Path], tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """They train and export, and load again with treeward."""
    own = (
        {"state_size": 4}
        if family == "mamba"
        else {"intermediate_size": 64, "num_attention_heads": 4}
    )
    fields = {
        "model_type": family,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        **own,
        **CAUSAL_ONLY.get(family, {}),
    }
    loaded = build_reward_model(fields, tiny_tokenizer, seed=3)
    assert loaded.model.layout == layout
    model = loaded.model.eval()
    with torch.no_grad():
        want = model(model.make_batch(forest()))
    export_model(
        model,
        loaded.tokenizer,
        tmp_path / "out",
        chat_template=Renderer(loaded.tokenizer).chat_template,
    )
    reloaded = load_classifier(tmp_path / "out").model
    with torch.no_grad():
        assert score_error(reloaded(reloaded.make_batch(forest())), want) <= 1e-5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "lama"}, "no such model type(?s:.*)did you mean llama"),
        (
            {**LLAMA, "hiden_size": 64},
            "llama has no such field(?s:.*)hiden_size(?s:.*)did you mean hidden_size",
        ),
        ({**LLAMA, "vocab_size": 10}, "follows from the tokenizer(?s:.*)vocab_size"),
        ({**LLAMA, "num_attention_heads": 5}, "no model can be built(?s:.*)not a multiple"),
        ({**LLAMA, "num_attention_heads": 0}, "no model can be built(?s:.*)ZeroDivisionError"),
    ],
)
def test_wrong_configurations(fields: dict[str, Any], message: str, tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        build_reward_model(fields, tiny_tokenizer, seed=0)


def test_remote_code_is_not_run(save: Callable[..., Path], tmp_path: Path) -> None:
    folder = save(tiny_model("llama"))
    edit_json(folder / "config.json", model_type="mine", auto_map={"AutoConfig": "mine.MyConfig"})
    marker = tmp_path / "ran"
    (folder / "mine.py").write_text(
        f"open({str(marker)!r}, 'w').close()\nclass MyConfig: pass\n", encoding="utf-8"
    )
    with pytest.raises(ModelError):
        load_classifier(folder)
    assert not marker.exists()


@pytest.mark.parametrize("family", ["distilbert", "bert", "qwen3"])
def test_bfloat16_keeps_the_head_alone_in_float32(family: str, save: Any) -> None:
    folder = save(tiny_model(family))
    loaded = load_classifier(folder, dtype=torch.bfloat16)
    head = head_name(loaded.model.hf)
    for name, parameter in loaded.model.hf.named_parameters():
        assert parameter.dtype == (
            torch.float32 if name.split(".")[0] == head else torch.bfloat16
        ), name
    exact = load_classifier(folder).model
    ids = [[5, 6, 7, 8], [9, 6, 7, 0]]
    assert loaded.model.score_tokens(ids) == pytest.approx(exact.score_tokens(ids).numpy(), abs=0.2)


def test_a_head_of_any_name_is_kept_in_float32(save: Any) -> None:
    """XLM's is `sequence_summary`; it is called with float32."""
    config = AutoConfig.for_model(
        "xlm", vocab_size=300, emb_dim=32, n_layers=1, n_heads=2, num_labels=1
    )
    folder = save(randomise(AutoModelForSequenceClassification.from_config(config)))
    model = load_classifier(folder, dtype=torch.bfloat16).model
    assert {parameter.dtype for parameter in model.head.parameters()} == {torch.float32}
    assert model.score_tokens([[5, 6, 7, 8], [9, 6, 7]]).isfinite().all()


GROUPS = [[[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [5, 6, 7, 12, 13, 14, 15]]]
STARTS = [[3, 3, 3]]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def difference(policy: PolicyModel, hf: Any) -> float:
    with torch.no_grad():
        ours = policy.log_probs(GROUPS, STARTS).values_SL
        rows = [
            plain_log_probs(hf, ids, start)[0]
            for ids, start in zip(GROUPS[0], STARTS[0], strict=True)
        ]
    return max(
        float((values[: len(row)] - row).abs().max())
        for values, row in zip(ours, rows, strict=True)
    )


def test_a_policy_trains_the_token_that_pads(save: Callable[..., Path]) -> None:
    """Most policies pad with their end of turn; PyTorch gives an embedding's `padding_idx` no
    gradient."""
    policy = load_policy(save(causal_model("llama", pad_token_id=7))).model
    policy.log_probs(GROUPS, STARTS).values_SL.sum().backward()
    assert policy.hf.get_input_embeddings().weight.grad[7].abs().max() > 0


def test_a_folder_of_the_home_directory(
    save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(causal_model("llama"))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}', encoding="utf-8")
    monkeypatch.setenv("HOME", str(folder.parent))
    # As YAML and `policy.model_name=~/model` give it: no shell has expanded it.
    name = f"~/{folder.name}"
    assert load_classifier(name, head_seed=1).model.num_heads == 1
    for on_meta in (False, True):
        policy = load_policy(name, on_meta=on_meta).model
        assert policy.hf.generation_config.eos_token_id == [1, 2]


def test_fields_of_the_configuration_are_overridden(save: Callable[..., Path]) -> None:
    hf = causal_model("llama")
    folder = save(hf)
    theta = {"rope_theta": 100.0, "rope_type": "default"}
    loaded = load_policy(
        folder, config_overrides={"max_position_embeddings": 77, "rope_parameters": theta}
    )
    assert (
        loaded.model.max_positions == 77
        and loaded.model.layout == "tree"
        and not loaded.model.hf.training
    )
    assert loaded.tokenizer.padding_side == "right"
    changed = AutoModelForCausalLM.from_pretrained(folder, rope_parameters=theta)
    assert difference(loaded.model, changed) < 1e-5 < 1e-3 < difference(loaded.model, hf)
    with pytest.raises(ConfigError, match=r"llama has no such field(?s:.*)rope_thta"):
        load_policy(folder, config_overrides={"rope_thta": 100.0})
    with pytest.raises(ModelError, match="shapes that config.json asks for"):
        load_policy(folder, config_overrides={"intermediate_size": 48})


def test_what_is_no_policy_is_refused(save: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_policy(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(tmp_path / "empty")
    with pytest.raises(
        ModelError,
        match=r"a classifier(?s:.*)policy.model_name(?s:.*)LlamaForSequenceClassification",
    ):
        load_policy(save(tiny_model("llama")))
    folder = tmp_path / "no-tokenizer"
    causal_model("llama").save_pretrained(folder)
    with pytest.raises(ModelError, match=r"tokenizer cannot be loaded(?s:.*)policy.tokenizer.name"):
        load_policy(folder)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "mixtral", "gpt_oss"])
def test_an_export_is_loaded_by_plain_transformers(
    family: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    policy = PolicyModel(causal_model(family))
    own = tiny_tokenizer.chat_template
    export_model(policy, tiny_tokenizer, tmp_path / "out", chat_template=TEMPLATE)
    assert tiny_tokenizer.chat_template == own != TEMPLATE
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert plain.dtype == torch.float32 and difference(policy, plain) < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
    )


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_damaged_file_is_named(own_policy_folder: Path, name: str) -> None:
    file = own_policy_folder / name
    text = file.read_text(encoding="utf-8")
    file.write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(ModelError, match="this file is damaged") as error:
        load_tokenizer(str(own_policy_folder))
    assert error.value.where == str(file) and "policy.tokenizer" not in str(error.value)
    if name == "config.json":
        with pytest.raises(ModelError, match=r"config.json: the model cannot be loaded: this file"):
            read_config(str(own_policy_folder), trust_remote_code=False)
