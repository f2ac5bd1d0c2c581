"""`EncodedPrompts`: prompts as token ids for a policy.

    encoded = encode_prompts([open_prompts(config)], renderer, max_length=1024)
    encoded[0].prompt, encoded[0].token_ids
    encoded.counts.summary()                      # prompts that were read, kept, held out and too long

The policy's own template renders them, with its generation prompt. A prompt is never cut: one that is too long is left
out and counted.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from treeward.data.preference import Message
from treeward.data.prompt_sets import Prompt, PromptCounts, PromptSet
from treeward.errors import DataError, ModelError

if TYPE_CHECKING:
    from treeward.data.rendering import Renderer

__all__ = ["EncodedPrompt", "EncodedPrompts", "encode_prompts"]

logger = logging.getLogger(__name__)

_PROMPTS_AT_ONCE = 512
_PROBE = "Romam."
_COMPLETION: Message = {"role": "assistant", "content": _PROBE}


class EncodedPrompt(NamedTuple):
    """A prompt, and its token ids up to where the completion begins."""

    prompt: Prompt
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of one or several sets that are short enough, set after set, N in all.

    `token_ids`: N int32 arrays. `sizes`, `weights`: the number of prompts of each set, and the passes over it per
    epoch. `longest`: tokens of the longest prompt that was read, too long or not.
    """

    prompts: tuple[Prompt, ...]
    token_ids: tuple[npt.NDArray[np.int32], ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    counts: PromptCounts
    longest: int

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[EncodedPrompt]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> EncodedPrompt:
        return EncodedPrompt(self.prompts[index], tuple(self.token_ids[index].tolist()))

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the policy's prompts, their order, and the info that environments read."""
        digest = hashlib.blake2b(repr((self.sizes, self.weights)).encode(), digest_size=16)
        for prompt, ids in zip(self.prompts, self.token_ids, strict=True):
            content = json.dumps([prompt.messages, prompt.info], sort_keys=True, default=repr)
            digest.update(content.encode() + ids.tobytes())
        return digest.hexdigest()


def encode_prompts(
    sets: Sequence[PromptSet],
    renderer: Renderer,
    *,
    max_length: int | None = None,
    too_long: Literal["drop", "error"] = "drop",
    progress: bool = False,
) -> EncodedPrompts:
    """Render and tokenize the prompts for a policy: see `Renderer.encode_prompt`.

    Prompts of more than `max_length` tokens are left out and counted, or with `too_long="error"` refused. Raises
    `DataError` for a set of which none is left, and for a prompt that the chat template refuses; `ModelError` for an
    encoder, which completes nothing.
    """
    if renderer.kind == "encoder":
        raise ModelError("an encoder cannot complete a prompt", got=type(renderer.tokenizer).__name__, need="a decoder")
    prompts: list[Prompt] = []
    token_ids: list[npt.NDArray[np.int32]] = []
    sizes, counts, longest = [], PromptCounts(), 0
    for one in sets:
        kept, first = 0, None
        for prompt, ids, num_tokens in _encoded(one, renderer, max_length, progress):
            longest = max(longest, num_tokens)
            if ids is not None and (max_length is None or num_tokens <= max_length):
                kept += 1
                prompts.append(prompt)
                token_ids.append(np.asarray(ids, dtype=np.int32))
                continue
            first = first or DataError(
                "the prompt is too long",
                where=prompt.where,
                got=f"{num_tokens} tokens" if ids is not None else f"more than {num_tokens} tokens",
                need=f"at most {max_length} (data.max_input_seq_length)",
                fix="raise the limit, or remove the row",
            )
            if too_long == "error":
                raise first
        left_out = len(one) - kept
        if first is not None:
            logger.warning(
                "%s: %d of %d prompts have more than %d tokens and are left out (the first: %s, %s)",
                *(one.name, left_out, len(one), max_length, first.where, first.got),
            )
            if not kept:
                raise DataError("no prompt is short enough", where=one.name, got=first.got, need=first.need) from first
        sizes.append(kept)
        counts += replace(one.counts, kept=kept, too_long=left_out)
        _warn_of_form(one, renderer)
    weights = tuple(one.weight for one in sets)
    return EncodedPrompts(tuple(prompts), tuple(token_ids), tuple(sizes), weights, counts, longest)


def _encoded(
    one: PromptSet, renderer: Renderer, max_length: int | None, progress: bool
) -> Iterator[tuple[Prompt, list[int] | None, int]]:
    with tqdm(total=len(one), desc=f"Tokenizing {one.name}", unit=" prompts", disable=not progress) as bar:
        for start in range(0, len(one), _PROMPTS_AT_ONCE):
            some = one.prompts[start : start + _PROMPTS_AT_ONCE]
            texts = [renderer.render(p.messages, where=p.where, generation_prompt=True) for p in some]
            encoded = renderer.encode_short(texts, max_length, where=[prompt.where for prompt in some])
            yield from ((prompt, *ids) for prompt, ids in zip(some, encoded, strict=True))
            bar.update(len(some))


def _warn_of_form(one: PromptSet, renderer: Renderer) -> None:
    """Warn where the template begins a finished completion in another way than its generation prompt does.

    The policy learns from the tokens of its prompt and of its samples, so training is sound; but what the template
    renders later, as an earlier turn or for a reward model of the same family, has another beginning.
    """
    messages = one[0].messages
    try:
        completed, plain = renderer.render([*messages, _COMPLETION]), renderer.render(messages)
        whole = renderer.encode_texts([completed])[0]
    except DataError:
        return  # a template that refuses one of them: nothing can be compared
    prompt = renderer.encode_prompt(messages, where=one[0].where)
    if whole[: len(prompt)] != prompt:
        same = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
        logger.warning(
            "%s: the chat template's generation prompt is %r, and a finished completion begins with %r",
            *(one.name, renderer.tokenizer.decode(prompt[same:]), renderer.tokenizer.decode(whole[same:])),
        )
        return
    beginning = completed.removeprefix(plain).partition(_PROBE)[0].strip()
    if beginning and plain == renderer.render(messages, generation_prompt=True):
        logger.warning(
            "%s: the chat template has no generation prompt, so the policy must begin its turn with %r by itself; "
            "policy.tokenizer.chat_template sets another template",
            *(one.name, beginning),
        )
