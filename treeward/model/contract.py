"""The scoring contract: how a model makes a score, with conversations to replay; it lies beside the weights.

    contract = read_contract("results/rm/final")       # None for a model that treeward has not written
    contract.rendering.max_length, contract.read.token, contract.golden[0].score

A score depends on more than weights: the chat template, one BOS or two, the token that is read, the number format, the
function applied to the number. `reward_contract.json` records all of them, and anyone can replay its golden
conversations, with their token ids and scores, in another program, on another machine or on a server.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from transformers.utils.hub import cached_file

from treeward.config.base import Strict
from treeward.config.reward_shaping import RewardCalibration, RewardShapingConfig
from treeward.errors import ModelError
from treeward.model.pretrained import check_local
from treeward.storage import write_text

Dtype = Literal["float32", "bfloat16", "float16"]
"""Number formats that a backbone computes in."""

CONTRACT_FILE = "reward_contract.json"
CONTRACT_VERSION = 2

SCORE_MEANING = "higher is better; only differences between completions of one prompt have a meaning"
"""Meaning of the value of a head trained on comparisons."""


ESTIMATE_MEANING = "an estimate of the score, which is the mean of all; where they differ it is uncertain"
"""Meaning of the value of one of several heads that have learnt the same score."""


class RenderingContract(Strict):
    """From messages to token ids: the whole conversation is rendered once, without a generation prompt."""

    chat_template_sha256: str
    """SHA-256 of the template's text, the content of the folder's chat_template.jinja."""
    chat_template: str
    """The template's text, to show a change line by line."""
    template_in_folder: bool
    """Whether the model folder holds a template; without one treeward uses its own, and other programs none."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the template."""
    max_length: int | None = None
    """Longest conversation in tokens; null: the model's positions."""
    truncation: Literal["drop", "truncate_left", "error"] = "drop"
    """Handling of longer conversations: no score, removal of the oldest context, or an error."""
    frame: Literal["none", "bos", "cls_sep"] = "none"
    """The tokens that every conversation has exactly once: a BOS in front, or CLS and SEP around it. The template
    writes them; tokenize with `add_special_tokens=False`."""
    bos_token_id: int | None = None
    """The tokenizer's begin-of-text token."""
    eos_token_id: int | None = None
    """The tokenizer's end-of-text token."""
    pad_token_id: int | None = None
    """The padding token: transformers reads the score before it. It ends no conversation of a model that treeward has
    trained."""
    tokenizer_sha256: str
    """SHA-256 of the tokenizer's vocabulary, merges and special tokens."""


class ReadContract(Strict):
    """Where in a conversation its score is read."""

    position: Literal["last token", "before padding", "pooled"] = "last token"
    """"last token": by length, whatever the token is. "before padding": at the last token that is not
    `rendering.pad_token_id`, as plain transformers reads a classifier that treeward has not trained. "pooled": as the
    encoder's own class does it."""
    plain_transformers: bool = True
    """Whether transformers alone, given padded rows, reads the same scores from this folder."""
    token: Literal["eos", "newline", "other"] | None = None
    """Kind of the last token of a question with its completion; null: the template refuses this conversation."""


class DtypeContract(Strict):
    """Number formats."""

    weights: str = "float32"
    """Of the backbone's weights on disk (of most of them, if they differ)."""
    head: str = "float32"
    """Of the head's weights on disk; the head always computes in float32."""
    config: str = "float32"
    """The `dtype` of config.json, in which transformers loads the weights; without one, `weights`."""
    compute: Literal["float32"] = "float32"
    """Of the computation of the golden scores."""


class HeadContract(Strict):
    """One value that the model gives to a conversation."""

    name: str = "reward"
    """The head's name."""
    meaning: str = SCORE_MEANING
    """The meaning of a value."""
    weight: float = 1.0
    """Its weight; the score is the sum of weight times value over the heads."""


class WeightsContract(Strict):
    """Which weights they are."""

    architecture: str
    """The class of transformers that loads them."""
    num_parameters: int
    """Numbers in all tensors on disk."""
    num_tensors: int
    """Tensors on disk."""
    shapes_sha256: str
    """SHA-256 of the names and shapes of the tensors on disk."""
    head_sha256: str
    """SHA-256 of the head's tensors: names, formats, shapes and the bytes on disk."""
    sha256: str | None = None
    """SHA-256 of the names of all tensors and the SHA-256 of each (name, format, shape and bytes), in the order of the
    names; null if they were not hashed, as in the checkpoints of a run."""
    tensors: dict[str, str] = {}
    """The first 12 digits of the SHA-256 of each tensor, to name changed tensors."""
    config: dict[str, Any]
    """The keys of config.json that describe the architecture."""


Mistake = Literal["read_before_end", "read_at_padding", "two_bos", "no_bos"]
"""A mistake that changes the score: to read it at the token before the last (padding and end are one token, or no end
was added), to read it at an end that is padding to this model, to put two BOS in front (the template's and the
tokenizer's), or to put none."""


class GoldenExample(Strict):
    """A conversation with its tokens and its score."""

    name: str
    """What is special about the conversation."""
    messages: list[dict[str, Any]]
    """The conversation."""
    token_ids: list[int]
    """Its tokens, as they are scored."""
    score: float
    """Its raw score, computed in float32 from the weights on disk."""
    heads: list[float]
    """The value of each head."""
    mistakes: dict[Mistake, float] = {}
    """The scores that known mistakes give."""


class ToleranceContract(Strict):
    """Largest difference from a golden score, in units of the score."""

    float32: float = Field(gt=0)
    """When computed in float32, on any device."""
    bfloat16: float = Field(gt=0)
    """When the backbone computes in bfloat16, or in float16, which rounds less."""

    def of(self, dtype: Dtype) -> float:
        """The tolerance of scores that a backbone computes in `dtype`."""
        return self.float32 if dtype == "float32" else self.bfloat16


class ScoringContract(Strict):
    """Everything that a model's score depends on: the content of `reward_contract.json`."""

    version: Literal[2] = 2
    """Version of the format."""
    treeward_version: str
    """The treeward that wrote it."""
    rendering: RenderingContract
    """From messages to token ids."""
    read: ReadContract
    """Where the score is read."""
    dtypes: DtypeContract = DtypeContract()
    """Number formats."""
    heads: list[HeadContract] = Field(default=[HeadContract()], min_length=1)
    """The heads, in order."""
    activation: Literal["none"] = "none"
    """The function applied to the head's output: none. (Some servers apply a sigmoid to models with one label.)"""
    problem_type: str | None = None
    """The key of config.json: "regression" keeps pipelines of transformers from applying a sigmoid."""
    calibration: RewardCalibration | None = None
    """Constants fitted on data, with their origin: `treeward calibrate`."""
    reward_shaping: RewardShapingConfig | None = None
    """The default shaping of scores into rewards."""
    weights: WeightsContract
    """Which weights they are."""
    golden: list[GoldenExample]
    """Conversations to replay; empty if the model's template or limit refuses all of them."""
    tolerance: ToleranceContract
    """Largest difference of a replayed score."""

    @property
    def has_estimates(self) -> bool:
        """Whether the heads are several estimates of one score, whose spread means something."""
        return len(self.heads) > 1 and all(head.meaning == ESTIMATE_MEANING for head in self.heads)

    @property
    def scores_sha256(self) -> str:
        """Identifies everything that a score depends on; calibration and shaping do not change it."""
        decisive = self.model_copy(update={"calibration": None, "reward_shaping": None})
        return text_sha256(json.dumps(decisive.model_dump(mode="json"), sort_keys=True))


def read_contract(name: str | Path) -> ScoringContract | None:
    """The contract of a model in a folder or on the hub, or None for a model that treeward has not written.

    Raises `ModelError`, naming the file and the field, for one that is damaged or of another version.
    """
    path = Path(name).expanduser() / CONTRACT_FILE
    if not path.parent.is_dir():
        check_local(str(name))
        try:
            found = cached_file(str(name), CONTRACT_FILE, _raise_exceptions_for_missing_entries=False)
        except OSError as error:
            raise ModelError("the scoring contract cannot be downloaded", where=str(name), got=str(error)) from error
        path = Path(found or path)
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content["version"]
        if version == CONTRACT_VERSION:
            return ScoringContract.model_validate(content)
    except (OSError, ValueError, TypeError, KeyError) as error:
        fix = "restore the file from where the model came from"
        raise ModelError("the scoring contract is damaged", where=str(path), got=str(error), fix=fix) from error
    raise ModelError(
        "the scoring contract is of another version",
        where=str(path),
        field="version",
        got=version,
        need=str(CONTRACT_VERSION),
        fix="if you trust the folder as it is: treeward verify MODEL --write --force",
    )


def keeps_padding(contract: ScoringContract | None) -> bool:
    """Whether a model with this contract, or none, is read before its own padding token, as plain transformers does."""
    return contract is None or contract.read.position == "before padding"


def write_contract(contract: ScoringContract, folder: str | Path) -> Path:
    """Write the contract into a model folder, replacing the one before at one moment; returns its path."""
    path = Path(folder).expanduser() / CONTRACT_FILE
    write_text(path, json.dumps(contract.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n")
    return path


def text_sha256(text: str) -> str:
    """SHA-256 of a text in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
