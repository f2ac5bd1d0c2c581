"""A judge whose verdicts are read from the probabilities of its tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
from environments.conftest import chat, details, judge
from fake_judge import FakeJudge, completion

from treeward.config.reward_environments import JudgePromptConfig, RubricEnvironmentConfig
from treeward.environments.judge import JudgeEnvironment
from treeward.scoring.verdicts import (
    Answer,
    NoVerdict,
    TokenChoice,
    Verdict,
    read_answer,
)


def tokens(*written: Any) -> list[dict[str, Any]]:
    """Tokens as an endpoint sends them: a text, or the probabilities of those that could stand
    there, itself first."""
    found = []
    for one in written:
        alternatives = {one: 1.0} if isinstance(one, str) else one
        top = [{"token": token, "logprob": math.log(p)} for token, p in alternatives.items()]
        found.append({**top[0], "top_logprobs": top})
    return found


def with_tokens(*written: Any) -> tuple[int, dict[str, Any]]:
    sent = tokens(*written)
    body = completion("".join(one["token"] for one in sent))
    body["choices"][0]["logprobs"] = {"content": sent}
    return 200, body


def test_log_probabilities_make_expected_ratings(endpoint: FakeJudge) -> None:
    verdict = with_tokens(
        "Rating: [[3]], no: ", "Rating: [[", {"7": 0.6, "9": 0.2, "0": 0.1, "Hm": 0.1}, "]]"
    )
    endpoint.answer = lambda request: verdict
    environment = judge(endpoint, use_logprobs=True)
    result = environment.step([chat("four")], [{}])
    rating = (0.6 * 7 + 0.2 * 9) / 0.8  # 0 is not on the scale
    assert result.rewards.tolist() == pytest.approx([(rating - 1) / 8])
    assert details(result, "components")[0] == pytest.approx(
        {"judge/rating": rating, "judge/label_mass": 0.8}
    )
    assert (endpoint.requests[0]["logprobs"], endpoint.requests[0]["top_logprobs"]) == (True, 20)
    endpoint.answer = lambda request: "Rating: [[5]]"  # an endpoint that sends none
    assert details(environment.step([chat("four")], [{}]), "components")[0] == {"judge/rating": 5}
    verdict = with_tokens("I say ", "[[", {"A": 0.5, "B": 0.3, "C": 0.1, "a": 0.1}, "]]")
    endpoint.answer = lambda request: verdict
    environment = judge(endpoint, use_logprobs=True, mode="pairwise")
    result = environment.step([chat("four")], [{"reference_answers": "five"}])
    assert details(result, "components")[0]["judge/forward"] == pytest.approx((0.5 + 0.1 / 2) / 0.9)
    # the same in both orders: a bias of place
    assert result.rewards.tolist() == pytest.approx([0.5])


def test_ratings_are_found_however_the_tokenizer_cuts_them() -> None:
    section = {"base_url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": None}
    config = JudgeEnvironment({**section, "use_logprobs": True}).config

    def mean(*written: Any) -> float | None:
        choices = [
            TokenChoice(one["token"], {top["token"]: top["logprob"] for top in one["top_logprobs"]})
            for one in tokens(*written)
        ]
        text = "".join(choice.text for choice in choices)
        verdict = read_answer(Answer(text, tokens=choices), config)
        return verdict.value if isinstance(verdict, Verdict) and verdict.mass is not None else None

    assert mean("Rating: [[", {"7": 0.5, "9": 0.5}, "]]") == pytest.approx(8)
    assert mean("Rating:", {" [[7": 0.75, " [[3": 0.25, "7": 1e-9}, "]]") == pytest.approx(6)
    assert mean("Rating: [[", {"7]]": 0.5, "9]]": 0.25, "75": 0.25}) == pytest.approx(
        (0.5 * 7 + 0.25 * 9) / 0.75
    )
    assert mean("Rating: [[", "7", ".5", "]]") is None
    assert mean("Rating: [[", {"x": 0.5}, "]]") is None


@pytest.mark.parametrize(
    ("message", "section", "value"),
    [
        ("<think>At first: [[YES]]. No.</think>It is not true.", {}, None),
        ("<think>At first: [[YES]]. No.</think>[[NO]]", {}, 0.0),
        ("It is [[NO]].</think>\n\n[[YES]]", {}, 1.0),
        ('{"explanation": "It has a </think>.", "verdict": "[[YES]]"}', {}, 1.0),
        (
            '<think>{"score_1": 5, "score_2": 1, "ranking": 1}</think>Neither is good.',
            {"mode": "pairwise", "verdict": "scores"},
            None,
        ),
        (
            '{"explanation": "</think>", "score_1": 5, "score_2": 1, "ranking": 1}',
            {"mode": "pairwise", "verdict": "scores"},
            1.0,
        ),
    ],
)
def test_a_verdict_in_the_reasoning_is_none(
    message: str, section: dict[str, Any], value: float | None
) -> None:
    config = JudgePromptConfig(**{"mode": "criterion", **section})
    verdict = read_answer(Answer(message), config)
    if value is None:
        assert isinstance(verdict, NoVerdict) and verdict.text == message
    else:
        assert isinstance(verdict, Verdict) and verdict.value == value


@pytest.mark.parametrize(
    ("written", "alternatives", "label", "value", "mass"),
    [
        # SmolLM2 writes YES as two tokens, and NO as one.
        (("Y", "ES"), {"Y": 0.8, "NO": 0.1, "x": 0.1}, "YES", 8 / 9, 0.9),
        (("NO",), {"NO": 0.6, "Y": 0.2}, "NO", 0.25, 0.8),
        (("YES",), {"YES": 0.5, "Y": 0.1, "N": 0.2}, "YES", 0.75, 0.8),
    ],
)
def test_a_label_of_several_tokens_counts_by_its_first(
    written: tuple[str, ...],
    alternatives: dict[str, float],
    label: str,
    value: float,
    mass: float,
) -> None:
    config = RubricEnvironmentConfig(model="m", base_url="http://127.0.0.1:1/v1")
    log_probs = {text: math.log(p) for text, p in alternatives.items()}
    first, *others = written
    choices = [TokenChoice("[[", {"[[": 0.0}), TokenChoice(first, log_probs)]
    choices += [TokenChoice(text, {text: 0.0}) for text in (*others, "]]")]
    verdict = read_answer(Answer(f"[[{label}]]", tokens=choices), config)
    assert isinstance(verdict, Verdict) and verdict.label == label
    assert (verdict.value, verdict.mass) == pytest.approx((value, mass))
