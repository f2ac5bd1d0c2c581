"""What a reader should know first of a run of RL, in sentences: `sum_up(run).sentence()`, `advice(summary)`.

A change is said to be one only where its 95 % interval says it. Intervals are paired by prompt: the watch logs them
(`treeward.rl.watch`); a run that was not watched has none, and then only numbers are said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from treeward.evaluation.report.blocks import format_number
from treeward.evaluation.results import Metric
from treeward.rl.report.reading import Curve, RLRun, Source
from treeward.rl.watch import AlarmKind

__all__ = ["KINDS", "Z95", "Change", "Outcome", "RunSummary", "advice", "opening", "scales_remark", "sum_up"]

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

_KL, _LR = "loss_fn.reference_policy_kl_penalty", "policy.optimizer.kwargs.lr"
_ADVICE: dict[AlarmKind, str] = {
    "gold_falls": f"Hold the policy nearer to the reference: raise `{_KL}`, or lower `{_LR}`.",
    "kl_budget": f"Hold the policy nearer to the reference: raise `{_KL}`, or lower `{_LR}`.",
    "length_growth": "Completions grew with the reward: calibrate it for length (`treeward calibrate`, then "
    "`reward_shaping.length_calibration: true`) or set `reward_shaping.length_penalty`.",
    "entropy_collapse": f"Entropy collapsed: lower `{_LR}`, or raise `loss_fn.ratio_clip_max`.",
    "truncation": "Completions are cut: raise `policy.generation.max_new_tokens`, or set `grpo.truncated`.",
    "no_signal": "Completions of a group have to differ in reward: `grpo.use_dynamic_sampling: true`, prompts of other "
    "difficulty, a reward with degrees, or a higher `policy.generation.temperature`.",
}

_SIGNS: frozenset[AlarmKind] = frozenset({"kl_budget", "length_growth", "entropy_collapse"})
"""The alarms that are signs of over-optimisation, where the proxy rose."""

_SAID: dict[Outcome, str] = {
    "over-optimised": "{} exploited the reward model: gold fell while the proxy rose.",
    "improved": "{} got better by gold.",
    "worse": "{} got worse by gold.",
    "level": "{} did not change measurably by gold.",
}
Z95 = 1.959964
_LONGER = 1.5
_MOSTLY = 0.9
_OF_REWARDS = ("env.", "grpo.environments", "grpo.reward_scaling.", "grpo.reward_shaping.", "grpo.truncat")


@dataclass(frozen=True, slots=True)
class Change:
    """A metric from its first to its last validation; `by`: the change, with its interval where that is known."""

    first: float
    last: float
    by: Metric

    @property
    def verb(self) -> str:
        """What its interval allows to say."""
        if self.by.low is None or self.by.high is None:
            return "went"
        return "rose" if self.by.low > 0 else "fell" if self.by.high < 0 else "went"

    def course(self) -> str:
        """ "rose from 0.31 to 0.72"."""
        return f"{self.verb} from {format_number(self.first)} to {format_number(self.last)}"

    def size(self, of: str = "") -> str:
        """ "(+0.41, 95% interval +0.30 to +0.52)"."""
        value, low, high = (format_number(one, "signed") for one in (self.by.value, self.by.low, self.by.high))
        return f"({value}{of}, {'no interval was logged' if self.by.low is None else f'95% interval {low} to {high}'})"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The numbers of a run that its verdict is made of; None for what its logs do not have.

    `source`: which metrics these are of, validation or training. `length`: tokens of a completion at first and at last.
    `num_silent`, `num_steps`: steps at which no two completions of a group differed in reward, and all.
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
    num_silent: int
    num_steps: int

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
    def is_silent(self) -> bool:
        """Whether (nearly) nothing was learnt from rewards."""
        return self.num_silent >= max(1.0, _MOSTLY * self.num_steps)

    def sentence(self) -> str:
        """What happened in this run."""
        run, parts = self.run, ["there is one measurement, so nothing to compare."]
        if self.proxy is not None:
            changes = f"the proxy {self.proxy.course()} {self.proxy.size()}"
            if self.gold is not None:
                changes = f"{self._course_of_gold(self.gold)}; the proxy {self.proxy.course()}"
            at = "" if self.kl is None else f", at a KL of {format_number(self.kl)} nats"
            of = "" if self.source == "validation" else ", on training batches, as the run has no two validations"
            parts = [f"{changes}{at}{of}."]
        if self.proxy is not None and run.rewards_move:
            parts.append("The proxy is the reward before shaping: running statistics move the scale of the shaped one.")
        if self.gold is not None and self.outcome != "over-optimised":
            parts.append(f"Gold was best, {format_number(self.best_gold)}, at step {self.best_step:,}.")
        if self.length is not None:
            first, last = (format_number(value, "integer") for value in self.length)
            parts.append(f"Completions went from {first} to {last} tokens.")
        if self.is_silent:
            alike = "all completions of a group were rewarded alike, or failed to be"
            steps = f"{self.num_silent:,} of {self.num_steps:,} steps"
            parts.append(f"**At {steps} nothing was learnt from rewards: {alike}.**")
        parts += [f"**Alarm at step {alarm.step:,}: {KINDS[alarm.kind]}.**" for alarm in run.alarms]
        return " ".join([f"**{run.name}** ({run.last_step:,} steps):", *parts])

    def _course_of_gold(self, gold: Change) -> str:
        if self.outcome == "over-optimised" and self.best_gold not in (None, gold.first):
            top = f"{format_number(self.best_gold)} at step {self.best_step:,}"
            curve = self.run.curve(f"{self.source}/gold_reward")
            until = {step: value for step, value in curve.items() if step <= (self.best_step or 0)}
            rise = _change(self.run, until, "gold_change")
            verb = "went" if rise is None else rise.verb
            course = f"gold {verb} from {format_number(gold.first)} to {top}, then fell to {format_number(gold.last)}"
            return f"{course} {gold.size(' in all')}"
        return f"gold {gold.course()} {gold.size()}{', within its noise' if self.outcome == 'level' else ''}"


def sum_up(run: RLRun) -> RunSummary:
    """The numbers of one run; of training batches where it has no two validations."""
    source: Source = "validation" if len(run.proxy("validation")) > 1 else "train"
    watched = source == "validation"
    proxy, gold = run.proxy(source), run.curve(f"{source}/gold_reward")
    best_step = max(gold, key=lambda step: gold[step], default=None)
    change = _change(run, gold, "gold_change" if watched else None)
    kl = list((run.curve(f"{source}/kl") or run.curve("train/kl")).values())
    lengths = list(run.curve(f"{source}/mean_gen_tokens_per_sample").values())
    shares = [] if _compares_with_the_batch(run) else list(run.curve("train/groups_without_signal").values())
    outcome: Outcome = "unknown"
    if run.gold_alarm is not None:
        outcome = "over-optimised"
    elif change is not None and change.by.low is not None:
        verb = change.verb
        outcome = "improved" if verb == "rose" else "worse" if verb == "fell" else "level"
    return RunSummary(
        run,
        source,
        proxy=_change(run, proxy, "proxy_change" if watched else None),
        gold=change,
        best_step=best_step,
        best_gold=None if best_step is None else gold[best_step],
        kl=kl[-1] if kl else None,
        length=(lengths[0], lengths[-1]) if len(lengths) > 1 else None,
        outcome=outcome,
        num_silent=sum(share >= 1.0 for share in shares),
        num_steps=len(shares),
    )


def opening(summaries: Sequence[RunSummary]) -> str:
    """The first sentences of the page: which runs exploited their reward model and which did not."""

    def named(chosen: Sequence[RunSummary]) -> str:
        names = [f"**{one.run.name}**" for one in chosen]
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))

    parts = []
    for outcome, text in _SAID.items():
        if chosen := [one for one in summaries if one.outcome == outcome]:
            parts.append(text.format(named(chosen)))
    unknown = [one for one in summaries if one.outcome == "unknown"]
    reasons = [
        "how much of its gold is noise was not logged" if one.gold is not None
        else "the gold reward gave too few values to compare" if one.best_gold is not None
        else "there is no gold reward" if one.run.setting("grpo.gold_environment") is None
        else "the gold reward gave no value"
        for one in unknown
    ]  # fmt: skip
    for why in dict.fromkeys(reasons):
        chosen = [one for one, own in zip(unknown, reasons, strict=True) if own == why]
        parts.append(f"Whether {named(chosen)} got better cannot be said: {why}.")
    if signs := [one for one in unknown if one.proxy_rose and any(alarm.kind in _SIGNS for alarm in one.run.alarms)]:
        parts.append(f"There are signs of over-optimisation in {named(signs)}.")
    return " ".join(parts)


def scales_remark(runs: Sequence[RLRun]) -> str:
    """That proxies are on scales of their own, where settings of the rewards differ; empty where none do."""
    scales = []
    for run in runs:
        gold = f"env.{run.setting('grpo.gold_environment')}."
        found = {path: value for path, value in run.settings().items() if path.startswith(_OF_REWARDS)}
        scales.append({path: value for path, value in found.items() if not path.startswith(gold)})
    if all(one == scales[0] for one in scales):
        return ""
    return "Proxies of different runs do not compare: settings of their rewards differ, and so may their scales."


def advice(summary: RunSummary) -> list[str]:
    """What to do next after this run, most useful first; empty where nothing is amiss."""
    run, outcome, found = summary.run, summary.outcome, []
    kinds = {alarm.kind for alarm in run.alarms} | ({"gold_falls"} if outcome == "worse" else set())
    if summary.length is not None and outcome in ("over-optimised", "worse") and summary.proxy_rose:
        kinds |= {"length_growth"} if summary.length[1] > _LONGER * summary.length[0] else set()
    kinds |= {"no_signal"} if summary.is_silent else set()
    if summary.is_broken:
        found.append(f"The policy broke, as even the proxy fell: lower `{_LR}`, or raise `{_KL}`.")
        kinds -= {"gold_falls", "kl_budget"}
    if outcome == "over-optimised":
        found.append(f"Take the checkpoint nearest to step {summary.best_step:,}, where gold was best, not the last.")
        found.append("End such runs at the alarm: `grpo.watch.stop: true`.")
    found += dict.fromkeys(text for kind, text in _ADVICE.items() if kind in kinds)
    if outcome in ("over-optimised", "worse") and summary.proxy_rose:
        found.append("Score with an ensemble, or train the reward model on completions of this policy.")
    if summary.best_gold is None and run.setting("grpo.gold_environment") is None:
        found.append("Give a gold reward (`grpo.gold_environment`): without one, signs are all that can be seen.")
    elif summary.best_gold is None:
        found.append("Find out why the gold reward gave no value: the run printed it, as a warning.")
    elif summary.source == "train":
        found.append("Validate (`grpo.val_period`): gold on training batches moves with the prompts drawn.")
    elif outcome == "improved" and summary.best_step == run.last_step:
        found.append("Gold was at its best at the end: more steps may gain more.")
    elif outcome == "level" and not summary.is_broken and not summary.is_silent:
        found.append(f"Train for longer, or faster: raise `{_LR}`; or validate on more prompts.")
    return found


def _compares_with_the_batch(run: RLRun) -> bool:
    """Whether a completion is compared with the whole batch, so that groups need no signal of their own."""
    estimator = run.setting("grpo.adv_estimator") or {}
    return estimator.get("name") == "reinforce_plus_plus" and estimator.get("minus_baseline") is False


def _change(run: RLRun, curve: Curve, watched: str | None) -> Change | None:
    """`watched`: the name under which the watch logs this change and its error."""
    if len(curve) < 2:
        return None
    (_, first), *_, (step, last) = curve.items()
    value, error = (run.curve(f"watch/{watched}{end}").get(step) for end in ("", "_error"))
    if value is None or error is None:
        return Change(first, last, Metric("change", last - first))
    return Change(first, last, Metric("change", value, value - Z95 * error, value + Z95 * error))
