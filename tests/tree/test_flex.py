"""FlexAttention over trees: what a GPU runs, as far as a CPU shows it.

The kernels of a GPU cannot run here. Everything that is ours can: the rule, the blocks that a
kernel visits, soft-caps, sinks, prefixes and padding. PyTorch computes FlexAttention without a
compiler, forward and backward, once its refusal of gradients on a CPU is taken away; its compiled
CPU kernel visits our blocks, forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from families import (
    DECODERS,
    assert_tree_equals_rows,
    dense_mask,
    forest,
    gradient_error,
    gradients,
    model_of,
    plain_scores,
    score_error,
    tiny_model,
)
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import GraphModule
from torch.nn.attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from treeward.config.policy import LoraConfig
from treeward.model.lora import add_adapters
from treeward.model.reward_model import RewardModel
from treeward.tree import attention, current_row, flex
from treeward.tree.batch import TreeBatch
from treeward.tree.flex import FlexMask
from treeward.tree.position_mask import PositionMask
from treeward.tree.prefix import Prefix


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own arithmetic of FlexAttention, with gradients."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "compiled_kernel", lambda: torch_flex.flex_attention)


def flex_model(family: str, **changes: Any) -> RewardModel:
    model = RewardModel(tiny_model(family, **changes))
    model.tree_attention = attention.FLEX
    return model


@pytest.mark.parametrize("family", DECODERS)
def test_trees_equal_rows(family: str, eager_flex: None) -> None:
    assert_tree_equals_rows(flex_model(family), forest())


def random_forest(seed: int) -> list[list[list[int]]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 9, (count,), generator=generator).tolist()

    groups = []
    for _ in range(draw(1, 5)):
        prompt = tokens(draw(1, 400))
        groups.append(
            [prompt[: draw(1, len(prompt) + 1)] + tokens(draw(1, 200)) for _ in range(draw(1, 6))]
        )
    return groups


def chunks(_b: Any, _h: Any, query: Any, key: Any) -> Any:
    return (key <= query) & (query // 150 == key // 150)


MASKS = {
    "causal": causal_mask_function,
    "window": sliding_window_causal_mask_function(150),
    "chunks": chunks,
}


@pytest.mark.parametrize("function", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))]
)
def test_blocks_and_rule_are_the_mask(seed: int, function: Callable[..., Any]) -> None:
    """What the kernel computes: full blocks without the rule, partial ones with it, and nothing
    elsewhere."""
    first = [] if seed else [[[3] * 255]]  # a tree that ends one token before a block does
    batch = TreeBatch.from_groups(first + random_forest(seed)).padded()
    layout = batch.layout
    length = len(batch.tokens_T)
    block_mask = FlexMask(function, layout).block_mask
    places = torch.arange(length)
    zero = torch.zeros((), dtype=torch.long)
    rule = block_mask.mask_mod(zero, zero, places[:, None], places[None, :])
    computed = torch.zeros(length, length, dtype=torch.bool)
    blocks = {"partial": (block_mask.kv_num_blocks, block_mask.kv_indices)}
    blocks["full"] = (block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    for kind, (counts, indices) in blocks.items():
        for q, count in enumerate(counts[0, 0].tolist()):
            for k in indices[0, 0, q, :count].tolist():
                block = (slice(128 * q, 128 * q + 128), slice(128 * k, 128 * k + 128))
                assert not computed[block].any()  # visited once
                computed[block] = rule[block] if kind == "partial" else True
    want = torch.eye(length, dtype=torch.bool)  # a token that pads the row sees itself
    want[: layout.num_tokens, : layout.num_tokens] = dense_mask(PositionMask(function, layout))
    assert torch.equal(computed, want)
    visited = sum(int(counts.sum()) for counts, _ in blocks.values())
    assert visited <= 1.3 * len(_touched(want)) + 2


def _touched(seen: torch.Tensor) -> set[tuple[int, int]]:
    return {(q // 128, k // 128) for q, k in seen.nonzero().tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_compiled_kernel_visits_the_right_blocks(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of one length: with lengths left open, PyTorch 2.13 writes C++ that does not compile for a
    # window's mask.
    monkeypatch.setattr(
        flex, "compiled_kernel", lambda: torch.compile(torch_flex.flex_attention, dynamic=False)
    )
    model = flex_model(family, head_dim=16)
    groups = []
    for group in random_forest(3):
        groups.append([row for row in group if len(row) < 1000])
    with torch.no_grad():
        got = model(model.make_batch(groups))
    assert score_error(got, plain_scores(model.hf, list(chain.from_iterable(groups)))) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_prefixes_are_keys_behind_the_row(family: str, eager_flex: None) -> None:
    model = flex_model(family)
    prompt = list(range(3, 43))
    completions = [[50, 51, 52], [50, 60], [70]]
    rows = [prompt + completion for completion in completions]
    with torch.no_grad():
        first = TreeBatch.from_groups([[prompt]], keep=[(0, 0, len(prompt))])
        model(first)
        assert first.layout.exchange is not None
        (prefix,) = first.layout.exchange.kept()
        other = [[90, 91, 92, 93], [90, 95]]
        batch = TreeBatch.from_groups([completions, other], prefixes=[prefix, None])
        got = model(batch)
    assert score_error(got, plain_scores(model.hf, [*rows, *other])) <= 1e-5


def test_under_autocast(eager_flex: None) -> None:
    """TRL's default: norms give float32 queries and keys, projections bfloat16 values."""
    model = flex_model("qwen3")
    exact = model(model.make_batch(forest()))
    with torch.autocast("cpu", torch.bfloat16):
        assert score_error(model(model.make_batch(forest())), exact) <= 0.05


def test_padding_changes_nothing(eager_flex: None) -> None:
    model = flex_model("qwen3")
    batch = TreeBatch.from_groups(forest())
    assert (
        len(batch.padded().tokens_T) == 256
        and batch.padded().num_computed_tokens == batch.num_computed_tokens
    )
    torch.testing.assert_close(model(batch.padded()), model(batch), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt2"])
def test_a_decoder_layer_is_one_graph(family: str, eager_flex: None) -> None:
    """Forward and backward without a break; all layers of a kind share it, and rows of every
    length."""
    plain = tiny_model(family)
    model = flex_model(family)
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    model.compile_layers(backend=counter, fullgraph=True)
    compiled = []
    for groups in (random_forest(1), random_forest(2), forest(), random_forest(3)):
        sequences = list(chain.from_iterable(groups))
        scores = model(TreeBatch.from_groups(groups).padded())
        scores.sum().backward()
        assert score_error(scores, plain_scores(plain, sequences)) <= 1e-5
        assert (
            score_error(plain_scores(model.hf, sequences[:1]), plain_scores(plain, sequences[:1]))
            <= 1e-6
        )
        compiled.append(counter.frame_count)
    # For the first length; once more, for all lengths; so for each kind of layer; and so
    # for the plain rows, which run without the model's own `attention`.
    assert compiled[0] <= compiled[1] == compiled[2] == compiled[3] <= 8


GPU_SHAPES = {"head_dim": 64, "hidden_size": 256}


def compiled_and_plain(
    family: str, backend: Any, *, adapted: bool = False, recomputes: bool = False
) -> tuple[RewardModel, RewardModel]:
    """Two models of the same weights over trees: with compiled layers and FlexAttention, and
    without."""
    models = []
    for _ in range(2):
        model = RewardModel(model_of(family), layout="tree").train()
        if adapted:
            add_adapters(model, LoraConfig(enabled=True, dim=4), seed=0)
            generator = torch.Generator().manual_seed(0)
            for name, weight in model.named_parameters():
                if "lora_B" in name:  # which is zero in new adapters
                    weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
        models.append(model)
    model, plain = models
    model.tree_attention = attention.FLEX
    if recomputes:
        model.recompute_activations()
    torch._dynamo.reset()
    model.compile_layers(backend=backend)
    return model, plain


def assert_same_training(model: RewardModel, plain: RewardModel, groups: Any) -> None:
    scores = model(model.make_batch(groups))
    want = plain(plain.make_batch(groups))
    assert score_error(scores, want) <= 1e-5
    assert gradient_error(gradients(model.hf, scores), gradients(plain.hf, want)) <= 2e-5


RECURRENT = ["qwen3_5", "nemotron_h", "mamba", "lfm2", "falcon_h1"]
"""Of each kind of recurrent layer one family, and one with attention beside it."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "adapted"), [*((family, False) for family in RECURRENT), ("qwen3_5", True)]
)
def test_a_recurrent_layer_is_a_few_graphs(family: str, adapted: bool, eager_flex: None) -> None:
    """Between the functions by which it follows trees. Layers of a kind share them, and rows of
    every length."""
    counter = CompileCounterWithBackend("eager")
    model, plain = compiled_and_plain(family, counter, adapted=adapted)
    compiled = []
    for groups in (random_forest(1), random_forest(2), forest(), random_forest(3)):
        assert_same_training(model, plain, groups)
        compiled.append(counter.frame_count)
    # For the first length; once more, for all lengths.
    assert 0 < compiled[0] < compiled[1] == compiled[2] == compiled[3] <= 16
    model.eval()
    with torch.no_grad():
        for groups in (random_forest(1), forest(), random_forest(2)):
            got = model(model.make_batch(groups))
            assert score_error(got, plain(plain.make_batch(groups))) <= 1e-5
            compiled.append(counter.frame_count)
        sequence = forest()[0][0]
        ids = torch.tensor([sequence])
        with model.plain_attention():  # a plain row, of which no layer is compiled
            got = model.hf.base_model(ids, use_cache=False).last_hidden_state
        with plain.plain_attention():
            want = plain.hf.base_model(ids, use_cache=False).last_hidden_state
    assert score_error(got, want) <= 1e-5
    assert compiled[-2] == compiled[-1] == counter.frame_count <= 24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "adapted"),
    [("llama", False), ("qwen3_5", False), ("qwen3_5", True), ("mamba", False)],
)
def test_compiled_layers_compute_activations_again(
    family: str, adapted: bool, eager_flex: None
) -> None:
    """Traced with their gradients, as for a GPU: PyTorch refused the context by which recurrent
    layers find their row in the recomputation."""
    backend = CompileCounterWithBackend("aot_eager")
    model, plain = compiled_and_plain(family, backend, adapted=adapted, recomputes=True)
    for groups in (forest(), random_forest(2), random_forest(1)):
        assert_same_training(model, plain, groups)
    # A recurrent layer is not compiled here: it cannot be traced whole, and nothing less is.
    assert backend.frame_count == {"llama": 2, "qwen3_5": 2, "mamba": 0}[family]


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_a_compiled_layer_that_computes_again_keeps_nothing(family: str, eager_flex: None) -> None:
    """But its inputs: its forward graph gives its output alone."""
    outputs = []

    def keep_graph(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        computed = [node for node in output.args[0] if node.op == "call_function"]
        outputs.append([node.meta["val"].shape for node in computed])
        return graph.forward

    backend = aot_autograd(
        fw_compiler=keep_graph,
        bw_compiler=lambda graph, inputs: graph.forward,
        partition_fn=min_cut_rematerialization_partition,
    )
    model, _ = compiled_and_plain(family, backend, recomputes=True)
    batch = model.make_batch(forest())
    model(batch)
    num_slots = len(batch.padded().tokens_T)
    assert outputs == [[(1, num_slots, model.hf.config.hidden_size)]]


def test_a_traced_checkpoint_has_no_row() -> None:
    layer = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def run(values: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(
            layer, values, use_reentrant=False, context_fn=current_row.checkpointing
        )
        return out

    torch._dynamo.reset()
    values = torch.randn(3, 4)
    found = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        function(values).square().sum().backward()
        found.append([weight.grad.clone() for weight in layer.parameters()])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_on_a_gpu(family: str, compiled: bool, recomputes: bool) -> None:
    """In bfloat16, against float64 on the host: at most a half more than the error of plain rows
    there."""
    groups = []
    for seed in range(3):
        groups += random_forest(seed)
    sequences = list(chain.from_iterable(groups))
    exact = plain_scores(tiny_model(family, **GPU_SHAPES).double(), sequences)
    hf = tiny_model(family, **GPU_SHAPES).to("cuda", torch.bfloat16)
    hf.score.float()
    model = RewardModel(hf).train()
    model.tree_attention = attention.FLEX
    if recomputes:
        model.recompute_activations()
    if compiled:
        model.compile_layers()
    trees = model(model.make_batch(groups))
    trees.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in hf.parameters() if p.grad is not None)
    rows = torch.cat([model(model.make_batch([[row]])) for row in sequences])

    def error_of(scores: torch.Tensor) -> torch.Tensor:
        return (scores.detach().cpu().double() - exact).square().mean().sqrt()

    assert error_of(trees) <= 1.5 * error_of(rows) + 1e-3


@pytest.mark.slow
def test_every_shape_of_a_process_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models in training and scoring are more cases than PyTorch compiles of one function, in
    each thread."""
    counter = CompileCounterWithBackend("eager")
    kernel = torch.compile(torch_flex.flex_attention, backend=counter)
    monkeypatch.setattr(flex, "shared_kernel", lambda: kernel)
    torch._dynamo.reset()
    layout = TreeBatch.from_groups(forest()).padded().layout

    def attend() -> None:
        mask = FlexMask(causal_mask_function, layout)
        for heads in range(1, 12):
            query = torch.zeros(1, heads, len(layout.positions_T), 16)
            flex.attend(query, query, query, mask, scale=1.0)

    for _ in range(2):  # the second has what the first compiled
        thread = threading.Thread(target=attend)
        thread.start()
        thread.join()
    assert counter.frame_count == 11


@pytest.mark.slow
def test_what_is_kept_of_prompts_compiles_nothing_anew(eager_flex: None) -> None:
    """As sampling reads prompts by compiled layers: their number and lengths are other ones in each
    step."""
    plain, model = (make("llama", num_hidden_layers=4) for make in (tiny_model, flex_model))
    counter = CompileCounterWithBackend("eager")
    compiled = []
    torch._dynamo.reset()
    model.compile_layers(backend=counter)
    with torch.no_grad():
        for lengths in ([150, 20], [300, 10, 30], [40, 50], [90, 210, 30, 11], [400, 9]):
            prompts = [[3 + p] * length for p, length in enumerate(lengths)]
            keep = [(p, 0, length) for p, length in enumerate(lengths)]
            batch = TreeBatch.from_groups([[ids] for ids in prompts], keep=keep)
            assert score_error(model(batch), plain_scores(plain, prompts)) <= 1e-5
            assert batch.layout.exchange is not None
            assert [len(kept) for kept in batch.layout.exchange.kept()] == lengths
            compiled.append(counter.frame_count)
    assert compiled[2] == compiled[3] == compiled[4], compiled


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "mamba"])
def test_what_is_kept_of_prompts_compiles_no_recurrent_layer_anew(
    family: str, eager_flex: None
) -> None:
    """States too, and completions that go on from them, as scoring with a cache does it."""
    counter = CompileCounterWithBackend("eager")
    model, plain = compiled_and_plain(family, counter)
    model.eval()

    def read(model: RewardModel, prompts: list[list[int]]) -> list[Prefix]:
        keep = [(p, 0, len(ids)) for p, ids in enumerate(prompts)]
        batch = TreeBatch.from_groups([[ids] for ids in prompts], keep=keep)
        model(batch)
        assert batch.layout.exchange is not None
        return batch.layout.exchange.kept()

    def go_on(model: RewardModel, prefixes: list[Prefix]) -> torch.Tensor:
        completions = [[[50, 51, 52], [50, 60], [70]] for _ in prefixes]
        groups = [*completions, [[90, 91, 92]]]
        scores: torch.Tensor = model(TreeBatch.from_groups(groups, prefixes=[*prefixes, None]))
        return scores

    compiled = []
    with torch.no_grad():
        for lengths in ([150, 20], [300, 10, 30], [40, 50], [90, 210, 30, 11], [400, 9], [64, 7]):
            prompts = [[3 + p] * length for p, length in enumerate(lengths)]
            prefixes = read(plain, prompts)
            for got, want in zip(read(model, prompts), prefixes, strict=True):
                for kept, kept_by_plain in zip(got.tensors, want.tensors, strict=True):
                    assert score_error(kept, kept_by_plain) <= 1e-5
            assert score_error(go_on(model, prefixes), go_on(plain, prefixes)) <= 1e-5
            compiled.append(counter.frame_count)
    assert compiled[3] == compiled[4] == compiled[5], compiled
