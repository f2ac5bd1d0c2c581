"""`label_numbers`: what out-of-fold margins say of labels, as numbers.

    numbers = label_numbers(pairs, plant_flips(features, fitted, pairs))
    numbers.bound.high             # at most this share of the labels is wrong
    numbers.overall.flips[0]       # what is found of labels that are flipped on purpose
    suspects_of(pairs)             # bool (P,): the pairs whose labels look wrong

A margin m is positive where the head agrees with the label. How often it is negative does not say
how many labels are wrong: a worse head and cleaner labels look alike. Two things can be said.

1. A bound. Let e be the share of wrong labels, and let errors fall on pairs whatever their texts.
   Of the pairs with |m| >= t the head is right about a share a, and disagrees with the labels of

       D(t) = P(m <= -t) / P(|m| >= t) = (1 - e)(1 - a) + e a = e + (1 - a)(1 - 2 e) >= e

   for e <= 1/2: the head's own mistakes only add to the wrong labels. Where labelers err more often
   on pairs that are hard, only t = 0 is safe: surer pairs then have fewer errors than all.
2. The power of the search: labels are flipped on purpose, the heads are fitted again, and the
   flipped ones are looked for (`plant_flips`). Labels that were wrong before count as right, which
   makes the precision too low.

Shapes: P pairs, T thresholds, R resamples, C prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import accuracy_metric, clopper_pearson

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

_SHARES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05)
"""The surest shares of the pairs, at whose smallest |m| the bound is taken."""
_FEWEST_SURE = 50
"""With fewer pairs beyond a threshold its bound says little, and the least of many would be a
chance."""
_LEVEL = 0.05
"""How often one of the upper ends may lie too low."""
_CHANCE = 2.0
"""By how many half-widths of its interval the accuracy must lie above 1/2. Random labels lie above
one more often than the interval says: a pair that pulls another's margin up from its own fold is
pulled up by it in turn, so that right margins come in twos. Of 500 sets of random labels (300 to
1,000 pairs, 12 to 200 features) 6 % lay above one half-width, 1.4 % above 1.5 and none above 2."""


@dataclass(frozen=True, slots=True)
class CheckedPairs:
    """Pairs with what a head that has not seen their prompts says of them.

    `margin_P`: positive where it agrees with the label. `spread_P`: its standard deviation.
    `prompt_P`: pairs of one prompt are dependent. `sources`: the subset of each. `longer_P`:
    characters of the better completion less those of the worse.
    """

    margin_P: Floats
    spread_P: Floats
    prompt_P: NDArray[np.int64]
    sources: Sequence[str]
    longer_P: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.margin_P)

    @property
    def sureness_P(self) -> Floats:
        """The margin in units of its spread: the order in which pairs are read."""
        # Completions with equal features have neither: 0, and not 0 / 0.
        return self.margin_P / np.maximum(self.spread_P, np.finfo(np.float64).tiny)

    @property
    def probability_P(self) -> Floats:
        """The probability that the better completion wins: sigmoid(m / sqrt(1 + pi v / 8)), which
        is the mean of sigmoid over a normal margin of variance v (MacKay 1992, eq. 10)."""
        moderated_P = self.margin_P / np.sqrt(1 + np.pi / 8 * np.square(self.spread_P))
        return np.exp(-np.logaddexp(0.0, -moderated_P))


@dataclass(frozen=True, slots=True)
class BoundPoint:
    """The upper bound of the share of wrong labels, from the pairs with |m| >= `threshold`: a
    `share` of all, `count` of them."""

    threshold: float
    share: float
    count: int
    bound: Metric


@dataclass(frozen=True, slots=True)
class PlantedFlips:
    """The same pairs once more, after a `share` of the labels was flipped on purpose and heads were
    fitted on that. `is_flipped_P`: which ones; `is_suspect_P`: the suspects among all."""

    share: float
    is_flipped_P: Flags
    is_suspect_P: Flags
    pairs: CheckedPairs


@dataclass(frozen=True, slots=True)
class FlippedLabels:
    """What is found where a `share` of the labels is flipped on purpose.

    `auroc`: the chance that a flipped pair comes before another one in the order in which pairs are
    read; its count is that of the flipped pairs. `precision`: of as many pairs as were flipped, the
    first in that order; it is the recall too. `suspect_recall`, `suspect_precision`: of the
    suspects.
    """

    share: float
    auroc: Metric
    precision: Metric
    suspect_recall: Metric
    suspect_precision: Metric


@dataclass(frozen=True, slots=True)
class SourceNumbers:
    """The numbers of one source of pairs, or of all."""

    accuracy: Metric
    flips: tuple[FlippedLabels, ...]
    num_suspects: int


@dataclass(frozen=True, slots=True)
class LabelNumbers:
    """`is_informed`: whether the head is better than chance; it proposes nothing if not. `curve`:
    the bound over t; its upper ends hold at once in 95 % of data sets. `bound`: the point with the
    lowest upper end. `longer_lost`: among suspects and among all pairs, how often the longer
    completion is the worse one."""

    num_pairs: int
    num_prompts: int
    accuracy: Metric
    is_informed: bool
    curve: tuple[BoundPoint, ...]
    bound: Metric
    suspects: Metric
    longer_lost: Mapping[str, Metric]
    overall: SourceNumbers
    sources: Mapping[str, SourceNumbers] = field(default_factory=dict)


def label_numbers(pairs: CheckedPairs, planted: Sequence[PlantedFlips]) -> LabelNumbers:
    """Every number of the report. `planted`: the pairs after flips on purpose."""
    accuracy = _accuracy(pairs, "accuracy")
    curve = bound_curve(pairs)
    is_suspect_P = suspects_of(pairs)
    lowest = min(curve, key=lambda point: point.bound.high or 0.0)
    # Of two equally long completions none is the longer one.
    differs_P = pairs.longer_P != 0
    longer_lost = {
        "suspects": _longer_lost(pairs, differs_P & is_suspect_P),
        "all pairs": _longer_lost(pairs, differs_P),
    }
    sources: dict[str, SourceNumbers] = {}
    names = sorted(set(pairs.sources))
    # A table of one source would repeat the numbers of all.
    if len(names) > 1:
        source_P = np.array(pairs.sources)
        for name in names:
            is_of_source_P = source_P == name
            sources[name] = _source_numbers(pairs, is_suspect_P, planted, name, is_of_source_P)
    is_any_P = np.ones(len(pairs), dtype=bool)
    return LabelNumbers(
        num_pairs=len(pairs),
        num_prompts=len(np.unique(pairs.prompt_P)),
        accuracy=accuracy,
        is_informed=is_informed(accuracy),
        curve=curve,
        bound=lowest.bound,
        suspects=Metric("suspects", float(is_suspect_P.mean()), count=int(is_suspect_P.sum())),
        longer_lost=longer_lost,
        overall=_source_numbers(pairs, is_suspect_P, planted, "all", is_any_P),
        sources=sources,
    )


def is_informed(accuracy: Metric) -> bool:
    """Whether the head is better than chance, by its accuracy on all pairs."""
    if accuracy.value is None or accuracy.low is None:
        return False
    half_width = accuracy.value - accuracy.low
    return accuracy.value - 0.5 > _CHANCE * half_width


def suspects_of(pairs: CheckedPairs) -> Flags:
    """The pairs (P,) whose labels look wrong; none where the head is no better than chance.

    Confident learning (Northcutt et al. 2021, arXiv 1911.00068, eq. 2) for the two classes "the
    first wins" and "the second wins", of which each pair is one in both orders: a label is a
    suspect where the probability of the other order is at least the mean probability of the orders
    that are given, 1 - p >= mean(p).
    """
    probability_P = pairs.probability_P
    mean = float(probability_P.mean())
    if mean <= 0.5 or not is_informed(_accuracy(pairs, "accuracy")):
        return np.zeros(len(pairs), dtype=bool)
    return probability_P <= 1 - mean


def bound_curve(pairs: CheckedPairs) -> tuple[BoundPoint, ...]:
    """D(t) with its interval, for thresholds that leave ever fewer pairs.

    All upper ends hold at once in 95 % of data sets: each of T may fail in 5 % / T (Bonferroni). So
    the lowest of them, which is told, holds too.
    """
    size_P = np.abs(pairs.margin_P)
    shares = [share for share in _SHARES if share * len(pairs) >= _FEWEST_SURE]
    if not shares:
        shares = [1.0]
    thresholds_T = np.quantile(size_P, [1 - share for share in shares])
    # All pairs; the quantile is the smallest margin, and rounding could leave that out.
    thresholds_T[0] = 0.0
    # Of the lowest of ten plain 95 % intervals 8 to 14 % lay below the share of wrong labels.
    tail = _LEVEL / len(shares)

    points = []
    for share, threshold in zip(shares, thresholds_T.tolist(), strict=True):
        is_sure_P = size_P >= threshold
        disagrees = pairs.margin_P[is_sure_P] < 0
        # Pairs of one prompt err together.
        low, high = clopper_pearson(disagrees, pairs.prompt_P[is_sure_P].tolist(), tail)
        count = int(is_sure_P.sum())
        bound = Metric("bound", float(disagrees.mean()), low, high, count)
        points.append(BoundPoint(threshold, share, count, bound))
    return tuple(points)


def flipped_labels(planted: PlantedFlips, is_counted_P: Flags) -> FlippedLabels:
    """What is found of the flips among the pairs that are counted, as those of a source."""
    from scipy.stats import rankdata

    is_flipped_P = planted.is_flipped_P[is_counted_P]
    is_suspect_P = planted.is_suspect_P[is_counted_P]
    sureness_P = planted.pairs.sureness_P[is_counted_P]
    prompt_P = planted.pairs.prompt_P[is_counted_P]
    num_flipped = int(is_flipped_P.sum())

    num_others = len(is_flipped_P) - num_flipped
    auroc = None
    if num_flipped > 0 and num_others > 0:
        # Mann and Whitney's statistic: how often a flipped pair comes after another; a tie is half.
        ranks_P = rankdata(sureness_P)
        smallest = num_flipped * (num_flipped + 1) / 2
        num_after = float(ranks_P[is_flipped_P].sum()) - smallest
        auroc = 1 - num_after / (num_flipped * num_others)

    # The order in which pairs are read, until as many are read as were flipped.
    first = np.argsort(sureness_P, kind="stable")[:num_flipped]

    def share(name: str, hits: Flags, prompts: NDArray[np.int64]) -> Metric:
        return accuracy_metric(hits.astype(float).tolist(), name, clusters=prompts.tolist())

    return FlippedLabels(
        share=planted.share,
        auroc=Metric("auroc", auroc, count=num_flipped),
        precision=share("precision", is_flipped_P[first], prompt_P[first]),
        suspect_recall=share("suspect_recall", is_suspect_P[is_flipped_P], prompt_P[is_flipped_P]),
        suspect_precision=share(
            "suspect_precision", is_flipped_P[is_suspect_P], prompt_P[is_suspect_P]
        ),
    )


def _source_numbers(
    pairs: CheckedPairs,
    is_suspect_P: Flags,
    planted: Sequence[PlantedFlips],
    name: str,
    is_counted_P: Flags,
) -> SourceNumbers:
    """The numbers of the pairs that are counted. `is_suspect_P`: the suspects among all pairs, as a
    source has no threshold of its own."""
    flips = [flipped_labels(of_share, is_counted_P) for of_share in planted]
    return SourceNumbers(
        accuracy=_accuracy(pairs, name, is_counted_P),
        flips=tuple(flips),
        num_suspects=int(is_suspect_P[is_counted_P].sum()),
    )


def _accuracy(pairs: CheckedPairs, name: str, is_counted_P: Flags | None = None) -> Metric:
    """How often the head agrees, on the pairs that are counted; None: on all."""
    margin_P = pairs.margin_P
    prompt_P = pairs.prompt_P
    if is_counted_P is not None:
        margin_P = margin_P[is_counted_P]
        prompt_P = prompt_P[is_counted_P]
    # A margin of 0 is half right.
    outcomes_P = (np.sign(margin_P) + 1) / 2
    return accuracy_metric(outcomes_P.tolist(), name, clusters=prompt_P.tolist())


def _longer_lost(pairs: CheckedPairs, is_counted_P: Flags) -> Metric:
    """Of these pairs, how often the longer completion is the worse one."""
    lost_P = pairs.longer_P[is_counted_P] < 0
    clusters = pairs.prompt_P[is_counted_P].tolist()
    return accuracy_metric(lost_P.astype(float).tolist(), "longer_lost", clusters=clusters)
