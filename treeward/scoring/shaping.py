"""`Shaper`: scores in, rewards out; the only code that turns a model's score into a policy's reward.

    shaper = Shaper(RewardShapingConfig(length_penalty=LengthPenaltyConfig()), tokenizer=None)
    shaper.shape([Score(1.25)], [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4." * 300}]])
    # [Reward(value=1.15, score=Score(1.25), ...)]: 600 characters, 0.001 for each above 500

Each step is off unless the configuration asks for it. The order is fixed:

1. length calibration and length penalty, on the raw score: the curve and the coefficient are in its units;
2. temperature, which turns a score into log-odds;
3. reference completions: the sigmoid takes a difference of log-odds (`preference_score`: log-odds). References go
   through steps 1 and 2 with their own lengths;
4. normalisation and clipping, last, because they set the scale and the bounds of the policy's reward.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from scipy.special import expit, log_expit

from treeward.config.scoring import LengthUnit, RewardShapingConfig
from treeward.data.preference import Message, check_messages, last_text
from treeward.errors import ConfigError, DataError
from treeward.model.contract import LengthCurve, RewardCalibration
from treeward.scoring.score import Conversation, Reward, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reference = tuple[Score, Conversation]
"""A reference completion: its score by the same model, and the conversation that ends with it, for its length."""

logger = logging.getLogger(__name__)

_WHERE = "reward_shaping"
_T = TypeVar("_T")


def relative_reward(score: float, references: Sequence[float], kind: Literal["log_sigmoid", "par"]) -> float:
    """A reward relative to M >= 1 reference completions of the same prompt, from log-odds r and r_ref_m.

    `log_sigmoid`: 1/M sum_m log sigma(r - r_ref_m), in (-inf, 0); Wang et al. 2024 (arXiv 2402.00742) with M = 1.
    `par`: 1/M sum_m sigma(r - r_ref_m), in (0, 1); Fu et al. 2025 (arXiv 2502.18770), who find M = 1 sufficient.
    Both flatten out where the completion is better than its references: there is less to gain by exploiting the model.
    """
    differences = score - np.asarray(references, dtype=np.float64)
    return float((log_expit(differences) if kind == "log_sigmoid" else expit(differences)).mean())


def normalize(reward: float, mean: float, std: float, clip: float | None) -> float:
    """max(-c, min(c, (r - mean) / std)), with the clip c; None: without it."""
    normalized = (reward - mean) / std
    return normalized if clip is None else max(-clip, min(clip, normalized))


def completion_length(conversation: Conversation, unit: LengthUnit, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Length of the last message's text, in characters or in tokens of `tokenizer` without special ones."""
    text = last_text(conversation)
    if unit == "characters" or not text:
        return len(text)
    assert tokenizer is not None, "a length in tokens needs a tokenizer"
    # Longer than the model's limit is fine here, and no reason for transformers to warn.
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


class Shaper:
    """Turns scores into rewards by a `RewardShapingConfig`.

    `calibration`: the fitted constants, as `Scorer.contract.calibration`, which are adapted to the steps before the
    normalisation. `tokenizer`: the reward model's own, where lengths are in tokens. Raises `ConfigError` where
    constants or a tokenizer are needed and missing.
    """

    def __init__(
        self,
        config: RewardShapingConfig,
        *,
        calibration: RewardCalibration | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.config, self.calibration = config, calibration
        self._tokenizer = tokenizer
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
        if config.uses_contract_constants and self._curve is not None:
            self._constants = self._curve.residual_mean, self._curve.residual_std
        elif config.uses_contract_constants and (config.missing_constants == "refuse" or calibration.normalization):
            normalization = _fitted(calibration.normalization, "normalize_rewards", "a mean and a standard deviation")
            self._constants = normalization.mean, normalization.std
        elif config.uses_contract_constants:
            logger.warning(
                "normalize_rewards changes nothing: there are no constants, so a reward is the score, without a limit. "
                "Give reward_mean and reward_std, or fit them: treeward calibrate MODEL --data FILE."
            )
        if self._constants is not None:
            mean, std = self._constants
            self._constants = mean / self._temperature, std / self._temperature
        if config.normalize_rewards and config.reward_mean is not None and config.reward_std is not None:
            self._constants = config.reward_mean, config.reward_std
        units = {part.unit for part in (self._curve, config.length_penalty) if part is not None}
        if tokenizer is None and "tokens" in units:
            summary = "lengths are counted in tokens, and there is no tokenizer"
            raise ConfigError(summary, where=_WHERE, need="the reward model's own tokenizer")

    @property
    def reads_completions(self) -> bool:
        """Whether a reward depends on the text of the completion, and not on its score alone."""
        config = self.config
        return self._curve is not None or config.length_penalty is not None or config.reference is not None

    @property
    def reference_key(self) -> str | None:
        """The key of the data with reference completions; None where none are read."""
        return None if self.config.reference is None else self.config.reference_key

    def shape(
        self,
        scores: Sequence[Score],
        conversations: Sequence[Conversation],
        references: Sequence[Sequence[Reference] | None] | None = None,
    ) -> list[Reward]:
        """One reward for each score, in order. `references`: the reference completions of each sample, read where the
        configuration asks for them; a sample without them, or with one that has no score, gets no reward."""
        references = [None] * len(scores) if references is None else references
        shaped = [self._relative(*sample) for sample in zip(scores, conversations, references, strict=True)]
        if self._constants is None:
            return shaped
        rewards = []
        for reward in shaped:
            if reward.value is not None:
                value = normalize(reward.value, *self._constants, self.config.reward_clip)
                error = None if math.isfinite(value) else f"the normalised reward is not finite: {value}"
                reward = replace(reward, value=value if error is None else None, error=error)
            rewards.append(reward)
        return rewards

    def _relative(self, score: Score, conversation: Conversation, references: Sequence[Reference] | None) -> Reward:
        """All steps before the normalisation."""
        if score.score is None or not math.isfinite(score.score):
            missing = "there is no score" if score.score is None else f"the score is not finite: {score.score}"
            return Reward(None, score, error=score.error or missing)
        value = self._adjusted(score.score, conversation)
        if self.config.reference is not None:
            key = self.config.reference_key
            if not references:
                return Reward(None, score, error=f"there are no {key} to compare with")
            adjusted = []
            for i, (reference, text) in enumerate(references):
                if reference.score is None or not math.isfinite(reference.score):
                    return Reward(None, score, error=f"{key}[{i}] has no score")
                adjusted.append(self._adjusted(reference.score, text))
            value = relative_reward(value, adjusted, self.config.reference)
        elif self.config.preference_score:
            value = float(expit(value))
        if not math.isfinite(value):
            return Reward(None, score, error=f"the shaped reward is not finite: {value}")
        return Reward(value, score)

    def _adjusted(self, score: float, conversation: Conversation) -> float:
        """The steps that a completion and its references share: (r - c(L) - alpha max(0, L - L0)) / T."""
        if self._curve is not None:
            # The score that length alone predicts: linear between the knots of the curve, constant beyond them.
            length = completion_length(conversation, self._curve.unit, self._tokenizer)
            score -= float(np.interp(length, self._curve.lengths, self._curve.values))
        penalty = self.config.length_penalty
        if penalty is not None:
            length = completion_length(conversation, penalty.unit, self._tokenizer)
            score -= penalty.coefficient * max(0.0, length - penalty.threshold)
        return score / self._temperature


def reference_conversations(conversation: Conversation, completions: Any, where: str) -> list[list[Message]]:
    """The conversation with each reference completion in place of its last message.

    `completions`: the value of `reference_key`: a text, a list of texts and message lists, or None for no reference.
    Raises `DataError` for anything else; `where` names the sample.
    """
    listed = [completions] if isinstance(completions, str) else [] if completions is None else completions
    if not isinstance(listed, Sequence) or any(isinstance(completion, Mapping) for completion in listed):
        summary, need = "the reference completions cannot be read", "a text, or texts and message lists"
        raise DataError(summary, where=where, got=completions, need=need)
    ends = [
        [{"role": "assistant", "content": completion}]
        if isinstance(completion, str)
        else list(check_messages(completion, f"reference completion {i}", where))
        for i, completion in enumerate(listed)
    ]
    return [[*(dict(message) for message in conversation[:-1]), *end] for end in ends]


def _fitted(value: _T | None, field: str, what: str) -> _T:
    if value is not None:
        return value
    instead = ", or give reward_mean and reward_std" if field == "normalize_rewards" else ""
    raise ConfigError(
        f"{field} needs {what}, which the model does not have",
        where=_WHERE,
        field=field,
        fix=f"fit it with `treeward calibrate MODEL --data FILE`{instead}",
    )
