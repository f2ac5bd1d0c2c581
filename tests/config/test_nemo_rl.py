"""Configurations of NeMo RL, with the keys and values that its files have had, load unchanged."""

import json
import logging
from pathlib import Path

import pytest
import yaml

from treeward.config.load import load_config, load_grpo_config, save_config
from treeward.errors import ConfigError

FILES = Path(__file__).parent / "nemo_rl"


def parts(sets):
    return [(one.dataset_name, one.part, one.split_validation_size) for one in sets]


@pytest.mark.parametrize(
    "name", ["grpo_rm_first", "grpo_math_1B", "grpo_rm_1B", "newest", "multiple"]
)
def test_it_loads_and_survives_saving(name, tmp_path):
    config = load_grpo_config(FILES / f"{name}.yaml")
    save_config(config, tmp_path / "resolved.yaml")
    assert load_grpo_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize("name", ["grpo_math_1B", "grpo_rm_1B", "rm"])
def test_the_keys_of_its_files_of_august_2026_are_known(name):
    (load_config if name == "rm" else load_grpo_config)(FILES / "2026-08" / f"{name}.yaml")


@pytest.mark.parametrize(
    "override",
    [
        "policy.generation.temperature=0.6",  # the file's validation samples with ${.temperature}
        "policy.generation.top_k=50",
        "checkpointing.model_save_format=null",
        "++policy.dtensor_cfg.expert_parallel_size=8",
        "++policy.dtensor_cfg.moe_parallelizer={ignore_router_for_ac: true}",
        "++policy.generation.vllm_cfg.enable_expert_parallel=true",
        (
            "policy.dtensor_cfg.lora_cfg={enabled: true, match_all_linear: false, "
            "exclude_modules: ['*out_proj*']}"
        ),
    ],
)
def test_what_its_recipes_change_is_known(override):
    load_grpo_config(FILES / "2026-08" / "grpo_math_1B.yaml", [override])


LOADED = [
    json.loads(line)
    for line in (FILES / "2026-08" / "loaded.jsonl").read_text(encoding="utf-8").splitlines()
]
"""Files of NeMo RL 7ea279ab by their keys: first what most of them have, then each one's others."""


@pytest.mark.parametrize("row", LOADED[1:], ids=lambda row: row["file"])
def test_its_other_files_load(row, tmp_path):
    keys = {
        key: value for key, value in LOADED[0]["keys"].items() if key not in row.get("without", ())
    }
    tree = {}
    for key, value in {**keys, **row["keys"]}.items():
        *sections, name = key.split(".")
        section = tree
        for outer in sections:
            section = section.setdefault(outer, {})
        section[name] = value
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    load_grpo_config(file)


def test_the_reward_model_example_means_what_it_meant(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="treeward.config"):
        config = load_config(FILES / "rm.yaml")
    assert (config.rm.max_num_steps, config.rm.val_batches) == (None, None)
    assert config.policy.tokenizer.name == "meta-llama/Llama-3.2-1B-Instruct"
    assert config.policy.optimizer.kwargs["eps"] == 1e-5
    assert (config.policy.train_micro_batch_size, config.policy.micro_batch_tokens) == (1, None)
    assert config.checkpointing.save_period == 16
    assert config.ranking_metric == ("default", "loss")
    sets = [(d.split, d.name) for d in (*config.data.train, *config.data.validation)]
    assert sets == [("train", None), ("validation", "default")]
    assert "These keys have no effect here: " in caplog.text
    assert "logger.monitor_gpus" in caplog.text and "policy.dtensor_cfg._v2" in caplog.text
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config


def test_the_first_file_means_what_it_meant(caplog):
    with caplog.at_level(logging.INFO, logger="treeward.config"):
        config = load_grpo_config(FILES / "grpo_rm_first.yaml")
    assert (
        config.grpo.completions_per_step,
        config.prompts_per_update,
        config.updates_per_pass,
    ) == (512, 32, 1)
    assert config.grpo.use_leave_one_out_baseline and config.grpo.normalize_rewards
    assert config.policy.micro_batch_tokens == 4 * 512
    assert (config.max_new_tokens, config.max_prompt_length) == (512, 511)
    assert config.policy.generation.batch_size == 32
    assert config.ranking_metric == "reward"
    assert config.used_environments == ("reward_model",)
    assert config.default_environment == "reward_model"
    assert parts(config.data.train) == [("OpenMathInstruct-2", "train", 0.05)]
    assert parts(config.data.validation) == [("OpenMathInstruct-2", "validation", 0.05)]
    assert {one.prompt_file for one in (*config.data.train, *config.data.validation)} == {
        "examples/prompts/cot.txt"
    }
    assert "env.reward_model.logprob_batch_size, env.reward_model.max_grad_norm" in caplog.text
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "the policy itself samples" in warnings[0]


def test_the_reward_model_replaces_the_rule():
    config = load_grpo_config(FILES / "grpo_rm_1B.yaml", ["data.default.env_name=reward_model"])
    assert config.environments == ("math", "reward_model")
    assert config.used_environments == ("reward_model",)
    assert [one.env_name for one in config.data.validation] == ["reward_model"]
    assert load_grpo_config(FILES / "grpo_rm_1B.yaml").used_environments == ("math",), (
        "as data.default.env_name says"
    )


def test_newer_names_mean_ours():
    config = load_grpo_config(FILES / "newest.yaml")
    assert config.grpo.adv_estimator.name == "reinforce_plus_plus"
    assert config.loss_fn.kl_in_reward
    assert config.grpo.num_val_generations == 4


def test_gdpo_has_the_keys_of_nemo_rl():
    overrides = [
        "grpo.adv_estimator={name: gdpo, normalize_rewards: true, use_leave_one_out_baseline: false,"
        " reward_weights: [1.0, 0.5, 0.5]}",
        "env.math_multi_reward={num_workers: 8, math_verify_impl: hf_math_verify}",
        "data.default.env_name=math_multi_reward",
    ]
    config = load_grpo_config(FILES / "grpo_math_1B.yaml", overrides)
    assert config.used_environments == ("math_multi_reward",)
    assert config.grpo.adv_estimator.reward_weights == (1.0, 0.5, 0.5)
    assert not config.grpo.use_leave_one_out_baseline


def test_a_section_may_replace_that_of_the_defaults(tmp_path):
    config = load_grpo_config(FILES / "multiple.yaml")
    assert parts(config.data.train) == [
        ("OpenMathInstruct-2", "train", 0.05),
        ("DeepScaler", None, 0.0),
    ]
    assert [one.name for one in config.data.validation] == [
        "AIME2024",
        "DAPOMathAIME2024",
        "held_out",
    ]
    assert [one.dataset_name for one in config.data.validation[1:]] == [
        "DAPOMathAIME2024",
        "OpenMathInstruct-2",
    ]
    text = f"defaults: {FILES}/grpo_math_1B.yaml\n"
    text += "data: {train: {data_path: t}, validation: {data_path: v}, _override_: true}\n"
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    replaced = load_grpo_config(tmp_path / "run.yaml").data.train[0]
    assert (replaced.prompt_file, replaced.split_validation_size) == (None, 0.0)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("grpo.async_grpo.enabled=true", "grpo.async_grpo.enabled"),
        ("grpo.max_rollout_turns=3", "grpo.max_rollout_turns"),
        (
            "grpo.reward_shaping.stop_properly_penalty_coef=0.5",
            "grpo.reward_shaping.stop_properly_penalty_coef",
        ),
        ("policy.megatron_cfg.enabled=true", "policy.megatron_cfg.enabled"),
        ("policy.dtensor_cfg.context_parallel_size=2", "policy.dtensor_cfg.context_parallel_size"),
        ("policy.reward_model_cfg.enabled=true", "policy.reward_model_cfg.enabled"),
        ("reward_penalties.penalize_unwanted_tokens=true", "reward_penalties"),
        ("++data.use_multiple_dataloader=true", "data.use_multiple_dataloader"),
        ("++policy.generation.val_temperature=0.6", "policy.generation.val_temperature"),
    ],
)
def test_what_cannot_be_done_is_refused_where_it_is_switched_on(override, field):
    with pytest.raises(ConfigError) as caught:
        load_grpo_config(FILES / "grpo_math_1B.yaml", [override])
    assert caught.value.field == field
    assert caught.value.need or caught.value.fix
    assert "None" not in str(caught.value)
    assert override in caught.value.where
