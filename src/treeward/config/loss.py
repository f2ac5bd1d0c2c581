"""`rm.loss`: the options of a reward model's loss, each with the losses that read it.

    "hinge": "pairs",                   # in LEARNS, and its name in RewardModelType
    "margin": ("hinge",),               # in READ_BY
    margin: NonNegativeFloat = 1.0      # in LossConfig, with a docstring that documents it

makes `rm.loss.margin` an argument of `hinge` in `losses.py`, and an error with every other loss.
`policy.reward_model_cfg.reward_model_type` names the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from treeward.config.base import Strict

RewardModelType = Literal["bradley_terry", "plackett_luce", "regression", "attributes"]


LEARNS: Mapping[RewardModelType, Literal["pairs", "choices", "grades"]] = {
    "bradley_terry": "pairs",
    "plackett_luce": "choices",
    "regression": "grades",
    "attributes": "grades",
}
"""What a loss learns: pairs of completions, choices of the best one, or grades. The functions are in `LOSSES` of
`losses.py`, by the same names."""


READ_BY: Mapping[str, tuple[RewardModelType, ...]] = {
    "weight": ("bradley_terry", "plackett_luce"),
    "strength": ("bradley_terry",),
    "strength_scale": ("bradley_terry",),
    "label_smoothing": ("bradley_terry",),
    "center_rewards_coefficient": ("bradley_terry",),
}
"""The losses that read an option of `LossConfig`, by their names in `losses.LOSSES`."""


class LabelConfig(Strict):
    """What becomes of the labels before the loss reads them: arguments of `losses.ranked_pairs`."""

    weight: Literal["group", "pair"] = "group"
    """What weighs the same: comparisons, however many pairs they have, or pairs (`plackett_luce`: choices)."""
    strength: Literal["margin", "soft_label", "weight"] | None = None
    """What becomes of by how much a completion is better (the keys are in docs/data.md): a margin that the difference
    of the scores should exceed, the log-odds of a soft label, or the weight of the pair. None: it is not used."""
    strength_scale: PositiveFloat = 1.0
    """Strengths are multiplied by it."""


class LossConfig(LabelConfig):
    """Options of the loss, which `policy.reward_model_cfg.reward_model_type` chooses."""

    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """The assumed probability that a label is wrong."""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the mean square of score(chosen) + score(rejected), which keeps scores near zero. 0: off."""

    def arguments(self, loss: RewardModelType) -> dict[str, Any]:
        """The options that the function of this loss gets, by name."""
        names = LossConfig.model_fields.keys() - LabelConfig.model_fields.keys()
        return {name: getattr(self, name) for name in names if loss in READ_BY[name]}
