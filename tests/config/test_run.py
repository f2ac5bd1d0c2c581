"""A run that trains a reward model: its sections one by one, the checks between them, and NeMo RL's file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from treeward.config import (
    CheckpointingConfig,
    PolicyConfig,
    load_config,
    parse_metric_name,
)
from treeward.config.checkpointing import METRICS
from treeward.config.optimisation import TorchScheduleConfig
from treeward.config.run import EvaluationConfig
from treeward.errors import ConfigError

SMALL = "policy: {model_name: m}\ndata:\n  train_data_path: t.jsonl\n"


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def mistake(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


def policy(**keys):
    return PolicyConfig.model_validate({"model_name": "m"} | keys)


def refused(section, raw, words=None):
    with pytest.raises(ValidationError, match=words):
        section.model_validate(raw)


# between sections

VALIDATION = ["data.val_data_paths={hard_set: h, plain: p}"]


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (
            ["data.max_input_seq_length=9000"],
            "data.max_input_seq_length",
            "larger than policy.max_total_sequence_length",
        ),
        (["checkpointing.metric_name=val_loss"], "checkpointing.metric_name", "no validation set"),
        (
            [*VALIDATION, "checkpointing.metric_name=validation-hard_loss"],
            "checkpointing.metric_name",
            "not in data: hard",
        ),
        (
            [*VALIDATION, "checkpointing.metric_name=val_loss", "rm.val_period=0", "rm.val_at_end=false"],
            "checkpointing.metric_name",
            "rm.val_period says never",
        ),
    ],
)
def test_contradictions_between_sections(write, overrides, field, words):
    error = mistake(write(SMALL), *overrides)
    assert error.field == field
    assert words in error.summary


SETS = "[{{data_path: a.jsonl, name: {0}}}, {{data_path: b.jsonl, name: {1}}}]"


@pytest.mark.parametrize(
    ("sets", "name", "key"),
    [
        (("plain", "hard"), "val:validation-plain_length_controlled_accuracy", ("plain", "length_controlled_accuracy")),
        (("plain", "length_controlled"), "validation-length_controlled_accuracy", ("length_controlled", "accuracy")),
        (("plain", "a_robust"), "validation-a_robust_accuracy", ("a_robust", "accuracy")),
        (("a", "a_robust"), "validation-a/robust_accuracy", ("a", "robust_accuracy")),
    ],
)
def test_which_underscore_parts_set_and_metric_is_known_from_the_sets(write, sets, name, key):
    data = f"data.validation={SETS.format(*sets)}"
    config = load_config(write(SMALL), [data, f"checkpointing.metric_name={name}"])
    assert config.ranking_metric == key


def test_a_metric_that_can_be_read_in_two_ways_is_refused(write):
    data = f"data.validation={SETS.format('a', 'a_robust')}"
    error = mistake(write(SMALL), data, "checkpointing.metric_name=val:validation-a_robust_accuracy")
    assert error.summary == "a metric's name can be read in two ways" and error.field == "checkpointing.metric_name"
    assert error.fix == "write validation-a/robust_accuracy or validation-a_robust/accuracy"
    unsaved = ["checkpointing.metric_name=val:validation-a_robust_accuracy", "checkpointing.enabled=false"]
    assert load_config(write(SMALL), [data, *unsaved]).ranking_metric is None, "nothing is ranked"


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        ("{dataset_name: my.module.Pairs}", "as {dataset_name: my.module.Pairs},"),
        ("{train_data_path: t.jsonl}", "Give data.validation or"),
    ],
)
def test_a_run_without_validation_says_so(write, caplog, data, fix):
    text = f"policy: {{model_name: m}}\ndata: {data}\n"
    config = load_config(write(text + "rm: {val_period: 10}\n"))
    assert len(config.remarks) == 1 and fix in config.remarks[0]
    assert "nothing is validated, although rm.val_period is 10" in caplog.text
    assert load_config(write(text), ["rm.val_period=null"]).remarks == []
    assert load_config(write(text), ["data.validation={dataset_name: Bundled}"]).remarks == []


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["hub={push_to_hub: true, repo_id: a/b}", "checkpointing.enabled=false"], "hub.push_to_hub"),
        (["evaluation.enabled=true", "checkpointing.enabled=false"], "evaluation.enabled"),
        (["evaluation.enabled=true"], "evaluation.enabled"),
        (["reward_shaping={normalize_rewards: true}"], "reward_shaping"),
        (["cluster.gpus_per_node=8"], "cluster.gpus_per_node"),
        (["cluster.num_nodes=2"], "cluster.num_nodes"),
    ],
)
def test_what_a_run_refuses(write, overrides, field):
    error = mistake(write(SMALL), *overrides)
    assert error.field == field and error.need and error.fix


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


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"dtensor_cfg": {"tensor_parallel_size": 2}}, "tensor_parallel_size is not supported yet"),
        ({"dtensor_cfg": {"lora_cfg": {"enabled": True}}}, "lora_cfg is not supported"),
        ({"megatron_cfg": {"enabled": True, "anything": 1}}, "megatron_cfg is not supported"),
        ({"reward_model_cfg": {"enabled": False}}, "reward_model_cfg.enabled"),
    ],
)
def test_what_a_policy_refuses(keys, words):
    refused(PolicyConfig, {"model_name": "m"} | keys, words)


# optimiser and schedule


LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 5}}
CONSTANT = {"name": "torch.optim.lr_scheduler.ConstantLR"}


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
        [LINEAR, CONSTANT, LINEAR, {"milestones": [6, 5]}],
        [LINEAR, CONSTANT, {"milestones": [5]}, {"milestones": [6]}],
        [{"milestones": [5]}],
        [],
    ],
)
def test_bad_lists_of_torch_schedulers(scheduler):
    refused(PolicyConfig, {"model_name": "m", "scheduler": scheduler})


# rm


# checkpointing


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,12}", fullmatch=True)


@given(NAMES, st.sampled_from(sorted(METRICS)), st.sampled_from(["", "val:"]), st.sampled_from("_/"))
def test_a_metric_of_one_set(name, metric, prefix, separator):
    key = parse_metric_name(f"{prefix}validation-{name}{separator}{metric}")
    assert key == (name, metric)


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


@given(st.integers(0, 99), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_a_deadline_in_days_hours_minutes_seconds(days, hours, minutes, seconds):
    config = CheckpointingConfig(checkpoint_must_save_by=f"{days:02}:{hours:02}:{minutes:02}:{seconds:02}")
    assert config.checkpoint_must_save_by == 86400 * days + 3600 * hours + 60 * minutes + seconds


# the others


def test_suites_are_names_or_names_and_folders():
    config = EvaluationConfig(suites=["rewardbench", " llmbar = my data/llmbar=2 "])
    assert config.named_suites == (("rewardbench", None), ("llmbar", "my data/llmbar=2"))
    one = EvaluationConfig.model_validate({"suites": "llmbar=downloads/llmbar"})  # as evaluation.suites=... gives it
    assert one.named_suites == (("llmbar", "downloads/llmbar"),)
    assert EvaluationConfig().named_suites == () and not EvaluationConfig().enabled


@pytest.mark.parametrize("suite", ["", " ", "=folder", "llmbar=", "llmbar= ", "llmbar,rmbench", "a,b=folder"])
def test_what_is_no_suite_is_refused(suite):
    with pytest.raises(ValidationError, match=r"suites(?s:.*)not understood"):
        EvaluationConfig.model_validate({"suites": ["rewardbench", suite]})
