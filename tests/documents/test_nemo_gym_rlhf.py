"""The document: "Use trained reward models as environments for GRPO training to optimize against
learned human preferences."

NeMo Gym's tutorial "RLHF with Reward Models", walked through: what is quoted is run. The tests in
`resources_servers/math_with_judge/` run its hybrid, and the walks through NeMo RL's documents its
training scripts; here those are read with the words of this page.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import chat

from treeward.compat.nemo_rl import EnvironmentReturn, RewardModelEnvironment
from treeward.config.load import load_config, load_grpo_config
from treeward.errors import ConfigError
from treeward.scoring.scorer import Scorer

REPOSITORY = Path(__file__).parent.parent.parent

LOGS = [
    chat("What's the capital of France?", text)
    for text in ("The capital of France is Paris.", "France is a country in Europe.")
]


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> list[float | None]:
    return [score.score for score in Scorer.load(model_folder, device="cpu").score(LOGS)]


# --- How It Works, Core Components ----------------------------------------------------------------


def test_the_parts_of_step(expected: list[float], model_folder: Path) -> None:
    """`preprocess_data`, `reward_model_policy.score(reward_data)["scores"]`, and the fields of
    `EnvironmentReturn`."""
    environment = RewardModelEnvironment({"model_name": str(model_folder), "precision": "float32"})
    scores = environment.reward_model_policy.score(environment.preprocess_data(LOGS))["scores"]
    result = environment.step(message_logs=LOGS, env_infos=[{}, {}])
    assert type(result) is EnvironmentReturn
    assert scores.tolist() == result.rewards.tolist() == pytest.approx(expected, abs=1e-5)
    assert result._fields == (
        "observations",
        "metadata",
        "next_stop_strings",
        "rewards",
        "terminateds",
        "answers",
    )
    assert result.rewards.device.type == "cpu" and torch.equal(
        result.terminateds, torch.tensor([True, True])
    )
    assert result.answers == [log[-1]["content"] for log in LOGS]
    assert all(len(field) == 2 for field in result)


# --- Quick Start ----------------------------------------------------------------------------------


def test_the_configuration_of_the_first_step() -> None:
    """`uv run examples/run_rm.py --config examples/configs/rm.yaml`; HelpSteer3, Tulu3Preference,
    custom JSONL."""
    quoted = REPOSITORY / "examples/configs/rm.yaml"
    assert (REPOSITORY / "examples/run_rm.py").is_file()
    assert load_config(quoted).data.train[0].dataset_name == "HelpSteer3"
    custom = [
        "data.dataset_name=PreferenceDataset",
        "+data.train_data_path=t.jsonl",
        "+data.val_data_path=v.jsonl",
    ]
    for words in (["data.dataset_name=Tulu3Preference", "checkpointing.metric_name=null"], custom):
        assert load_config(quoted, words).data.train[0].dataset_name == words[0].split("=")[1]


GRPO_WITH_RM = """
env:
  reward_model:
    model_name: "path/to/your/trained/reward/model"
    # Or use a pretrained model from HuggingFace:
    # model_name: "Skywork/Skywork-Reward-V2-Qwen3-0.6B"
    tokenizer:
      name: ${env.reward_model.model_name}
    precision: "bfloat16"
    batch_size: ${policy.train_micro_batch_size}
    resources:
      gpus_per_node: 1
      num_nodes: 1
    dtensor_cfg:
      enabled: true
      tensor_parallel_size: 1
    reward_model_cfg:
      enabled: true
      reward_model_type: "bradley_terry"
    dynamic_batching:
      enabled: false
    sequence_packing:
      enabled: false
"""


@pytest.fixture
def section(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A function: the section `env.reward_model` of the page's configuration; overrides as on the
    command line."""
    file = tmp_path / "grpo_with_rm.yaml"
    file.write_text(
        f"defaults: {REPOSITORY}/examples/configs/grpo_rm_1B.yaml\n{GRPO_WITH_RM}", encoding="utf-8"
    )
    return lambda *overrides: dict(load_grpo_config(file, overrides).env["reward_model"])


def test_the_configuration_of_the_environment(
    section: Callable[..., dict[str, Any]], expected: list[float], model_folder: Path
) -> None:
    for name in ("Skywork/Skywork-Reward-V2-Qwen3-0.6B", "Skywork/Skywork-Reward-V2-Qwen3-8B"):
        assert section(f"env.reward_model.model_name={name}")["tokenizer"]["name"] == name
    given = section(
        f"env.reward_model.model_name={model_folder}", "policy.train_micro_batch_size=2"
    )
    assert given["tokenizer"]["name"] == str(model_folder) and given["batch_size"] == 2
    step = RewardModelEnvironment(
        {key: value for key, value in given.items() if key != "enabled"}
    ).step(LOGS, [{}, {}])
    assert step.rewards.tolist() == pytest.approx(expected, abs=0.05)  # bfloat16


# --- Configuration Reference ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("env.reward_model.reward_model_cfg.enabled=false", "reward_model_cfg.enabled"),
        ("env.reward_model.reward_model_cfg.reward_model_type=hinge", "bradley_terry"),
        ("env.reward_model.dtensor_cfg.tensor_parallel_size=2", "tensor_parallel_size"),
        ("+env.reward_model.megatron_cfg={enabled: true}", "megatron_cfg"),
    ],
)
def test_what_must_be(section: Callable[..., dict[str, Any]], override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        section(override)


@pytest.mark.parametrize(
    "override",
    [
        "env.reward_model.dynamic_batching={enabled: true, train_mb_tokens: 64}",
        "env.reward_model.sequence_packing={enabled: true, train_mb_tokens: 64}",
        "+env.reward_model.dtensor_cfg.cpu_offload=true",
        "+env.reward_model.dtensor_cfg.activation_checkpointing=true",
    ],
)
def test_what_the_page_says_is_disabled_works(
    section: Callable[..., dict[str, Any]], expected: list[float], model_folder: Path, override: str
) -> None:
    names = [f"env.reward_model.model_name={model_folder}", "env.reward_model.precision=float32"]
    given = {key: value for key, value in section(*names, override).items() if key != "enabled"}
    assert RewardModelEnvironment(given).step(LOGS, [{}, {}]).rewards.tolist() == pytest.approx(
        expected, abs=1e-5
    )
