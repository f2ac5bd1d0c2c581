"""`run_evaluation`: models on suites, from loading to the report; what `treeward eval` and the end of training call.

    def load() -> tuple[Scorer, str]:
        scorer = Scorer.load("results/rm/final")
        return scorer, scorer_identity(scorer, "results/rm/final")

    done = run_evaluation([Candidate("rm", load)], [(get_suite("llmbar"), None)], Path("results/eval"))
    done.summaries[0].result.headline, done.path

The suites are read once, and one model is in memory at a time. Rows are kept as they are scored (see
`treeward.evaluation.running`), those of rewritten replies too, so an evaluation that was interrupted goes on where it
stopped when it is called again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treeward.config.data import DatasetConfig
from treeward.data.datasets import open_dataset
from treeward.data.preference import Preference
from treeward.errors import ConfigError, DataError
from treeward.evaluation.diagnostics.overlap import OverlapDiagnostics, find_overlap
from treeward.evaluation.diagnostics.perturbations import (
    PerturbationDiagnostics,
    diagnose_perturbations,
    sample_examples,
)
from treeward.evaluation.drift import SuiteDrift, find_drift
from treeward.evaluation.running import LoadedSuite, Progress, ScoredSuite, load_suites, score_suite, scorer_settings
from treeward.evaluation.suites.interface import Suite
from treeward.evaluation.summary import Summary, summarize, write_results
from treeward.scoring.ensemble import EnsembleScorer
from treeward.scoring.rewarding import RewardScorer
from treeward.scoring.score import ConversationScorer
from treeward.scoring.scorer import Scorer

__all__ = ["Candidate", "Evaluated", "run_evaluation", "scorer_identity"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to be evaluated.

    `name`: its folder of rows and its name in the report. `load`: gives the scorer and its identity, which is what a
    kept row depends on besides the example (`scorer_identity`); called when its turn comes, so that one model is in
    memory at a time. `published_name`: as published result files call it; None is `name`. `note`: what a reader of the
    report must know of its scores, as that they are shaped rewards. `in_drift`: False for a model that is none of the
    checkpoints that are compared with each other.
    """

    name: str
    load: Callable[[], tuple[ConversationScorer, str]]
    published_name: str | None = None
    note: str | None = None
    in_drift: bool = True


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What an evaluation found: for each model in turn a summary of each suite, and the file to look at.

    `path`: report.html, or results.json where no report is written; None where nothing is. `drift`: between
    checkpoints, suite by suite. `unread`: suites that are left out because they cannot be read, and why.
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
    on_progress: Progress | None = None,
    skip_unreadable: bool = False,
) -> Evaluated:
    """Score every suite (with where it comes from, None for the hub) with every model, and write what was found.

    `output`: where rows, results.json and the report go; None writes nothing. `limit`: most examples of each suite, the
    first. `num_perturbations`: most examples of each suite whose replies are rewritten; None rewrites none.
    `training_data`: what is looked for in the suites. `drift`: the candidates are checkpoints of one run, in order.
    `report`: False writes results.json only. `on_progress`: told what is done, of each step that takes long.
    `skip_unreadable`: a suite that cannot be read is left out, and said to be, as long as another can be.

    Raises `ConfigError` for two candidates or suites of one name, `DataError` for a suite that cannot be read or is
    empty and for what cannot be written, and `CheckpointError` for rows of another model or of other data. What stops
    a later candidate is raised when the results of those before it are written.
    """
    _check_names(candidates)
    loaded, unread = _load_suites(suites, limit, skip_unreadable)
    # Before any model is loaded: training data that cannot be read is told at once.
    overlaps = {one.suite.name: _overlap(one, training_data, on_progress) for one in loaded} if training_data else {}
    writing = _Writing(output, report, [f"{name} is missing, it could not be read: {why}" for name, why in unread])
    summaries: list[Summary] = []
    limits: dict[str, str | None] = {}
    names = [candidate.name for candidate in candidates]
    for number, candidate in enumerate(candidates):
        try:
            logger.info("Loading %s.", candidate.name)
            scorer, identity = candidate.load()
            limits[candidate.name] = scorer_settings(scorer).get("max_length")
            folder = None if output is None else _rows_folder(output, candidate.name, identity, names)
            own = []
            for one in loaded:
                scored = score_suite(scorer, one, candidate.name, output, identity, on_progress, folder_name=folder)
                _write_published(scored, candidate.published_name or candidate.name)
                perturbed = None
                if num_perturbations is not None:
                    perturbed = _perturbations(scorer, one, scored, identity, num_perturbations, on_progress)
                logger.info("Working out the numbers of %s on %s.", candidate.name, one.suite.name)
                own.append(summarize(scored, perturbations=perturbed, overlap=overlaps.get(one.suite.name)))
            summaries += own
            del scorer  # before the next one is loaded
        except Exception:
            writing.what_is_complete(summaries, candidates[:number], names[number:])
            raise
    _tell_unlike_limits(summaries, limits)
    compared = {candidate.name for candidate in candidates if candidate.in_drift}
    if drift:
        logger.info("Comparing the checkpoints.")
    found = find_drift([one for one in summaries if one.model in compared]) if drift else []
    return Evaluated(summaries, writing.write(summaries, candidates, found), found, unread=dict(unread))


def _load_suites(
    suites: Sequence[tuple[Suite, str | None]], limit: int | None, skip_unreadable: bool
) -> tuple[list[LoadedSuite], list[tuple[str, str]]]:
    """The suites that can be read, and of each other one its name and why not. Raises the first error if none can."""
    errors: list[tuple[str, DataError]] = []
    skip = (lambda suite, error: errors.append((suite.name, error))) if skip_unreadable else None
    loaded = load_suites(suites, limit, on_unreadable=skip)
    if errors and not loaded:
        raise errors[0][1]
    return loaded, [(name, " ".join(str(error).split())) for name, error in errors]


def _rows_folder(output: Path, name: str, identity: str, names: Sequence[str]) -> str:
    """The name of a candidate's folder in `output`: its own, or that of its rows by a longer or a shorter name.

    What else was on the command line decides how much of a model's path its name has: rows of `b` are those of `runs-b`
    when a further `b` was evaluated with it.
    """
    if (output / name).exists() or not output.is_dir():
        return name
    for folder in sorted(output.iterdir()):
        related = folder.name.endswith(f"-{name}") or name.endswith(f"-{folder.name}")
        if related and folder.name not in names and identity in _identities(folder):
            logger.info("The rows of %s are those in %s.", name, folder)
            return folder.name
    return name


def _identities(folder: Path) -> list[str]:
    """Of which models a folder has rows; what cannot be read is none."""
    found = []
    for file in folder.glob("*/evaluation.json"):
        try:
            found.append(str(json.loads(file.read_text(encoding="utf-8"))["model"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


@dataclass(frozen=True, slots=True)
class _Writing:
    """Where results go, whether with a report, and what their reader must know whichever models they are of."""

    output: Path | None
    report: bool
    notes: Sequence[str]

    def write(
        self,
        summaries: Sequence[Summary],
        candidates: Sequence[Candidate],
        drift: Sequence[SuiteDrift] = (),
        more: Sequence[str] = (),
    ) -> Path | None:
        if self.output is None:
            return None
        notes = [f"{candidate.name}: {candidate.note}" for candidate in candidates if candidate.note]
        subtitle = "; ".join([*notes, *self.notes, *more])
        logger.info("Writing the %s.", "report" if self.report else "results")
        return write_results(self.output, summaries, report=self.report, drift=drift, subtitle=subtitle)

    def what_is_complete(
        self, summaries: Sequence[Summary], candidates: Sequence[Candidate], missing: Sequence[str]
    ) -> None:
        """Of the models before that which an error has stopped; the error is raised by the caller."""
        if not summaries or self.output is None:
            return
        gone = ", ".join(missing)
        try:
            path = self.write(summaries, candidates, more=[f"missing, after an error: {gone}"])
        except DataError as error:
            logger.warning("The results of the models that are complete cannot be written: %s", error)
            return
        logger.warning("%s has what is complete; it lacks %s.", path, gone)


def _tell_unlike_limits(summaries: Sequence[Summary], limits: Mapping[str, str | None]) -> None:
    """Warn where a suite's numbers stand side by side though one model could not read what another could."""
    for suite in dict.fromkeys(summary.suite for summary in summaries):
        own = [summary for summary in summaries if summary.suite == suite]
        missing = {summary.model: summary.result.num_failed for summary in own}
        if len(set(missing.values())) < 2:
            continue
        parts = [
            f"{model} {count}" + (f" (reads {limits[model]} tokens)" if limits.get(model) else "")
            for model, count in missing.items()
        ]
        logger.warning(
            "%s: the models lack scores of different numbers of examples, which count as wrong: %s. `treeward compare` "
            "says where they differ.", suite, ", ".join(parts),
        )  # fmt: skip


def scorer_identity(scorer: ConversationScorer, name: str) -> str:
    """What the scores of a scorer depend on besides the conversation, as a text of one line.

    `name`: of the model; it stands for the weights of a model that has no scoring contract, and for all there is to
    know of a scorer that is not one of treeward's. The members of an ensemble have names of their own.
    """
    if isinstance(scorer, RewardScorer):
        section = scorer.shaper.config
        constants = _calibration(scorer.scorer) if section.uses_calibration else None
        shaping = {"section": section.model_dump(mode="json"), "constants": constants}
        return f"{scorer_identity(scorer.scorer, name)} shaped {_digest(shaping)}"
    if isinstance(scorer, EnsembleScorer):
        settings = {
            "members": [scorer_identity(*pair) for pair in zip(scorer.members, scorer.names, strict=True)],
            "section": scorer.config.model_dump(mode="json"),
            "calibrations": [_calibration(member) for member in scorer.members],
        }
        return f"ensemble {_digest(settings)}"
    if not isinstance(scorer, Scorer):
        return name
    contract = name if scorer.contract is None else scorer.contract.scores_sha256
    return f"{contract} as {_digest([scorer.renderer.fingerprint, scorer.head_weights, str(scorer.model.hf.dtype)])}"


def _calibration(scorer: ConversationScorer) -> object:
    """The constants of a model's contract, without where they come from."""
    contract = scorer.contract if isinstance(scorer, Scorer) else None
    known = None if contract is None else contract.calibration
    return None if known is None else known.model_dump(mode="json", exclude={"provenance"})


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _check_names(candidates: Sequence[Candidate]) -> None:
    names = [candidate.name for candidate in candidates]
    if not names:
        raise ConfigError("there is no model to evaluate", got="no candidates", need="one at least")
    if len(set(names)) < len(names):
        raise ConfigError("two models have one name", got=names, need="different names: they are those of folders")


def _overlap(
    loaded: LoadedSuite, training_data: Sequence[DatasetConfig], on_progress: Progress | None
) -> OverlapDiagnostics:
    names = ", ".join(config.name or config.data_path or config.dataset_name for config in training_data)
    logger.info("Looking for the examples of %s in %s.", loaded.suite.name, names)
    done = 0

    def progress(since: int) -> None:
        nonlocal done
        done += since
        if on_progress is not None:
            on_progress(f"training data, for {loaded.suite.name}", done, 0)

    return find_overlap(loaded.examples, _preferences(training_data), on_progress=progress)


def _preferences(training_data: Sequence[DatasetConfig]) -> Iterator[Preference]:
    for config in training_data:
        for preference, _ in open_dataset(config):
            yield preference


def _perturbations(
    scorer: ConversationScorer,
    loaded: LoadedSuite,
    scored: ScoredSuite,
    identity: str,
    num_examples: int,
    on_progress: Progress | None,
) -> PerturbationDiagnostics | None:
    what = f"{scored.model} on {loaded.suite.name}, rewritten"
    total = len(sample_examples(loaded.examples, num_examples))
    if not total:
        # An evaluation of hours is not given up for a suite that has no pair of texts; the report lacks the part.
        logger.warning(
            "%s: no example has a better and a worse reply of text, so none is rewritten.", loaded.suite.name
        )
        return None
    done = 0

    def progress(since: int) -> None:
        nonlocal done
        done += since
        if on_progress is not None:
            on_progress(what, done, total)

    return diagnose_perturbations(
        scorer,
        loaded.examples,
        num_examples=num_examples,
        folder=scored.folder,
        identity={"model": identity, "examples": loaded.digest},
        on_progress=progress,
    )


def _write_published(scored: ScoredSuite, model: str) -> None:
    """The suite's own result files, beside the rows."""
    if scored.folder is None:
        return
    for path, content in scored.suite.published_files(scored.examples, model).items():
        file = scored.folder / "published" / path
        lines, indent = (content, None) if path.endswith(".jsonl") else ([content], 2)
        text = "".join(json.dumps(line, ensure_ascii=False, indent=indent) + "\n" for line in lines)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise DataError("the published files cannot be written", where=str(file), got=str(error)) from error
