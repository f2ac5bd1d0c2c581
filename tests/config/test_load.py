import logging
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from omegaconf import OmegaConf

from treeward.config import load_config, load_grpo_config, save_config
from treeward.config.base import Strict
from treeward.config.load import load_section
from treeward.errors import ConfigError

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    path
    for path in (ROOT / "examples" / "configs").glob("*.yaml")
    if not path.name.startswith(("grpo", "rlhf"))  # those of `treeward grpo`
)

# The keys, values and references of the reward-model example of NeMo RL, in the spelling of its newer versions.
NEMO = """
rm:
  max_num_epochs: 1
  max_num_steps: -1
  val_period: 16
  val_batches: -1
  val_global_batch_size: 32
  val_micro_batch_size: 1
  val_at_start: false
  seed: 42
checkpointing:
  enabled: true
  checkpoint_dir: results/rm
  metric_name: "val:validation-default_loss"
  higher_is_better: false
  keep_top_k: 3
  save_period: ${rm.val_period}
  checkpoint_must_save_by: null
policy:
  model_name: meta-llama/Llama-3.2-1B-Instruct
  tokenizer:
    name: ${policy.model_name}
    chat_template: "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat_template_kwargs: null
  train_global_batch_size: 128
  train_micro_batch_size: 1
  max_total_sequence_length: 8192
  precision: "bfloat16"
  activation_checkpointing_enabled: false
  offload_optimizer_for_logprob: false
  reward_model_cfg: {enabled: true, reward_model_type: "bradley_terry"}
  dtensor_cfg:
    _v2: false
    enabled: true
    cpu_offload: false
    sequence_parallel: false
    activation_checkpointing: false
    tensor_parallel_size: 1
    context_parallel_size: 1
    custom_parallel_plan: null
    clear_cache_every_n_steps: null
  dynamic_batching:
    enabled: false
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
    sequence_length_round: 64
  sequence_packing: {enabled: false}
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  max_grad_norm: 1.0
  optimizer:
    name: "torch.optim.AdamW"
    kwargs: {lr: 2.0e-6, weight_decay: 0.1, betas: [0.9, 0.98], eps: 1e-5, foreach: False, fused: False}
  scheduler:
    - name: "torch.optim.lr_scheduler.LinearLR"
      kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 10}
    - name: "torch.optim.lr_scheduler.ConstantLR"
      kwargs: {factor: 1.0, total_iters: 10000000000}
    - milestones: [10]
  megatron_cfg:
    enabled: false
    optimizer:
      lr: ${policy.optimizer.kwargs.lr}
      bf16: true
    distributed_data_parallel_config: {overlap_grad_reduce: true}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  shuffle: true
  num_workers: 1
  dataset_name: HelpSteer3
logger:
  log_dir: logs
  wandb_enabled: true
  tensorboard_enabled: true
  mlflow_enabled: false
  swanlab_enabled: false
  monitor_gpus: true
  num_val_samples_to_print: 0
  wandb: {project: rm-dev, name: rm-dev-logger}
  tensorboard: {log_dir: tb_logs-rm-dev-logger}
  mlflow: {experiment_name: rm-dev, run_name: rm-dev-logger, tracking_uri: null}
  gpu_monitoring: {collection_interval: 10, flush_interval: 10}
cluster: {gpus_per_node: 1, num_nodes: 1}
"""

SMALL = "policy: {model_name: m}\ndata:\n  train_data_path: t.jsonl\n"


@pytest.fixture
def write(tmp_path):
    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def mistake(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_load_and_survive_saving(path, tmp_path):
    config = load_config(path)
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config


def test_the_three_configs_are_shipped():
    assert {path.stem for path in SHIPPED} >= {"quickstart", "rm", "rm_tulu3_8b"}


def test_a_config_of_nemo_rl_loads_unchanged(write, tmp_path, caplog):
    with caplog.at_level(logging.DEBUG, logger="treeward.config"):
        config = load_config(write(NEMO))
    assert (config.rm.max_num_steps, config.rm.val_batches) == (None, None)
    assert config.policy.tokenizer.name == "meta-llama/Llama-3.2-1B-Instruct"
    assert config.policy.optimizer.kwargs["eps"] == 1e-5
    assert (config.policy.train_micro_batch_size, config.policy.micro_batch_tokens) == (1, None)
    assert config.policy.dynamic_batching.train_mb_tokens == 8192
    assert config.checkpointing.save_period == 16
    assert config.ranking_metric == ("default", "loss")
    assert [(d.split, d.name) for d in (*config.data.train, *config.data.validation)] == [
        ("train", None),
        ("validation", "default"),
    ]
    assert "logger.monitor_gpus" in caplog.text and "policy.dtensor_cfg._v2" in caplog.text
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize("name", ["val_loss", "validation-default_loss", "validation-default/loss", "eval/rm/loss"])
def test_older_metric_names_load(write, name):
    assert load_config(write(NEMO), [f"checkpointing.metric_name={name}"]).ranking_metric.metric == "loss"


def test_a_minimal_file_is_enough(write):
    config = load_config(write(SMALL))
    assert config.max_sequence_length == config.policy.max_total_sequence_length
    assert config.rm.seed == 42


def test_overrides_reach_keys_that_the_file_does_not_have(write):
    config = load_config(write(SMALL), ["rm.seed=7", "policy.optimizer.kwargs={lr: 1e-4}", "data.val_data_paths.a=v"])
    assert (config.rm.seed, config.policy.optimizer.kwargs) == (7, {"lr": 1e-4})
    assert [d.name for d in config.data.validation] == ["a"]


def test_defaults_are_laid_under_the_file_in_order(write, tmp_path):
    write(SMALL + "rm: {seed: 1, val_period: 1, log_period: 1}\n", "a.yaml")
    (tmp_path / "deep").mkdir()
    write("defaults: ../a.yaml\nrm: {val_period: 2, log_period: 2}\n", "deep/b.yaml")
    write("rm: {log_period: 3}\n", "c.yaml")
    path = write("defaults: [deep/b.yaml, c.yaml]\npolicy: {model_name: other}\n")
    config = load_config(path)
    assert (config.rm.seed, config.rm.val_period, config.rm.log_period) == (1, 2, 3)
    assert config.policy.model_name == "other"
    assert load_config(write(f"defaults: {path.name}\n", "d.yaml")) == config


def test_a_mistake_in_a_default_names_that_file(write):
    base = write(SMALL + "rm:\n  sed: 1\n", "base.yaml")
    assert mistake(write("defaults: base.yaml\n")).where == f"{base}:5"


def test_bad_defaults(write):
    assert "does not exist" in mistake(write("defaults: nowhere.yaml\n")).summary
    assert "circle" in mistake(write("defaults: run.yaml\n")).summary
    assert "does not name files" in mistake(write("defaults: {a: b}\n")).summary


def test_references_and_functions(write):
    text = SMALL + "rm: {seed: '${mul:2,${rm.log_period}}', log_period: 5, val_period: '${div:9,2}'}\n"
    assert mistake(write(text)).field == "rm.val_period", "4.5 steps"
    config = load_config(write(text), ["rm.val_period=${int:${div:9,2}}", "rm.max_num_steps=${max:3,${min:8,7}}"])
    assert (config.rm.seed, config.rm.val_period, config.rm.max_num_steps) == (10, 4, 7)


@pytest.mark.parametrize("value", ["${rm.sed}", "${unknown:1}", "${rm.seed", "???", "${oc.env:TREEWARD_NO_SUCH_NAME}"])
def test_a_dangling_reference_names_the_key(write, value):
    error = mistake(write(SMALL + f"rm:\n  val_period: '{value}'\n"))
    assert (error.field, error.got) == ("rm.val_period", value)
    assert error.where.endswith("run.yaml:5")


def test_text_that_looks_like_a_reference_survives_saving(write, tmp_path):
    config = load_config(write(SMALL), [r"policy.tokenizer.chat_template='\${x} {{ y }}'"])
    assert config.policy.tokenizer.chat_template == "${x} {{ y }}"
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize(
    ("override", "field", "nearest"),
    [
        ("policy.modle_name=x", "policy.modle_name", "policy.model_name"),
        ("rm.loss.margn=true", "rm.loss.margn", "rm.loss.margin"),
        ("polcy.model_name=x", "polcy", "policy"),
        ("data.train_data_pth=x", "data.train_data_pth", "data.train_data_path"),
        ("data.train.promptkey=x", "data.train.promptkey", "data.train.prompt_key"),
        ("data.default.promptkey=x", "data.default.promptkey", "data.default.prompt_key"),
        ("data.validation=[{data_path: x, splt: y}]", "data.validation[0].splt", "data.validation[0].split"),
        ("policy.seed=1", "policy.seed", "rm.seed"),
        ("policy.scheduler.warmup=1", "policy.scheduler.warmup", "policy.scheduler.warmup_steps"),
    ],
)
def test_a_misspelt_key_fails_with_the_nearest_name(write, override, field, nearest):
    error = mistake(write(SMALL), override)
    assert error.field == field
    assert error.fix == f"did you mean {nearest}?"
    assert error.where == f"command line, {override}"


def test_a_key_that_resembles_nothing_lists_the_keys(write):
    error = mistake(write(SMALL), "hub.qqqq=1")
    assert error.fix is None
    assert error.need == "one of push_to_hub, repo_id, private"


@pytest.mark.parametrize("override", ["env={a: 1}", "grpo.num_prompts=1", "policy.generation.backend=vllm"])
def test_sections_of_another_command_say_so(write, override):
    error = mistake(write(SMALL), override)
    assert "belongs to `treeward grpo`" in error.summary
    assert "~" in error.fix


def test_every_mistake_is_listed_with_its_place(write):
    path = write("policy:\n  precision: fp16\ndata: {}\nrm:\n  max_num_epochs: zero\n  sed: 1\n")
    text = str(mistake(path, "hub.push_to_hub=true"))
    for line in (
        ":2: the value is not valid",
        ":3: there is no training data",
        ":5: the value is not valid",
        ":6: there is",
    ):
        assert f"{path}{line}" in text
    assert "command line, hub.push_to_hub=true: push_to_hub needs a repository" in text
    assert "the configuration has 5 mistakes" in text


def test_an_override_takes_the_place_of_the_line_that_it_replaces(write):
    path = write(SMALL + "rm: {seed: 1}\n")
    assert mistake(path, "data={train_data_path: null, train: [{data_path: a, weight: 0}]}").where.startswith("command")
    assert mistake(path, "rm={loss: {margn: 1}}").where == "command line, rm={loss: {margn: 1}}"
    assert mistake(path, "rm={log_period: 2}", "rm.seed=x").where == "command line, rm.seed=x"


def test_a_missing_section_is_named(write):
    assert mistake(write("policy: {model_name: m}\n")).field == "data"


def test_a_bad_value_says_what_is_needed(write):
    error = mistake(write(SMALL), "policy.attention=flash")
    assert (error.field, error.got) == ("policy.attention", "flash")
    assert "'tree' or 'rows'" in error.need


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
    assert error.where == f"command line, {next(o for o in overrides if o.startswith(field))}"


def test_the_metric_of_a_set_with_underscores(write):
    config = load_config(write(SMALL), [*VALIDATION, "checkpointing.metric_name=val:validation-hard_set_accuracy"])
    assert config.ranking_metric == ("hard_set", "accuracy")
    off = ["checkpointing.metric_name=val_loss", "checkpointing.enabled=false"]
    assert not load_config(write(SMALL), off).checkpointing.enabled, "nothing is ranked when nothing is saved"


SETS = "[{{data_path: a.jsonl, name: {0}}}, {{data_path: b.jsonl, name: {1}}}]"


@pytest.mark.parametrize(
    ("sets", "name", "key"),
    [
        (("plain", "hard"), "val:validation-plain_length_controlled_accuracy", ("plain", "length_controlled_accuracy")),
        (("plain", "length_controlled"), "validation-length_controlled_accuracy", ("length_controlled", "accuracy")),
        (("plain", "a_robust"), "validation-a_robust_accuracy", ("a_robust", "accuracy")),
        (("plain", "a"), "validation-a_robust_accuracy", ("a", "robust_accuracy")),
        (("a", "a_robust"), "validation-a/robust_accuracy", ("a", "robust_accuracy")),
        (("a", "a_robust"), "validation-a_robust/accuracy", ("a_robust", "accuracy")),
        (("a", "a_robust"), "val_worst_subset", (None, "worst_subset")),
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
    ("given", "meant"),
    [
        ("val:validation-plain_lenght_controlled_accuracy", "val:validation-plain_length_controlled_accuracy"),
        ("validation-hard_set_robst_accuracy", "validation-hard_set_robust_accuracy"),
        ("validation-plain_length_controlled_acuracy", "validation-plain_length_controlled_accuracy"),
    ],
)
def test_a_misspelt_metric_of_a_set_that_is_there(write, given, meant):
    error = mistake(write(SMALL), *VALIDATION, f"checkpointing.metric_name={given}")
    assert error.summary == "a metric is not known" and error.fix == f"did you mean {meant}?"
    config = load_config(write(SMALL), [*VALIDATION, f"checkpointing.metric_name={meant}"])
    assert config.ranking_metric.validation in ("plain", "hard_set")


def test_a_metric_without_its_set_is_not_taken_for_a_set(write):
    error = mistake(write(SMALL), *VALIDATION, "checkpointing.metric_name=validation-length_controlled_accuracy")
    assert "not in data: length_controlled" in error.summary
    assert error.fix.endswith("/length_controlled_accuracy")
    fixed = error.fix.removeprefix("set ")
    assert load_config(write(SMALL), [*VALIDATION, fixed]).ranking_metric.metric == "length_controlled_accuracy"


def test_robust_accuracy_is_measured_where_it_is_asked_for(write):
    def numbers(*overrides):
        data = f"data.validation={SETS.format('a', 'b')}"
        config = load_config(write(SMALL), [data, *overrides])
        return [config.num_perturbations(name) for name in ("a", "b")]

    assert numbers() == numbers("checkpointing.metric_name=val_accuracy") == [None, None]
    assert numbers("checkpointing.metric_name=validation-b_robust_accuracy") == [None, 100]
    assert numbers("checkpointing.metric_name=val_robust_accuracy") == [100, 100]
    assert numbers("checkpointing.metric_name=val_robust_accuracy", "rm.val_perturbations=7") == [7, 7]
    assert numbers("checkpointing.metric_name=val_robust_accuracy", "checkpointing.enabled=false") == [None, None]


def test_nothing_heavy_is_imported():
    code = (
        "import sys, treeward.config, treeward.config.load; "
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert shown.stdout.strip() == "[]"


class _Engine(Strict):
    ignored_keys: ClassVar[dict[str, str]] = {"colour": "it is never seen"}
    power: int = 1
    """How strong it is."""


class _Car(Strict):
    name: str
    """What it is called."""
    engine: _Engine = _Engine()
    """What drives it."""


def test_a_section_given_as_a_mapping(caplog):
    with caplog.at_level(logging.INFO):
        car = load_section(_Car, {"name": "${engine.power}-car", "engine": {"power": 3, "colour": "red"}}, where="car")
    assert (car.name, car.engine.power) == ("3-car", 3) and "engine.colour" in caplog.text


def test_a_section_of_a_larger_configuration_may_refer_to_the_whole():
    whole = OmegaConf.create({"a": {"power": 5}, "car": {"name": "x", "engine": {"power": "${a.power}"}}})
    assert load_section(_Car, whole.car, where="car").engine.power == 5


def test_a_section_of_a_larger_configuration_with_a_dangling_reference():
    with pytest.raises(ConfigError, match=r"car: a value cannot be resolved(?s:.*)nowhere"):
        load_section(_Car, OmegaConf.create({"car": {"name": "${nowhere}"}}).car, where="car")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "x", "engine": {"powr": 3}}, r"env_config: there is no such key(?s:.*)did you mean engine\.power"),
        ({}, "env_config: a key is missing(?s:.*)name"),
        ({"name": "x", "engine": {"power": "much"}}, "env_config: the value is not valid(?s:.*)much"),
        ({"name": "${nowhere}"}, "env_config: a value cannot be resolved"),
    ],
)
def test_mistakes_in_a_mapping_name_it(values, words):
    with pytest.raises(ConfigError, match=words):
        load_section(_Car, values, where="env_config")


# what is no path, and what are no overrides


@pytest.mark.parametrize("loader", [load_config, load_grpo_config])
@pytest.mark.parametrize(
    ("path", "overrides", "message"),
    [
        ("rm.yaml", "rm.seed=1", r"overrides are a list(.|\n)*fix:   write \['rm.seed=1'\]"),
        ("rm.yaml", {"rm.seed": 1}, "an override is not text"),
        ("rm.yaml", [("rm.seed", 1)], "an override is not text"),
        ({"policy": {}}, [], "a configuration is read from a file(.|\n)*path of a YAML file"),
    ],
)
def test_arguments_of_another_kind_are_refused(loader, path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        loader(path, overrides)
