"""`verify`: does this folder, on this machine, still make the scores of its scoring contract?

    verification = verify("results/rm/final", device="cuda")
    verification.equal               # True
    verification.first_difference    # None; or the part that differs first, with the remedy

Everything between messages and a score is compared in the order in which it acts. A wrong part
makes later ones look wrong too, so the first is the cause.

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
from treeward.model.heads import stored_heads
from treeward.model.loading import load_classifier
from treeward.model.pretrained import check_local, choose_device, load_tokenizer
from treeward.model.reward_model import RewardModel
from treeward.model.spread import SPREAD_FOLDER, read_spread
from treeward.model.stored import StoredModel, architecture_of, dtype_of, sha256_of
from treeward.scoring.combining import score_of, values_of
from treeward.scoring.diagnosis import (
    Check,
    DiagnosisRow,
    Part,
    Verification,
    compare_rows,
    diagnose,
    diagnose_spreads,
    failed,
    restore,
    verification,
)
from treeward.scoring.golden import (
    HASH_DIGITS,
    exact_scoring,
    golden_spreads,
    tokenizer_sha256,
)

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

    `device`: None is a GPU where there is one. `dtype`: of the backbone; unless it is float32,
    scores are compared to the contract's tolerance for bfloat16. What is wrong with the model is in
    the result; `ModelError` is raised where there is no model at all.
    """
    folder = _local_folder(name, trust_remote_code)
    computed: Dtype = "bfloat16"
    if dtype == torch.float32:
        computed = "float32"
    checks: list[Check] = []
    scores: list[float] = []
    contract: ScoringContract | None = None
    part: Part = "contract"  # the one at fault where something raises
    try:
        contract = read_contract(folder)
        if contract is None:
            command = f"treeward verify {name} --write"
            raise ModelError(
                "there is no scoring contract",
                got=f"no {CONTRACT_FILE}",
                fix=f"copy it from the export, or, if the folder is as it should be: {command}",
            )
        about = f"version {contract.version}, written by treeward {contract.treeward_version}"
        checks.append(compare_rows(part, (), about))
        part = "files"
        stored = StoredModel(folder)
        about = f"{len(stored.tensors)} tensors, {stored.num_parameters:,} numbers"
        if contract.readme_sha256 not in (None, readme_sha256(folder)):
            # No fault: a README is edited by people.
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
        row = DiagnosisRow(
            "problem_type",
            contract.problem_type,
            stored.config.get("problem_type"),
            "config.json has other programs apply another function to the score",
            _RESTORE_CONFIG,
        )
        checks.append(compare_rows("activation", [row], "none"))
        part = "weights"
        model = _load(contract, stored, tokenizer, choose_device(device), dtype, trust_remote_code)
        token_ids = [example.token_ids for example in contract.golden]
        with exact_scoring(model):
            golden_values = values_of(model, token_ids)
        scores = [score_of(values, contract.heads, contract.steps) for values in golden_values]
        heads = stored_heads(model.hf)
        dtypes = contract.dtypes
        about = f"weights in {dtypes.weights}, head in {dtypes.head}, loaded in {dtypes.config}"
        checks.append(compare_rows("precision", _precision(contract, stored, heads), about))
        verdict = diagnose(contract, scores, dtype=computed)
        checks.append(_weights(contract, stored, heads, verdict))
        part = "spread"
        checks.append(_spread(contract, stored, model, computed))
    except TreewardError as error:
        # Without this part the later ones cannot be compared.
        checks.append(failed(part, error))
    return verification(str(name), contract, checks, scores, dtype=computed)


def _local_folder(name: str | Path, trust_remote_code: bool) -> Path:
    """The folder of a model; one on the hub is downloaded.

    Raises `ModelError` where there is none.
    """
    folder = Path(name).expanduser()
    is_model = (folder / "config.json").is_file()
    if not is_model and (folder / "model" / "config.json").is_file():
        summary = "the model is inside this folder"
        raise ModelError(summary, where=str(name), fix=f"use {name}/model")
    if folder.is_dir():  # also without a model: what it lacks is a difference like others
        return folder
    check_local(str(name))
    # No pickles, and code only where it may run.
    patterns = list(_PATTERNS)
    if trust_remote_code:
        patterns.append("*.py")
    try:
        return Path(snapshot_download(str(name), allow_patterns=patterns))
    except (OSError, ValueError, HTTP_ERROR) as error:
        raise ModelError(
            "there is no such model",
            where=str(name),
            got=str(error).strip().partition("\n")[0],
            need="a folder that holds a model, or a hub name",
        ) from error


def _files(contract: ScoringContract, stored: StoredModel) -> Iterator[DiagnosisRow]:
    # Compared in the file: a limit or a window may change no conversation that is as short as the
    # golden ones.
    observed = architecture_of(stored.config)
    expected = contract.weights.config
    for key in sorted(observed.keys() | expected.keys()):
        summary = f"config.json is of another architecture, by {key}"
        yield DiagnosisRow(key, expected.get(key), observed.get(key), summary, _RESTORE_CONFIG)


def _template(contract: ScoringContract, renderer: Renderer) -> Iterator[DiagnosisRow]:
    raw = renderer.tokenizer.chat_template
    if contract.rendering.template_in_folder:
        yield DiagnosisRow(
            "",
            "a chat template",
            "a chat template" if raw else "none",
            "the chat template is gone: treeward falls back to its own, other programs have none",
            _RESTORE_TEMPLATE,
        )
    expected = contract.rendering.chat_template
    # What the renderer adds to a template (a fixed date, a BOS) is in that of an export already.
    template = raw if isinstance(raw, str) else ""
    if expected in (template, renderer.chat_template):
        observed = expected
    else:
        observed = template or renderer.chat_template
    observed_lines = observed.split("\n")
    expected_lines = expected.split("\n")
    i = _first_difference(observed_lines, expected_lines)
    yield DiagnosisRow(
        f"line {i + 1}:",
        _line_of_template(expected_lines, i),
        _line_of_template(observed_lines, i),
        "the chat template was changed",
        _RESTORE_TEMPLATE,
    )


def _line_of_template(lines: Sequence[str], i: int) -> str:
    if i == len(lines):
        return "(the text has ended)"
    return json.dumps(lines[i])  # which shows white space


def _tokens(contract: ScoringContract, renderer: Renderer) -> Iterator[DiagnosisRow]:
    tokenizer = renderer.tokenizer
    yield DiagnosisRow(
        "sha256",
        contract.rendering.tokenizer_sha256[:12],
        tokenizer_sha256(tokenizer)[:12],
        "another tokenizer: vocabulary, merges or special tokens",
        _RESTORE_TOKENIZER,
    )
    for example in contract.golden:
        fitted = renderer.fit(example.conversation)
        ids: list[int] = []  # where it is too long
        if fitted is not None:
            ids = list(fitted.token_ids)
        i = _first_difference(ids, example.token_ids)
        yield DiagnosisRow(
            "",
            _tokens_at(i, example.token_ids, tokenizer),
            _tokens_at(i, ids, tokenizer),
            f"the conversation {example.name!r} becomes other tokens",
            _RESTORE_TOKENIZER,
        )


def _tokens_at(i: int, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The next four tokens, which are enough to recognise the place, and their text."""
    shown = list(ids[i : i + 4])
    return f"{shown} at {i}, {tokenizer.decode(shown)!r}"


def _padding(
    contract: ScoringContract,
    stored: StoredModel,
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[DiagnosisRow]:
    """The padding tokens that a score depends on.

    Plain transformers finds the end of a row by the one of config.json, and pads with the
    tokenizer's. A model that reads before the padding does so by config.json in treeward too.
    """
    expected = contract.rendering.pad_token_id
    is_plain = contract.read.plain_transformers
    summary = "{} pads with another token: transformers may read the score elsewhere"
    if is_plain or keeps_padding(contract):
        yield DiagnosisRow(
            "pad_token_id",
            expected,
            stored.pad_token_id,
            summary.format("config.json"),
            restore("config.json"),
        )
    if is_plain:
        yield DiagnosisRow(
            "pad_token_id",
            expected,
            tokenizer.pad_token_id,
            summary.format("tokenizer_config.json"),
            restore("tokenizer_config.json"),
        )


def _precision(
    contract: ScoringContract,
    stored: StoredModel,
    heads: Sequence[str],
) -> Iterator[DiagnosisRow]:
    backbone, head = stored.split(heads)
    # As they are on the disk: loading casts them, and other programs load them otherwise.
    expected = contract.dtypes
    summary = "the {}'s weights are stored in another dtype"
    yield DiagnosisRow(
        "format",
        expected.weights,
        dtype_of(backbone),
        summary.format("backbone"),
        _RESTORE_WEIGHTS,
    )
    yield DiagnosisRow(
        "format",
        expected.head,
        dtype_of(head),
        summary.format("head"),
        _RESTORE_WEIGHTS,
    )
    if stored.config_dtype is not None:
        yield DiagnosisRow(
            "dtype",
            expected.config,
            stored.config_dtype,
            "config.json has transformers load the weights in another dtype",
            _RESTORE_CONFIG,
        )


def _load(
    contract: ScoringContract,
    stored: StoredModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> RewardModel:
    expected = contract.weights
    # Before they are loaded: transformers would draw tensors that are missing at random.
    if stored.shapes_sha256 != expected.shapes_sha256:
        need = f"{expected.num_tensors} tensors, {expected.num_parameters:,} numbers"
        raise ModelError(
            "these are tensors of other names or shapes",
            got=f"{len(stored.tensors)} tensors, {stored.num_parameters:,} numbers",
            need=f"{need} of {expected.architecture}",
            fix=_RESTORE_WEIGHTS,
        )
    return load_classifier(
        stored.folder,
        tokenizer=copy.deepcopy(tokenizer),  # loading mends its padding
        dtype=dtype,
        device=device,
        several_heads=True,
        steps=True,
        trust_remote_code=trust_remote_code,
        keep_padding=keeps_padding(contract),
    ).model


def _weights(
    contract: ScoringContract,
    stored: StoredModel,
    heads: Sequence[str],
    verdict: Check,
) -> Check:
    """The check of the bytes of the weights, beside `verdict`, which is what the scores say.

    The bytes are those of all tensors if they were hashed at signing, and else of the head alone.
    """
    expected = contract.weights
    changed = []
    if expected.tensors:
        hashed = f"the bytes of {len(stored.tensors)} tensors"
        for tensor in stored.tensors:
            digest = sha256_of([tensor])[:HASH_DIGITS]
            if digest != expected.tensors.get(tensor.name):
                changed.append(tensor.name)
    else:
        hashed = "the bytes of the head"
        _, head = stored.split(heads)
        # One hash for the head: any of its tensors may be the one that was changed.
        if sha256_of(head) != expected.head_sha256:
            changed = [tensor.name for tensor in head]
    if changed:
        names = ", ".join(changed[:3])
        summary = f"{len(changed)} of {len(stored.tensors)} tensors have changed: {names}"
        if len(changed) > 3:
            summary += f" and {len(changed) - 3} more"
        if verdict.part == "precision":
            # Weights that were rounded: both are true, and what the scores say is the cause.
            summary = f"{verdict.summary}; {summary}"
            return replace(verdict, summary=summary, fix=_RESTORE_WEIGHTS)
        if verdict.state == "differs":
            return replace(verdict, part="weights", summary=summary, fix=_RESTORE_WEIGHTS)
        if contract.golden:
            summary += "; the golden scores are still equal"
        return Check(
            "weights",
            "differs",
            summary,
            got=f"other bytes in {changed[0]}",
            need="the tensors that were signed",
            fix=_RESTORE_WEIGHTS,
        )
    if verdict.state == "equal":
        return replace(verdict, summary=f"{hashed} are equal; {verdict.summary}")
    # Where not every tensor was hashed, other weights can make scores that look scaled or negated.
    is_guess = verdict.part == "activation" and not expected.tensors
    if verdict.part == "weights" or is_guess:
        summary = f"the scores differ, though {hashed} are equal"
        fix = "restore the folder; if it is whole, compare the versions of torch and transformers"
        return replace(verdict, part="weights", summary=summary, fix=fix)
    return verdict


def _spread(
    contract: ScoringContract, stored: StoredModel, model: RewardModel, dtype: Dtype
) -> Check:
    """The check of how sure a score is. Raises `ModelError` for a file that cannot be used."""
    folder = stored.folder
    if contract.spread is None:
        about = "none"
        if contract.has_estimates:
            about = "the deviation of the heads"
        if (folder / SPREAD_FOLDER).is_dir():
            # As after `verify --write`: a new contract has nothing that was fitted to an older one.
            about += f"; nothing reads the folder {SPREAD_FOLDER}, which the contract does not name"
        return Check("spread", "equal", about)
    _, head = stored.split(stored_heads(model.hf))
    head_sha256 = sha256_of(head)
    if head_sha256 != contract.spread.head_sha256:
        return Check(
            "spread",
            "differs",
            "the head was changed after the spread was fitted",
            got=f"a head of SHA-256 {head_sha256[:HASH_DIGITS]}",
            need=contract.spread.head_sha256[:HASH_DIGITS],
            fix=_RESTORE_WEIGHTS,
        )
    reader = read_spread(folder, contract, model).to(model.device)
    token_ids = [example.token_ids for example in contract.golden]
    with exact_scoring(model):
        spreads = golden_spreads(model, reader, token_ids)
    check = diagnose_spreads(contract, spreads, dtype=dtype)
    if check.state == "equal":
        about = f"{contract.spread.file}, of {contract.spread.num_pairs} pairs; {check.summary}"
        return replace(check, summary=about)
    return check


def _first_difference(observed: Sequence[Any], expected: Sequence[Any]) -> int:
    """The first place at which two sequences differ.

    It is the end of the shorter one where that is how the longer one begins.
    """
    length = min(len(observed), len(expected))
    for i in range(length):
        if observed[i] != expected[i]:
            return i
    return length
