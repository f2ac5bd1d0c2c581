"""`ScoringConfig`: how a reward model is loaded and scores, in every section that names one;
`EnsembleConfig`: how the scores of several models are combined; `RewardShapingConfig`: how they
become rewards.

    models: [results/a/final, results/b/final]
    ensemble: {method: uncertainty, uncertainty_coefficient: 0.5}  # disagreement lowers the score
    shaping: {normalize_rewards: true, reward_mean: 1.5, reward_std: 0.5}

`treeward calibrate MODEL --data FILE` fits the constants and keeps them beside the weights, under
`calibration` of `reward_contract.json`. `treeward.scoring.shaping` has the formulas and the order
in which they are applied.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Tag,
)

from treeward.config.base import Strict, TextOrTexts
from treeward.config.policy import ScoringPrecision, ScoringTokenizerConfig


def _kind_of_temperature(raw: Any) -> str:
    return "<text>" if isinstance(raw, str) else "<number>"


# An error names the member that was meant: a number that is wrong is not told to be a text.
_Temperature = Annotated[
    Annotated[PositiveFloat, Tag("<number>")] | Annotated[Literal["calibrated"], Tag("<text>")],
    Discriminator(_kind_of_temperature),
]


class LengthPenaltyConfig(Strict):
    """A deduction from the score for each character above a threshold: `score - alpha * max(0,
    length - L0)`."""

    coefficient: PositiveFloat = 0.001
    """alpha: deducted per character above the threshold, in units of the model's score."""
    threshold: NonNegativeFloat = 500
    """L0: completions up to this length, in characters, lose nothing."""


class RewardShapingConfig(Strict):
    """How scores become rewards. As it stands, it changes nothing."""

    spread_penalty: NonNegativeFloat = 0.0
    """c of score - c * spread: how much a score loses for each unit of its spread, for a model
    whose scores have one."""
    length_calibration: bool = False
    """Subtract the score that length alone predicts, by the curve that `treeward calibrate` has
    fitted."""
    length_penalty: LengthPenaltyConfig | None = None
    """A deduction for long completions. None: no deduction."""
    temperature: _Temperature | None = None
    """Divide scores by this, or by what `treeward calibrate` has fitted (`calibrated`). None: they
    are not divided."""

    preference_score: bool = False
    """Rewards in [0, 1]: the sigmoid of the score, after length and temperature."""

    normalize_rewards: bool = False
    """Subtract a mean and divide by a standard deviation, as the last step."""
    reward_mean: float | None = None
    """The mean to subtract. None: from the model's contract."""
    reward_std: PositiveFloat | None = None
    """The standard deviation to divide by. None: from the model's contract."""
    reward_clip: PositiveFloat | None = 5.0
    """Normalised rewards are clipped to +- this many standard deviations; others are never clipped.
    None: no limit."""

    @property
    def uses_contract_constants(self) -> bool:
        """Whether the mean and standard deviation are those of the model's contract."""
        return self.normalize_rewards and self.reward_mean is None

    @property
    def uses_calibration(self) -> bool:
        """Whether it needs constants of the model's contract, which are fitted on comparisons."""
        return (
            self.uses_contract_constants
            or self.length_calibration
            or self.temperature == "calibrated"
        )

    def check(self) -> None:
        if (self.reward_mean is None) != (self.reward_std is None):
            # The error is at the first key: the one that is missing.
            keys = "reward_std reward_mean"
            if self.reward_mean is None:
                keys = "reward_mean reward_std"
            raise self.error(keys, "both of them, or neither for those of the model's contract")
        # Of NeMo Gym's defaults both stand beside `normalize_rewards: false`.
        if self.reward_mean is not None and "normalize_rewards" not in self.model_fields_set:
            need = "normalize_rewards: true, to use them; or false, if they are to have no effect"
            raise self.error("reward_mean normalize_rewards", need)
        if self.preference_score and self.normalize_rewards:
            raise self.error("preference_score normalize_rewards", "rewards in [0, 1] as they are")


Truncation = Literal["drop", "truncate_left", "error"]
StepScore = Literal["product", "min", "last"]
HeadWeights = Literal["mean"] | StepScore | dict[str, float] | tuple[float, ...]
EnsembleMethod = Literal["mean", "worst", "uncertainty"]


class EnsembleConfig(Strict):
    """How the members of an ensemble are combined: a section, or its `method` (Coste et al. 2023,
    arXiv 2310.02743)."""

    method: EnsembleMethod = "mean"
    """`mean`, `worst` (the smallest), or `uncertainty` (the mean less `uncertainty_coefficient`
    times the variance)."""
    uncertainty_coefficient: NonNegativeFloat = 0.5
    """Deduction for a unit of variance between members, with `method: uncertainty`."""
    spread_penalty: NonNegativeFloat = 0.0
    """c of min (score - c * spread), with `method: worst`, for members whose scores have a
    spread."""
    standardize: bool = True
    """Bring each member to mean 0 and deviation 1 first, by its calibration (`treeward
    calibrate`)."""

    def check(self) -> None:
        if self.spread_penalty > 0 and self.method != "worst":
            raise self.error(
                "spread_penalty method",
                "method: worst, of which it is a part",
                "reward_shaping.spread_penalty is for the spread of the whole ensemble",
            )


def _section_of_method(raw: Any) -> Any:
    return {"method": raw} if isinstance(raw, str) else raw


_Ensemble = Annotated[EnsembleConfig, BeforeValidator(_section_of_method)]


class ScoringConfig(Strict):
    """A reward model, or several as one, and how they score."""

    models: Annotated[TextOrTexts, Field(min_length=1)]
    """Folder or hub name of a reward model (also called model, model_name or model_path); several
    need `ensemble`."""
    ensemble: _Ensemble | None = None
    tokenizer: ScoringTokenizerConfig = ScoringTokenizerConfig()
    trust_remote_code: bool = False
    """Run Python code that the model's repository brings."""
    check_contract: bool = True
    """Refuse a model that does not reproduce the tokens and scores of its contract's golden
    conversations."""
    dtype: ScoringPrecision = "float32"
    """Number format of the backbone's weights: `float32`, `bfloat16` or `float16` (or `fp32`,
    `bf16`, `fp16`). The head is float32. float32 takes 4 bytes a parameter, 32 GB for an 8B model,
    the others half of it."""
    max_length: PositiveInt | None = None
    """Longest conversation, in tokens. None: as in the model's scoring contract, otherwise all of
    its positions."""
    truncation: Truncation | None = None
    """Longer conversations: no reward (`drop`), without their oldest messages and then their oldest
    tokens (`truncate_left`), `error`. None: as in training."""
    head_weights: HeadWeights | None = None
    """Weight of each head in the score, for a model with several: numbers in order or by the names
    of its labels (those not named have none), or `mean`. None: as in its scoring contract. Of a
    process reward model: the `product` of the probabilities of its steps, the least (`min`), or
    that of the `last` step. None: as in its scoring contract, else the product."""
    shaping: RewardShapingConfig | None = None
    """How scores become rewards. None: a reward is the score."""

    @property
    def has_other_score(self) -> bool:
        """Whether the score is not the one that the model's contract describes, so that its
        constants do not fit."""
        return self.ensemble is not None or self.head_weights is not None

    def check(self) -> None:
        if len(self.models) == 1:
            return
        if self.ensemble is None:
            raise self.error("models ensemble", "one model, or an `ensemble` section")
        if self.tokenizer != ScoringTokenizerConfig():
            raise self.error("tokenizer models", "no tokenizer: the models use their own")
