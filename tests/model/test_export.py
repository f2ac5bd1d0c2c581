"""An exported folder, loaded by plain code that knows nothing of treeward, gives the same
scores."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import score_error, tiny_model
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

from treeward.data.rendering import Renderer
from treeward.model.export import export_model
from treeward.model.loading import ensure_pad_token, load_classifier
from treeward.model.reward_model import RewardModel
from treeward.scoring.scorer import Scorer


@pytest.fixture
def conversations(real_chats: list[Any]) -> list[list[dict[str, Any]]]:
    conversations = []
    for preference in real_chats:
        for completion in preference.completions:
            conversations.append([*preference.context, *completion.messages])
    return conversations


def trained(family: str, tiny_tokenizer: Any, **changes: Any) -> tuple[RewardModel, Any]:
    """A reward model with a tokenizer as training leaves them."""
    hf = tiny_model(family, **changes)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    ensure_pad_token(hf, tokenizer)
    encoder = hasattr(hf, "classifier")
    return RewardModel(hf, layout="encoder" if encoder else "tree"), tokenizer


@torch.no_grad()
def plain_code(
    folder: Path, conversations: list[list[dict[str, Any]]], *, batch: bool, **options: Any
) -> torch.Tensor:
    """What a user of transformers would write."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, **options).eval()
    texts = [tokenizer.apply_chat_template(c, tokenize=False) for c in conversations]
    if batch:
        inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        return model(**inputs).logits[:, 0].float()
    rows = [
        tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids for text in texts
    ]
    return torch.cat([model(input_ids=row).logits[:, 0].float() for row in rows])


@torch.no_grad()
def our_scores(
    model: RewardModel, renderer: Renderer, conversations: list[list[dict[str, Any]]]
) -> torch.Tensor:
    return model(
        model.make_batch([[renderer.encode(conversation) for conversation in conversations]])
    )


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt2", "bert"])
def test_plain_transformers_gives_the_same_scores(
    family: str, conversations: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model, tokenizer = trained(family, tiny_tokenizer)
    renderer = Renderer(tokenizer)
    want = our_scores(model, renderer, conversations)
    export_model(model, tokenizer, tmp_path / "out", chat_template=renderer.chat_template)
    assert float(want.std()) > 0.05
    # padded rows too: transformers looks for the last token that is not padding
    for batch in (
        False,
        True,
    ):
        got = plain_code(tmp_path / "out", conversations, batch=batch, attn_implementation="eager")
        assert score_error(got, want) <= 1e-5
    scorer = Scorer.load(tmp_path / "out", device="cpu")
    scores = torch.tensor([score.score for score in scorer.score(conversations)])
    assert score_error(scores, want) <= 1e-5


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"]
)
def test_the_frame_of_the_tokenizer_is_in_the_exported_template(
    family: str, template: str | None, conversations: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """A tokenizer that adds BOS (or CLS and SEP) by itself, and a template that does not write
    them."""
    model, plain = trained(family, tiny_tokenizer)
    tokenizer = framing(plain, ("ÿ", None) if family == "llama" else ("ÿ", "þ"))  # in no chat
    tokenizer.chat_template = None
    renderer = Renderer(tokenizer, chat_template=template)
    ids = renderer.encode(conversations[0])
    first = tokenizer.bos_token_id or tokenizer.cls_token_id
    last = tokenizer.sep_token_id
    assert ids.count(first) == 1 and ids[0] == first and (last is None or ids[-1] == last)
    want = our_scores(model, renderer, conversations)
    export_model(model, tokenizer, tmp_path / "out", chat_template=renderer.chat_template)
    got = plain_code(tmp_path / "out", conversations, batch=False, attn_implementation="eager")
    assert score_error(got, want) <= 1e-5
    scores = torch.tensor(
        [score.score for score in Scorer.load(tmp_path / "out", device="cpu").score(conversations)]
    )
    assert score_error(scores, want) <= 1e-5


def framing(tokenizer: Any, ends: tuple[str, str | None]) -> Any:
    """The tokenizer with a post-processor that puts its first (and last) token around every
    text."""
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    first, last = ends
    special = [(token, backend.token_to_id(token)) for token in ends if token is not None]
    backend.post_processor = TemplateProcessing(
        single=f"{first} $A{f' {last}' if last else ''}", special_tokens=special
    )
    names = {"bos_token": first} if last is None else {"cls_token": first, "sep_token": last}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        **names,
    )


def test_bfloat16_export(conversations: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, tokenizer = trained("llama", tiny_tokenizer)
    renderer = Renderer(tokenizer)
    want = our_scores(model, renderer, conversations)
    export_model(
        model,
        tokenizer,
        tmp_path / "out",
        chat_template=renderer.chat_template,
        dtype=torch.bfloat16,
    )
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {name for name, tensor in stored.items() if tensor.dtype == torch.float32} == {
        "score.weight"
    }
    assert torch.equal(stored["score.weight"], model.head.weight)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["dtype"]
        == "bfloat16"
    )
    # Rounding the weights is the only difference when the arithmetic is float32; bfloat16
    # arithmetic rounds more.
    assert (
        score_error(
            plain_code(tmp_path / "out", conversations, batch=True, dtype=torch.float32), want
        )
        <= 2e-2
    )
    assert score_error(plain_code(tmp_path / "out", conversations, batch=True), want) <= 5e-2
    ours = load_classifier(tmp_path / "out", dtype=torch.bfloat16).model
    assert score_error(our_scores(ours, renderer, conversations), want) <= 5e-2


def test_pipelines_of_transformers_give_the_raw_score(
    conversations: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    """They apply a sigmoid to a single label unless the configuration says that it is a
    regression."""
    model, tokenizer = trained("llama", tiny_tokenizer)
    renderer = Renderer(tokenizer)
    conversations = conversations[:4]
    want = our_scores(model, renderer, conversations)
    export_model(model, tokenizer, tmp_path / "out", chat_template=renderer.chat_template)
    assert model.hf.config.problem_type is None
    classify = pipeline("text-classification", str(tmp_path / "out"), device="cpu")
    texts = [renderer.render(conversation) for conversation in conversations]
    got = torch.tensor([row["score"] for row in classify(texts, add_special_tokens=False)])
    assert float(want.min()) < 0 and score_error(got, want) <= 1e-5
