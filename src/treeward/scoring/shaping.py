"""`Shaper`: scores in, rewards out; the only code that turns a model's score into a policy's reward.

    shaper = Shaper(RewardShapingConfig(length_penalty=LengthPenaltyConfig()))
    shaper.shape([Score(1.25)], [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4." * 300}]])
    # [Reward(value=1.15, score=Score(1.25), ...)]: 600 characters, 0.001 for each above 500

Each step is off unless the configuration asks for it. The order is fixed:

1. length calibration and length penalty, on the raw score: the curve and the coefficient are in its units;
2. temperature, which turns a score into log-odds;
3. the sigmoid of log-odds (`preference_score`);
4. normalisation and clipping, last, because they set the scale and the bounds of the policy's reward.

`load_shaper` makes the shaper of a section, with the constants of the model's contract.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from scipy.special import expit

from treeward.config.scoring import RewardShapingConfig, ScoringConfig
from treeward.data.conversation import AnyConversation, last_text
from treeward.errors import ConfigError, ModelError
from treeward.model.contract import LengthCurve, RewardCalibration, read_contract
from treeward.scoring.score import ConversationScorer, OnError, Reward, Score

_T = TypeVar("_T")


def normalize(reward: float, mean: float, std: float, clip: float | None) -> float:
    """max(-c, min(c, (r - mean) / std)), with the clip c; None: without it."""
    normalized = (reward - mean) / std
    return normalized if clip is None else max(-clip, min(clip, normalized))


class Shaper:
    """Turns scores into rewards by a `RewardShapingConfig`.

    `calibration`: the fitted constants, as `Scorer.contract.calibration`, which are adapted to the steps before the
    normalisation. Raises `ConfigError` where constants are needed and missing.
    """

    def __init__(self, config: RewardShapingConfig, *, calibration: RewardCalibration | None = None) -> None:
        self.config, self.calibration = config, calibration
        calibration = calibration or RewardCalibration()
        self._curve: LengthCurve | None = None
        if config.length_calibration:
            self._curve = _fitted(calibration.length_curve, "length_calibration", "a length curve")
        if config.temperature == "calibrated":
            # The scores after the length curve have another spread, and so another temperature.
            temperature = calibration.temperature if self._curve is None else self._curve.residual_temperature
            self._temperature = _fitted(temperature, "temperature", "a temperature").value
        else:
            self._temperature = config.temperature or 1.0
        self._constants: tuple[float, float] | None = None
        if config.uses_contract_constants:
            if self._curve is not None:
                mean, std = self._curve.residual_mean, self._curve.residual_std
            else:
                fitted = _fitted(calibration.normalization, "normalize_rewards", "a mean and a standard deviation")
                mean, std = fitted.mean, fitted.std
            self._constants = mean / self._temperature, std / self._temperature
        elif config.normalize_rewards and config.reward_mean is not None and config.reward_std is not None:
            self._constants = config.reward_mean, config.reward_std

    @property
    def reads_completions(self) -> bool:
        """Whether a reward depends on the text of the completion, and not on its score alone."""
        config = self.config
        return self._curve is not None or config.length_penalty is not None

    def shape(self, scores: Sequence[Score], conversations: Sequence[AnyConversation]) -> list[Reward]:
        """One reward for each score, in order; a missing score, or a reward that is not finite, is None."""
        return [self._reward(score, chat) for score, chat in zip(scores, conversations, strict=True)]

    def _reward(self, score: Score, conversation: AnyConversation) -> Reward:
        if score.score is None or not math.isfinite(score.score):
            missing = "there is no score" if score.score is None else f"the score is not finite: {score.score}"
            return Reward(None, score, error=score.error or missing)
        shaped = self._adjusted(score.score, conversation)
        if self.config.preference_score:
            shaped = float(expit(shaped))
        value = shaped if self._constants is None else normalize(shaped, *self._constants, self.config.reward_clip)
        if not (math.isfinite(shaped) and math.isfinite(value)):
            return Reward(None, score, error=f"the shaped reward is not finite: {shaped}, normalised {value}")
        return Reward(value, score)

    def _adjusted(self, score: float, conversation: AnyConversation) -> float:
        """The steps on the scale of scores: (r - c(L) - alpha max(0, L - L0)) / T, L in characters."""
        length, penalty = len(last_text(conversation)), self.config.length_penalty
        if self._curve is not None:
            # The score that length alone predicts: linear between the knots of the curve, constant beyond them.
            score -= float(np.interp(length, self._curve.lengths, self._curve.values))
        if penalty is not None:
            score -= penalty.coefficient * max(0.0, length - penalty.threshold)
        return score / self._temperature


def rewards_of(
    scores: Sequence[Score], conversations: Sequence[AnyConversation], shaper: Shaper | None
) -> list[Reward]:
    """One reward for each score, in order; without a shaper it is the score."""
    if shaper is None:
        return [Reward(score.score, score, error=score.error) for score in scores]
    return shaper.shape(scores, conversations)


class RewardScorer:
    """Rewards as scores: a `ConversationScorer` whose `Score.score` is the reward of the conversation."""

    def __init__(self, scorer: ConversationScorer, shaper: Shaper) -> None:
        self.scorer, self.shaper = scorer, shaper

    def score(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Score]:
        """Scores whose `score` is the reward, or None with the reason in `error`. Raises what the scorer raises, and
        `ModelError` for a reward that is not finite; with `on_error="mask"` such a reward is None."""
        scores = self.scorer.score(conversations, where=where, on_error=on_error)
        rewards = self.shaper.shape(scores, conversations)
        for i, reward in enumerate(rewards):
            if on_error == "raise" and reward.value is None and reward.raw is not None:
                name = where[i] if where is not None else f"conversation {i}"
                raise ModelError("the conversation has no reward", where=name, got=reward.error)
        return [replace(reward.score, score=reward.value, error=reward.error) for reward in rewards]


def load_shaper(config: ScoringConfig) -> Shaper | None:
    """The shaper of a section, with the constants of the model's contract; None without shaping.

    Raises `ConfigError` for constants that are needed and missing.
    """
    if config.shaping is None:
        return None
    contract = None if config.has_other_score else read_contract(config.models[0])
    return Shaper(config.shaping, calibration=contract.calibration if contract else None)


def _fitted(value: _T | None, field: str, what: str) -> _T:
    if value is not None:
        return value
    instead = ", or give reward_mean and reward_std" if field == "normalize_rewards" else ""
    raise ConfigError(
        f"{field} needs {what}, which the model does not have",
        where="reward_shaping",
        field=field,
        fix=f"fit it with `treeward calibrate MODEL --data FILE`{instead}",
    )
