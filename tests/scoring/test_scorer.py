"""A score depends on its conversation alone, and what cannot be scored is never a number."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from families import plain_scores, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from treeward.data.rendering import Renderer
from treeward.errors import DataError, ModelError
from treeward.model.export import export_model
from treeward.model.reward_model import RewardModel
from treeward.scoring.scorer import Score, Scorer
from treeward.tree.token_tree import TokenTree

CLOSE = 1e-5


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CHATS = [
    [user("What is the capital of France, and why is it so famous all over the world?"), assistant(answer)]
    for answer in ("Paris.", "Paris, of course.", "I do not know.", "Paris.", "")
] + [
    [{"role": "system", "content": "Be brief."}, user("2 + 2?"), assistant("4")],
    [user("Hi"), assistant("Hello! How can I help?"), user("Bye"), assistant("Goodbye, and thank you!" * 5)],
    [user("Hi"), assistant("Hello! How can I help?"), user("Wait"), assistant("Yes?")],
]


@pytest.fixture(scope="module")
def make_scorer(tiny_tokenizer: Any) -> Any:
    def make(family: str = "qwen3", batch_tokens: int = 4096, **settings: Any) -> Scorer:
        layout = {"bert": "encoder", "gptj": "rows"}.get(family, "tree")
        model = RewardModel(tiny_model(family), layout=layout)  # type: ignore[arg-type]
        return Scorer(model, Renderer(copy.deepcopy(tiny_tokenizer), **settings), batch_tokens=batch_tokens)

    return make


def values(scores: list[Score]) -> list[float]:
    assert all(score.score is not None for score in scores)
    return [score.score for score in scores if score.score is not None]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gptj", "bert"])
@pytest.mark.parametrize("batch_tokens", [1, 60, 4096])
def test_a_call_equals_its_conversations_one_by_one(family: str, batch_tokens: int, make_scorer: Any) -> None:
    scorer = make_scorer(family, batch_tokens)
    together = scorer.score(CHATS)
    alone = [scorer.score([chat])[0] for chat in CHATS]
    assert values(together) == pytest.approx(values(alone), abs=CLOSE)
    assert [s.num_tokens for s in together] == [len(scorer.renderer.encode(chat)) for chat in CHATS]
    if family in ("qwen3", "gemma2"):
        plain = plain_scores(scorer.model.hf, [scorer.renderer.encode(chat) for chat in CHATS])
        assert values(together) == pytest.approx(plain.tolist(), abs=CLOSE)
    assert together[0].score == together[3].score  # the same conversation twice
    assert max(values(together)) - min(values(together)) > 0.1


def test_neither_order_nor_company_matters(make_scorer: Any, real_chats: list[Any]) -> None:
    scorer = make_scorer()
    want = dict(enumerate(values(scorer.score(CHATS))))
    crowd = [[*p.context, *c.messages] for p in real_chats for c in p.completions]
    order = list(range(len(CHATS)))
    random.Random(1).shuffle(order)
    for company in ([], crowd):
        got = values(scorer.score([*(CHATS[i] for i in order), *company]))
        assert got[: len(order)] == pytest.approx([want[i] for i in order], abs=CLOSE)


@given(st.lists(st.lists(st.integers(3, 6), min_size=1, max_size=12), max_size=8), st.integers(1, 40))
@settings(deadline=None, max_examples=25)
def test_token_sequences_in_order(sequences: list[list[int]], budget: int) -> None:
    scorer = _token_scorer()
    scorer.batch_tokens = budget
    want = plain_scores(scorer.model.hf, sequences).tolist() if sequences else []
    assert scorer.score_tokens(sequences) == pytest.approx(want, abs=CLOSE)


_TOKEN_SCORER: list[Scorer] = []


def _token_scorer() -> Scorer:
    """One model for all of Hypothesis's examples; no text is rendered."""
    if not _TOKEN_SCORER:
        scorer = object.__new__(Scorer)
        scorer.model = RewardModel(tiny_model("llama")).eval()
        scorer.num_computed_tokens = scorer.num_row_tokens = 0
        _TOKEN_SCORER.append(scorer)
    return _TOKEN_SCORER[0]


def test_what_a_call_has_in_common_is_computed_once(make_scorer: Any) -> None:
    scorer = make_scorer()
    context = [user("Tell me about the history of bread, from the first ovens to the supermarket. " * 3)]
    answers = [f"Bread is {word}." for word in ("old", "older than you think", "old", "tasty")]
    scores = scorer.score_completions(context, [answers[0], [assistant(answers[1])], *answers[2:]])
    rows = [scorer.renderer.encode([*context, assistant(answer)]) for answer in answers]
    assert scorer.num_computed_tokens == TokenTree.from_sequences(rows).num_tokens
    assert scorer.num_row_tokens == sum(map(len, rows)) > 3 * scorer.num_computed_tokens
    shuffled = make_scorer()
    other = [
        [user("Something else, quite different from that, and long enough to be a prompt?"), assistant(a)]
        for a in answers
    ]
    calls = [c for pair in zip([[*context, assistant(a)] for a in answers], other, strict=True) for c in pair]
    assert values(shuffled.score(calls))[::2] == pytest.approx(values(scores), abs=CLOSE)
    unique = {tuple(shuffled.renderer.encode(c)) for c in calls}
    assert shuffled.num_computed_tokens <= TokenTree.from_sequences(list(unique)).num_tokens + 8


def test_rows_share_nothing_but_give_the_same_kind_of_answer(make_scorer: Any) -> None:
    scorer = make_scorer("gptj")
    scorer.score(CHATS)
    assert scorer.num_computed_tokens >= scorer.num_row_tokens


def test_too_long_is_no_score(make_scorer: Any) -> None:
    scorer = make_scorer(max_length=40)
    long = [user("word " * 60), assistant("Short.")]
    short, none = scorer.score([CHATS[5], long])
    assert short.score is not None and not short.truncated
    assert none == Score(None, len(scorer.renderer.encode(long)), False)
    with pytest.raises(DataError, match=r"here:2(?s:.*)too long"):
        make_scorer(max_length=40, truncation="error").score([CHATS[5], long], where=["here:1", "here:2"])


def test_truncation_says_so_and_spares_the_answer(make_scorer: Any) -> None:
    scorer = make_scorer(max_length=40, truncation="truncate_left")
    question = [user("Short question?"), assistant("Short answer.")]
    long = [user("word " * 60), assistant("Yes."), *question]
    cut, same, hopeless = scorer.score([long, long[1:], [user("Q"), assistant("word " * 60)]])
    assert cut.truncated and cut.num_tokens <= 40 and cut.score == pytest.approx(same.score, abs=CLOSE)
    assert not same.truncated and hopeless.score is None and not hopeless.truncated


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ([], "is empty"),
        ([user("Hi")], "no answer to score"),
        ([assistant("A"), user("Q")], "ends with a message of user"),
    ],
)
def test_what_is_no_conversation(conversation: list[dict[str, Any]], message: str, make_scorer: Any) -> None:
    with pytest.raises(DataError, match=f"(?s:conversation 1: .*{message})"):
        make_scorer().score([CHATS[0], conversation])
    with pytest.raises(DataError, match=r"in\.jsonl:9"):
        make_scorer().score([conversation], where=["in.jsonl:9"])


def test_the_template_may_refuse(make_scorer: Any) -> None:
    scorer = make_scorer(chat_template="{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}"
                                       "{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}")  # fmt: skip
    with pytest.raises(DataError, match="conversation 5(?s:.*)no system"):
        scorer.score(CHATS)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_score_that_is_no_number_is_an_error(broken: float, make_scorer: Any) -> None:
    scorer = make_scorer()
    with torch.no_grad():
        scorer.model.head.weight[0, 0] = broken
    with pytest.raises(ModelError, match=r"not finite(?s:.*)(nan|inf) for sequence"):
        scorer.score(CHATS)


def test_nothing_gives_nothing(make_scorer: Any) -> None:
    assert make_scorer().score([]) == [] and make_scorer().score_tokens([]) == []
    with pytest.raises(ValueError):
        make_scorer().score(CHATS, where=["one"])


def test_a_template_that_ends_otherwise_than_in_training_is_refused(tiny_tokenizer: Any, tmp_path: Path) -> None:
    hf, tokenizer = tiny_model("llama"), copy.deepcopy(tiny_tokenizer)
    renderer = Renderer(tokenizer)
    assert renderer.read_token == "eos"
    export_model(
        RewardModel(hf), tokenizer, tmp_path / "out", rendering=renderer.settings, read_token=renderer.read_token
    )
    Scorer.load(tmp_path / "out", device="cpu")
    template = tmp_path / "out" / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8").replace("eos_token", "''"), encoding="utf-8")
    with pytest.raises(ModelError, match="do not end as they did in training(?s:.*)eos, says"):
        Scorer.load(tmp_path / "out", device="cpu")
