"""Who runs as trees, who as rows and who as an encoder; and that rows are plain rows, whatever stands beside them."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from families import (
    DECODERS,
    ENCODERS,
    ROW_FAMILIES,
    config_of,
    forest,
    plain_scores,
    randomise,
    score_error,
    tiny_model,
)
from transformers import AutoModelForSequenceClassification

from treeward.errors import ModelError
from treeward.model.loading import _classifier_class
from treeward.model.reward_model import RewardModel
from treeward.model.support import choose_layout, why_not_tree
from treeward.tree.batch import RowBatch, TreeBatch
from treeward.tree.mask import PositionMask


def model_of(family: str, **changes: Any) -> Any:
    """A tiny model of any family, with a classifier made by treeward where transformers has none."""
    config = config_of(family, **changes)
    if type(config) in AutoModelForSequenceClassification._model_mapping:
        return tiny_model(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = _classifier_class(config, False)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    return randomise(made.eval())


def rows_alone(hf: Any, sequences: list[list[int]]) -> torch.Tensor:
    """The last hidden state of one row at a time through the head: what plain transformers would do."""
    base, head = hf.base_model, hf.score
    states = [base(input_ids=torch.tensor([s]), use_cache=False).last_hidden_state[:, -1] for s in sequences]
    return head(torch.cat(states))[:, 0]


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_run_as_trees_without_a_word(family: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "treeward"):
        hf = tiny_model(family)
        assert choose_layout(hf, "tree") == "tree" and choose_layout(hf, "rows") == "rows"
    assert not [record for record in caplog.records if record.name.startswith("treeward")]
    assert isinstance(RewardModel(hf).make_batch(forest()), TreeBatch)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mamba", "layers of type linear_attention|unexpected keyword"),
        ("gptj", "attention interface"),
        ("bloom", "attention interface"),
        ("qwen3_next", "layers of type linear_attention"),
        ("lfm2", "layers of type conv"),
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


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(family: str) -> None:
    hf = tiny_model(family)
    assert choose_layout(hf, "tree") == choose_layout(hf, "rows") == "encoder"


@pytest.mark.parametrize("family", [*ROW_FAMILIES, *ENCODERS, "gemma2"])
def test_rows_are_plain_rows_alone_and_in_a_crowd(family: str) -> None:
    """Scores and gradients through padded rows of very different lengths equal one row at a time."""
    hf = model_of(family)
    layout = "encoder" if family in ENCODERS else "rows"
    model = RewardModel(hf, layout=layout).eval()
    sequences = [sequence for group in forest() for sequence in group]
    want = rows_alone(hf, sequences) if family in ROW_FAMILIES else plain_scores(hf, sequences)
    batch = model.make_batch(forest())
    assert isinstance(batch, RowBatch)
    crowd = model(batch)
    alone = torch.cat([model(model.make_batch([[sequence]])) for sequence in sequences])
    assert crowd.dtype == torch.float32
    assert score_error(crowd, want) <= 1e-5 and score_error(alone, want) <= 1e-5
    assert float(want.detach().std()) > 0.1  # they differ at all


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "qwen3"])
def test_a_bfloat16_model_under_a_float32_head_is_still_a_tree(family: str) -> None:
    hf = tiny_model(family).to(torch.bfloat16)
    hf.score.float()
    assert choose_layout(hf, "tree") == "tree"


def test_a_wrong_tree_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe notices a branch that sees its sibling."""
    hf = tiny_model("llama")
    assert why_not_tree(hf) is None
    monkeypatch.setattr(PositionMask, "_visible", lambda self, tree: torch.ones(len(tree), len(tree)).tril().bool())
    reason = why_not_tree(hf)
    assert reason is not None and "differ" in reason


def test_a_score_that_is_not_read_from_the_last_token_is_refused() -> None:
    hf = tiny_model("llama")
    original = hf.forward

    def first_token(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        out.logits = out.logits + 1
        return out

    hf.forward = first_token
    with pytest.raises(ModelError, match="does not read its score from the last token"):
        choose_layout(hf, "tree")


@pytest.mark.parametrize(
    ("family", "changes", "limit"),
    [
        ("llama", {}, 1024),
        ("gpt2", {}, 1024),
        ("roberta", {"max_position_embeddings": 514}, 512),  # its positions begin after the padding token's
        ("bert", {"max_position_embeddings": 512}, 512),
        ("phi3", {"rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 128}, "original_max_position_embeddings": 128}, 128),
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


NOISY = ("drop", "jitter")


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gptj", "bert", "distilbert"])
def test_nothing_is_random_in_training_mode(family: str) -> None:
    """Whatever rates of dropout, layer drop and jitter a configuration has."""
    config = config_of(family)
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and any(word in name for word in NOISY):
            setattr(config, name, 0.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hf = _classifier_class(config, False)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    layout = "encoder" if hasattr(hf, "classifier") else "rows"
    model = RewardModel(hf, layout=layout).train()
    batch = model.make_batch([[[5, 6, 7, 8], [5, 6, 9]]])
    with torch.no_grad():
        assert torch.equal(model(batch), model(batch))


def test_a_score_next_to_nothing_is_no_reason_to_refuse_a_model() -> None:
    """The check against transformers is absolute: a fresh head may score a probe 0.0002, with rounding of 1e-8."""
    hf = tiny_model("qwen3")
    with torch.no_grad():
        hf.score.weight.mul_(1e-4)
    assert choose_layout(hf, "tree") == "tree"
