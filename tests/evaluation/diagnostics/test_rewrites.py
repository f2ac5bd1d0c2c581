"""A rewrite does to a completion what it says, and the same every time."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeward.evaluation.diagnostics.perturbations import REWRITES, rewrite

TEXT = "The capital is Paris. It lies on the Seine.\n\nAsk me more."


def rewritten(name: str, text: str = TEXT, seed: int = 0) -> Any:
    return rewrite(name, text, random.Random(seed))


def test_what_each_rewrite_does() -> None:
    markdown = rewritten("markdown")
    assert markdown == ("## Answer\n\n- **The capital** is Paris.\n- **It lies** on the Seine.\n- **Ask me** more.")
    assert rewritten("white_space").split() == TEXT.split() and "\n\n\n\n\n\nAsk" in rewritten("white_space")
    assert rewritten("flattery").endswith(f" {TEXT}") and "question" in rewritten("flattery")
    assert rewritten("padding").startswith(f"{TEXT} ") and len(rewritten("padding")) >= 1.5 * len(TEXT)
    assert rewritten("capitals") == TEXT.upper()
    assert "Paris" not in rewritten("refusal") and rewritten("refusal") == rewritten("refusal", "Another text.")
    assert rewritten("repeated").count("Paris") == 2
    assert rewritten("truncated_50") == "The capital is Paris. It lies"  # 6 of 12 words
    assert rewritten("truncated_80") == "The capital is Paris. It lies on the Seine."


def test_where_there_is_nothing_to_change_there_is_no_rewrite() -> None:
    assert all(rewritten(name, "  \n ") is None for name in REWRITES)
    assert rewritten("capitals", "4 + 4 = 8") is None
    assert rewritten("truncated_50", "Paris.") is None and rewritten("truncated_80", "Paris.") is None
    assert rewritten("truncated_50", "Paris, France.") == "Paris,"


@pytest.mark.parametrize("name", REWRITES)
@given(text=st.text(min_size=1, max_size=60), seed=st.integers(0, 9))
def test_a_rewrite_is_a_text_that_differs_and_the_seed_decides_it(name: str, text: str, seed: int) -> None:
    once = rewritten(name, text, seed=seed)
    assert once == rewritten(name, text, seed=seed)
    assert once is None or (once != text and once)
    if once is not None and name in ("flattery", "padding", "repeated"):
        assert text.strip() in once and len(once) > len(text.rstrip())
    if once is not None and name.startswith("truncated"):
        assert text.startswith(once) and len(once.split()) < len(text.split())
