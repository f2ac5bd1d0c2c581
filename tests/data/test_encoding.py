"""Encoding: every row kept or counted, one file per content, the same from one process or several."""

from __future__ import annotations

import gzip
import json
import logging
import os
import pickle
import resource
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from treeward.data import encoding
from treeward.data.encoded import Comparison, EncodedDataset, EncodingCounts
from treeward.data.encoding import DropReason, count_tree_tokens, encode_comparison, encode_dataset
from treeward.data.preference import Completion, Preference, last_text
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, DataError
from treeward.scoring.shaping import reply_length

SHARED = Path(os.environ.get("TREEWARD_SHARED_DATA", Path(__file__).resolve().parents[2].parent / "shared" / "data"))
CHATML = (
    "{% for m in messages %}"
    "{% if m['role'] == 'broken' %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["What is the capital of France? Paris is the capital of France, number 1234567890."], 300)


@pytest.fixture(scope="module")
def renderer(tokenizer: PreTrainedTokenizerFast) -> Renderer:
    return Renderer(tokenizer, chat_template=CHATML)


def preference(
    *answers: str, ranks: tuple[int, ...] | None = None, prompt: str = "Capital?", **extra: Any
) -> Preference:
    completions = tuple(
        Completion(rank, ({"role": "assistant", "content": answer},))
        for answer, rank in zip(answers, ranks or range(len(answers)), strict=True)
    )
    return Preference(({"role": "user", "content": prompt},), completions, **extra)


class Rows:
    """A restartable stream that counts how often it was read."""

    name = "rows"

    def __init__(self, preferences: list[Preference], fingerprint: str = "a") -> None:
        self.preferences, self.fingerprint, self.times_read = preferences, fingerprint, 0

    def __iter__(self) -> Iterator[tuple[Preference, str]]:
        self.times_read += 1
        for number, row in enumerate(self.preferences, 1):
            yield row, f"rows.jsonl:{number}"


def varied(number: int) -> list[Preference]:
    """Rows with two to four answers, some ties, some duplicates, some long, some with a margin."""
    return [
        preference(
            *(f"Answer {i * j % (7 - i % 5)} of row {i}" for j in range(2 + i % 3)),
            ranks=tuple((j * (i % 5 > 0)) for j in range(2 + i % 3)),
            prompt=f"Question {i}? " * (1 + 20 * (i % 11 == 0)),
            margin=i / 2 if i % 4 == 0 else None,
            task_name=f"task {i % 3}",
        )
        for i in range(number)
    ]


def assert_same(a: Comparison, b: Comparison) -> None:
    assert (a.ranks, a.margin, a.where, a.tree_tokens) == (b.ranks, b.margin, b.where, b.tree_tokens)
    assert (a.lengths, a.subset) == (b.lengths, b.subset)
    assert [ids.tolist() for ids in a.token_ids] == [ids.tolist() for ids in b.token_ids]


def test_a_comparison_is_its_plain_rows(renderer: Renderer) -> None:
    row = preference("Paris.", "Lyon.", "Paris it is.", ranks=(0, 2, 1), margin=0.5)
    comparison = encode_comparison(row, renderer, "a.jsonl:1", "drop")
    assert isinstance(comparison, Comparison)
    rows = [renderer.encode([*row.context, *c.messages]) for c in row.completions]
    assert [ids.tolist() for ids in comparison.token_ids] == rows
    assert all(ids.dtype == np.int32 for ids in comparison.token_ids)
    assert (comparison.ranks, comparison.margin, comparison.where) == ((0, 2, 1), 0.5, "a.jsonl:1")
    assert comparison.num_tokens == sum(map(len, rows))
    assert comparison.tree_tokens == count_tree_tokens(rows) < comparison.num_tokens


def test_a_comparison_keeps_the_lengths_of_its_replies_and_its_subset(renderer: Renderer) -> None:
    turns = ({"role": "assistant", "content": "Let me see."}, {"role": "assistant", "content": "Paris!"})
    two_messages = Completion(2, turns)
    row = preference("Paris.", "Lyon", "Paris.", ranks=(1, 0, 3), task_name="capitals")
    row = replace(row, completions=(*row.completions, two_messages))
    comparison = encode_comparison(row, renderer, "a.jsonl:1", "drop")
    assert isinstance(comparison, Comparison)
    assert comparison.ranks == (1, 0, 2)
    assert comparison.lengths == (6, 4, 6), "characters of the last message; the duplicate is gone"
    assert comparison.subset == "capitals"
    for one in (row.completions[0].messages, turns):
        assert len(last_text(one)) == reply_length(one, "characters", None) == 6


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=6))
def test_tree_tokens_is_the_number_of_distinct_prefixes(sequences: list[list[int]]) -> None:
    prefixes = {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}
    assert count_tree_tokens(sequences) == len(prefixes)
    assert count_tree_tokens([np.array(s, np.int32) for s in sequences]) == len(prefixes)


def test_ties(renderer: Renderer) -> None:
    tied = preference("Paris.", "Lyon.", ranks=(1, 1))
    assert encode_comparison(tied, renderer, "a.jsonl:1", "drop") is DropReason.TIES
    kept = encode_comparison(tied, renderer, "a.jsonl:1", "half")
    assert isinstance(kept, Comparison) and kept.ranks == (1, 1)
    with pytest.raises(DataError, match=r"a\.jsonl:1(?s:.*)ranks \[1, 1\](?s:.*)data\.ties"):
        encode_comparison(tied, renderer, "a.jsonl:1", "error")
    partly = preference("Paris.", "Lyon.", "Nice.", ranks=(0, 1, 1))
    with pytest.raises(DataError, match=r"ranks \[0, 1, 1\]"):
        encode_comparison(partly, renderer, "a.jsonl:1", "error")
    for policy in ("drop", "half"):
        comparison = encode_comparison(partly, renderer, "a.jsonl:1", policy)  # type: ignore[arg-type]
        assert isinstance(comparison, Comparison) and comparison.ranks == (0, 1, 1)


def test_identical_completions(renderer: Renderer) -> None:
    assert encode_comparison(preference("Paris.", "Paris."), renderer, "", "drop") is DropReason.IDENTICAL
    assert encode_comparison(preference("Paris.", "Paris.", ranks=(0, 0)), renderer, "", "half") is DropReason.IDENTICAL
    contradictory = preference("Paris.", "Lyon.", "Paris.", "Paris.", ranks=(2, 1, 0, 3))
    comparison = encode_comparison(contradictory, renderer, "", "drop")
    assert isinstance(comparison, Comparison) and comparison.ranks == (0, 1)
    # What is left when the copies are gone is a tie: nothing to learn, unless ties count.
    left_tied = preference("Lyon.", "Paris.", "Paris.", ranks=(0, 1, 0))
    assert encode_comparison(left_tied, renderer, "", "drop") is DropReason.IDENTICAL
    kept = encode_comparison(left_tied, renderer, "", "half")
    assert isinstance(kept, Comparison) and kept.ranks == (0, 0)


def test_identical_only_once_the_context_is_cut(tokenizer: PreTrainedTokenizerFast) -> None:
    # A template that shows the words only while there are more than two messages.
    hides = Renderer(
        tokenizer,
        chat_template="{% for m in messages %}{{ m['content'] if messages | length > 2 else 'x' }}{% endfor %}",
        max_length=8,
        truncation="truncate_left",
    )
    long = Preference(
        ({"role": "user", "content": "What is the capital of France? " * 9}, {"role": "user", "content": "Well?"}),
        preference("Paris.", "Lyon.").completions,
    )
    assert encode_comparison(long, hides, "", "drop") is DropReason.IDENTICAL


def test_too_long(tokenizer: PreTrainedTokenizerFast) -> None:
    long = preference("Paris.", "Lyon.", prompt="Capital? " * 50)
    limited = Renderer(tokenizer, chat_template=CHATML, max_length=60)
    assert encode_comparison(long, limited, "", "drop") is DropReason.TOO_LONG
    cutting = Renderer(tokenizer, chat_template=CHATML, max_length=60, truncation="truncate_left")
    comparison = encode_comparison(long, cutting, "", "drop")
    assert isinstance(comparison, Comparison) and 50 < max(map(len, comparison.token_ids)) <= 60
    with pytest.raises(DataError, match=r"a\.jsonl:9: a conversation is too long"):
        encode_comparison(long, Renderer(tokenizer, chat_template=CHATML, max_length=60, truncation="error"),
                          "a.jsonl:9", "drop")  # fmt: skip


counts_strategy = st.builds(EncodingCounts, *[st.integers(0, 1000)] * 10)


@given(counts_strategy, counts_strategy, counts_strategy)
def test_counts_add_up(a: EncodingCounts, b: EncodingCounts, c: EncodingCounts) -> None:
    assert (a + b) + c == a + (b + c) and a + b == b + a and a + EncodingCounts() == a
    assert (a + b).tokens == a.tokens + b.tokens and (a + b).longest == max(a.longest, b.longest)
    assert a.as_metrics()["dropped_ties"] == float(a.dropped_ties)


def test_the_summary_names_every_loss() -> None:
    counts = EncodingCounts(1203, 1100, 40, 3, 60, 7, 2, 5, 1, 200_000, 120_000, 4096)
    assert counts.summary() == (
        "1,100 of 1,203 comparisons kept (dropped: 40 too long, 3 identical completions, 60 ties); "
        "7 with truncated context; 2 duplicate completions removed; "
        "1 of them ranked differently, the better rank kept; 5 tied pairs within them; "
        "200,000 tokens, 120,000 on prefix trees (40% shared); longest conversation 4,096 tokens, before any was left "
        "out or cut"
    )
    assert EncodingCounts(2, 2, longest=40).summary().endswith("longest conversation 40 tokens")
    assert "before any" in EncodingCounts(2, 2, truncated=1, longest=40).summary()


def test_dataset_equals_its_rows_one_by_one(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_CHUNK_ROWS", 16)
    renderer = Renderer(tokenizer, chat_template=CHATML, max_length=120, truncation="drop")
    rows = Rows(varied(150))
    dataset = encode_dataset(rows, renderer, ties="drop", cache_dir=tmp_path, num_workers=1)
    outcomes = [encode_comparison(row, renderer, where, "drop") for row, where in rows]
    kept = [outcome for outcome in outcomes if isinstance(outcome, Comparison)]
    assert len(dataset) == len(kept)
    for ours, theirs in zip(dataset, kept, strict=True):
        assert_same(ours, theirs)
    counts = dataset.counts
    assert counts.read == 150 == counts.kept + counts.dropped_too_long + counts.dropped_identical + counts.dropped_ties
    assert counts.dropped_ties == outcomes.count(DropReason.TIES) > 0
    assert counts.dropped_identical == outcomes.count(DropReason.IDENTICAL) > 0
    assert counts.dropped_too_long == outcomes.count(DropReason.TOO_LONG) > 0
    assert counts.deduplicated > 0
    assert dataset.num_tokens.tolist() == [c.num_tokens for c in kept] and counts.tokens == dataset.num_tokens.sum()
    assert dataset.tree_tokens.tolist() == [c.tree_tokens for c in kept]
    assert counts.tree_tokens == dataset.tree_tokens.sum()
    assert_same(dataset[-1], kept[-1])
    assert [c.where for c in dataset[3:9:2]] == [c.where for c in kept[3:9:2]]
    with pytest.raises(IndexError):
        dataset[len(kept)]
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.counts == counts and copy.fingerprint == dataset.fingerprint
    assert_same(copy[5], kept[5])


def test_the_cache_is_reused_for_the_same_content_only(
    tokenizer: PreTrainedTokenizerFast, renderer: Renderer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Rows(varied(20))
    first = encode_dataset(rows, renderer, ties="drop", cache_dir=tmp_path)
    with caplog.at_level(logging.INFO):
        again = encode_dataset(rows, renderer, ties="drop", cache_dir=tmp_path)
    assert rows.times_read == 1 and "reusing" in caplog.text and first.counts.summary() in caplog.text
    assert again.counts == first.counts and again.fingerprint == first.fingerprint
    limited = Renderer(tokenizer, chat_template=CHATML, max_length=400)
    others = [
        encode_dataset(rows, renderer, ties="half", cache_dir=tmp_path),
        encode_dataset(rows, limited, ties="drop", cache_dir=tmp_path),
        encode_dataset(Rows(varied(21), fingerprint="b"), renderer, ties="drop", cache_dir=tmp_path),
    ]
    assert rows.times_read == 3
    assert len({dataset.fingerprint for dataset in [first, *others]}) == 4
    assert len(list(tmp_path.iterdir())) == 4  # and no temporary file


def test_a_damaged_cache_is_noticed_and_made_again(
    renderer: Renderer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = Rows(varied(40))
    (path,) = [encode_dataset(rows, renderer, ties="drop", cache_dir=tmp_path).path]
    sound = path.read_bytes()
    tokens = encode_dataset(rows, renderer, ties="drop", cache_dir=tmp_path)[7].token_ids[0].tobytes()
    place = sound.index(tokens)
    flipped = sound[: place + 4] + bytes([sound[place + 4] ^ 1]) + sound[place + 5 :]
    for damage in (
        b"",
        sound[:100],
        sound[: len(sound) // 2],
        sound[:-1],
        flipped,
        sound.replace(b'"kept"', b'"kepx"'),
    ):
        path.write_bytes(damage)
        with pytest.raises(DataError, match="damaged"):
            EncodedDataset(path, "rows")
        caplog.clear()
        assert len(encode_dataset(rows, renderer, ties="drop", cache_dir=tmp_path)) > 0
        assert "damaged" in caplog.text and "tokenizing again" in caplog.text
        assert path.read_bytes() == sound


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_flipped_bit_changes_what_is_learnt(
    data: st.DataObject, renderer: Renderer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("flip")
    dataset = encode_dataset(Rows(varied(6)), renderer, ties="drop", cache_dir=folder)
    content = bytearray(dataset.path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    damaged = folder / "damaged.arrow"
    damaged.write_bytes(content)
    try:
        found = EncodedDataset(damaged, "rows")
    except DataError:
        return
    assert len(found) == len(dataset)  # a flip in padding, or in a part of the format that nothing reads
    for ours, theirs in zip(found, dataset, strict=True):
        assert_same(ours, theirs)


def test_a_changed_length_or_subset_is_noticed(renderer: Renderer, tmp_path: Path) -> None:
    row = preference("P" * 101, "L" * 203, task_name="capitals")
    sound = encode_dataset(Rows([row]), renderer, ties="drop", cache_dir=tmp_path).path.read_bytes()
    damaged = tmp_path / "damaged.arrow"
    for was, becomes in ((np.int32([101, 203]).tobytes(), np.int32([101, 202]).tobytes()), (b"capitals", b"capitole")):
        assert sound.count(was) == 1
        damaged.write_bytes(sound.replace(was, becomes))
        with pytest.raises(DataError, match="its checksum differs"):
            EncodedDataset(damaged, "rows")


def test_a_broken_row_stops_the_encoding_and_leaves_no_file(renderer: Renderer, tmp_path: Path) -> None:
    broken = Preference(({"role": "broken", "content": ""},), preference("Paris.", "Lyon.").completions)
    with pytest.raises(DataError, match=r"rows\.jsonl:6: the chat template refused(?s:.*)unknown role"):
        encode_dataset(Rows([*varied(5), broken]), renderer, ties="drop", cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_left_is_an_error(renderer: Renderer, tmp_path: Path) -> None:
    tied = Rows([preference("Paris.", "Lyon.", ranks=(0, 0))] * 3)
    for _ in range(2):  # fresh, and from the cache
        with pytest.raises(DataError, match=r"no comparison is left(?s:.*)0 of 3 comparisons kept \(dropped: 3 ties\)"):
            encode_dataset(tied, renderer, ties="drop", cache_dir=tmp_path)
    with pytest.raises(DataError, match="no comparison is left"):
        encode_dataset(Rows([], fingerprint="none"), renderer, ties="drop", cache_dir=tmp_path)


def test_a_folder_that_cannot_be_written(renderer: Renderer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be written(?s:.*)data\.cache_dir"):
        encode_dataset(Rows(varied(3)), renderer, ties="drop", cache_dir=tmp_path / "file")


def test_a_full_disk_is_named_and_leaves_no_file(renderer: Renderer, tmp_path: Path) -> None:
    rows = Rows(varied(300))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(ConfigError, match=r"cannot be written(?s:.*)data\.cache_dir"):
            encode_dataset(rows, renderer, ties="drop", cache_dir=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_several_processes_write_the_same_file(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_CHUNK_ROWS", 20)
    renderer = Renderer(tokenizer, chat_template=CHATML, max_length=150, truncation="truncate_left")
    rows = Rows(varied(400))
    one, two = (encode_dataset(rows, renderer, ties="drop", cache_dir=tmp_path / str(n), num_workers=n) for n in (1, 2))
    assert one.counts == two.counts and one.counts.truncated > 0
    assert one.path.read_bytes() == two.path.read_bytes()


@pytest.mark.slow
def test_processes_start_by_themselves_for_a_large_stream(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoding, "_MIN_CORES", 2)
    if encoding._num_cores() < 2:
        pytest.skip("one core")
    with caplog.at_level(logging.INFO):
        small = encode_dataset(Rows(varied(4000)), renderer, ties="drop", cache_dir=tmp_path)
        assert "processes" not in caplog.text and small.counts.read == 4000
        large = encode_dataset(Rows(varied(4500), fingerprint="b"), renderer, ties="drop", cache_dir=tmp_path)
    assert "processes" in caplog.text and large.counts.read == 4500
    for i in range(0, len(small), 100):
        assert_same(large[i], small[i])


@pytest.mark.slow
def test_an_error_in_a_process_is_the_error_of_one_process(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_CHUNK_ROWS", 10)
    broken = Preference(({"role": "broken", "content": ""},), preference("Paris.", "Lyon.").completions)

    class Unreadable(Rows):
        def __iter__(self) -> Iterator[tuple[Preference, str]]:
            yield from super().__iter__()
            raise DataError("not JSON", where="rows.jsonl:141")

    preferences = varied(140)
    preferences[115] = preferences[125] = broken
    messages = []
    for workers in (1, 2):
        with pytest.raises(DataError) as caught:
            encode_dataset(Unreadable(preferences), renderer, ties="drop", cache_dir=tmp_path, num_workers=workers)
        messages.append((str(caught.value), caught.value.where))
    assert messages[0] == messages[1] and messages[0][1] == "rows.jsonl:116"
    with pytest.raises(DataError, match=r"rows\.jsonl:141: not JSON"):
        encode_dataset(Unreadable(varied(140)), renderer, ties="drop", cache_dir=tmp_path, num_workers=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2])
def test_memory_does_not_grow_with_the_stream(renderer: Renderer, tmp_path: Path, num_workers: int) -> None:
    held: list[int] = []

    class Generated:
        name, fingerprint = "generated", "g"

        def __iter__(self) -> Iterator[tuple[Preference, str]]:
            for i in range(20_000):
                if i % 1000 == 0:
                    held.append(tracemalloc.get_traced_memory()[0] + pa.total_allocated_bytes())
                yield preference(f"Paris {i} " * 8, f"Lyon {i} " * 8, prompt=f"Capital {i}? " * 4), f"g:{i}"

    tracemalloc.start()
    try:
        dataset = encode_dataset(Generated(), renderer, ties="drop", cache_dir=tmp_path, num_workers=num_workers)
    finally:
        tracemalloc.stop()
    written = dataset.path.stat().st_size
    assert written > 15e6
    assert max(held[10:]) - max(held[:10]) < 0.5 * written / 2  # of what was written in that time


def hh_rows(name: str) -> Rows:
    def messages(transcript: str) -> list[dict[str, Any]]:
        turns = []
        for part in transcript.split("\n\nHuman:")[1:]:
            asked, *answers = part.split("\n\nAssistant:")
            turns.append({"role": "user", "content": asked.strip()})
            turns.extend({"role": "assistant", "content": answer.strip()} for answer in answers)
        return turns

    rows = []
    with gzip.open(SHARED / "hh_harmless" / name, "rt", encoding="utf-8") as lines:
        for line in lines:
            chosen, rejected = (messages(json.loads(line)[key]) for key in ("chosen", "rejected"))
            same = 0
            while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
                same += 1
            completions = tuple(Completion(rank, tuple(side[same:])) for rank, side in enumerate((chosen, rejected)))
            rows.append(Preference(tuple(chosen[:same]), completions))
    return Rows(rows)


@pytest.mark.skipif(not (SHARED / "hh_harmless").is_dir(), reason=f"no real data in {SHARED}")
def test_real_dialogues(tmp_path: Path) -> None:
    rows = hh_rows("validation.jsonl.gz")
    texts = [m["content"] for row in rows.preferences for m in [*row.context, *row.completions[0].messages]]
    renderer = Renderer(train_tokenizer(texts, 2048), chat_template=CHATML, max_length=512, truncation="truncate_left")
    dataset = encode_dataset(rows, renderer, ties="error", cache_dir=tmp_path)
    counts = dataset.counts
    assert counts.read == 300 == counts.kept + counts.dropped_too_long + counts.dropped_identical
    assert counts.kept > 290 and counts.truncated > 0
    assert counts.tokens / counts.tree_tokens > 1.4
    assert all(renderer.end_of_turn(ids.tolist()) == "newline" for c in dataset for ids in c.token_ids)
