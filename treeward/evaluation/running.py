"""`load_suite` and `score_suite`: read a suite once, score its examples with a model, and keep every row.

    loaded = load_suite(get_suite("llmbar"), None)
    scored = score_suite(scorer, loaded, "mine", Path("results/eval"), identity={"model": "mine"})

writes `results/eval/mine/llmbar/examples.jsonl`, a row for each example as soon as it is scored; an interrupted run
goes on with them (`treeward.resumable`). `treeward.evaluation.session` makes a whole evaluation of it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from treeward.errors import ConfigError, DataError
from treeward.evaluation.examples import EvalExample, ScoredExample, scored_from_row, to_row
from treeward.evaluation.suites.interface import Suite
from treeward.resumable import resumable_rows
from treeward.scoring.score import ConversationScorer
from treeward.scoring.shaping import completion_length

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Receives the task, how much of it is done, and how much there is; 0 where that is not known."""

_EXAMPLES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class LoadedSuite:
    """A suite with its examples; `digest` identifies all that it has, whatever the limit, in their order."""

    suite: Suite
    examples: tuple[EvalExample, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class ScoredSuite:
    """The examples of one suite as one model scores them, in the suite's order, and the folder of their rows."""

    model: str
    suite: Suite
    examples: tuple[ScoredExample, ...]
    folder: Path | None = None


def load_suite(suite: Suite, source: str | None, limit: int | None = None) -> LoadedSuite:
    """Read a suite from a source, None for the hub, and keep its first `limit` examples.

    Raises `DataError` for a suite that cannot be read or is empty, and for two examples with one id.
    """
    logger.info("Reading %s.", suite.name if source is None else f"{suite.name} from {source}")
    try:
        examples = suite.load(source)
    except DataError as error:
        if source is not None or suite.hub_path is None or not str(error.where).startswith(suite.hub_path):
            raise
        raise DataError(
            f"the suite {suite.name} cannot be read from the hub",
            where=suite.hub_path,
            got=error.got or error.summary,
            need="the hub, or a copy of the suite",
            fix=f"check the network; a copy is named as {suite.name}=FOLDER (--suite, or evaluation.suites)",
        ) from error
    if not examples:
        raise DataError("the suite has no examples", where=source or suite.name, need="at least one")
    ids, digest = Counter(example.id for example in examples), hashlib.sha256()
    if (twice := ids.most_common(1)[0])[1] > 1:
        raise DataError("two examples have one id", where=suite.name, got=twice[0])
    for example in examples:
        parts = [example.id, example.context, example.completions, example.ranks]
        digest.update(json.dumps(parts, sort_keys=True, default=str).encode() + b"\n")
    # The digest is of all examples: the rows of one limit are of use to another.
    return LoadedSuite(suite, tuple(examples[:limit]), digest.hexdigest())


def score_suite(
    scorer: ConversationScorer,
    loaded: LoadedSuite,
    model: str,
    output: Path | None,
    identity: Mapping[str, Any],
    on_progress: Progress,
) -> ScoredSuite:
    """Score one suite with one model; rows of an earlier run are not scored again.

    `model`: its name. `output`: where its folder of rows goes; None keeps none. `identity`: what its rows depend on
    besides the examples. Raises as `resumable_rows`.
    """
    folder = None if output is None else output / model / loaded.suite.name
    what, total = f"{model} on {loaded.suite.name}", len(loaded.examples)
    ids = {example.id for example in loaded.examples}
    own = {**identity, "examples": loaded.digest}
    with resumable_rows(None if folder is None else folder / "examples.jsonl", own, scored_from_row) as rows:
        done = {one.example.id: one for one in rows.kept if one.example.id in ids}  # a larger limit kept more
        if done:
            logger.info("%s: %d of %d examples were scored before.", what, len(done), total)
        on_progress(what, len(done), total)
        remaining = iter([example for example in loaded.examples if example.id not in done])
        while chunk := list(islice(remaining, _EXAMPLES_AT_ONCE)):
            for scored in _score(scorer, chunk):
                rows.add(to_row(scored))
                done[scored.example.id] = scored
            on_progress(what, len(done), total)
    found = tuple(done[example.id] for example in loaded.examples)
    missing = Counter(next(filter(None, one.errors), "no reason is known") for one in found if one.failed)
    if reasons := common_reasons(missing):
        logger.warning("%s: %d of %d examples have no score and count as wrong (%s).",
                       what, missing.total(), total, "; ".join(reason for reason, _ in reasons[:3]))  # fmt: skip
    return ScoredSuite(model, loaded.suite, found, folder)


def _score(scorer: ConversationScorer, examples: Sequence[EvalExample]) -> Iterator[ScoredExample]:
    scores = iter(scorer.score([one for example in examples for one in example.conversations], on_error="mask"))
    for example in examples:
        own = [next(scores) for _ in example.completions]
        yield ScoredExample(
            example,
            scores=tuple(score.score for score in own),
            lengths=tuple(completion_length(one, "characters", None) for one in example.conversations),
            num_tokens=tuple(score.num_tokens for score in own),
            errors=tuple(score.error for score in own),
        )


def common_reasons(errors: Mapping[str, int]) -> list[tuple[str, int]]:
    """Reasons with how often each occurs, the most frequent first; reasons that differ only in numbers count as one,
    and are told as the first of them."""
    counts: Counter[str] = Counter()
    firsts: dict[str, str] = {}
    for reason, count in errors.items():
        kind = re.sub(r"(?<!\w)\d[\d,.]*", "0", reason)
        counts[firsts.setdefault(kind, reason)] += count
    return counts.most_common()


def folder_names(models: Sequence[str]) -> dict[str, str]:
    """A folder name for each model: as many of the last parts of its path as make it unlike the others.

    Raises `ConfigError` for a model that is named twice.
    """
    paths = [os.path.normpath(model) for model in models]
    if len(set(paths)) < len(paths):
        raise ConfigError("a model is named twice", where="MODEL", got=", ".join(models), need="every model once")
    parts = {model: [part for part in re.split(r"[\\/]+", model) if part not in ("", ".", "..")] for model in models}
    for count in range(1, 1 + max((len(one) for one in parts.values()), default=0)):
        names = {model: "-".join(one[-count:]) or "model" for model, one in parts.items()}
        # `final` says nothing of a model: the run's folder is part of its name.
        if len(set(names.values())) == len(models) and not {"final", "model"} & set(names.values()):
            return names
    return {model: f"{i}-{'-'.join(one) or 'model'}" for i, (model, one) in enumerate(parts.items())}
