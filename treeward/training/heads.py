"""`Heads`: what each head of a reward model learns, and how the heads make one score.

    heads = heads_of(config.policy.reward_model_cfg, training_sets)
    heads.weights, heads.contract()         # as they are while the model trains, and in its checkpoints

Grades are learnt as they are: a mean and a scale that were taken out would have to be folded into the head at the
export, and the heads of decoders in transformers have no bias to hold a mean. The squared errors are in units of the
training data's standard deviation, so that no attribute counts more for its scale alone.

Several heads of one score (`num_heads`) differ in their initial weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit

from treeward.config.policy import RewardModelConfig
from treeward.data.encoding import EncodedDataset
from treeward.model.contract import ESTIMATE_MEANING, HeadContract

logger = logging.getLogger(__name__)

_PENALTY = 1.0  # as of one pair in all


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads with the `attributes` that they learn; none where the score learns an order.

    Of each head `weights`: in the score; `means`, `stds`: of its grades in the training data, 0 and 1 without grades.
    `are_estimates`: all of them learn the one score.
    """

    attributes: tuple[str, ...] = ()
    weights: tuple[float, ...] = (1.0,)
    means: tuple[float, ...] = (0.0,)
    stds: tuple[float, ...] = (1.0,)
    are_estimates: bool = False

    def contract(self) -> list[HeadContract] | None:
        """The heads of the scoring contract; None: the model's own."""
        if self.are_estimates:
            weights = enumerate(self.weights)
            return [HeadContract(name=f"LABEL_{h}", meaning=ESTIMATE_MEANING, weight=weight) for h, weight in weights]
        if not self.attributes:
            return None
        return [
            HeadContract(name=name, meaning=f"the grade {name} of the training data", weight=weight)
            for name, weight in zip(self.attributes, self.weights, strict=True)
        ]

    def fitted(self, differences_PH: NDArray[np.float64]) -> Heads:
        """With the weights under which the score orders pairs best; as they are where there is no pair.

        `differences_PH`: of the values of the better completion and the worse one. Logistic regression without a
        constant; a small penalty keeps the weights of pairs finite that can be told apart.
        """
        units_H = differences_PH.std(axis=0) if len(differences_PH) else np.zeros(0)
        if not len(differences_PH) or not units_H.all():
            logger.warning("The weights of the heads stay as they are: there are no pairs to fit them to.")
            return self
        x_PH = differences_PH / units_H

        def loss(weights_H: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
            margins_P = x_PH @ weights_H
            slope_H = -(x_PH * expit(-margins_P)[:, None]).mean(axis=0)
            penalty = _PENALTY / len(x_PH)
            value = np.logaddexp(0.0, -margins_P).mean() + penalty * (weights_H**2).sum()
            return float(value), slope_H + 2 * penalty * weights_H

        found = minimize(loss, np.zeros(x_PH.shape[1]), jac=True).x / units_H
        return replace(self, weights=tuple(found.tolist()))


def heads_of(config: RewardModelConfig, training_sets: Iterable[EncodedDataset], num_heads: int) -> Heads:
    """The heads of a run, whose model has `num_heads`. Weights that are to be fitted are those of the mean until then.

    The values of a published model without attributes are parts of its score.
    """
    names, given, times = config.labels, config.attribute_weights, config.num_heads
    if not names:
        weights_H, zeros_H, ones_H = ((constant,) * num_heads for constant in (1 / times, 0.0, 1.0))
        return Heads((), weights_H, zeros_H, ones_H, are_estimates=times > 1)
    grades_NH = np.concatenate([dataset.grades for dataset in training_sets])
    stds = np.nanstd(grades_NH, axis=0)
    weights = [given.get(name, 0.0) if isinstance(given, dict) else 1 / len(names) / times for name in names]
    means, units = np.nanmean(grades_NH, axis=0).tolist(), np.where(stds > 0, stds, 1.0).tolist()
    weights_H, means_H, units_H = (tuple(own * times) for own in (weights, means, units))
    return Heads(names, weights_H, means_H, units_H, are_estimates=times > 1)
