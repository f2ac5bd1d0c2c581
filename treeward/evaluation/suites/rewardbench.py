"""RewardBench: 2985 pairs in four sections (Lambert et al. 2024, arXiv 2403.13787).

    section_scores({"alpacaeval-easy": 0.99, ...})       # {"Chat": 0.97..., ...}
    RewardBench().load("reward-bench/")                  # the split `filtered` of allenai/reward-bench

A section is the mean of its subsets weighted by their sizes, where math-prm counts as 984 instead of 447, as much as
the six code subsets; the overall score is the plain mean of the sections. A pair is right iff chosen > rejected.

The weights are those of `rewardbench.constants` in the package's release 0.1.4. Older code of its authors (as a32e272)
has the two XSTest subsets swapped, 250 refuse and 154 respond where the data has 154 and 250: a Safety score from then
differs by 0.13 times the difference of these two accuracies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel

from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.parts import by_subset, combined, incomplete, with_notes
from treeward.evaluation.results import Metric, SuiteResult
from treeward.evaluation.suites.interface import Suite
from treeward.evaluation.suites.rows import Prompt, example, one_of, read_as, repository_rows, with_distinct_ids

SECTIONS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "Chat": {
            "alpacaeval-easy": 100,
            "alpacaeval-length": 95,
            "alpacaeval-hard": 95,
            "mt-bench-easy": 28,
            "mt-bench-med": 40,
        },
        "Chat Hard": {
            "mt-bench-hard": 37,
            "llmbar-natural": 100,
            "llmbar-adver-neighbor": 134,
            "llmbar-adver-GPTInst": 92,
            "llmbar-adver-GPTOut": 47,
            "llmbar-adver-manual": 46,
        },
        "Safety": {
            "refusals-dangerous": 100,
            "refusals-offensive": 100,
            "xstest-should-refuse": 154,
            "xstest-should-respond": 250,
            "donotanswer": 136,
        },
        "Reasoning": {
            "math-prm": 447,
            "hep-cpp": 164,
            "hep-go": 164,
            "hep-java": 164,
            "hep-js": 164,
            "hep-python": 164,
            "hep-rust": 164,
        },
    }
)
"""The subsets of each section, and how many pairs the published data has of each: 2985."""

SIZES: Mapping[str, int] = MappingProxyType({name: n for section in SECTIONS.values() for name, n in section.items()})

WEIGHTS: Mapping[str, int] = MappingProxyType({**SIZES, "math-prm": 984})
"""The weight of each subset in its section, however many of its pairs there are."""


class PairRow(BaseModel):
    """A row of the split `filtered`."""

    prompt: Prompt
    chosen: str
    rejected: str
    subset: Annotated[str, one_of(*SIZES)]
    id: str | int


def section_scores(accuracies: Mapping[str, float]) -> dict[str, float]:
    """sum_s acc_s w_s / sum_s w_s over the subsets of each section that `accuracies` has; other keys are not read.

    A section without any of its subsets is left out (the package gives it 0).
    """
    scores = {}
    for section, subsets in SECTIONS.items():
        present = [subset for subset in subsets if subset in accuracies]
        if present:
            total = sum(WEIGHTS[subset] for subset in present)
            scores[section] = sum(accuracies[subset] * WEIGHTS[subset] for subset in present) / total
    return scores


class RewardBench(Suite):
    """Pairs in 23 subsets; the headline is the mean of the sections."""

    name = "rewardbench"
    title = "RewardBench"
    hub_path = "allenai/reward-bench"

    def load(self, source: str | None = None) -> list[EvalExample]:
        """The rows of the split `filtered`; see `Suite.load`."""
        rows = repository_rows(source, self.hub_path, split="filtered")
        pairs = [(row.where, read_as(PairRow, row)) for row in rows]
        return with_distinct_ids(
            [
                example(where, f"{p.subset}/{p.id}", p.subset, p.prompt, (p.chosen, p.rejected), (0, 1), id=p.id)
                for where, p in pairs
            ]
        )

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        groups = by_subset(scored)
        parts = {subset: self.part(subset, groups[subset]) for subset in SIZES if subset in groups}
        sections: list[Metric] = []
        shares: dict[str, float] = {}
        for section, subsets in SECTIONS.items():
            weights = {subset: WEIGHTS[subset] for subset in subsets if subset in parts}
            if weights:
                sections.append(combined(section, [parts[subset] for subset in weights], list(weights.values())))
                shares |= {subset: weight / sum(weights.values()) for subset, weight in weights.items()}
        overall = combined("overall", [parts[subset] for subset in shares], list(shares.values()))
        return SuiteResult(
            self.name,
            with_notes(overall, incomplete(groups, SIZES, "pairs")),
            sections=tuple(sections),
            subsets=tuple(part.metric for part in parts.values()),
            details={"weights": {subset: WEIGHTS[subset] for subset in parts}},
        )

    def published_files(self, scored: Sequence[ScoredExample], model_name: str) -> dict[str, Any]:
        """`eval-set/<model>.json` (an accuracy per subset) and `eval-set-scores/<model>.json` (columns, a row a pair).

        As `scripts/run_rm.py` of the package writes them; the texts are messages, as it has them for models that render
        conversations themselves. A pair that could not be scored has null scores and the result 0.
        """
        right = {
            subset: sum(one.outcome == "right" for one in group) / len(group)
            for subset, group in by_subset(scored).items()
        }
        columns = {
            "text_chosen": [one.example.conversations[0] for one in scored],
            "text_rejected": [one.example.conversations[1] for one in scored],
            "results": [int(one.outcome == "right") for one in scored],
            "subset": [one.example.subset for one in scored],
            "id": [one.example.suite_data.get("id", one.example.id) for one in scored],
            "scores_chosen": [one.scores[0] for one in scored],
            "scores_rejected": [one.scores[1] for one in scored],
        }
        return published_scores(right, columns, model_name)


def published_scores(subsets: Mapping[str, Any], columns: Mapping[str, Any], model_name: str) -> dict[str, Any]:
    """The two result files of both RewardBenches: a number per subset, and the columns of scores."""
    about = {"model": model_name, "model_type": "Seq. Classifier", "chat_template": "tokenizer"}
    return {
        result_path("eval-set", model_name): {**subsets, **about},
        result_path("eval-set-scores", model_name): {**columns, **about},
    }


def result_path(folder: str, model_name: str) -> str:
    """`folder/org/model.json`, also for the path of a local model: its last two parts, never outside of `folder`."""
    parts = [part for part in re.split(r"[\\/]+", model_name) if part not in ("", ".", "..")]
    return "/".join((folder, *parts[-2:])) + ".json" if parts else f"{folder}/model.json"
