"""`calibrate`: a reward model's normalisation, length curve and temperature, fitted once on comparisons.

    calibration = calibrate(Scorer.load("results/rm/final"), preferences, name="validation.jsonl")
    calibration.normalization.mean, calibration.length_curve.values, calibration.temperature.value

`treeward calibrate` stores the constants in the model's contract, and `treeward.scoring.shaping` applies them. Use
comparisons that the model was not trained on: on its own training data it is too confident, and the temperature comes
out too low. A constant that cannot be fitted is None, and the log says why.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import combinations, islice
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from statsmodels.nonparametric.smoothers_lowess import lowess

from treeward.config.reward_shaping import (
    CalibratedTemperature,
    CalibrationProvenance,
    LengthCurve,
    LengthUnit,
    NormalizationConstants,
    RewardCalibration,
)
from treeward.data.preference import Preference, preference_to_dict
from treeward.errors import ConfigError, DataError
from treeward.scoring.score import ConversationScorer
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import completion_length
from treeward.version import VERSION

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]

MAX_KNOTS = 64
"""Most knots of a length curve."""

_COMPARISONS_AT_ONCE = 128
_SMOOTHING = 2 / 3  # Cleveland's: the part of the points that a local regression sees
_FEWEST_NEIGHBOURS = 10
_ROBUST_ROUNDS = 3
_EXACT_UP_TO = 1000  # points; above that, local regressions are skipped within a hundredth of the range


@dataclass
class _Collected:
    """Scores and lengths of the completions; `pairs`: indices of (better, worse) completions."""

    scores: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    num_comparisons: int = 0
    num_usable: int = 0
    num_failed: int = 0
    first_error: str | None = None


def calibrate(
    scorer: ConversationScorer,
    preferences: Iterable[Preference],
    *,
    name: str,
    length_unit: LengthUnit = "tokens",
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> RewardCalibration:
    """Score every completion of every comparison, and fit the constants.

    `name`: of the data, kept as the provenance (the last part of an absolute path). `tokenizer`: for lengths in tokens;
    None is the scorer's own. `on_progress` receives the number of comparisons scored since its last call. Memory grows
    by a few numbers per completion. Completions without a score are counted and left out. Raises `DataError` for fewer
    than two comparisons with two scored completions, or where all scores are the same.
    """
    if tokenizer is None and isinstance(scorer, Scorer):
        tokenizer = scorer.renderer.tokenizer
    if tokenizer is None and length_unit == "tokens":
        raise ConfigError(
            "lengths are counted in tokens, and there is no tokenizer",
            field="length_unit",
            got="tokens, tokenizer=None",
            need="a tokenizer, or length_unit: characters",
        )
    found, digest = _Collected(), hashlib.sha256()
    remaining = iter(preferences)
    while chunk := list(islice(remaining, _COMPARISONS_AT_ONCE)):
        for preference in chunk:
            row = preference_to_dict(preference)
            digest.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        _collect(scorer, chunk, length_unit, tokenizer, found)
        if on_progress is not None:
            on_progress(len(chunk))
    _check(found, name)
    logger.info("Fitting the constants to %d scores.", len(found.scores))
    scores, lengths = np.asarray(found.scores), np.asarray(found.lengths, dtype=np.float64)
    better, worse = np.asarray(found.pairs, dtype=np.int64).reshape(-1, 2).T
    temperature = fit_temperature(scores[better] - scores[worse], name=name)
    curve = fit_length_curve(scores, lengths, unit=length_unit)
    if curve is not None:
        left = scores - np.interp(lengths, curve.lengths, curve.values)
        of_rest = fit_temperature(left[better] - left[worse], name=f"{name}, beside the length curve")
        curve = curve.model_copy(update={"residual_temperature": of_rest})
    return RewardCalibration(
        normalization=NormalizationConstants(mean=float(scores.mean()), std=float(scores.std())),
        length_curve=curve,
        temperature=temperature,
        provenance=CalibrationProvenance(
            data=PurePath(name).name if PurePath(name).is_absolute() else name,
            fingerprint=digest.hexdigest(),
            num_comparisons=found.num_comparisons,
            num_conversations=len(found.scores),
            num_failed=found.num_failed,
            treeward_version=VERSION,
            date=datetime.now(UTC).date().isoformat(),
        ),
    )


def fit_length_curve(scores: Floats, lengths: Floats, *, unit: LengthUnit) -> LengthCurve | None:
    """The score that length alone predicts, from scores (N,) and lengths (N,); None where length explains every score.

    LOWESS: at each length a straight line, fitted to the nearest two thirds of the points by least squares, weighted by
    nearness and, in three further rounds, against outliers. Cleveland 1979; to calibrate rewards: Huang et al. 2024
    (arXiv 2409.17407). Kept at no more than 64 lengths, quantiles of those that occur.
    """
    distinct, counts = np.unique(lengths, return_counts=True)
    fitted = _smooth(scores, lengths, int(counts.max())) if len(distinct) > 1 else np.full(len(scores), scores.mean())
    knots = np.unique(np.quantile(lengths, np.linspace(0, 1, MAX_KNOTS), method="nearest"))
    order = np.argsort(lengths, kind="stable")
    values = np.interp(knots, lengths[order], fitted[order])
    residuals = scores - np.interp(lengths, knots, values)
    if residuals.std() <= 1e-6 * scores.std():
        logger.warning(
            "no length curve: length alone explains every one of the %d scores, so they would all become the same.",
            len(scores),
        )
        return None
    return LengthCurve(
        unit=unit,
        lengths=tuple(knots),
        values=tuple(values),
        residual_mean=float(residuals.mean()),
        residual_std=float(residuals.std()),
    )


def fit_temperature(differences: Floats, *, name: str | None = None) -> CalibratedTemperature | None:
    """The T that minimises `preference_nll` of ordered pairs, from their differences s_better - s_worse (P,).

    Temperature scaling: Guo et al. 2017 (arXiv 1706.04599). The loss is convex in b = 1/T, with slope
    -mean(d sigma(-b d)), and its minimum is where the slope is 0. If the mean difference is not positive, no finite T
    minimises it: None, with a warning. If no pair is in the wrong order, no T above 0 does: the targets are then
    (P + 1)/(P + 2) instead of 1 (Platt 1999), with a warning. `name`: of the data, for the log.
    """
    num_pairs, of = len(differences), f"{name}: " if name else ""
    if num_pairs == 0 or differences.mean() <= 0:
        logger.warning(
            "%sno temperature: the better completion does not score higher on average over %d ordered pairs, so no "
            "temperature makes probabilities of these scores.",
            of,
            num_pairs,
        )
        return None
    target = 1.0
    if differences.min() >= 0:
        target = (num_pairs + 1) / (num_pairs + 2)
        logger.warning(
            "%sthe temperature is a cautious guess: all %d ordered pairs are in the right order, so any lower "
            "temperature fits better. Use more comparisons.",
            of,
            num_pairs,
        )

    def slope(log_b: float) -> float:
        scaled = differences * math.exp(log_b)
        return float(np.mean(differences * (np.exp(-np.logaddexp(0.0, -scaled)) - target)))

    # The slope rises with b, from below 0 at b = 0 to above 0. In units of the mean difference the root is near 1.
    unit = -math.log(float(np.abs(differences).mean()))
    temperature = math.exp(-brentq(slope, unit - 40, unit + 40, xtol=1e-12))
    return CalibratedTemperature(
        value=temperature,
        nll_before=preference_nll(differences, 1.0),
        nll_after=preference_nll(differences, temperature),
        num_pairs=num_pairs,
    )


def preference_nll(differences: Floats, temperature: float) -> float:
    """mean log(1 + exp(-(s_i - s_j) / T)), in nats: of ordered pairs (P,), i better than j; ties are none.

    The negative log-likelihood of the model of Bradley and Terry 1952.
    """
    return float(np.mean(np.logaddexp(0.0, -differences / temperature)))


def _collect(
    scorer: ConversationScorer,
    chunk: Sequence[Preference],
    unit: LengthUnit,
    tokenizer: PreTrainedTokenizerBase | None,
    found: _Collected,
) -> None:
    conversations = [[*p.context, *completion.messages] for p in chunk for completion in p.completions]
    results = iter(zip(scorer.score(conversations, on_error="mask"), conversations, strict=True))
    for preference in chunk:
        ranked: list[tuple[int, int]] = []
        for completion in preference.completions:
            result, conversation = next(results)
            if result.score is None:
                found.num_failed += 1
                found.first_error = found.first_error or result.error or "there is no score"
                continue
            ranked.append((completion.rank, len(found.scores)))
            found.scores.append(result.score)
            found.lengths.append(completion_length(conversation, unit, tokenizer))
        for (rank, i), (other_rank, j) in combinations(ranked, 2):
            if rank != other_rank:
                found.pairs.append((i, j) if rank < other_rank else (j, i))
        found.num_comparisons += 1
        found.num_usable += len(ranked) > 1


def _check(found: _Collected, name: str) -> None:
    if found.num_usable < 2:
        reason = f"; the first failure: {found.first_error}" if found.first_error else ""
        raise DataError(
            "there are too few comparisons to calibrate on",
            where=name,
            got=f"{found.num_usable} with two scored completions, of {found.num_comparisons} comparisons; "
            f"{found.num_failed} completions have no score{reason}",
            need="2 at least, and hundreds for constants worth using",
        )
    if min(found.scores) == max(found.scores):
        raise DataError(
            "all completions have the same score, so there is nothing to calibrate",
            where=name,
            got=f"{found.scores[0]} for each of {len(found.scores)} completions",
        )
    if found.num_failed:
        total = found.num_failed + len(found.scores)
        logger.warning("%d of %d completions have no score and are left out; the first: %s.",
                       found.num_failed, total, found.first_error)  # fmt: skip


def _smooth(scores: Floats, lengths: Floats, most_at_one_length: int) -> Floats:
    """LOWESS at each point; finite."""
    n = len(scores)
    # Where more points than a regression sees have the same length, it would see some of them only: bandwidth 0.
    neighbours = min(n, max(int(_SMOOTHING * n), _FEWEST_NEIGHBOURS, most_at_one_length + 1))
    # A hundredth of the range would be coarse for most points if a few are very long.
    low, high = np.quantile(lengths, [0.025, 0.975])
    delta = float(high - low) / 100 if n > _EXACT_UP_TO else 0.0
    settings = {"frac": neighbours / n, "delta": delta, "return_sorted": False}
    plain: Floats = lowess(scores, lengths, it=0, **settings)
    # The median error defines outliers: if most points are fitted exactly it is 0, and all others would be outliers.
    if np.median(np.abs(scores - plain)) <= 1e-6 * scores.std():
        return plain
    robust: Floats = lowess(scores, lengths, it=_ROBUST_ROUNDS, **settings)
    return robust if bool(np.isfinite(robust).all()) else plain
