"""`scored_on_ray`: the rows of a file scored by workers of Ray Data, in order.

    read = partial(read_rows, "in.jsonl")
    for scored in scored_on_ray(load, read, num_workers=8, resources={"num_gpus": 1}):
        ...                                     # a ScoredChunk each

One task reads the rows on this node, in the chunks of `treeward.scoring.rows`; memory does not grow
with them. Any worker gives a chunk the same scores, and it is scored again where its worker has
died.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import islice
from typing import Any, cast

import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.util.annotations import RayDeprecationWarning

from treeward.config.data import DatasetConfig
from treeward.data.sources import Row
from treeward.errors import ModelError
from treeward.scoring.rows import ChunkScorer, Load, ScoredChunk, chunks_of

_RETRIES = 3
"""How often a chunk is scored again whose worker has died."""


def scored_on_ray(
    load: Load,
    read: Callable[[], Iterator[Row]],
    *,
    num_workers: int,
    resources: Mapping[str, Any],
    columns: DatasetConfig | None = None,
    skip: int = 0,
) -> Generator[ScoredChunk]:
    """The chunks of the rows of `read()` after the first `skip`, in order; one without rows if
    there are none.

    `resources`: Ray's options of each worker. `columns`: names columns, as `prompt_key`. Ray is
    running. Raises `ModelError` where workers die of one chunk again and again.
    """
    context = DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    # One byte: each chunk is a block of its own, and blocks are what Ray Data hands out.
    context.target_max_block_size = 1
    context.raise_original_map_exception = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    # It tells that it shows none.
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)
    # The files may lie on the command's machine alone.
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    folder = os.getcwd()

    def read_chunks(_: Any) -> Iterator[dict[str, bytes]]:
        _enter(folder)
        for chunk in chunks_of(islice(read(), skip, None), columns):
            yield {"chunk": pickle.dumps(chunk)}

    with DataContext.current(context), warnings.catch_warnings():
        # Of `max_task_retries`, without which Ray would try for ever.
        warnings.simplefilter("ignore", RayDeprecationWarning)
        scored = (
            ray.data.from_items([None])
            .flat_map(read_chunks, num_cpus=0, label_selector=here)
            .map(
                cast(Any, _Worker),
                fn_constructor_args=(load, folder),
                compute=ActorPoolStrategy(
                    min_size=1, max_size=num_workers, initial_size=num_workers
                ),
                max_task_retries=_RETRIES,
                **resources,
            )
        )
    # Pickles of our own processes: Ray Data would turn values into columns of Arrow.
    try:
        for row in scored.iter_rows():
            yield pickle.loads(row["scored"])
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise ModelError(
            "a worker of the scoring has died again and again",
            got=str(error).splitlines()[0],
            fix="look for the reason in Ray's logs; fewer --workers on a node or a lower "
            "--batch-tokens save memory",
        ) from error


class _Worker:
    """A `ChunkScorer` in a process of Ray."""

    def __init__(self, load: Load, folder: str) -> None:
        _enter(folder)
        self._scorer = ChunkScorer(load)

    def __call__(self, row: dict[str, Any]) -> dict[str, bytes]:
        scored = self._scorer.score(pickle.loads(row["chunk"]))
        return {"scored": pickle.dumps(scored)}


def _enter(folder: str) -> None:
    """Paths mean what they do where the command runs, on this node and on those that share its
    files.
    """
    # On a node without the folder absolute paths and names of the hub still hold.
    with contextlib.suppress(OSError):
        os.chdir(folder)
