"""`sample_continuously`: rows sampled by transformers' continuous batching, where another starts when one has ended.

    sampled = sample_continuously(policy, rows, end_ids={2}, seed=step, temperature=1.0)

Its log-probabilities are those after top-k and top-p, and it knows no stop strings: it is for rows that need neither.
All requests are queued before it starts, so that a seed determines the rows; in another batch they are others.
It samples in the dtype of the weights: its thread knows nothing of the policy's autocast.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from treeward.errors import ModelError
from treeward.model.policy_model import PolicyModel
from treeward.rl.sampling import Row, Sampled

__all__ = ["is_exact", "is_fast", "sample_continuously"]

_PAGE_TOKENS = 256
_WAIT_SECONDS = 1.0


def is_exact(policy: PolicyModel) -> bool:
    """Whether the paged attention is the model's own: that which stands in for eager has no soft-caps."""
    with policy.plain_attention():
        return bool(policy.hf.config._attn_implementation == "sdpa")


def is_fast(policy: PolicyModel) -> bool:
    """Whether it has what it is fast with: CUDA, a kernel that reads pages, and weights in a dtype that it takes."""
    kernel = is_flash_attn_2_available() or is_flash_attn_3_available()
    half = policy.hf.dtype in (torch.float16, torch.bfloat16)
    return policy.device.type == "cuda" and half and kernel and bool(getattr(policy.hf, "_supports_flash_attn", False))


@torch.no_grad()
def sample_continuously(
    policy: PolicyModel, rows: Sequence[Row], *, end_ids: Collection[int], seed: int, temperature: float
) -> list[Sampled]:
    """Each row until one of `end_ids`, or until it has `most` tokens. In order; the rows' own numbers are not used.

    The attention implementation is afterwards what it was. Raises `ModelError` where a row fails.
    """
    pages = sum(math.ceil((len(row.prompt_ids) + row.most) / _PAGE_TOKENS) for row in rows)
    on_cuda = policy.device.type == "cuda"
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    # Left alone it takes a flash kernel wherever there is one, also for float32, which none computes.
    kernel: dict[str, Any] = {"auto_switch_to_flash": is_fast(policy)} if "auto_switch_to_flash" in known else {}
    config = ContinuousBatchingConfig(
        **kernel,
        page_size=_PAGE_TOKENS,
        return_logprobs=True,
        seed=seed % 2**63,
        # Elsewhere there is no measure of what memory is free.
        num_blocks=None if on_cuda else pages + 1,
        max_batch_tokens=None if on_cuda else max(_PAGE_TOKENS, len(rows)),
    )
    sampling = GenerationConfig(
        do_sample=temperature > 0,
        temperature=temperature or 1.0,
        top_k=0,
        max_new_tokens=max(row.most for row in rows),
        eos_token_id=sorted(end_ids),
        pad_token_id=min(end_ids),
    )
    devices = [policy.device] if on_cuda else []
    with torch.random.fork_rng(devices=devices), policy.plain_attention():
        manager = policy.hf.init_continuous_batching(  # type: ignore[operator]
            generation_config=sampling, continuous_batching_config=config
        )
        found: dict[str, Any] = {}
        for r, row in enumerate(rows):
            manager.add_request(list(row.prompt_ids), request_id=str(r), max_new_tokens=row.most)
        manager.start()
        try:
            while len(found) < len(rows):
                result = manager.get_result(timeout=_WAIT_SECONDS)
                if result is not None and result.is_finished():
                    found[result.request_id] = result
                elif result is None and not manager.is_running():
                    break
        finally:
            manager.stop(block=True)
            manager.destroy()
    error = next((result.error for result in found.values() if result.error is not None), None)
    if error is not None or len(found) < len(rows):
        raise ModelError(
            "continuous batching has failed",
            got=error or f"{len(found)} of {len(rows)} completions",
            fix="set continuous_batching to false",
        )
    return [Sampled(found[str(r)].generated_tokens, found[str(r)].logprobs) for r in range(len(rows))]
