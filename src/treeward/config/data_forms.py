"""The forms of `data` in a file, turned into one: `train` and `validation` as lists of blocks, each
whole.

    # The form that the sections read.
    train: [{dataset_name: PreferenceDataset, data_path: train.jsonl}]
    validation: [{dataset_name: PreferenceDataset, data_path: plain.jsonl, name: plain}]

    # Flat keys, NeMo RL's first form.
    dataset_name: PreferenceDataset
    train_data_path: train.jsonl
    val_data_paths: {plain: plain.jsonl}

    # Blocks with shared values, its newer form.
    train: {data_path: train.jsonl}
    validation: {plain: {data_path: plain.jsonl}}
    default: {dataset_name: PreferenceDataset}

A set that brings its own data needs no paths. A training set that holds rows out gets a validation
set of these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treeward.config.dataset_table import COMPARISON_SETS, PROMPT_SETS, KnownDataset
from treeward.errors import ConfigError, nearest_name

Block = dict[str, Any]

_SHARED_KEYS = (
    "dataset_name",
    "subset",
    "prompt_file",
    "system_prompt_file",
    "kwargs",
    "prompt_key",
    "chosen_key",
    "rejected_key",
    "rating_key",
    "placeholder_token",
    "neutral_is_right",
    "input_key",
    "output_key",
    "processor",
    "env_name",
    "max_samples",
)
"""Keys of a block that may stand beside the blocks, for all of them."""
_TRAINING_KEYS = ("split_validation_size",)
"""The same, for the training sets alone."""
_PATH_KEYS = (
    "train_data_path",
    "train_split",
    "val_data_path",
    "val_data_paths",
    "val_split",
    "default",
)


def form_keys(block_keys: Sequence[str]) -> list[str]:
    """The keys of `data` that only the other forms have; `block_keys`: those that a block may
    have."""
    keys = [key for key in _SHARED_KEYS if key in block_keys]
    if _are_comparisons(block_keys):
        keys += _TRAINING_KEYS
    return [*keys, *_PATH_KEYS]


def as_blocks(
    raw: Mapping[str, Any], block_keys: Sequence[str], is_valid: Callable[[Block], bool]
) -> dict[str, Any]:
    """`data` with `train` and `validation` as lists of whole blocks, without the keys of the other
    forms.

    `block_keys`: those that a block may have. `is_valid`: whether a block makes a set. Unknown keys
    stay, for the section to refuse. Raises `ConfigError`, its `field` relative to `data`, for keys
    that contradict each other and for validation sets that cannot be told apart.
    """
    known_sets = dict(COMPARISON_SETS)
    if not _are_comparisons(block_keys):
        known_sets |= PROMPT_SETS  # a judge's prompts are comparisons
    other_keys = form_keys(block_keys)
    # null says nothing, as NeMo RL's files have it for keys that they leave open.
    flat = {key: value for key, value in raw.items() if key in other_keys and value is not None}
    shared = _shared_values(flat, block_keys)
    train = _training_blocks(raw.get("train"), flat, shared)
    validation = _validation_blocks(raw.get("validation"), flat, shared, block_keys)

    name = str(shared.get("dataset_name", ""))
    brings_data = name in known_sets and known_sets[name].brings_data
    is_a_class = "." in name
    # The set is named beside the blocks alone, as by dataset_name: HelpSteer3.
    if not train and (brings_data or is_a_class):
        train = [dict(shared)]
    is_flat = raw.get("train") is None
    if brings_data and is_flat and not validation and train[0].get("data_path") is None:
        # A set that brings its own data is validated on its own splits.
        for validation_name, split in known_sets[name].validation_splits.items():
            block = {**shared, "name": validation_name, "split": flat.get("val_split") or split}
            validation.append(block)
    if flat.get("val_split") is not None and not validation:
        raise ConfigError(
            "val_split is given, but there is no validation set",
            field="val_split",
            need="data.val_data_path too, or no val_split",
        )

    for_training = {key: flat[key] for key in _TRAINING_KEYS if key in flat}
    for i, block in enumerate(train):
        # A block's own value comes later, and counts.
        train[i] = {**for_training, **_with_own_split(block, known_sets, is_train=True)}
    for i, block in enumerate(validation):
        validation[i] = _with_own_split(block, known_sets, is_train=False)
    validation = _with_names(validation)
    if not _are_comparisons(block_keys) and is_flat and not validation:
        _add_validation_of_nemo_rl(train, validation, known_sets)
    _add_held_out(train, validation, is_valid, are_comparisons=_are_comparisons(block_keys))
    others = {key: value for key, value in raw.items() if key not in other_keys}
    return {**others, "train": train, "validation": validation}


def _are_comparisons(block_keys: Sequence[str]) -> bool:
    # A key of `DatasetConfig` that `PromptSetConfig` has not. This module knows neither section.
    return "chosen_key" in block_keys


def _shared_values(flat: Block, block_keys: Sequence[str]) -> Block:
    """The flat keys and those of the `default` block: the values of every block that does not give
    its own."""
    shared = {key: flat[key] for key in _SHARED_KEYS if key in flat}
    default = _mapping(flat.get("default", {}), "default", "{dataset_name: ...}")
    is_a_class = "." in str(default.get("dataset_name") or shared.get("dataset_name"))
    if not is_a_class:  # a class may have keys of its own
        for key in default.keys() - set(block_keys):
            near = nearest_name(key, block_keys)
            fix = f"did you mean data.default.{near}?" if near else None
            need = f"one of {', '.join(block_keys)}"
            raise ConfigError(
                "there is no such key", field=f"default.{key}", got=default[key], need=need, fix=fix
            )
    given = {key: value for key, value in default.items() if value is not None}
    return _combined(shared, given, "default.")


def _training_blocks(value: Any, flat: Block, shared: Block) -> list[Block]:
    train = _list_of_blocks(value, "train", shared)
    flat_train: Block = {}
    for key in ("data_path", "split"):
        if f"train_{key}" in flat:
            flat_train[key] = flat[f"train_{key}"]
    if not flat_train:
        return train
    if len(train) > 1:
        raise ConfigError(
            "training data is given in two forms",
            field="train_data_path",
            got=next(iter(flat_train.values())),
            need="only the list data.train",
        )
    block = train[0] if train else shared
    return [_combined(block, flat_train, "train_")]


def _validation_blocks(
    value: Any, flat: Block, shared: Block, block_keys: Sequence[str]
) -> list[Block]:
    """The validation sets; `val_split` is that of the flat ones, or of all blocks."""
    if isinstance(value, Mapping) and value:
        # {plain: {...}, hard: {...}} names sets. A single block may also hold mappings alone, as
        # {kwargs: {...}}: it is told by its keys.
        are_blocks = all(isinstance(block, Mapping) for block in value.values())
        is_one_block = bool(set(value) & set(block_keys))
        if are_blocks and not is_one_block:
            value = [{"name": str(name), **block} for name, block in value.items()]
    validation = _list_of_blocks(value, "validation", shared)
    flat_validation: list[Block] = []
    if "val_data_path" in flat:
        flat_validation.append({**shared, "data_path": flat["val_data_path"]})
    need = "{name: path, ...}; for one unnamed set use data.val_data_path"
    for name, path in _mapping(flat.get("val_data_paths", {}), "val_data_paths", need).items():
        flat_validation.append({**shared, "data_path": path, "name": str(name)})
    split: Block = {}
    if "val_split" in flat:
        split["split"] = flat["val_split"]
    if flat_validation:
        # Beside flat sets val_split is theirs: the blocks can have a `split` each.
        return validation + [_combined(block, split, "val_") for block in flat_validation]
    return [_combined(block, split, "val_") for block in validation]


def _list_of_blocks(value: Any, where: str, shared: Block) -> list[Block]:
    """One block or a list of blocks, completed by the shared values."""
    if value is None:
        return []
    items = list(value) if isinstance(value, list | tuple) else [value]
    blocks: list[Block] = []
    for item in items:
        block = _mapping(item, where, "{data_path: ..., ...} or a list of blocks")
        blocks.append({**shared, **block})
    return blocks


def _with_own_split(
    block: Block, known_sets: Mapping[str, KnownDataset], *, is_train: bool
) -> Block:
    """The block with the split of a set that brings its own data, unless it says which data."""
    known = known_sets.get(str(block.get("dataset_name")))
    if known is None or not known.brings_data:
        return block
    if block.get("data_path") is not None or block.get("split") is not None:
        return block
    if block.get("split_validation_size"):
        return block  # both parts of a set are of one split
    if is_train:
        return {**block, "split": known.train_split}
    splits = known.validation_splits
    if not splits:
        raise ConfigError(
            f"{block['dataset_name']} has no validation split",
            field="validation",
            need="a split, or another set to validate on",
        )
    # A validation set may have the name of a split, as `length_controlled` of the bundled data.
    first_split = next(iter(splits.values()))
    return {**block, "split": splits.get(str(block.get("name")), first_split)}


def _with_names(validation: list[Block]) -> list[Block]:
    """A set without a name is called `default`; several are called by their datasets."""
    unnamed = [i for i, block in enumerate(validation) if block.get("name") is None]
    names: dict[int, str] = {}
    for i in unnamed:
        names[i] = "default"
        if len(unnamed) > 1:
            names[i] = validation[i].get("dataset_name") or "default"
    if len(set(names.values())) < len(names):
        raise ConfigError(
            "several validation sets have no name",
            field=f"validation[{unnamed[1]}].name",
            got="no name",
            need="a name for each of those with the same dataset_name",
        )
    named = list(validation)
    for i, name in names.items():
        named[i] = {**validation[i], "name": name}
    return named


def _add_validation_of_nemo_rl(
    train: list[Block], validation: list[Block], known_sets: Mapping[str, KnownDataset]
) -> None:
    """What NeMo RL validates on for these sets in the flat form."""
    for block in train:
        known = known_sets.get(str(block.get("dataset_name")))
        if known is None:
            continue
        if known.held_out:
            block["split_validation_size"] = known.held_out
        if known.validated_on is not None:
            other = {**block, "dataset_name": known.validated_on, "name": "default"}
            # These are of the training data.
            other.pop("data_path", None)
            other.pop("split", None)
            # In place, because the caller holds the list.
            validation[:] = [_with_own_split(other, known_sets, is_train=False)]


def _add_held_out(
    train: list[Block],
    validation: list[Block],
    is_valid: Callable[[Block], bool],
    *,
    are_comparisons: bool,
) -> None:
    """Make the rows that training sets hold out validation sets, unless they are ones already."""
    for block in validation:
        if block.get("split_validation_size"):
            block.setdefault("part", "validation")
    # A run's only set of comparisons is called default, whatever its rows come from.
    name = "default" if are_comparisons and not validation else "held_out"
    for i, block in enumerate(train):
        # A block with its `part` is written out already, as in the resolved file of a run.
        if not block.get("split_validation_size") or block.get("part") is not None:
            continue
        if not is_valid(block):
            continue  # the training set reports its own mistake
        block["part"] = "train"
        # These are not for validation, and several sets may hold rows out under names of their own.
        shared = {key: block[key] for key in block.keys() - {"weight", "name"}}
        own_name = name if i == 0 else f"{name}_{i}"
        validation.append({**shared, "part": "validation", "name": own_name})


def _mapping(value: Any, field: str, need: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{field} is not a mapping", field=field, got=value, need=need)
    return value


def _combined(block: Block, values: Block, prefix: str) -> Block:
    """The block with further values; `prefix` and a key are the name under which they were
    given."""
    for key, value in values.items():
        # The same value in both forms is no contradiction.
        if block.get(key) not in (None, value):
            raise ConfigError(
                f"data has two values of {key}",
                field=f"{prefix}{key}",
                got=f"{value!r} and {block[key]!r}",
                need="one of them",
            )
    return {**block, **values}
