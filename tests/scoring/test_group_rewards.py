"""The rewards of a group against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from treeward.config.served_judge import ServedJudgeConfig
from treeward.errors import ConfigError
from treeward.scoring.group_rewards import (
    GroupCompletion,
    PairVerdict,
    group_metrics,
    mean_scores,
    num_pairs,
    pairs_of,
    style_density,
    with_bonuses,
)
from treeward.scoring.pair_scores import PairScores


def verdicts(*scores: Sequence[float] | None, strategy: str = "circular") -> list[PairVerdict]:
    """Of a group of three."""
    pairs = pairs_of(3, strategy)
    made = []
    for (first, second), numbers in zip(pairs, scores, strict=True):
        given = None if numbers is None else PairScores(*numbers)
        made.append(PairVerdict(first, second, 0, given))
    return made


def shaped(
    rewards: Sequence[float], completions: list[GroupCompletion], **keys: Any
) -> list[float]:
    return with_bonuses(rewards, completions, ServedJudgeConfig(model="m", **keys))


def of_lengths(*lengths: int) -> list[GroupCompletion]:
    return [GroupCompletion("a" * length) for length in lengths]


def test_pairs() -> None:
    assert pairs_of(4, "circular") == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert pairs_of(2, "circular") == [(0, 1), (1, 0)]
    assert pairs_of(4, "all_pairs") == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    for strategy in ("circular", "all_pairs"):
        for size in (2, 3, 4, 7):
            assert num_pairs(size, strategy) == len(pairs_of(size, strategy))


def test_the_worked_example_of_genrm_compare() -> None:
    # 0 against 1: 4 and 3. 1 against 2: 3 and 3, which the ranking 5 makes 1.5 and 4.5.
    # 2 against 0: 2 and 4.
    example = verdicts((4, 3, 2), (3, 3, 5), (2, 4, 5))
    rewards = mean_scores(example, 3)
    assert rewards == pytest.approx([4, 2.25, 3.25], abs=1e-6)
    penalised = shaped(
        [4, 2.25, 3.25],
        of_lengths(100, 300, 200),
        group_answer_length_penalty_coeff=0.35,
    )
    assert penalised == pytest.approx([4.175, 2.075, 3.25], abs=1e-6)
    metrics = group_metrics(example)
    # 4, 3, 3, 3, 2 and 4: variance 17/36.
    assert metrics == pytest.approx(
        {
            "mean_individual_score": 19 / 6,
            "std_individual_score": (17 / 36) ** 0.5,
            "tiebreak_usage_rate": 1 / 3,
        },
        abs=1e-6,
    )


def test_what_has_no_verdict_is_left_out_of_means_and_counted() -> None:
    partial = verdicts((4, 3, 2), None, (2, 4, 5))
    assert mean_scores(partial, 3) == [4, 3, 2]
    assert group_metrics(partial)["missing_comparisons"] == 1
    assert mean_scores(verdicts((4, 3, 2), None, None), 3) == [4, 3, None]
    assert group_metrics(verdicts(None, None, None)) == {"missing_comparisons": 3}


def test_the_shortest_gets_its_bonus_only_among_the_best() -> None:
    completions = [
        GroupCompletion("long answer", "brief"),
        GroupCompletion("short", "a longer reasoning"),
        GroupCompletion("", ""),
    ]
    bonuses = {"reasoning_bonus": 0.5, "answer_bonus": 0.25}
    # One of three is the best by 0.2, and by 0.34 too: the number is rounded down.
    assert shaped([4, 3, 3], completions, **bonuses) == [4.5, 3, 3]
    assert shaped([4, 3, 3], completions, top_percentile=0.34, **bonuses) == [4.5, 3, 3]
    assert shaped([4, 3, 3], completions, top_percentile=0.67, **bonuses) == [4.5, 3.25, 3]
    # Equal to the best is among the best, and an empty text is not the shortest.
    assert shaped([3, 3, 3], completions, **bonuses) == [3.5, 3.25, 3]
    # The best are chosen before the bonuses, and the second bonus sees the first.
    both = [GroupCompletion("s", "r"), GroupCompletion("long", "long")]
    assert shaped([4, 4.25], both, reasoning_bonus=0.5, answer_bonus=0.5) == [4, 4.25]
    assert shaped([4, 4], both, reasoning_bonus=0.5, answer_bonus=0.5) == [5, 4]


def test_penalties_add_up_to_0_and_are_0_for_equal_ones() -> None:
    completions = [
        GroupCompletion("ab", "xyz"),
        GroupCompletion("abcd", " x "),
        GroupCompletion(""),
    ]
    penalties = {
        "group_reasoning_length_penalty_coeff": 0.3,
        "group_answer_length_penalty_coeff": 0.5,
    }
    rewards = shaped([1, 2, 3], completions, **penalties)
    # Answers of 2, 4, 0: values .5, 0, 1, mean .5. Reasoning of 3, 1, 0: 0, 2/3, 1, mean 5/9.
    assert rewards == pytest.approx(
        [1 - 0.3 * 5 / 9, 2 - 0.25 + 0.3 / 9, 3 + 0.25 + 0.3 * 4 / 9], abs=1e-6
    )
    assert shaped([1, 2], of_lengths(5, 5), **penalties) == [1, 2]
    assert shaped([1], of_lengths(5), answer_bonus=1.0, **penalties) == [1]


def test_style_is_counted_without_code() -> None:
    assert style_density("plain text") == 0
    assert style_density("  ") == 0
    text = "# Head\n- item\n12. item\n**bold** __too__ \U0001f600\n```\n# code\n**bold**\n```"
    prose = text.partition("```")[0]
    assert style_density(text) == pytest.approx(6 / len(prose.strip()))
    # None of these characters is an emoji.
    assert style_density("\u4f60\u597d\uff0c\u4e16\u754c \ud55c\uad6d\uc5b4 \u3042") == 0
    plain_and_styled = [GroupCompletion("plain"), GroupCompletion("**bold**")]
    rewards = shaped([3, 3], plain_and_styled, group_style_penalty_coeff=0.1)
    assert rewards == pytest.approx([3.05, 2.95], abs=1e-6)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"num_judges_per_comparison": 2}, "temperature above 0"),
        ({"num_judges_per_comparison": 2, "temperature": 1, "use_logprobs": True}, "temperature"),
        ({"genrm_roles": True, "verdict": "label"}, "verdict: scores"),
        ({"default_score": 3.0}, "both or neither"),
        ({"mode": "rating"}, "pairwise"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        ServedJudgeConfig(model="m", **keys)
