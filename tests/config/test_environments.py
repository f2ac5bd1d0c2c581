"""The sections of environments, reward shaping, calibration and ensembles: what each accepts, and what it refuses."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from treeward.config.ensemble import EnsembleConfig
from treeward.config.environment import RewardModelEnvironmentConfig
from treeward.config.load import load_section
from treeward.config.reward_environments import (
    HybridEnvironmentConfig,
    JudgeEnvironmentConfig,
    RuleEnvironmentConfig,
)
from treeward.config.reward_shaping import LengthCurve, RewardCalibration, RewardShapingConfig
from treeward.errors import ConfigError


def model(**keys: Any) -> RewardModelEnvironmentConfig:
    return load_section(RewardModelEnvironmentConfig, {"model_name": "m"} | keys, where="env_config")


def shaping(**keys: Any) -> RewardShapingConfig:
    return load_section(RewardShapingConfig, keys, where="env_config.reward_shaping")


def ensemble(**keys: Any) -> EnsembleConfig:
    return load_section(EnsembleConfig, keys, where="env_config.ensemble")


# the reward model

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
env:
  reward_model:
    model_name: "path/to/your/trained/reward/model"
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
        config = model(
            checkpoint_path=None,
            max_model_len=2048,
            logprob_batch_size=4,
            max_grad_norm=None,
            processor="math_hf_data_processor",
            dtensor_cfg={"_v2": True, "sequence_parallel": False, "context_parallel_size": 1, "cpu_offload": False},
            dynamic_batching={"enabled": False, "train_mb_tokens": 8192, "sequence_length_round": 64},
            megatron_cfg={"enabled": False, "pipeline_dtype": "bfloat16"},
        )
    assert (config.max_model_len, config.batch_tokens) == (2048, None)
    assert "logprob_batch_size" in caplog.text and "_v2" in caplog.text


def test_features_that_nemo_rl_does_not_support() -> None:
    for section in ("dynamic_batching", "sequence_packing"):
        config = model(batch_size=8, **{section: {"enabled": True, "train_mb_tokens": 512}})
        assert (config.batch_size, config.batch_tokens) == (None, 512)
        assert model(batch_size=8, **{section: {"enabled": True}}).batch_size == 8
        own = model(batch_size=8, batch_tokens=64, **{section: {"enabled": True, "train_mb_tokens": 512}})
        assert (own.batch_size, own.batch_tokens) == (8, 64)
    assert model(cpu_offload=True).dtensor_cfg.cpu_offload
    assert model(activation_checkpointing=True, dtensor_cfg={"_v2": True}).dtensor_cfg.activation_checkpointing
    assert not model(cpu_offload=True, dtensor_cfg={"cpu_offload": False}).dtensor_cfg.cpu_offload


# shaping and ensembles


CURVE = {"unit": "tokens", "lengths": [1, 5], "values": [0.0, 2.0], "residual_mean": 0.0, "residual_std": 1.0}


def test_constants_survive_the_contract() -> None:
    calibration = RewardCalibration.model_validate(
        {
            "normalization": {"mean": 1.25, "std": 2.0},
            "length_curve": CURVE,
            "temperature": {"value": 1.5, "nll_before": 0.5, "nll_after": 0.4, "num_pairs": 12},
            "provenance": {
                "data": "held_out.jsonl", "fingerprint": "ab", "num_comparisons": 3, "num_conversations": 6,
                "num_failed": 0, "treeward_version": "1", "date": "2025-01-31",
            },
        }
    )  # fmt: skip
    assert RewardCalibration.model_validate(json.loads(json.dumps(calibration.model_dump(mode="json")))) == calibration
    for change in ({"lengths": [5, 1]}, {"lengths": [1, 1]}, {"values": [0.0]}, {"residual_std": 0.0}):
        with pytest.raises(ValueError, match="not a curve|greater than 0"):
            LengthCurve.model_validate(CURVE | change)


# rules, judges, functions and hybrids


def test_a_members_keys_stand_beside_its_weight() -> None:
    values = {
        "members": {
            "rules": {"weight": 2, "rule": "math"},
            "other": {"type": "rules", "settings": {"rule": "regex"}, "pattern": "x"},
        }
    }
    members = load_section(HybridEnvironmentConfig, values, where="env_config").members
    assert members["rules"].settings == {"rule": "math"} and members["rules"].weight == 2
    assert members["other"].settings == {"rule": "regex", "pattern": "x"} and members["other"].type == "rules"


RM, SHAPING, ENSEMBLE, RULE = RewardModelEnvironmentConfig, RewardShapingConfig, EnsembleConfig, RuleEnvironmentConfig
JUDGE, HYBRID = JudgeEnvironmentConfig, HybridEnvironmentConfig
MODEL, MATH = {"model_name": "m"}, {"rule": "math"}
ASKED = {"base_url": "http://127.0.0.1:1/v1", "model": "m"}
CONSTANTS = {"reward_mean": 0.0, "reward_std": 1.0}


@pytest.mark.parametrize(
    ("section", "values", "field", "words"),
    [
        (RM, MODEL | {"resources": {"gpus_per_node": 2}, "num_replicas": 3}, "num_replicas", "contradict"),
        (RM, MODEL | {"megatron_cfg": {"enabled": True}}, "megatron_cfg.enabled", "megatron_cfg is not supported"),
        (RM, MODEL | {"reward_model_cfg": {"enabled": False}}, "reward_model_cfg.enabled", "Must be true"),
        (RM, MODEL | {"enabled": False}, "enabled", "switched off"),
        (RM, MODEL | {"checkpoint_path": "weights"}, "checkpoint_path", "model_name"),
        (RM, {"model_name": ["a", "b"]}, "model_name", "ensemble"),
        (RM, {"model_name": ["a", "b"], "ensemble": {}, "tokenizer": {"name": "a"}}, "tokenizer", "their own"),
        (RM, {"model_name": []}, "model_name", "there is no model"),
        (RM, MODEL | {"reward_shaping": "contracts"}, "reward_shaping", "'contract'"),
        (SHAPING, {"reward_mean": 1.0}, "reward_std", "belong together"),
        (SHAPING, {"running": True}, "running", "normalize_rewards"),
        (SHAPING, {"normalize_rewards": True, "running": True} | CONSTANTS, "running", "reward_mean"),
        (SHAPING, {"normalize_rewards": True, "reference": "par"}, "normalize_rewards", "reference: par"),
        (SHAPING, {"temperature": "fitted"}, "temperature", "calibrated"),
        (ENSEMBLE, {"means": [1.0]}, "stds", "belong together"),
        (ENSEMBLE, {"means": [1.0, 2.0], "stds": [1.0]}, "stds", "different numbers"),
        (ENSEMBLE, {"means": [1.0], "stds": [1.0], "standardize": False}, "standardize", "standardize is off"),
        (RULE, MATH | {"pattern": "x"}, "pattern", "regex"),
        (RULE, MATH | {"wrong": 1.0}, "correct", "not above"),
        (JUDGE, ASKED | {"api_key": "secret"}, "api_key", "api_key_env"),
        (JUDGE, ASKED | {"template": "Rate it."}, "template", "{completion}"),
        (JUDGE, ASKED | {"lowest_rating": 10}, "lowest_rating", "highest_rating"),
        (HYBRID, {"mode": "fallback", "members": {"rules": {"weight": 2}}}, "members.rules.weight", "fallback"),
        (HYBRID, {"missing": "renormalise", "members": {"a": {"weight": -1}}}, "members.a.weight", "above 0"),
    ],
)  # fmt: skip
def test_what_is_refused(section: Any, values: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_section(section, values, where="env_config")
    assert caught.value.field == field and caught.value.where == "env_config"
    assert words in str(caught.value)
