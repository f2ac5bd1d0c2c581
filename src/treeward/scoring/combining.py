"""From the values of a conversation to its score: the weights of heads, or what is made of steps.

values_of(model, sequences)                   # the values of each head, or of each step
score_of(values, contract.heads, contract.steps)
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from treeward.config.scoring import HeadWeights
from treeward.errors import ConfigError, ModelError
from treeward.model.contract import HeadContract, ScoringContract, StepsContract
from treeward.model.reward_model import RewardModel
from treeward.scoring.steps import Steps
from treeward.tree.token_tree import TokenIds


def weighted_heads(
    labels: Sequence[str],
    weights: HeadWeights,
) -> list[HeadContract]:
    """The heads of a model with `labels`.

    `weights`: one for each label in order, or by name, where labels that are not named have none;
    "mean": all alike. Raises `ConfigError` for weights of other labels, for another number of them,
    and for weights that are all zero; `ModelError` for what makes a score of steps.
    """
    if weights == "mean":
        weights = (1.0 / len(labels),) * len(labels)
    if isinstance(weights, str):
        raise ModelError(
            "this is for the steps of a process reward model, and the model has heads",
            field="head_weights",
            got=weights,
            need="a number for each head, or mean",
        )
    got: Any
    if isinstance(weights, Mapping):
        got = dict(weights)
        # A name that two heads have says nothing about either.
        fits = all(list(labels).count(name) == 1 for name in weights)
        values = [weights.get(label, 0.0) for label in labels]
    else:
        values = list(weights)
        got = values
        fits = len(values) == len(labels)
    if not fits or not any(values) or not all(map(math.isfinite, values)):
        names = ", ".join(labels)
        raise ConfigError(
            "the weights of the heads do not fit the model",
            field="head_weights",
            got=got,
            need=f"a finite number for each of the labels {names}, not all of them zero",
        )
    if len(labels) == 1:  # transformers' LABEL_0 says nothing
        return [HeadContract(weight=values[0])]
    heads = []
    for label, weight in zip(labels, values, strict=True):
        meaning = "the attribute of this name"
        heads.append(HeadContract(name=label, meaning=meaning, weight=weight))
    return heads


def combined_heads(values: Sequence[float], heads: Sequence[HeadContract]) -> float:
    """The score: sum of weight times value over the heads."""
    return sum(head.weight * value for head, value in zip(heads, values, strict=True))


def values_of(model: RewardModel, sequences: Sequence[TokenIds]) -> list[list[float]]:
    """The values of each sequence: one for each head, or of a process reward model the log-odds of
    each step."""
    counts = [model.num_values(ids) for ids in sequences]
    values_VH = model.score_tokens(sequences)
    return [rows.flatten().tolist() for rows in values_VH.split(counts)]


def score_of(
    values: Sequence[float], heads: Sequence[HeadContract], steps: StepsContract | None
) -> float:
    """The score that a contract makes of the values of a conversation (`values_of`)."""
    if steps is None:
        return combined_heads(values, heads)
    score, _ = Steps(steps.token, steps.score).score(values)
    return score


def head_names_of(model: RewardModel, contract: ScoringContract | None) -> tuple[str, ...]:
    """The names in the contract, or else in the model; numbers where they do not fit its heads."""
    names: Sequence[object] = ()
    if contract is not None:
        names = [head.name for head in contract.heads]
    if not names:
        names = model.score_parts
    if not names:
        names = list((model.hf.config.id2label or {}).values())
    if len(names) != model.num_heads:
        names = range(model.num_heads)
    return tuple(map(str, names))


def head_weights_of(
    weights: HeadWeights | None,
    names: Sequence[str],
) -> tuple[float, ...] | None:
    """The weight of each head in the score; None for a single head, whose value is the score."""
    if weights is None and len(names) == 1:
        return None
    if weights is None:
        option = shlex.quote(",".join(f"{name}=1" for name in names[:2]))
        argument = dict.fromkeys(names[:2], 1.0)
        raise ModelError(
            "the model has several heads, and nothing says how they make one score",
            got=f"{len(names)} heads: {', '.join(names)}",
            fix=f"--head-weights {option} of treeward score, eval, bon and serve; in Python and "
            f"in a configuration head_weights={argument}; Score.heads has all values",
        )
    return tuple(float(head.weight) for head in weighted_heads(names, weights))
