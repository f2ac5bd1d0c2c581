"""`component_statistics`: what the parts of a reward tell, as the criteria of a rubric.

    group = RatedGroup("How tall is it?", ({"Unit": 1.0}, {"Unit": 0.0}), (0.9, 0.2))
    statistics = component_statistics([group])
    statistics.components["Unit"].agreement.value       # 1.0: the better completion meets it more
    statistics.num_always_met, statistics.num_never_met # criteria that tell no completions apart

A criterion that all completions of a prompt meet, or none, teaches nothing there. One that the
worse completions meet more often than the better ones is in conflict with what is known of them:
labels in an evaluation, the gold reward in a run of RL.

Components whose names have a slash are details of a reward, and are left out.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from treeward.evaluation.results import Metric, ScoredExample
from treeward.evaluation.statistics import accuracy_metric

_MET = 0.5
"""How far a criterion is met from which it counts as met: a judge's probability of yes."""


class RatedGroup(NamedTuple):
    """The completions of one prompt.

    `values`: the components of each by name. `gold`: how good each is known to be, higher is
    better; None where that is not known.
    """

    prompt: str
    values: Sequence[Mapping[str, float]]
    gold: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class ComponentStatistics:
    """One component by its name.

    `num_prompts`: prompts that have it. `mean`: over all completions. `agreement`: the share of
    pairs with different gold, and different values of the component, in which the better completion
    has the higher value. `always_met` and `never_met`: shares of the prompts with several
    completions in which all meet it, and in which none does; None for a component that is not
    always from 0 to 1.
    """

    name: str
    num_prompts: int
    mean: float
    agreement: Metric
    always_met: float | None
    never_met: float | None


@dataclass(frozen=True, slots=True)
class ComponentsSummary:
    """All components, the most frequent first, and the criteria among them: a criterion is a
    component from 0 to 1 at one prompt with several completions.

    `agreement`: as of one component, over the pairs of all.
    """

    components: Mapping[str, ComponentStatistics]
    num_criteria: int
    num_always_met: int
    num_never_met: int
    agreement: Metric


def component_statistics(groups: Sequence[RatedGroup]) -> ComponentsSummary | None:
    """The statistics of all components; None where there are none."""
    # For each component its values in each group that has it, with the gold beside them.
    found: dict[str, list[_Values]] = defaultdict(list)
    for group in groups:
        names = dict.fromkeys(name for components in group.values for name in components)
        for name in names:
            if "/" in name:
                continue
            known = []
            for components, gold in zip(group.values, group.gold, strict=True):
                if name in components:
                    known.append((components[name], gold))
            found[name].append(_Values(group.prompt, known))
    if not found:
        return None
    by_frequency = sorted(found, key=lambda name: (-len(found[name]), name))
    statistics = {name: _statistics(name, found[name]) for name in by_frequency}
    everything: list[_Values] = []
    num_criteria = 0
    num_always_met = 0
    num_never_met = 0
    for of_prompts in found.values():
        everything += of_prompts
        if not _is_share(of_prompts):
            continue
        for one in of_prompts:
            num_criteria += len(one.known) > 1
            num_always_met += one.is_always_met
            num_never_met += one.is_never_met
    return ComponentsSummary(
        statistics, num_criteria, num_always_met, num_never_met, _agreement(everything)
    )


def components_of(scored: Sequence[ScoredExample]) -> ComponentsSummary | None:
    """Those of the rewards of an environment, whose gold is the rank of each completion."""
    groups = []
    for example in scored:
        if example.heads:
            # Rank 0 is the best.
            gold = [-float(rank) for rank in example.example.ranks]
            groups.append(RatedGroup(example.example.context_key, example.heads, gold))
    return component_statistics(groups)


class _Values(NamedTuple):
    """One component at one prompt: its value and the gold of each completion that has it."""

    prompt: str
    known: Sequence[tuple[float, float | None]]

    @property
    def is_always_met(self) -> bool:
        return len(self.known) > 1 and all(value >= _MET for value, _ in self.known)

    @property
    def is_never_met(self) -> bool:
        return len(self.known) > 1 and all(value < _MET for value, _ in self.known)


def _statistics(name: str, values: Sequence[_Values]) -> ComponentStatistics:
    numbers = []
    for one in values:
        numbers += [value for value, _ in one.known]
    several = [one for one in values if len(one.known) > 1]
    always_met = None
    never_met = None
    if several and _is_share(values):
        always_met = fmean(one.is_always_met for one in several)
        never_met = fmean(one.is_never_met for one in several)
    return ComponentStatistics(
        name, len(values), fmean(numbers), _agreement(values), always_met, never_met
    )


def _is_share(values: Sequence[_Values]) -> bool:
    """Whether all values are from 0 to 1, as how far a criterion is met."""
    for one in values:
        for value, _ in one.known:
            if not 0.0 <= value <= 1.0:
                return False
    return True


def _agreement(values: Sequence[_Values]) -> Metric:
    agrees = []
    prompts = []
    for one in values:
        for (value, gold), (other, other_gold) in itertools.combinations(one.known, 2):
            if gold is None or other_gold is None or gold == other_gold or value == other:
                continue
            agrees.append(float((value > other) == (gold > other_gold)))
            prompts.append(one.prompt)
    return accuracy_metric(agrees, "agreement", prompts)
