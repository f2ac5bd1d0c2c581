"""`EnsembleConfig`: how the scores of several reward models, or of several heads of one model, are combined.

ensemble: {method: uncertainty, uncertainty_coefficient: 0.5}     # disagreement lowers the score
"""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from treeward.config.base import Strict

HeadWeights = Literal["mean"] | dict[str, float] | tuple[float, ...]
EnsembleMethod = Literal["mean", "worst", "uncertainty"]


class EnsembleConfig(Strict):
    """How the members of an ensemble are combined (Coste et al. 2023, arXiv 2310.02743)."""

    method: EnsembleMethod = "mean"
    """`mean`, `worst` (the smallest), or `uncertainty` (the mean less `uncertainty_coefficient` times the variance)."""
    uncertainty_coefficient: NonNegativeFloat = 0.5
    """Deduction for a unit of variance between members, with `method: uncertainty`."""
    over: Literal["models", "heads"] = "models"
    """The members: several models, or the heads of one model."""
    standardize: bool = True
    """Bring each member to mean 0 and deviation 1 first, by its calibration (`treeward calibrate`) or as below. Heads
    that have learnt one score (`num_heads`) have its unit: they are standardized only by `means` and `stds`."""
    means: tuple[float, ...] | None = None
    """The mean of each member's scores, in the members' order. None: those of the models' calibrations."""
    stds: tuple[PositiveFloat, ...] | None = None
    """The standard deviation of each member's scores, in the members' order. None: those of the calibrations."""

    def check(self) -> None:
        self.check_pair("means", "stds", need="both of them, one number for each member, or neither")
        is_uneven = len(self.means or ()) != len(self.stds or ())
        self.refuse(is_uneven, "stds means", "one number for each member in both")
        is_unread, need = self.means is not None and not self.standardize, "standardize: true, or no means and stds"
        self.refuse(is_unread, "standardize means", need)
