r"""The rule `dapo`: `Answer: 34` at the end of a completion, compared as text with the ground
truth.

    answer = find_answer("... so there are 34.\nAnswer: $\\boxed{34}$")
    normal_form(answer) == normal_form("34")        # True

It is the rule of DAPO's training set (Yu et al. 2025, arXiv 2503.14476), NeMo RL's
`math_verify_impl: dapo_math_verify` and verl's `math_dapo`. No algebra is done: `1/2` is not `0.5`.
The normal form, and its two tables, are those of Minerva (Lewkowycz et al. 2022, arXiv 2206.14858,
appendix D.1).
"""

from __future__ import annotations

import re

# As verl's math_dapo has it.
_LAST_CHARACTERS = 300
"""An answer before these is not looked for."""

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
"""Texts and what takes their place, one after the other."""

# "childrentickets" lacks a comma in the paper too: with one, other completions would be right.
_UNITS = r"""
square ways integers dollars mph inches hours km units \ldots sue points feet minutes digits cents
degrees cm gm pounds meters meals edges students childrentickets multiples
"""
_MARKS = (
    r"\text{s}",
    r"\text{.}",
    "\\text{\ns}",
    r"\text{}^2",
    r"\text{}^3",
    "\\text{\n}",
    r"\text{}",
    r"\mathrm{th}",
    r"^\circ",
    r"^{\circ}",
    r"\;",
    r",\!",
    "{,}",
    '"',
    r"\dots",
)
_REMOVED = (*_UNITS.split(), *_MARKS)
"""What is taken off, one after the other."""


def find_answer(completion: str) -> str | None:
    """What stands behind the last `Answer:` of a completion, to the end of its line; None if there
    is none."""
    answers = _ANSWER.findall(completion[-_LAST_CHARACTERS:])
    return answers[-1] if answers else None


def normal_form(answer: str) -> str:
    """An answer as it is compared: what comes after the last `=`, without units, marks and TeX's
    wrappers."""
    text = answer.rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    # The first formula alone, if there is one in the line.
    text = re.sub(r".*?\$(.*?)\$.*", r"\1", text)
    for wrapper in ("text", "textbf", "overline"):
        text = re.sub(rf"\\{wrapper}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    # The short forms \frac12 and \sqrt2.
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    if digits.isdigit():
        text = digits
    return text.strip()
