"""`train`: the run of a reward model. `treeward.training.loop` takes its steps, validates, saves, stops and resumes.

    outcome = train(load_config("quickstart", []))
    outcome.model_folder, outcome.validation      # None if it was interrupted; {"plain": {"accuracy": 0.95, ...}, ...}

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
from treeward.config.run import RewardModelRunConfig
from treeward.data.encoding import Comparison
from treeward.errors import ConfigError, TreewardError
from treeward.evaluation.diagnostics.scores import scored_comparison
from treeward.evaluation.results import Metric, ScoredExample
from treeward.formatting import metric_text
from treeward.losses import METRIC_NAMES, GradeSums, RewardMetrics, RewardSums
from treeward.model.contract import read_contract
from treeward.model.export import export_model, push_folder
from treeward.parallel.sharding import sum_over_copies
from treeward.scoring.golden import hash_all, sign_exported
from treeward.scoring.score import are_equal
from treeward.training.card import model_card
from treeward.training.features import with_features
from treeward.training.loop import Outcome, Run, StepMetrics, Validation, start
from treeward.training.models import save_adapted
from treeward.training.optimisation import SkippedSteps, advance
from treeward.training.prefetch import BatchPreparer, MicroBatch, Prefetcher, StepBatches
from treeward.training.setup import RewardModelSetup, set_up
from treeward.training.state import RunState
from treeward.training.tracking import METRICS_FILE, TrackerGroup, read_metrics
from treeward.training.validation import SetValidation, learnt, metric_values, pooled
from treeward.tree.plan import backward_in_parts

logger = logging.getLogger(__name__)

_COMPARISONS_AT_ONCE = (
    1024  # planned together: as good a plan as for the whole set, with the other rows on disk
)


@dataclass(frozen=True)
class TrainingOutcome(Outcome):
    """How a run ended. By validation set: `validation`, its metrics; `validation_sizes`, its comparisons; `caveats`,
    what was left out of much data; `learnt`, whether it is better than chance. `is_collapsed`: the exported model gives
    everything the same score. With an `upload_error` the exit code is 1."""

    validation_sizes: Mapping[str, int] = field(default_factory=dict)
    caveats: Mapping[str, str] = field(default_factory=dict)
    upload_error: str | None = None
    learnt: Mapping[str, str] = field(default_factory=dict)
    is_collapsed: bool = False


def train(config: RewardModelRunConfig, *, show_progress: bool = True) -> TrainingOutcome:
    """Train a reward model as configured, resuming where an earlier run of the same configuration stopped. Raises a
    `TreewardError` for what the user can fix; the last checkpoint stands."""
    check_packages(config)
    if config.hub.push_to_hub:
        _check_hub(config.hub_repo_id)
    key, ranked_by = config.ranking_metric, None
    if key is not None:
        ranked_by = (
            f"eval/rm/{key.metric}"
            if key.validation is None
            else f"validation-{key.validation}/{key.metric}"
        )
    outcome = start(
        config,
        config.rm,
        lambda checkpoint, shown: RewardModelRun(
            with_features(set_up(config, checkpoint, shown), shown)
        ),
        ranked_by=ranked_by,
        show_progress=show_progress,
    )
    assert isinstance(outcome, TrainingOutcome)
    return outcome


def _check_hub(repo_id: str) -> None:
    """Raise `ConfigError` for a name that the hub does not allow, and warn if nobody is logged in."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        summary = "the hub does not allow this name of a repository"
        raise ConfigError(summary, field="hub.repo_id", got=repo_id, need=str(error)) from error
    if get_token() is None:
        logger.warning(
            "hub.push_to_hub is true, and nobody is logged in to the hub: hf auth login, while the run lasts."
        )


class RewardModelRun(Run):
    """A `Run` of the loop: Bradley-Terry steps on comparisons, and validation on every named set."""

    def __init__(self, setup: RewardModelSetup) -> None:
        super().__init__(
            config=setup.config,
            optimizer=setup.optimizer,
            scheduler=setup.scheduler,
            identity=setup.identity,
            total_steps=setup.total_steps,
            validates=bool(setup.validation_sets),
        )
        self.setup, self.config, self.model, self.heads = (
            setup,
            setup.config,
            setup.model,
            setup.heads,
        )
        self._warned_of_ranking = False
        self.skipped = SkippedSteps()
        self._preparer = BatchPreparer(setup)
        self._prefetcher = Prefetcher(self._preparer.step, num_steps=setup.total_steps)

    def begin(self, state: RunState, trackers: TrackerGroup) -> None:
        self.model.train()
        self.skipped = SkippedSteps(**state.run.get("skipped_steps", {}))
        if state.step > 0:
            return
        for role, sets in (
            ("train", self.setup.training_sets),
            ("validation", self.setup.validation_sets),
        ):
            for name, dataset in sets.items():
                counts = asdict(dataset.counts)
                trackers.log(
                    {f"data/{role}/{name}/{key}": value for key, value in counts.items()}, step=0
                )

    def state(self) -> dict[str, Any]:
        return {"skipped_steps": asdict(self.skipped)}

    def step(self, number: int) -> StepMetrics:
        started = time.monotonic()
        batches = self._prefetcher.get(number)
        sums = RewardSums()
        for micro_batch in batches.micro_batches:
            sum_over_copies(self.model, micro_batch is batches.micro_batches[-1])
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
        return StepMetrics(logged, _progress(total), row_tokens)

    def _logged(self, number: int, batches: StepBatches, total: RewardMetrics) -> dict[str, float]:
        """The metrics of a step over all processes."""
        setup = self.setup
        counts_2 = torch.tensor([batches.num_computed_tokens, batches.num_row_tokens])
        computed_tokens, row_tokens = processes.summed(counts_2, setup.mesh.data_group).tolist()
        episodes = setup.order.num_seen(number, self.config.policy.train_global_batch_size)
        return {f"train/rm/{name}": value for name, value in total.means().items()} | {
            "train/rm/skipped_steps": self.skipped.total,
            "train/rm/computed_tokens": computed_tokens,
            "train/rm/row_tokens": row_tokens,
            "episode": episodes,
            "epoch": episodes / setup.order.rows_per_epoch,
        }

    def backward(self, micro_batch: MicroBatch, num_units: int, sums: RewardSums) -> None:
        """Add the gradient of one micro-batch, for a step of `num_units`, and its metrics to `sums`. The host never
        waits for a GPU here: it goes on to the next while the GPU computes."""
        micro_batch = micro_batch.to(self.model.device, non_blocking=True)
        values_SH, loss_sum = backward_in_parts(
            [partial(self.model.heads, batch) for batch in micro_batch.batches],
            lambda values_SH: self.heads.loss(values_SH, micro_batch.labels),
            order_S=micro_batch.order_S,
            scale=1 / num_units,
        )
        sums.add(
            self.heads.combine(values_SH),
            micro_batch.labels.pairs,
            loss_sum,
            micro_batch.labels.num_units,
        )

    def _update_weights(self, number: int, total: RewardMetrics) -> float:
        """Clip, step, and return the gradients' norm before clipping; NaN, and no step, where it or the loss is not
        finite. Raises `ModelError` for several such steps in a row."""
        norm = self.skipped.clip(
            self.model,
            self.config.policy.max_grad_norm,
            total.loss_sum,
            what=f"the loss of step {number}",
            fix="start anew in another checkpointing.checkpoint_dir with a lower policy.optimizer.kwargs.lr, or in "
            "policy.precision=float32",
        )
        if math.isfinite(norm):
            self.optimizer.step()
        advance(self.scheduler)
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def validate(self, step: int, should_stop: Callable[[], str | None]) -> Validation | None:
        sets: dict[str, SetValidation] = {}
        seconds: dict[str, float] = {}
        for name in self.setup.validation_sets:
            started = time.monotonic()
            result = self.validate_set(name, should_stop)
            if result is None:
                return None
            sets[name] = result
            seconds[f"timing/validation/{name}"] = time.monotonic() - started
        metrics = {name: result.metrics() for name, result in sets.items()}
        everything = pooled(list(sets.values()))
        logged = {f"eval/rm/{key}": value for key, value in metric_values(everything).items()}
        for name, means in metrics.items():
            logged |= {
                f"validation-{name}/{key}": value for key, value in metric_values(means).items()
            }
        key = self.config.ranking_metric
        if key is not None:
            ranking = (everything if key.validation is None else metrics[key.validation]).get(
                key.metric
            )
            self._warn_of_ranking(step, ranking)
        lines = [_line(name, step, metric_values(means), key) for name, means in metrics.items()]
        return Validation(logged, seconds, tuple(lines))

    @torch.no_grad()
    def validate_set(
        self, name: str, should_stop: Callable[[], object] = lambda: None
    ) -> SetValidation | None:
        """Measure a validation set in the precision of training; None if `should_stop` gave a reason on the way."""
        setup, model, sums, grades = self.setup, self.model, RewardSums(), GradeSums()
        dataset, size = setup.validation_sets[name], len(setup.validation_sets[name])
        scored: dict[int, ScoredExample] = {}  # by its place; of those that this process has scored
        model.eval()
        try:
            for start in range(0, size, _COMPARISONS_AT_ONCE):
                rows = [(dataset, i) for i in range(start, min(start + _COMPARISONS_AT_ONCE, size))]
                comparisons, values = dict[int, Comparison](), []
                for share in self._preparer.shares(rows, validation=True):
                    if should_stop():
                        return None
                    values.append(
                        self.evaluate(
                            share.micro_batch.to(model.device, non_blocking=True), sums, grades
                        )
                    )
                    comparisons |= {
                        start + i: comparison for i, comparison in share.comparisons.items()
                    }
                scored |= _scored(name, comparisons, torch.cat(values).tolist())
            shares = processes.gather(scored, setup.mesh.data_group)
            scored = {i: example for share in shares for i, example in share.items()}
            examples = tuple(scored[i] for i in range(size))
            total = sums.read(setup.mesh.data_group)
            grades_6H, attributes = grades.read(setup.mesh.data_group), setup.heads.attributes
            return SetValidation(total, examples, grades_6H=grades_6H, attributes=attributes)
        finally:
            model.train()

    def evaluate(self, micro_batch: MicroBatch, sums: RewardSums, grades: GradeSums) -> Tensor:
        """The scores (S,) of one micro-batch, on its device. Adds its metrics to `sums` and `grades`, without making
        the host wait."""
        values_SH = torch.cat([self.model.heads(batch) for batch in micro_batch.batches])
        if micro_batch.order_S is not None:
            values_SH = values_SH[micro_batch.order_S]
        scores_S = self.heads.combine(values_SH)
        labels = micro_batch.labels
        if labels.targets is not None:
            grades.add(self.heads.grades(values_SH), labels.targets)
        sums.add(scores_S, labels.pairs, self.heads.score_loss(values_SH, labels), labels.num_units)
        return scores_S

    def _warn_of_ranking(self, step: int, metric: Metric | None) -> None:
        """Say once why a checkpoint has no value of the metric that ranks it."""
        if self._warned_of_ranking or (
            metric and metric.value is not None and math.isfinite(metric.value)
        ):
            return
        self._warned_of_ranking = True
        logger.warning(
            "%s (checkpointing.metric_name) has no value after step %d. %s Checkpoints without it rank last.",
            self.config.checkpointing.metric_name, step, (metric and metric.note) or "It is not a number.",
        )  # fmt: skip

    def close(self) -> None:
        self._prefetcher.close()

    def save_model(self, folder: Path) -> None:
        setup, model = self.setup, folder / "model"
        export_model(
            setup.model, setup.tokenizer, model, chat_template=setup.renderer.chat_template
        )
        save_adapted(setup.model, folder)
        heads, mesh = setup.heads.contract(), setup.mesh
        sign_exported(
            model,
            model=setup.model,
            renderer=setup.renderer,
            heads=heads,
            mesh=mesh,
            is_checkpoint=True,
        )

    def complete_export(self, folder: Path, state: RunState) -> None:
        card = model_card(self.setup, state.step, self._by_set(state.own_validation))
        (folder / "README.md").write_text(card, encoding="utf-8")
        hash_all(folder, self.setup.renderer, self.model.max_positions)

    def _by_set(self, validation: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Logged metrics, by validation set; empty without any."""
        heads = {name: f"validation-{name}/" for name in self.setup.validation_sets if validation}
        return {
            name: {
                key.removeprefix(head): value
                for key, value in validation.items()
                if key.startswith(head) and "/" not in key.removeprefix(head)
            }
            for name, head in heads.items()
        }

    def finish(self, outcome: Outcome) -> Outcome:
        setup, validation = self.setup, self._by_set(outcome.validation)
        datasets = {
            f"training data, {name}": dataset for name, dataset in setup.training_sets.items()
        }
        counts = {
            name: dataset.counts for name, dataset in (setup.validation_sets | datasets).items()
        }
        sizes = {name: len(dataset) for name, dataset in setup.validation_sets.items()}
        file = Path(self.config.logger.log_dir) / METRICS_FILE
        lines = read_metrics(file) if processes.is_main() and file.exists() else []
        losses = [line["train/rm/loss"] for line in lines if "train/rm/loss" in line]
        sentences = {name: learnt(means, sizes[name], losses) for name, means in validation.items()}
        ended = TrainingOutcome(
            **{**vars(outcome), "validation": validation},
            validation_sizes=sizes,
            learnt={name: sentence for name, sentence in sentences.items() if sentence is not None},
            caveats={
                name: count.summary() for name, count in counts.items() if count.is_much_dropped
            },
            is_collapsed=processes.is_main() and _is_collapsed(outcome.model_folder),
        )
        if outcome.model_folder is not None and processes.is_main() and self.config.hub.push_to_hub:
            return _uploaded(ended, self.config, outcome.model_folder)
        return ended


def _progress(total: RewardMetrics) -> dict[str, float]:
    """What the line of progress shows; without pairs only the loss means anything."""
    means = total.means()
    if not total.num_pairs:
        return {"loss": means["loss"]}
    return {"loss": means["loss"], "accuracy": means["accuracy"], "margin": means["reward_margin"]}


def _scored(
    set_name: str, comparisons: Mapping[int, Comparison], scores: Sequence[float]
) -> dict[int, ScoredExample]:
    """Each comparison with its scores, which lie one comparison after another; subsets of two sets stay two."""
    remaining, scored = iter(scores), {}
    for i, comparison in comparisons.items():
        values = [next(remaining) for _ in comparison.ranks]
        ranks, lengths = comparison.ranks, comparison.lengths
        subset = f"{set_name}/{comparison.subset}"
        scored[i] = scored_comparison(
            comparison.where,
            subset,
            scores=values,
            ranks=ranks,
            lengths=lengths,
            prompt=str(comparison.prompt),
        )
    return scored


def _is_collapsed(model_folder: Path | None) -> bool:
    """Whether the exported model gives all conversations of its contract the same score; False without a model."""
    contract = None if model_folder is None else read_contract(model_folder)
    if contract is None:
        return False
    return are_equal([example.score for example in contract.golden])


def _uploaded(
    outcome: TrainingOutcome, config: RewardModelRunConfig, model: Path
) -> TrainingOutcome:
    """Upload the model. A failure is logged, and the results are still shown."""
    try:
        page = push_folder(model, config.hub_repo_id, private=config.hub.private)
    except Exception as error:  # the model is exported, and no later failure may hide that
        logger.error("%s", error, exc_info=None if isinstance(error, TreewardError) else error)
        return replace(outcome, upload_error=str(error), exit_code=1)
    logger.info("Uploaded %s to %s.", model, page)
    return outcome


def _line(name: str, step: int, means: Mapping[str, float], key: MetricKey | None) -> str:
    shown = {"loss": "loss", "accuracy": "accuracy", "reward_margin": "margin"}
    if "mse" in means:
        shown = {"loss": "loss", "mse": "mse", "pearson": "pearson"}
    if (
        key is not None
        and key.validation in (None, name)
        and key.metric not in (*METRIC_NAMES, "mse", "pearson")
    ):
        shown[key.metric] = key.metric
    texts = [f"{label} {metric_text(metric, means.get(metric))}" for metric, label in shown.items()]
    return f"validation-{name} after step {step}: {'  '.join(texts)}"
