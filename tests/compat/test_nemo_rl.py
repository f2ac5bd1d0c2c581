"""NeMo RL's own tests of its preference sets, in our words: the assertions of
`test_preference_dataset.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from messages import assistant, user

from treeward.compat import nemo_rl
from treeward.compat.nemo_rl import (
    BinaryPreferenceDataset,
    PreferenceDataset,
    RawDataset,
    RewardModelEnvironment,
    TaskDataSpec,
    create_env,
    get_tokenizer,
    load_dataset_from_path,
    load_preference_dataset,
    register_env,
)
from treeward.errors import ConfigError

PAIRS = [
    ("What is 2+2?", "It is 4.", "I don't know."),
    ("The capital of France?", "Paris.", "London."),
]
FIRST = [
    {"completion": [assistant("It is 4.")], "rank": 0},
    {"completion": [assistant("I don't know.")], "rank": 1},
]


def check(dataset: Any) -> None:
    first = dataset.dataset[0]
    assert first.keys() == {"context", "completions", "task_name"} and len(dataset.dataset) == 2
    assert first["context"] == [user("What is 2+2?")] and first["completions"] == FIRST
    assert first["task_name"] == dataset.task_name == dataset.task_spec.task_name


@pytest.mark.parametrize(
    "keys", [("prompt", "chosen", "rejected"), ("question", "answer1", "answer2")]
)
def test_binary_preferences(keys: tuple[str, str, str], tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    path.write_text(
        json.dumps([dict(zip(keys, pair, strict=True)) for pair in PAIRS]), encoding="utf-8"
    )
    names = dict(zip(("prompt_key", "chosen_key", "rejected_key"), keys, strict=True))
    section = {"dataset_name": "BinaryPreferenceDataset", "data_path": str(path), **names}
    for dataset in (
        load_preference_dataset(section),
        BinaryPreferenceDataset(data_path=str(path), **names),
    ):
        assert (dataset.prompt_key, dataset.chosen_key, dataset.rejected_key) == keys
        check(dataset)


def test_rows_that_are_held_out(tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    rows = [{"prompt": f"{n}?", "chosen": "Yes.", "rejected": "No."} for n in range(40)]
    path.write_text(json.dumps(rows), encoding="utf-8")
    parts = BinaryPreferenceDataset(str(path), split_validation_size=0.25).formatted_ds
    prompts = [{row["context"][0]["content"] for row in parts[name]} for name in parts]
    train, validation = prompts
    assert validation and not train & validation
    assert train | validation == {row["prompt"] for row in rows}


def test_ranked_preferences(tmp_path: Path) -> None:
    path = tmp_path / "ranked.json"
    rows = [
        {
            "context": [user(ask)],
            "completions": [{"rank": i, "completion": [assistant(x)]} for i, x in enumerate(ends)],
        }
        for ask, *ends in PAIRS
    ]
    path.write_text(json.dumps(rows), encoding="utf-8")
    check(load_preference_dataset({"dataset_name": "PreferenceDataset", "data_path": str(path)}))
    check(PreferenceDataset(data_path=str(path), split="train"))
    check(PreferenceDataset(str(path)))
    with pytest.raises(ConfigError, match="data_pth"):
        PreferenceDataset(data_pth=str(path))
    with pytest.raises(ConfigError, match="did you mean PreferenceDataset"):
        load_preference_dataset({"dataset_name": "PreferenceDatset", "data_path": str(path)})


IMPORTS = """
from nemo_rl.algorithms.utils import get_tokenizer, set_seed
from nemo_rl.data import DataConfig, PreferenceDatasetConfig
from nemo_rl.data.datasets.preference_datasets import load_preference_dataset
from nemo_rl.data.datasets.preference_datasets.binary_preference_dataset import BinaryPreferenceDataset
from nemo_rl.data.datasets.preference_datasets.helpsteer3 import HelpSteer3Dataset
from nemo_rl.data.datasets.preference_datasets.preference_dataset import PreferenceDataset
from nemo_rl.data.datasets.preference_datasets.tulu3 import Tulu3PreferenceDataset
from nemo_rl.data.datasets.raw_dataset import RawDataset
from nemo_rl.data.datasets.utils import load_dataset_from_path
from nemo_rl.data.interfaces import DatumSpec, LLMMessageLogType, TaskDataSpec
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from nemo_rl.environments.math_environment import MathEnvironment
from nemo_rl.environments.reward_model_environment import RewardModelEnvironment, RewardModelEnvironmentConfig
from nemo_rl.environments.utils import create_env, register_env
"""


def test_its_imports_run_as_they_are_printed() -> None:
    with pytest.raises(ModuleNotFoundError, match="nemo_rl"):  # it has to be asked for
        exec(IMPORTS, {})
    exec(IMPORTS.replace("nemo_rl", "treeward.compat.nemo_rl"), {})
    nemo_rl.install()
    try:
        exec(IMPORTS, {})
    finally:  # the other tests of this process have none
        for name in [name for name in sys.modules if name.split(".")[0] == "nemo_rl"]:
            del sys.modules[name]


def test_the_attributes_of_the_environment(policy_folder: Path, model_folder: Path) -> None:
    section = {
        "enabled": True,
        "model_name": str(model_folder),
        "tokenizer": {"name": str(model_folder)},
    }
    environment = RewardModelEnvironment(section)
    assert (
        environment.config["tokenizer"] == {"name": str(model_folder)}
        and environment.config["enabled"]
    )
    assert environment.tokenizer.eos_token is not None
    assert environment.task_data_spec.task_name == "reward_model_env"
    environment.shutdown()


def test_a_task_has_the_texts_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Think: {}")
    spec = TaskDataSpec("sums", prompt_file=tmp_path / "prompt.txt")
    other = TaskDataSpec()
    other.copy_defaults(spec)
    assert (spec.prompt, spec.system_prompt, other.prompt, other.task_name) == (
        "Think: {}",
        None,
        "Think: {}",
        None,
    )
    with pytest.raises(FileNotFoundError):
        TaskDataSpec(prompt_file=tmp_path / "missing.txt")


def test_environments_by_registered_names(policy_folder: Path) -> None:
    register_env("sums", "treeward.environments.rules.MathEnvironment")
    environment = create_env("sums", {"num_workers": 1})
    environment.shutdown()
    assert environment.config.workers == 1
    with pytest.raises(ValueError, match="already registered"):
        register_env("sums", "somewhere.Else")


def test_tokenizers_as_its_sections_name_them(policy_folder: Path) -> None:
    messages = [user("Hi"), assistant("Yes")]
    plain = get_tokenizer({"name": str(policy_folder), "chat_template": None})
    assert (
        plain.apply_chat_template(messages, tokenize=False) == "HiYes"
        and plain.pad_token is not None
    )
    own = get_tokenizer({"name": str(policy_folder), "chat_template": "{{ messages[0].content }}!"})
    assert own.apply_chat_template(messages, tokenize=False) == "Hi!"


def test_a_template_of_a_file_and_its_variables(policy_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ mood }} {{ messages[0].content }}", encoding="utf-8")
    section = {"name": str(policy_folder), "chat_template": str(file)}
    section["chat_template_kwargs"] = {"mood": "calm"}
    tokenizer = get_tokenizer(section)
    assert tokenizer.apply_chat_template([user("Hi")], tokenize=False) == "calm Hi"
    with pytest.raises(ConfigError, match="neither a file nor a template"):
        get_tokenizer(section | {"chat_template": "missing.jinja"})


def test_files_and_folders_of_rows(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"a": n} for n in range(4)])
    rows.to_json(tmp_path / "rows.jsonl")
    DatasetDict(train=rows, test=rows.select([0])).save_to_disk(str(tmp_path / "saved"))
    assert load_dataset_from_path(str(tmp_path / "rows.jsonl"))["a"] == [0, 1, 2, 3]
    assert load_dataset_from_path(str(tmp_path / "saved"), data_split="test")["a"] == [0]
    own = RawDataset()
    own.dataset = rows
    own.split_train_validation(1, seed=0)
    assert (len(own.dataset), own.val_dataset and len(own.val_dataset)) == (3, 1)
