"""`treeward score`: conversations of a file, or of standard input, with their scores."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from treeward.cli.interrupts import check_interrupts, heeding_interrupts
from treeward.cli.model_arguments import (
    RewardModels,
    add_model_arguments,
    add_reward_arguments,
    ensemble_section,
    fixed_shaping,
    model_options,
)
from treeward.errors import ConfigError, DataError

__all__ = ["EXAMPLES", "add_arguments", "run"]

logger = logging.getLogger(__name__)

EXAMPLES = """\
examples:
  treeward score results/quickstart/final --data conversations.jsonl --output scores.jsonl
  echo '{"prompt": "2 + 2?", "responses": ["4", "5"]}' | treeward score MODEL --data - --output -
  treeward score MODEL --data conversations.jsonl --shaping "{length_penalty: {coefficient: 0.001}}"
  treeward score MODEL OTHER_MODEL --data conversations.jsonl --ensemble worst

Rows hold `messages`; or `context` with `completions` or `responses`; or `prompt` with `responses`, or with `chosen` and
`rejected`.
Each is written as it is with its `score` (of messages) or `scores` (of several answers), in order; with --shaping also
with its `reward` or `rewards`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folder or hub name of a reward model")
    parser.add_argument("--data", required=True, metavar="FILE", help="jsonl, json, csv, parquet or arrow; - is stdin")
    parser.add_argument("--output", default="-", metavar="FILE", help="where rows go as JSON lines; - is stdout")
    add_reward_arguments(parser)
    add_model_arguments(parser)


@heeding_interrupts
def run(arguments: argparse.Namespace) -> int:
    models = _models(arguments)
    sources = importlib.import_module("treeward.data.sources")
    rows_module = importlib.import_module("treeward.scoring.rows")
    from treeward.progress import ShownProgress

    if arguments.data == "-":
        rows = sources.read_jsonl_stream(sys.stdin.buffer, "<stdin>")
    else:
        _check_not_the_input(arguments.output, arguments.data)
        rows = sources.read_rows(arguments.data)
    # A missing file or a bad first line is told before the model is loaded and before the output is emptied.
    rows = itertools.chain(list(itertools.islice(rows, 1)), rows)
    logger.info("Loading %s.", ", ".join(arguments.models))
    scorer, shaper = models.load(model_options(arguments))
    check_interrupts()  # before the output is emptied
    scored = failed = missing = 0
    first_error = None
    with (
        _opened(arguments.output) as write,
        ShownProgress(check_interrupts, unit="rows") as progress,
    ):
        progress.show("scoring", 0, 0)
        for row in rows_module.score_rows(scorer, rows, shaper=shaper):
            check_interrupts()
            write(json.dumps(row.values, ensure_ascii=False, default=_plain) + "\n")
            scored += 1
            failed += row.num_failed > 0
            missing += row.num_failed
            first_error = first_error or row.values.get("error")
            progress.show("scoring", scored, 0)
    logger.info(
        "Scored %d rows; %d tokens computed for %d tokens of plain rows.",
        scored,
        scorer.num_computed_tokens,
        scorer.num_row_tokens,
    )
    if failed:
        what = "score" if shaper is None else "reward"
        logger.warning("%d conversations in %d rows have no %s: it is null, and the row's `error` says why. The first: "
                       "%s", missing, failed, what, first_error)  # fmt: skip
    return 1 if failed else 0


def _models(arguments: argparse.Namespace) -> RewardModels:
    if arguments.ensemble is None and len(arguments.models) > 1:
        raise ConfigError(
            "several models are named, and nothing says how their scores become one",
            where="MODEL",
            got=" ".join(arguments.models),
            need="one model, or --ensemble",
            fix="--ensemble mean, or a run for each model",
        )
    ensemble = None if arguments.ensemble is None else ensemble_section(arguments.ensemble)
    return RewardModels(tuple(arguments.models), ensemble, fixed_shaping(arguments.shaping))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Callable[[str], None]]:
    """A function that writes there. Raises `DataError` where that fails; what was written before stays."""
    if path == "-":
        yield partial(_write, sys.stdout, "<stdout>")
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        stream = open(path, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise _unwritable(path, error) from error
    with stream:
        yield partial(_write, stream, path)


def _write(stream: TextIO, name: str, text: str) -> None:
    try:
        stream.write(text)
        stream.flush()  # whoever reads along sees each row at once, and a full disk is noticed here
    except BrokenPipeError:
        raise
    except OSError as error:
        with contextlib.suppress(OSError):
            stream.close()  # it tries to write once more what the disk has refused
        raise _unwritable(name, error) from error


def _unwritable(name: str, error: OSError) -> DataError:
    return DataError(
        "the scores cannot be written", where=name, got=str(error), need="a file that can be written, and room for it"
    )


def _check_not_the_input(output: str, data: str) -> None:
    if output != "-" and Path(output).exists() and Path(data).exists() and Path(output).samefile(data):
        raise ConfigError(
            "the output is the input: writing would destroy the rows",
            where="--output",
            got=output,
            need="another file than --data",
        )


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
