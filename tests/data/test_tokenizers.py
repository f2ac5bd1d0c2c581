from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from treeward.data.tokenizers import train_tokenizer

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog"] * 3
TOKENIZER = train_tokenizer(TEXTS, vocab_size=300)


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == text


def test_training_is_deterministic_and_survives_a_folder(tmp_path: Path) -> None:
    assert train_tokenizer(iter(TEXTS), vocab_size=300).get_vocab() == TOKENIZER.get_vocab()
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    conversation = [{"role": "user", "content": "the cat?"}, {"role": "assistant", "content": "on the mat"}]
    assert again.apply_chat_template(conversation) == TOKENIZER.apply_chat_template(conversation)
    assert again.pad_token_id != again.eos_token_id
