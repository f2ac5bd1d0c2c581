"""The same run of GRPO on one, two and four processes: samples, rewards, metrics, validation, files
and weights."""

from __future__ import annotations

import json
import platform
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loopback import Loopback
from served_policy import ServedPolicy
from training_runs import assert_close, assert_same_files

from treeward import processes
from treeward.config.load import load_grpo_config
from treeward.errors import TreewardError
from treeward.parallel import ray_cluster
from treeward.rl import grpo as grpo_module
from treeward.rl.grpo import GRPOOutcome, grpo
from treeward.training.tracking import read_metrics

# Steps of 5 prompts of unequal length, of which some processes have more; Adam's epsilon keeps the
# rounding of a small gradient small, as other weights sample other tokens in the end.
COMMON = [
    *(
        "grpo.num_prompts_per_step=5",
        "grpo.max_num_steps=3",
        "grpo.max_val_samples=5",
        "grpo.num_val_generations=2",
    ),
    *("policy.optimizer.kwargs={lr: 0.005, eps: 0.001}", "policy.train_micro_batch_tokens=100"),
]
LOADED = ["~policy.model_config", "~policy.tokenizer", "policy.model_name=POLICY"]
CASES: dict[str, list[str]] = {
    "everything": [
        *(
            "grpo.num_prompts_per_step=6",
            "policy.train_global_batch_size=8",
            "grpo.updates_per_batch=2",
        ),
        *(
            "grpo.use_dynamic_sampling=true",
            "grpo.batch_multiplier=1.5",
            "loss_fn.kl_in_reward=true",
        ),
        "env={planted: {type: planted.Scaled}, gold: {type: custom, function: planted.length}}",
        *("grpo.gold_environment=gold", "checkpointing.metric_name=val:raw_reward"),
    ],
    "loaded": [
        *LOADED,
        (
            "env={reward_model: {model_name: REWARDS, precision: float32, resources: "
            "{gpus_per_node: 0}}}"
        ),
    ],
    "one": ["grpo.num_prompts_per_step=1", "grpo.max_val_samples=1"],
    "rows": ["policy.attention=rows", "policy.generation.batch_size=3"],
    "adapters": [*LOADED, "policy.dtensor_cfg.lora_cfg={enabled: true, dim: 4}"],
    "recomputed": ["policy.dtensor_cfg.activation_checkpointing=true"],
}
FAILING = {
    "raises": ["env={planted: {type: planted.Troubled, orders: ORDERS}}"],
    "unmakeable": ["env={planted: {type: planted.Unmakeable}}"],
}


def run_one(file: str, folder: Path | str, overrides: list[str]) -> GRPOOutcome:
    places = [f"checkpointing.checkpoint_dir={folder}/checkpoints", f"logger.log_dir={folder}/logs"]
    return grpo(load_grpo_config(file, [*overrides, *places]), show_progress=False)


def run_all(file: str, folder: str, cases: dict[str, list[str]]) -> dict[str, Any]:
    """Each case's run, in a folder of its own: its steps and the validation of the exported
    policy."""
    outcomes = {
        name: run_one(file, Path(folder) / name, overrides) for name, overrides in cases.items()
    }
    return {
        name: {"step": one.step, "validation": dict(one.validation)}
        for name, one in outcomes.items()
    }


def run_stopped_and_failing(
    file: str, folder: str, cases: dict[str, list[str]], stopped: str, failing: dict[str, list[str]]
) -> dict[str, Any]:
    """`run_all`; also what failing runs say, and a run that the last process is asked to stop in
    its first step."""
    found = run_all(file, folder, cases)
    collect = grpo_module.collect

    def asked(run: Any, **at: int) -> Any:
        if at["step"] == 0 and processes.rank() == processes.size() - 1:
            signal.raise_signal(signal.SIGTERM)
        return collect(run, **at)

    for name, overrides in failing.items():
        try:
            run_one(file, Path(folder) / name, overrides)
        except TreewardError as error:
            found[name] = str(error)
    platform.node = lambda: f"node{processes.rank()}"
    try:
        ray_cluster.start_ray_of_run(spares=False, everywhere=True)
    except TreewardError as error:
        found["nodes"] = str(error)
    grpo_module.collect = asked
    outcome = run_one(file, Path(folder) / "stopped", cases[stopped])
    found["stopped"] = [outcome.step, outcome.interrupted_by, outcome.exit_code]
    return found


@pytest.fixture
def file(tiny_grpo: Callable[..., Any], tmp_path: Path) -> str:
    """The configuration of `tiny_grpo`, with prompts of one to twelve words."""
    tiny_grpo()
    for name, count in (("train", 21), ("held_out", 7)):
        prompts = [
            f"Say {' '.join(['sun', 'rain', 'leaf'][: 1 + n % 3] * (1 + n % 4))} {n}."
            for n in range(count)
        ]
        lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return str(tmp_path / "run.yaml")


@pytest.fixture
def case(policy_folder: Path, model_folder: Path) -> Callable[..., list[str]]:
    """The overrides of a case."""

    def named(name: str, **layout: Any) -> list[str]:
        laid_out = [f"policy.dtensor_cfg.{key}={value}" for key, value in layout.items()]
        own = [
            one.replace("POLICY", str(policy_folder)).replace("REWARDS", str(model_folder))
            for one in CASES[name]
        ]
        return [*COMMON, *own, *laid_out]

    return named


@pytest.mark.slow
def test_two_processes_run_stop_resume_and_fail_as_one(
    run_processes: Callable[..., list[Any]],
    file: str,
    case: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    chosen = {"everything": case("everything")}
    orders = tmp_path / "orders.json"
    orders.write_text('{"fail": 1, "after": 20}')
    raises = FAILING["raises"][0].replace("ORDERS", str(orders))
    failing = {
        name: [*COMMON, *overrides] for name, overrides in {**FAILING, "raises": [raises]}.items()
    }
    want = run_all(file, str(tmp_path / "alone"), chosen)
    together = tmp_path / "together"
    arguments = (file, str(together), chosen, "everything", failing)
    found = run_processes("test_grpo:run_stopped_and_failing", 2, *arguments)
    assert_same_runs(found, want, together, tmp_path / "alone")
    for of_rank in found:
        assert "too many completions have no reward" in of_rank["raises"]
        assert "told not to be made" in of_rank["unmakeable"]
        assert "engines of vLLM beside the processes of several nodes" in of_rank["nodes"]
        assert of_rank["stopped"] == [1, "SIGTERM", 143]
    orders.write_text("{}")
    assert run_one(file, together / "raises", failing["raises"]).step == 3
    stopped = together / "stopped"
    assert (stopped / "checkpoints" / "step_1").is_dir() and not (
        stopped / "checkpoints" / "final"
    ).exists()
    assert run_one(file, stopped, chosen["everything"]).step == 3  # on one process
    assert_same_files(stopped, tmp_path / "alone" / "everything", but_for="step_1")


@pytest.mark.parametrize(
    ("num_processes", "cases", "layout"),
    [
        pytest.param(2, [name for name in CASES if name != "everything"], {}, id="two"),
        pytest.param(2, ["everything", "rows"], {"tensor_parallel_size": 2}, id="cut in two"),
        pytest.param(4, list(CASES), {}, id="four"),
        pytest.param(4, ["everything", "one"], {"dp_replicate_size": 2}, id="two copies"),
        pytest.param(4, ["everything"], {"tensor_parallel_size": 2}, id="two, cut in two"),
    ],
)
@pytest.mark.slow
def test_any_number_of_processes_runs_the_same(
    run_processes: Callable[..., list[Any]],
    file: str,
    case: Callable[..., list[str]],
    tmp_path: Path,
    num_processes: int,
    cases: list[str],
    layout: dict[str, Any],
) -> None:
    want = run_all(file, str(tmp_path / "alone"), {name: case(name) for name in cases})
    laid_out = {name: case(name, **layout) for name in cases}
    found = run_processes(
        "test_grpo:run_all", num_processes, file, str(tmp_path / "together"), laid_out, timeout=500
    )
    assert_same_runs(found, want, tmp_path / "together", tmp_path / "alone")


@pytest.mark.slow
def test_two_processes_hand_over_their_weights_as_one_does(
    run_processes: Callable[..., list[Any]],
    file: str,
    tiny_tokenizer: Any,
    tmp_path: Path,
    vllm: None,
) -> None:
    """To an engine of vLLM beside each process, to an engine of its own for both, and to a server;
    all stand-ins."""
    engine = (
        "backend: vllm, max_new_tokens: 8, vllm_cfg: {precision: float32}, probe_tolerance: 0.001"
    )
    with Loopback(ServedPolicy(None, tiny_tokenizer)) as loopback:
        others = {
            "colocated": "",
            "apart": ", colocated: {enabled: false, resources: {gpus_per_node: 1}}",
            "served": f", url: {loopback.url}, model: m, max_retries: 1",
        }
        cases = {
            name: [*COMMON, f"policy.generation={{{engine}{more}}}"]
            for name, more in others.items()
        }
        want, *found = [
            run_processes(
                "test_grpo:run_all", num, file, str(tmp_path / folder), cases, timeout=500
            )
            for folder, num in (("alone", 1), ("together", 2))
        ]
        assert [one.path for one in loopback.requests].count("/collective_rpc") == 2 * 4, (
            "each version once"
        )
    assert_same_runs(found[0], want[0], tmp_path / "together", tmp_path / "alone")
    for name in cases:
        lines = read_metrics(tmp_path / "together" / name / "logs" / "metrics.jsonl")
        assert all(
            line.get("train/token_mult_prob_error", 1.0) == pytest.approx(1.0, abs=1e-4)
            for line in lines
        )


def assert_same_runs(found: list[Any], want: dict[str, Any], together: Path, alone: Path) -> None:
    for name, outcome in want.items():
        for of_rank in found:
            assert of_rank[name]["step"] == outcome["step"]
        assert_close(found[0][name]["validation"], outcome["validation"], name)
        assert_same_files(together / name, alone / name)
        samples = [
            (folder / name / "logs" / "samples.jsonl").read_text().splitlines()
            for folder in (together, alone)
        ]
        for one, other in zip(*(map(json.loads, lines) for lines in samples), strict=True):
            for ours, theirs in zip(one["completions"], other["completions"], strict=True):
                assert ours["text"] == theirs["text"]
