"""The seeds' second half: `examples/run_grpo_rm.py --config examples/configs/grpo_rm_1B.yaml`, with small stand-ins.

Policy and reward model are small ones in folders, and OpenMathInstruct-2 a file of its schema; everything else is as it
is shipped, down to the prompts, the math environment as gold, and the weights after two steps.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from signed import write_signed_model

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
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`python examples/run_grpo_rm.py ...` in the repository, in this process."""

    def run(*words: str) -> int:
        folders = [f"checkpointing.checkpoint_dir={tmp_path}/checkpoints", f"logger.log_dir={tmp_path}/logs"]
        monkeypatch.setattr(sys, "argv", ["run_grpo_rm.py", *words, *folders])
        monkeypatch.chdir(REPOSITORY)
        with pytest.raises(SystemExit) as caught:
            runpy.run_path("examples/run_grpo_rm.py", run_name="__main__")
        return int(caught.value.code or 0)

    return run


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
