"""`ScoredExample`, `Metric`, `SuiteResult`, `Diagnostic`: rows and numbers of an evaluation, as its files hold them.

    example = Preference(context, (Completion(0, good), Completion(1, bad)), task_name="chat", id="7")
    scored = ScoredExample(example, scores=(1.5, 0.25), lengths=(120, 80), num_tokens=(61, 49))
    scored.outcome, scored.margin            # "right", 1.25

In an evaluation the id of a preference is unique within its suite, and `task_name` is its subset. A row of
`examples.jsonl` is a scored example (`to_row`, `scored_from_row`): `results.json` can be computed again from the rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any, Literal

from treeward.data.conversation import last_text, read_template_kwargs, template_columns
from treeward.data.preference import Completion, Preference
from treeward.errors import DataError
from treeward.scoring.score import ConversationScorer, GroupScorer


@dataclass(frozen=True, slots=True)
class Metric:
    """A number with its 95 % interval (None where there is none) and how many examples it is of.

    `value`: None where nothing could be computed. `note`: what a reader must know to read it, one sentence.
    """

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    count: int | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What one model does in one suite. `headline`: the number that the suite is known by.

    `sections` make up the headline and `subsets` the sections; `details`: further numbers of the suite, JSON.
    `num_failed`: examples without a score, which count as wrong.
    """

    suite: str
    headline: Metric
    sections: tuple[Metric, ...] = ()
    subsets: tuple[Metric, ...] = ()
    num_examples: int = 0
    num_failed: int = 0
    num_ties: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scored(self) -> str:
        """How many of the examples have a score, in words."""
        return f"{self.num_examples - self.num_failed:,} of {self.num_examples:,} scored"

    @property
    def unit(self) -> Literal["pairs", "examples"]:
        """What the headline counts: "pairs" of completions where a suite pools these, else "examples"."""
        return "pairs" if "num_pairs" in self.details else "examples"


@dataclass(frozen=True)
class Diagnostic:
    """The numbers of one diagnostic of one model, each also an attribute: `length.accuracy_gap.value`.

    `numbers`: by their names in `results.json`.
    """

    numbers: Mapping[str, Metric]

    def __getattr__(self, name: str) -> Metric:
        numbers: Mapping[str, Metric] = self.__dict__.get("numbers", {})
        if name not in numbers:
            raise AttributeError(f"the diagnostic has no number {name}; it has {', '.join(numbers)}")
        return numbers[name]


Outcome = Literal["right", "wrong", "tie", "failed"]

_NUMBERS, _OPTIONAL = ("scores", "lengths", "num_tokens", "errors"), ("heads", "judgements")


@dataclass(frozen=True, slots=True)
class ScoredExample:
    """A preference with a score for each completion, None where there is none and `errors` says why.

    `lengths`: characters of each completion's last message. `num_tokens`: of each scored conversation. `heads`: for
    each completion the values of the model's heads by name, where the example has grades of such names, or the
    components of an environment's reward. `judgements`: what a judge wrote of each completion.
    """

    example: Preference
    scores: tuple[float | None, ...]
    lengths: tuple[int, ...]
    num_tokens: tuple[int, ...]
    errors: tuple[str | None, ...] = ()
    heads: tuple[Mapping[str, float], ...] = ()
    judgements: tuple[str | None, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether a completion has no score."""
        return None in self.scores

    def pairs(self) -> list[tuple[int, int]]:
        """Indices (better, worse) of every pair of completions with different ranks."""
        ranks = self.example.ranks
        return [(i, j) for i, a in enumerate(ranks) for j, b in enumerate(ranks) if a < b]

    @property
    def margin(self) -> float | None:
        """The lowest score among the best-ranked completions less the highest among the others; None if not known."""
        scores = [score for score in self.scores if score is not None]
        if len(scores) < len(self.scores) or len(set(self.example.ranks)) < 2:
            return None
        best = min(self.example.ranks)
        ranked = list(zip(scores, self.example.ranks, strict=True))
        return min(score for score, rank in ranked if rank == best) - max(s for s, rank in ranked if rank != best)

    @property
    def outcome(self) -> Outcome | None:
        """Whether the best-ranked completions have the highest scores; None for an example without an order."""
        margin = self.margin
        if margin is None:
            return "failed" if self.failed else None
        return "right" if margin > 0 else "tie" if margin == 0 else "wrong"


def score_examples(
    scorer: ConversationScorer | GroupScorer, examples: Iterable[Preference], at_once: int
) -> Iterator[ScoredExample]:
    """The examples as a model scores them, in order; `at_once`: how many the scorer gets in one call."""
    remaining = iter(examples)
    while chunk := list(islice(remaining, at_once)):
        conversations, infos = [example.conversations for example in chunk], [example.info for example in chunk]
        if isinstance(scorer, GroupScorer):
            groups = scorer.score_groups(conversations, infos)
        else:
            flat = iter(scorer.score([chat for group in conversations for chat in group], on_error="mask"))
            groups = [list(islice(flat, len(group))) for group in conversations]
        for example, scores in zip(chunk, groups, strict=True):
            grades = {name for completion in example.completions for name in completion.all_grades}
            named = [dict(zip(score.head_names, score.heads, strict=False)) for score in scores]
            if not isinstance(scorer, GroupScorer):
                named = [{name: value for name, value in values.items() if name in grades} for values in named]
            yield ScoredExample(
                example,
                scores=tuple(score.score for score in scores),
                lengths=tuple(len(last_text(completion.messages)) for completion in example.completions),
                num_tokens=tuple(score.num_tokens for score in scores),
                errors=tuple(score.error for score in scores),
                heads=tuple(named) if any(named) else (),
                judgements=tuple(score.judgement for score in scores) if any(s.judgement for s in scores) else (),
            )


def judge_usage(scorer: ConversationScorer | GroupScorer, scored: Iterable[ScoredExample]) -> dict[str, float]:
    """What a judge has used since it was last asked, and the mean of each component of its rewards, as `position_bias`,
    over all rows, those that were kept too. Empty for a reward model."""
    if not isinstance(scorer, GroupScorer):
        return {}
    seen: dict[str, list[float]] = defaultdict(list)
    for name, value in (item for row in scored for heads in row.heads for item in heads.items()):
        seen[name].append(value)
    return scorer.usage() | {name: fmean(values) for name, values in seen.items()}


def by_subset(scored: Iterable[ScoredExample]) -> dict[str, list[ScoredExample]]:
    """The examples of each subset, subsets in order of appearance."""
    groups: dict[str, list[ScoredExample]] = {}
    for example in scored:
        groups.setdefault(example.example.task_name, []).append(example)
    return groups


def to_row(scored: ScoredExample) -> dict[str, Any]:
    """A row of `examples.jsonl`; `margin` and `outcome` are for whoever reads the file."""
    example = scored.example
    row: dict[str, Any] = {
        "id": example.id,
        "subset": example.task_name,
        "outcome": scored.outcome,
        "margin": scored.margin,
        "context": example.context,
        "completions": [completion.messages for completion in example.completions],
        "ranks": example.ranks,
        **template_columns(example.template_kwargs),
    }
    row |= {name: getattr(scored, name) for name in _NUMBERS}
    grades = [completion.all_grades for completion in example.completions]
    row |= {"grades": grades} if any(grades) else {}
    return row | {name: values for name in _OPTIONAL if (values := getattr(scored, name))}


def scored_from_row(row: Mapping[str, Any], where: str) -> ScoredExample:
    """The inverse of `to_row`. Raises `DataError` for any other row."""
    try:
        grades = [dict(item) for item in row.get("grades") or [{}] * len(row["ranks"])]
        completions = [
            Completion(rank, tuple(messages), score=items.pop("score", None), grades=items)
            for rank, messages, items in zip(row["ranks"], row["completions"], grades, strict=True)
        ]
        example = Preference(
            context=tuple(row["context"]),
            completions=tuple(completions),
            task_name=row["subset"],
            id=row["id"],
            template_kwargs=read_template_kwargs(row, where),
        )
        numbers = {name: tuple(row[name]) for name in _NUMBERS}
        optional = {name: tuple(row.get(name) or ()) for name in _OPTIONAL}
        return ScoredExample(example, **numbers, **optional)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        need = "a line of examples.jsonl as `treeward eval` writes it"
        raise DataError(
            "this is no row of an evaluation's examples", where=where, got=repr(error), need=need
        ) from error
