"""`ScoringConfig`: how a reward model is loaded and scores, in every section that names one; and `EnsembleConfig`: how
the scores of several models, or of several heads of one, are combined.

model: results/rm/final
head_weights: mean
ensemble: {method: uncertainty, uncertainty_coefficient: 0.5}     # disagreement lowers the score
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from treeward.config.base import Strict, TextOrTexts
from treeward.config.policy import ScoringPrecision, ScoringTokenizerConfig
from treeward.config.reward_shaping import ShapingOrContract

Truncation = Literal["drop", "truncate_left", "error"]
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


class ScoringConfig(Strict):
    """A reward model, or several as one, and how they score."""

    other_names: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("model", "model_name", "model_path"), "models"),
        "precision": "dtype",
        "max_model_len": "max_length",
        "reward_shaping": "shaping",
    }

    models: Annotated[TextOrTexts, Field(min_length=1)]
    """Folder or hub name of a reward model; several models need `ensemble`."""
    ensemble: EnsembleConfig | None = None
    tokenizer: ScoringTokenizerConfig = ScoringTokenizerConfig()
    trust_remote_code: bool = False
    """Run Python code that the model's repository brings."""
    check_contract: bool = True
    """Refuse a model that does not reproduce the tokens and scores of its contract's golden conversations."""
    dtype: ScoringPrecision = "float32"
    """Number format of the backbone's weights: `float32`, `bfloat16` or `float16`. The head is float32."""
    max_length: PositiveInt | None = None
    """Longest conversation, in tokens. None: as in the model's scoring contract, otherwise all of its positions."""
    truncation: Truncation | None = None
    """Longer conversations: no reward (`drop`), oldest tokens cut (`truncate_left`), `error`. None: as in training."""
    head_weights: HeadWeights | None = None
    """Weight of each head in the score, for a model with several: numbers in order or by the names of its labels (those
    not named have none), or `mean`. None: as in its scoring contract."""
    shaping: ShapingOrContract | None = None
    """How scores become rewards; `contract`: as the model's scoring contract says. None: a reward is the score."""

    @property
    def has_other_score(self) -> bool:
        """Whether the score is not the one that the model's contract describes, so that its constants do not fit."""
        return self.ensemble is not None or self.head_weights is not None

    def check(self) -> None:
        are_several = len(self.models) > 1
        is_ensemble = self.ensemble is not None and self.ensemble.over == "models"
        need = "one model, or an `ensemble` section with over: models"
        self.refuse(are_several and not is_ensemble, "models ensemble", need)
        is_extra, need = self.tokenizer != ScoringTokenizerConfig(), "no tokenizer: the models use their own"
        self.refuse(are_several and is_extra, "tokenizer models", need)
