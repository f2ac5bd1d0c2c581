"""`treeward check-labels` on labels that are flipped on purpose: what it finds, and what it is worth.

    python benchmarks/wrong_labels.py [--seeds 3] [--shares 0.05 0.1 0.2] [--model SmolLM2]

1. Bundled data, a small model from scratch. Half of the comparisons, with as many flipped labels,
   train the model that checks the other half. A model is then trained on this half: on all of it,
   without the suspects, with the suspects turned round, and on the labels before they were flipped.
2. hh_harmless of the shared data, with `--model`: a head on its frozen hidden states is what
   checks, and what is trained.

3. What `check-labels` tells of such flips on the labels as they are, beside what was found.

Accuracies are on held-out labels that nobody has flipped: the mean over the seeds with a 95 %
interval (Student's t). Without the shared data or the model, part 2 says so and is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import hh_harmless, train_quickstart
from numpy.typing import NDArray
from scipy import stats

from treeward.config.data import DatasetConfig
from treeward.config.load import load_file
from treeward.config.run import RewardModelRunConfig
from treeward.data.datasets import open_dataset
from treeward.evaluation.label_check.cross_fitting import FeaturePairs, cross_fit, fit_head
from treeward.evaluation.label_check.label_numbers import CheckedPairs, label_numbers, suspects_of
from treeward.evaluation.label_check.label_page import FLIP_COLUMNS, flip_rows
from treeward.evaluation.label_check.planted_flips import plant_flips
from treeward.losses import ranked_pairs
from treeward.tables import Column, results_table
from treeward.training.features import with_features
from treeward.training.label_check import check_labels
from treeward.training.setup import set_up

_LONGEST = 1024  # tokens of a conversation of part 2
_SUSPECTS = {"dropped": "drop", "flipped back": "flip", "soft": "soft"}
"""What `data.suspects` is in each variant that has it."""

Row = dict[str, Any]
Flags = NDArray[np.bool_]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--rows", type=int, default=3000, help="bundled comparisons")
    parser.add_argument("--steps", type=int, default=100, help="of a run on bundled data")
    parser.add_argument("--model", default=None, help="folder or hub name, for part 2")
    parser.add_argument("--cache", default=None, help="folder of tokens and hidden states")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = Path(arguments.cache or folder / "cache")
        if arguments.rows:
            _bundled(folder, cache, arguments)
        data = hh_harmless(arguments.model)
        if data is not None:
            _hh(data, cache, arguments)


# --- the bundled data, models from scratch --------------------------------------------------------


def _bundled(folder: Path, cache: Path, arguments: argparse.Namespace) -> None:
    rows: list[Row] = []
    for preference, _ in open_dataset(DatasetConfig(dataset_name="Bundled")):
        ranked = sorted(preference.completions, key=lambda completion: completion.rank)
        if ranked[0].rank < ranked[-1].rank and len(rows) < arguments.rows:
            # A pair of each, so that a flip is one of one label.
            pair = {"context": preference.context, "better": ranked[0], "worse": ranked[-1]}
            rows.append(pair)
    half = len(rows) // 2
    found: list[Row] = []
    accuracies: list[Row] = []
    for share in arguments.shares:
        for seed in range(arguments.seeds):
            flips = np.random.default_rng(seed).random(len(rows)) < share
            run = folder / f"bundled_{share}_{seed}"
            run.mkdir()
            other = _write(run / "other.jsonl", rows[half:], flips[half:])
            noisy = _write(run / "noisy.jsonl", rows[:half], flips[:half])
            clean = _write(run / "clean.jsonl", rows[:half], np.zeros(half, dtype=bool))
            backbone = _train(other, run / "backbone", cache, seed, arguments.steps)
            checked = check_labels(_check_config(noisy, backbone["model"], cache))
            labels = run / "labels.jsonl"
            text = "".join(json.dumps(line) + "\n" for line in checked.lines)
            labels.write_text(text, encoding="utf-8")
            margins = np.zeros(half)
            is_suspect = np.zeros(half, dtype=bool)
            for line in checked.lines:
                place = int(line["where"].rpartition(":")[2]) - 1
                if line["margin"] is not None:
                    margins[place] = line["margin"] / line["spread"]
                    is_suspect[place] = line["proposal"] == "drop"
            found.append(_found(share, flips[:half], margins, is_suspect, checked.numbers.bound))
            accuracy: Row = {"share": share}
            variants = {"all": noisy, "dropped": noisy, "flipped back": noisy, "soft": noisy}
            variants["clean"] = clean
            for name, path in variants.items():
                options = []
                if name in _SUSPECTS:
                    options = [f"+data.labels={labels}", f"+data.suspects={_SUSPECTS[name]}"]
                trained = _train(path, run / name, cache, seed, arguments.steps, options)
                accuracy[name] = trained["accuracy"]
            accuracies.append(accuracy)
    title = f"Bundled data, {half:,} pairs, a model from scratch, {arguments.steps} steps"
    _tell(title, found, accuracies)


def _write(path: Path, rows: Sequence[Row], flips: Flags) -> Path:
    lines = []
    for row, is_flipped in zip(rows, flips.tolist(), strict=True):
        completions = []
        for name, rank in (("better", 0), ("worse", 1)):
            messages = row[name].messages
            if is_flipped:
                rank = 1 - rank
            completions.append({"rank": rank, "completion": messages})
        lines.append(json.dumps({"context": row["context"], "completions": completions}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _train(
    path: Path, folder: Path, cache: Path, seed: int, steps: int, options: Sequence[str] = ()
) -> Row:
    """The folder of the model, and its accuracy on the bundled validation set."""
    validation = "{dataset_name: Bundled, split: validation, name: plain}"
    data = f"{{train: [{{data_path: {path}}}], validation: [{validation}], cache_dir: {cache}}}"
    overrides = [
        "~data",
        f"+data={data}",
        "rm.max_num_epochs=100",
        *options,
    ]
    outcome = train_quickstart(folder, seed=seed, steps=steps, overrides=overrides)
    return {"model": outcome.model_folder, "accuracy": outcome.validation["plain"]["accuracy"]}


def _check_config(path: Path, model: object, cache: Path) -> RewardModelRunConfig:
    values = {
        "policy": {
            "model_name": str(model),
            "max_total_sequence_length": _LONGEST,
            "reward_model_cfg": {"freeze_backbone": True},
        },
        "data": {"train": [{"data_path": str(path)}], "cache_dir": str(cache)},
    }
    return load_file(RewardModelRunConfig, None, values=values)


# --- HH, a head on a frozen model -----------------------------------------------------------------


def _hh(data: Path, cache: Path, arguments: argparse.Namespace) -> None:
    pairs, lengths = _features(data / "train.jsonl.gz", arguments.model, cache)
    held_out, _ = _features(data / "validation.jsonl.gz", arguments.model, cache)
    found: list[Row] = []
    told: list[Row] = []
    accuracies: list[Row] = []
    for share in [0.0, *arguments.shares]:
        for seed in range(arguments.seeds):
            flips = np.random.default_rng(seed).random(len(lengths)) < share
            signs = np.where(flips, -1, 1)
            noisy_PD = pairs.differences_PD * signs[:, None].astype(np.float32)
            noisy = FeaturePairs(noisy_PD, pairs.weight_P, pairs.prompt_P)
            fitted = cross_fit(noisy)
            checked = CheckedPairs(
                margin_P=fitted.margin_P,
                spread_P=fitted.spread_P,
                prompt_P=pairs.prompt_P,
                sources=["hh"] * len(lengths),
                longer_P=lengths * signs,
            )
            is_suspect = suspects_of(checked)
            numbers = label_numbers(checked, ())
            if share == 0 and seed == 0:
                told = flip_rows(label_numbers(checked, plant_flips(noisy, fitted, checked)))
            if share > 0:
                row = _found(share, flips, checked.sureness_P, is_suspect, numbers.bound)
                found.append(row)
            penalty = statistics.median(fitted.penalties)
            ones = np.ones(len(flips))
            # What each proposal makes of the suspects: their weights and their targets.
            variants = {
                "all": (noisy_PD, ones, ones),
                "dropped": (noisy_PD, np.where(is_suspect, 0.0, 1.0), ones),
                "flipped back": (noisy_PD, ones, np.where(is_suspect, 0.0, 1.0)),
                "soft": (noisy_PD, ones, np.where(is_suspect, checked.probability_P, 1.0)),
                "clean": (pairs.differences_PD, ones, ones),
            }
            accuracy: Row = {"share": share}
            for name, (differences_PD, weight_P, target_P) in variants.items():
                head = fit_head(differences_PD, weight_P, penalty, target_N=target_P)
                margins = head.margins(held_out.differences_PD)
                accuracy[name] = float((margins > 0).mean())
            accuracies.append(accuracy)
    count = len(held_out.weight_P)
    title = f"hh_harmless, {len(lengths):,} pairs, a head on {Path(arguments.model).name}"
    _tell(f"{title}; {count} held out", found, accuracies)
    print("\nwhat check-labels tells of the labels as they are\n")
    print(results_table(told, FLIP_COLUMNS))


def _features(path: Path, model: str, cache: Path) -> tuple[FeaturePairs, NDArray[np.int64]]:
    """The pairs of a file as a head reads them, and by how much the better one is longer."""
    setup = with_features(set_up(_check_config(path, model, cache)))
    [dataset] = setup.training_sets.values()
    features_of = setup.features[dataset.fingerprint]
    differences = []
    prompts = []
    lengths = []
    for index in range(len(dataset)):
        comparison = dataset[index]
        features_CD = features_of(index).float().flatten(start_dim=1).numpy()
        pairs = ranked_pairs([comparison.ranks])
        better = int(pairs.better_P[0])
        worse = int(pairs.worse_P[0])
        differences.append(features_CD[better] - features_CD[worse])
        prompts.append(comparison.prompt)
        lengths.append(comparison.lengths[better] - comparison.lengths[worse])
    features = FeaturePairs(np.array(differences), np.ones(len(prompts)), np.array(prompts))
    return features, np.array(lengths)


# --- results --------------------------------------------------------------------------------------


def _found(share: float, flips: Flags, scores: Any, is_suspect: Flags, bound: Any) -> Row:
    """What a search found of the flipped labels, the lowest score first."""
    num_flipped = int(flips.sum())
    ranks = stats.rankdata(-scores)
    num_pairs = num_flipped * (len(flips) - num_flipped)
    above = ranks[flips].sum() - num_flipped * (num_flipped + 1) / 2
    return {
        "share": share,
        "auroc": float(above / num_pairs),
        "precision": float(flips[np.argsort(scores)[:num_flipped]].mean()),
        "suspects": float(is_suspect.mean()),
        "suspect precision": float(flips[is_suspect].mean()) if is_suspect.any() else math.nan,
        "suspect recall": float(is_suspect[flips].mean()),
        "bound": bound.value,
        "upper end": bound.high,
    }


def _tell(title: str, found: Sequence[Row], accuracies: Sequence[Row]) -> None:
    print(f"\n{title}\n")
    columns = [Column("share", title="flipped", format="percent")]
    for name in found[0]:
        if name != "share":
            columns.append(Column(name, title=name, format=".3f"))
    print(results_table(_means(found, with_interval=False), columns))
    print("\nheld-out accuracy, mean over the seeds with its 95 % interval\n")
    columns = [Column("share", title="flipped", format="percent")]
    columns += [Column(name, title=name) for name in accuracies[0] if name != "share"]
    print(results_table(_means(accuracies, with_interval=True), columns))
    print(
        "\nless than clean labels lose, of what flips cost: differences to `all`, of equal seeds\n"
    )
    differences = []
    for row in accuracies:
        difference: Row = {"share": row["share"]}
        for name, value in row.items():
            if name not in ("share", "all"):
                difference[name] = value - row["all"]
        differences.append(difference)
    columns = [column for column in columns if column.key != "all"]
    print(results_table(_means(differences, with_interval=True), columns))


def _means(rows: Sequence[Mapping[str, Any]], *, with_interval: bool) -> list[Row]:
    """A row for each share: the mean of each column over the seeds, as a number or with its
    interval as text."""
    shares = sorted({row["share"] for row in rows})
    means = []
    for share in shares:
        of_share = [row for row in rows if row["share"] == share]
        mean_row: Row = {"share": share}
        for name in of_share[0]:
            if name == "share":
                continue
            values = [row[name] for row in of_share]
            mean = statistics.fmean(values)
            mean_row[name] = mean
            if with_interval:
                half = math.nan
                if len(values) > 1:
                    error = statistics.stdev(values) / math.sqrt(len(values))
                    half = stats.t.ppf(0.975, len(values) - 1) * error
                mean_row[name] = f"{mean:.3f} ± {half:.3f}"
        means.append(mean_row)
    return means


if __name__ == "__main__":
    main()
