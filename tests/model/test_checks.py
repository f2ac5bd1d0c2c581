"""Each start-up check passes for a sound model and fails on its own seeded fault."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from families import causal_model, tiny_model
from torch import nn

from treeward.errors import ConfigError, ModelError
from treeward.model.checks import check_before_training, check_policy, check_tokenizer_survives
from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel

SEQUENCES = [[5, 6, 7, 0], [5, 6, 8, 9, 0]]  # 0 is the end of text, 1 the padding token


def test_a_sound_model_passes_and_says_where_it_reads(tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "treeward"):
        check_before_training(RewardModel(tiny_model("llama")), SEQUENCES, tiny_tokenizer)
    assert "'<|endoftext|>' in 2 of 2" in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_two_labels(tiny_tokenizer: Any) -> None:
    model = RewardModel(tiny_model("llama", num_labels=2))
    with pytest.raises(ModelError, match="2 labels, not one"):
        check_before_training(model, SEQUENCES, tiny_tokenizer)


def test_a_head_in_bfloat16(tiny_tokenizer: Any) -> None:
    model = RewardModel(tiny_model("llama").to(torch.bfloat16))
    with pytest.raises(ModelError, match="not float32"):
        check_before_training(model, SEQUENCES, tiny_tokenizer)


@pytest.mark.parametrize("family", ["llama", "roberta"])
def test_a_frozen_head(family: str, tiny_tokenizer: Any) -> None:
    model = RewardModel(tiny_model(family), layout="encoder" if family == "roberta" else "tree")
    for parameter in model.head.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ModelError, match="frozen"):
        check_before_training(model, SEQUENCES, tiny_tokenizer)


def test_a_head_that_would_not_be_saved(tiny_tokenizer: Any) -> None:
    class Unsaved(nn.Linear):
        def _save_to_state_dict(self, *_: Any) -> None:
            return

    hf = tiny_model("llama")
    hf.score = Unsaved(32, 1, bias=False)
    with pytest.raises(ModelError, match="not be saved"):
        check_before_training(RewardModel(hf), SEQUENCES, tiny_tokenizer)


def test_tokens_that_the_model_does_not_know(tiny_tokenizer: Any) -> None:
    model = RewardModel(tiny_model("llama"))
    check_before_training(model, [[599, 0]], tiny_tokenizer)
    with pytest.raises(ModelError, match=r"does not know(?s:.*)token 600(?s:.*)below 600"):
        check_before_training(model, [[600, 0]], tiny_tokenizer)


def test_conversations_that_end_with_padding(tiny_tokenizer: Any) -> None:
    with pytest.raises(ModelError, match=r"end with the padding token(?s:.*)ends 1 of 2"):
        check_before_training(RewardModel(tiny_model("llama")), [[5, 0], [5, 1]], tiny_tokenizer)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_tokenizer_that_survives_beside_the_model(family: str, tiny_tokenizer: Any) -> None:
    check_tokenizer_survives(tiny_model(family), tiny_tokenizer)


def test_a_tokenizer_that_transformers_would_load_as_another(tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot be kept(?s:.*)model_type qwen2(?s:.*)Qwen2Tokenizer"):
        check_tokenizer_survives(tiny_model("qwen2"), tiny_tokenizer)


PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [5], [13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["tree", "rows"])
def test_a_sound_policy_passes(dtype: torch.dtype, layout: Any) -> None:
    policy = PolicyModel(causal_model("qwen3").to(dtype), layout=layout, compute_dtype=torch.bfloat16, chunk_tokens=7)
    check_policy(policy, PROMPTS)
    assert policy.compute_dtype == torch.bfloat16


def test_a_policy_whose_logits_are_not_those_of_transformers() -> None:
    """Its own forward scales them by what `PolicyModel` knows nothing of."""

    def scaled(output: Any, scale: float) -> Any:
        output.logits = output.logits * scale
        return output

    for scale in (1.01, float("nan")):
        policy = PolicyModel(causal_model("qwen3"))
        policy.hf.register_forward_hook(lambda _m, _a, output, s=scale: scaled(output, s))
        with pytest.raises(ModelError, match="the log-probability that plain transformers gives") as raised:
            check_policy(policy, PROMPTS)
        assert "got:   -" in str(raised.value) and "tokens after a prompt of 1\n" in str(raised.value)


def test_a_policy_whose_tree_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from treeward.model import policy_model

    places = policy_model._tree_places
    monkeypatch.setattr(policy_model, "_tree_places", lambda *args: [place[::-1].copy() for place in places(*args)])
    with pytest.raises(ModelError, match="the log-probability that plain transformers gives"):
        check_policy(PolicyModel(causal_model("qwen3")), PROMPTS)
