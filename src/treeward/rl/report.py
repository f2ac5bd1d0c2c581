"""`write_rl_report`: runs of RL side by side on one page, which needs nothing but a browser.

    runs = [RLRun.read(name, folder) for name, folder in (("clean", a), ("hacked", b), ("cured", c))]
    write_rl_report(runs, Path("report.html"), title="GRPO against a reward model")
    runs[0].curve("validation/gold_reward")             # {0: 0.31, 10: 0.42, ...}: values by step
    runs[0].sentence()

`RLRun.read` reads `metrics.jsonl` and, if they exist, `samples.jsonl` and `alarms.json`. Any metric may be absent, at
some steps or at all; values that are not finite are ignored. A metric counts as changed only if its 95 % interval
excludes 0. Intervals are paired by prompt: the watch logs them (`treeward.rl.watch`).

The page and its blocks are those of `treeward.evaluation.report`: the verdict in sentences, gold and proxy over the
distance that the policy has moved, d = sqrt(KL), metrics over the steps, and the same prompts completed at the first, a
middle and the last validation. Beside it is a JSON file of the same name with all numbers. A metric that no run has
takes no place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from treeward.errors import ConfigError, DataError
from treeward.evaluation.report.blocks import curves_block, size_of, text_block
from treeward.evaluation.report.build import write_report
from treeward.evaluation.results import Block, Metric
from treeward.formatting import format_number
from treeward.rl.watch import ALARMS_FILE, Alarm, read_alarms
from treeward.training.tracking import read_metrics

SAMPLES_FILE = "samples.jsonl"

Curve = dict[int, float]
"""The finite values of one metric, by ascending steps."""

Outcome = Literal["over-optimised", "improved", "worse", "level", "unknown"]
"""The verdict by gold: `over-optimised` is an alarm of the watch; `unknown`: there is no gold, or no interval."""

_VERDICTS: dict[Outcome, str] = {
    "over-optimised": "{} exploited the reward model: gold fell while the proxy rose.",
    "improved": "{} got better by gold.",
    "worse": "{} got worse by gold.",
    "level": "{} did not change measurably by gold.",
    "unknown": "Whether {} got better cannot be said: there is no gold reward, or none with an interval.",
}
Z95 = 1.959964


@dataclass(frozen=True)
class RLRun:
    """One run by `name`. `steps`: metrics by step, ascending; `samples`: lines of samples.jsonl."""

    name: str
    steps: Mapping[int, Mapping[str, float]]
    samples: tuple[Mapping[str, Any], ...] = ()
    alarms: tuple[Alarm, ...] = ()

    @classmethod
    def read(cls, name: str, log_dir: str | Path) -> Self:
        """The run whose logs are in `log_dir`; it may be running still.

        Raises `DataError` where there are no metrics, or a line of a file is not what it should be.
        """
        metrics, samples, alarms = (Path(log_dir) / file for file in ("metrics.jsonl", SAMPLES_FILE, ALARMS_FILE))
        steps: dict[int, dict[str, float]] = {}
        for record in read_metrics(metrics) if metrics.exists() else ():
            steps.setdefault(record.pop("step"), {}).update(record)
        if not steps:
            raise DataError(
                "there are no metrics of a run here",
                where=str(metrics),
                need="the metrics.jsonl that `treeward grpo` writes into logger.log_dir",
                fix="give the run's log folder, or wait for its first step",
            )
        return cls(
            name,
            dict(sorted(steps.items())),
            # The reader of metrics drops the half line that a killed run leaves behind.
            tuple(read_metrics(samples)) if samples.exists() else (),
            tuple(read_alarms(alarms)) if alarms.exists() else (),
        )

    @property
    def last_step(self) -> int:
        return max(self.steps)

    def curve(self, key: str) -> Curve:
        """The finite values of a metric."""
        return {step: row[key] for step, row in self.steps.items() if math.isfinite(row.get(key, math.nan))}

    @property
    def gold_alarm(self) -> Alarm | None:
        """The alarm that gold falls while the proxy rises."""
        return next((alarm for alarm in self.alarms if alarm.kind == "gold_falls"), None)

    @property
    def alarm_step(self) -> int | None:
        """The step of the alarm of gold, else of the first alarm."""
        first = self.gold_alarm or next(iter(self.alarms), None)
        return None if first is None else first.step

    @cached_property
    def proxy(self) -> Change | None:
        """The change of the reward that is optimised, over the validations; None for fewer than two."""
        return self._change("reward", "proxy")

    @cached_property
    def gold(self) -> Change | None:
        """The same of the gold reward."""
        return self._change("gold_reward", "gold")

    @property
    def best_step(self) -> int | None:
        """The validation whose gold reward is highest."""
        gold = self.curve("validation/gold_reward")
        return max(gold, key=lambda step: gold[step], default=None)

    @property
    def kl(self) -> float | None:
        """KL to the reference at the last validation, in nats."""
        return next(reversed(self.curve("validation/kl").values()), None)

    @property
    def distances(self) -> Curve:
        """The distance that the policy has moved, sqrt(KL), at each validation with a reward."""
        rewarded = self.curve("validation/gold_reward").keys() | self.curve("validation/reward").keys()
        kl_by_step = self.curve("validation/kl")
        return {step: math.sqrt(max(kl, 0.0)) for step, kl in kl_by_step.items() if step in rewarded}

    @property
    def lengths(self) -> list[float]:
        """Mean tokens of a completion, at each validation."""
        return list(self.curve("validation/mean_gen_tokens_per_sample").values())

    @property
    def outcome(self) -> Outcome:
        """The verdict by gold."""
        if self.gold_alarm is not None:
            return "over-optimised"
        if self.gold is None or self.gold.by.low is None:
            return "unknown"
        return {"rose": "improved", "fell": "worse", "went": "level"}[self.gold.verb]  # type: ignore[return-value]

    def sentence(self) -> str:
        """What happened in this run."""
        parts = ["there are no two validations to compare."]
        if self.proxy is not None:
            changes = f"the proxy {self.proxy.course()}"
            changes = changes if self.gold is None else f"gold {self.gold.course()}; {changes}"
            at = "" if self.kl is None else f", at a KL of {format_number(self.kl)} nats"
            parts = [f"{changes}{at}."]
        if self.gold is not None and self.best_step is not None:
            best = format_number(self.curve("validation/gold_reward")[self.best_step])
            parts.append(f"Gold was best, {best}, at step {self.best_step}.")
        if len(self.lengths) > 1:
            first, last = (format_number(self.lengths[end], "integer") for end in (0, -1))
            parts.append(f"Completions went from {first} to {last} tokens.")
        parts += [f"**Alarm at step {alarm.step:,}:** {alarm.sentence}" for alarm in self.alarms]
        return " ".join([f"**{self.name}** ({self.last_step:,} steps):", *parts])

    def _change(self, key: str, name: str) -> Change | None:
        """The change of a metric, with the watch's interval."""
        curve = self.curve(f"validation/{key}")
        if len(curve) < 2:
            return None
        (_, first), *_, (step, last) = curve.items()
        value, error = (self.curve(f"watch/{name}_change{end}").get(step) for end in ("", "_error"))
        if value is None or error is None:
            return Change(first, last, Metric("change", last - first))
        return Change(first, last, Metric("change", value, value - Z95 * error, value + Z95 * error))


@dataclass(frozen=True, slots=True)
class Change:
    """A metric from its first to its last validation; `by`: the change, with its interval if known."""

    first: float
    last: float
    by: Metric

    @property
    def verb(self) -> str:
        """The verb that the interval supports."""
        return "rose" if (self.by.low or 0.0) > 0.0 else "fell" if (self.by.high or 0.0) < 0.0 else "went"

    def course(self) -> str:
        """ "rose from 0.31 to 0.72 (+0.41, 95% interval +0.30 to +0.52)"."""
        ends = {"low": self.first, "high": self.last}
        change = {"value": self.by.value, "low": self.by.low, "high": self.by.high}
        size = size_of([ends, change])
        first, last = format_number(self.first, size=size), format_number(self.last, size=size)
        value, low, high = (format_number(number, "signed", size) for number in change.values())
        interval = "no interval was logged" if self.by.low is None else f"95% interval {low} to {high}"
        return f"{self.verb} from {first} to {last} ({value}, {interval})"


def opening(runs: Sequence[RLRun]) -> str:
    """The first sentences of the page: which runs exploited their reward model and which did not."""
    sentences = []
    for outcome, text in _VERDICTS.items():
        names = [f"**{run.name}**" for run in runs if run.outcome == outcome]
        if names:
            *others, last = names
            sentences.append(text.format(f"{', '.join(others)} and {last}" if others else last))
    return " ".join(sentences)


_MOST_POINTS = 60
_MOST_PROMPTS = 12
_SOLID, _DOTTED = 0, 2  # dashes of charts

_FIGURES: tuple[tuple[str, str, str, str, str], ...] = (
    ("Gold reward", "gold_reward", "gold", "", "number"),
    ("Proxy", "reward", "reward", "What is optimised.", "number"),
    ("KL to the reference", "kl", "nats", "How far the policy has moved.", "number"),
    ("Length of the completions", "mean_gen_tokens_per_sample", "tokens", "", "number"),
    ("Entropy of the policy", "entropy", "nats", "Near 0 it says the same every time and learns no more.", "number"),
    ("Completions that were cut", "truncation_rate", "share", "At the length limit.", "percent"),
    ("Groups without signal", "groups_without_signal", "share", "All completions of a group have one reward: nothing "
     "is learnt from it.", "percent"),
    ("Rewards that failed", "num_failed", "completions", "Masked, and in no mean.", "number"),
)  # fmt: skip
"""Metrics over the steps: title, name after `train/` and `validation/`, unit, how to read it, format."""

_WITH_ALARM = ("gold_reward", "reward", "kl", "mean_gen_tokens_per_sample")
_ERRORS = {"gold_reward": "watch/gold_error", "reward": "watch/proxy_error"}
_OVER_STEPS = (
    "Solid: validation, always on the same prompts; dotted: training batches. A band is a 95% interval over "
    "prompts. Of many steps, a point is the mean of neighbours. Values that are not finite are left out."
)


def write_rl_report(runs: Sequence[RLRun], path: Path, *, title: str) -> Path:
    """Write the page to `path`, which ends in .html, and its numbers to the .json beside it; returns `path`.

    Raises `ConfigError` for no runs, or two of one name.
    """
    names = [run.name for run in runs]
    if not names or len(set(names)) < len(names):
        raise ConfigError("a report needs runs of different names", got=names, need="one run or more")
    subtitle = f"{len(runs)} runs: {', '.join(names)}" if len(runs) > 1 else f"Run {names[0]}"
    return write_report(path.parent, title, list(report_blocks(runs)), {}, subtitle=subtitle, name=path.stem)


def report_blocks(runs: Sequence[RLRun]) -> Iterator[Block]:
    """The blocks of the page."""
    texts = [opening(runs), "\n".join(f"- {run.sentence()}" for run in runs)]
    if len(runs) > 1:
        texts.append("Proxies of runs compare only where the settings of their rewards are the same.")
    yield text_block("\n\n".join(texts))
    yield from _over_distance(runs)
    yield text_block(_OVER_STEPS, title="Over the steps")
    for figure in _FIGURES:
        yield from _over_steps(runs, *figure)
    yield from _samples(runs)


def _prefix(run: RLRun, runs: Sequence[Any]) -> str:
    """The run's name before a curve's name, if there are several runs."""
    return f"{run.name}: " if len(runs) > 1 else ""


def _over_distance(runs: Sequence[RLRun]) -> Iterator[Block]:
    """Gold and the proxy over sqrt(KL): gains over the first validation."""
    moved = [(colour, run) for colour, run in enumerate(runs) if len(run.distances) > 1]
    lines: list[Block] = [
        {"x": run.distances[run.alarm_step], "label": f"{_prefix(run, runs)}alarm", "colour": colour}
        for colour, run in moved
        if run.alarm_step in run.distances
    ]
    for name, key, note in (
        ("gold", "gold_reward", "How much was gained for the distance that the policy has moved."),
        ("proxy", "reward", "In its own units. What it is worth only gold can tell."),
    ):
        series: list[Block] = []
        for colour, run in moved:
            curve, distances = run.curve(f"validation/{key}"), run.distances
            if steps := [step for step in distances if step in curve]:
                start = next(iter(curve.values()))
                points = {"x": [distances[step] for step in steps], "y": [curve[step] - start for step in steps]}
                labels = [f"step {step:,}, distance {format_number(distances[step])}" for step in steps]
                look = {"name": f"{_prefix(run, runs)}{name}", "colour": colour, "dash": _SOLID, "dots": True}
                series.append(look | points | {"labels": labels})
        if series:
            yield curves_block(
                f"{name.capitalize()} over the distance moved",
                series,
                note,
                x_label="square root of KL to the reference, KL in nats",
                y_label="gain over the first validation",
                lines=lines,
            )


def _over_steps(runs: Sequence[RLRun], title: str, key: str, y_label: str, note: str, format: str) -> Iterator[Block]:
    """A metric over the steps; nothing where no run has it."""
    series: list[Block] = []
    lines: list[Block] = []
    for colour, run in enumerate(runs):
        prefix = _prefix(run, runs)
        for name, part, dash in (("validation", "validation", _SOLID), ("training", "train", _DOTTED)):
            if curve := run.curve(f"{part}/{key}"):
                error = run.curve(_ERRORS.get(key, "")) if name == "validation" else None
                dots = name == "validation" and len(curve) <= _MOST_POINTS // 2
                look = {"name": f"{prefix}{name}", "colour": colour, "dash": dash, "dots": dots}
                series.append(look | _thinned(curve, error))
        if run.alarm_step is not None and key in _WITH_ALARM:
            lines.append({"x": run.alarm_step, "label": f"{prefix}alarm", "colour": colour})
    if series:
        yield curves_block(
            title,
            series,
            note,
            x_label="step",
            y_label=y_label,
            format=format,
            lines=lines,
            folded=not any(any(points["y"]) for points in series),
        )


def _thinned(curve: Curve, error: Curve | None) -> Block:
    """The points of a curve, thinned to what a screen shows; with 95 % intervals if none is left out."""
    number = min(len(curve), _MOST_POINTS)
    x = [float(part.mean()) for part in np.array_split(list(curve.keys()), number)]
    y = [float(part.mean()) for part in np.array_split(list(curve.values()), number)]
    if not error or len(x) < len(curve):
        return {"x": x, "y": y}
    halves = [Z95 * error.get(step, math.nan) for step in curve]
    low = [value - half for value, half in zip(y, halves, strict=True)]
    high = [value + half for value, half in zip(y, halves, strict=True)]
    return {"x": x, "y": y, "low": low, "high": high}


def _samples(runs: Sequence[RLRun]) -> Iterator[Block]:
    """The same prompts at the first, a middle and the last validation; the middle one is where gold was best."""
    items: dict[str, Block] = {}
    for colour, run in enumerate(runs):
        lines_by_prompt: dict[str, dict[int, Mapping[str, Any]]] = {}
        for line in run.samples:
            if line["completions"]:
                lines_by_prompt.setdefault(json.dumps(line["prompt"], sort_keys=True), {})[line["step"]] = line
        for prompt, lines in lines_by_prompt.items():
            steps = sorted(lines)
            middle = run.best_step if run.best_step in steps[1:-1] else steps[len(steps) // 2]
            shown = [lines[step] for step in dict.fromkeys((steps[0], middle, steps[-1]))]
            name = run.name if len(runs) > 1 else ""
            completions = [_completion(line, run.best_step) for line in shown]
            item = items.setdefault(prompt, {"prompt": shown[0]["prompt"], "rows": []})
            item["rows"].append({"name": name, "colour": colour, "completions": completions})
    if items:
        note = "The first completion that was sampled to each prompt, not a chosen one. samples.jsonl has all."
        yield text_block(note, title="Completions over time")
        # Without validations each step has other prompts: those of the first and of the last steps.
        shown_items = list(items.values())
        if len(shown_items) > _MOST_PROMPTS:
            shown_items = [*shown_items[: _MOST_PROMPTS // 2], *shown_items[-_MOST_PROMPTS // 2 :]]
        yield {"kind": "samples", "title": "Prompts and completions", "items": shown_items}


def _completion(line: Mapping[str, Any], best_step: int | None) -> Block:
    completion = line["completions"][0]
    forms = (("reward", "reward", "signed"), ("gold", "gold_reward", "number"), ("KL", "kl", "number"),
             ("tokens", "num_tokens", "integer"))  # fmt: skip
    numbers = [
        {"label": label, "value": completion.get(key), "format": form}
        for label, key, form in forms
        if completion.get(key) is not None or key == "reward"  # a reward that failed shows as a dash
    ]
    flags = ["cut"] if completion.get("truncated") else []
    flags += ["gold is best on average"] if line["step"] == best_step else []
    return {"label": f"step {line['step']:,}", "text": completion["text"], "numbers": numbers, "flags": flags}
