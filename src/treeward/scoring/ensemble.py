"""`EnsembleScorer`: several reward models that score as one.

    models, ensemble = ["results/a/final", "results/b/final"], {"method": "worst"}
    scorer = load_scorer(ScoringConfig(models=models, ensemble=ensemble))
    score = scorer.score([conversation])[0]
    score.score, score.members        # the combined score, and the score of each member

Each member renders and scores with its own tokenizer, template and weights. Their scores are z-scored first with fixed
constants: no score depends on the rest of the call. A conversation that one member cannot score has no score.

Shapes: S conversations, M members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treeward.config.reward_environments import JUDGE_FILE
from treeward.config.scoring import EnsembleConfig, EnsembleMethod, ScoringConfig
from treeward.data.conversation import AnyConversation
from treeward.errors import ConfigError, TreewardError
from treeward.model.contract import ScoringContract, read_contract
from treeward.scoring.score import OnError, Score
from treeward.scoring.scorer import Prepared, PreparedScorer, Scorer


def combine(
    values_SM: ArrayLike,
    method: EnsembleMethod = "mean",
    *,
    uncertainty_coefficient: float = 0.5,
    constants: tuple[ArrayLike, ArrayLike] | None = None,
) -> NDArray[np.float64]:
    """One score for each conversation from those of its members, float64 (S,); each row depends on itself alone.

    `constants`: the mean and the standard deviation of each member (M,); its scores are z-scored with them first.

    mean: R = 1/M sum_m r_m. worst: R = min_m r_m. uncertainty: R = mean_m r_m - lambda Var_m r_m, where lambda is
    `uncertainty_coefficient` and Var = 1/M sum_m (r_m - mean)^2, of the population. Coste et al. 2023 (arXiv
    2310.02743, their mean, worst-case and uncertainty-weighted optimisation).
    """
    values = np.asarray(values_SM, dtype=np.float64, order="C")
    assert values.ndim == 2 and values.shape[1] > 0, f"got shape {values.shape}, need (conversations, members)"
    if constants is not None:
        means_M, stds_M = (np.asarray(values_M, dtype=np.float64) for values_M in constants)
        values = (values - means_M) / stds_M
    if method == "worst":
        worst_S: NDArray[np.float64] = values.min(axis=1)
        return worst_S
    means_S: NDArray[np.float64] = values.mean(axis=1)
    return means_S if method == "mean" else means_S - uncertainty_coefficient * values.var(axis=1)


_T = TypeVar("_T")

_Constants = tuple[tuple[float, ...], tuple[float, ...]]
"""The mean and the standard deviation of each member."""


class EnsembleScorer(PreparedScorer):
    """Scores conversations with several models, and combines the scores.

    `Score.members` holds the members' own scores, before standardisation. `num_tokens` is that of the first member.
    `names`: of the members, for errors. Raises `ConfigError` for members that lack constants to be standardized by.
    """

    def __init__(
        self, members: Sequence[Scorer], config: EnsembleConfig | None = None, *, names: Sequence[str] | None = None
    ) -> None:
        self.members = tuple(members)
        self.config = config or EnsembleConfig()
        self.names = tuple(names) if names is not None else tuple(f"model {i + 1}" for i in range(len(self.members)))
        assert len(self.names) == len(self.members), f"{len(self.names)} names for {len(self.members)} members"
        self._constants = _constants(self.config, [member.contract for member in self.members], self.names)
        self.renderer = self.members[0].renderer

    @property
    def contract(self) -> ScoringContract | None:
        """None: an ensemble's scores are not on the scale that any member's contract was calibrated for."""
        return None

    def prepare(
        self,
        conversations: Sequence[AnyConversation],
        *,
        where: Sequence[str] | None = None,
        on_error: OnError = "raise",
    ) -> list[Prepared]:
        by_member = self._each(lambda _, member: member.prepare(conversations, where=where, on_error=on_error))
        return [_of_members(members) for members in zip(*by_member, strict=True)]

    def prepare_texts(self, texts: Sequence[str | Sequence[int]]) -> list[Prepared]:
        if len({member.renderer.fingerprint for member in self.members}) > 1:
            error = "the models of this ensemble render conversations in different ways: send messages, not text"
            return [Prepared(f"text {i}", None, error=error) for i in range(len(texts))]
        by_member = [member.prepare_texts(texts) for member in self.members]
        return [_of_members(members) for members in zip(*by_member, strict=True)]

    def score_prepared(self, prepared: Sequence[Prepared], *, on_error: OnError = "raise") -> list[Score]:
        by_member = self._each(
            lambda m, scorer: scorer.score_prepared(
                [conversation.members[m] for conversation in prepared], on_error=on_error
            )
        )
        return [self._combined(scores) for scores in zip(*by_member, strict=True)]

    def _combined(self, scores: Sequence[Score]) -> Score:
        """One conversation's score from those by the members; the first member without one gives the error."""
        joined = replace(scores[0], heads=(), steps=(), truncated=any(score.truncated for score in scores))
        for m, score in enumerate(scores):
            if score.score is None:
                return replace(joined, score=None, error=f"{self._label(m)}: {score.error}")
        members = tuple(score.score for score in scores if score.score is not None)
        coefficient, constants = self.config.uncertainty_coefficient, self._constants
        [score_S] = combine([members], self.config.method, uncertainty_coefficient=coefficient, constants=constants)
        return replace(joined, score=float(score_S), members=members)

    def _each(self, ask: Callable[[int, Scorer], list[_T]]) -> list[list[_T]]:
        """What every member gives; its errors name it."""
        by_member = []
        for m, member in enumerate(self.members):
            try:
                by_member.append(ask(m, member))
            except TreewardError as error:
                raise error.but(summary=f"{error.summary} ({self._label(m)})") from error
        return by_member

    def _label(self, m: int) -> str:
        return f"member {m + 1} of {len(self.members)}, {self.names[m]}"


def _of_members(members: tuple[Prepared, ...]) -> Prepared:
    error = next((member.error for member in members if member.error is not None), None)
    num_tokens = sum(member.num_tokens for member in members)
    return replace(members[0], num_tokens=num_tokens, error=error, members=members)


def _constants(
    config: EnsembleConfig, contracts: Sequence[ScoringContract | None], names: Sequence[str]
) -> _Constants | None:
    """The constants that standardize the members; None without standardisation."""
    if not names:
        raise ConfigError("an ensemble has no members", need="at least one model")
    if not config.standardize:
        return None
    calibrations = [contract.calibration for contract in contracts if contract and contract.calibration]
    data = {calibration.provenance.fingerprint for calibration in calibrations if calibration.provenance}
    constants = [calibration.normalization for calibration in calibrations if calibration.normalization]
    if len(constants) == len(names) and len(data) <= 1:
        return tuple(member.mean for member in constants), tuple(member.std for member in constants)
    raise ConfigError(
        "the members cannot be standardized",
        where=names[0],
        field="standardize",
        got=f"{len(constants)} of {len(names)} models with a calibration, on {len(data)} data sets",
        fix="treeward calibrate MODEL --data FILE for each; or set standardize=false",
    )


def load_scorer(config: ScoringConfig, **capacity: Any) -> PreparedScorer:
    """The reward model of a section, or its ensemble of them.

    A model that is named twice is loaded once. `capacity`: arguments of `Scorer.load`, whose errors it raises too.
    """
    judges = [name for name in config.models if (Path(name) / JUDGE_FILE).is_file()]
    if judges:
        fix = f"ask it as an environment: {{type: judge, model: {judges[0]}, use_logprobs: true}}"
        raise ConfigError("this model is a judge and no reward model", where=judges[0], fix=fix)
    if config.ensemble is None:
        return Scorer.load(config, **capacity)
    names = config.models
    if all(Path(name).is_dir() for name in names):  # before any weights are loaded
        _constants(config.ensemble, [read_contract(name) for name in names], names)
    sections = {name: config.model_copy(update={"models": (name,)}) for name in names}
    loaded = {name: Scorer.load(section, **capacity) for name, section in sections.items()}
    return EnsembleScorer([loaded[name] for name in names], config.ensemble, names=names)
