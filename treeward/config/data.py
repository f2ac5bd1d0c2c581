"""`DataConfig` and `PromptDataConfig`: the sets of a run, comparisons for a reward model and prompts for a policy.

    data:
      train: [{data_path: train.jsonl, prompt_key: question}]
      validation: [{data_path: plain.jsonl, name: plain}, {data_path: hard.jsonl, name: hard}]

`treeward.config.data_forms` has two more forms: flat keys, and blocks with shared values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from treeward.config.base import Strict
from treeward.config.data_forms import COMPARISON_SETS, PROMPT_SETS, keys_of_forms, normalise_data
from treeward.errors import ConfigError

_NEEDS_A_PATH = (
    "auto",
    "PreferenceDataset",
    "BinaryPreferenceDataset",
    "GradedDataset",
    "RMB",
    "ResponseDataset",
    "PromptDataset",
)
_OPEN_MATH_VALIDATION = 0.05

_COMMAS = BeforeValidator(lambda text: tuple(text.split(",")) if isinstance(text, str) else text)

Ties = Literal["drop", "half", "davidson", "rao_kupper", "error"]


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
    """Further arguments for the constructor of a class that is given by its dotted path."""
    split_validation_size: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the prompts, drawn with `seed`, whose rows are held out and become a validation set. 0: none."""
    part: Literal["train", "validation"] | None = None
    """Rows of `split_validation_size`: held out (`validation`) or not (`train`). None: as the set is used."""
    seed: NonNegativeInt = 42
    """Determines which prompts `split_validation_size` holds out."""

    def check(self) -> None:
        is_missing = self.data_path is None and self.dataset_name in _NEEDS_A_PATH
        fix = "give data_path, or a dataset_name that brings its own data, as HelpSteer3 or OpenMathInstruct-2"
        self.refuse(is_missing, "data_path dataset_name", "a file, a folder or a hub name", fix)
        is_ours = self.dataset_name in (*COMPARISON_SETS, *PROMPT_SETS)
        self.refuse(self.kwargs and is_ours, "kwargs dataset_name", "no kwargs, or the dotted path of a class")
        is_useless = self.part is not None and self.split_validation_size == 0.0
        self.refuse(is_useless, "part split_validation_size", "split_validation_size above 0, or no part")


class DatasetConfig(SetConfig):
    """One set of comparisons: its format, where it lies, and how to read it."""

    dataset_name: str = "auto"
    """A format, as `BinaryPreferenceDataset`, a set, as `HelpSteer3`, or the dotted path of a class. `auto`: the format
    that the keys of the first row tell."""
    non_contextual_answer: bool = False
    """Training only: add a good completion of another prompt to each comparison, as the worst (Liu et al. 2024)."""
    attributes: Annotated[tuple[str, ...], _COMMAS] = ()
    """Grades of each completion, keys of the data, that the heads of these names are evaluated by: a list, or text with
    commas. A run that learns grades reads its own."""
    prompt_key: str = "prompt"
    """`BinaryPreferenceDataset`: the key of the prompt (a string or messages)."""
    chosen_key: str = "chosen"
    """`BinaryPreferenceDataset`: the key of the better completion."""
    rejected_key: str = "rejected"
    """`BinaryPreferenceDataset`: the key of the worse completion."""


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
        self.refuse(not self.train, "train", "at least one set of data", fix="give data.train_data_path")
        names = [dataset.name for dataset in self.validation]
        for i, dataset in enumerate(self.validation):
            field = f"validation[{i}]"
            if dataset.name in names[:i]:
                need, summary = "a name for each: it names their metrics", "two validation sets have the same name"
                raise ConfigError(summary, field=f"{field}.name", got=dataset.name, need=need)
            for key, default in {"weight": 1.0, "non_contextual_answer": False}.items():
                if (value := getattr(dataset, key, default)) != default:
                    need = "no such key: each row of a validation set counts once, as it is"
                    raise ConfigError(f"a validation set has a {key}", field=f"{field}.{key}", got=value, need=need)


class DataConfig(_Sets[DatasetConfig]):
    """The training and validation sets, and what happens to rows that do not fit."""

    other_forms: ClassVar[tuple[str, ...]] = keys_of_forms([*DatasetConfig.model_fields])

    truncation: Literal["drop", "drop_comparison", "truncate_left", "error"] = "drop"
    """Too long completions are left out and counted (`drop`), with their whole comparison (`drop_comparison`), cut from
    the left (`truncate_left`), or an `error`."""
    ties: Ties = "drop"
    """Pairs of equal rank: left out and counted (`drop`), half a win for each side (`half`), given a probability by the
    model of Davidson (1970, `davidson`) or Rao and Kupper (1967, `rao_kupper`), or an error (`error`)."""
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
    """Environment of rows that name none. None: see `grpo.environment`."""
    max_samples: PositiveInt | None = None
    """Read only this number of rows, the first ones. None: all."""


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
            shared = {key: block[key] for key in block.keys() - {"weight", "name", "non_contextual_answer"}}
            data["validation"].append({**shared, "part": "validation", "name": f"{name}_{i}" if i else name})
