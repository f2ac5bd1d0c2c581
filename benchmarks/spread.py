"""The spread of a score: a Laplace approximation of the last layer, beside several heads and none.

    python benchmarks/spread.py [--seeds 3] [--model SmolLM2] [--policy results/rlhf_demo/sft]

1. Bundled data, models from scratch, of one head and of eight. Held out are comparisons of the
   training's kind (`validation`) and of another kind (`length_controlled`).
2. With `--policy`, samples of it: the gold quality of the best of n by score - c * spread.
3. hh_harmless of the shared data, with `--model`: heads on its frozen hidden states.

The numbers are those of `treeward calibrate --trained-on`, means over the seeds: each half of the
held-out prompts is measured by what the other half chose. For eight heads, `scaled` multiplies
their standard deviation by one number, chosen in the same way.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import hh_harmless, train_quickstart
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from treeward.config.data import DatasetConfig
from treeward.config.load import load_file
from treeward.config.run import RewardModelRunConfig
from treeward.data.datasets import open_dataset
from treeward.data.preference import Preference, digest_of
from treeward.data.rendering import Renderer
from treeward.evaluation.statistics import cluster_bootstrap
from treeward.model.contract import SpreadMetrics
from treeward.scoring.score import Score
from treeward.scoring.scorer import Scorer
from treeward.scoring.spread import fit_spread, held_out_metrics, keep_spread
from treeward.tables import Column, results_table
from treeward.training.train import train

_EXAMPLES = Path(__file__).parents[1] / "examples"
_NUM_HEADS = 8
_SCALES = tuple(10.0 ** (quarters / 4) for quarters in range(-4, 13))
_PENALTIES = (0.25, 0.5, 1.0, 2.0)
_NAMES = ("trained on", "held out")
_NEW_TOKENS = 64

Row = dict[str, Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Samples:
    """The completions of prompts, (prompts, n), with their gold quality."""

    conversations: list[list[Any]]
    gold_PN: Floats


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=104, help="of a run on bundled data; 0: none")
    parser.add_argument("--comparisons", type=int, default=None, help="of a set of bundled data")
    parser.add_argument("--policy", default=None, help="folder of rlhf_demo's fine-tuned policy")
    parser.add_argument("--prompts", type=int, default=150)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--model", default=None, help="folder or hub name, for hh_harmless")
    parser.add_argument("--pairs", type=int, default=900, help="of hh_harmless, to train on")
    parser.add_argument("--longest", type=int, default=1000, help="characters of a text of it")
    parser.add_argument("--epochs", type=int, default=10, help="of its heads")
    parser.add_argument("--cache", default=None, help="folder of tokens and hidden states")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = Path(arguments.cache or folder / "cache")
        if arguments.steps:
            _bundled(folder, cache, arguments)
        data = hh_harmless(arguments.model)
        if data is not None:
            _hh(data, folder, cache, arguments)


# --- the bundled data, models from scratch --------------------------------------------------------


def _bundled(folder: Path, cache: Path, arguments: argparse.Namespace) -> None:
    limit = arguments.comparisons
    trained_on = _comparisons(DatasetConfig(dataset_name="Bundled"), limit)
    held_out = {
        name: _comparisons(DatasetConfig(dataset_name="Bundled", split=name), limit)
        for name in ("validation", "length_controlled")
    }
    samples = None
    if arguments.policy is not None:
        samples = _sampled(arguments.policy, arguments.prompts, arguments.samples)
    rows: dict[str, list[Row]] = {name: [] for name in held_out}
    gains: list[Row] = []
    for seed in range(arguments.seeds):
        for num_heads in (1, _NUM_HEADS):
            model = _train_bundled(folder, cache, seed, num_heads, arguments.steps)
            for name, comparisons in held_out.items():
                rows[name] += _measured(model, trained_on, comparisons, num_heads)
            if samples is not None:
                if num_heads == 1:
                    # By the comparisons of the training's kind, as the guide says.
                    scorer = Scorer.load(model, device="cpu")
                    fitted = fit_spread(scorer, trained_on, held_out["validation"], names=_NAMES)
                    keep_spread(fitted, scorer, model)
                gains += _best_of_n(model, samples, num_heads)
    for name, measured in rows.items():
        count = measured[0]["pairs"]
        _tell(f"Bundled, held out: {name}, {count} pairs, {arguments.seeds} seeds", measured)
    if samples is None:
        print("\nBest of n is left out: it needs --policy.")
    else:
        _tell_gains(gains, arguments)


def _comparisons(config: DatasetConfig, limit: int | None) -> list[Preference]:
    stream = (preference for preference, _ in open_dataset(config))
    return list(itertools.islice(stream, limit))


def _train_bundled(folder: Path, cache: Path, seed: int, num_heads: int, steps: int) -> Path:
    run = folder / f"bundled_{seed}_{num_heads}"
    overrides = [
        f"+policy.reward_model_cfg.num_heads={num_heads}",
        f"+data.cache_dir={cache}",
    ]
    outcome = train_quickstart(run, seed=seed, steps=steps, overrides=overrides)
    assert outcome.model_folder is not None
    return outcome.model_folder


def _measured(
    model: Path, trained_on: Sequence[Preference], held_out: Sequence[Preference], num_heads: int
) -> list[Row]:
    """A row for each spread of this model."""
    scorer = Scorer.load(model, device="cpu")
    if num_heads == 1:
        fitted = fit_spread(scorer, trained_on, held_out, names=_NAMES)
        return [_row("Laplace, one head", fitted.metrics)]
    margins, spreads, prompts = _of_heads(scorer, held_out)
    scaled = np.stack([scale * spreads for scale in _SCALES])
    return [
        _row(f"{num_heads} heads", held_out_metrics(margins, spreads[None], prompts)),
        _row(f"{num_heads} heads, scaled", held_out_metrics(margins, scaled, prompts)),
    ]


def _of_heads(
    scorer: Scorer, held_out: Sequence[Preference]
) -> tuple[Floats, Floats, NDArray[np.int64]]:
    """The margins of several heads' mean, the deviations of their margins, and the prompts."""
    conversations = list(itertools.chain(*(preference.conversations for preference in held_out)))
    scores = iter(scorer.score(conversations, on_error="mask"))
    margins = []
    spreads = []
    prompts = []
    for preference in held_out:
        group = list(itertools.islice(scores, len(preference.completions)))
        for (i, a), (j, b) in itertools.permutations(enumerate(group), 2):
            is_ordered = preference.ranks[i] < preference.ranks[j]
            if is_ordered and a.score is not None and b.score is not None:
                differences = np.array(a.heads) - np.array(b.heads)
                margins.append(differences.mean())
                spreads.append(differences.std())
                prompts.append(digest_of(preference.context_key))
    return np.array(margins), np.array(spreads), np.array(prompts, dtype=np.int64)


# --- best of n ------------------------------------------------------------------------------------


def _sampled(policy: str, num_prompts: int, num_samples: int) -> Samples:
    """Completions that the policy samples of bundled prompts."""
    sys.path.insert(0, str(_EXAMPLES))
    from gold import gold_quality

    hf = AutoModelForCausalLM.from_pretrained(policy, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(policy)
    renderer = Renderer(tokenizer)
    torch.manual_seed(0)
    conversations: list[list[Any]] = []
    gold = []
    config = DatasetConfig(dataset_name="Bundled", split="validation")
    for preference in _comparisons(config, num_prompts):
        prompt = torch.tensor([renderer.encode_prompt(preference.context)])
        with torch.inference_mode():
            tokens = hf.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                max_new_tokens=_NEW_TOKENS,
                num_return_sequences=num_samples,
                pad_token_id=tokenizer.eos_token_id,
            )
        texts = tokenizer.batch_decode(tokens[:, prompt.shape[1] :], skip_special_tokens=True)
        context = list(preference.context)
        conversations.append([[*context, {"role": "assistant", "content": t}] for t in texts])
        gold.append([gold_quality(context, text) for text in texts])
    return Samples(conversations, np.array(gold))


def _best_of_n(model: Path, samples: Samples, num_heads: int) -> list[Row]:
    """By how much the gold quality of the best of n is better with a penalty than without."""
    scorer = Scorer.load(model, device="cpu")
    scores: list[list[Score]] = []
    for conversations in samples.conversations:
        scores.append(scorer.score(conversations, on_error="mask"))
    value_PN = np.array([[score.score or -np.inf for score in group] for group in scores])
    spread_PN = np.array([[score.spread or 0.0 for score in group] for group in scores])
    # The mean deviation of scores within a prompt: the unit in which a penalty can be compared.
    unit = float(value_PN.std(axis=1).mean() / spread_PN.mean())
    places = np.arange(len(value_PN))
    chosen_P = samples.gold_PN[places, value_PN.argmax(axis=1)]
    rows = []
    for penalty in _PENALTIES:
        best_P = (value_PN - penalty * unit * spread_PN).argmax(axis=1)
        gain_P = samples.gold_PN[places, best_P] - chosen_P
        low, high = cluster_bootstrap(gain_P, places.tolist())
        row: Row = {
            "spread": "Laplace" if num_heads == 1 else f"{num_heads} heads",
            "penalty": penalty,
            "all samples": float(samples.gold_PN.mean()),
            "best by score": float(chosen_P.mean()),
            "gain": float(gain_P.mean()),
            "low": low,
            "high": high,
        }
        rows.append(row)
    return rows


def _tell_gains(gains: Sequence[Row], arguments: argparse.Namespace) -> None:
    print(
        f"\nBest of {arguments.samples} by score - c * spread, {arguments.prompts} prompts: gold "
        "quality. c in units of (deviation of scores within a prompt) / (mean spread); `low` and "
        "`high`: the mean of the seeds' 95 % intervals of the gain.\n"
    )
    keys = sorted({(row["spread"], row["penalty"]) for row in gains})
    rows = []
    for spread, penalty in keys:
        of_key = [row for row in gains if (row["spread"], row["penalty"]) == (spread, penalty)]
        row = {"spread": spread, "c": f"{penalty:g}"}
        for name in ("all samples", "best by score", "gain", "low", "high"):
            row[name] = statistics.fmean(one[name] for one in of_key)
        row["worst seed"] = min(one["gain"] for one in of_key)
        row["best seed"] = max(one["gain"] for one in of_key)
        rows.append(row)
    columns = ["spread", "c"]
    numbers = [Column(name, format=".3f") for name in rows[0] if name not in columns]
    print(results_table(rows, [*columns, *numbers]))


# --- HH, heads on a frozen model ------------------------------------------------------------------


def _hh(data: Path, folder: Path, cache: Path, arguments: argparse.Namespace) -> None:
    files = {}
    for name in ("train", "validation"):
        files[name] = folder / f"{name}.jsonl"
        _write_short(data / f"{name}.jsonl.gz", files[name], arguments.pairs, arguments.longest)
    trained_on = _comparisons(DatasetConfig(data_path=str(files["train"])), None)
    held_out = _comparisons(DatasetConfig(data_path=str(files["validation"])), None)
    rows: list[Row] = []
    for seed in range(arguments.seeds):
        for num_heads in (1, _NUM_HEADS):
            values = {
                "policy": {
                    "model_name": arguments.model,
                    "max_total_sequence_length": 1024,
                    "precision": "float32",
                    "train_global_batch_size": 32,
                    "reward_model_cfg": {"freeze_backbone": True, "num_heads": num_heads},
                    "optimizer": {"kwargs": {"lr": 3e-4, "weight_decay": 0.0}},
                },
                "rm": {"max_num_epochs": arguments.epochs, "seed": seed, "val_period": None},
                "data": {
                    "train": [{"data_path": str(files["train"])}],
                    "cache_dir": str(cache),
                },
                "checkpointing": {
                    "checkpoint_dir": str(folder / f"hh_{seed}_{num_heads}"),
                    "metric_name": None,
                    "save_period": None,
                },
                "logger": {"log_dir": str(folder / f"hh_{seed}_{num_heads}" / "logs")},
            }
            run = load_file(RewardModelRunConfig, None, values=values)
            outcome = train(run, show_progress=False)
            assert outcome.model_folder is not None
            rows += _measured(outcome.model_folder, trained_on, held_out, num_heads)
    name = Path(arguments.model).name
    count = rows[0]["pairs"]
    title = f"hh_harmless, heads on {name}: {len(trained_on):,} pairs, {count} held out"
    _tell(f"{title}, {arguments.seeds} seeds", rows)


def _write_short(source: Path, path: Path, count: int, longest: int) -> None:
    """The first rows of a set of which both conversations are short enough."""
    lines = []
    with gzip.open(source, "rt", encoding="utf-8") as stream:
        for line in stream:
            row = json.loads(line)
            if max(len(row["chosen"]), len(row["rejected"])) <= longest:
                lines.append(line)
    path.write_text("".join(lines[:count]), encoding="utf-8")


# --- results --------------------------------------------------------------------------------------


def _row(name: str, metrics: SpreadMetrics) -> Row:
    return {
        "spread": name,
        "pairs": metrics.num_pairs,
        "accuracy": metrics.accuracy,
        "NLL": metrics.nll,
        "NLL, T": metrics.nll_temperature,
        "NLL, spread": metrics.nll_spread,
        "ECE": metrics.ece,
        "ECE, T": metrics.ece_temperature,
        "ECE, spread": metrics.ece_spread,
        "ELCE": metrics.elce,
        "CT": metrics.confident_true,
        "CF": metrics.confident_false,
        "ranking 0": metrics.ranking["0"],
        "ranking 1": metrics.ranking["1"],
        "AUROC |d|": metrics.auroc_margin,
        "AUROC |d|/s": metrics.auroc_sureness,
    }


def _tell(title: str, measured: Sequence[Row]) -> None:
    """A row for each spread, with the mean of each number over the seeds."""
    print(f"\n{title}\n")
    rows = []
    for name in dict.fromkeys(row["spread"] for row in measured):
        of_name = [row for row in measured if row["spread"] == name]
        row: Row = {"spread": name}
        for key in of_name[0]:
            values = [one[key] for one in of_name if one[key] is not None]
            if key not in ("spread", "pairs") and values:
                row[key] = statistics.fmean(values)
        rows.append(row)
    columns = [Column(name, format=".3f") for name in rows[0] if name != "spread"]
    print(results_table(rows, ["spread", *columns]))


if __name__ == "__main__":
    main()
