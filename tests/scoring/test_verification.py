"""Every way to damage a model folder is named rightly, and so is a known mistake of a program by
its scores."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from messages import edit_json, replace_text
from safetensors.torch import load_file, save_file
from signed import contract_of, signed
from transformers import AutoTokenizer

from treeward.model.contract import CONTRACT_FILE, GoldenExample, ScoringContract, write_contract
from treeward.scoring.diagnosis import PARTS, Check, diagnose
from treeward.scoring.verification import Verification, verify

TEMPLATE = """\
{%- for m in messages -%}
{{- m.role + ': ' + m.content + eos_token -}}
{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}"""


@pytest.fixture(scope="module")
def exported(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.bos_token = "<|system|>"  # a token that the template does not write
    folder = tmp_path_factory.mktemp("exported") / "model"
    signed(folder, tokenizer, tiny_model("llama"), chat_template=TEMPLATE)
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(exported, tmp_path / "model"))


def check(folder: Path, **options: Any) -> Verification:
    return verify(folder, device="cpu", **options)


def weights_of(result: Verification) -> Check:
    [found] = [one for one in result.checks if one.part == "weights"]
    return found


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def rounded(dtype: torch.dtype, tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: tensor.to(torch.bfloat16).to(dtype) for name, tensor in tensors.items()})


def add_to(name: str, amount: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].clone()
        tensors[name].view(-1)[0] += amount

    return change


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


def swap_words(folder: Path) -> None:
    """Two tokens of the vocabulary change places."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]
    file.write_text(json.dumps(content), encoding="utf-8")


def pad_with_eos(*files: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        for file in files:
            value = {"pad_token_id": tokenizer.eos_token_id} if file == "config.json" else {
                "pad_token": tokenizer.eos_token
            }  # fmt: skip
            edit_json(folder / file, **value)

    return change


DAMAGE: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "template edited": (
        lambda f: replace_text(f / "chat_template.jinja", "m.role + ': '", "m.role + ' - '"),
        "template", r"changed( .*)?got line 2: .*' - '.*need line 2: .*': '",
    ),
    "template gone": (lambda f: (f / "chat_template.jinja").unlink(), "template",
                      "gone.*fix restore chat_templ"),
    "words of the vocabulary swapped": (swap_words, "tokens", "another tokenizer"),
    "pad = eos in config.json": (
        pad_with_eos("config.json"), "read position",
        "^config.json pads with another token: transformers .*fix restore config.json",
    ),
    "saved in bfloat16": (
        lambda f: change_weights(f, partial(rounded, torch.bfloat16)), "precision",
        "backbone.*another dtype got format bfloat16 need format floa",
    ),
    "rounded to bfloat16": (
        lambda f: change_weights(f, partial(rounded, torch.float32)), "precision",
        "coarser dtype.*; 2[01] of 21 tensors have changed",
    ),
    "dtype in config.json": (
        lambda f: edit_json(f / "config.json", dtype="bfloat16"), "precision",
        "another dtype got dtype bfloat16 need dtype float32 fix restore config.json",
    ),
    "a sigmoid": (lambda f: edit_json(f / "config.json", problem_type=None), "activation",
                  "problem_type None"),
    "head changed a little": (
        lambda f: change_weights(f, add_to("score.weight", 1e-6)), "weights",
        "changed: score.weight; the golden scores are still equal got other bytes in score.weight",
    ),
    "a tensor of the backbone changed": (
        lambda f: change_weights(f, add_to(UP, 3.0)), "weights",
        f"1 of 21 tensors have changed: {UP} got [-0-9.]+ for .*"
        "fix restore the weights from the folder",
    ),
    "architecture": (
        lambda f: edit_json(f / "config.json", rms_norm_eps=0.1), "files",
        "by rms_norm_eps got rms_norm_eps 0.1 need",
    ),
    "config gone": (lambda f: (f / "config.json").unlink(), "files", "config.json is missing"),
    "no contract": (lambda f: (f / CONTRACT_FILE).unlink(), "contract",
                    "no scoring contract .* --write"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named(damage: str, folder: Path) -> None:
    change, part, words = DAMAGE[damage]
    change(folder)
    result = check(folder)
    first = result.first_difference
    assert first is not None and not result.equal
    assert first.part == part, result.checks
    assert re.search(words, f"{first.summary} got {first.got} need {first.need} fix {first.fix}"), (
        first
    )
    assert first.fix
    assert [one.part for one in result.checks] == list(PARTS)


def test_a_whole_folder_is_equal(folder: Path) -> None:
    result = check(folder)
    assert result.equal and result.first_difference is None
    assert all(one.state == "equal" for one in result.checks), result.checks
    assert (
        result.num_scores == 10
        and result.largest_difference is not None
        and result.tolerance is not None
    )
    assert result.largest_difference <= result.tolerance / 4
    assert "21 tensors are equal" in weights_of(result).summary


@pytest.mark.parametrize(("factor", "name"), [(2.0, "score.weight"), (-1.0, "model.norm.weight")])
@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_no_activation_is_blamed_for_weights(
    factor: float, name: str, is_checkpoint: bool, folder: Path
) -> None:
    """The contract of a checkpoint has the hash of the head alone."""
    contract = contract_of(folder)
    if is_checkpoint:
        weights = contract.weights.model_copy(update={"tensors": {}, "sha256": None})
        write_contract(contract.model_copy(update={"weights": weights}), folder)
        whole = check(folder)
        assert whole.equal and "the bytes of the head" in weights_of(whole).summary
    change_weights(folder, lambda tensors: tensors.update({name: tensors[name] * factor}))
    result = check(folder)
    assert [one.part for one in result.checks if one.state == "differs"] == ["weights"], (
        result.checks
    )


def test_the_same_weights_with_other_scores(folder: Path) -> None:
    """Something is applied to the score, or the machine computes another one."""
    contract = contract_of(folder)

    def expect(scores: list[float]) -> list[Any]:
        golden = [
            one.model_copy(update={"score": s})
            for one, s in zip(contract.golden, scores, strict=True)
        ]
        write_contract(contract.model_copy(update={"golden": golden}), folder)
        return [one for one in check(folder).checks if one.state == "differs"]

    (scaled,) = expect([one.score / 2 + 1 for one in contract.golden])
    assert scaled.part == "activation" and "2 x score" in scaled.summary
    (other,) = expect([one.score + 0.3 * (-1) ** i for i, one in enumerate(contract.golden)])
    assert (
        other.part == "weights"
        and "the scores differ, though the bytes of 21 tensors" in other.summary
    )
    (coarse,) = expect([one.score + 1e-4 * (-1) ** i for i, one in enumerate(contract.golden)])
    assert coarse.part == "precision"


# --- scores of any program, without a model -------------------------------------------------------


SCORES = [-2.5, -0.75, 0.25, 1.5, 4.0, 21.0]
EARLY = [0.5, -1.0, 0.0, 2.5, 3.0, 20.0]


def with_scores(folder: Path, scores: list[float], *, bos: bool = True) -> ScoringContract:
    """The folder's contract with these golden scores."""
    golden = []
    for i, (score, early) in enumerate(zip(scores, EARLY, strict=False)):
        mistakes = {"read_before_end": early} | (
            {"two_bos": score + 0.3, "no_bos": score - 0.2} if bos else {}
        )
        fields = {
            "name": f"chat {i}",
            "messages": [],
            "token_ids": [1, 2],
            "score": score,
            "heads": [score],
        }
        golden.append(GoldenExample.model_validate({**fields, "mistakes": mistakes}))
    contract = contract_of(folder)
    tolerance = contract.tolerance.model_copy(update={"float32": 1e-4, "bfloat16": 0.05})
    return contract.model_copy(update={"golden": golden, "tolerance": tolerance})


@pytest.mark.parametrize(
    ("change", "part", "words"),
    [
        (lambda x, i: x, None, "6 scores equal"),
        (lambda x, i: x + 9e-5 * (-1) ** i, None, "6 scores equal, largest difference 9.0e-05"),
        (lambda x, i: EARLY[i], "read position", "the token before the last"),
        (lambda x, i: x + 0.3, "tokens", "one BOS too many"),
        (lambda x, i: 1 / (1 + math.exp(-x)), "activation", "a sigmoid"),
        (lambda x, i: 1.0, "activation", "softmax"),
        (lambda x, i: (x - 3.0) / 2.0, "activation", r"0.5 x score -1.5"),
        (lambda x, i: x + 0.03 * (-1) ** i, "precision", "coarser dtype"),
        (lambda x, i: 0.0, "weights", "no known mistake explains"),
    ],
)
def test_what_the_scores_say(
    change: Callable[[float, int], float], part: str | None, words: str, exported: Path
) -> None:
    check = diagnose(
        with_scores(exported, SCORES), [change(score, i) for i, score in enumerate(SCORES)]
    )
    assert (check.part if check.state == "differs" else None) == part
    assert words in check.summary
    if part is not None:
        assert check.fix and check.got is not None and "chat" in check.got


def test_a_mistake_needs_evidence(exported: Path) -> None:
    """A line goes through any two scores, and a mistake that the contract does not know explains
    nothing."""
    assert diagnose(with_scores(exported, SCORES[:2]), [5.0, 9.0]).part == "weights"
    shifted = diagnose(with_scores(exported, SCORES, bos=False), [x + 0.3 for x in SCORES])
    assert shifted.part == "activation"


def renamed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.another.weight"] = tensors.pop(UP)


@pytest.mark.parametrize(
    "change", [renamed, lambda tensors: tensors.pop(UP)], ids=["renamed", "gone"]
)
def test_other_tensors_are_an_error_of_the_weights(change: Any, folder: Path) -> None:
    """Before they are loaded, where shapes would fail in the words of another library."""
    change_weights(folder, change)
    first = check(folder).first_difference
    assert first is not None and "other names or shapes" in first.summary


@pytest.mark.parametrize("index", ["[]", '{"weight_map": {"score.weight": 5}}'])
def test_an_index_of_weights_of_another_form_is_an_error_of_the_files(
    index: str, folder: Path
) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    first = check(folder).first_difference
    assert first is not None and first.part == "files" and "is damaged" in first.summary


def test_the_head_of_a_checkpoint_is_compared_though_no_score_shows_it(folder: Path) -> None:
    contract = contract_of(folder)
    weights = contract.weights.model_copy(update={"tensors": {}, "sha256": None})
    write_contract(contract.model_copy(update={"weights": weights}), folder)
    change_weights(folder, add_to("score.weight", 1e-6))
    first = check(folder).first_difference
    assert first is not None and first.part == "weights" and "score.weight" in first.summary
