"""`dry_run`: a run of `treeward train` up to its first batch, which is planned and not computed.

    found = dry_run(config)
    found.steps, found.first.tokens, found.memory

The data is read, tokenized and kept as in the run itself; no weights are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# It imports transformers quietly, and comes before modules that do not.
import treeward.model  # noqa: F401
from treeward.config.run import RewardModelRunConfig
from treeward.data.encoding import Comparison
from treeward.model.checks import check_positions
from treeward.model.wrapped import Layout
from treeward.planning.bare_models import bare_reward_model
from treeward.planning.plan import Plan, plan, why_not_planned
from treeward.training.prefetch import plan_passes
from treeward.training.setup import read_data
from treeward.tree.plan import split_group


@dataclass(frozen=True, slots=True)
class FirstBatch:
    """The first step: its comparisons, the forward passes that they fill, and their tokens.

    `tokens`: computed, each shared one of a tree once, and of padded rows the padding too;
    `row_tokens`: those of plain rows.
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
    max_tokens = config.policy.micro_batch_tokens
    plan_of_step = plan_passes(
        first_comparisons,
        model.layout,
        max_tokens=max_tokens,
        max_groups=config.policy.train_micro_batch_size,
    )
    num_passes = 0
    tokens = 0
    row_tokens = 0
    for places in plan_of_step:
        comparisons = []
        for i in places:
            dataset, row = first_comparisons[i]
            comparisons.append(dataset[row])
        passes = _tokens_of_passes(comparisons, model.layout, max_tokens)
        num_passes += len(passes)
        tokens += sum(passes)
        row_tokens += sum(comparison.num_tokens for comparison in comparisons)
    first = FirstBatch(
        comparisons=len(first_comparisons),
        passes=num_passes,
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


def _tokens_of_passes(
    comparisons: Sequence[Comparison], layout: Layout, max_tokens: int | None
) -> list[int]:
    """The tokens that each forward pass of a micro-batch computes: one pass, or several where a
    single comparison is larger than `max_tokens`."""
    if len(comparisons) == 1 and max_tokens is not None:
        share = layout == "tree"
        parts = split_group(comparisons[0].token_ids, max_tokens=max_tokens, share=share)
        return [part.num_tokens for part in parts]
    if layout == "tree":
        return [sum(comparison.tree_tokens for comparison in comparisons)]
    lengths: list[int] = []
    for comparison in comparisons:
        lengths += [len(ids) for ids in comparison.token_ids]
    return [len(lengths) * max(lengths)]
