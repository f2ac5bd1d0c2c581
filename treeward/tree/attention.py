"""Attention over a `TreeBatch`: a token sees itself, what precedes it in its segment, and the segments above it.

`register()` makes two implementations known to transformers, so that every model that calls its attention through
transformers' interface works unchanged:

- `treeward_tree`: the fast one. On a CPU it runs flash attention over slices and merges them by their log-sum-exp:
  each segment against itself (causal), and each segment's keys against all tokens below it (no mask at all). Where a
  tree is small, one call with a small mask is quicker. Elsewhere it runs one masked SDPA call per tree.
- `treeward_dense`: the reference. One mask over the whole row and plain arithmetic; slow, and easy to believe.

Which positions may see each other (causal, sliding window, chunks) is not assumed: transformers hands each layer's own
mask function to `PositionMask`, and it is evaluated on the positions within the conversation. Soft-capped scores and
attention sinks are computed as the model defines them, tree by tree.

Shapes: B batch (1: a row), H heads, J key/value heads, R = H / J, T tokens of the row, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from treeward.errors import ModelError
from treeward.tree.batch import TreeLayout, TreeSpan
from treeward.tree.token_tree import Segment

__all__ = ["DENSE", "TREE", "PositionMask", "dense_mask", "register"]

TREE = "treeward_tree"
DENSE = "treeward_dense"

CALL_COST = 4000
"""What one more flash call costs, in mask elements per head: measured on 2 CPU cores (forward and backward, 4 heads of
64), where a call takes about 0.15 ms and a masked element about 34 ns. It decides between slices and a small mask."""

MaskFunction = Callable[[Any, Any, Any, Any], Any]

Prefixes = Sequence[tuple[Tensor, Tensor] | None]
"""For each tree the keys and values (J, P, D) of its prefix in one layer."""


@dataclass(frozen=True, slots=True)
class Part:
    """Queries [q_start, q_end) against keys [k_start, k_end) of the row, or of a tree's prefix.

    `causal`: query i sees keys up to i (the two ranges are one). `mask_QK`: which keys are seen, or None for all.
    `first`: no earlier part wrote these queries. `prefix_of`: the index of the tree whose prefix holds the keys.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    causal: bool
    mask_QK: Tensor | None
    first: bool
    prefix_of: int | None = None

    @property
    def area(self) -> int:
        """The query-key products that are computed."""
        area = (self.q_end - self.q_start) * (self.k_end - self.k_start)
        return area // 2 if self.causal else area


class PositionMask:
    """One layer type's mask: which position sees which, and what follows from it for the trees of a row.

    transformers passes it from a model's mask creation to its attention layers in place of a tensor. It lives for one
    forward (and its backward); what it works out for a layout is kept for the other layers.
    """

    def __init__(self, mask_function: MaskFunction) -> None:
        self.mask_function = mask_function
        self._layout: TreeLayout | None = None
        self._parts: list[tuple[Part, ...]] = []
        self._fast_parts: list[Part] = []
        self._masks: dict[tuple[int, torch.device], Tensor] = {}

    def allowed(self, queries_Q: Tensor, keys_K: Tensor) -> Tensor:
        """Which of the key positions each query position sees, bool (Q, K)."""
        zero = torch.zeros((), dtype=torch.long)
        allowed = self.mask_function(zero, zero, queries_Q[:, None], keys_K[None, :])
        return torch.as_tensor(allowed).expand(len(queries_Q), len(keys_K))

    def parts(self, layout: TreeLayout) -> list[tuple[Part, ...]]:
        """For each tree, the parts that cover exactly what its tokens may see."""
        if self._layout is not layout:
            self._layout, self._masks, self._fast_parts = layout, {}, []
            self._parts = [
                (*self._tree_parts(tree), *self._prefix_parts(t, tree)) for t, tree in enumerate(layout.trees)
            ]
        return self._parts

    def fast_parts(self, layout: TreeLayout) -> list[Part]:
        """The parts of all trees for slice-wise attention; small trees become one masked part."""
        all_parts = self.parts(layout)
        if not self._fast_parts:
            for tree, parts in zip(layout.trees, all_parts, strict=True):
                above = [part for part in parts if part.prefix_of is not None]
                own = [part for part in parts if part.prefix_of is None]
                if len(own) > 1 and len(tree) ** 2 <= sum(part.area for part in own) + CALL_COST * (len(own) - 1):
                    mask = _mask_of(own, tree.start, tree.end)
                    own = [Part(tree.start, tree.end, tree.start, tree.end, False, mask, first=True)]
                self._fast_parts += own + above
        return self._fast_parts

    def tree_mask(self, layout: TreeLayout, tree: TreeSpan, device: torch.device) -> Tensor:
        """What the tokens of one tree see of its prefix and of each other, bool (N, P + N)."""
        key = (tree.start, device)
        if key not in self._masks:
            parts = self.parts(layout)[layout.trees.index(tree)]
            self._masks[key] = _mask_of(parts, tree.start, tree.end, tree.num_prefix_tokens).to(device)
        return self._masks[key]

    def _tree_parts(self, tree: TreeSpan) -> Iterator[Part]:
        last = torch.tensor([tree.depth - 1])
        if tree.depth > 1 and bool(self.allowed(torch.tensor([0]), last).any()):
            raise ModelError(
                "this model's attention sees later tokens, so its conversations cannot share a prefix",
                where="policy.attention",
                fix="policy.attention=rows",
            )
        return self._causal_parts(tree) if self._sees_all(tree) else self._patterned_parts(tree)

    def _sees_all(self, tree: TreeSpan) -> bool:
        """Whether nothing is out of the last token's sight."""
        return bool(self.allowed(torch.tensor([tree.depth - 1]), torch.arange(tree.depth)).all())

    def _prefix_parts(self, t: int, tree: TreeSpan) -> Iterator[Part]:
        """The parts of a tree's tokens against its prefix; each comes after the tokens' first part."""
        before = tree.num_prefix_tokens
        if before and self._sees_all(tree):
            yield Part(tree.start, tree.end, 0, before, False, None, first=False, prefix_of=t)
        elif before:
            root = Segment(0, before, before, 0, None)
            for own in tree.segments:
                queries = torch.arange(own.depth, own.depth + len(own))
                for part in _trimmed(own, root, self.allowed(queries, torch.arange(before))):
                    yield replace(part, prefix_of=t)

    @staticmethod
    def _causal_parts(tree: TreeSpan) -> Iterator[Part]:
        for segment in tree.segments:
            yield Part(segment.start, segment.end, segment.start, segment.end, True, None, first=True)
        for segment in tree.segments:
            if segment.subtree_end > segment.end:
                yield Part(segment.end, segment.subtree_end, segment.start, segment.end, False, None, first=False)

    def _patterned_parts(self, tree: TreeSpan) -> Iterator[Part]:
        for own in tree.segments:
            queries = torch.arange(own.depth, own.depth + len(own))
            above: Segment | None = own
            while above is not None:
                allowed = self.allowed(queries, torch.arange(above.depth, above.depth + len(above)))
                yield from _trimmed(own, above, allowed)
                above = None if above.parent is None else tree.segments[above.parent]


def dense_mask(mask: PositionMask, layout: TreeLayout) -> Tensor:
    """What every token of the row sees, bool (T, T)."""
    parts = [part for tree_parts in mask.parts(layout) for part in tree_parts]
    return _mask_of(parts, 0, layout.num_tokens)


def register() -> None:
    """Make `TREE` and `DENSE` known to transformers. Safe to repeat."""
    for name, function in ((TREE, _tree_attention), (DENSE, _dense_attention)):
        AttentionInterface.register(name, function)
        # Without a mask function of its own an implementation gets no mask, and never learns of a sliding window.
        AttentionMaskInterface.register(name, _make_mask)


def _make_mask(*, mask_function: MaskFunction, **_: Any) -> PositionMask:
    return PositionMask(mask_function)


def _tree_attention(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tree_layout: TreeLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    mask, layout = _checked(module, query_BHTD, attention_mask, tree_layout, kwargs)
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    prefixes = None if layout.exchange is None else layout.exchange.enter(key_BJTD, value_BJTD)
    out: Tensor
    if softcap is not None or s_aux is not None:
        out = _by_tree(
            query_BHTD,
            key_BJTD,
            value_BJTD,
            layout,
            lambda q, k, v, tree: _arithmetic(q, k, v, mask.tree_mask(layout, tree, q.device), scale, softcap, s_aux),
            prefixes,
        )
    elif query_BHTD.device.type == "cpu" and query_BHTD.shape[-1] == value_BJTD.shape[-1]:
        query_BHTD, key_BJTD, value_BJTD = _in_one_dtype(query_BHTD, key_BJTD, value_BJTD)
        parts = mask.fast_parts(layout)
        if prefixes is None:
            out = _SlicedAttention.apply(query_BHTD, key_BJTD, value_BJTD, parts, scale)  # type: ignore[no-untyped-call]
        else:
            out, _ = _sliced(query_BHTD, key_BJTD, value_BJTD, parts, scale, prefixes)
            out = out.view(query_BHTD.shape)
    else:
        out = _masked_attention(query_BHTD, key_BJTD, value_BJTD, mask, layout, scale, prefixes)
    return out.transpose(1, 2), None


def _dense_attention(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tree_layout: TreeLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    mask, layout = _checked(module, query_BHTD, attention_mask, tree_layout, kwargs)
    assert layout.exchange is None, "the reference computes every token"
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    mask_TT = dense_mask(mask, layout).to(query_BHTD.device)
    out = _arithmetic(query_BHTD, key_BJTD, value_BJTD, mask_TT, scale, softcap, s_aux)
    return out.transpose(1, 2), None


def _checked(
    module: torch.nn.Module, query_BHTD: Tensor, mask: Any, layout: TreeLayout | None, kwargs: dict[str, Any]
) -> tuple[PositionMask, TreeLayout]:
    """Refuse what would be silently wrong: a call that tree attention cannot serve exactly."""
    if layout is None:
        raise ModelError(
            "tree attention was called without a tree",
            where=type(module).__name__,
            need="a model that passes its keyword arguments on to its attention layers",
            fix="policy.attention=rows",
        )
    if not isinstance(mask, PositionMask):
        raise ModelError(
            "this model builds its attention mask by itself",
            where=type(module).__name__,
            got=type(mask).__name__,
            need="a model that builds its masks through transformers' mask interface",
            fix="policy.attention=rows",
        )
    for name in ("position_bias", "indices"):  # relative positions; keys that the model selects by itself
        if kwargs.get(name) is not None:
            raise ModelError(f"tree attention has no {name}", where=type(module).__name__, fix="policy.attention=rows")
    dropout = kwargs.get("dropout")
    assert not dropout, f"dropout is off in reward models, got {dropout}"
    assert query_BHTD.shape[0] == 1 and query_BHTD.shape[2] == layout.num_tokens, query_BHTD.shape
    return mask, layout


def _in_one_dtype(*tensors: Tensor) -> Iterator[Tensor]:
    """Autocast leaves queries and keys in float32 (norms) and values in bfloat16 (a projection): all become float32.

    PyTorch's own attention would take bfloat16, which on a CPU is slower for flash attention, and less exact.
    """
    dtype = torch.float32 if torch.is_autocast_enabled("cpu") else tensors[0].dtype
    return (tensor.to(dtype) for tensor in tensors)


def _by_tree(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    layout: TreeLayout,
    attend: Callable[[Tensor, Tensor, Tensor, TreeSpan], Tensor],
    prefixes: Prefixes | None = None,
) -> Tensor:
    sizes = [len(tree) for tree in layout.trees]
    # split, not slices: its backward writes each gradient once, where a slice's fills a whole row with zeros
    queries, keys, values = (torch.split(x, sizes, dim=2) for x in (query_BHTD, key_BJTD, value_BJTD))
    outs = []
    for t, tree in enumerate(layout.trees):
        key, value = keys[t], values[t]
        if prefixes is not None and (prefix := prefixes[t]) is not None:
            key, value = (torch.cat([x.to(own)[None], own], dim=2) for x, own in zip(prefix, (key, value), strict=True))
        outs.append(attend(queries[t], key, value, tree))
    return torch.cat(outs, dim=2)


def _masked_attention(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    mask: PositionMask,
    layout: TreeLayout,
    scale: float,
    prefixes: Prefixes | None = None,
) -> Tensor:
    """One call of PyTorch's attention per tree, with a mask (any device)."""
    # Not `enable_gqa`: together with a mask it leaves CUDA only the slow kernel (transformers avoids it too).
    repeats = query_BHTD.shape[1] // key_BJTD.shape[1]

    def attend(query: Tensor, key: Tensor, value: Tensor, tree: TreeSpan) -> Tensor:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(
            query, key, value, mask.tree_mask(layout, tree, query.device), scale=scale
        )

    return _by_tree(query_BHTD, key_BJTD, value_BJTD, layout, attend, prefixes)


def _arithmetic(
    query_BHND: Tensor,
    key_BJND: Tensor,
    value_BJND: Tensor,
    mask_NN: Tensor,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention written out: soft-cap c tanh(s / c) before the mask; a sink is one more key without a value."""
    repeats = query_BHND.shape[1] // key_BJND.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key_BJND, value_BJND))
    scores = (query_BHND @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask_NN, torch.finfo(scores.dtype).min).float()
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return weights.to(value.dtype) @ value


def _sliced(
    query_BHTD: Tensor,
    key_BJTD: Tensor,
    value_BJTD: Tensor,
    parts: Sequence[Part],
    scale: float,
    prefixes: Prefixes | None = None,
) -> tuple[Tensor, Tensor]:
    """The merged output (J, R, T, D) of the parts of a row, and its log-sum-exp (J, R, T)."""
    query, key, value = _by_key_head(query_BHTD, key_BJTD, value_BJTD)
    repeats = query.shape[1]
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    for part in parts:
        q, k = slice(part.q_start, part.q_end), slice(part.k_start, part.k_end)
        keys, values = key, value
        if part.prefix_of is not None:
            assert prefixes is not None and (prefix := prefixes[part.prefix_of]) is not None
            keys, values = (x.to(query.dtype).unsqueeze(1).expand(-1, repeats, -1, -1) for x in prefix)
        part_out, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[:, :, q],
            keys[:, :, k],
            values[:, :, k],
            0.0,
            part.causal,
            attn_mask=_additive(part.mask_QK, query.dtype),
            scale=scale,
        )
        if part.first:
            out[:, :, q], lse[:, :, q] = part_out, part_lse
        else:
            merged = torch.logaddexp(lse[:, :, q], part_lse)
            old_weight, weight = (torch.exp(x - merged).unsqueeze(-1) for x in (lse[:, :, q], part_lse))
            out[:, :, q] = out[:, :, q] * old_weight + part_out * weight
            lse[:, :, q] = merged
    return out, lse


class _SlicedAttention(torch.autograd.Function):
    """Flash attention over the parts of a row, merged by log-sum-exp (CPU).

    With parts p of one query, o_p their outputs and l_p their log-sum-exps, L = log sum_p exp(l_p) and
    o = sum_p exp(l_p - L) o_p. The gradient of a part's keys, values and queries is that of flash attention when it is
    given the *merged* o and L, for its probabilities are exp(s - L) and its row sums are those of the whole query: no
    mask over the row is ever built, forward or backward.
    """

    @staticmethod
    def forward(
        ctx: Any, query_BHTD: Tensor, key_BJTD: Tensor, value_BJTD: Tensor, parts: Sequence[Part], scale: float
    ) -> Tensor:
        out, lse = _sliced(query_BHTD, key_BJTD, value_BJTD, parts, scale)
        ctx.save_for_backward(query_BHTD, key_BJTD, value_BJTD, out, lse)
        ctx.parts, ctx.scale = parts, scale
        return out.view(query_BHTD.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query_BHTD, key_BJTD, value_BJTD, out, lse = ctx.saved_tensors
        query, key, value = _by_key_head(query_BHTD, key_BJTD, value_BJTD)
        grad_out = grads[0].reshape(query.shape)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key_BJTD[0]), torch.zeros_like(value_BJTD[0])
        for part in ctx.parts:
            q, k = slice(part.q_start, part.q_end), slice(part.k_start, part.k_end)
            part_query, part_key, part_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out[:, :, q],
                query[:, :, q],
                key[:, :, k],
                value[:, :, k],
                out[:, :, q],
                lse[:, :, q],
                0.0,
                part.causal,
                attn_mask=_additive(part.mask_QK, query.dtype),
                scale=ctx.scale,
            )
            if part.first:
                grad_query[:, :, q] = part_query
            else:
                grad_query[:, :, q] += part_query
            grad_key[:, k] += part_key.sum(dim=1)
            grad_value[:, k] += part_value.sum(dim=1)
        return grad_query.view(query_BHTD.shape), grad_key.unsqueeze(0), grad_value.unsqueeze(0), None, None


def _by_key_head(query_BHTD: Tensor, key_BJTD: Tensor, value_BJTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views (J, R, T, D): the key heads become the batch, and the heads that share one read it with stride 0."""
    _, heads, tokens, dim = query_BHTD.shape
    key_heads = key_BJTD.shape[1]
    query = query_BHTD.reshape(key_heads, heads // key_heads, tokens, dim)
    key, value = (x.transpose(0, 1).expand(query.shape) for x in (key_BJTD, value_BJTD))
    return query, key, value


def _additive(mask_QK: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask_QK is None:
        return None
    return torch.zeros(mask_QK.shape, dtype=dtype).masked_fill_(~mask_QK, float("-inf"))


def _mask_of(parts: Sequence[Part], start: int, end: int, num_prefix_tokens: int = 0) -> Tensor:
    """What the tokens `start` to `end` see of a prefix of P tokens and of each other, bool (N, P + N)."""
    mask = torch.zeros(end - start, num_prefix_tokens + end - start, dtype=torch.bool)
    for part in parts:
        offset = num_prefix_tokens - start if part.prefix_of is None else 0
        block = mask[part.q_start - start : part.q_end - start, part.k_start + offset : part.k_end + offset]
        if part.causal:
            block |= torch.ones_like(block).tril()
        else:
            block |= torch.ones_like(block) if part.mask_QK is None else part.mask_QK
    return mask


def _trimmed(own: Segment, above: Segment, allowed_QK: Tensor) -> Iterator[Part]:
    """The part of one segment's tokens against one segment above it (or itself), cut to what is seen at all."""
    rows, columns = allowed_QK.any(dim=1).nonzero().flatten(), allowed_QK.any(dim=0).nonzero().flatten()
    if len(rows) == 0 and own is not above:
        return
    r, c = (slice(int(x[0]), int(x[-1]) + 1) if len(x) else slice(0) for x in (rows, columns))
    mask = allowed_QK[r, c]
    # Flash attention has no answer for a query that sees no key, and every token's first part is its own segment.
    if not bool(mask.any(dim=1).all()) or (own is above and len(mask) < len(own)):
        raise ModelError(
            "this model's attention pattern has holes that tree attention cannot follow",
            where="policy.attention",
            fix="policy.attention=rows",
        )
    yield Part(
        own.start + r.start,
        own.start + r.stop,
        above.start + c.start,
        above.start + c.stop,
        False,
        None if bool(mask.all()) else mask.contiguous(),
        first=own is above,
    )
