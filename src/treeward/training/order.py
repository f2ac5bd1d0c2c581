"""`EpochOrder`: which rows each optimiser step sees, as a function of the step alone.

    order = EpochOrder([len(helpful), len(harmless)], weights=[1.0, 0.5], seed=42)
    order.batch(17, size=128)         # (set, row) of the 128 comparisons of the eighteenth step
    order.take(512, 64)               # the 64 prompts after the first 512, for a run of GRPO

Each epoch has an order of its own, drawn from (seed, epoch). A weight of 2 is every row twice, 0.5
a half of the rows, drawn anew each epoch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from treeward.config.run import ScheduleConfig
from treeward.errors import ConfigError

logger = logging.getLogger(__name__)


class EpochOrder:
    """The rows of one or several sets in each epoch. `sizes`: rows of each set. `weights`: passes
    over each per epoch. `together`: rows that `take` keeps side by side. `what`: a row, for
    messages. Raises `ConfigError` when an epoch would hold nothing of a set."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        weights: Sequence[float] | None = None,
        seed: int,
        shuffle: bool = True,
        together: int = 1,
        what: str = "comparison",
    ) -> None:
        # From here on a unit of `together` rows counts as one.
        self.sizes = [size // together for size in sizes]
        self.together = together
        if weights is None:
            weights = [1.0] * len(self.sizes)
        self.weights = list(weights)
        self.seed = seed
        self.shuffle = shuffle
        self._firsts = np.cumsum([0, *self.sizes])
        # Two epochs: a batch may be prepared from the next one before the last of this one is done.
        self.places = lru_cache(maxsize=2)(self._draw)
        wanted = []
        for size, weight in zip(self.sizes, self.weights, strict=True):
            wanted.append(round(size * weight))
        self.rows_per_epoch = sum(wanted) * together
        if not all(wanted):
            raise ConfigError(
                f"a weight leaves no {what} of its set in an epoch",
                where="data.train",
                got=f"weights {self.weights} of sets of {list(sizes)} {what}s",
                fix="raise the weight, or remove the set",
            )

    def steps_per_epoch(self, size: int) -> int:
        """How many batches of `size` rows an epoch has; the last one may be smaller, and no row is
        left out."""
        return math.ceil(self.rows_per_epoch / size)

    def batch(self, step: int, size: int) -> list[tuple[int, int]]:
        """(set, row) of each row of a step, counted from 0 over all epochs."""
        epoch, number = divmod(step, self.steps_per_epoch(size))
        places = self.places(epoch)[number * size : (number + 1) * size]
        sets = np.searchsorted(self._firsts[1:], places, side="right")
        rows = places - self._firsts[sets]
        return list(zip(sets.tolist(), rows.tolist(), strict=True))

    def num_seen(self, steps: int, size: int) -> int:
        """The number of rows in the first `steps` batches."""
        epochs, number = divmod(steps, self.steps_per_epoch(size))
        return epochs * self.rows_per_epoch + number * size

    def take(self, drawn: int, count: int) -> list[int]:
        """The `count` rows after the first `drawn`, counted over all epochs, as indices over all
        sets."""
        indices: list[int] = []
        size = self.together
        # Unlike `batch`, it goes on into the next epoch: dynamic sampling draws by numbers of
        # prompts, and not by steps.
        while len(indices) < count:
            epoch, start = divmod(drawn + len(indices), self.rows_per_epoch)
            stop = start + count - len(indices)
            chosen = self.places(epoch)[start // size : stop // size]
            indices += (chosen[:, None] * size + np.arange(size)).flatten().tolist()
        return indices

    def _draw(self, epoch: int) -> npt.NDArray[np.integer[Any]]:
        """The indices over all sets of an epoch's rows, (N,); 4 bytes each for up to 2 billion
        rows."""
        generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
        dtype = np.int32 if self._firsts[-1] < 2**31 else np.int64
        parts: list[npt.NDArray[np.integer[Any]]] = []
        firsts = self._firsts[:-1].tolist()
        for first, size, weight in zip(firsts, self.sizes, self.weights, strict=True):
            wanted = round(size * weight)
            if size == 0:
                continue
            whole, remainder = divmod(wanted, size)
            parts += [np.arange(first, first + size, dtype=dtype)] * whole
            if remainder:
                # It is drawn even where nothing is shuffled: the first rows of a file are seldom a
                # fair sample.
                sample = np.sort(generator.permutation(size)[:remainder])
                parts.append((first + sample).astype(dtype))
        order = np.concatenate(parts)
        if self.shuffle:
            generator.shuffle(order)
        return order


def planned_steps(config: ScheduleConfig, num_in_data: int, section: str) -> int:
    """The steps of a run whose epochs have `num_in_data` of them; `section`: the key of `config`,
    for the log."""
    most = config.max_num_steps or num_in_data
    if num_in_data < most:
        logger.info(
            "The data ends after %d steps (%s=%d): %s=%d is never reached.",
            num_in_data,
            f"{section}.max_num_epochs",
            config.max_num_epochs,
            f"{section}.max_num_steps",
            most,
        )
    return min(num_in_data, most)
