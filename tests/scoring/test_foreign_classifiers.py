"""A classifier that treeward has not made is read where plain transformers reads it, whatever its
padding token is."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from messages import chat
from templates import byte_bpe, template_source
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from treeward.model.export import export_model
from treeward.model.loading import load_classifier
from treeward.scoring.diagnosis import diagnose
from treeward.scoring.golden import sign_exported, sign_folder
from treeward.scoring.scorer import Scorer
from treeward.scoring.verification import verify

QUESTION = "Which tree bears cones, and which of them loses its needles every autumn? " * 3
CHATS = [
    chat(QUESTION, text)
    for text in ("A pine does.", "A pine does, and so does a larch.", "No.", "Yes")
]


@pytest.fixture(scope="module", params=["end of turn", "another", "none"])
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with Llama 3's template, saved by plain transformers; what its padding token is."""
    tokenizer = byte_bpe(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|pad|>"),
        "<|begin_of_text|>",
        "<|eot_id|>",
    )
    tokenizer.pad_token = {"end of turn": "<|eot_id|>", "another": "<|pad|>", "none": None}[
        request.param
    ]
    tokenizer.chat_template = template_source("llama3")
    folder = tmp_path_factory.mktemp("foreign")
    hf = tiny_model(
        "llama", pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )
    hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def plain(folder: Path, chats: Sequence[Any] = CHATS) -> list[float]:
    """The logits of plain transformers, with the folder's own tokenizer: padded, or alone where
    nothing pads."""
    hf = AutoModelForSequenceClassification.from_pretrained(folder, dtype="float32", num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    batches = [texts] if tokenizer.pad_token else [[text] for text in texts]
    values: list[float] = []
    for batch in batches:
        inputs = tokenizer(
            batch, padding=len(batch) > 1, add_special_tokens=False, return_tensors="pt"
        )
        values += hf(**inputs).logits[:, 0].tolist()
    return values


def of_ids(scorer: Scorer, rows: list[list[int]]) -> list[float | None]:
    return [score.score for score in scorer.score_prepared(scorer.prepare_texts(rows))]


def test_every_route_gives_the_logits_of_plain_transformers(foreign: Path) -> None:
    want = plain(foreign)
    for options in ({}, {"prefix_cache_bytes": 2**20}, {"max_sequences": 1}):
        scorer = Scorer.load(foreign, **options)
        for _ in range(2):  # the second time from the cache
            assert [one.score for one in scorer.score(CHATS)] == pytest.approx(want, abs=1e-5)
    for layout in ("tree", "rows"):
        scorer.model.layout = layout
        rows = [scorer.renderer.encode(chat) for chat in CHATS]
        assert of_ids(scorer, rows) == pytest.approx(want, abs=1e-5)
        assert scorer.model(scorer.model.make_batch([rows])).tolist() == pytest.approx(
            want, abs=1e-5
        )
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    padded = {"input_ids": ids, "input_lengths": torch.tensor([len(row) for row in rows])}
    assert scorer.model.score(padded)["scores"].tolist() == pytest.approx(want, abs=1e-5)
    read = load_classifier(foreign).model.score_tokens(rows)[:, 0].tolist()  # as training reads it
    if (
        pad := scorer.model.padding_token
    ) is not None:  # nothing but padding is read at its first token
        hf = AutoModelForSequenceClassification.from_pretrained(
            foreign, dtype="float32", num_labels=1
        )
        nothing_else = torch.tensor([[pad] * 3])
        want_of_padding = hf(nothing_else).logits[:, 0].tolist()
        assert of_ids(scorer, nothing_else.tolist()) == pytest.approx(want_of_padding, abs=1e-5)
    is_end = AutoTokenizer.from_pretrained(foreign).pad_token == "<|eot_id|>"
    assert (max(abs(a - b) for a, b in zip(read, want, strict=True)) > 0.01) == is_end


def test_its_contract_says_where_it_is_read(foreign: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(foreign, tmp_path / "model"))
    pad = AutoTokenizer.from_pretrained(folder).pad_token
    contract = sign_folder(folder)
    chats = [example.messages for example in contract.golden]
    assert [example.score for example in contract.golden] == pytest.approx(
        plain(folder, chats), abs=1e-5
    )
    assert contract.read.plain_transformers
    assert contract.read.position == ("before padding" if pad else "last token")
    assert (
        verify(folder).equal
        and Scorer.load(folder).model.padding_token == contract.rendering.pad_token_id
    )
    mistake = "read_at_padding" if pad == "<|eot_id|>" else "read_before_end"
    check = diagnose(contract, [example.mistakes[mistake] for example in contract.golden])
    assert check.part == "read position" and ("padding to this model" in check.summary) == (
        pad == "<|eot_id|>"
    )
    assert sign_folder(folder, like=contract).read == contract.read
    if pad is None:
        return
    edited = AutoTokenizer.from_pretrained(folder)
    hf = AutoModelForSequenceClassification.from_pretrained(folder)
    hf.config.pad_token_id = edited.convert_tokens_to_ids("<|start_header_id|>")
    hf.config.save_pretrained(folder)
    difference = verify(folder).first_difference
    assert (
        difference is not None
        and difference.part == "read position"
        and "config.json" in difference.summary
    )


def test_training_goes_on_at_the_last_token_and_says_so(
    foreign: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_classifier(foreign, head_seed=3)
    is_end = copy.deepcopy(AutoTokenizer.from_pretrained(foreign)).pad_token == "<|eot_id|>"
    assert ("before its padding token, '<|eot_id|>'" in caplog.text) == is_end
    assert loaded.model.padding_token is None and loaded.tokenizer.pad_token not in (
        None,
        "<|eot_id|>",
    )
    scorer = Scorer(loaded.model, Scorer.load(foreign).renderer)
    export_model(
        loaded.model, loaded.tokenizer, tmp_path, chat_template=scorer.renderer.chat_template
    )
    contract = sign_exported(tmp_path, model=loaded.model, renderer=scorer.renderer)
    assert contract.read.position == "last token" and verify(tmp_path).equal
    chats = [example.messages for example in contract.golden]
    assert [example.score for example in contract.golden] == pytest.approx(
        plain(tmp_path, chats), abs=1e-5
    )
