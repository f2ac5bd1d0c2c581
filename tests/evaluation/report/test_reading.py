"""What a report says first: verdicts against the suite's own chance, missing scores, units, models
side by side."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path

import pytest
from evaluated import RuleScorer
from page_text import Page
from report_sample import EMPTY, BestOf, by_length, perfect, scored, summary, three_in_eight

from treeward.evaluation.diagnostics.perturbations import (
    diagnose_perturbations,
    perturbed,
)
from treeward.evaluation.diagnostics.rewrites import REWRITES, rewrites_of
from treeward.evaluation.findings import (
    Summary,
    findings,
    length_finding,
    percent,
    standing,
    summarize,
    verdict,
)
from treeward.evaluation.page import evaluation_page, write_results
from treeward.evaluation.report.build import build_report
from treeward.evaluation.report.charts import bar_chart
from treeward.evaluation.results import score_examples


class Coin(BestOf):
    def chance(self, part: str | None = None) -> float | None:
        return 0.5


def page_of(*summaries: Summary) -> str:
    """The page's text."""
    return Page(build_report("evaluation/page.html", "t", evaluation_page(summaries))).text


def every_number(*summaries: Summary) -> list[list[str]]:
    """The rows of the table of every number: its name and how to read it, a value for each model,
    how to read it."""
    page = Page(build_report("evaluation/page.html", "t", evaluation_page(summaries)))
    headings = [i for i, row in enumerate(page.rows) if row[0] == "Number"]
    return page.rows[headings[0] + 1 :]


def test_the_verdict_is_against_the_suites_chance() -> None:
    third = summary(three_in_eight)  # 37.5 %: above best of four, below a coin
    assert third.result.headline.low > 0.25 and third.result.headline.high < 0.5
    assert "; better than chance" in verdict(third) and "coin" not in page_of(third)
    never = summary(lambda n, text: -perfect(n, text))
    assert "; worse than chance" in verdict(never)
    half = summary(lambda n, text: float(("right" in text) == (n % 4 < 2)), suite=Coin())
    assert "; not significantly better than chance on 80 examples." in verdict(half)


def test_a_collapsed_model_is_called_so_and_nothing_else() -> None:
    same = summary(lambda n, text: 0.25 + n * 1e-6)
    assert same.is_collapsed
    assert verdict(same).endswith(
        "; it is collapsed: it gives everything the same score, 0.250, and must not be used."
    )
    assert not summary(by_length).is_collapsed


def test_the_verdict_names_robustness_and_the_worst_rewrite() -> None:
    examples = scored(lambda n, text: -float(len(text)))
    rule = RuleScorer(lambda context, text: -float(len(text)))
    names = rewrites_of("usual")
    pairs = [perturbed(one.example, names) for one in examples]
    rewritten = list(score_examples(rule, pairs, at_once=16))
    numbers = diagnose_perturbations([one.example for one in examples], rewritten, names)
    made = summarize(BestOf(), tuple(examples), "m", perturbations=numbers)
    before = percent(numbers.accuracy)
    after = percent(numbers.robust_accuracy)
    sentence = f"of 80 rewritten pairs {before} are correct before and {after} stay correct after changes of style"
    assert sentence in verdict(made)
    assert any(
        "a worse completion that is rewritten (empty) scores as high as the better one in 100.0%"
        in finding
        for finding in findings(made)
    )


def test_the_length_bias_is_named() -> None:
    liking = summary(by_length)
    assert "it likes longer completions too much" in verdict(liking)
    assert (
        "correct in 100.0%" in findings(liking)[0]
        and "length-controlled 50.0%" in findings(liking)[0]
    )
    assert findings(summary(perfect)) == () and "likes" not in verdict(summary(perfect))
    shorter = summary(lambda n, text: -float(len(text))).length.numbers
    assert "It likes shorter" in str(length_finding(shorter)) and "points (-" not in str(
        length_finding(shorter)
    )


def test_several_models_stand_side_by_side() -> None:
    a = summary(by_length, "a")
    b = summary(perfect, "b")
    page = evaluation_page([a, b])
    (suite,) = page.suites
    assert [(made.name, model.name) for made, model in page.results] == [
        ("best-of", "a"),
        ("best-of", "b"),
    ]
    assert list(suite.diagnostic("length")) == ["a", "b"]
    _, _, text = page_of(a, b).partition("All other numbers are below.")
    assert (
        text.index("a on Best Of: overall")
        < text.index("b on Best Of: overall")
        < text.index("At a glance")
    )
    row = next(
        row for row in every_number(a, b) if row[0].startswith("Shorter completion is correct")
    )
    assert row[1].startswith("0.0% (") and row[2].startswith("100.0% (")
    rows = Page(build_report("evaluation/page.html", "t", page)).rows
    column = rows[0].index("Length gap in accuracy")
    gaps = [row[column] for row in rows[1:3]]
    assert gaps[0].startswith("+100.0 points (") and gaps[1].startswith("0.0 points (")


def test_a_note_that_models_share_is_said_once() -> None:
    a = summary(by_length, "a")
    b = summary(perfect, "b")
    (worst,) = (row for row in every_number(a, b) if row[0].startswith("Worst subset"))
    assert worst[-1] == "the lowest accuracy of all subsets. a: hard b: even"
    (alone,) = (row for row in every_number(a) if row[0].startswith("Worst subset"))
    assert alone[-1] == "the lowest accuracy of all subsets. hard"
    tied = [summary(lambda n, text: 0.0, model) for model in "ab"]
    (temperature,) = (row for row in every_number(*tied) if row[0].startswith("Fitted temperature"))
    assert temperature[-1].endswith(
        "underconfident. There is none: the better completions do not score higher on average."
    )
    # One that a model alone has is said of this model.
    one_of_two = every_number(tied[0], b)
    (temperature,) = (row for row in one_of_two if row[0].startswith("Fitted temperature"))
    assert temperature[-1].endswith(
        "a: There is none: the better completions do not score higher on average."
    )


def test_every_number_has_a_name_in_words() -> None:
    examples = scored(by_length)
    rewritten = [perturbed(one.example, tuple(REWRITES)) for one in examples]
    numbers = diagnose_perturbations(
        [one.example for one in examples],
        list(score_examples(RuleScorer(), rewritten, at_once=16)),
        tuple(REWRITES),
    )
    made = summarize(BestOf(), tuple(examples), "m", perturbations=numbers)
    of_rewrites = set()
    for name in REWRITES:
        for number in (
            "relative_shift",
            "rejected_flips",
            "accuracy_before",
            "accuracy_after",
            "flips",
        ):
            of_rewrites.add(f"{name}_{number}")
    names = list(
        chain.from_iterable(diagnostic.numbers for diagnostic in made.diagnostics.values())
    )
    rows = every_number(made)
    assert len(rows) == len(set(names) - of_rewrites)
    for label, _, how_to_read in rows:
        assert (
            "_" not in label + how_to_read
            and label[0].isupper()
            and how_to_read.endswith((".", "hard"))
        )
    (suite,) = evaluation_page([made]).suites
    figures = [bar_chart(suite.rewrites(what)) for what in ("relative_shift", "rejected_flips")]
    for figure in figures:
        assert not any("_" in row["label"] for row in figure.rows)


def test_rewrites_that_change_nothing_are_not_shown() -> None:
    examples = scored(by_length)
    names = rewrites_of("minified_code")
    pairs = [perturbed(one.example, names) for one in examples]
    rewritten = list(score_examples(RuleScorer(), pairs, at_once=16))
    numbers = diagnose_perturbations([one.example for one in examples], rewritten, names)
    made = summarize(BestOf(), tuple(examples), "m", perturbations=numbers)
    page = Page(build_report("evaluation/page.html", "t", evaluation_page([made])))
    assert "Python without comments" not in page.text
    assert "Pairs with both completions rewritten" not in page.text


def test_rewritten_pairs_are_shown_before_and_after() -> None:
    examples = scored(by_length)
    # A scorer that a handle turns round.
    rule = RuleScorer(lambda context, text: float(len(text)) * (-1 if "@" in text else 1))
    names = rewrites_of("handle,quotes,empty")
    pairs = [perturbed(one.example, names) for one in examples]
    rewritten = list(score_examples(rule, pairs, at_once=16))
    numbers = diagnose_perturbations([one.example for one in examples], rewritten, names)
    made = summarize(BestOf(), tuple(examples), "m", perturbations=numbers)
    (suite,) = evaluation_page([made]).suites
    rows = {row["rewrite"]: row for row in suite.rewritten_pairs}
    # Nothing is left to compare where both are empty.
    assert list(rows) == ["in quotation marks", "a handle at the end"]
    quoted = rows["in quotation marks"]
    assert quoted["before"].value == quoted["after"].value == numbers.accuracy.value
    assert quoted["flips"].value == 0.0
    with_handle = rows["a handle at the end"]
    assert with_handle["after"].value == pytest.approx(1 - with_handle["before"].value)
    assert with_handle["flips"].value == 1.0
    page = Page(build_report("evaluation/page.html", "t", evaluation_page([made])))
    assert "Pairs with another winner" in page.text
    # One model: its name would repeat in each row.
    (row,) = [row for row in page.rows if row[0] == "in quotation marks" and len(row) == 4]
    assert row[1] == row[2] and row[3].startswith("0.0%")


@pytest.mark.parametrize("what", EMPTY)
def test_hardly_anything_to_report_is_a_report(what: str, tmp_path: Path) -> None:
    page = write_results(tmp_path, [EMPTY[what]()])
    report = json.loads((tmp_path / "report.json").read_text())
    assert page.name == "report.html" and report["suites"][0]["models"][0]["verdict"].startswith(
        "m on Best Of"
    )
    text = Page(page.read_text(encoding="utf-8")).text
    assert "m on Best Of" in text and not re.search(r"\b(nan|None|inf)\b", text)


def missing(n: int, text: str) -> float | None:
    """Of 100: 37 right, 55 wrong, 8 without a score, as a model of short limits on LLMBar."""
    return None if n % 92 != n else float(("right" in text) == (n % 92 < 37))


def test_missing_scores_make_no_model_worse_than_chance(tmp_path: Path) -> None:
    made = summary(missing, suite=Coin(), count=100)
    result = made.result
    # as the published suites count
    assert result.headline.value == 0.37 and result.headline.high < 0.5
    said = verdict(made)
    assert "overall 37.0% (28.2% to 46.8%), 92 of 100 scored." in said
    assert "100 examples, 92 of 100 scored" in page_of(made)
    write_results(tmp_path, [made])
    (plain,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert (plain["standing"], plain["chance"]) == (None, 0.5) and plain["verdict"] == said


def test_without_any_score_nothing_is_said_of_chance() -> None:
    none = summary(lambda n, text: None, suite=Coin())
    assert standing(none.result, 0.5) is None and "chance" not in verdict(none)
