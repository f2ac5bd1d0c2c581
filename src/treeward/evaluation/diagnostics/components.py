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
    # By component, in order of appearance: one entry for each prompt that has it.
    prompts_of: dict[str, list[_ComponentAtPrompt]] = defaultdict(list)
    for group in groups:
        rated: dict[str, list[tuple[float, float | None]]] = defaultdict(list)
        for components, gold in zip(group.values, group.gold, strict=True):
            for name, value in components.items():
                if "/" not in name:
                    rated[name].append((value, gold))
        for name, values in rated.items():
            prompts_of[name].append(_ComponentAtPrompt(group.prompt, values))
    if not prompts_of:
        return None
    by_frequency = sorted(prompts_of, key=lambda name: (-len(prompts_of[name]), name))
    statistics = {name: _statistics(name, prompts_of[name]) for name in by_frequency}
    all_prompts: list[_ComponentAtPrompt] = []
    num_criteria = 0
    num_always_met = 0
    num_never_met = 0
    for prompts in prompts_of.values():
        all_prompts += prompts
        if not _is_share(prompts):
            continue
        for prompt in prompts:
            num_criteria += prompt.has_several
            num_always_met += prompt.is_always_met
            num_never_met += prompt.is_never_met
    return ComponentsSummary(
        statistics, num_criteria, num_always_met, num_never_met, _agreement(all_prompts)
    )


def components_of(scored: Sequence[ScoredExample]) -> ComponentsSummary | None:
    """The statistics of the components of an environment's rewards; the gold is the rank of each
    completion."""
    groups = []
    for example in scored:
        if example.heads:
            # A lower rank is better, and a higher gold.
            gold = [-float(rank) for rank in example.example.ranks]
            groups.append(RatedGroup(example.example.prompt_key, example.heads, gold))
    return component_statistics(groups)


class _ComponentAtPrompt(NamedTuple):
    """One component at one prompt: its value and the gold of each completion that has it."""

    prompt: str
    rated: Sequence[tuple[float, float | None]]

    @property
    def values(self) -> list[float]:
        return [value for value, _ in self.rated]

    @property
    def has_several(self) -> bool:
        """Whether there are completions that the component could tell apart."""
        return len(self.rated) > 1

    @property
    def is_always_met(self) -> bool:
        return self.has_several and min(self.values) >= _MET

    @property
    def is_never_met(self) -> bool:
        return self.has_several and max(self.values) < _MET


def _statistics(name: str, prompts: Sequence[_ComponentAtPrompt]) -> ComponentStatistics:
    values: list[float] = []
    for prompt in prompts:
        values += prompt.values
    always_met = None
    never_met = None
    num_several = sum(prompt.has_several for prompt in prompts)
    if num_several and _is_share(prompts):
        always_met = sum(prompt.is_always_met for prompt in prompts) / num_several
        never_met = sum(prompt.is_never_met for prompt in prompts) / num_several
    return ComponentStatistics(
        name, len(prompts), fmean(values), _agreement(prompts), always_met, never_met
    )


def _is_share(prompts: Sequence[_ComponentAtPrompt]) -> bool:
    """Whether all values are from 0 to 1, as how far a criterion is met."""
    for prompt in prompts:
        for value in prompt.values:
            if not 0.0 <= value <= 1.0:
                return False
    return True


def _agreement(prompts: Sequence[_ComponentAtPrompt]) -> Metric:
    """How often the completion with more gold has the higher value."""
    agrees = []
    keys = []
    for prompt in prompts:
        for (value, gold), (other, other_gold) in itertools.combinations(prompt.rated, 2):
            if gold is None or other_gold is None:
                continue
            # Equal gold says that neither is better, and an equal value does not choose.
            if gold == other_gold or value == other:
                continue
            agrees.append(float((value > other) == (gold > other_gold)))
            keys.append(prompt.prompt)
    return accuracy_metric(agrees, "agreement", keys)
