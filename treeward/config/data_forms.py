"""The accepted forms of the `data` section, turned into lists of blocks, the form of `DataConfig`.

Flat, as in NeMo RL's reward-model guide:

    dataset_name: PreferenceDataset          # or, older, dataset_type: rank | binary
    train_data_path: train.jsonl
    val_data_paths: {plain: plain.jsonl, hard: hard.jsonl}

Blocks, as in its newer guides; `default` holds the keys that the other blocks leave out:

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

__all__ = ["PREFERENCES", "PROMPTS", "DataForm", "normalise_data"]

Block = dict[str, Any]

_PATH_KEYS = ("train_data_path", "train_split", "val_data_path", "val_data_paths", "val_split", "default")
_DATASET_TYPES = {"rank": "PreferenceDataset", "binary": "BinaryPreferenceDataset"}


class DataForm(NamedTuple):
    """What differs between the two kinds of data, comparisons and prompts."""

    flat_keys: tuple[str, ...]
    """Keys of a block that may stand beside the blocks, for all of them."""
    own_splits: Mapping[str, Mapping[str | None, str | None]]
    """Sets that bring their own data: name of a validation set -> its split; under None the training split."""
    train_keys: tuple[str, ...] = ()
    """Flat keys that only training sets take."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of `data` that only these forms have."""
        return (*self.flat_keys, *self.train_keys, "dataset_type", *_PATH_KEYS)


PREFERENCES = DataForm(
    flat_keys=(
        *("dataset_name", "subset", "prompt_key", "chosen_key", "rejected_key", "prompt_file"),
        *("system_prompt_file", "kwargs"),
    ),
    own_splits={
        **dict.fromkeys(("HelpSteer3", "HelpSteer3Dataset"), {None: "train", "default": "validation"}),
        **dict.fromkeys(("Tulu3Preference", "Tulu3PreferenceDataset"), {None: "train"}),
        **dict.fromkeys(("HHTranscripts", "hh-rlhf"), {None: "train", "default": "test"}),
        "Bundled": {None: "train", "plain": "validation", "length_controlled": "length_controlled"},
    },
    train_keys=("non_contextual_answer",),
)
PROMPTS = DataForm(
    flat_keys=(
        *("dataset_name", "subset", "input_key", "output_key", "prompt_file", "system_prompt_file"),
        *("processor", "env_name", "max_samples", "kwargs"),
    ),
    own_splits={
        "OpenMathInstruct-2": {None: None},
        "DeepScaler": {None: None},
        "AIME2024": {None: "train", "default": "train"},
        "Bundled": {None: "train", "default": "validation"},
    },
)


def normalise_data(raw: Mapping[str, Any], block_keys: Sequence[str], form: DataForm) -> dict[str, Any]:
    """Return `raw` with `train` and `validation` as lists of blocks and without the keys of the other forms.

    `block_keys` are the keys that a block may have. Unknown keys are left in place for the schema to refuse. Raises
    `ConfigError`, its `field` relative to `data`, for keys that contradict each other and for validation sets that
    cannot be told apart.
    """
    data = dict(raw)
    shared = _shared_values(data, block_keys, form)
    for_training = {key: data.pop(key) for key in form.train_keys if key in data}
    has_train_block = data.get("train") is not None
    val_split = data.pop("val_split", None)
    train = _train_blocks(data, shared)
    validation = _validation_blocks(data, shared, block_keys, val_split)
    name = shared.get("dataset_name", "")
    if not train and (name in form.own_splits or "." in name):
        train = [dict(shared)]
    if name in form.own_splits and not has_train_block and not validation and train[0].get("data_path") is None:
        own = {key: split for key, split in form.own_splits[name].items() if key is not None}
        validation = [{**shared, "name": key, "split": val_split or split} for key, split in own.items()]
    if val_split is not None and not validation:
        need = "data.val_data_path too, or no val_split"
        raise ConfigError("val_split is given, but there is no validation set", field="val_split", need=need)
    for block in train:
        _fill_own_split(block, form, is_train=True)
        block.update({key: value for key, value in for_training.items() if key not in block})
    for block in validation:
        _fill_own_split(block, form, is_train=False)
    return {**data, "train": train, "validation": _with_names(validation)}


def _shared_values(data: Block, block_keys: Sequence[str], form: DataForm) -> Block:
    """Pop the flat keys and the `default` block: the values of every block that does not give its own."""
    given = {key: data.pop(key) for key in form.flat_keys if key in data}
    shared = {key: value for key, value in given.items() if value is not None}
    kind = data.pop("dataset_type", None) if form is PREFERENCES else None
    if kind is not None:
        if kind not in _DATASET_TYPES:
            raise ConfigError("dataset_type is not known", field="dataset_type", got=kind, need="rank or binary")
        _set_once(shared, "dataset_name", _DATASET_TYPES[kind], "dataset_type", "dataset_name")
    default = data.pop("default", None) or {}
    if not isinstance(default, Mapping):
        raise ConfigError("default is not a block", field="default", got=default, need="{dataset_name: ...}")
    for key, value in default.items():
        if key not in block_keys:
            near, need = nearest_name(key, block_keys), f"one of {', '.join(block_keys)}"
            fix = f"did you mean data.default.{near}?" if near else None
            raise ConfigError("there is no such key", field=f"default.{key}", got=value, need=need, fix=fix)
        if value is not None:
            _set_once(shared, key, value, f"default.{key}", key)
    return shared


def _blocks(value: Any, where: str, shared: Block) -> list[Block]:
    """One block or a list of blocks, completed by the shared values."""
    items = [] if value is None else value if isinstance(value, list | tuple) else [value]
    items = [item.model_dump(exclude_unset=True) if isinstance(item, BaseModel) else item for item in items]
    for item in items:
        if not isinstance(item, Mapping):
            need = "{data_path: ..., ...} or a list of blocks"
            raise ConfigError("a set of data is not a block", field=where, got=item, need=need)
    return [{**shared, **item} for item in items]


def _train_blocks(data: Block, shared: Block) -> list[Block]:
    train = _blocks(data.pop("train", None), "train", shared)
    for flat, key in (("train_data_path", "data_path"), ("train_split", "split")):
        value = data.pop(flat, None)
        if value is None:
            continue
        train = train or [dict(shared)]
        if len(train) > 1:
            need = "only the list data.train"
            raise ConfigError("training data is given in two forms", field=flat, got=value, need=need)
        _set_once(train[0], key, value, flat, f"train.{key}")
    return train


def _validation_blocks(data: Block, shared: Block, block_keys: Sequence[str], val_split: str | None) -> list[Block]:
    """The validation sets; `val_split` is that of the flat ones, or of the only block."""
    value = data.pop("validation", None)
    are_named = isinstance(value, Mapping) and all(isinstance(block, Mapping) for block in value.values())
    if value and are_named and not set(value) & set(block_keys):
        validation = [{**shared, "name": str(name), **block} for name, block in value.items()]
    else:
        validation = _blocks(value, "validation", shared)
    path, named_paths = data.pop("val_data_path", None), data.pop("val_data_paths", None) or {}
    if not isinstance(named_paths, Mapping):
        need = "{name: path, ...}; for one unnamed set use data.val_data_path"
        raise ConfigError("val_data_paths is not a mapping", field="val_data_paths", got=named_paths, need=need)
    flat: list[Block] = [] if path is None else [{**shared, "data_path": path}]
    flat += [{**shared, "data_path": each, "name": str(name)} for name, each in named_paths.items()]
    for block in flat or (validation if len(validation) == 1 else []):
        if val_split is not None:
            _set_once(block, "split", val_split, "val_split", "validation.split")
    return validation + flat


def _fill_own_split(block: Block, form: DataForm, *, is_train: bool) -> None:
    own = form.own_splits.get(str(block.get("dataset_name")))
    if own is None or block.get("data_path") is not None or block.get("split") is not None:
        return
    if block.get("split_validation_size"):
        return  # both parts are of one split
    splits = [split for name, split in own.items() if name is not None]
    if is_train:
        block["split"] = own[None]
    elif splits:
        block["split"] = own.get(str(block.get("name")), splits[0])
    else:
        need = "a split, or another set to validate on"
        raise ConfigError(f"{block['dataset_name']} has no validation split", field="validation", need=need)


def _with_names(validation: list[Block]) -> list[Block]:
    unnamed = [i for i, block in enumerate(validation) if block.get("name") is None]
    if len(unnamed) > 1:
        field, need = f"validation[{unnamed[1]}].name", "a name for each; only one may have none, and is called default"
        raise ConfigError("several validation sets have no name", field=field, got="no name", need=need)
    return [{**block, "name": "default"} if i in unnamed else block for i, block in enumerate(validation)]


def _set_once(block: Block, key: str, value: Any, spelling: str, other_spelling: str) -> None:
    """Set `key` unless another spelling of it has another value."""
    if block.get(key) not in (None, value):
        summary = f"data.{spelling} and data.{other_spelling} contradict each other"
        raise ConfigError(summary, field=spelling, got=f"{value!r} and {block[key]!r}", need="one of the two")
    block[key] = value
