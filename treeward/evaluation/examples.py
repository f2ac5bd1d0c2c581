"""`EvalExample` and `ScoredExample`: one comparison of an evaluation, before and after it was scored.

    example = EvalExample("7", "chat", context, (chosen, rejected), ranks=(0, 1))
    scored = ScoredExample(example, scores=(1.5, 0.25), lengths=(120, 80), num_tokens=(61, 49))
    scored.outcome, scored.margin            # "right", 1.25

A row of `examples.jsonl` is one of them (`to_row`, `scored_from_row`): every number of an evaluation can be computed
again from these rows, without the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from treeward.data.preference import Message
from treeward.errors import DataError

Outcome = Literal["right", "wrong", "tie", "failed"]


@dataclass(frozen=True, slots=True)
class EvalExample:
    """A prompt with K >= 1 completions and their order.

    `id` is unique within its suite. `completions`: the messages of each. `ranks`: lower is better, equal is a tie.
    `suite_data`: JSON for the suite's own arithmetic. `where`: file and line, for errors.
    """

    id: str
    subset: str
    context: tuple[Message, ...]
    completions: tuple[tuple[Message, ...], ...]
    ranks: tuple[int, ...]
    suite_data: Mapping[str, Any] = field(default_factory=dict)
    where: str | None = None

    @property
    def conversations(self) -> list[list[Message]]:
        """The conversations to score: the context with each completion."""
        return [[*self.context, *completion] for completion in self.completions]

    @property
    def prompt_key(self) -> str:
        """The context as text: examples with the same one are dependent."""
        return json.dumps(list(self.context), sort_keys=True, default=str)


@dataclass(frozen=True, slots=True)
class ScoredExample:
    """An example with a score for each completion, None where there is none and `errors` says why.

    `lengths`: characters of each completion's last message. `num_tokens`: of each scored conversation. `heads`: the
    values of the model's heads by name, for each completion, where the example has grades of such names, or the heads
    are estimates of one score.
    """

    example: EvalExample
    scores: tuple[float | None, ...]
    lengths: tuple[int, ...]
    num_tokens: tuple[int, ...]
    errors: tuple[str | None, ...] = ()
    heads: tuple[Mapping[str, float], ...] = ()

    @property
    def failed(self) -> bool:
        """Whether a completion has no score."""
        return None in self.scores

    @property
    def is_comparable(self) -> bool:
        """Whether a pair has both scores."""
        return any(None not in (self.scores[i], self.scores[j]) for i, j in self.pairs())

    def pairs(self) -> list[tuple[int, int]]:
        """Indices (better, worse) of every pair of completions with different ranks."""
        ranks = self.example.ranks
        return [(i, j) for i, a in enumerate(ranks) for j, b in enumerate(ranks) if a < b]

    @property
    def margin(self) -> float | None:
        """The lowest score among the best-ranked completions less the highest among the others; None if not known."""
        best = min(self.example.ranks, default=0)
        known = [(s, rank == best) for s, rank in zip(self.scores, self.example.ranks, strict=True) if s is not None]
        right, wrong = ([s for s, is_best in known if is_best == side] for side in (True, False))
        return min(right) - max(wrong) if right and wrong and not self.failed else None

    @property
    def outcome(self) -> Outcome | None:
        """Whether the best-ranked completions have the highest scores; None for an example without an order."""
        margin = self.margin
        if margin is None:
            return "failed" if self.failed else None
        return "right" if margin > 0 else "tie" if margin == 0 else "wrong"


def mostly_failed(scored: Sequence[ScoredExample]) -> bool:
    """Whether most examples have no pair with both scores: what is left is no sample, and there are no accuracies."""
    failed = [one for one in scored if one.failed and not one.is_comparable]
    return 2 * len(failed) > len(scored)


def to_row(scored: ScoredExample) -> dict[str, Any]:
    """A row of `examples.jsonl`; `margin` and `outcome` are for whoever reads the file."""
    row = {"id": scored.example.id, "outcome": scored.outcome, "margin": scored.margin}
    row |= {name: getattr(scored, name) for name in _OF_SCORES} | ({"heads": scored.heads} if scored.heads else {})
    return row | {name: getattr(scored.example, name) for name in _OF_EXAMPLE}


def scored_from_row(row: Mapping[str, Any], where: str) -> ScoredExample:
    """The inverse of `to_row`. Raises `DataError` for any other row."""
    try:
        own: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
        own["completions"] = tuple(map(tuple, row["completions"]))
        example = EvalExample(**{name: own[name] for name in _OF_EXAMPLE})
        return ScoredExample(example, heads=own.get("heads", ()), **{name: own[name] for name in _OF_SCORES})
    except (KeyError, TypeError) as error:
        raise DataError(
            "this is no row of an evaluation's examples",
            where=where,
            got=repr(error),
            need="a line of examples.jsonl as `treeward eval` writes it",
        ) from error


_OF_EXAMPLE = [one.name for one in fields(EvalExample)]
_OF_SCORES = [one.name for one in fields(ScoredExample) if one.name not in ("example", "heads")]
