"""RewardBench: 2985 pairs in four sections (Lambert et al. 2024, arXiv 2403.13787).

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
from treeward.evaluation.parts import by_subset, combined
from treeward.evaluation.results import Metric, SuiteResult
from treeward.evaluation.suites.interface import Suite
from treeward.evaluation.suites.rows import Prompt, example, one_of, read_as, suite_rows, with_distinct_ids

_HEP = ("hep-cpp", "hep-go", "hep-java", "hep-js", "hep-python", "hep-rust")
WEIGHTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
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
        "Reasoning": {"math-prm": 984, **dict.fromkeys(_HEP, 164)},
    }
)
"""The weight of each subset in its section, however many of its pairs there are: its published size, but of math-prm
(447) that of the six code subsets together."""

_SUBSETS = tuple(subset for section in WEIGHTS.values() for subset in section)


class PairRow(BaseModel):
    """A row of the split `filtered`."""

    prompt: Prompt
    chosen: str
    rejected: str
    subset: Annotated[str, one_of(*_SUBSETS)]
    id: str | int


class RewardBench(Suite):
    """Pairs in 23 subsets; the headline is the mean of the sections."""

    name = "rewardbench"
    title = "RewardBench"
    hub_path = "allenai/reward-bench"
    num_published = 2985

    def load(self, source: str | None = None) -> list[EvalExample]:
        """The rows of the split `filtered`; see `Suite.load`."""
        examples = []
        for row in suite_rows(source, self.hub_path, split="filtered"):
            pair = read_as(PairRow, row)
            texts = (pair.chosen, pair.rejected)
            examples.append(example(row.where, pair.subset, pair.id, pair.prompt, texts, (0, 1)))
        return with_distinct_ids(examples)

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        groups = by_subset(scored)
        parts = {subset: self.part(subset, groups[subset]) for subset in _SUBSETS if subset in groups}
        sections: list[Metric] = []
        shares: dict[str, float] = {}
        for section, all_weights in WEIGHTS.items():
            if weights := {subset: weight for subset, weight in all_weights.items() if subset in parts}:
                sections.append(combined(section, [parts[subset] for subset in weights], list(weights.values())))
                shares |= {subset: weight / sum(weights.values()) for subset, weight in weights.items()}
        overall = combined("overall", list(parts.values()), [shares[subset] for subset in parts])
        return SuiteResult(self.name, overall, tuple(sections), tuple(part.metric for part in parts.values()))

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
            "scores_chosen": [one.scores[0] for one in scored],
            "scores_rejected": [one.scores[1] for one in scored],
        }
        return published_scores(scored, right, columns, model_name)


def published_scores(
    scored: Sequence[ScoredExample], subsets: Mapping[str, Any], columns: Mapping[str, Any], model_name: str
) -> dict[str, Any]:
    """The two result files of both RewardBenches: a number per subset, and the columns of scores.

    Their names end in `org/model.json`, also for the path of a local model: in its last two parts.
    """
    ids = {
        "subset": [one.example.subset for one in scored],
        "id": [one.example.suite_data.get("id", one.example.id) for one in scored],
    }
    about = {"model": model_name, "model_type": "Seq. Classifier", "chat_template": "tokenizer"}
    parts = [part for part in re.split(r"[\\/]+", model_name) if part not in ("", ".", "..")]
    file = "/".join(parts[-2:] or ["model"]) + ".json"
    return {f"eval-set/{file}": {**subsets, **about}, f"eval-set-scores/{file}": {**columns, **ids, **about}}
