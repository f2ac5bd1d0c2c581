"""`compare`: two models on the same examples, and whether one is better by more than chance.

    comparison = compare(read_evaluation("results/eval/mine"), read_evaluation("results/eval/other"))
    comparison.overall.difference.value, comparison.overall.p_value, comparison.agreement.same_outcome.value

Examples are matched by suite and id, and only what both models were given is compared; what is left out is counted. A
tie and an example that could not be scored count as not right, as in `treeward eval`. Examples of one prompt are one
draw, in the tests as in the intervals.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

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

_ROWS = "examples.jsonl"
_AGREEMENT_RESAMPLES = 500
_Pair = tuple[str, ScoredExample, ScoredExample]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One model's examples by suite. `path`: where they were read; it stands for the model where names are equal."""

    name: str
    path: str
    suites: Mapping[str, Sequence[ScoredExample]]


@dataclass(frozen=True, slots=True)
class PairedResult:
    """Two models on the same `count` examples of `num_prompts` prompts; of a subset, a suite (subset None), or all.

    `difference`: the first's accuracy less the second's, with a paired interval, which holds 0 wherever `p_value` is
    0.05 or more. `only_first` and `only_second`: how many examples that model alone has right. `p_value`: of `test`,
    "McNemar" where each prompt has one example, else "sign flip" of whole prompts; both two-sided. `adjusted_p_value`:
    by Holm's method over the results of the same kind; the overall result is one test and has none.
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
    turns; `distance`: how far they are apart. `better` and `worse`: indices of the two completions that it is about, of
    the best-ranked that which the model without it right scores lowest, of the others that which it scores highest.
    """

    suite: str
    example: EvalExample
    outcomes: tuple[Outcome | None, Outcome | None]
    standardized_margins: tuple[float, float]
    distance: float
    better: int
    worse: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models, pairs in the order that they were given in.

    `outcomes`: how many examples of each outcome each model has. `unmatched`: of each model, the examples by suite that
    only it has. `num_changed`: same id, another prompt, completions or ranks. `num_unordered`: without a better and a
    worse completion. These three are left out; all else is compared. `num_several`: how many of the compared examples
    have more than two completions.
    """

    names: tuple[str, str]
    overall: PairedResult
    suites: tuple[PairedResult, ...]
    subsets: tuple[PairedResult, ...]
    outcomes: tuple[Mapping[Outcome, int], Mapping[Outcome, int]]
    agreement: Agreement
    disagreements: tuple[Disagreement, ...]
    num_disagreements: int
    unmatched: tuple[Mapping[str, int], Mapping[str, int]]
    num_changed: int
    num_unordered: int
    num_several: int


def read_evaluation(path: str | os.PathLike[str]) -> Evaluation:
    """The examples of one model: a file `examples.jsonl`, or a folder that `treeward eval` wrote for one model.

    A folder is OUTPUT/<model>, OUTPUT/<model>/<suite>, or OUTPUT itself if it has one model. Raises `DataError` for a
    path without examples or with those of several models, for rows that are none, and for an id that comes twice.
    """
    found = Path(path)
    is_file = found.is_file() and file_suffix(str(found)) in KINDS
    files = [found] if is_file else sorted(found.rglob(_ROWS)) if found.is_dir() else []
    models = sorted({file.resolve().parent.parent.name for file in files})
    if not files:
        need = f"a folder that `treeward eval` wrote, or its {_ROWS}"
        fix = "treeward eval MODEL --suite llmbar --output DIR"
        raise DataError("there is no evaluation here", where=str(path), need=need, fix=fix)
    if len(models) > 1:
        got, fix = ", ".join(models), str(found / models[0])
        summary = "the folder holds the evaluations of several models"
        raise DataError(summary, where=str(path), got=got, need="the folder of one model", fix=fix)
    return Evaluation(models[0], str(path), {file.resolve().parent.name: _read_rows(file) for file in files})


def _read_rows(file: Path) -> list[ScoredExample]:
    rows: dict[str, ScoredExample] = {}
    for row in read_file(str(file)):
        scored = scored_from_row(row.values, row.where)
        if rows.setdefault(scored.example.id, scored) is not scored:
            need = "an id for each example of a suite"
            raise DataError("two examples have one id", where=row.where, field="id", got=scored.example.id, need=need)
    return list(rows.values())


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
    theirs = dict(second.suites)
    if len(first.suites) == len(theirs) == 1:
        theirs = {name: rows for name in first.suites for rows in theirs.values()}
    own, other = (
        {(suite, one.example.id): one for suite, rows in suites.items() for one in rows}
        for suites in (first.suites, theirs)
    )
    matched = [(key[0], own[key], other[key]) for key in own if key in other]
    same = [pair for pair in matched if _content(pair[1].example) == _content(pair[2].example)]
    pairs = [pair for pair in same if len(set(pair[1].example.ranks)) > 1]
    num_changed, num_unordered = len(matched) - len(same), len(same) - len(pairs)
    if not pairs:
        raise DataError(
            "the two evaluations have no example in common that says which model is better",
            where=f"{first.path}, {second.path}",
            got=f"{len(matched)} examples with an id in common, of them {num_changed} with another content and "
            f"{num_unordered} without a better and a worse completion",
            need="examples that both models were given",
            fix="evaluate both models on the same suites",
        )
    names = (first.name, second.name) if first.name != second.name else (first.path, second.path)
    groups: dict[tuple[str, str | None], list[_Pair]] = {}
    for pair in pairs:
        groups.setdefault((pair[0], None), []).append(pair)
        groups.setdefault((pair[0], pair[1].example.subset), []).append(pair)
    settings = {"num_resamples": num_resamples, "seed": seed}
    results = [_result(group, names, *key, settings) for key, group in groups.items()]
    differing = _disagreements(pairs)
    return Comparison(
        names=names,
        overall=_result(pairs, names, None, None, settings),
        suites=_family([result for result in results if result.subset is None]),
        subsets=_family([result for result in results if result.subset is not None]),
        outcomes=(_outcomes([pair[1] for pair in pairs]), _outcomes([pair[2] for pair in pairs])),
        agreement=_agreement(pairs, seed),
        disagreements=tuple(differing[:num_disagreements]),
        num_disagreements=len(differing),
        unmatched=(
            dict(Counter(suite for suite, _ in own.keys() - other)),
            dict(Counter(suite for suite, _ in other.keys() - own)),
        ),
        num_changed=num_changed,
        num_unordered=num_unordered,
        num_several=sum(len(pair[1].example.ranks) > 2 for pair in pairs),
    )


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know of the numbers, a sentence each: what is left out, how it was tested and corrected."""
    overall, found = comparison.overall, []
    for name, suites in zip(comparison.names, comparison.unmatched, strict=True):
        if suites:
            parts = ", ".join(f"{count} of {suite}" for suite, count in sorted(suites.items()))
            found.append(f"Left out, because only {name} has them: {_examples(sum(suites.values()))} ({parts}).")
    if comparison.num_changed:
        found.append(f"Left out, because their content differs: {_examples(comparison.num_changed)} with the same id.")
    if comparison.num_several:
        found.append(
            f"{_examples(comparison.num_several)} with more than two completions: right is to have the best-ranked all"
            " ahead of the others, which is stricter than the accuracy over pairs that `treeward eval` shows."
        )
    if comparison.num_unordered:
        found.append(f"Left out, because no completion is better: {_examples(comparison.num_unordered)}.")
    for name, counts in zip(comparison.names, comparison.outcomes, strict=True):
        ties, failed = counts.get("tie", 0), counts.get("failed", 0)
        if ties or failed:
            found.append(f"{name}: ties ({ties}) and failures ({failed}) count as not right.")
    if overall.test == "McNemar":
        found.append("p is of McNemar's exact test, two-sided.")
    else:
        found.append(
            f"Several examples share a prompt ({overall.count} examples, {overall.num_prompts} prompts): where they do,"
            " p is of the test that flips the signs of whole prompts, and intervals resample prompts."
        )
    # The only subset of a suite is the suite once more: where all are, no subset is looked at.
    parted = len(comparison.suites) < len(comparison.subsets)
    for what, family in (("suites", comparison.suites), ("subsets", comparison.subsets if parted else ())):
        if len(family) > 1:
            found.append(f"p (Holm) is corrected for looking at {len(family)} {what}.")
    return found


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Every number of a comparison, with `notes`, as a JSON object."""
    return asdict(comparison) | {"notes": notes(comparison)}


def _examples(count: int) -> str:
    return f"{count} example{'s' if count != 1 else ''}"


def _content(example: EvalExample) -> tuple[Any, ...]:
    return example.context, example.completions, example.ranks


def _outcomes(examples: Sequence[ScoredExample]) -> Mapping[Outcome, int]:
    return dict(Counter(one.outcome for one in examples if one.outcome is not None))


def _prompts(pairs: Sequence[_Pair]) -> list[str]:
    """The prompt of each pair; an example without a context is a prompt of its own."""
    return [one.example.prompt_key if one.example.context else f"id {one.example.id}" for _, one, _ in pairs]


def _result(
    pairs: Sequence[_Pair],
    names: tuple[str, str],
    suite: str | None,
    subset: str | None,
    settings: Mapping[str, int],
) -> PairedResult:
    right = [(one.outcome == "right", other.outcome == "right") for _, one, other in pairs]
    a, b = np.array(right, dtype=np.float64).T
    prompts = _prompts(pairs)
    is_alone = len(set(prompts)) == len(pairs)
    p_value = mcnemar(a, b) if is_alone else sign_flip_test(a - b, prompts)
    low, high = paired_bootstrap(a, b, prompts, **settings)
    if p_value >= 0.05 and low is not None and high is not None:
        # Of few differing examples (4 to 0) resampling excludes 0 where the exact test, which is the stricter, does
        # not: one line must not say both.
        low, high = min(low, 0.0), max(high, 0.0)
    return PairedResult(
        suite=suite,
        subset=subset,
        count=len(pairs),
        num_prompts=len(set(prompts)),
        first=accuracy_metric(a.tolist(), names[0], prompts),
        second=accuracy_metric(b.tolist(), names[1], prompts),
        difference=Metric("difference", float((a - b).mean()), low=low, high=high, count=len(pairs)),
        only_first=int(np.sum(a > b)),
        only_second=int(np.sum(b > a)),
        test="McNemar" if is_alone else "sign flip",
        p_value=p_value,
    )


def _family(results: Sequence[PairedResult]) -> tuple[PairedResult, ...]:
    adjusted = holm([result.p_value for result in results])
    return tuple(replace(one, adjusted_p_value=p_value) for one, p_value in zip(results, adjusted, strict=True))


def _agreement(pairs: Sequence[_Pair], seed: int) -> Agreement:
    labels = np.array([[("right", "wrong", "tie", "failed").index(one.outcome or "failed") for one in pair[1:]]
                       for pair in pairs], dtype=np.float64)  # fmt: skip
    known = [pair for pair in pairs if pair[1].margin is not None and pair[2].margin is not None]
    margins = np.array([[pair[1].margin, pair[2].margin] for pair in known], dtype=np.float64).reshape(-1, 2)

    def bounded(name: str, rows: Any, of: Sequence[_Pair], statistic: Any) -> Metric:
        low, high = cluster_bootstrap(
            rows,
            _prompts(of),
            statistic=lambda some: statistic(some[:, 0], some[:, 1]),
            num_resamples=_AGREEMENT_RESAMPLES,
            seed=seed,
        )
        if low == high:  # all resamples alike: nothing is known of how far it may be off
            low = high = None
        return Metric(name, statistic(rows[:, 0], rows[:, 1]), low=low, high=high, count=len(rows))

    same = (labels[:, 0] == labels[:, 1]).astype(float).tolist()
    return Agreement(
        same_outcome=accuracy_metric(same, "same outcome", _prompts(pairs)),
        kappa=bounded("Cohen's kappa", labels, pairs, cohen_kappa),
        margin_correlation=bounded("rank correlation of margins", margins, known, spearman),
    )


def _disagreements(pairs: Sequence[_Pair]) -> list[Disagreement]:
    """Examples that one model has right and the other has wrong or tied, those furthest apart first."""
    known = [pair for pair in pairs if pair[1].margin is not None and pair[2].margin is not None]
    margins = np.array([[pair[1].margin, pair[2].margin] for pair in known], dtype=np.float64).reshape(-1, 2)
    scales = np.sqrt(np.mean(margins**2, axis=0)) if known else np.ones(2)
    found = []
    for (suite, first, second), (a, b) in zip(known, margins / np.where(scales > 0, scales, 1.0), strict=True):
        if (first.outcome == "right") == (second.outcome == "right"):
            continue
        mistaken = second if first.outcome == "right" else first
        ranks, scores = mistaken.example.ranks, [score or 0.0 for score in mistaken.scores]
        best = [i for i, rank in enumerate(ranks) if rank == min(ranks)]
        found.append(
            Disagreement(
                suite=suite,
                example=first.example,
                outcomes=(first.outcome, second.outcome),
                standardized_margins=(float(a), float(b)),
                distance=abs(float(a - b)),
                better=min(best, key=lambda i: scores[i]),
                worse=max((i for i in range(len(ranks)) if i not in best), key=lambda i: scores[i]),
            )
        )
    return sorted(found, key=lambda one: -one.distance)
