"""`RLRun`: what a run of RL has left in its log folder, as the report reads it.

    run = RLRun.read("no KL", Path("results/hacked/logs"))
    run.curve("validation/gold_reward").values          # [0.31, 0.42, ...] at its steps
    run.setting("loss_fn.reference_policy_kl_penalty")

Read are `metrics.jsonl`, and where they are there `samples.jsonl`, `alarms.json` and the resolved `config.yaml`. Any
metric may be absent, at some steps or at all; values that are not finite are left out and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from treeward.config.load import read_yaml
from treeward.errors import DataError
from treeward.rl.watch import ALARMS_FILE, Alarm, read_alarms
from treeward.training.tracking import read_metrics

__all__ = ["SAMPLES_FILE", "SILENCE", "Curve", "RLRun"]

SAMPLES_FILE = "samples.jsonl"
SILENCE = "train/groups_without_signal"
"""The metric that says in which share of a step's groups no two completions had different rewards."""
_MOSTLY = 0.9
_OF_REWARDS = ("env.", "grpo.environments", "grpo.reward_scaling.", "grpo.reward_shaping.", "grpo.truncat")


@dataclass(frozen=True, slots=True)
class Curve:
    """The finite values of one metric at ascending steps; `num_missing`: steps at which it was not finite."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    num_missing: int = 0

    def __bool__(self) -> bool:
        return bool(self.steps)

    def at(self, step: int) -> float | None:
        """The value at `step`, None where there is none."""
        return dict(zip(self.steps, self.values, strict=True)).get(step)

    def until(self, step: int) -> Self:
        """The values up to `step`, with it."""
        count = sum(one <= step for one in self.steps)
        return replace(self, steps=self.steps[:count], values=self.values[:count])

    def latest(self, step: int) -> float | None:
        """The last value until `step`, None where there is none."""
        return next((v for s, v in zip(reversed(self.steps), reversed(self.values), strict=True) if s <= step), None)


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
        folder = Path(log_dir)
        metrics, samples, alarms, config = (
            folder / file for file in ("metrics.jsonl", SAMPLES_FILE, ALARMS_FILE, "config.yaml")
        )
        steps: dict[int, dict[str, float]] = {}
        for record in read_metrics(metrics) if metrics.exists() else ():
            known = {key: value for key, value in record.items() if key not in ("step", "time") and _is_number(value)}
            steps.setdefault(record["step"], {}).update(known)
        if not steps:
            raise DataError(
                "there are no metrics of a run here",
                where=str(metrics),
                need="the metrics.jsonl that `treeward grpo` writes into logger.log_dir",
                fix="give the run's log folder, or wait for its first step",
            )
        # The reader of metrics knows what a killed run leaves behind, whatever else is in a line beside its step.
        lines = [_checked(line, samples) for line in read_metrics(samples)] if samples.exists() else []
        return cls(
            name,
            dict(sorted(steps.items())),
            tuple(sorted(lines, key=lambda line: int(line["step"]))),
            tuple(read_alarms(alarms)) if alarms.exists() else (),
            read_yaml(config) if config.exists() else {},
        )

    @property
    def last_step(self) -> int:
        return max(self.steps)

    def curve(self, *keys: str) -> Curve:
        """The first of the metrics `keys` that has a finite value anywhere."""
        for key in keys:
            found = [(step, row[key]) for step, row in self.steps.items() if key in row]
            finite = [(step, value) for step, value in found if math.isfinite(value)]
            if finite:
                steps, values = zip(*finite, strict=True)
                return Curve(steps, values, len(found) - len(finite))
        return Curve()

    def proxy(self, source: Literal["validation", "train"]) -> Curve:
        """What is optimised, on a scale that stays the same over the run; in older logs that is the reward."""
        if source == "validation":
            return self.curve("validation/proxy", "validation/reward", "validation/raw_reward")
        keys = ("train/reward", "train/raw_reward")
        return self.curve(*(reversed(keys) if self.rewards_move else keys))

    @property
    def rewards_move(self) -> bool:
        """Whether running statistics moved the scale of the reward, so that the proxy is another metric."""
        proxy = self.curve("validation/proxy")
        return bool(proxy) and proxy != self.curve("validation/reward")

    @property
    def has_gold(self) -> bool:
        """Whether a gold reward was configured, or logged."""
        return self.setting("grpo.gold_environment") is not None or bool(self._gold())

    @property
    def gold_failed(self) -> bool:
        """Whether a gold reward was configured, and gave no value at any step."""
        return self.has_gold and not self._gold()

    def _gold(self) -> Curve:
        return self.curve("validation/gold_reward", "train/gold_reward")

    @property
    def silent_steps(self) -> tuple[int, ...]:
        """The steps at which no group had two completions of different reward, so that nothing was learnt from them.

        Empty where a completion is compared with the whole batch, not with its group.
        """
        of_batch = self.setting("grpo.adv_estimator.name") == "reinforce_plus_plus"
        if of_batch and self.setting("grpo.adv_estimator.minus_baseline") is False:
            return ()
        share = self.curve(SILENCE)
        return tuple(step for step, value in zip(share.steps, share.values, strict=True) if value >= 1.0)

    @property
    def is_silent(self) -> bool:
        """Whether that holds of every step."""
        return bool(self.silent_steps) and len(self.silent_steps) == len(self.curve(SILENCE).steps)

    @property
    def is_mostly_silent(self) -> bool:
        """Whether it holds of nearly every step."""
        return len(self.silent_steps) >= max(1.0, _MOSTLY * len(self.curve(SILENCE).steps))

    def reward_settings(self) -> dict[str, str]:
        """The settings from which the scale of the proxy follows, by dotted path."""
        gold = f"env.{self.setting('grpo.gold_environment')}."
        return {
            path: value
            for path, value in self.settings().items()
            if path.startswith(_OF_REWARDS) and not path.startswith(gold)
        }

    def setting(self, path: str) -> Any:
        """The value of the resolved configuration at a dotted path; None where there is none."""
        value: Any = self.config
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def settings(self) -> dict[str, str]:
        """Every value of the resolved configuration as text, by its dotted path."""
        return dict(_flat(self.config, ""))

    @property
    def gold_alarm(self) -> Alarm | None:
        """The alarm that gold falls while the proxy rises."""
        return next((alarm for alarm in self.alarms if alarm.kind == "gold_falls"), None)

    @property
    def alarm_step(self) -> int | None:
        """The step of the first alarm: that of gold, else any, else where the metrics say that one held."""
        first = self.gold_alarm or next(iter(self.alarms), None)
        if first is not None:
            return first.step
        logged = self.curve("watch/alarm")
        return next((step for step, value in zip(logged.steps, logged.values, strict=True) if value > 0), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked(line: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    prompt, completions = line.get("prompt"), line.get("completions")
    if (
        not isinstance(prompt, list)
        or not isinstance(completions, list)
        or not all(
            isinstance(completion, dict) and isinstance(completion.get("text"), str) for completion in completions
        )
        or not all(isinstance(message, dict) for message in prompt)
    ):
        raise DataError(
            "a line is not a logged sample",
            where=f"{path}, step {line['step']}",
            got=repr(dict(line)),
            need='{"step": 10, "prompt": [messages], "completions": [{"text": ..., "reward": ...}]}',
            fix="remove the line",
        )
    return line


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inside in value.items():
            yield from _flat(inside, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
