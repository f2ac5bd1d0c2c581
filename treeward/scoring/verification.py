"""`verify`: does this folder, on this machine, still make the scores that its scoring contract says?

    verification = verify("results/rm/final", device="cuda")
    verification.equal, verification.first_difference      # True, None; or the part that differs first, with the remedy
    verify("results/rm/final", quick=True)                 # hashes the head alone; all tensors take a second per GB

Everything between messages and a score is compared in the order in which it acts: the contract itself, the files, the
chat template, the tokens, the read position, the number format, the activation, the weights. A wrong part makes later
ones look wrong too, so the first is the cause.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase

from treeward.data.rendering import Renderer
from treeward.errors import DataError, ModelError, TreewardError
from treeward.model.contract import CONTRACT_FILE, Dtype, ScoringContract, keeps_padding, read_contract, text_sha256
from treeward.model.export import HTTP_ERROR
from treeward.model.loading import load_reward_model
from treeward.model.pretrained import check_local, choose_device, load_tokenizer
from treeward.model.reward_model import RewardModel, stored_heads
from treeward.model.stored import (
    StoredTensor,
    architecture_of,
    dtype_of,
    named_dtype,
    num_parameters,
    of_head,
    raw_config,
    raw_pad_token_id,
    read_stored,
    sha256_of,
    shapes_sha256,
)
from treeward.scoring.diagnosis import PARTS, Check, Part, diagnose, restore
from treeward.scoring.golden import HASH_DIGITS, combined_heads, exact_scoring, frame_of, tokenizer_sha256

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_TOKENIZER_FILES = "tokenizer.json and tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found. `checks`: one per part, in order. `largest_difference`: of golden scores, None if not scored.

    `num_tensors`: tensors whose bytes were compared, beside the head's: none in a quick verification, and with the
    contract of a checkpoint.
    """

    model: str
    checks: tuple[Check, ...]
    num_tensors: int = 0
    num_scores: int = 0
    largest_difference: float | None = None
    tolerance: float | None = None

    @property
    def first_difference(self) -> Check | None:
        """The part that differs first: the cause, as far as the order can tell."""
        return next((check for check in self.checks if check.state == "differs"), None)

    @property
    def equal(self) -> bool:
        """Whether nothing differs and the scores were replayed."""
        return self.first_difference is None and self.largest_difference is not None

    @property
    def could_compare(self) -> bool:
        """Whether there was a contract to compare with."""
        return self.checks[0].state == "equal"


def verify(
    name: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    quick: bool = False,
    trust_remote_code: bool = False,
) -> Verification:
    """Replay the contract of a model in a folder or on the hub.

    `device`: None is a GPU where there is one. `dtype`: of the backbone; other than in float32 scores are compared to
    the contract's tolerance for bfloat16. `quick`: of the weights on the disk only the head is hashed. What is wrong
    with the model is in the result; `ModelError` is raised where there is no model at all.
    """
    folder = local_folder(name, trust_remote_code=trust_remote_code)
    try:
        contract = read_contract(folder)
        if contract is None:
            raise ModelError(
                "there is no scoring contract",
                got=f"no {CONTRACT_FILE}",
                fix=f"copy it from the export, or, if the folder is as it should be: treeward verify {name} --write",
            )
    except ModelError as error:
        others = [Check(part, "not checked", "there is no contract to compare with") for part in PARTS[1:]]
        return Verification(str(name), (_difference("contract", error), *others))
    return _Replay(str(name), folder, contract, choose_device(device), dtype, quick, trust_remote_code).run()


def local_folder(name: str | Path, *, trust_remote_code: bool = False) -> Path:
    """The folder of a model; one on the hub is downloaded. Raises `ModelError` where there is none."""
    folder = Path(name).expanduser()
    if (folder / "model" / "config.json").is_file() and not (folder / "config.json").is_file():
        raise ModelError("the model is inside this folder", where=str(name), fix=f"use {name}/model")
    if folder.is_dir():
        return folder
    check_local(str(name))
    try:
        patterns = [*_PATTERNS, *(["*.py"] if trust_remote_code else [])]
        return Path(snapshot_download(str(name), allow_patterns=patterns))
    except (OSError, ValueError, HTTP_ERROR) as error:
        raise ModelError(
            "there is no such model",
            where=str(name),
            got=str(error).strip().partition("\n")[0],
            need="a folder that holds a model, or a hub name",
        ) from error


def _difference(part: Part, error: TreewardError) -> Check:
    got = None if error.got is None else str(error.got)
    summary = error.summary if error.field is None else f"{error.summary}, field {error.field}"
    return Check(part, "differs", summary, got, error.need, error.fix or restore("the files"))


@dataclass
class _Replay:
    """One verification. Each step keeps the differences of its part, and returns what to say if there are none."""

    name: str
    folder: Path
    contract: ScoringContract
    device: torch.device
    dtype: torch.dtype
    quick: bool
    trust_remote_code: bool
    found: dict[Part, Check] = field(default_factory=dict)
    values: list[list[float]] = field(default_factory=list)
    num_tensors: int = 0
    config: dict[str, Any] = field(init=False)
    stored: list[StoredTensor] = field(init=False)
    tokenizer: PreTrainedTokenizerBase = field(init=False)
    renderer: Renderer = field(init=False)
    model: RewardModel = field(init=False)

    def run(self) -> Verification:
        contract, golden = self.contract, self.contract.golden
        equal = {"contract": f"version {contract.version}, written by treeward {contract.treeward_version}"}
        steps: list[tuple[Part, Callable[[], str | None]]] = [
            ("files", self.files),
            ("template", self.template),
            ("tokens", self.tokens),
            ("weights", self.load),
            ("read position", self.read_position),
            ("precision", self.precision),
            ("activation", self.activation),
            ("weights", self.weights),
        ]
        for part, step in steps:
            try:
                summary = step()
            except TreewardError as error:  # without this part the others cannot be compared
                self.found.setdefault(part, _difference(part, error))
                break
            if summary is not None:
                equal[part] = summary
        first = next((part for part in PARTS if part in self.found), None)
        why = f"it cannot be, because of the {first}" if first else "the contract has no golden scores"
        checks = tuple(
            self.found.get(part)
            or (Check(part, "equal", equal[part]) if part in equal else Check(part, "not checked", why))
            for part in PARTS
        )
        off = [abs(got - one.score) for got, one in zip(self.scores, golden, strict=False)]
        largest = max(off) if off and all(map(math.isfinite, off)) else None
        tolerance = contract.tolerance.of(self.computed_in)
        return Verification(self.name, checks, self.num_tensors, len(golden), largest, tolerance)

    @property
    def scores(self) -> list[float]:
        return [combined_heads(heads, self.contract.heads) for heads in self.values]

    @property
    def computed_in(self) -> Dtype:
        return "float32" if self.dtype == torch.float32 else "bfloat16"

    def differs(self, part: Part, summary: str, got: Any, need: Any, fix: str) -> None:
        """The first difference of a part is the one that is kept."""
        self.found.setdefault(part, Check(part, "differs", summary, str(got), str(need), fix))

    def compare(self, part: Part, what: str, got: Any, need: Any, file: str, summary: str) -> None:
        """`what`: the setting; `file`: where it stands; `summary`: what it means that it differs."""
        if got != need:
            self.differs(part, summary, f"{what} {got}", f"{what} {need}", restore(file))

    def files(self) -> str:
        self.config = raw_config(self.folder)
        # Compared in the file: a limit or a window may change no conversation as short as the golden ones.
        got, need = architecture_of(self.config), self.contract.weights.config
        for key in sorted(got.keys() | need.keys()):
            summary = f"config.json is of another architecture, by {key}"
            self.compare("files", key, got.get(key), need.get(key), "config.json", summary)
        self.stored = read_stored(self.folder)
        self.tokenizer = load_tokenizer(str(self.folder), trust_remote_code=self.trust_remote_code)
        return f"{len(self.stored)} tensors, {num_parameters(self.stored):,} numbers"

    def template(self) -> str:
        need, raw = self.contract.rendering, self.tokenizer.chat_template
        self.renderer = Renderer(
            self.tokenizer,
            chat_template_kwargs=need.chat_template_kwargs,
            max_length=need.max_length,
            truncation=need.truncation,
        )
        # What the renderer adds to a template (a fixed date, a BOS) is in that of an export already.
        texts = [raw if isinstance(raw, str) else "", self.renderer.chat_template]
        if not raw and need.template_in_folder:
            summary = "the chat template is gone: treeward falls back to its own, other programs have none"
            self.differs("template", summary, "none", f"sha256 {need.chat_template_sha256[:12]}",
                         restore("chat_template.jinja"))  # fmt: skip
        elif need.chat_template_sha256 not in map(text_sha256, texts):
            lines = [text.split("\n") for text in (texts[0] or texts[1], need.chat_template)]
            number = _first_difference(*lines)
            got, want = (json.dumps(one[number]) if number < len(one) else "(the text has ended)" for one in lines)
            self.differs("template", "the chat template was changed", f"line {number + 1}: {got}",
                         f"line {number + 1}: {want}", restore("chat_template.jinja"))  # fmt: skip
        return f"sha256 {need.chat_template_sha256[:12]}"

    def tokens(self) -> str:
        need, golden = self.contract.rendering, self.contract.golden
        summary = "another tokenizer: vocabulary, merges or special tokens"
        own = tokenizer_sha256(self.tokenizer)
        self.compare("tokens", "sha256", own[:12], need.tokenizer_sha256[:12], _TOKENIZER_FILES, summary)
        for example in golden:
            summary, want = f"the conversation {example.name!r} becomes other tokens", example.token_ids
            try:
                fitted = self.renderer.fit(example.messages)
            except DataError as error:
                self.differs("tokens", summary, error.summary, f"{len(want)} tokens", restore(_TOKENIZER_FILES))
                continue
            got = [] if fitted is None else list(fitted.token_ids)  # none: it is too long
            if got != want:
                at, decode = _first_difference(got, want), self.tokenizer.decode
                of_got, of_want = (f"{one[at : at + 4]} at {at}, {decode(one[at : at + 4])!r}" for one in (got, want))
                self.differs("tokens", summary, of_got, of_want, restore(_TOKENIZER_FILES))
        rows = [example.token_ids for example in golden]
        if rows:
            summary = "another frame is put around conversations"
            self.compare("tokens", "frame", frame_of(self.renderer, rows), need.frame, _TOKENIZER_FILES, summary)
        return f"{len(rows)} conversations, {sum(map(len, rows))} tokens"

    def load(self) -> None:
        """Load the weights, and score the golden conversations."""
        need = self.contract.weights
        if shapes_sha256(self.stored) != need.shapes_sha256:
            raise ModelError(
                "these are tensors of other names or shapes",
                got=f"{len(self.stored)} tensors, {num_parameters(self.stored):,} numbers",
                need=f"{need.num_tensors} tensors, {need.num_parameters:,} numbers of {need.architecture}",
                fix=restore("the weights"),
            )
        self.model = load_reward_model(
            self.folder,
            tokenizer=copy.deepcopy(self.tokenizer),  # loading mends its padding
            dtype=self.dtype,
            device=self.device,
            several_heads=True,
            trust_remote_code=self.trust_remote_code,
            keep_padding=keeps_padding(self.contract),
        ).model
        with exact_scoring(self.model):
            self.values = self.model.score_tokens([example.token_ids for example in self.contract.golden]).tolist()

    def read_position(self) -> str:
        contract, need = self.contract, self.contract.rendering.pad_token_id
        is_plain = contract.read.plain_transformers
        summary = "{} pads with another token: transformers may read the score elsewhere"
        for file, own, matters in (
            ("config.json", raw_pad_token_id(self.config), is_plain or keeps_padding(contract)),
            ("tokenizer_config.json", self.tokenizer.pad_token_id, is_plain),
        ):
            if matters:
                self.compare("read position", "pad_token_id", own, need, file, summary.format(file))
        return f"{contract.read.position}, {contract.read.token or 'whatever it is'}"

    def precision(self) -> str:
        need, (backbone, head) = self.contract.dtypes, self.split
        for what, tensors, want in (("backbone", backbone, need.weights), ("head", head, need.head)):
            summary = f"the {what}'s weights are stored in another number format"
            self.compare("precision", "format", dtype_of(tensors), want, "the weights", summary)
        for key in ("dtype", "torch_dtype"):
            if (dtype := named_dtype(self.config, key)) is not None:
                summary = f"config.json has transformers load the weights in another number format, by {key}"
                self.compare("precision", key, dtype, need.config, "config.json", summary)
        return f"weights in {need.weights}, head in {need.head}, loaded in {need.config}"

    def activation(self) -> str:
        got, need = self.config.get("problem_type"), self.contract.problem_type
        summary = "config.json has other programs apply another function to the score"
        self.compare("activation", "problem_type", got, need, "config.json", summary)
        return "none"

    def weights(self) -> str | None:
        """Compare the bytes of the tensors, and the golden scores."""
        changed, golden = self.changed_tensors(), self.contract.golden
        verdict = diagnose(self.contract, self.scores, dtype=self.computed_in)
        if verdict.state == "differs":
            verdict = self.attributed(verdict, changed)
            self.found.setdefault(verdict.part, verdict)
        elif changed:
            summary = self.named(changed) + ("; the golden scores are still equal" if golden else "")
            self.differs("weights", summary, f"other bytes in {changed[0]}", "the tensors that were signed",
                         restore("the weights"))  # fmt: skip
        if changed or not (golden or self.num_tensors):
            return None
        same = f"the bytes of {self.num_tensors} tensors" if self.num_tensors else "the bytes of the head"
        return f"{same} are equal; {verdict.summary if golden else 'the contract has no golden scores'}"

    @property
    def split(self) -> tuple[list[StoredTensor], list[StoredTensor]]:
        """The tensors of the backbone, and those of the head."""
        head = of_head(self.stored, *stored_heads(self.model.hf))
        return [tensor for tensor in self.stored if tensor not in head], head

    def changed_tensors(self) -> list[str]:
        """Tensors whose bytes are others: of all that were hashed at signing, or of the head alone."""
        need = self.contract.weights
        if need.tensors and not self.quick:
            self.num_tensors = len(self.stored)
            return [one.name for one in self.stored if sha256_of([one])[:HASH_DIGITS] != need.tensors.get(one.name)]
        head = self.split[1]
        return [] if sha256_of(head) == need.head_sha256 else [tensor.name for tensor in head]

    def attributed(self, verdict: Check, changed: list[str]) -> Check:
        """A difference of scores, put down to the part that explains it with what is known of the files."""
        if changed:
            is_rounding = verdict.part == "precision"
            summary = f"{verdict.summary}; {self.named(changed)}" if is_rounding else self.named(changed)
            part: Part = "precision" if is_rounding else "weights"
            return replace(verdict, part=part, summary=summary, fix=restore("the weights"))
        # Where not every tensor was hashed, other weights can make scores that look scaled or turned round.
        if verdict.part not in ("weights", "activation") or (verdict.part == "activation" and self.num_tensors):
            return verdict
        hashed = "every tensor is" if self.num_tensors else "the head is"
        fix = "restore the folder; if it is whole, compare the versions of torch and transformers"
        return replace(verdict, part="weights", summary=f"the scores are others, and {hashed} the contract's", fix=fix)

    def named(self, changed: list[str]) -> str:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return f"{len(changed)} of {len(self.stored)} tensors are others: {', '.join(changed[:3])}{more}"


def _first_difference(got: Sequence[Any], need: Sequence[Any]) -> int:
    """The first place at which two sequences differ; the end of the shorter one where it begins the other."""
    both = enumerate(zip(got, need, strict=False))
    return next((i for i, (a, b) in both if a != b), min(len(got), len(need)))
