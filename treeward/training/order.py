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

__all__ = ["EpochOrder", "TrainingOrder"]


class EpochOrder:
    """The rows of one or several sets in each epoch, a function of (seed, epoch).

    A run of GRPO draws its prompts by `take`; what it draws may go on over the end of an epoch.

    `sizes`: rows of each set. `weights`: passes over each per epoch, positive; default 1 each. `what`: a row, for
    messages. Raises `ConfigError` when an epoch would hold nothing of a set.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        weights: Sequence[float] | None = None,
        seed: int,
        shuffle: bool = True,
        what: str = "comparison",
    ) -> None:
        self.sizes = list(sizes)
        self.weights = [1.0] * len(self.sizes) if weights is None else list(weights)
        self.seed, self.shuffle = seed, shuffle
        self.rows = lru_cache(maxsize=2)(self._draw)
        if any(round(size * weight) == 0 for size, weight in zip(self.sizes, self.weights, strict=True)):
            raise ConfigError(
                f"a weight leaves no {what} of its set in an epoch",
                where="data.train",
                got=f"weights {self.weights} of sets of {self.sizes} {what}s",
                need=f"at least one {what} of each set",
                fix="raise the weight, or remove the set",
            )

    @property
    def rows_per_epoch(self) -> int:
        return sum(round(size * weight) for size, weight in zip(self.sizes, self.weights, strict=True))

    def take(self, drawn: int, count: int) -> list[int]:
        """The `count` rows after the first `drawn`, counted over all epochs, each as its place in all sets together."""
        first = np.cumsum([0, *self.sizes])[:-1]
        indices: list[int] = []
        while len(indices) < count:
            epoch, start = divmod(drawn + len(indices), self.rows_per_epoch)
            rows = self.rows(epoch)[start : start + count - len(indices)]
            indices += (first[rows[:, 0]] + rows[:, 1]).tolist()
        return indices

    def _draw(self, epoch: int) -> npt.NDArray[np.int64]:
        """(set, row) of every row of an epoch, int64 (N, 2)."""
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        parts = []
        for number, (size, weight) in enumerate(zip(self.sizes, self.weights, strict=True)):
            wanted = round(size * weight)
            whole, rest = divmod(wanted, size) if size else (0, 0)
            # The rest is drawn even where nothing is shuffled: the first rows of a file are seldom a fair sample.
            partial = np.sort(generator.permutation(size)[:rest]) if rest else np.empty(0, dtype=np.int64)
            rows = np.concatenate([np.arange(size)] * whole + [partial])
            parts.append(np.stack([np.full(len(rows), number), rows], axis=1))
        order = np.concatenate(parts)
        return generator.permutation(order) if self.shuffle else order


class TrainingOrder:
    """The order of the comparisons of one or several sets, in steps.

    `datasets`: sequences of comparisons. `batch_size`: comparisons per step. The others, and errors: as `EpochOrder`.
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
        self.datasets, self.batch_size = datasets, batch_size
        self.epochs = EpochOrder(list(map(len, datasets)), weights=weights, seed=seed, shuffle=shuffle)

    @property
    def comparisons_per_epoch(self) -> int:
        return self.epochs.rows_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.comparisons_per_epoch // self.batch_size)

    def comparisons(self, step: int) -> list[Comparison]:
        """The comparisons of a step, counted from 0 over all epochs."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        chosen = self.epochs.rows(epoch)[batch * self.batch_size : (batch + 1) * self.batch_size]
        return [self.datasets[int(dataset)][int(row)] for dataset, row in chosen]

    def episodes(self, steps: int) -> int:
        """How many comparisons have been seen after so many steps."""
        epochs, batches = divmod(steps, self.steps_per_epoch)
        return epochs * self.comparisons_per_epoch + min(batches * self.batch_size, self.comparisons_per_epoch)
