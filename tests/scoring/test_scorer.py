"""A score depends on its conversation alone, and what cannot be scored is never a number."""

from __future__ import annotations

import copy
import math
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from families import plain_scores, tiny_model
from messages import assistant, replace_text, user
from safetensors.torch import load_file, save_file
from signed import contract_of

from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, DataError, ModelError
from treeward.model.contract import NormalizationConstants, RewardCalibration, write_contract
from treeward.model.reward_model import RewardModel
from treeward.scoring.score import Score
from treeward.scoring.scorer import Scorer
from treeward.tree.token_tree import TokenTree

CLOSE = 1e-5


CHATS = [
    [
        user("What is the capital of France, and why is it so famous all over the world?"),
        assistant(completion),
    ]
    for completion in ("Paris.", "Paris, of course.", "I do not know.", "Paris.", "")
] + [
    [{"role": "system", "content": "Be brief."}, user("2 + 2?"), assistant("4")],
    [
        user("Hi"),
        assistant("Hello! How can I help?"),
        user("Bye"),
        assistant("Goodbye, and thank you!" * 5),
    ],
    [user("Hi"), assistant("Hello! How can I help?"), user("Wait"), assistant("Yes?")],
]


@pytest.fixture(scope="module")
def make_scorer(tiny_tokenizer: Any) -> Any:
    def make(family: str = "qwen3", batch_tokens: int = 4096, **settings: Any) -> Scorer:
        layout = {"bert": "encoder", "gptj": "rows"}.get(family, "tree")
        model = RewardModel(tiny_model(family), layout=layout)  # type: ignore[arg-type]
        return Scorer(
            model, Renderer(copy.deepcopy(tiny_tokenizer), **settings), batch_tokens=batch_tokens
        )

    return make


def values(scores: list[Score]) -> list[float]:
    assert all(score.score is not None for score in scores)
    return [score.score for score in scores if score.score is not None]


@pytest.mark.parametrize(
    ("family", "batch_tokens"),
    [("qwen3", 1), ("qwen3", 60), ("gemma2", 4096), ("gptj", 60), ("bert", 4096)],
)
def test_a_call_equals_its_conversations_one_by_one(
    family: str, batch_tokens: int, make_scorer: Any
) -> None:
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


def test_what_a_call_has_in_common_is_computed_once(make_scorer: Any) -> None:
    scorer = make_scorer()
    context = [
        user("Tell me about the history of bread, from the first ovens to the supermarket. " * 3)
    ]
    completions = [f"Bread is {word}." for word in ("old", "older than you think", "old", "tasty")]
    scores = scorer.score_completions(
        context, [completions[0], [assistant(completions[1])], *completions[2:]]
    )
    rows = [scorer.renderer.encode([*context, assistant(completion)]) for completion in completions]
    assert scorer.num_computed_tokens == TokenTree.from_sequences(rows).num_tokens
    assert scorer.num_row_tokens == sum(map(len, rows)) > 3 * scorer.num_computed_tokens
    shuffled = make_scorer()
    other = [
        [
            user("Something else, quite different from that, and long enough to be a prompt?"),
            assistant(a),
        ]
        for a in completions
    ]
    calls = list(
        chain.from_iterable(
            zip([[*context, assistant(a)] for a in completions], other, strict=True)
        )
    )
    assert values(shuffled.score(calls))[::2] == pytest.approx(values(scores), abs=CLOSE)
    unique = {tuple(shuffled.renderer.encode(c)) for c in calls}
    assert shuffled.num_computed_tokens <= TokenTree.from_sequences(list(unique)).num_tokens + 8


def test_too_long_is_no_score(make_scorer: Any) -> None:
    scorer = make_scorer(max_length=40)
    long = [user("word " * 60), assistant("Short.")]
    short, none = scorer.score([CHATS[5], long])
    assert short.score is not None and not short.truncated
    length = len(scorer.renderer.encode(long))
    assert none == Score(None, length, error=f"too long to score: {length} tokens, at most 40")
    with pytest.raises(DataError, match=r"here:2(?s:.*)too long"):
        make_scorer(max_length=40, truncation="error").score(
            [CHATS[5], long], where=["here:1", "here:2"]
        )


def test_truncation_is_reported_and_spares_the_completion(make_scorer: Any) -> None:
    scorer = make_scorer(max_length=40, truncation="truncate_left")
    question = [user("Short question?"), assistant("Short answer.")]
    long = [user("word " * 60), assistant("Yes."), *question]
    cut, same, hopeless = scorer.score([long, long[1:], [user("Q"), assistant("word " * 60)]])
    assert (
        cut.truncated and cut.num_tokens <= 40 and cut.score == pytest.approx(same.score, abs=CLOSE)
    )
    assert not same.truncated and hopeless.score is None and not hopeless.truncated


@pytest.mark.parametrize("family", ["qwen3", "gptj", "bert"])
def test_masked_failures_harm_no_other(family: str, make_scorer: Any) -> None:
    scorer = make_scorer(family, max_length=100)
    # One token is poison: whoever holds it has no score.
    poison = scorer.renderer.encode([user("~"), assistant("!")])
    token = next(
        i for i in poison if i not in {t for chat in CHATS for t in scorer.renderer.encode(chat)}
    )
    with torch.no_grad():
        scorer.model.hf.get_input_embeddings().weight[token] = math.nan
    want = values(scorer.score(CHATS))
    wrong = [
        [user("~"), assistant("!")],
        [],
        [user("Hi")],
        [{"role": "user"}, assistant("A")],
        "no messages",
        [user("word " * 200), assistant("A")],
    ]
    crowd: list[Any] = [wrong[0], *CHATS[:2], *wrong[1:4], *CHATS[2:], *wrong[4:]]
    got = scorer.score(crowd, on_error="mask")
    at = [i for i, one in enumerate(crowd) if one in CHATS]
    assert values([got[i] for i in at]) == pytest.approx(want, abs=CLOSE)
    failed = [score for i, score in enumerate(got) if i not in at]
    assert [score.score for score in failed] == [None] * 6 and all(
        score.heads == () for score in failed
    )
    for score, words in zip(
        failed,
        ["not finite", "empty", "no completion", "no text", "not a list", "too long to score"],
        strict=True,
    ):
        assert score.error and words in score.error and "\n" not in score.error
    with pytest.raises(DataError):
        scorer.score(crowd)


def test_several_heads(tiny_tokenizer: Any, tmp_path: Path) -> None:
    hf = tiny_model("llama", num_labels=3)
    model = RewardModel(hf)
    renderer = Renderer(copy.deepcopy(tiny_tokenizer))
    with pytest.raises(ModelError, match=r"several heads(?s:.*)3 heads(?s:.*)head_weights"):
        Scorer(model, renderer)
    scorer = Scorer(model, renderer, head_weights=[1.0, -0.5, 0.0])
    rows = [renderer.encode(chat) for chat in CHATS]
    with torch.no_grad(), model.plain_attention():
        plain = torch.cat([hf(torch.tensor([ids])).logits for ids in rows])
    for score, logits in zip(scorer.score(CHATS), plain.tolist(), strict=True):
        assert score.heads == pytest.approx(logits, abs=CLOSE)
        assert score.score == pytest.approx(logits[0] - 0.5 * logits[1], abs=CLOSE)
    means = Scorer(model, renderer, head_weights="mean").score(CHATS)
    assert values(means) == pytest.approx(plain.mean(dim=1).tolist(), abs=CLOSE)
    hf.save_pretrained(tmp_path)
    renderer.tokenizer.save_pretrained(tmp_path)
    for weights in ([1.0, -0.5, 0.0], {"LABEL_0": 1.0, "LABEL_1": -0.5}):
        loaded = Scorer.load(tmp_path, device="cpu", head_weights=weights)
        assert values(loaded.score(CHATS)) == pytest.approx(values(scorer.score(CHATS)), abs=CLOSE)
    with pytest.raises(ConfigError, match="each of the labels LABEL_0, LABEL_1, LABEL_2"):
        Scorer(model, renderer, head_weights={"helpful": 1.0})


def test_other_head_weights_drop_the_calibration(model_folder: Path, tmp_path: Path) -> None:
    """Its constants are of another score."""
    folder = Path(shutil.copytree(model_folder, tmp_path / "calibrated"))
    constants = RewardCalibration(normalization=NormalizationConstants(mean=3.0, std=2.0))
    write_contract(contract_of(folder).model_copy(update={"calibration": constants}), folder)
    same, other = (
        Scorer.load(folder, device="cpu", head_weights=weights) for weights in (None, [2.0])
    )
    assert same.contract is not None and same.contract.calibration == constants
    assert other.contract is not None and other.contract.calibration is None
    assert values(other.score(CHATS)) == pytest.approx(
        [2.0 * score for score in values(same.score(CHATS))], abs=CLOSE
    )


def test_the_positions_of_a_model_without_a_contract_are_its_limit(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    tiny_model("llama", max_position_embeddings=64).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    question = [user("Short question?"), assistant("Short answer.")]
    long = [user("word " * 60), assistant("Yes."), *question]
    score = Scorer.load(tmp_path, device="cpu").score([long])[0]
    assert score.score is None and str(score.error).endswith("at most 64") and score.num_tokens > 64
    cut = Scorer.load(tmp_path, device="cpu", truncation="truncate_left").score([long])[0]
    assert cut.score is not None and cut.truncated and cut.num_tokens <= 64


def test_text_that_is_no_unicode_has_no_score(make_scorer: Any) -> None:
    """A lone surrogate, as JSON may hold it."""
    scorer = make_scorer()
    with pytest.raises(DataError, match="not valid Unicode") as raised:
        scorer.score(
            [CHATS[0], [user("Hi \ud800"), assistant("Hello!")]], where=["c.jsonl:2", "c.jsonl:3"]
        )
    assert raised.value.where == "c.jsonl:3"
    sound, broken = scorer.prepare_texts(["Hi", "Hi \ud800"])
    assert sound.error is None and broken.ids is None and "not valid Unicode" in str(broken.error)


def test_what_lies_on_the_disk_must_keep_the_contract(model_folder: Path, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert Scorer.load(model_folder, device="cpu", dtype=dtype).num_computed_tokens == 0
    changed = Path(shutil.copytree(model_folder, tmp_path / "template"))
    replace_text(changed / "chat_template.jinja", "eos_token", "''")
    with pytest.raises(ModelError, match=r"contract: tokens(?s:.*)treeward verify"):
        Scorer.load(changed, device="cpu")
    # Whoever brings another template asks for other tokens, and knows it.
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    Scorer.load(changed, device="cpu", tokenizer={"chat_template": template})
    scaled = Path(shutil.copytree(model_folder, tmp_path / "weights"))
    weights = load_file(scaled / "model.safetensors")
    save_file(
        {**weights, "score.weight": 1.5 * weights["score.weight"]},
        scaled / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(
        ModelError, match=r"does not keep its scoring contract(?s:.*)--write --force"
    ):
        Scorer.load(scaled, device="cpu")
    assert (
        Scorer.load(scaled, device="cpu", check_contract=False).score([CHATS[0]])[0].score
        is not None
    )


@pytest.mark.parametrize(("batch_tokens", "max_sequences"), [(None, 3), (150, None)])
def test_no_pass_is_larger_than_allowed(
    batch_tokens: int | None, max_sequences: int | None, make_scorer: Any
) -> None:
    scorer = make_scorer()
    want = values(scorer.score(CHATS))
    make_batch = scorer.model.make_batch
    batches = []
    scorer.batch_tokens, scorer.max_sequences = batch_tokens, max_sequences
    scorer.model.make_batch = lambda groups: batches.append(make_batch(groups)) or batches[-1]
    assert values(scorer.score(CHATS)) == pytest.approx(want, abs=CLOSE)
    sizes = [len(batch.ends_S) for batch in batches]
    assert (
        len(batches) > 1
        and sum(sizes) == len(CHATS)
        and max(sizes) <= (max_sequences or len(CHATS))
    )
    assert max(batch.num_computed_tokens for batch in batches) <= (batch_tokens or 10**4)
