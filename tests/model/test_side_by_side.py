"""Parts of a batch that two halves of the CPU's threads compute at the same time: the values of one pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from families import model_of, tiny_model

from treeward.errors import ModelError
from treeward.model import reward_model
from treeward.model.reward_model import RewardModel
from treeward.model.side_by_side import can_divide, divided, side_by_side
from treeward.tree.prefix import PrefixCache

PROMPTS = [[7 + n, *range(20, 55), *range(20, 55)] for n in range(6)]
SEQUENCES = [[*prompt, *range(60, 60 + k)] for prompt in PROMPTS for k in (3, 9)]
LENGTHS = [len(prompt) for prompt in PROMPTS for _ in (3, 9)]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of parts of each batch."""
    counts: list[int] = []

    def counted(compute: object, parts: list[object]) -> list[object]:
        counts.append(len(parts))
        return side_by_side(compute, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(reward_model, "side_by_side", counted)
    return counts


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba", "qwen3_5", "bert"])
def test_values_are_those_of_one_pass(family: str, passes: list[int]) -> None:
    layout = "rows" if family == "bert" else "tree"
    model = RewardModel(model_of(family), layout=layout)
    got = model.score_tokens(SEQUENCES)
    assert passes == [2]
    torch.set_num_threads(1)
    want = model.score_tokens(SEQUENCES)
    assert passes == [2, 1]
    assert float((got - want).abs().max()) < 1e-5


@pytest.mark.usefixtures("two_threads")
def test_what_they_keep_and_count_is_that_of_one_pass(passes: list[int]) -> None:
    model = RewardModel(model_of("llama"), layout="tree")
    cache = PrefixCache(2**30)
    for _ in range(2):
        model.score_tokens(SEQUENCES, cache=cache, prompt_lengths=LENGTHS)
    assert passes == [2, 2]
    assert cache.num_reused_tokens == sum(LENGTHS)
    whole = sum(len(prompt) for prompt in PROMPTS) + 6 * (3 + 9 - 3)
    beyond_the_cache = 6 * (3 + 9 - 3)
    assert model.num_computed_tokens == whole + beyond_the_cache
    assert model.num_row_tokens == 2 * sum(map(len, SEQUENCES))


@pytest.mark.usefixtures("two_threads")
def test_a_broken_conversation_breaks_no_other() -> None:
    model = RewardModel(model_of("llama"), layout="tree")
    with torch.no_grad():
        model.hf.get_input_embeddings().weight[5] = torch.nan  # type: ignore[index]
    broken = [[*PROMPTS[0], 5], *SEQUENCES[2:]]
    values = model.score_tokens(broken)
    assert values[0].isnan().all()
    assert values[1:].isfinite().all()


@pytest.mark.usefixtures("two_threads")
def test_an_error_is_raised_and_the_threads_are_given_back() -> None:
    def fail(part: int) -> int:
        if part == 1:
            raise ModelError("told to fail")
        return part

    with pytest.raises(ModelError, match="told to fail"):
        side_by_side(fail, [0, 1, 2])
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_each_part_has_half_of_the_threads() -> None:
    assert side_by_side(lambda _: torch.get_num_threads(), [0, 1, 2]) == [1, 1, 1]
    assert side_by_side(lambda _: torch.get_num_threads(), [0]) == [2]


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([300, 300], 2),
        ([300] * 16, 6),
        # One prompt's completions stay together, and so does what cannot be balanced.
        ([2000], 1),
        ([900, 100], 1),
        ([], 1),
    ],
)
def test_groups_are_divided_where_it_pays(sizes: list[int], parts: int) -> None:
    found = divided(sizes)
    assert len(found) == parts
    assert sorted(i for part in found for i in part) == list(range(len(sizes)))


def test_one_thread_computes_one_pass() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert not can_divide(RewardModel(model_of("llama")))
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_model_that_a_pass_changes_computes_one_at_a_time() -> None:
    """Frequencies of longrope are those of the longest row of the pass."""
    assert can_divide(RewardModel(model_of("llama")))
    factors = [1.0] * 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": [2.0 * factor for factor in factors],
        "original_max_position_embeddings": 64,
    }
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for parameters in (rope, dynamic):
        model = tiny_model("llama", rope_parameters=parameters)
        assert not can_divide(RewardModel(model)), parameters["rope_type"]


@pytest.mark.usefixtures("two_threads")
def test_code_outside_of_transformers_computes_one_pass_at_a_time() -> None:
    hf = model_of("llama")
    hf.__class__ = type("Remote", (type(hf),), {"__module__": "families"})
    assert not can_divide(RewardModel(hf))
