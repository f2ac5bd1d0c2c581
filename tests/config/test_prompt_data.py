"""The `data` section of a run of GRPO: its forms, the sets that bring or hold out a validation set, what it refuses."""

import pytest

from treeward.config.data import PromptDataConfig, PromptSetConfig


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
        ({"train": {"data_path": "t", "split_validation_size": 1.0}}, "split_validation_size"),
        ({"train": {"data_path": "t", "part": "validation"}}, "needs split_validation_size"),
        ({"train": {"data_path": "t"}, "validation": {"data_path": "v", "weight": 2}}, "has a weight"),
        ({"train": {"data_path": "t"}, "validation": [{"data_path": file, "name": "a"} for file in "vw"]}, "same name"),
        ({"train": {"data_path": "t", "processor": "sft_processor"}}, "processor"),
        ({"train": {"data_path": "t", "env_name": {"math": float("inf")}}}, "env_name"),
        ({"train": {"data_path": "t"}, "default": {"prompt_key": "q"}}, "no such key"),
        ({"train": {"data_path": "t"}, "dataset_type": "rank"}, "dataset_type"),
    ],
)  # fmt: skip
def test_what_data_refuses(raw, words):
    with pytest.raises(ValueError, match=words):
        sets(**raw)


def test_null_is_the_default():
    assert PromptSetConfig.model_validate({"data_path": "t", "weight": None, "input_key": None}).weight == 1.0
