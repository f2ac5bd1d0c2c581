"""From rows of files to their scores, as `treeward score` reads and writes them.

scorer = ChunkScorer(load)
for chunk in chunks_of(read_rows("in.jsonl")):
    scorer.score(chunk).rows[0]["scores"]        # or "score", of a row of one conversation
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeward.config.data import DatasetConfig
from treeward.data.columns import named_columns, unread_columns
from treeward.data.conversation import Conversation
from treeward.data.formats import conversations_of, is_single, scored_columns
from treeward.data.preference import check_prompted
from treeward.data.sources import Row
from treeward.errors import DataError, TreewardError
from treeward.resumable import as_line
from treeward.scoring.score import Reward

if TYPE_CHECKING:
    from treeward.scoring.scorer import PreparedScorer
    from treeward.scoring.shaping import Shaper

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 256
_OURS = ("score", "scores", "spread", "spreads", "step_probabilities", "error", "truncated")
_OF_SHAPER = ("reward", "rewards")


@dataclass(frozen=True, slots=True)
class Request:
    """A row with its conversations. `is_single`: it has one conversation, and not a list."""

    row: Row
    conversations: list[Conversation]
    is_single: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows that are scored together. `error`: of the row after them, which has none."""

    requests: list[Request]
    error: DataError | None = None


def chunks_of(rows: Iterable[Row], config: DatasetConfig | None = None) -> Iterator[Chunk]:
    """The rows in chunks of 256. `config`: names columns, as `prompt_key`.

    Logs the columns of the first row that are not read.
    """
    chunk: list[Request] = []
    is_prompted: bool | None = None
    try:
        for row in rows:
            request = _request(row, config)
            if is_prompted is None:
                _describe_first(request, config)
            is_prompted = check_prompted(request.conversations[0], is_prompted, row.where)
            chunk.append(request)
            if len(chunk) == _ROWS_AT_ONCE:
                yield Chunk(chunk)
                chunk = []
    except DataError as error:
        yield Chunk(chunk, error)
    else:
        yield Chunk(chunk)


def chunk_start(row: int) -> int:
    """The first row of the chunk that a row is in.

    Scores depend on the rows beside them, by rounding, so a scoring that goes on begins there.
    """
    return row - row % _ROWS_AT_ONCE


def num_scored(path: Path, rows: Iterable[Row]) -> int:
    """How many rows at the beginning of the file at `path` are these rows with their scores; 0 where it is not there.

    A line that is twice in the file, is missing or is damaged ends the count.
    """
    if not path.exists():
        return 0
    number = 0
    with path.open("rb") as lines:
        for line, row in zip(lines, rows, strict=False):
            try:
                kept = json.loads(line)
            except ValueError:
                break
            if not isinstance(kept, dict) or _text_without_scores(kept) != _text_without_scores(row.values):
                break
            number += 1
    return number


def _text_without_scores(values: Mapping[str, Any]) -> str:
    # Values go through JSON twice, because dates become text, and keys that are numbers too.
    read_back = json.loads(as_line(values))
    return as_line({key: value for key, value in read_back.items() if key not in (*_OURS, *_OF_SHAPER)})


def _request(row: Row, config: DatasetConfig | None) -> Request:
    values = row.values if config is None else named_columns(row.values, config, row.where)
    return Request(row, conversations_of(values, row.where), is_single(values, row.where))


def _describe_first(request: Request, config: DatasetConfig | None) -> None:
    row, values = request.row, request.row.values
    if config is None:
        read = {*scored_columns(values, row.where), *_OURS}
    else:
        read = {*scored_columns(named_columns(values, config, row.where), row.where), *_OURS}
        # A named column stands in for the usual one, which is then not read.
        names = {"prompt": config.prompt_key, "chosen": config.chosen_key, "rejected": config.rejected_key}
        for usual, name in names.items():
            if name is not None and name != usual:
                read = read - {usual} | {name}
    if unread := unread_columns(values, read):
        logger.info("These columns are not read, and written as they are: %s.", ", ".join(unread))
    if not check_prompted(request.conversations[0], None, row.where):
        logger.warning("The rows have no prompt (columns: %s).", ", ".join(map(str, row.values)))


Load = Callable[[], "tuple[PreparedScorer, Shaper | None, Mapping[str, Any]]"]
"""The scorer, the shaper of its scores, and the identity of its rows: what they depend on besides the data."""


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """The rows of a chunk in order; those without some score have an "error" each.

    `error`: that of the chunk, or of a model that cannot be loaded, and then `identity` is None. `tokens`: those that
    were computed, and those of plain rows.
    """

    rows: list[dict[str, Any]]
    error: TreewardError | None = None
    identity: Mapping[str, Any] | None = None
    tokens: tuple[int, int] = (0, 0)


class ChunkScorer:
    """Scores chunks of rows, each by itself: a chunk has the same scores in any process.

    `load` is called for the first chunk. With a shaper there is a `reward`, or there are `rewards`, too. A conversation
    that cannot be scored has the score None, and its row an `error`.
    """

    def __init__(self, load: Load) -> None:
        self._load = functools.cache(load)
        self._warned = False

    def score(self, chunk: Chunk) -> ScoredChunk:
        """Its scored rows."""
        from treeward.scoring.shaping import rewards_of  # noqa: PLC0415 - torch, without which rows are read

        try:
            scorer, shaper, identity = self._load()
        except TreewardError as error:
            return ScoredChunk([], error)
        ours = _OURS if shaper is None else (*_OURS, *_OF_SHAPER)
        taken = sorted({key for request in chunk.requests for key in ours if key in request.row.values})
        if taken and not self._warned:
            logger.warning("The rows already have %s, which this scoring replaces.", ", ".join(taken))
            self._warned = True
        conversations = [conversation for request in chunk.requests for conversation in request.conversations]
        where = [request.row.where for request in chunk.requests for _ in request.conversations]
        computed, plain = scorer.num_computed_tokens, scorer.num_row_tokens
        scores = scorer.score(conversations, where=where, on_error="mask")
        rewards = iter(rewards_of(scores, conversations, shaper))
        rows = [
            _with_scores(request, [next(rewards) for _ in request.conversations], ours) for request in chunk.requests
        ]
        tokens = scorer.num_computed_tokens - computed, scorer.num_row_tokens - plain
        return ScoredChunk(rows, chunk.error, identity, tokens)


def _with_scores(request: Request, rewarded: Sequence[Reward], ours: Sequence[str]) -> dict[str, Any]:
    # Values of an earlier scoring would be taken for this one's.
    result = {key: value for key, value in request.row.values.items() if key not in ours}
    single = request.is_single
    columns = {"score": [reward.raw for reward in rewarded], "reward": [reward.value for reward in rewarded]}
    spreads = [reward.score.spread for reward in rewarded]
    if any(spread is not None for spread in spreads):
        columns["spread"] = spreads
    for key, numbers in columns.items():
        if key in ours:
            result |= {key: numbers[0]} if single else {f"{key}s": numbers}
    if any(reward.score.steps for reward in rewarded):
        steps = [reward.score.steps for reward in rewarded]
        result["step_probabilities"] = steps[0] if single else steps
    errors = {i: reward.error for i, reward in enumerate(rewarded) if reward.error is not None}
    if errors:
        alone = len(rewarded) == 1
        result["error"] = errors[0] if alone else "; ".join(f"[{i}] {error}" for i, error in errors.items())
    if any(reward.score.truncated for reward in rewarded):
        result["truncated"] = True
    return result
