"""`read_data`: one pass over preference data; `numbers_of`, `findings_of`: what it says, as numbers and as sentences.

    data = read_comparisons(streams, Renderer(tokenizer))
    for finding in findings_of(data, numbers_of(data)):          # the gravest first
        finding.text, finding.why, finding.fix, finding.rows

No text is kept: a row leaves its place, and a pair of different ranks a hash. Texts are compared by hashes of 64 bits:
among a million rows the chance of a single false match is one in 30 million.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from treeward.config.data import Ties
from treeward.data.conversation import Message, Messages, last_text
from treeward.data.datasets import RowDataset, UltraFeedback
from treeward.data.encoding import (
    EncodingCounts,
    Rules,
    contradicts_scores,
    encode_rows,
    nothing_left_error,
    num_unanswered,
    portions,
)
from treeward.data.preference import Preference
from treeward.data.rendering import Renderer
from treeward.errors import DataError
from treeward.evaluation.data_check.overlap import Overlap
from treeward.evaluation.diagnostics.biases import markdown_density
from treeward.evaluation.results import Metric
from treeward.evaluation.statistics import wilson

MOST_KEPT = 1000
"""Errors of broken rows, and rows of a finding, that are kept; all are counted."""
_MOST_CHARACTERS = 2**20
"""A longer text is read as far as this: it is beyond all limits, and to count the tokens of 50 MB took a minute."""

TRAITS: Mapping[str, tuple[str, Callable[[str], float]]] = {
    "longer": ("is the longer", len),
    "more_markdown": ("has more markdown", markdown_density),
}
"""What may tell the better completion from the worse one without being quality: by name, in words, and of a text."""


@dataclass
class DataRead:
    """What a pass over preference data leaves.

    `sums`: by name. `longest`: tokens of the longest conversation. `errors`: the first ones of broken rows. `noted`:
    the first rows of findings, by name. `stopped`: sets that could not be read to their end. `refused`: `train`'s error
    of each set of which it would keep nothing. `places`: file and line of each row. `prompts` and `comparisons`: their
    hashes, the latter with completions and ranks. `labels`: by the hash of two completions of a prompt, each row that
    ranks them, and whether the one of the smaller hash is the better.
    """

    sums: Counter[str] = field(default_factory=Counter)
    longest: int = 0
    errors: list[DataError] = field(default_factory=list)
    noted: dict[str, list[str]] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    refused: list[DataError] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    prompts: set[int] = field(default_factory=set)
    comparisons: set[int] = field(default_factory=set)
    labels: dict[int, list[tuple[int, bool]]] = field(default_factory=dict)

    def broken(self, error: DataError) -> None:
        """Count the error of a row."""
        self.sums["broken"] += 1
        if len(self.errors) < MOST_KEPT:
            self.errors.append(error)


def read_comparisons(
    streams: Sequence[RowDataset],
    renderer: Renderer,
    *,
    ties: Ties = "drop",
    max_length: int | None = None,
    on_progress: Callable[[int], object] = lambda done: None,
) -> DataRead:
    """Read every row. `renderer`: without a limit of the length. `max_length`: tokens of the longest completion that
    training keeps; None for no limit."""
    data = DataRead()
    for stream in streams:
        training = _Training(stream, ties, max_length)
        for rows in portions(rows_of([stream], data)):
            for (preference, where), record in _encoded(rows, renderer, training.rules, data):
                _add_row(data, preference, where, record)
                training.add(record)
            on_progress(data.sums["rows"])
        _note(data, "mistyped", stream.left_out)
        data.refused.extend(training.refusal())
    return data


def read_held_out(
    stream: RowDataset,
    renderer: Renderer,
    data: DataRead,
    *,
    ties: Ties = "drop",
    max_length: int | None = None,
) -> list[Preference]:
    """The sound rows of a validation set; `data` counts the broken ones, and the set if training keeps none of it."""
    training = _Training(stream, ties, max_length)
    preferences: list[Preference] = []
    for rows in portions(rows_of([stream], data)):
        for (preference, _), record in _encoded(rows, renderer, training.rules, data):
            preferences.append(preference)
            training.add(record)
    data.refused.extend(training.refusal())
    return preferences


class _Training:
    """What training would do with the rows of a set: how many it keeps, and why it drops the others."""

    def __init__(self, stream: RowDataset, ties: Ties, max_length: int | None) -> None:
        self.rules = Rules(ties, tuple(stream.config.attributes))
        self._name = stream.name
        self._max_length = max_length
        self._outcomes: Counter[str] = Counter()
        self._longest = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a row by its record of `encode_rows`."""
        self._outcomes[_outcome(record, self.rules, self._max_length)] += 1
        self._longest = max(self._longest, record["longest"])

    def refusal(self) -> list[DataError]:
        """The error that `train` ends with, if it keeps none of the rows; else nothing."""
        if "kept" in self._outcomes:
            return []
        counts = EncodingCounts(read=self._outcomes.total(), longest=self._longest, **self._outcomes)
        return [nothing_left_error(self._name, counts, self.rules.attributes)]


def _outcome(record: Mapping[str, Any], rules: Rules, max_length: int | None) -> str:
    """The outcome of a comparison in training, which leaves completions of more than `max_length` tokens out."""
    outcome: str = record["outcome"]
    if outcome != "kept" or max_length is None:
        return outcome
    fitting_ranks = []
    for ids, rank in zip(record["token_ids"], record["ranks"], strict=True):
        if len(ids) <= max_length:
            fitting_ranks.append(rank)
    num_fitting = len(set(fitting_ranks)) if rules.need_order else len(fitting_ranks)
    return outcome if num_fitting >= rules.fewest else "dropped_too_long"


def rows_of(streams: Iterable[RowDataset], data: DataRead | None = None) -> Iterator[tuple[Preference, str]]:
    """The sound rows of all sets; `data` counts the others."""
    data = DataRead() if data is None else data
    for stream in streams:
        stream.broken = data.broken
        try:
            for preference, where in stream:
                ends = tuple(replace(end, messages=_shortened(end.messages)) for end in preference.completions)
                yield replace(preference, context=_shortened(preference.context), completions=ends, id=where), where
        except DataError as error:  # of the file, not of one row
            data.broken(error)
            data.stopped.append(stream.name)


def _shortened(messages: Messages) -> Messages:
    most = _MOST_CHARACTERS
    return tuple(m | {"content": m["content"][:most]} if len(m.get("content") or "") > most else m for m in messages)


def _encoded(
    rows: Sequence[tuple[Preference, str]], renderer: Renderer, rules: Rules, data: DataRead
) -> list[tuple[tuple[Preference, str], dict[str, Any]]]:
    """The rows with their records of `encode_rows`; those that the template refuses are broken."""
    try:
        return list(zip(rows, encode_rows(rows, renderer, rules), strict=True))
    except DataError as error:
        if len(rows) > 1:
            return [encoded for row in rows for encoded in _encoded([row], renderer, rules, data)]
        data.broken(error)
        return []


def _add_row(data: DataRead, preference: Preference, where: str, record: Mapping[str, Any]) -> None:
    completions, ranks = preference.completions, preference.ranks
    prompt = key_of(preference.context, preference.template_kwargs)
    keys = [key_of(completion.messages) for completion in completions]
    texts = [last_text(completion.messages) for completion in completions]
    comparison = hash((prompt, frozenset(zip(keys, ranks, strict=True))))
    counts = {
        "ties": int(len(ranks) > 1 and len(set(ranks)) == 1),
        "empty": sum(not text.strip() for text in texts),
        "identical": record["deduplicated"] or int(record["outcome"] == "dropped_identical"),
        "duplicates": int(comparison in data.comparisons),
        "contradicted_scores": int(contradicts_scores(completions)),
        "unanswered": num_unanswered(completions),
    }
    for name, count in counts.items():
        _note(data, name, [where] * count)
    data.sums.update(
        rows=1,
        completions=len(completions),
        turns=len(preference.context),
        **{name: record[name] for name in ("tokens", "tree_tokens")},
    )
    data.comparisons.add(comparison)
    data.prompts.add(prompt if preference.context else comparison)
    data.longest = max([data.longest, *map(len, record["token_ids"])])
    _add_pairs(data, prompt, keys, texts, ranks)
    data.places.append(where)


def _note(data: DataRead, name: str, places: Sequence[str]) -> None:
    """Count a finding once for each place, and keep the first rows of it."""
    data.sums[name] += len(places)
    rows = data.noted.setdefault(name, [])
    for where in dict.fromkeys(places):
        if len(rows) < MOST_KEPT:
            rows.append(where)


def _add_pairs(data: DataRead, prompt: int, keys: Sequence[int], texts: Sequence[str], ranks: Sequence[int]) -> None:
    amounts = [[amount_of(text) for _, amount_of in TRAITS.values()] for text in texts]
    for a, b in itertools.permutations(range(len(keys)), 2):
        if ranks[a] >= ranks[b] or keys[a] == keys[b]:
            continue
        pair = hash((prompt, min(keys[a], keys[b]), max(keys[a], keys[b])))
        data.labels.setdefault(pair, []).append((len(data.places), keys[a] < keys[b]))
        for name, better, worse in zip(TRAITS, amounts[a], amounts[b], strict=True):
            if better != worse:
                data.sums[f"{name} in {'better' if better > worse else 'worse'}"] += 1


def key_of(messages: Sequence[Message], template_kwargs: Mapping[str, Any] | None = None) -> int:
    """The same number for the same messages and variables of the template, in every process."""
    parts: list[Any] = [(message["role"], message.get("content"), message.get("tool_calls")) for message in messages]
    if template_kwargs:
        parts.append(template_kwargs)
    digest = hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


Severity = Literal["error", "warning", "note"]

_SEVERITIES = ("error", "warning", "note")
_MOST_NAMED = 3
_SOME, _MUCH = 0.01, 0.1  # shares
_IMBALANCED, _VERY_IMBALANCED = 0.55, 0.6

_LEARNT = "A model that knows only this is right as often, and a policy that is optimised against it exploits it."
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
    "validation_overlap": (_REMEMBERED, "Split by prompt, not by row; remove them on one side."),
    "benchmark_overlap": (_REMEMBERED, "Remove these prompts from the data."),
    "duplicates": (
        "Each is learnt as often as it is there, and a random split puts copies on both sides.",
        "Remove the copies.",
    ),
    "identical": (
        "They are left out. Texts that differ lose the difference in the chat template (thoughts, white space).",
        "Remove them; where the template does it, set policy.tokenizer.chat_template.",
    ),
    "mistyped": (
        "The grade is a mistyped 1, as the authors of the data have confirmed; it would rank the completion best.",
        "None is needed: they are left out.",
    ),
    "empty": (
        "The score of saying nothing is learnt from few examples, and a policy may find it.",
        "Remove them, unless silence is meant as a completion.",
    ),
    "ties": ("By default they are left out.", "data.ties=half trains on them, half a win for each side."),
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
    def places(self) -> str:
        """The first rows, by file and line, in brackets; empty without rows."""
        named = ", ".join(where.rpartition("/")[2] for where in self.rows[:_MOST_NAMED])
        return f" ({named}{', ...' if len(self.rows) > _MOST_NAMED else ''})" if named else ""

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
    num_prompts = len(data.prompts)
    names = (
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
    )
    return {name: data.sums[name] for name in (*names, "duplicates")} | {
        "prompts": num_prompts,
        "contradictions": len(_contradicting(data)),
        "tokens_longest": data.longest,
        "style": {name: _trait(data, name, num_prompts) for name in TRAITS},
    }


def findings_of(
    data: DataRead,
    numbers: dict[str, Any],
    *,
    overlaps: Sequence[Overlap] = (),
    benchmarks: Collection[str] = (),
) -> list[Finding]:
    """The findings, the gravest first."""
    rows, completions = numbers["rows"], numbers["completions"]
    contradicting = [data.places[row] for row in _contradicting(data)[:MOST_KEPT]]
    ranked_both_ways = "rank two completions one way that another ranks the other way."
    as_another = "have the tokens of another of their comparison."
    num_graded = completions + numbers["mistyped"]
    mistyped = f"{UltraFeedback.left_out_because}."
    many_ties: Severity = "warning" if numbers["ties"] > _MUCH * rows else "note"
    findings = [
        broken_rows(data, rows, "rows"),
        _finding(
            "contradictions", numbers["contradictions"], rows, "comparisons", ranked_both_ways, contradicting, "warning"
        ),
        _finding(
            "contradicted_scores",
            numbers["contradicted_scores"],
            rows,
            "comparisons",
            "rank a completion above one with a higher score.",
            severity="warning",
        ),
        _finding(
            "unanswered",
            numbers["unanswered"],
            completions,
            "completions",
            "do not end with a message of the assistant.",
            severity="warning",
        ),
        *(_of_overlap(overlap, is_benchmark=overlap.name in benchmarks) for overlap in overlaps),
        _finding("duplicates", numbers["duplicates"], rows, "comparisons", "are there before."),
        _finding("identical", numbers["identical"], completions, "completions", as_another),
        _finding("mistyped", numbers["mistyped"], num_graded, "completions", mistyped, severity="note"),
        _finding("empty", numbers["empty"], completions, "completions", "are empty."),
        _finding(
            "ties", numbers["ties"], rows, "comparisons", "have one rank for all completions.", severity=many_ties
        ),
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


def broken_rows(data: DataRead, num_sound: int, what: str) -> Finding:
    """The finding of the rows that could not be read, beside so many sound ones; `what`: "rows", or of which sets."""
    broken = data.sums["broken"]
    stopped = f" {', '.join(data.stopped)}: the rest could not be read." if data.stopped else ""
    places = [str(error.where) for error in data.errors]
    return _finding("broken", broken, num_sound + broken, what, f"cannot be read.{stopped}", places, "error")


def _of_overlap(overlap: Overlap, is_benchmark: bool) -> Finding:
    flagged, total = overlap.flagged, len(overlap.flags)
    whole = sum(max(flag.prompt, flag.completion) == 1 for flag in flagged)
    verb = f"are in the data too, {whole:,} of them with a whole prompt or completion, the rest with most of its words."
    name = "benchmark_overlap" if is_benchmark else "validation_overlap"
    places = [flag.id for flag in flagged[:MOST_KEPT]]
    return _finding(name, len(flagged), total, f"examples of {overlap.name}", verb, places, "warning")


def _of_style(numbers: dict[str, Any]) -> Iterator[Finding]:
    for finding, trait in (("longer", "longer"), ("style", "more_markdown")):
        metric: Metric = numbers["style"][trait]
        if _imbalance(metric) > _IMBALANCED:
            more, count = metric.value or 0.0, metric.count or 0
            side, share = ("better", more) if more > 0.5 else ("worse", 1 - more)
            text = f"The {side} completion {TRAITS[trait][0]} in {share:.1%} of {count:,} pairs that differ in it."
            severity: Severity = "warning" if _imbalance(metric) > _VERY_IMBALANCED else "note"
            yield Finding(finding, severity, round(more * count), count, text)


def _imbalance(metric: Metric) -> float:
    """The end nearer to a half of the interval, taken on the side of the more frequent; below a half if it is in it."""
    return 0.0 if metric.low is None or metric.high is None else max(metric.low, 1 - metric.high)


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


def _contradicting(data: DataRead) -> list[int]:
    """The rows that rank two completions one way and another row the other way; those of a pair follow each other."""
    rows = [row for labels in data.labels.values() if len({side for _, side in labels}) > 1 for row, _ in labels]
    return list(dict.fromkeys(rows))
