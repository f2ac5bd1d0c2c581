"""`label_numbers`: what out-of-fold margins say of labels, as numbers.

    numbers = label_numbers(pairs)
    numbers.bound.high             # at most this share of the labels is wrong
    numbers.flips["all"]           # what is found of labels that are flipped on purpose
    suspects_of(pairs)             # bool (P,): the pairs whose labels look wrong

A margin m is positive where the head agrees with the label. How often it is negative does not say
how many labels are wrong: a worse head and cleaner labels look alike. Two things can be said.

1. A bound. Let e be the share of wrong labels, and let errors fall on pairs whatever their texts.
   Of the pairs with |m| >= t the head is right about a share a, and disagrees with the labels of

       D(t) = P(m <= -t) / P(|m| >= t) = (1 - e)(1 - a) + e a = e + (1 - a)(1 - 2 e) >= e

   for e <= 1/2: the head's own mistakes only add to the wrong labels. Where labelers err more often
   on pairs that are hard, only t = 0 is safe: surer pairs then have fewer errors than all.
2. The power of the search. To flip a held-out label only negates its margin. So recall and
   precision of planted errors are known without training again, exactly for a single one. Of many
   they are too good: the heads were fitted before the flips. Labels that were wrong before count
   as right, which makes the precision too low.

Shapes: P pairs, T thresholds, R resamples, C prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import accuracy_metric, expanded_tail, resampled

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

INJECTED = (0.05, 0.1, 0.2)
"""Shares of labels that are flipped on purpose."""
TYPICAL_SHARE = 0.1
"""The one of them that stands for all in a sentence."""
_SHARES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05)
"""The surest shares of the pairs, at whose smallest |m| the bound is taken."""
_FEWEST_SURE = 50
"""With fewer pairs beyond a threshold its bound says little, and the least of many would be a
chance."""
_NUM_RESAMPLES = 1000
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

    def of_source(self, source: str) -> CheckedPairs:
        is_of_source = np.array([one == source for one in self.sources])
        return CheckedPairs(
            self.margin_P[is_of_source],
            self.spread_P[is_of_source],
            self.prompt_P[is_of_source],
            [source] * int(is_of_source.sum()),
            self.longer_P[is_of_source],
        )


@dataclass(frozen=True, slots=True)
class BoundPoint:
    """The upper bound of the share of wrong labels, from the pairs with |m| >= `threshold`: a
    `share` of all, `count` of them."""

    threshold: float
    share: float
    count: int
    bound: Metric


@dataclass(frozen=True, slots=True)
class FlippedLabels:
    """What is found where a `share` of the labels is flipped on purpose.

    `precision`: of as many pairs as were flipped, the most suspicious first; it is the recall too.
    `suspect_recall`, `suspect_precision`: of the pairs that `suspects_of` would name.
    """

    share: float
    precision: float
    suspect_recall: float
    suspect_precision: float


@dataclass(frozen=True, slots=True)
class SourceNumbers:
    """The numbers of one source of pairs, or of all. `auroc`: the chance that a flipped label has a
    lower margin than one that is not flipped."""

    accuracy: Metric
    auroc: Metric
    flips: tuple[FlippedLabels, ...]
    num_suspects: int


@dataclass(frozen=True, slots=True)
class LabelNumbers:
    """`is_informed`: whether the head is better than chance; it proposes nothing if not. `curve`:
    the bound over t, each point with an interval of its own. `bound`: the point with the lowest
    upper end; because it is the lowest, it lies too low more often than one of 40 would.
    `longer_lost`: among suspects and among all pairs, how often the longer completion is the worse
    one."""

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


def label_numbers(pairs: CheckedPairs) -> LabelNumbers:
    """Every number of the report."""
    accuracy = _accuracy(pairs, "accuracy")
    curve = bound_curve(pairs)
    is_suspect_P = suspects_of(pairs)
    suspect_below = _suspect_below(pairs)
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
        suspects_by_source = np.array(pairs.sources)[is_suspect_P].tolist()
        for name in names:
            number = suspects_by_source.count(name)
            of_source = pairs.of_source(name)
            sources[name] = _source_numbers(of_source, name, number, suspect_below)
    return LabelNumbers(
        num_pairs=len(pairs),
        num_prompts=len(np.unique(pairs.prompt_P)),
        accuracy=accuracy,
        is_informed=is_informed(accuracy),
        curve=curve,
        bound=lowest.bound,
        suspects=Metric("suspects", float(is_suspect_P.mean()), count=int(is_suspect_P.sum())),
        longer_lost=longer_lost,
        overall=_source_numbers(pairs, "all", int(is_suspect_P.sum()), suspect_below),
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
    return pairs.probability_P <= _suspect_below(pairs)


def _suspect_below(pairs: CheckedPairs) -> float:
    """The highest probability of a suspect; -inf where there are none."""
    mean = float(pairs.probability_P.mean())
    if mean <= 0.5 or not is_informed(_accuracy(pairs, "accuracy")):
        return -np.inf
    return 1 - mean


def bound_curve(pairs: CheckedPairs) -> tuple[BoundPoint, ...]:
    """D(t) with 95 % intervals, for thresholds that leave ever fewer pairs; prompts are drawn."""
    size_P = np.abs(pairs.margin_P)
    shares = [share for share in _SHARES if share * len(pairs) >= _FEWEST_SURE]
    if not shares:
        shares = [1.0]
    thresholds_T = np.quantile(size_P, [1 - share for share in shares])
    # All pairs; the quantile is the smallest margin, and rounding could leave that out.
    thresholds_T[0] = 0.0
    is_sure_PT = size_P[:, None] >= thresholds_T
    disagrees_PT = is_sure_PT & (pairs.margin_P[:, None] < 0)
    counts_T = is_sure_PT.sum(axis=0)
    bounds_T = disagrees_PT.sum(axis=0) / counts_T

    _, prompt_P = np.unique(pairs.prompt_P, return_inverse=True)
    num_prompts = int(prompt_P.max()) + 1
    # Pairs of one prompt err together, so prompts are drawn; one draw serves all thresholds.
    sums_CK = np.zeros((num_prompts, 2 * len(shares)))
    np.add.at(sums_CK, prompt_P, np.concatenate([disagrees_PT, is_sure_PT], axis=1))
    means_RK = resampled(sums_CK, _NUM_RESAMPLES)
    disagree_RT, sure_RT = np.split(means_RK, 2, axis=1)
    tail = expanded_tail(num_prompts)

    points = []
    for i, share in enumerate(shares):
        # A resample may have no pair beyond a high threshold.
        is_drawn = sure_RT[:, i] > 0
        ratios = disagree_RT[is_drawn, i] / sure_RT[is_drawn, i]
        low, high = np.quantile(ratios, [tail, 1 - tail])
        count = int(counts_T[i])
        # Where nothing is wrong, all resamples agree: the end is then that of the rule of three.
        high = max(float(high), 1 - 0.05 ** (1 / min(count, num_prompts)))
        bound = Metric("bound", float(bounds_T[i]), float(low), high, count)
        points.append(BoundPoint(float(thresholds_T[i]), share, count, bound))
    return tuple(points)


def auroc_of_flips(score_P: Floats) -> float:
    """The chance that the score of a flipped label, -s, is lower than that of another that is not;
    a tie is half."""
    from scipy.stats import rankdata

    # P(-s_i < s_j), the Mann-Whitney statistic of the two samples.
    ranks = rankdata(np.concatenate([score_P, -score_P]))
    count = len(score_P)
    above = ranks[:count].sum() - count * (count + 1) / 2
    return float(above / count**2)


def flipped_labels(score_P: Floats, suspect_below: float, share: float) -> FlippedLabels:
    """What is found where a label of this score is flipped with probability `share`, which negates
    its score. Of all draws at once: each pair is both, with the weights 1 - share and share."""
    scores = np.concatenate([score_P, -score_P])
    weights = np.concatenate([np.full(len(score_P), 1 - share), np.full(len(score_P), share)])
    is_flipped = np.arange(len(scores)) >= len(score_P)
    # The lowest scores first, until as much weight is named as was flipped.
    order = np.argsort(scores, kind="stable")
    cumulative = np.cumsum(weights[order])
    num_flipped = share * len(score_P)
    is_named = cumulative <= num_flipped
    found = weights[order][is_named & is_flipped[order]].sum()
    is_suspect = scores <= suspect_below
    num_suspects = float(weights[is_suspect].sum())
    num_found = float(weights[is_suspect & is_flipped].sum())
    precision = num_found / num_suspects if num_suspects > 0 else 0.0
    return FlippedLabels(
        share=share,
        precision=float(found / num_flipped),
        suspect_recall=num_found / num_flipped,
        suspect_precision=precision,
    )


def _source_numbers(
    pairs: CheckedPairs, name: str, num_suspects: int, suspect_below: float
) -> SourceNumbers:
    """`suspect_below`: the threshold of all pairs, by which the suspects were counted too."""
    # A flip negates a score that is 0 where both orders are as likely.
    score_P = pairs.probability_P - 0.5
    flips = [flipped_labels(score_P, suspect_below - 0.5, share) for share in INJECTED]
    auroc = Metric("auroc", auroc_of_flips(score_P), count=len(pairs))
    return SourceNumbers(_accuracy(pairs, name), auroc, tuple(flips), num_suspects)


def _accuracy(pairs: CheckedPairs, name: str) -> Metric:
    # A margin of 0 is half right.
    outcomes_P = (np.sign(pairs.margin_P) + 1) / 2
    return accuracy_metric(outcomes_P.tolist(), name, clusters=pairs.prompt_P.tolist())


def _longer_lost(pairs: CheckedPairs, is_counted_P: Flags) -> Metric:
    """Of these pairs, how often the longer completion is the worse one."""
    lost_P = pairs.longer_P[is_counted_P] < 0
    clusters = pairs.prompt_P[is_counted_P].tolist()
    return accuracy_metric(lost_P.astype(float).tolist(), "longer_lost", clusters=clusters)
