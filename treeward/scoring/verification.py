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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase

from treeward.data.rendering import Renderer
from treeward.errors import DataError, ModelError, TreewardError
from treeward.model.checks import plain_values
from treeward.model.contract import CONTRACT_FILE, ScoringContract, read_contract, text_sha256
from treeward.model.export import HTTP_ERROR
from treeward.model.loading import load_reward_model
from treeward.model.pretrained import load_tokenizer, quiet_transformers
from treeward.model.reward_model import RewardModel, head_name
from treeward.model.stored import (
    StoredWeights,
    architecture_of,
    dtype_of,
    hash_of_all,
    named_dtype,
    raw_config,
    raw_pad_token_id,
    read_stored,
    sha256_of,
)
from treeward.scoring.diagnosis import PARTS, Check, Part, close, diagnose, restore
from treeward.scoring.golden import HASH_DIGITS, combined_heads, exact_scoring, frame_of, tokenizer_sha256

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


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

    `device`: None is a GPU where there is one. `dtype`: of the backbone; in bfloat16 scores are compared to the
    contract's tolerance for bfloat16. `quick`: of the weights on the disk only the head is hashed. What is wrong with
    the model is in the result; `ModelError` is raised where there is no model at all.
    """
    quiet_transformers()
    folder = local_folder(name, trust_remote_code=trust_remote_code)
    try:
        contract = read_contract(folder)
    except ModelError as error:
        return _unreadable(str(name), _differs("contract", error))
    if contract is None:
        missing = Check(
            "contract", "differs", "there is no scoring contract", f"no {CONTRACT_FILE}", "the contract of the model",
            f"copy it from the export, or, if the folder is as it should be, write one: treeward verify {name} --write",
        )  # fmt: skip
        return _unreadable(str(name), missing)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return _Replay(str(name), folder, contract, torch.device(device), dtype, quick, trust_remote_code).run()


def local_folder(name: str | Path, *, trust_remote_code: bool = False) -> Path:
    """The folder of a model; one on the hub is downloaded. Raises `ModelError` where there is none."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if (folder / "model" / "config.json").is_file() and not (folder / "config.json").is_file():
            raise ModelError(
                "this folder is a checkpoint; the model is inside it", where=str(name), fix=f"use {name}/model"
            )
        if not any((folder / file).exists() for file in ("config.json", CONTRACT_FILE)):
            raise ModelError("there is no model in this folder", where=str(name), need="config.json and weights")
        return folder
    try:
        patterns = [*_PATTERNS, *(["*.py"] if trust_remote_code else [])]
        return Path(snapshot_download(str(name), allow_patterns=patterns))
    except (OSError, ValueError, HTTP_ERROR) as error:
        raise ModelError(
            "there is no such model",
            where=str(name),
            got=str(error).strip().splitlines()[0],
            need="a folder that holds a model, or a hub name",
        ) from error


def _differs(part: Part, error: TreewardError) -> Check:
    got = None if error.got is None else str(error.got)
    summary = error.summary if error.field is None else f"{error.summary}, field {error.field}"
    return Check(part, "differs", summary, got, error.need, error.fix or restore("the files"))


def _unreadable(model: str, check: Check) -> Verification:
    others = tuple(Check(part, "not checked", "there is no contract to compare with") for part in PARTS[1:])
    return Verification(model, (check, *others))


@dataclass
class _Replay:
    """One verification: each step adds checks, and the objects that later steps need."""

    name: str
    folder: Path
    contract: ScoringContract
    device: torch.device
    dtype: torch.dtype
    quick: bool
    trust_remote_code: bool
    checks: dict[Part, Check] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    stored: StoredWeights | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    renderer: Renderer | None = None
    model: RewardModel | None = None
    values: list[list[float]] = field(default_factory=list)
    num_tensors: int = 0

    def run(self) -> Verification:
        contract = self.contract
        self.equal("contract", f"version {contract.version}, written by treeward {contract.treeward_version}")
        steps: list[tuple[Part, Callable[[], None]]] = [
            ("files", self.check_files),
            ("template", self.check_template),
            ("tokens", self.check_tokens),
            ("weights", self.load_model),
            ("read position", self.check_read_position),
            ("precision", self.check_precision),
            ("weights", self.check_weights),
        ]
        for part, step in steps:
            try:
                step()
            except TreewardError as error:
                self.checks.setdefault(part, _differs(part, error))
        scores = [combined_heads(heads, contract.heads) for heads in self.values]
        off = [abs(got - one.score) for got, one in zip(scores, contract.golden, strict=False)]
        largest = max(off) if off and all(map(math.isfinite, off)) else None
        first = next((check for part in PARTS if (check := self.checks.get(part)) and check.state == "differs"), None)
        why = f"it cannot be, because of the {first.part}" if first else "the contract has no golden scores"
        checks = tuple(self.checks.get(part) or Check(part, "not checked", why) for part in PARTS)
        tolerance = contract.tolerance.of("float32" if self.dtype == torch.float32 else "bfloat16")
        return Verification(self.name, checks, self.num_tensors, len(contract.golden), largest, tolerance)

    def equal(self, part: Part, summary: str) -> None:
        """The part is equal, unless a difference was found before."""
        self.checks.setdefault(part, Check(part, "equal", summary))

    def differs(self, part: Part, summary: str, got: Any, need: Any, fix: str) -> None:
        """The first difference of a part is the one that is kept."""
        if part not in self.checks or self.checks[part].state == "equal":
            self.checks[part] = Check(part, "differs", summary, str(got), str(need), fix)

    def check_files(self) -> None:
        self.config = raw_config(self.folder)
        # Compared in the file: a limit or a window may change no conversation as short as the golden ones.
        got, need = architecture_of(self.config), self.contract.weights.config
        keys = sorted(key for key in got.keys() | need.keys() if got.get(key) != need.get(key))
        if keys:
            more = f" and {len(keys) - 1} more keys" if len(keys) > 1 else ""
            self.differs(
                "files", f"config.json is of another architecture, by {keys[0]}{more}",
                f"{keys[0]} {got.get(keys[0])}", f"{keys[0]} {need.get(keys[0])}", restore("config.json"),
            )  # fmt: skip
        self.stored = read_stored(self.folder)
        self.tokenizer = load_tokenizer(str(self.folder), trust_remote_code=self.trust_remote_code)
        self.equal("files", f"{len(self.stored.tensors)} tensors, {self.stored.num_parameters:,} numbers")

    def check_template(self) -> None:
        need = self.contract.rendering
        if self.tokenizer is None:
            return
        raw = self.tokenizer.chat_template
        self.renderer = Renderer(
            self.tokenizer,
            chat_template_kwargs=need.chat_template_kwargs,
            max_length=need.max_length,
            truncation=need.truncation,
        )
        # What the renderer adds to a template (a fixed date, a BOS) is in that of an export already.
        texts = [raw if isinstance(raw, str) else "", self.renderer.chat_template]
        if raw is None and need.template_in_folder:
            self.differs(
                "template", "the chat template is gone: treeward falls back to its own, other programs have none",
                "a tokenizer without a chat template", f"sha256 {need.chat_template_sha256[:12]}",
                restore("chat_template.jinja"),
            )  # fmt: skip
        elif need.chat_template_sha256 not in map(text_sha256, texts):
            lines = [text.split("\n") for text in (texts[0] or texts[1], need.chat_template)]
            number = next((i for i, (a, b) in enumerate(zip(*lines, strict=False)) if a != b), min(map(len, lines)))
            got, want = (json.dumps(one[number]) if number < len(one) else "(the text has ended)" for one in lines)
            effect = "; the golden conversations come out the same" if self.token_difference() is None else ""
            self.differs(
                "template", f"the chat template was changed{effect}", f"line {number + 1}: {got}",
                f"line {number + 1}: {want}", restore("chat_template.jinja"),
            )  # fmt: skip
        self.equal("template", f"sha256 {need.chat_template_sha256[:12]}")

    def token_difference(self) -> tuple[str, str, str] | None:
        """Summary, got and need of the first golden conversation that does not become its tokens."""
        assert self.renderer is not None
        for example in self.contract.golden:
            summary, need = f"the conversation {example.name!r} becomes other tokens", example.token_ids
            try:
                fitted = self.renderer.fit(example.messages)
            except DataError as error:
                return summary, error.summary, f"{len(need)} tokens"
            got = [] if fitted is None else list(fitted.token_ids)  # none: it is too long
            if got != need:
                at = next((i for i, (a, b) in enumerate(zip(got, need, strict=False)) if a != b), 0)
                decode = self.renderer.tokenizer.decode
                texts = [f"{ids[at : at + 4]} at position {at}, {decode(ids[at : at + 4])!r}" for ids in (got, need)]
                return summary, texts[0], texts[1]
        return None

    def check_tokens(self) -> None:
        if self.renderer is None:
            return
        need, fix = self.contract.rendering, restore("tokenizer.json and tokenizer_config.json")
        if (got := tokenizer_sha256(self.renderer.tokenizer)) != need.tokenizer_sha256:
            sums = f"sha256 {got[:12]}", f"sha256 {need.tokenizer_sha256[:12]}"
            self.differs("tokens", "another tokenizer: vocabulary, merges or special tokens", *sums, fix)
        if (found := self.token_difference()) is not None:
            self.differs("tokens", *found, fix)
        rows = [example.token_ids for example in self.contract.golden]
        if rows and (frame := frame_of(self.renderer, rows)) != need.frame:
            self.differs("tokens", "another frame is put around conversations", frame, need.frame, fix)
        self.equal("tokens", f"{len(rows)} conversations, {sum(map(len, rows))} tokens")

    def load_model(self) -> None:
        """Load the weights, and score the golden conversations."""
        if self.stored is None or self.tokenizer is None:
            return
        need, stored = self.contract.weights, self.stored
        if stored.shapes_sha256 != need.shapes_sha256:
            self.differs(
                "weights", "these are tensors of other names or shapes",
                f"{len(stored.tensors)} tensors, {stored.num_parameters:,} numbers",
                f"{need.num_tensors} tensors, {need.num_parameters:,} numbers of {need.architecture}",
                restore("the weights"),
            )  # fmt: skip
            return
        model = load_reward_model(
            self.folder,
            tokenizer=copy.deepcopy(self.tokenizer),  # loading mends its padding
            dtype=self.dtype,
            device=self.device,
            several_heads=True,
            trust_remote_code=self.trust_remote_code,
        ).model
        with exact_scoring(model):
            self.values = model.score_tokens([example.token_ids for example in self.contract.golden]).tolist()
        self.model = model  # later steps need its scores too

    def check_read_position(self) -> None:
        contract, need = self.contract, self.contract.rendering.pad_token_id
        if contract.read.plain_transformers and self.tokenizer is not None:
            ends = {example.token_ids[-1] for example in contract.golden}
            token = None if need is None else self.tokenizer.convert_ids_to_tokens(need)
            for file, pad, setting in [
                ("config.json", raw_pad_token_id(self.config), f"pad_token_id to {json.dumps(need)}"),
                ("tokenizer_config.json", self.tokenizer.pad_token_id, f"pad_token to {json.dumps(token)}"),
            ]:
                if pad != need:
                    what = "the end of conversations" if pad in ends else "another token"
                    self.differs(
                        "read position", f"{file} pads with {what}: transformers may read the score elsewhere",
                        f"pad_token_id {pad}", f"pad_token_id {need}", f"in {file} set {setting}, or restore the file",
                    )  # fmt: skip
        if self.model is None:
            return
        # (In bfloat16 rows are padded and packed differently, and rounding would look like another position.)
        if contract.read.plain_transformers and contract.golden and self.dtype == torch.float32:
            rows = [example.token_ids for example in contract.golden]
            theirs = plain_values(self.model, rows, raw_pad_token_id(self.config)).tolist()
            for example, mine, plain in zip(contract.golden, self.values, theirs, strict=True):
                if all(map(math.isfinite, mine)) and not close(plain, mine, contract.tolerance.float32):
                    self.differs(
                        "read position", "transformers alone reads another score from padded rows",
                        f"{plain[0]:.6g} for the conversation {example.name!r}", f"{mine[0]:.6g}",
                        restore("config.json"),
                    )  # fmt: skip
        self.equal("read position", f"{contract.read.position}, {contract.read.token or 'whatever it is'}")

    def check_precision(self) -> None:
        """Number formats of the weights and of config.json; and the activation that config.json has others apply."""
        need = self.contract.dtypes
        if self.stored is not None and self.model is not None:
            parts = self.stored.split(head_name(self.model.hf))
            for what, tensors, want in zip(("backbone", "head"), parts, (need.weights, need.head), strict=True):
                if (got := dtype_of(tensors)) != want:
                    self.differs(
                        "precision", f"the {what}'s weights are stored in another number format", got, want,
                        f"{restore('the weights')}; they were rounded when they were saved again",
                    )  # fmt: skip
        for key in ("dtype", "torch_dtype"):
            if (dtype := named_dtype(self.config, key)) not in (None, need.config):
                self.differs(
                    "precision", f"config.json has transformers load the weights in another number format, by {key}",
                    f"{key} {dtype}", f"{key} {need.config}",
                    f"in config.json set {key} to {need.config}, or restore the file",
                )  # fmt: skip
        if self.config and self.config.get("problem_type") != self.contract.problem_type:
            self.differs(
                "activation", "config.json has other programs apply another function to the score",
                f"problem_type {self.config.get('problem_type')}", f"problem_type {self.contract.problem_type}",
                "set problem_type in config.json, or restore the file",
            )  # fmt: skip

    def check_weights(self) -> None:
        """Compare the bytes of the tensors, and the golden scores."""
        contract = self.contract
        if self.model is None:
            return
        changed = self.changed_tensors()
        scores = [combined_heads(heads, contract.heads) for heads in self.values]
        verdict = diagnose(contract, scores, dtype="float32" if self.dtype == torch.float32 else "bfloat16")
        if verdict.state == "differs":
            verdict = self.judged(verdict, changed)
            self.differs(verdict.part, verdict.summary, verdict.got, verdict.need, str(verdict.fix))
        elif changed:
            same = "; the golden scores are still equal" if contract.golden else ""
            self.differs(
                "weights", f"{self.named(changed)}{same}", f"other bytes in {changed[0]}",
                "the tensors that were signed", restore("the weights"),
            )  # fmt: skip
        need = contract.dtypes
        self.equal("precision", f"weights in {need.weights}, head in {need.head}, loaded in {need.config}")
        self.equal("activation", "none")
        same = f"the bytes of {self.num_tensors} tensors" if self.num_tensors else "the bytes of the head"
        if contract.golden or self.num_tensors:
            told = verdict.summary if contract.golden else "the contract has no golden scores"
            self.equal("weights", f"{same} are equal; {told}")

    def changed_tensors(self) -> list[str]:
        """Tensors whose bytes are others: of all that were hashed at signing, or of the head alone."""
        assert self.stored is not None and self.model is not None
        need = self.contract.weights
        if need.tensors and not self.quick:
            hashes = self.stored.hashes()
            self.num_tensors = len(hashes)
            changed = [name for name, digest in hashes.items() if digest[:HASH_DIGITS] != need.tensors.get(name)]
            return changed or ([] if hash_of_all(hashes) == need.sha256 else list(hashes))
        head = self.stored.split(head_name(self.model.hf))[1]
        return [] if sha256_of(head) == need.head_sha256 else [tensor.name for tensor in head]

    def judged(self, verdict: Check, changed: list[str]) -> Check:
        """A difference of scores, put down to the part that explains it with what is known of the files."""
        rounded = f"{verdict.summary}: the weights were rounded"
        if self.is_rounded():
            return replace(verdict, part="precision", summary=rounded, fix=restore("the weights"))
        if changed:
            return replace(verdict, part="weights", summary=self.named(changed), fix=restore("the weights"))
        # Where not every tensor was hashed, other weights can make scores that look scaled or turned round.
        if verdict.part in ("tokens", "read position", "precision") or (
            verdict.part == "activation" and self.num_tensors
        ):
            return verdict
        hashed = "every tensor is" if self.num_tensors else "the head is"
        return replace(
            verdict,
            part="weights",
            summary=f"the scores are others, and {hashed} the contract's",
            fix=f"{restore('the weights and config.json')}; if they are whole, compare the versions of torch and "
            "transformers with those of where the model was made",
        )

    def is_rounded(self) -> bool:
        """Whether the weights hold only what a coarser number format can hold, and should hold more."""
        assert self.model is not None and self.stored is not None
        backbone, _ = self.stored.split(head_name(self.model.hf))
        if dtype_of(backbone) != self.contract.dtypes.weights:
            return True
        matrices = [tensor.read() for tensor in backbone if len(tensor.shape) > 1 and tensor.dtype == "float32"]
        return bool(matrices) and all(torch.equal(one.to(torch.bfloat16).float(), one) for one in matrices)

    def named(self, changed: list[str]) -> str:
        assert self.stored is not None
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return f"{len(changed)} of {len(self.stored.tensors)} tensors are others: {', '.join(changed[:3])}{more}"
