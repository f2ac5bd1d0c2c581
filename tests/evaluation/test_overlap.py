"""What was trained on is flagged, what was not is not, and the shares are those of a plain count of runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from evaluated import preference

from treeward.data.preference import Preference
from treeward.evaluation.data_check.overlap import find_overlap

LONG = "the quick brown fox jumps over the lazy dog while seven wizards brew a potion of purple ink near the old mill"
OTHER = (
    "completely different sentence about submarines and violins that nobody has ever written down before in this test"
)


def trained(prompt: str, *texts: str, system: str | None = None) -> Preference:
    context = [{"role": "system", "content": system}] if system else []
    return preference("t", "s", [*context, {"role": "user", "content": prompt}], texts)


def flag_of(example: Preference, *training: Preference, **settings: Any) -> Any:
    return find_overlap([example], training, **settings)[0]


def shares(example: Preference, *training: Preference, **settings: Any) -> tuple[float, float, bool, bool]:
    flag = flag_of(example, *training, **settings)
    return flag.prompt, flag.completion, flag.is_exact, flag.is_flagged


def test_exact_duplicates_are_whole_prompts_and_long_completions() -> None:
    example = preference("a", "s", "Why is the sky blue?", [LONG, "No idea."])
    assert shares(example, trained("Why is it so?", OTHER, "No idea.")) == (0, 0, False, False)  # too short to tell
    assert shares(example, trained("why is the SKY - blue", OTHER, "Another.")) == (1, 0, True, True)
    assert shares(example, trained("Why is it so?", LONG.title(), "x")) == (0, 1, True, True)
    # The same question after another system message is a near duplicate; a system message alone tells nothing.
    system = {"role": "system", "content": LONG}
    with_system = replace(example, context=(system, *example.context))
    assert not flag_of(with_system, trained("How?", "u", "v", system=LONG)).is_flagged
    assert shares(with_system, trained("Why is the sky blue?", "x", "v")) == (1, 0, False, True)
    assert shares(with_system, trained("Why is the sky blue?", "x", "v", system=LONG)) == (1, 0, True, True)


def test_near_duplicates_are_told_by_the_share_of_words_in_common_runs() -> None:
    words = LONG.split()
    assert len(words) == 22
    example = preference("a", "s", "Why?", [LONG, "x"])
    first_16 = trained("p", " ".join(words[:16]) + " and then something else", "y")
    assert shares(example, first_16) == (0, pytest.approx(16 / 22), False, True)
    first_13 = trained("p", " ".join(words[:13]) + " and then something else", "y")
    assert shares(example, first_13) == (0, pytest.approx(13 / 22), False, False)
    # One word changed in the middle leaves 10 and 11 words, shorter than a run; runs of 8 see it.
    edited = trained("p", " ".join([*words[:10], "EDITED", *words[11:]]), "y")
    assert [flag_of(example, edited, num_words=n).completion for n in (13, 8)] == [0, pytest.approx(21 / 22)]


def test_words_are_without_case_and_punctuation_and_chinese_without_spaces() -> None:
    for text, trained_on in (
        ("Don't STOP_now: 3.5 Straße!", "don t stop now 3,5 STRASSE"),
        ("你好,ab世界", "你 好 AB 世 界"),
    ):
        assert flag_of(preference("a", "s", text, ["x"], ranks=[0]), trained(trained_on, "y")).is_exact
        assert not flag_of(preference("a", "s", text, ["x"], ranks=[0]), trained(trained_on + "z", "y")).is_exact
