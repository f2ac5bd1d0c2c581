import pytest
from pydantic import ValidationError

from treeward.config import DataConfig, DatasetConfig
from treeward.errors import ConfigError


def problem(raw):
    """The `ConfigError` inside the validation error that `raw` causes."""
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate(raw)
    errors = [details.get("ctx", {}).get("error") for details in caught.value.errors()]
    found = [error for error in errors if isinstance(error, ConfigError)]
    assert found, caught.value
    return found[0]


PAIRS = DataConfig(
    train=(DatasetConfig(dataset_name="BinaryPreferenceDataset", data_path="t", prompt_key="q", split="s"),),
    validation=(
        DatasetConfig(dataset_name="BinaryPreferenceDataset", data_path="a", prompt_key="q", split="v", name="A"),
        DatasetConfig(dataset_name="BinaryPreferenceDataset", data_path="b", prompt_key="q", split="v", name="B"),
    ),
)

FORMS_OF_PAIRS = {
    "flat": {
        "dataset_name": "BinaryPreferenceDataset",
        "train_data_path": "t",
        "train_split": "s",
        "val_data_paths": {"A": "a", "B": "b"},
        "val_split": "v",
        "prompt_key": "q",
    },
    "older flat": {
        "dataset_type": "binary",
        "train_data_path": "t",
        "train_split": "s",
        "val_data_path": None,
        "val_data_paths": {"A": "a", "B": "b"},
        "val_split": "v",
        "prompt_key": "q",
    },
    "blocks with paths": {
        "train": {"data_path": "t", "split": "s"},
        "val_data_paths": {"A": "a", "B": "b"},
        "default": {"dataset_name": "BinaryPreferenceDataset", "prompt_key": "q", "split": "v"},
    },
    "blocks, list": {
        "train": [{"data_path": "t", "split": "s"}],
        "validation": [{"data_path": "a", "name": "A"}, {"data_path": "b", "name": "B"}],
        "default": {
            "dataset_name": "BinaryPreferenceDataset",
            "prompt_key": "q",
            "split": "v",
            "prompt_file": None,
            "processor": "preference_preprocessor",
        },
    },
    "blocks, mapping": {
        "train": {"data_path": "t", "split": "s", "env_name": "x"},
        "validation": {"A": {"data_path": "a", "split": "v"}, "B": {"data_path": "b", "split": "v"}},
        "default": {"dataset_name": "BinaryPreferenceDataset", "prompt_key": "q"},
    },
    "blocks under flat keys": {
        "dataset_name": "BinaryPreferenceDataset",
        "prompt_key": "q",
        "train": {"data_path": "t", "split": "s"},
        "validation": {"data_path": "a", "name": "A", "split": "v"},
        "val_data_paths": {"B": "b"},
        "val_split": "v",
    },
}


@pytest.mark.parametrize("form", FORMS_OF_PAIRS)
def test_every_form_means_the_same(form):
    assert DataConfig.model_validate(FORMS_OF_PAIRS[form]) == PAIRS


def test_the_normal_form_is_a_fixed_point():
    assert DataConfig.model_validate(PAIRS.model_dump()) == PAIRS
    assert DataConfig(train=PAIRS.train, validation=PAIRS.validation) == PAIRS


@pytest.mark.parametrize(
    "raw",
    [
        {"train_data_path": "t", "val_data_path": "v"},
        {"train": {"data_path": "t"}, "validation": {"data_path": "v"}},
        {"train": {"data_path": "t"}, "validation": [{"data_path": "v"}]},
        {"train_data_path": "t", "val_data_paths": {"default": "v"}},
    ],
)
def test_the_only_unnamed_validation_set_is_called_default(raw):
    assert [(d.name, d.data_path) for d in DataConfig.model_validate(raw).validation] == [("default", "v")]


def test_an_unnamed_set_stands_beside_named_ones():
    raw = {"train_data_path": "t", "val_data_path": "v", "val_data_paths": {"hard": "h"}}
    assert [d.name for d in DataConfig.model_validate(raw).validation] == ["default", "hard"]


@pytest.mark.parametrize(
    ("name", "validation"),
    [
        ("HelpSteer3", [("default", "validation")]),
        ("Tulu3Preference", []),
        ("HelpSteer3Dataset", [("default", "validation")]),
        ("Bundled", [("plain", "validation"), ("length_controlled", "length_controlled")]),
    ],
)
@pytest.mark.parametrize("form", ["flat", "default"])
def test_sets_that_bring_their_own_data(name, validation, form):
    raw = {"dataset_name": name} if form == "flat" else {"default": {"dataset_name": name}}
    config = DataConfig.model_validate(raw)
    assert [(d.dataset_name, d.data_path, d.split) for d in config.train] == [(name, None, "train")]
    assert [(d.name, d.split) for d in config.validation] == validation


def test_own_splits_can_be_chosen():
    config = DataConfig.model_validate({"dataset_name": "HelpSteer3", "train_split": "a", "val_split": "b"})
    assert (config.train[0].split, config.validation[0].split) == ("a", "b")


def test_own_splits_are_filled_into_blocks():
    config = DataConfig.model_validate(
        {
            "train": {"dataset_name": "HelpSteer3"},
            "validation": {"dataset_name": "Bundled", "name": "length_controlled"},
        }
    )
    assert (config.train[0].split, config.validation[0].split) == ("train", "length_controlled")
    assert DataConfig.model_validate({"train": {"dataset_name": "HelpSteer3"}}).validation == ()


def test_a_local_copy_is_not_taken_for_the_hub():
    config = DataConfig.model_validate({"dataset_name": "HelpSteer3", "train_data_path": "copy.jsonl"})
    assert (config.train[0].data_path, config.train[0].split, config.validation) == ("copy.jsonl", None, ())


def test_answers_to_other_prompts_are_for_training_alone():
    flat = {"dataset_name": "Bundled", "non_contextual_answer": True}
    config = DataConfig.model_validate(flat)
    assert [d.non_contextual_answer for d in (*config.train, *config.validation)] == [True, False, False]
    assert [d.name for d in config.validation] == ["plain", "length_controlled"]
    train = [{"data_path": "a"}, {"data_path": "b", "non_contextual_answer": False}]
    config = DataConfig.model_validate({"non_contextual_answer": True, "train": train})
    assert [d.non_contextual_answer for d in config.train] == [True, False]


def test_several_training_sets_with_weights():
    config = DataConfig.model_validate({"train": [{"data_path": "a"}, {"data_path": "b", "weight": 0.5}]})
    assert [d.weight for d in config.train] == [1.0, 0.5]


def test_null_in_a_block_is_the_default_and_not_the_shared_value():
    config = DataConfig.model_validate(
        {"default": {"prompt_key": "q"}, "train": {"data_path": "a", "prompt_key": None}}
    )
    assert config.train[0].prompt_key == "prompt"


@pytest.mark.parametrize(
    ("raw", "field", "words"),
    [
        ({"validation": {"data_path": "v"}}, "train", "no training data"),
        ({"train": []}, "train", "no training data"),
        ({"train": {}}, None, "needs a data_path"),
        ({"train": "t.jsonl"}, "train", "not a block"),
        (
            {"train_data_path": "t", "validation": [{"data_path": "a"}, {"data_path": "b"}]},
            "validation[1].name",
            "no name",
        ),
        (
            {"train_data_path": "t", "validation": {"data_path": "a", "name": "A"}, "val_data_paths": {"A": "b"}},
            "validation[1].name",
            "same name",
        ),
        (
            {"train_data_path": "t", "val_data_path": "a", "val_data_paths": {"default": "b"}},
            "validation[1].name",
            "same",
        ),
        ({"train_data_path": "t", "val_data_paths": "v"}, "val_data_paths", "not a mapping"),
        ({"train_data_path": "t", "val_split": "v"}, "val_split", "no validation set"),
        ({"train_data_path": "t", "train": {"data_path": "u"}}, "train_data_path", "contradict"),
        ({"train_data_path": "t", "train": [{"data_path": "u"}, {"data_path": "w"}]}, "train_data_path", "two forms"),
        ({"train_data_path": "t", "dataset_type": "pairs"}, "dataset_type", "not known"),
        ({"train_data_path": "t", "dataset_type": "rank", "dataset_name": "X"}, "dataset_type", "contradict"),
        (
            {"train_data_path": "t", "prompt_key": "a", "default": {"prompt_key": "b"}},
            "default.prompt_key",
            "contradict",
        ),
        ({"train_data_path": "t", "default": {"promt_key": "a"}}, "default.promt_key", "no such key"),
        ({"train_data_path": "t", "default": "x"}, "default", "not a block"),
        ({"train_data_path": "t", "validation": {"data_path": "x", "weight": 2}}, "validation[0].weight", "weight"),
        (
            {"train_data_path": "t", "validation": {"data_path": "x", "non_contextual_answer": True}},
            "validation[0].non_contextual_answer",
            "validation set",
        ),
        ({"train_data_path": "t", "val_data_paths": {"a b": "x"}}, None, "cannot be part of a metric"),
        ({"dataset_name": "Tulu3Preference", "validation": {"name": "x"}}, "validation", "no validation split"),
    ],
)
def test_contradictions_are_refused(raw, field, words):
    error = problem(raw)
    assert error.field == field
    assert words in error.summary


@pytest.mark.parametrize(
    "raw",
    [
        {"train_data_pth": "t"},
        {"train": {"data_path": "t", "promt_key": "q"}},
        {"train": [{"data_path": "t", "promt_key": "q"}]},
        {"train_data_path": "t", "validation": {"data_path": "v", "nme": "q"}},
        {"train_data_path": "t", "validation": {"a": {"data_path": "v", "nme": None}}},
        {"train_data_path": "t", "truncation": "cut"},
        {"train": {"data_path": "t", "weight": 0}},
        {"train": {"data_path": "t", "weight": float("nan")}},
        {"train_data_path": "t", "max_input_seq_length": 0},
    ],
)
def test_unknown_keys_and_bad_values_are_refused(raw):
    with pytest.raises(ValidationError):
        DataConfig.model_validate(raw)


def test_a_configuration_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        PAIRS.shuffle = False
