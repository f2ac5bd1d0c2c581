"""`EnsembleScorer`: several reward models that score as one.

    models, ensemble = ["results/a/final", "results/b/final"], {"method": "worst"}
    scorer = load_scorer(ScoringConfig(models=models, ensemble=ensemble))
    score = scorer.score([conversation])[0]
    score.score, score.members        # the combined score, and the score of each member
    score.spread                      # of the mixture, where all members have one

Each member renders and scores with its own tokenizer, template and weights. Their scores are
z-scored first with fixed constants: no score depends on the rest of the call. A conversation that
one member cannot score has no score.

Shapes: S conversations, M members.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeward.config.reward_environments import JUDGE_FILE
from treeward.config.scoring import EnsembleConfig, EnsembleMethod, ScoringConfig
from treeward.data.conversation import AnyConversation
from treeward.errors import ConfigError, TreewardError
from treeward.model.contract import ScoringContract, read_contract
from treeward.model.spread import refit
from treeward.scoring.score import OnError, Score
from treeward.scoring.scorer import Prepared, PreparedScorer, Scorer


def combine(
    values_SM: ArrayLike,
    method: EnsembleMethod = "mean",
    *,
    uncertainty_coefficient: float = 0.5,
    spreads_SM: ArrayLike | None = None,
    spread_penalty: float = 0.0,
    constants: tuple[ArrayLike, ArrayLike] | None = None,
) -> NDArray[np.float64]:
    """One score for each conversation from those of its members, float64 (S,).

    Each row depends on itself alone. `constants`: the mean and the standard deviation of each
    member (M,); its scores are z-scored with them first. `spreads_SM`: of the scores, for
    `spread_penalty` alone, c.

    mean: R = 1/M sum_m r_m. worst: R = min_m (r_m - c s_m). uncertainty: R = mean_m r_m - lambda
    Var_m r_m, where lambda is `uncertainty_coefficient` and Var = 1/M sum_m (r_m - mean)^2, of the
    population. Coste et al. 2023 (arXiv 2310.02743, their mean, worst-case and
    uncertainty-weighted optimisation).
    """
    # One layout in memory, because the order of a sum depends on it.
    scores_SM = np.asarray(values_SM, dtype=np.float64, order="C")
    has_members = scores_SM.ndim == 2 and scores_SM.shape[1] > 0
    assert has_members, f"got shape {scores_SM.shape}, need (conversations, members)"
    stds_M: NDArray[np.float64] | None = None
    if constants is not None:
        means, stds = constants
        means_M = np.asarray(means, dtype=np.float64)
        stds_M = np.asarray(stds, dtype=np.float64)
        scores_SM = (scores_SM - means_M) / stds_M
    if method == "worst":
        if spread_penalty > 0:
            assert spreads_SM is not None
            scores_SM = scores_SM - spread_penalty * _in_units(spreads_SM, stds_M)
        worst_S: NDArray[np.float64] = scores_SM.min(axis=1)
        return worst_S
    means_S: NDArray[np.float64] = scores_SM.mean(axis=1)
    if method == "mean":
        return means_S
    variances_S: NDArray[np.float64] = scores_SM.var(axis=1)
    return means_S - uncertainty_coefficient * variances_S


def mixture_spreads(
    values_SM: ArrayLike,
    spreads_SM: ArrayLike,
    *,
    constants: tuple[ArrayLike, ArrayLike] | None = None,
) -> NDArray[np.float64]:
    """The standard deviation of the mixture of the members, float64 (S,), by the law of total
    variance: Var = 1/M sum_m s_m^2 + Var_m r_m, of scores and spreads that are z-scored first with
    the `constants` of `combine`."""
    scores_SM = np.asarray(values_SM, dtype=np.float64)
    stds_M: NDArray[np.float64] | None = None
    if constants is not None:
        stds_M = np.asarray(constants[1], dtype=np.float64)
        scores_SM = (scores_SM - np.asarray(constants[0], dtype=np.float64)) / stds_M
    within_S = np.square(_in_units(spreads_SM, stds_M)).mean(axis=1)
    spreads_S: NDArray[np.float64] = np.sqrt(within_S + scores_SM.var(axis=1))
    return spreads_S


def _in_units(spreads_SM: ArrayLike, stds_M: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """Spreads in the units of scores that are divided by `stds_M`."""
    spreads = np.asarray(spreads_SM, dtype=np.float64)
    if stds_M is None:
        return spreads
    divided: NDArray[np.float64] = spreads / stds_M
    return divided


_Constants = tuple[tuple[float, ...], tuple[float, ...]]
"""The mean and the standard deviation of each member."""


class EnsembleScorer(PreparedScorer):
    """Scores conversations with several models, and combines the scores.

    `Score.members` holds the members' own scores, before standardisation. `num_tokens` is that of
    the first member. `names`: of the members, for errors. Raises `ConfigError` for members that
    lack constants to be standardized by.
    """

    def __init__(
        self,
        members: Sequence[Scorer],
        config: EnsembleConfig | None = None,
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        self.members = tuple(members)
        self.config = config or EnsembleConfig()
        num_members = len(self.members)
        if names is None:
            names = [f"model {i + 1}" for i in range(num_members)]
        self.names = tuple(names)
        assert len(self.names) == num_members, f"{len(self.names)} names for {num_members} members"
        contracts = [member.contract for member in self.members]
        self._constants = _constants(self.config, contracts, self.names)
        for member, name in zip(self.members, self.names, strict=True):
            if self.config.spread_penalty > 0 and not member.has_spread:
                raise ConfigError(
                    "ensemble.spread_penalty needs members whose scores have a spread",
                    where=name,
                    field="ensemble.spread_penalty",
                    fix=f"fit one: {refit(name)}",
                )
        self.renderer = self.members[0].renderer

    @property
    def contract(self) -> ScoringContract | None:
        """None: no member's contract was calibrated for the scale of an ensemble's scores."""
        return None

    def prepare(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Prepared]:
        by_member = []
        for m, member in enumerate(self.members):
            with self._named(m):
                by_member.append(member.prepare(conversations, where=where, on_error=on_error))
        return list(map(_of_members, zip(*by_member, strict=True)))

    def prepare_texts(self, texts: Sequence[str | Sequence[int]]) -> list[Prepared]:
        # A rendered text is one member's text: another template would have written another.
        if len({member.renderer.fingerprint for member in self.members}) > 1:
            reason = "the models of this ensemble render conversations in different ways"
            error = f"{reason}: send messages, not text"
            return [Prepared(f"text {i}", None, error=error) for i in range(len(texts))]
        by_member = [member.prepare_texts(texts) for member in self.members]
        return list(map(_of_members, zip(*by_member, strict=True)))

    def score_prepared(
        self,
        prepared: Sequence[Prepared],
        *,
        on_error: OnError = "raise",
    ) -> list[Score]:
        by_member = []
        # Member by member, and not conversation by conversation: each fills its own batches.
        for m, member in enumerate(self.members):
            prepared_m = [conversation.members[m] for conversation in prepared]
            with self._named(m):
                by_member.append(member.score_prepared(prepared_m, on_error=on_error))
        return list(map(self._combined, zip(*by_member, strict=True)))

    def _combined(self, scores: Sequence[Score]) -> Score:
        """One conversation's score from those by the members.

        The first member without a score gives the error.
        """
        is_truncated = any(score.truncated for score in scores)
        # Heads, steps and spread of the first member say nothing about the combined score.
        joined = replace(scores[0], heads=(), steps=(), spread=None, truncated=is_truncated)
        members = []
        spreads = []
        for m, score in enumerate(scores):
            if score.score is None:
                return replace(joined, score=None, error=f"{self._label(m)}: {score.error}")
            members.append(score.score)
            if score.spread is not None:
                spreads.append(score.spread)
        spread = None
        member_spreads = None
        if len(spreads) == len(members):
            member_spreads = [spreads]
            [mixed] = mixture_spreads([members], member_spreads, constants=self._constants)
            spread = float(mixed)
        [combined] = combine(
            [members],
            self.config.method,
            uncertainty_coefficient=self.config.uncertainty_coefficient,
            spreads_SM=member_spreads,
            spread_penalty=self.config.spread_penalty,
            constants=self._constants,
        )
        return replace(joined, score=float(combined), members=tuple(members), spread=spread)

    @contextlib.contextmanager
    def _named(self, m: int) -> Iterator[None]:
        """Errors within it name the member."""
        try:
            yield
        except TreewardError as error:
            raise error.but(summary=f"{error.summary} ({self._label(m)})") from error

    def _label(self, m: int) -> str:
        return f"member {m + 1} of {len(self.members)}, {self.names[m]}"


def _of_members(members: tuple[Prepared, ...]) -> Prepared:
    error = next((member.error for member in members if member.error is not None), None)
    # The cost of a conversation, by which a server fills its batches, is that of all members.
    num_tokens = sum(member.num_tokens for member in members)
    return replace(members[0], num_tokens=num_tokens, error=error, members=members)


def _constants(
    config: EnsembleConfig,
    contracts: Sequence[ScoringContract | None],
    names: Sequence[str],
) -> _Constants | None:
    """The constants that standardize the members; None without standardisation."""
    if not names:
        raise ConfigError("an ensemble has no members", need="at least one model")
    if not config.standardize:
        return None
    means = []
    stds = []
    fingerprints = set()
    for contract in contracts:
        # A member without constants is missing in the count below.
        if contract is None or contract.calibration is None:
            continue
        provenance = contract.calibration.provenance
        if provenance is not None:
            fingerprints.add(provenance.fingerprint)
        constants = contract.calibration.normalization
        if constants is not None:
            means.append(constants.mean)
            stds.append(constants.std)
    # Constants of different data are not on one scale. Without a provenance nothing says that they
    # are of other data.
    if len(means) == len(names) and len(fingerprints) <= 1:
        return tuple(means), tuple(stds)
    num_data = len(fingerprints)
    raise ConfigError(
        "the members cannot be standardized",
        where=names[0],
        field="standardize",
        got=f"{len(means)} of {len(names)} models with a calibration, on {num_data} data sets",
        fix="treeward calibrate MODEL --data FILE for each; or set standardize=false",
    )


def load_scorer(config: ScoringConfig, **capacity: Any) -> PreparedScorer:
    """The reward model of a section, or its ensemble of them.

    A model that is named twice is loaded once. `capacity`: arguments of `Scorer.load`, whose errors
    it raises too.
    """
    names = config.models
    for name in names:
        if (Path(name).expanduser() / JUDGE_FILE).is_file():
            environment = f"{{type: judge, model: {name}, use_logprobs: true}}"
            raise ConfigError(
                "this model is a judge and no reward model",
                where=name,
                fix=f"ask it as an environment: {environment}",
            )
    if config.ensemble is None:
        return Scorer.load(config, **capacity)
    if all(Path(name).expanduser().is_dir() for name in names):
        # Raises for missing constants before any weights are loaded.
        _constants(config.ensemble, [read_contract(name) for name in names], names)
    loaded: dict[str, Scorer] = {}
    for name in names:
        if name not in loaded:
            section = config.model_copy(update={"models": (name,)})
            loaded[name] = Scorer.load(section, **capacity)
    return EnsembleScorer([loaded[name] for name in names], config.ensemble, names=names)
