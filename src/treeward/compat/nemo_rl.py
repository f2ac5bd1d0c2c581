"""What scripts for NeMo RL's reward models import, under its names.

    from treeward.compat.nemo_rl import HelpSteer3Dataset, RewardModelEnvironment, TaskDataSpec

| in NeMo RL | here |
|---|---|
| `nemo_rl.environments.reward_model_environment` | `RewardModelEnvironment` |
| `nemo_rl.environments.interfaces` | `EnvironmentReturn` |
| `nemo_rl.data.interfaces` | `TaskDataSpec`, `LLMMessageLogType` |
| `nemo_rl.data.datasets.preference_datasets` | the four dataset classes, `load_preference_dataset` |

These are treeward's own classes, with the arguments and fields that such scripts use; NeMo RL need not be installed. In
NeMo RL's own loop use `treeward.environments.nemo_rl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from datasets import Dataset

from treeward.config.data import DataConfig
from treeward.config.load import load_section
from treeward.data.datasets import RowDataset, open_dataset
from treeward.data.preference import preference_to_dict
from treeward.environments.interface import EnvironmentReturn as EnvironmentReturn
from treeward.environments.reward_model import RewardModelEnvironment as RewardModelEnvironment

LLMMessageLogType = list[dict[str, str | torch.Tensor]]
"""Messages with `role` and `content`, and tensors of the loop, as `token_ids`."""


@dataclass(frozen=True)
class TaskDataSpec:
    """The name of a task and its prompt files."""

    task_name: str
    prompt_file: str | None = None
    system_prompt_file: str | None = None


class _PreferenceSets:
    """The attributes of NeMo RL's dataset classes: `task_spec`, and `formatted_ds` of "train" and "validation", each a
    `datasets.Dataset` of rows with `context` and ranked `completions`, None without validation data; and `dataset`, the
    first of them, with `task_name`, as its newer classes have it.

    The arguments are those of NeMo RL's first classes in their order, those of its newer ones by name (`data_path`,
    `split`), and further keys of the section `data`. Raises `ConfigError` for what they cannot mean, `DataError` for a
    row that is wrong. A configuration does not hold all rows in memory.
    """

    dataset_name: ClassVar[str]

    def __init__(
        self,
        train_data_path: str | None = None,
        val_data_path: str | None = None,
        prompt_key: str | None = None,
        chosen_key: str | None = None,
        rejected_key: str | None = None,
        train_split: str | None = None,
        val_split: str | None = None,
        **keys: Any,
    ) -> None:
        arguments = {key: value for key, value in locals().items() if isinstance(value, str)}
        newer = {"data_path": "train_data_path", "split": "train_split"}
        section = {"dataset_name": self.dataset_name, **arguments, **{newer.get(key, key): keys[key] for key in keys}}
        data = load_section(DataConfig, section, where=type(self).__name__)
        train, *validation = (open_dataset(section) for section in (*data.train, *data.validation))
        held_out = _rows(validation[0]) if validation else None
        self.formatted_ds: dict[str, Dataset] = {"train": _rows(train), "validation": held_out}
        self.task_name = train.task_name
        self.task_spec = TaskDataSpec(self.task_name, train.config.prompt_file, train.config.system_prompt_file)
        self.dataset = self.formatted_ds["train"].select_columns(["context", "completions", "task_name"])
        self.prompt_key = train.config.prompt_key
        self.chosen_key = train.config.chosen_key
        self.rejected_key = train.config.rejected_key


def load_preference_dataset(data_config: Mapping[str, Any]) -> _PreferenceSets:
    """The set that NeMo RL's section of one dataset describes. Raises as the classes do."""
    classes = {cls.dataset_name: cls for cls in _PreferenceSets.__subclasses__()}
    return classes.get(data_config.get("dataset_name", ""), PreferenceDataset)(**data_config)


def _rows(dataset: RowDataset) -> Dataset:
    preferences = (dataset.to_preference(row) for row in dataset.rows())
    rows = [preference_to_dict(preference) for preference in preferences if preference is not None]
    return Dataset.from_list(rows, on_mixed_types="use_json")  # contents are texts or lists of parts


class PreferenceDataset(_PreferenceSets):
    """Rows in the rank format: `context` and `completions` with ranks."""

    dataset_name = "PreferenceDataset"


class BinaryPreferenceDataset(_PreferenceSets):
    """Rows of a prompt, a chosen and a rejected completion."""

    dataset_name = "BinaryPreferenceDataset"


class HelpSteer3Dataset(_PreferenceSets):
    """nvidia/HelpSteer3 from the hub, or copies of its splits."""

    dataset_name = "HelpSteer3"


class Tulu3PreferenceDataset(_PreferenceSets):
    """The preference mixture of Tulu 3 8B from the hub, or a copy; it has no validation split."""

    dataset_name = "Tulu3Preference"
