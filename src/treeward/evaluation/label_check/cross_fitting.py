"""`cross_fit`: what a Bradley-Terry head says of pairs whose prompts it has not seen.

    pairs = FeaturePairs(differences_PD, weight_P, prompt_P)
    fitted = cross_fit(pairs)
    fitted.margin_P, fitted.spread_P        # out of fold, in nats

The prompts are dealt into folds, and the pairs of each fold get their margins from a head that was
fitted on the other folds. The head is w in P(chosen wins) = sigmoid(w . z), where z is the
difference of the two completions' features, with a normal prior on w: logistic regression with a
ridge, by Newton's method.

The spread is that of the fitted head's Laplace approximation: `scoring/laplace.py`.

Shapes: P pairs, D features, N pairs that a head is fitted on, B of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treeward.scoring.laplace import (
    Floats,
    Posterior,
    blocks,
    folds_of,
    margins_of,
    root_mean_square,
    weighted_products,
)

NUM_FOLDS = 5
_PENALTIES: tuple[float, ...] = tuple(10.0 ** (halves / 2) for halves in range(10, -1, -1))
"""Precisions of the prior that are tried, in units of features with a root mean square of 1. From
the largest, which is the easiest fit, each fit begins where the one before has ended."""
_MOST_ITERATIONS = 50
_MOST_HALVINGS = 30
_TOLERANCE = 1e-9
"""Newton's method ends where a step lowers the loss by less than this share of it."""


@dataclass(frozen=True, slots=True)
class FeaturePairs:
    """Pairs of completions as a head reads them.

    `differences_PD`: float32, the better one's features less the worse one's. `weight_P`: what a
    pair counts in the fit. `prompt_P`: int64, the same for pairs that share a prompt, which are
    never fitted on and tested apart.
    """

    differences_PD: NDArray[np.float32]
    weight_P: Floats
    prompt_P: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CrossFit:
    """`margin_P`: out of fold, positive where the head agrees with the label. `spread_P`: its
    standard deviation. `fold_P`: the fold of each pair. `penalties`: the precision of the prior
    that each fold's head has."""

    margin_P: Floats
    spread_P: Floats
    fold_P: NDArray[np.int64]
    penalties: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Head:
    """A fitted head: `weights_D` of features that are divided by the scale of its `posterior`."""

    weights_D: Floats
    posterior: Posterior

    def margins(self, differences_PD: NDArray[np.float32]) -> Floats:
        return margins_of(differences_PD, self.weights_D / self.posterior.scale_D)

    def spreads(self, differences_PD: NDArray[np.float32]) -> Floats:
        return self.posterior.spreads(differences_PD)


def cross_fit(
    pairs: FeaturePairs,
    num_folds: int = NUM_FOLDS,
    on_progress: Callable[[int], object] = lambda num_folds_done: None,
    penalties: Sequence[float] | None = None,
) -> CrossFit:
    """The margin of each pair from a head that has not seen its prompt.

    The penalty is chosen inside the folds: one of the folds that a head may see is held out, and
    the penalty is the one under which its labels are the likeliest. `penalties`: those of an
    earlier fit, one for each fold, so that none is chosen.
    """
    fold_P = folds_of(pairs.prompt_P, num_folds)
    margin_P = np.zeros(len(fold_P))
    spread_P = np.zeros(len(fold_P))
    used_penalties = []
    for fold in range(num_folds):
        is_held_out = fold_P == fold
        if penalties is None:
            # One split for the choice and not four: the held-out loss is flat around its minimum.
            is_choosing = fold_P == (fold + 1) % num_folds
            penalty = _choose_penalty(pairs, ~is_held_out & ~is_choosing, is_choosing)
        else:
            penalty = penalties[fold]
        # With the penalty chosen, the fold that chose it is fitted on too.
        head = fit_head(pairs.differences_PD[~is_held_out], pairs.weight_P[~is_held_out], penalty)
        held_out_PD = pairs.differences_PD[is_held_out]
        margin_P[is_held_out] = head.margins(held_out_PD)
        spread_P[is_held_out] = head.spreads(held_out_PD)
        used_penalties.append(penalty)
        on_progress(fold + 1)
    return CrossFit(margin_P, spread_P, fold_P, tuple(used_penalties))


def fit_head(
    differences_ND: NDArray[np.float32],
    weight_N: Floats,
    penalty: float,
    start_D: Floats | None = None,
    target_N: Floats | None = None,
) -> Head:
    """The head that minimises sum_i c_i [q_i softplus(-m_i) + (1 - q_i) softplus(m_i)] + l/2 |w|^2,
    with m = w . z.

    `weight_N`: c. `target_N`: q, the probability that the better one wins; None: 1. `start_D`:
    where Newton's method begins, in units of the scaled features.
    """
    from scipy.linalg import cho_solve

    squares_D = np.zeros(differences_ND.shape[1])
    for block_BD in blocks(differences_ND):
        squares_D += np.square(block_BD).sum(axis=0)
    scale_D = root_mean_square(squares_D, len(differences_ND))
    if target_N is None:
        target_N = np.ones(len(weight_N))
    weights_D = np.zeros(len(scale_D))
    if start_D is not None:
        weights_D = start_D
    loss = _loss(differences_ND, scale_D, weight_N, target_N, weights_D, penalty)
    factor_DD: Floats = np.eye(len(scale_D))
    for _ in range(_MOST_ITERATIONS):
        gradient_D, hessian_DD = _derivatives(
            differences_ND, scale_D, weight_N, target_N, weights_D, penalty
        )
        factor_DD = np.linalg.cholesky(hessian_DD).astype(np.float64)
        step_D: Floats = cho_solve((factor_DD, True), gradient_D)
        before = loss
        share = 1.0
        for _ in range(_MOST_HALVINGS):
            candidate_D = weights_D - share * step_D
            loss = _loss(differences_ND, scale_D, weight_N, target_N, candidate_D, penalty)
            if loss <= before:
                weights_D = candidate_D
                break
            # Far from the minimum a whole step can overshoot.
            share /= 2
        else:
            break  # no step lowers the loss: what is left is rounding
        if before - loss <= _TOLERANCE * before:
            break
    # The Hessian of the point before the last step, which has lowered the loss by no more than
    # `_TOLERANCE`.
    return Head(weights_D, Posterior(factor_DD, scale_D))


def _choose_penalty(
    pairs: FeaturePairs, is_fitted: NDArray[np.bool_], is_choosing: NDArray[np.bool_]
) -> float:
    """The penalty under which the labels of `is_choosing` are the likeliest."""
    fitted_ND = pairs.differences_PD[is_fitted]
    weight_N = pairs.weight_P[is_fitted]
    choosing_PD = pairs.differences_PD[is_choosing]
    choosing_weight_P = pairs.weight_P[is_choosing]
    best_penalty = _PENALTIES[0]
    lowest = np.inf
    start_D: Floats | None = None
    num_worse = 0
    for penalty in _PENALTIES:
        head = fit_head(fitted_ND, weight_N, penalty, start_D)
        # The next fit begins here, a step or two from its end.
        start_D = head.weights_D
        margin_P = head.margins(choosing_PD)
        # softplus(-m), the negative log-likelihood of a label.
        loss = float(choosing_weight_P @ np.logaddexp(0.0, -margin_P))
        if loss < lowest:
            lowest = loss
            best_penalty = float(penalty)
            num_worse = 0
        else:
            num_worse += 1
        # The held-out loss falls and then rises, up to noise; the weakest penalties cost the most.
        if num_worse == 2:
            break
    return best_penalty


def _loss(
    differences_ND: NDArray[np.float32],
    scale_D: Floats,
    weight_N: Floats,
    target_N: Floats,
    weights_D: Floats,
    penalty: float,
) -> float:
    margin_N = margins_of(differences_ND, weights_D / scale_D)
    right_N = target_N * np.logaddexp(0.0, -margin_N)
    wrong_N = (1 - target_N) * np.logaddexp(0.0, margin_N)
    prior = penalty / 2 * float(weights_D @ weights_D)
    return float(weight_N @ (right_N + wrong_N)) + prior


def _derivatives(
    differences_ND: NDArray[np.float32],
    scale_D: Floats,
    weight_N: Floats,
    target_N: Floats,
    weights_D: Floats,
    penalty: float,
) -> tuple[Floats, Floats]:
    """The gradient (D,) and the Hessian (D, D) of the loss."""
    from scipy.special import expit

    gradient_D = penalty * weights_D
    hessian_DD = penalty * np.eye(len(weights_D))
    start = 0
    for block_BD in blocks(differences_ND):
        end = start + len(block_BD)
        scaled_BD = block_BD / scale_D
        probability_B = expit(scaled_BD @ weights_D)
        gradient_D += scaled_BD.T @ (weight_N[start:end] * (probability_B - target_N[start:end]))
        hessian_DD += weighted_products(scaled_BD, probability_B, weight_N[start:end])
        start = end
    return gradient_D, hessian_DD
