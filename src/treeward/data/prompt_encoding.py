"""`EncodedPrompts`: prompts as token ids for a policy.

    encoded = encode_prompts([open_prompts(config)], renderer, max_length=1024)
    encoded.prompts[0], encoded.token_ids[0]

The policy's template renders them, with its generation prompt, and says the `opening` of their
completions. A prompt is never cut: too long ones are left out and counted.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from treeward.data.prompt_sets import Prompt, PromptSet
from treeward.errors import ConfigError, DataError
from treeward.progress import ShownProgress

if TYPE_CHECKING:
    from treeward.data.rendering import Renderer


logger = logging.getLogger(__name__)

# Enough for a fast tokenizer to use all cores.
_PROMPTS_AT_ONCE = 512


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of several sets that are short enough, N in all, and their token ids, int32.
    `sizes`, `weights`: prompts of each set, and passes over it per epoch. `counts`: see
    `prompts_summary`. `together`: see `PromptSet`."""

    prompts: tuple[Prompt, ...]
    token_ids: tuple[npt.NDArray[np.int32], ...]
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    counts: Counter[str]
    together: int = 1

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the prompts' tokens, their order, and the info that environments read."""
        digest = hashlib.blake2b(repr((self.sizes, self.weights)).encode(), digest_size=16)
        for prompt, ids in zip(self.prompts, self.token_ids, strict=True):
            parts = [prompt.messages, prompt.info, prompt.template_kwargs]
            content = json.dumps(parts, sort_keys=True, default=repr)
            digest.update(content.encode() + ids.tobytes())
        return digest.hexdigest()


def encode_prompts(
    sets: Sequence[PromptSet],
    renderer: Renderer,
    *,
    max_length: int | None = None,
    progress: bool = False,
) -> EncodedPrompts:
    """Render and tokenize the prompts for a policy. Those of more than `max_length` tokens are left
    out and counted. Raises `DataError` if a set has no shorter ones, and for a prompt that the chat
    template refuses; `ModelError` for an encoder."""
    prompts: list[Prompt] = []
    token_ids: list[npt.NDArray[np.int32]] = []
    sizes = []
    counts = Counter[str]()
    for prompt_set in sets:
        num_kept = 0
        first_too_long: _EncodedPrompt | None = None
        encoded = _encoded(prompt_set, renderer, max_length, progress)
        # One iterator in every place of the zip: each takes the next item, so that neighbours come
        # together.
        for family in zip(*[encoded] * prompt_set.together, strict=True):
            # One too long prompt leaves its neighbours out too: a verdict needs both orders.
            too_long = [item for item in family if item.is_longer_than(max_length)]
            if too_long:
                first_too_long = first_too_long or too_long[0]
                continue
            num_kept += len(family)
            for item in family:
                prompts.append(item.prompt)
                token_ids.append(np.asarray(item.token_ids, dtype=np.int32))
        num_too_long = len(prompt_set) - num_kept
        if first_too_long is not None:
            if num_kept == 0:
                raise DataError(
                    "no prompt is short enough",
                    where=prompt_set.name,
                    got=f"the first: {first_too_long.place_and_length}",
                    need=f"at most {max_length} tokens (data.max_input_seq_length)",
                    fix="raise the limit",
                )
            logger.warning(
                "%s: %d of %d prompts have more than %s tokens and are left out (the first: %s)",
                prompt_set.name,
                num_too_long,
                len(prompt_set),
                max_length,
                first_too_long.place_and_length,
            )
        sizes.append(num_kept)
        # Of the prompts that were kept when the set was opened, these are left out now.
        counts += prompt_set.counts
        counts["kept"] -= num_too_long
        counts["too_long"] += num_too_long
    together = {prompt_set.together for prompt_set in sets}
    if len(together) > 1:
        summary = "questions about comparisons and other prompts cannot be mixed"
        need = "sets of comparisons, or sets of prompts: not both in a run"
        raise ConfigError(summary, where="data", need=need)
    weights = [prompt_set.weight for prompt_set in sets]
    return EncodedPrompts(
        tuple(prompts),
        tuple(token_ids),
        tuple(sizes),
        tuple(weights),
        counts,
        *together,  # nothing where there are no sets
    )


class _EncodedPrompt(NamedTuple):
    """`token_ids`: None for a text so long that it was not tokenized whole. `num_tokens`: of what
    was tokenized."""

    prompt: Prompt
    token_ids: list[int] | None
    num_tokens: int

    def is_longer_than(self, max_length: int | None) -> bool:
        if self.token_ids is None:
            return True
        return max_length is not None and self.num_tokens > max_length

    @property
    def place_and_length(self) -> str:
        """For an error."""
        at_least = "more than " if self.token_ids is None else ""
        return f"{self.prompt.where}, {at_least}{self.num_tokens} tokens"


def _encoded(
    prompt_set: PromptSet,
    renderer: Renderer,
    max_length: int | None,
    progress: bool,
) -> Iterator[_EncodedPrompt]:
    """The prompts of a set with their tokens, in its order."""
    with ShownProgress(unit="prompts", enabled=progress) as shown:
        for start in range(0, len(prompt_set), _PROMPTS_AT_ONCE):
            batch = prompt_set[start : start + _PROMPTS_AT_ONCE]
            texts = []
            for prompt in batch:
                text = renderer.render(
                    prompt.conversation,
                    where=prompt.where,
                    generation_prompt=True,
                )
                texts.append(text)
            places = [prompt.where for prompt in batch]
            encoded = renderer.encode_short(texts, max_length, where=places)
            for prompt, (token_ids, num_tokens) in zip(batch, encoded, strict=True):
                opening = renderer.opening(prompt.conversation, where=prompt.where)
                yield _EncodedPrompt(replace(prompt, opening=opening), token_ids, num_tokens)
            shown.show(f"tokenizing {prompt_set.name}", start + len(batch), len(prompt_set))
