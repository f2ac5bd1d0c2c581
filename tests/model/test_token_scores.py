"""A token of a language model as the score: Nemotron-Reward's, and a verifier's odds of two."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import causal_model
from messages import chat

from treeward.data.rendering import Renderer
from treeward.errors import ModelError
from treeward.model.export import export_model
from treeward.model.loading import load_classifier
from treeward.model.published import set_template
from treeward.scoring.golden import sign_folder
from treeward.scoring.scorer import Scorer

COMPLETIONS = ("A pine does.", "A pine does, and so does a spruce.", "No.")
CHATS = [chat("Which tree bears cones?", completion) for completion in COMPLETIONS]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["Llama-3.1-Nemotron-70B-Reward-HF", "verifier"])
def test_a_token_of_a_language_model_is_a_score(
    name: str, tied: bool, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    lm = causal_model("llama", vocab_size=len(tiny_tokenizer), tie_word_embeddings=tied)
    folder = tmp_path / name
    yes, no, end = 70, 71, "\nIs it right?"
    words = tiny_tokenizer.convert_ids_to_tokens([no, yes])
    if name == "verifier":
        lm.config.classifier_from_token, lm.config.classifier_prompt = words, end
    lm.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    plain = Renderer(tiny_tokenizer)
    suffix = end if name == "verifier" else ""
    texts = [plain.render(chat) + suffix for chat in CHATS]
    want = []
    for ids in plain.encode_texts(texts):
        with torch.no_grad():
            logits = lm(input_ids=torch.tensor([ids])).logits[0, -1]
        odds = logits.log_softmax(-1)
        want.append(float(odds[yes] - odds[no] if name == "verifier" else logits[0]))
    scorer = Scorer.load(folder)
    assert [one.score for one in scorer.score(CHATS)] == pytest.approx(want, abs=1e-5)
    renderer = scorer.renderer
    export_model(
        scorer.model, renderer.tokenizer, tmp_path / "plain", chat_template=renderer.chat_template
    )
    assert sign_folder(tmp_path / "plain").read.plain_transformers
    again = Scorer.load(tmp_path / "plain")
    assert [one.score for one in again.score(CHATS)] == pytest.approx(want, abs=1e-5)
    filled = load_classifier(folder, on_meta=True).model
    filled.fill("cpu")
    assert torch.equal(filled.head.weight, scorer.model.head.weight)


def test_the_prompt_of_a_verifier_may_have_any_characters(tiny_tokenizer: Any) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    prompt = 'Is it "right"?\n\N{GRINNING FACE} {{ \\'
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "classifier_from_token": ["yes"],
        "classifier_prompt": prompt,
    }
    set_template(tokenizer, fields, "verifier")
    assert tokenizer.apply_chat_template(CHATS[0], tokenize=False).endswith(prompt)


def test_logits_that_are_not_linear_and_unknown_tokens_are_refused(
    tiny_tokenizer: Any, save: Any
) -> None:
    lm = causal_model("gemma2", vocab_size=len(tiny_tokenizer), final_logit_softcapping=30.0)
    for tokens, message in (("no", "yes"), "these are no tokens"), ([70, 71], "not linear"):
        lm.config.classifier_from_token = tokens
        with pytest.raises(ModelError, match=message):
            load_classifier(save(lm))
