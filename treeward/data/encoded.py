"""`EncodedDataset`: comparisons as token ids, in a memory-mapped file.

    dataset = EncodedDataset(Path("cache/3f2a.arrow"), "train.jsonl")     # made by `encoding.encode_dataset`
    dataset[0].token_ids      # K int32 arrays, each a whole conversation
    dataset.counts.summary()  # what was read, kept, dropped and why, and how many tokens sharing saves

It is an Arrow IPC file whose last, empty batch carries the counts and a checksum: a file without it was cut short, and
is made again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from treeward.errors import ConfigError, DataError

__all__ = ["CHECKSUM_KEY", "COUNTS_KEY", "SCHEMA", "Block", "CacheFile", "Comparison", "EncodedDataset"]
__all__ += ["EncodingCounts", "open_if_sound"]

logger = logging.getLogger(__name__)

COUNTS_KEY, CHECKSUM_KEY = b"treeward.counts", b"treeward.checksum"
SCHEMA = pa.schema(
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
            self._blocks = [Block(batch) for batch, _ in batches]
            self.counts = EncodingCounts(**json.loads(ending[COUNTS_KEY]))
            expected = int(ending[CHECKSUM_KEY])
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


class Block:
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


class CacheFile:
    """An Arrow file that appears under its name complete, or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")

    def __enter__(self) -> CacheFile:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("wb")
            self._writer = pa.ipc.new_file(self._file, SCHEMA)
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


def open_if_sound(path: Path, name: str) -> EncodedDataset | None:
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
