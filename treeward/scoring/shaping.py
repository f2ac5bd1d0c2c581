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
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from scipy.special import expit, log_expit

from treeward.config.reward_shaping import LengthCurve, LengthUnit, RewardCalibration, RewardShapingConfig
from treeward.data.preference import Message, check_messages, last_text
from treeward.errors import CheckpointError, ConfigError, DataError
from treeward.scoring.score import Conversation, Reward, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reference = tuple[Score, Conversation]
"""A reference completion: its score by the same model, and the conversation that ends with it, for its length."""

_EPSILON = 1e-8
_WHERE = "reward_shaping"
_T = TypeVar("_T")


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
    differences = score - np.asarray(references, dtype=np.float64)
    return float((log_expit(differences) if kind == "log_sigmoid" else expit(differences)).mean())


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


@dataclass
class RunningStatistics:
    """Count, mean and variance of all numbers seen so far, without keeping them.

    M2 is the sum of squared differences from the mean. A batch b is added to the numbers a by Chan, Golub and LeVeque
    1979 (the formula of Welford 1962 where b is a single number):
    mean = mean_a + d n_b / n, M2 = M2_a + M2_b + d^2 n_a n_b / n, with d = mean_b - mean_a and n = n_a + n_b.
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

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
        self._curve: LengthCurve | None = None
        if config.length_calibration:
            self._curve = _fitted(known.length_curve, "length_calibration", "a length curve")
        if config.temperature == "calibrated":
            # The scores after the length curve have another spread, and so another temperature.
            found = known.temperature if self._curve is None else self._curve.residual_temperature
            self._temperature = _fitted(found, "temperature", "a temperature").value
        else:
            self._temperature = config.temperature or 1.0
        self._constants: tuple[float, float] | None = None
        if config.uses_contract_constants:
            if self._curve is not None:
                mean, std = self._curve.residual_mean, self._curve.residual_std
            else:
                normalization = _fitted(known.normalization, "normalize_rewards", "a mean and a standard deviation")
                mean, std = normalization.mean, normalization.std
            self._constants = mean / self._temperature, std / self._temperature
        elif config.normalize_rewards and config.reward_mean is not None and config.reward_std is not None:
            self._constants = config.reward_mean, config.reward_std
        units = {
            "length_calibration": self._curve and self._curve.unit,
            "length_penalty.unit": config.length_penalty and config.length_penalty.unit,
        }
        if tokenizer is None and "tokens" in units.values():
            raise ConfigError(
                "lengths are counted in tokens, and there is no tokenizer",
                where=_WHERE,
                need="the reward model's own tokenizer",
            )

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
        return {"running": asdict(self.statistics)} if self.config.running else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Raises `CheckpointError` for the state of another configuration."""
        if ("running" in state) != self.config.running:
            raise CheckpointError(
                "the reward shaping of the checkpoint is another one",
                field="running",
                got=sorted(state),
                fix="resume with the configuration that the run was started with",
            )
        if self.config.running:
            self.statistics = RunningStatistics(**state["running"])

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
            for i, (one, text) in enumerate(references):
                if one.score is None or not math.isfinite(one.score):
                    return Reward(None, score, error=f"{key}[{i}] has no score")
                adjusted.append(self._adjusted(one.score, text))
            value = relative_reward(value, adjusted, self.config.reference)
        if not math.isfinite(value):
            return Reward(None, score, error=f"the shaped reward is not finite: {value}")
        return Reward(value, score)

    def _adjusted(self, score: float, conversation: Conversation) -> float:
        """The steps that a completion and its references share: (r - c(L) - alpha max(0, L - L0)) / T."""
        if self._curve is not None:
            score -= length_effect(completion_length(conversation, self._curve.unit, self._tokenizer), self._curve)
        penalty = self.config.length_penalty
        if penalty is not None:
            length = completion_length(conversation, penalty.unit, self._tokenizer)
            score -= penalty.coefficient * max(0.0, length - penalty.threshold)
        return score / self._temperature

    def _normalized(self, shaped: Reward, value: float) -> Reward:
        """max(-c, min(c, (r - mean) / std)), with the clip c."""
        if self.config.running:
            if self.statistics.count == 0:
                return replace(shaped, value=None, error="there are no running statistics yet")
            mean, std = self.statistics.mean, self.statistics.std + _EPSILON
        elif self._constants is not None:
            mean, std = self._constants
        else:
            return shaped
        normalized, clip = (value - mean) / std, self.config.reward_clip
        if clip is not None:
            normalized = max(-clip, min(clip, normalized))
        if not math.isfinite(normalized):
            return replace(shaped, value=None, error=f"the normalised reward is not finite: {normalized}")
        return replace(shaped, value=normalized)


def reference_conversations(conversation: Conversation, completions: Any, where: str) -> list[list[Message]]:
    """The conversation with each reference completion in place of its last message.

    `completions`: the value of `reference_key`: a text, a list of texts and message lists, or None for no reference.
    Raises `DataError` for anything else; `where` names the sample.
    """
    listed = [completions] if isinstance(completions, str) else [] if completions is None else completions
    if not isinstance(listed, Sequence) or any(isinstance(one, Mapping) for one in listed):
        raise DataError(
            "the reference completions cannot be read",
            where=where,
            got=completions,
            need="a text, or texts and message lists",
        )
    ends = [
        [{"role": "assistant", "content": one}]
        if isinstance(one, str)
        else list(check_messages(one, f"reference completion {i}", where))
        for i, one in enumerate(listed)
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
