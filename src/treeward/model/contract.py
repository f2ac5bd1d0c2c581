"""The scoring contract: everything that a score depends on, with conversations to replay, beside
the weights.

    contract = read_contract("results/rm/final")        # None for a model of others
    contract.rendering.max_length, contract.read.token, contract.golden[0].score

Anyone can replay the golden conversations of `reward_contract.json`, in another program, machine or
server.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from transformers.utils.hub import cached_file

from treeward.config.base import Strict
from treeward.data.conversation import Conversation
from treeward.digests import reseal
from treeward.errors import ModelError
from treeward.model.pretrained import check_local
from treeward.storage import write_text

logger = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16", "float16"]
"""Number formats that a backbone computes in."""

CONTRACT_FILE = "reward_contract.json"
CONTRACT_VERSION = 2
MOST_GOLDEN = 100
"""Golden conversations of a contract. treeward signs eleven at most; each is scored whenever the
model is verified."""

SCORE_MEANING = (
    "higher is better; only differences between completions of one prompt have a meaning"
)
"""Meaning of the value of a head trained on comparisons."""

STEPS_MEANING = "a probability, made of those of the steps that each is right"
"""Meaning of the score of a process reward model."""

ESTIMATE_MEANING = (
    "an estimate of the score, which is the mean of all; where they differ it is uncertain"
)
"""Meaning of the value of one of several heads that have learnt the same score."""


class RenderingContract(Strict):
    """From messages to token ids: the whole conversation is rendered once, without a generation
    prompt.

    `template_in_folder`: else treeward uses its default, and other programs none. `max_length`: in
    tokens; null: the model's positions. `trained_length`: the limit in training; longer ones are
    scored, with a warning. `frame`: the tokens that every conversation begins (and ends) with,
    written by the template: tokenize with `add_special_tokens=False`. `num_bos`: how many of them,
    where it is not one as the tokenizer adds. `tokenizer_sha256`: of vocabulary, merges, special
    tokens.
    """

    chat_template_sha256: str
    chat_template: str
    template_in_folder: bool
    chat_template_kwargs: dict[str, Any] = {}
    max_length: int | None = None
    trained_length: int | None = None
    truncation: Literal["drop", "truncate_left", "error"] = "drop"
    frame: Literal["none", "bos", "cls_sep"] = "none"
    num_bos: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tokenizer_sha256: str

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of a `Renderer`, but for the template, which is its tokenizer's."""
        return self.model_dump(
            include={"chat_template_kwargs", "num_bos", "max_length", "truncation"}
        )


class ReadContract(Strict):
    """The position in a conversation at which its score is read: "last token" by length; "before
    padding", at the last token that is not `rendering.pad_token_id`; "step marks", at each
    `steps.token` of a process reward model; "pooled", by the encoder's class. `plain_transformers`:
    it reads the same scores from padded rows. `token`: the kind of the last token; null: the
    template refuses the probe."""

    position: Literal["last token", "before padding", "pooled", "step marks"] = "last token"
    plain_transformers: bool = True
    token: Literal["eos", "newline", "other"] | None = None


class DtypeContract(Strict):
    """Number formats on disk: of most of the backbone's weights, and of the head's. `config`: that
    transformers loads the weights in, by config.json. `compute`: of golden scores."""

    weights: str = "float32"
    head: str = "float32"
    config: str = "float32"
    compute: Literal["float32"] = "float32"


class HeadContract(Strict):
    """One value that the model gives to a conversation; the score is the sum of weight times value
    over the heads."""

    name: str = "reward"
    meaning: str = SCORE_MEANING
    weight: float = 1.0


class StepsContract(Strict):
    """How a process reward model scores. `token`: stands after each step of a completion, and is
    where the step is read. `score`: what is made of the probabilities that the steps are right, the
    softmax of two logits or the sigmoid of their difference."""

    token: str
    score: Literal["product", "min", "last"] = "product"


class WeightsContract(Strict):
    """The identity of the weights, in SHA-256. `architecture`: the class of transformers.
    `shapes_sha256`: of names and shapes; `head_sha256`: of the head's tensors; `sha256`: of all
    tensors, null if not computed; `tensors`: the first 12 digits of each. `config`: the keys of
    config.json that describe the architecture."""

    architecture: str
    num_parameters: int
    num_tensors: int
    shapes_sha256: str
    head_sha256: str
    sha256: str | None = None
    tensors: dict[str, str] = {}
    config: dict[str, Any]


Mistake = Literal["read_before_end", "read_at_padding", "two_bos", "no_bos"]
"""A mistake that changes the score: reading before the last token (padding and end are the same
token, or there is no end), reading at an end that is this model's padding, a BOS too many (the
tokenizer's, beside the template's), or one too few."""


class GoldenExample(Strict):
    """A conversation with its token ids, its raw score in float32 from the weights on disk, the
    value of each head (of a process reward model, the log-odds of each step), and the scores of
    known mistakes. `name`: its speciality. `spread`: of the score, where the contract has a
    `SpreadContract`. `chat_template_kwargs`: its variables, tools among them."""

    name: str
    messages: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any] = {}
    token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]]
    score: float
    heads: list[float]
    spread: float | None = None
    mistakes: dict[Mistake, float] = {}

    @property
    def conversation(self) -> Conversation:
        """The messages with their template variables."""
        return Conversation(self.messages, chat_template_kwargs=self.chat_template_kwargs)


class ToleranceContract(Strict):
    """Largest difference from a golden score, in units of the score, by the number format of the
    computation."""

    float32: float = Field(gt=0)
    bfloat16: float = Field(gt=0)

    def of(self, dtype: Dtype) -> float:
        """The tolerance of scores that a backbone computes in `dtype`; float16 rounds less than
        bfloat16."""
        if dtype == "float32":
            return self.float32
        return self.bfloat16


class NormalizationConstants(Strict):
    """Mean and standard deviation (of the population) of the scores of all completions of the
    calibration data."""

    mean: float
    std: PositiveFloat


class CalibratedTemperature(Strict):
    """The temperature T at which sigmoid((s_i - s_j) / T) predicts the data's preferences best.
    `nll_before`, `nll_after`: mean negative log-likelihood at T = 1 and at T, in nats. `num_pairs`:
    ordered pairs of completions."""

    value: PositiveFloat
    nll_before: NonNegativeFloat
    nll_after: NonNegativeFloat
    num_pairs: PositiveInt


class LengthCurve(Strict):
    """The score that length alone predicts: piecewise linear between knots, constant beyond.
    `lengths`: in characters, strictly increasing; `values`: the score at each. `residual_*`: of the
    calibration data's scores after the subtraction."""

    lengths: tuple[float, ...] = Field(min_length=1)
    values: tuple[float, ...] = Field(min_length=1)
    residual_mean: float
    residual_std: PositiveFloat
    residual_temperature: CalibratedTemperature | None = None

    def check(self) -> None:
        if len(self.lengths) != len(self.values) or list(self.lengths) != sorted(set(self.lengths)):
            raise self.error(
                "lengths values", "strictly increasing lengths, and one value for each"
            )


class CalibrationProvenance(Strict):
    """The data that the constants were fitted on. `fingerprint`: SHA-256 over the comparisons in
    order. `num_conversations`, `num_failed`: completions with and without a score. `date`: as
    2025-01-31, in UTC."""

    data: str
    fingerprint: str
    num_comparisons: PositiveInt
    num_conversations: PositiveInt
    num_failed: NonNegativeInt
    treeward_version: str
    date: str


class RewardCalibration(Strict):
    """The constants of `treeward calibrate` for one model; None if a fit was impossible."""

    normalization: NormalizationConstants | None = None
    length_curve: LengthCurve | None = None
    temperature: CalibratedTemperature | None = None
    provenance: CalibrationProvenance | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_earlier_versions(cls, raw: Any) -> Any:
        """Leave out what an earlier version wrote beside the constants, and a curve over lengths in
        tokens."""
        if not isinstance(raw, Mapping):
            return raw
        values = dict(raw)
        values.pop("heads", None)
        curve = values.get("length_curve")
        if isinstance(curve, Mapping):
            curve = dict(curve)
            if curve.pop("unit", None) == "tokens":
                logger.warning(
                    "A length curve over tokens is not read: `treeward calibrate` fits one over "
                    "characters."
                )
                curve = None
            values["length_curve"] = curve
        return values


class SpreadMetrics(Strict):
    """What a spread is worth on held-out pairs (`scoring/spread_metrics.py`).

    `nll`, `ece`: of the margins by themselves, divided by a temperature (`_temperature`), and with
    their spread (`_spread`). `ranking`: by beta. `auroc_margin`, `auroc_sureness`: how well
    |margin| and |margin| / spread tell pairs in the right order from others; null where all are
    right.
    """

    num_pairs: PositiveInt
    accuracy: NonNegativeFloat
    nll: NonNegativeFloat
    nll_temperature: NonNegativeFloat
    nll_spread: NonNegativeFloat
    ece: NonNegativeFloat
    ece_temperature: NonNegativeFloat
    ece_spread: NonNegativeFloat
    elce: NonNegativeFloat
    euce: NonNegativeFloat
    confident_true: NonNegativeFloat
    confident_false: NonNegativeFloat
    ranking: dict[str, float]
    auroc_margin: float | None
    auroc_sureness: float | None


class SpreadContract(Strict):
    """The spread of a score, by a Laplace approximation of the head: |A (features - mean)|, its
    standard deviation to the average completion.

    `file`: with A and the mean, in the model's folder; `sha256`: of its bytes. `head_sha256`: the
    head that it was fitted to. `penalty`: the prior's precision, of features with a root mean
    square of 1. `trained_on`: the comparisons whose curvature it has, `num_pairs` pairs;
    `held_out`: those that chose the penalty, with `metrics`, each half measured by the other's.
    `tolerance`: of the golden spreads.
    """

    method: Literal["laplace"] = "laplace"
    file: Annotated[str, Field(pattern=r"^spread/[0-9a-f]{12}\.safetensors$")]
    sha256: str
    head_sha256: str
    penalty: PositiveFloat
    num_pairs: PositiveInt
    trained_on: CalibrationProvenance
    held_out: CalibrationProvenance
    metrics: SpreadMetrics
    tolerance: ToleranceContract


class ScoringContract(Strict):
    """Everything that a model's score depends on: the content of `reward_contract.json`.

    `activation`: some servers apply a sigmoid to models with one label, and pipelines of
    transformers do unless `problem_type` is "regression". `steps`: for a process reward model, null
    for any other. `spread`: how sure a score is, null if `treeward calibrate` has not fitted it.
    `golden`: conversations to replay, empty if the model refuses all of them. `readme_sha256`: of
    README.md, the model card, as it was exported; null for a folder without one. No score depends
    on `calibration`, `spread` and README.md.
    """

    version: Literal[2] = 2
    treeward_version: str
    rendering: RenderingContract
    read: ReadContract
    dtypes: DtypeContract = DtypeContract()
    heads: list[HeadContract] = Field(default=[HeadContract()], min_length=1)
    steps: StepsContract | None = None
    activation: Literal["none"] = "none"
    problem_type: str | None = None
    calibration: RewardCalibration | None = None
    spread: SpreadContract | None = None
    weights: WeightsContract
    golden: list[GoldenExample] = Field(max_length=MOST_GOLDEN)
    tolerance: ToleranceContract
    readme_sha256: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_shaping(cls, raw: Any) -> Any:
        """A contract without the key of an earlier version, in which it could hold a section of
        shaping."""
        if not isinstance(raw, Mapping):
            return raw
        return {key: value for key, value in raw.items() if key != "reward_shaping"}

    def check(self) -> None:
        has_golden = all(example.spread is not None for example in self.golden)
        if self.spread is not None and not has_golden:
            raise self.error("spread golden", "a spread for each golden conversation")

    @property
    def has_estimates(self) -> bool:
        """Whether the heads are several estimates of one score, whose spread means something."""
        return len(self.heads) > 1 and all(head.meaning == ESTIMATE_MEANING for head in self.heads)

    @property
    def has_spread(self) -> bool:
        """Whether each score has a spread: of several estimates, or by a Laplace approximation."""
        return self.has_estimates or self.spread is not None

    @property
    def scores_sha256(self) -> str:
        """Identifies everything that a score depends on; calibration, spread and README.md do not
        change it."""
        # With keys that contracts had when the first hashes were taken: a model's hash must not
        # change with the version of treeward.
        left_out: Any = {"readme_sha256": True, "spread": True, "golden": {"__all__": {"spread"}}}
        decisive = self.model_dump(mode="json", exclude=left_out)
        decisive |= {"calibration": None, "reward_shaping": None}
        if self.steps is None:
            decisive.pop("steps")
        return text_sha256(json.dumps(decisive, sort_keys=True))


def read_contract(name: str | Path) -> ScoringContract | None:
    """The contract of a model in a folder or on the hub; None if treeward has not written the
    model. Raises `ModelError`, naming the file and the field, for a contract that is damaged or of
    another version."""
    path = file_of_model(name, CONTRACT_FILE)
    if not path.is_file():
        return None
    version = None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        # Before the rest: fields of another version are no damage.
        version = content["version"]
        return ScoringContract.model_validate(content)
    # A RecursionError is of very many brackets in a file that anybody may have written.
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        if version in (None, CONTRACT_VERSION):
            fix = "restore the file from where the model came from"
            raise ModelError(
                "the scoring contract is damaged", where=str(path), got=str(error), fix=fix
            ) from error
        raise ModelError(
            "the scoring contract is of another version",
            where=str(path),
            field="version",
            got=version,
            need=str(CONTRACT_VERSION),
            fix="if you trust the folder as it is: treeward verify MODEL --write --force",
        ) from error


def file_of_model(name: str | Path, file: str) -> Path:
    """The path of a file of a model in a folder or on the hub, from where it is downloaded; it may
    be missing. Raises `ModelError` for a name that is neither."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder / file
    # A mistyped folder is said to be one, and not looked for on the hub.
    check_local(str(name))
    try:
        cached = cached_file(str(name), file, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise ModelError(f"{file} cannot be downloaded", where=str(name), got=str(error)) from error
    return Path(cached or folder / file)


def keeps_padding(contract: ScoringContract | None) -> bool:
    """Whether a model with this contract, or None, is read before its padding token, as in plain
    transformers."""
    return contract is None or contract.read.position == "before padding"


def write_contract(contract: ScoringContract, folder: str | Path) -> Path:
    """Write the contract into a model folder, replacing an older one atomically; returns its path.
    In a checkpoint of a run its digest is replaced too: to calibrate the model there is no
    damage."""
    path = Path(folder).expanduser() / CONTRACT_FILE
    content = contract.model_dump(mode="json")
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    reseal(path)
    return path


def readme_sha256(folder: Path) -> str | None:
    """SHA-256 of a folder's README.md, in hexadecimal; None where there is none."""
    path = folder / "README.md"
    if not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def text_sha256(text: str) -> str:
    """SHA-256 of a text in UTF-8, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
