"""`reward_contract.json`: what it must hold, and what is said where it does not."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from treeward.errors import ModelError
from treeward.model.contract import (
    CONTRACT_FILE,
    ScoringContract,
    read_contract,
    text_sha256,
    write_contract,
)

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def contract_of(**changes: Any) -> ScoringContract:
    fields: dict[str, Any] = {
        "treeward_version": "0.1",
        "rendering": {
            "chat_template": TEMPLATE,
            "chat_template_sha256": text_sha256(TEMPLATE),
            "template_in_folder": True,
            "tokenizer_sha256": "0" * 64,
            "max_length": 77,
            "chat_template_kwargs": {"tone": "é"},
        },
        "read": {"token": "eos"},
        "weights": {
            "architecture": "LlamaForSequenceClassification",
            "num_parameters": 10,
            "num_tensors": 2,
            "shapes_sha256": "1" * 64,
            "head_sha256": "2" * 64,
            "config": {"hidden_size": 8},
        },
        "golden": [{"name": "a", "messages": [{"role": "user"}], "token_ids": [3], "score": 0.1, "heads": [0.1]}],
        "tolerance": {"float32": 1e-5, "bfloat16": 1e-2},
    }
    return ScoringContract.model_validate(fields | changes)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_contract(tmp_path) is None and read_contract("someone/on-the-hub") is None
    contract = contract_of()
    path = write_contract(contract, tmp_path)
    assert path == tmp_path / CONTRACT_FILE and read_contract(tmp_path) == contract == read_contract(str(tmp_path))
    assert "é" in path.read_text(encoding="utf-8")
    assert (stat.S_IMODE(path.stat().st_mode) & 0o044) == 0o044  # others may read the model, so this too
    other = contract.model_copy(update={"treeward_version": "0.2"})
    assert other.scores_sha256 != contract.scores_sha256 == contract_of().scores_sha256
    write_contract(other, tmp_path)
    assert read_contract(tmp_path) == other and [file.name for file in tmp_path.iterdir()] == [CONTRACT_FILE]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged"),
        ("[2]", "damaged"),
        ("{}", "damaged"),
        ('{"version": 99}', "another version(?s:.*)field: version(?s:.*)99(?s:.*)need:  2(?s:.*)--write --force"),
    ],
)
def test_files_that_are_no_contract(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / CONTRACT_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=f"{CONTRACT_FILE}: (?s:.*){message}"):
        read_contract(tmp_path)
