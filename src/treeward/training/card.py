"""The card of an exported model, and the table of its results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from treeward.config.checkpointing import MetricKey
from treeward.config.loss import LOSSES
from treeward.config.policy import RewardModelConfig
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
_STEP_COLUMNS = [
    _COLUMNS[0],
    Column("comparisons", title="problems"),
    Column("accuracy", title="accuracy by step", format="percent"),
    Column("first_error_accuracy", title="first error", format="percent"),
    Column("processbench_f1", title="ProcessBench F1", format="percent"),
    Column("loss", format="number"),
]
_NUM_FIRST_COLUMNS = 3
"""Columns that stand before that of the metric which chose the checkpoint."""


def result_columns(ranking: MetricKey | None, section: RewardModelConfig) -> list[Column]:
    """The columns of a results table: the usual ones of such a reward model, and `ranking`, the
    metric that chose the checkpoint."""
    columns = _COLUMNS
    if section.labels:
        columns = _GRADE_COLUMNS
    elif section.learns_steps:
        columns = _STEP_COLUMNS
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
    elif Path(base).expanduser().is_dir():
        # A card is for others: no paths of this machine.
        base = Path(base).expanduser().resolve().name
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
        columns = result_columns(setup.ranking, policy.reward_model_cfg)
        results = markdown_table(result_rows(sizes, validation), columns)
    data = []
    for name, dataset in setup.training_sets.items():
        data.append(f"- {name}: {dataset.counts.summary()}")
    unit = "comparisons"
    if policy.reward_model_cfg.learns_steps:
        unit = "problems, each with its solutions as steps,"
    return _CARD.format(
        plain_use=_plain_use(setup),
        unit=unit,
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


def _plain_use(setup: RewardModelSetup) -> str:
    """How the model is used without treeward, where transformers has a class for it."""
    config = setup.model.hf.config
    # Many families have no such class in transformers, as OLMo 2: there treeward makes it.
    if setup.policy.reward_model_cfg.learns_steps:
        auto_class: Any = AutoModelForTokenClassification
        text = _PLAIN_STEPS
        text_without_class = _NO_PLAIN_STEPS
    else:
        auto_class = AutoModelForSequenceClassification
        text = _PLAIN_SCORES
        text_without_class = _NO_PLAIN_SCORES
    # A model with code of its own brings its classes.
    has_class = type(config) in auto_class._model_mapping or hasattr(config, "auto_map")
    if not has_class:
        text = text_without_class
    return text.format(mark=setup.model.step_token, family=config.model_type)


_ESTIMATES = (
    " It is the mean of {} heads that began with different weights; their spread is its "
    "uncertainty."
)
_CARD = """---
library_name: transformers
tags: [reward-model, treeward]
{base_line}---

# Reward model

{base}, {step} optimiser steps of {batch_size} {unit} in {precision}, trained with treeward; \
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

{plain_use}
"""
_PLAIN_SCORES = """\
With plain transformers, `AutoModelForSequenceClassification.from_pretrained(THIS_FOLDER, \
dtype="float32")` gives the same values as its logits; render conversations with the tokenizer's \
chat template and tokenize with `add_special_tokens=False`."""
_NO_PLAIN_SCORES = """\
transformers has no sequence classifier of {family}, so it cannot load this model: treeward does. \
The score is the output of the linear layer `score` at the last token of a conversation."""
_NO_PLAIN_STEPS = """\
transformers has no token classifier of {family}, so it cannot load this model: treeward does. \
Each step is read at the `{mark}` after it, by the two outputs of the layer `score`: that the step \
is wrong, and right."""
_PLAIN_STEPS = """\
With plain transformers, `AutoModelForTokenClassification.from_pretrained(THIS_FOLDER, \
dtype="float32")` gives two logits at each token. Write `{mark}` after each step of the \
completion: there their softmax is the probability that the step is wrong (LABEL_0), and right \
(LABEL_1). Render conversations with the tokenizer's chat template and tokenize with \
`add_special_tokens=False`."""
