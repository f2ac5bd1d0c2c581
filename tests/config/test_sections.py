"""What sections make of the keys that they are given: other forms, other names, and what follows
from several keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeward.config.checkpointing import CheckpointingConfig, GRPOCheckpointingConfig
from treeward.config.grpo import GRPOConfig
from treeward.config.load import load_section
from treeward.config.policy import PolicyConfig
from treeward.config.reward_environments import RewardModelEnvironmentConfig


def policy(**keys):
    return load_section(PolicyConfig, {"model_name": "m"} | keys, where="policy")


def model(**keys):
    return load_section(
        RewardModelEnvironmentConfig, {"model_name": "m"} | keys, where="env_config"
    )


@pytest.mark.parametrize("section", ["dynamic_batching", "sequence_packing"])
def test_the_budget_of_a_batching_section_replaces_a_number_of_sequences(section):
    on = {"enabled": True, "train_mb_tokens": 512, "logprob_mb_tokens": 1}
    assert (policy().micro_batch_tokens, policy(train_micro_batch_size=2).micro_batch_tokens) == (
        4096,
        None,
    )
    config = policy(train_micro_batch_size=1, **{section: on})
    assert (config.micro_batch_tokens, config.train_micro_batch_size) == (512, None)
    assert policy(train_micro_batch_tokens=64, **{section: on}).micro_batch_tokens == 64
    assert (
        policy(
            train_micro_batch_size=1, **{section: on | {"enabled": False}}
        ).train_micro_batch_size
        == 1
    )
    environment = model(batch_size=8, **{section: on})
    assert (environment.batch_size, environment.batch_tokens) == (None, 512)


@pytest.mark.parametrize(
    ("sets", "name", "key"),
    [
        (
            "plain hard",
            "val:validation-plain_length_controlled_accuracy",
            ("plain", "length_controlled_accuracy"),
        ),
        (
            "plain length_controlled",
            "validation-length_controlled_accuracy",
            ("length_controlled", "accuracy"),
        ),
        ("a a_group", "validation-a_group_accuracy", ("a", "group_accuracy")),
        ("a a_group", "validation-a_group/accuracy", ("a_group", "accuracy")),
    ],
)
def test_which_underscore_parts_set_and_metric_is_known_from_the_sets(load, sets, name, key):
    data = f"data.val_data_paths={{{', '.join(f'{one}: {one}.jsonl' for one in sets.split())}}}"
    assert load("rm", data, f"checkpointing.metric_name={name}").ranking_metric == key


def test_whether_a_metric_is_better_when_it_is_higher():
    assert CheckpointingConfig(metric_name="val_accuracy").metric_is_better_when_higher
    assert not GRPOCheckpointingConfig(metric_name="val_kl").metric_is_better_when_higher
    # which only the user knows
    config = CheckpointingConfig(metric_name="val_chosen_rewards", higher_is_better=True)
    assert config.metric_is_better_when_higher


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_a_deadline_in_days_hours_minutes_seconds(days, hours, minutes, seconds):
    config = CheckpointingConfig(
        checkpoint_must_save_by=f"{days:02}:{hours:02}:{minutes:02}:{seconds:02}"
    )
    assert config.checkpoint_must_save_by == 86400 * days + 3600 * hours + 60 * minutes + seconds


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({}, ("grpo", False, True)),
        ({"adv_estimator": {"name": "leave_one_out"}}, ("leave_one_out", False, False)),
        ({"adv_estimator": {"use_leave_one_out_baseline": True}}, ("grpo", True, True)),
        ({"use_leave_one_out_baseline": True,
          "adv_estimator": {"use_leave_one_out_baseline": False}},
         ("grpo", False, True)),
        ({"normalize_rewards": True, "adv_estimator": {"normalize_rewards": False}},
         ("grpo", False, False)),
    ],
)  # fmt: skip
def test_keys_of_the_estimator_stand_in_either_place(keys, want):
    config = load_section(GRPOConfig, keys, where="grpo")
    assert (
        config.adv_estimator.name,
        config.use_leave_one_out_baseline,
        config.normalize_rewards,
    ) == want


def test_environments_of_a_run(load):
    config = load("grpo")
    assert config.environments == ("reward_model", "math", "shape")
    assert config.default_environment == "reward_model"
    assert (
        load("grpo", "~env.reward_model", "grpo.gold_environment=math").default_environment
        == "shape"
    )
    assert load("grpo", "~env.reward_model", "~env.math").default_environment == "shape"
    rows_choose = load("grpo", "~env.reward_model")
    assert rows_choose.default_environment is None and rows_choose.used_environments == ()
    assert load("grpo", "data.env_name=math").used_environments == ("math",)
    assert load("grpo", "env.reward_model.enabled=false").environments == ("math", "shape")
    assert (
        load("grpo", "env={my_package.math: {a_key_of_the_class: 1}}").environments[-1]
        == "my_package.math"
    )


@pytest.mark.parametrize(
    ("overrides", "left"),
    [
        (["cluster.gpus_per_node=8"], (1, 8)),
        (["cluster.gpus_per_node=8", "env.reward_model.resources={gpus_per_node: 3}"], (1, 5)),
        (["cluster.gpus_per_node=8", "env.reward_model.resources={gpus_per_node: 4, num_nodes: 1}"],
         (1, 4)),
        (["cluster.gpus_per_node=8", "env.reward_model={model_name: m, type: reward_model, "
          "resources: {gpus_per_node: 0, num_nodes: 2}}"], (1, 8)),
        (["cluster={num_nodes: 3, gpus_per_node: 0}",
          "env.reward_model.resources={gpus_per_node: 2}"], (1, 1)),
    ],
)  # fmt: skip
def test_replicas_of_a_reward_model_leave_the_other_gpus_to_train(load, overrides, left):
    cluster = load("grpo", *overrides).training_cluster
    assert (cluster.num_nodes, cluster.num_processes // cluster.num_nodes) == left


def test_folders_may_lie_below_the_home_folder(load, monkeypatch):
    """YAML and the command line keep ~, and a run would make a folder of this name."""
    monkeypatch.setenv("HOME", "/home/me")
    config = load(
        "rm",
        "checkpointing.checkpoint_dir=~/runs/rm",
        "logger.log_dir=~/logs",
        "data.cache_dir=~/cache",
        "data.train_data_path=~/pairs.jsonl",
        "data.labels=~/a/labels.jsonl, ~/b/labels.jsonl",
    )
    assert config.checkpointing.checkpoint_dir == "/home/me/runs/rm"
    assert config.logger.log_dir == "/home/me/logs"
    assert config.data.cache_dir == "/home/me/cache"
    assert config.data.train[0].data_path == "/home/me/pairs.jsonl"
    assert config.data.labels == ("/home/me/a/labels.jsonl", "/home/me/b/labels.jsonl")
