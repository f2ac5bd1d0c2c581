"""`LearningWatch`: detects a reward model that does not learn, by the loss of its latest steps.

watch.see(step, metrics, chance)     # warns in the log, at half of the run
watch.verdict()                      # of the latest steps; None if nothing is wrong, or for too few steps
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from treeward.evaluation.statistics import wilson
from treeward.losses import RewardMetrics

logger = logging.getLogger(__name__)

_MIN_STEPS, _FEW_STEPS = 10, 50
_AT_CHANCE, _WORSE = 0.98, 1.1  # shares of chance
_HIGH_RATE = 1e-3  # ten times this is no rate for a pretrained model
_PARTED = 0.1  # between the loss of held-out data and that of training, in nats


class LearningWatch:
    """Observes the loss of the latest quarter of the steps, at least ten."""

    def __init__(self, total_steps: int, *, learning_rate: float) -> None:
        self.total_steps, self.learning_rate = total_steps, learning_rate
        self._losses: deque[tuple[float, float]] = deque(maxlen=max(total_steps // 4, _MIN_STEPS))

    def see(self, step: int, metrics: RewardMetrics, chance: float) -> None:
        """Observe the sums of a step, and the loss of equal scores (`chance`); warns at half of the run."""
        if metrics.num_units and chance > 0:  # a custom loss may have no chance level
            self._losses.append((metrics.loss_sum / metrics.num_units, chance / metrics.num_units))
        is_half = step == self.total_steps // 2 and self.total_steps >= _FEW_STEPS  # in a shorter one it may warm up
        if is_half and (verdict := self.verdict()) is not None:
            logger.warning("%s", verdict)

    def verdict(self) -> str | None:
        """The problem and a remedy, in sentences; None if the model learns."""
        steps = len(self._losses)
        if steps < max(min(_MIN_STEPS, self.total_steps), 1):
            return None
        loss, chance = (fmean(values) for values in zip(*self._losses, strict=True))
        shares = [min(step_loss / equal, 2.0) for step_loss, equal in self._losses]  # a few huge losses are no scatter
        if not fmean(shares) - 2 * pstdev(shares) / math.sqrt(steps) > _AT_CHANCE:  # less two errors of the mean
            return None
        rate = f"policy.optimizer.kwargs.lr, which is {self.learning_rate:g}"
        is_worse = loss > _WORSE * chance
        is_high = is_worse or self.learning_rate >= _HIGH_RATE
        change = f"a tenth of {rate}" if is_high else f"ten times {rate}, or a tenth if the loss was lower before"
        advice = f"Try {change}, in another checkpointing.checkpoint_dir."
        if self.total_steps < _FEW_STEPS:
            longer = "a smaller policy.train_global_batch_size, or a larger rm.max_num_epochs"
            advice = f"So few steps ({self.total_steps}) teach little: try more ({longer}). {advice}"
        return (
            f"The loss is {'worse than' if is_worse else 'at'} chance: {loss:.4f} on average (latest steps: {steps}); "
            f"equal scores give {chance:.4f}. {advice} If that does not help, look at a few rows: is the chosen "
            "completion the better one?"
        )


def learnt(means: Mapping[str, float], size: int, training_losses: Sequence[float]) -> str | None:
    """One sentence on a validation set of `size` comparisons: whether its accuracy is chance, and its loss far above
    the latest quarter of the training losses. None without an accuracy."""
    accuracy, loss = means.get("accuracy", math.nan), means.get("loss", math.nan)
    if not math.isfinite(accuracy):
        return None
    low, high = wilson(accuracy * size, size)
    standing = "better than" if low > 0.5 else "worse than" if high < 0.5 else "not told from"
    sentence = f"accuracy {accuracy:.3f} ({low:.3f} to {high:.3f}) is {standing} chance, 0.5"
    if not training_losses:
        return f"{sentence}."
    trained = fmean(training_losses[-max(len(training_losses) // 4, _MIN_STEPS) :])
    if not loss - trained > _PARTED:
        return f"{sentence}; the loss, {loss:.3f}, has not parted from that of training, {trained:.3f}."
    advice = "more data or fewer epochs may help"
    return f"{sentence}; the loss, {loss:.3f}, has parted from that of training, {trained:.3f}: {advice}."
