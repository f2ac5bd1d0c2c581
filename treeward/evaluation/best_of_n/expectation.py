"""The mathematics of choosing the best of n: exact expectations from N samples, and the distance in KL.

    expected_best_of(proxy, gold, [1, 2, 4])     # the gold of what the proxy chooses among 1, 2 and 4 samples
    kl_of_best_of(4)                             # 0.636 nats: how far that is from plain sampling

Of N samples sorted by a score, the i-th from below is the best of n drawn without replacement with the probability
w_i(n) = C(i-1, n-1) / C(N, n). So sum_i w_i(n) gold_(i) is the mean over all subsets of n, an unbiased estimate from
all samples at once (Nakano et al. 2021, arXiv 2112.09332, appendix I). Array suffixes: N samples, G values of n.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]

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
