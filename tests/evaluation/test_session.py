"""A whole evaluation: read once, one model at a time, nothing scored twice or mixed, and everything
in the files."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluated import RuleScorer, preference
from families import tiny_model
from signed import signed

from treeward.config.scoring import EnsembleConfig, RewardShapingConfig
from treeward.data.preference import Preference
from treeward.data.rendering import Renderer
from treeward.errors import CheckpointError, ConfigError, DataError
from treeward.evaluation.results import SuiteResult
from treeward.evaluation.session import Candidate, run_evaluation
from treeward.evaluation.suites import get_suite
from treeward.evaluation.suites.interface import Suite
from treeward.model.contract import NormalizationConstants, RewardCalibration
from treeward.scoring.ensemble import EnsembleScorer
from treeward.scoring.identity import scorer_identity
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import RewardScorer, Shaper

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
)


class Questions(Suite):
    """Comparisons of answers."""

    name = "questions"
    title = "Questions"

    def load(self, source: str | None = None) -> list[Preference]:
        examples = []
        for n in range(int(source or 90)):
            example = preference(
                id=str(n),
                subset="even" if n % 2 == 0 else "odd",
                prompt=f"How many are {n} and {n * n} stones, put on one heap?",
                texts=[f"It is {n}.", "It is not known."],
            )
            examples.append(example)
        return examples

    def _compute(self, scored: Any) -> SuiteResult:
        return SuiteResult(self.name, self.part("accuracy", scored))


def candidate(name: str, model: RuleScorer | None = None, **fields: Any) -> Candidate:
    return Candidate(name, lambda: (model or RuleScorer(), {"model": name}), **fields)


@pytest.mark.slow
def test_an_interrupted_evaluation_scores_the_rest_and_its_numbers_are_the_same(
    tmp_path: Path,
) -> None:
    def run(model: RuleScorer, output: Path, perturbations: int = 60) -> Any:
        suites = [(Questions(), None)]
        [summary], _ = run_evaluation(
            [candidate("m", model)], suites, output, num_perturbations=perturbations
        )
        return summary

    whole = RuleScorer()
    want = run(whole, tmp_path / "whole")
    num_rewritten = whole.num_scored - 180
    # It dies while it scores the rows, and once more while it scores the rewritten replies.
    for most in (130, 180 + num_rewritten // 2):
        with pytest.raises(KeyboardInterrupt):
            run(RuleScorer(most=most), tmp_path / "cut")
    folder = tmp_path / "cut" / "m" / "questions"
    kept = [json.loads(line) for line in (folder / "perturbations.jsonl").read_text().splitlines()]
    assert 0 < len(kept) < 60 and len((folder / "examples.jsonl").read_text().splitlines()) == 90
    remaining = RuleScorer()
    got = run(remaining, tmp_path / "cut")
    assert remaining.num_scored == num_rewritten - sum(len(row["scores"]) for row in kept)
    assert got.perturbations == want.perturbations
    read = [
        json.loads((tmp_path / name / "results.json").read_text())["results"]
        for name in ("whole", "cut")
    ]
    assert read[0] == read[1]
    again = RuleScorer()
    assert run(again, tmp_path / "cut").perturbations == want.perturbations
    assert again.num_scored == 0
    more = RuleScorer()
    grown = run(more, tmp_path / "cut", 80)
    assert grown.perturbations.accuracy.count == 80
    assert 0 < more.num_scored < num_rewritten  # what the smaller sample has is not scored again


def test_rows_of_an_evaluation_that_goes_on_within_a_chunk_are_the_same_to_the_byte(
    tmp_path: Path,
) -> None:
    class Beside(RuleScorer):
        """A score depends on what is scored beside it, as that of a model by rounding."""

        def score(self, conversations: Sequence[Any], **options: Any) -> Any:
            scores = super().score(conversations, **options)
            total = sum(score.score for score in scores)
            return [dataclasses.replace(score, score=total + i) for i, score in enumerate(scores)]

    def run() -> bytes:
        run_evaluation([candidate("m", Beside())], [(Questions(), None)], tmp_path)
        return rows.read_bytes()

    rows = tmp_path / "m" / "questions" / "examples.jsonl"
    whole = run()
    lines = whole.splitlines(keepends=True)
    for kept in (1, 63, 64, 70):
        rows.write_bytes(b"".join(lines[:kept]))
        assert run() == whole


def test_what_is_complete_is_written_where_a_later_model_fails(tmp_path: Path) -> None:
    def no_model() -> tuple[RuleScorer, dict[str, Any]]:
        raise ConfigError("there is no such folder", where="nowhere")

    candidates = [candidate("x", note="mine"), Candidate("y", no_model), candidate("z")]
    with pytest.raises(ConfigError, match="no such folder"):
        run_evaluation(candidates, [(Questions(), "8")], tmp_path)
    content = json.loads((tmp_path / "results.json").read_text())
    assert [result["model"] for result in content["results"]] == ["x"]
    assert content["notes"] == "x: mine; missing, after an error: y, z"
    assert (tmp_path / "report.html").exists()
    with pytest.raises(ConfigError, match="no such folder"):
        run_evaluation(candidates[1:], [(Questions(), "8")], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_names_that_would_share_a_folder(tmp_path: Path) -> None:
    for models, suites, words in (
        (
            [candidate("a"), candidate("a")],
            [(Questions(), None)],
            "no models, or two of one name(?s:.*)name: ..., model",
        ),
        ([], [(Questions(), None)], "no models"),
        (
            [candidate("a")],
            [(Questions(), None), (Questions(), None)],
            "no suites, or two(?s:.*)one after the other",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            run_evaluation(models, suites, tmp_path)
    run_evaluation([candidate("a")], [(Questions(), None)], tmp_path)
    with pytest.raises(CheckpointError, match="another model"):
        run_evaluation(
            [Candidate("a", lambda: (RuleScorer(), {"model": "another"}))],
            [(Questions(), None)],
            tmp_path,
        )


def test_examples_of_one_id_stay_apart(tmp_path: Path) -> None:
    """Also where the data has an id that would be made for the second of another."""

    class Repeated(Questions):
        def load(self, source: str | None = None) -> list[Preference]:
            ids = ("a#2", "a", "a", "b", "b", "b#2")
            examples = super().load("6")
            return [dataclasses.replace(one, id=id) for one, id in zip(examples, ids, strict=True)]

    [summary], _ = run_evaluation([candidate("m")], [(Repeated(), None)], tmp_path)
    ids = [scored.example.id for scored in summary.examples]
    assert ids == ["a#2", "a", "a#3", "b", "b#2", "b#2#2"]
    prompts = {scored.example.prompt_key for scored in summary.examples}
    assert len(prompts) == 6


def test_rows_of_other_tools_are_other_data(tmp_path: Path) -> None:
    """The tools of a row are a part of what the model reads."""

    class WithTools(Questions):
        name_of_tool = "sum"

        def load(self, source: str | None = None) -> list[Preference]:
            tool = {"type": "function", "function": {"name": self.name_of_tool}}
            variables = {"tools": [tool]}
            examples = super().load("2")
            return [dataclasses.replace(one, template_kwargs=variables) for one in examples]

    suite = WithTools()
    run_evaluation([candidate("m")], [(suite, None)], tmp_path)
    run_evaluation([candidate("m")], [(suite, None)], tmp_path)
    suite.name_of_tool = "product"
    with pytest.raises(CheckpointError, match="examples"):
        run_evaluation([candidate("m")], [(suite, None)], tmp_path)


def test_the_identity_is_what_a_score_or_reward_depends_on(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model, _, contract = signed(
        tmp_path, tiny_tokenizer, tiny_model("llama", seed=1), max_length=200
    )

    def scorer(mean: float = 3.0, **settings: Any) -> Scorer:
        constants = RewardCalibration(normalization=NormalizationConstants(mean=mean, std=2.0))
        renderer = Renderer(copy.deepcopy(tiny_tokenizer), **({"max_length": 200} | settings))
        return Scorer(
            model, renderer, contract=contract.model_copy(update={"calibration": constants})
        )

    def shaped(inner: Any, **section: Any) -> RewardScorer:
        known = inner.contract.calibration if isinstance(inner, Scorer) else None
        return RewardScorer(inner, Shaper(RewardShapingConfig(**section), calibration=known))

    def ensemble(members: Sequence[Scorer], **section: Any) -> EnsembleScorer:
        return EnsembleScorer(members, EnsembleConfig(**section), names=["a", "b"])

    plain = scorer_identity(scorer(), "m")
    assert (
        plain
        == scorer_identity(scorer(), "another folder")
        == scorer_identity(scorer(mean=4.0), "m")
    )
    penalty = {"length_penalty": {"coefficient": 0.1}}
    two = [scorer(), scorer(max_length=150)]
    identities = [
        plain,
        scorer_identity(scorer(max_length=100), "m"),
        scorer_identity(scorer(truncation="truncate_left"), "m"),
        scorer_identity(scorer(chat_template=TEMPLATE), "m"),
        shaped_identity := scorer_identity(shaped(scorer(), **penalty), "m"),
        scorer_identity(shaped(scorer(), length_penalty={"coefficient": 0.2}), "m"),
        scorer_identity(shaped(scorer(), normalize_rewards=True), "m"),
        scorer_identity(shaped(scorer(mean=4.0), normalize_rewards=True), "m"),
        scorer_identity(ensemble(two), "m"),
        scorer_identity(ensemble(two[::-1]), "m"),
        scorer_identity(ensemble(two, method="worst"), "m"),
        scorer_identity(ensemble([scorer(mean=4.0), two[1]]), "m"),
        scorer_identity(shaped(ensemble(two), **penalty), "m"),
    ]
    assert len({json.dumps(one, sort_keys=True) for one in identities}) == len(identities)
    # Constants that nothing uses are no part of it.
    assert scorer_identity(shaped(scorer(mean=4.0), **penalty), "m") == shaped_identity
    unsigned = Scorer(model, Renderer(copy.deepcopy(tiny_tokenizer)))
    before = scorer_identity(unsigned, "m")
    assert before != scorer_identity(unsigned, "n") and before == scorer_identity(unsigned, "m")
    with torch.no_grad():
        next(unsigned.model.parameters())[0, 0] += 1e-3
    assert before != scorer_identity(Scorer(model, Renderer(copy.deepcopy(tiny_tokenizer))), "m")
    assert scorer_identity(RuleScorer(), "mine") == {"model": "mine"}


def test_a_suite_that_is_empty_or_that_the_hub_does_not_give() -> None:
    with pytest.raises(DataError, match="no examples"):
        run_evaluation([candidate("m")], [(Questions(), "0")])
    with pytest.raises(DataError, match="give a local copy instead"):
        run_evaluation([candidate("m")], [(get_suite("llmbar"), None)])  # tests are offline
