"""Every example is scored once and kept; an interrupted evaluation goes on; rows of another model never mix in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from treeward.errors import CheckpointError, ConfigError, DataError
from treeward.evaluation.examples import EvalExample
from treeward.evaluation.kept_rows import claim
from treeward.evaluation.results import Metric, SuiteResult
from treeward.evaluation.running import common_reasons, evaluate, folder_names, load_suites
from treeward.evaluation.suites import Suite, get_suite
from treeward.scoring.score import Conversation, OnError, Score


class Sums(Suite):
    """Comparisons of sums; `source` says how many."""

    name = "sums"

    def load(self, source: str | None = None) -> list[EvalExample]:
        return [
            EvalExample(
                id=str(n),
                subset="even" if n % 2 == 0 else "odd",
                context=({"role": "user", "content": f"{n} + 1?"},),
                completions=tuple(
                    ({"role": "assistant", "content": text},) for text in (f"{n + 1}.", "No idea at all.")
                ),
                ranks=(0, 1),
            )
            for n in range(int(source or 150))
        ]

    def _compute(self, scored: Any) -> SuiteResult:
        return SuiteResult(self.name, Metric("accuracy", None))


class Lengths:
    """A model whose score is the length of the reply; it dies when it has scored `most` conversations."""

    def __init__(self, most: int | None = None, refuse: str | None = None) -> None:
        self.num_scored, self.most, self.refuse = 0, most, refuse

    def score(
        self, conversations: Sequence[Conversation], *, where: Sequence[str] | None = None, on_error: OnError = "raise"
    ) -> list[Score]:
        if self.most is not None and self.num_scored + len(conversations) > self.most:
            raise KeyboardInterrupt
        self.num_scored += len(conversations)
        return [
            Score(None, 7, error="refused")
            if c[0]["content"] == self.refuse
            else Score(float(len(c[-1]["content"])), 7)
            for c in conversations
        ]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "m" / "sums" / "examples.jsonl").read_text().splitlines()]


def test_rows_are_kept_in_order_and_failures_say_why(tmp_path: Path) -> None:
    (scored,) = evaluate({"m": Lengths(refuse="3 + 1?")}, [(Sums(), None)], tmp_path)
    assert [one.example.id for one in scored.examples] == [str(n) for n in range(150)]
    assert scored.examples[0].scores == (2.0, 15.0) and scored.examples[0].outcome == "wrong"
    assert scored.examples[3].scores == (None, None) and scored.examples[3].errors == ("refused", "refused")
    assert scored.examples[10].lengths == (3, 15) and scored.examples[10].num_tokens == (7, 7)
    rows = lines(tmp_path)
    assert [row["id"] for row in rows] == [str(n) for n in range(150)] and rows[3]["outcome"] == "failed"


def test_an_interrupted_evaluation_goes_on_and_scores_nothing_twice(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        evaluate({"m": Lengths(most=200)}, [(Sums(), None)], tmp_path)
    kept = len(lines(tmp_path))
    assert 0 < kept < 150
    file = tmp_path / "m" / "sums" / "examples.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])  # as kill -9 leaves it
    model = Lengths()
    seen: list[tuple[str, int, int]] = []
    (scored,) = evaluate({"m": model}, [(Sums(), None)], tmp_path, on_progress=lambda *what: seen.append(what))
    assert model.num_scored == 2 * (150 - (kept - 1))
    assert [row["id"] for row in lines(tmp_path)] == [str(n) for n in range(150)]
    assert [one.example.id for one in scored.examples] == [str(n) for n in range(150)]
    assert seen[0][1:] == (kept - 1, 150) and seen[-1][1:] == (150, 150)
    again = Lengths()
    assert evaluate({"m": again}, [(Sums(), None)], tmp_path)[0].examples == scored.examples and again.num_scored == 0


@pytest.mark.parametrize("what", ["model", "examples", "rows without a name", "damaged"])
def test_rows_of_another_evaluation_are_refused(what: str, tmp_path: Path) -> None:
    evaluate({"m": Lengths()}, [(Sums(), None)], tmp_path, identities={"m": "one"})
    identity = tmp_path / "m" / "sums" / "evaluation.json"
    if what == "rows without a name":
        identity.unlink()
    if what == "damaged":
        identity.write_text("{")
    with pytest.raises(CheckpointError, match="holds an evaluation of another"):
        evaluate(
            {"m": Lengths()},
            [(Sums(), "149" if what == "examples" else None)],
            tmp_path,
            identities={"m": "two" if what == "model" else "one"},
        )


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    evaluate({"m": Lengths()}, [(Sums(), None)], tmp_path)
    file = tmp_path / "m" / "sums" / "examples.jsonl"
    whole = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*whole[:2], '{"id": \n', *whole[3:]]))
    with pytest.raises(DataError, match=r"examples\.jsonl:3: the row is damaged"):
        evaluate({"m": Lengths()}, [(Sums(), None)], tmp_path)


def test_nothing_to_evaluate_and_two_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no examples"):
        evaluate({"m": Lengths()}, [(Sums(), "0")], tmp_path)
    with pytest.raises(ConfigError, match="one name"):
        evaluate({"m": Lengths()}, [(Sums(), None), (Sums(), "3")], tmp_path)
    assert not list(tmp_path.iterdir())
    assert len(evaluate({"m": Lengths()}, [(Sums(), None)], limit=5)[0].examples) == 5


def test_folder_names_say_which_model_is_meant() -> None:
    assert folder_names(["org/model-a", "org/model-b"]) == {"org/model-a": "model-a", "org/model-b": "model-b"}
    runs = folder_names(["results/a/final", "results/b/final/"])
    assert list(runs.values()) == ["a-final", "b-final"]
    assert list(folder_names(["results/quickstart/final"]).values()) == ["quickstart-final"]
    assert len(set(folder_names(["final", "org/final", "."]).values())) == 3


@pytest.mark.parametrize("models", [["org/m", "org/m"], ["a", "runs/final", "./runs/final/"]])
def test_a_model_that_is_named_twice_is_refused(models: list[str]) -> None:
    with pytest.raises(ConfigError, match="named twice") as raised:
        folder_names(models)
    assert raised.value.got == f"{models[-2]}, {models[-1]}"


def test_a_folder_that_another_process_writes_is_refused_and_left_alone(tmp_path: Path) -> None:
    model, second = Lengths(), Lengths()
    refusals: list[CheckpointError] = []
    score = model.score

    def score_while_another_tries(conversations: Sequence[Conversation], **options: Any) -> list[Score]:
        with pytest.raises(CheckpointError, match="another process is writing rows") as raised:
            evaluate({"m": second}, [(Sums(), None)], tmp_path)
        refusals.append(raised.value)
        return score(conversations, **options)

    model.score = score_while_another_tries  # type: ignore[method-assign]
    evaluate({"m": model}, [(Sums(), None)], tmp_path)
    assert refusals and second.num_scored == 0 and "--output" in str(refusals[0].fix)
    assert [row["id"] for row in lines(tmp_path)] == [str(n) for n in range(150)]
    evaluate({"m": second}, [(Sums(), None)], tmp_path)  # the lock is gone, and nothing is left to score
    assert second.num_scored == 0


def test_the_rows_of_one_limit_are_of_use_to_another(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def run(limit: int | None) -> tuple[int, int]:
        model = Lengths()
        (scored,) = evaluate(
            {"m": model}, [(Sums(), None)], tmp_path, limit=limit, on_progress=lambda *what: seen.append(what)
        )
        assert [one.example.id for one in scored.examples] == [str(n) for n in range(limit or 150)]
        return model.num_scored, len(lines(tmp_path))

    assert [run(limit) for limit in (5, 20, 10, None)] == [(10, 5), (30, 20), (0, 20), (260, 150)]
    assert all(done <= total for _, done, total in seen)


def test_what_has_no_score_is_warned_of_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    evaluate({"m": Lengths(refuse="3 + 1?")}, [(Sums(), None)])
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == "m on sums: 1 of 150 examples have no score and count as wrong (refused)."
    caplog.clear()
    evaluate({"m": Lengths()}, [(Sums(), None)])
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_reasons_that_differ_in_numbers_alone_are_one() -> None:
    errors = {f"too long to score: {n} tokens, at most 512": 2 for n in (600, 1700, 801)}
    errors |= {"gold_3 is null": 4, "gold_4 is null": 1}
    assert common_reasons(errors) == [
        ("too long to score: 600 tokens, at most 512, and 2 like it with other numbers", 6),
        ("gold_3 is null", 4),
        ("gold_4 is null", 1),
    ]


def test_a_suite_that_the_hub_does_not_give_advises_a_copy_of_it() -> None:
    with pytest.raises(DataError, match="llmbar cannot be had from the hub") as raised:
        load_suites([(get_suite("llmbar"), None)])  # tests are offline
    assert "llmbar=FOLDER" in str(raised.value.fix) and "data_path" not in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "got"),
    [
        ({"truncation": "truncate_left"}, "other settings of the same model: truncation drop -> truncate_left"),
        (
            {"truncation": "truncate_left", "max_length": "768"},
            "other settings of the same model: truncation drop -> truncate_left, max_length 512 -> 768",
        ),
        ({"weights": "b", "max_length": "768"}, "another model"),
        ({}, "another model"),
    ],
)
def test_other_settings_are_named(changed: dict[str, str], got: str, tmp_path: Path) -> None:
    settings = {"weights": "a", "truncation": "drop", "max_length": "512"}
    names = {"rows": "rows.jsonl", "summary": "refused"}
    claim(tmp_path, {"model": "1", "examples": "e"}, "of.json", settings=settings, **names)
    claim(tmp_path, {"model": "1", "examples": "e"}, "of.json", settings=settings | changed, **names)  # never decides
    with pytest.raises(CheckpointError) as raised:
        claim(tmp_path, {"model": "2", "examples": "e"}, "of.json", settings=settings | changed, **names)
    assert raised.value.got == got
    with pytest.raises(CheckpointError) as raised:
        claim(tmp_path, {"model": "2", "examples": "f"}, "of.json", settings=settings | changed, **names)
    assert raised.value.got == f"{got} and another examples"
