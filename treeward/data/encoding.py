"""`encode_dataset`: comparisons as token ids, in a file that is written once per content.

    dataset = encode_dataset(open_dataset(config), renderer, ties="drop", cache_dir=Path("cache"))
    dataset[0].token_ids      # K int32 arrays, each a whole conversation
    dataset.counts.summary()  # what was read, kept, dropped and why, and how many tokens sharing saves

Every row that is read is kept or counted as dropped, and a row that is wrong raises. Several processes give the same
file as one.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tqdm import tqdm

from treeward.data.encoded import (
    CHECKSUM_KEY,
    COUNTS_KEY,
    SCHEMA,
    Block,
    CacheFile,
    Comparison,
    EncodedDataset,
    EncodingCounts,
    open_if_sound,
)
from treeward.data.preference import Message, Preference, last_text
from treeward.errors import ConfigError, DataError

if TYPE_CHECKING:
    from treeward.data.datasets import PreferenceStream
    from treeward.data.rendering import Renderer

__all__ = [
    "DropReason",
    "Ties",
    "count_tree_tokens",
    "encode_comparison",
    "encode_dataset",
]

logger = logging.getLogger(__name__)

Ties = Literal["drop", "half", "error"]
Row = tuple[Preference, str]
"""A preference and where it stands, as `train.jsonl:17`."""

_FORMAT_VERSION = 4  # raise it when the file's layout or the rules for keeping a comparison change
_CHUNK_ROWS = 1000
_CHUNK_CHARACTERS = 4_000_000
_SERIAL_ROWS = 4000  # starting a process costs as much as encoding about so many rows
_MIN_CORES = 4  # fast tokenizers use all cores already: with fewer, processes only help templates and cost their start
_MAX_WORKERS = 8


class DropReason(Enum):
    """Why a comparison was left out."""

    TOO_LONG = "too_long"
    IDENTICAL = "identical"
    TIES = "ties"


def count_tree_tokens(sequences: Sequence[npt.NDArray[np.int32] | Sequence[int]]) -> int:
    """The size of the trie of the sequences: in sorted order each adds what it does not share with its neighbour."""
    in_order = sorted(s.tolist() if isinstance(s, np.ndarray) else list(s) for s in sequences)
    arrays = [np.array(s, dtype=np.int32) for s in in_order]
    return sum(map(len, arrays)) - sum(_common_prefix(a, b) for a, b in zip(arrays, arrays[1:], strict=False))


def encode_comparison(preference: Preference, renderer: Renderer, where: str, ties: Ties) -> Comparison | DropReason:
    """Encode one comparison within the renderer's `max_length`, or say why it is left out.

    `ties` is about a comparison none of whose completions outranks another: "drop" leaves it out, "half" keeps it (the
    loss counts half a win for either side) and "error" raises. Completions that have the same tokens, as some have only
    once their context was cut, are kept once with the best of their ranks; a comparison without a pair left to compare
    is dropped. Raises `DataError` for a conversation that the chat template refuses.
    """
    outcomes, _ = _encode_rows([(preference, where)], renderer, ties)
    return outcomes[0]


def encode_dataset(
    stream: PreferenceStream,
    renderer: Renderer,
    *,
    ties: Ties = "drop",
    cache_dir: Path,
    num_workers: int | None = None,
    progress: bool = False,
) -> EncodedDataset:
    """Encode every comparison of a `PreferenceStream`, or open the file that an earlier call made of the same content.

    `num_workers`: processes; 1 is this process alone, None starts some for a large dataset on four cores or more.
    They are started afresh ("spawn"), so a script must guard its entry with `if __name__ == "__main__"`. `progress`
    shows a bar on a terminal.
    Raises `DataError` for a row that is wrong or when no comparison is left, `ConfigError` if `cache_dir` cannot be
    written.
    """
    content = json.dumps([_FORMAT_VERSION, stream.fingerprint, renderer.fingerprint, ties])
    path = Path(cache_dir) / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.arrow"
    dataset = open_if_sound(path, stream.name)
    if dataset is None:
        _write(path, stream, renderer, ties, num_workers, progress)
        dataset = EncodedDataset(path, stream.name)
    logger.info("%s: %s", stream.name, dataset.counts.summary())
    if not dataset:
        raise DataError(
            "no comparison is left to learn from",
            where=stream.name,
            got=dataset.counts.summary(),
            fix="check the file; for long rows raise data.max_input_seq_length or set data.truncation: truncate_left; "
            "for ties see data.ties",
        )
    return dataset


def _encode_rows(
    rows: Sequence[Row], renderer: Renderer, ties: Ties
) -> tuple[list[Comparison | DropReason], EncodingCounts]:
    """All rows with one call of the tokenizer."""
    wanted = [_has_order(p, where, ties) for p, where in rows]
    conversations = [
        ([*p.context, *messages], where)
        for (p, where), is_wanted in zip(rows, wanted, strict=True)
        if is_wanted
        for messages in _answers(p)
    ]
    encoded = iter(renderer.encode_many([c for c, _ in conversations], where=[where for _, where in conversations]))
    outcomes: list[Comparison | DropReason] = []
    counts = EncodingCounts()
    for (preference, where), is_wanted in zip(rows, wanted, strict=True):
        if not is_wanted:
            outcomes.append(DropReason.TIES)
            counts += EncodingCounts(read=1, dropped_ties=1)
            continue
        own = [next(encoded) for _ in preference.completions]
        outcome, of_row = _encode_row(preference, own, renderer, where, ties)
        if preference.non_contextual is not None:
            outcome, of_row = _extended(outcome, of_row, next(encoded), preference.non_contextual, renderer)
        outcomes.append(outcome)
        counts += of_row
    return outcomes, counts


def _answers(preference: Preference) -> list[tuple[Message, ...]]:
    own = [completion.messages for completion in preference.completions]
    return own if preference.non_contextual is None else [*own, preference.non_contextual]


def _extended(
    outcome: Comparison | DropReason,
    counts: EncodingCounts,
    encoded: list[int],
    messages: tuple[Message, ...],
    renderer: Renderer,
) -> tuple[Comparison | DropReason, EncodingCounts]:
    """With an answer to another prompt as the worst, unless it is too long or says what one of the row's own says."""
    is_too_long = renderer.max_length is not None and len(encoded) > renderer.max_length
    if not isinstance(outcome, Comparison) or is_too_long or any(encoded == ids.tolist() for ids in outcome.token_ids):
        return outcome, counts
    token_ids = (*outcome.token_ids, np.array(encoded, dtype=np.int32))
    extended = replace(
        outcome,
        token_ids=token_ids,
        ranks=(*outcome.ranks, max(outcome.ranks) + 1),
        lengths=(*outcome.lengths, len(last_text(messages))),
        tree_tokens=count_tree_tokens(token_ids),
        non_contextual=True,
    )
    sizes = {"tokens": extended.num_tokens, "tree_tokens": extended.tree_tokens}
    return extended, replace(counts, non_contextual=1, longest=max(counts.longest, len(encoded)), **sizes)


def _encode_row(
    preference: Preference, encoded: list[list[int]], renderer: Renderer, where: str, ties: Ties
) -> tuple[Comparison | DropReason, EncodingCounts]:
    longest = max(map(len, encoded))
    fitted = [
        renderer.fit([*preference.context, *completion.messages], encoded=ids, where=where)
        for completion, ids in zip(preference.completions, encoded, strict=True)
    ]
    kept = [one for one in fitted if one is not None]
    if len(kept) < len(fitted):
        return DropReason.TOO_LONG, EncodingCounts(read=1, dropped_too_long=1, longest=longest)
    best: dict[tuple[int, ...], int] = {}  # in the order of the completions
    lengths: dict[tuple[int, ...], int] = {}
    contradictory = 0
    for ids, completion in zip((tuple(one.token_ids) for one in kept), preference.completions, strict=True):
        contradictory += best.get(ids, completion.rank) != completion.rank
        best[ids] = min(completion.rank, best.get(ids, completion.rank))
        lengths.setdefault(ids, len(last_text(completion.messages)))
    if len(best) < 2 or (ties != "half" and len(set(best.values())) < 2):
        return DropReason.IDENTICAL, EncodingCounts(read=1, dropped_identical=1, longest=longest)
    comparison = Comparison(
        token_ids=tuple(np.array(ids, dtype=np.int32) for ids in best),
        ranks=tuple(best.values()),
        lengths=tuple(lengths.values()),
        subset=preference.task_name,
        margin=preference.margin,
        where=where,
        tree_tokens=count_tree_tokens(list(best)),
    )
    return comparison, EncodingCounts(
        read=1,
        kept=1,
        truncated=int(any(one.truncated for one in kept)),
        deduplicated=len(encoded) - len(best),
        tied_pairs=sum(a == b for a, b in itertools.combinations(best.values(), 2)),
        contradictory=contradictory,
        tokens=comparison.num_tokens,
        tree_tokens=comparison.tree_tokens,
        longest=longest,
    )


def _has_order(preference: Preference, where: str, ties: Ties) -> bool:
    """Whether the comparison has something to say under this policy; raises under "error" if it has not."""
    if ties == "half":
        return True
    ranks = [completion.rank for completion in preference.completions]
    if ties == "drop" or len(set(ranks)) == len(ranks):
        return preference.num_ordered_pairs > 0
    raise DataError(
        "completions have equal ranks",
        where=where,
        field="completions[*].rank",
        got=f"ranks {ranks}",
        need="different ranks, for data.ties is error",
        fix="remove the row, or set data.ties to drop (leave ties out) or half (a tie is half a win for either side)",
    )


def _encode_chunk(rows: Sequence[Row], renderer: Renderer, ties: Ties) -> tuple[pa.RecordBatch, EncodingCounts]:
    outcomes, counts = _encode_rows(rows, renderer, ties)
    kept = [outcome for outcome in outcomes if isinstance(outcome, Comparison)]
    sequences = [ids for comparison in kept for ids in comparison.token_ids]
    per_row = _offsets(len(comparison.token_ids) for comparison in kept)
    tokens = pa.array(np.concatenate([np.zeros(0, np.int32), *sequences]))
    columns = [
        pa.ListArray.from_arrays(per_row, pa.ListArray.from_arrays(_offsets(map(len, sequences)), tokens)),
        pa.ListArray.from_arrays(per_row, pa.array([r for c in kept for r in c.ranks], pa.int64())),
        pa.ListArray.from_arrays(per_row, pa.array([n for c in kept for n in c.lengths], pa.int32())),
        pa.array([c.subset for c in kept], pa.string()),
        pa.array([c.margin for c in kept], pa.float64()),
        pa.array([c.where for c in kept], pa.string()),
        pa.array([c.tree_tokens for c in kept], pa.int64()),
        pa.array([int(c.non_contextual) for c in kept], pa.int8()),
        pa.array([_own_tree_tokens(c) for c in kept], pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA), counts


def _own_tree_tokens(comparison: Comparison) -> int:
    own = comparison.token_ids[: comparison.num_own]
    return count_tree_tokens(own) if comparison.non_contextual else comparison.tree_tokens


def _chunks(stream: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in bounded portions: few rows where they are long."""
    chunk: list[Row] = []
    characters = 0
    for preference, where in stream:
        chunk.append((preference, where))
        context = sum(map(_num_characters, preference.context))
        characters += sum(context + sum(map(_num_characters, c.messages)) for c in preference.completions)
        if len(chunk) == _CHUNK_ROWS or characters > _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _encoded_chunks(
    stream: Iterable[Row], renderer: Renderer, ties: Ties, num_workers: int | None
) -> Iterator[tuple[pa.RecordBatch, EncodingCounts]]:
    """The chunks in the order of the stream, however many processes make them."""
    chunks = _chunks(stream)
    if num_workers is None:
        num_workers = min(_num_cores(), _MAX_WORKERS) if _num_cores() >= _MIN_CORES else 1
        num_rows = 0
        while num_workers > 1 and (chunk := next(chunks, None)) is not None:
            if num_rows >= _SERIAL_ROWS:
                chunks = itertools.chain([chunk], chunks)
                break
            num_rows += len(chunk)
            yield _encode_chunk(chunk, renderer, ties)
        else:
            num_workers = 1  # nothing is left, or there are too few cores
    if num_workers <= 1:
        yield from (_encode_chunk(chunk, renderer, ties) for chunk in chunks)
        return
    logger.info("tokenizing in %d processes", num_workers)
    pending: deque[Future[tuple[pa.RecordBatch, EncodingCounts]]] = deque()
    pool = ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(renderer, ties)
    )
    try:
        while (chunk := _next_chunk(chunks, pending)) is not None:
            pending.append(pool.submit(_encode_in_worker, chunk))
            if len(pending) > 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise ConfigError(
            "a tokenization process died",
            field="data.num_workers",
            got=num_workers,
            fix="set data.num_workers: 1; if that works, memory was short, or the script that calls encode_dataset "
            'lacks `if __name__ == "__main__"`',
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _next_chunk(chunks: Iterator[list[Row]], pending: Iterable[Future[Any]]) -> list[Row] | None:
    try:
        return next(chunks, None)
    except Exception:
        for future in pending:  # reading runs ahead of encoding: an earlier row's error is raised instead, as in one
            future.result()  # process
        raise


_worker: tuple[Renderer, Ties] | None = None


def _start_worker(renderer: Renderer, ties: Ties) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    _worker = renderer, ties


def _encode_in_worker(rows: list[Row]) -> tuple[pa.RecordBatch, EncodingCounts]:
    assert _worker is not None
    return _encode_chunk(rows, *_worker)


def _write(
    path: Path, stream: PreferenceStream, renderer: Renderer, ties: Ties, num_workers: int | None, progress: bool
) -> None:
    counts, checksum = EncodingCounts(), 0
    bar = tqdm(desc=f"tokenizing {stream.name}", unit=" rows", disable=not (progress and sys.stderr.isatty()))
    with bar, CacheFile(path) as file:
        for batch, of_chunk in _encoded_chunks(stream, renderer, ties, num_workers):
            if batch.num_rows:
                checksum = Block(batch).checksum(checksum)
                file.write(batch)
            counts += of_chunk
            bar.update(of_chunk.read)
        ending = {COUNTS_KEY: json.dumps(asdict(counts)).encode(), CHECKSUM_KEY: str(checksum).encode()}
        file.write(pa.RecordBatch.from_pylist([], schema=SCHEMA), ending)


def _offsets(lengths: Iterable[int]) -> pa.Array:
    return pa.array(np.cumsum([0, *lengths]).astype(np.int32))


def _common_prefix(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _num_characters(message: dict[str, Any]) -> int:
    content = message.get("content")
    return len(content) if isinstance(content, str) else len(str(content))


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
