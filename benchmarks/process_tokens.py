"""Tokens of a process reward model's data: one tree for each problem against rows.

    python benchmarks/process_tokens.py [--problems 50] [--alternatives 4]

Two kinds of solutions of generated arithmetic (examples/arithmetic_steps.py), of 4, 8 and 16 steps:

- alternatives, as in PRM800K: at each step one of K is chosen. TRL writes a row for each
  alternative that was not chosen, with all steps before it, and one for the chosen solution:
  1 + T (K - 1) rows for T steps;
- solutions: K samples of the same problem, each a row, of which some begin alike.

It counts tokens and trains nothing.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import NamedTuple

from treeward.data.encoding import count_tree_tokens
from treeward.data.rendering import Renderer
from treeward.data.step_marks import TRAINED_MARK
from treeward.data.steps import marked_completion
from treeward.data.tokenizers import train_tokenizer
from treeward.tables import Column, results_table

# The generator of the demo lies beside it.
sys.path.append(str(Path(__file__).parents[1] / "examples"))
from arithmetic_steps import Problem, step_of

_LENGTHS = (4, 8, 16)
_COLUMNS = [
    Column("kind"),
    Column("steps", format="d"),
    Column("rows", title="rows a problem", format=".0f"),
    Column("row_tokens", title="tokens as rows", format=",d"),
    Column("tree_tokens", title="as trees", format=",d"),
    Column("ratio", title="fewer times", format=".1f"),
]


class Drawn(NamedTuple):
    """The rows of a problem: its text, and the steps of each row."""

    text: str
    rows: list[list[str]]


def alternatives(draw: random.Random, num_steps: int, num_alternatives: int) -> Drawn:
    """The rows that TRL writes of a problem with `num_alternatives` rated for each step."""
    problem = Problem.draw(draw, num_steps=num_steps)
    chosen: list[str] = []
    rows: list[list[str]] = []
    digit = problem.start
    for number in problem.numbers:
        right, result, _ = step_of(digit, number, draw, mistakes=0.0)
        wrong = [f"{digit} + {number} ends in {(result + k) % 10}." for k in range(1, 10)]
        rows += [[*chosen, text] for text in draw.sample(wrong, num_alternatives - 1)]
        chosen.append(right)
        digit = result
    return Drawn(problem.text, [*rows, chosen])


def samples(draw: random.Random, num_steps: int, num_samples: int) -> Drawn:
    """The rows of solutions that were sampled independently."""
    problem = Problem.draw(draw, num_steps=num_steps)
    return Drawn(problem.text, [list(problem.solve(draw).texts) for _ in range(num_samples)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=int, default=50)
    parser.add_argument("--alternatives", type=int, default=4, help="K: alternatives, or samples")
    options = parser.parse_args()
    texts = [samples(random.Random(seed), 4, 4) for seed in range(50)]
    words = [drawn.text for drawn in texts] + [" ".join(drawn.rows[0]) for drawn in texts]
    tokenizer = train_tokenizer(words, vocab_size=320, more_special=[TRAINED_MARK])
    renderer = Renderer(tokenizer)
    table = []
    for kind, make in (("alternatives", alternatives), ("solutions", samples)):
        for num_steps in _LENGTHS:
            draw = random.Random(0)
            row_tokens = 0
            tree_tokens = 0
            num_rows = 0
            for _ in range(options.problems):
                drawn = make(draw, num_steps, options.alternatives)
                prompt = {"role": "user", "content": drawn.text}
                chats = [[prompt, marked_completion(row, TRAINED_MARK)] for row in drawn.rows]
                sequences = renderer.encode_many(chats)
                num_rows += len(sequences)
                row_tokens += sum(map(len, sequences))
                tree_tokens += count_tree_tokens(sequences)
            table.append(
                {
                    "kind": kind,
                    "steps": num_steps,
                    "rows": num_rows / options.problems,
                    "row_tokens": row_tokens,
                    "tree_tokens": tree_tokens,
                    "ratio": row_tokens / tree_tokens,
                }
            )
    sys.stdout.write(f"{results_table(table, _COLUMNS)}\n")


if __name__ == "__main__":
    main()
