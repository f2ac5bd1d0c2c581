"""The document: "feat: Support Reward Model based Environments."

NeMo RL's pull request 1026: its usage, its table and its training results. The usage line, `uv run
examples/run_grpo_rm.py --config examples/configs/grpo_rm_1B.yaml`, runs with small stand-ins, also
by today's name, `run_grpo.py`. Policy and reward model are small ones in folders, vLLM is a package
that makes the same calls, and OpenMathInstruct-2 a file of its schema; everything else is as it is
shipped, down to the prompts, the math environment as gold, and the weights after two steps.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import assistant, read_jsonl, write_jsonl
from safetensors.torch import load_file
from signed import SIZES, write_signed_model
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from treeward.cli.main import main
from treeward.config.load import load_grpo_config
from treeward.config.reward_environments import RewardModelEnvironmentConfig
from treeward.data.rendering import Renderer
from treeward.errors import ConfigError
from treeward.evaluation.suites.rewardbench import WEIGHTS
from treeward.training.tracking import read_metrics

REPOSITORY = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def stand_ins(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that put small things in the place of large ones."""
    folder = tmp_path_factory.mktemp("stand_ins")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "vocab_size": len(tiny_tokenizer),
            "num_key_value_heads": 2,
            **SIZES,
        }
        config = Qwen2Config(max_position_embeddings=1024, **sizes)
        Qwen2ForCausalLM(config).save_pretrained(folder / "policy")
    tiny_tokenizer.chat_template = Renderer(tiny_tokenizer).chat_template
    tiny_tokenizer.save_pretrained(folder / "policy")
    write_signed_model(folder / "rm", tiny_tokenizer, seed=3, max_length=2048)
    rows = [{"problem": f"What is {n} plus {n}?", "expected_answer": str(2 * n)} for n in range(60)]
    data = write_jsonl(folder / "train_1M.jsonl", *rows)
    return [
        f"policy.model_name={folder / 'policy'}",
        f"env.reward_model.model_name={folder / 'rm'}",
        f"data.train.data_path={data}",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
        "policy.train_global_batch_size=16",
        "grpo.max_num_steps=2",
        "grpo.val_period=2",
        "policy.generation.max_new_tokens=12",
    ]


@pytest.fixture
def run_script(uv_run: Callable[..., int]) -> Callable[..., int]:
    return partial(uv_run, "examples/run_grpo.py")


def check_run(folder: Path, *, gold: bool) -> None:
    lines = list(read_metrics(folder / "logs" / "metrics.jsonl"))
    first, second = (line for line in lines if "train/loss" in line)
    assert first["reward_model_env/num_samples"] == 16 and first["reward_model_env/num_failed"] == 0
    assert first["train/reward"] == pytest.approx(first["reward_model_env/mean_reward"], rel=1e-5)
    assert ("train/gold_reward" in first) is gold  # whether answers are right
    assert first["train/kl"] == 0.0 and second["train/lr"] > first["train/lr"] > 0  # it warms up
    assert [line["step"] for line in lines if "validation/reward" in line][-1] == 2
    samples = read_jsonl(folder / "logs" / "samples.jsonl")
    (asked,) = samples[0]["prompt"]
    assert asked["role"] == "user" and "\\boxed{" in asked["content"] and "plus" in asked["content"]
    assert (folder / "checkpoints" / "final" / "model.safetensors").is_file()


def test_without_a_config_it_is_the_shipped_one(
    run_script: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script("grpo.max_num_stepz=2") == 2
    error = capsys.readouterr().err
    assert "grpo.max_num_stepz" in error and "did you mean" in error


def test_nemo_rls_own_file(
    run_script: Callable[..., int], stand_ins: list[str], tmp_path: Path
) -> None:
    """Its keys and values, in the flat form of its first version."""
    file = REPOSITORY / "tests/config/nemo_rl/grpo_rm_first.yaml"
    flat = [word.replace("data.train.data_path", "+data.train_data_path") for word in stand_ins]
    assert run_script("--config", str(file), *flat) == 0
    check_run(tmp_path, gold=False)


# --- Reward Environment Correctness ---------------------------------------------------------------


YES = {"chosen": "Yes.", "rejected": "No."}
OF_PR_1026 = [
    {"prompt": f"{subset}?", "subset": subset, **pair}
    for subset in chain.from_iterable(WEIGHTS.values())
    for pair in (YES | {"id": 1}, {"chosen": "No.", "rejected": "Yes.", "id": 2})
]
OF_OPEN_INSTRUCT = [
    {
        "prompt": f"{subset}?",
        "subset": subset,
        "chosen": ["Yes."],
        "rejected": ["No.", "So?", "Hm."],
        "id": "1",
    }
    for subset in ("Factuality", "Precise IF", "Math", "Safety", "Focus")
]


@pytest.mark.parametrize(
    ("suite", "rows"), [("rewardbench", OF_PR_1026), ("rewardbench2", OF_OPEN_INSTRUCT)]
)
def test_published_numbers_beside_ours(
    suite: str, rows: list[Any], model_folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """`examples/reproduce/compare.py`, for open-instruct's numbers too: a small model on a copy in
    the hub's schema."""
    monkeypatch.chdir(tmp_path)
    copy = write_jsonl(tmp_path / "copy.jsonl", *rows)
    script = runpy.run_path(str(REPOSITORY / "examples" / "reproduce" / "compare.py"))
    words = [
        "--suite",
        suite,
        "--limit",
        "1000",
        "--model",
        str(model_folder),
        "--output",
        "elsewhere",
        "--copy",
    ]
    assert script["run"]([*words, copy]) == 0
    published = script["PUBLISHED"][suite]
    table = capsys.readouterr().out.partition(published["source"])[2]
    found = {
        cells[0]: cells[1:]
        for line in table.splitlines()[4:]
        if len(cells := re.split(r" {2,}", line)) == 7
    }
    assert {*(row["subset"] for row in rows), "overall"} == found.keys()
    if suite == "rewardbench":
        assert found.pop("overall")[2:] == ["–"] * 4, "the pull request has none"
        assert len(found) == 23 and all(
            values[:2] == ["2", "0.500"] for values in found.values()
        ), "one of two is right"
    for subset, (_, here, *values) in found.items():
        columns = [one[subset] for one in published["columns"].values()]
        assert values[::2] == [f"{column:.3f}" for column in columns]
        differences = [float(here) - column for column in columns]
        assert [float(cell) for cell in values[1::2]] == pytest.approx(differences, abs=1e-3)
    assert script["run"]([*words, str(tmp_path / "nowhere.jsonl")]) == 2
    assert published["source"] not in capsys.readouterr().out, "no numbers of an earlier run"


# --- Training Results -----------------------------------------------------------------------------

COMMON = (
    "policy.max_total_sequence_length=2048 cluster.gpus_per_node=8 "
    "data.default.dataset_name=OpenMathInstruct-2 "
    "env.reward_model.model_name=Skywork/Skywork-Reward-V2-Qwen3-0.6B "
    "env.reward_model.precision=bfloat16 "
    "env.reward_model.batch_size=32 env.reward_model.dtensor_cfg.tensor_parallel_size=4 "
    "policy.dtensor_cfg.tensor_parallel_size=2 policy.precision=bfloat16 "
)
COLOCATED = COMMON + "env.reward_model.resources.gpus_per_node=4"
APART = (
    f"{COMMON} env.reward_model.resources.gpus_per_node=8 "
    "policy.generation.colocated.enabled=False "
    "policy.generation.colocated.resources.gpus_per_node=4 "
    "policy.generation.colocated.resources.num_nodes=1"
)


def test_its_configurations_load_as_they_are_written() -> None:
    file = REPOSITORY / "examples/configs/grpo_rm_1B.yaml"
    for words, replicas, engines in ((COLOCATED, 1, 1), (APART, 2, 4)):
        config = load_grpo_config(file, words.split())
        rewards = RewardModelEnvironmentConfig.model_validate(config.env["reward_model"])
        assert (rewards.num_workers, rewards.needs_ray) == (replicas, True)
        assert config.policy.generation.num_engines == engines and config.has_other_gpus
        if words == COLOCATED:
            assert config.training_cluster.num_processes == 4
        else:
            with pytest.raises(
                ConfigError,
                match=r"(?s)no GPU is left.*8, of which .* have 12.*cluster.num_nodes=2",
            ):
                _ = config.training_cluster
            config = load_grpo_config(file, [*words.split(), "cluster.num_nodes=2"])
            left = config.training_cluster
            assert (left.num_nodes, left.gpus_per_node) == (1, 4)
    assert not load_grpo_config(
        file, COLOCATED.split()
    ).policy.generation.starts_engines  # there is no vLLM here


HALF_OF_COLOCATED = (
    "cluster.gpus_per_node=4 env.reward_model.resources.gpus_per_node=2 "
    "env.reward_model.dtensor_cfg.tensor_parallel_size=2"
)
HALF_OF_APART = (
    "env.reward_model.resources.gpus_per_node=4 "
    "env.reward_model.dtensor_cfg.tensor_parallel_size=2 "
    "policy.generation.colocated.resources.gpus_per_node=2"
)
"""Of 8 processes, 4 are the two replicas, 2 are engines, and 2 train."""


@pytest.fixture
def words_of(stand_ins: list[str], tmp_path: Path) -> Callable[..., list[str]]:
    """The usage line with these overrides and the stand-ins; each step is saved and validated on
    all prompts."""

    def words(*overrides: str) -> list[str]:
        settings = (
            *("grpo.val_at_start=true", "grpo.val_period=1", "grpo.gold_environment=math"),
            *(
                "checkpointing.save_period=1",
                "policy.max_total_sequence_length=512",
                "policy.optimizer.kwargs.lr=0.01",
            ),
            "env.reward_model.precision=float32",  # so that rewards compare to 1e-5
            *(
                f"checkpointing.checkpoint_dir={tmp_path}/checkpoints",
                f"logger.log_dir={tmp_path}/logs",
            ),
        )
        return ["--config", "examples/configs/grpo_rm_1B.yaml", *overrides, *stand_ins, *settings]

    return words


def check_rewards(folder: Path, reward_model: str) -> None:
    """Those of the validations are what `treeward score` says of the same completions."""
    samples = read_jsonl(folder / "logs/samples.jsonl")
    rewarded = [(sample, one) for sample in samples for one in sample["completions"]]
    assert {sample["step"] for sample in samples} == {0, 1, 2}
    rows = [{"messages": [*sample["prompt"], assistant(one["text"])]} for sample, one in rewarded]
    data = write_jsonl(folder / "sampled.jsonl", *rows)
    output = folder / "scored.jsonl"
    assert main(["score", reward_model, "--data", data, "--output", str(output)]) == 0
    scores = [row["score"] for row in read_jsonl(output)]
    rewards = [one["reward"] for _, one in rewarded]
    # Each different completion has another score, by ten times what rewards may be off.
    texts = [json.dumps(row) for row in rows]
    different = sorted(dict(zip(texts, scores, strict=True)).values())
    assert len(different) > 2
    gaps = [high - low for low, high in itertools.pairwise(different)]
    assert min(gaps) > 1e-4, "another order would do"
    assert rewards == pytest.approx(scores, abs=1e-5)


def check_weights(folder: Path, policy: str, received: list[list[Mapping[str, Tensor]]]) -> None:
    """`received`, by engine: the first policy, and what each checkpoint has, bit by bit in
    bfloat16."""
    saved = [Path(policy), folder / "checkpoints/step_1/model", folder / "checkpoints/step_2/model"]
    versions = [load_file(one / "model.safetensors") for one in saved]
    assert not all(
        torch.equal(versions[0][name].float(), versions[2][name].float()) for name in versions[0]
    )
    for updates in received:
        assert len(updates) == len(versions)
        for update, version in zip(updates, versions, strict=True):
            assert update.keys() == version.keys()
            for name, weight in update.items():
                assert torch.equal(weight.bfloat16(), version[name].bfloat16()), name


def check_metrics(folder: Path) -> None:
    check_run(folder, gold=True)
    steps = [line for line in read_metrics(folder / "logs/metrics.jsonl") if "train/loss" in line]
    assert len(steps) == 2
    for line in steps:
        assert all(
            math.isfinite(line[f"train/{name}"]) for name in ("loss", "grad_norm", "reward", "kl")
        )
        assert line["train/grad_norm"] > 0 and 1 <= line["train/token_mult_prob_error"] < 1.2


LAYOUT = "2 processes: 1 x 1 x 2 (copies x shards x tensor parallel)"


def log_of(folder: Path) -> str:
    """What the main process says."""
    return (folder / "logs/ranks/rank_0.log").read_text(encoding="utf-8")


def of_stand_in(stand_ins: list[str], key: str) -> str:
    return next(word.partition("=")[2] for word in stand_ins if word.startswith(f"{key}="))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "half", "num_replicas", "engines"),
    [
        (COLOCATED, HALF_OF_COLOCATED, 1, "2 engines of vLLM, 1 GPUs each, beside"),
        (
            f"{APART} cluster.gpus_per_node=8",
            HALF_OF_APART,
            2,
            "2 engines of vLLM, 1 GPUs each, apart from",
        ),
    ],
)
def test_half_of_its_processes(
    words: str, half: str, num_replicas: int, engines: str,
    words_of: Callable[..., list[str]], stand_ins: list[str], tmp_path: Path,
) -> None:  # fmt: skip
    """As written, but for half of its 8 and 16 GPUs, which are processes: Ray starts two that
    train, each replica of the reward model on two, and two engines."""
    received = tmp_path / "received"
    received.mkdir()
    given = words_of(
        *words.split(), *half.split(), f"policy.generation.vllm_kwargs={{kept_in: {received}}}"
    )
    paths = os.pathsep.join([str(REPOSITORY / "tests/stand_ins"), str(REPOSITORY / "src")])
    environment = {
        **os.environ,
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "examples/run_grpo_rm.py", *given]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    log = log_of(tmp_path)
    assert LAYOUT in log and engines in log
    assert f"{num_replicas} replicas of the reward model, 2 processes each" in log
    check_metrics(tmp_path)
    check_rewards(tmp_path, of_stand_in(stand_ins, "env.reward_model.model_name"))
    names = sorted(path.name for path in received.iterdir())
    by_engine = [[load_file(received / f"{pid}-{n}.safetensors") for n in (1, 2, 3)]
                 for pid in sorted({name.partition("-")[0] for name in names})]  # fmt: skip
    assert len(by_engine) == 2 and len(names) == 6
    check_weights(tmp_path, of_stand_in(stand_ins, "policy.model_name"), by_engine)
