"""NeMo RL's pull request 1026: reward models as environments of GRPO, its usage, its table and its training results.

The usage line, `uv run examples/run_grpo_rm.py --config examples/configs/grpo_rm_1B.yaml`, runs with small stand-ins.
Policy and reward model are small ones in folders, and OpenMathInstruct-2 a file of its schema; everything else is as it
is shipped, down to the prompts, the math environment as gold, and the weights after two steps.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from signed import write_signed_model

from treeward.config.load import load_grpo_config
from treeward.errors import ConfigError
from treeward.evaluation.suites.rewardbench import WEIGHTS
from treeward.training.tracking import read_metrics

REPOSITORY = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def stand_ins(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that put small things in the place of large ones."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from treeward.data.rendering import Renderer

    folder = tmp_path_factory.mktemp("stand_ins")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = Qwen2Config(
            vocab_size=len(tiny_tokenizer), num_key_value_heads=2, max_position_embeddings=1024, **sizes
        )
        Qwen2ForCausalLM(config).save_pretrained(folder / "policy")
    tiny_tokenizer.chat_template = Renderer(tiny_tokenizer).chat_template
    tiny_tokenizer.save_pretrained(folder / "policy")
    write_signed_model(folder / "rm", tiny_tokenizer, seed=3, max_length=2048)
    rows = [
        {
            "problem": f"What is {n} plus {n}?",
            "generated_solution": f"It is \\boxed{{{2 * n}}}.",
            "expected_answer": str(2 * n),
            "problem_source": "augmented_math",
        }
        for n in range(60)
    ]
    data = folder / "train_1M.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
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
    return partial(uv_run, "examples/run_grpo_rm.py")


def check_run(folder: Path, *, gold: bool) -> None:
    first, second = [line for line in read_metrics(folder / "logs" / "metrics.jsonl") if "train/loss" in line]
    assert first["reward_model_env/num_samples"] == 16 and first["reward_model_env/num_failed"] == 0
    assert first["train/reward"] == pytest.approx(first["reward_model_env/mean_reward"], rel=1e-5)
    assert ("train/gold_reward" in first) is gold  # whether answers are right
    assert first["train/kl"] == 0.0 and second["train/lr"] > first["train/lr"] > 0  # it warms up
    (validated,) = [line for line in read_metrics(folder / "logs" / "metrics.jsonl") if "validation/reward" in line]
    assert validated["step"] == 2
    samples = [json.loads(line) for line in (folder / "logs" / "samples.jsonl").read_text().splitlines()]
    (asked,) = samples[0]["prompt"]
    assert asked["role"] == "user" and "\\boxed{" in asked["content"] and "plus" in asked["content"]
    assert (folder / "checkpoints" / "final" / "model.safetensors").is_file()


def test_the_shipped_configuration(run_script: Callable[..., int], stand_ins: list[str], tmp_path: Path) -> None:
    gold = "grpo.gold_environment=math"
    assert run_script("--config", "examples/configs/grpo_rm_1B.yaml", *stand_ins, gold) == 0
    check_run(tmp_path, gold=True)


def test_without_a_config_it_is_the_shipped_one(
    run_script: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_script("grpo.max_num_stepz=2") == 2
    error = capsys.readouterr().err
    assert "grpo.max_num_stepz" in error and "did you mean" in error


def test_nemo_rls_own_file(
    run_script: Callable[..., int], stand_ins: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its keys and values, in the flat form of its first version."""
    file = REPOSITORY / "tests/config/nemo_rl/grpo_rm_first.yaml"
    flat = [word.replace("data.train.data_path", "+data.train_data_path") for word in stand_ins]
    assert run_script("--config", str(file), *flat) == 0
    check_run(tmp_path, gold=False)


# --- Reward Environment Correctness ----------------------------------------------------------------------------------


def test_published_numbers_beside_ours(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`examples/reproduce/compare.py`, with a small model on a small copy in the schema of the hub."""
    monkeypatch.chdir(tmp_path)
    subsets = {name for section in WEIGHTS.values() for name in section}
    answers = [("Yes, it is.", "No."), ("No.", "Yes, it is.")]
    rows = [
        {"prompt": f"{subset}?", "chosen": chosen, "rejected": rejected, "subset": subset, "id": n}
        for subset in subsets
        for n, (chosen, rejected) in enumerate(answers)
    ]
    copy = tmp_path / "filtered.jsonl"
    copy.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    script = runpy.run_path(str(REPOSITORY / "examples" / "reproduce" / "compare.py"))
    words = ["--limit", "1000", "--model", str(model_folder), "--output", "elsewhere", "--copy"]
    assert script["run"]([*words, str(copy)]) == 0
    published = script["PUBLISHED"]["rewardbench"]
    table = capsys.readouterr().out.partition(published["source"])[2]
    found = {cells[0]: cells[1:] for line in table.splitlines()[4:] if len(cells := line.split()) == 7}
    assert found.pop("overall")[2:] == ["–"] * 4, "the pull request has none"
    assert set(found) == subsets and len(subsets) == 23
    for subset, values in found.items():
        assert values[:2] == ["2", "0.500"], "one of two is right"
        columns = [one[subset] for one in published["columns"].values()]
        assert values[2:] == [text for value in columns for text in (f"{value:.3f}", f"{0.5 - value:+.3f}")]
    assert script["run"]([*words, str(tmp_path / "nowhere.jsonl")]) == 2
    assert published["source"] not in capsys.readouterr().out, "no numbers of an earlier run"


# --- Training Results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("policy.max_total_sequence_length=2048", None),
        ("env.reward_model.model_name=Skywork/Skywork-Reward-V2-Qwen3-0.6B", None),
        ('env.reward_model.precision="bfloat16"', None),
        ("env.reward_model.batch_size=32", None),
        ("env.reward_model.resources.gpus_per_node=4", None),
        ('policy.precision="bfloat16"', None),
        ("policy.generation.colocated.resources.gpus_per_node=4", None),
        ("policy.generation.colocated.resources.num_nodes=1", None),
        ("cluster.gpus_per_node=8", "training on more than one process"),
        ("env.reward_model.dtensor_cfg.tensor_parallel_size=4", "tensor_parallel_size"),
        ("policy.dtensor_cfg.tensor_parallel_size=2", "tensor_parallel_size"),
        ("policy.generation.colocated.enabled=False", "a url"),
        ("policy.generation.colocated.enabled=False policy.generation.url=http://127.0.0.1:8000/v1", None),
    ],
)
def test_the_keys_of_its_runs(key: str, answer: str | None) -> None:
    """Each is read, or refused with the reason and the remedy: one process trains, and no model is sharded yet."""
    file = REPOSITORY / "examples/configs/grpo_rm_1B.yaml"
    if answer is None:
        assert load_grpo_config(file, key.split()).env["reward_model"]["model_name"].startswith("Skywork/")
        return
    with pytest.raises(ConfigError, match=answer) as caught:
        load_grpo_config(file, [key])
    assert caught.value.fix or caught.value.need
