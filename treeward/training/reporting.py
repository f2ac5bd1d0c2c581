"""The report of a run: an evaluation of its exported model on the validation sets and on suites.

    check_report(config)                        # before anything slow: names and folders of suites, the report's folder
    plan = plan_report(setup, outcome.model_folder)
    report = plan.write(should_stop=lambda: stop.reason)
    report.path, report.error, report.stopped_by

The exported folder is loaded as any user loads it; the accuracies are those that validation printed. Rows are kept as
`treeward eval` keeps them, so the same command continues an interrupted report. A complete report is left as it is.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treeward.config.data import DatasetConfig
from treeward.config.run import RewardModelRunConfig
from treeward.data.encoding import Comparison, EncodedDataset
from treeward.data.rendering import Renderer
from treeward.errors import CheckpointError, ConfigError, DataError, TreewardError
from treeward.evaluation.examples import EvalExample, ScoredExample
from treeward.evaluation.findings import length_finding
from treeward.evaluation.parts import with_notes
from treeward.evaluation.results import Metric, SuiteResult
from treeward.evaluation.running import folder_names
from treeward.evaluation.session import Candidate, Evaluated, run_evaluation, scorer_identity
from treeward.evaluation.suites import PreferenceSuite, Suite, get_suite
from treeward.model.contract import read_contract
from treeward.progress import ShownProgress
from treeward.scoring.scorer import Scorer
from treeward.storage import write_text
from treeward.training.setup import RewardModelSetup

__all__ = ["Report", "ReportPlan", "ReportedSet", "ValidationSuite", "check_report", "plan_report", "report_findings"]
__all__ += ["reported_sets"]

logger = logging.getLogger(__name__)

_PAGE, _NUMBERS, _MARK = "report.html", "results.json", "report_of.json"
_OF_A_REPORT = {"suites", "perturbations", "look_for_training_data", "limit"}
_ADVICE = (
    "The model is whole. The same command as for training tries the report again and keeps the rows that were scored."
)


@dataclass(frozen=True, slots=True)
class Report:
    """The page at `path`; `error` if it is missing, or lacks the suites that the error names; or the signal or deadline
    that stopped it.
    """

    path: Path | None = None
    error: str | None = None
    stopped_by: str | None = None


def report_folder(config: RewardModelRunConfig) -> Path:
    """The folder of the report and its rows."""
    return Path(config.evaluation.output or Path(config.checkpointing.checkpoint_dir) / "report")


def check_report(config: RewardModelRunConfig) -> None:
    """Check, before training, that the report can be written at the end, if the configuration wants one.

    Raises `ConfigError` for a suite that does not exist or has the name of another, for a suite's folder that is not
    there, and for a folder of the report that is not this run's; `DataError` for a suite's folder that cannot be read.
    A suite that the hub does not give causes a warning: the hub may give it when the run ends.
    """
    if not config.evaluation.enabled:
        return
    names = [str(dataset.name) for dataset in config.data.validation]
    for suite, source in _named_suites(config):
        if suite.name in names:
            raise ConfigError(
                "two sets of the report have one name",
                field="evaluation.suites",
                got=[*names, suite.name],
                need="suites named once, and validation sets with other names",
            )
        names.append(suite.name)
        if source is None:
            _look_for(suite)
        else:
            if not Path(source).exists():
                raise ConfigError(
                    "the folder of a suite is not there",
                    field="evaluation.suites",
                    got=f"{suite.name}={source}",
                    need="a folder or file in the suite's published schema",
                )
            suite.load(source)  # seconds now, or an error after days
    folder = report_folder(config)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _MARK).exists():
        raise ConfigError(
            "the folder of the report holds something else",
            where=str(folder),
            field="evaluation.output",
            need="a new folder, or that of this run's report",
            fix="set evaluation.output, or move the folder away",
        )


def _look_for(suite: Suite) -> None:
    logger.info("Looking for the suite %s on the hub, or among what was downloaded before.", suite.name)
    try:
        suite.load(None)
    except DataError as error:
        logger.warning(
            "The suite %s cannot be had now (%s). The run trains all the same, and looks for the suite again at its "
            "end; from a copy: evaluation.suites=[%s=FOLDER].", suite.name, error.got or error.summary, suite.name,
        )  # fmt: skip


def plan_report(setup: RewardModelSetup, model: Path) -> ReportPlan:
    """The report of a finished run: its validation sets, as validation measures them, and its suites."""
    config = setup.config
    sets = [
        ValidationSuite(
            dataset,
            setup.validation_sets[str(dataset.name)],
            setup.renderer,
            setup.validation_limit,
            caveat=_caveat(setup, str(dataset.name)),
        )
        for dataset in config.data.validation
    ]
    return ReportPlan(config, model, (*((one, None) for one in sets), *_named_suites(config)))


def _caveat(setup: RewardModelSetup, name: str) -> str | None:
    """Why the numbers of a validation set may be better than those of new data."""
    parts = []
    if setup.choice is not None and setup.choice.among_several and name in setup.choice.sets:
        parts.append(setup.choice.caveat)
    if count := setup.num_trained_on.get(name):
        size = setup.validation_sizes[name]
        parts.append(f"{count:,} of its {size:,} comparisons are in the training data too, word for word.")
    return " ".join(parts) or None


@dataclass(frozen=True, slots=True)
class ReportPlan:
    """A report on the exported `model`. It holds no weights, so the memory of the run's model can be freed."""

    config: RewardModelRunConfig
    model: Path
    suites: tuple[tuple[Suite, str | None], ...]

    @property
    def name(self) -> str:
        """The name of the model, as in `treeward eval`: with the folder of its run, because every run has a `final`."""
        model = str(self.model.resolve())
        return re.sub(r"[^\w.-]+", "-", folder_names([model])[model])

    def write(self, *, should_stop: Callable[[], str | None], show_progress: bool = True) -> Report:
        """Evaluate the model and write the report, unless it is there. Failures are logged and returned, not raised.

        A suite that cannot be read is missing from the report. `should_stop` is called all the time; a reason ends the
        evaluation, and the rows stay.
        """
        folder = report_folder(self.config)
        if (reason := should_stop()) is not None:
            return Report(stopped_by=reason)
        try:
            if self._is_complete(folder):
                return Report(folder / _PAGE)
            self._claim(folder)
            logger.info("Evaluating %s on %s.", self.model, ", ".join(suite.name for suite, _ in self.suites))
            with ShownProgress(lambda: _raise_if(should_stop()), enabled=show_progress, leave=False) as shown:
                done = self._evaluate(folder, shown.show)
            return self._report_of(folder, done)
        except _Stopped as stopped:
            return Report(stopped_by=str(stopped))
        except Exception as error:  # the model is exported, and no later failure may hide that
            expected = isinstance(error, (TreewardError, OSError))
            logger.error("There is no report: %s\n%s", error, _ADVICE, exc_info=None if expected else error)
            return Report(error=str(error))

    def _report_of(self, folder: Path, done: Evaluated) -> Report:
        if not done.unread:
            return Report(done.path)
        self._write_mark(folder, self._mark() | {"missing": sorted(done.unread)})  # so it is tried again
        missing = f"the report lacks {', '.join(done.unread)}: {'; '.join(done.unread.values())}"
        logger.error("%s is written, and %s\n%s", done.path, missing, _ADVICE)
        return Report(done.path, error=missing)

    def _evaluate(self, folder: Path, on_progress: Callable[[str, int, int], None]) -> Evaluated:
        evaluation = self.config.evaluation

        def load() -> tuple[Scorer, Mapping[str, Any]]:
            scorer = Scorer.load(self.model, trust_remote_code=self.config.policy.trust_remote_code)
            return scorer, scorer_identity(scorer, str(self.model))

        return run_evaluation(
            [Candidate(self.name, load)],
            self.suites,
            folder,
            limit=evaluation.limit,
            num_perturbations=evaluation.perturbations,
            training_data=self.config.data.train if evaluation.look_for_training_data else (),
            on_progress=on_progress,
            skip_unreadable=True,
        )

    def _mark(self) -> dict[str, Any]:
        """The model, the examples and the settings that the rows and the report belong to."""
        contract = read_contract(self.model)
        assert contract is not None  # it was exported with one
        evaluation = self.config.evaluation
        sizes = {one.name: one.size for one, _ in self.suites if isinstance(one, ValidationSuite)}
        return {
            "rows": {"model": contract.scores_sha256, "validation": sizes},
            "report": evaluation.model_dump(mode="json", include=_OF_A_REPORT),
        }

    def _is_complete(self, folder: Path) -> bool:
        return (folder / _PAGE).exists() and _read_mark(folder) == self._mark()

    def _claim(self, folder: Path) -> None:
        """Prepare the folder; rows and report of an earlier model or of other settings of the run are removed."""
        mark, before = self._mark(), _read_mark(folder)
        if before.get("rows") not in (None, mark["rows"]):
            logger.info("The rows in %s are of an earlier model of this run or of other examples; made anew.", folder)
            shutil.rmtree(folder / self.name, ignore_errors=True)
        for name in (_PAGE, _NUMBERS):
            (folder / name).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        self._write_mark(folder, mark)

    def _write_mark(self, folder: Path, mark: Mapping[str, Any]) -> None:
        write_text(folder / _MARK, json.dumps(mark, indent=2) + "\n")


class ValidationSuite(PreferenceSuite):
    """The comparisons that validation measures, so that the accuracies agree (to rounding; a model that trains in
    bfloat16 is evaluated in float32).

    The comparisons and completions that the encoding has left out (too long, ties, identical tokens) are left out here
    too; `limit` is the number of comparisons that validation measures. `caveat`: a sentence beside the verdict.
    """

    title = ""  # its name is its title

    def __init__(
        self,
        config: DatasetConfig,
        encoded: EncodedDataset,
        renderer: Renderer,
        limit: int | None,
        *,
        caveat: str | None = None,
    ) -> None:
        super().__init__(str(config.name), config)
        self.caveat = caveat
        self.encoded, self.renderer = encoded, renderer
        self.size = len(encoded) if limit is None else min(limit, len(encoded))

    def load(self, source: str | None = None) -> list[EvalExample]:
        """The examples, in the order of the data; ids are the rows' numbers. Raises `DataError` for data that has
        changed since the run read it."""
        rows = iter(super().load(source))
        examples = []
        for i in range(self.size):
            comparison = self.encoded[i]
            example = next((one for one in rows if one.where == comparison.where), None)
            if example is None or len(example.completions) < len(comparison.ranks):
                raise DataError(
                    "the validation set is not what the run has read",
                    where=comparison.where,
                    got="other rows",
                    need="the data as it was when the run was set up",
                )
            examples.append(self._as_measured(example, comparison))
        return examples

    def _as_measured(self, example: EvalExample, comparison: Comparison) -> EvalExample:
        if len(example.completions) == len(comparison.ranks):
            return example
        firsts: dict[tuple[int, ...], int] = {}
        for i, conversation in enumerate(example.conversations):
            fitted = self.renderer.fit(conversation, where=example.where)
            assert fitted is not None  # the comparison was kept
            firsts.setdefault(tuple(fitted.token_ids), i)
        kept = list(firsts.values())
        data = dict(example.suite_data)
        if "grades" in data:
            data["grades"] = [data["grades"][i] for i in kept]
        completions = tuple(example.completions[i] for i in kept)
        return replace(example, completions=completions, ranks=comparison.ranks, suite_data=data)

    def _compute(self, scored: Sequence[ScoredExample]) -> SuiteResult:
        result = super()._compute(scored)
        counts, notes = self.encoded.counts, []
        if counts.kept < counts.read:
            notes.append(f"As in training, {counts.read - counts.kept:,} of {counts.read:,} comparisons are left out.")
        if self.size < counts.kept:
            notes.append(f"As in validation, only the first {self.size:,} of {counts.kept:,} are measured.")
        noted = with_notes(replace(result.headline, note=None), *notes, result.headline.note)
        return replace(result, headline=noted)


@dataclass(frozen=True, slots=True)
class ReportedSet:
    """The verdict of a report on one set; the sentence on length bias, None if there is little; the gap in accuracy."""

    name: str
    verdict: str
    length_finding: str | None
    gap: float


def reported_sets(report: Path) -> list[ReportedSet]:
    """The sets and suites of a run's report, in its order.

    Raises `CheckpointError` if the numbers beside the report cannot be read.
    """
    file = report.with_name(_NUMBERS)
    try:
        return [_reported(one) for one in json.loads(file.read_text(encoding="utf-8"))["results"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            "the numbers of the report cannot be read",
            where=str(file),
            got=repr(error),
            fix="remove the folder of the report; the same command writes it again",
        ) from error


def report_findings(report: Path) -> dict[str, str]:
    """The sentence on length bias for each set that has one, the largest gap first. Raises as `reported_sets`."""
    by_gap = sorted(reported_sets(report), key=lambda one: -one.gap)
    return {one.name: one.length_finding for one in by_gap if one.length_finding is not None}


def _reported(one: Mapping[str, Any]) -> ReportedSet:
    length = {metric["name"]: Metric(**metric) for metric in one["diagnostics"]["length"]}
    gap = length["accuracy_gap"].value or 0.0
    return ReportedSet(one["suite"], one["verdict"], length_finding(length, one["standing"]), abs(gap))


def _named_suites(config: RewardModelRunConfig) -> list[tuple[Suite, str | None]]:
    try:
        return [(get_suite(name), source) for name, source in config.evaluation.named_suites]
    except ConfigError as error:
        field = "evaluation.suites"
        raise ConfigError(error.summary, field=field, got=error.got, need=error.need, fix=error.fix) from error


def _read_mark(folder: Path) -> Mapping[str, Any]:
    try:
        mark = json.loads((folder / _MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return mark if isinstance(mark, dict) else {}


class _Stopped(Exception):
    """The reason for which the report was stopped."""


def _raise_if(reason: str | None) -> None:
    if reason is not None:
        raise _Stopped(reason)
