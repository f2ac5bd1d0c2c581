"""Encoding: every row kept or counted, one file per content, the same from one process or
several."""

from __future__ import annotations

import itertools
import logging
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import assistant, user
from templates import byte_bpe

from treeward.data import encoding
from treeward.data.encoding import EncodedDataset, count_tree_tokens, encode_dataset
from treeward.data.preference import Completion, Preference
from treeward.data.rendering import Renderer
from treeward.errors import DataError

CHATML = (
    "{% for m in messages %}"
    "{% if m['role'] == 'broken' %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
)


def renderer_of(
    max_length: int | None = None,
    truncation: Any = "drop",
    template: str = CHATML,
) -> Renderer:
    return Renderer(
        byte_bpe(),
        chat_template=template,
        max_length=max_length,
        truncation=truncation,
    )


def preference(
    *texts: str,
    ranks: tuple[int, ...] | None = None,
    prompt: str = "Capital?",
    **extra: Any,
) -> Preference:
    ranked = zip(ranks or range(len(texts)), texts, strict=True)
    return Preference(
        (user(prompt),),
        tuple(Completion(rank, (assistant(text),)) for rank, text in ranked),
        **extra,
    )


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
    """Rows with two to four completions, some ties, some duplicates, some long, some with a
    margin."""
    rows = []
    for i in range(number):
        is_tied = i % 5 == 0
        is_long = i % 11 == 0
        has_strength = i % 4 == 0
        num_completions = 2 + i % 3
        # The remainder is one of few numbers, so some completions are equal.
        answers = [f"Answer {i * j % (7 - i % 5)} of row {i}" for j in range(num_completions)]
        row = preference(
            *answers,
            ranks=(0,) * num_completions if is_tied else tuple(range(num_completions)),
            prompt=f"Question {i}? " * (21 if is_long else 1),
            strength=i / 2 if has_strength else None,
            task_name=f"task {i % 3}",
        )
        rows.append(row)
    return rows


OTHER = preference("Sure.", "No.", prompt="Other?")


@pytest.fixture
def encode(tmp_path: Path) -> Any:
    numbers = itertools.count()

    def encode(
        *rows: Preference,
        ties: Any = "drop",
        renderer: Renderer | None = None,
    ) -> EncodedDataset:
        """The comparisons of the rows, and of one more that is always kept."""
        cache = tmp_path / str(next(numbers))
        return encode_dataset(
            Rows([*rows, OTHER]),
            renderer or renderer_of(),
            ties=ties,
            cache_dir=cache,
        )

    return encode


def test_a_comparison_is_its_plain_rows(encode: Any) -> None:
    turns = (assistant("Let me see."), assistant("Paris!"))
    row = preference(
        "Paris.",
        "Lyon",
        "Paris it is.",
        ranks=(0, 2, 1),
        strength=0.5,
        task_name="capitals",
    )
    row = replace(row, completions=(*row.completions, Completion(3, turns)))
    comparison = encode(row)[0]
    rows = [renderer_of().encode([*row.context, *c.messages]) for c in row.completions]
    assert [ids.tolist() for ids in comparison.token_ids] == rows
    assert all(ids.dtype == np.int32 and not ids.flags.writeable for ids in comparison.token_ids)
    assert (comparison.ranks, comparison.strength, comparison.where) == (
        (0, 2, 1, 3),
        0.5,
        "rows.jsonl:1",
    )
    assert (comparison.lengths, comparison.subset) == ((6, 4, 12, 6), "capitals")
    assert comparison.num_tokens == sum(map(len, rows))
    assert comparison.tree_tokens == count_tree_tokens(rows) < comparison.num_tokens


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=6))
def test_tree_tokens_is_the_number_of_distinct_prefixes(sequences: list[list[int]]) -> None:
    prefixes = set()
    for sequence in sequences:
        for end in range(1, len(sequence) + 1):
            prefixes.add(tuple(sequence[:end]))
    assert count_tree_tokens(sequences) == len(prefixes)
    assert count_tree_tokens([np.array(s, np.int32) for s in sequences]) == len(prefixes)


def test_ranks_that_contradict_scores_and_completions_without_an_answer_are_told(
    encode: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def scored(*scores: float | None) -> Preference:
        completions = [
            Completion(rank, (assistant(f"Text {rank}."),), score=score)
            for rank, score in enumerate(scores)
        ]
        return Preference((user("Capital?"),), tuple(completions))

    caplog.set_level("INFO")
    counts = encode(scored(5, 1), scored(1, 5), scored(3, 1, 2), scored(None, 5, 2)).counts
    assert counts.contradicted == 2
    assert "2 whose ranks contradict their scores" in caplog.text and "assistant" not in caplog.text
    asked = Completion(0, (assistant("Paris."), user("Thanks.")))
    counts = encode(
        Preference((user("Capital?"),), (asked, Completion(1, (assistant("Rome."),)))),
    ).counts
    assert counts.unanswered == 1
    assert "1 of 4 completions do not end with a message of the assistant" in caplog.text
    assert counts.other_prompts == 0


def test_sides_with_different_prompts_are_told(
    encode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    system = {"role": "system", "content": "Be brief."}
    brief = Completion(0, (system, user("Capital?"), assistant("Paris.")))
    plain = Completion(1, (user("Capital?"), assistant("It is Paris.")))
    called = Completion(1, ({"role": "tool", "content": "Rome."}, assistant("It is Rome.")))
    counts = encode(
        Preference((), (brief, plain)),
        Preference((user("Capital?"),), (Completion(0, (assistant("Paris."),)), called)),
    ).counts
    assert counts.other_prompts == 1
    assert "1 whose sides answer different prompts" in caplog.text


def test_a_comparison_without_a_prompt_is_a_prompt_of_its_own(encode: Any) -> None:
    """Else the interval of a validation would be that of a single example."""

    def without_prompt(better: str, worse: str) -> Preference:
        sides = (Completion(0, (assistant(better),)), Completion(1, (assistant(worse),)))
        return Preference((), sides)

    first = without_prompt("Paris.", "Rome.")
    prompts = encode(first, without_prompt("Lyon.", "Nice."), without_prompt("Rome.", "Paris."))
    digest, other, contradicted, *_ = [comparison.prompt for comparison in prompts]
    assert digest == contradicted != other


def test_ties(encode: Any) -> None:
    tied = preference("Paris.", "Lyon.", ranks=(1, 1))
    assert encode(tied).counts.dropped_ties == 1 and len(encode(tied)) == 1
    assert encode(tied, ties="half")[0].ranks == (1, 1)
    partly = preference("Paris.", "Lyon.", "Nice.", ranks=(0, 1, 1))
    for policy in ("drop", "half"):
        assert encode(partly, ties=policy)[0].ranks == (0, 1, 1)


@pytest.mark.parametrize(
    ("texts", "ranks", "ties", "kept"),
    [
        (("Paris.", "Paris."), (0, 1), "drop", None),
        (("Paris.", "Paris."), (0, 0), "half", None),
        (("Paris.", "Lyon.", "Paris.", "Paris."), (2, 1, 0, 3), "drop", (0, 1)),
        (("Lyon.", "Paris.", "Paris."), (0, 1, 0), "drop", None),  # without the copy a tie is left
        (("Lyon.", "Paris.", "Paris."), (0, 1, 0), "half", (0, 0)),
    ],
)
def test_identical_completions(encode: Any, texts: Any, ranks: Any, ties: str, kept: Any) -> None:
    dataset = encode(preference(*texts, ranks=ranks), ties=ties)
    assert dataset.counts.dropped_identical == (kept is None)
    if kept is not None:
        assert dataset[0].ranks == kept and dataset.counts.deduplicated == len(texts) - 2


def test_too_long(encode: Any) -> None:
    long = preference("Paris.", "Lyon.", prompt="Capital? " * 50)
    assert encode(long, renderer=renderer_of(60)).counts.dropped_too_long == 1
    cut = encode(long, renderer=renderer_of(60, "truncate_left"))
    assert (
        cut.counts.truncated == 1
        and 50 < max(map(len, cut[0].token_ids)) <= 60 < cut.counts.longest
    )
    with pytest.raises(DataError, match=r"rows\.jsonl:1: a conversation is too long"):
        encode(long, renderer=renderer_of(60, "error"))
    huge = preference("Paris.", "Lyon.", prompt="Capital? " * 1_000_000)
    counts = encode(huge, renderer=renderer_of(60)).counts
    assert (counts.read, counts.kept, counts.dropped_too_long) == (
        2,
        1,
        1,
    ) and counts.longest > 60_000


def test_an_overlong_completion_leaves_the_others(
    encode: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    row = preference("Paris.", "Lyon. " * 30, "Nice.", ranks=(0, 1, 2))
    pair = preference("Paris.", "Lyon. " * 30)
    tied = preference("Paris.", "Lyon. " * 30, "Nice.", ranks=(0, 1, 0))
    dataset = encode(row, pair, tied, renderer=renderer_of(60))
    assert dataset[0].ranks == (0, 2) and len(dataset[0].token_ids) == len(dataset[0].lengths) == 2
    counts = dataset.counts
    assert (
        counts.kept,
        counts.dropped_too_long,
        counts.completions,
        counts.completions_too_long,
    ) == (2, 2, 4, 1)
    words = r"2 of 4 comparisons kept \(dropped: 2 too long\); 1 completions of kept comparisons too long.*_left"
    assert re.search(words, caplog.text) and counts.is_much_dropped
    assert encode(tied, ties="half", renderer=renderer_of(60))[0].ranks == (0, 0)
    assert not encode(preference("Paris.", "Lyon.")).counts.is_much_dropped


VARIED = varied(150)
MOST_TOKENS = 120


@pytest.fixture
def in_batches(encode: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The varied rows, encoded in several goes."""
    monkeypatch.setattr(encoding, "_ROWS_AT_ONCE", 16)
    monkeypatch.setattr(encoding, "_ROWS_IN_BATCH", 40)
    return encode(*VARIED, renderer=renderer_of(MOST_TOKENS))


def test_every_row_is_kept_or_counted_as_dropped(in_batches: Any) -> None:
    counts = in_batches.counts
    dropped = (counts.dropped_too_long, counts.dropped_identical, counts.dropped_ties)
    assert counts.read == 151
    assert counts.read == counts.kept + sum(dropped)
    assert counts.kept == len(in_batches)
    assert min(*dropped, counts.deduplicated) > 0
    assert counts.dropped_ties == sum(len(set(row.ranks)) == 1 for row in VARIED)


def test_tokens_and_costs_are_those_of_the_comparisons(in_batches: Any) -> None:
    counts = in_batches.counts
    costs = [count_tree_tokens(comparison.token_ids) for comparison in in_batches]
    assert counts.tokens == sum(comparison.num_tokens for comparison in in_batches)
    assert counts.tree_tokens == sum(costs)
    assert [comparison.tree_tokens for comparison in in_batches] == costs
    assert in_batches.tree_tokens.tolist() == costs
    shapes = []
    highest = 0
    for comparison in in_batches:
        shapes.append([len(comparison.token_ids), max(map(len, comparison.token_ids))])
        highest = max(highest, *(int(ids.max()) for ids in comparison.token_ids))
    assert in_batches.shapes.tolist() == shapes
    assert in_batches.highest_token == highest


def test_a_comparison_has_the_tokens_of_its_row(in_batches: Any) -> None:
    renderer = renderer_of(MOST_TOKENS)
    rows = [*VARIED, OTHER]
    for comparison in in_batches:
        row = rows[int(comparison.where.partition(":")[2]) - 1]
        want = set()
        for completion in row.completions:
            ids = renderer.encode([*row.context, *completion.messages])
            if len(ids) <= MOST_TOKENS:
                want.add(tuple(ids))
        assert {tuple(ids.tolist()) for ids in comparison.token_ids} == want
        assert (comparison.strength, comparison.subset) == (row.strength, row.task_name)


def test_the_first_comparisons_keep_the_counts_of_all(in_batches: Any) -> None:
    some = in_batches.first(9)
    assert len(some) == 9
    assert some.digests.tolist() == in_batches.digests.tolist()[:9]
    assert some.counts == in_batches.counts


def test_comparisons_are_read_by_index_and_slice(in_batches: Any) -> None:
    places = [comparison.where for comparison in in_batches]
    assert [comparison.where for comparison in in_batches[3:9:2]] == places[3:9:2]
    with pytest.raises(IndexError):
        in_batches[len(in_batches)]


def test_encoded_comparisons_go_to_another_process(in_batches: Any) -> None:
    copy = pickle.loads(pickle.dumps(in_batches))
    assert copy.counts == in_batches.counts
    assert copy.fingerprint == in_batches.fingerprint
    assert copy[-1].where == in_batches[-1].where
    some = pickle.loads(pickle.dumps(in_batches.first(9)))
    assert [comparison.where for comparison in some] == [c.where for c in in_batches[:9]]


def test_the_cache_is_reused_for_the_same_content_only(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = Rows(varied(20))
    first = encode_dataset(rows, renderer_of(), ties="drop", cache_dir=tmp_path)
    with caplog.at_level(logging.INFO):
        again = encode_dataset(rows, renderer_of(), ties="drop", cache_dir=tmp_path)
    assert (
        rows.times_read == 1 and "reusing" in caplog.text and first.counts.summary() in caplog.text
    )
    assert again.counts == first.counts and again.fingerprint == first.fingerprint
    others = [
        encode_dataset(rows, renderer_of(), ties="half", cache_dir=tmp_path),
        encode_dataset(rows, renderer_of(400), ties="drop", cache_dir=tmp_path),
        encode_dataset(
            Rows(varied(21), fingerprint="b"),
            renderer_of(),
            ties="drop",
            cache_dir=tmp_path,
        ),
    ]
    assert rows.times_read == 3
    assert len({dataset.fingerprint for dataset in [first, *others]}) == 4
    assert len(list(tmp_path.glob("*.arrow"))) == 4
    assert len(list(tmp_path.iterdir())) == 8  # a digest of each, and no temporary file


def test_a_cut_cache_is_noticed_and_made_again(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = Rows(varied(40))
    path = encode_dataset(rows, renderer_of(), ties="drop", cache_dir=tmp_path).path
    sound = path.read_bytes()
    for damage in (b"", sound[:100], sound[: len(sound) // 2], sound[:-1]):
        path.write_bytes(damage)
        with pytest.raises(DataError, match="damaged"):
            EncodedDataset(path, "rows")
        caplog.clear()
        assert len(encode_dataset(rows, renderer_of(), ties="drop", cache_dir=tmp_path)) > 0
        assert "damaged" in caplog.text and "tokenizing again" in caplog.text
        assert path.read_bytes() == sound


def test_a_cache_with_one_changed_bit_is_made_again(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Arrow reads most of these files without a word, as other training data."""
    rows = Rows(varied(20))
    path = encode_dataset(rows, renderer_of(), cache_dir=tmp_path).path
    sound = path.read_bytes()
    for place in range(0, len(sound), len(sound) // 20):
        damaged = bytearray(sound)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        caplog.clear()
        encode_dataset(rows, renderer_of(), cache_dir=tmp_path)
        assert f"{path} is damaged" in caplog.text and path.read_bytes() == sound


def test_a_broken_row_stops_the_encoding_and_leaves_no_file(tmp_path: Path) -> None:
    broken = Preference(
        ({"role": "broken", "content": ""},),
        preference("Paris.", "Lyon.").completions,
    )
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl:6: the chat template refused(?s:.*)unknown role",
    ):
        encode_dataset(Rows([*varied(5), broken]), renderer_of(), ties="drop", cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_left_is_an_error(tmp_path: Path) -> None:
    tied = Rows([preference("Paris.", "Lyon.", ranks=(0, 0))] * 3)
    # also cached
    for rows, words in (
        (tied, "no comparison is left(?s:.*)3 ties"),
        (tied, "no comparison is left(?s:.*)3 ties"),
        (Rows([], fingerprint="none"), "there are no comparisons(?s:.*)hold out none"),
    ):
        with pytest.raises(DataError, match=words):
            encode_dataset(rows, renderer_of(), ties="drop", cache_dir=tmp_path)
