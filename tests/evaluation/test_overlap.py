"""What was trained on is flagged, and what was not is not: by the share of the words in common
runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from evaluated import preference

from treeward.data.preference import Preference
from treeward.evaluation.data_check.overlap import find_overlap

LONG = "the quick brown fox jumps over the lazy dog while seven wizards brew a potion of purple ink near the old mill"
OTHER = "completely different sentence about submarines and violins that nobody has ever written down in this test"


def trained(prompt: str, *texts: str, system: str | None = None) -> Preference:
    context = [{"role": "system", "content": system}] if system else []
    return preference("t", "s", [*context, {"role": "user", "content": prompt}], texts)


def shares(example: Preference, *training: Preference) -> tuple[Any, Any, bool]:
    [flag] = find_overlap([example], training)
    return flag.prompt, flag.completion, flag.is_flagged


def test_whole_prompts_and_long_completions_are_flagged() -> None:
    example = preference("a", "s", "Why is the sky blue?", [LONG, "No idea."])
    # too short to tell
    assert shares(example, trained("Why is it so?", OTHER, "No idea.")) == (
        0,
        0,
        False,
    )
    assert shares(example, trained("why is the SKY - blue", OTHER, "Another.")) == (1, 0, True)
    assert shares(example, trained("Why is it so?", LONG.title(), "x")) == (0, 1, True)
    # The same question after another system message is found; a system message alone tells nothing.
    for role in ("system", "developer"):
        with_system = replace(example, context=({"role": role, "content": LONG}, *example.context))
        assert shares(with_system, trained("How?", "u", "v", system=LONG)) == (0, 0, False)
        assert shares(with_system, trained("Why is the sky blue?", "x", "v")) == (1, 0, True)


def test_near_duplicates_are_told_by_the_share_of_words_in_common_runs() -> None:
    words = LONG.split()
    assert len(words) == 22
    example = preference("a", "s", "Why?", [LONG, "x"])
    for number, is_flagged in ((16, True), (13, False), (12, False)):
        training = trained("p", " ".join(words[:number]) + " and then something else", "y")
        share = number / 22 if number >= 13 else 0
        assert shares(example, training) == (0, pytest.approx(share), is_flagged)


def test_words_are_without_case_and_punctuation_and_chinese_without_spaces() -> None:
    for text, trained_on in (
        ("Don't STOP_now: 3.5 Straße!", "don t stop now 3,5 STRASSE"),
        ("你好,ab世界", "你 好 AB 世 界"),
    ):
        example = preference("a", "s", text, ["x"], ranks=[0])
        assert shares(example, trained(trained_on, "y")) == (1, 0, True)
        assert shares(example, trained(trained_on + "z", "y")) == (0, 0, False)
