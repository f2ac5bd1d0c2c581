"""Rewards in the place of scores: the same order as the rewards, and no number where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from treeward.config.scoring import RewardShapingConfig
from treeward.errors import ModelError
from treeward.model.contract import LengthCurve, NormalizationConstants, RewardCalibration
from treeward.scoring.rewarding import RewardScorer
from treeward.scoring.score import Conversation, OnError, Score
from treeward.scoring.shaping import Shaper


def chat(answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}]


class Lengths:
    """The score is the length of the reply; a reply of "?" has none."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str] | None, str]] = []

    def score(
        self, conversations: Sequence[Conversation], *, where: Sequence[str] | None = None, on_error: OnError = "raise"
    ) -> list[Score]:
        self.calls.append((None if where is None else list(where), on_error))
        return [
            Score(None, 9, error="too long to score")
            if one[-1]["content"] == "?"
            else Score(float(len(one[-1]["content"])), 9, heads=(1.0, 2.0))
            for one in conversations
        ]


def rewards(**section: Any) -> RewardScorer:
    curve = LengthCurve(unit="characters", lengths=(0, 100), values=(0, 300), residual_mean=0.0, residual_std=1.0)
    constants = RewardCalibration(normalization=NormalizationConstants(mean=2.0, std=4.0), length_curve=curve)
    return RewardScorer(Lengths(), Shaper(RewardShapingConfig(**section), calibration=constants))


def test_the_reward_takes_the_place_of_the_score() -> None:
    chats = [chat("a" * n) for n in (1, 4, 9)]
    penalised = rewards(length_penalty={"coefficient": 2.0, "threshold": 3}).score(chats)
    assert [one.score for one in penalised] == [1, 4 - 2, 9 - 12]
    assert [(one.num_tokens, one.heads, one.error) for one in penalised] == [(9, (1.0, 2.0), None)] * 3
    calibrated = [one.score for one in rewards(length_calibration=True).score(chats)]
    assert calibrated == pytest.approx([1 - 3, 4 - 12, 9 - 27])  # the shortest is the best now
    assert [one.score for one in rewards(normalize_rewards=True).score(chats)] == [-0.25, 0.5, 1.75]


def test_what_has_no_score_has_no_reward() -> None:
    scorer = rewards(normalize_rewards=True)
    for on_error in ("mask", "raise"):  # as with a scorer, what is too long raises nothing
        one, other = scorer.score([chat("?"), chat("four")], on_error=on_error)  # type: ignore[arg-type]
        assert one.score is None and one.error == "too long to score" and one.num_tokens == 9
        assert other.score == 0.5
    endless = rewards(length_penalty={"coefficient": 1e308, "threshold": 0})
    (one,) = endless.score([chat("a" * 90)], on_error="mask")
    assert one.score is None and "not finite" in (one.error or "")
    with pytest.raises(ModelError, match="row 7.*no reward"):
        endless.score([chat("a" * 90)], where=["row 7"])
