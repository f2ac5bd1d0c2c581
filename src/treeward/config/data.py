"""`DataConfig` and `PromptDataConfig`: the sets of a run, comparisons for a reward model and prompts for a policy.

    data:
      train: [{data_path: train.jsonl, prompt_key: question}]
      validation: [{data_path: plain.jsonl, name: plain}, {data_path: hard.jsonl, name: hard}]

Two more forms are turned into that one: NeMo RL's flat keys, and the blocks with shared values of its newer guides. A
set that brings its own data needs no paths.

    {dataset_name: PreferenceDataset, train_data_path: train.jsonl, val_data_paths: {plain: plain.jsonl}}
    {train: {data_path: train.jsonl}, validation: {plain: {data_path: plain.jsonl}}, default: {prompt_key: context}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from treeward.config.base import Strict
from treeward.config.scoring import Truncation
from treeward.errors import ConfigError, nearest_name

Block = dict[str, Any]
Splits = Mapping[str | None, str | None]

_FLAT_KEYS = (
    *("dataset_name", "subset", "prompt_file", "system_prompt_file", "kwargs"),
    *("prompt_key", "chosen_key", "rejected_key"),
    *("input_key", "output_key", "processor", "env_name", "max_samples"),
)
"""Keys of a block that may stand beside the blocks, for all of them."""
_TRAINING_KEYS = ("split_validation_size",)  # flat keys for the training sets alone
_PATH_KEYS = ("train_data_path", "train_split", "val_data_path", "val_data_paths", "val_split", "default")

# The names of the sets in `treeward.data`, which this layer cannot import. Those that bring their own data have the
# name of each validation set with its split, and under None the training split; {} needs a `data_path`.
COMPARISON_SETS: Mapping[str, Splits] = {
    "auto": {},
    "PreferenceDataset": {},
    "BinaryPreferenceDataset": {},
    "GradedDataset": {},
    "WinnerDataset": {},
    **dict.fromkeys(("HelpSteer3", "HelpSteer3Dataset"), {None: "train", "default": "validation"}),
    "HelpSteer2": {None: "train", "default": "validation"},
    "UltraFeedback": {None: "train"},
    **dict.fromkeys(("Tulu3Preference", "Tulu3PreferenceDataset"), {None: "train"}),
    **dict.fromkeys(("HHTranscripts", "hh-rlhf"), {None: "train", "default": "test"}),
    "Bundled": {None: "train", "plain": "validation", "length_controlled": "length_controlled"},
}
PROMPT_SETS: Mapping[str, Splits] = {
    **dict.fromkeys(("PromptDataset", "auto"), {}),
    "ResponseDataset": {},
    **dict.fromkeys(("OpenMathInstruct-2", "OpenMathInstruct2"), {None: None}),
    "DeepScaler": {None: None},
    **dict.fromkeys(("AIME2024", "DAPOMathAIME2024", "DAPOMath17K"), {None: "train", "default": "train"}),
    "Bundled": {None: "train", "default": "validation"},
}


def keys_of_forms(block_keys: Sequence[str]) -> tuple[str, ...]:
    """The keys of `data` that only these forms have, for sets whose blocks have `block_keys`."""
    for_training = _TRAINING_KEYS if "chosen_key" in block_keys else ()
    return (*(key for key in _FLAT_KEYS if key in block_keys), *for_training, *_PATH_KEYS)


def normalise_data(raw: Mapping[str, Any], block_keys: Sequence[str]) -> dict[str, Any]:
    """Return `raw` with `train` and `validation` as lists of blocks and without the keys of the other forms.

    `block_keys` are the keys that a block may have. Unknown keys are left in place for the schema to refuse. Raises
    `ConfigError`, its `field` relative to `data`, for keys that contradict each other and for validation sets that
    cannot be told apart.
    """
    names, are_prompts = keys_of_forms(block_keys), "chosen_key" not in block_keys
    own_splits = {**COMPARISON_SETS, **(PROMPT_SETS if are_prompts else {})}  # a judge's prompts are comparisons
    flat_keys = {key: value for key, value in raw.items() if key in names and value is not None}
    shared = _shared_values(flat_keys, block_keys)
    train = _blocks(raw.get("train"), "train", shared)
    flat = {key: flat_keys[f"train_{key}"] for key in ("data_path", "split") if f"train_{key}" in flat_keys}
    if flat and len(train) > 1:
        got, need = next(iter(flat.values())), "only the list data.train"
        raise ConfigError("training data is given in two forms", field="train_data_path", got=got, need=need)
    train = [_joined(train[0] if train else shared, flat, "train_")] if flat else train
    validation = _validation_blocks(raw.get("validation"), flat_keys, shared, block_keys)
    name, val_split = str(shared.get("dataset_name", "")), flat_keys.get("val_split")
    bundled_splits = own_splits.get(name, {})
    if not train and (bundled_splits or "." in name):
        train = [dict(shared)]
    if bundled_splits and raw.get("train") is None and not validation and train[0].get("data_path") is None:
        splits = {key: val_split or split for key, split in bundled_splits.items() if key is not None}
        validation = [{**shared, "name": key, "split": split} for key, split in splits.items()]
    if val_split is not None and not validation:
        need = "data.val_data_path too, or no val_split"
        raise ConfigError("val_split is given, but there is no validation set", field="val_split", need=need)
    for_training = {key: flat_keys[key] for key in _TRAINING_KEYS if key in flat_keys}
    train = [{**for_training, **_with_own_split(block, own_splits, is_train=True)} for block in train]
    validation = [_with_own_split(block, own_splits, is_train=False) for block in validation]
    other_keys = {key: value for key, value in raw.items() if key not in names}
    return {**other_keys, "train": train, "validation": _with_names(validation)}


def _shared_values(given: Block, block_keys: Sequence[str]) -> Block:
    """The flat keys and those of the `default` block: the values of every block that does not give its own."""
    shared = {key: given[key] for key in _FLAT_KEYS if key in given}
    default = _mapping(given.get("default", {}), "default", "{dataset_name: ...}")
    is_of_a_class = "." in str(default.get("dataset_name") or shared.get("dataset_name"))
    for key in () if is_of_a_class else default.keys() - set(block_keys):  # a class may have keys of its own
        near, need = nearest_name(key, block_keys), f"one of {', '.join(block_keys)}"
        fix = f"did you mean data.default.{near}?" if near else None
        raise ConfigError("there is no such key", field=f"default.{key}", got=default[key], need=need, fix=fix)
    return _joined(shared, {key: value for key, value in default.items() if value is not None}, "default.")


def _blocks(value: Any, where: str, shared: Block) -> list[Block]:
    """One block or a list of blocks, completed by the shared values."""
    items = [] if value is None else value if isinstance(value, list | tuple) else [value]
    items = [item.model_dump(exclude_unset=True) if isinstance(item, BaseModel) else item for item in items]
    return [{**shared, **_mapping(item, where, "{data_path: ..., ...} or a list of blocks")} for item in items]


def _validation_blocks(value: Any, given: Block, shared: Block, block_keys: Sequence[str]) -> list[Block]:
    """The validation sets; `val_split` is that of the flat ones, or of all blocks."""
    are_named = isinstance(value, Mapping) and all(isinstance(block, Mapping) for block in value.values())
    if value and are_named and not set(value) & set(block_keys):
        value = [{"name": str(name), **block} for name, block in value.items()]
    validation = _blocks(value, "validation", shared)
    flat: list[Block] = [{**shared, "data_path": given["val_data_path"]}] if "val_data_path" in given else []
    need = "{name: path, ...}; for one unnamed set use data.val_data_path"
    for name, path in _mapping(given.get("val_data_paths", {}), "val_data_paths", need).items():
        flat.append({**shared, "data_path": path, "name": str(name)})
    split = {"split": given["val_split"]} if "val_split" in given else {}
    if not flat:
        return [_joined(block, split, "val_") for block in validation]
    return validation + [_joined(block, split, "val_") for block in flat]


def _with_own_split(block: Block, own_splits: Mapping[str, Splits], *, is_train: bool) -> Block:
    """The block with the split of a set that brings its own data, unless it says which data."""
    set_splits = own_splits.get(str(block.get("dataset_name")))
    is_given = any(block.get(key) is not None for key in ("data_path", "split"))
    if not set_splits or is_given or block.get("split_validation_size"):  # both parts of a set are of one split
        return block
    if is_train:
        return {**block, "split": set_splits[None]}
    splits = {str(name): split for name, split in set_splits.items() if name is not None}
    if not splits:
        need, summary = "a split, or another set to validate on", f"{block['dataset_name']} has no validation split"
        raise ConfigError(summary, field="validation", need=need)
    return {**block, "split": splits.get(str(block.get("name")), next(iter(splits.values())))}


def _with_names(validation: list[Block]) -> list[Block]:
    """A set without a name is called `default`; several are called by their datasets."""
    unnamed = [i for i, block in enumerate(validation) if block.get("name") is None]
    names = {i: validation[i].get("dataset_name") or "default" for i in unnamed} if unnamed[1:] else {}
    if len(set(names.values())) < len(names):
        field, need = f"validation[{unnamed[1]}].name", "a name for each of those with the same dataset_name"
        raise ConfigError("several validation sets have no name", field=field, got="no name", need=need)
    return [{**block, "name": names.get(i, "default")} if i in unnamed else block for i, block in enumerate(validation)]


def _mapping(value: Any, field: str, need: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{field} is not a mapping", field=field, got=value, need=need)
    return value


def _joined(block: Block, values: Block, prefix: str) -> Block:
    """The block with further values; `prefix` and a key are the name under which they were given."""
    for key, value in values.items():
        if block.get(key) not in (None, value):
            summary, got = f"data has two values of {key}", f"{value!r} and {block[key]!r}"
            raise ConfigError(summary, field=f"{prefix}{key}", got=got, need="one of them")
    return {**block, **values}


_OPEN_MATH_VALIDATION = 0.05

_COMMAS = BeforeValidator(lambda text: tuple(text.split(",")) if isinstance(text, str) else text)

Ties = Literal["drop", "half"]


class SetConfig(Strict):
    """One set of data: its format, where it lies, and how to read it."""

    dataset_name: str
    """Name of a format, or the dotted path of a class."""
    name: Annotated[str | None, Field(pattern=r"^[^\s/]+$")] = None
    """Name of a validation set, for its metrics `validation-<name>/...`. The only unnamed one is called `default`,
    several are called by their `dataset_name`."""
    data_path: str | None = None
    """A file (jsonl, json, csv or tsv, also gzipped; parquet, arrow), a `save_to_disk` folder, or a hub name."""
    split: str | None = None
    """Split of a hub dataset or of a saved folder."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    weight: PositiveFloat = 1.0
    """Training only: passes over this set per epoch. 0.5 is a seeded half of its rows, 2.0 is every row twice."""
    prompt_file: str | None = None
    """A text file with one `{}`, which is replaced by the last user message."""
    system_prompt_file: str | None = None
    """A text file whose content becomes the system message of conversations that have none."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for the constructor of a class that is given by its dotted path. They may also stand beside the
    other keys, as in NeMo RL."""
    split_validation_size: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the prompts, drawn with `seed`, whose rows are held out and become a validation set. 0: none."""
    part: Literal["train", "validation"] | None = None
    """Rows of `split_validation_size`: held out (`validation`) or not (`train`). None: as the set is used."""
    seed: NonNegativeInt = 42
    """Determines which prompts `split_validation_size` holds out."""

    @model_validator(mode="before")
    @classmethod
    def _take_keys_of_a_class(cls, raw: Any) -> Any:
        """Keys of a section of a class by dotted path that are none of ours are arguments of the class.

        One that is nearly a key of ours stays, to be refused with its name: a class that takes any keyword would
        swallow it. `kwargs` can hold such an argument.
        """
        if not isinstance(raw, Mapping) or "." not in str(raw.get("dataset_name")):
            return raw
        own = {}
        for key, value in raw.items():
            if key not in cls.model_fields and nearest_name(key, cls.model_fields) is None:
                own[key] = value
        if not own:
            return raw
        others = {key: value for key, value in raw.items() if key not in own}
        return {**others, "kwargs": {**own, **(raw.get("kwargs") or {})}}

    @property
    def section(self) -> dict[str, Any]:
        """The keys that the file gives for the set, those of a class of its own among them."""
        given = {key: getattr(self, key) for key in type(self).model_fields if key in self.model_fields_set}
        ours = {"kwargs", "part", "name"}
        return {key: value for key, value in given.items() if key not in ours} | self.kwargs

    def check(self) -> None:
        if self.data_path is None and {**PROMPT_SETS, **COMPARISON_SETS}.get(self.dataset_name) == {}:
            fix = "give data_path, or a dataset_name that brings its own data, as HelpSteer3 or OpenMathInstruct-2"
            raise self.error("data_path dataset_name", "a file, a folder or a hub name", fix)
        if self.kwargs and self.dataset_name in (*COMPARISON_SETS, *PROMPT_SETS):
            raise self.error("kwargs dataset_name", "no kwargs, or the dotted path of a class")
        if self.part is not None and self.split_validation_size == 0.0:
            raise self.error("part split_validation_size", "split_validation_size above 0, or no part")


class DatasetConfig(SetConfig):
    """One set of comparisons: its format, where it lies, and how to read it."""

    dataset_name: str = "auto"
    """A format, as `BinaryPreferenceDataset`, a set, as `HelpSteer3`, or the dotted path of a class. `auto`: the format
    that the keys of the first row tell."""
    attributes: Annotated[tuple[str, ...], _COMMAS] = ()
    """Grades of each completion, keys of the data, that the heads of these names are evaluated by: a list, or text with
    commas. A run that learns grades reads its own."""
    prompt_key: str | None = None
    """The column of the prompt (a string or messages); other columns that could hold a part of it are then not read.
    None: found by its name, `context`, `prompt`, `instruction`, `question` or `query`, or messages."""
    chosen_key: str = "chosen"
    """`BinaryPreferenceDataset`: the key of the better completion."""
    rejected_key: str = "rejected"
    """`BinaryPreferenceDataset`: the key of the worse completion."""
    rating_key: str | None = None
    """The column of a completion's rating, the higher the better, in rows of one completion; or of the ratings of
    `completions`. None: `score`."""


_Set = TypeVar("_Set", bound=SetConfig)


class _Sets(Strict, Generic[_Set]):
    """What the sections of comparisons and of prompts have in common."""

    train: tuple[_Set, ...]
    """The training sets, mixed by their weights."""
    validation: tuple[_Set, ...] = ()
    """The validation sets: of comparisons, each is reported by its name; of prompts, they are validated on together."""
    shuffle: bool = True
    """A new order of the training data in each epoch, determined by the seed of the run."""
    max_input_seq_length: PositiveInt | None = None
    """Longest conversation, or prompt of GRPO, in tokens. None: as `policy.max_total_sequence_length` allows."""

    def check(self) -> None:
        if not self.train:
            raise self.error("train", "at least one set of data", "give data.train_data_path")
        names = [dataset.name for dataset in self.validation]
        for i, dataset in enumerate(self.validation):
            if dataset.name in names[:i]:
                need, summary = "a name for each: it names their metrics", "two validation sets have the same name"
                raise ConfigError(summary, field=f"validation[{i}].name", got=dataset.name, need=need)
            if dataset.weight != 1.0:
                summary = "a validation set has a weight, which would have no effect"
                need = "no such key: each of its rows counts once"
                raise ConfigError(summary, field=f"validation[{i}].weight", got=dataset.weight, need=need)


class DataConfig(_Sets[DatasetConfig]):
    """The training and validation sets, and what happens to rows that do not fit."""

    other_forms: ClassVar[tuple[str, ...]] = keys_of_forms([*DatasetConfig.model_fields])

    truncation: Truncation = "drop"
    """Too long completions are left out and counted (`drop`), lose their oldest messages and then their
    oldest tokens (`truncate_left`), or are an `error`."""
    ties: Ties = "drop"
    """Pairs of equal rank: left out and counted (`drop`), or half a win for each side (`half`)."""
    cache_dir: str | None = None
    """Where tokenized data is kept. None: `.treeward_cache` in the working folder."""

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        data = normalise_data(raw, _keys_of(DatasetConfig))
        _add_held_out(data, DatasetConfig, "held_out" if data["validation"] else "default")
        return data


class PromptSetConfig(SetConfig):
    """One set of prompts: its format, where it lies, how to read it, and which environment rewards completions."""

    dataset_name: str = "ResponseDataset"
    """A format, as `ResponseDataset`, a set, as `OpenMathInstruct-2`, or the dotted path of a class."""
    input_key: str | None = None
    """The key of the question (a string or messages). None: that of the format, `input` of a `ResponseDataset`."""
    output_key: str | None = None
    """The key of the answer, the `ground_truth` of environments. None: that of the format, as `output`."""
    env_name: str | None = None
    """Environment of rows that name none; a mixture is one of the type `hybrid`. None: `reward_model`, or the only one
    besides `grpo.gold_environment`."""
    max_samples: PositiveInt | None = None
    """Read only this number of rows, the first ones. None: all."""

    @property
    def comparisons(self) -> DatasetConfig:
        """The same set as comparisons, for questions to a judge: `dataset_name` is then one of a reward model's."""
        keys = {key: getattr(self, key) for key in SetConfig.model_fields if key in self.model_fields_set}
        return DatasetConfig(**keys, **({} if self.input_key is None else {"prompt_key": self.input_key}))


class PromptDataConfig(_Sets[PromptSetConfig]):
    """The prompts to train on and to validate on."""

    other_forms: ClassVar[tuple[str, ...]] = keys_of_forms([*PromptSetConfig.model_fields])

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        had_blocks = raw.get("train") is not None
        data = normalise_data(raw, _keys_of(PromptSetConfig))
        if not had_blocks and not data["validation"]:
            for block in data["train"]:  # as NeMo RL does for these in the flat form
                if block.get("dataset_name") == "OpenMathInstruct-2":
                    block["split_validation_size"] = _OPEN_MATH_VALIDATION
                elif block.get("dataset_name") == "DeepScaler":
                    shared = {key: value for key, value in block.items() if key not in ("data_path", "split")}
                    data["validation"] = [{**shared, "dataset_name": "AIME2024", "name": "default"}]
        _add_held_out(data, PromptSetConfig, "held_out")
        return data


def _keys_of(section: type[SetConfig]) -> tuple[str, ...]:
    """The keys that a block may have."""
    return (*section.model_fields, *section.foreign_keys())


def _add_held_out(data: dict[str, Any], section: type[SetConfig], name: str) -> None:
    """Make the rows that training sets hold out validation sets, unless they are ones already."""
    for block in data["validation"]:
        if block.get("split_validation_size"):
            block.setdefault("part", "validation")
    for i, block in enumerate(data["train"]):
        if block.get("split_validation_size") and block.get("part") is None:
            try:
                section.model_validate(block)
            except ValidationError:
                continue  # the training set reports its own mistake
            block["part"] = "train"
            # These are not for validation, and several sets may hold rows out under names of their own.
            shared = {key: block[key] for key in block.keys() - {"weight", "name"}}
            data["validation"].append({**shared, "part": "validation", "name": f"{name}_{i}" if i else name})
