"""`numbers_of`, `findings_of`: what a pass over preference data says, as numbers and as sentences.

    numbers = numbers_of(data)
    for finding in findings_of(data, numbers):          # the gravest first
        finding.text, finding.why, finding.fix, finding.rows

A finding has its number, why it matters and what to do; a clean set has none.

Shapes: N rows (comparisons), P pairs of a better and a worse completion of one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from treeward.evaluation.data_check.reading import MOST_KEPT, TRAITS, DataRead
from treeward.evaluation.diagnostics.overlap import NUM_WORDS, OverlapFlag
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import wilson

Severity = Literal["error", "warning", "note"]

_SEVERITIES = ("error", "warning", "note")
_SOME, _MUCH, _TEMPLATED = 0.01, 0.1, 0.25  # shares
_IMBALANCED, _VERY_IMBALANCED = 0.55, 0.6

_LEARNT = "A model that knows only this is right as often, and a policy that is optimised against it exploits it."
_REMEMBERED = "Accuracy on them tells what is remembered, and nothing of new data."
_ADVICE = {
    "broken": ("A run ends at the first of them.", "Mend or remove them."),
    "contradictions": (
        "Both cannot be learnt: they pull the margin to 0 and cap the accuracy.",
        "Keep the label of the majority, or give both completions one rank and set data.ties=half.",
    ),
    "validation_overlap": (_REMEMBERED, "Split by prompt, not by row; remove them on one side."),
    "benchmark_overlap": (
        _REMEMBERED,
        "Remove these prompts from the data, or quote the accuracy without them (treeward eval --training-data).",
    ),
    "duplicates": (
        "Each is learnt as often as it is there, and a random split puts copies on both sides.",
        "Remove the copies.",
    ),
    "identical": (
        "They are left out. Texts that differ lose the difference in the chat template (thoughts, white space).",
        "Remove them; where the template does it, set policy.tokenizer.chat_template.",
    ),
    "empty": (
        "The score of saying nothing is learnt from few examples, and a policy may find it.",
        "Remove them, unless silence is meant as a completion.",
    ),
    "ties": ("By default they are left out.", "data.ties=half trains on them, half a win for each side."),
    "too_long": (
        "data.truncation leaves them out or cuts them, and long conversations are rarely like the others.",
        "Raise policy.max_total_sequence_length; data.truncation=truncate_left cuts prompts and leaves little out.",
    ),
    "shared_prompts": (
        "A split by rows would put one prompt on both sides, and a row for each prompt computes it once.",
        "Split by prompt. Where ranks are comparable, merge them into rows of many completions (PreferenceDataset).",
    ),
    "longer": (
        _LEARNT,
        "checkpointing.metric_name=validation-NAME/length_controlled_accuracy chooses checkpoints without it; "
        "reward_shaping.length_calibration=true takes it out of rewards.",
    ),
    "style": (
        _LEARNT,
        "Add comparisons in which the better completion does not; treeward eval says what a model made of it "
        "(style_controlled_accuracy, --perturbations).",
    ),
}
"""Of each finding why it matters, and what to do."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`text`: the number in a sentence. `count` of `of` rows, pairs or completions. `rows`: where, the first ones."""

    name: str
    severity: Severity
    count: int
    of: int
    text: str
    rows: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        """Why it matters."""
        return _ADVICE[self.name][0]

    @property
    def fix(self) -> str:
        """What to do about it."""
        return _ADVICE[self.name][1]


@dataclass(frozen=True, slots=True)
class Overlap:
    """The examples of a set `name` that the data has too. `is_benchmark`: the set is not a validation set."""

    name: str
    flags: tuple[OverlapFlag, ...]
    is_benchmark: bool

    @property
    def flagged(self) -> list[OverlapFlag]:
        """Examples with an exact or near duplicate, the exact ones first."""
        return sorted((flag for flag in self.flags if flag.is_flagged), key=lambda flag: not flag.is_exact)


def numbers_of(data: DataRead) -> dict[str, Any]:
    """Every number of a pass by its name: sums, lengths in tokens, repetitions, and a `Metric` for each trait."""
    sums, longest = data.sums, data.column("longest")
    longest = longest[longest > 0]
    median, most, maximum = np.quantile(longest, [0.5, 0.99, 1], method="lower").tolist() if len(longest) else [0] * 3
    prompts, rows_of_prompt = np.unique(data.column("prompt"), return_counts=True)
    repeated_tokens = data.column("shared").astype(np.int64)[_repeated(data.column("prompt"))].sum()
    names = (
        *("rows", "broken", "turns", "completions", "tokens", "tree_tokens", "ties", "tied_pairs"),
        *("identical", "empty"),
    )
    return {name: sums[name] for name in names} | {
        "pairs": len(data.columns["pair"]),
        "prompts": len(prompts),
        "rows_of_shared_prompts": int(rows_of_prompt[rows_of_prompt > 1].sum()),
        "saved_by_tree": _share(sums["tokens"] - sums["tree_tokens"], sums["tokens"]),
        "saved_by_grouping": _share(int(repeated_tokens), sums["tree_tokens"]),
        "duplicates": len(_repeated(data.column("digest"))),
        "contradictions": len(np.unique(data.column("row")[_contradicting(data)])),
        "tokens_median": median,
        "tokens_99_percent": most,
        "tokens_longest": maximum,
        "style": {name: _trait(data, name, len(prompts)) for name in TRAITS},
    }


def findings_of(
    data: DataRead,
    numbers: dict[str, Any],
    *,
    max_length: int | None = None,
    truncation: str = "drop",
    overlaps: Sequence[Overlap] = (),
) -> list[Finding]:
    """The findings, the gravest first. `max_length`, `truncation`: of the run that is to train on the data."""
    findings = [
        *_of_labels(data, numbers),
        *(_of_overlap(overlap) for overlap in overlaps),
        *_of_rows(data, numbers),
        *_of_length(data, max_length, truncation),
        *_of_style(numbers),
    ]
    findings = [
        replace(finding, rows=finding.rows or tuple(data.noted.get(finding.name, ())))
        for finding in findings
        if finding.count
    ]
    return sorted(findings, key=lambda finding: _SEVERITIES.index(finding.severity))


def _finding(
    name: str, count: int, of: int, what: str, verb: str, rows: Sequence[str] = (), severity: Severity | None = None
) -> Finding:
    """A sentence with the share; more than a hundredth is a warning, where `severity` says nothing else."""
    share = count / max(of, 1)
    percent = "under 0.1%" if 0 < share < 0.001 else f"{share:.1%}"
    text = f"{count:,} of {of:,} {what} ({percent}) {verb}"
    return Finding(name, severity or ("warning" if share > _SOME else "note"), count, of, text, tuple(rows))


def _of_labels(data: DataRead, numbers: dict[str, Any]) -> Iterator[Finding]:
    rows, broken = data.sums["rows"], data.sums["broken"]
    stopped = f" {', '.join(data.stopped)}: the rest could not be read." if data.stopped else ""
    places = [str(error.where) for error in data.errors]
    yield _finding("broken", broken, rows + broken, "rows", f"cannot be read.{stopped}", places, "error")
    pairs = _contradicting(data)
    in_order = data.column("row")[pairs[np.argsort(data.column("pair")[pairs], kind="stable")]]
    verb = "rank two completions one way that another ranks the other way."
    count = numbers["contradictions"]
    yield _finding("contradictions", count, rows, "comparisons", verb, _wheres(data, in_order), "warning")


def _of_overlap(overlap: Overlap) -> Finding:
    flagged, total = overlap.flagged, len(overlap.flags)
    exact = sum(flag.is_exact for flag in flagged)
    verb = f"are in the data too, {f'{exact:,}' if exact else 'none'} word for word"
    verb += f", the others in runs of {NUM_WORDS} words." if exact < len(flagged) else "."
    is_templated = len(flagged) > _TEMPLATED * total and exact < len(flagged) / 2
    verb += " So many near duplicates with few exact ones are expected of templated data." if is_templated else ""
    name = "benchmark_overlap" if overlap.is_benchmark else "validation_overlap"
    places = [flag.id for flag in flagged[:MOST_KEPT]]
    severity: Severity = "note" if is_templated and not exact else "warning"
    return _finding(name, len(flagged), total, f"examples of {overlap.name}", verb, places, severity)


def _of_rows(data: DataRead, numbers: dict[str, Any]) -> Iterator[Finding]:
    rows, completions = numbers["rows"], numbers["completions"]
    places = _wheres(data, _repeated(data.column("digest")))
    yield _finding("duplicates", numbers["duplicates"], rows, "comparisons", "are there before.", places)
    verb = "have the tokens of another of their comparison."
    yield _finding("identical", numbers["identical"], completions, "completions", verb)
    yield _finding("empty", numbers["empty"], completions, "completions", "are empty.")
    many: Severity = "warning" if numbers["ties"] > _MUCH * rows else "note"
    verb = "have one rank for all completions."
    yield _finding("ties", numbers["ties"], rows, "comparisons", verb, severity=many)
    if (saved := numbers["saved_by_grouping"]) > _SOME:
        verb = f"share a prompt with another; as one row for each prompt they take about {saved:.0%} fewer tokens."
        count = numbers["rows_of_shared_prompts"]
        yield _finding("shared_prompts", count, rows, "comparisons", verb, severity="note")


def _of_length(data: DataRead, max_length: int | None, truncation: str) -> Iterator[Finding]:
    tokens = data.column("needed" if truncation == "drop" else "longest")
    if max_length is not None:
        verb = f"do not fit in {max_length:,} tokens; {int(tokens.max(initial=0)):,} would keep all."
        yield _finding("too_long", int((tokens > max_length).sum()), len(tokens), "comparisons", verb)


def _of_style(numbers: dict[str, Any]) -> Iterator[Finding]:
    """Length alone, and all other traits in one sentence."""
    skewed = {name: metric for name, metric in numbers["style"].items() if _imbalance(metric) > _IMBALANCED}
    for finding in ("longer", "style"):
        traits = {name: metric for name, metric in skewed.items() if (name == "longer") == (finding == "longer")}
        if traits:
            strongest = max(traits.values(), key=_imbalance)
            severity: Severity = "warning" if _imbalance(strongest) > _VERY_IMBALANCED else "note"
            text = f"The {'; the '.join(_more(name, metric) for name, metric in traits.items())}."
            count = round((strongest.value or 0.0) * (strongest.count or 0))
            yield Finding(finding, severity, count, strongest.count or 0, text)


def _more(name: str, metric: Metric) -> str:
    assert metric.value is not None
    side, share = ("better", metric.value) if metric.value > 0.5 else ("worse", 1 - metric.value)
    return f"{side} completion {TRAITS[name][0]} in {share:.1%} of {metric.count:,} pairs that differ in it"


def _imbalance(metric: Metric) -> float:
    """The end nearer to a half of the interval, taken on the side of the more frequent; below a half if it is in it."""
    return 0.0 if metric.low is None or metric.high is None else max(metric.low, 1 - metric.high)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def _trait(data: DataRead, name: str, num_prompts: int) -> Metric:
    """How often the better completion has more of it, of the pairs that differ. The interval is that of as many
    independent pairs as there are prompts at most."""
    more, less = (data.sums[f"{name} in {side}"] for side in ("better", "worse"))
    count = more + less
    if not count:
        return Metric(name, None, count=0)
    independent = min(count, num_prompts)
    low, high = wilson(more / count * independent, independent)
    return Metric(name, more / count, low, high, count)


def _contradicting(data: DataRead) -> NDArray[np.int64]:
    """Indices of the pairs (P,) that are ranked both ways."""
    if not len(data.columns["pair"]):
        return np.zeros(0, np.int64)
    _, number, counts = np.unique(data.column("pair"), return_inverse=True, return_counts=True)
    first = np.bincount(number, weights=data.column("first_is_better"))[number]
    return np.flatnonzero((first > 0) & (first < counts[number]))


def _repeated(digests: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the rows (N,) that have come before."""
    is_repeated = np.ones(len(digests), dtype=bool)
    is_repeated[np.unique(digests, return_index=True)[1]] = False
    return np.flatnonzero(is_repeated)


def _wheres(data: DataRead, rows: NDArray[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(data.where(int(row)) for row in rows[: 2 * MOST_KEPT]))[:MOST_KEPT]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
