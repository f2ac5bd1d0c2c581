"""What a reader should know first of a model in a suite, in words.

    verdict(summary)        # "**my-model** on LLMBar: 71.0% (61.5% to 79.0%); better than chance, but it likes ..."
    findings(summary)       # that, and a list: chance, length, worst subset, calibration, rewrites, overlap
    length_finding({metric.name: metric for metric in summary.length.metrics()})

A finding is said only where its interval says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from treeward.evaluation.diagnostics.rewrites import rewrite_label
from treeward.evaluation.results import Metric

if TYPE_CHECKING:
    from treeward.evaluation.summary import Summary

__all__ = ["findings", "length_finding", "percent", "verdict"]

_MOST_NAMED = 5
# Below these, what rewrites and calibration do is not among the first things to know.
_FOOLED, _MISCALIBRATED = 0.1, 0.02


def verdict(summary: Summary) -> str:
    """One sentence: the headline, whether it is chance, and the length bias if there is one."""
    headline = summary.result.headline
    parts = [part for part in (_standing(headline, summary.chance), _likes(summary.length.accuracy_gap)) if part]
    joined = ", but ".join(parts) if parts[:1] == ["better than chance"] else ", and ".join(parts)
    named = f"**{summary.model}** on {summary.title}: {headline.name} {percent(headline)}"
    return f"{named}; {joined}." if joined else f"{named}."


def findings(summary: Summary) -> str:
    """The verdict, and below it a list of what is behind it."""
    headline = summary.result.headline
    parts = [
        _against_chance(summary),
        length_finding({metric.name: metric for metric in summary.length.metrics()}),
        _worst_subset(summary),
        _calibration(summary),
        _rewrites(summary),
        _overlap(summary),
        " ".join(filter(None, (_note(headline), _of_scored(summary)))),
    ]
    said = "\n".join(f"- {part}" for part in parts if part)
    return f"{verdict(summary)}\n\n{said}" if said else verdict(summary)


def length_finding(length: Mapping[str, Metric]) -> str | None:
    """One sentence on which length a model likes too much, of its length diagnostics by name; None if the interval of
    `accuracy_gap` has 0 in it, or there is none."""
    likes = _likes(length["accuracy_gap"])
    if likes is None:
        return None
    return (
        f"{likes[0].upper()}{likes[1:]}: right in {percent(length['accuracy_longer_right'])} of the pairs whose "
        f"better reply is the longer, in {percent(length['accuracy_shorter_right'])} where it is the shorter; "
        f"length-controlled {percent(length['length_controlled_accuracy'])}."
    )


def percent(metric: Metric) -> str:
    """A fraction with its interval, in per cent."""
    if metric.value is None:
        return "unknown"
    if metric.low is None or metric.high is None:
        return f"{metric.value:.1%}"
    return f"{metric.value:.1%} ({metric.low:.1%} to {metric.high:.1%})"


def _standing(metric: Metric, chance: float | None) -> str | None:
    if chance is None or metric.low is None or metric.high is None:
        return None
    return f"{'better' if metric.low > chance else 'worse' if metric.high < chance else 'no better'} than chance"


def _likes(gap: Metric) -> str | None:
    if gap.low is None or gap.high is None or gap.low <= 0 <= gap.high:
        return None
    return f"it likes {'longer' if gap.low > 0 else 'shorter'} replies too much"


def _against_chance(summary: Summary) -> str | None:
    chance, standing = summary.chance, _standing(summary.result.headline, summary.chance)
    if standing is not None and standing != "better than chance":
        than, at = ("a coin", "50 %") if chance == 0.5 else ("chance", f"{chance:.0%}, which is chance")
        if standing == "worse than chance":
            return f"The interval is below {at}: it is worse than {than}."
        return f"The interval contains {at}: nothing shows that it is better than {than}."
    parts = summary.result.subsets or summary.result.sections
    low = [
        m.name for m in parts if _standing(m, summary.chances[m.name]) in ("no better than chance", "worse than chance")
    ]
    if not low or len(parts) < 2:
        return None
    more = f" and {len(low) - _MOST_NAMED} more" if len(low) > _MOST_NAMED else ""
    return f"Nothing shows that it is better than chance in {', '.join(low[:_MOST_NAMED])}{more}."


def _worst_subset(summary: Summary) -> str | None:
    worst = summary.statistics.worst_subset
    if worst.value is None or len(summary.result.subsets) < 2:
        return None
    return f"Its worst subset is {worst.note} with {percent(worst)}."


def _calibration(summary: Summary) -> str | None:
    before, after, scale = (getattr(summary.statistics, name).value for name in ("ece", "ece_fitted", "temperature"))
    if before is None or after is None or scale is None or before - after < _MISCALIBRATED:
        return None
    how = "too sure of themselves" if scale > 1 else "not sure enough"
    return f"Its margins are {how}: off by {before:.1%} as probabilities, by {after:.1%} once divided by {scale:.2f}."


def _rewrites(summary: Summary) -> str | None:
    if summary.perturbations is None:
        return None
    robust, accuracy = summary.perturbations.robust_accuracy, summary.perturbations.accuracy
    said = (
        f"Of the pairs that were rewritten {percent(accuracy)} are right, {percent(robust)} under every change of style"
    )
    fooling = max(summary.perturbations.results, key=lambda one: one.rejected_flips.low or 0.0, default=None)
    if fooling is None or (fooling.rejected_flips.low or 0.0) < _FOOLED:
        return f"{said}."
    fooled = (
        f"{rewrite_label(fooling.name)} on the worse reply turns {percent(fooling.rejected_flips)} of the right ones"
    )
    return f"{said}; {fooled}."


def _overlap(summary: Summary) -> str | None:
    overlap, without = summary.overlap, summary.without_overlap
    if overlap is None or without is None or not without.accuracy_flagged.count:
        return None
    shared = f"{overlap.flagged:.1%} of the examples have an exact or near duplicate in the training data"
    if overlap.templated:
        shared += f" ({overlap.exact:.1%} word for word; so it is with templated data)"
    of_them, others = percent(without.accuracy_flagged), percent(without.accuracy_clean)
    return f"{shared}: accuracy is {of_them} on these and {others} on the others."


def _note(headline: Metric) -> str | None:
    """What is special about these data; that prompts are shared is no finding."""
    return None if (headline.note or "").startswith("The interval is over") else headline.note


def _of_scored(summary: Summary) -> str | None:
    value = summary.result.details.get("headline_of_scored")
    return None if value is None else f"Without these examples it is {value:.1%}."
