"""Several proxies on the same samples: what each does to gold, and whether one does better than the first.

    prompts = same_samples({"plain": rows_of_one, "worst of two": rows_of_another})
    compared = analyse_several(prompts)
    compared[1].result.verdict.sentence
    compared[1].difference          # Metric: gold at the largest n, of this proxy less that of the first

A sample that one proxy could not score is left out for all, so that the curves differ by the proxy alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from treeward.errors import DataError
from treeward.evaluation.best_of_n.analysis import BestOfN, SampledPrompt, analyse
from treeward.evaluation.best_of_n.selection import expected_best_of
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import cluster_bootstrap

__all__ = ["ComparedProxy", "analyse_several", "same_samples"]


@dataclass(frozen=True, slots=True)
class ComparedProxy:
    """One of several proxies.

    `difference`: gold of what it chooses among the largest n less that of what the first chooses, over the same
    prompts, with a 95 % interval of a bootstrap over prompts; None for the first.
    """

    name: str
    result: BestOfN
    difference: Metric | None = None


def same_samples(prompts: Mapping[str, Sequence[SampledPrompt]]) -> dict[str, list[SampledPrompt]]:
    """The prompts of each proxy, without the scores of samples that another proxy could not score.

    Each proxy has the same prompts in the same order. Raises `DataError` where they are not: of other length, with
    another number of samples, or of other gold.
    """
    names = list(prompts)
    found: dict[str, list[SampledPrompt]] = {name: [] for name in names}
    if len({len(prompts[name]) for name in names}) > 1:
        got = ", ".join(f"{len(prompts[name])} of {name}" for name in names)
        raise DataError("the proxies have not scored the same prompts", got=got, need="as many of each")
    for row in zip(*prompts.values(), strict=True):
        first = row[0]
        for one, name in zip(row, names, strict=True):
            if list(one.gold) != list(first.gold) or len(one.proxy) != len(first.proxy):
                need = "the same samples with the same gold for every proxy"
                raise DataError("the proxies have not scored the same samples", where=one.where, got=name, need=need)
        known = [None not in scores for scores in zip(*(one.proxy for one in row), strict=True)]
        for one, name in zip(row, names, strict=True):
            scores = [score if all_know else None for score, all_know in zip(one.proxy, known, strict=True)]
            found[name].append(replace(one, proxy=scores))
    return found


def analyse_several(
    prompts: Mapping[str, Sequence[SampledPrompt]],
    *,
    max_n: int | None = None,
    num_resamples: int = 2000,
    seed: int = 0,
) -> list[ComparedProxy]:
    """`analyse` for each proxy on the samples that all have scored, and how its gold differs from that of the first.

    Raises as `same_samples` and `analyse`.
    """
    shared = same_samples(prompts)
    compared: list[ComparedProxy] = []
    for name, own in shared.items():
        result = analyse(own, max_n=max_n, num_resamples=num_resamples, seed=seed)
        difference = None
        if compared:
            first = shared[compared[0].name]
            difference = _difference(first, own, result.max_n, num_resamples, seed)
        compared.append(ComparedProxy(name, result, difference))
    return compared


def _difference(
    first: Sequence[SampledPrompt], other: Sequence[SampledPrompt], n: int, num_resamples: int, seed: int
) -> Metric:
    values, clusters = [], []
    for number, pair in enumerate(zip(first, other, strict=True)):
        chosen = [_chosen_gold(one, n) for one in pair]
        if chosen[0] is None or chosen[1] is None:
            continue
        values.append(chosen[1] - chosen[0])
        clusters.append(number if pair[0].cluster is None else pair[0].cluster)
    low, high = cluster_bootstrap(values, clusters, num_resamples=num_resamples, seed=seed)
    return Metric(f"gold@{n} less that of the first proxy", float(np.mean(values)), low, high, len(values))


def _chosen_gold(prompt: SampledPrompt, n: int) -> float | None:
    known = [(p, g) for p, g in zip(prompt.proxy, prompt.gold, strict=True) if p is not None and g is not None]
    if len(known) < n:
        return None
    proxy, gold = zip(*known, strict=True)
    return float(expected_best_of(proxy, gold, [n])[0])
