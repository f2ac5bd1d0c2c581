"""The scoring contract: how a model makes a score, beside its weights, with conversations to replay.

    contract = read_contract("results/rm/final")       # None for a model that treeward has not written
    contract.rendering.max_length, contract.read.token, contract.golden[0].score

A score depends on more than weights: the chat template, one BOS or two, the token that is read, the number format, what
is done to the number afterwards. `reward_contract.json` says all of it, and its golden conversations, with their token
ids and scores, let anyone see whether another program, machine or server still makes the same score.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from transformers.utils.hub import cached_file

from treeward.config.base import Strict
from treeward.config.reward_shaping import RewardCalibration, RewardShapingConfig
from treeward.errors import ModelError
from treeward.model.pretrained import check_local
from treeward.storage import write_text

__all__ = [
    "CONTRACT_FILE",
    "CONTRACT_VERSION",
    "Dtype",
    "DtypeContract",
    "GoldenExample",
    "HeadContract",
    "Mistake",
    "ReadContract",
    "RenderingContract",
    "ScoringContract",
    "ToleranceContract",
    "WeightsContract",
    "read_contract",
    "text_sha256",
    "write_contract",
]

Dtype = Literal["float32", "bfloat16"]
"""What a backbone computes in."""

CONTRACT_FILE = "reward_contract.json"
CONTRACT_VERSION = 2

SCORE_MEANING = (
    "higher is better; only differences between answers to one prompt have a meaning: P(a > b) = sigmoid(a - b)"
)
"""What the value of a head trained on comparisons means (Bradley and Terry 1952)."""


class RenderingContract(Strict):
    """From messages to token ids: the whole conversation is rendered once, without a generation prompt."""

    chat_template_sha256: str
    """SHA-256 of the template's text, which is what the model folder holds as chat_template.jinja."""
    chat_template: str
    """The template itself, so that a change can be shown line by line."""
    template_in_folder: bool
    """Whether the model folder brings a template; without one treeward takes its own, and other programs none."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables that the template is given."""
    max_length: int | None = None
    """Longest conversation in tokens; null: as long as the model's positions reach."""
    truncation: Literal["drop", "truncate_left", "error"] = "drop"
    """What becomes of longer ones: no score, the oldest context removed, or an error."""
    frame: Literal["none", "bos", "cls_sep"] = "none"
    """What every conversation has exactly once: a BOS in front, or CLS and SEP around it; the template writes them, and
    the tokenizer adds none (`add_special_tokens=False`)."""
    bos_token_id: int | None = None
    """The tokenizer's begin-of-text token."""
    eos_token_id: int | None = None
    """The tokenizer's end-of-text token."""
    pad_token_id: int | None = None
    """The padding token, which no conversation ends with: transformers reads the score before it."""
    tokenizer_sha256: str
    """SHA-256 of what the tokenizer does to a text (vocabulary, merges, normalisation, special tokens)."""

    @model_validator(mode="after")
    def _template_is_whole(self) -> RenderingContract:
        if text_sha256(self.chat_template) != self.chat_template_sha256:
            raise ValueError("chat_template and chat_template_sha256 do not belong together")
        return self


class ReadContract(Strict):
    """Where in a conversation its score is read."""

    position: Literal["last token", "pooled"] = "last token"
    """"last token": by length, whatever the token is. "pooled": as the encoder's own class does it."""
    plain_transformers: bool = True
    """Whether transformers alone, given padded rows, reads the same scores from this folder."""
    token: Literal["eos", "newline", "other"] | None = None
    """What ends a conversation of one question and one answer; null: the template refuses such a one."""


class DtypeContract(Strict):
    """Number formats."""

    weights: str = "float32"
    """Of the backbone's weights on disk; where there are several, of most of them."""
    head: str = "float32"
    """Of the head's weights on disk; the head computes in float32 in any case."""
    config: str = "float32"
    """What config.json names as `dtype`, which transformers loads the weights in; where it names none, `weights`."""
    compute: Literal["float32"] = "float32"
    """What the golden scores were computed in."""


class HeadContract(Strict):
    """One value that the model gives to a conversation."""

    name: str = "reward"
    """The head's name."""
    meaning: str = SCORE_MEANING
    """What a value says."""
    weight: float = 1.0
    """Its share in the score, which is the sum of weight times value over the heads."""


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
    names, whatever files they lie in; null where they were not hashed, as in the checkpoints of a run."""
    tensors: dict[str, str] = {}
    """The first 12 digits of the SHA-256 of each tensor, so that those that were changed can be named."""
    config: dict[str, Any]
    """What config.json says about the architecture."""

    @model_validator(mode="after")
    def _hashes_are_whole(self) -> WeightsContract:
        if len(self.tensors) != (0 if self.sha256 is None else self.num_tensors):
            raise ValueError("sha256 and tensors are of all num_tensors tensors, or of none")
        return self


Mistake = Literal["read_before_end", "two_bos", "no_bos"]
"""A known way to make another score of the same conversation: read it at the token before the last (padding and end are
one token, or no end was added), put two BOS in front (the template's and the tokenizer's), or none."""


class GoldenExample(Strict):
    """A conversation with what it must become."""

    name: str
    """What is special about it."""
    messages: list[dict[str, Any]]
    """The conversation."""
    token_ids: list[int]
    """Its tokens, as they are scored."""
    score: float
    """Its score, from the weights on disk in float32, nothing applied to it."""
    heads: list[float]
    """The value of each head."""
    mistakes: dict[Mistake, float] = {}
    """The scores that known mistakes give, so that they are recognised."""


class ToleranceContract(Strict):
    """By how much a score may differ from the golden one, in units of the score."""

    float32: float = Field(gt=0)
    """When computed in float32, on any device."""
    bfloat16: float = Field(gt=0)
    """When the backbone computes in bfloat16."""

    def of(self, dtype: Dtype) -> float:
        """The tolerance of scores that a backbone computes in `dtype`."""
        return self.float32 if dtype == "float32" else self.bfloat16


class ScoringContract(Strict):
    """Everything that a score of one model depends on: the content of `reward_contract.json`."""

    version: Literal[2] = 2
    """Of this file's form."""
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
    """What is applied to the head's output: nothing, a score is the raw value. (A sigmoid, as some servers apply to
    models of one label, would saturate.)"""
    problem_type: str | None = None
    """What config.json says under that name: "regression" keeps pipelines of transformers from applying a sigmoid."""
    calibration: RewardCalibration | None = None
    """Constants fitted on data, with their origin: `treeward calibrate`."""
    reward_shaping: RewardShapingConfig | None = None
    """How scores become rewards unless the user of the model says otherwise."""
    weights: WeightsContract
    """Which weights they are."""
    golden: list[GoldenExample]
    """Conversations to replay; none where the model's template or its limit refuses all of them."""
    tolerance: ToleranceContract
    """By how much a replayed score may differ."""

    @property
    def sha256(self) -> str:
        """Identifies the contract, whatever the layout of its file."""
        return text_sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True))

    @property
    def scores_sha256(self) -> str:
        """Identifies what a score depends on: it stays when constants are fitted to the scores."""
        return self.model_copy(update={"calibration": None, "reward_shaping": None}).sha256


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
            raise ModelError(
                "the scoring contract cannot be looked for",
                where=str(name),
                got=str(error).splitlines()[0],
                need="a folder, or a name on the hub and a way to it",
            ) from error
        if found is None:
            return None
        path = Path(found)
    if not path.is_file():
        return None
    remedy = "restore the file from where the model came from"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}, not an object")
    except (OSError, ValueError) as error:
        raise ModelError("the scoring contract is damaged", where=str(path), got=str(error), fix=remedy) from error
    if content.get("version") != CONTRACT_VERSION:
        raise ModelError(
            "the scoring contract is of another version",
            where=str(path),
            field="version",
            got=content.get("version"),
            need=str(CONTRACT_VERSION),
            fix="use the treeward version that wrote the model, or, if you trust the folder as it is, write a new one: "
            "treeward verify MODEL --write --force",
        )
    try:
        return ScoringContract.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ModelError(
            "the scoring contract is damaged",
            where=str(path),
            field=".".join(map(str, first["loc"])),
            got="nothing" if first["type"] == "missing" else first["input"],
            need=first["msg"],
            fix=remedy,
        ) from error


def write_contract(contract: ScoringContract, folder: str | Path) -> Path:
    """Write the contract into a model folder, replacing the one before at one moment; returns its path.

    Raises `ModelError` where the folder cannot be written.
    """
    path = Path(folder).expanduser() / CONTRACT_FILE
    try:
        write_text(path, json.dumps(contract.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ModelError(
            "the scoring contract cannot be written",
            where=str(path),
            got=str(error),
            need="a model folder that exists and can be written",
        ) from error
    return path


def text_sha256(text: str) -> str:
    """SHA-256 of a text in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
