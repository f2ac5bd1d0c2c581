"""Scores of a program that makes a known mistake are recognised; without a model."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from treeward.model.contract import GoldenExample, ScoringContract, text_sha256
from treeward.scoring.diagnosis import diagnose

SCORES = [-2.5, -0.75, 0.25, 1.5, 4.0, 21.0]
EARLY = [0.5, -1.0, 0.0, 2.5, 3.0, 20.0]


def contract_of(scores: list[float], *, bos: bool = True) -> ScoringContract:
    golden = []
    for i, (score, early) in enumerate(zip(scores, EARLY, strict=False)):
        mistakes = {"read_before_end": early} | ({"two_bos": score + 0.3, "no_bos": score - 0.2} if bos else {})
        fields = {"name": f"chat {i}", "messages": [], "token_ids": [1, 2], "score": score, "heads": [score]}
        golden.append(GoldenExample.model_validate({**fields, "mistakes": mistakes}))
    return ScoringContract.model_validate(
        {
            "treeward_version": "0",
            "rendering": {
                "chat_template": "",
                "chat_template_sha256": text_sha256(""),
                "template_in_folder": True,
                "tokenizer_sha256": "",
                "pad_token_id": 9,
            },
            "read": {},
            "weights": {
                "architecture": "A",
                "num_parameters": 1,
                "num_tensors": 1,
                "shapes_sha256": "",
                "head_sha256": "",
                "config": {},
            },
            "golden": golden,
            "tolerance": {"float32": 1e-4, "bfloat16": 0.05},
        }
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("change", "part", "words"),
    [
        (lambda x, i: x, None, "6 scores equal"),
        (lambda x, i: x + 9e-5 * (-1) ** i, None, "6 scores equal, largest difference 9.0e-05"),
        (lambda x, i: EARLY[i], "read position", "the token before the last"),
        (lambda x, i: x + 0.3, "tokens", "two BOS"),
        (lambda x, i: x - 0.2, "tokens", "lacks its BOS"),
        (lambda x, i: sigmoid(x), "activation", "a sigmoid"),
        (lambda x, i: math.tanh(x), "activation", "a tanh"),
        (lambda x, i: 1.0, "activation", "softmax"),
        (lambda x, i: -x, "activation", "change of sign"),
        (lambda x, i: (x - 3.0) / 2.0, "activation", r"0.5 x score -1.5"),
        (lambda x, i: x + 0.03 * (-1) ** i, "precision", "coarser number format"),
        (lambda x, i: x + 0.4 * (-1) ** i, "weights", "no known mistake explains"),
        (lambda x, i: x if i else 7.0, "weights", "no known mistake explains"),
        (lambda x, i: 0.0, "weights", "no known mistake explains"),
        (lambda x, i: 1e-6 * x, "weights", "no known mistake explains"),  # nearly level: any scores lie on such a line
    ],
)
def test_what_the_scores_say(change: Callable[[float, int], float], part: str | None, words: str) -> None:
    check = diagnose(contract_of(SCORES), [change(score, i) for i, score in enumerate(SCORES)])
    assert (check.part if check.state == "differs" else None) == part
    assert words in check.summary
    if part is not None:
        assert check.fix and check.got is not None and "chat" in check.got


def test_a_mistake_needs_evidence() -> None:
    """A line goes through any two scores, and a mistake that the contract does not know explains nothing."""
    assert diagnose(contract_of(SCORES[:2]), [5.0, 9.0]).part == "weights"
    assert diagnose(contract_of(SCORES, bos=False), [x + 0.3 for x in SCORES]).part == "activation"  # a shift, then
