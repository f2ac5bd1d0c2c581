"""`Shaper`: scores in, rewards out; the only code that turns a model's score into a policy's reward.

    shaper = Shaper(RewardShapingConfig(length_penalty=LengthPenaltyConfig()), tokenizer=None)
    shaper.shape([Score(1.25)], [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4." * 300}]])
    # [Reward(value=1.15, score=Score(1.25), ...)]: 600 characters, 0.001 for each above 500

Each step is off unless the configuration asks for it. The order is fixed:

1. length calibration and length penalty, on the raw score: the curve and the coefficient are in its units;
2. temperature, which turns a score into log-odds;
3. reference completions: the sigmoid takes a difference of log-odds. References go through steps 1 and 2 with their own
   lengths: otherwise a long completion would pay for its length, and the long reference beside it would not;
4. normalisation and clipping, last, because they set the scale and the bounds of the policy's reward.

A missing score stays missing: `Reward.value` is None and `error` says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from treeward.config.reward_shaping import LengthCurve, LengthUnit, RewardCalibration, RewardShapingConfig
from treeward.data.preference import Message, check_messages, last_text
from treeward.errors import CheckpointError, ConfigError, DataError
from treeward.scoring.score import Conversation, Reward, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Reference", "RunningStatistics", "Shaper", "completion_length", "length_deduction", "length_effect"]
__all__ += ["log_sigmoid", "normalize", "reference_conversations", "relative_reward", "sigmoid"]

Reference = tuple[Score, Conversation]
"""A reference completion: its score by the same model, and the conversation that ends with it, for its length."""

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
    """A reward relative to M >= 1 reference completions of the same prompt, from log-odds r and r_ref_m.

    `log_sigmoid`: 1/M sum_m log sigma(r - r_ref_m), in (-inf, 0); Wang et al. 2024 (arXiv 2402.00742) with M = 1.
    `par`: 1/M sum_m sigma(r - r_ref_m), in (0, 1); Fu et al. 2025 (arXiv 2502.18770), who find M = 1 sufficient.
    Both flatten out where the completion is better than its references: there is less to gain by exploiting the model.
    """
    transform = log_sigmoid if kind == "log_sigmoid" else sigmoid
    return math.fsum(transform(score - reference) for reference in references) / len(references)


def completion_length(conversation: Conversation, unit: LengthUnit, tokenizer: PreTrainedTokenizerBase | None) -> int:
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

    M2 is the sum of squared differences from the mean. A batch b is added to the numbers a by Chan, Golub and LeVeque
    1979 (the formula of Welford 1962 where b is a single number):
    mean = mean_a + d n_b / n, M2 = M2_a + M2_b + d^2 n_a n_b / n, with d = mean_b - mean_a and n = n_a + n_b.
    """

    def __init__(self, count: int = 0, mean: float = 0.0, m2: float = 0.0) -> None:
        self.count, self.mean, self.m2 = count, mean, m2

    @property
    def std(self) -> float:
        """Standard deviation of the population, sqrt(M2 / n); 0 before the first number."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def update(self, values: Iterable[float]) -> None:
        """Add finite numbers; their order makes no difference."""
        batch = list(values)
        if not batch:
            return
        mean = math.fsum(batch) / len(batch)
        count, difference = self.count + len(batch), mean - self.mean
        self.m2 += math.fsum((value - mean) ** 2 for value in batch)
        self.m2 += difference**2 * self.count * len(batch) / count
        self.mean += difference * len(batch) / count
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        """Count, mean and M2, for JSON."""
        return {"count": self.count, "mean": self.mean, "m2": self.m2}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises `CheckpointError` where it holds no running statistics."""
        values = [state.get(key) for key in ("count", "mean", "m2")]
        numbers = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
        if len(numbers) != len(values) or numbers[0] < 0 or numbers[2] < 0:
            raise CheckpointError(
                "the state holds no running statistics", got=dict(state), need="count, mean and m2, finite numbers"
            )
        self.count, self.mean, self.m2 = int(numbers[0]), numbers[1], numbers[2]


# --- the shaper ------------------------------------------------------------------------------------------------------


class Shaper:
    """Turns scores into rewards by a `RewardShapingConfig`.

    `calibration`: the fitted constants, as `Scorer.contract.calibration`. `tokenizer`: the reward model's own, where
    lengths are in tokens. Raises `ConfigError` where constants or a tokenizer are needed and missing. The contract's
    constants are adapted to the steps before the normalisation: after length calibration they are those of the
    calibrated scores, and a temperature divides them too.
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
    def reads_completions(self) -> bool:
        """Whether a reward depends on the text of the completion, and not on its score alone."""
        config = self.config
        return self._curve is not None or config.length_penalty is not None or config.reference is not None

    def shape(
        self,
        scores: Sequence[Score],
        conversations: Sequence[Conversation],
        references: Sequence[Sequence[Reference] | None] | None = None,
        *,
        update: bool = True,
    ) -> list[Reward]:
        """One reward for each score, in order; B scores, B conversations.

        `references`: the reference completions of each sample, read where the configuration asks for them; a sample
        without references, or with a reference that has no score, gets no reward. `update`: running statistics take
        this batch in before it is normalised; in validation they stay unchanged, and before the first update there is
        no reward.
        """
        given = [None] * len(scores) if references is None else references
        shaped = [self._relative(*item) for item in zip(scores, conversations, given, strict=True)]
        if self.config.running and update:
            self.statistics.update(one.value for one in shaped if one.value is not None)
        return [one if one.value is None else self._normalized(one, one.value) for one in shaped]

    def state_dict(self) -> dict[str, Any]:
        """The state that an exact resume needs: the running statistics, if any. JSON."""
        return {"running": self.statistics.state_dict()} if self.config.running else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Raises `CheckpointError` for the state of another configuration."""
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

    def _relative(self, score: Score, conversation: Conversation, references: Sequence[Reference] | None) -> Reward:
        """All steps before the normalisation."""
        if score.score is None or not math.isfinite(score.score):
            missing = "there is no score" if score.score is None else f"the score is not finite: {score.score}"
            return Reward(None, score, error=score.error or missing)
        value = self._adjusted(score.score, conversation)
        if self.config.reference is not None:
            if not references:
                return Reward(None, score, error=f"there are no {self.config.reference_key} to compare with")
            failed = [i for i, (one, _) in enumerate(references) if one.score is None or not math.isfinite(one.score)]
            if failed:
                words = f"has no score ({len(failed)} of {len(references)} have none)"
                return Reward(None, score, error=f"{self.config.reference_key}[{failed[0]}] {words}")
            adjusted = [self._adjusted(one.score, text) for one, text in references if one.score is not None]
            value = relative_reward(value, adjusted, self.config.reference)
        if not math.isfinite(value):
            return Reward(None, score, error=f"the shaped reward is not finite: {value}")
        return Reward(value, score)

    def _adjusted(self, score: float, conversation: Conversation) -> float:
        """The steps that a completion and its references share."""
        if self._curve is not None:
            score -= length_effect(completion_length(conversation, self._curve.unit, self._tokenizer), self._curve)
        penalty = self.config.length_penalty
        if penalty is not None:
            length = completion_length(conversation, penalty.unit, self._tokenizer)
            score -= length_deduction(length, penalty.coefficient, penalty.threshold)
        return score / self._temperature

    def _normalized(self, shaped: Reward, value: float) -> Reward:
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
            # The scores after the length curve have another spread, and so another temperature.
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


def reference_conversations(conversation: Conversation, completions: Any, where: str) -> list[list[Message]]:
    """The conversation with each reference completion in place of its last message.

    `completions`: the value of `reference_key`: a text, a list of texts and message lists, or None for no reference.
    Raises `DataError` for anything else; `where` names the sample.
    """
    context = [dict(message) for message in conversation[:-1]]
    if completions is None:
        return []
    listed = [completions] if isinstance(completions, str) else completions
    if not isinstance(listed, Sequence) or any(not isinstance(one, str | Sequence) for one in listed):
        raise DataError(
            "the reference completions cannot be read",
            where=where,
            got=completions,
            need="a text, or a list of texts and message lists",
            fix="put a single list of messages in a list" if isinstance(completions, Sequence) else None,
        )
    ends = [
        [{"role": "assistant", "content": one}]
        if isinstance(one, str)
        else list(check_messages(one, f"reference completion {i}", where))
        for i, one in enumerate(listed)
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
