"""What a report says first where it would be easy to say the wrong thing: missing scores, other units, chosen data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_sample import BestOf, perfect, scored, summary

from treeward.config.data import DatasetConfig
from treeward.evaluation.diagnostics.overlap import OverlapDiagnostics, OverlapFlag
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.findings import findings, length_finding, standing, verdict
from treeward.evaluation.report.blocks import check_blocks
from treeward.evaluation.running import ScoredSuite
from treeward.evaluation.statistics import wilson
from treeward.evaluation.suites import PreferenceSuite
from treeward.evaluation.summary import Summary, summarize
from treeward.evaluation.writing import report_blocks, write_results


class Coin(BestOf):
    def chance(self, part: str | None = None) -> float | None:
        return 0.5


def missing(n: int, text: str) -> float | None:
    """Of 100: 37 right, 55 wrong, 8 without a score, as a model of short limits on LLMBar."""
    if n >= 92:
        return None
    return float(("right" in text) == (n % 92 < 37))


def block(blocks: list[dict[str, Any]], title: str) -> dict[str, Any]:
    return next(one for one in blocks if one.get("title") == title)


def test_missing_scores_make_no_model_worse_than_chance(tmp_path: Path) -> None:
    made = summary(missing, suite=Coin(), count=100)
    result = made.result
    assert result.headline.value == 0.37 and result.headline.high < 0.5  # as the published suites count
    of_scored = result.headline_of_scored
    assert of_scored is not None and of_scored.count == 92 and of_scored.value == 37 / 92
    assert (of_scored.low, of_scored.high) == pytest.approx(wilson(37, 92))
    assert standing(result, 0.5) == "no better than chance"
    said = verdict(made)
    assert "overall 37.0% (28.2% to 46.8%) with the 8 of 100 examples without a score counted as wrong" in said
    assert "40.2% (30.8% to 50.4%) of the scored ones; no better than chance" in said
    assert "The interval of the scored examples contains 50 %" in findings(made) and "worse" not in findings(made)
    cards = {card["label"]: card for card in report_blocks([made])[1]["items"]}
    assert (
        cards["Overall of the scored"]["value"] == of_scored.value
        and "92 examples" in cards["Overall of the scored"]["note"]
    )
    write_results(tmp_path, [made], report=False)
    (plain,) = json.loads((tmp_path / "results.json").read_text())["results"]
    assert (
        plain["standing"] == "no better than chance"
        and plain["chance"] == 0.5
        and plain["verdict"] == said.replace("**", "")
    )
    assert plain["headline_of_scored"]["count"] == 92 and plain["headline"]["value"] == 0.37


def test_a_subset_is_not_at_chance_because_its_scores_are_missing() -> None:
    made = summary(lambda n, text: None if n % 3 == 1 and n > 20 else perfect(n, text), suite=Coin())
    even = next(one for one in made.result.subsets if one.name == "even")
    assert even.low < 0.5  # most of it has no score
    assert "Nothing shows" not in findings(made)
    none = summary(lambda n, text: None, suite=Coin())
    assert standing(none.result, 0.5) is None and "chance" not in verdict(none)
    whole = summary(perfect, suite=Coin())
    assert whole.result.headline_of_scored is None and "scored" not in verdict(whole)
    assert not any("of the scored" in card["label"] for card in report_blocks([whole])[1]["items"])


def test_missing_scores_of_long_replies_are_no_length_bias() -> None:
    # Where the longer reply is right (n odd) many have no score: right in few of these pairs, without any bias.
    made = summary(lambda n, text: None if n % 2 and n < 60 else perfect(n, text), suite=Coin())
    assert made.length.accuracy_gap.value == 0 and made.length.length_controlled_accuracy.value == 1
    assert "likes" not in findings(made)
    left = (
        "30 pairs have no score and are left out"  # a third reply would have one more, and where n is even none lacks
    )
    assert f"By length and by markdown: {left}." in findings(made) and "left out" not in findings(summary(perfect))
    cards = {card["label"]: card for card in report_blocks([made])[1]["items"]}
    for label in ("Length-controlled accuracy", "Length gap in accuracy"):
        assert cards[label]["note"].endswith(f"; {left}")
    # What becomes of a pair still has them.
    assert block(report_blocks([made]), "What becomes of a pair")["values"][0][3] == pytest.approx(30 / 48)


def test_the_length_sentence_has_the_gap_and_its_interval_and_the_models_standing() -> None:
    made = summary(lambda n, text: float(len(text)), suite=Coin())
    numbers = made.length.numbers
    gap = numbers["accuracy_gap"]
    said = length_finding(numbers)
    assert said is not None and f"100.0 points ({gap.low * 100:.1f} to {gap.high * 100:.1f}) apart" in said
    assert "chance" not in said and length_finding(numbers, "better than chance") == said
    assert str(length_finding(numbers, "no better than chance")).endswith("; it is no better than chance here.")
    shorter = summary(lambda n, text: -float(len(text))).length.numbers
    assert "It likes shorter" in str(length_finding(shorter)) and "points (-" not in str(length_finding(shorter))


def many(scores: list[tuple[float | None, ...]], suite: PreferenceSuite | None = None) -> Summary:
    """Examples of three replies each, best first, as a set of preferences."""
    texts = ("short", "a longer reply", "the longest reply of all")
    found = []
    for n, own in enumerate(scores):
        completions = tuple(({"role": "assistant", "content": text},) for text in texts)
        example = EvalExample(str(n), "s", ({"role": "user", "content": f"{n}?"},), completions, (0, 1, 2))
        found.append(ScoredExample(example, own, tuple(map(len, texts)), (1, 1, 1)))
    flags = tuple(OverlapFlag(str(n), "s", 1.0, 1.0, ("prompt",) if n < 2 else (), True) for n in range(len(scores)))
    suite = suite or PreferenceSuite("mine", DatasetConfig(data_path="x"))
    return summarize(ScoredSuite("m", suite, tuple(found), None), overlap=OverlapDiagnostics(flags, 13, 0.7, 5))


def test_pairs_and_examples_are_told_apart_where_both_are_counted() -> None:
    made = many([(2.0, 1.0, 0.0)] * 6 + [(2.0, 0.0, 1.0)] * 2 + [(1.0, 2.0, 0.0)] * 2)
    assert made.result.unit == "pairs" and made.result.headline.value == 26 / 30
    split = made.without_overlap
    assert split is not None and split.accuracy_flagged.count == 6 and split.accuracy_clean.value == 20 / 24
    headline = made.result.headline
    for name in ("value", "low", "high", "count", "note"):  # one number has one meaning
        assert getattr(split.accuracy, name) == getattr(headline, name), name
    assert str(headline.note) == "The interval is over 10 prompts, which the 30 pairs share."
    assert "of 30 pairs" in verdict(made) and "accuracy 100.0% (34.2% to 100.0%) on these and 83.3%" in findings(made)
    blocks = report_blocks([made])
    check_blocks(blocks, ["mine"])
    assert blocks[1]["items"][0]["note"] == "30 pairs of 10 examples"
    assert "counts pairs" in block(blocks, "Accuracy and overlap")["note"]
    assert "counts pairs" in block(blocks, "Accuracy by which completion is longer")["note"]


def test_figures_of_length_have_the_same_strata() -> None:
    """200 characters are within 10 % of 222, but 222 not within 10 % of 200."""
    sizes = [(221, 200), (200, 221), (222, 200), (225, 200), (200, 225), (100, 300)]
    found = [
        ScoredExample(
            EvalExample(str(n), "s", ({"role": "user", "content": f"{n}"},),
                        tuple(({"role": "assistant", "content": "x" * size},) for size in pair), (0, 1)),
            (1.0, 0.0), pair, (1, 1),
        )
        for n, pair in enumerate(sizes)
    ]  # fmt: skip
    blocks = report_blocks([summarize(ScoredSuite("m", Coin(), tuple(found), None))])
    bars = [item["count"] for item in block(blocks, "Accuracy by which completion is longer")["series"][0]["items"][:3]]
    rows = block(blocks, "What becomes of a pair")["rows"]
    assert bars == [1, 2, 3]
    assert rows == ["better is longer (1 pair)", "about as long (3 pairs)", "better is shorter (2 pairs)"]


def test_overlap_is_split_in_the_headlines_unit_with_its_ties() -> None:
    tied = (0.5, 0.5, 0.0)  # the best two: one of three pairs is a tie
    for policy, value in (("strict", 2 / 3), ("half", 2.5 / 3)):
        suite = PreferenceSuite("mine", DatasetConfig(data_path="x"), tie_policy=policy)  # type: ignore[arg-type]
        examples = many([tied] * 12, suite)
        assert examples.without_overlap is not None
        assert examples.result.headline.value == examples.without_overlap.accuracy.value == pytest.approx(value)
    holed = many([(2.0, None, 0.0)] * 3)
    assert holed.without_overlap is not None
    assert holed.result.headline.value == holed.without_overlap.accuracy.value == pytest.approx(1 / 3)


def test_no_subset_is_the_worst_where_all_are_alike() -> None:
    alike, apart = summary(perfect), summary(lambda n, text: -1.0 if n == 4 and "right" in text else perfect(n, text))
    assert "worst subset" not in findings(alike) and "Its worst subset is even" in findings(apart)
    labels = [[card["label"] for card in report_blocks([one])[1]["items"]] for one in (alike, apart)]
    assert "Worst subset" not in labels[0] and "Worst subset" in labels[1]


def test_a_temperature_is_named_only_where_it_helps() -> None:
    def card(made: Summary) -> dict[str, Any]:
        return next(one for one in report_blocks([made])[1]["items"] if one["label"] == "Calibration error")

    # As often right as they say, but for one that is wrong and very sure: the likelihood gives up the others for it.
    harmed = summary(
        lambda n, text: (40.0 if n == 3 else 3.0) * float(("right" in text) == (n != 3 and n % 20 != 5)), suite=Coin()
    )
    helped = summary(lambda n, text: 6.0 * float(("right" in text) == (n % 4 > 0)))
    for made, is_helped in ((harmed, False), (helped, True)):
        before, after = made.statistics.ece.value, made.statistics.ece_fitted.value
        assert before is not None and after is not None and (after < before) == is_helped, (before, after)
    assert "note" not in card(harmed) and "once margins are divided by" in card(helped)["note"]


def test_one_number_has_one_interval() -> None:
    even = summarize(ScoredSuite("m", PreferenceSuite("mine", DatasetConfig(data_path="x")), two_replies(60), None))
    headline, controlled, pairs = (
        even.result.headline,
        even.length.length_controlled_accuracy,
        even.statistics.pair_accuracy,
    )
    assert controlled.count == headline.count == 60
    assert (controlled.value, controlled.low, controlled.high) == (headline.value, headline.low, headline.high)
    assert (pairs.low, pairs.high) == (headline.low, headline.high)


def two_replies(count: int) -> tuple[ScoredExample, ...]:
    """Pairs whose better reply is the longer in every other one; two examples share each prompt."""
    found = []
    for n, one in enumerate(scored(lambda n, text: float(("right" in text) == (n % 7 > 0)), count)):
        context = ({"role": "user", "content": f"{n // 2}?"},)
        example = EvalExample(str(n), "s", context, one.example.completions[:2], (0, 1))
        found.append(ScoredExample(example, one.scores[:2], one.lengths[:2], one.num_tokens[:2]))
    return tuple(found)


def test_the_temperature_behind_saturated_pairs_is_named() -> None:
    def note(made: Summary, name: str) -> str:
        tables = [one for one in report_blocks([made]) if one["kind"] == "table"]
        return str(next(row["note"] for one in tables for row in one["rows"] if row.get("metric") == name))

    wrong = summary(lambda n, text: -10 * perfect(n, text))
    assert wrong.statistics.temperature.value is None and wrong.scores.saturated.value > 0
    assert "no temperature is fitted, so it is taken as 1" in note(wrong, "saturated")
    assert "better completions do not score higher" in note(wrong, "temperature")
    assert "taken as 1" not in note(summary(perfect), "saturated")


def test_no_explanation_is_said_twice_and_the_unit_of_style_is_reconciled_with_rewrites() -> None:
    blocks = report_blocks([summary(perfect)])
    notes = [row["note"] for one in blocks if one["kind"] == "table" for row in one["rows"] if "metric" in row]
    for note in notes:
        assert note.count("scores within a prompt") + note.count("all prompts") <= 1, note
    assert "--perturbations" in block(blocks, "Style in numbers")["note"]
    shown = json.dumps(blocks)
    assert "The suite's number" not in shown and "Stability index" not in shown


def test_what_chose_the_model_is_said_beside_the_verdict(tmp_path: Path) -> None:
    class Chosen(BestOf):
        caveat = "These examples chose the checkpoint among 6, so the number is too good."

    made = summary(perfect, suite=Chosen())
    assert verdict(made).endswith(f". {Chosen.caveat}")
    write_results(tmp_path, [made, summary(perfect, "b")])
    first, second = json.loads((tmp_path / "results.json").read_text())["results"]
    assert first["caveat"] == Chosen.caveat and second["caveat"] is None
    blocks = json.loads((tmp_path / "report.json").read_text())["blocks"]
    assert blocks[0]["markdown"].count(Chosen.caveat) == 1
