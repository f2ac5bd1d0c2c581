"""A tokenizer trained on the training data, for models that are built from a bare configuration:
byte-level BPE, with tokens of its own for the ends and roles of `DEFAULT_CHAT_TEMPLATE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from treeward.data.chat_template import DEFAULT_CHAT_TEMPLATE
from treeward.data.datasets import RowDataset
from treeward.data.step_datasets import StepDataset
from treeward.errors import ConfigError

_END = "<|endoftext|>"
_PAD = "<|pad|>"
_SPECIAL = [_END, _PAD, "<|system|>", "<|user|>", "<|assistant|>"]


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, more_special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Train on texts, read once. `more_special`: further tokens at which texts are parted. Raises
    `ConfigError` if `vocab_size` does not hold the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [*_SPECIAL, *more_special]
    if vocab_size < len(alphabet) + len(special):
        need = f"at least {len(alphabet) + len(special)}: the bytes and the special tokens"
        raise ConfigError(
            "the vocabulary is too small",
            where="policy.tokenizer.vocab_size",
            got=vocab_size,
            need=need,
        )
    tokenizer = Tokenizer(models.BPE())
    # Without a space in front, so that the text of a conversation comes back as it was.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    # A lone surrogate is refused later, when its row is encoded; here it must not end the training.
    whole = (text.encode(errors="replace").decode() for text in texts)
    tokenizer.train_from_iterator(whole, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        padding_side="right",
    )
    # Each role of its headers is one token of this vocabulary.
    wrapped.chat_template = DEFAULT_CHAT_TEMPLATE
    return wrapped


def texts_of(streams: Iterable[RowDataset | StepDataset]) -> Iterator[str]:
    """The text of every message, and of every step, of some sets."""
    for stream in streams:
        if isinstance(stream, StepDataset):
            for problem, _ in stream:
                yield from problem.texts
            continue
        for preference, _ in stream:
            messages = list(preference.context)
            for completion in preference.completions:
                messages += completion.messages
            for message in messages:
                if isinstance(message.get("content"), str):
                    yield message["content"]
