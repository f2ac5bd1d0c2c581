"""The `data` section of both kinds of run: its forms, the sets that bring their own validation, what it refuses."""

import pytest
from pydantic import ValidationError

from treeward.config import DataConfig, DatasetConfig
from treeward.config.data import PromptDataConfig
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

BINARY = {"dataset_name": "BinaryPreferenceDataset", "prompt_key": "q"}
FORMS_OF_PAIRS = [
    BINARY | {"train_data_path": "t", "train_split": "s", "val_data_paths": {"A": "a", "B": "b"}, "val_split": "v"},
    {
        "dataset_type": "binary",
        "prompt_key": "q",
        "train_data_path": "t",
        "train_split": "s",
        "val_data_path": None,
        "val_data_paths": {"A": "a", "B": "b"},
        "val_split": "v",
    },
    {
        "train": {"data_path": "t", "split": "s"},
        "val_data_paths": {"A": "a", "B": "b"},
        "default": BINARY | {"split": "v"},
    },
    {
        "train": [{"data_path": "t", "split": "s"}],
        "validation": [{"data_path": "a", "name": "A"}, {"data_path": "b", "name": "B"}],
        "default": BINARY | {"split": "v", "prompt_file": None, "processor": "preference_preprocessor"},
    },
    {
        "train": {"data_path": "t", "split": "s", "env_name": "x"},
        "validation": {"A": {"data_path": "a", "split": "v"}, "B": {"data_path": "b", "split": "v"}},
        "default": BINARY,
    },
    BINARY
    | {
        "train": {"data_path": "t", "split": "s"},
        "validation": {"data_path": "a", "name": "A", "split": "v"},
        "val_data_paths": {"B": "b"},
        "val_split": "v",
    },
]


@pytest.mark.parametrize("form", FORMS_OF_PAIRS)
def test_every_form_means_the_same(form):
    assert DataConfig.model_validate(form) == PAIRS


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


@pytest.mark.parametrize(
    ("name", "validation"),
    [
        ("HelpSteer3", [("default", "validation")]),
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


def test_own_splits_are_filled_into_blocks():
    config = DataConfig.model_validate(
        {
            "train": {"dataset_name": "HelpSteer3"},
            "validation": {"dataset_name": "Bundled", "name": "length_controlled"},
        }
    )
    assert (config.train[0].split, config.validation[0].split) == ("train", "length_controlled")
    assert DataConfig.model_validate({"train": {"dataset_name": "HelpSteer3"}}).validation == ()


def test_answers_to_other_prompts_are_for_training_alone():
    flat = {"dataset_name": "Bundled", "non_contextual_answer": True}
    config = DataConfig.model_validate(flat)
    assert [d.non_contextual_answer for d in (*config.train, *config.validation)] == [True, False, False]
    assert [d.name for d in config.validation] == ["plain", "length_controlled"]
    train = [{"data_path": "a"}, {"data_path": "b", "non_contextual_answer": False}]
    config = DataConfig.model_validate({"non_contextual_answer": True, "train": train})
    assert [d.non_contextual_answer for d in config.train] == [True, False]


@pytest.mark.parametrize(
    ("raw", "field", "words"),
    [
        ({"validation": {"data_path": "v"}}, "train", "no training data"),
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
        ({"train_data_path": "t", "val_split": "v"}, "val_split", "no validation set"),
        ({"train_data_path": "t", "train": {"data_path": "u"}}, "train_data_path", "contradict"),
        ({"train_data_path": "t", "train": [{"data_path": "u"}, {"data_path": "w"}]}, "train_data_path", "two forms"),
        ({"train_data_path": "t", "dataset_type": "pairs"}, "dataset_type", "not known"),
        ({"train_data_path": "t", "default": {"promt_key": "a"}}, "default.promt_key", "no such key"),
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


# prompts


def sets(**raw):
    return PromptDataConfig.model_validate(raw)


def test_the_forms_of_data_mean_the_same():
    flat = sets(train_data_path="t", val_data_path="v", input_key="q", env_name="math")
    blocks = sets(
        train={"data_path": "t"}, validation={"data_path": "v"}, default={"input_key": "q", "env_name": "math"}
    )
    lists = sets(
        train=[{"data_path": "t", "input_key": "q", "env_name": "math"}],
        validation={"default": {"data_path": "v", "input_key": "q", "env_name": "math"}},
    )
    assert flat == blocks == lists
    assert flat.train[0].environment_names == ("math",)


def test_sets_that_bring_their_own_validation():
    bundled = sets(dataset_name="Bundled")
    assert [(one.split, one.name) for one in (*bundled.train, *bundled.validation)] == [
        ("train", None),
        ("validation", "default"),
    ]
    assert [one.dataset_name for one in sets(dataset_name="DeepScaler").validation] == ["AIME2024"]
    open_math = sets(dataset_name="OpenMathInstruct-2", prompt_file="cot.txt")
    assert [(one.part, one.split_validation_size) for one in (*open_math.train, *open_math.validation)] == [
        ("train", 0.05),
        ("validation", 0.05),
    ]
    given = sets(dataset_name="OpenMathInstruct-2", val_data_path="v")
    assert given.train[0].split_validation_size == 0, "nothing is held out where there is a validation set"


def test_held_out_rows_are_one_set_each_and_only_once():
    config = sets(
        train=[{"data_path": "a", "split_validation_size": 0.1, "weight": 2.0}, {"data_path": "b"},
               {"data_path": "c", "split_validation_size": 0.2, "seed": 7}],
        validation={"data_path": "v"},
    )  # fmt: skip
    held = [(one.name, one.data_path, one.part, one.weight, one.seed) for one in config.validation]
    assert held == [
        ("default", "v", None, 1.0, 42),
        ("held_out", "a", "validation", 1.0, 42),
        ("held_out_2", "c", "validation", 1.0, 7),
    ]
    assert [one.part for one in config.train] == ["train", None, "train"]
    again = PromptDataConfig.model_validate(config.model_dump())
    assert again == config


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({}, "no training data"),
        ({"train": {"dataset_name": "PromptDataset"}}, "needs a data_path"),
        ({"train": {"data_path": "t", "part": "validation"}}, "needs split_validation_size"),
        ({"train": {"data_path": "t"}, "validation": [{"data_path": file, "name": "a"} for file in "vw"]}, "same name"),
        ({"train": {"data_path": "t"}, "default": {"prompt_key": "q"}}, "no such key"),
        ({"train": {"data_path": "t"}, "dataset_type": "rank"}, "dataset_type"),
    ],
)  # fmt: skip
def test_what_data_refuses(raw, words):
    with pytest.raises(ValueError, match=words):
        sets(**raw)
