"""What the scores of golden conversations say about the program that made them: a server, another toolkit, us.

    check = diagnose(contract, scores_of_the_server)
    check.part, check.summary      # "activation", "a sigmoid is applied to the score"

No model is needed: the contract holds the right scores, and those that known mistakes give. A mistake is named only
where it explains every score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from treeward.model.contract import GoldenExample, Mistake, ScoringContract

__all__ = ["PARTS", "Check", "Part", "close", "diagnose", "restore"]

Part = Literal[
    "contract", "files", "template", "tokens", "read position", "precision", "activation", "weights"
]  # fmt: skip
PARTS: tuple[Part, ...] = (
    "contract", "files", "template", "tokens", "read position", "precision", "activation", "weights",
)  # fmt: skip
"""What is compared, in the order in which a score is made."""


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
    dtype: Literal["float32", "bfloat16"] = "float32",
    golden: Sequence[GoldenExample] | None = None,
) -> Check:
    """What the scores of the golden conversations, by whatever program, say about it; one check.

    Equal within the tolerance of `dtype`: part "weights" in state "equal". Otherwise the part is what explains them: a
    known mistake of reading or framing, a function applied to the score, rounding, or, where nothing does, the weights.
    `golden`: those that were scored, where they are not all. Raises `ValueError` for another number of scores.
    """
    examples = list(contract.golden if golden is None else golden)
    tolerance = contract.tolerance.float32 if dtype == "float32" else contract.tolerance.bfloat16
    for example, score in zip(examples, scores, strict=True):
        if score is None or not math.isfinite(score):
            return Check(
                "weights", "differs", "there is no score", f"{score} for the conversation {example.name!r}",
                f"{example.score:.6g}", "see why it fails, in the log of what scored it",
            )  # fmt: skip
    got = [float(score) for score in scores if score is not None]
    need = [example.score for example in examples]
    if close(got, need, tolerance):
        largest = max((abs(a - b) for a, b in zip(got, need, strict=True)), default=0.0)
        return Check("weights", "equal", f"{len(got)} scores equal, largest difference {largest:.1e}")
    worst = max(range(len(got)), key=lambda i: abs(got[i] - need[i]))
    shown = {
        "got": f"{got[worst]:.6g} for the conversation {examples[worst].name!r}",
        "need": f"{need[worst]:.6g} within {tolerance:.1e}",
    }
    for explain in (_known_mistake, _known_function, _rounding, _scale):
        if (found := explain(contract, examples, got, tolerance)) is not None:
            return replace(found, got=shown["got"], need=shown["need"])
    return Check(
        "weights", "differs", "the scores are others, and no known mistake explains them", **shown,
        fix=f"{restore('the weights')}, unless the conversations became other tokens",
    )  # fmt: skip


def restore(what: str) -> str:
    """What mends files that were changed."""
    return f"restore {what} from the folder that was exported, or from where the model came from"


def close(got: Sequence[float], need: Sequence[float], tolerance: float) -> bool:
    """Whether every number is within `tolerance` of the one it should be."""
    return all(abs(a - b) <= tolerance for a, b in zip(got, need, strict=True))


def _known_mistake(
    contract: ScoringContract, examples: Sequence[GoldenExample], got: Sequence[float], tolerance: float
) -> Check | None:
    known: list[tuple[Mistake, Part, str, str]] = [
        (
            "read_before_end", "read position", "every score is read at the token before the last",
            "the end of turn is missing, or it is taken for padding: keep it, and pad with "
            f"token {contract.rendering.pad_token_id}",
        ),
        (
            "two_bos", "tokens", "every conversation begins with two BOS tokens",
            "the template writes one already: tokenize with add_special_tokens=False",
        ),
        ("no_bos", "tokens", "every conversation lacks its BOS token", "begin with the tokenizer's BOS, once"),
    ]  # fmt: skip
    for mistake, part, summary, fix in known:
        explained = [one.mistakes.get(mistake, one.score) for one in examples]
        if any(mistake in one.mistakes for one in examples) and close(got, explained, tolerance):
            return Check(part, "differs", summary, fix=fix)
    return None


def _known_function(
    contract: ScoringContract, examples: Sequence[GoldenExample], got: Sequence[float], tolerance: float
) -> Check | None:
    functions: dict[str, Callable[[float], float]] = {
        "sigmoid": lambda x: 1 / (1 + math.exp(-x)) if x > -700 else 0.0,
        "tanh": math.tanh,
        "log-sigmoid": lambda x: min(x, 0.0) - math.log1p(math.exp(-abs(x))),
        "softmax over one label": lambda x: 1.0,
        "change of sign": lambda x: -x,
    }
    for name, function in functions.items():
        if close(got, [function(one.score) for one in examples], tolerance):
            return Check(
                "activation", "differs", f"a {name} is applied to the score",
                fix="ask for raw scores (use_activation: false, function_to_apply: none), and set problem_type to "
                "regression in config.json",
            )  # fmt: skip
    return None


def _rounding(
    contract: ScoringContract, examples: Sequence[GoldenExample], got: Sequence[float], tolerance: float
) -> Check | None:
    if tolerance < contract.tolerance.bfloat16 and close(
        got, [one.score for one in examples], contract.tolerance.bfloat16
    ):
        return Check(
            "precision", "differs", "the scores differ by what a coarser number format makes of them",
            fix="compute in float32, from weights that were not rounded",
        )  # fmt: skip
    return None


def _scale(
    contract: ScoringContract, examples: Sequence[GoldenExample], got: Sequence[float], tolerance: float
) -> Check | None:
    """A straight line through the scores: least squares, and then every one of them must lie on it.

    A line that is nearly level lies within the tolerance of any scores that hardly differ, and explains nothing.
    """
    need = [one.score for one in examples]
    if len(got) < 4:
        return None  # any three scores are nearly on some line
    mean_got, mean_need = sum(got) / len(got), sum(need) / len(need)
    spread = sum((x - mean_need) ** 2 for x in need)
    if spread == 0:
        return None
    slope = sum((x - mean_need) * (y - mean_got) for x, y in zip(need, got, strict=True)) / spread
    offset = mean_got - slope * mean_need
    explained = slope * (max(need) - min(need))
    if explained <= _TELLING_SPREAD * tolerance or not close(
        got, [slope * x + offset for x in need], tolerance * max(1.0, slope)
    ):
        return None
    return Check(
        "activation", "differs", f"the scores are scaled and shifted: {slope:.6g} x score {offset:+.6g}",
        fix="ask for raw scores: they are normalised or shaped",
    )  # fmt: skip
