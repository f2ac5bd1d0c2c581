"""What a policy is asked: the generation prompts of real templates, one BOS, and prompts that are
too long."""

from __future__ import annotations

from collections import Counter

import pytest
from messages import assistant, user
from templates import CASES, PROMPTING_CHATML, TEMPLATES, byte_bpe, family_renderer

from treeward.data.prompt_encoding import encode_prompts
from treeward.data.prompt_sets import Prompt, PromptSet, prompts_summary
from treeward.data.rendering import Renderer
from treeward.environments.rules import RuleEnvironment
from treeward.errors import DataError

# Their generation prompts open a thought, which a finished answer without one does not have.
THINKING = ("deepseek", "nemotron_3_")


def prompts_of(*texts: str, name: str = "set", weight: float = 1.0, held_out: int = 0) -> PromptSet:
    prompts = tuple(
        Prompt((user(text),), {"n": n}, f"{name}:{n}") for n, text in enumerate(texts, 1)
    )
    counts = Counter(read=len(texts) + held_out, kept=len(texts), held_out=held_out)
    return PromptSet(name, prompts, counts, weight)


CHATS = [
    [user("What is the capital of France?")],
    [user("Hi"), assistant("Hello."), user("And of Ünïland? 🙂")],
]


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_is_how_an_answered_one_begins(name: str) -> None:
    renderer = family_renderer(name)
    for chat in CHATS:
        asked = renderer.encode_prompt(chat)
        whole = renderer.encode([*chat, assistant("Paris.")])
        if renderer.adds_bos:
            assert asked[0] == renderer.tokenizer.bos_token_id != asked[1]
        assert (whole[: len(asked)] == asked) != name.startswith(THINKING)
        if renderer.reads_text:  # as the tokenizer itself makes of the same template
            own = {
                "chat_template": renderer.chat_template,
                "add_generation_prompt": True,
                "return_dict": False,
            }
            assert asked == renderer.tokenizer.apply_chat_template(chat, **own)


@pytest.fixture
def renderer() -> Renderer:
    return Renderer(byte_bpe(), chat_template=PROMPTING_CHATML)


@pytest.mark.skipif(not TEMPLATES, reason="trl, which carries the templates, is not installed")
@pytest.mark.parametrize(
    "name",
    ["deepseek_r1_distill", "qwen3_5_think", "nemotron_3_nano", "qwen3"],
)
def test_prompts_know_how_their_completions_begin(name: str) -> None:
    """A rule for the form reads what a reasoning policy writes after its generation prompt."""
    encoded = encode_prompts([prompts_of("2 + 2?", "3 + 3?")], family_renderer(name))
    sampled = "<think>\nRatio.</think>4" if name == "qwen3" else "Ratio.</think>4"
    turns = [[*prompt.messages, assistant(prompt.opening + sampled)] for prompt in encoded.prompts]
    form = RuleEnvironment({"rule": "regex", "pattern": "^<think>\nRatio"})
    assert [reward.value for reward in form.rewards(turns, [{}, {}])] == [1, 1]


def test_prompts_of_several_sets_in_their_order(renderer: Renderer) -> None:
    sets = [
        prompts_of("one", "two, longer", weight=0.5),
        prompts_of(*"abc", name="other", held_out=2),
    ]
    encoded = encode_prompts(sets, renderer)
    assert list(encoded.prompts) == [*sets[0], *sets[1]]
    ids = [renderer.encode_prompt(prompt.messages) for prompt in encoded.prompts]
    assert [ids.tolist() for ids in encoded.token_ids] == ids
    assert (encoded.sizes, encoded.weights) == ((2, 3), (0.5, 1.0))
    assert encoded.counts == Counter(read=7, kept=5, held_out=2)


def test_prompts_that_are_too_long_are_left_out_counted_and_named(
    renderer: Renderer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sets = [prompts_of("a", "b" * 40, "c" * 3, "d" * 50), prompts_of("e", name="other")]
    limit = len(renderer.encode_prompt([user("c" * 3)]))
    encoded = encode_prompts(sets, renderer, max_length=limit)
    assert [prompt.messages[0]["content"] for prompt in encoded.prompts] == ["a", "ccc", "e"]
    assert encoded.sizes == (2, 1)
    assert encoded.counts == Counter(read=5, kept=3, too_long=2)
    assert prompts_summary(encoded.counts) == "3 of 5 prompts kept (left out: 2 too long)"
    (record,) = caplog.records
    assert (
        f"2 of 4 prompts have more than {limit} tokens" in record.message
        and "the first: set:2" in record.message
    )
    with pytest.raises(DataError, match="set: no prompt is short enough"):
        encode_prompts(sets, renderer, max_length=2)
