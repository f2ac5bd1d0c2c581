"""The sections one by one: what each accepts, normalises and refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from treeward.config import CheckpointingConfig, PolicyConfig, RMConfig, parse_metric_name
from treeward.config.checkpointing import METRICS
from treeward.config.cluster import ClusterConfig
from treeward.config.hub import HubConfig
from treeward.config.logger import LoggerConfig
from treeward.config.optimisation import (
    _CLASSES,
    NamedScheduleConfig,
    OptimizerConfig,
    TorchScheduleConfig,
    _dotted,
)
from treeward.errors import ConfigError


def policy(**keys):
    return PolicyConfig.model_validate({"model_name": "m"} | keys)


def refused(section, raw, words=None):
    with pytest.raises(ValidationError, match=words):
        section.model_validate(raw)


# policy


def test_one_model():
    bare = {"model_type": "qwen3", "hidden_size": 8}
    assert policy().model_name == "m"
    assert PolicyConfig.model_validate({"model_config": bare}).architecture == bare
    refused(PolicyConfig, {}, "there is no model")
    refused(PolicyConfig, {"model_name": "m", "model_config": bare}, "exclude each other")
    refused(PolicyConfig, {"model_config": {"hidden_size": 8}}, "family")


def test_size_of_a_trained_tokenizer():
    def size(architecture, **tokenizer):
        raw = {"model_config": {"model_type": "qwen3"} | architecture, "tokenizer": tokenizer}
        return PolicyConfig.model_validate(raw).trained_vocab_size

    assert policy().trained_vocab_size is None
    assert size({}, name="ready") is None
    assert size({}) == 4096
    assert size({"vocab_size": 300}) == 300
    assert size({"vocab_size": 300}, vocab_size=200) == 200
    refused(PolicyConfig, {"model_name": "m", "tokenizer": {"vocab_size": 9}}, "not trained")
    refused(
        PolicyConfig,
        {"model_config": {"model_type": "qwen3", "vocab_size": 300}, "tokenizer": {"vocab_size": 400}},
        "more tokens than the model",
    )


@pytest.mark.parametrize(
    ("spelling", "precision"), [("fp32", "float32"), ("bf16", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_precision(spelling, precision):
    assert policy(precision=spelling).precision == precision


def test_micro_batches():
    assert policy().micro_batch_tokens == 4096
    assert policy(train_micro_batch_size=2).micro_batch_tokens is None
    assert policy(train_micro_batch_size=2, train_micro_batch_tokens=100).micro_batch_tokens == 100
    refused(PolicyConfig, {"model_name": "m", "train_global_batch_size": 2, "train_micro_batch_size": 4}, "larger than")


@pytest.mark.parametrize("section", ["dynamic_batching", "sequence_packing"])
def test_budget_of_a_batching_section(section):
    config = policy(
        train_micro_batch_size=1, **{section: {"enabled": True, "train_mb_tokens": 512, "logprob_mb_tokens": 1}}
    )
    assert (config.train_micro_batch_tokens, config.train_micro_batch_size) == (512, None)
    own = policy(train_micro_batch_tokens=64, **{section: {"enabled": True, "train_mb_tokens": 512}})
    assert own.train_micro_batch_tokens == 64
    off = policy(train_micro_batch_size=1, **{section: {"enabled": False, "train_mb_tokens": 512}})
    assert (off.train_micro_batch_tokens, off.train_micro_batch_size) == (None, 1)


def test_activation_checkpointing_by_either_key():
    assert not policy().activation_checkpointing
    assert policy(activation_checkpointing_enabled=True).activation_checkpointing
    assert policy(dtensor_cfg={"activation_checkpointing": True}).activation_checkpointing


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"dtensor_cfg": {"tensor_parallel_size": 2}}, "tensor_parallel_size is not supported yet"),
        ({"dtensor_cfg": {"context_parallel_size": 2}}, "context_parallel_size is not supported yet"),
        ({"dtensor_cfg": {"cpu_offload": True}}, "cpu_offload is not supported yet"),
        ({"dtensor_cfg": {"custom_parallel_plan": "a.b"}}, "custom_parallel_plan is not supported yet"),
        ({"dtensor_cfg": {"lora_cfg": {"enabled": True}}}, "not supported yet"),
        ({"megatron_cfg": {"enabled": True, "anything": 1}}, "no Megatron backend"),
        ({"reward_model_cfg": {"enabled": False}}, "reward models only"),
        ({"reward_model_cfg": {"reward_model_type": "regression"}}, "bradley_terry"),
        ({"attention": "flash"}, "tree"),
        ({"max_grad_norm": 0}, "greater than 0"),
    ],
)
def test_what_a_policy_refuses(keys, words):
    refused(PolicyConfig, {"model_name": "m"} | keys, words)


def test_foreign_sections_are_accepted_while_disabled():
    config = policy(megatron_cfg={"enabled": False, "optimizer": {"lr": 1}}, logprob_batch_size=3)
    assert not config.megatron_cfg.enabled


# optimiser and schedule


def test_optimizer():
    assert OptimizerConfig(kwargs={"lr": 1e-3, "fused": True, "foreach": False}).kwargs["lr"] == 1e-3
    refused(OptimizerConfig, {"name": "AdamW"}, "without its module")
    refused(OptimizerConfig, {"name": "adamw"}, r"as torch\.optim\.AdamW\n.*did you mean torch\.optim\.AdamW\?")
    refused(OptimizerConfig, {"name": "torch.optim.adamw"}, r"no such class(.|\n)*did you mean torch\.optim\.AdamW\?")
    refused(
        OptimizerConfig,
        {"kwargs": {"lr": 1e-5, "weight_decy": 0.1}},
        r"no weight_decy(.|\n)*did you mean weight_decay\?",
    )
    assert OptimizerConfig(name="mine.AdamW", kwargs={"lr": 1e-5, "weight_decy": 0.1}).name == "mine.AdamW"
    for module, names in _CLASSES.items():
        for name in names:
            assert _dotted(f"{module}.{name}", module) == f"{module}.{name}"
    refused(OptimizerConfig, {"kwargs": {"weight_decay": 0.1}}, "learning rate is missing")
    refused(OptimizerConfig, {"kwargs": {"lr": "fast"}}, "not a positive number")
    refused(OptimizerConfig, {"kwargs": {"lr": float("nan")}}, "not a positive number")
    refused(OptimizerConfig, {"kwargs": {"lr": 1.0, "fused": True, "foreach": True}}, "exclude each other")


LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 5}}
CONSTANT = {"name": "torch.optim.lr_scheduler.ConstantLR"}


def test_named_schedules():
    assert policy(scheduler=None).scheduler == NamedScheduleConfig(name="constant")
    assert policy(scheduler={"name": "cosine", "warmup_steps": 3}).scheduler == NamedScheduleConfig(
        name="cosine", warmup_steps=3
    )
    refused(
        PolicyConfig, {"model_name": "m", "scheduler": {"warmup_steps": 1, "warmup_ratio": 0.1}}, "exclude each other"
    )
    refused(PolicyConfig, {"model_name": "m", "scheduler": {"name": "cosin"}}, "cosine")
    refused(PolicyConfig, {"model_name": "m", "scheduler": "cosine"})


def test_lists_of_torch_schedulers():
    expected = TorchScheduleConfig.model_validate({"schedulers": [LINEAR, CONSTANT], "milestones": [5]})
    assert policy(scheduler=[LINEAR, CONSTANT, {"milestones": [5]}]).scheduler == expected
    assert policy(scheduler=expected.model_dump()).scheduler == expected
    assert policy(scheduler=expected).scheduler == expected
    assert policy(scheduler=LINEAR).scheduler == TorchScheduleConfig.model_validate({"schedulers": [LINEAR]})


@pytest.mark.parametrize(
    "scheduler",
    [
        [LINEAR, CONSTANT],
        [LINEAR, CONSTANT, {"milestones": [5, 6]}],
        [LINEAR, CONSTANT, LINEAR, {"milestones": [6, 5]}],
        [LINEAR, CONSTANT, {"milestones": [5]}, {"milestones": [6]}],
        [{"milestones": [5]}],
        [{"name": "LinearLR"}],
        [{**LINEAR, "kwarg": {}}],
        [],
    ],
)
def test_bad_lists_of_torch_schedulers(scheduler):
    refused(PolicyConfig, {"model_name": "m", "scheduler": scheduler})


# rm


def test_sentinels_become_none():
    config = RMConfig.model_validate({"max_num_steps": -1, "val_batches": -1, "val_period": 0})
    assert (config.max_num_steps, config.val_batches, config.val_period) == (None, None, None)
    for raw in (
        {"max_num_steps": 0},
        {"val_batches": 0},
        {"max_num_steps": -2},
        {"max_num_epochs": -1},
        {"val_period": -2},
    ):
        refused(RMConfig, raw, "greater than 0")


@pytest.mark.parametrize(
    "loss", [{"label_smoothing": 0.5}, {"label_smoothing": -0.1}, {"center_rewards_coefficient": -1}]
)
def test_loss_limits(loss):
    refused(RMConfig, {"loss": loss}, "should be")


# checkpointing


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,12}", fullmatch=True)


@given(NAMES, st.sampled_from(sorted(METRICS)), st.sampled_from(["", "val:"]), st.sampled_from("_/"))
def test_a_metric_of_one_set(name, metric, prefix, separator):
    key = parse_metric_name(f"{prefix}validation-{name}{separator}{metric}")
    assert key == (name, metric)


@pytest.mark.parametrize("metric", METRICS)
def test_a_pooled_metric(metric):
    for name in (f"val_{metric}", f"val:val_{metric}", f"eval/rm/{metric}", f"val:eval/rm/{metric}"):
        assert parse_metric_name(name) == (None, metric)


@pytest.mark.parametrize(
    "name",
    [
        "accuracy",
        "train/rm/loss",
        "train:loss",
        "validation-default_f1",
        "validation-_loss",
        "validation-loss",
        "val_",
        "",
    ],
)
def test_names_that_are_no_metric(name):
    with pytest.raises(ConfigError):
        parse_metric_name(name)
    refused(CheckpointingConfig, {"metric_name": name})


def test_a_near_miss_is_named():
    with pytest.raises(ConfigError, match="did you mean validation-hard_accuracy"):
        parse_metric_name("validation-hard_acuracy")


def test_direction_of_the_metric():
    def higher(**keys):
        return CheckpointingConfig(**keys).metric_is_better_when_higher

    assert higher(metric_name="val_accuracy") and not higher(metric_name="val_loss")
    assert higher(metric_name="val_accuracy", higher_is_better=True)
    assert not higher(metric_name="val_chosen_rewards", higher_is_better=False)
    assert higher(metric_name="val_length_controlled_accuracy") and not higher(metric_name="validation-a_ece")
    assert not higher(metric_name="eval/rm/brier") and higher(metric_name="validation-a/worst_subset")
    assert not higher(metric_name="val_accuracy_gap", higher_is_better=False)
    refused(CheckpointingConfig, {"metric_name": "val_accuracy", "higher_is_better": False}, "contradicts")
    refused(CheckpointingConfig, {"metric_name": "val_loss", "higher_is_better": True}, "contradicts")
    refused(CheckpointingConfig, {"metric_name": "val_chosen_rewards"}, "does not say which")
    refused(CheckpointingConfig, {"metric_name": "val_accuracy_gap"}, "does not say which")


def test_a_name_that_can_be_read_as_two_metrics_has_one_direction():
    ambiguous = [(long, short) for long in METRICS for short in METRICS if long.endswith(f"_{short}")]
    assert ("length_controlled_accuracy", "accuracy") in ambiguous
    assert all(METRICS[long] == METRICS[short] for long, short in ambiguous)


@given(NAMES, st.sampled_from(sorted(METRICS)))
def test_a_set_that_is_there_is_meant(name, metric):
    spelling = f"{name}_{metric}"
    for other in METRICS:
        if spelling.endswith(f"_{other}") and spelling != f"_{other}":
            key = spelling.removesuffix(f"_{other}"), other
            assert parse_metric_name(f"validation-{spelling}", [key[0]]) == key


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_a_deadline_in_days_hours_minutes_seconds(days, hours, minutes, seconds):
    config = CheckpointingConfig(checkpoint_must_save_by=f"{days:02}:{hours:02}:{minutes:02}:{seconds:02}")
    assert config.checkpoint_must_save_by == 86400 * days + 3600 * hours + 60 * minutes + seconds


def test_other_deadlines():
    assert CheckpointingConfig(checkpoint_must_save_by=90).checkpoint_must_save_by == 90.0
    assert CheckpointingConfig(checkpoint_must_save_by="90").checkpoint_must_save_by == 90.0
    for raw in ("00:24:00:00", "1:2", "soon", "00:00:00:00", -1):
        refused(CheckpointingConfig, {"checkpoint_must_save_by": raw})


# the others


def test_one_process():
    assert ClusterConfig(gpus_per_node=0).num_processes == 1
    assert ClusterConfig(gpus_per_node=1).num_processes == 1
    refused(ClusterConfig, {"gpus_per_node": 2}, "more than one process")
    refused(ClusterConfig, {"num_nodes": 2}, "more than one process")


def test_trackers():
    assert LoggerConfig.model_validate({"wandb": {"project": "p", "entity": "e"}}).wandb.model_extra == {"entity": "e"}
    refused(LoggerConfig, {"swanlab_enabled": True}, "SwanLab")
    refused(LoggerConfig, {"tensorbord_enabled": True}, "Extra inputs")


def test_pushing_needs_a_repository():
    assert HubConfig(push_to_hub=True, repo_id="a/b").private
    refused(HubConfig, {"push_to_hub": True}, "needs a repository")
