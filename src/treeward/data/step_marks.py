"""The mark after each step of a solution: which token it is, and that the tokenizer parts texts at
it.

    mark = choose_mark(tokenizer, None)     # "<extra_0>", or another token in reserve
    mark_id(tokenizer, mark)                # its id; equal steps have equal tokens before it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers import AddedToken

from treeward.data.reasoning import REASONING_END, REASONING_START
from treeward.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINED_MARK = "<|step|>"
"""The mark in a tokenizer that a run trains itself."""

_RESERVED = (
    TRAINED_MARK,
    "<extra_0>",  # Qwen2.5-Math-PRM
    "<|fim_pad|>",  # Qwen2.5 and later
    "<|reserved_special_token_0|>",  # Llama 3
    "<unused0>",  # Gemma
    "<file_sep>",  # SmolLM2
    "<|extra_0|>",
)
"""Tokens that families keep in reserve and that no chat template writes."""


def choose_mark(tokenizer: PreTrainedTokenizerBase, requested: str | None) -> str:
    """The mark that the configuration names, or else a token in reserve. Raises `ConfigError` for
    one that is not one token, and where the tokenizer has none in reserve."""
    field = "policy.reward_model_cfg.step_token"
    if requested is None:
        vocabulary = tokenizer.get_vocab()
        for token in _RESERVED:
            if token in vocabulary:
                return token
        raise ConfigError(
            "the tokenizer has no token in reserve for the mark after each step",
            field=field,
            got="null",
            need="a token of the vocabulary that no text and no chat template has",
        )
    try:
        mark_id(tokenizer, requested)
    except ModelError as error:
        raise ConfigError(
            "this token cannot be the mark after each step",
            field=field,
            got=f"{requested!r}: {error.got}",
            need=error.need,
            fix="leave the key out for a token in reserve",
        ) from error
    return requested


def mark_id(tokenizer: PreTrainedTokenizerBase, mark: str) -> int:
    """The id of the mark. The tokenizer parts texts at it from now on, and when it is saved.

    Raises `ModelError` if it is not one token, for white space, and for a part of another special
    token.
    """
    if not mark.strip():
        # Prompts have it too, and templates trim it after the last step.
        raise ModelError(
            "white space cannot be the token at which a model reads a step",
            got=repr(mark),
            need="a token that no prompt, no step and no chat template has",
        )
    for other in tokenizer.get_added_vocab():
        if mark in other and mark != other:
            # The text of a conversation, whose marks are counted, has it wherever a turn begins.
            raise ModelError(
                "a part of a special token cannot be the token at which a model reads a step",
                got=f"{mark!r}, which {other!r} has",
                need="a token that no prompt, no step and no chat template has",
            )
    is_known = mark in tokenizer.get_vocab()
    if is_known and mark not in tokenizer.get_added_vocab():
        # An ordinary token could merge with the text before it: a step must have its own tokens.
        # It is looked for before a normalizer can change the text.
        tokenizer.add_tokens([AddedToken(mark, normalized=False)])
    ids: list[int] = tokenizer.encode(mark, add_special_tokens=False)
    if not is_known or ids != [tokenizer.convert_tokens_to_ids(mark)]:
        raise ModelError(
            "the tokenizer does not write the token at which this model reads a step",
            got=ids,
            need=f"one token for {mark!r}",
            fix="name the model's own tokenizer",
        )
    return ids[0]


def check_marks(text: str, steps: Sequence[str], mark: str, where: str | None) -> None:
    """Check that a rendered conversation has one mark for each of the `steps` of its completion,
    and each step before its mark.

    Raises `DataError`. Many chat templates leave out the reasoning of a completion (DeepSeek's), or
    what stands before it (Qwen3's): the mark of such a step would be read without the step.
    """
    fix = (
        "choose another token or template: policy.reward_model_cfg.step_token, "
        "policy.tokenizer.chat_template"
    )
    pieces = text.split(mark)
    num_marks = len(pieces) - 1
    if num_marks != len(steps):
        raise DataError(
            "the chat template writes not one mark for each step",
            where=where,
            got=f"{num_marks} marks for {len(steps)} steps",
            need="a chat template that writes completions as they are",
            fix=fix,
        )
    for step, piece in zip(steps, pieces, strict=False):
        if _bare(step) not in _bare(piece):
            raise DataError(
                "the chat template leaves out the text of a step",
                where=where,
                got=step,
                need="a chat template that writes completions as they are",
                fix=fix,
            )


def _bare(text: str) -> str:
    """The text without white space, which templates trim, and without the tags of reasoning, for
    which some write their own."""
    for tag in (REASONING_START, REASONING_END):
        text = text.replace(tag, "")
    return "".join(text.split())
