"""The parts of a scoring contract as a table, and what golden scores say about a program.

    check = diagnose(contract, scores_of_the_server)
    check.part, check.summary      # "activation", "a sigmoid is applied to the score"

`compare_rows` makes a `Check` of a part's rows: what is expected and what is observed, on this
machine or of a server. `diagnose` needs no model: the contract holds the right scores, and those
that known mistakes give.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression
from typing import Any, Literal, NamedTuple, get_args

from treeward.errors import TreewardError
from treeward.model.contract import Dtype, GoldenExample, Mistake, ScoringContract

Part = Literal[
    "contract",
    "files",
    "template",
    "tokens",
    "read position",
    "precision",
    "activation",
    "weights",
    "spread",
]
PARTS: tuple[Part, ...] = get_args(Part)
"""What is compared, in the order in which a score is made, and last how sure it is."""


class _KnownMistake(NamedTuple):
    mistake: Mistake
    part: Part
    summary: str
    fix: str


_MISTAKES = (
    _KnownMistake(
        "read_before_end",
        "read position",
        "every score is read at the token before the last",
        "the end of turn is missing, or it is taken for padding: keep it, and pad with another "
        "token",
    ),
    _KnownMistake(
        "read_at_padding",
        "read position",
        "every score is read at the last token, which is padding to this model",
        "read at the last token that is not the padding token of config.json, as plain "
        "transformers does",
    ),
    _KnownMistake(
        "two_bos",
        "tokens",
        "every conversation begins with one BOS too many",
        "the template writes what it needs: tokenize with add_special_tokens=False",
    ),
    _KnownMistake(
        "no_bos",
        "tokens",
        "every conversation lacks a BOS",
        "begin as the template of the folder does",
    ),
)


def _sigmoid(x: float) -> float:
    if x <= -700:
        return 0.0  # exp(710) is beyond a float
    return 1 / (1 + math.exp(-x))


_FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "sigmoid": _sigmoid,
    "tanh": math.tanh,
    "softmax over one label": lambda score: 1.0,
    "change of sign": operator.neg,
}

_RAW = "ask for raw scores (use_activation: false, function_to_apply: none)"

_TELLING_SPREAD = 10
"""How many tolerances the scores on a line must spread over for the line to say something. Scores
that are level within one tolerance are within another of lines that rise by up to 4."""


class DiagnosisRow(NamedTuple):
    """One row of the table: a setting, what the contract expects and what is observed.

    `summary`: what it means that they differ; `fix`: the remedy.
    """

    name: str
    expected: Any
    observed: Any
    summary: str
    fix: str


@dataclass(frozen=True, slots=True)
class Check:
    """One part: equal to the contract, different from it, or not checked.

    `got`, `need`, `fix`: as in errors.
    """

    part: Part
    state: Literal["equal", "differs", "not checked"]
    summary: str
    got: str | None = None
    need: str | None = None
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification. `checks`: one per part, in order.

    `largest_difference`: of golden scores, None if they were not scored. `against`: the server that
    was asked, and how.
    """

    model: str
    checks: tuple[Check, ...]
    num_scores: int = 0
    largest_difference: float | None = None
    tolerance: float | None = None
    against: str | None = None

    @property
    def first_difference(self) -> Check | None:
        """The part that differs first: the cause, as far as the order can tell."""
        for check in self.checks:
            if check.state == "differs":
                return check
        return None

    @property
    def equal(self) -> bool:
        """Whether nothing differs and the scores were replayed."""
        return self.first_difference is None and self.largest_difference is not None


def compare_rows(part: Part, rows: Iterable[DiagnosisRow], summary: str) -> Check:
    """The check of a part by its rows: the first one that differs, or that all are equal.

    `summary`: of rows that are equal.
    """
    for row in rows:
        if row.observed != row.expected:
            got = f"{row.name} {row.observed}".strip()
            need = f"{row.name} {row.expected}".strip()
            return Check(part, "differs", row.summary, got, need, row.fix)
    return Check(part, "equal", summary)


def failed(part: Part, error: TreewardError) -> Check:
    """The check of a part that cannot be read."""
    summary = error.summary
    if error.field is not None:
        summary += f", field {error.field}"
    got = None
    if error.got is not None:
        got = str(error.got)
    return Check(part, "differs", summary, got, error.need, error.fix or restore("the files"))


def verification(
    model: str,
    contract: ScoringContract | None,
    checks: Sequence[Check],
    scores: Sequence[float | None],
    *,
    dtype: Dtype,
    against: str | None = None,
) -> Verification:
    """The result of the checks and the scores of the golden conversations, which may be missing.

    It has one check for each part, in order: its first difference, if it has any, or why it was not
    checked.
    """
    # A part may have several checks, as scores say something about parts that were compared too.
    by_part: dict[Part, Check] = {}
    for check in checks:
        earlier = by_part.setdefault(check.part, check)
        if check.state == "differs" and earlier.state != "differs":
            by_part[check.part] = check
    # A wrong part makes later ones look wrong too: the first in the order of a score is the cause.
    differing = [check.part for check in by_part.values() if check.state == "differs"]
    cause = min(differing, key=PARTS.index, default="missing golden scores")
    table = []
    for part in PARTS:
        unchecked = Check(part, "not checked", f"it cannot be, because of the {cause}")
        table.append(by_part.get(part, unchecked))
    if contract is None:
        return Verification(model, tuple(table))
    golden = contract.golden
    off = []
    for score, example in zip(scores, golden, strict=False):  # where one failed there are no scores
        if score is not None:
            off.append(abs(score - example.score))
    largest_difference = None
    if off and len(off) == len(golden) and all(map(math.isfinite, off)):
        largest_difference = max(off)
    return Verification(
        model,
        tuple(table),
        num_scores=len(golden),
        largest_difference=largest_difference,
        tolerance=contract.tolerance.of(dtype),
        against=against,
    )


def diagnose(
    contract: ScoringContract,
    scores: Sequence[float | None],
    *,
    dtype: Dtype = "float32",
) -> Check:
    """One check that explains the scores of the golden conversations, made by whatever program.

    Equal within the tolerance of `dtype`: part "weights" in state "equal". Otherwise the part is
    what explains every score: a known mistake, a function applied to the score, rounding, or, if
    nothing does, the weights. Raises `ValueError` for another number of scores.
    """
    examples = contract.golden
    for example, score in zip(examples, scores, strict=True):
        if score is None or not math.isfinite(score):
            return Check(
                "weights",
                "differs",
                "there is no score",
                got=f"{score} for the conversation {example.name!r}",
                need=f"{example.score:.6g}",
                fix="see why it fails, in the log of the program that scored it",
            )
    got = [float(score) for score in scores if score is not None]
    need = [example.score for example in examples]
    off = [abs(a - b) for a, b in zip(got, need, strict=True)]
    tolerance = contract.tolerance.of(dtype)
    coarse = contract.tolerance.bfloat16
    if close(got, need, tolerance):
        largest = max(off, default=0.0)
        summary = f"{len(got)} scores equal, largest difference {largest:.1e}"
        return Check("weights", "equal", summary)
    # A mistake within the fine tolerance comes first, because the coarse one lets more pass. Then
    # rounding alone, and last a mistake with rounding on top.
    check = _explained(examples, got, tolerance)
    if check is None and coarse > tolerance:
        if close(got, need, coarse):
            option = "vLLM, SGLang, TEI: --dtype float32"
            check = Check(
                "precision",
                "differs",
                "the scores differ by what a coarser dtype makes of them",
                fix=f"compute in float32 ({option}), from weights that were not rounded",
            )
        else:
            check = _explained(examples, got, coarse)
            if check is not None:
                summary = f"{check.summary}, and they are computed in a coarser dtype"
                check = replace(check, summary=summary)
    if check is None:
        check = Check(
            "weights",
            "differs",
            "the scores differ, and no known mistake explains them",
            fix=f"{restore('the weights')}, unless the conversations became other tokens",
        )
    worst = off.index(max(off))
    return replace(
        check,
        got=f"{got[worst]:.6g} for the conversation {examples[worst].name!r}",
        need=f"{need[worst]:.6g} within {tolerance:.1e}",
    )


def diagnose_spreads(
    contract: ScoringContract, spreads: Sequence[float | None], *, dtype: Dtype = "float32"
) -> Check:
    """One check of the spreads of the golden conversations, of a contract that has them."""
    assert contract.spread is not None
    tolerance = contract.spread.tolerance.of(dtype)
    largest = 0.0
    for example, spread in zip(contract.golden, spreads, strict=True):
        need = example.spread
        assert need is not None
        if spread is None:
            return Check(
                "spread",
                "differs",
                "the server sends no spread",
                got=f"none for the conversation {example.name!r}",
                need=f"{need:.6g}",
                fix="start it again with this folder: it has loaded one that was not calibrated",
            )
        # Written so that NaN differs.
        if not abs(spread - need) <= tolerance:
            return Check(
                "spread",
                "differs",
                "the spreads differ, and the scores do not",
                got=f"{spread} for the conversation {example.name!r}",
                need=f"{need:.6g} within {tolerance:.1e}",
                fix=restore(f"{contract.spread.file} and the weights"),
            )
        largest = max(largest, abs(spread - need))
    summary = f"{len(spreads)} spreads equal, largest difference {largest:.1e}"
    return Check("spread", "equal", summary)


def restore(what: str) -> str:
    """The remedy for files that were changed."""
    return f"restore {what} from the folder that was exported, or from where the model came from"


def close(got: Sequence[float], need: Sequence[float], tolerance: float) -> bool:
    """Whether every number is within `tolerance` of the one it should be."""
    return all(abs(a - b) <= tolerance for a, b in zip(got, need, strict=True))


def _explained(
    examples: Sequence[GoldenExample],
    got: Sequence[float],
    tolerance: float,
) -> Check | None:
    """The known mistake that explains every score within the tolerance."""
    for known in _MISTAKES:
        if all(known.mistake not in example.mistakes for example in examples):
            continue  # with this model it cannot be made, or changes nothing
        # Some conversations may be too short to make it with: their scores are right.
        mistaken = [example.mistakes.get(known.mistake, example.score) for example in examples]
        if close(got, mistaken, tolerance):
            return Check(known.part, "differs", known.summary, fix=known.fix)
    need = [example.score for example in examples]
    for name, function in _FUNCTIONS.items():
        if close(got, list(map(function, need)), tolerance):
            return Check(
                "activation",
                "differs",
                f"a {name} is applied to the score",
                fix=f"{_RAW}, and set problem_type to regression in config.json",
            )
    if len(got) < 4 or min(need) == max(need):
        return None  # any three scores are nearly on some line
    slope, offset = linear_regression(need, got)
    # A line that is nearly level lies within the tolerance of any scores that hardly differ, and
    # explains nothing.
    if slope * (max(need) - min(need)) <= _TELLING_SPREAD * tolerance:
        return None
    on_line = [slope * score + offset for score in need]
    # A scaled score has a scaled rounding.
    if not close(got, on_line, tolerance * max(1.0, slope)):
        return None
    summary = f"the scores are scaled and shifted: {slope:.4g} x score {offset:+.4g}"
    return Check("activation", "differs", summary, fix=f"{_RAW}: they are normalised or shaped")
