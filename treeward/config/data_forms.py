"""The accepted forms of the `data` section, turned into the one that `DataConfig` has.

Flat, as in NeMo RL's reward-model guide:

    dataset_name: PreferenceDataset          # or, older, dataset_type: rank | binary
    train_data_path: train.jsonl
    val_data_paths: {plain: plain.jsonl, hard: hard.jsonl}

Blocks, as in its newer guides; `default` holds what the other blocks leave out:

    train: {data_path: train.jsonl}          # or a list of blocks
    validation: {data_path: val.jsonl}       # or a list, or a mapping of names to blocks
    default: {dataset_name: BinaryPreferenceDataset, prompt_key: context}

A set that brings its own data needs no paths: `dataset_name: HelpSteer3` gives the training and the validation sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from treeward.config.base import nearest_name
from treeward.errors import ConfigError

__all__ = ["FORM_KEYS", "PREFERENCES", "PROMPTS", "DataForm", "normalise_data"]

Block = dict[str, Any]

_FLAT_KEYS = (
    "dataset_name",
    "subset",
    "prompt_key",
    "chosen_key",
    "rejected_key",
    "prompt_file",
    "system_prompt_file",
    "kwargs",
)
_TRAIN_KEYS = ("non_contextual_answer",)
_PATH_KEYS = ("train_data_path", "train_split", "val_data_path", "val_data_paths", "val_split", "default")
FORM_KEYS = (*_FLAT_KEYS, *_TRAIN_KEYS, "dataset_type", *_PATH_KEYS)
"""The keys of `data` that only the other forms have."""

_DATASET_TYPES = {"rank": "PreferenceDataset", "binary": "BinaryPreferenceDataset"}


class _OwnSplits(NamedTuple):
    train: str | None
    validation: Mapping[str, str]
    """Name of the validation set -> split."""


_OWN_SPLITS = {
    "HelpSteer3": _OwnSplits("train", {"default": "validation"}),
    "Tulu3Preference": _OwnSplits("train", {}),
    "HHTranscripts": _OwnSplits("train", {"default": "test"}),
    "hh-rlhf": _OwnSplits("train", {"default": "test"}),
    "Bundled": _OwnSplits("train", {"plain": "validation", "length_controlled": "length_controlled"}),
}
_OWN_SPLITS |= {f"{name}Dataset": _OWN_SPLITS[name] for name in ("HelpSteer3", "Tulu3Preference")}


class DataForm(NamedTuple):
    """What is particular to one kind of data."""

    flat_keys: tuple[str, ...]
    own_splits: Mapping[str, _OwnSplits]
    foreign_keys: tuple[str, ...]
    """Keys of other toolkits that `default` may have."""
    dataset_types: Mapping[str, str]
    """What `dataset_type` may be -> the `dataset_name` that it means."""
    train_keys: tuple[str, ...] = ()
    """Flat keys that only training sets take."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of `data` that only the other forms have."""
        return (*self.flat_keys, *self.train_keys, *_PATH_KEYS)


PREFERENCES = DataForm(_FLAT_KEYS, _OWN_SPLITS, ("processor", "env_name"), _DATASET_TYPES, _TRAIN_KEYS)
PROMPTS = DataForm(
    (
        *("dataset_name", "subset", "input_key", "output_key", "prompt_file", "system_prompt_file"),
        *("processor", "env_name", "max_samples", "kwargs"),
    ),
    {
        "OpenMathInstruct-2": _OwnSplits(None, {}),
        "DeepScaler": _OwnSplits(None, {}),
        "Bundled": _OwnSplits("train", {"default": "validation"}),
    },
    ("repeat", "download_dir"),
    {},
)


def normalise_data(raw: Mapping[str, Any], block_keys: Sequence[str], form: DataForm = PREFERENCES) -> dict[str, Any]:
    """Return `raw` with `train` and `validation` as lists of blocks and without the keys of the other forms.

    `block_keys` are the keys that a block may have. Keys that no form knows are left in place for the schema to
    refuse. Raises `ConfigError`, its `field` relative to `data`, for keys that contradict each other and for validation
    sets that cannot be told apart.
    """
    data = dict(raw)
    shared = _shared_values(data, block_keys, form)
    for_training = {key: data.pop(key) for key in form.train_keys if key in data}
    has_train_block = data.get("train") is not None
    train = _blocks(data.pop("train", None), "train", shared)
    validation = _validation_blocks(data.pop("validation", None), shared, block_keys)
    _add_flat_train(train, data.pop("train_data_path", None), data.pop("train_split", None), shared)
    _add_flat_validation(validation, data, shared)
    own = form.own_splits.get(shared.get("dataset_name", ""))
    if own is not None and not has_train_block:
        train = train or [dict(shared)]
        if not validation and train[0].get("data_path") is None:
            split = data.pop("val_split", None)
            validation = [
                {**shared, "name": name, "split": split or own_split} for name, own_split in own.validation.items()
            ]
    if not train and "." in shared.get("dataset_name", ""):
        train = [dict(shared)]  # a class by its dotted path knows where its data lies
    if data.pop("val_split", None) is not None and not validation:
        raise ConfigError(
            "val_split is given, but there is no validation set",
            field="val_split",
            fix="give data.val_data_path too, or remove val_split",
        )
    for block in train:
        _fill_own_split(block, form, is_train=True)
        block.update({key: value for key, value in for_training.items() if key not in block})
    for block in validation:
        _fill_own_split(block, form, is_train=False)
    return {**data, "train": train, "validation": _with_names(validation)}


def _shared_values(data: Block, block_keys: Sequence[str], form: DataForm) -> Block:
    """Pop the flat keys and the `default` block; what every block takes unless it says otherwise."""
    flat = {key: data.pop(key) for key in form.flat_keys if key in data}
    flat = {key: value for key, value in flat.items() if value is not None}
    kind = data.pop("dataset_type", None) if form.dataset_types else None
    if kind is not None:
        if kind not in form.dataset_types:
            raise ConfigError("dataset_type is not known", field="dataset_type", got=kind, need="rank or binary")
        _set_once(flat, "dataset_name", form.dataset_types[kind], "data.dataset_type", "data.dataset_name")
    default = data.pop("default", None)
    if default is None:
        return flat
    if not isinstance(default, Mapping):
        raise ConfigError("default is not a block", field="default", got=default, need="{dataset_name: ...}")
    for key, value in default.items():
        if key not in block_keys and key not in form.foreign_keys:
            near = nearest_name(key, block_keys)
            raise ConfigError(
                "there is no such key",
                field=f"default.{key}",
                got=value,
                need=f"one of {', '.join(block_keys)}",
                fix=f"did you mean data.default.{near}?" if near else None,
            )
        if value is not None:
            _set_once(flat, key, value, f"data.default.{key}", f"data.{key}")
    return flat


def _blocks(value: Any, where: str, shared: Block) -> list[Block]:
    """One block or a list of them, completed by the shared values."""
    if value is None:
        return []
    items = value if isinstance(value, list | tuple) else [value]
    items = [item.model_dump(exclude_unset=True) if isinstance(item, BaseModel) else item for item in items]
    for item in items:
        if not isinstance(item, Mapping):
            raise ConfigError(
                "a set of data is not a block", field=where, got=item, need="{data_path: ..., ...} or a list of those"
            )
    return [{**shared, **item} for item in items]


def _validation_blocks(value: Any, shared: Block, block_keys: Sequence[str]) -> list[Block]:
    names_to_blocks = (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(block, Mapping) for block in value.values())
        and not set(value) & set(block_keys)
    )
    if not names_to_blocks:
        return _blocks(value, "validation", shared)
    for name, block in value.items():
        if block.get("name") not in (None, name):
            raise ConfigError(
                "a validation set has two names",
                field=f"validation.{name}.name",
                got=block["name"],
                need=f"{name}, or no such key",
            )
    return [{**shared, **block, "name": str(name)} for name, block in value.items()]


def _add_flat_train(train: list[Block], path: Any, split: Any, shared: Block) -> None:
    if path is None and split is None:
        return
    if len(train) > 1:
        raise ConfigError(
            "training data is given in two forms",
            field="train_data_path" if path is not None else "train_split",
            got=path if path is not None else split,
            need="only the list data.train",
            fix="add the set to data.train",
        )
    if not train:
        train.append(dict(shared))
    if path is not None:
        _set_once(train[0], "data_path", path, "data.train_data_path", "data.train.data_path")
    if split is not None:
        _set_once(train[0], "split", split, "data.train_split", "data.train.split")


def _add_flat_validation(validation: list[Block], data: Block, shared: Block) -> None:
    """Add the sets of `val_data_path` and `val_data_paths`; `val_split` is left in `data` if nothing takes it."""
    paths: list[tuple[str | None, Any]] = []
    path, named_paths = data.pop("val_data_path", None), data.pop("val_data_paths", None)
    if path is not None:
        paths.append((None, path))
    if isinstance(named_paths, Mapping):
        paths.extend((str(name), item) for name, item in named_paths.items())
    elif named_paths is not None:
        raise ConfigError(
            "val_data_paths is not a mapping",
            field="val_data_paths",
            got=named_paths,
            need="{name: path, ...}",
            fix="for one unnamed set use data.val_data_path" if isinstance(named_paths, str) else None,
        )
    flat: list[Block] = [{**shared, "data_path": item} | ({"name": name} if name else {}) for name, item in paths]
    split = data.get("val_split")
    if split is not None and (flat or len(validation) == 1):
        for block in flat or validation:
            _set_once(block, "split", split, "data.val_split", "data.validation.split")
        del data["val_split"]
    validation.extend(flat)


def _fill_own_split(block: Block, form: DataForm, *, is_train: bool) -> None:
    own = form.own_splits.get(str(block.get("dataset_name")))
    if own is None or block.get("data_path") is not None or block.get("split") is not None:
        return
    if block.get("split_validation_size"):
        return  # both parts are of one split
    if is_train:
        block["split"] = own.train
    elif own.validation:
        by_name = block.get("name")
        block["split"] = own.validation.get(str(by_name), next(iter(own.validation.values())))
    else:
        raise ConfigError(
            f"{block['dataset_name']} has no validation split",
            field="validation",
            fix="give a split, or another set to validate on",
        )


def _with_names(validation: list[Block]) -> list[Block]:
    unnamed = [i for i, block in enumerate(validation) if block.get("name") is None]
    if len(unnamed) > 1:
        raise ConfigError(
            "several validation sets have no name",
            field=f"validation[{unnamed[1]}].name",
            got="no name",
            need="a name for each, at most one of them left out (it is called default)",
        )
    return [{**block, "name": "default"} if i in unnamed else block for i, block in enumerate(validation)]


def _set_once(block: Block, key: str, value: Any, spelling: str, other_spelling: str) -> None:
    """Set `key` unless another spelling of it has already said something else."""
    if block.get(key) not in (None, value):
        raise ConfigError(
            f"{spelling} and {other_spelling} contradict each other",
            field=spelling.removeprefix("data."),
            got=f"{value!r} and {block[key]!r}",
            need="one of the two",
            fix=f"remove {spelling} or {other_spelling}",
        )
    block[key] = value
