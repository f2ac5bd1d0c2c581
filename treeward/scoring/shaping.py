"""`Shaper`: scores in, rewards out; the one way from what a model says to what a policy is trained on.

    shaper = Shaper(RewardShapingConfig(length_penalty=LengthPenaltyConfig()), tokenizer=None)
    shaper.shape([1.25], [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4." * 300}]])
    # [Shaped(value=1.15, raw=1.25, error=None)]: 600 characters, 0.001 for each above 500

The steps, each of them off unless the configuration asks for it, always in this order:

1. length calibration and length penalty, on the raw score: the curve and the coefficient are in its units;
2. temperature, which makes log-odds of a score;
3. reference answers, whose sigmoid takes a difference of log-odds. They go through steps 1 and 2 too, each with a
   length of its own: otherwise a long answer would pay for its length, and the long reference beside it would not;
4. normalisation and clipping, last, because they fix the scale and the bounds of what a policy sees.

A score that is missing stays missing: `Shaped.value` is None and `error` says why. It is never a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from treeward.config.reward_shaping import LengthCurve, LengthUnit, RewardCalibration, RewardShapingConfig
from treeward.data.preference import Message, check_messages, last_text
from treeward.errors import CheckpointError, ConfigError, DataError
from treeward.scoring.score import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Reference",
    "RunningStatistics",
    "Shaped",
    "Shaper",
    "length_deduction",
    "length_effect",
    "log_sigmoid",
    "normalize",
    "reference_conversations",
    "relative_reward",
    "reply_length",
    "sigmoid",
]

_EPSILON = 1e-8
_CALIBRATE = "treeward calibrate MODEL --data FILE"
_WHERE = "reward_shaping"


# --- formulas --------------------------------------------------------------------------------------------------------


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)), for any finite or infinite x."""
    small = math.exp(-abs(x))
    return 1.0 / (1.0 + small) if x >= 0 else small / (1.0 + small)


def log_sigmoid(x: float) -> float:
    """log(1 / (1 + exp(-x))) = min(x, 0) - log(1 + exp(-|x|)), finite for any finite x: -1000 gives -1000."""
    return min(x, 0.0) - math.log1p(math.exp(-abs(x)))


def normalize(value: float, mean: float, std: float, clip: float | None) -> float:
    """max(-c, min(c, (r - mean) / std)): a reward in standard deviations; `clip` c None is no limit.

    `std` is positive; running statistics add 1e-8 to theirs.
    """
    normalized = (value - mean) / std
    return normalized if clip is None else max(-clip, min(clip, normalized))


def length_deduction(length: float, coefficient: float, threshold: float) -> float:
    """alpha * max(0, L - L0), to be subtracted: `coefficient` alpha per unit of `length` L above `threshold` L0.

    Singhal et al. 2023 (arXiv 2310.03716) study such penalties.
    """
    return coefficient * max(0.0, length - threshold)


def length_effect(length: float, curve: LengthCurve) -> float:
    """c(L), to be subtracted: the score that `length` L alone predicts, read off a fitted curve.

    The curve is the locally weighted regression (LOWESS) of score on length, Huang et al. 2024 (arXiv 2409.17407).
    Linear between its knots; constant beyond the first and the last, where nothing was observed.
    """
    return float(np.interp(length, curve.lengths, curve.values))


def relative_reward(score: float, references: Sequence[float], kind: Literal["log_sigmoid", "par"]) -> float:
    """A reward relative to M >= 1 reference answers to the same prompt, of log-odds r and r_ref_m.

    `log_sigmoid`: 1/M sum_m log sigma(r - r_ref_m), in (-inf, 0); Wang et al. 2024 (arXiv 2402.00742) with M = 1.
    `par`: 1/M sum_m sigma(r - r_ref_m), in (0, 1); Fu et al. 2025 (arXiv 2502.18770), who find M = 1 sufficient.
    Both flatten out where the answer is better than its references already: less is gained by exploiting the model.
    """
    transform = log_sigmoid if kind == "log_sigmoid" else sigmoid
    return math.fsum(transform(score - reference) for reference in references) / len(references)


def reply_length(conversation: Conversation, unit: LengthUnit, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Length of the last message's text, in characters or in tokens of `tokenizer` without special ones.

    Parts of content that are not text, and messages without content, have no length.
    """
    text = last_text(conversation)
    if unit == "characters" or not text:
        return len(text)
    assert tokenizer is not None, "a length in tokens needs a tokenizer"
    # Longer than the model's limit is fine here, and no reason for transformers to warn.
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


# --- running statistics ----------------------------------------------------------------------------------------------


class RunningStatistics:
    """Count, mean and variance of all numbers seen so far, without keeping them.

    M2 is the sum of squared differences from the mean. Two sets of numbers are merged by Chan, Golub and LeVeque 1979
    (the formula of Welford 1962 where one set is a single number):
    mean = mean_a + d n_b / n, M2 = M2_a + M2_b + d^2 n_a n_b / n, with d = mean_b - mean_a and n = n_a + n_b.
    """

    def __init__(self, count: int = 0, mean: float = 0.0, m2: float = 0.0) -> None:
        self.count, self.mean, self.m2 = count, mean, m2

    @property
    def std(self) -> float:
        """Standard deviation of the population, sqrt(M2 / n); 0 of nothing."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def update(self, values: Iterable[float]) -> None:
        """See more finite numbers; their order makes no difference."""
        batch = list(values)
        if not batch:
            return
        mean = math.fsum(batch) / len(batch)
        self.merge(RunningStatistics(len(batch), mean, math.fsum((value - mean) ** 2 for value in batch)))

    def merge(self, other: RunningStatistics) -> None:
        """See what `other` has seen, as of another process."""
        count = self.count + other.count
        if other.count:
            difference = other.mean - self.mean
            self.m2 += other.m2 + difference**2 * self.count * other.count / count
            self.mean += difference * other.count / count
            self.count = count

    def state_dict(self) -> dict[str, Any]:
        """Count, mean and M2, as JSON can hold them."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises `CheckpointError` where it is none of running statistics."""
        values = [state.get(key) for key in ("count", "mean", "m2")]
        numbers = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
        if len(numbers) != len(values) or numbers[0] < 0 or numbers[2] < 0:
            raise CheckpointError(
                "the state holds no running statistics", got=dict(state), need="count, mean and m2, finite numbers"
            )
        self.count, self.mean, self.m2 = int(numbers[0]), numbers[1], numbers[2]


# --- the shaper ------------------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """A reference answer: its score by the same model, and the conversation that ends with it, for its length."""

    score: float | None
    conversation: Conversation


@dataclass(frozen=True, slots=True)
class Shaped:
    """A reward: `value`, finite, or None and `error` says why; `raw` is the score that it was made of."""

    value: float | None
    raw: float | None
    error: str | None = None


class Shaper:
    """Makes rewards of scores as a `RewardShapingConfig` says.

    `calibration`: the fitted constants, as `Scorer.contract.calibration`. `tokenizer`: the reward model's own, where
    lengths are in tokens. Raises `ConfigError` for constants or a tokenizer that the configuration needs and that are
    not there. Normalisation by the contract's constants fits what precedes it: after length calibration they are those
    of the calibrated scores, and a temperature divides them too.
    """

    def __init__(
        self,
        config: RewardShapingConfig,
        *,
        calibration: RewardCalibration | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.config = config
        self.statistics = RunningStatistics()
        self._tokenizer = tokenizer
        known = calibration or RewardCalibration()
        self._curve = known.length_curve if config.length_calibration else None
        if config.length_calibration and self._curve is None:
            raise _not_fitted("length_calibration", "true", "a length curve", calibration)
        self._temperature = self._find_temperature(known, calibration)
        self._constants = self._find_constants(known, calibration)
        self._check_tokenizer()

    @property
    def reads_replies(self) -> bool:
        """Whether a reward depends on the text of the reply, and not on its score alone."""
        config = self.config
        return self._curve is not None or config.length_penalty is not None or config.reference is not None

    def shape(
        self,
        scores: Sequence[float | None],
        conversations: Sequence[Conversation],
        references: Sequence[Sequence[Reference] | None] | None = None,
        *,
        update: bool = True,
    ) -> list[Shaped]:
        """One reward for each score, in order; B scores, B conversations.

        `references`: the reference answers of each sample, read where the configuration asks for them; a sample that
        has none, or one without a score, gets no reward. `update`: running statistics take this batch in before it is
        normalised; off, as in validation, they stay as they are, and before the first update there is no reward.
        """
        given = [None] * len(scores) if references is None else references
        shaped = [self._relative(*item) for item in zip(scores, conversations, given, strict=True)]
        if self.config.running and update:
            self.statistics.update(one.value for one in shaped if one.value is not None)
        return [one if one.value is None else self._normalized(one, one.value) for one in shaped]

    def state_dict(self) -> dict[str, Any]:
        """What must be kept for a run to go on exactly: the running statistics, if any. JSON."""
        return {"running": self.statistics.state_dict()} if self.config.running else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. Raises `CheckpointError` for that of another configuration."""
        if ("running" in state) != self.config.running:
            raise CheckpointError(
                "the reward shaping of the checkpoint is another one",
                field="running",
                got="running statistics" if "running" in state else "no running statistics",
                need="running statistics" if self.config.running else "no running statistics",
                fix="resume with the configuration that the run was started with",
            )
        if self.config.running:
            self.statistics.load_state_dict(state["running"])

    def _relative(
        self, score: float | None, conversation: Conversation, references: Sequence[Reference] | None
    ) -> Shaped:
        """Everything before the normalisation."""
        if score is None:
            return Shaped(None, None, "there is no score")
        if not math.isfinite(score):
            return Shaped(None, None, f"the score is not finite: {score}")
        value = self._adjusted(score, conversation)
        if self.config.reference is not None:
            if not references:
                return Shaped(None, score, f"there are no {self.config.reference_key} to compare with")
            missing = [i for i, one in enumerate(references) if one[0] is None or not math.isfinite(one[0])]
            if missing:
                name = f"{self.config.reference_key}[{missing[0]}]"
                return Shaped(None, score, f"{name} has no score ({len(missing)} of {len(references)} have none)")
            adjusted = [self._adjusted(one, text) for one, text in references if one is not None]
            value = relative_reward(value, adjusted, self.config.reference)
        if not math.isfinite(value):
            return Shaped(None, score, f"the shaped reward is not finite: {value}")
        return Shaped(value, score)

    def _adjusted(self, score: float, conversation: Conversation) -> float:
        """The steps that an answer and its references go through alike."""
        if self._curve is not None:
            score -= length_effect(reply_length(conversation, self._curve.unit, self._tokenizer), self._curve)
        penalty = self.config.length_penalty
        if penalty is not None:
            length = reply_length(conversation, penalty.unit, self._tokenizer)
            score -= length_deduction(length, penalty.coefficient, penalty.threshold)
        return score / self._temperature

    def _normalized(self, shaped: Shaped, value: float) -> Shaped:
        if self.config.running:
            if self.statistics.count == 0:
                return replace(shaped, value=None, error="there are no running statistics yet")
            mean, std = self.statistics.mean, self.statistics.std + _EPSILON
        elif self._constants is not None:
            mean, std = self._constants
        else:
            return shaped
        normalized = normalize(value, mean, std, self.config.reward_clip)
        if not math.isfinite(normalized):
            return replace(shaped, value=None, error=f"the normalised reward is not finite: {normalized}")
        return replace(shaped, value=normalized)

    def _find_temperature(self, known: RewardCalibration, calibration: RewardCalibration | None) -> float:
        temperature = self.config.temperature
        if temperature == "calibrated":
            # What is left after the length curve has a spread, and so a temperature, of its own.
            fitted = known.temperature if self._curve is None else self._curve.residual_temperature
            if fitted is None:
                raise _not_fitted("temperature", "calibrated", "a temperature", calibration)
            return fitted.value
        return 1.0 if temperature is None else temperature

    def _find_constants(
        self, known: RewardCalibration, calibration: RewardCalibration | None
    ) -> tuple[float, float] | None:
        config = self.config
        if config.reward_mean is not None and config.reward_std is not None:
            return (config.reward_mean, config.reward_std) if config.normalize_rewards else None
        if not config.uses_contract_constants:
            return None
        if self._curve is not None:
            mean, std = self._curve.residual_mean, self._curve.residual_std
        elif known.normalization is not None:
            mean, std = known.normalization.mean, known.normalization.std
        else:
            what, instead = "a mean and a standard deviation", "reward_mean and reward_std"
            raise _not_fitted("normalize_rewards", "true", what, calibration, instead)
        return mean / self._temperature, std / self._temperature

    def _check_tokenizer(self) -> None:
        penalty = self.config.length_penalty
        asked = {
            "length_calibration": self._curve is not None and self._curve.unit == "tokens",
            "length_penalty.unit": penalty is not None and penalty.unit == "tokens",
        }
        if self._tokenizer is None and any(asked.values()):
            raise ConfigError(
                "lengths are counted in tokens, and there is no tokenizer",
                where=_WHERE,
                field=next(field for field, needs_it in asked.items() if needs_it),
                got="tokenizer=None",
                need="the reward model's own tokenizer, as Scorer.renderer.tokenizer",
            )


def reference_conversations(conversation: Conversation, answers: Any, where: str) -> list[list[Message]]:
    """The conversation with each reference answer in the place of its last message; what `reference_key` holds.

    `answers`: a text; a list of texts and message lists; or None, which gives none. Raises `DataError` for anything
    else; `where` names the sample.
    """
    context = [dict(message) for message in conversation[:-1]]
    if answers is None:
        return []
    listed = [answers] if isinstance(answers, str) else answers
    if not isinstance(listed, Sequence) or any(not isinstance(answer, str | Sequence) for answer in listed):
        raise DataError(
            "the reference answers cannot be read",
            where=where,
            got=answers,
            need="a text, or a list of texts and message lists",
            fix="wrap a single answer that is a list of messages in a list" if isinstance(answers, Sequence) else None,
        )
    ends = [
        [{"role": "assistant", "content": answer}]
        if isinstance(answer, str)
        else list(check_messages(answer, f"reference answer {i}", where))
        for i, answer in enumerate(listed)
    ]
    return [[*context, *end] for end in ends]


def _not_fitted(
    field: str, got: str, what: str, calibration: RewardCalibration | None, instead: str | None = None
) -> ConfigError:
    there = "no calibration" if calibration is None else f"a calibration without {what}"
    return ConfigError(
        f"{field} needs {what}, which the model does not have",
        where=_WHERE,
        field=field,
        got=f"{got}, and {there} in the model's contract",
        need=f"{what} fitted on comparisons",
        fix=f"fit one with `{_CALIBRATE}`" + (f", or give {instead}" if instead else ""),
    )
