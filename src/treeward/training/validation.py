"""`SetValidation`: the measurements of a validation on one named set.

    result = run.validate_set("held_out")                        # SetValidation of one set
    pooled([result, of_another_set])                             # metrics over all of them
    learnt(result.metrics(), 200, losses)       # a sentence: is it better than chance?

Shapes: H attributes; 6 sums of `GradeSums`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from treeward.evaluation.diagnostics.biases import collect_pairs
from treeward.evaluation.diagnostics.scores import gate_metrics
from treeward.evaluation.results import Metric, ScoredExample
from treeward.evaluation.statistics import accuracy_metric
from treeward.formatting import format_number
from treeward.losses import RewardMetrics, grade_metrics

_FEWEST_STEPS = 10  # of training, in the mean of the latest losses
_DIVERGING = 0.1  # between the loss of held-out data and that of training, in nats


@dataclass(frozen=True, slots=True)
class SetValidation:
    """The measurements of one set: sums over its pairs, the scores of each comparison in the order
    of the set, and the sums of `GradeSums` over the grades of `attributes`."""

    sums: RewardMetrics
    scored: tuple[ScoredExample, ...]
    grades_6H: Tensor | None = None
    attributes: tuple[str, ...] = ()

    def metrics(self) -> dict[str, Metric]:
        """The metrics by name; without a value a metric's note says why. The interval of the
        accuracy is that of `treeward eval`."""
        metrics = pooled([self])
        pairs = collect_pairs(self.scored)
        if pairs:
            outcomes = [pair.outcome for pair in pairs]
            prompts = [pair.prompt for pair in pairs]
            interval = accuracy_metric(outcomes, "", prompts)
            metrics["accuracy"] = replace(metrics["accuracy"], low=interval.low, high=interval.high)
        return metrics


def pooled(sets: Sequence[SetValidation]) -> dict[str, Metric]:
    """The metrics over the comparisons of all sets."""
    sums = sum((result.sums for result in sets), RewardMetrics())
    missing = "There is no pair of a better and a worse completion."
    metrics: dict[str, Metric] = {}
    for name, value in sums.means().items():
        note = None
        if math.isnan(value):
            note = missing
        metrics[name] = Metric(name, value, count=sums.num_pairs, note=note)
    # These are no sums over pairs: they need the scores of all examples side by side.
    examples: list[ScoredExample] = []
    for result in sets:
        examples += result.scored
    metrics |= gate_metrics(examples)
    grades = [result.grades_6H for result in sets if result.grades_6H is not None]
    if grades:
        grades_6H = torch.stack(grades).sum(dim=0)
        count = int(grades_6H[0].sum())
        for name, value in grade_metrics(grades_6H, sets[0].attributes).items():
            if math.isfinite(value):
                metrics[name] = Metric(name, value, count=count)
    return metrics


def metric_values(metrics: dict[str, Metric]) -> dict[str, float]:
    """The metrics that have a value, as numbers; the ends of an interval are called `accuracy_low`,
    `accuracy_high`."""
    values = dict[str, float]()
    for name, metric in metrics.items():
        ends = {name: metric.value, f"{name}_low": metric.low, f"{name}_high": metric.high}
        values |= {key: value for key, value in ends.items() if value is not None}
    return values


def learnt(means: Mapping[str, float], size: int, training_losses: Sequence[float]) -> str | None:
    """One sentence on a validation set of `size` comparisons: whether its accuracy is chance, and
    its loss far above the latest quarter of the training losses, without those that are not finite.
    `means`: as `metric_values` gives them. None without an accuracy and its interval."""
    accuracy = means.get("accuracy", math.nan)
    loss = means.get("loss", math.nan)
    low = means.get("accuracy_low")
    high = means.get("accuracy_high")
    if not math.isfinite(accuracy) or low is None or high is None:
        return None
    shown, lowest, highest = (format_number(value, "percent") for value in (accuracy, low, high))
    sentence = f"accuracy {shown} ({lowest} to {highest})"
    if low > 0.5:
        sentence += " is better than chance, 50%"
    elif high < 0.5:
        sentence += " is worse than chance, 50%"
    else:
        sentence += f" on {size:,} comparisons is not significantly better than chance, 50%"
    # A step that was skipped has logged a loss of NaN, which would be the mean of all.
    finite_losses = [
        training_loss for training_loss in training_losses if math.isfinite(training_loss)
    ]
    if not finite_losses:
        return f"{sentence}."
    # The latest quarter: the loss of a single step is that of one batch.
    num_latest = max(len(finite_losses) // 4, _FEWEST_STEPS)
    trained = fmean(finite_losses[-num_latest:])
    is_diverging = loss - trained > _DIVERGING
    verb = "is not diverging"
    if is_diverging:
        verb = "is diverging"
    held_out = format_number(loss)
    sentence += f"; the loss, {held_out}, {verb} from that of training, {format_number(trained)}"
    if is_diverging:
        sentence += ": more data or fewer epochs may help"
    return f"{sentence}."
