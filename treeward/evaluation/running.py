"""`evaluate`: score the examples of suites with models, keep every row, and go on where an earlier run stopped.

    evaluate({"mine": scorer}, [(get_suite("llmbar"), None)], Path("results/eval"))

writes `results/eval/mine/llmbar/examples.jsonl`, a row for each example as soon as it is scored. The rows belong to
what `evaluation.json` beside them says (the data, the model's contract); with anything else of the same name the folder
is refused, so that no table mixes two models. `treeward.evaluation.session` makes a whole evaluation of it.
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

from treeward.errors import ConfigError, DataError
from treeward.evaluation.examples import EvalExample, ScoredExample, scored_from_row, to_row
from treeward.evaluation.kept_rows import keeping
from treeward.evaluation.suites.interface import Suite
from treeward.scoring.rewarding import RewardScorer
from treeward.scoring.score import ConversationScorer
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import reply_length

__all__ = [
    "LoadedSuite",
    "Progress",
    "ScoredSuite",
    "common_reasons",
    "evaluate",
    "folder_names",
    "load_suites",
    "score_examples",
    "score_suite",
    "scorer_settings",
]

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Told what is being done, how many of it are done, and how many there are; 0 where that is not known."""

_EXAMPLES_AT_ONCE = 64
_ROWS, _IDENTITY = "examples.jsonl", "evaluation.json"
_OF_ANOTHER = "this folder holds an evaluation of another model, of other settings or of other data"


@dataclass(frozen=True, slots=True)
class LoadedSuite:
    """A suite with its examples; `digest` identifies all that it has, whatever the limit, in their order."""

    suite: Suite
    examples: tuple[EvalExample, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class ScoredSuite:
    """The examples of one suite as one model scores them, in the suite's order, and the folder that they lie in."""

    model: str
    suite: Suite
    examples: tuple[ScoredExample, ...]
    folder: Path | None = None


def evaluate(
    models: Mapping[str, ConversationScorer],
    suites: Sequence[tuple[Suite, str | None]],
    output: Path | None = None,
    *,
    identities: Mapping[str, str] | None = None,
    limit: int | None = None,
    on_progress: Progress | None = None,
) -> list[ScoredSuite]:
    """Score every suite (with where it comes from, None for the hub) with every model; its folder is as the model.

    `output`: where rows are kept; None keeps none. `identities`: of each model, what a resumed run must have in common
    with the one that it continues. `limit`: most examples of each suite, the first. Raises `DataError` for a suite that
    cannot be read or is empty, and `CheckpointError` for rows of another model or of other data.
    """
    loaded = load_suites(suites, limit)  # all of them before any is scored
    names = folder_names(list(models))
    return [
        score_suite(scorer, one, names[model], output, (identities or {}).get(model, model), on_progress)
        for model, scorer in models.items()
        for one in loaded
    ]


def load_suites(
    suites: Sequence[tuple[Suite, str | None]],
    limit: int | None = None,
    *,
    on_unreadable: Callable[[Suite, DataError], None] | None = None,
) -> list[LoadedSuite]:
    """Read every suite (with where it comes from, None for the hub), the first `limit` examples of each.

    `on_unreadable`: told of a suite that cannot be read or is empty, which is then left out. Raises `ConfigError` for
    two of one name, and `DataError` for one that cannot be read or is empty where nobody is told of it.
    """
    if len({suite.name for suite, _ in suites}) < len(suites):
        raise ConfigError("two suites have one name", got=[suite.name for suite, _ in suites], need="different names")
    loaded = []
    for suite, source in suites:
        try:
            loaded.append(_load(suite, source, limit))
        except DataError as error:
            if on_unreadable is None:
                raise
            on_unreadable(suite, error)
    return loaded


def score_suite(
    scorer: ConversationScorer,
    loaded: LoadedSuite,
    model: str,
    output: Path | None = None,
    identity: str | None = None,
    on_progress: Progress | None = None,
    *,
    folder_name: str | None = None,
) -> ScoredSuite:
    """Score one suite with one model. `model`: its name; `identity`: what its rows depend on besides the examples, by
    default the name. Rows that are there already are not scored again. `folder_name`: of the model's folder in
    `output`, by default its name.

    Raises `CheckpointError` for rows of another model or of other data.
    """
    folder = None if output is None else output / (folder_name or model) / loaded.suite.name
    identities = {"model": model if identity is None else identity, "examples": loaded.digest}
    what = f"{model} on {loaded.suite.name}"
    rows = _scored(scorer, loaded.examples, folder, identities, what, on_progress)
    _tell_missing(rows, what)
    return ScoredSuite(model, loaded.suite, rows, folder)


def scorer_settings(scorer: ConversationScorer) -> dict[str, str]:
    """What a scorer's scores depend on, part by part, for a person; empty for one that is not treeward's own.

    `weights` stand for the model: those of a contract by its digest.
    """
    if isinstance(scorer, RewardScorer):
        section = scorer.shaper.config.model_dump(mode="json", exclude_defaults=True)
        return scorer_settings(scorer.scorer) | {"shaping": json.dumps(section, sort_keys=True)}
    if not isinstance(scorer, Scorer) or scorer.contract is None:
        return {}
    renderer = scorer.renderer
    return {
        "weights": scorer.contract.scores_sha256,
        "truncation": renderer.truncation,
        "max_length": str(renderer.max_length),
        "dtype": str(scorer.model.hf.dtype).removeprefix("torch."),
        "head_weights": str(scorer.head_weights),
    }


def common_reasons(errors: Mapping[str, int]) -> list[tuple[str, int]]:
    """Reasons with how often each comes, the most frequent first; those that differ in numbers alone, as in the tokens
    that are too many, are one: its first, and that there are others."""
    kinds: dict[str, list[str]] = {}
    for reason in errors:
        kinds.setdefault(re.sub(r"(?<!\w)\d[\d,.]*", "0", reason), []).append(reason)
    counts: Counter[str] = Counter()
    for alike in kinds.values():
        others = f", and {len(alike) - 1:,} like it with other numbers" if len(alike) > 1 else ""
        counts[alike[0] + others] = sum(errors[reason] for reason in alike)
    return counts.most_common()


def _tell_missing(rows: Sequence[ScoredExample], what: str) -> None:
    """Warn of examples without a score: they are in the number, as wrong ones."""
    first = [next((error for error in one.errors if error), "no reason is known") for one in rows if one.failed]
    if not first:
        return
    reasons = common_reasons(Counter(first))
    others = f"; and {len(reasons) - 1} other reasons" if len(reasons) > 1 else ""
    logger.warning("%s: %d of %d examples have no score and count as wrong (%s%s).",
                   what, len(first), len(rows), reasons[0][0], others)  # fmt: skip


def score_examples(
    scorer: ConversationScorer, examples: Sequence[EvalExample], *, on_scored: Callable[[int], None] | None = None
) -> Iterator[ScoredExample]:
    """Score examples in order, a few at a time; what cannot be scored has no score and says why."""
    remaining = iter(examples)
    while chunk := list(islice(remaining, _EXAMPLES_AT_ONCE)):
        flat = [conversation for example in chunk for conversation in example.conversations]
        scores = iter(scorer.score(flat, on_error="mask"))
        for example in chunk:
            own = [next(scores) for _ in example.completions]
            yield ScoredExample(
                example,
                scores=tuple(score.score for score in own),
                lengths=tuple(reply_length(chat, "characters", None) for chat in example.conversations),
                num_tokens=tuple(score.num_tokens for score in own),
                errors=tuple(score.error for score in own),
            )
        if on_scored is not None:
            on_scored(len(chunk))


def folder_names(models: Sequence[str]) -> dict[str, str]:
    """A folder name for each model: as many of the last parts of its path as make it unlike the others.

    Raises `ConfigError` for a model that is named twice.
    """
    paths = [os.path.normpath(model) for model in models]
    for i, path in enumerate(paths):
        if path in paths[:i]:
            both = f"{models[paths.index(path)]}, {models[i]}"
            raise ConfigError("a model is named twice", where="MODEL", got=both, need="every model once")
    parts = {model: [part for part in re.split(r"[\\/]+", model) if part not in ("", ".", "..")] for model in models}
    for count in range(1, 1 + max((len(one) for one in parts.values()), default=0)):
        names = {model: "-".join(one[-count:]) or "model" for model, one in parts.items()}
        # `final` says nothing of a model: the run's folder is part of its name
        if len(set(names.values())) == len(models) and not {"final", "model"} & set(names.values()):
            return names
    return {model: f"{i}-{'-'.join(one) or 'model'}" for i, (model, one) in enumerate(parts.items())}


def _load(suite: Suite, source: str | None, limit: int | None) -> LoadedSuite:
    of_hub = source is None and suite.hub_path is not None
    logger.info("Reading %s%s.", suite.name, f" from {source or suite.hub_path}" if source or of_hub else "")
    try:
        examples = suite.load(source)
    except DataError as error:
        if not of_hub or not str(error.where or "").startswith(str(suite.hub_path)):
            raise
        raise DataError(
            f"the suite {suite.name} cannot be had from the hub",
            where=suite.hub_path,
            got=error.got or error.summary,
            need="the hub, or a copy of the suite",
            fix=f"check the network; a copy is named as {suite.name}=FOLDER (--suite, or evaluation.suites)",
        ) from error
    if not examples:
        raise DataError("the suite has no examples", where=source or suite.name, need="at least one")
    seen: dict[str, EvalExample] = {}
    for example in examples:
        if (first := seen.setdefault(example.id, example)) is not example:
            raise DataError(
                "two examples have one id", where=example.where or suite.name, got=f"{example.id}, at {first.where} too"
            )
    # Of all examples: the rows of one limit are of use to another.
    return LoadedSuite(suite, tuple(examples[:limit]), _digest(examples))


def _scored(
    scorer: ConversationScorer,
    examples: Sequence[EvalExample],
    folder: Path | None,
    identity: Mapping[str, str],
    what: str,
    on_progress: Progress | None,
) -> tuple[ScoredExample, ...]:
    report = on_progress or (lambda *_: None)
    names = {"identity_file": _IDENTITY, "rows": _ROWS, "summary": _OF_ANOTHER}
    with keeping(folder, identity, scored_from_row, settings=scorer_settings(scorer), **names) as (kept, keep):
        ids = {example.id for example in examples}  # those kept may be more: of a larger limit
        done = {one.example.id: one for one in kept if one.example.id in ids}
        if done:
            logger.info("%s: %d of %d examples were scored before.", what, len(done), len(examples))
        left = [example for example in examples if example.id not in done]
        report(what, len(done), len(examples))
        for scored in score_examples(scorer, left, on_scored=lambda _: report(what, len(done), len(examples))):
            keep(to_row(scored))
            done[scored.example.id] = scored
    return tuple(done[example.id] for example in examples)


def _digest(examples: Sequence[EvalExample]) -> str:
    digest = hashlib.sha256()
    for example in examples:
        parts = [example.id, example.context, example.completions, example.ranks]
        digest.update(json.dumps(parts, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()
