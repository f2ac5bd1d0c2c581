"""Whether a model can share prefixes: tried on the model itself, once, before it is used.

Two short conversations that begin alike are computed as plain Hugging Face rows and as a tree. If both give the same,
trees are exact for this family; if not (recurrent layers, attention of the model's own, position biases), the model
runs as padded rows and the log says why. There is no list of families.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from treeward.errors import ConfigError, ModelError
from treeward.model.reward_model import RewardModel, head_name
from treeward.model.wrapped import Layout, WrappedModel
from treeward.tree.batch import TreeBatch

__all__ = ["choose_layout", "choose_policy_layout", "why_not_tree"]

logger = logging.getLogger(__name__)

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest accepted difference of hidden states, relative to their largest value. Rounding stays a factor of ten below,
and a token that sees one token too many lies far above."""


def choose_layout(hf: PreTrainedModel, requested: str) -> Layout:
    """How to run a model when `policy.attention` is `requested`: "tree" or "rows".

    Raises `ModelError` where not even plain rows give Hugging Face's own scores.
    """
    _check_requested(requested)
    if head_name(hf) != "score":
        return "encoder"
    if not getattr(hf, "made_by_treeward", False):
        _check_against_transformers(hf)
    return _tree_or_rows(hf, requested)


def choose_policy_layout(hf: PreTrainedModel, requested: str) -> Layout:
    """`choose_layout` for a causal language model."""
    _check_requested(requested)
    return _tree_or_rows(hf, requested)


def _check_requested(requested: str) -> None:
    if requested not in ("tree", "rows"):
        raise ConfigError("unknown attention", where="policy.attention", got=requested, need="tree or rows")


def _tree_or_rows(hf: PreTrainedModel, requested: str) -> Layout:
    reason = why_not_tree(hf) if requested == "tree" else None
    if reason is not None:
        logger.warning("%s cannot share prefixes (%s): it runs as padded rows.", type(hf).__name__, reason)
    return "rows" if requested == "rows" or reason is not None else "tree"


@torch.no_grad()
def why_not_tree(hf: PreTrainedModel) -> str | None:
    """None if trees are exact for this model, else the reason why not."""
    config = hf.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if other:
        return f"it has layers of type {', '.join(sorted(other))}"
    if getattr(config, "attn_temperature_tuning", False):  # Llama 4, from 8192 tokens on: a probe would not show it
        return "its attention temperature depends on the place in the row"
    model = WrappedModel(hf, layout="tree", compute_dtype=None)
    sequences = _probe_sequences(hf)
    try:
        batch = TreeBatch.from_groups([sequences]).to(model.device)
        tree = model._tree_hidden(batch)[batch.reads_S]
    except (ModelError, TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        return str(error).splitlines()[0]
    with model.plain_attention():
        rows = [
            model.backbone(input_ids=torch.tensor([ids], device=model.device), use_cache=False).last_hidden_state[:, -1]
            for ids in sequences
        ]
    want = torch.cat(rows).float()
    difference = float((tree.float() - want).abs().max() / want.abs().max().clamp_min(1e-6))
    if difference <= _TOLERANCE.get(hf.dtype, 5e-2):
        return None
    return f"a tree's hidden states differ by {difference:.1e} from plain rows"


@torch.no_grad()
def _check_against_transformers(hf: PreTrainedModel) -> None:
    """The score is the one that the model's own forward gives for one unpadded row."""
    model = RewardModel(hf, layout="rows")
    for sequence in _probe_sequences(hf):
        ours = model.heads(model.make_batch([[sequence]]))
        with model.plain_attention(), _head_in_its_own_dtype(model):
            theirs = hf(input_ids=torch.tensor([sequence], device=model.device), use_cache=False).logits
        # Not relative to the score, which may be close to zero.
        tolerance = _TOLERANCE.get(hf.dtype, 5e-2) * max(1.0, float(theirs.abs().max()))
        if float((ours - theirs.float()).abs().max()) > tolerance:
            raise ModelError(
                f"{type(hf).__name__} does not read its score from the last token",
                got=f"{theirs[0].tolist()} from transformers, {ours[0].tolist()} from the last token",
                need="a linear head on the last hidden state",
            )


@contextlib.contextmanager
def _head_in_its_own_dtype(model: RewardModel) -> Iterator[None]:
    """transformers gives a float32 head the hidden states of a bfloat16 backbone, and PyTorch refuses."""
    head = model.head
    hook = head.register_forward_pre_hook(lambda _, args: (args[0].to(next(head.parameters()).dtype),))
    try:
        yield
    finally:
        hook.remove()


def _probe_sequences(hf: PreTrainedModel) -> list[list[int]]:
    """Two conversations of 12 and 10 tokens that share 6; the padding token is not in them."""
    vocabulary = WrappedModel(hf, layout="rows", compute_dtype=None).num_embeddings
    generator = torch.Generator().manual_seed(0)
    pad = getattr(hf.config.get_text_config(), "pad_token_id", None)
    drawn = torch.randint(0, vocabulary, (64,), generator=generator).tolist()
    tokens = [token for token in drawn if token != pad][:16]
    if len(tokens) < 16:
        raise ModelError("the vocabulary is too small", got=vocabulary, need="two tokens besides padding")
    return [tokens[:12], tokens[:6] + tokens[12:16]]
