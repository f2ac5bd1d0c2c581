"""The bundled data is what its generator writes, ranked by gold."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from messages import read_jsonl

from treeward.data.bundled import SPLITS, bundled_path
from treeward.data.preference import preference_from_dict
from treeward.user_code import import_object

SCRIPT = Path(__file__).parents[2] / "examples" / "bundled_data.py"
gold_quality, known_words, words_of = (
    import_object(f"{SCRIPT.with_name('gold.py')}:{name}", field="gold")
    for name in ("gold_quality", "known_words", "words_of")
)


@cache
def rows(split: str) -> list[dict[str, Any]]:
    return read_jsonl(bundled_path(split))


def answers(row: dict[str, Any]) -> list[str]:
    return [completion["completion"][0]["content"] for completion in row["completions"]]


@pytest.mark.slow
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
        assert [completion.rank for completion in preference.completions] == [
            better.index(s) for s in scores
        ]
        assert len(set(answers(row))) == len(scores)
        assert known_words().issuperset(words_of(" ".join(answers(row))))
