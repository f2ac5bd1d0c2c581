"""`fit_spread`: how sure a trained model is of each score, without a second training.

    fitted = fit_spread(scorer, train_preferences, held_out, names=("train.jsonl", "dev.jsonl"))
    contract = keep_spread(fitted, scorer, Path("results/rm/final"))
    Scorer.load("results/rm/final").score([conversation])[0].spread
    margin_spreads(scorer, context, completions)            # of each difference of two scores

The mathematics are in `laplace.py`: a Laplace approximation of the last layer, around the head that
was trained. Its curvature is summed over the comparisons that the head was trained on, which the
backbone reads once, by the path of a score. The prior's precision is the one under which held-out
labels are the likeliest, with probabilities that are moderated by the spread.

Shapes: P pairs, D features, C completions, L penalties.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from treeward.data.conversation import AnyConversation, as_conversations
from treeward.data.preference import Preference, digest_of
from treeward.errors import DataError, ModelError
from treeward.losses import ranked_pairs
from treeward.model.contract import (
    CalibrationProvenance,
    ScoringContract,
    SpreadContract,
    SpreadMetrics,
    read_contract,
    write_contract,
)
from treeward.model.heads import Features
from treeward.model.spread import SpreadReader, remove_other_spreads, write_spread
from treeward.scoring.calibration import DataLog, fit_temperature
from treeward.scoring.golden import exact_scoring, golden_spreads, measured_tolerance
from treeward.scoring.laplace import Curvature, Floats, folds_of, moderated
from treeward.scoring.scorer import Scorer
from treeward.scoring.spread_metrics import spread_metrics
from treeward.tree.token_tree import TokenIds

logger = logging.getLogger(__name__)

PENALTIES: tuple[float, ...] = tuple(10.0 ** (halves / 2) for halves in range(-6, 13))
"""Precisions of the prior that are tried, for features with a root mean square of 1."""
_COMPARISONS_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class FittedSpread:
    """A spread that is not written yet. `num_pairs`: whose curvature it has."""

    reader: SpreadReader
    penalty: float
    num_pairs: int
    trained_on: CalibrationProvenance
    held_out: CalibrationProvenance
    metrics: SpreadMetrics


@dataclass(frozen=True, slots=True)
class _ReadComparison:
    """What the head reads of a comparison's completions, and makes of it. `prompt`: a digest.
    `rows`: of each completion the score, and then the features."""

    prompt: int
    ranks: list[int] = field(default_factory=list)
    rows: list[NDArray[np.float32]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The ordered pairs of some comparisons, as the head reads them.

    `differences_PD`: the better one's features less the worse one's; `margin_P`: the same of the
    scores. `weight_P`: a comparison counts 1, as in training. `prompt_P`: the same for pairs that
    share a prompt. `features_CD`: of all completions that were read.
    """

    differences_PD: NDArray[np.float32]
    margin_P: Floats
    weight_P: Floats
    prompt_P: NDArray[np.int64]
    features_CD: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _TrainedOn:
    """`mean_D`: of the features of all completions. `prompts`: digests."""

    curvature: Curvature
    mean_D: NDArray[np.float32]
    prompts: set[int]


def fit_spread(
    scorer: Scorer,
    trained_on: Iterable[Preference],
    held_out: Iterable[Preference],
    *,
    names: tuple[str, str],
) -> FittedSpread:
    """Fit the spread of a model's scores. `names`: of the two sets of comparisons, for provenance.

    Raises `ModelError` for a model whose head is not one linear value and for one that does not
    compute in float32, and `DataError` for sets without pairs, or that are the same.
    """
    check_head(scorer)
    trained_log = DataLog(names[0])
    trained = _read_trained_on(scorer, trained_on, trained_log)
    held_out_log = DataLog(names[1])
    comparisons: list[_ReadComparison] = []
    for chunk in _read_chunks(scorer, held_out, held_out_log):
        comparisons += chunk
    pairs = _pairs_of(comparisons, scorer)
    # Half of the prompts chooses, and half is measured.
    num_other_prompts = len(np.unique(pairs.prompt_P)) - 1
    _check_pairs(len(pairs.margin_P), num_other_prompts, held_out_log)
    if trained_log.fingerprint == held_out_log.fingerprint:
        raise DataError(
            "the held-out comparisons are those that the model was trained on",
            where=names[1],
            need="comparisons of other prompts, which say how large the spread must be",
        )
    num_known = len(trained.prompts.intersection(pairs.prompt_P.tolist()))
    if num_known:
        logger.warning(
            "%s has %d prompts that the model was trained on: the spread comes out too small.",
            names[1],
            num_known,
        )
    spreads = []
    for penalty in PENALTIES:
        # One at a time: each has a factor of D x D numbers.
        spreads.append(trained.curvature.posterior(penalty).spreads(pairs.differences_PD))
    spread_LP = np.stack(spreads)
    # The measure is of halves. The spread that is kept is chosen by all pairs, which are more.
    penalty = PENALTIES[_likeliest(pairs.margin_P, spread_LP)]
    _warn_of_ends(penalty)
    whitening_DD = trained.curvature.posterior(penalty).whitening().astype(np.float32)
    reader = SpreadReader(torch.from_numpy(whitening_DD), torch.from_numpy(trained.mean_D))
    return FittedSpread(
        reader=reader.to(scorer.model.device),
        penalty=penalty,
        num_pairs=trained.curvature.num_pairs,
        trained_on=trained_log.provenance(),
        held_out=held_out_log.provenance(),
        metrics=held_out_metrics(pairs.margin_P, spread_LP, pairs.prompt_P),
    )


def keep_spread(fitted: FittedSpread, scorer: Scorer, folder: Path) -> ScoringContract:
    """Write a spread into the folder of the scorer's model, with the spreads of its golden
    conversations; returns the new contract."""
    contract = read_contract(folder)
    assert contract is not None
    model = scorer.model
    token_ids = [example.token_ids for example in contract.golden]
    with exact_scoring(model):
        exact = golden_spreads(model, fitted.reader, token_ids)
        # How far these are off in bfloat16 says how much the model amplifies rounding.
        with model.computing_in(torch.bfloat16):
            rounded = golden_spreads(model, fitted.reader, token_ids)
    golden = []
    for example, spread in zip(contract.golden, exact, strict=True):
        golden.append(example.model_copy(update={"spread": spread}))
    # The file first: until the contract names it, the one before holds.
    file, sha256 = write_spread(fitted.reader, folder)
    spread_contract = SpreadContract(
        file=file,
        sha256=sha256,
        head_sha256=contract.weights.head_sha256,
        penalty=fitted.penalty,
        num_pairs=fitted.num_pairs,
        trained_on=fitted.trained_on,
        held_out=fitted.held_out,
        metrics=fitted.metrics,
        tolerance=measured_tolerance(exact, rounded),
    )
    contract = contract.model_copy(update={"spread": spread_contract, "golden": golden})
    write_contract(contract, folder)
    remove_other_spreads(folder, file)
    return contract


def margin_spreads(
    scorer: Scorer,
    context: AnyConversation | str,
    completions: Sequence[AnyConversation | str],
) -> Floats:
    """The spread of each difference of two scores, (C, C), in which what both completions share
    cancels. The spreads of the two scores say less: they have no sum that would be this one.

    No other thread may score with this model meanwhile: beside each score the model reads the
    features of its head, where the other thread would take the first of them for a spread.

    Raises `ModelError` for a model without a spread, and `DataError` for a completion that cannot
    be scored.
    """
    model = scorer.model
    if not scorer.has_spread:
        raise ModelError(
            "the model has no spread",
            where=model.hf.name_or_path or None,
            fix="fit one: treeward calibrate MODEL --data HELD_OUT --trained-on TRAIN",
        )
    sequences = []
    for item in scorer.prepare(as_conversations(context, completions)):
        if item.ids is None:
            raise DataError("the completion has no score", where=item.name, got=item.error)
        sequences.append(item.ids)
    if isinstance(model.beside, SpreadReader):
        with model.reading(Features(len(model.beside.mean_D))):
            features_CD = _read(scorer, sequences)[:, 1:]
        whitened_CD = model.beside.whitened(features_CD.to(model.device)).cpu().numpy()
        distances_CC: Floats = np.linalg.norm(
            whitened_CD[:, None].astype(np.float64) - whitened_CD[None], axis=2
        )
        return distances_CC
    # Several heads: the deviation of their differences.
    values_CH = _read(scorer, sequences).double().numpy()
    spreads_CC: Floats = (values_CH[:, None] - values_CH[None]).std(axis=2)
    return spreads_CC


def check_head(scorer: Scorer) -> None:
    """Raise `ModelError` for a model that a spread cannot be fitted to."""
    model = scorer.model
    name = model.hf.name_or_path or None
    is_single = model.num_heads == 1 and scorer.head_weights is None and model.step_token is None
    if not (isinstance(model.head, nn.Linear) and is_single and not model.score_parts):
        fix = None
        if scorer.has_spread:
            fix = "its heads have a spread already, Score.spread: leave out --trained-on"
        raise ModelError(
            "a spread cannot be fitted to this model's head",
            where=name,
            got=f"{type(model.head).__name__} with {model.num_heads} values",
            need="a linear layer with one value, which is the score",
            fix=fix,
        )
    if model.hf.dtype != torch.float32:
        raise ModelError(
            "a spread is fitted in float32",
            where=name,
            got=str(model.hf.dtype).removeprefix("torch."),
            fix="leave out --dtype",
        )


def _read_trained_on(scorer: Scorer, trained_on: Iterable[Preference], log: DataLog) -> _TrainedOn:
    """Sums alone are kept of what the model was trained on, which may be large."""
    _, num_features = scorer.model.feature_shape
    curvature = Curvature(num_features)
    sum_D = np.zeros(num_features)
    prompts: set[int] = set()
    for chunk in _read_chunks(scorer, trained_on, log):
        pairs = _pairs_of(chunk, scorer)
        curvature.add(pairs.differences_PD, pairs.margin_P, pairs.weight_P)
        sum_D += pairs.features_CD.sum(axis=0, dtype=np.float64)
        prompts.update(pairs.prompt_P.tolist())
    # 1: here any prompts will do, as none is held out from another.
    _check_pairs(curvature.num_pairs, 1, log)
    # Also of completions that are in no pair: they are tied, or the only one that has a score.
    mean_D = (sum_D / log.num_conversations).astype(np.float32)
    return _TrainedOn(curvature, mean_D, prompts)


def _read_chunks(
    scorer: Scorer, preferences: Iterable[Preference], log: DataLog
) -> Iterator[list[_ReadComparison]]:
    """A set, some comparisons at a time. Completions that cannot be scored are counted in the log,
    and left out."""
    remaining = iter(preferences)
    while chunk := list(islice(remaining, _COMPARISONS_AT_ONCE)):
        yield _read_comparisons(scorer, chunk, log)


def _read_comparisons(
    scorer: Scorer, chunk: Sequence[Preference], log: DataLog
) -> list[_ReadComparison]:
    """The completions of each comparison that can be scored, in one call."""
    conversations: list[AnyConversation] = []
    for preference in chunk:
        conversations += preference.conversations
    prepared = scorer.prepare(conversations, on_error="mask")
    sequences = [item.ids for item in prepared if item.ids is not None]
    _, num_features = scorer.model.feature_shape
    with scorer.model.reading(Features(num_features)):
        rows = iter(_read(scorer, sequences).numpy())
    # In the order of `prepared`, of which those without tokens have no row.
    items = iter(prepared)
    comparisons = []
    for preference in chunk:
        read = _ReadComparison(digest_of(preference.prompt_key))
        for rank in preference.ranks:
            item = next(items)
            if item.ids is None:
                log.errors.append(item.error or "there are no tokens")
                continue
            row_X = next(rows)
            if not np.isfinite(row_X).all():
                log.errors.append("the model reads states that are not finite")
                continue
            read.ranks.append(rank)
            read.rows.append(row_X)
        log.add(preference)
        log.num_conversations += len(read.rows)
        comparisons.append(read)
    return comparisons


def _pairs_of(comparisons: Sequence[_ReadComparison], scorer: Scorer) -> _Pairs:
    _, num_features = scorer.model.feature_shape
    # The first of each list is of no pair: a chunk may have none.
    differences = [np.zeros((0, num_features), dtype=np.float32)]
    margins = [np.zeros(0)]
    features = [np.zeros((0, num_features), dtype=np.float32)]
    weights: list[float] = []
    prompts: list[int] = []
    for read in comparisons:
        if not read.rows:
            continue
        rows_CX = np.stack(read.rows)
        scores_C = rows_CX[:, 0].astype(np.float64)
        features_CD = rows_CX[:, 1:]
        pairs = ranked_pairs([read.ranks])
        better_P = pairs.better_P.numpy()
        worse_P = pairs.worse_P.numpy()
        features.append(features_CD)
        differences.append(features_CD[better_P] - features_CD[worse_P])
        margins.append(scores_C[better_P] - scores_C[worse_P])
        weights += pairs.weight_P.tolist()
        prompts += [read.prompt] * len(better_P)
    return _Pairs(
        differences_PD=np.concatenate(differences),
        margin_P=np.concatenate(margins),
        weight_P=np.array(weights, dtype=np.float64),
        prompt_P=np.array(prompts, dtype=np.int64),
        features_CD=np.concatenate(features),
    )


def _read(scorer: Scorer, sequences: Sequence[TokenIds]) -> torch.Tensor:
    return scorer.model.read_tokens(
        sequences, max_tokens=scorer.batch_tokens, max_sequences=scorer.max_sequences
    )


def _check_pairs(num_pairs: int, num_other_prompts: int, log: DataLog) -> None:
    """Raise `DataError` where there is too little to fit a spread on; log what was left out."""
    if num_pairs and num_other_prompts > 0:
        log.warn_of_failures()
        return
    raise DataError(
        "there are too few comparisons to fit a spread on",
        where=log.name,
        got=f"{num_pairs} ordered pairs of {log.num_comparisons} comparisons{log.first_error}",
        need="comparisons of different prompts, each with a better and a worse completion",
    )


def _warn_of_ends(penalty: float) -> None:
    """Warn where no penalty that was tried is the best one."""
    if penalty == PENALTIES[0]:
        logger.warning(
            "The held-out pairs ask for more doubt than a Laplace approximation has with any "
            "prior: they may be of another kind than what the model was trained on. A temperature "
            "may do more."
        )
    if penalty == PENALTIES[-1]:
        logger.warning("The held-out labels are the likeliest without any spread: it is about 0.")


def _likeliest(margin_P: Floats, spread_LP: Floats) -> int:
    """The place of the penalty under which the labels are the likeliest."""
    losses = []
    for spread_P in spread_LP:
        losses.append(np.logaddexp(0.0, -moderated(margin_P, spread_P)).mean())
    return int(np.argmin(losses))


def held_out_metrics(
    margin_P: Floats, spread_LP: Floats, prompt_P: NDArray[np.int64]
) -> SpreadMetrics:
    """The numbers of both halves of the prompts, each by the spread (of L) and the temperature that
    the other half has chosen."""
    half_P = folds_of(prompt_P, 2)
    spread_P = np.zeros(len(margin_P))
    temperature_P = np.ones(len(margin_P))
    for half in range(2):
        is_measured_P = half_P == half
        choosing_P = margin_P[~is_measured_P]
        place = _likeliest(choosing_P, spread_LP[:, ~is_measured_P])
        spread_P[is_measured_P] = spread_LP[place, is_measured_P]
        temperature = fit_temperature(choosing_P, name="half of the held-out pairs")
        if temperature is not None:
            temperature_P[is_measured_P] = temperature.value
    return spread_metrics(margin_P, spread_P, temperature_P, half_P)
