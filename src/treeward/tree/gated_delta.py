"""`gated_delta_rule`: the gated delta rule over a row of trees, in chunks that start from their
parent chunk's state.

    out_THV = gated_delta_rule(recurrence.chunks(32), query, key, value, g, beta, normalise=True)

The function of transformers takes a batch of rows, each with one state, so trees need it once for
each round of pieces that can go on together. Here all that happens within chunks is computed for
all chunks of the row at once, and only the states are passed from one level of chunks to the next.

It computes a chunk in the WY form of Yang et al. 2024 (arXiv 2412.06464). With the decays summed up
within the chunk, G = cumsum(g), the start state S and rows of queries q, keys k and values v:

    A = strictly lower part of beta k k^T exp(G_i - G_j)
    u = (1 + A)^-1 beta v,    w = (1 + A)^-1 beta k exp(G)
    new = u - w S
    out = q exp(G) S + lower part of (q k^T exp(G_i - G_j)) new
    S' = exp(G_last) S + (k exp(G_last - G))^T new

In the code `total` is G, `decay` the lower part of exp(G_i - G_j), `written` u, and `forgotten` w.
The length of queries and keys is the square root of their sum of squares and 1e-6, as transformers'
`l2norm` has it.

Shapes: T tokens, N chunks, C tokens of a chunk, J key heads, R = H / J, H value heads, Q key
dimension, V value dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from treeward.tree.recurrence import Chunks


def gated_delta_rule(
    plan: Chunks,
    query_TJQ: Tensor,
    key_TJQ: Tensor,
    value_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    *,
    normalise: bool,
) -> Tensor:
    """The outputs (T, H, V), in the dtype of the values. `normalise`: queries and keys to the
    length 1."""
    wide = torch.promote_types(value_THV.dtype, torch.float32)
    groups = (key_TJQ.shape[1], value_THV.shape[1] // key_TJQ.shape[1])

    def by_key_head(x_TJQ: Tensor) -> Tensor:
        x_NCJQ: Tensor = plan.slots.take(x_TJQ).unflatten(0, (-1, plan.size))
        return x_NCJQ.transpose(1, 2).unsqueeze(2).to(wide)  # (N, J, 1, C, Q)

    def by_value_head(x_TH: Tensor) -> Tensor:
        x_NCH: Tensor = plan.slots.take(x_TH).unflatten(0, (-1, plan.size))
        # Padding neither decays nor writes.
        x_NCH = x_NCH * plan.slots.is_token_N.view(-1, plan.size, 1)
        x_NCJR: Tensor = x_NCH.unflatten(2, groups)
        return x_NCJR.permute(0, 2, 3, 1).to(wide)  # (N, J, R, C)

    query = by_key_head(query_TJQ)
    key = by_key_head(key_TJQ)
    value_NCHV = plan.slots.take(value_THV).unflatten(0, (-1, plan.size))
    value = value_NCHV.unflatten(2, groups).permute(0, 2, 3, 1, 4).to(wide)  # (N, J, R, C, V)
    total = by_value_head(g_TH).cumsum(dim=-1)
    beta = by_value_head(beta_TH)
    if normalise:
        query = query * torch.rsqrt(query.square().sum(dim=-1, keepdim=True) + 1e-6)
        key = key * torch.rsqrt(key.square().sum(dim=-1, keepdim=True) + 1e-6)
    query = query * query.shape[-1] ** -0.5

    later = torch.ones(plan.size, plan.size, dtype=torch.bool, device=value.device).triu(1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    # -inf before the exponential: upper differences are positive and would overflow.
    decay = between.masked_fill(later, float("-inf")).exp()  # (N, J, R, C, C)
    system = (key @ key.mT) * decay * beta.unsqueeze(-1)
    within = (query @ key.mT) * decay
    since_start = total.exp().unsqueeze(-1)
    key_from_start = key * since_start
    right = torch.cat([value, key_from_start], dim=-1) * beta.unsqueeze(-1)
    # The ones of the diagonal are implied.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, forgotten = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    query = query * since_start
    end = total[..., -1:]
    key = key * (end - total).exp().unsqueeze(-1)
    end = end.exp().unsqueeze(-1)

    # All of the above was for all chunks at once. Only the states go level by level.
    parts = [x.split(plan.sizes) for x in (query, key, written, forgotten, within, end)]
    outs = []
    state: Tensor | None = None
    for number, level in enumerate(plan.levels):
        query, key, new, forgotten, within, end = (part[number] for part in parts)
        if state is None:  # the roots, which start from a state of zeros
            out = within @ new
        else:
            state = state.index_select(0, level.parents)
            new = new - forgotten @ state
            out = query @ state + within @ new
        outs.append(out)
        # States of chunks without children are never read.
        if not len(level.with_children):
            break
        written_state = key.index_select(0, level.with_children).mT @ new.index_select(
            0, level.with_children
        )
        if state is None:
            state = written_state
        else:
            kept = state.index_select(0, level.with_children)
            state = kept * end.index_select(0, level.with_children) + written_state
    out_NCHV = torch.cat(outs).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return plan.slots.put(out_NCHV.flatten(0, 1)).to(value_THV.dtype)
