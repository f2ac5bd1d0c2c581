"""Models with recurrent layers on trees: exactly plain rows, whatever a state has to pass.

Their decays are drawn slow (`families.randomise`): else a state would not live to be inherited, and
a wrong one would not show.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import itertools
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import (
    DENSE,
    HYBRIDS,
    VOCABULARY,
    InFloat64,
    causal_model,
    config_of,
    forest,
    gradient_error,
    gradients,
    model_of,
    randomise,
    rows_alone,
    score_error,
)
from safetensors.torch import load_file
from sampled import IDS, policy_of
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from treeward.model.checks import choose_layout, why_not_tree
from treeward.model.export import export_model
from treeward.model.loading import load_classifier, load_policy
from treeward.model.reward_model import RewardModel
from treeward.tree import mixers
from treeward.tree.batch import TreeBatch, TreeLayout
from treeward.tree.current_row import over
from treeward.tree.prefix import PrefixCache
from treeward.tree.recurrence import Recurrence

KINDS = ["qwen3_5", "nemotron_h", "mamba", "lfm2"]
"""A family of each kind: gated delta rule, Mamba 2, Mamba 1, convolutions alone."""
FAMILIES: list[Any] = list(KINDS)
"""One of each kind of layer; the others are slow."""
for name in HYBRIDS:
    if name not in KINDS:
        FAMILIES.append(pytest.param(name, marks=pytest.mark.slow))
SCORES = 2e-5
GRADIENTS = 1e-4
"""Plain rows of a gated delta net are themselves up to 5e-4 off float64 in float32."""


def drawn(generator: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in generator.integers(3, VOCABULARY, length)]


def deep_forest() -> list[list[list[int]]]:
    """Segments above one and two chunks of a kernel, four levels, several children, and short
    ones."""
    generator = np.random.default_rng(0)
    prompt = drawn(generator, 135)
    other = drawn(generator, 30)
    middle = prompt + drawn(generator, 70)
    inner = middle + drawn(generator, 1)
    return [
        [prompt + drawn(generator, n) for n in (1, 66, 3)] + [middle, inner + [5], inner + [6, 7]],
        [other + drawn(generator, n) for n in (2, 9)],
        [drawn(generator, 4)],
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_and_gradients_are_those_of_plain_rows(family: str) -> None:
    hf = model_of(family)
    assert choose_layout(hf, "tree") == "tree"
    model = RewardModel(hf, layout="tree").train()
    for groups in (forest(), deep_forest()):
        sequences = list(chain.from_iterable(groups))
        got = model(model.make_batch(groups))
        got_gradients = gradients(hf, got)
        with model.plain_attention():
            want = rows_alone(hf, sequences)
        want_gradients = gradients(hf, want)
        assert float(want.detach().std()) > 0.1
        assert score_error(got, want) <= SCORES
        assert gradient_error(got_gradients, want_gradients) <= GRADIENTS


Values = tuple[Tensor, dict[str, Tensor]]
"""Scores, and the gradients of a weighted sum of them."""


def on_trees(hf: Any, groups: list[list[list[int]]]) -> Values:
    model = RewardModel(hf, layout="tree").train()
    if hf.dtype == torch.float64:
        model.tree_attention = DENSE  # that of trees has float32 log-sum-exps
    scores = model(model.make_batch(groups))
    return scores.detach().double(), gradients(hf, scores)


def as_rows(hf: Any, groups: list[list[list[int]]]) -> Values:
    model = RewardModel(hf, layout="tree").train()
    with model.plain_attention():
        scores = rows_alone(hf, list(chain.from_iterable(groups)))
    return scores.detach().double(), gradients(hf, scores)


def errors(got: Values, want: Values) -> list[float]:
    """Of the scores and of each gradient, relative to its norm; a tiny gradient is mostly
    rounding."""
    least = max(float(gradient.norm()) for gradient in want[1].values()) / 1000
    found = [float((got[0] - want[0]).norm() / want[0].norm())]
    for name, gradient in want[1].items():
        difference = got[1][name].double() - gradient
        found.append(float(difference.norm() / gradient.norm().clamp_min(least)))
    return found


def rms(values: list[float]) -> float:
    return (sum(value**2 for value in values) / len(values)) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_trees_are_no_further_from_float64_than_twice_what_rows_are(family: str) -> None:
    """And in float64 they are rows. One model's trees may be off by 0.6 to 2.7 times what its rows
    are, because both round at other places; so the mean is over several.
    """
    of_trees: list[float] = []
    of_rows: list[float] = []
    for seed in range(3):
        hf = model_of(family, seed=seed)
        hf.config._experts_implementation = "eager"  # grouped products have no float64
        for groups in (forest(seed), deep_forest()):
            with InFloat64():
                wide = copy.deepcopy(hf).double()
                exact = as_rows(wide, groups)
                assert max(errors(on_trees(wide, groups), exact)) < 1e-10
            of_rows += errors(as_rows(hf, groups), exact)
            of_trees += errors(on_trees(hf, groups), exact)
    assert rms(of_trees) <= max(1e-5, 2 * rms(of_rows)), (rms(of_trees), rms(of_rows))


@torch.no_grad()
@pytest.mark.parametrize("family", KINDS)
def test_trees_in_bfloat16_are_no_further_from_float32_than_rows_are(family: str) -> None:
    """States, and what is written to them, are float32 in both."""
    groups = deep_forest()
    sequences = list(chain.from_iterable(groups))
    batch = TreeBatch.from_groups(groups)

    def rows(model: RewardModel) -> Tensor:
        states = []
        with model.plain_attention():
            for sequence in sequences:
                ids = torch.tensor([sequence])
                states.append(model.backbone(input_ids=ids, use_cache=False)[0][0, -1])
        return torch.stack(states).float()

    of_trees: list[float] = []
    of_rows: list[float] = []
    for seed in range(4):
        model = RewardModel(model_of(family, seed=seed), layout="tree")
        model.cast(torch.bfloat16)
        # The same rounded weights, computed in float32.
        with model.computing_in(torch.float32):
            exact = rows(model)
        hidden_ND = model.tree_hidden(batch, batch.reads.places_N)
        tree = hidden_ND.index_select(0, batch.reads.index_R).float()
        of_trees.append(float((tree - exact).norm() / exact.norm()))
        of_rows.append(float((rows(model) - exact).norm() / exact.norm()))
    assert rms(of_trees) <= 1.1 * rms(of_rows), (rms(of_trees), rms(of_rows))


@pytest.mark.parametrize("family", KINDS)
def test_a_row_that_is_padded_has_the_same_values(family: str) -> None:
    """As compiled layers on a GPU need it."""
    model = RewardModel(model_of(family), layout="tree").train()
    batch = TreeBatch.from_groups(deep_forest())
    places = batch.reads.places_N
    plain = model.tree_hidden(batch, places)
    plain_gradients = gradients(model.hf, plain.sum(dim=1))
    padded = model.tree_hidden(batch.padded(), places)
    assert torch.allclose(padded, plain, atol=1e-5)
    assert gradient_error(gradients(model.hf, padded.sum(dim=1)), plain_gradients) <= GRADIENTS


@pytest.mark.parametrize("family", KINDS)
def test_activations_that_are_computed_again_are_the_same(family: str) -> None:
    """The recomputation runs in the backward pass, where the row of trees is not set any more."""
    model = RewardModel(model_of(family), layout="tree").train()
    groups = deep_forest()
    want = gradients(model.hf, model(model.make_batch(groups)))
    model.recompute_activations()
    scores = model(model.make_batch(groups))
    # A graph that is retained is computed again by each backward pass.
    scores.sum().backward(retain_graph=True)
    got = gradients(model.hf, scores)
    assert gradient_error(got, want) == 0.0


@pytest.mark.parametrize("family", KINDS)
def test_scores_with_a_cache_of_prompts_are_those_without(family: str) -> None:
    model = RewardModel(model_of(family), layout="tree").eval()
    cache = PrefixCache(2**30, whole=True)
    generator = np.random.default_rng(0)
    prompts = [drawn(generator, n) for n in (70, 35)]
    prompts.append(prompts[0][:64] + drawn(generator, 20))
    # What is kept of a turn continues what is known.
    turns = [prompt + drawn(generator, 33) for prompt in prompts]
    reused = []
    for starts, completions in ((prompts, (1, 7)), (prompts, (3,)), (turns, (1, 2)), (turns, (4,))):
        sequences = []
        lengths = []
        for start, length in product(starts, completions):
            sequences.append(start + drawn(generator, length))
            lengths.append(len(start))
        plain = model.score_tokens(sequences)
        cached = model.score_tokens(sequences, cache=cache, prompt_lengths=lengths)
        assert torch.allclose(cached, plain, atol=1e-5)
        reused.append(cache.num_reused_tokens)
    known = sum(map(len, prompts))
    # Of a third turn's conversation all is known but the completion.
    assert reused == [0, known, 3 * known, 3 * known + sum(map(len, turns))]


@pytest.mark.parametrize("family", KINDS)
def test_completions_that_part_at_once_continue_one_cached_prompt(family: str) -> None:
    """They are several roots below one prefix, beside those of another and of none."""
    model = RewardModel(model_of(family), layout="tree").eval()
    cache = PrefixCache(2**30, whole=True)
    generator = np.random.default_rng(0)
    prompts = [drawn(generator, n) for n in (40, 70)]
    new = drawn(generator, 35)
    model.score_tokens([[*prompt, 5] for prompt in prompts], cache=cache, prompt_lengths=[40, 70])
    ends = [[5, 6], [7], [8, *drawn(generator, 66)]]
    sequences = []
    lengths = []
    for start, end in product((*prompts, new), ends):
        sequences.append(start + end)
        lengths.append(len(start))
    cached = model.score_tokens(sequences, cache=cache, prompt_lengths=lengths)
    assert cache.num_reused_tokens == 3 * (40 + 70)
    assert torch.allclose(cached, model.score_tokens(sequences), atol=1e-5)


@pytest.mark.parametrize("family", KINDS)
def test_a_cached_prompt_serves_only_those_that_begin_with_all_of_it(family: str) -> None:
    """A state is that of one place. Conversations that part earlier are computed whole."""
    model = RewardModel(model_of(family), layout="tree").eval()
    cache = PrefixCache(2**30, whole=True)
    generator = np.random.default_rng(0)
    prompt = drawn(generator, 64)
    model.score_tokens([prompt + [5]], cache=cache, prompt_lengths=[64])
    parted = [prompt[:50] + drawn(generator, 20)]
    cached = model.score_tokens(parted, cache=cache, prompt_lengths=[64])
    assert cache.num_reused_tokens == 0
    assert torch.allclose(cached, model.score_tokens(parted), atol=1e-5)


@pytest.fixture
def lengths_of_fla(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A stand-in of fla's kernels, which need a GPU: the functions of transformers, which take
    `cu_seqlens` now. Collects how many sequences each call had."""
    calls: list[int] = []

    def taking_lengths(original: Any) -> Any:
        def call(*inputs: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Any:
            bounds = options.pop("cu_seqlens", None)
            if bounds is None:  # rows
                return original(*inputs, g=g, beta=beta, **options)
            assert torch.equal(bounds, options.pop("cu_seqlens_cpu"))
            assert all(values.shape[0] == 1 for values in (*inputs, g, beta))
            starts = options.pop("initial_state")
            is_wanted = options["output_final_state"]
            outs, ends = [], []
            for number, (first, last) in enumerate(itertools.pairwise(bounds.tolist())):
                of_sequence = [values[:, first:last] for values in (*inputs, g, beta)]
                start = None if starts is None else starts[number, None]
                *inputs_, g_, beta_ = of_sequence
                out, end = original(*inputs_, g=g_, beta=beta_, initial_state=start, **options)
                outs.append(out)
                ends.append(end)
            calls.append(len(outs))
            return torch.cat(outs, dim=1), torch.cat(ends) if is_wanted else None

        return call

    monkeypatch.setattr(mixers, "is_flash_linear_attention_available", lambda: True)
    for family, name in (
        ("kimi_linear", "chunk_kimi_delta_attention"),
        ("qwen3_5", "torch_chunk_gated_delta_rule"),
    ):
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        plain = inspect.unwrap(getattr(module, name))
        monkeypatch.setattr(module, name, taking_lengths(plain))
    return calls


def test_segments_of_one_depth_are_one_call_of_a_kernel_that_takes_lengths(
    lengths_of_fla: list[int],
) -> None:
    hf = model_of("kimi_linear")
    model = RewardModel(hf, layout="tree").train()
    groups = deep_forest()
    got = model(model.make_batch(groups))
    got_gradients = gradients(hf, got)
    # Three roots, their children, one more level, and two leaves.
    assert lengths_of_fla == [3, 6, 1, 2]
    with model.plain_attention():
        want = rows_alone(hf, [sequence for group in groups for sequence in group])
    assert score_error(got, want) <= SCORES
    assert gradient_error(got_gradients, gradients(hf, want)) <= GRADIENTS


def test_a_kernel_that_takes_lengths_starts_from_cached_prompts(lengths_of_fla: list[int]) -> None:
    model = RewardModel(model_of("qwen3_5"), layout="tree").eval()
    generator = np.random.default_rng(0)
    prompts = [drawn(generator, n) for n in (70, 35)]
    sequences = [prompt + drawn(generator, n) for prompt in prompts for n in (1, 40)]
    want = model.score_tokens(sequences)
    cache = PrefixCache(2**30, whole=True)
    lengths = [70, 70, 35, 35]
    for _ in range(2):
        got = model.score_tokens(sequences, cache=cache, prompt_lengths=lengths)
        assert torch.allclose(got, want, atol=1e-5)
    assert cache.num_reused_tokens == 2 * (70 + 35)
    assert 4 in lengths_of_fla


# --- The probe ------------------------------------------------------------------------------------


def from_grandparents(recurrence: Recurrence) -> Recurrence:
    """Each segment goes on from the segment above the one above it."""
    pieces = []
    for piece in recurrence.pieces:
        parent = piece.parent
        above = None if parent is None else recurrence.pieces[parent].parent
        pieces.append(dataclasses.replace(piece, parent=parent if above is None else above))
    return Recurrence(pieces, (), device=recurrence.device)


def without_paths(recurrence: Recurrence) -> Recurrence:
    """Each segment begins anew."""
    pieces = [dataclasses.replace(piece, parent=None) for piece in recurrence.pieces]
    return Recurrence(pieces, (), device=recurrence.device)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("wrong", [from_grandparents, without_paths])
def test_a_model_whose_states_go_the_wrong_way_runs_as_rows(
    family: str, wrong: Callable[[Recurrence], Recurrence], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = Recurrence.of

    def of(layout: TreeLayout) -> Recurrence:
        return wrong(planned(layout))

    hf = model_of(family)
    assert why_not_tree(hf) is None
    monkeypatch.setattr(Recurrence, "of", of)
    reason = why_not_tree(hf)
    assert reason is not None and "differ" in reason


@pytest.mark.parametrize("family", ["kimi_linear", "nemotron_h"])
def test_a_state_that_padding_has_changed_is_seen(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk of a segment is padded with tokens that must not write."""
    in_rounds = mixers._in_rounds

    def unmasked(plan: Any, kernel: Any, inputs: Any, neutral: Any, *more: Any) -> Tensor:
        return in_rounds(plan, kernel, inputs, (), *more)

    hf = model_of(family)
    monkeypatch.setattr(mixers, "_in_rounds", unmasked)
    reason = why_not_tree(hf)
    assert reason is not None and "differ" in reason


def test_rows_that_are_further_off_than_trees_refuse_no_tree() -> None:
    """This Mamba's rows in bfloat16 are 0.09 off float32, its trees 0.03."""
    assert why_not_tree(model_of("mamba").to(torch.bfloat16)) is None


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "mamba2_chunk_scan"])
def test_a_function_that_transformers_has_renamed_means_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {key: value for key, value in mixers._MIXERS.items() if key != name}
    monkeypatch.setattr(mixers, "_MIXERS", kinds)
    hf = model_of("nemotron_h")
    module = __import__(type(hf).__module__, fromlist=["*"])
    following = getattr(module, name)
    monkeypatch.setattr(module, name, getattr(following, "__wrapped__", following))
    assert choose_layout(hf, "tree") == "rows"


def test_without_a_row_of_trees_the_model_is_as_it_was() -> None:
    """Also in another thread's forward pass, and after one on trees."""
    hf = model_of("qwen3_5")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        before = hf(input_ids=ids, use_cache=False).logits
        model = RewardModel(copy.deepcopy(hf), layout="tree").eval()
        model(model.make_batch(deep_forest()))
        with over(TreeBatch.from_groups([[[5, 6, 7], [5, 8]]]).layout):
            pass
        with model.plain_attention():
            after = model.hf(input_ids=ids, use_cache=False).logits
    assert torch.allclose(after, before, atol=1e-6)


# --- Policies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", KINDS)
def test_log_probabilities_of_a_policy_are_those_of_plain_rows(family: str) -> None:
    policy = policy_of(family).eval()
    prompt = IDS[2] * 8
    rows = [prompt + [31, 32, 33], prompt + [41], prompt + [31, 52]]
    with torch.no_grad():
        found = policy.log_probs([rows], [[len(prompt)] * 3])
        for row, values, mask in zip(rows, found.values_SL, found.mask_SL, strict=True):
            with policy.plain_attention():
                logits = policy.hf(input_ids=torch.tensor([row]), use_cache=False).logits[0]
            log_probs = logits.float().log_softmax(-1)[:-1]
            want = log_probs.gather(1, torch.tensor(row)[1:, None])[len(prompt) - 1 :, 0]
            assert torch.allclose(values[mask], want, atol=1e-4)


# --- From a causal model to an export -------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_causal_model_becomes_a_reward_model_that_plain_transformers_scores(
    family: str, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """Loaded, trained for a step, exported; then transformers' base model and the exported head."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    causal = causal_model(family)
    causal.save_pretrained(tmp_path / "causal")
    tokenizer.save_pretrained(tmp_path / "causal")
    model = load_classifier(tmp_path / "causal", head_seed=1).model
    assert model.layout == "tree"
    base = AutoModel.from_pretrained(tmp_path / "causal")
    weights = dict(model.backbone.named_parameters())
    for name, weight in base.named_parameters():
        assert torch.equal(weights[name][: len(weight)], weight), name
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(model.make_batch(deep_forest())).square().sum().backward()
    optimizer.step()
    export_model(model.eval(), tokenizer, tmp_path / "out", chat_template=None)
    sequences = list(chain.from_iterable(deep_forest()))
    want = model.score_tokens(sequences)[:, 0]

    base = AutoModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    head = load_file(tmp_path / "out" / "model.safetensors")["score.weight"]
    with torch.no_grad():
        states = []
        for sequence in sequences:
            ids = torch.tensor([sequence])
            states.append(base(input_ids=ids, use_cache=False).last_hidden_state[0, -1])
        got = torch.stack(states) @ head[0]
    assert float(want.std()) > 0.1
    assert score_error(got, want) <= SCORES


def test_a_model_that_also_sees_is_loaded_for_text(tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Qwen3.5 as it is on the hub: the language model is a part of it, and of its configuration."""
    text = config_of("qwen3_5").to_dict()
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    whole = randomise(AutoModelForImageTextToText.from_config(config))
    whole.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    stored = whole.state_dict()["model.language_model.layers.0.linear_attn.A_log"]
    for loaded in (load_classifier(tmp_path, head_seed=1), load_policy(tmp_path)):
        model: Any = loaded.model
        assert model.layout == "tree"
        weights = [
            w for name, w in model.hf.named_parameters() if "layers.0.linear_attn.A_log" in name
        ]
        assert len(weights) == 1 and torch.equal(weights[0], stored)
