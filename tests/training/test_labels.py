"""Every kind of label learns a planted rule, does not learn shuffled labels, and is served as it
was trained.

Several heads learn one score, each from initial weights of its own; their spread goes wherever
scores go.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from messages import chat
from torch.nn import functional as F

from treeward.cli.main import main
from treeward.config.data import DatasetConfig
from treeward.data.sources import Row
from treeward.environments.reward_model import RewardModelEnvironment
from treeward.errors import DataError
from treeward.losses import Heads, Labels, graded, ranked_pairs, squared_error
from treeward.model.contract import read_contract
from treeward.scoring.rows import ChunkScorer, chunks_of
from treeward.scoring.scorer import Scorer
from treeward.training.setup import set_up
from treeward.training.train import RewardModelRun, train

GOOD = ("sun", "moon", "star", "sky")
BAD = ("mud", "rust", "dust", "ash")


def rows(
    num: int, *, seed: int, shuffled: bool = False, tied: bool = False
) -> list[dict[str, Any]]:
    """Four completions of each prompt, of four words: `bright` is how many are good, `brief`
    nothing but noise."""
    generator = random.Random(seed)
    made = []
    for n in range(num):
        counts = generator.choices(range(5), k=4) if tied else generator.sample(range(5), 4)
        completions = []
        for count in counts:
            words = [generator.choice(GOOD) for _ in range(count)]
            words += [generator.choice(BAD) for _ in range(4 - count)]
            generator.shuffle(words)
            bright = generator.choice(counts) if shuffled else count
            grades = {
                "bright": bright if n % 3 else None,
                "brief": float(generator.randrange(3)),
                "score": bright,
            }
            completions.append({"completion": " ".join(words), **grades})
        made.append({"prompt": f"Say {n % 7}.", "completions": completions})
    return made


@pytest.fixture
def learnt(
    tiny_run: Callable[..., Any], write_rows: Callable[..., Path]
) -> Callable[..., dict[str, float]]:
    """Validation metrics of a run on the planted rule."""

    def run(kind: str, *more: str, shuffled: bool = False, steps: int = 24) -> dict[str, float]:
        overrides = [*KINDS[kind], *more]
        tied = kind == "ties"
        train_path = write_rows("train.jsonl", rows(96, seed=0, shuffled=shuffled, tied=tied))
        held_out = rows(24, seed=1, tied=tied)
        sets = [f"data.train=[{{data_path: {train_path}}}]"]
        sets.append(
            f"data.validation=[{{data_path: {write_rows('held_out.jsonl', held_out)}, name: "
            f"held_out}}]"
        )
        sets += [
            "policy.optimizer.kwargs.lr=3.0e-3",
            "policy.train_global_batch_size=16",
            "rm.val_batches=null",
        ]
        length = (
            f"rm={{max_num_steps: {steps}, max_num_epochs: 100, val_period: 0}}",
            "checkpointing.save_period=null",
        )
        return dict(
            train(tiny_run(*sets, *length, *overrides), show_progress=False).validation["held_out"]
        )

    return run


KINDS = {
    "pairs": ["rm.loss.weight=pair"],
    "rankings": ["policy.reward_model_cfg.reward_model_type=plackett_luce"],
    "ties": ["data.ties=half", "rm.loss.strength=soft_label"],
    "grades": ["policy.reward_model_cfg.reward_model_type=regression"],
    "attributes": [
        "policy.reward_model_cfg={reward_model_type: attributes, attributes: [bright, brief]}"
    ],
}


def errors_of(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name.startswith(("mse", "pearson"))}


@pytest.mark.parametrize(
    "kind", ["pairs", *(pytest.param(kind, marks=pytest.mark.slow) for kind in list(KINDS)[1:])]
)
def test_a_planted_rule_is_learnt_and_served(
    kind: str, learnt: Callable[..., Any], tmp_path: Path
) -> None:
    metrics = learnt(kind)
    # tau-b of ties and scores that differ is below 1
    assert metrics["kendall_tau"] > (0.8 if kind == "ties" else 0.9)
    assert metrics["best_of_k"] > 0.9 and metrics["group_accuracy"] > 0.6
    folder = next(tmp_path.rglob("final"))
    # which replays the golden scores
    contract = read_contract(folder)
    scorer = Scorer.load(folder)
    assert contract is not None and contract.read.plain_transformers and contract.golden
    names = {"grades": ["score"], "attributes": ["bright", "brief"]}.get(kind, ["reward"])
    assert [head.name for head in contract.heads] == names == list(scorer.head_names)
    [one] = scorer.score([chat("Say 1.", "sun moon sky mud")])
    if kind in ("grades", "attributes"):  # an evaluation says the same of its grades
        words = [
            "--data",
            str(tmp_path / "held_out.jsonl"),
            "--data-option",
            f"attributes={','.join(names)}",
        ]
        assert main(["eval", str(folder), *words, "--output", str(tmp_path / "eval")]) == 0
        [report] = json.loads((tmp_path / "eval" / "results.json").read_text(encoding="utf-8"))[
            "results"
        ]
        told = {one["name"]: one["value"] for one in report["diagnostics"]["statistics"]}
        assert errors_of(told) == pytest.approx(errors_of(metrics), abs=1e-4)
        assert (told["group_accuracy"], told["best_of_k"]) == (
            metrics["group_accuracy"],
            metrics["best_of_k"],
        )
    if kind == "grades":
        assert metrics["mse"] < 0.2 and one.score == pytest.approx(3, abs=1)
    if kind == "attributes":
        assert metrics["pearson_bright"] > 0.9 > abs(metrics["pearson_brief"]) + 0.5
        assert one.heads is not None and one.heads[0] == pytest.approx(3, abs=1)
        weights = [head.weight for head in contract.heads]
        assert weights == [0.5, 0.5]
        assert one.score == pytest.approx(
            sum(w * v for w, v in zip(weights, one.heads, strict=True))
        )


CHANCE = {
    "pairs": math.log(2),
    "rankings": (math.log(4) + math.log(3) + math.log(2)) / 3,
    "ties": math.log(2),
    "grades": 1.0,
    "attributes": (2 + 0.5) / 3,  # a third of the prompts lacks one of both
}


@pytest.mark.parametrize("kind", CHANCE)
def test_shuffled_labels_are_not_learnt(kind: str, learnt: Callable[..., Any]) -> None:
    assert learnt(kind, shuffled=True, steps=12)["loss"] > 0.8 * CHANCE[kind]


@pytest.mark.parametrize(
    ("row", "attributes", "field", "said"),
    [
        (
            {"completions": [{"completion": "a", "rank": -1}, {"completion": "b", "rank": 0}]},
            "",
            "rank",
            "-1",
        ),
        (
            {"completions": [{"completion": "a", "score": math.nan}] * 2},
            "",
            "score",
            "finite number",
        ),
        ({"chosen": "a", "rejected": "b", "probability": 1.5}, "", "probability", "from 0 to 1"),
        ({"completion": "a", "bright": "very", "score": 1}, "bright", "bright", "very"),
        ({"completion": "a", "bright": 1, "score": 1}, "brigth", "", "completion: brigth"),
        (
            {"completion": "a", "bright": 1, "brief": None, "score": 1},
            "bright, brief",
            "brief",
            "no completion has",
        ),
    ],
)
def test_bad_labels_are_refused_where_they_are(
    row: Any,
    attributes: str,
    field: str,
    said: str,
    tiny_run: Callable[..., Any],
    write_rows: Callable[..., Path],
) -> None:
    path = write_rows("bad.jsonl", [{"prompt": "Say.", **row}])
    kind = (
        f"policy.reward_model_cfg={{reward_model_type: attributes, attributes: [{attributes}]}}"
        if attributes
        else ""
    )
    sets = (
        f"data.train=[{{data_path: {path}}}]",
        f"data.validation=[{{data_path: {path}, name: held_out}}]",
    )
    with pytest.raises(DataError) as caught:
        train(tiny_run(*sets, *filter(None, [kind])), show_progress=False)
    error = caught.value
    place = "bad.jsonl" if error.summary.startswith("no com") else "bad.jsonl:1"
    assert (
        str(error.where).endswith(place) and str(error.field).endswith(field) and said in str(error)
    )
    assert error.got is not None and error.need is not None


def test_rows_of_one_prompt_are_one_comparison_and_a_missing_grade_is_nan(
    tiny_run: Callable[..., Any], write_rows: Callable[..., Path]
) -> None:
    """HelpSteer2's columns as they are: a prompt of one response stays, one without a grade goes
    and is counted."""
    columns = {"helpfulness": 3, "verbosity": None}
    graded = [{"prompt": "A?", "response": text, **columns} for text in ("yes", "no")]
    graded += [{"prompt": "B?", "response": "maybe", "helpfulness": math.nan, "verbosity": 1.0}]
    graded += [{"prompt": "C?", "response": "never", "helpfulness": None, "verbosity": None}]
    kind = "policy.reward_model_cfg={reward_model_type: attributes, attributes: [helpfulness, verbosity]}"
    one_set = f"{{data_path: {write_rows('graded.jsonl', graded)}, dataset_name: HelpSteer2, name: held_out}}"
    config = tiny_run(f"data.train=[{one_set}]", f"data.validation=[{one_set}]", kind)
    dataset = set_up(config).training_sets["held_out"]
    assert [len(one.ranks) for one in dataset] == [2, 1]  # type: ignore[attr-defined]
    assert DatasetConfig(data_path="a", attributes="helpfulness,verbosity").attributes == (
        "helpfulness",
        "verbosity",
    )
    assert dataset.counts.dropped_ungraded == 1 and dataset.counts.read == 3
    assert repr(dataset.grades.tolist()) == "[[3.0, nan], [3.0, nan], [nan, 1.0]]"


HEADS = "policy.reward_model_cfg.num_heads=4"


def test_the_loss_is_the_mean_of_each_heads_loss() -> None:
    """Two comparisons, three heads, by hand in float64, forward and backward."""
    values = torch.randn(
        5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True
    )
    pairs = ranked_pairs([(0, 1), (1, 0, 1)])
    expected = torch.zeros((), dtype=torch.float64)
    for h in range(3):
        expected = expected - F.logsigmoid(values[0, h] - values[1, h]) / 3
        for worse in (2, 4):
            expected = expected - F.logsigmoid(values[3, h] - values[worse, h]) / 2 / 3
    estimates = Heads(weights=(1 / 3,) * 3, are_estimates=True)
    got = estimates.loss(values, Labels(pairs))
    assert float(got) == pytest.approx(float(expected), rel=1e-6)
    [by_hand], [ours] = torch.autograd.grad(expected, values), torch.autograd.grad(got, values)
    torch.testing.assert_close(ours, by_hand, atol=1e-6, rtol=1e-5)
    grades = graded([[(1.0,), (math.nan,)], [(0.0,), (2.0,), (4.0,)]], stds=(2.0,))
    error = torch.zeros(())
    for s, grade, size in ((0, 1.0, 2), (2, 0.0, 3), (3, 2.0, 3), (4, 4.0, 3)):
        error = error + ((values[s, :3] - grade) ** 2).sum() / size / 4 / 3
    got = replace(estimates, function=squared_error).loss(values, Labels(pairs, grades))
    assert float(got) == pytest.approx(float(error), rel=1e-6)


@pytest.mark.parametrize("num_heads", [1, 3])
def test_grades_of_completions_that_stand_alone_are_learnt(
    num_heads: int, tiny_run: Callable[..., Any], write_rows: Callable[..., Path]
) -> None:
    """There is no pair in the data; the loss is the mean squared error in units of the grades'
    deviation. Several heads estimate a grade by their mean, and each learns for itself."""
    grades = [float(n % 5) for n in range(8)]
    alone = [
        {"prompt": f"Say {n}.", "completions": ["sun"], "scores": [grade]}
        for n, grade in enumerate(grades)
    ]
    path = write_rows("alone.jsonl", alone)
    sets = [
        f"data.train=[{{data_path: {path}}}]",
        f"data.validation=[{{data_path: {path}, name: held_out}}]",
    ]
    kind = f"policy.reward_model_cfg={{reward_model_type: regression, num_heads: {num_heads}}}"
    run = RewardModelRun(set_up(tiny_run(kind, *sets, "checkpointing.metric_name=val_loss")))
    [dataset] = run.setup.training_sets.values()
    values = [float(run.model.score_tokens(one.token_ids).mean()) for one in dataset[:]]
    errors = [
        (value - one.grades[0][0]) ** 2 for value, one in zip(values, dataset[:], strict=True)
    ]
    want = fmean(errors) / pstdev(grades) ** 2
    measured = run.validate_set("held_out")
    assert measured is not None and measured.sums.means()["loss"] == pytest.approx(want, rel=1e-5)
    assert measured.metrics()["mse"].value == pytest.approx(fmean(errors), rel=1e-5)
    assert num_heads > 1 or run.step(1).logged["train/rm/loss"] == pytest.approx(want, rel=1e-5)
    run.close()


def test_spread_is_a_component_and_in_rows(tiny_run: Callable[..., Any]) -> None:
    folder = train(tiny_run(HEADS, "rm.max_num_steps=2"), show_progress=False).model_folder
    assert folder is not None
    log = chat("Say 1.", "sun moon")
    contract, [score] = read_contract(folder), Scorer.load(folder).score([log])
    assert contract is not None and contract.has_estimates and contract.read.plain_transformers
    assert [head.name for head in contract.heads] == ["LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3"]
    assert [head.weight for head in contract.heads] == [0.25] * 4
    assert (
        score.score == pytest.approx(fmean(score.heads), abs=1e-6)
        and score.parts["spread"] == score.spread
    )
    environment = RewardModelEnvironment({"model_name": str(folder), "precision": "float32"})
    [reward] = environment.rewards([log], [{}])
    assert reward.value == pytest.approx(score.score)
    assert reward.components["score/spread"] == pytest.approx(score.spread)
    assert [reward.components[f"head_{h}"] for h in range(4)] == pytest.approx(list(score.heads))
    assert score.spread == pytest.approx(pstdev(score.heads))
    given = [{"messages": log}, {"prompt": "Say 1.", "completions": ["sun moon", "ash"]}]
    chunks = chunks_of(Row(values, f"in.jsonl:{i}") for i, values in enumerate(given))
    [scored] = map(ChunkScorer(lambda: (Scorer.load(folder), None, {})).score, chunks)
    one, two = scored.rows
    assert (one["score"], one["spread"]) == pytest.approx((score.score, score.spread))
    assert two["spreads"][0] == pytest.approx(score.spread) and len(two["spreads"]) == 2
