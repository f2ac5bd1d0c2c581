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

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.errors import ConfigError, DataError
from treeward.evaluation.diagnostics.overlap import Overlap, find_overlap
from treeward.evaluation.diagnostics.perturbations import diagnose_perturbations
from treeward.evaluation.drift import SuiteDrift, find_drift
from treeward.evaluation.running import LoadedSuite, Progress, load_suite, score_suite
from treeward.evaluation.suites.interface import Suite
from treeward.evaluation.summary import Summary, summarize
from treeward.evaluation.writing import write_results
from treeward.scoring.ensemble import EnsembleScorer
from treeward.scoring.rewarding import RewardScorer
from treeward.scoring.score import ConversationScorer
from treeward.scoring.scorer import Scorer
from treeward.storage import write_text

logger = logging.getLogger(__name__)

Identity = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to be evaluated.

    `name`: its folder of rows and its name in the report. `load`: returns the scorer and its identity, everything that
    a kept row depends on besides the example (`scorer_identity`); called when its turn comes, so that one model is in
    memory at a time. `published_name`: the name in published result files; None is `name`. `note`: what a reader of the
    report must know of its scores, such as a shaping. `in_drift`: False for a model that is not one of the checkpoints
    that are compared with each other.
    """

    name: str
    load: Callable[[], tuple[ConversationScorer, Identity]]
    published_name: str | None = None
    note: str | None = None
    in_drift: bool = True


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The results of an evaluation: for each model in turn a summary of each suite, and the file to look at.

    `path`: report.html, or results.json where no report is written; None where nothing is. `drift`: between
    checkpoints, suite by suite. `unread`: suites that could not be read, and why.
    """

    summaries: list[Summary]
    path: Path | None = None
    drift: list[SuiteDrift] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)


def run_evaluation(
    candidates: Sequence[Candidate],
    suites: Sequence[tuple[Suite, str | None]],
    output: Path | None = None,
    *,
    limit: int | None = None,
    num_perturbations: int | None = None,
    training_data: Sequence[DatasetConfig] = (),
    drift: bool = False,
    report: bool = True,
    on_progress: Progress = lambda what, done, total: None,
    skip_unreadable: bool = False,
) -> Evaluated:
    """Score every suite (with its source, None for the hub) with every model, and write the results.

    `output`: the folder of rows, results.json and the report; None writes nothing. `limit`: most examples of each
    suite, the first. `num_perturbations`: most examples of each suite whose completions are rewritten; None rewrites
    none. `training_data`: data to look for in the suites. `drift`: the candidates are checkpoints of one run, in
    order. `report`: False writes results.json only. `skip_unreadable`: leave out and note a suite that cannot be read,
    as long as another can be.

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

    def write(notes: list[str], found: Sequence[SuiteDrift] = ()) -> Path | None:
        if output is None:
            return None
        logger.info("Writing the %s.", "report" if report else "results")
        return write_results(output, summaries, report=report, drift=found, subtitle="; ".join(notes))

    summaries: list[Summary] = []
    for number, candidate in enumerate(candidates):
        try:
            summaries += _evaluate(candidate, loaded, output, num_perturbations, overlaps, on_progress)
        except Exception:
            missing = ", ".join(models[number:])
            if summaries and (path := write([*notes, f"missing, after an error: {missing}"])):
                logger.warning("%s holds the complete results; it lacks %s.", path, missing)
            raise
    compared = {candidate.name for candidate in candidates if candidate.in_drift}
    found = find_drift([one for one in summaries if one.model in compared]) if drift else []
    return Evaluated(summaries, write(notes, found), found, unread)


def _evaluate(
    candidate: Candidate,
    suites: Sequence[LoadedSuite],
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
        scored = score_suite(scorer, one, candidate.name, output, identity, on_progress)
        if scored.folder is not None:
            files = one.suite.published_files(scored.examples, candidate.published_name or candidate.name)
            for name, content in files.items():
                path = scored.folder / "published" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, json.dumps(content, ensure_ascii=False, indent=2) + "\n")
        perturbations = None
        if num_perturbations is not None:
            perturbations = diagnose_perturbations(
                scorer,
                one.examples,
                candidate.name,
                num_examples=num_perturbations,
                folder=scored.folder,
                identity={**identity, "examples": one.digest},
                on_progress=partial(on_progress, f"{candidate.name} on {one.suite.name}, rewritten"),
            )
            if perturbations is None:  # an evaluation of hours goes on
                logger.warning("%s: no example has a better and a worse completion of text, so none is rewritten.",
                               one.suite.name)  # fmt: skip
        logger.info("Computing the numbers of %s on %s.", candidate.name, one.suite.name)
        summaries.append(summarize(scored, perturbations=perturbations, overlap=overlaps.get(one.suite.name)))
    return summaries


def scorer_identity(scorer: ConversationScorer, name: str) -> dict[str, Any]:
    """What the scores of a scorer depend on besides the conversation, by name; JSON.

    `name`: of the model; it stands for the weights of a model that has no scoring contract, and for everything about
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
        "model": name if scorer.contract is None else scorer.contract.scores_sha256,
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
) -> tuple[list[LoadedSuite], dict[str, str]]:
    """The suites that can be read, and why others cannot, by name. Raises the first error if none can."""
    loaded: list[LoadedSuite] = []
    errors: dict[str, DataError] = {}
    for suite, source in suites:
        try:
            loaded.append(load_suite(suite, source, limit))
        except DataError as error:
            if not skip_unreadable:
                raise
            errors[suite.name] = error
    if errors and not loaded:
        raise next(iter(errors.values()))
    return loaded, {name: " ".join(str(error).split()) for name, error in errors.items()}
