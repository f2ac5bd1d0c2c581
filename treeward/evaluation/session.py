"""`run_evaluation`: models on suites, from loading to the report; what `treeward eval` and the end of training call.

    def load() -> tuple[Scorer, dict[str, Any]]:
        scorer = Scorer.load("results/rm/final")
        return scorer, scorer_identity(scorer, "results/rm/final")

    done = run_evaluation([Candidate("rm", load)], [(get_suite("llmbar"), None)], Path("results/eval"))
    done.summaries[0].result.headline, done.path

The suites are read once, and one model is in memory at a time. Rows are kept as they are scored, those of rewritten
completions too, so an interrupted evaluation goes on where it stopped when it is called again. A report is always of
everything that its folder holds: an evaluation that would drop earlier results from it is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.errors import ConfigError, DataError
from treeward.evaluation.diagnostics.overlap import Overlap, find_overlap
from treeward.evaluation.diagnostics.perturbations import diagnose_perturbations
from treeward.evaluation.examples import EvalExample, ScoredExample, mostly_failed, scored_from_row, to_row
from treeward.evaluation.suites.interface import Suite
from treeward.evaluation.summary import Summary, summarize
from treeward.evaluation.writing import write_results
from treeward.resumable import resumable_rows
from treeward.scoring.ensemble import EnsembleScorer
from treeward.scoring.rewarding import RewardScorer
from treeward.scoring.score import ConversationScorer, GroupScorer, Score, score_groups
from treeward.scoring.scorer import Scorer
from treeward.scoring.shaping import completion_length
from treeward.storage import write_text

logger = logging.getLogger(__name__)

Identity = Mapping[str, Any]
Progress = Callable[[str, int, int], None]
"""Receives the task, how much of it is done, and how much there is; 0 where that is not known."""

_EXAMPLES_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to be evaluated.

    `name`: its folder of rows and its name in the report. `load`: returns the scorer and its identity, everything that
    a kept row depends on besides the example (`scorer_identity`); called when its turn comes, so that one model is in
    memory at a time. `published_name`: the name in published result files; None is `name`. `note`: what a reader of the
    report must know of its scores, such as a shaping.
    """

    name: str
    load: Callable[[], tuple[ConversationScorer, Identity]]
    published_name: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class _LoadedSuite:
    """A suite with its examples; `digest` identifies all that it has, whatever the limit, in their order."""

    suite: Suite
    examples: tuple[EvalExample, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The results of an evaluation: for each model in turn a summary of each suite, and the file to look at.

    `path`: of the report; None where nothing is written. `unread`: suites that could not be read, and why.
    """

    summaries: list[Summary]
    path: Path | None = None
    unread: dict[str, str] = field(default_factory=dict)


def run_evaluation(
    candidates: Sequence[Candidate],
    suites: Sequence[tuple[Suite, str | None]],
    output: Path | None = None,
    *,
    limit: int | None = None,
    num_perturbations: int | None = None,
    training_data: Sequence[DatasetConfig] = (),
    on_progress: Progress = lambda what, done, total: None,
    skip_unreadable: bool = False,
) -> Evaluated:
    """Score every suite (with its source, None for the hub) with every model, and write the results.

    `output`: the folder of rows, results.json and the report; None writes nothing. `limit`: most examples of each
    suite, the first. `num_perturbations`: most examples of each suite whose completions are rewritten; None rewrites
    none. `training_data`: data to look for in the suites. `skip_unreadable`: leave out and note a suite that cannot be
    read, as long as another can be.

    Raises `ConfigError` for two candidates or suites of one name and for a folder with results that this evaluation
    would drop, `DataError` for a suite that cannot be read or is empty and for files that cannot be written, and
    `CheckpointError` for rows of another model or of other data. An error of a later candidate is raised after the
    results of those before it are written.
    """
    models, sets = [one.name for one in candidates], [one.name for one, _ in suites]
    for what, names in (("models", models), ("suites", sets)):
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"there are no {what}, or two of one name", got=names, need="different names: of folders")
    if output is not None:
        _check_earlier_results(output, {(model, name) for model in models for name in sets})
    loaded, unread = _load_suites(suites, limit, skip_unreadable)
    overlaps = {  # before any model is loaded: training data that cannot be read is an error at once
        one.suite.name: find_overlap(
            one.examples,
            (preference for config in training_data for preference, _ in open_dataset(config)),
            on_progress=partial(on_progress, f"training data, for {one.suite.name}"),
        )
        for one in loaded
        if training_data
    }
    notes = [f"{one.name}: {one.note}" for one in candidates if one.note]
    notes += [f"{name} is missing, it could not be read: {why}" for name, why in unread.items()]

    def write(notes: list[str]) -> Path | None:
        if output is None:
            return None
        logger.info("Writing the report.")
        return write_results(output, summaries, subtitle="; ".join(notes))

    summaries: list[Summary] = []
    for number, candidate in enumerate(candidates):
        try:
            summaries += _evaluate(candidate, loaded, output, num_perturbations, overlaps, on_progress)
        except Exception:
            missing = ", ".join(models[number:])
            if summaries and (path := write([*notes, f"missing, after an error: {missing}"])):
                logger.warning("%s holds the complete results; it lacks %s.", path, missing)
            raise
    return Evaluated(summaries, write(notes), unread)


def _evaluate(
    candidate: Candidate,
    suites: Sequence[_LoadedSuite],
    output: Path | None,
    num_perturbations: int | None,
    overlaps: Mapping[str, Overlap],
    on_progress: Progress,
) -> list[Summary]:
    """One model on all suites. The model is gone when this returns."""
    logger.info("Loading %s.", candidate.name)
    scorer, identity = candidate.load()
    summaries = []
    for one in suites:
        what, own = f"{candidate.name} on {one.suite.name}", {**identity, "examples": one.digest}
        folder = None if output is None else output / candidate.name / one.suite.name
        scored = _score_suite(scorer, one, what, folder, own, on_progress)
        usage = scorer.usage() if isinstance(scorer, GroupScorer) else {}
        if folder is not None and not mostly_failed(scored):
            files = one.suite.published_files(scored, candidate.published_name or candidate.name)
            for name, content in files.items():
                path = folder / "published" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, json.dumps(content, ensure_ascii=False, indent=2) + "\n")
        perturbations = None
        if num_perturbations is not None:
            perturbations = diagnose_perturbations(
                scorer,
                one.examples,
                candidate.name,
                num_examples=num_perturbations,
                folder=folder,
                identity=own,
                on_progress=partial(on_progress, f"{what}, rewritten"),
            )
            if perturbations is None:  # an evaluation of hours goes on
                logger.warning("%s: no example has a better and a worse completion of text, so none is rewritten.",
                               one.suite.name)  # fmt: skip
        logger.info("Computing the numbers of %s.", what)
        overlap = overlaps.get(one.suite.name)
        summary = summarize(one.suite, scored, candidate.name, perturbations=perturbations, overlap=overlap)
        if usage:  # of the rows that were scored now
            summary = replace(
                summary, result=replace(summary.result, details={**summary.result.details, "usage": usage})
            )
        summaries.append(summary)
    return summaries


def scorer_identity(scorer: ConversationScorer, name: str) -> dict[str, Any]:
    """What the scores of a scorer depend on besides the conversation, by name; JSON.

    `name`: of the model; with the sum of the weights it stands for a model that has no scoring contract, and alone for
    a scorer that is not one of treeward's. The members of an ensemble have names of their own.
    """
    if isinstance(scorer, RewardScorer):
        section = scorer.shaper.config
        constants = _calibration(scorer.scorer) if section.uses_calibration else None
        shaping = section.model_dump(mode="json", exclude_defaults=True)
        return scorer_identity(scorer.scorer, name) | {"shaping": shaping, "constants": constants}
    if isinstance(scorer, EnsembleScorer):
        return {
            "members": [scorer_identity(*pair) for pair in zip(scorer.members, scorer.names, strict=True)],
            "ensemble": scorer.config.model_dump(mode="json"),
            "calibrations": [_calibration(member) for member in scorer.members],
        }
    if not isinstance(scorer, Scorer):
        return {"model": name}
    renderer = scorer.renderer
    return {
        "model": scorer.model_id if scorer.contract is not None else f"{name}, {scorer.model_id}",
        "truncation": renderer.truncation,
        "max_length": renderer.max_length,
        "dtype": str(scorer.model.hf.dtype).removeprefix("torch."),
        "head_weights": scorer.head_weights,
        "rendering": renderer.fingerprint,
    }


def _calibration(scorer: ConversationScorer) -> object:
    """The constants of a model's contract, without where they come from."""
    contract = scorer.contract if isinstance(scorer, Scorer) else None
    known = None if contract is None else contract.calibration
    return None if known is None else known.model_dump(mode="json", exclude={"provenance"})


def _check_earlier_results(output: Path, own: set[tuple[str, str]]) -> None:
    """Raise `ConfigError` where the folder has results of other models and suites than `own`: they would be lost."""
    try:
        earlier = json.loads((output / "results.json").read_text(encoding="utf-8"))["results"]
        dropped = [(one["model"], one["suite"]) for one in earlier if (one["model"], one["suite"]) not in own]
    except (OSError, ValueError, KeyError, TypeError):
        return  # nothing that could be lost
    if dropped:
        raise ConfigError(
            "the folder has results that this evaluation would drop from its report",
            where=str(output),
            field="output",
            got=", ".join(f"{model} on {suite}" for model, suite in dropped),
            need="a new folder, or one command for all models and all data of the folder",
            fix="choose another --output, or name these models and data too: their rows are not scored again",
        )


def _load_suites(
    suites: Sequence[tuple[Suite, str | None]], limit: int | None, skip_unreadable: bool
) -> tuple[list[_LoadedSuite], dict[str, str]]:
    """The suites that can be read, and why others cannot, by name. Raises the first error if none can."""
    loaded: list[_LoadedSuite] = []
    errors: dict[str, DataError] = {}
    for suite, source in suites:
        try:
            loaded.append(_load_suite(suite, source, limit))
        except DataError as error:
            if not skip_unreadable:
                raise
            errors[suite.name] = error
    if errors and not loaded:
        raise next(iter(errors.values()))
    return loaded, {name: " ".join(str(error).split()) for name, error in errors.items()}


def _load_suite(suite: Suite, source: str | None, limit: int | None = None) -> _LoadedSuite:
    """Read a suite from a source, None for the hub, and keep its first `limit` examples.

    The second example of an id becomes `id#2`, and so on. Raises `DataError` for a suite that cannot be read or is
    empty.
    """
    logger.info("Reading %s.", suite.name if source is None else f"{suite.name} from {source}")
    try:
        examples = list(suite.load(source))
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
    given = Counter(example.id for example in examples)
    taken: set[str] = set()
    digest = hashlib.sha256()
    for i, example in enumerate(examples):
        number, name = 1, example.id
        while name in taken or (number > 1 and name in given):
            number += 1
            name = f"{example.id}#{number}"
        taken.add(name)
        examples[i] = replace(example, id=name)
        parts = [name, example.subset, example.context, example.completions, example.ranks, example.suite_data]
        digest.update(json.dumps(parts, sort_keys=True, default=str).encode() + b"\n")
    # The digest is of all examples: the rows of one limit are of use to another.
    return _LoadedSuite(suite, tuple(examples[:limit]), digest.hexdigest())


def _score_suite(
    scorer: ConversationScorer,
    loaded: _LoadedSuite,
    what: str,
    folder: Path | None,
    identity: Identity,
    on_progress: Progress,
) -> tuple[ScoredExample, ...]:
    """The examples as a model scores them, in the suite's order; those that `folder` keeps are not scored again."""
    total, ids = len(loaded.examples), {example.id for example in loaded.examples}
    path = None if folder is None else folder / "examples.jsonl"
    with resumable_rows(path, identity, scored_from_row) as rows:
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
        logger.warning("%s: %d of %d examples have no score (%s).",
                       what, missing.total(), total, "; ".join(reason for reason, _ in reasons[:3]))  # fmt: skip
    return found


def _score(scorer: ConversationScorer, examples: Sequence[EvalExample]) -> Iterator[ScoredExample]:
    groups = score_groups(scorer, [example.conversations for example in examples], on_error="mask")
    for example, own in zip(examples, groups, strict=True):
        yield ScoredExample(
            example,
            scores=tuple(score.score for score in own),
            lengths=tuple(completion_length(one, "characters", None) for one in example.conversations),
            num_tokens=tuple(score.num_tokens for score in own),
            errors=tuple(score.error for score in own),
            heads=_kept_heads(example, own),
        )


def _kept_heads(example: EvalExample, scores: Sequence[Score]) -> tuple[dict[str, float], ...]:
    grades = example.suite_data.get("attributes", {})
    kept = tuple(
        {name: value for name, value in own if name in grades or score.spread is not None}
        for score in scores
        for own in [zip(score.head_names, score.heads, strict=False)]
    )
    return kept if any(kept) else ()


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
