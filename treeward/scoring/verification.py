"""`verify`: does this folder, on this machine, still make the scores that its scoring contract says?

    verification = verify("results/rm/final", device="cuda")
    verification.equal, verification.first_difference      # True, None; or the part that differs first, with the remedy

Everything between messages and a score is compared in the order in which it acts: the contract itself, the files, the
chat template, the tokens, the read position, the number format, the activation, the weights. A wrong part makes later
ones look wrong too, so the first is the cause.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase

from treeward.data.rendering import Renderer
from treeward.errors import ModelError, TreewardError
from treeward.model.contract import CONTRACT_FILE, Dtype, ScoringContract, keeps_padding, read_contract
from treeward.model.export import HTTP_ERROR
from treeward.model.loading import load_reward_model
from treeward.model.pretrained import check_local, choose_device, load_tokenizer
from treeward.model.reward_model import stored_heads
from treeward.model.stored import StoredModel, StoredTensor, architecture_of, dtype_of, sha256_of
from treeward.scoring.diagnosis import (
    Check,
    Part,
    Row,
    Verification,
    compare,
    diagnose,
    failed,
    restore,
    table,
    verification,
)
from treeward.scoring.golden import HASH_DIGITS, combined_heads, exact_scoring, tokenizer_sha256

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_RESTORE_TOKENIZER = restore("tokenizer.json and tokenizer_config.json")
_RESTORE_TEMPLATE = restore("chat_template.jinja")
_RESTORE_CONFIG = restore("config.json")
_RESTORE_WEIGHTS = restore("the weights")


def verify(
    name: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
) -> Verification:
    """Replay the contract of a model in a folder or on the hub.

    `device`: None is a GPU where there is one. `dtype`: of the backbone; other than in float32 scores are compared to
    the contract's tolerance for bfloat16. What is wrong with the model is in the result; `ModelError` is raised where
    there is no model at all.
    """
    folder = _local_folder(name, trust_remote_code)
    try:
        contract = read_contract(folder)
        if contract is None:
            raise ModelError(
                "there is no scoring contract",
                got=f"no {CONTRACT_FILE}",
                fix=f"copy it from the export, or, if the folder is as it should be: treeward verify {name} --write",
            )
    except ModelError as error:
        return Verification(str(name), table([failed("contract", error)]))
    return _Replay(str(name), folder, contract, choose_device(device), dtype, trust_remote_code).run()


def _local_folder(name: str | Path, trust_remote_code: bool) -> Path:
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


@dataclass
class _Replay:
    """One verification. Each step yields the rows of a part, after reading what later steps need."""

    name: str
    folder: Path
    contract: ScoringContract
    device: torch.device
    dtype: torch.dtype
    trust_remote_code: bool
    scores: list[float] = field(default_factory=list)
    num_hashed: int = 0
    stored: StoredModel = field(init=False)
    backbone: list[StoredTensor] = field(init=False)
    head: list[StoredTensor] = field(init=False)
    tokenizer: PreTrainedTokenizerBase = field(init=False)
    renderer: Renderer = field(init=False)

    def run(self) -> Verification:
        contract, rendering, dtypes = self.contract, self.contract.rendering, self.contract.dtypes
        num_tokens = sum(len(example.token_ids) for example in contract.golden)
        about = {
            "contract": f"version {contract.version}, written by treeward {contract.treeward_version}",
            "files": f"{contract.weights.num_tensors} tensors, {contract.weights.num_parameters:,} numbers",
            "template": f"sha256 {rendering.chat_template_sha256[:12]}",
            "tokens": f"{len(contract.golden)} conversations, {num_tokens} tokens",
            "read position": f"{contract.read.position}, {contract.read.token or 'whatever it is'}",
            "precision": f"weights in {dtypes.weights}, head in {dtypes.head}, loaded in {dtypes.config}",
            "activation": "none",
        }
        steps: dict[Part, Callable[[], Iterator[Row]]] = {
            "files": self.files,
            "template": self.template,
            "tokens": self.tokens,
            "read position": self.padding,
            "activation": self.activation,
        }
        checks = [compare("contract", (), about["contract"])]
        part: Part = "contract"
        try:
            for part, rows in steps.items():
                checks.append(compare(part, rows(), about[part]))
            part = "weights"
            self.load()
            checks += [compare("precision", self.precision(), about["precision"]), self.weights()]
        except TreewardError as error:  # without this part the later ones cannot be compared
            checks.append(failed(part, error))
        return verification(self.name, contract, checks, self.scores, dtype=self.computed_in)

    @property
    def computed_in(self) -> Dtype:
        return "float32" if self.dtype == torch.float32 else "bfloat16"

    def files(self) -> Iterator[Row]:
        self.stored = StoredModel(self.folder)
        if not self.stored.tensors:
            raise ModelError("the files of weights are empty", where=self.name)
        self.tokenizer = load_tokenizer(str(self.folder), trust_remote_code=self.trust_remote_code)
        # Compared in the file: a limit or a window may change no conversation as short as the golden ones.
        observed, expected = architecture_of(self.stored.config), self.contract.weights.config
        for key in sorted(observed.keys() | expected.keys()):
            summary = f"config.json is of another architecture, by {key}"
            yield Row(key, expected.get(key), observed.get(key), summary, _RESTORE_CONFIG)

    def template(self) -> Iterator[Row]:
        expected, raw = self.contract.rendering, self.tokenizer.chat_template
        self.renderer = Renderer(
            self.tokenizer,
            chat_template_kwargs=expected.chat_template_kwargs,
            max_length=expected.max_length,
            truncation=expected.truncation,
        )
        if expected.template_in_folder:
            summary = "the chat template is gone: treeward falls back to its own, other programs have none"
            yield Row("", "a chat template", "a chat template" if raw else "none", summary, _RESTORE_TEMPLATE)
        # What the renderer adds to a template (a fixed date, a BOS) is in that of an export already.
        texts = [raw if isinstance(raw, str) else "", self.renderer.chat_template]
        if expected.chat_template not in texts:
            observed_lines, expected_lines = (texts[0] or texts[1]).split("\n"), expected.chat_template.split("\n")
            i = _first_difference(observed_lines, expected_lines)
            observed, wanted = (
                json.dumps(lines[i]) if i < len(lines) else "(the text has ended)"
                for lines in (observed_lines, expected_lines)
            )
            yield Row(f"line {i + 1}:", wanted, observed, "the chat template was changed", _RESTORE_TEMPLATE)

    def tokens(self) -> Iterator[Row]:
        expected, observed = self.contract.rendering.tokenizer_sha256, tokenizer_sha256(self.tokenizer)
        summary = "another tokenizer: vocabulary, merges or special tokens"
        yield Row("sha256", expected[:12], observed[:12], summary, _RESTORE_TOKENIZER)
        for example in self.contract.golden:
            fitted = self.renderer.fit(example.messages)
            ids = [] if fitted is None else list(fitted.token_ids)  # none: it is too long
            i = _first_difference(ids, example.token_ids)
            observed, wanted = (
                f"{tokens[i : i + 4]} at {i}, {self.tokenizer.decode(tokens[i : i + 4])!r}"
                for tokens in (ids, example.token_ids)
            )
            summary = f"the conversation {example.name!r} becomes other tokens"
            yield Row("", wanted, observed, summary, _RESTORE_TOKENIZER)

    def padding(self) -> Iterator[Row]:
        expected, is_plain = self.contract.rendering.pad_token_id, self.contract.read.plain_transformers
        summary = "{} pads with another token: transformers may read the score elsewhere"
        if is_plain or keeps_padding(self.contract):
            observed, meaning = self.stored.pad_token_id, summary.format("config.json")
            yield Row("pad_token_id", expected, observed, meaning, _RESTORE_CONFIG)
        if is_plain:
            observed, meaning = self.tokenizer.pad_token_id, summary.format("tokenizer_config.json")
            yield Row("pad_token_id", expected, observed, meaning, restore("tokenizer_config.json"))

    def activation(self) -> Iterator[Row]:
        summary = "config.json has other programs apply another function to the score"
        observed = self.stored.config.get("problem_type")
        yield Row("problem_type", self.contract.problem_type, observed, summary, _RESTORE_CONFIG)

    def load(self) -> None:
        """Load the weights, and score the golden conversations."""
        expected = self.contract.weights
        if self.stored.shapes_sha256 != expected.shapes_sha256:
            raise ModelError(
                "these are tensors of other names or shapes",
                got=f"{len(self.stored.tensors)} tensors, {self.stored.num_parameters:,} numbers",
                need=f"{expected.num_tensors} tensors, {expected.num_parameters:,} numbers of {expected.architecture}",
                fix=_RESTORE_WEIGHTS,
            )
        model = load_reward_model(
            self.folder,
            tokenizer=copy.deepcopy(self.tokenizer),  # loading mends its padding
            dtype=self.dtype,
            device=self.device,
            several_heads=True,
            trust_remote_code=self.trust_remote_code,
            keep_padding=keeps_padding(self.contract),
        ).model
        with exact_scoring(model):
            values_SH = model.score_tokens([example.token_ids for example in self.contract.golden]).tolist()
        self.scores = [combined_heads(values, self.contract.heads) for values in values_SH]
        self.backbone, self.head = self.stored.split(stored_heads(model.hf))

    def precision(self) -> Iterator[Row]:
        expected = self.contract.dtypes
        summary = "the {}'s weights are stored in another number format"
        yield Row("format", expected.weights, dtype_of(self.backbone), summary.format("backbone"), _RESTORE_WEIGHTS)
        yield Row("format", expected.head, dtype_of(self.head), summary.format("head"), _RESTORE_WEIGHTS)
        if (dtype := self.stored.config_dtype) is not None:
            summary = "config.json has transformers load the weights in another number format"
            yield Row("dtype", expected.config, dtype, summary, _RESTORE_CONFIG)

    def weights(self) -> Check:
        """Compare the bytes of the tensors, and the golden scores."""
        changed = self.changed_tensors()
        verdict = diagnose(self.contract, self.scores, dtype=self.computed_in)
        hashed = f"the bytes of {self.num_hashed} tensors" if self.num_hashed else "the bytes of the head"
        if changed:
            return self.named(changed, verdict)
        if verdict.state == "equal":
            return replace(verdict, summary=f"{hashed} are equal; {verdict.summary}")
        # Where not every tensor was hashed, other weights can make scores that look scaled or turned round.
        if verdict.part == "weights" or (verdict.part == "activation" and not self.num_hashed):
            summary = f"the scores are others, though {hashed} are equal"
            fix = "restore the folder; if it is whole, compare the versions of torch and transformers"
            return replace(verdict, part="weights", summary=summary, fix=fix)
        return verdict

    def changed_tensors(self) -> list[str]:
        """Tensors whose bytes are others: of all that were hashed at signing, or of the head alone."""
        expected = self.contract.weights
        if expected.tensors:
            self.num_hashed = len(self.stored.tensors)
            digests = {tensor.name: sha256_of([tensor])[:HASH_DIGITS] for tensor in self.stored.tensors}
            return [name for name, digest in digests.items() if digest != expected.tensors.get(name)]
        return [] if sha256_of(self.head) == expected.head_sha256 else [tensor.name for tensor in self.head]

    def named(self, changed: Sequence[str], verdict: Check) -> Check:
        """The check of weights whose bytes are others; `verdict`: what the scores say."""
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        summary = f"{len(changed)} of {len(self.stored.tensors)} tensors are others: {', '.join(changed[:3])}{more}"
        if verdict.part == "precision":
            return replace(verdict, summary=f"{verdict.summary}; {summary}", fix=_RESTORE_WEIGHTS)
        if verdict.state == "differs":
            return replace(verdict, part="weights", summary=summary, fix=_RESTORE_WEIGHTS)
        same = "; the golden scores are still equal" if self.scores else ""
        got, need = f"other bytes in {changed[0]}", "the tensors that were signed"
        return Check("weights", "differs", summary + same, got, need, _RESTORE_WEIGHTS)


def _first_difference(observed: Sequence[Any], expected: Sequence[Any]) -> int:
    """The first place at which two sequences differ; the end of the shorter one where it begins the other."""
    pairs = enumerate(zip(observed, expected, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(observed), len(expected)))
