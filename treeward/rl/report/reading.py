"""`RLRun`: what a run of RL has left in its log folder, as the report reads it.

    run = RLRun.read("no KL", Path("results/hacked/logs"))
    run.curve("validation/gold_reward")                 # {0: 0.31, 10: 0.42, ...}: values by step

Read are `metrics.jsonl`, and where they are there `samples.jsonl`, `alarms.json` and the resolved `config.yaml`. Any
metric may be absent, at some steps or at all; values that are not finite are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from treeward.config.load import read_yaml
from treeward.errors import DataError
from treeward.rl.watch import ALARMS_FILE, Alarm, read_alarms
from treeward.training.step_file import flattened
from treeward.training.tracking import read_metrics

__all__ = ["SAMPLES_FILE", "Curve", "RLRun", "Source"]

SAMPLES_FILE = "samples.jsonl"

Curve = Mapping[int, float]
"""The finite values of one metric, by ascending steps."""

Source = Literal["validation", "train"]


@dataclass(frozen=True)
class RLRun:
    """One run by `name`. `steps`: metrics by step, ascending; `samples`: lines of samples.jsonl; `config`: resolved."""

    name: str
    steps: Mapping[int, Mapping[str, float]]
    samples: tuple[Mapping[str, Any], ...] = ()
    alarms: tuple[Alarm, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, log_dir: str | Path) -> Self:
        """The run whose logs are in `log_dir`; it may be running still.

        Raises `DataError` where there are no metrics, or a line of a file is not what it should be.
        """
        metrics, samples, alarms, config = (
            Path(log_dir) / file for file in ("metrics.jsonl", SAMPLES_FILE, ALARMS_FILE, "config.yaml")
        )
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
            # The reader of metrics knows what a killed run leaves behind, whatever else is in a line beside its step.
            tuple(read_metrics(samples)) if samples.exists() else (),
            tuple(read_alarms(alarms)) if alarms.exists() else (),
            read_yaml(config) if config.exists() else {},
        )

    @property
    def last_step(self) -> int:
        return max(self.steps)

    def curve(self, key: str) -> Curve:
        """The finite values of a metric."""
        return {step: row[key] for step, row in self.steps.items() if math.isfinite(row.get(key, math.nan))}

    def proxy(self, source: Source) -> Curve:
        """What is optimised, on a scale that stays the same over the run."""
        if source == "validation":
            return self.curve("validation/proxy")
        # Running statistics move the scale of the shaped reward; the proxy is then the one before shaping.
        moves = self.curve("validation/proxy") != self.curve("validation/reward")
        return self.curve("train/raw_reward" if moves else "train/reward")

    def settings(self) -> dict[str, str]:
        """Every value of the resolved configuration as text, by its dotted path."""
        return {
            path: "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            for path, value in flattened(self.config)
        }

    @property
    def gold_alarm(self) -> Alarm | None:
        """The alarm that gold falls while the proxy rises."""
        return next((alarm for alarm in self.alarms if alarm.kind == "gold_falls"), None)

    @property
    def alarm_step(self) -> int | None:
        """The step of the alarm of gold, else of the first alarm."""
        first = self.gold_alarm or next(iter(self.alarms), None)
        return None if first is None else first.step
