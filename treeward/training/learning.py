"""`LearningWatch`: whether a reward model learns at all, by the loss and the scores of its latest steps.

watch = LearningWatch(total_steps, learning_rate=1e-5, chance=CHANCE)
watch.see(step, metrics)         # says once in the log what is wrong, at half of the run; a collapse at once
watch.verdict()                  # of the latest steps; None where nothing is wrong, or too few were seen
"""

from __future__ import annotations

import logging
import math
from collections import deque

from treeward.metrics import RewardMetrics

logger = logging.getLogger(__name__)

CHANCE = math.log(2)
"""The Bradley-Terry loss of a pair with equal scores."""

_MIN_STEPS = 10
_AT_CHANCE = 0.98  # share of chance: 16 steps of 16 comparisons scatter by about 0.03
_WORSE, _FEW_STEPS = 1.1, 50
_COLLAPSED = 1e-4  # mean difference within a pair, relative to the scores; a fresh head has 1e-2


class LearningWatch:
    """Looks at the latest quarter of the steps, at least ten.

    `chance`: the loss of equal scores, None where the loss has no such number.
    """

    def __init__(self, total_steps: int, *, learning_rate: float, chance: float | None) -> None:
        self.total_steps, self.learning_rate, self.chance = total_steps, learning_rate, chance
        self.latest: deque[RewardMetrics] = deque(maxlen=max(total_steps // 4, _MIN_STEPS))
        self._warned = False

    def see(self, step: int, metrics: RewardMetrics) -> None:
        """Take in the sums of a step; warn once if the scores have collapsed, or if half of the run taught nothing."""
        self.latest.append(metrics)
        if self._warned or len(self.latest) < _MIN_STEPS or not (step == self.total_steps // 2 or self._collapse()):
            return
        if (verdict := self.verdict()) is not None:
            self._warned = True
            logger.warning("%s", verdict)

    def verdict(self) -> str | None:
        """What is wrong and what to try, in sentences; None where the model learns."""
        if (collapse := self._collapse()) is not None:
            return collapse
        total = sum(self.latest, RewardMetrics())
        loss, steps = total.means()["loss"], len(self.latest)
        is_seen = steps >= min(_MIN_STEPS, self.total_steps)
        if self.chance is None or not is_seen or not loss > _AT_CHANCE * self.chance:
            return None
        rate = f"policy.optimizer.kwargs.lr, which is {self.learning_rate:g}"
        is_worse = loss > _WORSE * self.chance
        advice = f"Try {'a tenth of' if is_worse else 'ten times'} {rate}."
        if self.total_steps < _FEW_STEPS:
            longer = "a smaller policy.train_global_batch_size, or a larger rm.max_num_epochs"
            advice = f"So few steps ({self.total_steps}) teach little: try more ({longer}). {advice}"
        return (
            f"The loss is {'worse than' if is_worse else 'at'} chance: {loss:.4f} on average (latest steps: {steps}); "
            f"equal scores give {self.chance:.4f}. {advice} If that does not help, look at a few rows: is the chosen "
            "completion the better one?"
        )

    def _collapse(self) -> str | None:
        total = sum(self.latest, RewardMetrics())
        if len(self.latest) < _MIN_STEPS or not total.num_pairs:
            return None
        score, gap = total.chosen_sum / total.num_pairs, total.gap_sum / total.num_pairs
        if gap > _COLLAPSED * max(1.0, abs(score)):
            return None
        return (
            f"The scores have collapsed: those of a pair differ by {gap:.1g} and all are about {score:.4g}, over the "
            f"last {len(self.latest)} steps. Start anew in another checkpointing.checkpoint_dir with a warm-up and a "
            f"tenth of policy.optimizer.kwargs.lr, which is {self.learning_rate:g}."
        )
