"""Trees equal plain Hugging Face rows, one by one: scores and gradients, for every family and way
of computing.

Tolerances, float32: scores 1e-5 of the largest score (which is near 1), each gradient tensor 1e-5
of its own largest element. Measured on a CPU: 7e-7 and 5e-6 at most; `test_a_seeded_bug_is_seen`
shows that the mildest mistakes lie far above. bfloat16 rounds at 4e-3, several times in a row:
there the tree may be off by twice what plain rows are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from families import (
    DECODERS,
    DENSE,
    WINDOW,
    assert_tree_equals_rows,
    dense_mask,
    forest,
    gradient_error,
    gradients,
    plain_scores,
    score_error,
    tiny_model,
)
from torch.utils._python_dispatch import TorchDispatchMode

from treeward.data.rendering import Renderer
from treeward.errors import ModelError
from treeward.model.reward_model import RewardModel
from treeward.tree import attention, position_mask
from treeward.tree.batch import TreeBatch, TreeLayout
from treeward.tree.position_mask import PositionMask

PATHS = ("slices", "small_masks", "dense")


@contextlib.contextmanager
def computed_by(path: str, model: RewardModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Slices alone; one small mask per tree; or the dense reference."""
    monkeypatch.setattr(position_mask, "CALL_COST", 0 if path == "slices" else 10**12)
    model.tree_attention = DENSE if path == "dense" else attention.TREE
    yield
    model.tree_attention = attention.TREE


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", DECODERS)
def test_trees_equal_rows(family: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = RewardModel(tiny_model(family))
    with computed_by(path, model, monkeypatch):
        assert_tree_equals_rows(model, forest())


@pytest.mark.parametrize("family", DECODERS)
def test_real_chats(family: str, real_chats: list[Any], tiny_tokenizer: Any) -> None:
    renderer = Renderer(tiny_tokenizer)
    groups = []
    for preference in real_chats:
        chats = [[*preference.context, *each.messages] for each in preference.completions]
        groups.append([renderer.encode(chat) for chat in chats])
    assert_tree_equals_rows(RewardModel(tiny_model(family)), groups)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_padding_that_is_the_end_of_text(family: str) -> None:
    """Every sequence ends with EOS, which pads too; plain transformers would read the token before
    it."""
    hf = tiny_model(family, pad_token_id=0, eos_token_id=0)
    groups = []
    for group in forest():
        groups.append([[*sequence, 0] for sequence in group])
    assert_tree_equals_rows(RewardModel(hf), groups)
    row = torch.tensor([groups[0][0]])
    # why we read by length
    assert score_error(hf(input_ids=row).logits[0], plain_scores(hf, groups[0][:1])) > 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "gpt_neox", "gpt2"])
def test_bfloat16(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = list(chain.from_iterable(forest()))
    exact_model = tiny_model(family)
    exact = plain_scores(exact_model, sequences)
    exact_gradients = gradients(exact_model, exact)
    hf = tiny_model(family)
    hf.to(torch.bfloat16)
    rows = plain_scores(hf, sequences).float()
    row_gradients = gradients(hf, rows)
    hf.score.float()
    model = RewardModel(hf)
    for path in PATHS:
        with computed_by(path, model, monkeypatch):
            trees = model(model.make_batch(forest()))
            assert trees.dtype == torch.float32
            found = gradient_error(gradients(hf, trees), exact_gradients)
        assert score_error(trees, exact) <= 2 * score_error(rows, exact) + 5e-3
        assert found <= 2 * gradient_error(row_gradients, exact_gradients) + 1e-2


def _packed_positions(batch: TreeBatch) -> TreeBatch:
    return replace(
        batch, layout=replace(batch.layout, positions_T=torch.arange(len(batch.tokens_T)))
    )


def _one_sibling_visible(batch: TreeBatch) -> TreeBatch:
    """The first branch of the first tree is seen by the one beside it."""
    first, *others = batch.layout.trees
    segments = list(first.segments)
    segments[1] = replace(segments[1], subtree_end=segments[2].end)
    ends = batch.layout.subtree_end_T.clone()
    ends[segments[1].start : segments[1].end] = segments[1].subtree_end
    trees = (replace(first, segments=tuple(segments)), *others)
    return replace(batch, layout=replace(batch.layout, trees=trees, subtree_end_T=ends))


def _read_one_early(batch: TreeBatch) -> TreeBatch:
    places_N = batch.reads.places_N.clone()
    places_N[0] -= 1
    return replace(batch, reads=replace(batch.reads, places_N=places_N))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bug", [_packed_positions, _one_sibling_visible, _read_one_early])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_seeded_bug_in_the_batch_is_seen(
    family: str, bug: Callable[[TreeBatch], TreeBatch], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = RewardModel(tiny_model(family))
    monkeypatch.setattr(model, "make_batch", lambda groups: bug(TreeBatch.from_groups(groups)))
    with (
        computed_by(path, model, monkeypatch),
        pytest.raises(AssertionError, match=r"scores: off by \d\.\d+e[+-]0[0-3]"),
    ):
        assert_tree_equals_rows(model, forest())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", ["mistral", "gemma3", "phi3", "gpt_oss"])
def test_a_window_off_by_one_is_seen(
    family: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = PositionMask.allowed

    def wider(self: PositionMask, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return right(self, queries, keys) | (queries[:, None] - keys[None, :] == WINDOW)

    monkeypatch.setattr(PositionMask, "allowed", wider)
    model = RewardModel(tiny_model(family))
    with computed_by(path, model, monkeypatch), pytest.raises(AssertionError, match="scores"):
        assert_tree_equals_rows(model, forest())


@pytest.mark.parametrize("path", ["slices", "dense"])
@pytest.mark.parametrize(
    ("family", "place"), [("gemma2", 5), ("gpt_oss", 6)], ids=["soft-cap", "sinks"]
)
def test_an_ignored_soft_cap_or_sink_is_seen(
    family: str, place: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_out = attention.written_out

    def without(*arguments: Any) -> Any:
        return written_out(*arguments[:place], None, *arguments[place + 1 :])

    monkeypatch.setattr(attention, "written_out", without)
    model = RewardModel(tiny_model(family))
    with computed_by(path, model, monkeypatch), pytest.raises(AssertionError, match="scores"):
        assert_tree_equals_rows(model, forest())


def test_a_bug_in_the_backward_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(attention.SlicedAttention):
        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            ctx.parts = ctx.parts[:-1]
            return attention_backward(ctx, *grads)

    attention_backward = attention.SlicedAttention.backward
    monkeypatch.setattr(attention, "SlicedAttention", Forgetful)
    model = RewardModel(tiny_model("llama"))
    with (
        computed_by("slices", model, monkeypatch),
        pytest.raises(AssertionError, match="gradients"),
    ):
        assert_tree_equals_rows(model, forest())


def layout_of(groups: list[list[list[int]]]) -> TreeLayout:
    return TreeBatch.from_groups(groups).layout


def causal(_b: Any, _h: Any, query: Any, key: Any) -> Any:
    return key <= query


def window(_b: Any, _h: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (query - key < WINDOW)


def chunks(_b: Any, _h: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (query // 5 == key // 5)


@pytest.mark.parametrize("function", [causal, window, chunks])
def test_the_mask_is_that_of_the_paths(function: Callable[..., Any]) -> None:
    """A token sees exactly those of its own path that the mask function allows: worked out token by
    token."""
    layout = layout_of(forest())
    want = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    for tree in layout.trees:
        for segment in tree.segments:
            path: list[int] = []
            at: Any = segment
            while at is not None:
                path = [*range(at.start, at.end), *path]
                at = None if at.parent is None else tree.segments[at.parent]
            for position in range(segment.depth, segment.depth + len(segment)):
                for key, place in enumerate(path):
                    want[path[position], place] = bool(
                        function(0, 0, torch.tensor(position), torch.tensor(key))
                    )
    assert torch.equal(dense_mask(PositionMask(function, layout)), want)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
@pytest.mark.parametrize("function", [causal, window, chunks])
@pytest.mark.parametrize("call_cost", [0, 10**12])
def test_slices_equal_masked_attention(
    heads: tuple[int, int],
    function: Callable[..., Any],
    call_cost: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward and backward of the fast path, of one masked call per tree (what a GPU runs) and of
    the dense one."""
    monkeypatch.setattr(position_mask, "CALL_COST", call_cost)
    layout = layout_of(forest())
    positions = PositionMask(function, layout)
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(1, n, layout.num_tokens, 8, generator=generator)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    inputs = [x.requires_grad_() for x in (query, key, value)]

    outs = [
        attention.SlicedAttention.apply(*inputs, positions.parts, 0.3),
        attention.masked_attention(*inputs, positions, 0.3),
        attention.written_out(*inputs, dense_mask(positions), 0.3, None, None),
    ]
    fast, per_tree, dense = [(out, *torch.autograd.grad(out, inputs, grad)) for out in outs]
    for tensors in (fast, per_tree):
        for got, want in zip(tensors, dense, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("function", [causal, window, chunks])
def test_slices_in_float64(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts and their merging are computed in float64 throughout, forward and backward."""
    monkeypatch.setattr(position_mask, "CALL_COST", 0)
    layout = layout_of([[[5, 6, 7, 8], [5, 6, 9, 10, 11], [5, 6, 9, 12]], [[3, 4], [3, 5]]])
    positions = PositionMask(function, layout)
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for num_heads in (2, 1, 1):
        shape = (1, num_heads, layout.num_tokens, 4)
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        inputs.append(values.requires_grad_())

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attention.sliced_attention(query, key, value, positions.parts, 0.5)

    dense = attention.masked_attention(*inputs, positions, 0.5)
    torch.testing.assert_close(attend(*inputs), dense, rtol=1e-13, atol=1e-14)
    assert torch.autograd.gradcheck(attend, inputs)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(
                    self.elements, tensor.untyped_storage().nbytes() // tensor.element_size()
                )
        return out


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
def test_memory_follows_the_window(family: str) -> None:
    """Sliding layers with plain scores, soft-capped scores and sinks: nothing has the square of the
    row's length."""
    layers = {} if family == "mistral" else {"layer_types": ["sliding_attention"] * 2}
    hf = tiny_model(family, sliding_window=32, max_position_embeddings=4096, **layers)
    tokens = torch.randint(3, 600, (2300,), generator=torch.Generator().manual_seed(0)).tolist()
    model = RewardModel(hf)
    with Largest() as largest:
        batch = model.make_batch(
            [[tokens[:2000] + tokens[2000:2100], tokens[:2000] + tokens[2100:]]]
        )
        model(batch).sum().backward()
    assert largest.elements < 2300 * 2300 / 4


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "gemma3"])
@pytest.mark.parametrize("block", [1, 2, 5, 16])
def test_windows_in_blocks_of_any_size(
    family: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(position_mask, "BLOCK", block)
    model = RewardModel(tiny_model(family))
    with computed_by("slices", model, monkeypatch):
        assert_tree_equals_rows(model, forest())


def test_what_cannot_be_served_exactly_is_refused() -> None:
    layout = layout_of([[[1, 2, 3], [1, 2, 4]]])
    with pytest.raises(ModelError, match="later tokens"):
        _ = PositionMask(lambda b, h, q, k: (q >= 0) & (k >= 0), layout).parts
    # even positions see nothing, not even themselves
    with pytest.raises(ModelError, match="holes"):
        _ = PositionMask(lambda b, h, q, k: (k <= q) & (q % 2 == 1), layout).parts
    with pytest.raises(ModelError, match="holes"):  # nothing sees itself
        _ = PositionMask(lambda b, h, q, k: k < q, layout).parts
    module = torch.nn.Linear(1, 1)
    x = torch.zeros(1, 2, layout.num_tokens, 4)
    model = RewardModel(tiny_model("llama"))
    with model.attention(attention.TREE), pytest.raises(ModelError, match="without a tree"):
        model.hf(torch.tensor([[1, 2, 3]]))
    with pytest.raises(ModelError, match="attention mask by itself"):
        attention.layer_attention_of(attention.tree_attention)(
            module, x, x, x, torch.zeros(1, 1, 4, 4)
        )
    for name in ("position_bias", "indices"):
        with pytest.raises(ModelError, match=name):
            of_layers = attention.layer_attention_of(attention.tree_attention)
            of_layers(module, x, x, x, PositionMask(causal, layout), **{name: x})
