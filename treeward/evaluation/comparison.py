"""`compare`: two models on the same examples, and whether one is better by more than chance.

    comparison = compare(read_evaluation("results/eval/mine"), read_evaluation("results/eval/other"))
    comparison.overall.difference.value, comparison.overall.p_value, comparison.agreement.same_outcome.value

Examples are matched by suite and id, and only what both models were given is compared; what is left out is counted. A
tie and an example that could not be scored count as not right, as in `treeward eval`. Examples of one prompt are one
draw, in the tests as in the intervals.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treeward.data.sources import KINDS, file_suffix, read_file
from treeward.errors import DataError
from treeward.evaluation.examples import EvalExample, Outcome, ScoredExample, scored_from_row
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import (
    accuracy_metric,
    cluster_bootstrap,
    cohen_kappa,
    holm,
    mcnemar,
    paired_bootstrap,
    sign_flip_test,
    spearman,
)

__all__ = [
    "Agreement",
    "Comparison",
    "Disagreement",
    "Evaluation",
    "OutcomeCounts",
    "PairedResult",
    "compare",
    "notes",
    "prompt_key",
    "read_evaluation",
    "to_json",
]

_ROWS = "examples.jsonl"
_AGREEMENT_RESAMPLES = 1000
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One model's examples by suite. `path`: where they were read; it stands for the model where names are equal."""

    name: str
    path: str
    suites: Mapping[str, Sequence[ScoredExample]]


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """How one model does on the examples that are compared."""

    right: int
    wrong: int
    ties: int
    failed: int


@dataclass(frozen=True, slots=True)
class PairedResult:
    """Two models on the same `count` examples of `num_prompts` prompts; of a subset, a suite (subset None), or all.

    `difference`: the first's accuracy less the second's, with a paired interval, which holds 0 wherever `p_value` is
    0.05 or more. `only_first` and `only_second`: how
    many examples that model alone has right. `p_value`: of `test`, "McNemar" where each prompt has one example, else
    "sign flip" of whole prompts; both two-sided. `adjusted_p_value`: by Holm's method over the `family` of
    results of the same kind; the overall result is one test and has none.
    """

    suite: str | None
    subset: str | None
    count: int
    num_prompts: int
    first: Metric
    second: Metric
    difference: Metric
    only_first: int
    only_second: int
    test: str
    p_value: float
    adjusted_p_value: float | None = None
    family: int | None = None


@dataclass(frozen=True, slots=True)
class Agreement:
    """How alike two models judge. `same_outcome`: the share of examples with one outcome (right, wrong, tie, failed).

    `kappa`: Cohen's, of the outcomes. `margin_correlation`: Spearman's, of the margins where both have one.
    """

    same_outcome: Metric
    kappa: Metric
    margin_correlation: Metric


@dataclass(frozen=True, slots=True)
class Disagreement:
    """An example that one model has right and the other has not; pairs hold the first model's value, then the second's.

    `standardized_margins`: margins in units of the model's root mean square margin, so that 0 stays where a choice
    turns. `better` and `worse`: indices of the two completions that it is about, of the best-ranked that which the
    model without it right scores lowest, of the others that which it scores highest. `distance`: how far the margins
    are apart.
    """

    suite: str
    example: EvalExample
    outcomes: tuple[Outcome | None, Outcome | None]
    margins: tuple[float, float]
    standardized_margins: tuple[float, float]
    better: int
    worse: int

    @property
    def distance(self) -> float:
        return abs(self.standardized_margins[0] - self.standardized_margins[1])


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models, pairs in the order that they were given in.

    `unmatched`: of each model, the examples by suite that only it has. `num_changed`: same id, another prompt, answers
    or ranks. `num_unordered`: without a better and a worse answer. These three are left out; all else is compared.
    `num_several`: how many of the compared examples have more than two completions.
    """

    names: tuple[str, str]
    overall: PairedResult
    suites: tuple[PairedResult, ...]
    subsets: tuple[PairedResult, ...]
    outcomes: tuple[OutcomeCounts, OutcomeCounts]
    agreement: Agreement
    disagreements: tuple[Disagreement, ...]
    num_disagreements: int
    unmatched: tuple[Mapping[str, int], Mapping[str, int]]
    num_changed: int
    num_unordered: int
    num_several: int


@dataclass(frozen=True, slots=True)
class _Pair:
    suite: str
    first: ScoredExample
    second: ScoredExample

    @property
    def subset(self) -> str:
        return self.first.example.subset


def read_evaluation(path: str | os.PathLike[str]) -> Evaluation:
    """The examples of one model: a file `examples.jsonl`, or a folder that `treeward eval` wrote for one model.

    A folder is OUTPUT/<model>, OUTPUT/<model>/<suite>, or OUTPUT itself if it has one model. Raises `DataError` for a
    path without examples or with those of several models, for rows that are none, and for an id that comes twice.
    """
    found = Path(path)
    if found.is_file() and file_suffix(str(found)) in KINDS:
        files, name = [found], found.resolve().parent.parent.name if found.name == _ROWS else found.name
    elif found.is_dir():
        files = sorted(found.rglob(_ROWS))
        models = sorted({file.resolve().parent.parent for file in files})
        if len(models) > 1:
            raise DataError(
                "the folder holds the evaluations of several models",
                where=str(path),
                got=", ".join(model.name for model in models),
                need="the folder of one model",
                fix=f"{found / models[0].name}",
            )
        name = models[0].name if models else ""
    else:
        files, name = [], ""
    if not files:
        near = _evaluations_near(found)
        raise DataError(
            "there is no evaluation here",
            where=str(path),
            need=f"a folder that `treeward eval` wrote, or its {_ROWS}",
            fix=f"there are {', '.join(near)}" if near else "treeward eval MODEL --suite llmbar --output DIR",
        )
    return Evaluation(name, str(path), {file.resolve().parent.name: _read_rows(file) for file in files})


def compare(
    first: Evaluation,
    second: Evaluation,
    *,
    num_disagreements: int = 10,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Compare two models on the examples that both have.

    `num_disagreements`: how many of the examples on which they disagree are kept, those furthest apart.
    `num_resamples` and `seed` are those of the intervals of differences, which are of 95 %. Where each evaluation has
    one suite, these are matched whatever they are called. Raises `DataError` if there is nothing to compare.
    """
    suites = {name: (name, name) for name in first.suites if name in second.suites}
    if len(first.suites) == len(second.suites) == 1:
        (name,), (other) = first.suites, next(iter(second.suites))
        suites = {name: (name, other)}
    pairs, changed = [], 0
    unmatched = (Counter[str](), Counter[str]())
    for evaluation, counts, place in ((first, unmatched[0], 0), (second, unmatched[1], 1)):
        matched = {names[place] for names in suites.values()}
        counts.update({name: len(rows) for name, rows in evaluation.suites.items() if name not in matched})
    for name, (own, other) in suites.items():
        ours, theirs = _by_id(first.suites[own]), _by_id(second.suites[other])
        unmatched[0][own] += len(ours.keys() - theirs.keys())
        unmatched[1][other] += len(theirs.keys() - ours.keys())
        for key in (key for key in ours if key in theirs):
            if _same(ours[key].example, theirs[key].example):
                pairs.append(_Pair(name, ours[key], theirs[key]))
            else:
                changed += 1
    ordered = [pair for pair in pairs if len(set(pair.first.example.ranks)) > 1]
    if not ordered:
        raise _nothing_to_compare(first, second, changed, len(pairs))
    names = (first.name, second.name) if first.name != second.name else (first.path, second.path)
    settings = {"num_resamples": num_resamples, "seed": seed}
    by_suite = {name: [pair for pair in ordered if pair.suite == name] for name in {p.suite: None for p in ordered}}
    by_subset: dict[tuple[str, str], list[_Pair]] = {}
    for pair in ordered:
        by_subset.setdefault((pair.suite, pair.subset), []).append(pair)
    differing = _disagreements(ordered)
    return Comparison(
        names=names,
        overall=_result(ordered, names, None, None, settings),
        suites=_family([_result(group, names, name, None, settings) for name, group in by_suite.items()]),
        subsets=_family([_result(group, names, *key, settings) for key, group in by_subset.items()]),
        outcomes=(_counts([pair.first for pair in ordered]), _counts([pair.second for pair in ordered])),
        agreement=_agreement(ordered, seed),
        disagreements=tuple(differing[:num_disagreements]),
        num_disagreements=len(differing),
        unmatched=(_positive(unmatched[0]), _positive(unmatched[1])),
        num_changed=changed,
        num_unordered=len(pairs) - len(ordered),
        num_several=sum(len(pair.first.example.ranks) > 2 for pair in ordered),
    )


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know of the numbers, a sentence each: what is left out, how it was tested and corrected."""
    overall, found = comparison.overall, []
    for name, suites in zip(comparison.names, comparison.unmatched, strict=True):
        if suites:
            parts = ", ".join(f"{count} of {suite}" for suite, count in suites.items())
            found.append(f"Left out, because only {name} has them: {_examples(sum(suites.values()))} ({parts}).")
    if comparison.num_changed:
        found.append(f"Left out, because their content differs: {_examples(comparison.num_changed)} with the same id.")
    if comparison.num_several:
        found.append(
            f"{_examples(comparison.num_several)} with more than two completions: right is to have the best-ranked all"
            " ahead of the others, which is stricter than the accuracy over pairs that `treeward eval` shows."
        )
    if comparison.num_unordered:
        found.append(f"Left out, because no answer is better: {_examples(comparison.num_unordered)}.")
    for name, counts in zip(comparison.names, comparison.outcomes, strict=True):
        if counts.ties or counts.failed:
            found.append(f"{name}: ties ({counts.ties}) and failures ({counts.failed}) count as not right.")
    results = (overall, *comparison.suites, *comparison.subsets)
    if any(result.test == "McNemar" for result in results):
        found.append("p is of McNemar's exact test, two-sided.")
    if any(result.test != "McNemar" for result in results):
        found.append(
            f"Several examples share a prompt ({overall.count} examples, {overall.num_prompts} prompts): where they do,"
            " p is of the test that flips the signs of whole prompts, and intervals resample prompts."
        )
    # The only subset of a suite is the suite once more: where all are, no subset is looked at.
    parted = len({result.suite for result in comparison.subsets}) < len(comparison.subsets)
    for what, family in (("suites", comparison.suites), ("subsets", comparison.subsets if parted else ())):
        if len(family) > 1:
            found.append(f"p (Holm) is corrected for looking at {len(family)} {what}.")
    return found


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Every number of a comparison, with `notes`, as a JSON object."""
    content = asdict(comparison)
    for one, row in zip(comparison.disagreements, content["disagreements"], strict=True):
        row["distance"] = one.distance
    return content | {"notes": notes(comparison)}


def prompt_key(example: EvalExample) -> Hashable:
    """The same for examples of one prompt; an example without a context is a prompt of its own."""
    if not example.context:
        return "id", example.id
    return "context", json.dumps(example.context, sort_keys=True, ensure_ascii=False, default=str)


def _evaluations_near(path: Path) -> list[str]:
    """The evaluations in the nearest folder above that is there, one for each model, the most alike in name first."""
    folder = next((one for one in path.parents if one.is_dir()), None)
    if folder is None:
        return []
    depths = ("*", "*/*")  # OUTPUT/<model>/<suite>: of a folder far above, its whole tree is not searched
    models = {file.parent.parent for depth in depths for file in folder.glob(f"{depth}/{_ROWS}")}
    names = sorted(models, key=lambda one: (-difflib.SequenceMatcher(None, one.name, path.name).ratio(), str(one)))
    shown = [str(one) for one in names[:_MOST_NAMED]]
    return [*shown, f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else shown


def _read_rows(file: Path) -> list[ScoredExample]:
    rows: dict[str, ScoredExample] = {}
    for row in read_file(str(file)):
        scored = scored_from_row(row.values, row.where)
        if not all(score is None or math.isfinite(score) for score in scored.scores):
            raise DataError(
                "a score is not finite",
                where=row.where,
                field="scores",
                got=list(scored.scores),
                need="numbers, or null where there is no score",
            )
        if scored.example.id in rows:
            raise DataError(
                "two examples have one id, so nothing says which of another model's belongs to which",
                where=row.where,
                field="id",
                got=scored.example.id,
                need="an id for each example of a suite",
            )
        rows[scored.example.id] = scored
    return list(rows.values())


def _examples(count: int) -> str:
    return f"{count} example{'s' if count != 1 else ''}"


def _by_id(examples: Sequence[ScoredExample]) -> dict[str, ScoredExample]:
    return {scored.example.id: scored for scored in examples}


def _same(first: EvalExample, second: EvalExample) -> bool:
    return (first.context, first.completions, first.ranks) == (second.context, second.completions, second.ranks)


def _positive(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _nothing_to_compare(first: Evaluation, second: Evaluation, changed: int, unordered: int) -> DataError:
    if changed:
        got, fix = f"{changed} examples with the same id and another content", "evaluate both models on the same data"
    elif unordered:
        got, fix = f"{unordered} examples without a better and a worse answer", "evaluate on comparisons"
    else:
        got = f"{', '.join(first.suites)} and {', '.join(second.suites)}, with no id in common"
        fix = "evaluate both models on the same suites"
    return DataError(
        "the two evaluations have no example in common that says which model is better",
        where=f"{first.path}, {second.path}",
        got=got,
        need="examples that both models were given",
        fix=fix,
    )


def _result(
    pairs: Sequence[_Pair],
    names: tuple[str, str],
    suite: str | None,
    subset: str | None,
    settings: Mapping[str, int],
) -> PairedResult:
    right = [np.array([scored.outcome == "right" for scored in side]) for side in _sides(pairs)]
    prompts = [prompt_key(pair.first.example) for pair in pairs]
    num_prompts = len(set(prompts))
    exact = mcnemar(*right)
    a, b = (side.astype(np.float64) for side in right)
    p_value = exact.p_value if num_prompts == len(pairs) else sign_flip_test(a - b, prompts)
    low, high = paired_bootstrap(a, b, prompts, **settings)
    if p_value >= 0.05 and low is not None and high is not None:
        # Of few differing examples (4 to 0) resampling excludes 0 where the exact test, which is the stricter, does
        # not: one line must not say both.
        low, high = min(low, 0.0), max(high, 0.0)
    return PairedResult(
        suite=suite,
        subset=subset,
        count=len(pairs),
        num_prompts=num_prompts,
        first=accuracy_metric(a.tolist(), names[0], prompts),
        second=accuracy_metric(b.tolist(), names[1], prompts),
        difference=Metric("difference", float((a - b).mean()), low=low, high=high, count=len(pairs)),
        only_first=exact.only_first,
        only_second=exact.only_second,
        test="McNemar" if num_prompts == len(pairs) else "sign flip",
        p_value=p_value,
    )


def _sides(pairs: Sequence[_Pair]) -> tuple[list[ScoredExample], list[ScoredExample]]:
    return [pair.first for pair in pairs], [pair.second for pair in pairs]


def _family(results: Sequence[PairedResult]) -> tuple[PairedResult, ...]:
    adjusted = holm([result.p_value for result in results])
    return tuple(
        replace(result, adjusted_p_value=p_value, family=len(results))
        for result, p_value in zip(results, adjusted, strict=True)
    )


def _counts(examples: Sequence[ScoredExample]) -> OutcomeCounts:
    found = Counter(scored.outcome for scored in examples)
    return OutcomeCounts(right=found["right"], wrong=found["wrong"], ties=found["tie"], failed=found["failed"])


def _agreement(pairs: Sequence[_Pair], seed: int) -> Agreement:
    labels: list[Outcome | None] = ["right", "wrong", "tie", "failed"]
    prompts = [prompt_key(pair.first.example) for pair in pairs]
    codes = np.array([[float(labels.index(one.outcome)) for one in (pair.first, pair.second)] for pair in pairs])
    known = [i for i, pair in enumerate(pairs) if None not in (pair.first.margin, pair.second.margin)]
    margins = np.array([[_margin(pairs[i].first), _margin(pairs[i].second)] for i in known]).reshape(-1, 2)

    def bounded(name: str, rows: NDArray[np.float64], clusters: Sequence[Hashable], of_columns: Any) -> Metric:
        def statistic(some: NDArray[np.float64]) -> float | None:
            value: float | None = of_columns(some[:, 0], some[:, 1])
            return value

        low, high = cluster_bootstrap(
            rows, clusters, statistic=statistic, num_resamples=_AGREEMENT_RESAMPLES, seed=seed
        )
        if low == high:  # all resamples alike: nothing is known of how far it may be off
            low = high = None
        return Metric(name, statistic(rows), low=low, high=high, count=len(rows))

    return Agreement(
        same_outcome=accuracy_metric((codes[:, 0] == codes[:, 1]).astype(float).tolist(), "same outcome", prompts),
        kappa=bounded("Cohen's kappa", codes, prompts, cohen_kappa),
        margin_correlation=bounded("rank correlation of margins", margins, [prompts[i] for i in known], spearman),
    )


def _margin(scored: ScoredExample) -> float:
    assert scored.margin is not None
    return scored.margin


def _what_it_is_about(pair: _Pair) -> dict[str, int]:
    """The completions between which the model that is not right has chosen: see `Disagreement`."""
    judge = pair.second if pair.first.outcome == "right" else pair.first
    ranks, scores = judge.example.ranks, [score for score in judge.scores if score is not None]
    best = min(ranks)
    better = min((i for i, rank in enumerate(ranks) if rank == best), key=lambda i: scores[i])
    return {
        "better": better,
        "worse": max((i for i, rank in enumerate(ranks) if rank != best), key=lambda i: scores[i]),
    }


def _disagreements(pairs: Sequence[_Pair]) -> list[Disagreement]:
    """Examples that one model has right and the other has wrong or tied, those furthest apart first."""
    known = [pair for pair in pairs if pair.first.margin is not None and pair.second.margin is not None]
    scales = [math.sqrt(sum(_margin(one) ** 2 for one in side) / max(1, len(side))) or 1.0 for side in _sides(known)]
    found = [
        Disagreement(
            suite=pair.suite,
            example=pair.first.example,
            outcomes=(pair.first.outcome, pair.second.outcome),
            margins=(_margin(pair.first), _margin(pair.second)),
            standardized_margins=(_margin(pair.first) / scales[0], _margin(pair.second) / scales[1]),
            **_what_it_is_about(pair),
        )
        for pair in known
        if (pair.first.outcome == "right") != (pair.second.outcome == "right")
    ]
    return sorted(found, key=lambda one: -one.distance)
