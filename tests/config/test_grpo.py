"""The configuration of a run of GRPO: what each section normalises and refuses, and the checks between sections."""

import logging
from pathlib import Path

import pytest

from treeward.config import load_grpo_config, save_config
from treeward.config.checkpointing import GRPO_METRICS, GRPOCheckpointingConfig, parse_grpo_metric_name
from treeward.config.grpo import GRPOConfig, PolicyLossConfig
from treeward.config.grpo_policy import GRPOPolicyConfig
from treeward.errors import ConfigError

ROOT = Path(__file__).parents[2]

SMALL = """
policy: {model_name: m, max_total_sequence_length: 64}
data: {dataset_name: PromptDataset, train_data_path: t.jsonl, val_data_path: v.jsonl}
env:
  reward_model: {model_name: rm}
  math: {}
  shape: {type: rules, rule: regex, pattern: "</think>"}
"""


@pytest.fixture
def load(tmp_path):
    def load(*overrides, text=SMALL):
        path = tmp_path / "grpo.yaml"
        path.write_text(text, encoding="utf-8")
        return load_grpo_config(path, overrides)

    return load


@pytest.fixture
def mistake(load):
    def mistake(*overrides, text=SMALL):
        with pytest.raises(ConfigError) as caught:
            load(*overrides, text=text)
        return caught.value

    return mistake


def wrong(section, **keys):
    with pytest.raises(ConfigError) as caught:
        section(**keys)
    return caught.value


def test_the_defaults_are_enough(load):
    config = load()
    assert (config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt) == (32, 16)
    assert (config.grpo.estimator, config.grpo.divides_by_std) == ("grpo", True)
    assert config.completions_per_update == 512
    assert config.max_new_tokens == 64
    assert config.policy.micro_batch_tokens == 4096
    assert not config.policy.generation.is_remote
    assert config.logger.log_dir == "logs/grpo" and config.checkpointing.checkpoint_dir == "results/grpo"


# grpo


@pytest.mark.parametrize(
    ("keys", "estimator", "divides"),
    [
        ({}, "grpo", True),
        ({"use_leave_one_out_baseline": True}, "leave_one_out", True),
        ({"use_leave_one_out_baseline": True, "normalize_rewards": False}, "leave_one_out", False),
        ({"adv_estimator": {"name": "leave_one_out"}}, "leave_one_out", False),
        ({"adv_estimator": {"use_leave_one_out_baseline": True}}, "leave_one_out", True),
        ({"use_leave_one_out_baseline": True, "adv_estimator": {"use_leave_one_out_baseline": False}}, "grpo", True),
        ({"normalize_rewards": False, "adv_estimator": {"name": "reinforce_plus_plus"}}, "reinforce_plus_plus", True),
        ({"use_leave_one_out_baseline": True, "adv_estimator": {"name": "reinforce_plus_plus"}},
         "reinforce_plus_plus", True),
    ],
)  # fmt: skip
def test_advantages(keys, estimator, divides):
    config = GRPOConfig(**keys)
    assert (config.estimator, config.divides_by_std) == (estimator, divides)


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"adv_estimator": {"name": "leave_one_out", "use_leave_one_out_baseline": False}},
         "adv_estimator.use_leave_one_out_baseline"),
        ({"adv_estimator": {"name": "reinforce_plus_plus", "normalize_rewards": False}},
         "adv_estimator.normalize_rewards"),
        ({"overlong_filtering": True, "truncated": "penalty"}, "truncated"),
        ({"reward_scaling": {"source_min": 1.0, "source_max": 1.0}}, "reward_scaling.source_min"),
        ({"batch_multiplier": 2}, "batch_multiplier"),
        ({"environments": {"math": 0.0}}, "environments"),
        ({"val_num_generations_per_prompt": 2, "num_val_generations": 3}, "num_val_generations"),
    ],
)  # fmt: skip
def test_what_grpo_refuses(keys, field):
    error = wrong(GRPOConfig, **keys)
    assert error.field == field
    assert error.need


def test_overlong_filtering_masks():
    assert GRPOConfig(overlong_filtering=True).truncated == "mask"
    assert GRPOConfig(overlong_filtering=True, truncated="mask").truncated == "mask"
    assert GRPOConfig(overlong_filtering=False, truncated="penalty").truncated == "penalty"
    assert wrong(GRPOConfig, overlong_filtering="yes!").field == "overlong_filtering"


# loss_fn


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"reference_policy_kl_type": "k1"}, "reference_policy_kl_type"),
        ({"ratio_clip_c": 1.2, "ratio_clip_max": 0.28}, "ratio_clip_c"),
        ({"sequence_level_importance_ratios": True}, "sequence_level_importance_ratios"),
        ({"truncated_importance_sampling_ratio": 2.0}, "truncated_importance_sampling_ratio"),
        ({"truncated_importance_sampling_type": "icepop"}, "truncated_importance_sampling_type"),
        ({"use_kl_in_reward": True, "kl_in_reward": False}, "kl_in_reward"),
    ],
)  # fmt: skip
def test_what_the_loss_refuses(keys, field):
    assert wrong(PolicyLossConfig, **keys).field == field


# policy, generation and adapters


@pytest.mark.parametrize(
    ("keys", "field"),
    [
        ({"generation": {"max_new_tokens": 65}}, "generation.max_new_tokens"),
        ({"hf_config_overrides": {"max_position_embeddings": 32}}, "max_total_sequence_length"),
        ({"model_name": None, "model_config": {"model_type": "qwen3", "max_position_embeddings": 32}},
         "max_total_sequence_length"),
        ({"model_name": None, "model_config": {"model_type": "qwen3"}, "hf_config_overrides": {"head_dim": 8}},
         "hf_config_overrides"),
        ({"lora_cfg": {"enabled": True}}, "lora_cfg.enabled"),
        ({"generation": {"backend": "openai"}}, "generation.url"),
        ({"generation": {"vllm_cfg": {"precision": "fp8", "gpu_memory_utilization": 0.6}}},
         "generation.vllm_cfg.precision"),
        ({"generation": {"url": "http://h/v1"}}, "generation.url"),
        ({"generation": {"backend": "openai", "url": "http://h/v1", "top_k": 4}}, "generation.top_k"),
        ({"generation": {"colocated": {"enabled": False, "resources": {"gpus_per_node": 1}}}}, "generation.url"),
        ({"train_global_batch_size": 8, "train_micro_batch_size": 16}, "train_micro_batch_size"),
    ],
)  # fmt: skip
def test_what_a_policy_refuses(keys, field):
    error = wrong(GRPOPolicyConfig, **{"model_name": "m", "max_total_sequence_length": 64} | keys)
    assert error.field == field
    assert error.need


# environments


def test_environments_of_a_run(load):
    config = load()
    assert config.environments == ("reward_model", "math", "shape")
    assert config.default_environments == {"reward_model": 1.0}
    assert load("grpo.environments=[math, shape]").default_environments == {"math": 1.0, "shape": 1.0}
    assert load("~env.reward_model", "~env.math").default_environments == {"shape": 1.0}
    rows_choose = load("~env.reward_model")
    assert rows_choose.default_environments == {} and rows_choose.used_environments == ()
    named = load("data.env_name={math: 1.0, shape: 0.2}")
    assert named.used_environments == ("math", "shape")
    assert load("env.reward_model.enabled=false").environments == ("math", "shape")


@pytest.mark.parametrize(
    ("override", "field", "words"),
    [
        ("env.reward_model.batch_sise=3", "env.reward_model.batch_sise", "no such key"),
        ("env.math.correct=-1", "env.math.correct", "not above"),
        ("env.rewad_model={model_name: m}", "env.rewad_model", "no such kind"),
        ("env.mine={type: ruls}", "env.mine.type", "no such kind"),
        ("env.math=3", "env.math", "not a mapping"),
        ("env.mix={type: hybrid, members: {math: {wrong: 5.0}}}", "env.mix.members.math.correct", "not above"),
        ("env.mix={type: hybrid, members: {a: {type: rule}}}", "env.mix.members.a.type", "no such kind"),
    ],
)
def test_environments_are_checked_by_their_kinds(mistake, override, field, words):
    error = mistake(override)
    assert (error.field, words in error.summary) == (field, True)
    assert error.where == f"command line, {override}"


# between sections

OPENAI = ("policy.generation.backend=openai", "policy.generation.url=http://h/v1", "policy.generation.retokenize=true")
CORRECTED = "loss_fn.use_importance_sampling_correction=true"
COOLER = ("policy.generation.temperature=0.7", "policy.generation.top_p=0.9")

OWN_GPUS = (
    "policy.generation.backend=vllm",
    "policy.generation.url=http://127.0.0.1:8000/v1",
    "policy.generation.colocated.enabled=false",
)


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (["policy.train_global_batch_size=24"], "policy.train_global_batch_size", "whole groups"),
        (["loss_fn.force_on_policy_ratio=true", "grpo.updates_per_batch=2"],
         "loss_fn.force_on_policy_ratio", "several"),
        (["loss_fn.force_on_policy_ratio=true", "policy.train_global_batch_size=256"],
         "loss_fn.force_on_policy_ratio", "several"),
        (["grpo.skip_reference_policy_logprobs_calculation=true"],
         "grpo.skip_reference_policy_logprobs_calculation", "reference"),
        (["grpo.skip_reference_policy_logprobs_calculation=true", "loss_fn.reference_policy_kl_penalty=0",
          "grpo.watch.max_kl=10"], "grpo.skip_reference_policy_logprobs_calculation", "grpo.watch.max_kl needs"),
        ([*OPENAI, CORRECTED], "loss_fn.use_importance_sampling_correction", "returns none"),
        ([*OPENAI, "loss_fn.use_on_policy_kl_approximation=true"],
         "loss_fn.use_on_policy_kl_approximation", "returns none"),
        ([OPENAI[1], "policy.generation.backend=vllm", CORRECTED, *COOLER],
         "loss_fn.use_importance_sampling_correction", "returns none"),
        (["data.max_input_seq_length=65"], "data.max_input_seq_length", "larger than"),
        (["grpo.reward_shaping.enabled=true"], "grpo.reward_shaping.overlong_buffer_length", "before the completion"),
        (["grpo.environments=[format]"], "grpo.environments", "no environment format"),
        (["data.env_name=maths"], "data.train[0].env_name", "no environment maths"),
        (["env.math.enabled=false", "data.env_name=math"], "data.train[0].env_name", "switched off"),
        (["grpo.gold_environment=reward_model"], "grpo.gold_environment", "trained on"),
        (["grpo.gold_environment=math", "data.env_name=math"], "grpo.gold_environment", "trained on"),
        (["grpo.watch.stop=true"], "grpo.watch.stop", "there is none"),
        (["grpo.watch={stop: true, stop_on: [truncation]}", "~data.val_data_path"], "grpo.watch.stop", "no validation"),
        (["cluster.gpus_per_node=8"], "cluster.gpus_per_node", "more than one process"),
        (["checkpointing.metric_name=val:reward", "~data.val_data_path"],
         "checkpointing.metric_name", "never measured"),
        (["checkpointing.metric_name=val:reward", "grpo.val_period=0", "grpo.val_at_end=false"],
         "checkpointing.metric_name", "never"),
        (["checkpointing.metric_name=val_gold_reward"], "checkpointing.metric_name", "never measured"),
        (["checkpointing.metric_name=val:kl", "grpo.skip_reference_policy_logprobs_calculation=true",
          "loss_fn.reference_policy_kl_penalty=0"], "checkpointing.metric_name", "never measured"),
    ],
)  # fmt: skip
def test_contradictions(mistake, overrides, field, words):
    error = mistake(*overrides)
    assert (error.field, words in error.summary) == (field, True), error
    assert error.need and error.fix


@pytest.mark.parametrize(
    "overrides",
    [
        ["grpo.skip_reference_policy_logprobs_calculation=true", "loss_fn.reference_policy_kl_penalty=0"],
        [*OPENAI[:2], CORRECTED],
        [*OPENAI],
        [*OPENAI, "loss_fn={use_on_policy_kl_approximation: true, kl_in_reward: true}"],
        [OPENAI[1], "policy.generation.backend=sglang", CORRECTED, *COOLER],
        [OPENAI[1], "policy.generation.backend=vllm", CORRECTED, COOLER[0]],
        [CORRECTED, *COOLER],
        ["data.max_input_seq_length=64", "policy.generation.max_new_tokens=64"],
        ["grpo.reward_shaping={enabled: true, overlong_buffer_length: 16}"],
        ["grpo.gold_environment=math", "grpo.watch.stop=true", "checkpointing.metric_name=val_gold_reward"],
        ["grpo.watch={stop: true, stop_on: [kl_budget], max_kl: 5}"],
        ["env.reward_model.resources.gpus_per_node=1", "cluster.gpus_per_node=0"],
        [*OWN_GPUS, "policy.generation.colocated.resources.gpus_per_node=1"],
        ["checkpointing={enabled: false, metric_name: val_gold_reward}"],
    ],
)
def test_what_fits_loads(load, overrides, tmp_path):
    config = load(*overrides)
    save_config(config, tmp_path / "resolved.yaml")
    assert load_grpo_config(tmp_path / "resolved.yaml") == config


def test_remarks_are_logged_once_each(load, caplog):
    with caplog.at_level(logging.WARNING, logger="treeward.config"):
        config = load(
            "policy.generation.backend=vllm",
            "grpo.reward_shaping={enabled: true, overlong_buffer_length: 16}",
            "grpo.truncated=mask",
            "~data.val_data_path",
        )
    assert [record.message for record in caplog.records] == config.remarks
    for words, remark in zip(
        ("the policy itself samples", "env.math, env.shape", "leaves the longest", "nothing to watch"),
        config.remarks,
        strict=True,
    ):
        assert words in remark
    assert load("~env.math", "~env.shape").remarks == []


# checkpointing


@pytest.mark.parametrize(
    "name", ["val_reward", "val:reward", "validation/reward", "val:accuracy", "val_accuracy", "val:validation/reward"]
)
def test_names_of_the_reward(name):
    assert parse_grpo_metric_name(name) == "reward"


@pytest.mark.parametrize("metric", GRPO_METRICS)
def test_every_metric_has_its_direction(metric):
    assert parse_grpo_metric_name(f"val_{metric}") == metric
    direction = GRPO_METRICS[metric]
    if direction is None:
        assert wrong(GRPOCheckpointingConfig, metric_name=f"val:{metric}").field == "higher_is_better"
    else:
        assert GRPOCheckpointingConfig(metric_name=f"val:{metric}").metric_is_better_when_higher is direction
        contrary = wrong(GRPOCheckpointingConfig, metric_name=f"val:{metric}", higher_is_better=not direction)
        assert "contradicts" in contrary.summary
