"""The bundled data is what its generator writes, its gold grades any text, and its biases are as documented."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import assistant, read_jsonl, user

from treeward.data.bundled import SPLITS, bundled_path
from treeward.data.preference import preference_from_dict
from treeward.user_code import import_object

SCRIPT = Path(__file__).parents[2] / "examples" / "bundled_data.py"
gold_quality, parse_question, known_words, words_of = (
    import_object(f"{SCRIPT.with_name('gold.py')}:{name}", field="gold")
    for name in ("gold_quality", "parse_question", "known_words", "words_of")
)

FRANCE = "What is the capital of France?"
ONE_WORD = f"{FRANCE} Answer in one word."


@cache
def rows(split: str) -> list[dict[str, Any]]:
    return read_jsonl(bundled_path(split))


def answers(row: dict[str, Any]) -> list[str]:
    return [completion["completion"][0]["content"] for completion in row["completions"]]


def test_command_writes_the_committed_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import_object(f"{SCRIPT}:main", field="script")(str(tmp_path))
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {f"{split}.jsonl": bundled_path(split).read_bytes() for split in SPLITS}


@pytest.mark.parametrize("split", SPLITS)
def test_rows_are_preferences_ranked_by_gold(split: str) -> None:
    for number, row in enumerate(rows(split), start=1):
        preference = preference_from_dict(row, where=f"{split}:{number}")
        scores = [gold_quality(row["context"], answer) for answer in answers(row)]
        assert scores == [completion.score for completion in preference.completions]
        better = sorted(set(scores), reverse=True)
        assert [completion.rank for completion in preference.completions] == [better.index(s) for s in scores]
        assert len(set(answers(row))) == len(scores)
        assert known_words().issuperset(words_of(" ".join(answers(row))))


def test_formats_come_from_the_turn_then_earlier_turns_then_the_system_prompt() -> None:
    system = {"role": "system", "content": "You are a helpful assistant. Answer in one word."}
    reply = assistant("Paris.")
    standing = user(f'{FRANCE} From now on: End with "Over."')
    follow_up = user("And of Italy?")
    assert parse_question([system, user(FRANCE)]).format == "one_word"
    assert parse_question([system, standing, reply, follow_up]).format == "end"
    dashed = user("And of Italy? Put the answer in square brackets.")
    assert parse_question([system, standing, reply, dashed]).format == "brackets"
    assert parse_question([user(ONE_WORD), reply, follow_up]).format is None
    assert gold_quality([system, standing, reply, follow_up], "Sure! It is Rome. Over.") == 1.0
    assert gold_quality([user([{"type": "text", "text": ONE_WORD}])], "Paris") == 1.0


CONTEXTS = st.sampled_from([row["context"] for split in SPLITS for row in rows(split)[:150]])
WORDS = sorted(known_words())
BABBLE = st.lists(
    st.sampled_from([*WORDS, "Paris", "-", "\n", ".", "[", "]", "Answer:", "Over.", "Sure!"]), max_size=40
)
TEXTS = st.text(max_size=80) | BABBLE.map(" ".join)


@settings(max_examples=150)
@given(CONTEXTS, TEXTS)
def test_any_text_has_a_quality_that_repetition_never_raises(context: Any, text: str) -> None:
    quality = gold_quality(context, text)
    assert 0.0 <= quality <= 1.0
    assert gold_quality(context, f"{text} {text}") <= quality + 1e-9
    assert gold_quality(context, " ".join([text] * 6)) <= quality + 1e-9
