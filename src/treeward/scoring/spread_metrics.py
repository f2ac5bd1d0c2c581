"""What a spread is worth on pairs whose order is known: numbers of margins and their spreads.

    spread_metrics(margin_P, spread_P, temperature_P, half_P)    # `SpreadMetrics`, of the contract
    calibration_error(margin_P)                             # ECE, of both orientations

The numbers and their defaults are those of RewardUQ (2602.24040; its metrics.py, commit 9f86e163):
20 bins, both orientations of each pair, and bounds of a margin at half a standard deviation below
and above it. Its own bounds are of two rewards, and add up what both completions share; here the
spread is that of the margin. With both orientations ELCE and EUCE are mirror images, and equal.

Shapes: P pairs, of which the first completion is the better one; N = 2 P with both orientations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import rankdata

from treeward.model.contract import SpreadMetrics
from treeward.scoring.laplace import Floats, moderated

NUM_BINS = 20
BOUND = 0.5
"""Standard deviations from a margin to its bounds."""
BETAS = (0.0, 0.01, 0.2, 1.0)
"""Of the ranking scores: 0 counts shares of the true and of the false pairs, 1 of all pairs."""


def spread_metrics(
    margin_P: Floats, spread_P: Floats, temperature_P: Floats, part_P: NDArray[np.int64]
) -> SpreadMetrics:
    """Numbers of margins by themselves, divided by a temperature, and with their spreads.

    `temperature_P`: fitted on other pairs. `part_P`: the part of each pair, by which spreads may
    have another prior, so that only pairs of one part are compared. A spread that is the same for
    all pairs does no more than a temperature, which is why both stand side by side.
    """
    cooled_P = margin_P / temperature_P
    moderated_P = moderated(margin_P, spread_P)
    lower_P = margin_P - BOUND * spread_P
    upper_P = margin_P + BOUND * spread_P
    is_true_P = margin_P > 0
    # Where margin and spread are 0 the completions have the same features: nothing is surer.
    sureness_P = np.divide(
        np.abs(margin_P), spread_P, out=np.zeros(len(margin_P)), where=spread_P > 0
    )
    return SpreadMetrics(
        num_pairs=len(margin_P),
        accuracy=float(is_true_P.mean()),
        nll=negative_log_likelihood(margin_P),
        nll_temperature=negative_log_likelihood(cooled_P),
        nll_spread=negative_log_likelihood(moderated_P),
        ece=calibration_error(margin_P),
        ece_temperature=calibration_error(cooled_P),
        ece_spread=calibration_error(moderated_P),
        elce=lower_calibration_error(lower_P, upper_P),
        euce=upper_calibration_error(lower_P, upper_P),
        confident_true=float((lower_P > 0).mean()),
        confident_false=float((upper_P < 0).mean()),
        ranking={f"{beta:g}": ranking_score(margin_P, lower_P, upper_P, beta) for beta in BETAS},
        auroc_margin=auroc(np.abs(margin_P), is_true_P, part_P),
        auroc_sureness=auroc(sureness_P, is_true_P, part_P),
    )


def negative_log_likelihood(log_odds_P: Floats) -> float:
    """The mean of -log sigmoid(m), in nats."""
    return float(np.mean(np.logaddexp(0.0, -log_odds_P)))


def calibration_error(log_odds_P: Floats) -> float:
    """ECE: the mean over the bins of |frequency - mean probability|, weighted by their pairs (Guo
    et al. 2017, arXiv 1706.04599)."""
    probability_N = np.concatenate([expit(log_odds_P), expit(-log_odds_P)])
    return _binned_error(probability_N, np.abs)


def lower_calibration_error(lower_P: Floats, upper_P: Floats) -> float:
    """ELCE: by how much lower bounds of the probability exceed the frequency, in their bins."""
    # Of the pair the other way round, the lower bound is what its upper one leaves.
    probability_N = np.concatenate([expit(lower_P), expit(-upper_P)])
    return _binned_error(probability_N, lambda excess: np.maximum(excess, 0.0))


def upper_calibration_error(lower_P: Floats, upper_P: Floats) -> float:
    """EUCE: by how much the frequency exceeds upper bounds of the probability, in their bins."""
    probability_N = np.concatenate([expit(upper_P), expit(-lower_P)])
    return _binned_error(probability_N, lambda excess: np.maximum(-excess, 0.0))


def _binned_error(probability_N: Floats, error: Callable[[Floats], Floats]) -> float:
    """The mean over `NUM_BINS` bins of `error` of (mean probability - frequency), weighted by what
    they hold. The first half of the probabilities is of pairs as they are, which are right, and the
    second of the same pairs the other way round."""
    is_right_N = np.arange(len(probability_N)) < len(probability_N) // 2
    edges = np.linspace(0.0, 1.0, NUM_BINS + 1)
    bin_N = np.digitize(probability_N, edges[1:-1])
    right_bins = np.bincount(bin_N, weights=is_right_N, minlength=NUM_BINS)
    probability_bins = np.bincount(bin_N, weights=probability_N, minlength=NUM_BINS)
    # Both means have the same count, which is also the bin's weight, and so it cancels.
    excess_bins = (probability_bins - right_bins).astype(np.float64)
    return float(error(excess_bins).sum() / len(probability_N))


def ranking_score(margin_P: Floats, lower_P: Floats, upper_P: Floats, beta: float) -> float:
    """CT / ((1 - b) T + b) - CF / ((1 - b) F + b).

    T and F are the shares of pairs in the right and in the wrong order, CT and CF of those whose
    interval leaves no doubt about it. A share of nothing is 0.
    """
    true = float((margin_P > 0).mean())
    confident_true = float((lower_P > 0).mean())
    confident_false = float((upper_P < 0).mean())
    reward = _share(confident_true, (1 - beta) * true + beta)
    loss = _share(confident_false, (1 - beta) * (1 - true) + beta)
    return reward - loss


def _share(part: float, whole: float) -> float:
    if whole == 0:
        return 0.0
    return part / whole


def auroc(value_P: Floats, is_true_P: NDArray[np.bool_], part_P: NDArray[np.int64]) -> float | None:
    """The chance that a pair in the right order has a larger value than one of its part in the
    wrong order; a tie is half. None where all are right, or all are wrong."""
    num_above = 0.0
    num_compared = 0
    for part in np.unique(part_P):
        value_N = value_P[part_P == part]
        is_true_N = is_true_P[part_P == part]
        num_true = int(is_true_N.sum())
        # The Mann-Whitney statistic: the true ones' ranks, less what they are among themselves.
        num_above += rankdata(value_N)[is_true_N].sum() - num_true * (num_true + 1) / 2
        num_compared += num_true * (len(is_true_N) - num_true)
    if num_compared == 0:
        return None
    return float(num_above / num_compared)
