"""`EncodedPrompts`: prompts as token ids for a policy.

    encoded = encode_prompts([open_prompts(config)], renderer, max_length=1024)
    encoded.prompts[0], encoded.token_ids[0]

The policy's template renders them, with its generation prompt, and says the `opening` of their completions. A prompt is
never cut: too long ones are left out and counted.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from treeward.data.prompt_sets import Prompt, PromptSet
from treeward.errors import ConfigError, DataError
from treeward.progress import ShownProgress

if TYPE_CHECKING:
    from treeward.data.rendering import Renderer


logger = logging.getLogger(__name__)

_PROMPTS_AT_ONCE = 512


@dataclass(frozen=True)
class EncodedPrompts:
    """The prompts of several sets that are short enough, N in all, and their token ids, int32. `sizes`, `weights`:
    prompts of each set, and passes over it per epoch. `counts`: see `prompts_summary`. `together`: see `PromptSet`."""

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
            content = json.dumps([prompt.messages, prompt.info, prompt.template_kwargs], sort_keys=True, default=repr)
            digest.update(content.encode() + ids.tobytes())
        return digest.hexdigest()


def encode_prompts(
    sets: Sequence[PromptSet], renderer: Renderer, *, max_length: int | None = None, progress: bool = False
) -> EncodedPrompts:
    """Render and tokenize the prompts for a policy. Those of more than `max_length` tokens are left out and counted.
    Raises `DataError` if a set has no shorter ones, and for a prompt that the chat template refuses; `ModelError` for
    an encoder."""
    prompts: list[Prompt] = []
    token_ids: list[npt.NDArray[np.int32]] = []
    sizes = []
    counts = Counter[str]()
    for prompt_set in sets:
        kept, first = 0, None
        encoded = _encoded(prompt_set, renderer, max_length, progress)
        for family in zip(*[encoded] * prompt_set.together, strict=True):
            too_long = [item for item in family if item[1] is None or item[2] > (max_length or item[2])]
            if not too_long:
                kept += len(family)
                prompts += [prompt for prompt, _, _ in family]
                token_ids += [np.asarray(ids, dtype=np.int32) for _, ids, _ in family]
            elif first is None:
                prompt, ids, num_tokens = too_long[0]
                first = f"{prompt.where}, {'' if ids is not None else 'more than '}{num_tokens} tokens"
        num_too_long = len(prompt_set) - kept
        if first is not None and not kept:
            need, fix = f"at most {max_length} tokens (data.max_input_seq_length)", "raise the limit"
            got = f"the first: {first}"
            raise DataError("no prompt is short enough", where=prompt_set.name, got=got, need=need, fix=fix)
        if first is not None:
            text = f"{num_too_long} of {len(prompt_set)} prompts have more than {max_length} tokens and are left out"
            logger.warning("%s: %s (the first: %s)", prompt_set.name, text, first)
        sizes.append(kept)
        counts += prompt_set.counts
        counts["kept"] -= num_too_long
        counts["too_long"] += num_too_long
    weights, together = tuple(prompt_set.weight for prompt_set in sets), {prompt_set.together for prompt_set in sets}
    if len(together) > 1:
        need = "sets of comparisons, or sets of prompts: not both in a run"
        raise ConfigError("questions about comparisons and other prompts cannot be mixed", where="data", need=need)
    return EncodedPrompts(tuple(prompts), tuple(token_ids), tuple(sizes), weights, counts, *together)


def _encoded(
    prompt_set: PromptSet, renderer: Renderer, max_length: int | None, progress: bool
) -> Iterator[tuple[Prompt, list[int] | None, int]]:
    with ShownProgress(unit="prompts", enabled=progress) as shown:
        for start in range(0, len(prompt_set), _PROMPTS_AT_ONCE):
            batch = prompt_set[start : start + _PROMPTS_AT_ONCE]
            texts = [renderer.render(p.conversation, where=p.where, generation_prompt=True) for p in batch]
            encoded = renderer.encode_short(texts, max_length, where=[prompt.where for prompt in batch])
            for prompt, ids in zip(batch, encoded, strict=True):
                opening = renderer.opening(prompt.conversation, where=prompt.where)
                yield replace(prompt, opening=opening), *ids
            shown.show(f"tokenizing {prompt_set.name}", start + len(batch), len(prompt_set))
