"""`Shaper`: scores in, rewards out.

It is the only code that turns a model's score into a policy's reward.

    shaper = Shaper(RewardShapingConfig(length_penalty=LengthPenaltyConfig()))
    chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4." * 300}]
    shaper.shape([Score(1.25)], [chat])
    # [Reward(value=1.15, score=Score(1.25), ...)]: 600 characters, 0.001 for each above 500

Each step is off unless the configuration asks for it. The order is fixed:

1. length calibration, length penalty and spread penalty, on the raw score: the curve, the
   coefficient and the spread are in its units;
2. temperature, which turns a score into log-odds;
3. the sigmoid of log-odds (`preference_score`);
4. normalisation and clipping, last, because they set the scale and the bounds of the policy's
   reward.

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
from treeward.model.spread import refit
from treeward.scoring.score import ConversationScorer, OnError, Reward, Score

_T = TypeVar("_T")


def normalize(reward: float, mean: float, std: float, clip: float | None) -> float:
    """max(-c, min(c, (r - mean) / std)), with the clip c; None: without it."""
    normalized = (reward - mean) / std
    if clip is None:
        return normalized
    return max(-clip, min(clip, normalized))


class Shaper:
    """Turns scores into rewards by a `RewardShapingConfig`.

    `calibration`: the fitted constants, as `Scorer.contract.calibration`, which are adapted to the
    steps before the normalisation. Raises `ConfigError` where constants are needed and missing.
    """

    def __init__(
        self,
        config: RewardShapingConfig,
        *,
        calibration: RewardCalibration | None = None,
    ) -> None:
        self.config = config
        self.calibration = calibration
        calibration = calibration or RewardCalibration()
        self._curve: LengthCurve | None = None
        if config.length_calibration:
            self._curve = _fitted(calibration.length_curve, "length_calibration", "a length curve")
        if config.temperature == "calibrated":
            temperature = calibration.temperature
            if self._curve is not None:
                # The scores after the length curve have another spread, and so another temperature.
                temperature = self._curve.residual_temperature
            self._temperature = _fitted(temperature, "temperature", "a temperature").value
        else:
            self._temperature = config.temperature or 1.0
        self._constants: tuple[float, float] | None = None
        if config.uses_contract_constants:
            if self._curve is not None:
                mean = self._curve.residual_mean
                std = self._curve.residual_std
            else:
                what = "a mean and a standard deviation"
                fitted = _fitted(calibration.normalization, "normalize_rewards", what)
                mean = fitted.mean
                std = fitted.std
            # They are of raw scores, and normalise scores that the temperature has divided, never
            # sigmoids: a section with both is refused.
            self._constants = (mean / self._temperature, std / self._temperature)
        elif config.normalize_rewards:
            # Not None: without them the contract's constants are used.
            assert config.reward_mean is not None
            assert config.reward_std is not None
            self._constants = (config.reward_mean, config.reward_std)

    @property
    def reads_completions(self) -> bool:
        """Whether a reward depends on the text of the completion, and not on its score alone."""
        return self._curve is not None or self.config.length_penalty is not None

    def shape(
        self,
        scores: Sequence[Score],
        conversations: Sequence[AnyConversation],
    ) -> list[Reward]:
        """One reward for each score, in order.

        A missing score, or a reward that is not finite, is None.
        """
        pairs = zip(scores, conversations, strict=True)
        return [self._reward(score, conversation) for score, conversation in pairs]

    def _reward(self, score: Score, conversation: AnyConversation) -> Reward:
        if score.score is None:
            return Reward(None, score, error=score.error or "there is no score")
        if not math.isfinite(score.score):
            missing = f"the score is not finite: {score.score}"
            return Reward(None, score, error=score.error or missing)
        # (r - c(L) - alpha max(0, L - L0) - c s) / T, with the length L in characters and the
        # spread s: steps 1 and 2.
        shaped = score.score
        length = len(last_text(conversation))
        penalty = self.config.length_penalty
        if self._curve is not None:
            # The score that length alone predicts: linear between the knots of the curve, constant
            # beyond them.
            shaped -= float(np.interp(length, self._curve.lengths, self._curve.values))
        if penalty is not None:
            shaped -= penalty.coefficient * max(0.0, length - penalty.threshold)
        if self.config.spread_penalty > 0:
            if score.spread is None:
                # Without its deduction it would be a better reward than all that have one.
                return Reward(
                    None, score, error="the score has no spread, which spread_penalty needs"
                )
            shaped -= self.config.spread_penalty * score.spread
        shaped /= self._temperature
        if self.config.preference_score:
            # The probability to beat a completion of score 0, by the model of Bradley and Terry.
            shaped = float(expit(shaped))
        value = shaped
        if self._constants is not None:
            mean, std = self._constants
            value = normalize(shaped, mean, std, self.config.reward_clip)
        # Both: clipping makes a number of infinity.
        if not math.isfinite(shaped) or not math.isfinite(value):
            error = f"the shaped reward is not finite: {shaped}, normalised {value}"
            return Reward(None, score, error=error)
        return Reward(value, score)


def rewards_of(
    scores: Sequence[Score],
    conversations: Sequence[AnyConversation],
    shaper: Shaper | None,
) -> list[Reward]:
    """One reward for each score, in order; without a shaper it is the score."""
    if shaper is None:
        return [Reward(score.score, score, error=score.error) for score in scores]
    return shaper.shape(scores, conversations)


class RewardScorer:
    """Rewards as scores: a `ConversationScorer` whose `Score.score` is the reward."""

    def __init__(self, scorer: ConversationScorer, shaper: Shaper) -> None:
        self.scorer = scorer
        self.shaper = shaper

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that the scorer has computed so far."""
        return self.scorer.num_computed_tokens

    def score(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Score]:
        """Scores whose `score` is the reward, or None with the reason in `error`.

        Raises what the scorer raises, and `ModelError` for a reward that is not finite; with
        `on_error="mask"` such a reward is None.
        """
        names = where or [f"conversation {i}" for i in range(len(conversations))]
        scores = self.scorer.score(conversations, where=where, on_error=on_error)
        rewards = self.shaper.shape(scores, conversations)
        scores_with_rewards = []
        for reward, name in zip(rewards, names, strict=True):
            # Where there is no score either, the conversation is too long, which is no error.
            if on_error == "raise" and reward.value is None and reward.raw is not None:
                raise ModelError("the conversation has no reward", where=name, got=reward.error)
            score = replace(reward.score, score=reward.value, error=reward.error)
            scores_with_rewards.append(score)
        return scores_with_rewards


def load_shaper(config: ScoringConfig) -> Shaper | None:
    """The shaper of a section, with the constants of the model's contract; None without shaping.

    Raises `ConfigError` for constants that are needed and missing, and for a penalty on a spread
    that the scores do not have.
    """
    if config.shaping is None:
        return None
    if config.shaping.spread_penalty > 0:
        _check_spreads(config)
    calibration = None
    if not config.has_other_score:  # else the constants of the contract are of another score
        contract = read_contract(config.models[0])
        if contract is not None:
            calibration = contract.calibration
    return Shaper(config.shaping, calibration=calibration)


def _check_spreads(config: ScoringConfig) -> None:
    """Raise `ConfigError` for a model of the section whose scores have no spread."""
    for name in config.models:
        contract = read_contract(name)
        has_spread = contract is not None and contract.has_spread
        got = "a model without one"
        if has_spread and contract is not None and config.head_weights is not None:
            # A Laplace approximation is of the score that the contract's weights make.
            has_spread = contract.has_estimates
            got = "other weights of heads than those of the contract"
        if not has_spread:
            raise ConfigError(
                "spread_penalty needs scores that have a spread",
                where=name,
                field="reward_shaping.spread_penalty",
                got=got,
                fix=f"fit one: {refit(name)}; or train several heads: "
                "policy.reward_model_cfg.num_heads",
            )


def _fitted(value: _T | None, field: str, what: str) -> _T:
    """The constants, which must be there."""
    if value is not None:
        return value
    fix = "fit it with `treeward calibrate MODEL --data FILE`"
    if field == "normalize_rewards":
        fix += ", or give reward_mean and reward_std"
    raise ConfigError(
        f"{field} needs {what}, which the model does not have",
        where="reward_shaping",
        field=field,
        fix=fix,
    )
