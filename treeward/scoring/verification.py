"""Replaying a scoring contract: does this folder, on this machine, still make the scores that it says?

    verification = verify("results/rm/final", device="cuda")
    verification.equal, verification.first_difference      # True, None; or the part that differs first, with the remedy
    verify("results/rm/final", quick=True)                 # without hashing every tensor, about a second per GB

Everything between messages and a score is compared in the order in which it acts: the contract itself, the files, the
chat template, the tokens, the read position, the number format, what is applied to the number, the weights. A part that
is wrong makes later ones look wrong too, so the first is the cause.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase

from treeward.data.rendering import Renderer
from treeward.errors import ConfigError, DataError, ModelError, TreewardError
from treeward.model.contract import CONTRACT_FILE, GoldenExample, ScoringContract, read_contract, text_sha256
from treeward.model.export import HTTP_ERROR
from treeward.model.loading import load_reward_model
from treeward.model.pretrained import load_tokenizer, quiet_transformers
from treeward.model.reward_model import RewardModel, head_name
from treeward.model.stored import (
    StoredWeights,
    architecture_of,
    changed_keys,
    hash_of_all,
    named_dtype,
    raw_config,
    raw_pad_token_id,
    read_stored,
)
from treeward.scoring.diagnosis import PARTS, Check, Part, close, diagnose, restore
from treeward.scoring.golden import (
    HASH_DIGITS,
    combined_heads,
    exact_scoring,
    frame_of,
    plain_values,
    tokenizer_sha256,
)

__all__ = ["Verification", "local_folder", "verify"]

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found. `checks`: one per part, in order. `largest_difference`: of golden scores, None if not scored.

    `num_tensors`: tensors whose bytes were compared; of the backbone's they are not in a quick verification, nor with
    the contract of a checkpoint.
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

    `device`: None is a GPU where there is one. `dtype`: of the backbone; of scores in bfloat16 only what bfloat16 can
    tell apart is compared. `quick`: of the weights on the disk only the head is hashed. What is wrong with the model is
    in the result; `ModelError` is raised where there is no model at all.
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
    replay = _Replay(str(name), folder, contract, torch.device(device), dtype, quick, trust_remote_code)
    return replay.run()


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
    return Check(part, "differs", summary, got, error.need, error.fix)


def _unreadable(model: str, check: Check) -> Verification:
    others = tuple(Check(part, "not checked", "there is no contract to compare with") for part in PARTS[1:])
    return Verification(model, (check, *others))


@dataclass
class _Replay:
    """One verification on its way: each step leaves its check, and what later steps need."""

    name: str
    folder: Path
    contract: ScoringContract
    device: torch.device
    dtype: torch.dtype
    quick: bool
    trust_remote_code: bool
    checks: dict[Part, Check] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    changed_keys: list[str] = field(default_factory=list)
    stored: StoredWeights | None = None
    others: list[str] = field(default_factory=list)
    num_tensors: int = 0
    is_rounded: bool = False
    tokenizer: PreTrainedTokenizerBase | None = None
    renderer: Renderer | None = None
    model: RewardModel | None = None

    def run(self) -> Verification:
        contract = self.contract
        self.equal("contract", f"version {contract.version}, written by treeward {contract.treeward_version}")
        self.check_files()
        self.check_template()
        self.check_tokens()
        self.load_model()
        self.check_read_position()
        self.check_precision()
        self.check_activation()
        self.compare_tensors()
        largest = self.check_scores()
        checks = tuple(self.checks.get(part) or Check(part, "not checked", self._why_not()) for part in PARTS)
        return Verification(self.name, checks, self.num_tensors, len(contract.golden), largest, self.tolerance)

    @property
    def tolerance(self) -> float:
        tolerance = self.contract.tolerance
        return tolerance.float32 if self.dtype == torch.float32 else tolerance.bfloat16

    def equal(self, part: Part, summary: str) -> None:
        self.checks.setdefault(part, Check(part, "equal", summary))

    def differs(self, part: Part, summary: str, got: Any, need: Any, fix: str) -> None:
        """The first difference of a part is the one that is kept."""
        before = self.checks.get(part)
        if before is None or before.state != "differs":
            self.checks[part] = Check(part, "differs", summary, str(got), str(need), fix)

    def _why_not(self) -> str:
        first = next((check for part in PARTS if (check := self.checks.get(part)) and check.state == "differs"), None)
        return f"it cannot be, because of the {first.part}" if first else "there is nothing to compare"

    def check_files(self) -> None:
        try:
            self.config = raw_config(self.folder)
        except (OSError, ValueError) as error:
            self.differs("files", "config.json is missing or damaged", error, "config.json", restore("config.json"))
        else:
            self._check_architecture()
        try:
            self.stored = read_stored(self.folder)
        except ModelError as error:
            self.checks.setdefault("files", _differs("files", error))
        if self.stored is not None:
            self.equal("files", f"{len(self.stored.tensors)} tensors, {self.stored.num_parameters:,} numbers")

    def _check_architecture(self) -> None:
        """It is seen in the file: a limit or a window may change no conversation that is as short as the golden are."""
        got, need = architecture_of(self.config), self.contract.weights.config
        self.changed_keys = changed_keys(got, need)
        if self.changed_keys:
            key, others = self.changed_keys[0], len(self.changed_keys) - 1
            more = f" and {others} more keys" if others else ""
            self.differs(
                "files", f"config.json is of another architecture, by {key}{more}", f"{key} {got.get(key)}",
                f"{key} {need.get(key)}", restore("config.json"),
            )  # fmt: skip

    def check_template(self) -> None:
        need = self.contract.rendering
        if not self.config:
            return  # which class a tokenizer is of, transformers finds there
        try:
            self.tokenizer = load_tokenizer(str(self.folder), trust_remote_code=self.trust_remote_code)
        except ModelError as error:
            self.checks.setdefault("files", _differs("files", error))
            if self.checks["files"].state == "equal":
                self.checks["files"] = _differs("files", error)
            return
        raw = self.tokenizer.chat_template
        try:
            self.renderer = Renderer(
                self.tokenizer,
                chat_template_kwargs=need.chat_template_kwargs,
                max_length=need.max_length,
                truncation=need.truncation,
            )
        except ConfigError as error:
            self.checks["template"] = _differs("template", error)
            return
        if raw is None and need.template_in_folder:
            self.differs(
                "template", "the chat template is gone: treeward falls back to its own, other programs have none",
                "a tokenizer without a chat template", f"sha256 {need.chat_template_sha256[:12]}",
                restore("chat_template.jinja"),
            )  # fmt: skip
            return
        # What the renderer adds to a template (a fixed date, a BOS) is in that of an export already.
        if need.chat_template_sha256 in (text_sha256(raw) if isinstance(raw, str) else None, self._sha256()):
            self.equal("template", f"sha256 {need.chat_template_sha256[:12]}")
            return
        line, got, want = _first_line_that_differs(
            raw if isinstance(raw, str) else self.renderer.chat_template, need.chat_template
        )
        same = self._golden_difference() is None
        effect = "; the golden conversations come out the same" if same else ""
        self.differs(
            "template", f"the chat template was changed{effect}", f"line {line}: {got}", f"line {line}: {want}",
            restore("chat_template.jinja"),
        )  # fmt: skip

    def _sha256(self) -> str:
        assert self.renderer is not None
        return text_sha256(self.renderer.chat_template)

    def _golden_difference(self) -> tuple[GoldenExample, list[int] | None, str] | None:
        """The first golden conversation that does not become its tokens, with those that it becomes, or why none."""
        assert self.renderer is not None
        for example in self.contract.golden:
            try:
                fitted = self.renderer.fit(example.messages)
            except DataError as error:
                return example, None, error.summary
            if fitted is None or list(fitted.token_ids) != example.token_ids:
                return example, None if fitted is None else list(fitted.token_ids), "too long"
        return None

    def check_tokens(self) -> None:
        if self.renderer is None:
            return
        tokenizer, need = self.renderer.tokenizer, self.contract.rendering
        fix = restore("tokenizer.json and tokenizer_config.json")
        if (got := tokenizer_sha256(tokenizer)) != need.tokenizer_sha256:
            self.differs(
                "tokens", "it is another tokenizer", f"{len(tokenizer)} tokens, sha256 {got[:12]}",
                f"sha256 {need.tokenizer_sha256[:12]}", fix,
            )  # fmt: skip
        for name in ("bos_token_id", "eos_token_id"):
            if (token := getattr(tokenizer, name)) != getattr(need, name):
                self.differs("tokens", f"the tokenizer has another {name}", token, getattr(need, name), fix)
        found = self._golden_difference()
        if found is not None:
            self.differs("tokens", *_token_difference(tokenizer, *found), fix)
        rows = [example.token_ids for example in self.contract.golden]
        if found is None and (frame := frame_of(self.renderer, rows)) != need.frame and rows:
            self.differs("tokens", "another frame is put around conversations", frame, need.frame, fix)
        self.equal("tokens", f"{len(rows)} conversations, {sum(map(len, rows))} tokens")

    def load_model(self) -> None:
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
        try:
            self.model = load_reward_model(
                self.folder,
                tokenizer=copy.deepcopy(self.tokenizer),  # loading mends its padding
                dtype=self.dtype,
                device=self.device,
                several_heads=True,
                trust_remote_code=self.trust_remote_code,
            ).model
        except ModelError as error:
            self.checks.setdefault("weights", _differs("weights", error))

    def check_read_position(self) -> None:
        contract, need = self.contract, self.contract.rendering.pad_token_id
        decode = self.tokenizer.convert_ids_to_tokens if self.tokenizer is not None else str
        if contract.read.plain_transformers:
            padding: list[tuple[str, int | None, str]] = []
            if self.config:
                padding.append(("config.json", raw_pad_token_id(self.config), f"pad_token_id to {json.dumps(need)}"))
            if self.tokenizer is not None:
                token = None if need is None else decode(need)
                padding.append(
                    ("tokenizer_config.json", self.tokenizer.pad_token_id, f"pad_token to {json.dumps(token)}")
                )
            ends = {example.token_ids[-1] for example in contract.golden}
            for file, pad, setting in padding:
                if pad != need:
                    reads = "so transformers reads the score before it" if pad in ends else "so padding may be read"
                    self.differs(
                        "read position",
                        f"{file} pads with {'the end of conversations' if pad in ends else 'another token'}, {reads}",
                        f"pad_token_id {pad}{'' if pad is None else f', {decode(pad)!r}'}",
                        f"pad_token_id {need}{'' if need is None else f', {decode(need)!r}'}",
                        f"in {file} set {setting}, or restore the file",
                    )
        if self.renderer is not None and self.renderer.read_token != contract.read.token:
            self.differs(
                "read position", "conversations end with another kind of token", self.renderer.read_token,
                contract.read.token, restore("the chat template and the tokenizer"),
            )  # fmt: skip
        if self.model is None or self._vocabulary_is_small():
            return
        # (In bfloat16 transformers would have to be told to keep the head in float32.)
        if contract.read.plain_transformers and contract.golden and self.dtype == torch.float32:
            self._check_plain_scores(self.model)
        self.equal("read position", f"{contract.read.position}, {contract.read.token or 'whatever it is'}")

    def _check_plain_scores(self, model: RewardModel) -> None:
        rows = [example.token_ids for example in self.contract.golden]
        with exact_scoring(model):
            ours = model.score_tokens(rows).tolist()
        theirs = plain_values(model, rows, raw_pad_token_id(self.config))
        for example, mine, plain in zip(self.contract.golden, ours, theirs, strict=True):
            if not close(plain, mine, self.tolerance):
                self.differs(
                    "read position", "transformers alone reads another score from padded rows",
                    f"{plain[0]:.6g} for the conversation {example.name!r}", f"{mine[0]:.6g}",
                    restore("config.json"),
                )  # fmt: skip
                return

    def _vocabulary_is_small(self) -> bool:
        assert self.model is not None
        highest = max((max(example.token_ids) for example in self.contract.golden), default=0)
        return highest >= self.model.num_embeddings

    def check_precision(self) -> None:
        need, stored = self.contract.dtypes, self.stored
        if stored is not None and self.model is not None:
            head = head_name(self.model.hf)
            for what, tensors, want in [
                ("backbone", stored.backbone(head), need.weights),
                ("head", stored.under(head), need.head),
            ]:
                if (got := stored.dtype_of(tensors)) != want:
                    self.is_rounded = True
                    self.differs(
                        "precision", f"the {what}'s weights are stored in another number format", got, want,
                        f"{restore('the weights')}; they were rounded when they were saved again",
                    )  # fmt: skip
        if not self.config:
            return
        named = {key: dtype for key in ("dtype", "torch_dtype") if (dtype := named_dtype(self.config, key)) is not None}
        for key, dtype in (named or {"dtype": need.weights}).items():  # transformers then asks the weights
            if dtype != need.config:
                self.differs(
                    "precision", f"config.json has transformers load the weights in another number format, by {key}",
                    f"{key} {self.config.get(key)}", f"{key} {need.config}",
                    f"in config.json set {key} to {need.config}, or restore the file",
                )  # fmt: skip

    def check_activation(self) -> None:
        if not self.config:
            return
        got, need = self.config.get("problem_type"), self.contract.problem_type
        if got != need:
            self.differs(
                "activation", "config.json has other programs apply another function to the score",
                f"problem_type {got}", f"problem_type {need}", "set problem_type in config.json, or restore the file",
            )  # fmt: skip

    def compare_tensors(self) -> None:
        """Find the tensors that are others by their bytes: of all that were hashed at signing, or of the head alone."""
        if self.stored is None or self.model is None:
            return
        need, stored = self.contract.weights, self.stored
        if need.tensors and not self.quick:
            hashes = stored.hashes()
            self.num_tensors = len(hashes)
            self.others = [name for name, digest in hashes.items() if digest[:HASH_DIGITS] != need.tensors.get(name)]
            if not self.others and hash_of_all(hashes) != need.sha256:
                self.others = list(hashes)
        elif stored.sha256_of(head := head_name(self.model.hf)) != need.head_sha256:
            self.others = [tensor.name for tensor in stored.under(head)]

    def check_scores(self) -> float | None:
        contract = self.contract
        if self.model is None or self._vocabulary_is_small():
            return None
        with exact_scoring(self.model):
            values = self.model.score_tokens([example.token_ids for example in contract.golden]).tolist()
        scores = [combined_heads(heads, contract.heads) for heads in values]
        verdict = diagnose(contract, scores, dtype="float32" if self.dtype == torch.float32 else "bfloat16")
        self._judge(verdict)
        largest = max((abs(got - one.score) for got, one in zip(scores, contract.golden, strict=True)), default=None)
        return largest if largest is not None and math.isfinite(largest) else None

    def _judge(self, verdict: Check) -> None:
        """Put what the scores say where it belongs, with what is known of the files."""
        is_same_model = self.num_tensors > 0 and not self.others and not self.changed_keys
        explained = verdict.state == "equal"
        if verdict.part == "precision":
            explained = self._explain_rounding(verdict, is_same_model)
        elif verdict.state == "differs" and verdict.part != "weights":
            # Other weights can make scores that look scaled or turned round; of the same ones something was applied.
            explained = verdict.part != "activation" or is_same_model
            if explained:
                self.differs(verdict.part, verdict.summary, verdict.got, verdict.need, str(verdict.fix))
        need = self.contract.dtypes
        self.equal("precision", f"weights in {need.weights}, head in {need.head}, loaded in {need.config}")
        self.equal("activation", "none")
        if self.others and not (self.is_rounded and explained):
            self._name_the_tensors(verdict)
        elif not explained:
            self._name_what_else(verdict)
        self._weights_are_equal(verdict)

    def _explain_rounding(self, verdict: Check, is_same_model: bool) -> bool:
        """Whether the scores differ by what rounding makes of them, on the disk or while they were computed."""
        assert self.stored is not None and self.model is not None
        if self.is_rounded:
            return True
        backbone = self.stored.backbone(head_name(self.model.hf))
        # Of weights that are in bfloat16 as they should be, that they fit it says nothing.
        may_be_others = self.others or not self.num_tensors
        if may_be_others and self.stored.dtype_of(backbone) != "bfloat16" and self.stored.fits_bfloat16(backbone):
            summary = "the weights were rounded to bfloat16 and saved as float32"
            self._put("precision", replace(verdict, summary=summary, fix=restore("the weights")))
            self.is_rounded = True
        elif self.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
            fix = 'torch.set_float32_matmul_precision("highest")'
            self._put("precision", replace(verdict, summary="float32 products are rounded to TF32", fix=fix))
        elif is_same_model:
            summary = "the weights are the same, and this machine computes their scores in a coarser number format"
            self._put("precision", replace(verdict, summary=summary))
        else:
            return False
        return True

    def _put(self, part: Part, check: Check) -> None:
        self.differs(part, check.summary, check.got, check.need, str(check.fix))

    def _name_the_tensors(self, verdict: Check) -> None:
        assert self.stored is not None and self.model is not None
        in_head = {tensor.name for tensor in self.stored.under(head_name(self.model.hf))}.intersection(self.others)
        what = "the head is another"
        if len(in_head) < len(self.others):
            what = "head and backbone are others" if in_head else "the backbone is another"
        first = self.others[0]
        more = f" and {len(self.others) - 3} more" if len(self.others) > 3 else ""
        named = f"{len(self.others)} of {len(self.stored.tensors)} tensors: {', '.join(self.others[:3])}{more}"
        summary, got, need = f"{what}, {named}", verdict.got, verdict.need
        if verdict.state == "equal":
            summary += "; the golden scores are equal all the same" if self.contract.golden else ""
            digest = self.contract.weights.tensors.get(first) if self.num_tensors else None
            got, need = f"other bytes in {first}", f"its sha256 {digest}..." if digest else "the head that was signed"
        self.differs("weights", summary, got, need, restore("the weights"))

    def _name_what_else(self, verdict: Check) -> None:
        """Scores that are others although no tensor is known to be."""
        if self.changed_keys:
            summary, fix = "the scores are others, as config.json is", restore("config.json")
        elif self.is_rounded:
            summary, fix = "the scores are others by more than rounding makes of them", restore("the weights")
        elif self.num_tensors:
            summary = "every tensor is the contract's, and the scores are others: this machine computes another model"
            fix = "compare its versions of torch and transformers with those of where the model was made; try another "
            fix += "--device"
        else:
            summary, fix = "the head is the contract's, the backbone is another", restore("the weights")
        self.differs("weights", summary, verdict.got, verdict.need, fix)

    def _weights_are_equal(self, verdict: Check) -> None:
        """Unless a difference was found."""
        same = f"the bytes of {self.num_tensors} tensors" if self.num_tensors else "the bytes of the head"
        if self.is_rounded:
            self.equal("weights", "equal but for the rounding")
        elif verdict.state == "differs":
            self.equal("weights", f"{same} are equal")
        elif self.contract.golden:
            self.equal("weights", f"{same} are equal, {verdict.summary}")
        elif self.num_tensors:
            self.equal("weights", f"{same} are equal; the contract has no golden scores")
        else:
            self.checks.setdefault("weights", Check("weights", "not checked", "the contract has no golden scores"))


def _first_line_that_differs(got: str, need: str) -> tuple[int, str, str]:
    pairs = enumerate(zip_longest(got.split("\n"), need.split("\n")), start=1)
    number, lines = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    one, other = ("(the text has ended)" if line is None else json.dumps(line) for line in lines)
    return number, one, other


def _token_difference(
    tokenizer: PreTrainedTokenizerBase, example: GoldenExample, got: list[int] | None, why: str
) -> tuple[str, str, str]:
    """Summary, got and need of a conversation that does not become its tokens."""
    need = example.token_ids
    summary = f"the conversation {example.name!r} becomes other tokens"
    if got is None:
        return summary, why, f"{len(need)} tokens"
    at = next((i for i, (a, b) in enumerate(zip(got, need, strict=False)) if a != b), min(len(got), len(need)))

    def shown(ids: list[int]) -> str:
        if at >= len(ids):
            return f"an end after {len(ids)} tokens"
        return f"{ids[at : at + 4]} at position {at}, {tokenizer.decode(ids[at : at + 4])!r}"

    return summary, shown(got), shown(need)
