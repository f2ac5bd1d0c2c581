"""The mathematics of choosing the best of n: exact expectations from N samples, the distance in KL, Gao's law.

    expected_best_of(proxy, gold, [1, 2, 4])     # the gold of what the proxy chooses among 1, 2 and 4 samples
    kl_of_best_of(4)                             # 0.636 nats: how far that is from plain sampling
    law = fit_gao(distances, gains, "bon")       # gain(d) = d (alpha - beta d), d = sqrt(KL)
    law.alpha, law.beta, law.r_squared, law.gain(distances)

Of N samples sorted by a score, the i-th from below is the best of n drawn without replacement with the probability
w_i(n) = C(i-1, n-1) / C(N, n). So sum_i w_i(n) gold_(i) is the mean over all subsets of n, an unbiased estimate from
all samples at once (Nakano et al. 2021, arXiv 2112.09332, appendix I). The laws of how gold first rises and then falls
with the distance are those of Gao, Schulman, Hilton 2022, arXiv 2210.10760, section 3.1. Array suffixes: N samples, G
values of n or points of a curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
GaoForm: TypeAlias = Literal["bon", "rl"]

_ALL_SIZES_TO, _SIZES_PER_DOUBLING = 64, 16


def curve_sizes(max_n: int) -> tuple[int, ...]:
    """The n that curves are computed at: each up to 64, then 16 for every doubling, and `max_n`."""
    steps = range(_SIZES_PER_DOUBLING * max_n.bit_length())
    sizes = {*range(1, _ALL_SIZES_TO + 1), *(round(2 ** (i / _SIZES_PER_DOUBLING)) for i in steps), max_n}
    return tuple(sorted(n for n in sizes if n <= max_n))


@lru_cache(maxsize=16)
def selection_weights(num_samples: int, sizes: tuple[int, ...]) -> Floats:
    """(G, N): the probability that the i-th of N samples, from below, is the best of n drawn without replacement.

    C(i-1, n-1) / C(N, n) for n from 1 to N, to a relative error below 1e-11 for thousands of samples.
    """
    assert all(1 <= n <= num_samples for n in sizes), "n is between 1 and the number of samples"
    # From the top down: w_N = n / N and w_(i-1) / w_i = (i - n) / (i - 1). All factors lie in [0, 1]: nothing overflows
    # or cancels, and the error is a few roundings per factor, less than with logarithms of binomials.
    n_G1 = np.asarray(sizes, dtype=np.float64)[:, None]
    i = np.arange(num_samples, 1, -1, dtype=np.float64)[None, :]
    factors = np.concatenate([n_G1 / num_samples, np.maximum(i - n_G1, 0.0) / (i - 1.0)], axis=1)
    weights: Floats = np.cumprod(factors, axis=1)[:, ::-1].copy()
    weights.setflags(write=False)
    return weights


def expected_best_of(by: ArrayLike, values: ArrayLike, sizes: Sequence[int]) -> Floats:
    """(G,): the expected `values` (N,) of the sample with the highest `by` (N,) among n, over all subsets of n.

    Samples that are equal `by` are chosen from at random: they share the mean of their values. All numbers are finite.
    """
    keys, amounts = np.asarray(by, dtype=np.float64), np.asarray(values, dtype=np.float64)
    _, tie, count = np.unique(keys, return_inverse=True, return_counts=True)
    shared = np.bincount(tie, weights=amounts) / count
    return selection_weights(len(keys), tuple(sizes)) @ np.repeat(shared, count)


def kl_of_best_of(sizes: ArrayLike) -> Floats:
    """KL(n) = ln n - (n - 1) / n, in nats: how far best-of-n is from plain sampling.

    Source: Stiennon et al. 2020, arXiv 2009.01325, appendix G.3. It is exact where no two samples are equal and an
    upper bound otherwise (Beirami et al. 2024, arXiv 2401.01879).
    """
    n = np.asarray(sizes, dtype=np.float64)
    return np.asarray(np.log(n) - (n - 1.0) / n, dtype=np.float64)


class GaoLaw(NamedTuple):
    """gain(d) = d (alpha - beta d) of best-of-n (`bon`), d (alpha - beta ln d) of RL (`rl`); d = sqrt(KL), nats.

    `r_squared`: how much of the gains' variance it explains; 0 where there is none.
    """

    form: GaoForm
    alpha: float
    beta: float
    r_squared: float = 0.0

    def gain(self, distances: ArrayLike) -> Floats:
        """The gold above that at d = 0."""
        design = _design(np.asarray(distances, dtype=np.float64), self.form)
        gains: Floats = design @ np.array([self.alpha, self.beta])
        return gains


def fit_gao(distances: ArrayLike, gains: ArrayLike, form: GaoForm) -> GaoLaw:
    """Fit a law to gains over d = 0, by least squares through the origin.

    `distances` (G,): d = sqrt(KL) > 0, ascending, 3 or more; `gains` (G,): gold less the gold at d = 0. A point weighs
    as much of the d axis as it stands for, so that it does not matter which were measured.
    """
    d, gain = np.asarray(distances, dtype=np.float64), np.asarray(gains, dtype=np.float64)
    root = np.sqrt(np.diff(np.concatenate([[0.0], (d[1:] + d[:-1]) / 2.0, d[-1:]])))
    alpha, beta = np.linalg.lstsq(_design(d, form) * root[:, None], gain * root, rcond=None)[0].tolist()
    law = GaoLaw(form, alpha, beta)
    spread = float(np.sum((gain - gain.mean()) ** 2))
    return law._replace(r_squared=1.0 - float(np.sum((gain - law.gain(d)) ** 2)) / spread if spread > 0.0 else 0.0)


def _design(distances: Floats, form: GaoForm) -> Floats:
    """(..., 2): what alpha and beta are multiplied by."""
    bent = distances if form == "bon" else np.log(np.where(distances > 0.0, distances, 1.0))
    return np.stack([distances, -distances * bent], axis=-1)
