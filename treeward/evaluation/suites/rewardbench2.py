"""RewardBench 2: 1865 prompts, best of four completions, and Ties (Malik et al. 2025, arXiv 2506.01937).

    RewardBench2().load("reward-bench-2/")               # the split `test` of allenai/reward-bench-2
    best_of_credit([2.0, 2.0, 1.0, 0.0])                 # 0.5: two at the top, one of them the chosen one
    ties_score([TiePair(tied=((2.0, 1.5), (-1.0,)), reference=((2.0,), (0.0, -1.0)))])

A prompt of the five best-of-4 subsets scores 1/k if the chosen completion, the first, is among the k joint maxima,
else 0. Ties has prompts with several correct completions (ids `tied:i`), each with a reference (`ref:i`) with one. Let
D be the spread max - min of the correct scores of the tied prompt, and M_t and M_r the lowest correct less the highest
wrong score of the tied and of the reference prompt. The score is

    0.30 mean(M_t > 0) + 0.30 mean(M_r > 0) + 0.20 mean(M_t > D) + 0.20 mean(min(M_r, M_t) > D)
    + 0.01 mean(tanh(min(M_r, M_t) / D - 1)),

where 0 / 0 counts 0 and the last three means are over the pairs. That is the authors' code at a009692; their release
0.1.4 leaves pairs with D = 0 out of the last mean, which moves the score by 0.02 at most. The overall score is the
plain mean of the six subsets. Ties have a rule of their own here, so `tie_policy` changes nothing. A completion without
a score: its prompt scores 0, in Ties it is not accurate and its pair's tanh is -1, the lowest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from treeward.data.sources import Row
from treeward.errors import DataError
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.parts import Part, by_subset, combined, incomplete, with_notes
from treeward.evaluation.results import Metric, SuiteResult
from treeward.evaluation.statistics import cluster_bootstrap, wilson
from treeward.evaluation.suites.interface import Suite
from treeward.evaluation.suites.rewardbench import published_scores
from treeward.evaluation.suites.rows import Prompt, example, one_of, read_as, repository_rows, with_distinct_ids

SIZES: Mapping[str, int] = MappingProxyType(
    {"Factuality": 475, "Precise IF": 160, "Math": 183, "Safety": 450, "Focus": 495, "Ties": 102}
)
"""How many rows the published data has of each subset: 1865."""

_TERM_WEIGHTS = MappingProxyType(
    {
        "tied_accuracy": 0.30,
        "reference_accuracy": 0.30,
        "margin_beats_spread": 0.20,
        "margin_beats_spread_hard": 0.20,
        "margin_tanh": 0.01,
    }
)

Scores = tuple[Sequence[float], Sequence[float]]
"""Scores of the correct and of the wrong completions; both empty where a completion has none."""


class BestOfRow(BaseModel):
    """A row of the split `test`."""

    prompt: Prompt
    chosen: Annotated[list[str], Field(min_length=1)]
    rejected: Annotated[list[str], Field(min_length=1)]
    subset: Annotated[str, one_of(*SIZES)]
    id: str | int
    num_correct: int | None = None


@dataclass(frozen=True, slots=True)
class TiePair:
    """A tied prompt and its reference; None where the data has only the other."""

    tied: Scores | None
    reference: Scores | None


def best_of_credit(scores: Sequence[float], chosen: int = 0) -> float:
    """1/k if `scores[chosen]` is among the k joint maxima, else 0."""
    best = max(scores)
    return 1.0 / sum(score == best for score in scores) if scores[chosen] == best else 0.0


def ties_terms(pairs: Sequence[TiePair]) -> NDArray[np.float64]:
    """The terms of P pairs (P, 5): M_t > 0, M_r > 0, M_t > D, min(M_r, M_t) > D, tanh; NaN where they are undefined."""
    tied, spread = np.array([_margin_and_spread(pair.tied) for pair in pairs]).reshape(-1, 2).T
    reference, _ = np.array([_margin_and_spread(pair.reference) for pair in pairs]).reshape(-1, 2).T
    least = np.minimum(tied, reference)
    with np.errstate(invalid="ignore", divide="ignore"):
        tanh = np.tanh(least / spread - 1)
    tanh[(least == 0) & (spread == 0)] = 0.0
    tanh[least == -np.inf] = -1.0
    terms = np.column_stack([tied > 0, reference > 0, tied > spread, least > spread, tanh])
    terms[np.isnan(tied), 0] = terms[np.isnan(reference), 1] = terms[np.isnan(least), 2:] = np.nan
    return terms


class RewardBench2(Suite):
    """Best of 4 in five subsets, and Ties; the headline is the mean of the six."""

    name = "rewardbench2"
    title = "RewardBench 2"
    hub_path = "allenai/reward-bench-2"

    def load(self, source: str | None = None) -> list[EvalExample]:
        """The rows of the split `test`; see `Suite.load`."""
        rows = repository_rows(source, self.hub_path, split="test")
        return with_distinct_ids([_example(row) for row in rows])

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        groups = by_subset(scored)
        parts, details = {}, {}
        for subset in (one for one in SIZES if one in groups):
            if subset == "Ties":
                parts[subset], details["ties"] = _ties_part(groups[subset])
            else:
                parts[subset] = self.part(subset, groups[subset], _credit)
        headline = with_notes(combined("overall", list(parts.values())), incomplete(groups, SIZES, "prompts"))
        metrics = tuple(part.metric for part in parts.values())
        return SuiteResult(self.name, headline, sections=metrics, subsets=metrics, details=details)

    def chance(self, part: str | None = None) -> float | None:
        """0.25 where the best of four is chosen (Malik et al. 2025, section 3: one right completion, three wrong ones).

        None for Ties, whose prompts differ in their number of right completions, and so for the mean of all six.
        """
        return 0.25 if part in SIZES and part != "Ties" else None

    def published_files(self, scored: Sequence[ScoredExample], model_name: str) -> dict[str, Any]:
        """`eval-set/<model>.json` (a score per subset) and `eval-set-scores/<model>.json` (columns, a row a prompt).

        As `scripts/run_v2.py` of the package writes them; the texts are messages. Ties have no result of their own.
        """
        columns = {
            "text": [one.example.conversations for one in scored],
            "scores": [list(one.scores) for one in scored],
            "results": [None if one.example.subset == "Ties" else _credit(one) for one in scored],
            "subset": [one.example.subset for one in scored],
            "id": [one.example.suite_data.get("id", one.example.id) for one in scored],
            "num_correct": [one.example.ranks.count(0) for one in scored],
        }
        subsets = {metric.name: metric.value for metric in self._compute(scored).subsets}
        return published_scores(subsets, columns, model_name)


def _example(row: Row) -> EvalExample:
    one = read_as(BestOfRow, row)
    if one.num_correct not in (None, len(one.chosen)):
        got = f"{one.num_correct} for {len(one.chosen)} chosen completions"
        raise DataError("num_correct is not their number", where=row.where, field="num_correct", got=got)
    if one.subset == "Ties":
        _tie_number(str(one.id), row.where)
    elif len(one.chosen) != 1:
        got = f"{len(one.chosen)} completions"
        raise DataError(f"a prompt of {one.subset} has one right completion", where=row.where, field="chosen", got=got)
    texts = (*one.chosen, *one.rejected)
    ranks = (0,) * len(one.chosen) + (1,) * len(one.rejected)
    return example(row.where, f"{one.subset}/{one.id}", one.subset, one.prompt, texts, ranks, id=one.id)


def _tie_number(published: str, where: str | None) -> tuple[str, int]:
    kind, _, number = published.partition(":")
    if kind not in ("ref", "tied") or not number.isdecimal():
        need = "tied:<number> or ref:<number>"
        raise DataError("the id does not say which prompt of Ties this is", where=where, field="id", got=published,
                        need=need)  # fmt: skip
    return kind, int(number)


def _credit(scored: ScoredExample) -> float:
    return 0.0 if scored.failed else best_of_credit([score for score in scored.scores if score is not None])


# --- ties ------------------------------------------------------------------------------------------------------------


def _margin_and_spread(scores: Scores | None) -> tuple[float, float]:
    """The lowest correct score less the highest wrong one, and D; NaN without a prompt, -inf and inf without scores."""
    if scores is None:
        return math.nan, math.nan
    correct, wrong = scores
    if not correct or not wrong:
        return -math.inf, math.inf
    return min(correct) - max(wrong), max(correct) - min(correct)


def _shares(terms_P5: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each pair the value (P,) whose mean is the score: the mean of a term is over the pairs that have it."""
    known = ~np.isnan(terms_P5)
    scale = len(terms_P5) / np.maximum(known.sum(axis=0), 1)
    shares: NDArray[np.float64] = np.where(known, terms_P5, 0.0) @ (np.array(list(_TERM_WEIGHTS.values())) * scale)
    return shares


def _ties_part(scored: Sequence[ScoredExample]) -> tuple[Part, dict[str, Any]]:
    found: dict[int, dict[str, ScoredExample]] = {}
    for one in scored:
        kind, number = _tie_number(str(one.example.suite_data["id"]), one.example.where)
        found.setdefault(number, {})[kind] = one
    terms = ties_terms(
        [
            TiePair(*(_scores(kinds[kind]) if kind in kinds else None for kind in ("tied", "ref")))
            for kinds in found.values()
        ]
    )
    shares = _shares(terms)
    value = float(shares.mean())
    low, high = cluster_bootstrap(shares, range(len(shares)))
    if low is None or high is None or low == high:
        low, high = wilson(min(max(value, 0.0), 1.0) * len(shares), len(shares))
    note = f"The interval is over {len(shares)} pairs of a tied and a reference prompt."
    columns = {name: column[~np.isnan(column)] for name, column in zip(_TERM_WEIGHTS, terms.T, strict=True)}
    details = {name: float(column.mean()) if len(column) else None for name, column in columns.items()}
    prompts = tuple((kinds.get("tied") or kinds["ref"]).example.prompt_key for kinds in found.values())
    return Part(Metric("Ties", value, low, high, len(scored), note), tuple(shares.tolist()), prompts), details


def _scores(scored: ScoredExample) -> Scores:
    if scored.failed:
        return (), ()
    pairs = list(zip(scored.scores, scored.example.ranks, strict=True))
    right, wrong = ([float(s or 0.0) for s, rank in pairs if (rank == 0) is wanted] for wanted in (True, False))
    return right, wrong
