"""SIGTERM, SIGHUP and Ctrl-C end a verb with a sentence and their code; the same command goes on,
to the same bytes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verbs import Command

from treeward.scoring.scorer import Scorer

pytestmark = pytest.mark.usefixtures("restored_logging")
SIGNALS = {signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGINT: 130}


@pytest.fixture
def samples(write_rows: Callable[..., Path]) -> Path:
    rows = []
    for i in range(300):
        texts = ["4", "four" * (i % 9 + 1)]
        completions = []
        for rank, text in enumerate(texts):
            completion = [{"role": "assistant", "content": text}]
            completions.append({"rank": rank, "completion": completion})
        row = {"context": [{"role": "user", "content": f"{i} + 2?"}], "completions": completions}
        rows.append(row)
    return write_rows("samples.jsonl", rows)


def words_of(verb: str, model: Path, samples: Path, folder: Path) -> tuple[object, ...]:
    words: dict[str, tuple[object, ...]] = {
        "score": ("score", model, "--data", samples, "--output", folder / "scores.jsonl"),
        "eval": ("eval", model, "--data", samples, "--output", folder),
    }
    return words[verb]


def files_of(folder: Path) -> dict[str, bytes]:
    """The rows and numbers of a folder, by their names; the report has charts, which hold the
    folder's name.
    """
    files = [path for path in folder.rglob("*") if path.suffix in (".json", ".jsonl")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("verb", "number"),
    [
        ("score", signal.SIGTERM),
        ("score", signal.SIGHUP),
        ("score", signal.SIGINT),
        ("eval", signal.SIGTERM),
    ],
)
def test_a_signal_keeps_what_is_scored_and_says_how_to_go_on(
    verb: str,
    number: signal.Signals,
    treeward: Command,
    model_folder: Path,
    samples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undisturbed = tmp_path / "undisturbed"
    folder = tmp_path / "disturbed"
    assert treeward(*words_of(verb, model_folder, samples, undisturbed)).code == 0
    whole = Scorer.score
    num_calls = 0

    def signalled(self: Scorer, *arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            signal.raise_signal(number)
        return whole(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "score", signalled)
        before = signal.getsignal(number)
        ended = treeward(*words_of(verb, model_folder, samples, folder))
    assert ended.code == SIGNALS[number]
    assert f"treeward {verb}: interrupted" in ended.err
    assert "The rows that are done are kept in" in ended.err
    assert "goes on from there" in ended.err
    assert signal.getsignal(number) == before
    assert treeward(*words_of(verb, model_folder, samples, folder)).code == 0
    assert files_of(folder) == files_of(undisturbed)


def test_what_was_ignored_at_the_start_stays_ignored(
    treeward: Command,
    model_folder: Path,
    samples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    whole = Scorer.score

    def signalled(self: Scorer, *arguments: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGHUP)
        return whole(self, *arguments, **options)

    monkeypatch.setattr(Scorer, "score", signalled)
    try:
        assert treeward(*words_of("score", model_folder, samples, tmp_path / "out")).code == 0
    finally:
        signal.signal(signal.SIGHUP, before)
