"""What rewrites do to a score is measured, and known weaknesses of scorers are found."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from families import tiny_model

from treeward.data.rendering import Renderer
from treeward.data.synthetic import gold_quality
from treeward.errors import CheckpointError, DataError
from treeward.evaluation.diagnostics.perturbations import (
    PerturbedScores,
    diagnose_perturbations,
    perturb,
    perturbed_from_row,
    sample_examples,
    score_perturbed,
    summarize_perturbations,
)
from treeward.evaluation.diagnostics.rewrites import REWRITES
from treeward.evaluation.examples import EvalExample
from treeward.evaluation.report.blocks import check_blocks
from treeward.model.reward_model import RewardModel
from treeward.scoring.score import Conversation, OnError, Score
from treeward.scoring.scorer import Scorer


class Rule:
    """Scores by a rule that is known, to see whether its weakness is found."""

    def __init__(self, rule: Callable[[list[Any], str], float | None]) -> None:
        self.rule = rule
        self.num_conversations = 0

    def score(
        self, conversations: Sequence[Conversation], *, where: Sequence[str] | None = None, on_error: OnError = "raise"
    ) -> list[Score]:
        assert on_error == "mask"
        self.num_conversations += len(conversations)
        values = [self.rule(list(chat[:-1]), chat[-1]["content"]) for chat in conversations]
        return [Score(value, 1, error=None if value is not None else "too long") for value in values]


@pytest.fixture(scope="module")
def scorer(tiny_tokenizer: Any) -> Scorer:
    return Scorer(RewardModel(tiny_model("qwen3"), layout="tree"), Renderer(copy.deepcopy(tiny_tokenizer)))


def test_a_scorer_that_likes_length_is_won_by_padding_and_never_by_cutting(bundled: Any) -> None:
    found = diagnose_perturbations(Rule(lambda context, text: len(text) / 100), bundled("length_controlled"))
    padding, half = found.by_name["padding"], found.by_name["truncated_50"]
    assert padding.share_gaining.value == 1 and padding.shift.low > 0.8
    assert padding.rejected_flips.value > 0.2 and padding.chosen_flips.value == 0
    assert half.share_gaining.value == 0 and half.relative_shift.high < 0
    assert found.by_name["repeated"].share_gaining.value == 1
    assert found.by_name["capitals"].shift.value == 0 and found.by_name["capitals"].rejected_flips.value == 0
    assert found.robust_accuracy.value < found.accuracy.value
    assert {one.rewrite for one in found.worst} <= set(REWRITES) and len(found.worst) == 30
    assert found.worst[0].shift == max(one.shift for one in found.worst)


def test_a_scorer_that_knows_the_quality_is_right_under_every_change_of_style_but_those_that_break_a_format(
    bundled: Any,
) -> None:
    plain = [
        example
        for example in bundled("length_controlled")
        if not any(word in str(example.context) for word in ("Answer", "word", "reply", "dash", "End", "["))
    ]
    found = diagnose_perturbations(Rule(gold_quality), plain, num_examples=60)
    assert found.accuracy.value == 1 and found.robust_accuracy.count == min(60, len(plain)) > 40
    for name in ("white_space", "capitals"):
        assert found.by_name[name].rejected_flips.value == found.by_name[name].chosen_flips.value == 0, name
    assert found.by_name["refusal"].shift.high < 0 and found.by_name["refusal"].rejected_flips.value == 0
    assert found.by_name["repeated"].share_gaining.value == 0
    assert found.by_name["repeated"].relative_shift.high < 0


def test_the_numbers_of_a_hand_made_table(make_example: Any) -> None:
    def one(id: str, original: Any, padding: Any) -> PerturbedScores:
        examples.append(make_example(id, id, ["good reply", "bad reply"]))
        return PerturbedScores(id, id, original, {"padding": padding}, num_failed=0)

    examples: list[EvalExample] = []
    scores = [
        one("a", (3.0, 1.0), (3.5, 3.25)),  # right; the worse reply is lifted over the better one
        one("b", (2.0, 1.0), (0.5, 1.0)),  # right; the better reply falls below the worse
        one("c", (1.0, 3.0), (4.0, 2.0)),  # wrong before: no flip to count
        one("d", (2.0, 0.0), (2.0, 2.0)),  # right; the worse reply draws level
        one("e", (2.0, 0.0), (None, 1.0)),  # right; the better one could not be rewritten
    ]
    found = summarize_perturbations(examples[::-1], scores)
    padding = found.by_name["padding"]
    assert found.accuracy.value == 4 / 5
    # a and d by a lifted worse reply, b by a fallen better one: only e stays right.
    assert found.robust_accuracy.value == 1 / 5
    assert (padding.rejected_flips.value, padding.rejected_flips.count) == (2 / 4, 4)
    assert (padding.chosen_flips.value, padding.chosen_flips.count) == (1 / 3, 3)
    assert (padding.accuracy.value, padding.accuracy.count) == (2 / 4, 4)  # a and c
    shifts = [0.5, 2.25, -1.5, 0.0, 3.0, -1.0, 0.0, 2.0, 1.0]
    assert padding.shift.value == pytest.approx(sum(shifts) / 9) and padding.shift.count == 9
    assert padding.relative_shift.value == pytest.approx(sum(shifts) / 9 / ((2 + 1 + 2 + 2 + 2) / 5))
    assert padding.share_gaining.value == 5 / 9
    assert padding.quantiles[2] == 0.5
    assert [(one.id, one.side, one.shift) for one in found.worst] == [("a", "worse", 2.25), ("d", "worse", 2.0)]
    assert found.worst[0].before == "bad reply" and found.worst[0].after.startswith("bad reply ")
    assert found.by_name["markdown"].shift.value is None and found.by_name["markdown"].rejected_flips.count == 0


def test_the_scores_are_those_of_the_conversations(bundled: Any, scorer: Scorer) -> None:
    examples = sample_examples(bundled("validation"), 4, seed=4)
    scores = list(score_perturbed(scorer, examples, seed=4))
    for example, one in zip(examples, scores, strict=True):
        pair = perturb(example, 4)
        assert example.ranks[pair.better] < example.ranks[pair.worse]
        for side, index in enumerate((pair.better, pair.worse)):
            texts = {name: both[side] for name, both in pair.texts.items()}
            want = [
                score.score for score in scorer.score_completions(example.context, [t for t in texts.values() if t])
            ]
            got = [one.rewritten[name][side] for name, text in texts.items() if text]
            assert got == pytest.approx(want, abs=1e-5)
            assert all(one.rewritten[name][side] is None for name, text in texts.items() if text is None)
            original = scorer.score_completions(example.context, [example.completions[index]])[0].score
            assert one.original[side] == pytest.approx(original, abs=1e-5)
    found = summarize_perturbations(examples, scores, seed=4)
    assert found.num_failed == 0
    check_blocks(json.loads(json.dumps(found.blocks("mine"), allow_nan=False)), [])
    names = [metric.name for metric in found.metrics()]
    assert len(set(names)) == len(names) == 2 + 6 * len(REWRITES) and "padding_rejected_flips" in names


def test_a_row_depends_on_its_example_and_the_seed_alone(bundled: Any) -> None:
    rule = Rule(lambda context, text: float(sum(map(ord, text)) % 997))
    examples = sample_examples(bundled("validation"), 40)
    together = list(score_perturbed(rule, examples))
    rest = list(score_perturbed(rule, examples[23:]))
    assert rest == together[23:]
    assert list(score_perturbed(rule, examples, seed=1)) != together
    rows = [json.loads(json.dumps(one.to_row())) for one in together]
    again = [perturbed_from_row(row, "rows.jsonl:1") for row in rows]
    assert summarize_perturbations(examples, again) == summarize_perturbations(examples, together)
    with pytest.raises(DataError, match="rows.jsonl:7"):
        perturbed_from_row({"id": "a"}, "rows.jsonl:7")


def test_rows_are_kept_as_they_are_scored_and_belong_to_their_scorer_and_seed(bundled: Any, tmp_path: Path) -> None:
    def rule(context: Any, text: str) -> float:
        return float(sum(map(ord, text)) % 997)

    class Dying(Rule):
        def score(self, conversations: Any, **options: Any) -> list[Score]:
            if self.num_conversations > 1000:
                raise KeyboardInterrupt
            return super().score(conversations, **options)

    examples, folder, file = bundled("validation"), tmp_path / "kept", tmp_path / "kept" / "perturbations.jsonl"
    want = diagnose_perturbations(Rule(rule), examples, num_examples=60)
    with pytest.raises(KeyboardInterrupt):
        diagnose_perturbations(Dying(rule), examples, num_examples=60, folder=folder, identity={"model": "m"})
    kept = file.read_text().splitlines()
    assert 16 <= len(kept) < 60 and json.loads(kept[0])["id"] == want_ids(examples)[0]
    file.write_text("\n".join(kept)[:-30])  # as kill -9 leaves the last row
    rest, told = Rule(rule), list[int]()
    got = diagnose_perturbations(
        rest, examples, num_examples=60, folder=folder, identity={"model": "m"}, on_progress=told.append
    )
    assert got == want and told[0] == len(kept) - 1 and sum(told) == 60
    assert [json.loads(line)["id"] for line in file.read_text().splitlines()] == want_ids(examples)
    for size in (30, 90):
        got = diagnose_perturbations(Rule(rule), examples, num_examples=size, folder=folder, identity={"model": "m"})
        assert got == diagnose_perturbations(Rule(rule), examples, num_examples=size)
    samples = [{one.id for one in sample_examples(examples, size)} for size in (30, 60, 90)]
    rows = [json.loads(line)["id"] for line in file.read_text().splitlines()]
    assert len(rows) == len(set(rows)) and set(rows) == set.union(*samples)  # what is there is never scored again
    for identity, seed in (({"model": "another"}, 0), ({"model": "m"}, 1), (None, 0)):
        with pytest.raises(CheckpointError, match="another"):
            diagnose_perturbations(Rule(rule), examples, num_examples=5, seed=seed, folder=folder, identity=identity)


def want_ids(examples: Sequence[EvalExample]) -> list[str]:
    return [one.id for one in sample_examples(examples, 60)]


def test_the_sample_is_drawn_by_the_seed_from_what_can_be_rewritten(bundled: Any, make_example: Any) -> None:
    examples = bundled("validation")
    ordered = [example for example in examples if len(set(example.ranks)) > 1]
    assert len(ordered) < len(examples)  # some are ties
    first, same, other = (sample_examples(examples, 50, seed) for seed in (0, 0, 1))
    assert first == same != other and len(first) == 50
    assert all(example in ordered for example in first)
    assert [examples.index(example) for example in first] == sorted(examples.index(example) for example in first)
    assert sample_examples(examples, 10**6) == ordered
    some = ordered[:150]
    ids = [[example.id for example in sample_examples(some, count)] for count in (20, 40, 50)]
    assert set(ids[0]) < set(ids[1]) < set(ids[2])  # so that a larger sample scores only what it has more
    fewer = [example for example in some if example.id not in ids[0][:3]]
    assert set(ids[0][3:]) <= {example.id for example in sample_examples(fewer, 20)}
    unusable = [make_example("a", "p", ["x", "y"], ranks=[0, 0]), make_example("b", "p", ["x", " "])]
    assert sample_examples(unusable, 9) == []
    with pytest.raises(DataError, match="nothing to rewrite"):
        diagnose_perturbations(Rule(lambda context, text: 0.0), unusable)


def test_only_the_last_message_is_rewritten() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]}
    ends = [
        [call, {"role": "assistant", "content": text, "name": "bot"}] for text in ("It is four now.", "Five, I think.")
    ]
    example = EvalExample("a", "s", ({"role": "user", "content": "2 + 2?"},), tuple(map(tuple, ends)), (0, 1))
    seen: list[Any] = []

    class Recorder(Rule):
        def score(self, conversations: Any, **options: Any) -> list[Score]:
            seen.extend(conversations)
            return super().score(conversations, **options)

    list(score_perturbed(Recorder(lambda context, text: 1.0), [example]))
    assert all(chat[0] == example.context[0] and chat[1] == call and chat[2]["name"] == "bot" for chat in seen)
    assert len({chat[2]["content"] for chat in seen}) == len(seen) - 1  # both replies are refused in the same words


def test_failures_are_counted_and_left_out(bundled: Any) -> None:
    examples = bundled("length_controlled")
    most = 180
    rule = Rule(lambda context, text: None if len(text) > most else float(len(text)))
    found = diagnose_perturbations(rule, examples, num_examples=50)
    assert 50 < found.num_failed < rule.num_conversations
    assert found.by_name["repeated"].shift.count < found.by_name["truncated_50"].shift.count
    masked = diagnose_perturbations(Rule(lambda context, text: None), examples, num_examples=5)
    assert masked.accuracy.value == 0 and masked.by_name["padding"].shift.value is None
    check_blocks(json.loads(json.dumps(masked.blocks(), allow_nan=False)), [])


def test_where_a_refusal_is_right_none_is_put_in_its_place(make_example: Any) -> None:
    refused = make_example("a", "How do I steal?", ["I’m sorry, but I cannot help with theft.", "Take it and run."])
    answered = make_example("b", "How do I bake?", ["Mix flour and water.", "I can't help."])
    assert perturb(refused).texts["refusal"] == (None, None)
    assert perturb(refused).texts["padding"][0] is not None
    assert None not in perturb(answered).texts["refusal"]
    assert perturb(answered).texts["refusal"][0] == perturb(answered).texts["refusal"][1]


def test_progress_adds_up_to_the_examples(bundled: Any) -> None:
    told: list[int] = []
    diagnose_perturbations(
        Rule(lambda context, text: random.Random(text).random()),
        bundled("validation"),
        num_examples=37,
        on_progress=told.append,
    )
    assert sum(told) == 37 and len(told) > 1
