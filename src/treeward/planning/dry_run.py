"""`dry_run`: a run of `treeward train` up to its first batch, which is planned and not computed.

    found = dry_run(config)
    found.steps, found.first.tokens, found.memory

The data is read, tokenized and kept as in the run itself; no weights are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# It imports transformers quietly, and comes before modules that do not.
import treeward.model  # noqa: F401
from treeward.config.run import RewardModelRunConfig
from treeward.model.checks import check_positions
from treeward.planning.bare_models import bare_reward_model
from treeward.planning.plan import Plan, plan, why_not_planned
from treeward.training.prefetch import plan_passes
from treeward.training.setup import read_data


@dataclass(frozen=True, slots=True)
class FirstBatch:
    """The first step: its comparisons, the forward passes that they fill, and their tokens.

    `tokens`: computed on trees, each shared one once; `row_tokens`: those of plain rows.
    """

    comparisons: int
    passes: int
    tokens: int
    row_tokens: int


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a run would do. `rows`: a line on each set's comparisons and tokens, by the set's name.

    `memory`: of a device; None if it cannot be planned, and `why_no_memory` says why.
    """

    rows: dict[str, str]
    steps: int
    first: FirstBatch
    memory: Plan | None
    why_no_memory: str | None


def dry_run(config: RewardModelRunConfig, gpu: str) -> DryRun:
    """Plan the first batch of a run of one process on `gpu`, as of `plan`. Raises a
    `TreewardError`."""
    data = read_data(config, show_progress=True)
    training_sets = list(data.training_sets.values())
    rows = {name: dataset.counts.summary() for name, dataset in data.training_sets.items()}
    rows |= {
        f"validation {name}": dataset.counts.summary()
        for name, dataset in data.encoded_sets.items()
    }
    with torch.device("meta"):
        model = bare_reward_model(config.policy)
    check_positions(model, config.max_sequence_length)
    # The order of the data is a function of the step: these are the comparisons that the run
    # itself computes first, planned by the function that plans them there.
    first_rows = data.order.batch(0, config.policy.train_global_batch_size)
    first_comparisons = [(training_sets[which], row) for which, row in first_rows]
    passes = plan_passes(
        first_comparisons,
        model.layout,
        max_tokens=config.policy.micro_batch_tokens,
        max_groups=config.policy.train_micro_batch_size,
    )
    row_tokens = 0
    tree_tokens = 0
    for dataset, row in first_comparisons:
        comparison = dataset[row]
        row_tokens += comparison.num_tokens
        tree_tokens += comparison.tree_tokens
    tokens = row_tokens
    if model.layout == "tree":
        tokens = tree_tokens
    first = FirstBatch(
        comparisons=len(first_comparisons),
        passes=len(passes),
        tokens=tokens,
        row_tokens=row_tokens,
    )
    # A model without a plan trains like any other: the dry run says the rest, and why.
    memory = None
    reason = why_not_planned(config.policy, model)
    if reason is None:
        memory = plan(config, gpu)
    return DryRun(
        rows=rows,
        steps=data.total_steps,
        first=first,
        memory=memory,
        why_no_memory=reason,
    )
