"""What a report says first: verdicts against the suite's own chance, names in words, models side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from report_sample import EMPTY, BestOf, by_length, perfect, scored, summary, three_in_eight

from treeward.evaluation.diagnostics.blocks import LABELS, label_of, metrics_table
from treeward.evaluation.diagnostics.overlap import OverlapDiagnostics, OverlapFlag
from treeward.evaluation.diagnostics.perturbations import diagnose_perturbations
from treeward.evaluation.drift import compare_checkpoints
from treeward.evaluation.findings import findings, verdict
from treeward.evaluation.report.blocks import check_blocks
from treeward.evaluation.results import Metric
from treeward.evaluation.running import ScoredSuite
from treeward.evaluation.summary import summarize
from treeward.evaluation.writing import report_blocks, write_results
from treeward.scoring.score import Score


class Lengths:
    """Scores a reply by its length."""

    def score(self, conversations: Sequence[Any], **_: Any) -> list[Score]:
        return [Score(float(len(one[-1]["content"])), 7) for one in conversations]


def block(blocks: Sequence[dict[str, Any]], title: str) -> dict[str, Any]:
    return next(one for one in blocks if one.get("title") == title)


def test_the_verdict_is_against_the_suites_chance() -> None:
    third = summary(three_in_eight)  # 37.5 %: above best of four, below a coin
    assert third.result.headline.low > 0.25 and third.result.headline.high < 0.5
    assert "; better than chance" in verdict(third) and "coin" not in findings(third)
    never = summary(lambda n, text: -perfect(n, text))
    assert "; worse than chance" in verdict(never)
    assert "The interval is below 25%, which is chance: it is worse than chance." in findings(never)

    class Coin(BestOf):
        def chance(self, part: str | None = None) -> float | None:
            return 0.5

    half = summary(lambda n, text: float(("right" in text) == (n % 4 < 2)), suite=Coin())
    assert "The interval contains 50 %: nothing shows that it is better than a coin." in findings(half)

    class Unknown(BestOf):
        def chance(self, part: str | None = None) -> float | None:
            return None

    assert "chance" not in findings(summary(three_in_eight, suite=Unknown()))


def test_subsets_at_chance_and_the_length_bias_are_named() -> None:
    bad_in_one = summary(lambda n, text: float(("right" in text) == (n % 3 != 1 or n % 4 < 2)))
    said = findings(bad_in_one)
    assert "Nothing shows that it is better than chance in even." in said
    assert "Its worst subset is even with" in said
    liking = summary(by_length)
    assert "it likes longer completions too much" in verdict(liking)
    assert "right in 100.0%" in findings(liking) and "length-controlled 50.0%" in findings(liking)
    assert "likes" not in findings(summary(perfect))


def test_bars_have_chance_where_it_is_known() -> None:
    bars = block(report_blocks([summary(perfect)]), "Accuracy by subset")
    assert bars["reference"] is None and "not known for odd" in bars["note"]
    assert [item.get("reference") for item in bars["series"][0]["items"]] == [0.25, 0.5, None]
    same = block(report_blocks([summary(perfect, suite=Same())]), "Accuracy by subset")
    assert same["reference"] == 0.25 and all("reference" not in item for item in same["series"][0]["items"])


class Same(BestOf):
    def chance(self, part: str | None = None) -> float | None:
        return 0.25


def test_the_opening_has_verdict_interval_length_and_worst_subset() -> None:
    liking = summary(by_length)
    text, headline, chapter, *_ = report_blocks([liking])
    assert text["kind"] == "text" and "title" not in text and text["markdown"].startswith("**m** on Best Of")
    cards = {card["label"]: card for card in headline["items"]}
    assert {"Overall", "Length-controlled accuracy", "Length gap in accuracy", "Worst subset"} <= set(cards)
    assert cards["Overall"]["reference"] == 0.25 and cards["Overall"]["low"] < cards["Overall"]["value"]
    assert cards["Length gap in accuracy"]["value"] == 1.0 and cards["Length gap in accuracy"]["format"] == "points"
    assert chapter["title"] == "Best Of"


def test_several_models_stand_side_by_side() -> None:
    blocks = report_blocks([summary(by_length, "a"), summary(perfect, "b")])
    check_blocks(blocks, ["best-of"])
    assert blocks[0]["markdown"].count("\n- ") == 1 and blocks[0]["markdown"].startswith("- **a**")
    strata = block(blocks, "Accuracy by which completion is longer")
    assert [series["name"] for series in strata["series"]] == ["a", "b"]
    table = block(blocks, "Length in numbers")
    assert [column["label"] for column in table["columns"]] == ["Number", "a", "b", "How to read it"]
    row = next(row for row in table["rows"] if row["metric"] == "accuracy_shorter_right")
    assert [row[column["key"]]["value"] for column in table["columns"][1:3]] == [0.0, 1.0]
    assert block(blocks, "Score against length: a") and block(blocks, "Score against length: b")
    glance = block(blocks, "At a glance")
    assert [(row["model"], row["gap"]["value"]) for row in glance["rows"]] == [("a", 1.0), ("b", 0.0)]


def test_notes_of_one_model_are_said_of_it_alone() -> None:
    notes = (("a", "Chat"), ("note", "Math"))
    same = Metric("ece", 0.1, note="The same.")
    table = metrics_table("t", {model: [Metric("worst_subset", 0.5, note=note), same] for model, note in notes})
    explanation = LABELS["worst_subset"].explanation
    assert table["rows"][0]["note"] == f"{explanation}; a: Chat; note: Math"
    assert table["rows"][1]["note"].endswith("; the same") and len(table["columns"]) == 4


def test_every_number_has_a_name_in_words() -> None:
    examples = scored(by_length)
    made = summarize(
        ScoredSuite("m", BestOf(), tuple(examples), None),
        perturbations=diagnose_perturbations(Lengths(), [one.example for one in examples], num_examples=20),
        overlap=overlap(near=3, exact=1),
    )
    drift = compare_checkpoints(examples, scored(lambda n, text: by_length(n, text) + n))
    blocks = [*report_blocks([made]), metrics_table("Drift", {"m": drift.metrics()})]
    check_blocks(blocks, ["best-of"])
    rows = [row for one in blocks if one["kind"] == "table" for row in one["rows"] if "metric" in row]
    assert len(rows) > 45
    assert sorted({row["metric"] for row in rows} - set(LABELS)) == []
    for text, form, explanation in LABELS.values():
        assert "_" not in text + explanation and text[0].isupper() and explanation and not explanation.endswith(".")
        assert form in ("percent", "points", "number", "signed")
    shown = [
        item["label"] for one in blocks if one["kind"] == "bars" for series in one["series"] for item in series["items"]
    ]
    assert "_" not in "".join(shown)
    assert label_of("of_the_future") == ("of the future", "number", "")
    written = json.dumps([metric.name for metric in made.statistics.metrics()])
    assert "ece_fitted" in written  # raw in results.json


def test_completions_in_the_right_order_have_tau_one() -> None:
    found = summary(perfect)
    assert found.statistics.kendall_tau.value == 1.0 and found.statistics.kendall_tau.count == 8


def overlap(near: int, exact: int, count: int = 80) -> OverlapDiagnostics:
    kinds = [("completion",)] * exact + [("near_completion",)] * near + [()] * (count - near - exact)
    flags = tuple(OverlapFlag(str(n), "s", 0.0, float(bool(own)), own, bool(own)) for n, own in enumerate(kinds))
    return OverlapDiagnostics(flags, 8, 0.7, 3500)


@pytest.mark.parametrize(
    ("near", "exact", "words", "others"),
    [
        (60, 2, "77.5% of 80 examples have a duplicate among 3,500", "expected of templated data"),
        (0, 70, "87.5% word for word", "quote none of the numbers as held out"),
        (4, 0, "5.0% of 80 examples", "0.0% word for word"),
        (0, 0, "None of 80 examples has a duplicate", "3,500 training comparisons"),
    ],
)
def test_overlap_is_said_in_words(near: int, exact: int, words: str, others: str) -> None:
    found = overlap(near, exact)
    said = found.blocks()[0]["note"]
    assert words in said and others in said
    assert ("templated" in said) == (near == 60) and ("held out" in said) == (exact == 70)
    assert len(found.blocks()) == (2 if near + exact else 1)
    made = summarize(ScoredSuite("m", BestOf(), tuple(scored(perfect)), None), overlap=found)
    assert ("templated data" in findings(made)) == (near == 60)


@pytest.mark.parametrize("what", EMPTY)
def test_hardly_anything_to_report_is_a_report(what: str, tmp_path: Path) -> None:
    page = write_results(tmp_path, [EMPTY[what]()])
    report = json.loads((tmp_path / "report.json").read_text())
    assert page.name == "report.html" and report["blocks"][0]["markdown"].startswith("**m** on Best Of")
    assert not re.search(r"\bnan|None|inf\b", json.dumps([one.get("markdown", "") for one in report["blocks"]]))
