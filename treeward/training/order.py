"""`TrainingOrder`: which comparisons each optimiser step sees, as a function of the step alone.

    order = TrainingOrder([helpful, harmless], weights=[1.0, 0.5], seed=42, batch_size=128)
    order.steps_per_epoch
    order.comparisons(step=17)        # the 128 comparisons of the eighteenth step

There is no state to save: a run that resumes at step S asks for step S and goes on. Each epoch has an order of its own,
drawn from (seed, epoch). A weight is how many passes over a set an epoch makes: 2 is every row twice, 0.5 a half of the
rows, drawn anew each epoch. The last batch of an epoch may be smaller; no row is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from treeward.data.encoding import Comparison
from treeward.errors import ConfigError

__all__ = ["TrainingOrder"]


class TrainingOrder:
    """The order of the comparisons of one or several sets.

    `datasets`: sequences of comparisons. `weights`: passes over each per epoch, positive; default 1 each. `batch_size`:
    comparisons per step. Raises `ConfigError` when an epoch would hold nothing of a set.
    """

    def __init__(
        self,
        datasets: Sequence[Sequence[Comparison]],
        *,
        weights: Sequence[float] | None = None,
        seed: int,
        batch_size: int,
        shuffle: bool = True,
    ) -> None:
        self.datasets = datasets
        self.weights = [1.0] * len(datasets) if weights is None else list(weights)
        self.seed, self.batch_size, self.shuffle = seed, batch_size, shuffle
        self.sizes = [len(dataset) for dataset in datasets]
        self._epoch_order = lru_cache(maxsize=2)(self._draw_epoch)
        if any(round(size * weight) == 0 for size, weight in zip(self.sizes, self.weights, strict=True)):
            raise ConfigError(
                "a weight leaves no comparison of its set in an epoch",
                where="data.train",
                got=f"weights {self.weights} of sets of {self.sizes} comparisons",
                need="at least one comparison of each set",
                fix="raise the weight, or remove the set",
            )

    @property
    def comparisons_per_epoch(self) -> int:
        return sum(round(size * weight) for size, weight in zip(self.sizes, self.weights, strict=True))

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.comparisons_per_epoch // self.batch_size)

    def comparisons(self, step: int) -> list[Comparison]:
        """The comparisons of a step, counted from 0 over all epochs."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        chosen = self._epoch_order(epoch)[batch * self.batch_size : (batch + 1) * self.batch_size]
        return [self.datasets[int(dataset)][int(row)] for dataset, row in chosen]

    def episodes(self, steps: int) -> int:
        """How many comparisons have been seen after so many steps."""
        epochs, batches = divmod(steps, self.steps_per_epoch)
        return epochs * self.comparisons_per_epoch + min(batches * self.batch_size, self.comparisons_per_epoch)

    def _draw_epoch(self, epoch: int) -> npt.NDArray[np.int64]:
        """(dataset, row) of every comparison of an epoch, int64 (N, 2)."""
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        parts = []
        for dataset, (size, weight) in enumerate(zip(self.sizes, self.weights, strict=True)):
            wanted = round(size * weight)
            whole, rest = divmod(wanted, size) if size else (0, 0)
            # The rest is drawn even where nothing is shuffled: the first rows of a file are seldom a fair sample.
            partial = np.sort(generator.permutation(size)[:rest]) if rest else np.empty(0, dtype=np.int64)
            rows = np.concatenate([np.arange(size)] * whole + [partial])
            parts.append(np.stack([np.full(len(rows), dataset), rows], axis=1))
        order = np.concatenate(parts)
        return generator.permutation(order) if self.shuffle else order
