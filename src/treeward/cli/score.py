r"""`treeward score`: conversations of a file, or of standard input, with their scores.

examples:
  treeward score results/quickstart/final --data conversations.jsonl --output scores.jsonl
  echo '{"prompt": "What is 7 plus 5?", "responses": ["12", "13"]}' | treeward score MODEL --data -
  treeward score "{models: MODEL, shaping: {length_penalty: {coefficient: 0.001}}}" \
      --data conversations.jsonl
  treeward score "{models: [MODEL, OTHER_MODEL], ensemble: worst}" --data conversations.jsonl
  treeward score MODEL --data pairs.csv --data-option prompt_key=frage \
      --data-option chosen_key=gut --data-option rejected_key=schlecht
  treeward score MODEL --data conversations.jsonl --output scores.jsonl --workers 8

A row has `messages`, or a `prompt` with one or several completions. It is written unchanged and in
order, with its `score` or `scores` added. To resume, type the same command again.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from treeward.cli.comparisons import DataOptions, choosing_split, dataset_config, split_data_option
from treeward.cli.options import (
    ModelOptions,
    checked_model,
    load,
    model_section,
    output_file,
    with_model_options,
)
from treeward.errors import CheckpointError, ConfigError
from treeward.progress import ShownProgress
from treeward.resumable import ResumableRows, resumable_rows
from treeward.storage import is_stream

if TYPE_CHECKING:
    from treeward.config.data import DatasetConfig
    from treeward.data.sources import Row
    from treeward.scoring.rows import Load, ScoredChunk

logger = logging.getLogger(__name__)

ScoreRows = Callable[..., Generator["ScoredChunk"]]
"""`_scored` with all its arguments but `skip`."""


@with_model_options
def run(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A reward model: its folder, hub name, or a section as {models: [A, B], ...}.",
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Conversations: jsonl, json, csv, tsv, parquet or arrow; - is stdin.",
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="The file for the rows with their scores, as JSON lines; - is stdout.",
        ),
    ] = "-",
    data_option: DataOptions = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Score in so many processes of Ray Data, each with a GPU if there are any."
        ),
    ] = None,
    *,
    options: ModelOptions,
) -> int:
    # Errors of the output come first, before a model is loaded.
    path = Path(output) if output == "-" else output_file(output)
    # A symlink to it, too.
    if path.exists() and Path(data).exists() and path.samefile(data):
        raise ConfigError(
            "the output is the input",
            where="--output",
            got=output,
            need="another file than --data",
        )
    section = checked_model(model_section(model), "MODEL", options)
    columns = dataset_config(data, None, None, data_option)
    if data == "-" and workers is not None:
        raise ConfigError(
            "workers cannot read standard input",
            where="--workers",
            need="--data FILE",
        )
    load_model = partial(load, section, options.batch_tokens)
    read = partial(_rows, data, columns)
    score = partial(_scored, load_model, read, columns, workers, options.device or "auto")
    # To standard output, a device or a FIFO rows go at once, and none is kept.
    if output == "-":
        num_failed, problem = _to_stream(score, sys.stdout, path)
    elif is_stream(path):
        with path.open("w", encoding="utf-8", errors="backslashreplace") as stream:
            num_failed, problem = _to_stream(score, stream, path)
    else:
        num_failed, problem = _to_file(score, read, path, data, columns, data_option)
    if num_failed > 0:
        what = "score" if section.shaping is None else "reward"
        logger.warning("%d rows have a conversation without a %s, which is null.", num_failed, what)
        logger.warning("The row's `error` says why. The first: %s", problem)
        return 1
    return 0


def _to_stream(score: ScoreRows, stream: IO[str], path: Path) -> tuple[int, str | None]:
    """Write the rows to a stream; returns as `_write`."""
    with closing(score(skip=0)) as chunks:
        first = _first_chunk(chunks)
        rows: ResumableRows[bool] = ResumableRows([], stream, path)
        return _write(itertools.chain([first], chunks), rows, 0)


def _to_file(
    score: ScoreRows,
    read: Callable[[], Iterator[Row]],
    path: Path,
    data: str,
    columns: DatasetConfig,
    data_option: list[str] | None,
) -> tuple[int, str | None]:
    """Write the rows to a file, after those that an interrupted run has kept; returns as `_write`.

    The file gets its name when it is complete.
    """
    from treeward.data.sources import fingerprint
    from treeward.scoring.rows import chunk_start, num_scored

    partial_file = path.with_name(f"{path.stem}.partial{path.suffix}")
    # Standard input cannot be read again, so a part of it is not resumed.
    can_resume = data != "-"
    if not can_resume:
        partial_file.unlink(missing_ok=True)
    num_before = 0
    if partial_file.exists():
        num_before = num_scored(partial_file, read())
    skip = chunk_start(num_before)
    with closing(score(skip=skip)) as chunks:
        first = _first_chunk(chunks)
        content = None
        if can_resume:
            content = fingerprint(data, split=columns.split, subset=columns.subset)
        # Kept rows are used again where all of this is the same.
        identity = {**(first.identity or {}), "data": content, "data_option": data_option}
        numbers = itertools.count()

        def failed_before(row: Any, where: str) -> bool | None:
            """Whether a kept row has failed; None for those that are not this data's, which are
            scored again.
            """
            return "error" in row if next(numbers) < num_before else None

        with resumable_rows(partial_file, identity, failed_before, can_resume=can_resume) as rows:
            # The file is locked only from here on.
            if len(rows.kept) != num_before:
                raise CheckpointError(
                    "another process has written these rows",
                    where=str(partial_file),
                )
            result = _write(itertools.chain([first], chunks), rows, num_before - skip)
            rows.finish(path)
    return result


def _first_chunk(chunks: Iterator[ScoredChunk]) -> ScoredChunk:
    """The first chunk. Raises the error of a model that cannot be loaded."""
    first = next(chunks)
    if first.error is not None and first.identity is None:
        raise first.error
    return first


def _write(
    chunks: Iterator[ScoredChunk],
    kept: ResumableRows[bool],
    again: int,
) -> tuple[int, str | None]:
    """How many rows have failed, those kept before among them, and why the first one did.

    `again`: so many rows of the first chunk are kept already.
    """
    done = len(kept.kept)
    failed = sum(kept.kept)
    num_computed = 0
    num_plain = 0
    first_error: str | None = None
    if done:
        logger.info("%d rows were scored before.", done)
    with ShownProgress(unit="rows") as progress:
        for chunk in chunks:
            # A chunk is scored whole, because scores depend on what is beside them by rounding.
            new_rows = chunk.rows[again:]
            again = 0
            for row in new_rows:
                kept.add(row)
                done += 1
                failed += "error" in row
                first_error = first_error or row.get("error")
                progress.show("scoring", done, 0)
            num_computed += chunk.tokens[0]
            num_plain += chunk.tokens[1]
            # After its rows, which are kept.
            if chunk.error is not None:
                raise chunk.error
    logger.info(
        "Scored rows: %d; %d tokens computed for %d tokens of plain rows.",
        done,
        num_computed,
        num_plain,
    )
    return failed, first_error


def _rows(data: str, columns: DatasetConfig) -> Iterator[Row]:
    """The rows of a file, or of standard input."""
    from treeward.data.sources import read_jsonl_stream, read_rows

    if data == "-":
        return read_jsonl_stream(sys.stdin.buffer, "<stdin>")
    with choosing_split(split_data_option):
        return read_rows(data, split=columns.split, subset=columns.subset)


def _scored(
    load_model: Load,
    read: Callable[[], Iterator[Row]],
    columns: DatasetConfig,
    workers: int | None,
    device: str,
    *,
    skip: int,
) -> Generator[ScoredChunk]:
    """The rows after the first `skip`, in chunks that are scored as they are asked for, here or by
    workers.

    Raises `DataError` for a missing file and a first line that is not JSON, before any model is
    loaded.
    """
    from treeward.scoring.rows import ChunkScorer, chunks_of

    if workers is None:
        rows = read()
        # The first row is read before the model is loaded.
        first = list(itertools.islice(rows, 1))
        rows = itertools.chain(first, rows)
        scorer = ChunkScorer(load_model)
        for chunk in chunks_of(itertools.islice(rows, skip, None), columns):
            yield scorer.score(chunk)
        return
    # Workers read the rows themselves; a file that cannot be read is told before they start.
    next(read(), None)
    from treeward.parallel.ray_cluster import equal_shares, start_ray

    ray = start_ray()
    from treeward.scoring.on_ray import scored_on_ray

    # `auto` takes a GPU only where there is one.
    required = device.startswith("cuda")
    shares = equal_shares(
        ray,
        workers,
        num_gpus=float(device != "cpu"),
        required=required,
        where="--workers",
    )
    yield from scored_on_ray(
        load_model,
        read,
        num_workers=workers,
        resources=shares,
        columns=columns,
        skip=skip,
    )
