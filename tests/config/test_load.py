"""Reading, overriding, resolving, checking and saving a configuration; the errors that a user
sees."""

import re
from pathlib import Path

import pytest
from config.conftest import RM
from hypothesis import given, settings
from hypothesis import strategies as st

from treeward.config.base import Strict
from treeward.config.load import load_config, load_file, load_grpo_config, load_section, save_config
from treeward.config.server import ServedModelConfig
from treeward.errors import ConfigError

# PyYAML 6.0.4 counts levels; before, Python's own limit ended the reading.
NESTED = "nested too deep|maximum nesting depth"
ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "src/treeward/config/recipes").glob("*.yaml"))
GRPO = ("grpo", "rlhf", "rubric", "judge")

TEXTS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp", "Co", "Cn"]),
    max_size=12,
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXTS, v, max_size=3), max_leaves=6
)


class Anything(Strict):
    """A section of any content, to see what the loader makes of YAML."""

    a: object = None
    """Anything."""


@pytest.fixture
def write(tmp_path):
    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_load_and_survive_saving(path, tmp_path):
    load = load_grpo_config if path.name.startswith(GRPO) else load_config
    config = load(path)
    save_config(config, tmp_path / "resolved.yaml")
    assert load(tmp_path / "resolved.yaml") == config
    assert not (config.logger.tensorboard_enabled or config.logger.wandb_enabled), (
        "make env installs no tracker"
    )


@settings(max_examples=15)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES, max_size=3))
def test_any_value_survives_saving(tmp_path_factory, kwargs):
    folder = tmp_path_factory.mktemp("yaml")
    (folder / "a.yaml").write_text(RM, encoding="utf-8")
    config = load_config(folder / "a.yaml")
    optimizer = config.policy.optimizer.model_copy(
        update={"name": "my.Optimizer", "kwargs": {**kwargs, "lr": 1.0}}
    )
    config = config.model_copy(
        update={"policy": config.policy.model_copy(update={"optimizer": optimizer})}
    )
    save_config(config, folder / "resolved.yaml")
    assert load_config(folder / "resolved.yaml") == config


@pytest.mark.parametrize(
    ("text", "value"), [("1e-5", 1e-5), ("null", None), ("'1'", "1"), ("[1, x]", [1, "x"])]
)
def test_a_value_means_the_same_in_a_file_and_in_an_override(write, text, value):
    for found in (
        load_file(Anything, None, [f"a={text}"]).a,
        load_file(Anything, write(f"a: {text}\n")).a,
    ):
        assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "result"),
    [
        ("a.seed=7", {"seed": 7, "sets": [{"w": 1}, {"w": 2}]}),
        ("+a.new.key=7", {"seed": 1, "sets": [{"w": 1}, {"w": 2}], "new": {"key": 7}}),
        ("a={new: 2}", {"seed": 1, "sets": [{"w": 1}, {"w": 2}], "new": 2}),
        ("a.sets.1.w=3", {"seed": 1, "sets": [{"w": 1}, {"w": 3}]}),
        ("a.sets[0].w=3", {"seed": 1, "sets": [{"w": 3}, {"w": 2}]}),
        ("~a.seed", {"sets": [{"w": 1}, {"w": 2}]}),
        ("~a.sets.0", {"seed": 1, "sets": [{"w": 2}]}),
    ],
)
def test_overrides(write, override, result):
    path = write("a: {seed: 1, sets: [{w: 1}, {w: 2}]}\n")
    assert load_file(Anything, path, [override]).a == result


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rm.seed", "not understood"),
        ("rm seed=1", "not understood"),
        ("+rm.seed=1", "there already(?s:.*)write rm.seed=1"),
        ("~rm.sed", "not there(?s:.*)did you mean seed"),
        ("~rm.list.x", "cannot be applied"),
        ("rm.seed=[1", "cannot be applied"),
        ("rm.list.2=1", "cannot be applied"),
    ],
)
def test_a_wrong_override_is_shown(mistake, override, words):
    error = mistake(RM + "rm: {seed: 1, list: [1]}\n", override)
    assert (error.where, error.got) == ("command line", override) and re.search(words, str(error))


def test_defaults_are_laid_under_the_file_in_order(write, tmp_path):
    write(RM + "rm: {seed: 1, val_period: 1, log_period: 1}\n", "a.yaml")
    (tmp_path / "deep").mkdir()
    write("defaults: ../a.yaml\nrm: {val_period: 2, log_period: 2}\n", "deep/b.yaml")
    write("rm: {log_period: 3}\n", "c.yaml")
    path = write("defaults: [deep/b.yaml, c.yaml]\npolicy: {model_name: other}\n")
    config = load_config(path)
    assert (config.rm.seed, config.rm.val_period, config.rm.log_period) == (1, 2, 3)
    assert config.policy.model_name == "other"
    assert load_config(write(f"defaults: {path.name}\n", "d.yaml")) == config
    write(RM + "rm: null\n", "e.yaml")
    lists = "defaults: e.yaml\nrm: {seed: 3}\ndata: {validation: [{data_path: v}], train: {weight: 2.0}}\n"
    write(lists, "f.yaml")
    config = load_config(write("defaults: f.yaml\ndata: {validation: {data_path: w}}\n", "g.yaml"))
    assert (config.rm.seed, [one.data_path for one in config.data.validation]) == (3, ["w"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: nowhere.yaml\n", "does not exist"),
        ("defaults: run.yaml\n", "circle"),
        ("a: 1\na: 2\n", "duplicate key"),
    ],
)
def test_errors_of_a_file_name_it(mistake, text, words):
    error = mistake(text)
    assert "run.yaml" in error.where and words in str(error)


def test_references_and_functions(load, mistake):
    text = RM + "rm: {seed: '${mul:2,${rm.log_period}}', log_period: 5, val_period: '${div:9,2}'}\n"
    assert mistake(text).field == "rm.val_period", "4.5 steps"
    assert load(RM + "rm: {seed: '${nowhere}'}\n", "rm.seed=7").rm.seed == 7
    config = load(text, "rm.val_period=${int:${div:9,2}}", "rm.max_num_steps=${max:3,${min:8,7}}")
    assert (config.rm.seed, config.rm.val_period, config.rm.max_num_steps) == (10, 4, 7)


@pytest.mark.parametrize(
    "value", ["${rm.sed}", "${unknown:1}", "???", "${oc.env:TREEWARD_NO_SUCH_NAME}"]
)
def test_a_dangling_reference_names_the_key(mistake, value):
    error = mistake(RM + f"rm:\n  val_period: '{value}'\n")
    assert error.field == "rm.val_period" and error.where.endswith("run.yaml")


@pytest.mark.parametrize(
    ("override", "field", "nearest"),
    [
        ("policy.modle_name=x", "policy.modle_name", "policy.model_name"),
        ("data.train.promptkey=x", "data.train[0].promptkey", "data.train[0].prompt_key"),
        ("data.default.promptkey=x", "data.default.promptkey", "data.default.prompt_key"),
        (
            "data.validation=[{data_path: x, splt: y}]",
            "data.validation[0].splt",
            "data.validation[0].split",
        ),
        ("policy.seed=1", "policy.seed", "rm.seed"),
    ],
)
def test_a_misspelt_key_fails_with_the_nearest_name(mistake, override, field, nearest):
    error = mistake("rm", override)
    assert (error.field, error.fix) == (field, f"did you mean {nearest}?")
    assert error.where == f"command line, {override}"


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("grpo.num_generation_per_prompt=8", "grpo.num_generations_per_prompt"),
        ("num_generation=8", "grpo.num_generations_per_prompt"),
        ("loss_fn.epsilon=0.1", "loss_fn.ratio_clip_min and loss_fn.ratio_clip_max"),
        ("loss_fn.clip_ratio_hgh=0.1", "loss_fn.ratio_clip_max"),
        ("policy.learning_rate=1e-5", "policy.optimizer.kwargs.lr"),
    ],
)
def test_names_of_other_toolkits_are_known(mistake, override, ours):
    error = mistake("grpo", override)
    assert (error.summary, error.fix) == ("there is no such key", f"did you mean {ours}?")


def test_a_value_fails_with_the_nearest_and_its_whole_meaning(mistake):
    error = mistake("grpo", "grpo.adv_estimator={name: rloo}")
    assert error.fix == "did you mean leave_one_out?"
    assert "(Shao et al. 2024)" in error.need and "(Hu et al. 2025)" in error.need
    error = mistake("rm", "policy.attention=flash")
    assert (error.field, error.got, error.fix) == ("policy.attention", "flash", None)
    assert "'tree' or 'rows'" in error.need


@pytest.mark.parametrize(
    ("run", "override", "command"),
    [("rm", "policy.generation.backend=vllm", "grpo"), ("grpo", "rm.seed=1", "train")],
)
def test_sections_of_another_command_say_so(mistake, run, override, command):
    error = mistake(run, override)
    assert f"belongs to `treeward {command}`" in error.summary and "~" in error.fix


def test_every_mistake_is_listed_with_its_place(mistake, tmp_path):
    wrong = "policy:\n  precision: fp16\ndata: {}\nrm:\n  max_num_epochs: zero\n  sed: 1\n"
    text = str(mistake(wrong, "hub.push_to_hub=maybe"))
    for key in ("policy.precision", "data.train", "rm.max_num_epochs", "rm.sed", "hub.push_to_hub"):
        assert f"field: {key}" in text
    assert f"{tmp_path / 'run.yaml'}: the value is not valid" in text
    assert "the configuration has 5 mistakes" in text


def test_a_mistake_is_told_of_the_last_override_of_its_key(write) -> None:
    """The first of them had the same key, before another that holds it."""
    key = "policy.optimizer.kwargs"
    overrides = [f"{key}.lr=1.0", f"{key}={{lr: 1.0e-5}}", f"{key}.lr=-1.0"]
    with pytest.raises(ConfigError) as caught:
        load_config(write(RM), overrides)
    assert caught.value.where == f"command line, {key}.lr=-1.0"


def test_an_unknown_key_names_the_file_that_has_it(write, tmp_path):
    write(
        (
            "policy: {model_name: m, zigzag: 1, nought: 2}\ncluster: {fabric: 1}\ndata: {train: "
            "t.jsonl}\n"
        ),
        "base.yaml",
    )
    with pytest.raises(ConfigError) as caught:
        load_config(
            write("defaults: base.yaml\nrm: {seed: 1}\nlogger: {monitor_gpus: true, fabric: 1}\n")
        )
    text = str(caught.value)
    for key, file in {
        "policy.zigzag": "base",
        "cluster.fabric": "base",
        "logger.fabric": "run",
    }.items():
        assert f"{tmp_path}/{file}.yaml: there is no such key\n    field: {key}\n" in text
    assert text.count("one of model_name, ") == 1, "the names of a section's keys once"


def test_a_pretrained_model_replaces_one_from_scratch_with_its_tokenizer(write, caplog):
    policy = load_config("small", ["policy.model_name=a/model"]).policy
    assert (policy.model_name, policy.architecture) == ("a/model", None)
    assert policy.tokenizer.name is None and policy.trained_vocab_size is None
    assert policy.train_global_batch_size == 16, "the rest is that of small.yaml"
    assert "--model NAME` chooses" in caplog.text, "2e-3 would destroy it"
    file = write(
        "defaults: small\npolicy: {model_name: a/model, optimizer: {kwargs: {lr: 1.0e-5}}}\n"
    )
    caplog.clear()
    assert load_config(file).policy.model_name == "a/model" and not caplog.text
    named = ["policy.tokenizer.name=b", "policy.model_name=a/model"]
    assert load_config("small", named).policy.tokenizer.name == "b"


def test_a_model_from_scratch_replaces_a_pretrained_one(write):
    policy = load_config("rm", ["policy.model_config={model_type: qwen3, vocab_size: 64}"]).policy
    assert policy.model_name is None and policy.trained_vocab_size == 64


def test_who_removes_the_other_model_keeps_what_is_left(write):
    removed = ["policy.model_name=a/model", "~policy.model_config", "~policy.tokenizer"]
    assert load_config("small", removed).policy.model_name == "a/model"
    file = write("policy: {model_name: m, tokenizer: {name: b}}\ndata: {train_data_path: t}\n")
    policy = load_config(
        file, ["policy.model_name=null", "policy.model_config={model_type: qwen3}"]
    ).policy
    assert policy.tokenizer.name == "b"


@pytest.mark.parametrize(
    ("override", "meant", "why"),
    [
        (
            "policy.per_device_train_batch_size=8",
            "policy.train_micro_batch_size",
            "policy.train_global_batch_size",
        ),
        (
            "policy.gradient_accumulation_steps=4",
            "policy.train_global_batch_size",
            "number of devices",
        ),
        ("data.max_length=512", "policy.max_total_sequence_length", "prompt with its completion"),
        ("rm.per_device_eval_batch_size=8", "rm.val_micro_batch_size", "each device"),
        ("output_dir=results", "checkpointing.checkpoint_dir", ""),
    ],
)
def test_a_key_of_trl_is_told_with_what_it_counts(mistake, override, meant, why):
    error = mistake("rm", override)
    assert error.fix.startswith(f"did you mean {meant}?") and why in error.fix


@pytest.mark.parametrize("section", [{}, {"model_path": None}])
def test_a_missing_key_has_all_its_names(section):
    with pytest.raises(ConfigError, match="also called model, model_name or model_path") as error:
        load_section(ServedModelConfig, section, where="MODEL")
    assert error.value.summary == "a key is missing"


def test_a_wrong_value_is_told_at_the_name_that_the_file_has():
    with pytest.raises(ConfigError) as caught:
        load_section(ServedModelConfig, {"model_path": 3}, where="MODEL")
    error = caught.value
    assert (error.summary, error.field, error.got) == ("the value is not valid", "model_path", 3)
    assert "also called model, model_name or model_path" in error.need


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: " + "[" * 2000 + "]" * 2000, NESTED),
        ("\n".join(" " * i + "a:" for i in range(2000)), NESTED),
        ("rm: {seed: " + "9" * 5000 + "}", "digits"),
        ("a: !!python/object/apply:os.getcwd []", "python/object"),
    ],
    ids=["deep lists", "deep mappings", "many digits", "an object of Python"],
)
def test_yaml_that_cannot_be_read(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(file)
    assert str(file) in str(caught.value)


def test_an_override_that_is_nested_too_deep() -> None:
    with pytest.raises(ConfigError, match=NESTED):
        load_config("rm", ["a=" + "[" * 2000 + "]" * 2000])


def test_a_file_of_yaml_runs_nothing(mistake, tmp_path):
    planted = tmp_path / "planted"
    call = f"!!python/object/apply:os.system ['touch {planted}']"
    text = f"policy: {{model_name: {call}}}\ndata: {{train_data_path: t}}\n"
    assert "python/object" in str(mistake(text)) and not planted.exists()
