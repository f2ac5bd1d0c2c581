"""Completions of other prompts: worse than all others, never of the same prompt, and no say in what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from messages import assistant, user, write_jsonl

from treeward.config.data import DatasetConfig
from treeward.data import datasets
from treeward.data.datasets import open_dataset
from treeward.data.encoding import EncodedDataset, encode_dataset
from treeward.data.preference import Preference
from treeward.data.rendering import Renderer

Row = dict[str, Any]


def row(prompt: str, answers: list[str]) -> Row:
    completions = [{"rank": rank, "completion": [assistant(answer)]} for rank, answer in enumerate(answers)]
    return {"context": [user(prompt)], "completions": completions}


def config_of(tmp_path: Path, rows: list[Row], **more: Any) -> DatasetConfig:
    return DatasetConfig(data_path=write_jsonl(tmp_path / "train.jsonl", *rows), **more)


def opened(tmp_path: Path, rows: list[Row]) -> list[Preference]:
    plain, stream = (open_dataset(config_of(tmp_path, rows, non_contextual_answer=on)) for on in (False, True))
    found = list(stream)
    assert found == list(stream), "another pass is another draw"
    assert [where for _, where in found] == [where for _, where in plain]
    assert [preference.completions for preference, _ in found] == [one.completions for one, _ in plain]
    return [preference for preference, _ in found]


def text(preference: Preference) -> str | None:
    return None if preference.non_contextual is None else str(preference.non_contextual[-1]["content"])


@pytest.mark.parametrize("window", [5, 4096])
def test_it_is_a_good_answer_to_another_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(datasets, "_WINDOW", window)
    rows = [row(f"question {n // 2}", [f"good {n}", f"fair {n}", f"bad {n}"]) for n in range(40)]
    drawn = [text(preference) for preference in opened(tmp_path, rows)]
    for n, answer in enumerate(drawn):
        assert answer is not None and answer.startswith("good ") and int(answer.split()[1]) // 2 != n // 2
        assert window == 4096 or n < 5 or n - 5 < int(answer.split()[1]) < n
    assert len(set(drawn)) > 12


def test_what_has_nothing_to_give(tmp_path: Path) -> None:
    systems = [{"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}]
    same_question = [row(["What is 2+2?", "what is  2 2"][n % 2], [f"4 {n}", f"5 {n}"]) for n in range(6)]
    for n, one in enumerate(same_question):
        one["context"].insert(0, systems[n // 2 % 2])
    assert [text(preference) for preference in opened(tmp_path, same_question)] == [None] * 6
    same_answer = [row(f"question {n}", ["yes", "no"]) for n in range(5)]
    assert [text(preference) for preference in opened(tmp_path, same_answer)] == [None] * 5


@pytest.fixture
def encoded(tmp_path: Path, tiny_tokenizer: Any) -> Any:
    def encode(rows: list[Row], *, on: bool = True, ties: Any = "drop", **options: Any) -> EncodedDataset:
        renderer = Renderer(tiny_tokenizer, **options)
        stream = open_dataset(config_of(tmp_path, rows, non_contextual_answer=on))
        return encode_dataset(stream, renderer, ties=ties, cache_dir=tmp_path / "cache")

    return encode


@pytest.mark.parametrize("ties", ["drop", "half"])
def test_the_rows_own_completions_decide(encoded: Any, ties: str) -> None:
    rows = [row(f"question {n}", [f"good {n}", f"bad {n}", "fine"]) for n in range(10)]
    tied = row("tied", ["one", "other"])
    tied["completions"][1]["rank"] = 0
    rows += [tied, row("twice", ["same", "same"])]
    without, with_one = encoded(rows, on=False, ties=ties), encoded(rows, ties=ties)
    same = ("read", "kept", "dropped_ties", "dropped_identical", "tied_pairs", "deduplicated")
    assert [getattr(with_one.counts, name) for name in same] == [getattr(without.counts, name) for name in same]
    assert with_one.counts.non_contextual == len(with_one) == len(without) and without.counts.non_contextual == 0
    assert with_one.digests.tolist() == without.digests.tolist()
    for one, plain in zip(with_one, without, strict=True):
        assert one.non_contextual and len(plain.token_ids) == len(one.token_ids) - 1
        assert one.ranks == (*plain.ranks, max(plain.ranks) + 1) and one.strength == plain.strength
        assert all((a == b).all() for a, b in zip(one.token_ids, plain.token_ids, strict=False))
        assert one.num_tokens == sum(map(len, one.token_ids)) and one.tree_tokens > plain.tree_tokens


@pytest.mark.parametrize("truncation", ["drop", "truncate_left", "error"])
def test_a_completion_that_does_not_fit_is_not_added(encoded: Any, truncation: str) -> None:
    rows = [row(f"question {n} " + "please " * 30, [f"short {n}", "no"]) for n in range(20)]
    rows += [row(f"{n}?", ["long " * 20 + str(n), "no"]) for n in range(12)]
    longest = encoded(rows, on=False).counts.longest
    with_one = encoded(rows, max_length=longest, truncation=truncation)
    assert (with_one.counts.kept, with_one.counts.truncated) == (32, 0)
    assert 0 < with_one.counts.non_contextual < 32
    assert max(len(ids) for one in with_one for ids in one.token_ids) <= longest
