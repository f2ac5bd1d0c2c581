"""`run_evaluation`: models on suites, from loading to the report; what `treeward eval` calls.

    def load() -> tuple[Scorer, dict[str, Any]]:
        scorer = Scorer.load("results/rm/final")
        return scorer, scorer_identity(scorer, "results/rm/final")

    suites = [(get_suite("llmbar"), None)]
    summaries, path = run_evaluation([Candidate("rm", load)], suites, Path("results/eval"))

The suites are read once, and one model is in memory at a time. Rows are kept as they are scored, so
an interrupted evaluation goes on where it stopped. The report is of the models and suites of the
call.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treeward.data.preference import Preference
from treeward.errors import ConfigError, DataError
from treeward.evaluation.diagnostics.components import components_of
from treeward.evaluation.diagnostics.perturbations import (
    diagnose_perturbations,
    perturbed,
    sample_examples,
)
from treeward.evaluation.diagnostics.rewrites import FORMAT_VERSION, rewrites_of
from treeward.evaluation.findings import Summary, summarize
from treeward.evaluation.page import write_results
from treeward.evaluation.results import (
    ScoredExample,
    judge_usage,
    score_examples,
    scored_from_row,
    to_row,
)
from treeward.evaluation.suites.interface import Suite
from treeward.resumable import resumable_rows
from treeward.scoring.score import ConversationScorer, GroupScorer

logger = logging.getLogger(__name__)

Identity = Mapping[str, Any]
Progress = Callable[[str, int, int], None]
"""Receives the task, how much of it is done, and how much there is; 0 where that is not known."""

_EXAMPLES_AT_ONCE = 64
_REWRITTEN_AT_ONCE = 16  # each has a completion for every rewrite


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model to be evaluated.

    `name`: its folder of rows and its name in the report. `load`: returns the scorer and its
    identity, everything that a kept row depends on besides the example (`scorer_identity`); called
    when its turn comes, so that one model is in memory at a time. `note`: what a reader of the
    report must know of its scores, such as a shaping.
    """

    name: str
    load: Callable[[], tuple[ConversationScorer | GroupScorer, Identity]]
    note: str | None = None


def run_evaluation(
    candidates: Sequence[Candidate],
    suites: Sequence[tuple[Suite, str | None]],
    output: Path | None = None,
    *,
    limit: int | None = None,
    num_perturbations: int | None = None,
    rewrites: Sequence[str] = rewrites_of("usual"),
    on_progress: Progress = lambda what, done, total: None,
) -> tuple[list[Summary], Path | None]:
    """Score every suite (with its source, None for the hub) with every model, and write the
    results.

    Returns for each model in turn a summary of each suite, and the report's path, if any.

    `output`: the folder of rows, results.json and the report; None writes nothing. `limit`: most
    examples of each suite, the first. `num_perturbations`: most examples of each suite whose
    completions are rewritten; None rewrites none. `rewrites`: by which, names of `REWRITES`.

    Raises `ConfigError` for two candidates or suites of one name, `DataError` for a suite that
    cannot be read or is empty and for files that cannot be written, and `CheckpointError` for rows
    of another model or of other data. An error of a later candidate is raised after the results of
    those before it are written.
    """
    models = [candidate.name for candidate in candidates]
    suite_names = [suite.name for suite, _ in suites]
    fixes = {
        "models": "{name: ..., model: ...} gives a model a name of its own",
        "suites": "evaluate files of one name one after the other, or rename one",
    }
    for what, names in (("models", models), ("suites", suite_names)):
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"there are no {what}, or two of one name",
                got=names,
                need="different names",
                fix=fixes[what],
            )
    loaded = [_load_suite(suite, source, limit) for suite, source in suites]
    notes = [f"{candidate.name}: {candidate.note}" for candidate in candidates if candidate.note]
    summaries: list[Summary] = []
    for number, candidate in enumerate(candidates):
        try:
            summaries += _evaluate(
                candidate, loaded, output, num_perturbations, rewrites, on_progress
            )
        except Exception:
            # Those before it may have taken hours, or a judge's requests: their results are written
            # first.
            if summaries and output is not None:
                missing = ", ".join(models[number:])
                notes.append(f"missing, after an error: {missing}")
                path = write_results(output, summaries, subtitle="; ".join(notes))
                logger.warning("%s has the complete results; it lacks %s.", path, missing)
            raise
    if output is None:
        return summaries, None
    logger.info("Writing the report.")
    return summaries, write_results(output, summaries, subtitle="; ".join(notes))


@dataclass(frozen=True, slots=True)
class _LoadedSuite:
    """A suite with its examples; `digest` identifies all that it has, whatever the limit, in their
    order, and `columns_digest` what environments read beside the conversations."""

    suite: Suite
    examples: tuple[Preference, ...]
    digest: str
    columns_digest: str


def _load_suite(suite: Suite, source: str | None, limit: int | None) -> _LoadedSuite:
    """Read a suite from a source, None for the hub, and keep its first `limit` examples."""
    logger.info("Reading %s.", suite.name if source is None else f"{suite.name} from {source}")
    taken: dict[str, int] = {}  # how many examples have each id
    examples = []
    for example in suite.load(source):
        name = example.id
        # The second example of an id becomes `id#2`, and so on; data may have such an id too.
        while name in taken:
            taken[example.id] += 1
            name = f"{example.id}#{taken[example.id]}"
        taken[name] = 1
        examples.append(replace(example, id=name))
    if not examples:
        raise DataError(
            "the suite has no examples", where=source or suite.name, need="at least one"
        )
    # The digest is of all examples: the rows of one limit are of use to another.
    digest = hashlib.sha256()
    columns_digest = hashlib.sha256()
    for example in examples:
        completions = [
            (completion.rank, completion.messages, completion.grades)
            for completion in example.completions
        ]
        parts: list[Any] = [example.id, example.task_name, example.context, completions]
        # Tools and further variables are a part of what the model reads.
        if example.template_kwargs:
            parts.append(dict(example.template_kwargs))
        digest.update(json.dumps(parts, sort_keys=True, default=str).encode() + b"\n")
        columns = json.dumps(example.info, sort_keys=True, default=str)
        columns_digest.update(columns.encode() + b"\n")
    kept = tuple(examples[:limit])
    return _LoadedSuite(suite, kept, digest.hexdigest(), columns_digest.hexdigest())


def _evaluate(
    candidate: Candidate,
    suites: Sequence[_LoadedSuite],
    output: Path | None,
    num_perturbations: int | None,
    rewrites: Sequence[str],
    on_progress: Progress,
) -> list[Summary]:
    """One model on all suites. The model is gone when this returns."""
    scorer, identity = candidate.load()
    summaries = []
    for loaded in suites:
        suite = loaded.suite
        what = f"{candidate.name} on {suite.name}"
        # A row that was kept is valid for this model on this data, and for nothing else.
        full_identity = {**identity, "examples": loaded.digest}
        if isinstance(scorer, GroupScorer):
            full_identity["content of the columns"] = loaded.columns_digest
        folder = None if output is None else output / candidate.name / suite.name
        rows_file = None if folder is None else folder / "examples.jsonl"
        started = time.perf_counter()
        num_tokens_before = _num_computed_tokens(scorer)
        scored = score_rows(scorer, loaded.examples, what, rows_file, full_identity, on_progress)
        usage = {
            "num_prompt_tokens": _num_computed_tokens(scorer) - num_tokens_before,
            "seconds": time.perf_counter() - started,
        }
        components = None
        if isinstance(scorer, GroupScorer):
            usage = judge_usage(scorer, scored)
            components = components_of(scored)
        perturbations = None
        sampled = sample_examples(loaded.examples, num_perturbations or 0)
        if sampled:
            rewritten_file = None if folder is None else folder / "perturbations.jsonl"
            rewritten = score_rows(
                scorer,
                [perturbed(example, rewrites) for example in sampled],
                f"{what}, rewritten",
                rewritten_file,
                {
                    "set of rewrites": ", ".join(rewrites),
                    "version of rewrites": FORMAT_VERSION,
                    **full_identity,
                },
                on_progress,
                _REWRITTEN_AT_ONCE,
            )
            perturbations = diagnose_perturbations(sampled, rewritten, rewrites)
        elif num_perturbations is not None:  # an evaluation of hours goes on
            logger.warning(
                "%s: no example has a better and a worse completion of text, so none is rewritten.",
                suite.name,
            )
        logger.info("Computing the numbers of %s.", what)
        summary = summarize(
            suite,
            scored,
            candidate.name,
            perturbations=perturbations,
            components=components,
            usage=usage,
        )
        summaries.append(summary)
    return summaries


def _num_computed_tokens(scorer: ConversationScorer | GroupScorer) -> int:
    """Those of reward models; an environment counts what it uses by itself."""
    if isinstance(scorer, GroupScorer):
        return 0
    return scorer.num_computed_tokens


def score_rows(
    scorer: ConversationScorer | GroupScorer,
    examples: Sequence[Preference],
    what: str,
    path: Path | None,
    identity: Identity,
    on_progress: Progress,
    at_once: int = _EXAMPLES_AT_ONCE,
) -> tuple[ScoredExample, ...]:
    """The examples as a model scores them, in order; those that the file at `path` keeps are not
    scored again, and the log tells how many have no score. `what`: the task of `on_progress`."""
    total = len(examples)
    by_id = {example.id: example for example in examples}
    with resumable_rows(path, identity, scored_from_row) as rows:
        # A larger limit may have kept more.
        scored_by_id = {}
        for scored in rows.kept:
            example = by_id.get(scored.example.id)
            if example is not None:
                # The suite's own has what a row does not keep: its `info`.
                scored_by_id[example.id] = replace(scored, example=example)
        if scored_by_id:
            logger.info("%s: %d of %d examples were scored before.", what, len(scored_by_id), total)
        on_progress(what, len(scored_by_id), total)
        remaining = [example for example in examples if example.id not in scored_by_id]
        if remaining and not isinstance(scorer, GroupScorer):
            # A model's scores depend on the examples beside them, by rounding. The chunk that an
            # earlier run began is scored whole, so that the rows are those of a run that was never
            # interrupted. What an environment rewards is paid for, as a judge's requests, and is
            # not asked for again.
            num_begun = len(scored_by_id) % at_once
            kept_ids = list(scored_by_id)
            begun = [by_id[id] for id in kept_ids[len(kept_ids) - num_begun :]]
            remaining = begun + remaining
        for start in range(0, len(remaining), at_once):
            chunk = remaining[start : start + at_once]
            for scored in score_examples(scorer, chunk, at_once):
                if scored.example.id in scored_by_id:
                    continue
                rows.add(to_row(scored))
                scored_by_id[scored.example.id] = scored
            # It may stop the evaluation: all that is scored is kept.
            on_progress(what, len(scored_by_id), total)
    scored_examples = tuple(scored_by_id[example.id] for example in examples)
    # Each failed example has one reason here, so their total is the number of examples.
    reasons: Counter[str] = Counter()
    for scored in scored_examples:
        if scored.failed:
            first = next(filter(None, scored.errors), "no reason is known")
            reasons[first] += 1
    if reasons:
        named = "; ".join(reason for reason, _ in reasons.most_common(3))
        message = "%s: %d of %d examples have no score (%s)."
        logger.warning(message, what, reasons.total(), total, named)
    return scored_examples
