"""From rows of files to their scores, as `treeward score` reads and writes them.

scorer = ChunkScorer(load)
for chunk in chunks_of(read_rows("in.jsonl")):
    scorer.score(chunk).rows[0]["scores"]        # or "score", of a row of one conversation
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
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
# The columns that a scoring writes, and those that it writes with a shaper too.
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
            values = row.values
            if config is not None:
                values = named_columns(values, config, row.where)
            conversations = conversations_of(values, row.where)
            request = Request(row, conversations, is_single(values, row.where))
            # The first row stands for the file: what it lacks is said once.
            if is_prompted is None:
                _describe_first(request, config)
            is_prompted = check_prompted(request.conversations[0], is_prompted, row.where)
            chunk.append(request)
            if len(chunk) == _ROWS_AT_ONCE:
                yield Chunk(chunk)
                chunk = []
    except DataError as error:
        # The rows before a bad one are scored and written: nothing is lost.
        yield Chunk(chunk, error)
    else:
        # Also without rows: the first chunk of a file is what brings the identity of its scores.
        yield Chunk(chunk)


def chunk_start(row: int) -> int:
    """The first row of the chunk that a row is in.

    Scores depend on the rows beside them, by rounding, so a scoring that goes on begins there.
    """
    return row - row % _ROWS_AT_ONCE


def num_scored(path: Path, rows: Iterable[Row]) -> int:
    """How many rows at the beginning of the file at `path` are these rows with their scores.

    0 where there is no file. A line that is twice in it, is missing or is damaged ends the count.
    """
    if not path.exists():
        return 0
    number = 0
    with path.open("rb") as lines:
        for line, row in zip(lines, rows, strict=False):
            try:
                kept = json.loads(line)
            except ValueError:
                # A run that was killed may leave half a line.
                break
            if not isinstance(kept, dict):
                break
            if _text_without_scores(kept) != _text_without_scores(row.values):
                break
            number += 1
    return number


def _text_without_scores(values: Mapping[str, Any]) -> str:
    # Values go through JSON twice, because dates become text, and keys that are numbers too.
    read_back = json.loads(as_line(values))
    for key in (*_OURS, *_OF_SHAPER):
        read_back.pop(key, None)
    return as_line(read_back)


def _describe_first(request: Request, config: DatasetConfig | None) -> None:
    """Log what of the columns is not read, and whether the rows have no prompt."""
    row = request.row
    values = row.values
    if config is not None:
        values = named_columns(values, config, row.where)
    read = {*scored_columns(values, row.where), *_OURS}
    if config is not None:
        # A named column stands in for the usual one, which is then not read.
        names = {
            "prompt": config.prompt_key,
            "chosen": config.chosen_key,
            "rejected": config.rejected_key,
        }
        renamed = {}
        for usual, name in names.items():
            if name is not None and name != usual:
                renamed[usual] = name
        # All out before any is in: a named column may have the usual name of another.
        read -= renamed.keys()
        read.update(renamed.values())
    unread = unread_columns(row.values, read)
    if unread:
        logger.info("These columns are not read, and written as they are: %s.", ", ".join(unread))
    if not check_prompted(request.conversations[0], None, row.where):
        logger.warning("The rows have no prompt (columns: %s).", ", ".join(map(str, row.values)))


Load = Callable[[], "tuple[PreparedScorer, Shaper | None, Mapping[str, Any]]"]
"""The scorer, the shaper of its scores, and the identity of its rows.

The identity is what they depend on besides the data.
"""


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """The rows of a chunk in order; those without some score have an "error" each.

    `error`: that of the chunk, or of a model that cannot be loaded, and then `identity` is None.
    `tokens`: those that were computed, and those of plain rows.
    """

    rows: list[dict[str, Any]]
    error: TreewardError | None = None
    identity: Mapping[str, Any] | None = None
    tokens: tuple[int, int] = (0, 0)


class ChunkScorer:
    """Scores chunks of rows, each by itself: a chunk has the same scores in any process.

    `load` is called for the first chunk. With a shaper there is a `reward`, or there are `rewards`,
    too. A conversation that cannot be scored has the score None, and its row an `error`.
    """

    def __init__(self, load: Load) -> None:
        # Cached, and called late: a worker that gets no chunk loads no model.
        self._load = functools.cache(load)
        self._warned = False

    def score(self, chunk: Chunk) -> ScoredChunk:
        """Its scored rows."""
        # Here, because rows are read without torch, which this imports.
        from treeward.scoring.shaping import rewards_of  # noqa: PLC0415

        try:
            scorer, shaper, identity = self._load()
        except TreewardError as error:
            return ScoredChunk([], error)
        ours = set(_OURS)
        if shaper is not None:
            ours.update(_OF_SHAPER)
        taken: set[str] = set()
        conversations: list[Conversation] = []
        where: list[str] = []
        for request in chunk.requests:
            taken |= ours & request.row.values.keys()
            conversations += request.conversations
            where += [request.row.where] * len(request.conversations)
        if taken and not self._warned:
            columns = ", ".join(sorted(taken))
            logger.warning("The rows already have %s, which this scoring replaces.", columns)
            self._warned = True
        computed_before = scorer.num_computed_tokens
        plain_before = scorer.num_row_tokens
        scores = scorer.score(conversations, where=where, on_error="mask")
        rewards = iter(rewards_of(scores, conversations, shaper))
        rows = []
        for request in chunk.requests:
            rewarded = list(islice(rewards, len(request.conversations)))
            rows.append(_with_scores(request, rewarded, ours))
        num_computed = scorer.num_computed_tokens - computed_before
        num_plain = scorer.num_row_tokens - plain_before
        return ScoredChunk(rows, chunk.error, identity, (num_computed, num_plain))


def _with_scores(
    request: Request,
    rewarded: Sequence[Reward],
    ours: Collection[str],
) -> dict[str, Any]:
    """The row with the columns of a scoring; `rewarded`: for each of its conversations."""
    # Values of an earlier scoring would be taken for this one's.
    result = {key: value for key, value in request.row.values.items() if key not in ours}

    def write(key: str, numbers: Sequence[object]) -> None:
        if request.is_single:
            result[key] = numbers[0]
        else:
            result[f"{key}s"] = numbers

    write("score", [reward.raw for reward in rewarded])
    if "reward" in ours:
        write("reward", [reward.value for reward in rewarded])
    spreads = [reward.score.spread for reward in rewarded]
    if any(spread is not None for spread in spreads):
        write("spread", spreads)
    steps = [reward.score.steps for reward in rewarded]
    if any(steps):
        # The one column whose name is the same for one conversation and for several.
        result["step_probabilities"] = steps
        if request.is_single:
            result["step_probabilities"] = steps[0]
    errors = {i: reward.error for i, reward in enumerate(rewarded) if reward.error is not None}
    if errors and len(rewarded) == 1:
        result["error"] = errors[0]
    elif errors:
        result["error"] = "; ".join(f"[{i}] {error}" for i, error in errors.items())
    if any(reward.score.truncated for reward in rewarded):
        result["truncated"] = True
    return result
