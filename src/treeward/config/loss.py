"""`LOSSES`: every loss of a reward model, one entry each; and `rm.loss`, the options of all of
them.

    "hinge": Loss(
        function="hinge",                                   # of `treeward.losses`
        learns="pairs",
        options=("weight", "margin"),                       # keys of `rm.loss` that it reads
        meaning="a is preferred to b where score(a) > score(b) + margin",
    ),

    # A new option, in `LossConfig`, with a docstring.
    margin: NonNegativeFloat = 1.0

`policy.reward_model_cfg.reward_model_type` names the loss. With any other loss the option is an
error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from treeward.config.base import Strict


@dataclass(frozen=True, slots=True)
class Loss:
    """`function`: its name in `treeward.losses`. It takes scores (S,) with `Pairs`, or where grades
    are learnt values (S, H) with `Targets`, and its options by name; it gives a sum.

    `learns`: pairs of completions, choices of the best one, grades, or labels of steps. `options`:
    the keys of `LossConfig` that count: those of `LabelConfig` and `StepLabelConfig` are read
    before the function, the others are its arguments. `meaning`: what a score means, for the card
    of a trained model; `{grades}` are the names of the grades.
    """

    function: str
    learns: Literal["pairs", "choices", "grades", "steps"]
    options: tuple[str, ...]
    meaning: str


_DIFFERENCES = "Only differences of scores of completions of the same prompt have a meaning"
_LOG_ODDS = f"{_DIFFERENCES}: P(a is preferred to b) = sigmoid(score(a) - score(b))."
_STEPS = (
    "It is a probability, made of those of the steps that each is right, as reward_contract.json "
    "says."
)
_GRADES = "It is a weighted sum of predicted grades, as reward_contract.json says: {grades}."

LOSSES: Mapping[str, Loss] = {
    "bradley_terry": Loss(
        function="bradley_terry",
        learns="pairs",
        options=(
            "weight",
            "strength",
            "strength_scale",
            "label_smoothing",
            "center_rewards_coefficient",
        ),
        meaning=_LOG_ODDS,
    ),
    "plackett_luce": Loss(
        function="plackett_luce", learns="choices", options=("weight",), meaning=_LOG_ODDS
    ),
    "regression": Loss(function="squared_error", learns="grades", options=(), meaning=_GRADES),
    "attributes": Loss(function="squared_error", learns="grades", options=(), meaning=_GRADES),
    "process": Loss(
        function="step_cross_entropy",
        learns="steps",
        options=("step_weight", "last_step_only"),
        meaning=_STEPS,
    ),
}

if TYPE_CHECKING:
    RewardModelType = str
else:
    RewardModelType = Literal[tuple(LOSSES)]  # a name of no loss is an error, with the nearest one


class LabelConfig(Strict):
    """What becomes of the labels before the loss reads them: arguments of `losses.ranked_pairs`."""

    weight: Literal["group", "pair"] = "group"
    """What weighs the same: comparisons, however many pairs they have, or pairs (`plackett_luce`:
    choices)."""
    strength: Literal["margin", "soft_label", "weight"] | None = None
    """What becomes of by how much a completion is better (the keys are in docs/data.md): a margin
    that the difference of the scores should exceed, the log-odds of a soft label, or the weight of
    the pair. None: it is not used."""
    strength_scale: PositiveFloat = 1.0
    """Strengths are multiplied by it."""


class StepLabelConfig(Strict):
    """The same for the labels of steps: `step_weight` is an argument of
    `step_losses.labelled_steps`, `last_step_only` one of `encode_steps`."""

    step_weight: Literal["copies", "node"] = "copies"
    """`process`: a step that several solutions of a problem share is computed once. It weighs as
    many as have judged it (`copies`), which is what separate rows give, or 1 (`node`)."""
    last_step_only: bool = False
    """`process`: learn only the last label of each solution, in the training sets. A validation
    measures all."""


class LossConfig(LabelConfig, StepLabelConfig):
    """Options of the loss, which `policy.reward_model_cfg.reward_model_type` chooses."""

    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """The assumed probability that a label is wrong."""
    center_rewards_coefficient: NonNegativeFloat = 0.0
    """Weight of the mean square of score(chosen) + score(rejected), which keeps scores near zero.
    0: off."""

    def arguments(self, loss: str) -> dict[str, Any]:
        """The options that the function of this loss gets, by name."""
        of_labels = {*LabelConfig.model_fields, *StepLabelConfig.model_fields}
        names = [name for name in LOSSES[loss].options if name not in of_labels]
        return {name: getattr(self, name) for name in names}


def readers(option: str) -> list[str]:
    """The losses that read an option of `LossConfig`."""
    return [name for name, loss in LOSSES.items() if option in loss.options]
