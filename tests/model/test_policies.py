"""From folders and bare configurations to policies, back to folders that plain transformers loads, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import causal_model, plain_log_probs, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from treeward.errors import ConfigError, ModelError
from treeward.model.export import export_policy
from treeward.model.loading import load_policy
from treeward.model.policy_model import PolicyModel

GROUPS = [[[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [5, 6, 7, 12, 13, 14, 15]]]
STARTS = [[3, 3, 3]]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def difference(policy: PolicyModel, hf: Any) -> float:
    with torch.no_grad():
        ours = policy.log_probs(GROUPS, STARTS).values_SL
        rows = [plain_log_probs(hf, ids, start)[0] for ids, start in zip(GROUPS[0], STARTS[0], strict=True)]
    return max(float((values[: len(row)] - row).abs().max()) for values, row in zip(ours, rows, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_a_loaded_policy_is_the_saved_model(family: str, save: Callable[..., Path]) -> None:
    hf = causal_model(family)
    loaded = load_policy(save(hf))
    assert loaded.model.layout == "tree" and not loaded.model.hf.training
    assert len(loaded.tokenizer) == 600 and loaded.tokenizer.padding_side == "right"
    assert difference(loaded.model, hf) < 1e-5
    for (name, one), other in zip(hf.named_parameters(), loaded.model.hf.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_policy_trains_the_token_that_pads(save: Callable[..., Path]) -> None:
    """Most policies pad with their end of turn; PyTorch gives an embedding's `padding_idx` no gradient."""
    policy = load_policy(save(causal_model("llama", pad_token_id=7))).model
    policy.log_probs(GROUPS, STARTS).values_SL.sum().backward()
    assert policy.hf.get_input_embeddings().weight.grad[7].abs().max() > 0


def test_fields_of_the_configuration_are_overridden(save: Callable[..., Path]) -> None:
    hf = causal_model("llama")
    folder = save(hf)
    theta = {"rope_theta": 100.0, "rope_type": "default"}
    loaded = load_policy(folder, config_overrides={"max_position_embeddings": 77, "rope_parameters": theta})
    assert loaded.model.max_positions == 77
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
    with pytest.raises(ModelError, match=r"a classifier(?s:.*)policy.model_name(?s:.*)LlamaForSequenceClassification"):
        load_policy(save(tiny_model("llama")))
    folder = tmp_path / "no-tokenizer"
    causal_model("llama").save_pretrained(folder)
    with pytest.raises(ModelError, match=r"tokenizer cannot be loaded(?s:.*)policy.tokenizer.name"):
        load_policy(folder)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "mixtral", "gpt_oss"])
def test_an_export_is_loaded_by_plain_transformers(family: str, tmp_path: Path, tiny_tokenizer: Any) -> None:
    policy = PolicyModel(causal_model(family))
    own = tiny_tokenizer.chat_template
    export_policy(policy, tiny_tokenizer, tmp_path / "out", chat_template=TEMPLATE)
    assert tiny_tokenizer.chat_template == own != TEMPLATE
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert plain.dtype == torch.float32 and difference(policy, plain) < 1e-5
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"
