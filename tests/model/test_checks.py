"""Each start-up check passes for a sound model and fails on its own seeded fault; who runs as
trees, who as rows."""

from __future__ import annotations

import logging
import re
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from families import (
    ENCODERS,
    ROW_FAMILIES,
    causal_model,
    config_of,
    forest,
    model_of,
    plain_scores,
    rows_alone,
    score_error,
    tiny_model,
)
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama

from treeward.errors import ModelError
from treeward.model.checks import check_before_training, check_policy, choose_layout, why_not_tree
from treeward.model.loading import classifier_class
from treeward.model.policy_model import PolicyModel
from treeward.model.reward_model import RewardModel
from treeward.tree.batch import RowBatch
from treeward.tree.position_mask import Part, PositionMask

SEQUENCES = [[5, 6, 7, 0], [5, 6, 8, 9, 0]]  # 0 is the end of text, 1 the padding token


def give_two_labels(model: RewardModel) -> None:
    model.hf.score = nn.Linear(32, 2, bias=False)


def leave_out_of_saves(model: RewardModel) -> None:
    def remove_weight(_head: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        del state[f"{prefix}weight"]

    model.head.register_state_dict_post_hook(remove_weight)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (give_two_labels, "2 labels, not one"),
        (lambda model: model.to(torch.bfloat16), "not float32"),
        (lambda model: model.head.requires_grad_(False), "frozen"),
        (leave_out_of_saves, "not be saved"),
    ],
)
def test_a_head_that_cannot_be_trained(break_it: Any, message: str, tiny_tokenizer: Any) -> None:
    model = RewardModel(tiny_model("llama"))
    break_it(model)
    with pytest.raises(ModelError, match=message):
        check_before_training(model, SEQUENCES, tiny_tokenizer)


def test_tokens_that_the_model_does_not_know(tiny_tokenizer: Any) -> None:
    model = RewardModel(tiny_model("llama"))
    check_before_training(model, [[599, 0]], tiny_tokenizer)
    with pytest.raises(ModelError, match=r"does not know(?s:.*)token 600(?s:.*)below 600"):
        check_before_training(model, [[600, 0]], tiny_tokenizer)

    with pytest.raises(ModelError, match=r"end with the padding token(?s:.*)ends 1 of 2"):
        check_before_training(RewardModel(tiny_model("llama")), [[5, 0], [5, 1]], tiny_tokenizer)


PROMPTS = [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [5], [13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["tree", "rows"])
def test_a_sound_policy_passes(dtype: torch.dtype, layout: Any) -> None:
    check_policy(
        PolicyModel(causal_model("qwen3").to(dtype), layout=layout, chunk_tokens=7), PROMPTS
    )


def noisy(policy: PolicyModel, *, on_trees: bool) -> PolicyModel:
    """Roundings of bfloat16 add up in a deep model: here as noise of each forward pass that is not
    in float32."""
    generator = torch.Generator().manual_seed(0)

    def shake(_module: Any, _args: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        if hidden.dtype != torch.float32:
            scale = (
                1.0
                if on_trees and policy.hf.config._attn_implementation.startswith("treeward")
                else 0.15
            )
            output.last_hidden_state = hidden + scale * torch.randn(
                hidden.shape, generator=generator
            ).to(hidden)
        return output

    policy.hf.base_model.register_forward_hook(shake)
    return policy


def test_a_policy_may_be_off_by_what_its_precision_costs_plain_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """SmolLM2 in bfloat16 is off by 0.09 a token on trees and in rows alike; off by more on trees
    is a fault."""
    caplog.set_level("INFO")
    before = causal_model("qwen3").to(torch.bfloat16).state_dict()
    policy = noisy(PolicyModel(causal_model("qwen3").to(torch.bfloat16)), on_trees=False)
    check_policy(policy, PROMPTS)
    off, allowed = map(float, re.findall(r"(\S+) off a token.* (\S+) is allowed", caplog.text)[0])
    assert 0.05 < off < 0.8 * allowed
    assert all(torch.equal(weight, before[name]) for name, weight in policy.hf.state_dict().items())
    with pytest.raises(ModelError, match="the log-probability that plain transformers gives"):
        check_policy(noisy(policy, on_trees=True), PROMPTS)
    exact = PolicyModel(causal_model("qwen3").to(torch.bfloat16).float())
    check_policy(
        noisy(PolicyModel(causal_model("qwen3").to(torch.bfloat16)), on_trees=False),
        PROMPTS,
        exact=exact,
    )


def test_a_policy_whose_logits_are_not_those_of_transformers() -> None:
    """Its own forward scales them by what `PolicyModel` knows nothing of."""

    def scaled(output: Any, scale: float) -> Any:
        output.logits = output.logits * scale
        return output

    for scale in (1.01, float("nan")):
        policy = PolicyModel(causal_model("qwen3"))
        policy.hf.register_forward_hook(lambda _m, _a, output, s=scale: scaled(output, s))
        with pytest.raises(
            ModelError, match="the log-probability that plain transformers gives"
        ) as raised:
            check_policy(policy, PROMPTS)
        assert "off a token, the mean of 45" in str(raised.value)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bloom", "attention interface"),
        ("minimax", "layers of type linear_attention"),
    ],
)
def test_who_cannot_share_a_prefix_runs_as_rows_and_says_so_once(
    family: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    hf = model_of(family)
    caplog.clear()
    with caplog.at_level(logging.INFO, "treeward"):
        assert choose_layout(hf, "tree") == "rows"
    (record,) = [record for record in caplog.records if record.name.startswith("treeward")]
    assert record.levelno == logging.WARNING and "padded rows" in record.getMessage()
    assert re.search(reason, record.getMessage())


@pytest.mark.parametrize("family", [*ROW_FAMILIES, *ENCODERS, "gemma2"])
def test_rows_are_plain_rows_alone_and_in_a_crowd(family: str) -> None:
    """Scores and gradients through padded rows of very different lengths equal one row at a
    time."""
    hf = model_of(family)
    layout = "encoder" if family in ENCODERS else "rows"
    model = RewardModel(hf, layout=layout).eval()
    sequences = list(chain.from_iterable(forest()))
    want = rows_alone(hf, sequences) if family in ROW_FAMILIES else plain_scores(hf, sequences)
    batch = model.make_batch(forest())
    assert isinstance(batch, RowBatch)
    crowd = model(batch)
    alone = torch.cat([model(model.make_batch([[sequence]])) for sequence in sequences])
    assert crowd.dtype == torch.float32
    assert score_error(crowd, want) <= 1e-5 and score_error(alone, want) <= 1e-5
    assert float(want.detach().std()) > 0.1  # they differ at all


def test_a_wrong_tree_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe notices a branch that sees its sibling."""
    hf = tiny_model("llama")
    assert why_not_tree(hf) is None

    def causal_alone(mask: PositionMask) -> list[Part]:
        """Each token sees all earlier ones of its tree, as in a plain row."""
        parts = []
        for tree in mask.layout.trees:
            parts.append(Part(tree.start, tree.end, tree.start, tree.end, True, None, first=True))
        return parts

    monkeypatch.setattr(PositionMask, "parts", property(causal_alone))
    reason = why_not_tree(hf)
    assert reason is not None and "differ" in reason


def test_a_mask_with_holes_beyond_the_probe_is_not_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def dilated(_b: Any, _h: Any, query: Any, key: Any) -> Any:
        return (query - key < 64) | (key % 2 == 0)

    masked = partial(create_causal_mask, and_mask_function=dilated)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", masked)
    reason = why_not_tree(tiny_model("llama"))
    assert reason is not None and "holes" in reason


def test_a_score_that_is_not_read_from_the_last_token_is_refused() -> None:
    hf = tiny_model("llama")
    original = hf.forward

    def first_token(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        # ten times what is accepted in float32, as the scores are about 1
        out.logits = out.logits + 1e-2
        return out

    hf.forward = first_token
    with pytest.raises(ModelError, match="does not get the score that plain transformers gives"):
        choose_layout(hf, "tree")


@pytest.mark.parametrize(
    ("family", "changes", "limit"),
    [
        ("llama", {}, 1024),
        ("gpt2", {}, 1024),
        # its positions begin after the padding token's
        ("roberta", {"max_position_embeddings": 514}, 512),
        ("bert", {"max_position_embeddings": 512}, 512),
        ("phi3", {"rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 128}, "original_max_position_embeddings": 128},
            128),
        ("gemma3", {"rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0,
                               "original_max_position_embeddings": 64}}}, 64),
    ],
)  # fmt: skip
def test_longest_conversation(family: str, changes: dict[str, Any], limit: int) -> None:
    layout = "encoder" if family in ENCODERS else "tree"
    model = RewardModel(tiny_model(family, **changes), layout=layout)  # type: ignore[arg-type]
    assert model.max_positions == limit
    with torch.no_grad():
        assert model(model.make_batch([[[3] * limit]])).isfinite().all()


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gptj", "bert", "distilbert"])
def test_nothing_is_random_in_training_mode(family: str) -> None:
    """Whatever rates of dropout, layer drop and jitter a configuration has."""
    config = config_of(family)
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and any(word in name for word in ("drop", "jitter")):
            setattr(config, name, 0.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf = classifier_class(config, False)._from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    layout = "encoder" if hasattr(hf, "classifier") else "rows"
    model = RewardModel(hf, layout=layout).train()
    batch = model.make_batch([[[5, 6, 7, 8], [5, 6, 9]]])
    with torch.no_grad():
        assert torch.equal(model(batch), model(batch))


def test_layers_with_heads_of_several_sizes_share_prefixes() -> None:
    """Gemma 4, whose configuration raises where it is asked for one size."""
    # Plain rows of some random weights are up to 7e-5 off float64, near the tolerance of 1e-4.
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
    }
    small = {
        "num_key_value_heads": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 300,
    }
    hf = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gemma4_text", vocab_size=300, **sizes, **small)
    )
    assert PolicyModel(hf).head_sizes == {256, 512} and why_not_tree(hf.eval()) is None
