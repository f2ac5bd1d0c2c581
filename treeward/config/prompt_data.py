"""`PromptDataConfig`: the prompts that a policy is trained on and validated on.

    data:
      train:
        - {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05, env_name: math}
        - {data_path: chat.jsonl, dataset_name: PromptDataset, env_name: reward_model, weight: 2.0}
      validation:
        - {data_path: held_out.jsonl, env_name: {math: 1.0, format: 0.2}}

Two more forms are accepted and mean the same: the flat one, as `dataset_name`, `train_data_path`, `val_data_path`,
`train_split`, `val_split`, `env_name`, and blocks with shared values, as `train: {...}`, `validation: {...}`,
`default: {...}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from treeward.config.base import Strict
from treeward.config.data import check_sets
from treeward.config.data_forms import PROMPTS, normalise_data
from treeward.errors import ConfigError

__all__ = ["PromptDataConfig", "PromptSetConfig"]

_NEEDS_A_PATH = ("ResponseDataset", "PromptDataset")
_OPEN_MATH_VALIDATION = 0.05


class PromptSetConfig(Strict):
    """One set of prompts: its format, where it lies, how to read it, and which environment rewards the answers."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        "repeat": "grpo.num_val_generations says how often a validation prompt is answered",
        "download_dir": "data is cached where HF_HOME says",
    }

    dataset_name: str = "ResponseDataset"
    """`ResponseDataset` (rows with a question and an answer), `PromptDataset` (rows with messages), `Bundled`,
    `OpenMathInstruct-2`, `DeepScaler`, `AIME2024`, or the dotted path of a class, as `my.module.MyPrompts`."""
    name: str | None = None
    """Name of a validation set, in logs and reports; the only unnamed one is called `default`."""
    data_path: str | None = None
    """A file (jsonl, json, csv, parquet, arrow, each also gzipped), a `save_to_disk` folder, or a hub name."""
    split: str | None = None
    """Split of a hub dataset or of a saved folder."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    input_key: str | None = None
    """The key of the question (a string or messages). None: that of the format, `input` of a `ResponseDataset`."""
    output_key: str | None = None
    """The key of the answer, which becomes the `ground_truth` that environments read. None: that of the format,
    `output` of a `ResponseDataset`."""
    prompt_file: str | None = None
    """A text file with one `{}`, in whose place the last user message is put."""
    system_prompt_file: str | None = None
    """A text file whose content becomes the system message of conversations that have none."""
    processor: Literal["math_hf_data_processor", "math_data_processor"] | None = None
    """Only checked: NeMo RL's name of what reads a row, `math_hf_data_processor`, `math_data_processor` or None. Here
    the format of the set says how it is read."""
    env_name: str | dict[str, FiniteFloat] | None = None
    """The environment that rewards the answers to rows that name none: a key of `env`, or several with weights, as
    `{math: 1.0, format: 0.2}`. None: as `grpo.environments` says."""
    weight: PositiveFloat = 1.0
    """Training only: passes over this set per epoch. 0.5 is a seeded half of its rows, 2.0 is every row twice."""
    max_samples: PositiveInt | None = None
    """Only the first so many rows. None: all."""
    split_validation_size: float = Field(default=0.0, ge=0.0, lt=1.0)
    """The share of the rows, drawn by `seed`, that is held out for validation; 0 for none."""
    part: Literal["train", "validation"] | None = None
    """Which rows of a set with `split_validation_size` these are: `validation`, those that are held out, or `train`,
    the others. None: `train` in `data.train`, `validation` in `data.validation`. A training set that holds rows out
    becomes a validation set by itself."""
    seed: NonNegativeInt = 42
    """Determines which rows `split_validation_size` holds out."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More arguments for the constructor of a class that was given by its dotted path."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        return {key: value for key, value in raw.items() if value is not None or key not in cls.model_fields}

    @model_validator(mode="after")
    def _is_complete(self) -> PromptSetConfig:
        if self.data_path is None and self.dataset_name in _NEEDS_A_PATH:
            raise ConfigError(
                f"{self.dataset_name} needs a data_path",
                got="no data_path",
                need="a file, a folder or a hub name",
                fix="give data_path, or the dataset_name of a set that brings its own data, as OpenMathInstruct-2",
            )
        if self.part is not None and self.split_validation_size == 0.0:
            raise ConfigError(
                "part chooses among rows that are not parted",
                field="part",
                got=f"{self.part}, split_validation_size: 0",
                need="split_validation_size above 0, or no part",
            )
        return self

    @property
    def environment_names(self) -> tuple[str, ...]:
        """The environments that `env_name` names."""
        if self.env_name is None:
            return ()
        return (self.env_name,) if isinstance(self.env_name, str) else tuple(self.env_name)


class PromptDataConfig(Strict):
    """The prompts to train on and to validate on."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        "num_workers": "prompts are short: this process renders them",
        "use_multiple_dataloader": "sets are mixed by their weights",
    }
    other_forms: ClassVar[tuple[str, ...]] = PROMPTS.keys

    train: tuple[PromptSetConfig, ...]
    """The training sets, mixed by their weights."""
    validation: tuple[PromptSetConfig, ...] = ()
    """The validation sets, whose prompts are validated on together."""
    shuffle: bool = True
    """A new order of the training prompts in each epoch, determined by `grpo.seed`."""
    max_input_seq_length: PositiveInt | None = None
    """Longest prompt, in tokens; longer ones are left out and counted, and so are those that leave no room for an
    answer in `policy.max_total_sequence_length`. None: only that."""

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        had_blocks = raw.get("train") is not None
        data = normalise_data(raw, PromptSetConfig.key_names(), PROMPTS)
        if not had_blocks and not data["validation"]:
            for block in data["train"]:  # as NeMo RL does for these in the flat form
                if block.get("dataset_name") == "OpenMathInstruct-2":
                    block["split_validation_size"] = _OPEN_MATH_VALIDATION
                elif block.get("dataset_name") == "DeepScaler":
                    shared = {key: value for key, value in block.items() if key not in ("data_path", "split")}
                    data["validation"] = [{**shared, "dataset_name": "AIME2024", "name": "default"}]
        _add_held_out(data)
        return data

    @model_validator(mode="after")
    def _check_sets(self) -> PromptDataConfig:
        check_sets(self.train, self.validation, "every prompt of a validation set is asked alike")
        return self


def _add_held_out(data: dict[str, Any]) -> None:
    """Make the rows that training sets hold out validation sets, unless they are ones already."""
    held_out = []
    for i, block in enumerate(data["train"]):
        if not isinstance(block.get("split_validation_size"), int | float) or not block["split_validation_size"]:
            continue
        try:
            PromptSetConfig.model_validate(block)
        except ValidationError:
            continue  # what is wrong is said once, of the training set
        if block.get("part") is None:
            block["part"] = "train"
            # A weight is of training, and so is a name: several sets may hold rows out.
            shared = {key: value for key, value in block.items() if key not in ("weight", "name")}
            held_out.append({**shared, "part": "validation", "name": f"held_out_{i}" if i else "held_out"})
    for block in data["validation"]:
        if block.get("split_validation_size"):
            block.setdefault("part", "validation")
    data["validation"] += held_out
