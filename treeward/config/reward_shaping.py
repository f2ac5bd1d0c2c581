"""`RewardShapingConfig`: how scores become rewards.

    reward_shaping: {normalize_rewards: true, reward_mean: 0.0, reward_std: 1.0}      # as written here
    reward_shaping: {normalize_rewards: true}                                         # those of the model's contract
    reward_shaping: {length_penalty: {coefficient: 0.001, threshold: 500}, reference: par}

`treeward calibrate MODEL --data FILE` fits the constants and keeps them beside the weights, under `calibration` of
`reward_contract.json`. `treeward.scoring.shaping` has the formulas and the order in which they are applied.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, NonNegativeFloat, PositiveFloat, Tag

from treeward.config.base import Strict

LengthUnit = Literal["characters", "tokens"]
"""Unit of the length of a completion: characters, or tokens without special ones."""


_is_text = Discriminator(lambda raw: "<text>" if isinstance(raw, str) else "<other>")
_Temperature = Annotated[
    Annotated[PositiveFloat, Tag("<other>")] | Annotated[Literal["calibrated"], Tag("<text>")], _is_text
]


class LengthPenaltyConfig(Strict):
    """A deduction from the score for each unit of length above a threshold: `score - alpha * max(0, length - L0)`."""

    coefficient: PositiveFloat = 0.001
    """alpha: deducted per unit of length above the threshold, in units of the model's score."""
    threshold: NonNegativeFloat = 500
    """L0: completions up to this length lose nothing."""
    unit: LengthUnit = "characters"
    """Unit of length, `characters` or `tokens`."""


class RewardShapingConfig(Strict):
    """How scores become rewards. As it stands, it changes nothing."""

    length_calibration: bool = False
    """Subtract the score that length alone predicts, by the curve that `treeward calibrate` has fitted."""
    length_penalty: LengthPenaltyConfig | None = None
    """A deduction for long completions. None: no deduction."""
    temperature: _Temperature | None = None
    """Divide scores by this, or by what `treeward calibrate` has fitted (`calibrated`). None: they are not divided."""

    reference: Literal["log_sigmoid", "par"] | None = None
    """Rewards relative to references: mean of log sigmoid(r - r_ref) (`log_sigmoid`), or without the log (`par`)."""
    reference_key: str = "reference_answers"
    """The key of `env_infos` with the reference completions of a sample: a text, or a list of texts and messages."""

    preference_score: bool = False
    """Rewards in [0, 1]: the sigmoid of the score, after length and temperature; `reference: par` is one already."""

    normalize_rewards: bool = False
    """Subtract a mean and divide by a standard deviation, as the last step."""
    reward_mean: float | None = None
    """The mean to subtract. None: from the model's contract."""
    reward_std: PositiveFloat | None = None
    """The standard deviation to divide by. None: from the model's contract."""
    missing_constants: Literal["refuse", "ignore"] = "refuse"
    """Without constants, here or in the contract, `normalize_rewards` is an error, or changes nothing and warns."""
    reward_clip: PositiveFloat | None = 5.0
    """Normalised rewards are clipped to +- this many standard deviations; others are never clipped. None: no limit."""

    @property
    def uses_contract_constants(self) -> bool:
        """Whether the mean and standard deviation are those of the model's contract."""
        return self.normalize_rewards and self.reward_mean is None

    @property
    def uses_calibration(self) -> bool:
        """Whether it needs constants of the model's contract, which are fitted on comparisons."""
        return self.uses_contract_constants or self.length_calibration or self.temperature == "calibrated"

    def check(self) -> None:
        self.check_pair("reward_mean", "reward_std", need="both of them, or neither for those of the model's contract")
        is_wrong = self.preference_score and (self.normalize_rewards or self.reference == "log_sigmoid")
        need = "rewards in [0, 1] as they are, or with reference: par"
        self.refuse(is_wrong, "preference_score normalize_rewards reference", need)
        is_wrong = self.reference is not None and self.uses_contract_constants
        need = "constants of the relative rewards; the contract's constants describe scores"
        fix = "set normalize_rewards to false: relative rewards are bounded from above already"
        self.refuse(is_wrong, "normalize_rewards reference", need, fix)


ShapingOrContract = Annotated[
    Annotated[RewardShapingConfig, Tag("<other>")] | Annotated[Literal["contract"], Tag("<text>")], _is_text
]
"""A section, or `contract` for the section in the model's scoring contract."""
