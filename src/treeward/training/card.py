"""The card of an exported model, and the table of its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from treeward.config.checkpointing import MetricKey
from treeward.config.loss import LOSSES
from treeward.formatting import metric_format
from treeward.tables import Column, markdown_table
from treeward.training.setup import RewardModelSetup

_COLUMNS = [
    Column("set", title="validation set"),
    Column("comparisons"),
    Column("accuracy", format="percent"),
    Column("loss", format="number"),
    Column("reward_margin", title="margin", format="number"),
    Column("chosen_rewards", title="chosen", format="number"),
    Column("rejected_rewards", title="rejected", format="number"),
]
_GRADE_COLUMNS = [
    *_COLUMNS[:2],
    Column("mse", title="squared error", format="number"),
    Column("pearson", title="correlation", format="number"),
    *_COLUMNS[2:4],
]
_NUM_FIRST_COLUMNS = 3
"""Columns that stand before that of the metric which chose the checkpoint."""


def result_columns(ranking: MetricKey | None, *, has_grades: bool) -> list[Column]:
    """The columns of a results table: the usual ones, and `ranking`, the metric that chose the
    checkpoint. `has_grades`: whether the model has learnt grades."""
    columns = _COLUMNS
    if has_grades:
        columns = _GRADE_COLUMNS
    if ranking is None:
        return columns
    metric = ranking.metric
    if metric in {column.key for column in columns}:  # it is shown anyway
        return columns
    column = Column(metric, title=metric.replace("_", " "), format=metric_format(metric))
    return [*columns[:_NUM_FIRST_COLUMNS], column, *columns[_NUM_FIRST_COLUMNS:]]


def result_rows(
    sizes: Mapping[str, int], validation: Mapping[str, Mapping[str, float]]
) -> list[dict[str, object]]:
    """The rows of a results table. `sizes`: how many comparisons of each set were measured."""
    rows: list[dict[str, object]] = []
    for name, means in validation.items():
        rows.append({"set": name, "comparisons": sizes.get(name), **means})
    return rows


def model_card(
    setup: RewardModelSetup, step: int, validation: Mapping[str, Mapping[str, float]]
) -> str:
    """Markdown with the metadata block that the hub reads."""
    policy = setup.policy
    base = policy.model_name
    base_line = ""
    if base is None:
        base = "a model trained from scratch"
    elif Path(base).is_dir():
        # A card is for others: no paths of this machine.
        base = Path(base).resolve().name
    else:
        # Only here: the hub refuses a card whose base_model is no repository's name.
        base_line = f"base_model: {base}\n"
    loss = policy.reward_model_cfg.reward_model_type
    meaning = LOSSES[loss].meaning.format(grades=", ".join(setup.heads.attributes))
    if setup.heads.are_estimates:
        meaning += _ESTIMATES.format(len(setup.heads.weights))
    results = "This checkpoint was not validated."
    if validation:
        sizes = {name: len(dataset) for name, dataset in setup.validation_sets.items()}
        has_grades = bool(policy.reward_model_cfg.labels)
        columns = result_columns(setup.ranking, has_grades=has_grades)
        results = markdown_table(result_rows(sizes, validation), columns)
    data = []
    for name, dataset in setup.training_sets.items():
        data.append(f"- {name}: {dataset.counts.summary()}")
    return _CARD.format(
        base_line=base_line,
        base=base,
        loss=loss,
        meaning=meaning,
        step=step,
        batch_size=policy.train_global_batch_size,
        precision=policy.precision,
        results=results,
        data="\n".join(data),
    )


_ESTIMATES = (
    " It is the mean of {} heads that began with different weights; their spread is its "
    "uncertainty."
)
_CARD = """---
library_name: transformers
tags: [reward-model, treeward]
{base_line}---

# Reward model

{base}, {step} optimiser steps of {batch_size} comparisons in {precision}, trained with treeward; \
loss: {loss}.
A higher score is better. {meaning}

## Results

{results}

## Training data

{data}

## Use

```bash
treeward score THIS_FOLDER --data conversations.jsonl --output scores.jsonl
```

With plain transformers, `AutoModelForSequenceClassification.from_pretrained(THIS_FOLDER, \
dtype="float32")` gives the same values as its logits; render conversations with the tokenizer's \
chat template and tokenize with `add_special_tokens=False`.
"""
