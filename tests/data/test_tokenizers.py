from __future__ import annotations

from pathlib import Path

from messages import chat
from transformers import AutoTokenizer

from treeward.data.tokenizers import train_tokenizer

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog"] * 3


def test_training_is_deterministic_and_survives_a_folder(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    assert train_tokenizer(iter(TEXTS), vocab_size=300).get_vocab() == tokenizer.get_vocab()
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    conversation = chat("the cat? 数字", "on the mat")
    assert again.apply_chat_template(conversation) == tokenizer.apply_chat_template(conversation)
    assert "the cat? 数字" in again.decode(
        again.apply_chat_template(conversation, return_dict=False),
    )
    assert again.pad_token_id != again.eos_token_id
