"""`treeward score`: conversations of a file, or of standard input, with their scores.

examples:
  treeward score results/quickstart/final --data conversations.jsonl --output scores.jsonl
  echo '{"prompt": "What is 7 plus 5?", "responses": ["12", "13"]}' | treeward score MODEL --data -
  treeward score MODEL --data conversations.jsonl --shaping "{length_penalty: {coefficient: 0.001}}"
  treeward score MODEL OTHER_MODEL --data conversations.jsonl --ensemble worst

Rows hold `messages`, or a `context` or `prompt` with completions. Each is written as it
is, in order, with its `score` or `scores`. The same command goes on where it stopped.
"""

from __future__ import annotations

import itertools
import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from treeward.cli.options import Ensemble, ModelOptions, Shaping, load, one_model, with_model_options
from treeward.errors import ConfigError
from treeward.progress import ShownProgress
from treeward.resumable import ResumableRows, resumable_rows

logger = logging.getLogger(__name__)


@with_model_options
def run(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="Folder or hub name of a reward model.")],
    data: Annotated[str, typer.Option(metavar="FILE", help="jsonl, json, csv, parquet or arrow; - is stdin.")],
    output: Annotated[str, typer.Option(metavar="FILE", help="Where rows go as JSON lines; - is stdout.")] = "-",
    shaping: Shaping = None,
    ensemble: Ensemble = None,
    *,
    options: ModelOptions,
) -> int:
    section = one_model(models, ensemble, shaping, options)

    from treeward.data.sources import fingerprint, read_jsonl_stream, read_rows
    from treeward.evaluation.session import scorer_identity
    from treeward.scoring.rows import score_rows

    if output != "-" and Path(output).exists() and Path(data).exists() and Path(output).samefile(data):
        raise ConfigError("the output is the input", where="--output", got=output, need="another file than --data")
    rows = read_jsonl_stream(sys.stdin.buffer, "<stdin>") if data == "-" else read_rows(data)
    # A missing file or a bad first line is an error before the model is loaded.
    rows = itertools.chain(list(itertools.islice(rows, 1)), rows)
    logger.info("Loading %s.", ", ".join(models))
    scorer, shaper = load(section, options.batch_tokens)
    identity = {
        "model": scorer_identity(scorer, models[0]),
        "data": fingerprint(data) if data != "-" and output != "-" else None,
        "shaping": shaper and shaper.config.model_dump(mode="json"),
    }
    partial, first_error = Path(output).with_name(f"{Path(output).stem}.partial{Path(output).suffix}"), None
    opened: AbstractContextManager[ResumableRows[bool]] = nullcontext(ResumableRows([], sys.stdout))
    if output != "-":  # the file gets its name when it is complete
        if data == "-":  # which cannot be read again, so a part of it is not resumed
            partial.unlink(missing_ok=True)
        opened = resumable_rows(partial, identity, lambda row, _: "error" in row)
    with opened as kept, ShownProgress(unit="rows") as progress:
        done, failed = len(kept.kept), sum(kept.kept)
        if done:
            logger.info("%d rows were scored before.", done)
        for row in score_rows(scorer, itertools.islice(rows, done, None), shaper=shaper):
            kept.add(row.values)
            done += 1
            failed += row.num_failed > 0
            first_error = first_error or row.values.get("error")
            progress.show("scoring", done, 0)
        if output != "-":
            kept.finish(Path(output))
    logger.info("Scored %d rows; %d tokens computed for %d tokens of plain rows.",
                done, scorer.num_computed_tokens, scorer.num_row_tokens)  # fmt: skip
    if failed:
        logger.warning("%d rows have no %s for some conversation: it is null, and the row's `error` says why. "
                       "The first: %s", failed, "reward" if shaper else "score", first_error)  # fmt: skip
    return 1 if failed else 0
