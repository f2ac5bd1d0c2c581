"""`numbers_of`, `findings_of`: what a pass over preference data says, as numbers and as sentences.

    for finding in findings_of(data, numbers_of(data)):          # the gravest first
        finding.text, finding.why, finding.fix, finding.rows

The sentences are those of the terminal and of results.json.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from treeward.data.ratings import MISTYPED
from treeward.evaluation.data_check.overlap import Overlap
from treeward.evaluation.data_check.reading import MOST_KEPT, TRAITS, DataRead
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import wilson

Severity = Literal["error", "warning", "note"]

_SEVERITIES = ("error", "warning", "note")
_MOST_NAMED = 3  # rows of a finding on the terminal
# Shares beyond which a finding is a warning and not a note: of most findings, and of ties.
_SOME = 0.01
_MUCH = 0.1
# Shares of pairs in which the better completion has more of a trait. Beyond the first there is a
# note, and beyond the second a warning.
_IMBALANCED = 0.55
_VERY_IMBALANCED = 0.6
_SUMS = (
    "rows",
    "broken",
    "turns",
    "completions",
    "tokens",
    "tree_tokens",
    "ties",
    "identical",
    "empty",
    "mistyped",
    "contradicted_scores",
    "unanswered",
    "other_prompts",
    "duplicates",
)
"""The sums of a pass that are among its numbers."""

_LEARNT = (
    "A model that knows only this is right as often, and a policy that is optimised against it "
    "exploits it."
)
_REMEMBERED = "Accuracy on them tells what is remembered, and nothing of new data."
_ADVICE = {
    "broken": ("A run ends at the first of them.", "Mend or remove them."),
    "contradictions": (
        "Both cannot be learnt: they pull the margin to 0 and cap the accuracy.",
        "Keep the label of the majority, or give both completions one rank and set data.ties=half.",
    ),
    "contradicted_scores": (
        "The ranks count, and the scores do not, unless rm.loss.strength reads them.",
        "Look at some: either the labels are turned round, or the scores are of something else.",
    ),
    "unanswered": (
        "Its score is read after the message that it ends with.",
        "End each completion with the assistant's message that is to be judged.",
    ),
    "other_prompts": (
        "What tells the prompts apart is learnt as quality, such as a system message on one side.",
        "Give both sides the same messages before their completions, or remove these rows.",
    ),
    "validation_overlap": (_REMEMBERED, "Split by prompt, not by row; remove them on one side."),
    "benchmark_overlap": (_REMEMBERED, "Remove these prompts from the data."),
    "duplicates": (
        "Each is learnt as often as it is there, and a random split puts copies on both sides.",
        "Remove the copies.",
    ),
    "identical": (
        "They are left out. Texts that differ lose the difference in the chat template (thoughts, "
        "white space).",
        "Remove them; where the template does it, set policy.tokenizer.chat_template.",
    ),
    "mistyped": (
        "The grade is a mistyped 1, as the authors of the data have confirmed; it would rank the "
        "completion best.",
        "None is needed: they are left out.",
    ),
    "empty": (
        "The score of saying nothing is learnt from few examples, and a policy may find it.",
        "Remove them, unless silence is meant as a completion.",
    ),
    "ties": (
        "By default they are left out.",
        "data.ties=half trains on them, half a win for each side.",
    ),
    "longer": (
        _LEARNT,
        "checkpointing.metric_name=validation-NAME/length_controlled_accuracy chooses checkpoints "
        "without it; reward_shaping.length_calibration=true takes it out of rewards.",
    ),
    "style": (
        _LEARNT,
        "Add comparisons in which the better completion does not; treeward eval says what a model "
        "made of it (style_controlled_accuracy, --perturbations).",
    ),
}
"""Why each finding matters, and what to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`text`: the number in a sentence. It is `count` of `of` rows, pairs or completions. `rows`:
    the places of the first ones.
    """

    name: str
    severity: Severity
    count: int
    of: int
    text: str
    rows: tuple[str, ...] = ()

    @property
    def places(self) -> str:
        """The first rows, by file and line, in brackets; empty without rows."""
        if not self.rows:
            return ""
        named = [where.rpartition("/")[2] for where in self.rows[:_MOST_NAMED]]
        if len(self.rows) > _MOST_NAMED:
            named.append("...")
        return f" ({', '.join(named)})"

    @property
    def why(self) -> str:
        """Why it matters."""
        return _ADVICE[self.name][0]

    @property
    def fix(self) -> str:
        """What to do about it."""
        return _ADVICE[self.name][1]


def numbers_of(data: DataRead) -> dict[str, Any]:
    """Every number of a pass by its name: sums, repetitions, and a `Metric` for each trait."""
    numbers: dict[str, Any] = {name: data.sums[name] for name in _SUMS}
    numbers["prompts"] = len(data.prompts)
    numbers["contradictions"] = len(_contradicting(data))
    numbers["tokens_longest"] = data.longest
    # How often the better completion has more of a trait, of the pairs that differ in it.
    numbers["style"] = {}
    for name in TRAITS:
        num_better = data.sums[f"{name} in better"]
        count = num_better + data.sums[f"{name} in worse"]
        metric = Metric(name, None, count=0)
        if count:
            share = num_better / count
            # Pairs of one prompt are not independent: the interval is that of as many independent
            # pairs as there are prompts at most.
            independent = min(count, len(data.prompts))
            low, high = wilson(share * independent, independent)
            metric = Metric(name, share, low, high, count)
        numbers["style"][name] = metric
    return numbers


def findings_of(
    data: DataRead,
    numbers: dict[str, Any],
    *,
    overlaps: Sequence[Overlap] = (),
    benchmarks: Collection[str] = (),
) -> list[Finding]:
    """The findings, the gravest first."""
    totals = {"comparisons": numbers["rows"], "completions": numbers["completions"]}

    def counted(name: str, unit: str, verb: str, severity: Severity | None = None) -> Finding:
        return _finding(name, numbers[name], totals[unit], unit, verb, severity)

    tie_severity: Severity = "warning" if numbers["ties"] > _MUCH * numbers["rows"] else "note"
    overlap_findings = []
    for overlap in overlaps:
        overlap_findings.append(_of_overlap(overlap, is_benchmark=overlap.name in benchmarks))
    # Of one severity the order is that of this list, which `sorted` keeps.
    findings = [
        broken_rows(data, numbers["rows"], "rows"),
        counted(
            "contradictions",
            "comparisons",
            "rank two completions one way that another ranks the other way.",
            "warning",
        ),
        counted(
            "contradicted_scores",
            "comparisons",
            "rank a completion above one with a higher score.",
            "warning",
        ),
        counted(
            "unanswered", "completions", "do not end with a message of the assistant.", "warning"
        ),
        counted(
            "other_prompts", "comparisons", "have sides that answer different prompts.", "warning"
        ),
        *overlap_findings,
        counted("duplicates", "comparisons", "are there before."),
        counted("identical", "completions", "have the tokens of another of their comparison."),
        # They are left out, so they are not among the completions.
        _finding(
            "mistyped",
            numbers["mistyped"],
            numbers["completions"] + numbers["mistyped"],
            "completions",
            f"{MISTYPED}.",
            "note",
        ),
        counted("empty", "completions", "are empty."),
        counted("ties", "comparisons", "have one rank for all completions.", tie_severity),
        *_of_style(numbers),
    ]
    places = {name: tuple(rows) for name, rows in data.noted.items()}
    # A contradiction shows only with a later row, so its rows are known at the end alone.
    contradicting = _contradicting(data)[:MOST_KEPT]
    places["contradictions"] = tuple(data.places[row] for row in contradicting)
    # A finding of nothing is left out.
    with_rows = []
    for finding in findings:
        if finding.count:
            rows = finding.rows or places.get(finding.name, ())
            with_rows.append(replace(finding, rows=rows))
    return sorted(with_rows, key=lambda finding: _SEVERITIES.index(finding.severity))


def _finding(
    name: str,
    count: int,
    total: int,
    unit: str,
    verb: str,
    severity: Severity | None = None,
    rows: Sequence[str] = (),
) -> Finding:
    """The finding of a sentence with its share. Without a `severity` it is a warning from a
    hundredth on, and else a note."""
    share = count / max(total, 1)
    percent = f"{share:.1%}"
    if 0 < share < 0.001:
        percent = "under 0.1%"  # and not 0.0%
    if severity is None:
        severity = "warning" if share > _SOME else "note"
    text = f"{count:,} of {total:,} {unit} ({percent}) {verb}"
    return Finding(name, severity, count, total, text, tuple(rows))


def broken_rows(data: DataRead, num_sound: int, what: str) -> Finding:
    """The finding of the rows that could not be read, beside so many sound ones; `what`: "rows", or
    of which sets.
    """
    num_broken = data.sums["broken"]
    verb = "cannot be read."
    if data.stopped:
        verb += f" {', '.join(data.stopped)}: the rest could not be read."
    places = [str(error.where) for error in data.errors]
    return _finding("broken", num_broken, num_sound + num_broken, what, verb, "error", places)


def _of_overlap(overlap: Overlap, is_benchmark: bool) -> Finding:
    flagged = overlap.flagged
    num_whole = 0
    for flag in flagged:
        if max(flag.prompt, flag.completion) == 1:
            num_whole += 1
    # They differ in their advice: one's own data may be split again, and a benchmark may not.
    name = "benchmark_overlap" if is_benchmark else "validation_overlap"
    return _finding(
        name,
        len(flagged),
        len(overlap.flags),
        f"examples of {overlap.name}",
        f"are in the data too, {num_whole:,} of them with a whole prompt or completion, the rest "
        "with most of its words.",
        "warning",
        [flag.id for flag in flagged[:MOST_KEPT]],
    )


def _of_style(numbers: dict[str, Any]) -> Iterator[Finding]:
    for name, trait in (("longer", "longer"), ("style", "more_markdown")):
        metric: Metric = numbers["style"][trait]
        if metric.value is None or metric.low is None or metric.high is None:
            continue
        # The end of the interval that is nearer to a half, as the share of the more frequent side;
        # below a half if a half is in the interval.
        imbalance = max(metric.low, 1 - metric.high)
        if imbalance <= _IMBALANCED:
            continue
        count = metric.count or 0
        # The text names the side that has more of the trait more often.
        side = "better"
        share = metric.value
        if share <= 0.5:
            side = "worse"
            share = 1 - share
        text = (
            f"The {side} completion {TRAITS[trait][0]} in {share:.1%} of {count:,} pairs "
            "that differ in it."
        )
        severity: Severity = "warning" if imbalance > _VERY_IMBALANCED else "note"
        num_better = round(metric.value * count)
        yield Finding(name, severity, num_better, count, text)


def _contradicting(data: DataRead) -> list[int]:
    """The rows that rank two completions one way and another row the other way; those of a pair
    follow each other.
    """
    rows: dict[int, None] = {}  # in order, each once
    for labels in data.labels.values():
        is_first_better = {is_better for _, is_better in labels}
        if len(is_first_better) > 1:
            for row, _ in labels:
                rows[row] = None
    return list(rows)
