"""`RLRun`: a run of RL as its log folder has it, with its verdict by gold.

    run = RLRun.read("hacked", log_dir)
    run.curve("validation/gold_reward")     # {0: 0.31, 10: 0.42, ...}: values by step
    run.outcome                             # "over-optimised"
    run.components["rubric/Unit"].verb      # "fell"

`RLRun.read` reads `metrics.jsonl` and, if they exist, `samples.jsonl` and `alarms.json`. Any metric
may be absent, at some steps or at all; values that are not finite are ignored. A metric counts as
changed only if its 95 % interval excludes 0. Intervals are paired by prompt: the watch logs them
(`treeward.rl.watch`).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from treeward.errors import DataError
from treeward.evaluation.diagnostics.components import (
    ComponentsSummary,
    RatedGroup,
    component_statistics,
)
from treeward.evaluation.report.intervals import size_of
from treeward.evaluation.results import Metric
from treeward.rl.environment_runner import GOLD_LABEL
from treeward.rl.watch import ALARMS_FILE, Alarm, read_alarms
from treeward.training.tracking import read_metrics

SAMPLES_FILE = "samples.jsonl"

Curve = dict[int, float]
"""The finite values of one metric, by ascending steps."""

Outcome = Literal["over-optimised", "improved", "worse", "level", "unknown"]
"""The verdict by gold: `over-optimised` is an alarm of the watch; `unknown`: there is no gold, or
no interval."""

Z95 = 1.959964
"""Standard errors from the middle of a 95 % interval to its ends, by the normal distribution."""

_COMPONENT = re.compile(r"validation/([^/]+)/component/([^/]+)")


@dataclass(frozen=True, slots=True)
class Change:
    """A metric from its first to its last validation; `by`: the change, with its interval if
    known."""

    first: float
    last: float
    by: Metric

    @property
    def verb(self) -> Literal["rose", "fell", "went"]:
        """The verb that the interval supports."""
        if self.by.low is not None and self.by.low > 0.0:
            return "rose"
        if self.by.high is not None and self.by.high < 0.0:
            return "fell"
        return "went"

    @property
    def size(self) -> float:
        """The largest of its numbers: all are written with as many decimals."""
        return size_of([Metric("ends", None, self.first, self.last), self.by])


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
        metrics_file = Path(log_dir) / "metrics.jsonl"
        samples_file = Path(log_dir) / SAMPLES_FILE
        alarms_file = Path(log_dir) / ALARMS_FILE
        steps: dict[int, dict[str, float]] = {}
        if metrics_file.exists():
            for record in read_metrics(metrics_file):
                # A step may have several records, as of training and of validation.
                steps.setdefault(record.pop("step"), {}).update(record)
        if not steps:
            raise DataError(
                "there are no metrics of a run here",
                where=str(metrics_file),
                need="the metrics.jsonl that `treeward grpo` writes into logger.log_dir",
                fix="give the run's log folder, or wait for its first step",
            )
        # The reader of metrics drops the half line that a killed run leaves behind.
        samples: list[dict[str, Any]] = []
        if samples_file.exists():
            samples = read_metrics(samples_file)
        alarms: list[Alarm] = []
        if alarms_file.exists():
            alarms = read_alarms(alarms_file)
        return cls(name, dict(sorted(steps.items())), tuple(samples), tuple(alarms))

    @property
    def last_step(self) -> int:
        return max(self.steps)

    def curve(self, key: str) -> Curve:
        """The finite values of a metric."""
        values: Curve = {}
        for step, row in self.steps.items():
            # A run that diverges logs NaN.
            value = row.get(key, math.nan)
            if math.isfinite(value):
                values[step] = value
        return values

    @property
    def gold_alarm(self) -> Alarm | None:
        """The alarm that gold falls while the proxy rises."""
        for alarm in self.alarms:
            if alarm.kind == "gold_falls":
                return alarm
        return None

    @property
    def alarm_step(self) -> int | None:
        """The step of the alarm of gold, else of the first alarm."""
        if self.gold_alarm is not None:
            return self.gold_alarm.step
        if self.alarms:
            return self.alarms[0].step
        return None

    @cached_property
    def proxy(self) -> Change | None:
        """The change of the reward that is optimised, over the validations; None for fewer than
        two."""
        return self._change("reward", "proxy")

    @cached_property
    def gold(self) -> Change | None:
        """The same of the gold reward."""
        return self._change("gold_reward", "gold")

    @cached_property
    def components(self) -> dict[str, Change]:
        """The change of each component of the proxy, by `environment/component`. Details, whose
        names have a slash, are left out."""
        changes = {}
        names = self._component_names(of_gold=False)
        num_environments = Counter(component for _, component in names)
        for environment, component in names:
            # The watch knows a component by its own name, whichever environments have it: what it
            # logs for several is the change of none of them.
            watched = None
            if num_environments[component] == 1:
                watched = f"component/{component}"
            change = self._change(f"{environment}/component/{component}", watched)
            if change is not None:
                # Metrics name an environment with this ending, as `rubric_env`.
                changes[f"{environment.removesuffix('_env')}/{component}"] = change
        return changes

    @cached_property
    def gold_components(self) -> dict[str, Change]:
        """The change of each component of gold, by its name."""
        changes = {}
        for environment, component in self._component_names(of_gold=True):
            change = self._change(
                f"{environment}/component/{component}", f"gold_component/{component}"
            )
            if change is not None:
                changes[component] = change
        return changes

    def _component_names(self, *, of_gold: bool) -> list[tuple[str, str]]:
        """The environment, as metrics name it, and the component of each logged mean."""
        pairs = []
        metric_names = dict.fromkeys(name for row in self.steps.values() for name in row)
        for name in metric_names:
            match = _COMPONENT.fullmatch(name)
            if match is None:
                continue
            environment, component = match.groups()
            if (environment == GOLD_LABEL) == of_gold:
                pairs.append((environment, component))
        return pairs

    @cached_property
    def criteria(self) -> ComponentsSummary | None:
        """The components of the completions that were logged at the last step, against gold; None
        where no prompt has several completions."""
        if not self.samples:
            return None
        last_step = max(line["step"] for line in self.samples)
        groups = []
        for line in self.samples:
            completions = line["completions"]
            if line["step"] < last_step or len(completions) < 2:
                continue
            groups.append(
                RatedGroup(
                    json.dumps(line["prompt"], sort_keys=True),
                    [completion.get("components", {}) for completion in completions],
                    [completion.get("gold_reward") for completion in completions],
                )
            )
        return component_statistics(groups)

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
        gold = self.curve("validation/gold_reward")
        proxy = self.curve("validation/reward")
        distances: Curve = {}
        for step, kl in self.curve("validation/kl").items():
            if step in gold or step in proxy:
                # An estimate of KL from samples may be below 0.
                distances[step] = math.sqrt(max(kl, 0.0))
        return distances

    @property
    def lengths(self) -> list[float]:
        """Mean tokens of a completion, at each validation."""
        return list(self.curve("validation/mean_gen_tokens_per_sample").values())

    @property
    def outcome(self) -> Outcome:
        """The verdict by gold."""
        # The alarm comes first: gold may have risen since the first validation, and fallen from its
        # best since.
        if self.gold_alarm is not None:
            return "over-optimised"
        if self.gold is None or self.gold.by.low is None:
            return "unknown"
        if self.gold.verb == "rose":
            return "improved"
        if self.gold.verb == "fell":
            return "worse"
        return "level"

    def _change(self, key: str, name: str | None) -> Change | None:
        """The change of a metric, with the interval that the watch has under `name`, if any."""
        curve = self.curve(f"validation/{key}")
        if len(curve) < 2:
            return None
        first = next(iter(curve.values()))
        last_step, last = list(curve.items())[-1]
        if name is None:
            return Change(first, last, Metric("change", last - first))
        # The watch pairs both ends by prompt, which makes the interval narrower.
        value = self.curve(f"watch/{name}_change").get(last_step)
        error = self.curve(f"watch/{name}_change_error").get(last_step)
        if value is None or error is None:
            return Change(first, last, Metric("change", last - first))
        half = Z95 * error
        return Change(first, last, Metric("change", value, value - half, value + half))
