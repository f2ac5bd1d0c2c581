"""The parts of a scoring contract as a table, and what the scores of golden conversations say about a program.

    check = diagnose(contract, scores_of_the_server)
    check.part, check.summary      # "activation", "a sigmoid is applied to the score"

`compare` makes a `Check` of a part's rows: what is expected and what is observed, on this machine or of a server.
`diagnose` needs no model: the contract holds the right scores, and those that known mistakes give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression
from typing import Any, Literal, NamedTuple, get_args

from treeward.errors import TreewardError
from treeward.model.contract import Dtype, GoldenExample, Mistake, ScoringContract

Part = Literal["contract", "files", "template", "tokens", "read position", "precision", "activation", "weights"]
PARTS: tuple[Part, ...] = get_args(Part)
"""What is compared, in the order in which a score is made."""

_MISTAKES: tuple[tuple[Mistake, Part, str, str], ...] = (
    (
        "read_before_end", "read position", "every score is read at the token before the last",
        "the end of turn is missing, or it is taken for padding: keep it, and pad with another token",
    ),
    (
        "read_at_padding", "read position", "every score is read at the last token, which is padding to this model",
        "read at the last token that is not the padding token of config.json, as plain transformers does",
    ),
    (
        "two_bos", "tokens", "every conversation begins with one BOS too many",
        "the template writes what it needs: tokenize with add_special_tokens=False",
    ),
    ("no_bos", "tokens", "every conversation lacks a BOS", "begin as the template of the folder does"),
)  # fmt: skip

_FUNCTIONS: Mapping[str, Callable[[float], float]] = {
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)) if x > -700 else 0.0,
    "tanh": math.tanh,
    "softmax over one label": lambda x: 1.0,
    "change of sign": lambda x: -x,
}

_RAW = "ask for raw scores (use_activation: false, function_to_apply: none)"

_TELLING_SPREAD = 10
"""How many tolerances the scores on a line must spread over for the line to say something."""


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
    """One part: equal to the contract, different from it, or not checked. `got`, `need`, `fix`: as in errors."""

    part: Part
    state: Literal["equal", "differs", "not checked"]
    summary: str
    got: str | None = None
    need: str | None = None
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a verification. `checks`: one per part, in order.

    `largest_difference`: of golden scores, None if they were not scored. `against`: the server that was asked, and how.
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
        return next((check for check in self.checks if check.state == "differs"), None)

    @property
    def equal(self) -> bool:
        """Whether nothing differs and the scores were replayed."""
        return self.first_difference is None and self.largest_difference is not None


def compare_rows(part: Part, rows: Iterable[DiagnosisRow], summary: str) -> Check:
    """The check of a part by its rows: the first one that differs, or that all are equal, as `summary` puts it."""
    for name, expected, observed, meaning, fix in rows:
        if observed != expected:
            got, need = (f"{name} {value}".strip() for value in (observed, expected))
            return Check(part, "differs", meaning, got, need, fix)
    return Check(part, "equal", summary)


def failed(part: Part, error: TreewardError) -> Check:
    """The check of a part that cannot be read."""
    got = None if error.got is None else str(error.got)
    summary = error.summary if error.field is None else f"{error.summary}, field {error.field}"
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

    It has one check for each part, in order: its first difference, if it has any, or why it was not checked.
    """
    differences = [check for check in checks if check.state == "differs"]
    by_part = {check.part: check for check in reversed([*differences, *checks])}
    cause = min((check.part for check in differences), key=PARTS.index, default="missing golden scores")
    why = f"it cannot be, because of the {cause}"
    table = tuple(by_part.get(part, Check(part, "not checked", why)) for part in PARTS)
    if contract is None:
        return Verification(model, table)
    golden = contract.golden
    off = [abs(score - example.score) for score, example in zip(scores, golden, strict=False) if score is not None]
    is_complete = bool(off) and len(off) == len(golden) and all(map(math.isfinite, off))
    return Verification(
        model,
        table,
        num_scores=len(golden),
        largest_difference=max(off) if is_complete else None,
        tolerance=contract.tolerance.of(dtype),
        against=against,
    )


def diagnose(contract: ScoringContract, scores: Sequence[float | None], *, dtype: Dtype = "float32") -> Check:
    """One check that explains the scores of the golden conversations, made by whatever program.

    Equal within the tolerance of `dtype`: part "weights" in state "equal". Otherwise the part is what explains every
    score: a known mistake, a function applied to the score, rounding, or, if nothing does, the weights.
    Raises `ValueError` for another number of scores.
    """
    examples = contract.golden
    for example, score in zip(examples, scores, strict=True):
        if score is None or not math.isfinite(score):
            return Check(
                "weights", "differs", "there is no score", f"{score} for the conversation {example.name!r}",
                f"{example.score:.6g}", "see why it fails, in the log of the program that scored it",
            )  # fmt: skip
    got = [float(score) for score in scores if score is not None]
    need = [example.score for example in examples]
    tolerance, coarse = contract.tolerance.of(dtype), contract.tolerance.bfloat16
    if close(got, need, tolerance):
        largest = max((abs(a - b) for a, b in zip(got, need, strict=True)), default=0.0)
        return Check("weights", "equal", f"{len(got)} scores equal, largest difference {largest:.1e}")
    check = _explained(examples, got, tolerance)
    if check is None and coarse > tolerance:
        if close(got, need, coarse):
            summary = "the scores differ by what a coarser number format makes of them"
            fix = "compute in float32 (vLLM, SGLang, TEI: --dtype float32), from weights that were not rounded"
            check = Check("precision", "differs", summary, fix=fix)
        elif (check := _explained(examples, got, coarse)) is not None:
            check = replace(check, summary=f"{check.summary}, and they are computed in a coarser number format")
    if check is None:
        fix = f"{restore('the weights')}, unless the conversations became other tokens"
        check = Check("weights", "differs", "the scores are others, and no known mistake explains them", fix=fix)
    worst = max(range(len(got)), key=lambda i: abs(got[i] - need[i]))
    return replace(
        check,
        got=f"{got[worst]:.6g} for the conversation {examples[worst].name!r}",
        need=f"{need[worst]:.6g} within {tolerance:.1e}",
    )


def restore(what: str) -> str:
    """The remedy for files that were changed."""
    return f"restore {what} from the folder that was exported, or from where the model came from"


def close(got: Sequence[float], need: Sequence[float], tolerance: float) -> bool:
    """Whether every number is within `tolerance` of the one it should be."""
    return all(abs(a - b) <= tolerance for a, b in zip(got, need, strict=True))


def _explained(examples: Sequence[GoldenExample], got: Sequence[float], tolerance: float) -> Check | None:
    """The known mistake that explains every score within the tolerance."""
    for mistake, part, summary, fix in _MISTAKES:
        mistaken = [example.mistakes.get(mistake, example.score) for example in examples]
        if any(mistake in example.mistakes for example in examples) and close(got, mistaken, tolerance):
            return Check(part, "differs", summary, fix=fix)
    need = [example.score for example in examples]
    for name, function in _FUNCTIONS.items():
        if close(got, list(map(function, need)), tolerance):
            fix = f"{_RAW}, and set problem_type to regression in config.json"
            return Check("activation", "differs", f"a {name} is applied to the score", fix=fix)
    if len(got) < 4 or min(need) == max(need):
        return None  # any three scores are nearly on some line
    slope, offset = linear_regression(need, got)
    # A line that is nearly level lies within the tolerance of any scores that hardly differ, and explains nothing.
    is_telling = slope * (max(need) - min(need)) > _TELLING_SPREAD * tolerance
    if is_telling and close(got, [slope * x + offset for x in need], tolerance * max(1.0, slope)):
        summary = f"the scores are scaled and shifted: {slope:.4g} x score {offset:+.4g}"
        return Check("activation", "differs", summary, fix=f"{_RAW}: they are normalised or shaped")
    return None
