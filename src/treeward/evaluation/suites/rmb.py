"""RMB and IF-RewardBench: suites that are published as files of a git repository.

RMB: helpfulness and harmlessness, each as pairs and as one best answer against several (Zhou et al.
2024, arXiv 2410.09893). A pair is right where the chosen answer scores higher
(`eval/scripts/my_run_rm.py` at 2be3180); a best answer is right where it beats all others (the
paper; the repository has no code of it). The headline is the mean of the four parts: the published
overall number is above that of best-of-n alone, so it includes the pairs, but no source says how.

IF-RewardBench: answers to one instruction, of which a graph says which is better (arXiv
2603.04738, thu-coai/IF-RewardBench at c192fe9). The accuracy of an instruction is the share of the
graph's edges that the scores follow, and

    tau = (C - D) / max(1, sqrt((C + D) (C + D + T)))

with C edges that they follow, D that they turn round and T ties. The headline is the mean of the
three types of instructions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import BaseModel, Field

from treeward.data.preference import Preference
from treeward.data.sources import Row, read_rows
from treeward.errors import DataError
from treeward.evaluation.results import ScoredExample, SuiteResult, by_subset
from treeward.evaluation.statistics import combined
from treeward.evaluation.suites.interface import (
    Prompt,
    Suite,
    one_of,
    published_example,
    read_as,
    suite_rows,
)

# --- RMB ------------------------------------------------------------------------------------------

PARTS = (
    "Helpfulness, pairs",
    "Helpfulness, best of n",
    "Harmlessness, pairs",
    "Harmlessness, best of n",
)


class Answer(BaseModel):
    answer: str


class PairOfAnswers(BaseModel):
    """A row of `Pairwise_set`."""

    pair_uid: str | int
    conversation_input: Prompt
    chosen: Answer
    reject: Answer


class BestAnswer(BaseModel):
    """A row of `BoN_set`."""

    bon_uid: str | int
    conversation_input: Prompt
    bon_best: Answer
    loser_list: Annotated[list[Answer], Field(min_length=1)]


class RMB(Suite):
    """Four parts; the headline is their mean."""

    name = "rmb"
    title = "RMB"
    git_url = "https://github.com/Zhou-Zoey/RMB-Reward-Model-Benchmark"

    def load(self, source: str | None = None) -> list[Preference]:
        """The files of both sets. `source`: the repository's folder, a folder of it, or a file."""
        # Absolute: the folders above a file say of which part its rows are.
        folder = Path(self.copy_of(source)).absolute()
        files = [] if folder.is_dir() else [folder]
        # The repository has other JSON beside the two sets.
        for file in sorted(folder.rglob("*.json")):
            if {"Pairwise_set", "BoN_set"} & set(file.parts):
                files.append(file)
        if not files:
            raise DataError(
                "there is no data of RMB here",
                where=str(folder),
                need="the folders Pairwise_set and BoN_set, as the repository has them",
                fix=f"git clone {self.git_url}",
            )
        examples = []
        for file in files:
            for row in read_rows(str(file)):
                examples.append(self._example_of(file, row))
        return examples

    def _example_of(self, file: Path, row: Row) -> Preference:
        """The example of a row of either set; the first of its texts is the better one."""
        if "bon_best" in row.values:
            best = read_as(BestAnswer, row)
            texts = [best.bon_best.answer]
            texts += [loser.answer for loser in best.loser_list]
            id = best.bon_uid
            prompt = best.conversation_input
            kind = "best of n"
        else:
            pair = read_as(PairOfAnswers, row)
            texts = [pair.chosen.answer, pair.reject.answer]
            id = pair.pair_uid
            prompt = pair.conversation_input
            kind = "pairs"
        ranks = [0] + [1] * (len(texts) - 1)
        part = f"{_goal(file)}, {kind}"
        return published_example(row.where, part, id, prompt, texts, ranks)

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        parts = tuple(self.parts(PARTS, scored).values())
        return SuiteResult(self.name, combined("accuracy", parts), sections=parts, subsets=parts)

    def chance(self, part: str | None = None) -> float | None:
        """None where one answer stands against several, because their number differs, and of the
        headline, which has such parts."""
        if part is None or part.endswith("best of n"):
            return None
        return 0.5


def _goal(file: Path) -> str:
    """The part that the folder nearest to a file names."""
    for folder in file.parents:
        for goal in ("Helpfulness", "Harmlessness"):
            if folder.name.lower() == goal.lower():
                return goal
    raise DataError(
        "the path of this file does not say of which part of RMB it is",
        where=str(file),
        need="a folder Helpfulness or Harmlessness above it, as the repository has them",
    )


# --- IF-RewardBench -------------------------------------------------------------------------------

TYPES = ("Single_Turn", "Multi_Turn", "System_Prompt")


class NamedResponse(BaseModel):
    response_id: str | int
    response: str


class ResponseId(BaseModel):
    response_id: str | int


class Edge(BaseModel):
    chosen: ResponseId
    rejected: ResponseId


class InstructionRow(BaseModel):
    """A row of `data/if_rewardbench.json`."""

    id: str | int
    instruction_type: Annotated[str, one_of(*TYPES)]
    messages: Prompt
    responses: Annotated[list[NamedResponse], Field(min_length=2)]
    preference_graph: Annotated[list[Edge], Field(min_length=1)]

    def edges(self, where: str) -> list[tuple[int, int]]:
        """The indices of the better and the worse response of each edge."""
        indices = {response.response_id: i for i, response in enumerate(self.responses)}
        edges = []
        for edge in self.preference_graph:
            better = edge.chosen.response_id
            worse = edge.rejected.response_id
            for response_id in (better, worse):
                if response_id not in indices:
                    raise DataError(
                        "an edge of the graph has a response that the row lacks",
                        where=where,
                        field="preference_graph",
                        got=response_id,
                        need=f"one of {', '.join(map(str, indices))}",
                    )
            edges.append((indices[better], indices[worse]))
        return edges


class IFRewardBench(Suite):
    """Three types of instructions; the headline is the mean of their accuracies."""

    name = "ifrewardbench"
    title = "IF-RewardBench"
    git_url = "https://github.com/thu-coai/IF-RewardBench"
    schema = InstructionRow
    num_published = 842

    def load(self, source: str | None = None) -> list[Preference]:
        """`source`: the repository's folder, or the file `if_rewardbench.json`."""
        place = Path(self.copy_of(source))
        files = [place]
        if place.is_dir():
            files = sorted(place.rglob("if_rewardbench.json*"))
        if not files:
            raise DataError(
                "there is no data of IF-RewardBench here",
                where=str(place),
                need="data/if_rewardbench.json, as the repository has it",
                fix=f"git clone {self.git_url}",
            )
        return self._examples(suite_rows(str(files[0]), "", split=None))

    def _example(self, row: InstructionRow, where: str) -> Preference:
        edges = row.edges(where)
        texts = [response.response for response in row.responses]
        # The suite counts edges; ranks are for what compares completions, as the diagnostics.
        ranks = _depths(len(texts), edges, where)
        example = published_example(where, row.instruction_type, row.id, row.messages, texts, ranks)
        return replace(example, info={"edges": edges})

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        parts = self.parts(TYPES, scored, _share_of_edges_right)
        groups = by_subset(scored)
        tau = {name: fmean(map(_tau, groups[name])) for name in parts}
        details: dict[str, Any] = {"tau": tau}
        if tau:
            details["tau_overall"] = fmean(tau.values())
        sections = tuple(parts.values())
        return SuiteResult(
            self.name,
            combined("accuracy", sections),
            sections=sections,
            subsets=sections,
            details=details,
        )


def _depths(count: int, edges: Sequence[tuple[int, int]], where: str) -> list[int]:
    """The rank of each response: the number of edges of the longest way that leads down to it.

    Raises `DataError` for a graph with a circle.
    """
    depths = [0] * count
    # A way has at most count - 1 edges, so that by then nothing changes but in a circle.
    for _ in range(count):
        has_changed = False
        for better, worse in edges:
            if depths[worse] <= depths[better]:
                depths[worse] = depths[better] + 1
                has_changed = True
        if not has_changed:
            return depths
    raise DataError(
        "the graph of preferences has a circle",
        where=where,
        field="preference_graph",
        got=[list(edge) for edge in edges],
    )


def _counts(example: ScoredExample) -> Mapping[str, int]:
    """How many edges the scores follow, turn round and tie; a missing score follows none."""
    counts = {"right": 0, "wrong": 0, "tie": 0}
    for better, worse in example.example.info["edges"]:
        high = example.scores[better]
        low = example.scores[worse]
        if high is None or low is None or high < low:
            counts["wrong"] += 1
        elif high == low:
            counts["tie"] += 1
        else:
            counts["right"] += 1
    return counts


def _share_of_edges_right(example: ScoredExample) -> float:
    counts = _counts(example)
    return counts["right"] / sum(counts.values())


def _tau(example: ScoredExample) -> float:
    """The tau of the module's head: C is `right`, D is `wrong`, T is `tie`."""
    counts = _counts(example)
    decided = counts["right"] + counts["wrong"]
    size = math.sqrt(decided * (decided + counts["tie"]))
    # Where all are ties the size is 0, and so is tau.
    return (counts["right"] - counts["wrong"]) / max(1.0, size)
