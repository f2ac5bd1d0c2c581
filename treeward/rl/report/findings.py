"""What a reader should know first of a run of RL, in sentences: `sum_up(run).sentence()`, `advice(summary)`.

A change is said to be one only where its 95 % interval says it. Intervals are paired by prompt: the watch logs them
(`treeward.rl.watch`); a run that was not watched has none, and then only numbers are said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from treeward.evaluation.report.blocks import format_number
from treeward.rl.report.reading import SILENCE, Curve, RLRun
from treeward.rl.watch import AlarmKind

__all__ = ["KINDS", "Change", "Outcome", "RunSummary", "advice", "opening", "scales_remark", "sum_up"]

Outcome = Literal["over-optimised", "improved", "worse", "level", "unknown"]
"""What became of gold: `over-optimised` is an alarm of the watch; `unknown` where there is no gold, or no interval."""

KINDS: dict[AlarmKind, str] = {
    "gold_falls": "gold falls while the proxy rises",
    "kl_budget": "KL is above its budget",
    "length_growth": "completions grow with the reward",
    "entropy_collapse": "entropy collapses",
    "truncation": "completions are cut",
    "no_signal": "groups carry no signal",
}
"""What each kind of alarm is, in a few words."""

_SIGNS: frozenset[AlarmKind] = frozenset({"kl_budget", "length_growth", "entropy_collapse"})
"""The alarms that are signs of over-optimisation, where the proxy rose."""

_Z95 = 1.959964
_LONGER = 1.5


@dataclass(frozen=True, slots=True)
class Change:
    """A metric from its first to its last validation, and the 95 % interval of the change, where it is known."""

    first: float
    last: float
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def verb(self) -> str:
        """What its interval allows to say."""
        if self.low is None or self.high is None:
            return "went"
        return "rose" if self.low > 0 else "fell" if self.high < 0 else "went"

    def course(self) -> str:
        """ "rose from 0.31 to 0.72"."""
        return f"{self.verb} from {format_number(self.first)} to {format_number(self.last)}"

    def size(self, of: str = "") -> str:
        """ "(+0.41, 95% interval +0.30 to +0.52)"."""
        value = f"{format_number(self.value, 'signed')}{of}"
        if self.low is None:
            return f"({value}, no interval was logged)"
        return f"({value}, 95% interval {format_number(self.low, 'signed')} to {format_number(self.high, 'signed')})"

    def cell(self) -> dict[str, Any]:
        """As a table or a headline shows it."""
        return {"value": self.value, "low": self.low, "high": self.high, "format": "signed"}


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The numbers of a run that its verdict is made of; None for what its logs do not have.

    `fall`: gold at its best validation less that at the last; no interval, as the best of many is lucky: the watch's
    alarm is what counts that. `source`: which metrics these are of, validation or training.
    """

    run: RLRun
    source: Literal["validation", "train"]
    proxy: Change | None
    gold: Change | None
    best_step: int | None
    best_gold: float | None
    fall: float | None
    kl: float | None
    length: Change | None
    outcome: Outcome

    @property
    def proxy_rose(self) -> bool:
        """Whether its interval says so, or the alarm of gold, which compares the proxy with that at the best gold."""
        if self.proxy is None or self.proxy.verb == "fell":
            return False
        return self.proxy.verb == "rose" or self.outcome == "over-optimised"

    @property
    def is_broken(self) -> bool:
        """Whether what is optimised fell measurably, and gold does not say that the policy got better."""
        return self.proxy is not None and self.proxy.verb == "fell" and self.outcome != "improved"

    @property
    def has_signs(self) -> bool:
        """Whether gold cannot tell, and an alarm is a sign of over-optimisation."""
        signs = any(alarm.kind in _SIGNS for alarm in self.run.alarms)
        return self.outcome == "unknown" and self.proxy_rose and signs

    @property
    def plain_alarms(self) -> frozenset[AlarmKind]:
        """The kinds of its alarms that are no signs of over-optimisation and that nothing else tells."""
        kinds = {alarm.kind for alarm in self.run.alarms}
        told = (_SIGNS if self.has_signs else frozenset()) | ({"no_signal"} if self.run.is_silent else set())
        return frozenset(kinds - told)

    @property
    def why_unknown(self) -> str:
        """Why gold does not say whether the policy got better."""
        if self.gold is not None:
            return "how much of its gold is noise was not logged"
        if not self.run.has_gold:
            return "there is no gold reward"
        if self.run.gold_failed:
            return "the gold reward gave no value"
        return "the gold reward gave too few values to compare"

    def sentence(self) -> str:
        """What happened in this run."""
        return " ".join([f"**{self.run.name}** ({self.run.last_step:,} steps):", *self._parts()])

    def _parts(self) -> list[str]:
        if self.proxy is None:
            compared = ["there is one measurement, so nothing to compare."]
            return [*compared, self._silence()] if self.run.is_mostly_silent else compared
        changes = f"the proxy {self.proxy.course()} {self.proxy.size()}"
        if self.gold is not None:
            changes = f"{self._course_of_gold(self.gold)}; the proxy {self.proxy.course()}"
        at = "" if self.kl is None else f", at a KL of {format_number(self.kl)} nats"
        of = "" if self.source == "validation" else ", on training batches, as the run has no two validations"
        parts = [f"{changes}{at}{of}."]
        if self.run.rewards_move:
            parts.append("The proxy is the reward before shaping: running statistics move the scale of the shaped one.")
        if self.best_step is not None and self.outcome != "over-optimised":
            parts.append(f"Gold was best, {format_number(self.best_gold)}, at step {self.best_step:,}.")
        if self.length is not None:
            first, last = (format_number(value, "integer") for value in (self.length.first, self.length.last))
            parts.append(f"Completions went from {first} to {last} tokens.")
        if self.run.is_mostly_silent:
            parts.append(self._silence())
        parts += [f"**Alarm at step {alarm.step:,}: {KINDS[alarm.kind]}.**" for alarm in self.run.alarms]
        if not self.run.alarms and self.run.alarm_step is not None:
            parts.append(f"**Alarm at step {self.run.alarm_step:,}.**")
        return parts

    def _silence(self) -> str:
        silent, known = self.run.silent_steps, self.run.curve(SILENCE).steps
        failed = any(self.run.curve("train/num_failed").at(step) for step in silent)
        why = f"all completions of a group were rewarded alike{', or their rewards failed' if failed else ''}"
        if len(silent) == len(known):
            return f"**Nothing was learnt from rewards: at every step {why}.**"
        return f"**At {len(silent):,} of {len(known):,} steps nothing was learnt from rewards: {why}.**"

    def _course_of_gold(self, gold: Change) -> str:
        if self.outcome == "over-optimised" and self.best_step is not None and self.best_gold != gold.first:
            top = f"{format_number(self.best_gold)} at step {self.best_step:,}"
            rise = _change(self.run, self.run.curve(f"{self.source}/gold_reward").until(self.best_step), "gold_change")
            verb = "went" if rise is None else rise.verb
            course = f"gold {verb} from {format_number(gold.first)} to {top}, then fell to {format_number(gold.last)}"
            return f"{course} {gold.size(' in all')}"
        return f"gold {gold.course()} {gold.size()}{', within its noise' if self.outcome == 'level' else ''}"


def sum_up(run: RLRun) -> RunSummary:
    """The numbers of one run; of training batches where it has no two validations."""
    proxy = run.proxy("validation")
    source: Literal["validation", "train"] = "validation" if len(proxy.steps) > 1 else "train"
    if source == "train":
        proxy = run.proxy("train")
    gold = run.curve(f"{source}/gold_reward")
    best = max(range(len(gold.steps)), key=lambda i: gold.values[i]) if gold else None
    best_step, best_gold = (None, None) if best is None else (gold.steps[best], gold.values[best])
    last = (gold or proxy).steps[-1] if gold or proxy else run.last_step
    watched = source == "validation"
    change = _change(run, gold, "gold_change" if watched else None)
    return RunSummary(
        run,
        source,
        _change(run, proxy, "proxy_change" if watched else None),
        change,
        best_step,
        best_gold,
        None if best_gold is None else best_gold - gold.values[-1],
        run.curve(f"{source}/kl", "train/kl").latest(last),
        _change(run, run.curve(f"{source}/mean_gen_tokens_per_sample", "train/mean_gen_tokens_per_sample"), None),
        _outcome(run, change),
    )


def opening(summaries: Sequence[RunSummary]) -> str:
    """The first sentence of the page: which runs exploited their reward model and which did not."""
    of: dict[Outcome, list[str]] = {}
    for one in summaries:
        of.setdefault(one.outcome, []).append(f"**{one.run.name}**")
    said = {
        "over-optimised": "{} exploited the reward model: gold fell while the proxy rose.",
        "improved": "{} got better by gold.",
        "worse": "{} got worse by gold.",
        "level": "{} did not change measurably by gold.",
    }
    parts = [_capital(text.format(_listed(of[outcome]))) for outcome, text in said.items() if outcome in of]
    untold = [one for one in summaries if one.outcome == "unknown"]
    silent = [one for one in untold if one.run.is_silent]
    if silent:
        alike = "at every step no group had completions that were rewarded differently"
        parts.append(f"{_names(silent)} learnt nothing from rewards: {alike}.")
    unknown = [one for one in untold if not one.run.is_silent]
    for why in dict.fromkeys(one.why_unknown for one in unknown):
        names = _names([one for one in unknown if one.why_unknown == why])
        parts.append(f"Whether {names} got better cannot be said: {why}.")
    signs = [one for one in untold if one.has_signs]
    if signs:
        parts.append(f"There are signs of over-optimisation in {_names(signs)}.")
    for kind, found in KINDS.items():
        others = [one for one in untold if kind in one.plain_alarms]
        if others:
            parts.append(f"The watch found in {_names(others)} that {found}.")
    return " ".join(parts)


def scales_remark(runs: Sequence[RLRun]) -> str:
    """That proxies are on scales of their own, where settings of the rewards differ; empty where none do."""
    settings = [run.reward_settings() for run in runs if run.config]
    if all(one == settings[0] for one in settings):
        return ""
    return "Proxies of different runs do not compare: settings of their rewards differ, and so may their scales."


def advice(summary: RunSummary) -> list[str]:
    """What to do next after this run, most useful first; empty where nothing is amiss."""
    run, kinds = summary.run, {alarm.kind for alarm in summary.run.alarms}
    found = []
    grown = summary.length is not None and summary.length.last > _LONGER * summary.length.first
    if summary.is_broken:
        found.append(
            "The policy broke, as even the proxy fell, which it is trained on: "
            f"lower `{_LR}`{_now(run, _LR)}, or raise `{_KL}`{_now(run, _KL)}."
        )
    if summary.outcome == "over-optimised":
        found.append(f"Take the checkpoint nearest to step {summary.best_step:,}, where gold was best, not the last.")
        found.append("End such runs at the alarm: `grpo.watch.stop: true`.")
    if summary.outcome in ("over-optimised", "worse") or kinds & {"kl_budget", "length_growth"}:
        if not summary.is_broken:
            found.append(f"Hold the policy nearer to the reference: raise `{_KL}`{_now(run, _KL)}.")
            found.append(f"Or go slower: lower `{_LR}`{_now(run, _LR)}.")
        if summary.proxy_rose and (grown or "length_growth" in kinds):
            found.append(
                "Completions grew with the reward: calibrate it for length (`treeward calibrate`, then "
                "`reward_shaping.length_calibration: true`) or set `reward_shaping.length_penalty`."
            )
        if summary.proxy_rose:
            found.append(
                "Score with an ensemble of reward models, or train the reward model on completions of this policy."
            )
    if "entropy_collapse" in kinds:
        found.append(f"Entropy collapsed: lower `{_LR}`{_now(run, _LR)} or raise `loss_fn.ratio_clip_max`.")
    if "truncation" in kinds:
        key = "policy.generation.max_new_tokens"
        found.append(f"Completions are cut: raise `{key}`{_now(run, key)}, or set `grpo.truncated` to mask or penalty.")
    if run.is_silent:
        key = "policy.generation.temperature"
        found.append(
            "Completions of one group have to differ in reward: prompts that are neither always nor never solved, a "
            f"reward with degrees, or a higher `{key}`{_now(run, key)}."
        )
    elif "no_signal" in kinds or run.is_mostly_silent:
        found.append("Most groups teach nothing: `grpo.use_dynamic_sampling: true`, or prompts of other difficulty.")
    if run.gold_failed:
        found.append(
            f"Find out why the gold reward, `grpo.gold_environment: {run.setting('grpo.gold_environment')}`, gave no "
            "value: these logs do not say, but the run printed it, as a warning that completions have no gold reward."
        )
    elif not run.has_gold:
        found.append("Give a gold reward (`grpo.gold_environment`): without one, signs are all that can be seen.")
    elif summary.gold is not None and summary.source == "train":
        found.append("Validate (`grpo.val_period`): gold on training batches moves with the prompts drawn.")
    elif summary.outcome == "improved" and summary.best_step == summary.run.last_step:
        found.append("Gold was at its best at the end: more steps may gain more.")
    elif summary.outcome == "level" and not summary.is_broken and not run.is_silent:
        found.append(f"Train for longer, or faster: raise `{_LR}`{_now(run, _LR)}; or validate on more prompts.")
    return found


_KL = "loss_fn.reference_policy_kl_penalty"
_LR = "policy.optimizer.kwargs.lr"


def _change(run: RLRun, curve: Curve, watched: str | None) -> Change | None:
    """`watched`: the name under which the watch logs this change and its error."""
    if len(curve.steps) < 2:
        return None
    first, last = curve.values[0], curve.values[-1]
    value, error = (run.curve(f"watch/{watched}{end}").at(curve.steps[-1]) for end in ("", "_error"))
    if watched is None or value is None or error is None:
        return Change(first, last, last - first)
    return Change(first, last, value, value - _Z95 * error, value + _Z95 * error)


def _outcome(run: RLRun, gold: Change | None) -> Outcome:
    if run.gold_alarm is not None:
        return "over-optimised"
    if gold is None or gold.low is None or gold.high is None or not math.isfinite(gold.low + gold.high):
        return "unknown"
    return "improved" if gold.low > 0 else "worse" if gold.high < 0 else "level"


def _now(run: RLRun, path: str) -> str:
    value = run.setting(path)
    return "" if value is None else f" (it was {value})"


def _names(summaries: Sequence[RunSummary]) -> str:
    return _listed([f"**{one.run.name}**" for one in summaries])


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
