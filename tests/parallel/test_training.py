"""The same run on one, two and four processes: the same metrics, validation, files, weights and
golden scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from families import ENCODER_RUN
from messages import write_jsonl
from safetensors.torch import load_file, save_file
from training_runs import assert_close, assert_same_files, run_all

from treeward.errors import ModelError
from treeward.scoring.scorer import Scorer

# 22 comparisons of two to five completions: steps of 5, so that of four processes some compute one
# and some two, and a last step of 2; budgets that some comparisons exceed
COMMON = [
    "policy.train_global_batch_size=5",
    "rm.max_num_epochs=2",
    "rm.max_num_steps=null",
    "rm.val_period=4",
    "rm.val_batches=null",
    "checkpointing.save_period=4",
]
GRADES = "policy.reward_model_cfg={reward_model_type: attributes, attributes: [score, terse], attribute_weights: %s}"
CASES: dict[str, list[str]] = {
    "trees": ["policy.train_micro_batch_tokens=200", GRADES % "{score: 1, terse: -0.5}"],
    "parts": [
        *("policy.train_micro_batch_tokens=80", "data.ties=half"),
        "checkpointing.keep_top_k=null",
    ],
    "rows": [
        *(
            "policy.attention=rows",
            "policy.train_micro_batch_tokens=150",
            "policy.max_grad_norm=0.1",
        ),
        # the best checkpoint is not the last, so that what is exported is not the model in memory
        *(
            "checkpointing.metric_name=eval/rm/chosen_rewards",
            "checkpointing.higher_is_better=false",
        ),
        "policy.dtensor_cfg.lora_cfg={enabled: true, dim: 4}",
        GRADES % "mean",
    ],
    "encoder": [*ENCODER_RUN],
    "recomputed": [
        *("policy.dtensor_cfg.activation_checkpointing=true", "policy.train_micro_batch_size=1"),
        *("policy.reward_model_cfg.reward_model_type=plackett_luce", "rm.loss.weight=pair"),
    ],
    "head alone": [
        "policy.reward_model_cfg.freeze_backbone=true",
        "policy.train_micro_batch_tokens=80",
    ],
}
BEGUN = {"cut": "parts/checkpoints/step_4", "sharded again": "cut/checkpoints/step_8"}
"""Runs of several processes that go on from a checkpoint of another layout; one process goes on
from the first."""
WORDS = ("sun", "moon", "rain", "wind", "snow", "leaf", "root")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = []
    for n in range(22):
        completions = [" ".join(WORDS[: 1 + (n * k) % 7]) + f" {k}." for k in range(2 + n % 3)]
        if n % 6 == 0:
            completions.append(" ".join(WORDS * 4))
        graded = [
            {
                "completion": text,
                "score": float((n + k) % 4),
                "terse": None if (n + k) % 3 == 0 else k,
            }
            for k, text in enumerate(completions)
        ]
        lines.append({"prompt": f"What is {WORDS[n % 7]} number {n}?", "completions": graded})
    return Path(write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", *lines))


SLOW = [pytest.mark.slow]


@pytest.fixture(scope="module")
def step_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Solutions of 22 problems, two to five of each, of which some begin alike and some exceed a
    budget."""
    lines = []
    for n in range(22):
        for k in range(2 + n % 4):
            steps = [f"{WORDS[n % 7]} {WORDS[i * k % 7]}" for i in range(1 + (n + k) % 4)]
            labels = [(n + i * k) % 3 != 0 for i in range(len(steps))]
            lines.append({"prompt": f"Problem {n}", "completions": steps, "labels": labels})
    return Path(write_jsonl(tmp_path_factory.mktemp("data") / "steps.jsonl", *lines))


@pytest.mark.slow
def test_two_processes_learn_the_same_steps(
    run_processes: Callable[..., list[Any]],
    tiny_runs: Callable[[Path], Callable[..., Any]],
    tmp_path: Path,
    step_rows: Path,
) -> None:
    tiny_runs(tmp_path)()
    read = f"dataset_name: auto, data_path: {step_rows}, split: null"
    overrides = [
        *COMMON,
        f"data.train={{{read}}}",
        f"data.validation=[{{{read}, name: held_out}}]",
        "policy.reward_model_cfg.reward_model_type=process",
        "policy.train_micro_batch_tokens=60",
    ]
    runs = {"steps": overrides}
    file = str(tmp_path / "run.yaml")
    together = tmp_path / "together"
    alone = tmp_path / "alone"
    found = run_processes("training_runs:run_all", 2, file, str(together), runs, {}, timeout=500)
    want = run_all(file, str(alone), runs, {})["steps"]
    for outcome in found:
        assert outcome["steps"]["step"] == want["step"]
        measured = outcome["steps"]["validation"]["held_out"]
        assert_close(measured, want["validation"]["held_out"], "steps")
    assert_same_files(together / "steps", alone / "steps")


@pytest.mark.parametrize(
    ("num_processes", "cases", "layout"),
    [
        pytest.param(2, ["rows"], {}, id="two", marks=pytest.mark.slow),
        pytest.param(
            2,
            ["trees", "parts", "encoder", "recomputed", "head alone"],
            {},
            id="two, all kinds",
            marks=SLOW,
        ),
        pytest.param(4, list(CASES), {}, id="four", marks=SLOW),
        pytest.param(4, ["parts"], {"dp_replicate_size": 2}, id="two copies", marks=SLOW),
        pytest.param(4, ["trees"], {"tensor_parallel_size": 2}, id="cut in two", marks=SLOW),
    ],
)
def test_any_number_of_processes_trains_the_same_model(
    run_processes: Callable[..., list[Any]],
    tiny_runs: Callable[[Path], Callable[..., Any]],
    tmp_path: Path,
    rows: Path,
    num_processes: int,
    cases: list[str],
    layout: dict[str, int],
) -> None:
    tiny_runs(tmp_path)()
    read = f"dataset_name: auto, data_path: {rows}, split: null"
    data = [f"data.train={{{read}}}", f"data.validation=[{{{read}, name: held_out}}]"]
    chosen = {name: [*COMMON, *data, *CASES[name]] for name in cases}
    words = [f"policy.dtensor_cfg.{key}={value}" for key, value in layout.items()]
    laid_out = {name: [*own, *words] for name, own in chosen.items()}
    begun = BEGUN if "parts" in cases and not layout else {}
    laid_out |= {name: chosen["parts"] for name in begun}
    if begun:
        laid_out["cut"] = [*chosen["parts"], "policy.dtensor_cfg.tensor_parallel_size=2"]
    file = str(tmp_path / "run.yaml")
    alone = tmp_path / "alone"
    together = tmp_path / "together"
    found = run_processes(
        "training_runs:run_all", num_processes, file, str(together), laid_out, begun, timeout=500
    )
    whole = chosen | ({"alone again": chosen["parts"]} if begun else {})
    of_others = {"alone again": "../together/parts/checkpoints/step_8"} if begun else {}
    want = run_all(file, str(alone), whole, of_others)
    for name in cases:
        for rank, outcome in enumerate(found):
            assert outcome[name]["step"] == want[name]["step"] and (
                name != "rows" or want[name]["step"] < 10
            )
            assert (outcome[name]["reads"] == 0) == (rank > 0), "the main process reads the data"
            assert_close(
                outcome[name]["validation"]["held_out"], want[name]["validation"]["held_out"], name
            )
        assert_same_files(together / name, alone / name)
    for run in (
        [together / "cut", together / "sharded again", alone / "alone again"] if begun else []
    ):
        after = 5 if run.name == "cut" else 9
        assert_same_files(run, alone / "parts", after=after)
    signed = together / cases[0] / "checkpoints"
    for folder in (signed / "final", max(signed.glob("step_*")) / "model"):
        Scorer.load(folder, device="cpu")
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.0.mlp.up_proj.weight"][0] += 1.0
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match="does not keep its scoring contract"):
            Scorer.load(folder, device="cpu")
