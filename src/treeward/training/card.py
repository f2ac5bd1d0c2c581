"""The card of an exported model, and the table of its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from treeward.config.loss import LOSSES
from treeward.config.run import RewardModelRunConfig
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


def result_columns(config: RewardModelRunConfig) -> list[Column]:
    """The columns of a results table: the usual ones, and the metric that chose the checkpoint."""
    key, columns = (
        config.ranking_metric,
        _GRADE_COLUMNS if config.policy.reward_model_cfg.labels else _COLUMNS,
    )
    if key is None or key.metric in {column.key for column in columns}:
        return columns
    ranking = Column(
        key.metric, title=key.metric.replace("_", " "), format=metric_format(key.metric)
    )
    return [*columns[:3], ranking, *columns[3:]]


def result_rows(
    sizes: Mapping[str, int], validation: Mapping[str, Mapping[str, float]]
) -> list[dict[str, object]]:
    """The rows of a results table. `sizes`: how many comparisons of each set were measured."""
    return [
        {"set": name, "comparisons": sizes.get(name), **means} for name, means in validation.items()
    ]


def model_card(
    setup: RewardModelSetup, step: int, validation: Mapping[str, Mapping[str, float]]
) -> str:
    """Markdown with the metadata block that the hub reads."""
    policy, base = setup.config.policy, setup.config.policy.model_name
    on_hub = base is not None and not Path(base).is_dir()
    if base is not None and not on_hub:
        base = Path(base).resolve().name  # a card is for others: no paths of this machine
    data = "\n".join(
        f"- {name}: {dataset.counts.summary()}" for name, dataset in setup.training_sets.items()
    )
    rows = result_rows(
        {name: len(dataset) for name, dataset in setup.validation_sets.items()}, validation
    )
    table = markdown_table(rows, result_columns(setup.config))
    loss = policy.reward_model_cfg.reward_model_type
    meaning = LOSSES[loss].meaning.format(grades=", ".join(setup.heads.attributes))
    if setup.heads.are_estimates:
        meaning += _ESTIMATES.format(len(setup.heads.weights))
    return _CARD.format(
        base_line=f"base_model: {base}\n" if on_hub else "",
        base=base or "a model trained from scratch",
        loss=loss,
        meaning=meaning,
        step=step,
        batch_size=policy.train_global_batch_size,
        precision=policy.precision,
        results=table if validation else "This checkpoint was not validated.",
        data=data,
    )


_ESTIMATES = " It is the mean of {} heads that began with different weights; their spread is its uncertainty."
_CARD = """---
library_name: transformers
tags: [reward-model, treeward]
{base_line}---

# Reward model

{base}, {step} optimiser steps of {batch_size} comparisons in {precision}, trained with treeward; loss: {loss}.
A higher score is better. {meaning}

## Results

{results}

## Training data

{data}

## Use

```bash
treeward score THIS_FOLDER --data conversations.jsonl --output scores.jsonl
```

With plain transformers, `AutoModelForSequenceClassification.from_pretrained(THIS_FOLDER, dtype="float32")` gives the \
same values as its logits; render conversations with the tokenizer's chat template and tokenize with \
`add_special_tokens=False`.
"""
