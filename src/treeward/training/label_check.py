"""`check_labels`: which labels of comparisons look wrong to a head on a frozen backbone.

    config = load_file(RewardModelRunConfig, None, values={...})    # with freeze_backbone
    checked = check_labels(config)
    checked.lines[0]     # {"pair": "f3a0...", "margin": -2.9, "proposal": "drop", ...}
    checked.numbers      # `LabelNumbers`

The backbone reads the data once, by `with_features`: each prompt once for all its completions, and
a second start uses what the first has kept. `evaluation.label_check` has the mathematics and the
page.

Shapes: P pairs, C completions of a comparison, D features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from treeward.config.data import Proposal
from treeward.config.run import RewardModelRunConfig
from treeward.data.conversation import last_text
from treeward.data.datasets import open_dataset
from treeward.data.pair_labels import pair_name
from treeward.data.preference import Preference, pair_ids
from treeward.errors import DataError, ModelError
from treeward.evaluation.label_check.cross_fitting import (
    NUM_FOLDS,
    CrossFit,
    FeaturePairs,
    cross_fit,
)
from treeward.evaluation.label_check.label_numbers import (
    CheckedPairs,
    LabelNumbers,
    label_numbers,
    suspects_of,
)
from treeward.evaluation.label_check.planted_flips import SHARES, plant_flips
from treeward.losses import ranked_pairs
from treeward.progress import ShownProgress
from treeward.training.features import with_features
from treeward.training.setup import RewardModelSetup, set_up

_FEWEST_PROMPTS = 4 * NUM_FOLDS  # four in each fold
_MOST_SHOWN = 500
"""Pairs on the page, the most suspicious first; the file has all."""


@dataclass(frozen=True, slots=True)
class LabelCheck:
    """`lines`: of labels.jsonl, the most suspicious pair first, those that were not read last.
    `examples`: the first of these pairs with their texts, as a report shows examples.
    `num_unread`: pairs that were left out, as they are too long or have equal tokens."""

    numbers: LabelNumbers
    lines: tuple[dict[str, Any], ...]
    examples: tuple[dict[str, Any], ...]
    num_unread: int
    penalties: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _ReadPairs:
    """The pairs of all training sets: their features, their ids, and where the first of each is."""

    features: FeaturePairs
    ids: list[int]
    places: list[str]
    sources: list[str]
    longer: list[int]


def check_labels(config: RewardModelRunConfig, *, show_progress: bool = True) -> LabelCheck:
    """Check the labels of the training sets of a run whose backbone is frozen.

    Raises `ConfigError` for a backbone that is not frozen and for `data.labels`, `DataError` for
    too few prompts, `ModelError` for features that are not finite, and what `set_up` raises.
    """
    if not config.policy.reward_model_cfg.freeze_backbone:
        need = "true: only a head is fitted"
        raise config.error("policy.reward_model_cfg.freeze_backbone", need, "leave the key out")
    if config.data.labels:
        # A pair that they drop has no features, and one that they turn round another label.
        need = "none: the labels of the data are checked"
        raise config.error("data.labels", need, "leave the key out")
    setup = with_features(set_up(config, show_progress=show_progress), show_progress)
    read = _read_pairs(setup)
    with ShownProgress(unit="folds", enabled=show_progress) as progress:
        fitted = cross_fit(
            read.features,
            on_progress=lambda num_done: progress.show("fitting heads", num_done, NUM_FOLDS),
        )
    pairs = CheckedPairs(
        margin_P=fitted.margin_P,
        spread_P=fitted.spread_P,
        prompt_P=read.features.prompt_P,
        sources=read.sources,
        longer_P=np.array(read.longer, dtype=np.int64),
    )
    with ShownProgress(unit="shares", enabled=show_progress) as progress:
        planted = plant_flips(
            read.features,
            fitted,
            pairs,
            on_progress=lambda num_done: progress.show("flipping labels", num_done, len(SHARES)),
        )
    lines = _lines(read, pairs)
    return _with_texts(config, lines, label_numbers(pairs, planted), fitted)


def _read_pairs(setup: RewardModelSetup) -> _ReadPairs:
    """Raises `DataError` for fewer than `_FEWEST_PROMPTS` prompts."""
    differences = []
    weights: list[float] = []
    prompts: list[int] = []
    ids: list[int] = []
    places: list[str] = []
    sources: list[str] = []
    longer: list[int] = []
    for dataset in setup.training_sets.values():
        ids += dataset.ids_of_pairs().tolist()
        features_of = setup.features[dataset.fingerprint]
        for index in range(len(dataset)):
            comparison = dataset[index]
            # A head that reads several hidden states has them side by side.
            features_CD = features_of(index).float().flatten(start_dim=1).numpy()
            # In the order of the ids; a comparison counts 1, however many pairs it has.
            pairs = ranked_pairs([comparison.ranks])
            better_P = pairs.better_P.tolist()
            worse_P = pairs.worse_P.tolist()
            differences.append(features_CD[better_P] - features_CD[worse_P])
            weights += pairs.weight_P.tolist()
            num_pairs = len(better_P)
            prompts += [comparison.prompt] * num_pairs
            places += [comparison.where] * num_pairs
            sources += [comparison.subset] * num_pairs
            for better, worse in zip(better_P, worse_P, strict=True):
                longer.append(comparison.lengths[better] - comparison.lengths[worse])
    differences_PD = np.concatenate(differences)
    if not np.isfinite(differences_PD).all():
        raise ModelError(
            "the model's hidden states are not all finite",
            where=str(setup.policy.model_name),
            need="finite numbers, to fit a head on them",
            fix="set policy.precision=float32",
        )
    num_prompts = len(set(prompts))
    if num_prompts < _FEWEST_PROMPTS:
        raise DataError(
            "there are too few prompts to check labels by those of other prompts",
            where=", ".join(dataset.name for dataset in setup.training_sets.values()),
            got=f"{num_prompts} different prompts with {len(ids)} pairs",
            need=f"{_FEWEST_PROMPTS} different prompts or more",
            fix="add data, or read the pairs yourself",
        )
    features = FeaturePairs(differences_PD, np.array(weights), np.array(prompts, dtype=np.int64))
    return _ReadPairs(features, ids, places, sources, longer)


def _lines(read: _ReadPairs, pairs: CheckedPairs) -> list[dict[str, Any]]:
    """The lines of the pairs that were read, the most suspicious first; one for all copies of a
    pair."""
    is_suspect_P = suspects_of(pairs)
    probability_P = pairs.probability_P
    sureness_P = pairs.sureness_P
    lines: dict[int, dict[str, Any]] = {}
    for place in np.argsort(sureness_P, kind="stable").tolist():
        proposal: Proposal = "keep"
        # Dropping beats flipping where either helps: docs/labels.md has the measurements.
        if is_suspect_P[place]:
            proposal = "drop"
        line = {
            "pair": pair_name(read.ids[place]),
            "where": read.places[place],
            "source": read.sources[place],
            "margin": float(pairs.margin_P[place]),
            "spread": float(pairs.spread_P[place]),
            "probability": float(probability_P[place]),
            "proposal": proposal,
        }
        # A copy has the same features in the same fold, and so the same margin.
        lines.setdefault(read.ids[place], line)
    return list(lines.values())


def _with_texts(
    config: RewardModelRunConfig,
    lines: list[dict[str, Any]],
    numbers: LabelNumbers,
    fitted: CrossFit,
) -> LabelCheck:
    """The result, with the texts of the pairs that the page shows, and lines of pairs that were
    not read. The data is read again, because tokens are no texts."""
    shown = {line["pair"]: line for line in lines[:_MOST_SHOWN]}
    known = {line["pair"] for line in lines}
    examples: dict[str, dict[str, Any]] = {}
    unread: dict[str, dict[str, Any]] = {}
    for preference, where, name in _pairs_of(config):
        if name in shown and name not in examples:
            examples[name] = _example(preference, shown[name])
        if name not in known and name not in unread:
            # Another model may read it: the file has a line for each pair of the data.
            unread[name] = {
                "pair": name,
                "where": where,
                "source": preference.task_name,
                "margin": None,
                "spread": None,
                "probability": None,
                "proposal": "keep",
            }
    return LabelCheck(
        numbers=numbers,
        lines=(*lines, *unread.values()),
        # Worst first, as the lines are.
        examples=tuple(examples[name] for name in shown),
        num_unread=len(unread),
        penalties=fitted.penalties,
    )


def _pairs_of(config: RewardModelRunConfig) -> Iterator[tuple[Preference, str, str]]:
    """Each ordered pair of the training sets, as a preference of two completions; its place, and
    its name."""
    for section in config.training_sets:
        for preference, where in open_dataset(section):
            for better in preference.completions:
                for worse in preference.completions:
                    if better.rank < worse.rank:
                        pair = replace(preference, completions=(better, worse))
                        [pair_id] = pair_ids(pair, pair.completions)
                        yield pair, where, pair_name(pair_id)


def _example(pair: Preference, line: Mapping[str, Any]) -> dict[str, Any]:
    """The pair with its texts: a row of a report's examples."""
    sureness = 0.0
    # Completions with equal features have neither margin nor spread.
    if line["spread"] > 0:
        sureness = line["margin"] / line["spread"]
    lengths = [len(last_text(completion.messages)) for completion in pair.completions]
    outcome = "wrong"
    if line["margin"] > 0:
        outcome = "right"
    # The table's columns have the names of an evaluation; the page gives them other titles.
    return {
        "id": line["where"],
        "subset": line["source"],
        "model": line["proposal"],
        "outcome": outcome,
        "margin": sureness,
        "context": pair.context,
        "ranks": [0, 1],
        "completions": [completion.messages for completion in pair.completions],
        "lengths": lengths,
        "pair": line["pair"],
    }
