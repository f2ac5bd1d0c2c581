"""The report of a run: an evaluation of its exported model on the validation sets and on suites.

    check_report(config)                        # before anything slow: names and folders of suites, the report's folder
    report = plan_report(setup, outcome.model_folder).write(should_stop=lambda: stop.reason)

The exported folder is loaded as any user loads it. The same command continues an interrupted report; a complete one is
not repeated: `report_of.json`, empty until then, has its model and settings.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeward.config.data import DatasetConfig
from treeward.config.run import RewardModelRunConfig
from treeward.data.preference import Preference
from treeward.data.rendering import Renderer
from treeward.errors import CheckpointError, ConfigError, TreewardError
from treeward.evaluation.findings import length_finding
from treeward.evaluation.results import Metric
from treeward.evaluation.session import Candidate, Evaluated, folder_names, run_evaluation
from treeward.evaluation.suites import PreferenceSuite, Suite, get_suite
from treeward.model.contract import read_contract
from treeward.progress import ShownProgress
from treeward.scoring.identity import scorer_identity
from treeward.scoring.scorer import Scorer
from treeward.storage import write_text
from treeward.training.setup import RewardModelSetup
from treeward.training.validation import ValidationSet, as_measured

logger = logging.getLogger(__name__)

_PAGE, _NUMBERS, _MARK = "report.html", "results.json", "report_of.json"
_ADVICE = (
    "The model is whole. The same command as for training tries the report again and keeps the rows that were scored."
)


@dataclass(frozen=True, slots=True)
class Report:
    """The page at `path`; the `error` if it is missing or lacks suites; or the signal or deadline that stopped it."""

    path: Path | None = None
    error: str | None = None
    stopped_by: str | None = None


def check_report(config: RewardModelRunConfig) -> None:
    """Check, before training, that the configured report can be written at the end. Raises `ConfigError` for an unknown
    or repeated suite; `DataError` for a suite that cannot be read."""
    if not config.evaluation.enabled:
        return
    names = [str(dataset.name) for dataset in config.data.validation]
    for suite, source in _named_suites(config):
        if suite.name in names:
            need = f"another name than {', '.join(names)}"
            summary = "two sets of the report have one name"
            raise ConfigError(summary, field="evaluation.suites", got=suite.name, need=need)
        names.append(suite.name)
        suite.load(source)  # seconds now, or an error after days


def plan_report(setup: RewardModelSetup, model: Path, caveats: Mapping[str, str]) -> ReportPlan:
    """The report of a finished run. `caveats`: by set, the sentence beside its verdict."""
    suites: list[tuple[Suite, str | None]] = []
    for dataset in setup.config.validation_sets:
        held_out, caveat = setup.validation_sets[str(dataset.name)], caveats.get(str(dataset.name))
        suites.append((ValidationSuite(dataset, held_out, setup.renderer, caveat=caveat), None))
    return ReportPlan(setup.config, model, (*suites, *_named_suites(setup.config)))


@dataclass(frozen=True, slots=True)
class ReportPlan:
    """A report on the exported `model`. It holds no weights, so the memory of the run's model can be freed."""

    config: RewardModelRunConfig
    model: Path
    suites: tuple[tuple[Suite, str | None], ...]

    def write(self, *, should_stop: Callable[[], str | None], show_progress: bool = True) -> Report:
        """Evaluate the model and write the report, unless it exists. Failures are logged and returned, not raised. A
        reason from `should_stop` ends the evaluation, and the rows stay."""
        folder, mark = Path(self.config.checkpointing.checkpoint_dir) / "report", self._mark()

        def stop_if_asked() -> None:
            if (reason := should_stop()) is not None:
                raise _Stopped(reason)

        try:
            if (folder / _PAGE).exists() and (folder / _MARK).read_text(encoding="utf-8") == mark:
                return Report(folder / _PAGE)
            folder.mkdir(parents=True, exist_ok=True)
            for name in (_PAGE, _NUMBERS):
                (folder / name).unlink(missing_ok=True)
            write_text(folder / _MARK, "")
            logger.info("Evaluating %s on %s.", self.model, ", ".join(suite.name for suite, _ in self.suites))
            with ShownProgress(stop_if_asked, enabled=show_progress, leave=False) as shown:
                done = self._evaluate(folder, shown.show)
            write_text(folder / _MARK, mark)
            return Report(done.path)
        except _Stopped as stopped:
            return Report(stopped_by=str(stopped))
        except Exception as error:  # the model is exported, and no later failure may hide that
            expected = isinstance(error, (TreewardError, OSError))
            logger.error("There is no report: %s\n%s", error, _ADVICE, exc_info=None if expected else error)
            return Report(error=str(error))

    def _evaluate(self, folder: Path, on_progress: Callable[[str, int, int], None]) -> Evaluated:
        """Rows of an earlier model of the run, or of other examples, are scored again."""
        evaluation, model = self.config.evaluation, str(self.model.resolve())
        name = re.sub(r"[^\w.-]+", "-", folder_names([model])[model])

        def load() -> tuple[Scorer, Mapping[str, Any]]:
            scorer = Scorer.load(self.model, trust_remote_code=self.config.policy.trust_remote_code)
            return scorer, scorer_identity(scorer, str(self.model))

        def evaluate() -> Evaluated:
            return run_evaluation(
                [Candidate(name, load)],
                self.suites,
                folder,
                limit=evaluation.limit,
                num_perturbations=evaluation.perturbations,
                training_data=self.config.training_sets,
                on_progress=on_progress,
            )

        try:
            return evaluate()
        except CheckpointError as error:
            logger.info("The rows in %s are of an earlier model or of other examples: made anew (%s).", folder, error)
            shutil.rmtree(folder / name)
            return evaluate()

    def _mark(self) -> str:
        """The model, the examples and the settings of a complete report."""
        contract = read_contract(self.model)
        assert contract is not None  # it was exported with one
        sizes = {suite.name: suite.held_out.size for suite, _ in self.suites if isinstance(suite, ValidationSuite)}
        settings = self.config.evaluation.model_dump(mode="json", exclude={"output"})
        return json.dumps({"model": contract.scores_sha256, "validation": sizes, "evaluation": settings}, indent=2)


class ValidationSuite(PreferenceSuite):
    """The comparisons of a validation, without those and the completions that the encoding has left out, so that the
    accuracies agree (to rounding). `caveat`: a sentence beside the verdict."""

    title = ""  # its name is its title

    def __init__(
        self, config: DatasetConfig, held_out: ValidationSet, renderer: Renderer, *, caveat: str | None
    ) -> None:
        super().__init__(str(config.name), config)
        self.held_out, self.renderer, self.caveat = held_out, renderer, caveat

    def load(self, source: str | None = None) -> list[Preference]:
        """The examples, in the order of the data; ids are the rows' numbers. Raises `DataError` for data that has
        changed since the run read it."""
        comparisons = (self.held_out.comparisons[i] for i in range(self.held_out.size))
        return as_measured(super().load(source), comparisons, self.renderer)


def verdicts(report: Path) -> list[str]:
    """The verdict of a run's report on each set, and the largest length bias, if any."""
    lines, findings = [], []
    for result in json.loads(report.with_name(_NUMBERS).read_text(encoding="utf-8"))["results"]:
        length = {metric["name"]: Metric(**metric) for metric in result["diagnostics"]["length"]}
        lines.append(f"\n{result['verdict']}")
        if finding := length_finding(length, result["standing"]):
            findings.append((abs(length["accuracy_gap"].value or 0.0), f"\nOn {result['suite']}: {finding}"))
    return [*lines, *(text for _, text in sorted(findings, reverse=True)[:1])]


def _named_suites(config: RewardModelRunConfig) -> list[tuple[Suite, str | None]]:
    try:
        return [(get_suite(name), source) for name, source in config.evaluation.named_suites]
    except ConfigError as error:
        raise error.but(field="evaluation.suites") from error


class _Stopped(Exception):
    """The reason for which the report was stopped."""
