"""The report of a run: an evaluation of its exported model on the validation sets and on suites.

    check_report(config)                        # before anything slow: names and folders of suites
    report = write_report(config, outcome.model_folder, should_stop=lambda: stop.reason)

The exported folder is loaded as any user loads it. The same command continues an interrupted report; rows that were
scored are kept.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treeward.config.run import RewardModelRunConfig
from treeward.config.server import model_name
from treeward.errors import CheckpointError, ConfigError, TreewardError
from treeward.evaluation.findings import length_finding
from treeward.evaluation.results import Metric
from treeward.evaluation.session import Candidate, Evaluated, run_evaluation
from treeward.evaluation.suites import PreferenceSuite, Suite, get_suite
from treeward.progress import ShownProgress
from treeward.scoring.identity import scorer_identity
from treeward.scoring.scorer import Scorer

logger = logging.getLogger(__name__)

_NUMBERS = "results.json"
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


def write_report(
    config: RewardModelRunConfig,
    model: Path,
    *,
    should_stop: Callable[[], str | None],
    show_progress: bool = True,
) -> Report:
    """Evaluate the exported model on the validation sets and the suites, and write the report.
    Failures are logged and returned, not raised. A reason from `should_stop` ends the evaluation, and the rows stay."""
    folder = Path(config.checkpointing.checkpoint_dir) / "report"

    def stop_if_asked() -> None:
        if (reason := should_stop()) is not None:
            raise _Stopped(reason)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("report.html", _NUMBERS):  # perhaps of an earlier model
            (folder / name).unlink(missing_ok=True)
        suites: list[tuple[Suite, str | None]] = []
        suites += [(PreferenceSuite(str(dataset.name), dataset), None) for dataset in config.validation_sets]
        suites += _named_suites(config)
        logger.info("Evaluating %s on %s.", model, ", ".join(suite.name for suite, _ in suites))
        with ShownProgress(stop_if_asked, enabled=show_progress, leave=False) as shown:
            return Report(_evaluate(config, model, suites, folder, shown.show).path)
    except _Stopped as stopped:
        return Report(stopped_by=str(stopped))
    except Exception as error:  # the model is exported, and no later failure may hide that
        expected = isinstance(error, (TreewardError, OSError))
        logger.error("There is no report: %s\n%s", error, _ADVICE, exc_info=None if expected else error)
        return Report(error=str(error))


def _evaluate(
    config: RewardModelRunConfig,
    model: Path,
    suites: Sequence[tuple[Suite, str | None]],
    folder: Path,
    on_progress: Callable[[str, int, int], None],
) -> Evaluated:
    """Rows of an earlier model of the run, or of other examples, are scored again."""
    name = model_name(str(model))

    def load() -> tuple[Scorer, Mapping[str, Any]]:
        scorer = Scorer.load(model, trust_remote_code=config.policy.trust_remote_code)
        return scorer, scorer_identity(scorer, str(model))

    def evaluate() -> Evaluated:
        return run_evaluation(
            [Candidate(name, load)],
            suites,
            folder,
            num_perturbations=config.evaluation.perturbations,
            on_progress=on_progress,
        )

    try:
        return evaluate()
    except CheckpointError as error:
        logger.info("The rows in %s are of an earlier model or of other examples: made anew (%s).", folder, error)
        shutil.rmtree(folder / name)
        return evaluate()


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
