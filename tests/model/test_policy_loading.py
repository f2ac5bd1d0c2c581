"""From folders and bare configurations to policies, back to folders that plain transformers loads, and refusals."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import config_of, randomise, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from treeward.errors import ConfigError, ModelError
from treeward.model.policy_loading import build_policy, export_policy, load_policy
from treeward.model.policy_model import PolicyModel
from treeward.model.support import choose_policy_layout

QWEN = {
    "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
GROUPS = [[[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [5, 6, 7, 12, 13, 14, 15]]]
STARTS = [[3, 3, 3]]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def causal(family: str = "llama", **changes: Any) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return randomise(AutoModelForCausalLM.from_config(config_of(family, **changes), dtype=torch.float32).eval())


@pytest.fixture
def save(tmp_path: Path, tiny_tokenizer: Any) -> Callable[..., Path]:
    """Save a model with the tiny tokenizer as a folder that anyone could have made."""

    def to_folder(model: Any) -> Path:
        folder = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return to_folder


def plain_values(hf: Any) -> list[Tensor]:
    """Of each completion, as plain transformers computes it."""
    found = []
    if hf._can_set_attn_implementation():
        hf.set_attn_implementation("eager")  # a `PolicyModel` of it leaves its own
    with torch.no_grad():
        for ids, start in zip(GROUPS[0], STARTS[0], strict=True):
            logits = hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
            found.append(logits[:-1].gather(-1, torch.tensor(ids)[1:, None])[start - 1 :, 0])
    return found


def difference(policy: PolicyModel, hf: Any) -> float:
    with torch.no_grad():
        ours = policy.log_probs(GROUPS, STARTS).values_SL
    rows = plain_values(hf)
    return max(float((values[: len(row)] - row).abs().max()) for values, row in zip(ours, rows, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "phi3", "mixtral"])
def test_a_loaded_policy_is_the_saved_model(family: str, save: Callable[..., Path]) -> None:
    hf = causal(family)
    loaded = load_policy(save(hf), chunk_tokens=2)
    assert loaded.model.layout == "tree" and loaded.model.chunk_tokens == 2 and not loaded.model.hf.training
    assert len(loaded.tokenizer) == 600 and loaded.tokenizer.padding_side == "right"
    assert difference(loaded.model, hf) < 1e-5
    for (name, one), other in zip(hf.named_parameters(), loaded.model.hf.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_policy_trains_the_token_that_pads(save: Callable[..., Path]) -> None:
    """Most policies pad with their end of turn; PyTorch gives an embedding's `padding_idx` no gradient."""
    policy = load_policy(save(causal(pad_token_id=7))).model
    policy.log_probs(GROUPS, STARTS).values_SL.sum().backward()
    assert policy.hf.get_input_embeddings().weight.grad[7].abs().max() > 0


def test_dtype_rows_and_another_tokenizer(save: Callable[..., Path], tiny_tokenizer: Any) -> None:
    hf = causal()
    loaded = load_policy(save(hf), dtype=torch.bfloat16, attention="rows", tokenizer=tiny_tokenizer)
    assert loaded.tokenizer is tiny_tokenizer and loaded.model.layout == "rows"
    assert {weight.dtype for weight in loaded.model.hf.parameters()} == {torch.bfloat16}
    assert 0 < difference(loaded.model, hf) < 0.2
    with pytest.raises(ConfigError, match="unknown attention(?s:.*)flash"):
        load_policy(save(hf), attention="flash")


def test_fields_of_the_configuration_are_overridden(save: Callable[..., Path]) -> None:
    hf = causal()
    folder = save(hf)
    theta = {"rope_theta": 100.0, "rope_type": "default"}
    loaded = load_policy(folder, config_overrides={"max_position_embeddings": 77, "rope_parameters": theta})
    assert loaded.model.max_positions == 77
    changed = AutoModelForCausalLM.from_pretrained(folder, rope_parameters=theta)
    assert difference(loaded.model, changed) < 1e-5 < 1e-3 < difference(loaded.model, hf)
    with pytest.raises(ModelError, match=r"no such field(?s:.*)rope_thta(?s:.*)LlamaConfig"):
        load_policy(folder, config_overrides={"rope_thta": 100.0})
    with pytest.raises(ModelError, match="shapes that config.json asks for"):
        load_policy(folder, config_overrides={"intermediate_size": 48})


def test_what_is_no_policy_is_refused(save: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        load_policy(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(tmp_path / "empty")
    with pytest.raises(ModelError, match=r"a classifier(?s:.*)LlamaForSequenceClassification(?s:.*)policy.model_name"):
        load_policy(save(tiny_model("llama")))
    with pytest.raises(ModelError, match="no causal language model of this family(?s:.*)distilbert"):
        load_policy(save(tiny_model("distilbert", architectures=["DistilBertModel"])))
    folder = tmp_path / "no-tokenizer"
    causal().save_pretrained(folder)
    with pytest.raises(ModelError, match=r"no tokenizer(?s:.*)policy.tokenizer.name"):
        load_policy(folder)


def test_broken_weights_are_refused(save: Callable[..., Path]) -> None:
    folder = save(causal())
    file = folder / "model.safetensors"
    whole = load_file(file)
    up = "model.layers.1.mlp.up_proj.weight"
    save_file({name: w for name, w in whole.items() if name != up}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"weights are missing(?s:.*)up_proj"):
        load_policy(folder)
    broken = whole[up].clone()
    broken[0, 0] = float("nan")
    save_file({**whole, up: broken}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"NaN or infinity(?s:.*)up_proj"):
        load_policy(folder)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(folder)
    file.unlink()
    torch.save(whole, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"cannot be loaded(?s:.*)safetensors"):
        load_policy(folder)


def test_a_tokenizer_larger_than_the_embedding_is_refused(save: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match="more tokens than the policy has embeddings(?s:.*)600 tokens, 599 embeddings"):
        load_policy(save(causal(vocab_size=599)))
    assert load_policy(save(causal(vocab_size=608))).model.num_embeddings == 608  # padded for speed, as many are


def test_remote_code_is_not_run(save: Callable[..., Path], tmp_path: Path) -> None:
    folder = save(causal())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    marker = tmp_path / "ran"
    (folder / "mine.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass MyConfig: pass\n", encoding="utf-8")
    with pytest.raises(ModelError):
        load_policy(folder)
    assert not marker.exists()


def test_a_policy_that_is_built_is_determined_by_its_seed(tiny_tokenizer: Any) -> None:
    torch.manual_seed(1)
    one = build_policy(QWEN, tiny_tokenizer, seed=3)
    state = torch.random.get_rng_state()
    other = build_policy(QWEN, tiny_tokenizer, seed=3, chunk_tokens=7)
    assert torch.equal(state, torch.random.get_rng_state())  # and nobody else's draws are changed
    different = build_policy(QWEN, tiny_tokenizer, seed=4, attention="rows")
    ones, others, differents = (dict(loaded.model.hf.named_parameters()) for loaded in (one, other, different))
    assert all(torch.equal(ones[name], others[name]) for name in ones)
    assert not any(torch.equal(ones[name], differents[name]) for name in ones if ones[name].dim() > 1)
    assert (one.model.layout, different.model.layout, other.model.chunk_tokens) == ("tree", "rows", 7)
    assert one.model.num_embeddings == 600 and one.model.max_positions == 64 and not one.model.hf.training
    assert one.model.hf.config.eos_token_id == tiny_tokenizer.eos_token_id
    assert difference(one.model, one.model.hf) < 1e-5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "model type is missing"),
        ({"model_type": "quen3"}, "no such model type(?s:.*)did you mean qwen3"),
        ({**QWEN, "hiden_size": 64}, "qwen3 has no such field(?s:.*)did you mean hidden_size"),
        ({**QWEN, "vocab_size": 10}, "follows from the tokenizer(?s:.*)vocab_size"),
        ({**QWEN, "hidden_size": "wide"}, "no model can be built"),
        ({"model_type": "distilbert"}, "no model can be built"),
    ],
)
def test_wrong_configurations(fields: dict[str, Any], message: str, tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        build_policy(fields, tiny_tokenizer, seed=0)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "phi3", "mixtral", "gpt_oss"])
def test_an_export_is_loaded_by_plain_transformers(family: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    policy = PolicyModel(causal(family))
    own = tiny_tokenizer.chat_template
    export_policy(policy, tiny_tokenizer, tmp_path / "out", chat_template=TEMPLATE)
    assert tiny_tokenizer.chat_template == own != TEMPLATE
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert plain.dtype == torch.float32 and difference(policy, plain) < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_an_export_in_another_dtype(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Tied weights are written once in it too, the configuration says it, and the policy keeps its own."""
    policy = PolicyModel(causal("gemma2"))
    before = copy.deepcopy(policy.hf.state_dict())
    for dtype in (torch.bfloat16, None):
        folder = tmp_path / str(dtype)
        export_policy(policy, copy.deepcopy(tiny_tokenizer), folder, chat_template=TEMPLATE, dtype=dtype)
        saved = load_file(folder / "model.safetensors")
        assert "lm_head.weight" not in saved
        assert {weight.dtype for weight in saved.values()} == {dtype or torch.float32}
        assert AutoModelForCausalLM.from_pretrained(folder).dtype == (dtype or torch.float32)
        assert policy.hf.config.dtype == torch.float32
    assert all(torch.equal(weight, before[name]) for name, weight in policy.hf.state_dict().items())


def test_resuming_from_an_export_gives_the_same_bits(tmp_path: Path, tiny_tokenizer: Any) -> None:
    def step(policy: PolicyModel) -> None:
        policy.log_probs(GROUPS, STARTS).values_SL.sum().backward()
        with torch.no_grad():
            for weight in policy.hf.parameters():
                assert weight.grad is not None
                weight -= 0.01 * weight.grad
                weight.grad = None

    policy = build_policy({**QWEN, "tie_word_embeddings": True}, tiny_tokenizer, seed=0).model
    step(policy)
    export_policy(policy, copy.deepcopy(tiny_tokenizer), tmp_path / "out", chat_template=TEMPLATE)
    resumed = load_policy(tmp_path / "out").model
    step(policy)
    step(resumed)
    for (name, one), other in zip(policy.hf.named_parameters(), resumed.hf.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_models_that_cannot_share_prefixes_run_as_rows(caplog: pytest.LogCaptureFixture) -> None:
    hf = causal("mamba").double()  # its recurrence makes much of a rounding error, and rows are computed side by side
    with caplog.at_level(logging.WARNING, "treeward"):
        assert choose_policy_layout(causal(), "tree") == "tree"
        assert choose_policy_layout(causal(), "rows") == "rows"
        assert not caplog.records
        assert choose_policy_layout(hf, "tree") == "rows"
    assert "MambaForCausalLM cannot share prefixes" in caplog.text
    assert difference(PolicyModel(hf, layout="rows"), hf) < 1e-5
    with pytest.raises(ConfigError, match="unknown attention"):
        choose_policy_layout(hf, "trees")
