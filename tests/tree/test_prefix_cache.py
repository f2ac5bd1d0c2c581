"""Scores with a prefix cache are those without one, whatever was scored before, and only what is
new is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.families import DECODERS, VOCABULARY, model_of, tiny_model
from treeward.model.reward_model import RewardModel
from treeward.tree.prefix import Prefix, PrefixCache, RecentTokens

TOLERANCE = 1e-5


def _ids(generator: np.random.Generator, length: int) -> list[int]:
    return [int(i) for i in generator.integers(3, VOCABULARY, length)]


def _prefix(length: int, num_bytes_per_token: int = 8) -> Prefix:
    part = torch.zeros(1, length, num_bytes_per_token // 8, dtype=torch.float32)
    return Prefix(part.shape[1], (part,), (part,))


@pytest.mark.parametrize("family", DECODERS)
def test_scores_are_those_without_a_cache(family: str) -> None:
    model = RewardModel(tiny_model(family)).eval()
    cache = PrefixCache(2**30)
    assert model.layout == "tree"
    generator = np.random.default_rng(0)
    system = _ids(generator, 40)
    prompts = [system + _ids(generator, 30), system + _ids(generator, 50), _ids(generator, 35)]
    # what is kept of them continues what is known
    turns = [prompt + _ids(generator, 33) for prompt in prompts]
    # First nothing is known, then the prompts are.
    for starts, completions in (
        (prompts, (1, 7, 20)),
        (prompts, (1, 3)),
        (turns, (1, 3)),
        (turns, (2,)),
        (prompts, (4,)),
    ):
        sequences = []
        lengths = []
        for start in starts:
            for length in completions:
                sequences.append(start + _ids(generator, length))
                lengths.append(len(start))
        plain = model.score_tokens(sequences)
        cached = model.score_tokens(sequences, cache=cache, prompt_lengths=lengths)
        assert (cached - plain).abs().max() < TOLERANCE
    assert cache.num_reused_tokens > 0


def test_only_what_is_new_is_computed() -> None:
    model = RewardModel(tiny_model("llama")).eval()
    cache = PrefixCache(2**30)
    generator = np.random.default_rng(1)
    prompt = _ids(generator, 64)
    other = _ids(generator, 40)

    def score(sequences: Any, lengths: Any) -> Any:
        return model.score_tokens(sequences, cache=cache, prompt_lengths=lengths)

    score([prompt + [5, 6]], [64])
    assert model.num_computed_tokens == 66
    score([prompt + [7], prompt + [8, 9], other + [7]], [64, 64, 40])
    assert model.num_computed_tokens == 66 + 3 + 41
    score([prompt + [7, 7], other + [8, 8, 8]], [64, 40])
    assert model.num_computed_tokens == 110 + 2 + 3
    assert model.num_row_tokens == 66 + 65 + 66 + 41 + 66 + 43
    # The next turn continues the first completion: the longer prompt replaces the shorter one, and
    # serves both.
    turn = prompt + _ids(generator, 30)
    score([turn + [9]], [94])
    assert len(cache) == 2
    before = model.num_computed_tokens
    score([prompt + [4, 4, 4], turn + [4, 4]], [64, 94])
    assert model.num_computed_tokens - before == 3 + 2


def test_the_least_recently_used_go_first() -> None:
    size = _prefix(40).num_bytes
    cache = PrefixCache(2 * size)
    keys = [[n] * 40 for n in (1, 2, 3)]
    cache.put(keys[0], _prefix(40))
    cache.put(keys[1], _prefix(40))
    assert len(cache.get(keys[0] + [9], 40)) == 40
    cache.put(keys[2], _prefix(40))
    assert [cache.match(key + [9]) for key in keys] == [40, 0, 40]
    assert cache.num_bytes == 2 * size and len(cache) == 2
    cache.clear()
    assert (len(cache), cache.num_bytes) == (0, 0)


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_a_prompt_that_a_call_drops_from_the_cache_serves_that_call(family: str) -> None:
    """The room is for one prompt, and each of three forward passes keeps another one."""
    model = RewardModel(model_of(family)).eval()
    generator = np.random.default_rng(3)
    prompts = [_ids(generator, 40) for _ in range(3)]
    with_room = PrefixCache(2**30, whole=bool(model.recurrent_functions))
    model.score_tokens([prompts[0] + [5]], cache=with_room, prompt_lengths=[40])
    for first in prompts:
        cache = PrefixCache(with_room.num_bytes, whole=with_room.whole)
        model.score_tokens([first + [5]], cache=cache, prompt_lengths=[40])
        sequences = [prompt + [7, 8] for prompt in prompts]
        options: dict[str, Any] = {"cache": cache, "prompt_lengths": [40] * 3, "max_tokens": 42}
        scores = model.score_tokens(sequences, **options)
        assert (scores - model.score_tokens(sequences)).abs().max() < TOLERANCE
        assert cache.num_reused_tokens == 40


def test_what_comes_again_is_noticed() -> None:
    recent = RecentTokens(max_blocks=3)
    generator = np.random.default_rng(6)
    prompt = _ids(generator, 70)
    assert recent.add([*prompt, 3]) == 0
    assert recent.add([*prompt, 4, 5]) == 64  # whole blocks of 32
    assert recent.add(prompt[:20]) == 0
    for _ in range(3):
        recent.add(_ids(generator, 40))
    assert recent.add([*prompt, 6]) == 0


def test_a_conversation_that_is_cached_as_a_whole_still_has_a_token_to_read() -> None:
    model = RewardModel(tiny_model("llama")).eval()
    cache = PrefixCache(2**30)
    prompt = _ids(np.random.default_rng(3), 64)
    model.score_tokens([[*prompt, 5]], cache=cache, prompt_lengths=[64])
    assert cache.match(prompt) == 63
    cached = model.score_tokens([prompt], cache=cache, prompt_lengths=[64])
    assert (cached - model.score_tokens([prompt])).abs().max() < TOLERANCE
