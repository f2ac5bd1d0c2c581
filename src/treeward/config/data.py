"""`DataConfig` and `PromptDataConfig`: the sets of a run, comparisons for a reward model and
prompts for a policy.

    data:
      train: [{data_path: train.jsonl, prompt_key: question}]
      validation: [{data_path: plain.jsonl, name: plain}, {data_path: hard.jsonl, name: hard}]

A set that brings its own data needs no paths. Files may have other forms, which `data_forms.py`
turns into this one.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from treeward.config.base import FilePath, Strict
from treeward.config.dataset_table import COMPARISON_SETS, PROMPT_SETS, STEP_SETS
from treeward.config.scoring import Truncation
from treeward.errors import ConfigError


def _split_at_commas(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(","))


_COMMAS = BeforeValidator(_split_at_commas)

Ties = Literal["drop", "half"]
Proposal = Literal["keep", "drop", "flip", "soft", "weight"]
"""What becomes of a pair: it is learnt as it is, not at all, the other way round, with its
probability as a soft label, or with that as its weight."""
PROPOSALS: tuple[Proposal, ...] = get_args(Proposal)
Suspects = Literal["proposed", "drop", "flip", "soft", "weight"]


class SetConfig(Strict):
    """One set of data: its format, where it lies, and how to read it."""

    dataset_name: str
    """Name of a format, or the dotted path of a class."""
    name: Annotated[str | None, Field(pattern=r"^[^\s/]+$")] = None
    """Name of a validation set, for its metrics `validation-<name>/...`. The only unnamed one is
    called `default`, several are called by their `dataset_name`."""
    data_path: FilePath | None = None
    """A file (jsonl, json, csv or tsv, also gzipped; parquet, arrow), a `save_to_disk` folder, or a
    hub name."""
    split: str | None = None
    """Split of a hub dataset or of a saved folder."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    weight: PositiveFloat = 1.0
    """Training only: passes over this set per epoch. 0.5 is a seeded half of its rows, 2.0 is every
    row twice."""
    prompt_file: FilePath | None = None
    """A text file with one `{}`, which is replaced by the last user message."""
    system_prompt_file: FilePath | None = None
    """A text file whose content becomes the system message of conversations that have none."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for the constructor of a class that is given by its dotted path. They may
    also stand beside the other keys, as in NeMo RL."""
    split_validation_size: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the prompts, drawn with `seed`, whose rows are held out and become a validation set.
    0: none."""
    part: Literal["train", "validation"] | None = None
    """Rows of `split_validation_size`: held out (`validation`) or not (`train`). None: as the set
    is used."""
    seed: NonNegativeInt = 42
    """Determines which prompts `split_validation_size` holds out."""

    @property
    def section(self) -> dict[str, Any]:
        """The keys that the file gives for the set, those of a class of its own among them."""
        keys: dict[str, Any] = {}
        for key in type(self).model_fields:
            # `name` and `part` are of the run, not of the set.
            if key in self.model_fields_set and key not in ("kwargs", "part", "name"):
                keys[key] = getattr(self, key)
        return keys | self.kwargs

    def check(self) -> None:
        # A judge's set of prompts is read as comparisons, and a section does not know which kind of
        # reward model reads it: any table may have the name.
        name = self.dataset_name
        known = COMPARISON_SETS.get(name) or STEP_SETS.get(name) or PROMPT_SETS.get(name)
        if known is not None and not known.brings_data and self.data_path is None:
            fix = (
                "give data_path, or a dataset_name that brings its own data, as HelpSteer3 or "
                "OpenMathInstruct-2"
            )
            raise self.error("data_path dataset_name", "a file, a folder or a hub name", fix)
        if self.kwargs and known is not None:
            raise self.error("kwargs dataset_name", "no kwargs, or the dotted path of a class")
        if self.part is not None and self.split_validation_size == 0.0:
            raise self.error(
                "part split_validation_size", "split_validation_size above 0, or no part"
            )


class DatasetConfig(SetConfig):
    """One set of comparisons: its format, where it lies, and how to read it."""

    dataset_name: str = "auto"
    """A format, as `BinaryPreferenceDataset`, a set, as `HelpSteer3`, or the dotted path of a
    class. `auto`: the format that the keys of the first row tell."""
    attributes: Annotated[tuple[str, ...], _COMMAS] = ()
    """Grades of each completion, keys of the data, that the heads of these names are evaluated by:
    a list, or text with commas. A run that learns grades reads its own."""
    prompt_key: str | None = None
    """The column of the prompt (a string or messages); other columns that could hold a part of it
    are then not read. None: found by its name, `context`, `prompt`, `instruction`, `question` or
    `query`, or messages."""
    chosen_key: str = "chosen"
    """`BinaryPreferenceDataset`: the key of the better completion."""
    rejected_key: str = "rejected"
    """`BinaryPreferenceDataset`: the key of the worse completion."""
    rating_key: str | None = None
    """The column of a completion's rating, the higher the better, in rows of one completion; or of
    the ratings of `completions`. None: `score`."""
    placeholder_token: str = "ки"  # Math-Shepherd's
    """Steps for a process reward model, in `MathShepherd` and `PlaceholderSteps`: the text that
    stands after each step in the data."""
    neutral_is_right: bool = True
    """`PRM800K`: whether the rating 0 makes a step right, as in Qwen's models. TRL's script makes
    it wrong."""

    def check(self) -> None:
        super().check()
        if self.chosen_key == self.rejected_key:
            raise self.error("chosen_key rejected_key", "two different columns")
        for key in ("chosen_key", "rejected_key"):
            column = getattr(self, key)
            # Once the row's prompt is read it has this name: a completion would be its own prompt.
            if column == "prompt":
                need = "a column of another name: this one is the prompt"
                raise self.error(key, need, "rename the column in the data")
            if column == self.prompt_key:
                raise self.error(f"prompt_key {key}", "two different columns")


_Set = TypeVar("_Set", bound=SetConfig)


class _Sets(Strict, Generic[_Set]):
    """What the sections of comparisons and of prompts have in common."""

    train: tuple[_Set, ...]
    """The training sets, mixed by their weights."""
    validation: tuple[_Set, ...] = ()
    """The validation sets: of comparisons, each is reported by its name; of prompts, they are
    validated on together."""
    shuffle: bool = True
    """A new order of the training data in each epoch, determined by the seed of the run."""
    max_input_seq_length: PositiveInt | None = None
    """Longest conversation, or prompt of GRPO, in tokens. None: as
    `policy.max_total_sequence_length` allows."""

    def check(self) -> None:
        if not self.train:
            raise self.error("train", "at least one set of data", "give data.train_data_path")
        names = [dataset.name for dataset in self.validation]
        for i, dataset in enumerate(self.validation):
            if dataset.name in names[:i]:
                summary = "two validation sets have the same name"
                need = "a name for each: it names their metrics"
                raise ConfigError(
                    summary, field=f"validation[{i}].name", got=dataset.name, need=need
                )
            if dataset.weight != 1.0:
                summary = "a validation set has a weight, which would have no effect"
                need = "no such key: each of its rows counts once"
                raise ConfigError(
                    summary, field=f"validation[{i}].weight", got=dataset.weight, need=need
                )


class DataConfig(_Sets[DatasetConfig]):
    """The training and validation sets, and what happens to rows that do not fit."""

    truncation: Truncation = "drop"
    """Too long completions are left out and counted (`drop`), lose their oldest messages and then
    their oldest tokens (`truncate_left`), or are an `error`."""
    ties: Ties = "drop"
    """Pairs of equal rank: left out and counted (`drop`), or half a win for each side (`half`)."""
    labels: Annotated[tuple[FilePath, ...], _COMMAS] = ()
    """Files of `treeward check-labels`, a list or text with commas: what becomes of the pairs whose
    labels look wrong. The data stays as it is."""
    suspects: Suspects = "proposed"
    """What becomes of each pair that `labels` does not keep: what its line proposes (`proposed`);
    or it is left out (`drop`), turned round (`flip`), learnt with the probability that its label is
    right (`soft`), or weighed by that (`weight`)."""
    cache_dir: FilePath | None = None
    """Where tokenized data is kept. None: `.treeward_cache` in the working folder."""


class PromptSetConfig(SetConfig):
    """One set of prompts: its format, where it lies, how to read it, and which environment rewards
    completions."""

    dataset_name: str = "ResponseDataset"
    """A format, as `ResponseDataset`, a set, as `OpenMathInstruct-2`, or the dotted path of a
    class."""
    input_key: str | None = None
    """The key of the question (a string or messages). None: that of the format, `input` of a
    `ResponseDataset`."""
    output_key: str | None = None
    """The key of the answer, the `ground_truth` of environments. None: that of the format, as
    `output`."""
    env_name: str | None = None
    """Environment of rows that name none; a mixture is one of the type `hybrid`. None:
    `reward_model`, or the only one besides `grpo.gold_environment`."""
    max_samples: PositiveInt | None = None
    """Read only this number of rows, the first ones. None: all."""

    @property
    def comparisons(self) -> DatasetConfig:
        """The same set as comparisons, for questions to a judge: `dataset_name` is then one of a
        reward model's."""
        # Only what the file gives: the two sections have other defaults, as of dataset_name.
        keys: dict[str, Any] = {}
        for key in SetConfig.model_fields:
            if key in self.model_fields_set:
                keys[key] = getattr(self, key)
        if self.input_key is not None:
            keys["prompt_key"] = self.input_key
        return DatasetConfig(**keys)


class PromptDataConfig(_Sets[PromptSetConfig]):
    """The prompts to train on and to validate on."""
