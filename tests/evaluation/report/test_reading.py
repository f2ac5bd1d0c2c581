"""What a report says first: verdicts against the suite's own chance, missing scores, units, models side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from evaluated import RuleScorer
from report_sample import EMPTY, BestOf, by_length, perfect, scored, summary, three_in_eight

from treeward.evaluation.diagnostics.perturbations import diagnose_perturbations, perturbed
from treeward.evaluation.findings import (
    Summary,
    findings,
    length_finding,
    percent,
    standing,
    summarize,
    verdict,
)
from treeward.evaluation.page import LABELS, metrics_table, report_blocks, write_results
from treeward.evaluation.results import Metric, score_examples


class Coin(BestOf):
    def chance(self, part: str | None = None) -> float | None:
        return 0.5


def block(blocks: Sequence[dict[str, Any]], title: str) -> dict[str, Any]:
    return next(one for one in blocks if one.get("title") == title)


def cards(made: Summary) -> dict[str, dict[str, Any]]:
    return {card["label"]: card for card in report_blocks([made])[1]["items"]}


def test_the_verdict_is_against_the_suites_chance() -> None:
    third = summary(three_in_eight)  # 37.5 %: above best of four, below a coin
    assert third.result.headline.low > 0.25 and third.result.headline.high < 0.5
    assert "; better than chance" in verdict(third) and "coin" not in findings(third)
    never = summary(lambda n, text: -perfect(n, text))
    assert "; worse than chance" in verdict(never)
    half = summary(lambda n, text: float(("right" in text) == (n % 4 < 2)), suite=Coin())
    assert "; 80 examples cannot tell it from chance." in verdict(half)


def test_a_collapsed_model_is_called_so_and_nothing_else() -> None:
    same = summary(lambda n, text: 0.25 + n * 1e-6)
    assert same.is_collapsed
    assert verdict(same).endswith("; it is collapsed: it gives everything the same score, 0.250, and must not be used.")
    assert not summary(by_length).is_collapsed


def test_the_verdict_names_robustness_and_the_worst_rewrite() -> None:
    examples = scored(lambda n, text: -float(len(text)))
    rule = RuleScorer(lambda context, text: -float(len(text)))
    rewritten = list(score_examples(rule, [perturbed(one.example) for one in examples], at_once=16))
    numbers = diagnose_perturbations([one.example for one in examples], rewritten)
    made = summarize(BestOf(), tuple(examples), "m", perturbations=numbers)
    before, after = percent(numbers.accuracy), percent(numbers.robust_accuracy)
    sentence = f"of 80 rewritten pairs {before} are right before and {after} stay right after changes of style"
    assert sentence in verdict(made)
    assert "a worse completion that is rewritten (empty) scores as high as the better one in 100.0%" in findings(made)


def test_the_length_bias_is_named() -> None:
    liking = summary(by_length)
    assert "it likes longer completions too much" in verdict(liking)
    assert "right in 100.0%" in findings(liking) and "length-controlled 50.0%" in findings(liking)
    assert "likes" not in findings(summary(perfect))
    shorter = summary(lambda n, text: -float(len(text))).length.numbers
    assert "It likes shorter" in str(length_finding(shorter)) and "points (-" not in str(length_finding(shorter))


def test_several_models_stand_side_by_side() -> None:
    blocks = report_blocks([summary(by_length, "a"), summary(perfect, "b")])
    assert blocks[0]["markdown"].count("\n- ") == 1 and blocks[0]["markdown"].startswith("- **a**")
    strata = block(blocks, "Accuracy by which completion is longer")
    assert [series["name"] for series in strata["series"]] == ["a", "b"]
    table = block(blocks, "Every number")
    assert [column["label"] for column in table["columns"]] == ["Number", "a", "b", "How to read it"]
    row = next(row for row in table["rows"] if row["metric"] == "accuracy_shorter_right")
    assert [row[column["key"]]["value"] for column in table["columns"][1:3]] == [0.0, 1.0]
    glance = block(blocks, "At a glance")
    assert [(row["model"], row["Length gap in accuracy"]["value"]) for row in glance["rows"]] == [
        ("a", 1.0),
        ("b", 0.0),
    ]
    same = Metric("ece", 0.1, note="The same.")
    rows = metrics_table("t", {m: [Metric("worst_subset", 0.5, note=n), same] for m, n in (("a", "X"), ("b", "Y"))})
    assert rows["rows"][0]["note"].endswith(". a: X b: Y") and rows["rows"][1]["note"].endswith(". The same.")


def test_every_number_has_a_name_in_words() -> None:
    examples = scored(by_length)
    made = summarize(
        BestOf(),
        tuple(examples),
        "m",
        perturbations=diagnose_perturbations(
            [one.example for one in examples],
            list(score_examples(RuleScorer(), [perturbed(one.example) for one in examples], at_once=16)),
        ),
    )
    blocks = report_blocks([made])
    rows = [row for one in blocks if one["kind"] == "table" for row in one["rows"] if "metric" in row]
    # there are no grades
    assert {row["metric"] for row in rows} | {"mse", "pearson"} == set(LABELS)
    for text, form, explanation in LABELS.values():
        assert "_" not in text + explanation and text[0].isupper() and not explanation.endswith(".")
        assert form in ("percent", "points", "number", "signed")
    items = [item["label"] for one in blocks if one["kind"] == "bars" for own in one["series"] for item in own["items"]]
    assert "_" not in "".join(items)


@pytest.mark.parametrize("what", EMPTY)
def test_hardly_anything_to_report_is_a_report(what: str, tmp_path: Path) -> None:
    page = write_results(tmp_path, [EMPTY[what]()])
    report = json.loads((tmp_path / "report.json").read_text())
    assert page.name == "report.html" and report["blocks"][0]["markdown"].startswith("**m** on Best Of")
    assert not re.search(r"\bnan|None|inf\b", json.dumps([one.get("markdown", "") for one in report["blocks"]]))


def missing(n: int, text: str) -> float | None:
    """Of 100: 37 right, 55 wrong, 8 without a score, as a model of short limits on LLMBar."""
    return None if n % 92 != n else float(("right" in text) == (n % 92 < 37))


def test_missing_scores_make_no_model_worse_than_chance(tmp_path: Path) -> None:
    made = summary(missing, suite=Coin(), count=100)
    result = made.result
    assert result.headline.value == 0.37 and result.headline.high < 0.5  # as the published suites count
    said = verdict(made)
    assert "overall 37.0% (28.2% to 46.8%), 92 of 100 scored." in said
    assert "92 of 100 scored" in cards(made)["Overall"]["note"]
    write_results(tmp_path, [made])
    (plain,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert (plain["standing"], plain["chance"]) == (None, 0.5) and plain["verdict"] == said.replace("**", "")


def test_without_any_score_nothing_is_said_of_chance() -> None:
    none = summary(lambda n, text: None, suite=Coin())
    assert standing(none.result, 0.5) is None and "chance" not in verdict(none)
