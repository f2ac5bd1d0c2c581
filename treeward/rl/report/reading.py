"""`RLRun`: the logs of a run of RL; `RunSummary`: its verdict, in sentences.

    run = RLRun.read("no KL", Path("results/hacked/logs"))
    run.curve("validation/gold_reward")                 # {0: 0.31, 10: 0.42, ...}: values by step
    sum_up(run).sentence(), sum_up(run).advice()

It reads `metrics.jsonl` and, if they exist, `samples.jsonl`, `alarms.json` and the resolved `config.yaml`. Any metric
may be absent, at some steps or at all; values that are not finite are ignored. A metric counts as changed only if its
95 % interval excludes 0. Intervals are paired by prompt: the watch logs them (`treeward.rl.watch`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from treeward.config.grpo import AlarmKind
from treeward.config.load import read_yaml
from treeward.errors import DataError
from treeward.evaluation.report.blocks import format_number
from treeward.evaluation.results import Metric
from treeward.rl.watch import ALARMS_FILE, Alarm, read_alarms
from treeward.training.step_file import flattened
from treeward.training.tracking import read_metrics

SAMPLES_FILE = "samples.jsonl"

Curve = Mapping[int, float]
"""The finite values of one metric, by ascending steps."""

Source = Literal["validation", "train"]

Outcome = Literal["over-optimised", "improved", "worse", "level", "unknown"]
"""The verdict by gold: `over-optimised` is an alarm of the watch; `unknown`: there is no gold, or no interval."""

_VERDICTS: dict[Outcome, str] = {
    "over-optimised": "{} exploited the reward model: gold fell while the proxy rose.",
    "improved": "{} got better by gold.",
    "worse": "{} got worse by gold.",
    "level": "{} did not change measurably by gold.",
    "unknown": "Whether {} got better cannot be said: there is no gold reward, or none with an interval.",
}
_KL, _LR = "loss_fn.reference_policy_kl_penalty", "policy.optimizer.kwargs.lr"
_NEARER = f"Hold the policy nearer to the reference: raise `{_KL}`, or lower `{_LR}`."
_ADVICE: dict[AlarmKind, str] = {
    "gold_falls": _NEARER,
    "kl_budget": _NEARER,
    "length_growth": "Completions grew with the reward: calibrate it for length (`treeward calibrate`, then "
    "`reward_shaping.length_calibration: true`) or set `reward_shaping.length_penalty`.",
    "entropy_collapse": f"Entropy collapsed: lower `{_LR}`, or raise `loss_fn.ratio_clip_max`.",
    "truncation": "Completions are cut: raise `policy.generation.max_new_tokens`, or set `grpo.overlong_filtering`.",
    "no_signal": "Completions of a group have to differ in reward: `grpo.use_dynamic_sampling: true`, prompts of other "
    "difficulty, a reward with degrees, or a higher `policy.generation.temperature`.",
}
_SIGNS: frozenset[AlarmKind] = frozenset({"kl_budget", "length_growth", "entropy_collapse"})
"""The alarms that are signs of over-optimisation, where the proxy rose."""

Z95 = 1.959964
_LONGER = 1.5


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
            # The reader of metrics drops the half line that a killed run leaves behind.
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
        value, low, high = (format_number(number, "signed") for number in (self.by.value, self.by.low, self.by.high))
        interval = "no interval was logged" if self.by.low is None else f"95% interval {low} to {high}"
        return f"{self.verb} from {format_number(self.first)} to {format_number(self.last)} ({value}, {interval})"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The numbers behind a run's verdict; None for metrics that its logs lack.

    `source`: validation or training metrics. `length`: mean tokens of a completion, first and last.
    """

    run: RLRun
    source: Source
    proxy: Change | None
    gold: Change | None
    best_step: int | None
    best_gold: float | None
    kl: float | None
    length: tuple[float, float] | None
    outcome: Outcome

    @property
    def proxy_rose(self) -> bool:
        """Whether its interval says so, or the alarm of gold, which compares with the proxy at the best gold."""
        verb = None if self.proxy is None else self.proxy.verb
        return verb == "rose" or (verb == "went" and self.outcome == "over-optimised")

    def sentence(self) -> str:
        """What happened in this run."""
        parts = ["there is one measurement, so nothing to compare."]
        if self.proxy is not None:
            changes = f"the proxy {self.proxy.course()}"
            changes = changes if self.gold is None else f"gold {self.gold.course()}; {changes}"
            at = "" if self.kl is None else f", at a KL of {format_number(self.kl)} nats"
            of = "" if self.source == "validation" else ", on training batches, as the run has no two validations"
            parts = [f"{changes}{at}{of}."]
        if self.gold is not None:
            parts.append(f"Gold was best, {format_number(self.best_gold)}, at step {self.best_step}.")
        if self.length is not None:
            first, last = (format_number(value, "integer") for value in self.length)
            parts.append(f"Completions went from {first} to {last} tokens.")
        parts += [f"**Alarm at step {alarm.step:,}:** {alarm.sentence}" for alarm in self.run.alarms]
        return " ".join([f"**{self.run.name}** ({self.run.last_step:,} steps):", *parts])

    def advice(self) -> list[str]:
        """What to do next, most useful first; empty where nothing is amiss."""
        is_broken = self.proxy is not None and self.proxy.verb == "fell" and self.outcome != "improved"
        is_exploited = self.outcome in ("over-optimised", "worse") and self.proxy_rose
        first, last = self.length or (1.0, 1.0)
        kinds = {alarm.kind for alarm in self.run.alarms} | ({"gold_falls"} if self.outcome == "worse" else set())
        kinds |= {"length_growth"} if is_exploited and last > _LONGER * first else set()
        kinds -= {"gold_falls", "kl_budget"} if is_broken else set()
        advice = []
        if is_broken:
            advice.append(f"The policy broke, as even the proxy fell: lower `{_LR}`, or raise `{_KL}`.")
        if self.outcome == "over-optimised":
            advice.append(f"Take the checkpoint nearest to step {self.best_step}, where gold was best, not the last.")
        advice += dict.fromkeys(text for kind, text in _ADVICE.items() if kind in kinds)
        if is_exploited:
            advice.append("Score with an ensemble, or train the reward model on completions of this policy.")
        if self.best_gold is None:
            advice.append("Give a gold reward (`grpo.gold_environment`), or mend the one that gives no values.")
        return advice


def sum_up(run: RLRun) -> RunSummary:
    """The numbers of one run; of training batches where it has no two validations."""
    source: Source = "validation" if len(run.curve("validation/reward")) > 1 else "train"
    gold = run.curve(f"{source}/gold_reward")
    best_step = max(gold, key=lambda step: gold[step], default=None)
    change = _change(run, gold, source, "gold")
    kl = list((run.curve(f"{source}/kl") or run.curve("train/kl")).values())
    lengths = list(run.curve(f"{source}/mean_gen_tokens_per_sample").values())
    outcome: Outcome = "unknown"
    if run.gold_alarm is not None:
        outcome = "over-optimised"
    elif change is not None and change.by.low is not None:
        outcome = "improved" if change.verb == "rose" else "worse" if change.verb == "fell" else "level"
    return RunSummary(
        run,
        source,
        proxy=_change(run, run.curve(f"{source}/reward"), source, "proxy"),
        gold=change,
        best_step=best_step,
        best_gold=None if best_step is None else gold[best_step],
        kl=kl[-1] if kl else None,
        length=(lengths[0], lengths[-1]) if len(lengths) > 1 else None,
        outcome=outcome,
    )


def opening(summaries: Sequence[RunSummary]) -> str:
    """The first sentences of the page: which runs exploited their reward model and which did not."""
    groups = {
        text: [summary for summary in summaries if summary.outcome == outcome] for outcome, text in _VERDICTS.items()
    }
    groups["There are signs of over-optimisation in {}."] = [
        summary
        for summary in summaries
        if summary.outcome == "unknown" and summary.proxy_rose and any(a.kind in _SIGNS for a in summary.run.alarms)
    ]
    sentences = []
    for text, members in groups.items():
        *names, last = [f"**{summary.run.name}**" for summary in members] or [""]
        if last:
            sentences.append(text.format(f"{', '.join(names)} and {last}" if names else last))
    return " ".join(sentences)


def _change(run: RLRun, curve: Curve, source: Source, name: str) -> Change | None:
    """The change, with the watch's interval for validations; None for fewer than two values."""
    if len(curve) < 2:
        return None
    (_, first), *_, (step, last) = curve.items()
    value, error = (run.curve(f"watch/{name}_change{end}").get(step) for end in ("", "_error"))
    if source == "train" or value is None or error is None:
        return Change(first, last, Metric("change", last - first))
    return Change(first, last, Metric("change", value, value - Z95 * error, value + Z95 * error))
