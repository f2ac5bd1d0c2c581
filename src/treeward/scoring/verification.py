"""`verify`: does this folder, on this machine, still make the scores that its scoring contract says?

    verification = verify("results/rm/final", device="cuda")
    verification.equal, verification.first_difference      # True, None; or the part that differs first, with the remedy

Everything between messages and a score is compared in the order in which it acts. A wrong part makes later ones look
wrong too, so the first is the cause.

Shapes: S golden conversations, H heads.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import PreTrainedTokenizerBase

from treeward.data.rendering import Renderer
from treeward.errors import ModelError, TreewardError
from treeward.model.contract import (
    CONTRACT_FILE,
    Dtype,
    ScoringContract,
    keeps_padding,
    read_contract,
    readme_sha256,
)
from treeward.model.export import HTTP_ERROR
from treeward.model.loading import load_classifier
from treeward.model.pretrained import check_local, choose_device, load_tokenizer
from treeward.model.reward_model import RewardModel, stored_heads
from treeward.model.stored import StoredModel, architecture_of, dtype_of, sha256_of
from treeward.scoring.diagnosis import (
    Check,
    DiagnosisRow,
    Part,
    Verification,
    compare_rows,
    diagnose,
    failed,
    restore,
    verification,
)
from treeward.scoring.golden import HASH_DIGITS, combined_heads, exact_scoring, tokenizer_sha256

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_RESTORE_CONFIG = restore("config.json")
_RESTORE_TEMPLATE = restore("chat_template.jinja")
_RESTORE_TOKENIZER = restore("tokenizer.json and tokenizer_config.json")
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
    computed: Dtype = "float32" if dtype == torch.float32 else "bfloat16"
    checks: list[Check] = []
    scores: list[float] = []
    contract: ScoringContract | None = None
    part: Part = "contract"
    try:
        contract = read_contract(folder)
        if contract is None:
            raise ModelError(
                "there is no scoring contract",
                got=f"no {CONTRACT_FILE}",
                fix=f"copy it from the export, or, if the folder is as it should be: treeward verify {name} --write",
            )
        checks.append(
            compare_rows(part, (), f"version {contract.version}, written by treeward {contract.treeward_version}")
        )
        part = "files"
        stored = StoredModel(folder)
        about = f"{len(stored.tensors)} tensors, {stored.num_parameters:,} numbers"
        if contract.readme_sha256 not in (None, readme_sha256(folder)):
            about += "; README.md is not the one that was signed, which no score depends on"
        tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code)
        checks.append(compare_rows(part, _files(contract, stored), about))
        part = "template"
        renderer = Renderer(tokenizer, **contract.rendering.settings)
        about = f"sha256 {contract.rendering.chat_template_sha256[:12]}"
        checks.append(compare_rows(part, _template(contract, renderer), about))
        part = "tokens"
        num_tokens = sum(len(example.token_ids) for example in contract.golden)
        about = f"{len(contract.golden)} conversations, {num_tokens} tokens"
        checks.append(compare_rows(part, _tokens(contract, renderer), about))
        about = f"{contract.read.position}, {contract.read.token or 'whatever it is'}"
        checks.append(compare_rows("read position", _padding(contract, stored, tokenizer), about))
        summary = "config.json has other programs apply another function to the score"
        row = DiagnosisRow(
            "problem_type", contract.problem_type, stored.config.get("problem_type"), summary, _RESTORE_CONFIG
        )
        checks.append(compare_rows("activation", [row], "none"))
        part = "weights"
        model = _load(contract, stored, tokenizer, choose_device(device), dtype, trust_remote_code)
        with exact_scoring(model):
            values_SH = model.score_tokens([example.token_ids for example in contract.golden]).tolist()
        scores = [combined_heads(values, contract.heads) for values in values_SH]
        heads, dtypes = stored_heads(model.hf), contract.dtypes
        about = f"weights in {dtypes.weights}, head in {dtypes.head}, loaded in {dtypes.config}"
        checks.append(compare_rows("precision", _precision(contract, stored, heads), about))
        checks.append(_weights(contract, stored, heads, diagnose(contract, scores, dtype=computed)))
    except TreewardError as error:  # without this part the later ones cannot be compared
        checks.append(failed(part, error))
    return verification(str(name), contract, checks, scores, dtype=computed)


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


def _files(contract: ScoringContract, stored: StoredModel) -> Iterator[DiagnosisRow]:
    # Compared in the file: a limit or a window may change no conversation as short as the golden ones.
    observed, expected = architecture_of(stored.config), contract.weights.config
    for key in sorted(observed.keys() | expected.keys()):
        summary = f"config.json is of another architecture, by {key}"
        yield DiagnosisRow(key, expected.get(key), observed.get(key), summary, _RESTORE_CONFIG)


def _template(contract: ScoringContract, renderer: Renderer) -> Iterator[DiagnosisRow]:
    raw, expected = renderer.tokenizer.chat_template, contract.rendering.chat_template
    if contract.rendering.template_in_folder:
        summary = "the chat template is gone: treeward falls back to its own, other programs have none"
        yield DiagnosisRow("", "a chat template", "a chat template" if raw else "none", summary, _RESTORE_TEMPLATE)
    # What the renderer adds to a template (a fixed date, a BOS) is in that of an export already.
    texts = [raw if isinstance(raw, str) else "", renderer.chat_template]
    observed_lines = (expected if expected in texts else texts[0] or texts[1]).split("\n")
    expected_lines = expected.split("\n")
    i = _first_difference(observed_lines, expected_lines)
    observed, wanted = (
        json.dumps(lines[i]) if i < len(lines) else "(the text has ended)" for lines in (observed_lines, expected_lines)
    )
    yield DiagnosisRow(f"line {i + 1}:", wanted, observed, "the chat template was changed", _RESTORE_TEMPLATE)


def _tokens(contract: ScoringContract, renderer: Renderer) -> Iterator[DiagnosisRow]:
    tokenizer = renderer.tokenizer
    expected, observed = contract.rendering.tokenizer_sha256[:12], tokenizer_sha256(tokenizer)[:12]
    summary = "another tokenizer: vocabulary, merges or special tokens"
    yield DiagnosisRow("sha256", expected, observed, summary, _RESTORE_TOKENIZER)
    for example in contract.golden:
        fitted = renderer.fit(example.conversation)
        ids = [] if fitted is None else list(fitted.token_ids)  # none: it is too long
        i = _first_difference(ids, example.token_ids)
        observed, expected = (
            f"{tokens[i : i + 4]} at {i}, {tokenizer.decode(tokens[i : i + 4])!r}"
            for tokens in (ids, example.token_ids)
        )
        summary = f"the conversation {example.name!r} becomes other tokens"
        yield DiagnosisRow("", expected, observed, summary, _RESTORE_TOKENIZER)


def _padding(
    contract: ScoringContract, stored: StoredModel, tokenizer: PreTrainedTokenizerBase
) -> Iterator[DiagnosisRow]:
    expected, is_plain = contract.rendering.pad_token_id, contract.read.plain_transformers
    for file, observed, matters in (
        ("config.json", stored.pad_token_id, is_plain or keeps_padding(contract)),
        ("tokenizer_config.json", tokenizer.pad_token_id, is_plain),
    ):
        if matters:
            summary = f"{file} pads with another token: transformers may read the score elsewhere"
            yield DiagnosisRow("pad_token_id", expected, observed, summary, restore(file))


def _precision(contract: ScoringContract, stored: StoredModel, heads: Sequence[str]) -> Iterator[DiagnosisRow]:
    expected, (backbone, head) = contract.dtypes, stored.split(heads)
    summary = "the {}'s weights are stored in another number format"
    yield DiagnosisRow("format", expected.weights, dtype_of(backbone), summary.format("backbone"), _RESTORE_WEIGHTS)
    yield DiagnosisRow("format", expected.head, dtype_of(head), summary.format("head"), _RESTORE_WEIGHTS)
    if (dtype := stored.config_dtype) is not None:
        summary = "config.json has transformers load the weights in another number format"
        yield DiagnosisRow("dtype", expected.config, dtype, summary, _RESTORE_CONFIG)


def _load(
    contract: ScoringContract,
    stored: StoredModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> RewardModel:
    expected = contract.weights
    if stored.shapes_sha256 != expected.shapes_sha256:
        raise ModelError(
            "these are tensors of other names or shapes",
            got=f"{len(stored.tensors)} tensors, {stored.num_parameters:,} numbers",
            need=f"{expected.num_tensors} tensors, {expected.num_parameters:,} numbers of {expected.architecture}",
            fix=_RESTORE_WEIGHTS,
        )
    return load_classifier(
        stored.folder,
        tokenizer=copy.deepcopy(tokenizer),  # loading mends its padding
        dtype=dtype,
        device=device,
        several_heads=True,
        trust_remote_code=trust_remote_code,
        keep_padding=keeps_padding(contract),
    ).model


def _weights(contract: ScoringContract, stored: StoredModel, heads: Sequence[str], verdict: Check) -> Check:
    """The check of the bytes of all tensors that were hashed at signing, or of the head alone. `verdict`: what the
    scores say."""
    expected, (_, head) = contract.weights, stored.split(heads)
    if expected.tensors:
        hashed = f"the bytes of {len(stored.tensors)} tensors"
        digests = {tensor.name: sha256_of([tensor])[:HASH_DIGITS] for tensor in stored.tensors}
        changed = [name for name, digest in digests.items() if digest != expected.tensors.get(name)]
    else:
        hashed = "the bytes of the head"
        changed = [] if sha256_of(head) == expected.head_sha256 else [tensor.name for tensor in head]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        summary = f"{len(changed)} of {len(stored.tensors)} tensors are others: {', '.join(changed[:3])}{more}"
        if verdict.part == "precision":
            return replace(verdict, summary=f"{verdict.summary}; {summary}", fix=_RESTORE_WEIGHTS)
        if verdict.state == "differs":
            return replace(verdict, part="weights", summary=summary, fix=_RESTORE_WEIGHTS)
        summary += "; the golden scores are still equal" if contract.golden else ""
        got, need = f"other bytes in {changed[0]}", "the tensors that were signed"
        return Check("weights", "differs", summary, got, need, _RESTORE_WEIGHTS)
    if verdict.state == "equal":
        return replace(verdict, summary=f"{hashed} are equal; {verdict.summary}")
    # Where not every tensor was hashed, other weights can make scores that look scaled or turned round.
    if verdict.part == "weights" or (verdict.part == "activation" and not expected.tensors):
        summary = f"the scores are others, though {hashed} are equal"
        fix = "restore the folder; if it is whole, compare the versions of torch and transformers"
        return replace(verdict, part="weights", summary=summary, fix=fix)
    return verdict


def _first_difference(observed: Sequence[Any], expected: Sequence[Any]) -> int:
    """The first place at which two sequences differ; the end of the shorter one where it begins the other."""
    pairs = enumerate(zip(observed, expected, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(observed), len(expected)))
