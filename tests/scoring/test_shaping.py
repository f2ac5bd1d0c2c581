"""Formulas against their definitions, the order of the steps, and no number for a missing score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import messages
import pytest
from families import tiny_model
from signed import signed

from treeward import RewardModelEnvironment
from treeward.config.scoring import RewardShapingConfig, ScoringConfig
from treeward.data.conversation import AnyConversation
from treeward.errors import ConfigError, ModelError
from treeward.model.contract import (
    ESTIMATE_MEANING,
    CalibratedTemperature,
    HeadContract,
    LengthCurve,
    NormalizationConstants,
    RewardCalibration,
)
from treeward.scoring.score import OnError, Reward, Score
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import RewardScorer, Shaper, load_shaper

CURVE = LengthCurve(
    lengths=(10, 20, 40), values=(-1.0, 1.0, 2.0), residual_mean=0.25, residual_std=0.5
)
CALIBRATION = RewardCalibration(
    normalization=NormalizationConstants(mean=2.0, std=4.0),
    length_curve=CURVE,
    temperature=CalibratedTemperature(value=2.0, nll_before=0.5, nll_after=0.4, num_pairs=100),
)


def chat(completion: Any) -> list[dict[str, Any]]:
    return messages.chat("Which?", completion)


def shaper(calibration: RewardCalibration | None = None, **keys: Any) -> Shaper:
    return Shaper(RewardShapingConfig.model_validate(keys), calibration=calibration)


def shape(shaper: Shaper, scores: list[float]) -> list[float]:
    return values(shaper.shape([Score(score) for score in scores], [chat("x")] * len(scores)))


def values(rewards: list[Reward]) -> list[float]:
    assert all(one.value is not None and one.error is None for one in rewards)
    return [one.value for one in rewards if one.value is not None]


def reward(score: float, length: int = 1, **keys: Any) -> float:
    made = shaper(keys.pop("calibration", None), **keys)
    return values(made.shape([Score(score)], [chat("x" * length)]))[0]


def test_rewards_are_normalised_and_clipped_on_both_sides() -> None:
    constants = {"normalize_rewards": True, "reward_mean": 1.0, "reward_std": 2.0}
    scores = [-99.0, -2.0, 1.0, 2.0, 99.0]
    normalised = [-50.0, -1.5, 0.0, 0.5, 49.0]
    for clip in (1.0, 5.0, None):
        limit = math.inf if clip is None else clip
        want = [max(-limit, min(limit, value)) for value in normalised]
        assert shape(shaper(**constants, reward_clip=clip), scores) == pytest.approx(want)
    assert shape(shaper(**constants), scores) == pytest.approx([-5.0, -1.5, 0.0, 0.5, 5.0])


def test_lengths_come_before_the_temperature() -> None:
    keys = {"length_calibration": True, "length_penalty": {"coefficient": 0.1, "threshold": 20}}
    # The contract has a temperature of the scores, 2, and one of the scores after the curve, 5.
    residual = CalibratedTemperature(value=5.0, nll_before=1.0, nll_after=0.5, num_pairs=3)
    curve = CURVE.model_copy(update={"residual_temperature": residual})
    both = CALIBRATION.model_copy(update={"length_curve": curve})
    assert reward(7.0, 30, calibration=both, temperature="calibrated", **keys) == pytest.approx(
        (7.0 - 1.5 - 1.0) / 5.0
    )
    assert reward(7.0, 30, calibration=both, temperature="calibrated") == pytest.approx(7.0 / 2.0)
    with pytest.raises(ConfigError, match="temperature needs a temperature"):
        reward(7.0, 30, calibration=CALIBRATION, temperature="calibrated", **keys)


def test_constants_of_the_contract_are_adapted_to_the_steps_before() -> None:
    keys: dict[str, Any] = {"calibration": CALIBRATION, "normalize_rewards": True}
    assert reward(7.0, 30, **keys) == pytest.approx((7.0 - 2.0) / 4.0)
    assert reward(7.0, 30, temperature="calibrated", **keys) == pytest.approx((7.0 - 2.0) / 4.0)
    for temperature in (None, 8.0):
        got = reward(3.0, 30, length_calibration=True, temperature=temperature, **keys)
        assert got == pytest.approx((3.0 - 1.5 - 0.25) / 0.5)
    fixed = reward(
        3.0, 30, length_calibration=True, temperature=2.0, reward_mean=1.0, reward_std=0.5, **keys
    )
    assert fixed == pytest.approx(((3.0 - 1.5) / 2.0 - 1.0) / 0.5)


def test_a_curve_over_tokens_of_an_earlier_version_is_not_read_as_one_over_characters() -> None:
    curve = CURVE.model_dump() | {"unit": "tokens"}
    assert (
        RewardCalibration.model_validate(
            {"length_curve": {**curve, "unit": "characters"}}
        ).length_curve
        == CURVE
    )
    with pytest.raises(ConfigError, match="needs a length curve"):
        shaper(RewardCalibration.model_validate({"length_curve": curve}), length_calibration=True)


def test_a_missing_score_stays_missing() -> None:
    scores = [Score(5.0), Score(None), Score(math.nan), Score(None, error="too long")]
    for keys in ({}, {"normalize_rewards": True, "reward_mean": 5.0, "reward_std": 1.0}):
        one, *missing = shaper(**keys).shape(scores, [chat("a")] * 4)
        assert one.value is not None and one.raw == 5.0 and one.error is None
        assert [each.value for each in missing] == [None] * 3
        assert [each.error for each in missing] == [
            "there is no score",
            "the score is not finite: nan",
            "too long",
        ]


def test_a_spread_is_taken_off_in_the_units_of_the_score() -> None:
    keys = {"spread_penalty": 0.5, "temperature": 2.0, "normalize_rewards": True}
    made = shaper(**keys, reward_mean=1.0, reward_std=0.25)
    [got] = values(made.shape([Score(5.0, spread=3.0)], [chat("x")]))
    assert got == pytest.approx(((5.0 - 0.5 * 3.0) / 2.0 - 1.0) / 0.25)
    # A score without a spread would else be the best reward of its group.
    [missing] = made.shape([Score(5.0)], [chat("x")])
    assert missing.value is None and missing.error is not None and "no spread" in missing.error
    [unasked] = shaper(temperature=2.0).shape([Score(5.0)], [chat("x")])
    assert unasked.value == 2.5


def test_a_penalty_on_a_spread_works_wherever_models_are_shaped_or_is_refused_at_the_start(
    spread_folder: Path, model_folder: Path, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    heads = [HeadContract(name=name, meaning=ESTIMATE_MEANING, weight=0.5) for name in "ab"]
    hf = tiny_model("llama", num_labels=2)
    signed(tmp_path / "two", tiny_tokenizer, hf, heads=heads, max_length=256)
    chats = [chat("Four."), chat("Five, of course!")]
    for folder in (spread_folder, tmp_path / "two"):
        section = {"model_name": str(folder), "reward_shaping": {"spread_penalty": 0.5}}
        rewards = RewardModelEnvironment(section).rewards(chats, [{}, {}])
        for got, score in zip(rewards, Scorer.load(folder).score(chats), strict=True):
            assert score.score is not None and score.spread is not None and score.spread > 0
            assert got.value == pytest.approx(score.score - 0.5 * score.spread, abs=1e-5)
            assert got.components["score/spread"] == pytest.approx(score.spread, abs=1e-5)
    with pytest.raises(ConfigError, match="needs scores that have a spread"):
        RewardModelEnvironment(
            {"model_name": str(model_folder), "reward_shaping": {"spread_penalty": 0.5}}
        )
    other = ScoringConfig(
        models=(str(spread_folder),),
        head_weights=(2.0,),
        shaping=RewardShapingConfig(spread_penalty=1.0),
    )
    with pytest.raises(ConfigError, match="other weights of heads"):
        load_shaper(other)


# --- rewards in the place of scores ---------------------------------------------------------------


class Lengths:
    """The score is the length of the reply; a reply of "?" has none."""

    def score(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Score]:
        return [
            Score(None, 9, error="too long to score")
            if one[-1]["content"] == "?"
            else Score(float(len(one[-1]["content"])), 9, heads=(1.0, 2.0))
            for one in conversations
        ]


def reward_scorer(**section: Any) -> RewardScorer:
    curve = LengthCurve(lengths=(0, 100), values=(0, 300), residual_mean=0.0, residual_std=1.0)
    constants = RewardCalibration(
        normalization=NormalizationConstants(mean=2.0, std=4.0), length_curve=curve
    )
    return RewardScorer(Lengths(), Shaper(RewardShapingConfig(**section), calibration=constants))


def test_the_reward_takes_the_place_of_the_score() -> None:
    chats = [chat("a" * n) for n in (1, 4, 9)]
    penalised = reward_scorer(length_penalty={"coefficient": 2.0, "threshold": 3}).score(chats)
    assert [one.score for one in penalised] == [1, 4 - 2, 9 - 12]
    assert [(one.num_tokens, one.heads, one.error) for one in penalised] == [
        (9, (1.0, 2.0), None)
    ] * 3
    calibrated = [one.score for one in reward_scorer(length_calibration=True).score(chats)]
    assert calibrated == pytest.approx([1 - 3, 4 - 12, 9 - 27])  # the shortest is the best now
    assert [one.score for one in reward_scorer(normalize_rewards=True).score(chats)] == [
        -0.25,
        0.5,
        1.75,
    ]


def test_what_has_no_score_has_no_reward() -> None:
    scorer = reward_scorer(normalize_rewards=True)
    for on_error in ("mask", "raise"):  # as with a scorer, what is too long raises nothing
        one, other = scorer.score([chat("?"), chat("four")], on_error=on_error)  # type: ignore[arg-type]
        assert one.score is None and one.error == "too long to score" and one.num_tokens == 9
        assert other.score == 0.5
    endless = reward_scorer(length_penalty={"coefficient": 1e308, "threshold": 0})
    (one,) = endless.score([chat("a" * 90)], on_error="mask")
    assert one.score is None and "not finite" in (one.error or "")
    with pytest.raises(ModelError, match="row 7.*no reward"):
        endless.score([chat("a" * 90)], where=["row 7"])
