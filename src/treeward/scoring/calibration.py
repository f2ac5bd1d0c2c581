"""`calibrate`: a reward model's normalisation, length curve and temperature, fitted on comparisons.

    calibration = calibrate(Scorer.load("results/rm/final"), preferences, name="validation.jsonl")
    calibration.normalization.mean, calibration.length_curve.values, calibration.temperature.value

Use comparisons that the model was not trained on: on these it is too confident, and the temperature
comes out too low. A constant that cannot be fitted is None, and the log says why.

Shapes: N completions with a score, P pairs of a better and a worse one of a comparison.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby, islice, permutations
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from treeward.data.conversation import last_text
from treeward.data.preference import Preference, preference_to_dict
from treeward.errors import DataError
from treeward.model.contract import (
    CalibratedTemperature,
    CalibrationProvenance,
    LengthCurve,
    NormalizationConstants,
    RewardCalibration,
)
from treeward.scoring.scorer import PreparedScorer
from treeward.version import VERSION

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]

MAX_KNOTS = 64
"""Most knots of a length curve."""

_COMPARISONS_AT_ONCE = 128
_SMOOTHING = 2 / 3  # Cleveland's: the part of the points that a local regression sees
# Two thirds of five points are three, of which the farthest weigh nothing: the curve would pass
# through every score.
_FEWEST_NEIGHBOURS = 10
_ROBUST_ROUNDS = 3
_EXACT_UP_TO = 1000
"""Points; with more of them, local regressions are skipped within a hundredth of the range."""


@dataclass(frozen=True, slots=True)
class _Scored:
    """A completion with its score.

    `group`: the number of its comparison. `length`: in characters.
    """

    group: int
    rank: int
    score: float
    length: int


class DataLog:
    """What was read of a set of comparisons, for its provenance. `num_conversations`: completions
    with a score; `errors`: why others have none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_comparisons = 0
        self.num_conversations = 0
        self.errors: list[str] = []
        self._digest = hashlib.sha256()

    def add(self, preference: Preference) -> None:
        """Count a comparison, in the order of the set."""
        # Of the comparisons, and not of the file: an ensemble's members must be calibrated on the
        # same data, in whatever file it lies.
        row = preference_to_dict(preference)
        self._digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        self.num_comparisons += 1

    @property
    def first_error(self) -> str:
        """The end of a sentence about too little data: nothing, or why a completion has no
        score."""
        if not self.errors:
            return ""
        return f"; the first failure: {self.errors[0]}"

    def warn_of_failures(self) -> None:
        """Log how many completions are left out."""
        if self.errors:
            logger.warning(
                "%s: %d of %d completions have no score and are left out; the first: %s.",
                self.name,
                len(self.errors),
                len(self.errors) + self.num_conversations,
                self.errors[0],
            )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the comparisons so far."""
        return self._digest.hexdigest()

    def provenance(self) -> CalibrationProvenance:
        """What was read so far."""
        name = self.name
        if PurePath(name).is_absolute():
            name = PurePath(name).name  # a contract is published: no paths of this machine
        return CalibrationProvenance(
            data=name,
            fingerprint=self.fingerprint,
            num_comparisons=self.num_comparisons,
            num_conversations=self.num_conversations,
            num_failed=len(self.errors),
            treeward_version=VERSION,
            date=datetime.now(UTC).date().isoformat(),
        )


def calibrate(
    scorer: PreparedScorer,
    preferences: Iterable[Preference],
    *,
    name: str,
) -> RewardCalibration:
    """Score every completion of every comparison, and fit the constants.

    `name`: of the data, kept as the provenance. Completions without a score are counted and left
    out. Raises `DataError` for fewer than two comparisons with two scored completions, or where all
    scores are the same.
    """
    scored: list[_Scored] = []
    log = DataLog(name)
    remaining = iter(preferences)
    while chunk := list(islice(remaining, _COMPARISONS_AT_ONCE)):
        places = []
        conversations = []
        for preference in chunk:
            for completion in preference.completions:
                # The count is this comparison's number until `add` counts it.
                places.append((log.num_comparisons, completion.rank))
                conversations.append(preference.conversation(completion))
            log.add(preference)
        results = scorer.score(conversations, on_error="mask")
        for result, place, conversation in zip(results, places, conversations, strict=True):
            if result.score is None:
                log.errors.append(result.error or "there is no score")
                continue
            group, rank = place
            scored.append(_Scored(group, rank, result.score, len(last_text(conversation))))
    log.num_conversations = len(scored)
    _check(scored, log)
    logger.info("Fitting the constants to %d scores.", len(scored))
    scores = np.array([completion.score for completion in scored], dtype=np.float64)
    lengths = np.array([completion.length for completion in scored], dtype=np.float64)
    # The completions of a comparison stand side by side. A pair of one rank has no order.
    better: list[int] = []
    worse: list[int] = []
    for _, group_members in groupby(range(len(scored)), key=lambda i: scored[i].group):
        for i, j in permutations(group_members, 2):
            if scored[i].rank < scored[j].rank:
                better.append(i)
                worse.append(j)
    curve = fit_length_curve(scores, lengths)
    if curve is not None:
        # Without the part that length explains, scores have another spread.
        residuals = scores - np.interp(lengths, curve.lengths, curve.values)
        residual_temperature = fit_temperature(
            residuals[better] - residuals[worse],
            name=f"{name}, beside the length curve",
        )
        curve = curve.model_copy(update={"residual_temperature": residual_temperature})
    return RewardCalibration(
        normalization=NormalizationConstants(mean=float(scores.mean()), std=float(scores.std())),
        length_curve=curve,
        temperature=fit_temperature(scores[better] - scores[worse], name=name),
        provenance=log.provenance(),
    )


def fit_length_curve(scores: Floats, lengths: Floats) -> LengthCurve | None:
    """The score that length alone predicts, from scores (N,) and lengths (N,).

    None where length explains every score, or where most have one length.

    LOWESS: at each length a straight line, fitted to the nearest two thirds of the points by least
    squares, weighted by nearness and, in three further rounds, against outliers. Cleveland 1979; to
    calibrate rewards: Huang et al. 2024 (arXiv 2409.17407). Kept at no more than 64 lengths,
    quantiles of those that occur.
    """
    # Here, because it imports pandas, which takes seconds.
    from statsmodels.nonparametric.smoothers_lowess import lowess

    fitted = np.full(len(scores), scores.mean())
    if lengths.min() < lengths.max():
        delta = 0.0
        if len(scores) > _EXACT_UP_TO:
            # Of most lengths: the whole range would be coarse for them if a few are very long.
            low, high = np.quantile(lengths, [0.025, 0.975])
            delta = float(high - low) / 100
        # NaN where it fails, as where most points have one length.
        fitted = lowess(
            scores,
            lengths,
            frac=min(1.0, max(_SMOOTHING, _FEWEST_NEIGHBOURS / len(scores))),
            it=_ROBUST_ROUNDS,
            delta=delta,
            return_sorted=False,
        )
    # At quantiles, so that knots are dense where lengths are frequent.
    knots = np.unique(np.quantile(lengths, np.linspace(0, 1, MAX_KNOTS), method="nearest"))
    # `np.interp` needs lengths that rise; stable, so that equal lengths keep their order.
    order = np.argsort(lengths, kind="stable")
    values = np.interp(knots, lengths[order], fitted[order])
    residuals = scores - np.interp(lengths, knots, values)
    # Scores that are a line of the length leave about 1e-7, the rounding of float32. Written so
    # that NaN is no spread either.
    if not residuals.std() > 1e-6 * scores.std():
        logger.warning(
            "no length curve: length alone explains every one of the %d scores, or most have one "
            "length.",
            len(scores),
        )
        return None
    return LengthCurve(
        lengths=tuple(knots),
        values=tuple(values),
        residual_mean=float(residuals.mean()),
        residual_std=float(residuals.std()),
    )


def fit_temperature(
    differences: Floats,
    *,
    name: str | None = None,
) -> CalibratedTemperature | None:
    """The T that minimises `preference_nll` of ordered pairs.

    `differences`: s_better - s_worse of each pair (P,). `name`: of the data, for the log.

    Temperature scaling: Guo et al. 2017 (arXiv 1706.04599). The loss is convex in b = 1/T, with
    slope -mean(d sigma(-b d)), and its minimum is where the slope is 0. If the mean difference is
    not positive, no finite T minimises it: None, with a warning. If no pair is in the wrong order,
    no T above 0 does: the targets are then (P + 1)/(P + 2) instead of 1 (Platt 1999), with a
    warning.
    """
    num_pairs = len(differences)
    where = name or "calibration"
    target = 1.0
    if num_pairs == 0 or differences.mean() <= 0:
        reason = "no temperature: the better completion does not score higher on average"
        logger.warning("%s: %s, over %d ordered pairs.", where, reason, num_pairs)
        return None
    if differences.min() >= 0:
        guess = "the temperature is a cautious guess"
        reason = f"{guess}: no pair is in the wrong order, so any lower one fits better"
        logger.warning("%s: %s, over %d ordered pairs.", where, reason, num_pairs)
        target = (num_pairs + 1) / (num_pairs + 2)

    def slope(log_b: float) -> float:
        scaled = differences * math.exp(log_b)
        sigmoid = np.exp(-np.logaddexp(0.0, -scaled))  # without overflow
        return float(np.mean(differences * (sigmoid - target)))

    # The slope rises with b, from below 0 at b = 0 to above 0. In units of the mean difference the
    # root is near 1, and lower the smaller the mean is beside the sizes: in float64 down to e^-36.
    unit = -math.log(float(np.abs(differences).mean()))
    temperature = math.exp(-brentq(slope, unit - 40, unit + 40, xtol=1e-12))
    return CalibratedTemperature(
        value=temperature,
        nll_before=preference_nll(differences, 1.0),
        nll_after=preference_nll(differences, temperature),
        num_pairs=num_pairs,
    )


def preference_nll(differences: Floats, temperature: float) -> float:
    """mean log(1 + exp(-(s_i - s_j) / T)), in nats, over ordered pairs (P,): i better than j.

    The negative log-likelihood of the model of Bradley and Terry 1952.
    """
    return float(np.mean(np.logaddexp(0.0, -differences / temperature)))


def _check(scored: Sequence[_Scored], log: DataLog) -> None:
    """Raise `DataError` where there is too little to fit constants to; log what was left out."""
    sizes = Counter(completion.group for completion in scored)
    num_usable = sum(size > 1 for size in sizes.values())
    if num_usable < 2:
        got = f"{num_usable} with two scored completions, of {log.num_comparisons} comparisons"
        raise DataError(
            "there are too few comparisons to calibrate on",
            where=log.name,
            got=got + log.first_error,
        )
    if len({completion.score for completion in scored}) == 1:
        summary = "all completions have the same score, so there is nothing to calibrate"
        raise DataError(summary, where=log.name)
    log.warn_of_failures()
