"""What scripts and classes for NeMo RL import, under its names.

    from treeward.compat.nemo_rl.environments.reward_model_environment import RewardModelEnvironment

or, where NeMo RL is not installed, as its documents print it:

    from treeward.compat import nemo_rl
    nemo_rl.install()
    from nemo_rl.environments.reward_model_environment import RewardModelEnvironment

`_MODULES` lists the modules and their names. They are treeward's own classes, with the arguments,
fields and attributes that such code uses. The parts of its training loop (`algorithms.rm`,
`data.utils`) have no counterpart: `treeward.train(load_config(file))` runs its file. In NeMo RL's
own loop use `treeward.environments.nemo_rl`.
"""

from __future__ import annotations

import abc
import importlib.util
import random
import sys
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, NotRequired, TypedDict, TypeVar

import datasets
import numpy as np
import torch
from datasets import Dataset
from pydantic import PrivateAttr
from transformers import PreTrainedTokenizerBase

from treeward.config import reward_environments
from treeward.config.data import DataConfig as _DataSection
from treeward.config.load import load_section
from treeward.data.chat_template import find_template
from treeward.data.datasets import RowDataset, open_dataset
from treeward.data.preference import preference_to_dict
from treeward.environments import registry, reward_model
from treeward.environments.interface import EnvironmentReturn as EnvironmentReturn
from treeward.environments.rules import MathEnvironment as MathEnvironment
from treeward.errors import ConfigError
from treeward.model.pretrained import load_tokenizer

LLMMessageLogType = list[dict[str, str | torch.Tensor]]
"""Messages with `role` and `content`, and tensors of the loop, as `token_ids`."""


class DatumSpec(TypedDict):
    """A sample of NeMo RL's loop."""

    message_log: LLMMessageLogType
    length: int
    extra_env_info: dict[str, Any] | None
    loss_multiplier: float
    idx: int
    task_name: NotRequired[str]
    stop_strings: NotRequired[list[str]]


class RewardModelEnvironmentConfig(TypedDict):
    """The keys of `env.reward_model` in NeMo RL. Here only `model_name` is required."""

    model_name: str
    enabled: NotRequired[bool]
    precision: NotRequired[str]
    batch_size: NotRequired[int]
    checkpoint_path: NotRequired[str | None]
    logprob_batch_size: NotRequired[int]
    resources: NotRequired[dict[str, Any]]
    dtensor_cfg: NotRequired[dict[str, Any] | None]
    dynamic_batching: NotRequired[dict[str, Any]]
    sequence_packing: NotRequired[dict[str, Any] | None]
    max_grad_norm: NotRequired[float | None]
    generation: NotRequired[dict[str, Any] | None]
    tokenizer: NotRequired[dict[str, Any]]
    reward_model_cfg: NotRequired[dict[str, Any]]
    max_model_len: NotRequired[int]


class PreferenceDatasetConfig(TypedDict, total=False):
    """The section of a set of comparisons."""

    dataset_name: str
    data_path: str
    subset: str | None
    split: str | None
    prompt_key: str
    chosen_key: str
    rejected_key: str
    prompt_file: str | None
    system_prompt_file: str | None


class DataConfig(TypedDict, total=False):
    """The section `data`."""

    max_input_seq_length: int | None
    shuffle: bool
    num_workers: int
    train: PreferenceDatasetConfig | list[PreferenceDatasetConfig]
    validation: PreferenceDatasetConfig | list[PreferenceDatasetConfig] | None
    default: PreferenceDatasetConfig | None


@dataclass
class TaskDataSpec:
    """The name of a task and its prompt files, whose texts are `prompt` and `system_prompt`.

    Raises `FileNotFoundError` for a file that does not exist.
    """

    task_name: str | None = None
    prompt_file: str | PathLike[str] | None = None
    system_prompt_file: str | PathLike[str] | None = None
    num_frames: int | None = None
    video_sampling_style: str | None = None
    video_target_num_patches: int | None = None
    video_temporal_patch_size: int | None = None
    video_maintain_aspect_ratio: bool | None = None
    min_generation_tokens: int | None = None

    def __post_init__(self) -> None:
        self.prompt = _text_of(self.prompt_file)
        self.system_prompt = _text_of(self.system_prompt_file)

    def copy_defaults(self, from_spec: TaskDataSpec) -> None:
        """Take the texts of another task where this one has none."""
        if self.prompt is None:
            self.prompt = from_spec.prompt
        if self.system_prompt is None:
            self.system_prompt = from_spec.system_prompt


def _text_of(path: str | PathLike[str] | None) -> str | None:
    return None if path is None else Path(path).read_text(encoding="utf-8")


class RawDataset:
    """The base of a class of one's own: it sets `dataset` and `task_name`, and gets its section by
    `set_task_spec`."""

    dataset: Dataset
    task_name: str
    val_dataset: Dataset | None = None

    def set_task_spec(self, data_config: Mapping[str, Any]) -> None:
        """Keep the section as `data_config`, and make `task_spec` of it."""
        self.data_config = data_config
        settings = {name: data_config.get(name) for name in TaskDataSpec.__dataclass_fields__}
        settings["task_name"] = self.task_name
        self.task_spec = TaskDataSpec(**settings)

    def split_train_validation(self, test_size: float, seed: int) -> None:
        """Hold out a share of the rows, or from 1 on a number of them, as `val_dataset`."""
        if test_size <= 0:
            return
        if test_size >= 1:
            test_size = int(test_size)  # `datasets` takes 1.0 for a share
        parts = self.dataset.train_test_split(test_size, seed=seed)
        self.dataset = parts["train"]
        self.val_dataset = parts["test"]


def load_dataset_from_path(
    data_path: str, data_subset: str | None = None, data_split: str | None = "train"
) -> Any:
    """A file (arrow, csv, json, jsonl, parquet, txt), a dataset of the hub, or a folder of
    `save_to_disk`.

    `data_split`: None or "" for "train". Raises what `datasets` raises.
    """
    kinds = {
        "json": "json",
        "jsonl": "json",
        "txt": "text",
        "arrow": "arrow",
        "csv": "csv",
        "parquet": "parquet",
    }
    folder = Path(data_path)
    is_saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    suffix = folder.suffix.removeprefix(".")
    if suffix in kinds:
        if data_subset is not None:
            raise ConfigError(
                "a file has no subsets", field="data_subset", got=data_subset, need="null"
            )
        loaded = datasets.load_dataset(kinds[suffix], data_files=data_path)
    elif is_saved:
        loaded = datasets.load_from_disk(data_path)
    else:
        loaded = datasets.load_dataset(data_path, data_subset)
    if isinstance(loaded, Mapping):
        return loaded[data_split or "train"]
    return loaded


_Metadata = TypeVar("_Metadata")


class EnvironmentInterface(abc.ABC, Generic[_Metadata]):
    """The base of an environment of one's own, which `env.NAME.type` names by its dotted path."""

    @abc.abstractmethod
    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[_Metadata]
    ) -> EnvironmentReturn:
        """The rewards of completions: a tensor (B,), or `{"reward/NAME": (B,)}`."""

    @abc.abstractmethod
    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """The batch, and the metrics of it."""


class _GivenSection(reward_environments.RewardModelEnvironmentConfig):
    """The section, whose keys can also be read as those of the dictionary that was given."""

    _given: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self._given[key]


class RewardModelEnvironment(reward_model.RewardModelEnvironment):
    """treeward's environment, with the attributes that NeMo RL's has."""

    section = _GivenSection

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.config._given = dict(config)  # type: ignore[attr-defined]
        self.task_data_spec = TaskDataSpec(task_name=self.name)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model in this process. Raises `ConfigError` if it is in another
        one."""
        return self._here("tokenizer").scorer.members[0].renderer.tokenizer


_REGISTERED: dict[str, str] = {}


def register_env(env_name: str, actor_class_fqn: str) -> None:
    """Let `create_env` find a class by a name. Raises `ValueError` for a name that is taken."""
    if env_name in _REGISTERED:
        raise ValueError(f"Env name {env_name} already registered")
    _REGISTERED[env_name] = actor_class_fqn


def create_env(env_name: str, env_config: Mapping[str, Any]) -> Any:
    """The environment of a section, in this process. Raises `ConfigError` for an unknown name."""
    section = {key: value for key, value in env_config.items() if key != "enabled"}
    return registry.make_environment(_REGISTERED.get(env_name, env_name), section)


def get_tokenizer(tokenizer_config: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer of a section `tokenizer`, with a token for padding.

    `chat_template`: without the key or "default", the tokenizer's own; null, the contents alone,
    one after the other; else a template, or the path of a file that holds one.
    `chat_template_kwargs`: its `apply_chat_template` passes them to the template. Raises
    `ConfigError` for a template that is neither.
    """
    tokenizer = load_tokenizer(str(tokenizer_config["name"]))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    template = tokenizer_config.get("chat_template", "default")
    if template is None:
        template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    if template != "default":
        tokenizer.chat_template, _ = find_template(tokenizer, template)
    variables = tokenizer_config.get("chat_template_kwargs")
    if variables:
        tokenizer.apply_chat_template = partial(  # type: ignore[method-assign]
            tokenizer.apply_chat_template, **variables
        )
    return tokenizer


def set_seed(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class BatchedDataDict(UserDict[str, Any]):
    """A dictionary of columns: tensors and lists with one entry for each sample."""

    @property
    def size(self) -> int:
        """The number of samples; 0 without columns."""
        return len(next(iter(self.data.values()), ()))


class _PreferenceSets:
    """The attributes of NeMo RL's dataset classes: `task_spec`, and `formatted_ds` of "train" and
    "validation", each a `datasets.Dataset` of rows with `context` and ranked `completions`, None
    without validation data; and `dataset`, the first of them, with `task_name`, as its newer
    classes have it.

    The arguments are those of NeMo RL's first classes in their order, those of its newer ones by
    name (`data_path`, `split`), and further keys of the section `data`. Raises `ConfigError` for
    what they cannot mean, `DataError` for a row that is wrong. A configuration does not hold all
    rows in memory.
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
        arguments = {
            "train_data_path": train_data_path,
            "val_data_path": val_data_path,
            "prompt_key": prompt_key,
            "chosen_key": chosen_key,
            "rejected_key": rejected_key,
            "train_split": train_split,
            "val_split": val_split,
        }
        section: dict[str, Any] = {"dataset_name": self.dataset_name}
        for key, value in arguments.items():
            if value is not None:
                section[key] = value
        # The names of the newer classes.
        older = {"data_path": "train_data_path", "split": "train_split"}
        for key, value in keys.items():
            # A key that nobody knows is refused by the section, with the nearest name.
            section[older.get(key, key)] = value
        data = load_section(_DataSection, section, where=type(self).__name__)
        # Both are opened before a row is read: a mistake in either is told at once.
        train, *validation = map(open_dataset, (*data.train, *data.validation))
        held_out = _rows(validation[0]) if validation else None
        self.formatted_ds: dict[str, Dataset] = {"train": _rows(train), "validation": held_out}
        self.task_name = train.task_name
        self.task_spec = TaskDataSpec(
            self.task_name, train.config.prompt_file, train.config.system_prompt_file
        )
        self.dataset = self.formatted_ds["train"].select_columns(
            ["context", "completions", "task_name"]
        )
        self.prompt_key = train.config.prompt_key
        self.chosen_key = train.config.chosen_key
        self.rejected_key = train.config.rejected_key


def load_preference_dataset(data_config: Mapping[str, Any]) -> _PreferenceSets:
    """The set that NeMo RL's section of one dataset describes. Raises as the classes do."""
    classes = {cls.dataset_name: cls for cls in _PreferenceSets.__subclasses__()}
    return classes.get(data_config.get("dataset_name", ""), PreferenceDataset)(**data_config)


def _rows(dataset: RowDataset) -> Dataset:
    rows = []
    for row in dataset.rows():
        preference = dataset.to_preference(row)
        if preference is None:
            continue
        # A loop over the set would choose the part too, and apply the prompt files, which are for
        # the reader of `task_spec`.
        if dataset.is_of_part(preference.context or preference.completions[0].messages):
            rows.append(preference_to_dict(preference))
    # A content is a text or a list of parts, which one column of Arrow cannot hold.
    return Dataset.from_list(rows, on_mixed_types="use_json")


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


_PREFERENCES = "data.datasets.preference_datasets"
_MODULES: Mapping[str, tuple[object, ...]] = {
    "environments.reward_model_environment": (RewardModelEnvironment, RewardModelEnvironmentConfig),
    "environments.interfaces": (EnvironmentInterface, EnvironmentReturn),
    "environments.utils": (register_env, create_env),
    "environments.math_environment": (MathEnvironment,),
    "data": (PreferenceDatasetConfig, DataConfig),
    "data.interfaces": (TaskDataSpec, DatumSpec),
    "data.datasets.raw_dataset": (RawDataset,),
    "data.datasets.utils": (load_dataset_from_path,),
    _PREFERENCES: (load_preference_dataset,),
    f"{_PREFERENCES}.preference_dataset": (PreferenceDataset,),
    f"{_PREFERENCES}.binary_preference_dataset": (BinaryPreferenceDataset,),
    f"{_PREFERENCES}.helpsteer3": (HelpSteer3Dataset,),
    f"{_PREFERENCES}.tulu3": (Tulu3PreferenceDataset,),
    "algorithms.utils": (get_tokenizer, set_seed),
    "distributed.batched_data_dict": (BatchedDataDict,),
}
"""NeMo RL's modules, and what each has here."""


def install() -> None:
    """Make `import nemo_rl` mean these modules, in this process. Raises `ConfigError` where NeMo RL
    is installed."""
    if "nemo_rl" not in sys.modules and importlib.util.find_spec("nemo_rl") is not None:
        raise ConfigError(
            "NeMo RL is installed",
            where="nemo_rl.install()",
            need="a Python without it: its own modules would be hidden",
            fix="import from nemo_rl without install()",
        )
    _add_modules("nemo_rl", ModuleType("nemo_rl"))


def _add_modules(root: str, package: ModuleType) -> None:
    """Put the modules of `_MODULES` and their parents under `root` where Python looks for imported
    modules."""
    sys.modules[root] = package
    package.__path__ = []  # a module with a path may have others within
    for path, members in _MODULES.items():
        parent = package
        name = root
        for part in path.split("."):
            name = f"{name}.{part}"
            module = sys.modules.setdefault(name, ModuleType(name))
            module.__path__ = []
            setattr(parent, part, module)
            parent = module
        for member in members:
            setattr(parent, member.__name__, member)  # type: ignore[attr-defined]
    # NeMo RL's package has the classes of its modules too.
    preferences = sys.modules[f"{root}.{_PREFERENCES}"]
    for name in ("preference_dataset", "binary_preference_dataset", "helpsteer3", "tulu3"):
        [cls] = _MODULES[f"{_PREFERENCES}.{name}"]
        setattr(preferences, cls.__name__, cls)  # type: ignore[attr-defined]
    # An alias of a type has no name of its own.
    interfaces: Any = sys.modules[f"{root}.data.interfaces"]
    interfaces.LLMMessageLogType = LLMMessageLogType


_add_modules(__name__, sys.modules[__name__])
