"""`summarize`: every number of one model in one suite; `findings`, `verdict`: the first things to know, in words.

    summary = summarize(suite, scored, "my-model")
    summary.result.headline, summary.length.accuracy_gap, summary.statistics.ece
    verdict(summary)        # "**my-model** on LLMBar: 71.0% (61.5% to 79.0%); better than chance, but it likes ..."
    summary.is_collapsed    # whether it gives everything the same score
    findings(summary)       # that, and a list: the length bias, what a judge used

A finding is reported only where its interval supports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from treeward.evaluation.diagnostics.biases import diagnose_length, diagnose_style
from treeward.evaluation.diagnostics.perturbations import REWRITES
from treeward.evaluation.diagnostics.scores import statistics_of
from treeward.evaluation.report.blocks import format_interval
from treeward.evaluation.results import Diagnostic, Metric, ScoredExample, SuiteResult
from treeward.evaluation.suites.interface import Suite
from treeward.formatting import format_number
from treeward.scoring.score import are_equal


@dataclass(frozen=True, slots=True)
class Summary:
    """Every number of one model in one suite."""

    model: str
    suite: Suite
    result: SuiteResult
    statistics: Diagnostic
    length: Diagnostic
    style: Diagnostic
    examples: tuple[ScoredExample, ...]
    perturbations: Diagnostic | None = None

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
        """The diagnostics that were made, by their names in `results.json`, in the order of a report."""
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
        perturbations=perturbations,
    )


_BETTER, _WORSE, _NOT_TOLD = "better than chance", "worse than chance", "not told from chance"


def verdict(summary: Summary) -> str:
    """One sentence: the headline, whether it is chance, the length bias if there is one, and how many pairs stay right
    under rewrites. Of a collapsed model it says nothing else."""
    result = summary.result
    joined = _collapse(summary) or "; ".join(filter(None, (_quality(summary), _robustness(summary))))
    has_result = result.headline.value is not None
    headline = f"{result.headline.name} {percent(result.headline)}" if has_result else "no result"
    if result.unit == "pairs" and result.headline.count not in (None, result.num_examples):
        headline += f" of {result.headline.count:,} pairs"
    if result.num_failed:
        headline += f", {result.scored}"
    return f"**{summary.model}** on {summary.title}: {headline}{f'; {joined}' if joined else ''}."


def _collapse(summary: Summary) -> str | None:
    if not summary.is_collapsed:
        return None
    score = format_number(summary.statistics.score_mean.value)
    return f"it is collapsed: it gives everything the same score, {score}, and must not be used"


def _quality(summary: Summary) -> str | None:
    """Whether it is better than chance, and its length bias."""
    result = summary.result
    against_chance = standing(result, summary.suite.chance())
    said = against_chance
    if against_chance == _NOT_TOLD:
        said = f"{result.headline.count:,} {result.unit} cannot tell it from chance"
    join = ", but " if against_chance == _BETTER else ", and "
    return join.join(filter(None, (said, _likes(summary.length.numbers)))) or None


def _robustness(summary: Summary) -> str | None:
    """How many of the rewritten pairs are right, before and after."""
    made = summary.perturbations
    if made is None or made.robust_accuracy.value is None:
        return None
    robust, before = made.robust_accuracy, made.accuracy
    count = f"{robust.count:,} rewritten pairs"
    return f"of {count} {percent(before)} are right before and {percent(robust)} stay right after changes of style"


def findings(summary: Summary) -> str:
    """The verdict, and a list below: the length bias in numbers, the rewrite that costs the most pairs, what a judge
    used, the note of the headline."""
    result = summary.result
    usage = usage_finding(result.details.get("usage", {}))
    reasons = [
        length_finding(summary.length.numbers),
        rewrite_finding(summary.perturbations),
        usage and f"As a judge: {usage}",
        result.headline.note,
    ]
    listed = "\n".join(f"- {reason}" for reason in reasons if reason)
    return f"{verdict(summary)}\n\n{listed}" if listed else verdict(summary)


def standing(result: SuiteResult, chance: float | None) -> str | None:
    """ "better than chance", "worse than chance" or "not told from chance"; None where that is not known: missing
    scores, which count as wrong, make no model worse than chance."""
    low, high = result.headline.low, result.headline.high
    if chance is None or low is None or high is None:
        return None
    if low > chance:
        return _BETTER
    if result.num_failed:
        return None
    return _WORSE if high < chance else _NOT_TOLD


def length_finding(length: Mapping[str, Metric]) -> str | None:
    """One sentence on the length that a model likes too much; None if the interval of `accuracy_gap` contains 0.

    `length`: the length diagnostics by name.
    """
    gap, likes = length["accuracy_gap"], _likes(length)
    if likes is None or gap.value is None:
        return None
    # The words before it say which is the larger.
    low, high = sorted(abs(end) * 100 for end in (gap.low, gap.high) if end is not None)
    return (
        f"{likes[0].upper()}{likes[1:]}: right in {percent(length['accuracy_longer_right'])} of the pairs whose "
        f"better completion is the longer, in {percent(length['accuracy_shorter_right'])} where it is the shorter, "
        f"{abs(gap.value) * 100:.1f} points ({low:.1f} to {high:.1f}) apart; length-controlled "
        f"{percent(length['length_controlled_accuracy'])}."
    )


def rewrite_finding(perturbations: Diagnostic | None) -> str | None:
    """One sentence on the rewrite of worse completions that costs the most right pairs; None where none is lost."""
    if perturbations is None:
        return None
    flips = {name: perturbations.numbers[f"{name}_rejected_flips"] for name in REWRITES}
    name = max(flips, key=lambda name: flips[name].value or 0.0)
    if not flips[name].value:
        return None
    return (
        f"It can be fooled: a worse completion that is rewritten ({REWRITES[name].label}) scores as high as the better "
        f"one in {percent(flips[name])} of the {flips[name].count:,} right pairs."
    )


def usage_finding(usage: Mapping[str, float]) -> str | None:
    """What a judge has used, and what it saw of itself; None of a scorer that says nothing."""
    parts = []
    if usage.get("num_requests"):
        parts.append(
            f"{usage['num_requests']:,.0f} requests, {usage['num_prompt_tokens']:,.0f} tokens read and "
            f"{usage['num_completion_tokens']:,.0f} written, {usage['seconds']:,.1f} seconds"
        )
    if "position_bias" in usage:
        parts.append(f"the first place is worth {usage['position_bias']:+.3f}")
    if "inconsistent" in usage:
        parts.append(f"{usage['inconsistent']:.1%} of pairs change their winner with the order")
    return f"{'; '.join(parts)}." if parts else None


def percent(metric: Metric) -> str:
    """A fraction with its interval, in per cent."""
    if metric.value is None:
        return "unknown"
    return " ".join(filter(None, format_interval(asdict(metric), "percent", with_count=False)))


def _likes(length: Mapping[str, Metric]) -> str | None:
    gap = length["accuracy_gap"]
    if gap.low is None or gap.high is None or gap.low <= 0 <= gap.high:
        return None
    return f"it likes {'longer' if gap.low > 0 else 'shorter'} completions too much"
