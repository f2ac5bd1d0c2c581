"""Arithmetic with planted mistakes: problems, solutions as steps, and the truth about each step.

    problem = Problem.draw(random.Random(0), num_steps=4)
    problem.text          # "Begin with 7. Add 3, 1, 2, 2, each time keeping the last digit."
    solution = problem.solve(random.Random(1))
    solution.texts        # ("7 + 3 ends in 0.", "0 + 1 ends in 2.", ...)
    solution.labels       # (True, False, ...): does each step add rightly what is asked for?

A mistake is one too many, or another digit. The steps after it go on from the wrong digit.
"""

import random
from dataclasses import dataclass
from typing import Any

MISTAKES = 0.3
"""The probability that a step is wrong. Of four steps all are right in 24 % of the solutions."""
LARGEST = 3
"""The largest number that is added: with 30 sums a small model learns them all in minutes."""


@dataclass(frozen=True)
class StepSolution:
    """The steps of a solution, and whether each is right; `answer`: the last digit that it
    gives."""

    texts: tuple[str, ...]
    labels: tuple[bool, ...]
    answer: int


@dataclass(frozen=True)
class Problem:
    """Numbers to add to the first digit, one after another."""

    start: int
    numbers: tuple[int, ...]

    @classmethod
    def draw(cls, draw: random.Random, *, num_steps: int = 4) -> "Problem":
        return cls(
            draw.randrange(10), tuple(draw.randrange(1, LARGEST + 1) for _ in range(num_steps))
        )

    @property
    def text(self) -> str:
        numbers = ", ".join(map(str, self.numbers))
        return f"Begin with {self.start}. Add {numbers}, each time keeping the last digit."

    @property
    def answer(self) -> int:
        return (self.start + sum(self.numbers)) % 10

    def solve(self, draw: random.Random, *, mistakes: float = MISTAKES) -> StepSolution:
        """A solution in which each step is wrong with the probability `mistakes`."""
        digit = self.start
        texts = []
        labels = []
        for number in self.numbers:
            text, result, is_right = step_of(digit, number, draw, mistakes)
            texts.append(text)
            labels.append(is_right)
            digit = result
        return StepSolution(tuple(texts), tuple(labels), digit)


def step_of(digit: int, number: int, draw: random.Random, mistakes: float) -> tuple[str, int, bool]:
    """The text of a step, the digit that it gives, and whether that is right."""
    result = (digit + number) % 10
    is_right = draw.random() >= mistakes
    if not is_right and draw.random() < 0.5:
        result = (result + 1) % 10  # a slip that many solutions share: majorities fall for it
    elif not is_right:
        result = (result + draw.randrange(2, 10)) % 10
    return f"{digit} + {number} ends in {result}.", result, is_right


def step_rows(problem: Problem, solutions: list[StepSolution]) -> list[dict[str, Any]]:
    """The rows of the solutions, in TRL's form."""
    rows = []
    for solution in solutions:
        rows.append(
            {
                "prompt": problem.text,
                "completions": list(solution.texts),
                "labels": list(solution.labels),
            }
        )
    return rows
