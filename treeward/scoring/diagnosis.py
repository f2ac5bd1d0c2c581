"""What the scores of golden conversations say about the program that made them: a server, another toolkit, treeward.

    check = diagnose(contract, scores_of_the_server)
    check.part, check.summary      # "activation", "a sigmoid is applied to the score"

No model is needed: the contract holds the right scores, and those that known mistakes give. A mistake is named only
where it explains every score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression
from typing import Literal, get_args

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
        "two_bos", "tokens", "every conversation begins with two BOS tokens",
        "the template writes one already: tokenize with add_special_tokens=False",
    ),
    ("no_bos", "tokens", "every conversation lacks its BOS token", "begin with the tokenizer's BOS, once"),
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


@dataclass(frozen=True, slots=True)
class Check:
    """One part: equal to the contract, different from it, or not checked. `got`, `need`, `fix`: as in errors."""

    part: Part
    state: Literal["equal", "differs", "not checked"]
    summary: str
    got: str | None = None
    need: str | None = None
    fix: str | None = None


def diagnose(
    contract: ScoringContract,
    scores: Sequence[float | None],
    *,
    dtype: Dtype = "float32",
    golden: Sequence[GoldenExample] | None = None,
) -> Check:
    """One check that explains the scores of the golden conversations, made by whatever program.

    Equal within the tolerance of `dtype`: part "weights" in state "equal". Otherwise the part is what explains them: a
    known mistake of reading or framing, a function applied to the score, rounding, or, if nothing does, the weights.
    `golden`: those that were scored, where they are not all. Raises `ValueError` for another number of scores.
    """
    examples = list(contract.golden if golden is None else golden)
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
        mistaken = [one.mistakes.get(mistake, one.score) for one in examples]
        if any(mistake in one.mistakes for one in examples) and close(got, mistaken, tolerance):
            return Check(part, "differs", summary, fix=fix)
    need = [one.score for one in examples]
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
