"""A rubric's questions on one tree against one question at a time, by a judge in this process.

    python benchmarks/rubrics.py --model FOLDER [--prompts 2] [--completions 8] [--criteria 6] [--rounds 3]

Each completion of alpaca_eval's prompts is judged by every criterion, with the built-in question
and the probabilities of its two answers (`use_logprobs`). On a tree all questions of a prompt are
computed together. One at a time, each question is one row, whose two answers are a few tokens more.
The probabilities are the same.

`tokens` says how many tokens one at a time takes for one of the tree, the limit of what sharing
alone can give; `x` says how many times faster the tree is, the median of the ratios within each
round, and `share` its part of that limit.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import (
    SIZES,
    add_model,
    build_causal,
    describe,
    interleave,
    median_ratio,
    model_name,
    tokenizer_of,
    use_device,
)
from scoring import Prompt, load_prompts

from treeward.config.reward_environments import RubricEnvironmentConfig
from treeward.data.conversation import Message
from treeward.data.rendering import Renderer
from treeward.scoring.judge_local import LocalJudge
from treeward.scoring.verdicts import NoVerdict, Verdict, make_question
from treeward.tables import Column, results_table

CRITERIA = [
    "It answers the question that was asked.",
    "All that it says is true.",
    "It says what it does not know.",
    "It is written in complete sentences.",
    "It repeats itself.",
    "Its tone is courteous.",
    "It gives an example.",
    "It is longer than it has to be.",
]
TREE, ALONE = "tree", "one at a time"
Question = tuple[Message, ...]


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as temporary:
        _run(arguments, Path(temporary))


def _run(arguments: argparse.Namespace, temporary: Path) -> None:
    device = use_device("cpu")
    data, prompts = load_prompts(arguments.size)
    chosen = [(prompt, texts) for prompt, texts in prompts if len(texts) >= arguments.completions]
    criteria = CRITERIA[: arguments.criteria]
    folder = arguments.size
    if folder in SIZES:
        folder = str(_written(folder, prompts, temporary))
    section = RubricEnvironmentConfig(
        model=folder, use_logprobs=True, dtype="float32", device=device.type
    )
    judge = LocalJudge(section)
    print(f"{data}, {model_name(arguments.size)}, {describe(device)}")
    rows = []
    for prompt, texts in chosen[: arguments.prompts]:
        questions = []
        for text in texts[: arguments.completions]:
            for criterion in criteria:
                shown = f"user: {prompt}"
                questions.append(make_question(section, shown, [text, criterion]))
        rows.append(_measure(judge, questions, arguments.rounds, device))
    columns = [
        Column("questions"),
        Column(ALONE, title="tokens, one at a time", format=",.0f"),
        Column(TREE, title="tokens, tree", format=",.0f"),
        Column("tokens", format=".2f"),
        Column("seconds", title="tree, s", format=".2f"),
        Column("faster", title="x", format=".2f"),
        Column("share", format=".0%"),
        Column("difference", title="largest difference", format=".1e"),
    ]
    print(results_table(rows, columns))


def _written(size: str, prompts: Sequence[Prompt], folder: Path) -> Path:
    """A judge with random weights, and a tokenizer of these texts."""
    texts = (text for prompt, answers in prompts for text in (prompt, *answers))
    tokenizer = tokenizer_of(size, texts)
    build_causal(size, tokenizer).save_pretrained(folder)
    tokenizer.chat_template = Renderer(tokenizer).chat_template
    tokenizer.save_pretrained(folder)
    return folder


def _measure(
    judge: LocalJudge, questions: list[Question], rounds: int, device: torch.device
) -> dict[str, Any]:
    sizes = {TREE: len(questions), ALONE: 1}
    values = {}
    tokens = {}
    for name, size in sizes.items():
        before = judge.cost.num_prompt_tokens
        values[name] = _ask(judge, questions, size, 0)
        tokens[name] = judge.cost.num_prompt_tokens - before
    variants = {name: partial(_ask, judge, questions, size) for name, size in sizes.items()}
    seconds = interleave(variants, rounds, device=device)
    faster = median_ratio(seconds[ALONE], seconds[TREE])
    ratio = tokens[ALONE] / tokens[TREE]
    pairs = zip(values[ALONE], values[TREE], strict=True)
    return {
        "questions": len(questions),
        **tokens,
        "tokens": ratio,
        "seconds": sorted(seconds[TREE])[rounds // 2],
        "faster": faster,
        "share": faster / ratio,
        "difference": max(abs(a - b) for a, b in pairs),
    }


def _ask(judge: LocalJudge, questions: list[Question], size: int, _: int) -> list[float]:
    """The value of each verdict; `size` questions are given at a time."""
    values = []
    for start in range(0, len(questions), size):
        for answer in judge.ask(questions[start : start + size]):
            values.append(_value(answer))
    return values


def _value(answer: Verdict | NoVerdict) -> float:
    if isinstance(answer, NoVerdict):
        raise RuntimeError(answer.reason)
    return answer.value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model(parser)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--criteria", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
