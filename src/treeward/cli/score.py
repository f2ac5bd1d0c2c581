r"""`treeward score`: conversations of a file, or of standard input, with their scores.

examples:
  treeward score results/quickstart/final --data conversations.jsonl --output scores.jsonl
  echo '{"prompt": "What is 7 plus 5?", "responses": ["12", "13"]}' | treeward score MODEL --data -
  treeward score "{models: MODEL, shaping: {length_penalty: {coefficient: 0.001}}}" --data conversations.jsonl
  treeward score "{models: [MODEL, OTHER_MODEL], ensemble: worst}" --data conversations.jsonl
  treeward score MODEL --data pairs.csv --data-option prompt_key=frage --data-option chosen_key=gut \
      --data-option rejected_key=schlecht
  treeward score MODEL --data conversations.jsonl --output scores.jsonl --workers 8

Rows hold `messages`, or a `context` or `prompt` with completions. Each is written as it
is, in order, with its `score` or `scores`. The same command goes on where it stopped.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from treeward.cli.comparisons import DataOptions, choosing_split, dataset_config, split_data_option
from treeward.cli.options import ModelOptions, checked_model, load, model_section, output_file, with_model_options
from treeward.errors import CheckpointError, ConfigError
from treeward.progress import ShownProgress
from treeward.resumable import ResumableRows, resumable_rows
from treeward.storage import is_stream

if TYPE_CHECKING:
    from treeward.config.data import DatasetConfig
    from treeward.data.sources import Row
    from treeward.scoring.rows import Load, ScoredChunk

logger = logging.getLogger(__name__)


@with_model_options
def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub name, or a section.")],
    data: Annotated[str, typer.Option(metavar="FILE", help="jsonl, json, csv, tsv, parquet or arrow; - is stdin.")],
    output: Annotated[str, typer.Option(metavar="FILE", help="Where rows go as JSON lines; - is stdout.")] = "-",
    data_option: DataOptions = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes of Ray Data, each with a GPU if any.")] = None,
    *,
    options: ModelOptions,
) -> int:
    path = Path(output) if output == "-" else output_file(output)
    if path.exists() and Path(data).exists() and path.samefile(data):
        raise ConfigError("the output is the input", where="--output", got=output, need="another file than --data")
    section = checked_model(model_section(model), "MODEL", options)
    columns = dataset_config(data, None, None, data_option)

    from treeward.data.sources import fingerprint
    from treeward.scoring.rows import chunk_start, num_scored

    if data == "-" and workers is not None:
        raise ConfigError("workers cannot read standard input", where="--workers", need="--data FILE")
    stream: IO[str] | None = None  # standard output, a device or a FIFO: rows go there at once, and none is kept
    if output == "-":
        stream = sys.stdout
    elif is_stream(path):
        stream = path.open("w", encoding="utf-8", errors="backslashreplace")
    partial_file = path.with_name(f"{path.stem}.partial{path.suffix}")
    if stream is None and data == "-":  # which cannot be read again, so a part of it is not resumed
        partial_file.unlink(missing_ok=True)
    load_model = partial(load, section, options.batch_tokens)
    read = partial(_rows, data, columns)
    before = 0
    if stream is None and partial_file.exists():
        before = num_scored(partial_file, read())
    skip = chunk_start(before)
    with closing(_scored(load_model, read, columns, workers, options.device or "auto", skip=skip)) as chunks:
        first = next(chunks)
        if first.error is not None and first.identity is None:
            raise first.error
        can_resume = data != "-" and stream is None
        content = fingerprint(data, split=columns.split, subset=columns.subset) if can_resume else None
        identity = {**(first.identity or {}), "data": content, "data_option": data_option}
        numbers = itertools.count()

        def failed_before(row: Any, where: str) -> bool | None:
            """Whether a kept row has failed; None for those that are not this data's, which are scored again."""
            return "error" in row if next(numbers) < before else None

        opened: AbstractContextManager[ResumableRows[bool]] = nullcontext(ResumableRows([], stream, path))
        if stream is None:  # the file gets its name when it is complete
            opened = resumable_rows(partial_file, identity, failed_before, can_resume=data != "-")
        with opened as kept:
            if len(kept.kept) != before:
                raise CheckpointError("another process has written these rows", where=str(partial_file))
            failed, first_error = _write(itertools.chain([first], chunks), kept, before - skip)
            if stream is None:
                kept.finish(path)
    if stream is not None and stream is not sys.stdout:
        stream.close()
    if failed:
        what = "score" if section.shaping is None else "reward"
        summary = "%d rows have no %s for some conversation: it is null, and the row's `error` says why. The first: %s"
        logger.warning(summary, failed, what, first_error)
    return 1 if failed else 0


def _write(chunks: Iterator[ScoredChunk], kept: ResumableRows[bool], again: int) -> tuple[int, str | None]:
    """How many rows have failed, those kept before among them, and why the first one did.

    `again`: so many rows of the first chunk are kept already.
    """
    done, failed, computed, plain = len(kept.kept), sum(kept.kept), 0, 0
    first_error: str | None = None
    if done:
        logger.info("%d rows were scored before.", done)
    with ShownProgress(unit="rows") as progress:
        for chunk in chunks:
            new_rows = chunk.rows[again:]
            again = 0
            for row in new_rows:
                kept.add(row)
                done += 1
                failed += "error" in row
                first_error = first_error or row.get("error")
                progress.show("scoring", done, 0)
            computed, plain = computed + chunk.tokens[0], plain + chunk.tokens[1]
            if chunk.error is not None:
                raise chunk.error
    logger.info("Scored %d rows; %d tokens computed for %d tokens of plain rows.", done, computed, plain)
    return failed, first_error


def _rows(data: str, columns: DatasetConfig) -> Iterator[Row]:
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
    """The rows after the first `skip`, in chunks that are scored as they are asked for, here or by workers.

    Raises `DataError` for a missing file and a first line that is not JSON, before any model is loaded.
    """
    from treeward.scoring.rows import ChunkScorer, chunks_of

    if workers is None:
        rows = read()
        rows = itertools.chain(list(itertools.islice(rows, 1)), rows)
        yield from map(ChunkScorer(load_model).score, chunks_of(itertools.islice(rows, skip, None), columns))
        return
    next(read(), None)
    from treeward.parallel.ray_cluster import equal_shares, start_ray

    ray = start_ray()
    from treeward.scoring.on_ray import scored_on_ray

    required = device.startswith("cuda")
    shares = equal_shares(ray, workers, num_gpus=float(device != "cpu"), required=required, where="--workers")
    yield from scored_on_ray(load_model, read, num_workers=workers, resources=shares, columns=columns, skip=skip)
