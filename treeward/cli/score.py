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

from treeward.errors import ConfigError, DataError

__all__ = ["EXAMPLES", "add_arguments", "run"]

logger = logging.getLogger(__name__)

EXAMPLES = """\
examples:
  treeward score results/quickstart/final --data conversations.jsonl --output scores.jsonl
  echo '{"prompt": "2 + 2?", "responses": ["4", "5"]}' | treeward score MODEL --data - --output -

Rows hold `messages`; or `context` and `completions`; or `prompt` with `chosen` and `rejected`, or with `responses`.
Each is written as it is with its `score` (of messages) or `scores` (of several answers), in order."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or hub name of a reward model")
    parser.add_argument("--data", required=True, metavar="FILE", help="jsonl, json, csv, parquet or arrow; - is stdin")
    parser.add_argument("--output", default="-", metavar="FILE", help="where rows go as JSON lines; - is stdout")
    parser.add_argument("--batch-tokens", type=_positive, default=None, metavar="N", help="tokens in one forward pass")
    parser.add_argument("--device", default=None, help="cpu, cuda, cuda:1, ...; default: a GPU where there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the backbone's weights")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings")


def run(arguments: argparse.Namespace) -> int:
    sources = importlib.import_module("treeward.data.sources")
    files = importlib.import_module("treeward.data.files")
    loading = importlib.import_module("treeward.model.loading")
    scoring = importlib.import_module("treeward.scoring.scorer")
    rows_module = importlib.import_module("treeward.scoring.rows")
    progress = importlib.import_module("tqdm").tqdm
    if arguments.data == "-":
        rows = files.read_jsonl_stream(sys.stdin.buffer, "<stdin>")
    else:
        _check_not_the_input(arguments.output, arguments.data)
        rows = sources.read_rows(arguments.data)
    # A missing file or a bad first line is told before the model is loaded and before the output is emptied.
    rows = itertools.chain(list(itertools.islice(rows, 1)), rows)
    _check_device(arguments.device)
    scorer = scoring.Scorer.load(
        arguments.model,
        device=arguments.device,
        dtype=loading.DTYPES[arguments.dtype],
        batch_tokens=arguments.batch_tokens or scoring.DEFAULT_BATCH_TOKENS,
        trust_remote_code=arguments.trust_remote_code,
    )
    scored = failed = 0
    with (
        _opened(arguments.output) as write,
        progress(unit=" rows", desc="scoring", disable=not sys.stderr.isatty()) as bar,
    ):
        for row in rows_module.score_rows(scorer, rows):
            write(json.dumps(row.values, ensure_ascii=False, default=_plain) + "\n")
            scored += 1
            failed += row.failed
            bar.update()
    logger.info(
        "Scored %d rows, %d of them without a score; %d tokens computed for %d tokens of plain rows.",
        scored,
        failed,
        scorer.num_computed_tokens,
        scorer.num_row_tokens,
    )
    if failed:
        logger.warning("%d rows hold a conversation too long to score: their score is null, see `error`.", failed)
    return 1 if failed else 0


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


def _check_device(name: str | None) -> None:
    if name is None:
        return
    torch = importlib.import_module("torch")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        raise ConfigError(
            "the device cannot be used",
            where="--device",
            got=f"{name}: {str(error).splitlines()[0]}",
            need="cpu, or a GPU that torch sees, as cuda or cuda:1",
        ) from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, need a positive number of tokens")
    return int(text)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
