"""The prefixes of a completion are the conversations whose completion ends there, and share their tokens."""

from __future__ import annotations

from typing import Any

import pytest
from templates import CASES, byte_bpe, family_renderer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from treeward.data.rendering import Renderer
from treeward.errors import DataError
from treeward.scoring.prefixes import completion_prefixes

COMPLETION = "Mix flour, water 数字 and 🙂 salt.\n\nThen rest it"
PROMPT = {"role": "user", "content": "How do I bake bread?"}


def chat(completion: str, *before: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(before or (PROMPT,)), {"role": "assistant", "content": completion}]


def check(renderer: Renderer, completion: str = COMPLETION) -> None:
    """All that holds for every template and tokenizer."""
    prefixes = completion_prefixes(renderer, chat(completion))
    pieces = prefixes.pieces
    assert prefixes.text == completion and "".join(piece.text for piece in pieces) == completion
    assert [piece.start for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert all(piece.text == completion[piece.start : piece.end] for piece in pieces)
    assert prefixes.until(len(pieces)) == renderer.encode(chat(completion))
    assert prefixes.num_tokens == len(renderer.encode(chat(completion)))
    ends_of_words = [
        n for n, piece in enumerate(pieces, start=1) if completion[piece.end : piece.end + 1] in (" ", "\n")
    ]
    compared = 0
    for n in ends_of_words:
        cut = completion[: pieces[n - 1].end]
        if cut == cut.strip():  # templates strip
            assert prefixes.until(n) == renderer.encode(chat(cut)), cut
            compared += 1
    assert compared >= 5


@pytest.mark.parametrize("name", CASES)
def test_prefixes_are_the_conversations_that_end_there(name: str) -> None:
    renderer = family_renderer(name)
    try:
        renderer.render(chat(COMPLETION))
    except DataError:
        pytest.skip("the template refuses the conversation")
    check(renderer)


def test_an_encoder_keeps_its_frame() -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "how", "do", "i", "bake", "bread", "?", "mix", "flour", "and", "then"]
    words += [*"abcdefghijklmnopqrstuvwxyz,.|<>", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    renderer = Renderer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special))
    assert renderer.kind == "encoder"
    check(renderer, "Mix flour, and then do bake bread, then do mix")
    ids = completion_prefixes(renderer, chat("Mix flour")).until(1)
    assert ids[0] == 2 and ids[-1] == 3 and list(ids).count(3) == 1


def test_a_bos_is_there_once() -> None:
    tokenizer = byte_bpe(("<s>",), "<s>", "<|im_end|>", True)
    for template in ("{{ bos_token }}{% for m in messages %}{{ m.content }}|{% endfor %}", "{% for m in messages %}"
                     "{{ m.content }}|{% endfor %}"):  # fmt: skip
        renderer = Renderer(tokenizer, chat_template=template)
        prefixes = completion_prefixes(renderer, chat("Yes, of course it is"))
        for n in range(1, len(prefixes.pieces) + 1):
            ids = list(prefixes.until(n))
            assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1


def test_tokens_of_one_character_are_one_piece() -> None:
    renderer = Renderer(byte_bpe((), None, "<|im_end|>"), chat_template=CHATML)
    prefixes = completion_prefixes(renderer, chat("a🙃b"))
    assert [piece.text for piece in prefixes.pieces] == ["a", "🙃", "b"]
    assert prefixes.pieces[1].num_tokens - prefixes.pieces[0].num_tokens > 1
    assert prefixes.until(2) == renderer.encode(chat("a🙃"))


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"


def test_a_cut_context_is_cut_as_for_the_score() -> None:
    before = {"role": "user", "content": "How much flour do I need? " * 30}
    renderer = Renderer(byte_bpe(), chat_template=CHATML, max_length=120, truncation="truncate_left")
    prefixes = completion_prefixes(renderer, chat("Two loaves of it.", before))
    fitted = renderer.fit(chat("Two loaves of it.", before))
    assert fitted is not None and fitted.truncated and prefixes.truncated
    assert prefixes.until(len(prefixes.pieces)) == fitted.token_ids
    assert prefixes.text == "Two loaves of it."
    first = prefixes.until(1)
    assert list(first[: len(prefixes.prompt_ids)]) == fitted.token_ids[: len(prefixes.prompt_ids)]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (chat(""), "no text"),
        (chat(" \n "), "no text"),
        ([PROMPT], "no completion"),
        ([], "messages"),
        (chat("flour " * 200), "too long"),
    ],
)
def test_conversations_without_prefixes(messages: Any, why: str) -> None:
    renderer = Renderer(byte_bpe(), chat_template=CHATML, max_length=120)
    with pytest.raises(DataError, match=why):
        completion_prefixes(renderer, messages)
