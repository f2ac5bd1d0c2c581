"""Ensembles: the formulas against plain numpy, and no score without every member's, whatever the
company."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from messages import chat
from signed import contract_of, signed

from treeward.config.scoring import EnsembleConfig, ScoringConfig
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError
from treeward.model.contract import (
    CalibrationProvenance,
    NormalizationConstants,
    RewardCalibration,
    write_contract,
)
from treeward.model.reward_model import RewardModel
from treeward.scoring.ensemble import EnsembleScorer, combine, load_scorer, mixture_spreads
from treeward.scoring.score import Score
from treeward.scoring.scorer import Scorer

CLOSE = 1e-5
METHODS = ("mean", "worst", "uncertainty")
RAW = EnsembleConfig(standardize=False)


CHATS = [
    chat("What is the capital of France?", completion)
    for completion in ("Paris.", "Paris, of course.", "I do not know.", "")
] + [chat("2 + 2?", "4"), chat("Tell me about bread.", "Bread is old. " * 6)]
LONG = chat("and so on " * 40, "Yes.")


@pytest.fixture(scope="module")
def scorer(tiny_tokenizer: Any) -> Callable[..., Scorer]:
    """A scorer of a tiny model; the seed determines the weights."""

    def make(seed: int, *, num_labels: int = 1, **settings: Any) -> Scorer:
        model = RewardModel(tiny_model("qwen3", seed=seed, num_labels=num_labels))
        weights = None if num_labels == 1 else [1.0] * num_labels
        return Scorer(
            model, Renderer(copy.deepcopy(tiny_tokenizer), **settings), head_weights=weights
        )

    return make


@pytest.fixture(scope="module")
def folders(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two signed model folders, calibrated to means 3 and -1 and standard deviations 2 and 0.25."""
    made = []
    for seed, (mean, std) in enumerate([(3.0, 2.0), (-1.0, 0.25)]):
        folder = tmp_path_factory.mktemp("member") / "final"
        _, _, contract = signed(
            folder, tiny_tokenizer, tiny_model("llama", seed=seed), max_length=200
        )
        constants = RewardCalibration(normalization=NormalizationConstants(mean=mean, std=std))
        write_contract(contract.model_copy(update={"calibration": constants}), folder)
        made.append(folder)
    return made


def values(scores: list[Score]) -> list[float]:
    assert all(score.score is not None and score.error is None for score in scores)
    return [score.score for score in scores if score.score is not None]


def by_hand(rows: list[list[float]], method: str, coefficient: float) -> list[float]:
    """The formulas once more, a conversation at a time."""
    combined = []
    for row in rows:
        mean = sum(row) / len(row)
        variance = sum((value - mean) ** 2 for value in row) / len(row)
        combined.append(
            {"mean": mean, "worst": sorted(row)[0], "uncertainty": mean - coefficient * variance}[
                method
            ]
        )
    return combined


finite = st.floats(-1e3, 1e3)


@given(
    st.integers(1, 5).flatmap(
        lambda m: st.tuples(
            st.lists(st.lists(finite, min_size=m, max_size=m), min_size=1, max_size=6),
            st.lists(st.tuples(finite, st.floats(0.1, 9)), min_size=m, max_size=m),
        )
    ),
    st.floats(0, 3),
)
def test_formulas(
    drawn: tuple[list[list[float]], list[tuple[float, float]]], coefficient: float
) -> None:
    """Each row as by hand, whatever the order of the members, and by itself alone."""
    rows, constants = drawn
    means, stds = zip(*constants, strict=True)
    z = [[(r - m) / s for r, m, s in zip(row, means, stds, strict=True)] for row in rows]

    def combined(
        method: Any, given: list[list[float]], constants: Any = (means, stds)
    ) -> list[float]:
        return combine(
            given, method, uncertainty_coefficient=coefficient, constants=constants
        ).tolist()

    for method in METHODS:
        got = combined(method, rows)
        assert got == pytest.approx(by_hand(z, method, coefficient), rel=1e-6, abs=1e-6)
        turned = combined(method, [row[::-1] for row in rows], (means[::-1], stds[::-1]))
        assert turned == pytest.approx(got, rel=1e-6, abs=1e-6)
        assert [combined(method, [row])[0] for row in rows] == got


@pytest.mark.parametrize("method", METHODS)
def test_members_combined(method: Any, scorer: Callable[..., Scorer]) -> None:
    members = [scorer(seed) for seed in range(3)]
    config = EnsembleConfig(method=method, uncertainty_coefficient=0.7, standardize=False)
    got = EnsembleScorer(members, config).score(CHATS)
    raw_SM = np.array([values(member.score(CHATS)) for member in members]).T
    assert [score.members for score in got] == [tuple(row) for row in raw_SM.tolist()]
    assert values(got) == pytest.approx(by_hand(raw_SM.tolist(), method, 0.7), abs=1e-9)
    assert np.std(values(got)) > 0.05 and raw_SM.std(axis=1).min() > 0.01  # the members do disagree
    assert [s.num_tokens for s in got] == [len(members[0].renderer.encode(c)) for c in CHATS]


def test_no_score_without_every_member(scorer: Callable[..., Scorer]) -> None:
    ensemble = EnsembleScorer(
        [scorer(0), scorer(1, max_length=60), scorer(2, max_length=50)], RAW, names=["a", "b", "c"]
    )
    bad = [{"role": "user", "content": "Anyone?"}]
    scores = ensemble.score([CHATS[0], LONG, bad, CHATS[4]], on_error="mask")
    want = ensemble.score([CHATS[0], CHATS[4]])
    assert values([scores[0], scores[3]]) == pytest.approx(values(want), abs=CLOSE)
    assert scores[1].score is None and scores[1].members == ()
    assert scores[1].error is not None and scores[1].error.startswith(
        "member 2 of 3, b: too long to score"
    )
    assert scores[2].error is not None and scores[2].error.startswith("member 1 of 3, a: ")
    assert all(score.members and score.error is None for score in (scores[0], scores[3]))
    nothing = ensemble.score([LONG, bad], on_error="mask")
    assert [score.score for score in nothing] == [None, None] and ensemble.score([]) == []


@pytest.mark.parametrize(
    ("seeds", "keys", "message"),
    [
        ([], {"standardize": False}, "no members"),
        (
            [0, 1],
            {},
            r"the members cannot be standardized(?s:.*)treeward calibrate MODEL --data FILE",
        ),
    ],
)
def test_what_does_not_fit(
    seeds: list[int], keys: dict[str, Any], message: str, scorer: Callable[..., Scorer]
) -> None:
    members = [scorer(seed) for seed in seeds]
    with pytest.raises(ConfigError, match=message):
        EnsembleScorer(members, EnsembleConfig(**keys))


def test_each_folder_is_standardized_by_its_own_calibration(folders: list[Path]) -> None:
    section = ScoringConfig(models=tuple(map(str, folders)), ensemble=EnsembleConfig())
    ensemble = load_scorer(section, device="cpu")
    raw = [values(Scorer.load(folder, device="cpu").score(CHATS)) for folder in folders]
    want = [((a - 3.0) / 2.0 + (b + 1.0) / 0.25) / 2 for a, b in zip(*raw, strict=True)]
    assert values(ensemble.score(CHATS)) == pytest.approx(want, abs=CLOSE)
    assert ensemble.contract is None and ensemble.renderer is ensemble.members[0].renderer


def test_members_calibrated_on_different_data_are_not_standardized(
    folders: list[Path], tmp_path: Path
) -> None:
    """Their means and standard deviations do not compare. The files decide, before any weights are
    loaded."""
    members = []
    for number, folder in enumerate(folders):
        member = tmp_path / f"member-{number}"
        member.mkdir()
        contract = contract_of(folder)
        fitted_on = CalibrationProvenance(
            data="d.jsonl",
            fingerprint=f"{number}" * 64,
            num_comparisons=9,
            num_conversations=18,
            num_failed=0,
            treeward_version="0.1.0",
            date="2025-01-31",
        )
        assert contract.calibration is not None
        calibration = contract.calibration.model_copy(update={"provenance": fitted_on})
        write_contract(contract.model_copy(update={"calibration": calibration}), member)
        members.append(str(member))
    with pytest.raises(
        ConfigError, match="cannot be standardized(?s:.*)2 of 2 models(?s:.*)on 2 data sets"
    ):
        load_scorer(ScoringConfig(models=tuple(members), ensemble=EnsembleConfig()), device="cpu")


def test_a_score_is_truncated_if_it_is_for_one_member(scorer: Callable[..., Scorer]) -> None:
    members = [scorer(0), scorer(1, max_length=60, truncation="truncate_left")]
    scores = EnsembleScorer(members, RAW).score([LONG, CHATS[0]])
    assert [score.truncated for score in scores] == [True, False]


def test_the_spread_of_an_ensemble_is_that_of_the_mixture() -> None:
    # Draws from the mixture itself: each member as often as any other.
    values_SM = np.array([[1.0, 3.0, -2.0], [0.0, 0.0, 0.0]])
    spreads_SM = np.array([[0.5, 2.0, 1.0], [1.0, 1.0, 2.0]])
    draw = np.random.default_rng(0)
    member = draw.integers(3, size=200_000)
    normal = draw.normal(size=200_000)
    got = mixture_spreads(values_SM, spreads_SM)
    for row, (values_M, spreads_M) in enumerate(zip(values_SM, spreads_SM, strict=True)):
        drawn = values_M[member] + spreads_M[member] * normal
        assert got[row] == pytest.approx(drawn.std(), rel=0.01)
    constants = ([1.0, 0.0, -1.0], [2.0, 0.5, 4.0])
    standard = mixture_spreads(values_SM, spreads_SM, constants=constants)
    scaled_SM = (values_SM - constants[0]) / constants[1]
    want = np.sqrt((spreads_SM / constants[1]) ** 2 @ np.ones(3) / 3 + scaled_SM.var(axis=1))
    assert standard == pytest.approx(want)
    worst = combine(
        values_SM, "worst", spreads_SM=spreads_SM, spread_penalty=0.5, constants=constants
    )
    by_member = scaled_SM - 0.5 * spreads_SM / np.array(constants[1])
    assert worst == pytest.approx(by_member.min(axis=1))


def test_members_with_a_spread_give_the_ensemble_one(
    spread_folder: Path, folders: list[Path]
) -> None:
    alone = Scorer.load(spread_folder, device="cpu").score(CHATS)
    twice = EnsembleConfig(method="worst", standardize=False, spread_penalty=0.5)
    models = (str(spread_folder), str(spread_folder))
    scores = load_scorer(ScoringConfig(models=models, ensemble=twice), device="cpu").score(CHATS)
    for score, member in zip(scores, alone, strict=True):
        assert member.score is not None and member.spread is not None
        assert score.spread == pytest.approx(member.spread, rel=1e-5)
        assert score.score == pytest.approx(member.score - 0.5 * member.spread, abs=1e-5)
        assert score.members == pytest.approx([member.score] * 2, abs=1e-5)
    # Where one member has none there is no spread of the whole, and no penalty on it.
    mixed = (str(spread_folder), str(folders[0]))
    section = ScoringConfig(models=mixed, ensemble=RAW)
    assert [s.spread for s in load_scorer(section, device="cpu").score(CHATS[:2])] == [None, None]
    with pytest.raises(ConfigError, match="members whose scores have a spread"):
        load_scorer(ScoringConfig(models=mixed, ensemble=twice), device="cpu")
    with pytest.raises(ConfigError, match="worst, of which it is a part"):
        EnsembleConfig(method="mean", spread_penalty=0.5)
