"""The section of a reward-model environment: what it accepts from NeMo RL's configurations, and what it refuses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from treeward.config.environment import RewardModelEnvironmentConfig
from treeward.config.load import load_section
from treeward.errors import ConfigError


def load(**keys: Any) -> RewardModelEnvironmentConfig:
    return load_section(RewardModelEnvironmentConfig, {"model_name": "m"} | keys, where="env_config")


def refused(words: str, **keys: Any) -> None:
    with pytest.raises(ConfigError, match=f"(?s:{words})"):
        load(**keys)


GUIDE = """
env:
  reward_model:
    enabled: true
    model_name: "path/to/your/trained/reward/model"
    tokenizer:
      name: "path/to/your/trained/reward/model"
    precision: "bfloat16"
    batch_size: 32
    resources:
      gpus_per_node: 1
      num_nodes: 1
    reward_model_cfg:
      enabled: true
      reward_model_type: "bradley_terry"
"""
TUTORIAL = """
policy: {train_micro_batch_size: 4}
# grpo_with_rm.yaml
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


@pytest.mark.parametrize(("text", "batch_size"), [(GUIDE, 32), (TUTORIAL, 4)])
def test_the_files_of_the_guides(text: str, batch_size: int, tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(text, encoding="utf-8")
    config = load_section(RewardModelEnvironmentConfig, OmegaConf.load(file).env.reward_model, where=str(file))
    assert config.model_names == ("path/to/your/trained/reward/model",)
    assert config.tokenizer.name == config.model_name
    assert (config.precision, config.batch_size, config.num_workers) == ("bfloat16", batch_size, 1)


def test_keys_that_such_configurations_carry(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="treeward"):
        config = load(
            checkpoint_path=None,
            max_model_len=2048,
            logprob_batch_size=4,
            offload_optimizer_for_logprob=False,
            max_grad_norm=None,
            processor="math_hf_data_processor",
            dtensor_cfg={"_v2": True, "sequence_parallel": False, "context_parallel_size": 1, "cpu_offload": False,
                         "custom_parallel_plan": None, "activation_checkpointing": False},
            dynamic_batching={"enabled": False, "train_mb_tokens": 8192, "logprob_mb_tokens": 8192,
                              "sequence_length_round": 64},
            megatron_cfg={"enabled": False, "pipeline_dtype": "bfloat16"},
        )  # fmt: skip
    assert (config.max_model_len, config.batch_tokens) == (2048, None)
    assert "logprob_batch_size" in caplog.text and "_v2" in caplog.text


def test_what_other_toolkits_do_not_support() -> None:
    for section in ("dynamic_batching", "sequence_packing"):
        config = load(batch_size=8, **{section: {"enabled": True, "train_mb_tokens": 512}})
        assert (config.batch_size, config.batch_tokens) == (None, 512)
        assert load(batch_size=8, **{section: {"enabled": True}}).batch_size == 8
        own = load(batch_size=8, batch_tokens=64, **{section: {"enabled": True, "train_mb_tokens": 512}})
        assert (own.batch_size, own.batch_tokens) == (8, 64)
    assert load(cpu_offload=True).dtensor_cfg.cpu_offload
    assert load(activation_checkpointing=True, dtensor_cfg={"_v2": True}).dtensor_cfg.activation_checkpointing
    assert not load(cpu_offload=True, dtensor_cfg={"cpu_offload": False}).dtensor_cfg.cpu_offload


def test_replicas() -> None:
    assert load().num_workers == 1
    assert load(resources={"gpus_per_node": 4, "num_nodes": 2}).num_workers == 8
    assert load(resources={"gpus_per_node": 0, "num_nodes": 2}).num_workers == 2
    assert load(resources={"gpus_per_node": 0}, num_replicas=3).num_workers == 3
    assert load(num_replicas=3).num_workers == 3
    assert load(resources={"gpus_per_node": 3}, num_replicas=3).num_workers == 3
    refused("num_replicas and resources contradict", resources={"gpus_per_node": 2}, num_replicas=3)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"dtensor_cfg": {"tensor_parallel_size": 4}}, "tensor_parallel_size is not supported yet.*4.*replica"),
        ({"dtensor_cfg": {"context_parallel_size": 2}}, "not supported yet.*context_parallel_size"),
        ({"megatron_cfg": {"enabled": True}}, "no Megatron backend.*megatron_cfg"),
        ({"reward_model_cfg": {"enabled": False}}, "reward_model_cfg.enabled.*Must be true"),
        ({"reward_model_cfg": {"reward_model_type": "regression"}}, "regression.*bradley_terry"),
        ({"enabled": False}, "switched off"),
        ({"checkpoint_path": "weights"}, "checkpoint_path is not supported.*model_name"),
        ({"model_name": ["a", "b"]}, "no ensemble over models.*ensemble"),
        ({"model_name": ["a", "b"], "ensemble": {"over": "heads"}}, "no ensemble over models"),
        ({"model_name": ["a", "b"], "ensemble": {}, "tokenizer": {"name": "a"}}, "their own tokenizers"),
        ({"model_name": []}, "there is no model"),
        ({"model_name": 3}, "field: model_name\n.*valid string"),
        ({"reward_shaping": {"normalise_rewards": True}}, "did you mean reward_shaping.normalize_rewards"),
        ({"reward_shaping": "contracts"}, "field: reward_shaping\n.*'contract'"),
        ({"batch_sise": 4}, "did you mean batch_size"),
        ({"batch_size": 0}, "field: batch_size"),
        ({"precision": "float16"}, "float32' or 'bfloat16"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], words: str) -> None:
    refused(words, **keys)


def test_an_ensemble_and_the_contract() -> None:
    config = load(model_name=["a", "b"], ensemble={"method": "worst"}, reward_shaping="contract")
    assert config.model_names == ("a", "b") and config.reward_shaping == "contract"
    assert load(reward_shaping={"normalize_rewards": True, "reward_mean": 0.0, "reward_std": 1.0}).ensemble is None
