"""The folder of a finished run: the model, its card, and its scoring contract with the constants of rewards.

    export_final(setup, model, step, validation, folder)

The constants of `reward_shaping` are fitted on the run's validation sets.

Shapes: S sequences, H heads, P pairs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit
from torch.distributed import ProcessGroup

from treeward import processes
from treeward.config.loss import LOSS_KINDS
from treeward.config.run import RewardModelRunConfig
from treeward.data.datasets import open_dataset
from treeward.losses import Heads, ranked_pairs
from treeward.model.contract import RewardCalibration, write_contract
from treeward.model.export import export_model
from treeward.model.pretrained import DTYPES
from treeward.model.reward_model import RewardModel
from treeward.scoring.calibration import calibrate
from treeward.scoring.golden import as_saved, sign_exported
from treeward.scoring.scorer import Scorer
from treeward.tables import Column, markdown_table
from treeward.training.setup import RewardModelSetup

logger = logging.getLogger(__name__)

_MOST_FITTED = 2000  # comparisons of a set, for a weight of each head

_COLUMNS = [
    Column("set", title="validation set"),
    Column("comparisons"),
    Column("accuracy", format=".3f"),
    Column("loss", format=".4f"),
    Column("reward_margin", title="margin", format=".2f"),
    Column("chosen_rewards", title="chosen", format=".2f"),
    Column("rejected_rewards", title="rejected", format=".2f"),
]
_GRADE_COLUMNS = [
    *_COLUMNS[:2],
    Column("mse", title="squared error", format=".3f"),
    Column("pearson", title="correlation", format=".3f"),
    *_COLUMNS[2:4],
]
_LENGTH_COLUMNS = [
    Column("set", title="validation set"),
    Column("accuracy_longer_right", title="better completion longer", format=".3f"),
    Column("accuracy_shorter_right", title="better completion shorter", format=".3f"),
    Column("length_controlled_accuracy", title="mean of both (length-controlled)", format=".3f"),
]


def export_final(
    setup: RewardModelSetup, model: RewardModel, step: int, validation: Mapping[str, Mapping[str, float]], folder: Path
) -> None:
    """Write `model`, as it was after `step` steps, to `folder`. `validation`: its metrics, by validation set."""
    config, renderer, positions = setup.config, setup.renderer, model.max_positions
    saved = DTYPES[config.checkpointing.export_dtype or config.policy.precision]
    if renderer.max_length and renderer.truncation != "truncate_left" and renderer.max_length < (positions or math.inf):
        logger.info(
            "The model has seen conversations of up to %d tokens. Longer ones are scored, with a warning, up to its "
            "%s positions.", renderer.max_length, positions or "unlimited",
        )  # fmt: skip
    export_model(model, setup.tokenizer, folder, chat_template=renderer.chat_template, dtype=saved)
    card = model_card(setup, step, validation)
    processes.on_main(lambda: (folder / "README.md").write_text(card, encoding="utf-8"))
    heads = fitted_heads(setup, model, saved)
    contract = sign_exported(folder, model=model, renderer=renderer, heads=heads.contract(), mesh=setup.mesh)
    with processes.patience() as group:  # the main process reads the validation sets
        if (shaping := config.reward_shaping) is not None:
            calibration = _fitted(setup, model, heads, saved, group) if shaping.uses_calibration else None
            shaped = contract.model_copy(update={"reward_shaping": shaping, "calibration": calibration})
            processes.on_main(lambda: write_contract(shaped, folder), group)


def fitted_heads(setup: RewardModelSetup, model: RewardModel, saved: torch.dtype) -> Heads:
    """The heads of the run, with weights fitted on its validation sets, else its training sets, if configured. Every
    process calls it."""
    if setup.config.policy.reward_model_cfg.attribute_weights != "fit":
        return setup.heads
    sets = (setup.validation_sets or setup.training_sets).values()
    comparisons = [comparison for dataset in sets for comparison in dataset[:_MOST_FITTED]]
    logger.info("Fitting the weights of the heads to the order of %d comparisons.", len(comparisons))
    with as_saved(model, saved, setup.mesh) as exact:
        values_SH = exact.score_tokens([ids for comparison in comparisons for ids in comparison.token_ids])
    pairs = ranked_pairs([comparison.ranks for comparison in comparisons])
    weights = weights_of_order((values_SH[pairs.better_P] - values_SH[pairs.worse_P]).double().numpy())
    if weights is None:
        logger.warning("The weights of the heads stay as they are: there are no pairs to fit them to.")
        return setup.heads
    return replace(setup.heads, weights=weights)


def weights_of_order(differences_PH: NDArray[np.float64]) -> tuple[float, ...] | None:
    """The weights whose score orders pairs best, by logistic regression without a constant, with a small penalty; None
    without pairs. `differences_PH`: values of the better completion less the worse one's."""
    units_H = differences_PH.std(axis=0) if len(differences_PH) else np.zeros(1)
    if not units_H.all():
        return None
    x_PH = differences_PH / units_H
    penalty = 1 / len(x_PH)  # as of one pair in all

    def loss(weights_H: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        margins_P = x_PH @ weights_H
        slope_H = -(x_PH * expit(-margins_P)[:, None]).mean(axis=0)
        value = np.logaddexp(0.0, -margins_P).mean() + penalty * (weights_H**2).sum()
        return float(value), slope_H + 2 * penalty * weights_H

    weights_H = minimize(loss, np.zeros(x_PH.shape[1]), jac=True).x / units_H
    return tuple(weights_H.tolist())


def _fitted(
    setup: RewardModelSetup, model: RewardModel, heads: Heads, saved: torch.dtype, group: ProcessGroup | None
) -> RewardCalibration:
    datasets = setup.config.validation_sets
    names = ", ".join(dataset.name or dataset.dataset_name for dataset in datasets)
    logger.info("Fitting the constants of reward_shaping on the validation sets: %s.", names)
    preferences = processes.on_main(lambda: [row for dataset in datasets for row, _ in open_dataset(dataset)], group)
    with as_saved(model, saved, setup.mesh) as exact:
        scorer = Scorer(exact, setup.renderer, head_weights=heads.weights)
        return calibrate(scorer, preferences, name=f"validation sets of the run ({names})")


def result_columns(config: RewardModelRunConfig) -> list[Column]:
    """The columns of a results table: the usual ones, and the metric that chose the checkpoint."""
    key, columns = config.ranking_metric, _GRADE_COLUMNS if config.policy.reward_model_cfg.labels else _COLUMNS
    if key is None or key.metric in {column.key for column in columns}:
        return columns
    return [*columns[:3], Column(key.metric, title=key.metric.replace("_", " "), format=".3f"), *columns[3:]]


def result_rows(sizes: Mapping[str, int], validation: Mapping[str, Mapping[str, float]]) -> list[dict[str, object]]:
    """The rows of a results table. `sizes`: how many comparisons of each set were measured."""
    return [{"set": name, "comparisons": sizes.get(name), **means} for name, means in validation.items()]


def model_card(setup: RewardModelSetup, step: int, validation: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown with the metadata block that the hub reads."""
    policy, base = setup.config.policy, setup.config.policy.model_name
    on_hub = base is not None and not Path(base).is_dir()
    if base is not None and not on_hub:
        base = Path(base).resolve().name  # a card is for others: no paths of this machine
    data = "\n".join(f"- {name}: {dataset.counts.summary()}" for name, dataset in setup.training_sets.items())
    results = _results(setup, validation) if validation else ["This checkpoint was not validated."]
    loss = policy.reward_model_cfg.reward_model_type
    order = f"{_ORDER}{_LOG_ODDS if LOSS_KINDS[loss].gives_log_odds else ''}."
    return _CARD.format(
        base_line=f"base_model: {base}\n" if on_hub else "",
        base=base or "a model trained from scratch",
        loss=loss,
        meaning=(_GRADES.format(", ".join(setup.heads.attributes)) if setup.heads.attributes else order)
        + (_ESTIMATES.format(len(setup.heads.weights)) if setup.heads.are_estimates else ""),
        step=step,
        batch_size=policy.train_global_batch_size,
        precision=policy.precision,
        results="\n\n".join(results),
        data=data,
    )


_ORDER = "Only differences of scores of completions of the same prompt have a meaning"
_LOG_ODDS = ": P(a is preferred to b) = sigmoid(score(a) - score(b))"
_GRADES = "It is a weighted sum of predicted grades, as reward_contract.json says: {}."
_ESTIMATES = " It is the mean of {} heads, trained on different weights of the data; their spread is its uncertainty."
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


def _results(setup: RewardModelSetup, validation: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Tables: the metrics, and the effect of length."""
    rows = result_rows({name: len(dataset) for name, dataset in setup.validation_sets.items()}, validation)
    parts = [markdown_table(rows, result_columns(setup.config))]
    if any("length_controlled_accuracy" in means for means in validation.values()):
        caption = "Accuracy where the better completion is the longer, and the shorter:"
        parts += [caption, markdown_table(rows, _LENGTH_COLUMNS)]
    return parts
