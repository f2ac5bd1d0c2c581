"""PPE, Preference Proxy Evaluations: choices of people, and whether answers are correct (Frick et
al. 2024, arXiv 2410.14872).

Preference: 16,038 conversations of an arena with two answers and who won. The accuracy is over
those with a winner; ties are not read. A part is a kind of prompt, and a prompt may be of several
kinds.

Correctness: prompts of five benchmarks, each with up to 32 answers of one model, of which some are
correct. Accuracy is over the pairs of a correct and a wrong answer that the data names
(`sampled_conflict_pairs`; some come twice, and count twice). The headline is the mean of the five,
as Skywork's report has it (arXiv 2507.01352); the paper's own code was not seen. Beside it stand
the area under the curve of score against correctness, within a prompt, and how often the best of k
answers is correct.

The fields are those that users' loaders read: the authors' repository was not at hand.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import BaseModel, ConfigDict

from treeward.data.preference import Preference
from treeward.data.sources import missing_file
from treeward.errors import DataError
from treeward.evaluation.results import Metric, ScoredExample, SuiteResult, by_subset
from treeward.evaluation.statistics import accuracy_metric, combined
from treeward.evaluation.suites.interface import (
    Prompt,
    Suite,
    published_example,
    read_as,
    suite_rows,
)

# --- preference -----------------------------------------------------------------------------------

KINDS = {
    "Hard": "hard_prompt",
    "Easy": "easy_prompt",
    "Instruction following": "if_prompt",
    "Code": "is_code",
    "Math": "math_prompt",
}
"""The columns that say of which kind a prompt is."""


class ArenaRow(BaseModel):
    """A row of the split `test`."""

    model_config = ConfigDict(extra="allow")

    question_id: str | int
    prompt: Prompt
    response_1: str
    response_2: str
    winner: str
    """`model_a`, `model_b`, or a word for a tie."""


class PPEPreference(Suite):
    """Whom people preferred; the headline is the accuracy over the conversations with a winner."""

    name = "ppepreference"
    title = "PPE Preference"
    hub_path = "lmarena-ai/PPE-Human-Preference-V1"
    split = "test"
    schema = ArenaRow

    def load(self, source: str | None = None) -> list[Preference]:
        """The conversations with a winner; `source` as of `Suite.load`."""
        examples = []
        for row in suite_rows(source, str(self.hub_path), split=self.split):
            arena = read_as(ArenaRow, row)
            if arena.winner not in ("model_a", "model_b"):
                continue
            texts = (arena.response_1, arena.response_2)
            ranks = (0, 1) if arena.winner == "model_a" else (1, 0)
            columns = arena.model_extra or {}
            kinds = [kind for kind, column in KINDS.items() if columns.get(column) is True]
            # One subset for all, because a prompt may be of several kinds, and an example is of one
            # subset.
            example = published_example(
                row.where, "all", arena.question_id, arena.prompt, texts, ranks
            )
            examples.append(replace(example, info={"kinds": kinds}))
        return examples

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        examples_of: dict[str, list[ScoredExample]] = {kind: [] for kind in KINDS}
        for example in scored:
            for kind in example.example.info["kinds"]:
                examples_of[kind].append(example)
        parts = tuple(self.part(kind, group) for kind, group in examples_of.items() if group)
        return SuiteResult(self.name, self.part("accuracy", scored), sections=parts, subsets=parts)


# --- correctness ----------------------------------------------------------------------------------

BENCHMARKS = ("MMLU-Pro", "MATH", "GPQA", "IFEval", "MBPP-Plus")
_RESPONSE = re.compile(r"response_(\d+)")


class BestOfKRow(BaseModel):
    """A row of the split `train`; its other columns are `response_1`, `response_2`, ..."""

    model_config = ConfigDict(extra="allow")

    question_id: str | int
    prompt: Prompt
    scores: list[bool]
    """Whether each response is correct."""
    sampled_conflict_pairs: list[tuple[int, int]]
    """Indices of a correct and a wrong response, in either order, from 0."""

    def responses(self, where: str) -> list[str]:
        """The responses in the order of their numbers.

        Raises `DataError` for other columns than one text for each of the scores, and for a pair
        that is not one of a correct and a wrong response.
        """
        by_number: dict[int, Any] = {}
        for name, value in (self.model_extra or {}).items():
            match = _RESPONSE.fullmatch(name)
            if match is not None:
                by_number[int(match[1])] = value
        # By number and not by name: "response_10" comes before "response_2".
        texts = [by_number[number] for number in sorted(by_number)]
        are_texts = all(isinstance(text, str) for text in texts)
        if len(texts) != len(self.scores) or not are_texts:
            raise DataError(
                "the row does not have a response for each score",
                where=where,
                field="response_1 scores",
                got=f"{len(texts)} responses, {len(self.scores)} scores",
                need="as many texts response_1, response_2, ... as scores",
            )
        for first, second in self.sampled_conflict_pairs:
            # Not Python's own error: an index of -1 would be the last response.
            is_known = 0 <= first < len(texts) and 0 <= second < len(texts)
            if not is_known or self.scores[first] == self.scores[second]:
                raise DataError(
                    "this is no pair of a correct and a wrong response",
                    where=where,
                    field="sampled_conflict_pairs",
                    got=[first, second],
                    need="the indices of two responses of which one is correct, from 0",
                )
        return texts


class PPECorrectness(Suite):
    """Which answers are correct, in five benchmarks; the headline is the mean of their
    accuracies."""

    name = "ppecorrectness"
    title = "PPE Correctness"
    hub_path = "lmarena-ai/PPE-{}-Best-of-K"
    split = "train"
    schema = BestOfKRow

    def load(self, source: str | None = None) -> list[Preference]:
        """The prompts of all benchmarks. `source`: a folder in which each benchmark is a file or a
        folder that has its name, of which some may be missing; or the file of one."""
        places: Mapping[str, str | None] = dict.fromkeys(BENCHMARKS)
        if source is not None:
            places = _places(Path(source))
        examples = []
        for benchmark, place in places.items():
            hub_path = self.hub_path.format(benchmark)
            for row in suite_rows(place, hub_path, split=self.split):
                best_of_k = read_as(BestOfKRow, row)
                texts = best_of_k.responses(row.where)
                ranks = [int(not is_correct) for is_correct in best_of_k.scores]
                example = published_example(
                    row.where, benchmark, best_of_k.question_id, best_of_k.prompt, texts, ranks
                )
                # The accuracy is over these pairs alone, and the ranks would give all of them.
                info = {"pairs": best_of_k.sampled_conflict_pairs}
                examples.append(replace(example, info=info))
        return examples

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        groups = by_subset(scored)
        parts = []
        auc: dict[str, float | None] = {}
        best_of_k: dict[str, Mapping[int, float]] = {}
        for name, group in groups.items():
            part = _accuracy(name, group)
            # The first prompts of a benchmark may have no pairs, which is no accuracy.
            if part.count:
                parts.append(part)
            auc[name] = _mean_auc(group)
            best_of_k[name] = _best_of_k(group)
        return SuiteResult(
            self.name,
            combined("accuracy", parts),
            sections=tuple(parts),
            subsets=tuple(parts),
            details={"auc": auc, "best_of_k": best_of_k},
        )


def _places(source: Path) -> dict[str, str]:
    """The file or folder of each benchmark that is there."""
    if not source.exists():
        raise missing_file(str(source))
    paths = sorted(source.iterdir()) if source.is_dir() else [source]
    places = {}
    for benchmark in BENCHMARKS:
        named = [str(path) for path in paths if benchmark.lower() in path.name.lower()]
        if len(named) > 1:
            raise DataError(
                "this benchmark of PPE is there more than once",
                where=str(source),
                got=named,
                need=f"one file or folder with the name {benchmark}",
                fix="put the parts of a benchmark into a folder of its own",
            )
        if named:
            places[benchmark] = named[0]
    # A single file may have any name: it is then a benchmark of its own.
    if not places and source.is_file():
        return {source.stem: str(source)}
    if not places:
        raise DataError(
            "there is no benchmark of PPE here",
            where=str(source),
            need=f"files or folders with the names {', '.join(BENCHMARKS)}",
        )
    return places


def _accuracy(name: str, scored: Sequence[ScoredExample]) -> Metric:
    """Over the sampled pairs; a tie and a missing score are wrong."""
    outcomes = []
    prompts = []
    for example in scored:
        ranks = example.example.ranks
        for first, second in example.example.info["pairs"]:
            # The data has the two in either order. Rank 0 is correct.
            correct, wrong = (first, second) if ranks[first] == 0 else (second, first)
            better = example.scores[correct]
            worse = example.scores[wrong]
            is_right = better is not None and worse is not None and better > worse
            outcomes.append(float(is_right))
            prompts.append(example.example.prompt_key)
    return accuracy_metric(outcomes, name, prompts)


def _mean_auc(scored: Sequence[ScoredExample]) -> float | None:
    """The mean over prompts of P(correct > wrong) + P(tie) / 2; None without a prompt that has
    both."""
    areas = []
    for example in scored:
        correct, wrong = _by_correctness(example)
        if not correct or not wrong:
            continue
        wins = 0.0
        for score, other in itertools.product(correct, wrong):
            if score > other:
                wins += 1.0
            elif score == other:
                wins += 0.5
        areas.append(wins / (len(correct) * len(wrong)))
    return fmean(areas) if areas else None


def _best_of_k(scored: Sequence[ScoredExample]) -> Mapping[int, float]:
    """For k = 1, 2, 4, ... how often the highest score among the first k answers is that of a
    correct one; joint maxima share it. Answers without a score are never chosen."""
    curve: dict[int, float] = {}
    # The same prompts stand behind every k.
    fewest_answers = min(len(example.scores) for example in scored)
    k = 1
    while k <= fewest_answers:
        shares = []
        for example in scored:
            correct, wrong = _by_correctness(example, k)
            if not correct and not wrong:
                shares.append(0.0)
                continue
            highest = max(correct + wrong)
            num_right = correct.count(highest)
            num_chosen = num_right + wrong.count(highest)
            shares.append(num_right / num_chosen)
        curve[k] = fmean(shares)
        k *= 2
    return curve


def _by_correctness(
    example: ScoredExample, first: int | None = None
) -> tuple[list[float], list[float]]:
    """The scores of the correct and of the wrong answers that have one, among the first so many;
    None: among all."""
    correct = []
    wrong = []
    ranks = example.example.ranks
    for score, rank in zip(example.scores[:first], ranks[:first], strict=True):
        if score is None:
            continue
        if rank == 0:
            correct.append(score)
        else:
            wrong.append(score)
    return correct, wrong
