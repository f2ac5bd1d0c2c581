"""`ScoredExample`, `Metric`, `SuiteResult`, `Diagnostic`: rows and numbers of an evaluation, as its
files hold them.

    completions = (Completion(0, good), Completion(1, bad))
    example = Preference(context, completions, task_name="chat", id="7")
    scored = ScoredExample(example, scores=(1.5, 0.25), lengths=(120, 80), num_tokens=(61, 49))
    scored.outcome, scored.margin            # "right", 1.25

In an evaluation the id of a preference is unique within its suite, and `task_name` is its subset. A
row of `examples.jsonl` is a scored example (`to_row`, `scored_from_row`), without the `info` that
some suites read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from statistics import fmean
from typing import Any, Literal

from treeward.data.conversation import last_text, read_template_kwargs, template_columns
from treeward.data.preference import Completion, Preference
from treeward.errors import DataError
from treeward.scoring.score import ConversationScorer, GroupScorer, Score


@dataclass(frozen=True, slots=True)
class Metric:
    """A number with its 95 % interval, from `low` to `high` (None where there is none), and how
    many examples it is of.

    `value`: None where nothing could be computed. `note`: what a reader must know to read it, one
    sentence.
    """

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    count: int | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """The numbers of one model in one suite. `headline`: the number that the suite is known by.

    The headline is computed from `sections`, and these from `subsets`. `details`: further numbers
    of the suite, as JSON holds them. `num_failed`: examples without a score, which count as wrong.
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
        """What the headline counts: "pairs" of completions where a suite pools these, else
        "examples"."""
        return "pairs" if "num_pairs" in self.details else "examples"


@dataclass(frozen=True)
class Diagnostic:
    """The numbers of one diagnostic of one model, each also an attribute:
    `length.accuracy_gap.value`.

    `numbers`: by their names in `results.json`.
    """

    numbers: Mapping[str, Metric]

    def __getattr__(self, name: str) -> Metric:
        # By way of __dict__: while a copy is unpickled, `numbers` is not there yet.
        numbers: Mapping[str, Metric] = self.__dict__.get("numbers", {})
        if name not in numbers:
            raise AttributeError(
                f"the diagnostic has no number {name}; it has {', '.join(numbers)}"
            )
        return numbers[name]


Outcome = Literal["right", "wrong", "tie", "failed"]

# The fields of a scored example that are columns of its row; the optional ones if they are not
# empty, because most models have none of them.
_NUMBERS = ("scores", "lengths", "num_tokens", "errors")
_OPTIONAL = ("heads", "spreads", "judgements", "steps")


@dataclass(frozen=True, slots=True)
class ScoredExample:
    """A preference with a score for each completion, None where there is none and `errors` says
    why.

    `lengths`: characters of each completion's last message. `num_tokens`: of each scored
    conversation. `heads`: for each completion the values of the model's heads by name, where the
    example has grades of such names, or the components of an environment's reward. `spreads`: of
    each score, where the model has one. `judgements`: what a judge wrote of each completion.
    `steps`: of each completion, the probabilities that its steps are right, for a process reward
    model.
    """

    example: Preference
    scores: tuple[float | None, ...]
    lengths: tuple[int, ...]
    num_tokens: tuple[int, ...]
    errors: tuple[str | None, ...] = ()
    heads: tuple[Mapping[str, float], ...] = ()
    spreads: tuple[float | None, ...] = ()
    judgements: tuple[str | None, ...] = ()
    steps: tuple[Sequence[float], ...] = ()

    @property
    def failed(self) -> bool:
        """Whether a completion has no score."""
        return None in self.scores

    def pairs(self) -> list[tuple[int, int]]:
        """Indices (better, worse) of every pair of completions with different ranks."""
        pairs = []
        for i, rank in enumerate(self.example.ranks):
            for j, other_rank in enumerate(self.example.ranks):
                if rank < other_rank:
                    pairs.append((i, j))
        return pairs

    @property
    def margin(self) -> float | None:
        """The lowest score among the best-ranked completions less the highest among the others;
        None if not known.
        """
        if len(set(self.example.ranks)) < 2:
            return None
        sides = self.best_and_others()
        if sides is None:
            return None
        best_scores, other_scores = sides
        return min(best_scores) - max(other_scores)

    def best_and_others(self) -> tuple[list[float], list[float]] | None:
        """The scores of the best-ranked completions, and of the others; None if one is missing."""
        best = min(self.example.ranks)
        best_scores = []
        other_scores = []
        for score, rank in zip(self.scores, self.example.ranks, strict=True):
            if score is None:
                return None
            if rank == best:
                best_scores.append(score)
            else:
                other_scores.append(score)
        return best_scores, other_scores

    @property
    def outcome(self) -> Outcome | None:
        """Whether the best-ranked completions have the highest scores; None for an example without
        an order."""
        margin = self.margin
        if margin is None:
            return "failed" if self.failed else None
        if margin == 0:
            return "tie"
        return "right" if margin > 0 else "wrong"


def score_examples(
    scorer: ConversationScorer | GroupScorer, examples: Iterable[Preference], at_once: int
) -> Iterator[ScoredExample]:
    """The examples as a model scores them, in order; `at_once`: how many the scorer gets in one
    call."""
    remaining = iter(examples)
    while chunk := list(islice(remaining, at_once)):
        conversations = [example.conversations for example in chunk]
        if isinstance(scorer, GroupScorer):
            infos = [example.info for example in chunk]
            groups = scorer.score_groups(conversations, infos)
        else:
            # All groups go to the scorer in one call, and their scores are dealt out again.
            flat = list(chain.from_iterable(conversations))
            scores = iter(scorer.score(flat, on_error="mask"))
            groups = [list(islice(scores, len(group))) for group in conversations]
        for example, group in zip(chunk, groups, strict=True):
            yield _scored(example, group, keeps_all_heads=isinstance(scorer, GroupScorer))


def _scored(
    example: Preference, scores: Sequence[Score], *, keeps_all_heads: bool
) -> ScoredExample:
    """The example with its scores.

    `keeps_all_heads`: whether heads without a grade of their name are kept too. Those of an
    environment are the components of its reward, of which every one is shown.
    """
    grade_names: set[str] = set()
    lengths = []
    for completion in example.completions:
        grade_names |= completion.all_grades.keys()
        lengths.append(len(last_text(completion.messages)))
    heads = []
    for score in scores:
        heads_of_score = {}
        # Heads need not have names.
        for name, value in zip(score.head_names, score.heads, strict=False):
            if keeps_all_heads or name in grade_names:
                heads_of_score[name] = value
        heads.append(heads_of_score)
    # A row has these fields only where one of its completions has something there.
    if not any(heads):
        heads = []
    spreads = [score.spread for score in scores]
    if all(spread is None for spread in spreads):
        spreads = []
    judgements = [score.judgement for score in scores]
    if not any(judgements):
        judgements = []
    steps: list[Sequence[float]] = [score.steps or () for score in scores]
    if not any(steps):
        steps = []
    values = [score.score for score in scores]
    num_tokens = [score.num_tokens for score in scores]
    errors = [score.error for score in scores]
    return ScoredExample(
        example,
        scores=tuple(values),
        lengths=tuple(lengths),
        num_tokens=tuple(num_tokens),
        errors=tuple(errors),
        heads=tuple(heads),
        spreads=tuple(spreads),
        judgements=tuple(judgements),
        steps=tuple(steps),
    )


def judge_usage(
    scorer: ConversationScorer | GroupScorer, scored: Iterable[ScoredExample]
) -> dict[str, float]:
    """What a judge has used since it was last asked, and the mean of each detail of its rewards,
    as `judge/position_bias`. Empty for a reward model.

    The means are over all rows, those that an earlier run kept too; only the costs are of this
    run.
    """
    if not isinstance(scorer, GroupScorer):
        return {}
    values_by_name: dict[str, list[float]] = defaultdict(list)
    for row in scored:
        for heads in row.heads:
            for name, value in heads.items():
                # A criterion of a rubric may be called as a cost is, such as `seconds`.
                if "/" in name:
                    values_by_name[name].append(value)
    means = {name: fmean(values) for name, values in values_by_name.items()}
    return scorer.usage() | means


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
    for name in _NUMBERS:
        row[name] = getattr(scored, name)
    grades = [completion.all_grades for completion in example.completions]
    if any(grades):
        row["grades"] = grades
    for name in _OPTIONAL:
        values = getattr(scored, name)
        if values:
            row[name] = values
    return row


def scored_from_row(row: Mapping[str, Any], where: str) -> ScoredExample:
    """The inverse of `to_row`. Raises `DataError` for any other row."""
    try:
        ranks = row["ranks"]
        all_grades = row.get("grades") or [{}] * len(ranks)
        completions = []
        for rank, messages, grades in zip(ranks, row["completions"], all_grades, strict=True):
            # `Completion.all_grades` has the completion's score among them, by this name.
            named_grades = dict(grades)
            score = named_grades.pop("score", None)
            completions.append(Completion(rank, tuple(messages), score=score, grades=named_grades))
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
    # Any JSON may stand in a file that is called examples.jsonl: these are all its misfits.
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            "the row is not an example of an evaluation",
            where=where,
            got=repr(error),
            need="a line of examples.jsonl as `treeward eval` writes it",
        ) from error
