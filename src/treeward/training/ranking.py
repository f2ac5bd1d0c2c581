"""Warnings of a metric that ranks checkpoints, before checkpoints are pruned by it.

    warn_of_unranked(store)                            # earlier checkpoints have no such value
    warn_of_rare_metric(store, schedule, total_steps)  # few of the coming ones will have it

Both say nothing for a store whose latest checkpoints are the best, and outside the main process.
"""

from __future__ import annotations

import logging
from pathlib import Path

from treeward import processes
from treeward.config.grpo import GRPOConfig
from treeward.config.run import RMConfig
from treeward.errors import CheckpointError
from treeward.training.checkpoints import CheckpointStore
from treeward.training.state import read_state

logger = logging.getLogger(__name__)


def warn_of_unranked(store: CheckpointStore) -> None:
    """Warn of checkpoints that will be pruned first, because they have no value of the metric."""
    if not store.is_ranked or store.config.keep_top_k is None or not processes.is_main():
        return
    unranked: list[str] = []
    for checkpoint in store.all():
        # A checkpoint of a signal is for resuming, and pruned without a word.
        if checkpoint.metric is None and not _is_of_a_signal(checkpoint.path):
            unranked.append(str(checkpoint.step))
    if unranked:
        logger.warning(
            "Checkpoints without %s are pruned first (step %s): to keep one, copy it elsewhere, or "
            "set checkpointing.keep_top_k=null.",
            store.config.metric_name,
            ", ".join(unranked),
        )


def _is_of_a_signal(folder: Path) -> bool:
    """Whether the uninterrupted run would not have saved it: nobody expects it to stay."""
    try:
        return not read_state(folder).ranked
    except CheckpointError:
        return False


def warn_of_rare_metric(
    store: CheckpointStore, schedule: RMConfig | GRPOConfig, total_steps: int
) -> None:
    """Warn if fewer checkpoints of the run will be validated than saved: the others rank last."""
    if not store.is_ranked or not processes.is_main():
        return
    save_period = store.config.save_period
    # The last step is saved whatever the period is.
    saved = {total_steps}
    if save_period is not None:
        saved.update(range(save_period, total_steps + 1, save_period))
    ranked = {step for step in saved if schedule.is_validated(step)}
    if schedule.val_at_end:
        ranked.add(total_steps)
    num_ranked = len(ranked)
    if num_ranked < len(saved):
        logger.warning(
            "%d of the %d checkpoints of this run will have a %s, and the others rank last: "
            "checkpointing.save_period is %s and val_period %s.",
            num_ranked,
            len(saved),
            store.config.metric_name,
            save_period,
            schedule.val_period,
        )
