"""The `data` section of both kinds of run: its forms, and the sets that bring their own
validation."""

import pytest

from treeward.config.data import DataConfig, PromptDataConfig
from treeward.config.load import load_section

BINARY = {"dataset_name": "BinaryPreferenceDataset", "prompt_key": "q"}
VALIDATION = [
    {"data_path": "a", "name": "A", "split": "v"},
    {"data_path": "b", "name": "B", "split": "v"},
]
PAIRS = DataConfig.model_validate(
    {
        "train": [BINARY | {"data_path": "t", "split": "s"}],
        "validation": [BINARY | one for one in VALIDATION],
    }
)


def comparisons(**raw):
    return load_section(DataConfig, raw, where="data")


@pytest.mark.parametrize(
    "form",
    [
        BINARY | {"train_data_path": "t", "train_split": "s",
                  "val_data_paths": {"A": "a", "B": "b"}, "val_split": "v"},
        {
            "train": [{"data_path": "t", "split": "s"}],
            "validation": [{"data_path": "a", "name": "A"}, {"data_path": "b", "name": "B"}],
            "default": BINARY | {"split": "v", "prompt_file": None,
                                 "processor": "preference_preprocessor"},
        },
        {
            "train": {"data_path": "t", "split": "s", "env_name": "x"},
            "validation": {"A": {"data_path": "a", "split": "v"},
                           "B": {"data_path": "b", "split": "v"}},
            "default": BINARY,
        },
        BINARY | {
            "train": {"data_path": "t", "split": "s"}, "val_split": "v",
            "validation": [{"data_path": "a", "name": "A"}, {"data_path": "b", "name": "B"}],
        },
        BINARY | {
            "train": {"data_path": "t", "split": "s"}, "validation": VALIDATION[0],
            "val_data_paths": {"B": "b"},
            "val_split": "v",
        },
    ],
)  # fmt: skip
def test_every_form_means_the_same(form):
    assert comparisons(**form) == PAIRS


def test_the_column_of_a_rating_may_stand_beside_the_paths() -> None:
    config = comparisons(
        train_data_path="rated.jsonl", val_data_path="held.jsonl", rating_key="stars"
    )
    assert [one.rating_key for one in (*config.train, *config.validation)] == ["stars", "stars"]


@pytest.mark.parametrize(
    ("name", "validation"),
    [
        ("HelpSteer3Dataset", [("default", "validation")]),
        ("Bundled", [("plain", "validation"), ("length_controlled", "length_controlled")]),
    ],
)
def test_sets_that_bring_their_own_data(name, validation):
    for raw in ({"dataset_name": name}, {"default": {"dataset_name": name}}):
        config = comparisons(**raw)
        assert [(d.dataset_name, d.data_path, d.split) for d in config.train] == [
            (name, None, "train")
        ]
        assert [(d.name, d.split) for d in config.validation] == validation


def test_own_splits_are_filled_into_blocks():
    blocks = {"train": {"dataset_name": "HelpSteer3"}}
    assert comparisons(**blocks).validation == ()
    config = comparisons(
        **blocks, validation={"dataset_name": "Bundled", "name": "length_controlled"}
    )
    assert (config.train[0].split, config.validation[0].split) == ("train", "length_controlled")


def sets(**raw):
    return load_section(PromptDataConfig, raw, where="data")


def test_the_forms_of_prompts_mean_the_same():
    asked = {"input_key": "q", "env_name": "math"}
    flat = sets(train_data_path="t", val_data_path="v", **asked)
    assert flat == sets(train={"data_path": "t"}, validation={"data_path": "v"}, default=asked)
    assert flat == sets(
        train=[{"data_path": "t"} | asked], validation={"default": {"data_path": "v"} | asked}
    )
    assert flat.train[0].env_name == "math"


def test_prompts_that_bring_their_own_validation():
    bundled = sets(dataset_name="Bundled")
    own = [(d.split, d.name) for d in (*bundled.train, *bundled.validation)]
    assert own == [("train", None), ("validation", "default")]
    (aime,) = sets(dataset_name="DeepScaler").validation
    assert (aime.dataset_name, aime.split) == ("AIME2024", "train")
    open_math = sets(dataset_name="OpenMathInstruct-2", prompt_file="cot.txt")
    parts = [(d.part, d.split_validation_size) for d in (*open_math.train, *open_math.validation)]
    assert parts == [("train", 0.05), ("validation", 0.05)]
    given = sets(dataset_name="OpenMathInstruct-2", val_data_path="v")
    assert given.train[0].split_validation_size == 0, (
        "nothing is held out where there is a validation set"
    )


def test_held_out_rows_are_one_set_each_and_only_once():
    config = sets(
        train=[{"data_path": "a", "split_validation_size": 0.1, "weight": 2.0}, {"data_path": "b"},
               {"data_path": "c", "split_validation_size": 0.2, "seed": 7}],
        validation={"data_path": "v"},
    )  # fmt: skip
    assert [(d.name, d.data_path, d.part, d.weight, d.seed) for d in config.validation] == [
        ("default", "v", None, 1.0, 42),
        ("held_out", "a", "validation", 1.0, 42),
        ("held_out_2", "c", "validation", 1.0, 7),
    ]
    assert [d.part for d in config.train] == ["train", None, "train"]
    assert sets(**config.model_dump(mode="json")) == config


def test_comparisons_may_be_held_out() -> None:
    """In both forms; the held-out rows are the unnamed validation set, if there is no other."""
    keys = {"prompt_key": "question", "split_validation_size": 0.1}
    blocks = {"train": {"data_path": "own.csv", **keys}}
    for config in (comparisons(train_data_path="own.csv", **keys), comparisons(**blocks)):
        (train,), (held_out,) = config.train, config.validation
        assert (train.part, held_out.part, held_out.name) == ("train", "validation", "default")
        assert (held_out.data_path, held_out.prompt_key) == ("own.csv", "question")
        assert comparisons(**config.model_dump(mode="json")) == config, "it is saved and read again"
    both = comparisons(**blocks, validation={"data_path": "val.csv"})
    assert [one.name for one in both.validation] == ["default", "held_out"]


def test_names_between_commas_have_no_white_space() -> None:
    """YAML's `attributes: helpfulness, correctness` is one text."""
    config = DataConfig.model_validate(
        {
            "train": [{"data_path": "t", "attributes": "helpfulness, correctness"}],
            "labels": "a.jsonl , b.jsonl",
        }
    )
    assert config.train[0].attributes == ("helpfulness", "correctness")
    assert config.labels == ("a.jsonl", "b.jsonl")
