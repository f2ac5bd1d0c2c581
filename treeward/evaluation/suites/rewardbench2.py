"""RewardBench 2: 1865 prompts, best of four answers, and Ties (Malik et al. 2025, arXiv 2506.01937).

    RewardBench2().load("reward-bench-2/")               # the split `test` of allenai/reward-bench-2
    best_of_credit([2.0, 2.0, 1.0, 0.0])                 # 0.5: two at the top, one of them the chosen one
    ties_score({0: TiePair(tied=((2.0, 1.5), (-1.0,)), reference=((2.0,), (0.0, -1.0)))})

A prompt of the five best-of-4 subsets scores 1/k if the chosen answer, the first, is among the k joint maxima, else 0.
Ties has prompts with several correct answers (ids `tied:i`), each with a reference (`ref:i`) with one. With D the
spread max - min of the correct answers of the tied prompt, and M_t and M_r by how much the lowest correct answer of the
tied and of the reference prompt exceeds the highest wrong one,

    0.30 mean(M_t > 0) + 0.30 mean(M_r > 0) + 0.20 mean(M_t > D) + 0.20 mean(min(M_r, M_t) > D)
    + 0.01 mean(tanh(min(M_r, M_t) / D - 1)),

where 0 / 0 counts 0 and the last three means are over the pairs. That is the authors' code at a009692; their release
0.1.4 leaves pairs with D = 0 out of the last mean, which moves the score by 0.02 at most. The overall score is the
plain mean of the six subsets. Ties have a rule of their own here, so `tie_policy` changes nothing. An answer without a
score: its prompt scores 0, in Ties it is not accurate and its pair's tanh is -1, the lowest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from treeward.data.sources import Row
from treeward.errors import DataError
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.results import Metric, SuiteResult
from treeward.evaluation.statistics import cluster_bootstrap, wilson
from treeward.evaluation.suites.interface import Suite
from treeward.evaluation.suites.parts import Part, by_subset, combined, prompt_of, with_notes
from treeward.evaluation.suites.rewardbench import result_path
from treeward.evaluation.suites.rows import (
    assistant,
    id_field,
    name_field,
    prompt_field,
    repository_rows,
    texts_field,
    with_distinct_ids,
)

__all__ = ["SIZES", "RewardBench2", "TiePair", "best_of_credit", "ties_score", "ties_terms"]

SIZES: Mapping[str, int] = MappingProxyType(
    {"Factuality": 475, "Precise IF": 160, "Math": 183, "Safety": 450, "Focus": 495, "Ties": 102}
)
"""How many rows the published data has of each subset: 1865."""

_TERM_WEIGHTS = (0.30, 0.30, 0.20, 0.20, 0.01)
_KINDS = ("ref", "tied")

Answers = tuple[Sequence[float], Sequence[float]]
"""Scores of the correct and of the wrong answers; both empty where an answer has none."""


@dataclass(frozen=True, slots=True)
class TiePair:
    """A tied prompt and its reference; None where the data has only the other."""

    tied: Answers | None
    reference: Answers | None


def best_of_credit(scores: Sequence[float], chosen: int = 0) -> float:
    """1/k if `scores[chosen]` is among the k joint maxima, else 0."""
    best = max(scores)
    return 1.0 / sum(score == best for score in scores) if scores[chosen] == best else 0.0


def ties_terms(pairs: Mapping[int, TiePair]) -> dict[int, tuple[float | None, ...]]:
    """The five terms of each pair: M_t > 0, M_r > 0, M_t > D, min(M_r, M_t) > D, tanh; None where they are undefined.

    The means of the columns, None left out, weighted as in the module's formula, are the score.
    """
    terms: dict[int, tuple[float | None, ...]] = {}
    for number, pair in pairs.items():
        tied = None if pair.tied is None else _margin(pair.tied)
        reference = None if pair.reference is None else _margin(pair.reference)
        accurate = tuple(None if margin is None else float(margin > 0) for margin in (tied, reference))
        if pair.tied is None or tied is None or reference is None:
            terms[number] = (*accurate, None, None, None)
            continue
        correct = pair.tied[0]
        spread = max(correct) - min(correct) if correct else math.inf
        least = min(tied, reference)
        terms[number] = (*accurate, float(tied > spread), float(least > spread), _tanh_of_ratio(least, spread))
    return terms


def ties_score(pairs: Mapping[int, TiePair]) -> float | None:
    """The score of the Ties subset, None without any prompt; a term that no pair has counts 0, as published."""
    return _score_and_shares(ties_terms(pairs))[0]


class RewardBench2(Suite):
    """Best of 4 in five subsets, and Ties; the headline is the mean of the six."""

    name = "rewardbench2"
    title = "RewardBench 2"
    hub_path = "allenai/reward-bench-2"

    def load(self, source: str | None = None) -> list[EvalExample]:
        """Rows of prompt, chosen, rejected (lists), num_correct, subset, id (split `test`); see `Suite.load`."""
        rows = repository_rows(source, self.hub_path, split="test")
        return with_distinct_ids([_example(row) for row in rows])

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        groups = by_subset(scored)
        parts, details = {}, {}
        for subset in (one for one in SIZES if one in groups):
            if subset == "Ties":
                parts[subset], details["ties"] = _ties_part(groups[subset])
            else:
                prompts = [prompt_of(one.example) for one in groups[subset]]
                parts[subset] = Part.of(subset, [_credit(one) for one in groups[subset]], prompts)
        overall = combined("overall", list(parts.values()), [1.0] * len(parts))
        metrics = tuple(part.metric for part in parts.values())
        return SuiteResult(
            self.name, with_notes(overall, _missing(groups)), sections=metrics, subsets=metrics, details=details
        )

    def chance(self, part: str | None = None) -> float | None:
        """0.25 where the best of four is chosen (Malik et al. 2025, section 3: one right answer and three wrong ones).

        None for Ties, whose prompts differ in how many of their answers are right, and so for the mean of all six.
        """
        return 0.25 if part in SIZES and part != "Ties" else None

    def published_files(self, scored: Sequence[ScoredExample], model_name: str) -> dict[str, Any]:
        """`eval-set/<model>.json` (a score per subset) and `eval-set-scores/<model>.json` (columns, a row a prompt).

        As `scripts/run_v2.py` of the package writes them; the texts are messages. Ties have no result of their own.
        """
        about = {"model": model_name, "model_type": "Seq. Classifier", "chat_template": "tokenizer"}
        subsets = {metric.name: metric.value for metric in self._compute(scored).subsets}
        columns = {
            "text": [one.example.conversations for one in scored],
            "scores": [list(one.scores) for one in scored],
            "results": [None if one.example.subset == "Ties" else _credit(one) for one in scored],
            "subset": [one.example.subset for one in scored],
            "id": [one.example.suite_data.get("id", one.example.id) for one in scored],
            "num_correct": [one.example.ranks.count(0) for one in scored],
        }
        return {
            result_path("eval-set", model_name): {**subsets, **about},
            result_path("eval-set-scores", model_name): {**columns, **about},
        }


def _example(row: Row) -> EvalExample:
    subset, published = name_field(row, "subset", tuple(SIZES), "subset of RewardBench 2"), id_field(row, "id")
    chosen, rejected = texts_field(row, "chosen"), texts_field(row, "rejected")
    number = row.values.get("num_correct")
    if number is not None and number != len(chosen):
        raise DataError(
            "num_correct is not the number of chosen answers",
            where=row.where,
            field="num_correct",
            got=number,
            need=str(len(chosen)),
        )
    if subset == "Ties":
        _tie_number(published, row.where)
    elif len(chosen) != 1:
        raise DataError(
            f"a prompt of {subset} has one right answer", where=row.where, field="chosen", got=f"{len(chosen)} answers"
        )
    return EvalExample(
        id=f"{subset}/{published}",
        subset=subset,
        context=prompt_field(row, "prompt"),
        completions=tuple(map(assistant, (*chosen, *rejected))),
        ranks=(0,) * len(chosen) + (1,) * len(rejected),
        suite_data={"id": row.values["id"]},
        where=row.where,
    )


def _tie_number(published: str, where: str | None) -> tuple[str, int]:
    kind, _, number = published.partition(":")
    if kind not in _KINDS or not number.isdecimal():
        raise DataError(
            "the id does not say which prompt of Ties this is",
            where=where,
            field="id",
            got=published,
            need="tied:<number> or ref:<number>",
        )
    return kind, int(number)


def _credit(scored: ScoredExample) -> float:
    return 0.0 if scored.failed else best_of_credit([score for score in scored.scores if score is not None])


# --- ties ------------------------------------------------------------------------------------------------------------


def _margin(answers: Answers) -> float:
    """The lowest correct answer less the highest wrong one; -inf where they have no scores."""
    correct, wrong = answers
    return min(correct) - max(wrong) if correct and wrong else -math.inf


def _tanh_of_ratio(margin: float, spread: float) -> float:
    if margin == -math.inf:
        return -1.0
    if spread == 0:
        return 0.0 if margin == 0 else math.copysign(1.0, margin)
    return math.tanh(margin / spread - 1)


def _score_and_shares(terms: Mapping[int, tuple[float | None, ...]]) -> tuple[float | None, dict[int, float]]:
    """The score, and of each pair the value z_i with mean(z_i) = score: a term counts as often as it is missing."""
    if not terms:
        return None, {}
    shares = dict.fromkeys(terms, 0.0)
    for place, weight in enumerate(_TERM_WEIGHTS):
        known = {number: value for number, row in terms.items() if (value := row[place]) is not None}
        for number, value in known.items():
            shares[number] += weight * value * len(terms) / len(known)
    return math.fsum(shares.values()) / len(terms), shares


def _ties_part(scored: Sequence[ScoredExample]) -> tuple[Part, dict[str, Any]]:
    found: dict[int, dict[str, ScoredExample]] = {}
    for one in scored:
        kind, number = _tie_number(str(one.example.suite_data["id"]), one.example.where)
        found.setdefault(number, {})[kind] = one
    pairs = {
        number: TiePair(*(_answers(kinds[kind]) if kind in kinds else None for kind in ("tied", "ref")))
        for number, kinds in found.items()
    }
    terms = ties_terms(pairs)
    value, shares = _score_and_shares(terms)
    low, high = cluster_bootstrap(list(shares.values()), list(shares))
    if value is not None and (low is None or high is None or low == high):
        low, high = wilson(min(max(value, 0.0), 1.0) * len(shares), len(shares))
    note = f"The interval is over {len(shares)} pairs of a tied and a reference prompt."
    names = ("tied_accuracy", "reference_accuracy", "margin_beats_spread", "margin_beats_spread_hard", "margin_tanh")
    columns = [[row[place] for row in terms.values() if row[place] is not None] for place in range(len(names))]
    details = {
        name: math.fsum(v for v in column if v is not None) / len(column) if column else None
        for name, column in zip(names, columns, strict=True)
    }
    prompts = tuple(_first_prompt(kinds) for kinds in found.values())
    return Part(Metric("Ties", value, low, high, len(scored), note), tuple(shares.values()), prompts), details


def _first_prompt(kinds: Mapping[str, ScoredExample]) -> str:
    return prompt_of(kinds[min(kinds, key=lambda kind: kind != "tied")].example)


def _answers(scored: ScoredExample) -> Answers:
    if scored.failed:
        return (), ()
    by_rank: dict[bool, list[float]] = {True: [], False: []}
    for score, rank in zip(scored.scores, scored.example.ranks, strict=True):
        by_rank[rank == 0].append(float(score or 0.0))
    return by_rank[True], by_rank[False]


def _missing(groups: Mapping[str, Sequence[ScoredExample]]) -> str | None:
    if all(len(groups.get(subset, ())) == size for subset, size in SIZES.items()):
        return None
    absent = [subset for subset in SIZES if subset not in groups]
    names = f"; none of {', '.join(absent)}" if absent else ""
    count = sum(map(len, groups.values()))
    return f"These are {count} of {sum(SIZES.values())} prompts{names}: not comparable with published scores."
