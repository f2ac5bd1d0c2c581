"""`train`: the run of a reward model. `treeward.training.loop` takes its steps, validates, saves,
stops and resumes.

    outcome = train(load_config("quickstart", []))
    outcome.model_folder      # None if it was interrupted
    outcome.validation        # {"plain": {"accuracy": 0.95, ...}, ...}

Shapes: S completions of a micro-batch, H heads; 6 sums of `GradeSums`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from torch import Tensor

from treeward import processes
from treeward.config.checkpointing import MetricKey
from treeward.config.preflight import check_packages
from treeward.config.run import HubConfig, RewardModelRunConfig
from treeward.data.encoding import Comparison
from treeward.errors import ConfigError, TreewardError
from treeward.evaluation.diagnostics.scores import scored_comparison
from treeward.evaluation.results import Metric, ScoredExample
from treeward.formatting import metric_text
from treeward.losses import METRIC_NAMES, GradeSums, Labels, RewardMetrics, RewardSums
from treeward.model.contract import read_contract
from treeward.model.export import export_model, push_folder
from treeward.parallel.sharding import sum_over_copies
from treeward.scoring.golden import hash_all, sign_exported
from treeward.scoring.score import are_equal
from treeward.step_losses import StepSums, StepTotals
from treeward.training.card import model_card
from treeward.training.features import with_features
from treeward.training.loop import Outcome, Run, StepMetrics, Validation
from treeward.training.models import save_adapted
from treeward.training.optimisation import SkippedSteps, advance
from treeward.training.prefetch import BatchPreparer, MicroBatch, Prefetcher, StepBatches
from treeward.training.session import open_session
from treeward.training.setup import RewardModelSetup, set_up
from treeward.training.state import RunState
from treeward.training.step_validation import (
    FIRST_ERROR,
    StepValidation,
    pooled_steps,
    solutions_of,
)
from treeward.training.tracking import TrackerGroup, read_metrics
from treeward.training.validation import SetValidation, learnt, metric_values, pooled
from treeward.tree.plan import backward_in_parts

logger = logging.getLogger(__name__)

_COMPARISONS_AT_ONCE = 1024
"""Planned together: as good a plan as for the whole set, with the other rows on disk."""


@dataclass(frozen=True)
class TrainingOutcome(Outcome):
    """How a run ended.

    By validation set: `validation`, its metrics; `validation_sizes`, its comparisons; `caveats`,
    what was left out of much data; `learnt`, whether it is better than chance. `is_collapsed`: the
    exported model gives everything the same score. With an `upload_error` the exit code is 1.
    """

    validation_sizes: Mapping[str, int] = field(default_factory=dict)
    caveats: Mapping[str, str] = field(default_factory=dict)
    upload_error: str | None = None
    learnt: Mapping[str, str] = field(default_factory=dict)
    is_collapsed: bool = False


def train(config: RewardModelRunConfig, *, show_progress: bool = True) -> TrainingOutcome:
    """Train a reward model as configured, resuming where an earlier run of the same configuration
    stopped. Raises a `TreewardError` for what the user can fix; the last checkpoint stands."""
    check_packages(config)
    if config.hub.push_to_hub:
        _check_hub(config.hub_repo_id)
    ranking = config.ranking_metric
    ranked_by = None
    if ranking is not None:
        ranked_by = ranking.logged_name
    with open_session(
        config, config.rm, ranked_by=ranked_by, show_progress=show_progress
    ) as session:
        setup = set_up(config, session.checkpoint, session.shows_progress)
        run_class = ProcessRun if config.policy.reward_model_cfg.learns_steps else RewardModelRun
        run = run_class(with_features(setup, session.shows_progress))
        outcome = session.run_to_end(run)
    assert isinstance(outcome, TrainingOutcome)
    return outcome


def _check_hub(repo_id: str) -> None:
    """Raise `ConfigError` for a name that the hub does not allow, and warn if nobody is logged
    in."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        summary = "the hub does not allow this name of a repository"
        raise ConfigError(summary, field="hub.repo_id", got=repo_id, need=str(error)) from error
    if get_token() is None:
        logger.warning(
            "hub.push_to_hub is true, and nobody is logged in to the hub: hf auth login, while the "
            "run lasts."
        )


class RewardModelRun(Run):
    """A `Run` of the loop: steps on comparisons, and validation on every named set."""

    def __init__(self, setup: RewardModelSetup) -> None:
        super().__init__(
            setup.optimizer,
            setup.scheduler,
            setup.identity,
            total_steps=setup.total_steps,
            validates=bool(setup.validation_sets),
            is_rounded=setup.policy.precision != "float32",
        )
        self.setup = setup
        self.model = setup.model
        self.heads = setup.heads
        self.skipped = SkippedSteps()
        self._warned_of_ranking = False
        self._metrics_file: Path | None = None
        self._preparer = BatchPreparer(setup)
        self._prefetcher = Prefetcher(self._preparer.step, num_steps=setup.total_steps)

    def begin(self, state: RunState, trackers: TrackerGroup) -> None:
        self.model.train()
        self.skipped = SkippedSteps(**state.run.get("skipped_steps", {}))
        self._metrics_file = trackers.metrics_file
        if state.step > 0:
            return  # an earlier session has logged the counts
        roles = {"train": self.setup.training_sets, "validation": self.setup.validation_sets}
        for role, sets in roles.items():
            for name, dataset in sets.items():
                counts = asdict(dataset.counts)
                logged = {f"data/{role}/{name}/{key}": value for key, value in counts.items()}
                trackers.log(logged, step=0)

    def state(self) -> dict[str, Any]:
        return {"skipped_steps": asdict(self.skipped)}

    def step(self, number: int) -> StepMetrics:
        started = time.monotonic()
        # Comparisons as trees, with their labels; a thread has made them during the last step.
        batches = self._prefetcher.get(number)
        sums = self.new_sums()
        for micro_batch in batches.micro_batches:
            # Copies of the weights on other processes exchange gradients once a step.
            is_last = micro_batch is batches.micro_batches[-1]
            sum_over_copies(self.model, is_last)
            self.backward(micro_batch, batches.num_units, sums)
        # Only here, and for the gradients' norm, the host waits for a GPU.
        total = sums.read(self.setup.mesh.data_group)
        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        grad_norm = self._update_weights(number, total)

        logged = self._logged(number, batches, total)
        logged["train/rm/lr"] = learning_rate
        logged["train/rm/grad_norm"] = grad_norm
        row_tokens = int(logged["train/rm/row_tokens"])
        logged["timing/train/row_tokens_per_second"] = row_tokens / (time.monotonic() - started)
        means = total.means()
        shown = {"loss": means["loss"]}
        # Without pairs, or steps, only the loss means anything.
        for name, label in (("accuracy", "accuracy"), ("reward_margin", "margin")):
            if math.isfinite(means.get(name, math.nan)):
                shown[label] = means[name]
        return StepMetrics(logged, shown, row_tokens)

    def new_sums(self) -> Any:
        """Empty sums of metrics, of the kind that `count` adds to."""
        return RewardSums()

    def count(self, sums: Any, values_SH: Tensor, labels: Labels, loss_sum: Tensor) -> None:
        """Add the metrics of one micro-batch to `sums`, without making the host wait."""
        sums.add(self.heads.combine(values_SH), labels.pairs, loss_sum, labels.num_units)

    def backward(self, micro_batch: MicroBatch, num_units: float, sums: Any) -> None:
        """Trees to scores to loss: add the gradient of one micro-batch, for a step of `num_units`,
        and its metrics to `sums`.

        The host never waits for a GPU here: it goes on to the next while the GPU computes.
        """
        micro_batch = micro_batch.to(self.model.device, non_blocking=True)
        labels = micro_batch.labels

        def loss(values_SH: Tensor) -> Tensor:
            return self.heads.loss(values_SH, labels)

        values_SH, loss_sum = backward_in_parts(
            [partial(self.model.heads, batch) for batch in micro_batch.batches],
            loss,
            order_S=micro_batch.order_S,
            scale=1 / num_units,
        )
        self.count(sums, values_SH, labels, loss_sum)

    def _update_weights(self, number: int, total: RewardMetrics | StepTotals) -> float:
        """Clip, step, and return the gradients' norm before clipping; NaN, and no step, where it or
        the loss is not finite. Raises `ModelError` for several such steps in a row."""
        norm = self.skipped.clip(
            self.model,
            self.setup.policy.max_grad_norm,
            total.loss_sum,
            what=f"the loss of step {number}",
            fix="start anew in another checkpointing.checkpoint_dir with a lower "
            "policy.optimizer.kwargs.lr, or in policy.precision=float32",
        )
        if math.isfinite(norm):
            self.optimizer.step()
        advance(self.scheduler)
        # None keeps Adam from a step on parameters without a gradient.
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _logged(
        self, number: int, batches: StepBatches, total: RewardMetrics | StepTotals
    ) -> dict[str, float]:
        """The metrics of a step over all processes."""
        setup = self.setup
        # These are of this process; `total` is of all of them.
        counts_2 = torch.tensor([batches.num_computed_tokens, batches.num_row_tokens])
        computed_tokens, row_tokens = processes.summed(counts_2, setup.mesh.data_group).tolist()
        episodes = setup.order.num_seen(number, setup.policy.train_global_batch_size)
        logged = {f"train/rm/{name}": value for name, value in total.means().items()}
        logged["train/rm/skipped_steps"] = self.skipped.total
        logged["train/rm/computed_tokens"] = computed_tokens
        logged["train/rm/row_tokens"] = row_tokens
        logged["episode"] = episodes
        logged["epoch"] = episodes / setup.order.rows_per_epoch
        return logged

    def validate(self, step: int, should_stop: Callable[[], str | None]) -> Validation | None:
        results: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        for name in self.setup.validation_sets:
            started = time.monotonic()
            result = self.validate_set(name, should_stop)
            if result is None:
                return None
            results[name] = result
            seconds[f"timing/validation/{name}"] = time.monotonic() - started

        overall = self.pooled(list(results.values()))
        by_set = {name: result.metrics() for name, result in results.items()}
        logged = _with_prefix("eval/rm/", metric_values(overall))
        lines = []
        for name, metrics in by_set.items():
            # Without those that could not be measured: a log has numbers alone.
            values = metric_values(metrics)
            logged |= _with_prefix(f"validation-{name}/", values)
            lines.append(_line(name, step, values, self.setup.ranking))
        ranking = self.setup.ranking
        if ranking is not None:
            ranked = overall
            if ranking.validation is not None:
                ranked = by_set[ranking.validation]
            self._warn_of_ranking(step, ranking, ranked.get(ranking.metric))
        return Validation(logged, seconds, tuple(lines))

    @torch.no_grad()
    def validate_set(self, name: str, should_stop: Callable[[], object] = lambda: None) -> Any:
        """Measure a validation set in the precision of training: a `SetValidation`; None if
        `should_stop` gave a reason on the way."""
        group = self.setup.mesh.data_group
        dataset = self.setup.validation_sets[name]
        size = len(dataset)
        sums = self.new_sums()
        grades = GradeSums()
        rank_examples: dict[int, Any] = {}
        """Of those that this process has scored, by their places in the set."""
        self.model.eval()
        try:
            for start in range(0, size, _COMPARISONS_AT_ONCE):
                end = min(start + _COMPARISONS_AT_ONCE, size)
                rows = [(dataset, i) for i in range(start, end)]
                comparisons: dict[int, Comparison] = {}
                scores: list[Tensor] = []
                for share in self._preparer.shares(rows, validation=True):
                    # All processes ask as often, because all have as many micro-batches: it is a
                    # collective call.
                    if should_stop():
                        return None
                    micro_batch = share.micro_batch.to(self.model.device, non_blocking=True)
                    scores.append(self.evaluate(micro_batch, sums, grades))
                    for i, comparison in share.comparisons.items():
                        comparisons[start + i] = comparison
                # The host waits here, once for all of them.
                rank_examples |= self.examples(name, comparisons, torch.cat(scores).tolist())
            all_examples: dict[int, Any] = {}
            for examples_of_rank in processes.gather(rank_examples, group):
                all_examples |= examples_of_rank
            examples = tuple(all_examples[i] for i in range(size))
            return self.validation_of(sums.read(group), examples, grades.read(group))
        finally:
            self.model.train()

    def examples(
        self, name: str, comparisons: Mapping[int, Comparison], scores: Sequence[float]
    ) -> Mapping[int, Any]:
        """What is kept of comparisons of the validation set `name`, whose scores lie one comparison
        after another."""
        examples: dict[int, ScoredExample] = {}
        first = 0
        for i, comparison in comparisons.items():
            end = first + len(comparison.ranks)
            examples[i] = scored_comparison(
                comparison.where,
                f"{name}/{comparison.subset}",  # subsets of two sets stay two
                scores=scores[first:end],
                ranks=comparison.ranks,
                lengths=comparison.lengths,
                prompt=str(comparison.prompt),
            )
            first = end
        return examples

    def validation_of(
        self, totals: Any, examples: tuple[Any, ...], grades_6H: Tensor | None
    ) -> Any:
        """The measurements of one set, from its sums and all of its examples."""
        return SetValidation(
            totals, examples, grades_6H=grades_6H, attributes=self.heads.attributes
        )

    def pooled(self, results: Sequence[Any]) -> dict[str, Metric]:
        """The metrics over all sets."""
        return pooled(results)

    def evaluate(self, micro_batch: MicroBatch, sums: Any, grades: GradeSums) -> Tensor:
        """The scores (S,) of one micro-batch, on its device. Adds its metrics to `sums` and
        `grades`, without making the host wait."""
        values_SH = torch.cat([self.model.heads(batch) for batch in micro_batch.batches])
        if micro_batch.order_S is not None:
            values_SH = values_SH[micro_batch.order_S]
        scores_S = self.heads.combine(values_SH)
        labels = micro_batch.labels
        if labels.targets is not None:
            grades.add(self.heads.grades(values_SH), labels.targets)
        loss_sum = self.heads.score_loss(values_SH, labels)
        self.count(sums, values_SH, labels, loss_sum)
        return scores_S

    def _warn_of_ranking(self, step: int, ranking: MetricKey, metric: Metric | None) -> None:
        """Say once why a checkpoint has no value of the metric that ranks it."""
        has_value = False
        if metric is not None and metric.value is not None:
            has_value = math.isfinite(metric.value)
        if has_value or self._warned_of_ranking:
            return
        self._warned_of_ranking = True
        reason = "It is not a number."
        if metric is not None and metric.note:
            reason = metric.note
        logger.warning(
            "%s (checkpointing.metric_name) has no value after step %d. %s Checkpoints without it "
            "rank last.",
            ranking.logged_name,
            step,
            reason,
        )

    def close(self) -> None:
        self._prefetcher.close()

    def save_model(self, folder: Path) -> None:
        setup = self.setup
        model_folder = folder / "model"
        export_model(
            setup.model, setup.tokenizer, model_folder, chat_template=setup.renderer.chat_template
        )
        save_adapted(setup.model, folder)
        # The contract, with golden scores of the model as it was exported.
        sign_exported(
            model_folder,
            model=setup.model,
            renderer=setup.renderer,
            heads=setup.heads.contract(),
            step_score=setup.policy.reward_model_cfg.step_score,
            mesh=setup.mesh,
            is_checkpoint=True,
        )

    def complete_export(self, folder: Path, state: RunState) -> None:
        # The metrics are of the exported step, which may not be the last.
        card = model_card(self.setup, state.step, self._by_set(state.own_validation))
        (folder / "README.md").write_text(card, encoding="utf-8")
        hash_all(folder, self.setup.renderer, self.model.max_positions)

    def _by_set(self, validation: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Logged metrics, by validation set; empty without any."""
        by_set: dict[str, dict[str, float]] = {}
        if not validation:
            return by_set
        for name in self.setup.validation_sets:
            prefix = f"validation-{name}/"
            by_set[name] = {}
            for key, value in validation.items():
                metric = key.removeprefix(prefix)
                # A set may be called as the beginning of another: `a` and `a/b`.
                if key.startswith(prefix) and "/" not in metric:
                    by_set[name][metric] = value
        return by_set

    def finish(self, outcome: Outcome) -> Outcome:
        """Also uploads the model; its results are shown though that may fail."""
        validation = self._by_set(outcome.validation)
        sizes: dict[str, int] = {}
        caveats: dict[str, str] = {}
        for name, dataset in self.setup.validation_sets.items():
            sizes[name] = len(dataset)
            if dataset.counts.is_much_dropped:
                caveats[name] = dataset.counts.summary()
        for name, dataset in self.setup.training_sets.items():
            if dataset.counts.is_much_dropped:
                caveats[f"training data, {name}"] = dataset.counts.summary()
        # The loss of each logged step, of earlier sessions too.
        losses: list[float] = []
        file = self._metrics_file
        if file is not None and processes.is_main() and file.exists():
            for line in read_metrics(file):
                if "train/rm/loss" in line:
                    losses.append(line["train/rm/loss"])
        sentences: dict[str, str] = {}
        for name, means in validation.items():
            sentence = learnt(means, sizes[name], losses)
            if sentence is not None:
                sentences[name] = sentence
        # Collapsed: all golden conversations of the exported model have the same score.
        is_collapsed = False
        if processes.is_main() and outcome.model_folder is not None:
            contract = read_contract(outcome.model_folder)
            if contract is not None:
                is_collapsed = are_equal([example.score for example in contract.golden])
        fields = {**vars(outcome), "validation": validation}
        ended = TrainingOutcome(
            **fields,
            validation_sizes=sizes,
            learnt=sentences,
            caveats=caveats,
            is_collapsed=is_collapsed,
        )
        is_uploaded = self.setup.hub.push_to_hub and processes.is_main()
        if outcome.model_folder is not None and is_uploaded:
            return _uploaded(ended, self.setup.hub, outcome.model_folder)
        return ended


class ProcessRun(RewardModelRun):
    """A run of a process reward model: steps of solutions in the place of comparisons."""

    def new_sums(self) -> StepSums:
        return StepSums()

    def count(self, sums: Any, values_SH: Tensor, labels: Labels, loss_sum: Tensor) -> None:
        assert labels.steps is not None
        sums.add(self.heads.combine(values_SH), labels.steps, loss_sum)

    def examples(
        self, name: str, comparisons: Mapping[int, Comparison], scores: Sequence[float]
    ) -> Mapping[int, Any]:
        return solutions_of(comparisons, scores)

    def validation_of(
        self, totals: Any, examples: tuple[Any, ...], grades_6H: Tensor | None
    ) -> StepValidation:
        return StepValidation(totals, examples)

    def pooled(self, results: Sequence[Any]) -> dict[str, Metric]:
        return pooled_steps(results)


def _with_prefix(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def _uploaded(outcome: TrainingOutcome, hub: HubConfig, model_folder: Path) -> TrainingOutcome:
    """Upload the model. A failure is logged, and the results are still shown."""
    assert hub.repo_id is not None  # the set-up has named it
    try:
        page = push_folder(model_folder, hub.repo_id, private=hub.private)
    # The model is exported, and no later failure may hide that.
    except Exception as error:
        # A `TreewardError` says itself what to do; anything else needs its traceback.
        trace = None
        if not isinstance(error, TreewardError):
            trace = error
        logger.error("%s", error, exc_info=trace)
        return replace(outcome, upload_error=str(error), exit_code=1)
    logger.info("Uploaded %s to %s.", model_folder, page)
    return outcome


def _line(name: str, step: int, means: Mapping[str, float], ranking: MetricKey | None) -> str:
    """The line on a set for a person: loss and accuracy, or errors of grades, and the metric that
    ranks."""
    shown = {"loss": "loss", "accuracy": "accuracy", "reward_margin": "margin"}
    if "mse" in means:
        shown = {"loss": "loss", "mse": "mse", "pearson": "pearson"}
    if FIRST_ERROR in means:
        shown = {"loss": "loss", "accuracy": "accuracy by step", FIRST_ERROR: "first error"}
    # The metrics of any validation; another one that ranks is shown beside them.
    usual = (*METRIC_NAMES, "mse", "pearson", FIRST_ERROR)
    if ranking is not None and ranking.validation in (None, name) and ranking.metric not in usual:
        shown[ranking.metric] = ranking.metric
    texts = []
    for metric, label in shown.items():
        texts.append(f"{label} {metric_text(metric, means.get(metric))}")
    return f"validation-{name} after step {step}: {'  '.join(texts)}"
