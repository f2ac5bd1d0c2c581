"""Questions about comparisons, and the reward of every verdict by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import chat, write_jsonl

from treeward.config.data import PromptSetConfig
from treeward.config.reward_environments import PreferenceVerdictConfig
from treeward.data.prompt_sets import FAMILY, PromptSet, prompts_summary
from treeward.environments.interface import Reward
from treeward.environments.preference_verdict import (
    LABEL,
    SCORES,
    PreferenceVerdictEnvironment,
    open_questions,
)
from treeward.errors import DataError

PAIR = {"prompt": "2 + 2?", "completions": ["Four.", "Five."], "scores": [1, 0]}
RANKED = {
    "prompt": "2 + 3?",
    "completions": ["Five.", "5, I think.", "Six.", "Six."],
    "scores": [3, 2, 0, 0],
}
GRADED = {"prompt": "2 + 4?", "completions": ["Six.", "Seven."], "scores": [1, 1]}

Asked = Callable[..., PromptSet]


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    """The questions about rows."""

    def ask(*rows: dict[str, Any], **section: Any) -> PromptSet:
        path = write_jsonl(tmp_path / "rows.jsonl", *rows)
        return open_questions(PromptSetConfig(data_path=path), PreferenceVerdictConfig(**section))

    return ask


def rewards(questions: PromptSet, messages: list[list[str]], **section: Any) -> list[list[Reward]]:
    """The rewards of messages to each question."""
    chats = []
    infos = []
    for question, texts in zip(questions, messages, strict=True):
        for text in texts:
            chats.append(
                [*question.messages, {"role": "assistant", "content": text.removesuffix("<cut>")}]
            )
            infos.append({**question.info, "truncated": text.endswith("<cut>")})
    found = iter(PreferenceVerdictEnvironment(section).rewards(chats, infos))
    return [[next(found) for _ in texts] for texts in messages]


def test_completions_that_differ_in_their_calls_are_no_tie(asked: Asked) -> None:
    completions = []
    for city in ("Rome", "Oslo"):
        call = {"type": "function", "function": {"name": "rain", "arguments": {"city": city}}}
        completions.append([{"role": "assistant", "content": "", "tool_calls": [call]}])
    row = {"prompt": "Rain in Rome?", "completions": completions, "scores": [1, 0]}
    questions = list(asked(row))
    assert len(questions) == 2
    assert '"Rome"' in questions[0].messages[-1]["content"]


def test_a_row_with_an_image_is_named(asked: Asked) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    prompt = [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: a judge reads text only"):
        asked({"prompt": prompt, "completions": ["A cat.", "A dog."], "scores": [1, 0]})


def test_a_pair_is_asked_about_in_both_orders_with_one_beginning(asked: Asked) -> None:
    first, second = asked(PAIR)
    assert (first.info[LABEL], second.info[LABEL]) == ("A", "B")
    assert first.info[FAMILY] == second.info[FAMILY]
    one, other = (question.messages[-1]["content"] for question in (first, second))
    assert one.index("Four.") < one.index("Five.") and other.index("Five.") < other.index("Four.")
    assert one[: one.index("Four.")] == other[: other.index("Five.")]
    assert "user: 2 + 2?" in one and "[[A]]" in one and first.messages[0]["role"] == "system"


@pytest.mark.parametrize("env_name", [None, "first", "second"])
def test_the_questions_of_a_set_are_for_the_environment_that_it_names(
    env_name: str | None, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", PAIR)
    config = PromptSetConfig(data_path=path, env_name=env_name)
    for question in open_questions(config, PreferenceVerdictConfig()):
        assert question.info.get("environment") == env_name


@pytest.mark.parametrize(
    ("verdict", "strength", "is_told"),
    [("label", 2, True), ("label", None, False), ("scores", 2, False)],
)
def test_a_strength_that_is_not_used_is_told(
    verdict: str,
    strength: int | None,
    is_told: bool,
    asked: Asked,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    asked(PAIR | {"strength": strength}, verdict=verdict)
    assert ("the strength of 1 comparisons is not used by verdicts" in caplog.text) == is_told


def test_every_pair_with_an_order_is_asked_about_and_the_others_are_counted(asked: Asked) -> None:
    questions = asked(PAIR, RANKED, GRADED)
    assert len(questions) == 2 * (1 + 5) and questions.together == 2
    assert len({question.info[FAMILY] for question in questions}) == 6
    assert prompts_summary(questions.counts) == "12 of 16 prompts kept (left out: 4 of equal ranks)"
    assert questions[-1].where is not None and questions[-1].where.endswith("rows.jsonl:2")
    with pytest.raises(DataError, match="no comparison has a better completion"):
        asked(GRADED)


def test_the_reward_of_every_verdict(asked: Asked) -> None:
    questions = asked(PAIR)
    messages = [
        [
            "Four is right. [[A]]",
            "[[B]]",
            "[[C]]",
            "I do not know.",
            "[[A]]<cut>",
            "[[B]] No: [[A]]",
        ],
        ["[[B]]", "[[B]]", "[[C]]", "[[A]]", "[[B]]", ""],
    ]
    first, second = rewards(questions, messages)
    assert [reward.value for reward in first] == [1, 0, 0, -1, -1, 1]
    assert [reward.value for reward in second] == [1, 1, 0, 0, 1, -1]
    assert [reward.components["accuracy"] for reward in first] == [1, 0, 0, 0, 0, 1]
    assert [reward.components["judge/no_verdict"] for reward in first] == [0, 0, 0, 1, 1, 0]
    assert [reward.components.get("judge/position_bias") for reward in first] == [
        1,
        -1,
        0,
        None,
        None,
        1,
    ]
    # of the messages with the same number about both orders
    assert [reward.components.get("judge/consistent") for reward in first] == [
        1,
        0,
        1,
        None,
        None,
        None,
    ]
    assert [reward.components.get("judge/consistent") for reward in second] == [
        1,
        0,
        1,
        None,
        None,
        None,
    ]
    (other,) = rewards(asked(PAIR)[:1], [["Hm."]], no_verdict=-0.25)  # type: ignore[arg-type]
    assert other[0].value == -0.25


HELPSTEER = {
    "context": [{"role": "user", "content": "2 + 2?"}],
    "response1": "Four.",
    "response2": "Five.",
    "overall_preference": -3,
}


def test_the_ranking_of_the_label_follows_from_the_strength(asked: Asked) -> None:
    for grade, (first, second) in {-3: (1, 6), -2: (2, 5), -1: (3, 4)}.items():
        questions = asked({**HELPSTEER, "overall_preference": grade}, verdict="scores")
        assert [question.info[LABEL] for question in questions] == ["A", "B"]
        assert [question.info[SCORES] for question in questions] == [
            {"ranking": first},
            {"ranking": second},
        ]
    [first, second] = asked(PAIR, verdict="scores")
    assert (first.info[SCORES], second.info[SCORES]) == ({"ranking": 2}, {"ranking": 5})
    assert '"score_1"' in first.messages[-1]["content"]
    # The ranking of 0.25 would be on the side of the worse one.
    for strength in (7, 0.25):
        with pytest.raises(DataError, match="scale of rankings"):
            asked({**PAIR, "strength": strength}, verdict="scores")


def test_the_reward_of_scores_is_their_distance_from_the_label(
    asked: Asked, tmp_path: Path
) -> None:
    messages = [
        [
            'So {"score_1": 5, "score_2": 2, "ranking": 1}',
            '{"score_1": 3, "score_2": 3, "ranking": 5}',
            '{"score_1": 5, "score_2": 2}',
            '{"score_1": 5, "score_2": 2, "ranking": 9}',
            "[[A]]",
            '{"score_1": 5, "score_2": 2, "ranking": 1}<cut>',
        ],
        [],
    ]
    without, _ = rewards(asked(HELPSTEER, verdict="scores"), messages, verdict="scores")
    # The ranking of the label is 1, and the row has no helpfulness.
    assert [reward.value for reward in without] == [0, -4, -10, -10, -10, -10]
    assert without[1].components["judge/ranking_error"] == 4
    assert "judge/helpfulness_error" not in without[1].components
    # An equal score with the ranking 5 says that the second is better.
    assert [reward.components["accuracy"] for reward in without] == [1, 0, 0, 0, 0, 0]
    assert [reward.components["judge/no_verdict"] for reward in without] == [0, 0, 1, 1, 1, 1]

    row = {
        "prompt": "2 + 2?",
        "completions": [
            {"completion": "Four.", "score": 1, "helpfulness": 4},
            {"completion": "Five.", "score": 0, "helpfulness": 1},
        ],
        "strength": 3,
    }
    path = write_jsonl(tmp_path / "graded.jsonl", row)
    section = {"verdict": "scores", "helpfulness": "helpfulness", "lowest_helpfulness": 0}
    config = PromptSetConfig(data_path=path)
    questions = open_questions(config, PreferenceVerdictConfig(**section))
    assert questions[0].info[SCORES] == {"ranking": 1, "score_1": 5, "score_2": 2}
    assert questions[1].info[SCORES] == {"ranking": 6, "score_1": 2, "score_2": 5}
    graded, _ = rewards(questions, messages, **section)
    assert [reward.value for reward in graded] == [0, -(4 + 2 + 1), -10, -10, -10, -10]
    assert graded[1].components["judge/helpfulness_error"] == 3
    with pytest.raises(DataError, match="lowest_helpfulness"):
        open_questions(config, PreferenceVerdictConfig(**{**section, "lowest_helpfulness": 2}))
    (own,) = rewards(questions[:1], [["Hm."]], no_verdict=-3, **section)  # type: ignore[arg-type]
    assert own[0].value == -3


def test_a_rating_is_right_of_the_ratings_of_the_other_completion(asked: Asked) -> None:
    questions = asked(PAIR, mode="rating")
    assert [question.info[LABEL] for question in questions] == ["better", "worse"]
    assert (
        "Four." in questions[0].messages[-1]["content"]
        and "Five." not in questions[0].messages[-1]["content"]
    )
    messages = [
        ["Rating: [[7]]", "Rating: [[3]]", "Rating: [[11]]"],
        ["Rating: [[3]]", "Rating: [[5]]", "Hm."],
    ]
    better, worse = rewards(questions, messages, mode="rating")
    # above 3 and 5; equal and below; beyond the scale
    assert [reward.value for reward in better] == [
        1,
        0,
        -1,
    ]
    assert [reward.value for reward in worse] == [0.5, 0.5, -1]
    assert better[0].components == {"accuracy": 1, "judge/no_verdict": 0, "judge/rating": 7}
    (alone,) = rewards(questions[:1], [["Rating: [[7]]"]], mode="rating")  # type: ignore[arg-type]
    assert alone[0].value == 0  # nothing to compare with is no success


def test_a_prompt_that_is_no_question_has_no_reward() -> None:
    (reward,) = PreferenceVerdictEnvironment({}).rewards([chat("Hi", "[[A]]")], [{}])
    assert reward.value is None and "no question about a comparison" in str(reward.error)
