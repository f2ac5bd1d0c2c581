"""`GaoLaw`: how gold first rises and then falls with the distance from plain sampling, fitted to a measured curve.

    law = fit_gao(distances, gains)              # gain(d) = d (alpha - beta d), d = sqrt(KL)
    law.alpha, law.beta, law.peak_distance

Source: Gao, Schulman, Hilton 2022, arXiv 2210.10760, section 3.1. Array suffix: G points.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from treeward.errors import ConfigError
from treeward.evaluation.best_of_n.selection import Floats

GaoForm = Literal["bon", "rl"]
FORMS: tuple[GaoForm, ...] = ("bon", "rl")
FEWEST_POINTS = 3


class GaoLaw(NamedTuple):
    """gain(d) = d (alpha - beta d) for best-of-n (`bon`), d (alpha - beta ln d) for RL (`rl`); d = sqrt(KL), nats."""

    form: GaoForm
    alpha: float
    beta: float

    def gain(self, distances: ArrayLike) -> Floats:
        """The gold above that at d = 0."""
        gains: Floats = _design(np.asarray(distances, dtype=np.float64), self.form) @ np.array([self.alpha, self.beta])
        return gains

    @property
    def peak_distance(self) -> float | None:
        """The d at which the law is highest; 0 where it only falls, None where it rises without end."""
        if self.alpha <= 0.0 and (self.beta >= 0.0 if self.form == "bon" else self.beta == 0.0):
            return 0.0
        if self.beta <= 0.0:
            return None
        return (
            self.alpha / (2.0 * self.beta) if self.form == "bon" else math.exp(min(self.alpha / self.beta - 1.0, 500.0))
        )


def fit_gao(distances: ArrayLike, gains: ArrayLike, form: GaoForm = "bon") -> GaoLaw:
    """Fit a law to gains over d = 0, by least squares through the origin.

    `distances` (G,): d = sqrt(KL) > 0, ascending; `gains` (G,): gold less the gold at d = 0. A point weighs as much of
    the d axis as it stands for, so that it does not matter which n were computed. Raises `ConfigError` for fewer than
    3 points, or points that are not such.
    """
    d, gain = np.asarray(distances, dtype=np.float64), np.asarray(gains, dtype=np.float64)
    is_axis = d.ndim == 1 and len(d) >= FEWEST_POINTS and d[0] > 0.0 and bool(np.all(np.diff(d) > 0.0))
    if not is_axis or d.shape != gain.shape or not (np.isfinite(d).all() and np.isfinite(gain).all()):
        got = f"{d.size} distances, {gain.size} gains, d = {d.ravel()[:5].tolist()}"
        need = "3 or more finite points, ascending d above 0"
        raise ConfigError("no law can be fitted to these points", got=got, need=need)
    root = np.sqrt(point_weights(d))
    alpha, beta = np.linalg.lstsq(_design(d, form) * root[:, None], gain * root, rcond=None)[0].tolist()
    return GaoLaw(form, alpha, beta)


def point_weights(distances: Floats) -> Floats:
    """(G,): how much of the d axis, from 0 to the last point, each point stands for."""
    borders = np.concatenate([[0.0], (distances[1:] + distances[:-1]) / 2.0, distances[-1:]])
    return np.diff(borders)


def _design(distances: Floats, form: GaoForm) -> Floats:
    """(..., 2): what alpha and beta are multiplied by."""
    bent = distances if form == "bon" else np.log(np.where(distances > 0.0, distances, 1.0))
    return np.stack([distances, -distances * bent], axis=-1)
