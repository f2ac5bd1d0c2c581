"""Sampled completions: their ends, their log-probabilities, their distribution, and that a seed
determines them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import VOCABULARY
from sampled import (
    ENDS,
    IDS,
    PROMPTS,
    assert_sampled_from,
    completions_of,
    policy_of,
    prompt_lengths,
    sequences_of,
)
from templates import PROMPTING_CHATML, TEMPLATES, byte_bpe, family_renderer
from transformers import TopKLogitsWarper, TopPLogitsWarper

from treeward.config.grpo_policy import GenerationConfig
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, ModelError
from treeward.model.policy_model import PolicyModel
from treeward.parallel.mesh import Mesh
from treeward.rl import sampling
from treeward.rl.generation import (
    CompletionReader,
    LocalGenerator,
    SampledCompletion,
    end_ids_of,
    template_end_ids,
)
from treeward.rl.setup import make_generator
from treeward.tree import decoding


def make(
    policy: PolicyModel, tokenizer: Any, *, end_ids: Any = ENDS, **settings: Any
) -> LocalGenerator:
    return LocalGenerator(
        policy, tokenizer, GenerationConfig(**{"max_new_tokens": 12, **settings}), end_ids=end_ids
    )


def test_completions_end_where_the_turn_ends(policy: PolicyModel, tiny_tokenizer: Any) -> None:
    groups = make(policy, tiny_tokenizer).generate(PROMPTS, IDS, num_completions=8, seed=1)
    policy.hf(torch.tensor(IDS[:1]))  # as it was before
    assert_sampled_from(policy, groups)
    completions = completions_of(groups)
    assert len(completions) == 24 and len({completion.truncated for completion in completions}) == 2
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(ENDS)
        assert (
            len(completion.token_ids) == 12
            if completion.truncated
            else len(completion.token_ids) <= 12
        )


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "stablelm", "nemotron", "qwen2_window", "gemma2", "gpt2", "gpt_oss"),
        *("mamba", "lfm2", "qwen3_5", "nemotron_h", "gptj"),
    ],
)
def test_the_trainer_finds_the_log_probabilities_that_the_generator_says(
    family: str, tiny_tokenizer: Any
) -> None:
    """Also with windows shorter than the sequences, with states instead of caches, and with prompts
    that are padded."""
    policy = policy_of(family)
    for temperature, top_p in ((1.0, 0.9), (0.6, 1.0)):
        generator = make(
            policy, tiny_tokenizer, temperature=temperature, top_p=top_p, top_k=50, batch_size=7
        )
        groups = generator.generate(PROMPTS, IDS, num_completions=4, seed=2)
        with torch.no_grad():
            found = policy.log_probs(
                list(map(sequences_of, groups)), prompt_lengths(groups), temperature=temperature
            )
        for s, completion in enumerate(completions_of(groups)):
            values = found.values_SL[s][found.mask_SL[s]]
            torch.testing.assert_close(
                values, torch.tensor(completion.log_probs), rtol=0, atol=1e-4
            )


@pytest.mark.parametrize("family", ["llama", "mamba", "mamba2", "qwen3_5"])
def test_a_policy_in_bfloat16_is_sampled_and_learnt_from(family: str, tiny_tokenizer: Any) -> None:
    """The last norm of a Mamba gives float32 to a head in bfloat16, which was an error of
    PyTorch's."""
    policy = policy_of(family)
    policy.cast(torch.bfloat16)
    groups = make(policy, tiny_tokenizer).generate(PROMPTS, IDS, num_completions=2, seed=2)
    found = policy.log_probs(list(map(sequences_of, groups)), prompt_lengths(groups))
    found.values_SL.sum().backward()
    assert policy.head.weight.grad is not None and policy.head.weight.grad.abs().max() > 0
    for s, completion in enumerate(completions_of(groups)):
        values = found.values_SL[s][found.mask_SL[s]].detach()
        torch.testing.assert_close(values, torch.tensor(completion.log_probs), rtol=0, atol=0.15)


def test_a_seed_determines_the_completions_and_nothing_else_does(
    policy: PolicyModel, tiny_tokenizer: Any
) -> None:
    """Neither the random state, nor the mode, nor what else is in the batch, nor its size."""
    prompts = PROMPTS + PROMPTS[:2]
    ids = [*IDS, [20] * 90, [21, 22]]
    generator = make(policy, tiny_tokenizer, batch_size=7)
    first = generator.generate(prompts, ids, num_completions=3, seed=3)
    tokens = [completion.token_ids for completion in completions_of(first)]
    assert len(set(tokens[:9])) == 9
    torch.rand(5)
    state = torch.random.get_rng_state()
    policy.training = True
    assert generator.generate(prompts, ids, num_completions=3, seed=3) == first
    assert torch.equal(torch.random.get_rng_state(), state) and policy.training
    policy.eval()
    assert generator.generate(prompts, ids, num_completions=3, seed=4) != first
    for size, count in ((1, 5), (4, 5), (1000, 5), (1000, 1)):
        other = make(policy, tiny_tokenizer, batch_size=size)
        some = other.generate(prompts[:count], ids[:count], num_completions=3, seed=3)
        assert [completion.token_ids for completion in completions_of(some)] == tokens[: 3 * count]
    same = generator.generate([PROMPTS[0]] * 2, [IDS[0]] * 2, num_completions=1, seed=3)
    assert same[0].completions[0].token_ids == tokens[0] != same[1].completions[0].token_ids


@pytest.mark.parametrize("family", ["qwen3", "qwen2_window", "gemma2", "gpt2", "gpt_oss"])
def test_shared_prompts_give_the_completions_of_plain_rows(
    family: str, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as a GPU does it: shapes that stay, several tokens before the host looks; and with
    caches that grow."""
    policy = policy_of(family)
    settings: dict[str, Any] = {"end_ids": range(3, 25), "max_new_tokens": 40, "batch_size": 9}

    def sampled() -> list[SampledCompletion]:
        groups = make(policy, tiny_tokenizer, **settings).generate(
            PROMPTS, IDS, num_completions=5, seed=9
        )
        return completions_of(groups)

    monkeypatch.setattr(decoding, "_FIRST_CAPACITY", 4)
    shared = sampled()
    monkeypatch.setitem(sampling.DECODE_SETTINGS, "cpu", sampling.DECODE_SETTINGS["cuda"])
    as_on_a_gpu = sampled()
    policy.layout = "rows"
    rows = sampled()
    assert len({len(completion.token_ids) for completion in rows}) > 2
    for found in (shared, as_on_a_gpu):
        assert [one.token_ids for one in found] == [one.token_ids for one in rows]
        for one, want in zip(found, rows, strict=True):
            assert one.log_probs == pytest.approx(want.log_probs, abs=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "mamba", "lfm2"])
def test_a_token_whose_capture_fails_is_taken_once(
    family: str, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture computes the token before the graph does; recurrent layers would take it twice."""
    policy = policy_of(family)
    want = make(policy, tiny_tokenizer).generate(PROMPTS, IDS, num_completions=3, seed=9)
    make_decoder = sampling._TreeDecoder.__init__

    def captures(decoder: Any, *arguments: Any) -> None:
        make_decoder(decoder, *arguments)
        decoder._captures = True

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("this model cannot be captured")

    monkeypatch.setattr(sampling._TreeDecoder, "__init__", captures)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    found = make(policy, tiny_tokenizer).generate(PROMPTS, IDS, num_completions=3, seed=9)
    assert found == want


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "mamba", "lfm2"])
def test_cuda_graphs_give_the_completions_of_the_cpu(
    family: str, tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy = policy_of(family)
    here = make(policy, tiny_tokenizer, max_new_tokens=40).generate(
        PROMPTS, IDS, num_completions=5, seed=9
    )
    policy.cuda()
    there = make(policy, tiny_tokenizer, max_new_tokens=40).generate(
        PROMPTS, IDS, num_completions=5, seed=9
    )
    assert not caplog.records  # no model is refused
    assert [c.token_ids for c in completions_of(there)] == [
        c.token_ids for c in completions_of(here)
    ]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, None, 1.0), (0.5, None, 0.8), (2.0, 9, 0.9)]
)
def test_tokens_come_as_often_as_they_should(
    policy: PolicyModel, tiny_tokenizer: Any, temperature: float, top_k: Any, top_p: Any
) -> None:
    count = 3000
    settings = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "max_new_tokens": 1,
        "batch_size": count,
    }
    groups = make(policy, tiny_tokenizer, **settings).generate(
        PROMPTS[:1], IDS[:1], num_completions=count, seed=0
    )
    with torch.no_grad(), policy.plain_attention():
        scores = policy.hf(torch.tensor(IDS[:1])).logits[:, -1] / temperature
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    want = scores[0].softmax(-1)
    tokens = torch.tensor([completion.token_ids[0] for completion in groups[0].completions])
    got = torch.bincount(tokens, minlength=VOCABULARY) / count
    assert not got[want == 0].any()
    # of so many draws the expected distance is the sum of sqrt(p (1 - p) * 2 / (pi n)) / 2
    expected = float((want * (1 - want) * 2 / (torch.pi * count)).sqrt().sum() / 2)
    assert float((got - want).abs().sum() / 2) < 1.3 * expected + 0.002


def test_a_stop_string_ends_the_completion_that_it_completes(
    policy: PolicyModel, tiny_tokenizer: Any
) -> None:
    options: dict[str, Any] = {"end_ids": [0], "max_new_tokens": 40}
    free = completions_of(
        make(policy, tiny_tokenizer, **options).generate(PROMPTS, IDS, num_completions=6, seed=6)
    )
    stops = (free[0].text[9:13], free[7].text[20:21], "no such text")
    generator = make(policy, tiny_tokenizer, stop_strings=stops, **options)
    stopped = completions_of(generator.generate(PROMPTS, IDS, num_completions=6, seed=6))
    lengths = []
    for whole, completion in zip(free, stopped, strict=True):
        length = 0
        has_stop = False
        while not has_stop and length < len(whole.token_ids):
            length += 1
            text = tiny_tokenizer.decode(whole.token_ids[:length])
            has_stop = any(stop in text for stop in stops)
        lengths.append(length)
        assert completion.token_ids == whole.token_ids[:length]
        assert completion.truncated == (not has_stop and whole.truncated)
        assert not any(stop in completion.text for stop in stops)
        assert whole.text.startswith(completion.text)
    assert len(set(lengths)) > 3


def test_a_stop_string_that_is_a_special_token_ends_the_completion(tiny_tokenizer: Any) -> None:
    end = tiny_tokenizer.eos_token_id
    tokens = [*tiny_tokenizer("So be it.", add_special_tokens=False)["input_ids"], end]
    config = GenerationConfig(stop_strings=(tiny_tokenizer.eos_token,))
    reader = CompletionReader(tiny_tokenizer, [], config)
    assert [reader.has_ended(tokens[:length]) for length in (1, len(tokens))] == [False, True]
    completion = reader.completion(tokens, None)
    assert (completion.text, completion.truncated) == ("So be it.", False)


def test_the_text_of_a_completion_begins_in_the_generation_prompt(
    policy: PolicyModel, tiny_tokenizer: Any
) -> None:
    generator = make(policy, tiny_tokenizer, stop_strings=("k>",))
    opened = [replace(prompt, opening="<think>\n") for prompt in PROMPTS]
    groups = generator.generate(opened, IDS, num_completions=2, seed=1)
    plain = generator.generate(PROMPTS, IDS, num_completions=2, seed=1)
    for completion, sampled in zip(completions_of(groups), completions_of(plain), strict=True):
        # nothing else has changed
        assert completion == replace(sampled, text="<think>\n" + sampled.text)
    assert groups[0].conversations[0][-1]["content"].startswith("<think>\n")


def test_a_completion_has_the_room_that_its_prompt_leaves(
    policy: PolicyModel, tiny_tokenizer: Any
) -> None:
    limit = policy.hf.config.max_position_embeddings
    ids = [[5], [5] * (limit - 1), [5] * (limit - 4)]
    groups = make(policy, tiny_tokenizer, end_ids=[0]).generate(
        PROMPTS, ids, num_completions=2, seed=0
    )
    assert [[len(a.token_ids) for a in group.completions] for group in groups] == [
        [12, 12],
        [1, 1],
        [4, 4],
    ]
    assert all(completion.truncated for completion in completions_of(groups))
    with pytest.raises(ModelError, match="row 1"):
        make(policy, tiny_tokenizer).generate(
            PROMPTS[:2], [[5], [5] * limit], num_completions=1, seed=0
        )
    with pytest.raises(ModelError, match="row 0.*no tokens"):
        make(policy, tiny_tokenizer).generate(PROMPTS[:1], [[]], num_completions=1, seed=0)


def test_logits_that_are_not_finite_are_an_error(tiny_tokenizer: Any) -> None:
    policy = policy_of("qwen3")
    with torch.no_grad():
        policy.hf.get_output_embeddings().weight[7] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        make(policy, tiny_tokenizer).generate(PROMPTS, IDS, num_completions=2, seed=0)


@pytest.mark.parametrize("url", ["", "policy.generation.url=http://127.0.0.1:9/v1"])
def test_the_template_ends_a_completion(
    policy: PolicyModel, tiny_grpo: Callable[..., Any], tmp_path: Path, url: str
) -> None:
    tokenizer = byte_bpe(eos="<|endoftext|>")  # as those of Qwen's base models name it
    end, turn = (
        tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>")
    )
    remote = ["policy.generation.backend=vllm", "policy.generation.model=m", url] if url else []
    renderer = Renderer(tokenizer, chat_template=PROMPTING_CHATML)
    section = tiny_grpo(*remote).policy
    generator = make_generator(section, str(tmp_path), policy, tokenizer, renderer, Mesh())
    assert generator.reader.end_ids == {0, end, turn}  # type: ignore[attr-defined]
    assert generator.reader.completion([5, turn], None).truncated is False  # type: ignore[attr-defined]
    generator.close()
    assert end_ids_of(policy, tokenizer, GenerationConfig(), template_ids=[turn, end]) == [
        0,
        end,
        turn,
    ]


def test_without_an_end_token_the_settings_must_name_one(
    policy: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_bpe(eos=None)
    monkeypatch.setattr(policy.hf.generation_config, "eos_token_id", None)
    with pytest.raises(ConfigError, match=r"policy\.generation\.stop_token_ids"):
        end_ids_of(policy, tokenizer, GenerationConfig())
    for setting in ({"stop_token_ids": (7,)}, {"stop_strings": ("END",)}):
        assert end_ids_of(policy, tokenizer, GenerationConfig(**setting)) == []


@pytest.mark.skipif(not TEMPLATES, reason="trl, which carries the templates, is not installed")
@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("cohere2", "<|END_OF_TURN_TOKEN|>"), ("deepseekv3", "<｜end▁of▁sentence｜>"),
        ("gemma", "<end_of_turn>"),
        ("glm4moe", None), ("gptoss", "<|return|>"), ("llama3", "<|eot_id|>"), ("phi3", "<|end|>"),
        ("qwen2_5", "<|im_end|>"), ("qwen3", "<|im_end|>"),
    ],
)  # fmt: skip
def test_what_real_templates_end_a_completion_with(name: str, end: str | None) -> None:
    renderer = family_renderer(name)
    assert renderer.tokenizer.convert_ids_to_tokens(template_end_ids(renderer)) == (
        [] if end is None else [end]
    )
