"""`PromptOrder`: which prompts come next, as a function of how many have been drawn.

    order = PromptOrder(encoded.sizes, weights=encoded.weights, seed=42)
    order.take(drawn=17, count=32)        # the indices of the 32 prompts after the first 17

There is no state to save: a run that resumes after N drawn prompts asks for the prompts after N. Each epoch has an
order of its own, from (seed, epoch). A step may go over the end of an epoch, and may then hold a prompt twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treeward.training.order import EpochOrder

__all__ = ["PromptOrder"]


class PromptOrder:
    """The order of the prompts of one or several sets of `sizes`, which are numbered through, set after set.

    `weights`: passes over each set per epoch, default 1 each; 0.5 is a half of it, drawn anew each epoch. Without
    `shuffle` an epoch goes through the sets as they lie. Raises `ConfigError` when an epoch would hold nothing of one.
    """

    def __init__(
        self, sizes: Sequence[int], *, weights: Sequence[float] | None = None, seed: int, shuffle: bool = True
    ) -> None:
        self._epochs = EpochOrder(sizes, weights=weights, seed=seed, shuffle=shuffle, what="prompt")
        self._first = np.cumsum([0, *sizes])[:-1]

    @property
    def prompts_per_epoch(self) -> int:
        return self._epochs.rows_per_epoch

    def take(self, drawn: int, count: int) -> list[int]:
        """The `count` prompts that come after the first `drawn`, counted over all epochs."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, start = divmod(drawn + len(indices), self.prompts_per_epoch)
            rows = self._epochs.rows(epoch)[start : start + count - len(indices)]
            indices += (self._first[rows[:, 0]] + rows[:, 1]).tolist()
        return indices
