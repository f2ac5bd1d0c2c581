"""Sampled answers: their ends, their log-probabilities, and that a seed determines them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import config_of, randomise
from transformers import AutoModelForCausalLM

from treeward.errors import ModelError
from treeward.model.policy_model import PolicyModel
from treeward.rl.experience import Prompt, prompt_lengths
from treeward.rl.generation import GenerationSettings, LocalGenerator

PROMPTS = [Prompt(({"role": "user", "content": text},), where=f"row {n}") for n, text in enumerate(("a", "bb", "c d"))]
IDS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16]]
ENDS = list(range(3, 120))  # so many that answers end soon


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config_of("qwen3"), attn_implementation="eager", dtype=torch.float32)
    return PolicyModel(randomise(hf.eval()))


def make(policy: PolicyModel, tokenizer: Any, **settings: Any) -> LocalGenerator:
    return LocalGenerator(policy, tokenizer, GenerationSettings(max_new_tokens=12, **settings), end_ids=ENDS)


def test_answers_end_where_the_turn_ends(policy: PolicyModel, tiny_tokenizer: Any) -> None:
    groups = make(policy, tiny_tokenizer).generate(PROMPTS, IDS, num_answers=8, seed=1)
    assert [group.prompt_ids for group in groups] == [tuple(ids) for ids in IDS]
    answers = [answer for group in groups for answer in group.answers]
    assert len(answers) == 24
    for answer in answers:
        ends = [t for t, token in enumerate(answer.token_ids) if token in ENDS]
        assert answer.truncated == (not ends)
        assert ends in ([], [len(answer.token_ids) - 1])
        assert len(answer.token_ids) == 12 if answer.truncated else len(answer.token_ids) <= 12
        assert answer.log_probs is not None and len(answer.log_probs) == len(answer.token_ids)
    assert len({answer.truncated for answer in answers}) == 2 or len({len(a.token_ids) for a in answers}) > 3


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_trainer_finds_the_log_probabilities_that_the_generator_says(
    policy: PolicyModel, tiny_tokenizer: Any, temperature: float
) -> None:
    groups = make(policy, tiny_tokenizer, temperature=temperature).generate(PROMPTS, IDS, num_answers=4, seed=2)
    found = policy.log_probs([g.sequences for g in groups], prompt_lengths(groups), temperature=temperature)
    for s, answer in enumerate(answer for group in groups for answer in group.answers):
        assert answer.log_probs is not None
        own = found.values_SL[s][found.mask_SL[s]].detach()
        assert torch.allclose(own, torch.tensor(answer.log_probs), atol=1e-4)


def test_a_seed_determines_the_answers_and_nothing_else_does(policy: PolicyModel, tiny_tokenizer: Any) -> None:
    generator = make(policy, tiny_tokenizer)
    first = generator.generate(PROMPTS, IDS, num_answers=3, seed=3)
    torch.rand(5)
    state = torch.random.get_rng_state()
    assert generator.generate(PROMPTS, IDS, num_answers=3, seed=3) == first
    assert torch.equal(torch.random.get_rng_state(), state)
    assert generator.generate(PROMPTS, IDS, num_answers=3, seed=4) != first


def test_a_prompt_without_room_is_named(policy: PolicyModel, tiny_tokenizer: Any) -> None:
    limit = policy.hf.config.max_position_embeddings
    with pytest.raises(ModelError, match="row 1"):
        make(policy, tiny_tokenizer).generate(PROMPTS[:2], [[5], [5] * limit], num_answers=1, seed=0)
