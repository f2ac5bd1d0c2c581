"""`encode_dataset`: comparisons as token ids, in an Arrow file that is written once per content.

    dataset = encode_dataset(open_dataset(config), renderer, ties="drop", cache_dir=Path("cache"))
    dataset[0].token_ids      # K int32 arrays, each a whole conversation
    dataset.counts.summary()  # rows read, kept and dropped (and why), and tokens that sharing saves

The file has a row for every row of the data, with its outcome; the counts are sums of its columns.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from treeward.config.data import Ties
from treeward.data.conversation import Conversation, last_text
from treeward.data.encoding_counts import EncodingCounts
from treeward.data.preference import (
    Completion,
    Preference,
    contradicts_scores,
    differs_in_prompt,
    digest_of,
    num_unanswered,
    pair_ids,
)
from treeward.digests import has_its_digest, write_digest
from treeward.errors import ConfigError, DataError
from treeward.progress import ShownProgress
from treeward.storage import atomic_file

if TYPE_CHECKING:
    from treeward.data.datasets import RowDataset
    from treeward.data.rendering import Fitted, Renderer


logger = logging.getLogger(__name__)

_FORMAT_VERSION = 19
"""Raise it with the file's layout, the rules for keeping a comparison or the parsing of rows: files
of another version are not read."""

# Enough for a fast tokenizer to use all cores.
_ROWS_AT_ONCE = 128
_CHARACTERS_AT_ONCE = 4_000_000

# Each batch of the file costs its readers memory.
_ROWS_IN_BATCH = 4096
_TOKENS_IN_BATCH = 4_000_000

SUMMED = (
    "tokens",
    "tree_tokens",
    "truncated",
    "deduplicated",
    "tied_pairs",
    "completions",
    "completions_too_long",
    "contradicted",
    "unanswered",
    "other_prompts",
    "steps",
    "step_copies",
    "steps_too_long",
)
"""Columns of the file whose sums over the kept comparisons are fields of `EncodingCounts`."""

_SCHEMA = pa.schema(
    [
        ("where", pa.string()),
        ("outcome", pa.string()),  # a field of EncodingCounts: "kept", or "dropped_" and the reason
        ("token_ids", pa.list_(pa.list_(pa.int32()))),
        ("ranks", pa.list_(pa.int64())),
        ("lengths", pa.list_(pa.int32())),
        ("subset", pa.string()),
        ("prompt", pa.int64()),
        ("strength", pa.float64()),
        ("scores", pa.list_(pa.float64())),
        ("grades", pa.list_(pa.list_(pa.float64()))),
        ("step_labels", pa.list_(pa.list_(pa.float64()))),
        ("step_counts", pa.list_(pa.list_(pa.int64()))),
        ("is_whole", pa.list_(pa.bool_())),
        ("digest", pa.int64()),
        ("pair_ids", pa.list_(pa.int64())),  # of its ordered pairs, as `ranked_pairs` lists them
        ("all_pair_ids", pa.list_(pa.int64())),  # those that are not learnt from too
        ("longest", pa.int64()),
        *((name, pa.int64()) for name in SUMMED),
    ]
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A tokenized `Preference`: K conversations that begin with the same prompt.

    `token_ids`: K different int32 arrays, read-only. `lengths`: characters of each completion's
    last message. `grades`: the learnt ones, per attribute, NaN for none. `subset`: the preference's
    `task_name`. `tree_tokens`: tokens when common beginnings are held once. `prompt`: a digest of
    `Preference.prompt_key`; statistics treat comparisons with the same one as dependent.
    `pair_labels`: the weight of each ordered pair, and the probability that its better one wins; ()
    where the ranks say all (see `data.pair_labels`). `step_labels`: of a problem whose
    conversations are solutions, the label of each of their steps, NaN for none; `step_counts`: how
    many solutions of the data have judged the step, in the first conversation that has it, and 0 in
    the others; `is_whole`: whether a solution ends where the conversation does, which else lacks
    steps that are too long or without a label.
    """

    token_ids: tuple[npt.NDArray[np.int32], ...]
    ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    subset: str
    strength: float | None
    where: str
    tree_tokens: int
    scores: tuple[float | None, ...] = ()
    grades: tuple[tuple[float, ...], ...] = ()
    prompt: int = 0
    pair_labels: tuple[tuple[float, float], ...] = ()
    step_labels: tuple[tuple[float, ...], ...] = ()
    step_counts: tuple[tuple[int, ...], ...] = ()
    is_whole: tuple[bool, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens as plain rows."""
        return sum(map(len, self.token_ids))


class EncodedDataset(Sequence[Comparison]):
    """The kept comparisons of a file of `encode_dataset`, the first `limit` of them, memory-mapped:
    token ids are views of the file. Pickles as its path. Raises `DataError` if the file cannot be
    read."""

    def __init__(self, path: Path, name: str, limit: int | None = None) -> None:
        self.path = path
        self.name = name
        self._limit = limit
        # The digest of data, renderer and rules: a run that resumes asks whether it is the same.
        self.fingerprint = path.stem
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except (pa.ArrowException, OSError) as error:
            summary = f"the token cache {path} is damaged: {error}"
            fix = "delete the file; it is made again, in a data.cache_dir that all nodes share"
            raise DataError(summary, fix=fix) from error
        # The first row of each batch, and at the end the number of rows.
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        kept = np.flatnonzero(pa.compute.equal(self._column("outcome"), "kept").to_numpy())
        # Places of rows in the file, which has dropped ones too.
        self._kept = kept[:limit].astype(np.int32)

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Comparison: ...
    @overload
    def __getitem__(self, index: slice) -> list[Comparison]: ...
    def __getitem__(self, index: int | slice) -> Comparison | list[Comparison]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        table, row = self._place(index)
        return Comparison(
            token_ids=tuple(ids.values.to_numpy() for ids in table["token_ids"][row]),
            ranks=tuple(table["ranks"][row].as_py()),
            lengths=tuple(table["lengths"][row].as_py()),
            # There are few names, and a validation keeps one for each comparison.
            subset=sys.intern(table["subset"][row].as_py()),
            strength=table["strength"][row].as_py(),
            where=table["where"][row].as_py(),
            tree_tokens=table["tree_tokens"][row].as_py(),
            scores=tuple(table["scores"][row].as_py()),
            grades=tuple(map(tuple, table["grades"][row].as_py())),
            prompt=table["prompt"][row].as_py(),
            pair_labels=self.pair_labels(index),
            step_labels=tuple(map(tuple, table["step_labels"][row].as_py())),
            step_counts=self.step_counts(index),
            is_whole=tuple(table["is_whole"][row].as_py()),
        )

    def step_counts(self, index: int) -> tuple[tuple[int, ...], ...]:
        """`Comparison.step_counts`, without its tokens."""
        table, row = self._place(index)
        return tuple(map(tuple, table["step_counts"][row].as_py()))

    def ranks(self, index: int) -> tuple[int, ...]:
        """The ranks of a comparison, without its tokens."""
        table, row = self._place(index)
        return tuple(table["ranks"][row].as_py())

    def pair_labels(self, index: int) -> tuple[tuple[float, float], ...]:
        """`Comparison.pair_labels` of a comparison."""
        return ()

    def pair_ids(self, index: int) -> list[int]:
        """`preference.pair_ids` of a comparison."""
        table, row = self._place(index)
        return list(table["pair_ids"][row].as_py())

    def ids_of_pairs(self, column: str = "pair_ids") -> npt.NDArray[np.int64]:
        """The ids of all pairs of the file, one row after another; or of its other column."""
        ids: npt.NDArray[np.int64] = pa.compute.list_flatten(self._column(column)).to_numpy()
        return ids

    def _place(self, index: int) -> tuple[Any, int]:
        """The batch and the row of a comparison; a table of many batches would search them all."""
        row = int(self._kept[index])
        batch = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._batches[batch], row - int(self._starts[batch])

    def _column(self, name: str) -> Any:
        return pa.chunked_array([batch[name] for batch in self._batches], _SCHEMA.field(name).type)

    # Each process maps the file by itself: a pickle of the mapping would copy all tokens.
    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedDataset, (self.path, self.name, self._limit)

    def first(self, limit: int | None) -> EncodedDataset:
        """The first `limit` comparisons; None: all."""
        # Of a validation set: a `LabelledDataset` would lose its labels here.
        return EncodedDataset(self.path, self.name, limit)

    @cached_property
    def tree_tokens(self) -> npt.NDArray[np.int32]:
        """int32 (N,), `Comparison.tree_tokens` of each, without reading tokens."""
        tree_tokens: npt.NDArray[np.int64] = self._column("tree_tokens").to_numpy()
        return tree_tokens[self._kept].astype(np.int32)

    @cached_property
    def shapes(self) -> npt.NDArray[np.int32]:
        """int32 (N, 2), the conversations of each comparison and the tokens of the longest, without
        reading them."""
        nested = self._column("token_ids")
        counts = pa.compute.list_value_length(nested).to_numpy().astype(np.int64)
        lengths = pa.compute.list_value_length(pa.compute.list_flatten(nested)).to_numpy()
        # `reduceat` takes the maximum from one start to the next, so it is given every row that has
        # conversations: those beyond a limit, or dropped by labels, are among them.
        has_conversations = counts > 0
        longest = np.zeros_like(counts)
        if has_conversations.any():
            starts = np.cumsum(counts) - counts
            longest[has_conversations] = np.maximum.reduceat(lengths, starts[has_conversations])
        return np.stack([counts, longest], axis=1)[self._kept].astype(np.int32)

    @cached_property
    def grades(self) -> npt.NDArray[np.float64]:
        """float64 (N, H), the grades of all completions, NaN for none."""
        rows = self._column("grades").to_numpy()[self._kept]
        return np.array(list(itertools.chain.from_iterable(rows)), dtype=np.float64)

    @property
    def digests(self) -> npt.NDArray[np.int64]:
        """int64 (N,): equal for equal conversations and ranks, in any order."""
        digests: npt.NDArray[np.int64] = self._column("digest").to_numpy()
        return digests[self._kept]

    @property
    def prompts(self) -> npt.NDArray[np.int64]:
        """int64 (N,), `Comparison.prompt` of each."""
        prompts: npt.NDArray[np.int64] = self._column("prompt").to_numpy()
        return prompts[self._kept]

    def tokens_sha256(self) -> str:
        """SHA-256 of the conversations, without their labels."""
        # The tokens alone would not say where a conversation ends, nor a comparison.
        conversations = hashlib.sha256()
        lengths = hashlib.sha256()
        tokens = hashlib.sha256()
        # Not strict: the last of the starts is the end.
        for start, batch in zip(self._starts, self._batches, strict=False):
            first, last = np.searchsorted(self._kept, [start, start + batch.num_rows])
            nested = batch["token_ids"].take(pa.array(self._kept[first:last] - start))
            flat = nested.flatten()
            conversations.update(pa.compute.list_value_length(nested).to_numpy().tobytes())
            lengths.update(pa.compute.list_value_length(flat).to_numpy().tobytes())
            tokens.update(flat.flatten().to_numpy().tobytes())
        parts = conversations.digest() + lengths.digest() + tokens.digest()
        return hashlib.sha256(parts).hexdigest()

    @cached_property
    def highest_token(self) -> int:
        """The largest token id."""
        tokens = pa.compute.list_flatten(pa.compute.list_flatten(self._column("token_ids")))
        return int(pa.compute.max(tokens).as_py() or 0)

    @cached_property
    def counts(self) -> EncodingCounts:
        """The counts of all rows of the file, whatever the limit."""
        outcomes: dict[str, int] = {}
        for item in self._column("outcome").value_counts().to_pylist():
            outcomes[item["values"]] = item["counts"]
        sums = {name: pa.compute.sum(self._column(name)).as_py() or 0 for name in SUMMED}
        longest = pa.compute.max(self._column("longest")).as_py() or 0
        return EncodingCounts(read=int(self._starts[-1]), longest=longest, **outcomes, **sums)


def count_tree_tokens(sequences: Sequence[npt.NDArray[np.int32] | Sequence[int]]) -> int:
    """The size of the trie of the sequences: in sorted order each adds the tokens after its
    neighbour's prefix."""
    ordered: list[list[int]] = []
    for sequence in sequences:
        if isinstance(sequence, np.ndarray):
            ordered.append(sequence.tolist())  # Python's numbers compare much faster than numpy's
        else:
            ordered.append(list(sequence))
    ordered.sort()
    size = 0
    neighbour: list[int] = []
    for token_ids in ordered:
        # It compares lists too, item by item; arrays it does not take.
        size += len(token_ids) - len(os.path.commonprefix([neighbour, token_ids]))
        neighbour = token_ids
    return size


def encode_dataset(
    stream: RowDataset,
    renderer: Renderer,
    *,
    ties: Ties = "drop",
    attributes: Sequence[str] = (),
    cache_dir: Path,
    progress: bool = False,
) -> EncodedDataset:
    """Encode every comparison of a dataset, or open the file that an earlier call wrote for the
    same content.

    A completion longer than the renderer's `max_length` is left out. Completions with the same
    tokens are kept once, with their best rank. A comparison without a pair is dropped, unless it
    has one of `attributes`, the grades to learn. Raises `DataError` for an invalid row or if no
    comparison is left, `ConfigError` if `cache_dir` cannot be written.
    """
    parts = [stream.fingerprint, renderer.fingerprint, ties, *attributes]
    rules = Rules(ties, tuple(attributes))

    def portions_of_records() -> Iterator[list[dict[str, Any]]]:
        for rows in portions(stream):
            yield list(encode_rows(rows, renderer, rules))

    dataset = encoded_file(stream.name, parts, portions_of_records, cache_dir, progress=progress)
    counts = dataset.counts
    remedy = ""
    if counts.is_much_dropped and (counts.dropped_too_long or counts.completions_too_long):
        remedy = "; a higher policy.max_total_sequence_length keeps more"
        remedy += ", data.truncation=truncate_left cuts prompts"
    level = logging.WARNING if counts.is_much_dropped else logging.INFO
    logger.log(level, "%s: %s%s", stream.name, counts.summary(), remedy)
    if counts.unanswered:
        logger.warning(
            "%s: %s of %s completions do not end with a message of the assistant. Their score is "
            "read after the message that they end with; end each with what is to be judged.",
            stream.name,
            f"{counts.unanswered:,}",
            f"{counts.completions:,}",
        )
    if not dataset:
        raise nothing_left_error(stream.name, dataset.counts, attributes)
    return dataset


def nothing_left_error(name: str, counts: EncodingCounts, attributes: Sequence[str]) -> DataError:
    """The error of the set `name`, of which no comparison was kept."""
    if counts.read == 0:
        return DataError(
            "there are no comparisons",
            where=name,
            got="no row of this part of the data",
            need="one row or more",
            fix="check the file; of few prompts data.split_validation_size may hold out none",
        )
    need = "completions of different ranks"
    if attributes:
        need = f"a grade of a completion: {', '.join(attributes)}"
    return DataError(
        "no comparison is left to learn from",
        where=name,
        got=counts.summary(),
        need=need,
        fix="check the file, data.max_input_seq_length, truncation, ties and split_validation_size",
    )


class Rules(NamedTuple):
    """Which comparisons and completions to keep; with `attributes`, for their grades."""

    ties: Ties
    attributes: tuple[str, ...] = ()

    def is_enough(self, ranks: Sequence[int]) -> bool:
        """Whether completions of these ranks make a comparison."""
        if self.attributes:
            return len(ranks) >= 1  # a grade is learnt without another completion
        if self.ties == "half":
            return len(ranks) >= 2
        return len(set(ranks)) >= 2


def encoded_file(
    name: str,
    parts: Sequence[Any],
    records: Callable[[], Iterator[list[dict[str, Any]]]],
    cache_dir: Path,
    *,
    progress: bool = False,
) -> EncodedDataset:
    """The file of the set `name`, written unless an earlier call has written it. `parts`: what its
    content depends on. `records`: gives its rows, a portion at a time."""
    # The name of the file is what its content depends on: a file that exists is never out of date.
    digest = hashlib.sha256(json.dumps([_FORMAT_VERSION, *parts]).encode()).hexdigest()
    path = Path(cache_dir) / f"{digest[:32]}.arrow"
    # Arrow has no checksums: a flipped bit in the file would be other training data without a word.
    if has_its_digest(path):
        logger.info("%s: tokenized before, reusing %s", name, path)
    else:
        if path.exists():
            damage = "it is not what its digest is of; tokenizing again"
            logger.warning("the token cache %s is damaged: %s", path, damage)
        _write(path, name, records(), progress)
    return EncodedDataset(path, name)


def _write(
    path: Path, name: str, portions_of_records: Iterator[list[dict[str, Any]]], progress: bool
) -> None:
    """Write the file and its digest."""
    done = 0
    tokens = 0
    pending: list[dict[str, Any]] = []
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            ShownProgress(unit="rows", enabled=progress) as shown,
            atomic_file(path, "wb") as file,
            pa.ipc.new_file(file, _SCHEMA) as writer,
        ):
            for records in portions_of_records:
                for record in records:
                    pending.append(record)
                    tokens += record["tokens"]
                    # A batch is the least that Arrow writes, and so what is held in memory.
                    if len(pending) == _ROWS_IN_BATCH or tokens > _TOKENS_IN_BATCH:
                        writer.write_batch(pa.RecordBatch.from_pylist(pending, schema=_SCHEMA))
                        pending = []
                        tokens = 0
                done += len(records)
                shown.show(f"tokenizing {name}", done, 0)
            writer.write_batch(pa.RecordBatch.from_pylist(pending, schema=_SCHEMA))
        write_digest(path)
    except OSError as error:
        raise ConfigError(
            f"the token cache cannot be written: {error.strerror or error}",
            where=str(path.parent),
            field="data.cache_dir",
            need="a folder with room that can be written",
        ) from error


def portions(stream: Iterable[tuple[Preference, str]]) -> Iterator[list[tuple[Preference, str]]]:
    """Rows for one call of `encode_rows`: fewer if they are long, to bound memory."""
    rows = []
    characters = 0
    for preference, where in stream:
        rows.append((preference, where))
        for conversation in preference.conversations:
            characters += sum(len(str(message.get("content"))) for message in conversation)
        if len(rows) == _ROWS_AT_ONCE or characters > _CHARACTERS_AT_ONCE:
            yield rows
            rows = []
            characters = 0
    if rows:
        yield rows


def encode_rows(
    rows: Sequence[tuple[Preference, str]],
    renderer: Renderer,
    rules: Rules,
) -> Iterator[dict[str, Any]]:
    """The rows of the file, from one call of the tokenizer."""
    # What cannot be learnt from is not tokenized.
    conversations: list[Conversation] = []
    places: list[str] = []
    for preference, where in rows:
        if _is_trainable(preference, rules):
            conversations += preference.conversations
            places += [where] * len(preference.completions)
    fitted = iter(renderer.fit_many(conversations, where=places))
    for preference, where in rows:
        # The row of a comparison without anything to learn from. A kept comparison replaces every
        # column but `where` and `all_pair_ids`; one that `_encode_row` drops only its outcome and
        # `longest`.
        record = empty_record(where)
        record["outcome"] = "dropped_ungraded" if rules.attributes else "dropped_ties"
        record["all_pair_ids"] = pair_ids(preference, preference.completions)
        if _is_trainable(preference, rules):
            fitted_completions = [next(fitted) for _ in preference.completions]
            record |= _encode_row(preference, fitted_completions, rules)
        yield record


def empty_record(where: str) -> dict[str, Any]:
    """A row of the file without an outcome, a conversation or a number."""
    record: dict[str, Any] = dict.fromkeys(_SCHEMA.names, 0)
    for field in _SCHEMA:
        if pa.types.is_list(field.type):
            record[field.name] = []
    record["where"] = where
    record["subset"] = ""
    record["strength"] = None
    return record


def _encode_row(
    preference: Preference,
    fitted: Sequence[tuple[Fitted | None, int]],
    rules: Rules,
) -> dict[str, Any]:
    """The columns of a comparison, from the tokens of its conversations and their number before
    truncation."""
    longest = max(num_tokens for _, num_tokens in fitted)
    kept: list[tuple[Fitted, Completion]] = []
    for (sequence, _), completion in zip(fitted, preference.completions, strict=True):
        if sequence is not None:
            kept.append((sequence, completion))
    fitting_ranks = [completion.rank for _, completion in kept]
    # Where all fit the ranks are enough, as `_is_trainable` has found.
    if len(kept) < len(fitted) and not rules.is_enough(fitting_ranks):
        return {"outcome": "dropped_too_long", "longest": longest}

    # Completions with the same tokens have one score; the best rank of them is kept.
    best: dict[tuple[int, ...], Completion] = {}  # in the order of the completions
    for sequence, completion in kept:
        ids = tuple(sequence.token_ids)
        if ids not in best or completion.rank < best[ids].rank:
            best[ids] = completion
    completions = list(best.values())
    ranks = [completion.rank for completion in completions]
    if not rules.is_enough(ranks):
        return {"outcome": "dropped_identical", "longest": longest}

    grades = []
    for completion in completions:
        all_grades = completion.all_grades
        grades.append([all_grades.get(name, math.nan) for name in rules.attributes])
    # Sorted, so that a comparison whose completions come in another order has the same digest.
    ranked_tokens = sorted(zip(best, ranks, strict=True))
    lengths = [len(last_text(completion.messages)) for completion in completions]
    is_truncated = any(sequence.truncated for sequence, _ in kept)
    num_tied = sum(a == b for a, b in itertools.combinations(ranks, 2))
    return {
        "outcome": "kept",
        "subset": preference.task_name,
        "strength": preference.strength,
        "prompt": digest_of(preference.prompt_key),
        "digest": digest_of(repr(ranked_tokens)),
        "pair_ids": pair_ids(preference, completions),
        "truncated": int(is_truncated),
        "deduplicated": len(kept) - len(best),
        "tied_pairs": num_tied,
        "completions": len(best),
        "completions_too_long": len(fitted) - len(kept),
        "contradicted": int(contradicts_scores(completions)),
        "unanswered": num_unanswered(completions),
        "other_prompts": int(differs_in_prompt(completions)),
        "token_ids": [np.array(ids, dtype=np.int32) for ids in best],
        "ranks": ranks,
        "lengths": lengths,
        "scores": [completion.score for completion in completions],
        "grades": grades,
        "tokens": sum(map(len, best)),
        "tree_tokens": count_tree_tokens(list(best)),
        "longest": longest,
    }


def _is_trainable(preference: Preference, rules: Rules) -> bool:
    """Whether the comparison has an order or grades to learn from."""
    if rules.attributes:
        learnt = set(rules.attributes)
        return any(learnt & completion.all_grades.keys() for completion in preference.completions)
    return rules.ties == "half" or len(set(preference.ranks)) > 1
