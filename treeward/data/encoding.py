"""`EncodedDataset`: comparisons as token ids, in a memory-mapped file that is written once per content.

    dataset = encode_dataset(open_dataset(config), renderer, ties="drop", cache_dir=Path("cache"))
    dataset[0].token_ids      # K int32 arrays, each a whole conversation
    dataset.counts.summary()  # what was read, kept, dropped and why, and how many tokens sharing saves

Every row that is read is kept or counted as dropped, and a row that is wrong raises. Several processes give the same
file as one. The file is an Arrow IPC file whose last, empty batch carries the counts and a checksum: a file without it
was cut short, and is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import sys
import uuid
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tqdm import tqdm

from treeward.data.preference import Message, Preference, last_text
from treeward.errors import ConfigError, DataError

if TYPE_CHECKING:
    from treeward.data.datasets import PreferenceStream
    from treeward.data.rendering import Renderer

__all__ = [
    "Comparison",
    "DropReason",
    "EncodedDataset",
    "EncodingCounts",
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
_COUNTS_KEY, _CHECKSUM_KEY = b"treeward.counts", b"treeward.checksum"
_SCHEMA = pa.schema(
    [
        ("token_ids", pa.list_(pa.list_(pa.int32()))),
        ("ranks", pa.list_(pa.int64())),
        ("lengths", pa.list_(pa.int32())),
        ("subset", pa.string()),
        ("margin", pa.float64()),
        ("where", pa.string()),
        ("tree_tokens", pa.int64()),
        ("non_contextual", pa.int8()),
        ("own_tree_tokens", pa.int64()),
    ]
)


class DropReason(Enum):
    """Why a comparison was left out."""

    TOO_LONG = "too_long"
    IDENTICAL = "identical"
    TIES = "ties"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A tokenized `Preference`: K conversations that begin with the same prompt.

    `token_ids`: K int32 arrays, read-only. `ranks`: lower is better. `lengths`: characters of the last message of each
    completion. `subset`: the preference's `task_name`. `tree_tokens`: tokens when common beginnings are held once. No
    two conversations are identical. `non_contextual`: the last of them is an answer to another prompt.
    """

    token_ids: tuple[npt.NDArray[np.int32], ...]
    ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    subset: str
    margin: float | None
    where: str
    tree_tokens: int
    non_contextual: bool = False

    @property
    def num_own(self) -> int:
        """Conversations that the data itself compares."""
        return len(self.token_ids) - self.non_contextual

    @property
    def num_tokens(self) -> int:
        """Tokens as plain rows."""
        return sum(map(len, self.token_ids))


@dataclass(frozen=True, slots=True)
class EncodingCounts:
    """What became of the comparisons that were read: `read` = `kept` + the three `dropped_*`.

    `tied_pairs`: pairs of equal rank in kept comparisons, which the loss leaves out unless `ties` is "half".
    `contradictory`: completions of kept comparisons that another, differently ranked one equals.
    `truncated`: kept comparisons that lost context. `deduplicated`: completions removed from kept comparisons because
    another has the same tokens. `non_contextual`: kept comparisons with an answer to another prompt, where they are
    asked for; the rest has none that fits. `tokens` (plain rows) and `tree_tokens` are of what was kept. `longest`:
    tokens of the longest conversation that was read, before truncation.
    """

    read: int = 0
    kept: int = 0
    dropped_too_long: int = 0
    dropped_identical: int = 0
    dropped_ties: int = 0
    truncated: int = 0
    deduplicated: int = 0
    tied_pairs: int = 0
    contradictory: int = 0
    tokens: int = 0
    tree_tokens: int = 0
    longest: int = 0
    non_contextual: int = 0

    def __add__(self, other: EncodingCounts) -> EncodingCounts:
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return EncodingCounts(**sums | {"longest": max(self.longest, other.longest)})

    def summary(self) -> str:
        """One line for a person."""
        dropped = {
            "too long": self.dropped_too_long,
            "identical completions": self.dropped_identical,
            "ties": self.dropped_ties,
        }
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in dropped.items() if number)
        parts = [f"{self.kept:,} of {self.read:,} comparisons kept" + (f" (dropped: {reasons})" if reasons else "")]
        if self.truncated:
            parts.append(f"{self.truncated:,} with truncated context")
        if self.deduplicated:
            parts.append(f"{self.deduplicated:,} duplicate completions removed")
        if self.contradictory:
            parts.append(f"{self.contradictory:,} of them ranked differently, the better rank kept")
        if self.tied_pairs:
            parts.append(f"{self.tied_pairs:,} tied pairs within them")
        if self.non_contextual:
            parts.append(f"{self.non_contextual:,} with an answer to another prompt")
        if self.tree_tokens:
            shared = 1 - self.tree_tokens / self.tokens
            parts.append(f"{self.tokens:,} tokens, {self.tree_tokens:,} on prefix trees ({shared:.0%} shared)")
        before = ", before any was left out or cut" if self.dropped_too_long or self.truncated else ""
        parts.append(f"longest conversation {self.longest:,} tokens{before}")
        return "; ".join(parts)

    def as_metrics(self) -> dict[str, float]:
        """The counts by name, for trackers."""
        return {name: float(value) for name, value in asdict(self).items()}


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
    dataset = _open_if_sound(path, stream.name)
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


class EncodedDataset(Sequence[Comparison]):
    """The comparisons of a file written by `encode_dataset`, memory-mapped: rows are views, nothing is loaded ahead.

    `tree_tokens` and `num_tokens`: int64 arrays (N,), the cost of each comparison. Pickles as its path. Raises
    `DataError` if the file is damaged.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            *batches, (_, ending) = (reader.get_batch_with_custom_metadata(i) for i in range(reader.num_record_batches))
            for batch, _ in batches:
                batch.validate(full=True)
            self._blocks = [_Block(batch) for batch, _ in batches]
            self.counts = EncodingCounts(**json.loads(ending[_COUNTS_KEY]))
            expected = int(ending[_CHECKSUM_KEY])
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(path, str(error)) from error
        checksum = 0
        for block in self._blocks:
            checksum = block.checksum(checksum)
        if checksum != expected:
            raise _unreadable(path, "its checksum differs")
        self.fingerprint = path.stem  # the digest of everything that the content follows from
        self._starts = np.cumsum([0, *(len(block) for block in self._blocks)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, index: int) -> Comparison: ...
    @overload
    def __getitem__(self, index: slice) -> list[Comparison]: ...
    def __getitem__(self, index: int | slice) -> Comparison | list[Comparison]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"comparison {index} of {len(self)}")
        block = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self._blocks[block].row(position - int(self._starts[block]))

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedDataset, (self.path, self.name)

    @cached_property
    def tree_tokens(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *(block.tree_tokens for block in self._blocks)])

    @cached_property
    def own_sizes(self) -> npt.NDArray[np.int64]:
        """(N,): tokens and tree tokens without answers to other prompts; equal for equal comparisons, seldom for
        others."""
        return np.concatenate([np.zeros(0, np.int64), *(block.own_sizes for block in self._blocks)])

    @cached_property
    def highest_token(self) -> int:
        """The largest token id, for comparison with a model's vocabulary."""
        return max(int(block.tokens.max(initial=0)) for block in self._blocks)

    @cached_property
    def num_tokens(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *(block.num_tokens for block in self._blocks)])


class _Block:
    """One record batch as numpy views: `rows` into `sequences` into `tokens`, each offsets of the next."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        token_ids, ranks = batch.column("token_ids"), batch.column("ranks")
        self.rows = token_ids.offsets.to_numpy()
        self.sequences = token_ids.values.offsets.to_numpy()
        self.tokens = token_ids.values.values.to_numpy()
        self.ranks = ranks.values.to_numpy()
        self.lengths = batch.column("lengths").values.to_numpy()
        self.tree_tokens: npt.NDArray[np.int64] = batch.column("tree_tokens").to_numpy()
        self.num_tokens: npt.NDArray[np.int64] = np.diff(self.sequences[self.rows]).astype(np.int64)
        self.non_contextual = batch.column("non_contextual").to_numpy()
        self.own_tree_tokens: npt.NDArray[np.int64] = batch.column("own_tree_tokens").to_numpy()
        self.margins, self.where, self.subsets = (batch.column(name) for name in ("margin", "where", "subset"))

    def __len__(self) -> int:
        return len(self.rows) - 1

    @property
    def own_sizes(self) -> npt.NDArray[np.int64]:
        ends = self.rows[1:]
        last = self.sequences[ends] - self.sequences[ends - 1]
        sizes: npt.NDArray[np.int64] = self.num_tokens - last * self.non_contextual
        return sizes * (1 << 24) + self.own_tree_tokens

    def row(self, i: int) -> Comparison:
        start, end = self.rows[i], self.rows[i + 1]
        bounds = self.sequences[start : end + 1]
        return Comparison(
            token_ids=tuple(self.tokens[a:b] for a, b in zip(bounds, bounds[1:], strict=False)),
            ranks=tuple(self.ranks[start:end].tolist()),
            lengths=tuple(self.lengths[start:end].tolist()),
            subset=sys.intern(self.subsets[i].as_py()),  # there are few, and a validation keeps one per comparison
            margin=self.margins[i].as_py(),
            where=self.where[i].as_py(),
            tree_tokens=int(self.tree_tokens[i]),
            non_contextual=bool(self.non_contextual[i]),
        )

    def checksum(self, previous: int) -> int:
        arrays = (self.rows, self.sequences, self.tokens, self.ranks, self.lengths, self.tree_tokens)
        for array in (*arrays, self.non_contextual, self.own_tree_tokens):
            previous = zlib.crc32(array.data, previous)
        for texts in (self.where, self.subsets):
            previous = zlib.crc32("\n".join(texts.to_pylist()).encode(), previous)
        return zlib.crc32(self.margins.fill_null(float("nan")).to_numpy(), previous)


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
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA), counts


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
    with bar, _CacheFile(path) as file:
        for batch, of_chunk in _encoded_chunks(stream, renderer, ties, num_workers):
            if batch.num_rows:
                checksum = _Block(batch).checksum(checksum)
                file.write(batch)
            counts += of_chunk
            bar.update(of_chunk.read)
        ending = {_COUNTS_KEY: json.dumps(asdict(counts)).encode(), _CHECKSUM_KEY: str(checksum).encode()}
        file.write(pa.RecordBatch.from_pylist([], schema=_SCHEMA), ending)


class _CacheFile:
    """An Arrow file that appears under its name complete, or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")

    def __enter__(self) -> _CacheFile:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("wb")
            self._writer = pa.ipc.new_file(self._file, _SCHEMA)
        except OSError as error:
            raise self._cannot_write(error) from error
        return self

    def write(self, batch: pa.RecordBatch, metadata: dict[bytes, bytes] | None = None) -> None:
        try:
            self._writer.write_batch(batch, custom_metadata=metadata)
        except OSError as error:
            raise self._cannot_write(error) from error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._writer.close()
                self._file.flush()
                os.fsync(self._file.fileno())
                self._temporary.replace(self._path)
        except OSError as error:
            raise self._cannot_write(error) from error
        finally:
            with contextlib.suppress(OSError):  # it is safe on disk, or not wanted: on a full disk this fails again
                self._file.close()
            self._temporary.unlink(missing_ok=True)

    def _cannot_write(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"the token cache cannot be written: {error.strerror or error}",
            where=str(self._path.parent),
            field="data.cache_dir",
            fix="make room, or set data.cache_dir to a folder that can be written",
        )


def _open_if_sound(path: Path, name: str) -> EncodedDataset | None:
    if not path.exists():
        return None
    try:
        dataset = EncodedDataset(path, name)
    except DataError as error:
        logger.warning("%s; tokenizing again", error.summary)
        return None
    logger.info("%s: tokenized before, reusing %s", name, path)
    return dataset


def _unreadable(path: Path, reason: str) -> DataError:
    return DataError(f"the token cache {path} is damaged: {reason}", fix="delete the file; it is made again")


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
