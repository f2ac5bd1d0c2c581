"""`write_rl_report`: runs of RL side by side on one page, which needs nothing but a browser.

    runs = [RLRun.read("clean", a), RLRun.read("hacked", b), RLRun.read("cured", c)]
    write_rl_report(runs, Path("report.html"), title="GRPO against a reward model")

The page has the verdict in sentences, gold and proxy over the distance that the policy has moved, d
= sqrt(KL), metrics over the steps, and the same prompts completed at the first, a middle and the
last validation. `RLPage` has its numbers and `report.html` its words. A metric that no run has
takes no place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from treeward.errors import ConfigError
from treeward.evaluation.diagnostics.components import ComponentStatistics
from treeward.evaluation.report.build import write_report
from treeward.evaluation.report.charts import DOTTED, SOLID, Line, Place
from treeward.evaluation.results import Metric
from treeward.formatting import format_number
from treeward.rl.environment_runner import GOLD_LABEL
from treeward.rl.logged_run import Z95, Change, Curve, Outcome, RLRun
from treeward.rl.watch import Alarm

Content = TypeVar("Content")

_MOST_POINTS = 60  # of a curve over the steps
_MOST_PROMPTS = 12
_MOST_CRITERIA = 30
_OVER_STEPS = (
    "gold_reward",
    "reward",
    "kl",
    "mean_gen_tokens_per_sample",
    "entropy",
    "truncation_rate",
    "groups_without_signal",
    "num_failed",
)
"""The metrics that are shown over the steps, by their names after `train/` and `validation/`."""
_ERRORS = {"gold_reward": "watch/gold_error", "reward": "watch/proxy_error"}
"""The standard errors of validations, of the metrics that have one."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What became of a run.

    `lengths`: mean tokens of a completion at the first and last validation, if known. `criteria`:
    the most frequent components of the completions that were logged last.
    """

    name: str
    outcome: Outcome
    last_step: int
    gold: Change | None
    proxy: Change | None
    kl: float | None
    best_step: int | None
    best_gold: float | None
    lengths: tuple[float, float] | None
    alarms: tuple[Alarm, ...]
    components: Mapping[str, Change]
    criteria: tuple[ComponentStatistics, ...]
    gold_components: Mapping[str, Change]

    @property
    def sacrificed(self) -> list[str]:
        """The components, of the proxy and of gold, that fell while the proxy rose."""
        if self.proxy is None or self.proxy.verb != "rose":
            return []
        fallen = [name for name, change in self.components.items() if change.verb == "fell"]
        for name, change in self.gold_components.items():
            if change.verb == "fell":
                fallen.append(f"{GOLD_LABEL}/{name}")
        return fallen


@dataclass(frozen=True, slots=True)
class SampledCompletion:
    """The first completion that was sampled at `step`, not a chosen one. Numbers that were not
    logged are None.

    `is_cut`: at the length limit. `is_at_best_gold`: gold is highest at this validation, on
    average.
    """

    step: int
    text: str
    reward: float | None
    gold: float | None
    kl: float | None
    num_tokens: int | None
    is_cut: bool
    is_at_best_gold: bool


@dataclass(frozen=True, slots=True)
class PromptSamples:
    """A prompt's messages, and its completions by the index of the run."""

    prompt: Sequence[Mapping[str, Any]]
    completions: dict[int, tuple[SampledCompletion, ...]]


@dataclass(frozen=True, slots=True)
class RLPage:
    """The numbers of the page.

    `over_distance`: gains of "gold" and "proxy" over the first validation, over sqrt(KL);
    `over_steps`: metrics by name. Both without those that no run has. `alarm_distances` and
    `alarm_steps`: where runs had an alarm. `component_changes`: by run and component, of "gold" and
    of "proxy", if a run has any.
    """

    runs: tuple[RunSummary, ...]
    over_distance: Mapping[str, Sequence[Line]]
    alarm_distances: Sequence[Place]
    over_steps: Mapping[str, Sequence[Line]]
    alarm_steps: Sequence[Place]
    component_changes: Mapping[str, Mapping[str, Mapping[str, Metric]]]
    samples: Sequence[PromptSamples]

    def change_range(self, whose: str) -> tuple[float, float]:
        """The ends of an axis on which all changes of components, with their intervals, have a
        place."""
        ends = [0.0]
        for changes in self.component_changes[whose].values():
            for change in changes.values():
                ends += [end for end in (change.value, change.low, change.high) if end is not None]
        return min(ends), max(ends)

    def is_zero(self, name: str) -> bool:
        """Whether a metric over the steps is 0 everywhere."""
        return not any(any(line.y) for line in self.over_steps[name])


def write_rl_report(runs: Sequence[RLRun], path: Path, *, title: str) -> Path:
    """Write the page to `path`, which ends in .html, and its numbers to the .json beside it;
    returns `path`.

    Raises `ConfigError` for no runs, or two of one name.
    """
    names = [run.name for run in runs]
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            "a report needs runs of different names",
            got=names,
            need="one run or more",
        )
    subtitle = f"Run {names[0]}"
    if len(runs) > 1:
        subtitle = f"{len(runs)} runs: {', '.join(names)}"
    return write_report(
        path.parent,
        "rl/report.html",
        title,
        rl_page(runs),
        subtitle=subtitle,
        name=path.stem,
    )


def rl_page(runs: Sequence[RLRun]) -> RLPage:
    """The numbers of the page on these runs."""
    over_distance = {
        "gold": _over_distance(runs, "gold", "gold_reward"),
        "proxy": _over_distance(runs, "proxy", "reward"),
    }
    over_steps = {name: _over_steps(runs, name) for name in _OVER_STEPS}
    # An alarm is marked in every figure, in the colour of its run.
    alarm_distances = []
    alarm_steps = []
    for number, run in enumerate(runs):
        if run.alarm_step is None:
            continue
        label = f"{_prefix(run, runs)}alarm"
        alarm_steps.append(Place(run.alarm_step, label, number))
        if _has_moved(run) and run.alarm_step in run.distances:
            alarm_distances.append(Place(run.distances[run.alarm_step], label, number))
    component_changes = {
        "gold": _component_changes({run.name: run.gold_components for run in runs}),
        "proxy": _component_changes({run.name: run.components for run in runs}),
    }
    summaries = [_summary(run) for run in runs]
    return RLPage(
        runs=tuple(summaries),
        over_distance=_not_empty(over_distance),
        alarm_distances=alarm_distances,
        over_steps=_not_empty(over_steps),
        alarm_steps=alarm_steps,
        component_changes=_not_empty(component_changes),
        samples=_samples(runs),
    )


def _not_empty(by_name: Mapping[str, Content]) -> dict[str, Content]:
    return {name: content for name, content in by_name.items() if content}


def _component_changes(
    runs: Mapping[str, Mapping[str, Change]],
) -> dict[str, dict[str, Metric]]:
    """By run and component. A run without a component of another has a place without a number."""
    names = list(dict.fromkeys(name for components in runs.values() for name in components))
    if not names:
        return {}
    changes: dict[str, dict[str, Metric]] = {}
    for run, components in runs.items():
        changes[run] = {}
        for name in names:
            change = components.get(name)
            changes[run][name] = Metric("change", None) if change is None else change.by
    return changes


def _summary(run: RLRun) -> RunSummary:
    best_step = run.best_step
    best_gold = None
    if best_step is not None:
        best_gold = run.curve("validation/gold_reward")[best_step]
    lengths = None
    if len(run.lengths) > 1:
        lengths = (run.lengths[0], run.lengths[-1])
    criteria: list[ComponentStatistics] = []
    if run.criteria is not None:
        criteria = list(run.criteria.components.values())
    return RunSummary(
        name=run.name,
        outcome=run.outcome,
        last_step=run.last_step,
        gold=run.gold,
        proxy=run.proxy,
        kl=run.kl,
        best_step=best_step,
        best_gold=best_gold,
        lengths=lengths,
        alarms=run.alarms,
        components=run.components,
        criteria=tuple(criteria[:_MOST_CRITERIA]),
        gold_components=run.gold_components,
    )


def _prefix(run: RLRun, runs: Sequence[RLRun]) -> str:
    """The run's name before a curve's name, if there are several runs."""
    if len(runs) == 1:
        return ""
    return f"{run.name}: "


def _has_moved(run: RLRun) -> bool:
    """Whether there is a curve over the distance: two validations or more."""
    return len(run.distances) > 1


def _over_distance(runs: Sequence[RLRun], name: str, key: str) -> list[Line]:
    """A reward over sqrt(KL), as the gain over the first validation, of each run that has both."""
    lines = []
    for number, run in enumerate(runs):
        curve = run.curve(f"validation/{key}")
        distances = run.distances
        steps = [step for step in distances if step in curve]
        if not _has_moved(run) or not steps:
            continue
        # Gains, because rewards of different runs begin at different levels.
        start = next(iter(curve.values()))
        labels = []
        for step in steps:
            labels.append(f"step {step:,}, distance {format_number(distances[step])}")
        moved = [distances[step] for step in steps]
        gains = [curve[step] - start for step in steps]
        lines.append(
            Line(
                f"{_prefix(run, runs)}{name}",
                x=moved,
                y=gains,
                labels=labels,
                colour=number,
                dots=True,
            )
        )
    return lines


def _over_steps(runs: Sequence[RLRun], key: str) -> list[Line]:
    """A metric over the steps: of each run the validations and, dotted, the training batches."""
    lines = []
    for number, run in enumerate(runs):
        validation = run.curve(f"validation/{key}")
        if validation:
            error: Curve = {}
            if key in _ERRORS:
                error = run.curve(_ERRORS[key])
            name = f"{_prefix(run, runs)}validation"
            has_dots = len(validation) <= _MOST_POINTS // 2
            lines.append(_thinned(name, validation, error, colour=number, dots=has_dots))
        training = run.curve(f"train/{key}")
        if training:
            name = f"{_prefix(run, runs)}training"
            lines.append(_thinned(name, training, {}, colour=number, dash=DOTTED, dots=False))
    return lines


def _thinned(
    name: str,
    curve: Curve,
    error: Curve,
    *,
    colour: int,
    dots: bool,
    dash: int = SOLID,
) -> Line:
    """A curve with as many points as a screen shows, and with 95 % intervals if no point is left
    out."""
    num_points = min(len(curve), _MOST_POINTS)
    x = [float(part.mean()) for part in np.array_split(list(curve.keys()), num_points)]
    y = [float(part.mean()) for part in np.array_split(list(curve.values()), num_points)]
    # A mean of neighbours has no interval of its own.
    if not error or num_points < len(curve):
        return Line(name, x, y, colour=colour, dash=dash, dots=dots)
    low: list[float | None] = []
    high: list[float | None] = []
    for step, value in curve.items():
        known_error = error.get(step)
        if known_error is None:
            low.append(None)
            high.append(None)
        else:
            low.append(value - Z95 * known_error)
            high.append(value + Z95 * known_error)
    return Line(name, x, y, low, high, colour=colour, dash=dash, dots=dots)


def _samples(runs: Sequence[RLRun]) -> list[PromptSamples]:
    """The same prompts at the first, a middle and the last validation; the middle one is where gold
    was best."""
    by_prompt: dict[str, PromptSamples] = {}
    for number, run in enumerate(runs):
        # The lines of samples.jsonl with a completion, by prompt and step.
        lines_by_prompt: dict[str, dict[int, Mapping[str, Any]]] = {}
        for line in run.samples:
            if line["completions"]:
                key = json.dumps(line["prompt"], sort_keys=True)
                lines_by_prompt.setdefault(key, {})[line["step"]] = line
        for key, lines in lines_by_prompt.items():
            steps = sorted(lines)
            middle = steps[len(steps) // 2]
            if run.best_step in steps[1:-1]:
                middle = run.best_step
            # One of two steps, or the only one, is not shown twice.
            shown_steps = list(dict.fromkeys((steps[0], middle, steps[-1])))
            completions = [_completion(lines[step], run.best_step) for step in shown_steps]
            samples = by_prompt.setdefault(key, PromptSamples(lines[steps[0]]["prompt"], {}))
            samples.completions[number] = tuple(completions)
    all_samples = list(by_prompt.values())
    if len(all_samples) <= _MOST_PROMPTS:
        return all_samples
    # Without validations each step has other prompts: those of the first and of the last steps.
    half = _MOST_PROMPTS // 2
    return [*all_samples[:half], *all_samples[-half:]]


def _completion(line: Mapping[str, Any], best_step: int | None) -> SampledCompletion:
    # The first that was sampled, and not the best: a reader sees what the policy writes.
    completion = line["completions"][0]
    return SampledCompletion(
        step=line["step"],
        text=completion["text"],
        reward=completion.get("reward"),
        gold=completion.get("gold_reward"),
        kl=completion.get("kl"),
        num_tokens=completion.get("num_tokens"),
        is_cut=bool(completion.get("truncated")),
        is_at_best_gold=line["step"] == best_step,
    )
