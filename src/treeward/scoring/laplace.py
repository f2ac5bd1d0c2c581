"""The Laplace approximation of a Bradley-Terry head: how sure a head is of a margin.

    curvature = Curvature(num_features)
    curvature.add(differences_PD, margin_P, weight_P)       # as often as there are blocks of pairs
    posterior = curvature.posterior(penalty=10.0)
    posterior.spreads(differences_PD)                       # standard deviations of margins, nats

A head w says P(chosen wins) = sigmoid(w . z), where z is the difference of the two completions'
features. With a normal prior of precision l on w, the posterior is about normal around the head
that was fitted (MacKay 1992, Neural Computation 4, page 448), with the inverse covariance

    H = l I + sum_i c_i s_i (1 - s_i) z_i z_i',      s_i = sigmoid(w . z_i)

so the variance of a margin is z' H^-1 z for the *difference* z, in which what both completions
share cancels. The labels are not in H: at a maximum of the likelihood only the margins count.

Features are divided by their root mean square first. Hidden states have a few features that are a
thousand times the others; one prior for all would leave those alone and silence the rest. No mean
is taken off: z and -z are one pair.

Shapes: P pairs, D features, B pairs of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.special import expit

Floats = NDArray[np.float64]

_BLOCK = 8192
"""Pairs that are computed at once in float64: a bound of the memory."""


def blocks(rows_ND: NDArray[np.float32]) -> Iterator[Floats]:
    """The rows in blocks, in float64."""
    for start in range(0, len(rows_ND), _BLOCK):
        yield rows_ND[start : start + _BLOCK].astype(np.float64)


def margins_of(rows_ND: NDArray[np.float32], weights_D: Floats) -> Floats:
    """The margin of each pair by a head of these weights, (N,)."""
    margin_N = np.zeros(len(rows_ND))
    start = 0
    # By blocks: a product of float32 and float64 copies the whole matrix into float64.
    for block_BD in blocks(rows_ND):
        end = start + len(block_BD)
        margin_N[start:end] = block_BD @ weights_D
        start = end
    return margin_N


def folds_of(prompt_P: NDArray[np.int64], num_folds: int) -> NDArray[np.int64]:
    """The fold of each pair. Prompts are digests, so their order is random, and it is the same
    whatever the order of the data; dealt out in that order they make folds of equal size."""
    _, place_P = np.unique(prompt_P, return_inverse=True)
    return place_P.astype(np.int64) % num_folds


def root_mean_square(squares_D: Floats, num_rows: int) -> Floats:
    """The scale of each feature from its sum of squares; 1 of one that is always 0."""
    scale_D = np.sqrt(squares_D / num_rows)
    scale_D[scale_D == 0] = 1.0
    return scale_D


def weighted_products(rows_BD: Floats, probability_B: Floats, weight_B: Floats) -> Floats:
    """sum_i c_i s_i (1 - s_i) z_i z_i', (D, D): what a block of pairs adds to the Hessian."""
    curvature_B = weight_B * probability_B * (1 - probability_B)
    products_DD: Floats = rows_BD.T @ (curvature_B[:, None] * rows_BD)
    return products_DD


@dataclass(frozen=True, slots=True)
class Posterior:
    """The normal distribution of a head's weights.

    `factor_DD`: the lower Cholesky factor of H, of features that are divided by `scale_D`.
    """

    factor_DD: Floats
    scale_D: Floats

    def spreads(self, differences_PD: NDArray[np.float32]) -> Floats:
        """The standard deviation of each margin, (P,)."""
        variances: list[Floats] = []
        for block_BD in blocks(differences_PD):
            scaled_BD = block_BD / self.scale_D
            # z' H^-1 z is the square of L^-1 z, with H = L L'.
            whitened_DB = solve_triangular(self.factor_DD, scaled_BD.T, lower=True)
            variances.append(np.square(whitened_DB).sum(axis=0))
        if not variances:
            return np.zeros(0)
        spreads: Floats = np.sqrt(np.concatenate(variances))
        return spreads

    def whitening(self) -> Floats:
        """A, (D, D), with which the spread of a margin is |A z|, for z as the head reads it."""
        num_features = len(self.scale_D)
        inverse_DD: Floats = solve_triangular(self.factor_DD, np.eye(num_features), lower=True)
        return inverse_DD / self.scale_D


class Curvature:
    """The data's part of H, summed over pairs that are read one block after another.

    `num_pairs`: those that were added.
    """

    def __init__(self, num_features: int) -> None:
        self.num_pairs = 0
        self._squares_D = np.zeros(num_features)
        self._products_DD = np.zeros((num_features, num_features))

    def add(self, differences_PD: NDArray[np.float32], margin_P: Floats, weight_P: Floats) -> None:
        """Add pairs with the margins that the head gives them."""
        start = 0
        for block_BD in blocks(differences_PD):
            end = start + len(block_BD)
            self._squares_D += np.square(block_BD).sum(axis=0)
            probability_B = expit(margin_P[start:end])
            self._products_DD += weighted_products(block_BD, probability_B, weight_P[start:end])
            start = end
        self.num_pairs += len(differences_PD)

    def posterior(self, penalty: float) -> Posterior:
        """The posterior with the prior's precision `penalty`, for features with a root mean square
        of 1."""
        # The scale is known only now that all pairs are read: the products are divided by it.
        scale_D = root_mean_square(self._squares_D, self.num_pairs)
        hessian_DD = self._products_DD / np.outer(scale_D, scale_D)
        hessian_DD[np.diag_indices_from(hessian_DD)] += penalty
        return Posterior(np.linalg.cholesky(hessian_DD).astype(np.float64), scale_D)


def moderated(margin_P: Floats, spread_P: Floats) -> Floats:
    """The log-odds that the first completion wins, d / sqrt(1 + pi v / 8), (P,).

    Their sigmoid is about the mean of sigmoid(m) over m ~ N(d, v): MacKay 1992 (Neural Computation
    4, page 720).
    """
    return margin_P / np.sqrt(1 + math.pi / 8 * np.square(spread_P))
