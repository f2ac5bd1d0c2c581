"""NeMo RL's pull request 1026: reward models as environments of GRPO, its usage, its table and its training results.

The usage line, `uv run examples/run_grpo_rm.py --config examples/configs/grpo_rm_1B.yaml`, runs with small stand-ins.
Policy and reward model are small ones in folders, and OpenMathInstruct-2 a file of its schema; everything else is as it
is shipped, down to the prompts, the math environment as gold, and the weights after two steps.
"""

from __future__ import annotations

import json
import re
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

# The table's rows where its two columns differ; subset: by the package, by NeMo RL's environment.
DIFFERING = {
    "donotanswer": (0.8161764705882353, 0.7941176470588235),
    "hep-cpp": (0.9817073170731707, 0.975609756097561),
    "llmbar-adver-GPTOut": (0.7659574468085106, 0.8085106382978723),
    "llmbar-natural": (0.93, 0.94),
    "xstest-should-respond": (0.952, 0.956),
}
ROWS = {
    "filtered": [
        {"prompt": f"{subset}?", "chosen": chosen, "rejected": rejected, "subset": subset, "id": n}
        for subset in (name for section in WEIGHTS.values() for name in section)
        for n, (chosen, rejected) in enumerate([("Yes, it is.", "No."), ("No.", "Yes, it is.")])
    ],
    "test": [
        {"prompt": f"{subset}?", "chosen": ["Yes."], "rejected": ["No.", "So?", "Hm."], "subset": subset, "id": "1"}
        for subset in ("Factuality", "Precise IF", "Math", "Safety", "Focus")
    ],
}


@pytest.mark.parametrize(
    ("name", "split", "num_subsets"), [("pull_request_1026", "filtered", 23), ("tulu_3_8b", "test", 5)]
)
def test_published_numbers_beside_ours(
    name: str,
    split: str,
    num_subsets: int,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`examples/reproduce/compare.py`, with a small model on a small copy in the schema of the hub."""
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / f"{split}.jsonl"
    copy.write_text("".join(json.dumps(row) + "\n" for row in ROWS[split]), encoding="utf-8")
    script = runpy.run_path(str(REPOSITORY / "examples" / "reproduce" / "compare.py"))
    assert script["run"]([name, str(model_folder), "--copy", str(copy), "--limit", "1000"]) == 0
    published = script["PUBLISHED"][name]
    table = capsys.readouterr().out.partition(published["source"])[2]
    rows = {cells[0]: cells[1:] for line in table.splitlines() if len(cells := re.split(r" {2,}", line.strip())) == 7}
    assert len(rows) == num_subsets + 3, "the heading and its rule, the subsets, the whole"
    for subset, values in zip(published["columns"].values(), (2, 4), strict=True):
        for row in set(subset) & set(rows):
            here, value, difference = (float(rows[row][i]) for i in (1, values, values + 1))
            assert value == pytest.approx(subset[row], abs=5e-4)
            assert difference == pytest.approx(here - subset[row], abs=1.1e-3)
    if name == "pull_request_1026":
        assert {cells[1] for subset, cells in rows.items() if subset in WEIGHTS["Chat"]} == {"0.500"}
        package, environment = published["columns"].values()
        assert set(package) == set(environment) == {name for section in WEIGHTS.values() for name in section}
        assert {one: (package[one], environment[one]) for one in DIFFERING} == DIFFERING


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
