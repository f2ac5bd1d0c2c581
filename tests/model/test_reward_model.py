"""What a reward model refuses to read, because the number would be no score, and what must tie."""

from __future__ import annotations

import pytest
import torch

from tests.families import VOCABULARY, tiny_model
from treeward.errors import ModelError
from treeward.model.reward_model import RewardModel


@pytest.fixture(scope="module")
def model() -> RewardModel:
    return RewardModel(tiny_model("llama")).eval()


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([3, -1], "token -1"),
        ([3, VOCABULARY], f"token {VOCABULARY}"),
        ([3] * 1025, "1025 tokens"),
        ([], "0 tokens"),
    ],
)
def test_sequences_that_no_model_reads(
    sequence: list[int], message: str, model: RewardModel
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        model.score_tokens([[3, 4], sequence])
    assert "sequence 1" in str(caught.value)


@pytest.mark.parametrize("length", [0, 4])
def test_rows_that_have_no_such_length(length: int, model: RewardModel) -> None:
    """`score(data)` of NeMo RL; a row of 3 tokens."""
    data = {"input_ids": torch.full((2, 3), 5), "input_lengths": torch.tensor([3, length])}
    with pytest.raises(ModelError, match="a row cannot have this length"):
        model.score(data)


def test_a_broken_conversation_leaves_others_of_its_prompt_as_they_are(model: RewardModel) -> None:
    """One completion holds a token whose embedding is not a number; in a shared tree it would
    spread."""
    backbone = tiny_model("llama")
    with torch.no_grad():
        backbone.get_input_embeddings().weight[99] = float("nan")
    poisoned = RewardModel(backbone).eval()
    prompt = list(range(10, 50))
    values = poisoned.score_tokens([[*prompt, 5], [*prompt, 99], [*prompt, 6, 7]])
    plain = model.score_tokens([[*prompt, 5], [*prompt, 6, 7]])
    assert values[1].isnan().all()
    assert torch.allclose(values[[0, 2]], plain, atol=1e-5)


def test_equal_rows_are_computed_once_so_that_they_tie() -> None:
    """Matrix products may round equal rows of a batch differently, by where they lie in it."""
    rows = RewardModel(tiny_model("llama"), layout="rows").eval()
    long, short = list(range(10, 30)), [5, 6, 7]
    want = [rows.score_tokens([ids])[0] for ids in (long, short)]
    rows.num_computed_tokens = rows.num_row_tokens = 0
    values = rows.score_tokens([long, short, long, long, short])
    assert rows.num_computed_tokens == 2 * 20  # two padded rows
    assert rows.num_row_tokens == 3 * 20 + 2 * 3
    assert values[0] == values[2] == values[3] and values[1] == values[4]
    assert torch.allclose(values[:2, 0], torch.cat(want), atol=1e-6)
