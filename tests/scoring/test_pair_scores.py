"""Verdicts in JSON: what is read, what is none, and the tie-breaker by hand."""

from __future__ import annotations

import os

import pytest

from treeward.config.load import load_section
from treeward.config.reward_environments import JudgeEnvironmentConfig
from treeward.errors import ConfigError
from treeward.scoring.pair_scores import PairScores, all_pair_scores, read_pair_scores
from treeward.scoring.verdicts import (
    Answer,
    NoVerdict,
    Verdict,
    expected_verdict,
    labels,
    make_question,
    read_answer,
)

SECTION = {"model": "some-model", "mode": "pairwise", "verdict": "scores"}


def config(**keys: object) -> JudgeEnvironmentConfig:
    return load_section(JudgeEnvironmentConfig, {**SECTION, **keys}, where="judge")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"score_1": 4, "score_2": 3, "ranking": 2}', (4, 3, 2)),
        ('Both. ```json\n{"score_1": 1, "score_2": 5, "ranking": 6}\n``` So.', (1, 5, 6)),
        ('```JSON {"score_1": "4", "score_2": 3.5, "ranking": 2} ```', (4, 3.5, 2)),
        # The last of both kinds: the judge may quote a block of a completion before its verdict,
        # for which the prompt asks as a line.
        (
            'It claims: ```json {"score_1": 5, "score_2": 1, "ranking": 1} ```\n'
            '{"score_1": 2, "score_2": 2, "ranking": 4}',
            (2, 2, 4),
        ),
        (
            'It claims {"score_1": 5, "score_2": 1, "ranking": 1}. '
            '```json {"score_1": 2, "score_2": 2, "ranking": 4} ``` And {"note": 1}.',
            (2, 2, 4),
        ),
        # Braces of the prose around a block do not hide its verdict.
        ('{ ```json {"score_1": 2, "score_2": 3, "ranking": 4} ``` }', (2, 3, 4)),
        # The last of several: the first may be what a completion wrote.
        (
            '```json {"score_1": 5, "score_2": 1, "ranking": 1} ``` no, '
            '```json {"score_1": 1, "score_2": 2, "ranking": 4} ```',
            (1, 2, 4),
        ),
        (
            '{"score_1": 5, "score_2": 1, "ranking": 1} no: '
            '{"score_1": 1, "score_2": 2, "ranking": 4} {"note": 1}',
            (1, 2, 4),
        ),
        (
            '{"rubric_evaluations": [{"score_1": 5, "score_2": 5, "ranking": 1}], '
            '"overall": {"score_1": 3, "score_2": 2, "ranking": 3}}',
            (3, 2, 3),
        ),
        # Braces and quotes of the prose, and within strings.
        (
            'In f"{x} and {{y the set: {1} {"why": "a } \\" {", '
            '"score_1": 3, "score_2": 4, "ranking": 5}',
            (3, 4, 5),
        ),
        ('{"score_1": 6, "score_2": 3, "ranking": 2}', None),
        ('{"score_1": 0, "score_2": 3, "ranking": 2}', None),
        ('{"score_1": 4, "score_2": 3, "ranking": 7}', None),
        ('{"score_1": 4, "score_2": 3, "ranking": NaN}', None),
        ('{"score_1": 4, "score_2": 3}', None),
        ('{"ranking": 1}', None),
        ('{"score_1": true, "score_2": 3, "ranking": 2}', None),
        ('{"score_1": null, "score_2": 3, "ranking": 2}', None),
        ('{"score_1": "good", "score_2": 3, "ranking": 2}', None),
        ("score_1: 4, score_2: 3, ranking: 2", None),
        ("[[A]]", None),
        ("", None),
        ("{" * 100_000, None),
        ('{"a":' * 20_000 + "}" * 20_000, None),
    ],
)
def test_what_is_a_verdict(text: str, expected: tuple[float, float, float] | None) -> None:
    scores = read_pair_scores(text)
    assert scores == (None if expected is None else PairScores(*expected))


def test_a_default_is_taken_only_where_it_is_asked_for_and_only_for_what_is_absent() -> None:
    defaults = {"default_score": 3.0, "default_ranking": 3.5}
    assert read_pair_scores('{"ranking": 1}', **defaults) == PairScores(3, 3, 1)
    assert read_pair_scores('{"score_1": 5}', **defaults) == PairScores(5, 3, 3.5)
    assert read_pair_scores('{"score_1": 5, "score_2": 9}', **defaults) is None
    assert read_pair_scores("no verdict", **defaults) is None


def test_equal_scores_move_apart_by_the_ranking() -> None:
    assert PairScores(4, 3, 6).tie_broken == (4, 3)
    assert PairScores(3, 3, 5).tie_broken == (1.5, 4.5)
    assert PairScores(5, 5, 1).tie_broken == (7.5, 2.5)
    labelled = [PairScores(4, 3, 6), PairScores(3, 3, 5), PairScores(3, 3, 3.5)]
    assert [scores.label for scores in labelled] == ["A", "B", "C"]


def test_an_outcome_has_scores_too() -> None:
    assert PairScores.of_outcome(1.0) == PairScores(5, 1, 1)
    assert PairScores.of_outcome(0.0) == PairScores(1, 5, 6)
    assert PairScores.of_outcome(0.5) == PairScores(3, 3, 3.5)
    assert Verdict(0.75, "A").pair_scores == PairScores(4, 2, 2.25)


def test_the_question_asks_for_scores_and_the_answer_is_read_strictly() -> None:
    question = make_question(config(), "user: 2 + 2?", ["4", "{completion_a}"])[1]["content"]
    assert '{"score_1": 3, "score_2": 3, "ranking": 4}' in question
    assert question.index("\n4\n") < question.index("\n{completion_a}\n")

    verdict = read_answer(Answer('So {"score_1": 2, "score_2": 2, "ranking": 5}'), config())
    assert isinstance(verdict, Verdict)
    assert (verdict.value, verdict.label) == (0.0, "B")
    assert verdict.pair_scores == PairScores(2, 2, 5)
    cut = read_answer(Answer('{"score_1": 2, "score_2": 2, "ranking": 5}', is_cut=True), config())
    assert isinstance(cut, NoVerdict) and cut.is_cut
    label = read_answer(Answer("[[A]]"), config())
    assert isinstance(label, NoVerdict) and "JSON" in label.reason


def test_the_pairs_of_a_group_begin_alike() -> None:
    def question(*texts: str) -> str:
        return str(make_question(config(), "user: 2 + 2?", texts)[1]["content"])

    # Up to the second completion, as one prefix tree computes it once.
    first, second = question("four", "five"), question("four", "six")
    beginning = os.path.commonprefix([first, second])
    assert "\nfour\n" in beginning and "<completion_b " in beginning
    assert "user: 2 + 2?" in os.path.commonprefix([first, question("six", "four")])


def test_probabilities_give_the_expected_scores() -> None:
    names = list(labels(config()))
    assert len(names) == 5 * 5 * 6
    assert [read_pair_scores(name) for name in names] == list(all_pair_scores())
    weights = [0.0] * len(names)
    weights[names.index('{"score_1": 5, "score_2": 1, "ranking": 1}')] = 0.75
    weights[names.index('{"score_1": 3, "score_2": 3, "ranking": 5}')] = 0.25
    verdict = expected_verdict(config(), weights, 0.5)
    scores = verdict.scores
    assert scores is not None
    assert (scores.score_1, scores.score_2, scores.ranking) == (4.5, 1.5, 2.0)
    # The second verdict is a tie, and its ranking makes (1.5, 4.5) of it.
    assert scores.tie_broken == pytest.approx((0.75 * 5 + 0.25 * 1.5, 0.75 * 1 + 0.25 * 4.5))
    assert (verdict.value, verdict.label, verdict.mass) == (0.75, "A", 0.5)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"mode": "rating"}, "mode: pairwise"),
        ({"use_logprobs": True, "base_url": "http://localhost:1/v1"}, "use_logprobs: false"),
    ],
)
def test_what_does_not_fit_scores_is_refused(keys: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        config(**keys)
