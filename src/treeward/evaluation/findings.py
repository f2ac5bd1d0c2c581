"""`summarize`: every number of one model in one suite; `findings`, `verdict`: the first things to
know, in words.

    summary = summarize(suite, scored, "my-model")
    summary.result.headline, summary.length.accuracy_gap, summary.statistics.ece
    verdict(summary)        # "my-model on LLMBar: 71.0% (61.5% to 79.0%); better than ..."
    summary.is_collapsed    # whether it gives everything the same score
    findings(summary)       # a sentence each: the length bias, what a judge used

A finding is reported only where its interval supports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treeward.evaluation.diagnostics.biases import diagnose_length, diagnose_style
from treeward.evaluation.diagnostics.components import ComponentsSummary
from treeward.evaluation.diagnostics.rewrites import REWRITES
from treeward.evaluation.diagnostics.scores import reliability_of, statistics_of
from treeward.evaluation.report.intervals import interval_text
from treeward.evaluation.results import Diagnostic, Metric, ScoredExample, SuiteResult
from treeward.evaluation.suites.interface import Suite
from treeward.formatting import format_number
from treeward.scoring.score import are_equal


@dataclass(frozen=True, slots=True)
class Summary:
    """Every number of one model in one suite.

    `reliability`: bins of `statistics.reliability_curve`. `components`: of the rewards of an
    environment, as the criteria of a rubric; None of a reward model. `usage`: what this evaluation
    has used, as `num_prompt_tokens` and `seconds`, and the means of a judge's details, as
    `judge/position_bias`.
    """

    model: str
    suite: Suite
    result: SuiteResult
    statistics: Diagnostic
    length: Diagnostic
    style: Diagnostic
    examples: tuple[ScoredExample, ...]
    reliability: list[dict[str, Any]]
    perturbations: Diagnostic | None = None
    components: ComponentsSummary | None = None
    usage: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_judge(self) -> bool:
        """Whether it asked a language model."""
        return bool(self.usage.get("num_requests"))

    @property
    def title(self) -> str:
        """That of the suite."""
        return self.suite.title or self.suite.name

    @property
    def is_collapsed(self) -> bool:
        """Whether all scores are equal to rounding."""
        scores: list[float | None] = []
        for example in self.examples:
            scores += example.scores
        return are_equal(scores)

    @property
    def diagnostics(self) -> dict[str, Diagnostic]:
        """The diagnostics that were made, by their names in `results.json`, in the order of a
        report."""
        named = {
            "length": self.length,
            "style": self.style,
            "perturbations": self.perturbations,
            "statistics": self.statistics,
        }
        return {name: diagnostic for name, diagnostic in named.items() if diagnostic is not None}


def summarize(
    suite: Suite,
    examples: tuple[ScoredExample, ...],
    model: str,
    *,
    perturbations: Diagnostic | None = None,
    components: ComponentsSummary | None = None,
    usage: Mapping[str, float] | None = None,
) -> Summary:
    """The numbers of one model in one suite."""
    result = suite.summarize(examples)
    return Summary(
        model=model,
        suite=suite,
        result=result,
        statistics=statistics_of(examples, result, name=f"{model} on {suite.name}"),
        length=diagnose_length(examples),
        style=diagnose_style(examples),
        examples=examples,
        reliability=reliability_of(examples),
        perturbations=perturbations,
        components=components,
        usage=usage or {},
    )


_BETTER = "better than chance"
_WORSE = "worse than chance"
_NOT_SIGNIFICANT = "not significantly better than chance"


def verdict(summary: Summary) -> str:
    """One sentence: the headline, whether it is chance, the length bias if there is one, and how
    many pairs stay right under rewrites. Of a collapsed model it says nothing else."""
    result = summary.result
    headline = "no result"
    if result.headline.value is not None:
        headline = f"{result.headline.name} {percent(result.headline)}"
    if result.unit == "pairs" and result.headline.count not in (None, result.num_examples):
        headline += f" of {result.headline.count:,} pairs"
    if result.num_failed:
        headline += f", {result.scored}"
    parts = [headline]
    if summary.is_collapsed:
        score = format_number(summary.statistics.score_mean.value)
        parts.append(
            f"it is collapsed: it gives everything the same score, {score}, and must not be used"
        )
    else:
        parts += [_quality(summary), _robustness(summary)]
    return f"{summary.model} on {summary.title}: {'; '.join(filter(None, parts))}."


def _quality(summary: Summary) -> str:
    """Whether it is better than chance, and its length bias."""
    result = summary.result
    against_chance = standing(result, summary.suite.chance())
    likes = _likes(summary.length.numbers)
    if against_chance is None:
        return likes or ""
    if against_chance == _NOT_SIGNIFICANT:
        sentence = f"{_NOT_SIGNIFICANT} on {result.headline.count:,} {result.unit}"
    else:
        sentence = against_chance
    if likes is None:
        return sentence
    # A liking is bad news after good, and more of it after bad.
    conjunction = "but" if against_chance == _BETTER else "and"
    return f"{sentence}, {conjunction} {likes}"


def _robustness(summary: Summary) -> str:
    """How many of the rewritten pairs are right, before and after."""
    made = summary.perturbations
    if made is None or made.robust_accuracy.value is None:
        return ""
    before = percent(made.accuracy)
    after = percent(made.robust_accuracy)
    pairs = f"of {made.robust_accuracy.count:,} rewritten pairs"
    return f"{pairs} {before} are correct before and {after} stay correct after changes of style"


def findings(summary: Summary) -> tuple[str, ...]:
    """What is below the verdict, a sentence each: the length bias in numbers, the rewrite that
    costs the most pairs, the criteria that tell nothing, what a judge used, the note of the
    headline."""
    usage = usage_finding(summary.usage)
    reasons = [
        length_finding(summary.length.numbers),
        rewrite_finding(summary.perturbations),
        criteria_finding(summary.components),
        None if usage is None else f"As a judge: {usage}",
        summary.result.headline.note,
    ]
    return tuple(reason for reason in reasons if reason)


def standing(result: SuiteResult, chance: float | None) -> str | None:
    """Whether the headline is better than chance, worse, or neither; None where that is not
    known: missing scores, which count as wrong, make no model worse than chance."""
    low = result.headline.low
    high = result.headline.high
    if chance is None or low is None or high is None:
        return None
    # Even with every missing score counted as wrong.
    if low > chance:
        return _BETTER
    if result.num_failed:
        return None
    if high < chance:
        return _WORSE
    return _NOT_SIGNIFICANT


def length_finding(length: Mapping[str, Metric]) -> str | None:
    """One sentence on the length that a model likes too much; None if the interval of
    `accuracy_gap` contains 0.

    `length`: the length diagnostics by name.
    """
    gap = length["accuracy_gap"]
    likes = _likes(length)
    if likes is None or gap.value is None or gap.low is None or gap.high is None:
        return None
    # The words before it say which is the larger, so the gap and its ends have no sign.
    low, high = sorted((abs(gap.low) * 100, abs(gap.high) * 100))
    longer = percent(length["accuracy_longer_right"])
    shorter = percent(length["accuracy_shorter_right"])
    controlled = percent(length["length_controlled_accuracy"])
    return (
        f"{likes[0].upper()}{likes[1:]}: correct in {longer} of the pairs whose better completion "
        f"is the longer, in {shorter} where it is the shorter, {abs(gap.value) * 100:.1f} points "
        f"({low:.1f} to {high:.1f}) apart; length-controlled {controlled}."
    )


def rewrite_finding(perturbations: Diagnostic | None) -> str | None:
    """One sentence on the rewrite of worse completions that costs the most right pairs; None where
    none is lost."""
    if perturbations is None:
        return None
    flips = {}
    for name in REWRITES:
        key = f"{name}_rejected_flips"
        if key in perturbations.numbers:
            flips[name] = perturbations.numbers[key]
    # A rewrite that applied to no pair has no value, and costs nothing.
    worst = max(flips, key=lambda name: flips[name].value or 0.0)
    if not flips[worst].value:
        return None
    label = REWRITES[worst].label
    share = percent(flips[worst])
    return (
        f"It can be fooled: a worse completion that is rewritten ({label}) scores as high as the "
        f"better one in {share} of the {flips[worst].count:,} correct pairs."
    )


def criteria_finding(components: ComponentsSummary | None) -> str | None:
    """One sentence on the criteria of a rubric: how many tell no completions apart, and whether the
    others agree with the labels; None without criteria."""
    if components is None or not components.num_criteria:
        return None
    count = f"{components.num_criteria:,}"
    always = f"{components.num_always_met:,}"
    never = f"{components.num_never_met:,}"
    sentence = (
        f"Of {count} criteria {always} are met by all completions of their prompt and {never} by "
        "none: these tell no completions apart"
    )
    agreement = components.agreement
    if agreement.value is None:
        return f"{sentence}."
    return (
        f"{sentence}; where a criterion differs in a pair, the better completion meets it more in "
        f"{percent(agreement)} of {agreement.count:,}."
    )


def usage_finding(usage: Mapping[str, float]) -> str | None:
    """What a judge has used, and what it saw of itself; None of a scorer that says nothing."""
    parts = []
    # An environment in a judge's place may have components of a reward and ask nobody.
    if usage.get("num_requests"):
        parts.append(
            f"{usage['num_requests']:,.0f} requests, {usage['num_prompt_tokens']:,.0f} tokens read "
            f"and {usage['num_completion_tokens']:,.0f} written, {usage['seconds']:,.1f} seconds"
        )
    position_bias = usage.get("judge/position_bias")
    if position_bias is not None:
        parts.append(f"the first place is worth {position_bias:+.3f}")
    inconsistent = usage.get("judge/inconsistent")
    if inconsistent is not None:
        parts.append(f"{inconsistent:.1%} of pairs change their winner with the order")
    if not parts:
        return None
    return f"{'; '.join(parts)}."


def percent(metric: Metric) -> str:
    """A fraction with its interval, in per cent."""
    if metric.value is None:
        return "unknown"
    value, interval = interval_text(metric, "percent", with_count=False)
    return f"{value} {interval}" if interval else value


def _likes(length: Mapping[str, Metric]) -> str | None:
    gap = length["accuracy_gap"]
    if gap.low is None or gap.high is None or gap.low <= 0 <= gap.high:
        return None
    liked = "longer" if gap.low > 0 else "shorter"
    return f"it likes {liked} completions too much"
