"""Recurrent layers of transformers over a row of trees: gated delta nets, Mamba, convolutions.

    follow_trees(hf)                    # once for a model
    with over(batch.layout):
        hf(...)                         # a row of trees; elsewhere the model is as it was

In such a layer projections, gates and norms are token by token. Tokens are mixed by a few
functions, which transformers' modules call by name. `follow_trees` puts a function of its own under
each name. It calls the original one, unless a row of trees is computed or sampled
(`current_row.py`, `decoding.py`); then each segment starts from the state at the end of the segment
above it.

The names are private to transformers. If one is missing, or a model mixes tokens elsewhere, a tree
does not give the states of plain rows; `model/checks.py` sees that, and the model runs as rows.

Shapes: B batch (1: a row), T tokens of the row, E of the longer row of a convolution, N slots, R
rows of a round, L slots of a row, S rows that are sampled, D channels, K taps, H heads, J key heads
or groups, Q key dimension or state size, V value or head dimension, C channels of Mamba 1.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.utils.import_utils import is_flash_linear_attention_available

from treeward.tree import decoding
from treeward.tree.convolution import shifted_sums
from treeward.tree.current_row import Row, current
from treeward.tree.gated_delta import gated_delta_rule
from treeward.tree.prefix import Exchange
from treeward.tree.recurrence import Round, Rounds

CPU_CHUNK = 32
GPU_CHUNK = 64
"""Tokens that a kernel computes at once, and the multiple at which rounds end; 64 is built into
kernels for a GPU. On a CPU (one thread, a small Qwen3.5, completions of 70 to 130 tokens) 32 took
0.96 to 1.03 of the time of 64; it pads short segments less."""


def follow_trees(hf: nn.Module) -> set[str]:
    """Let the model's recurrent layers follow trees; safe to repeat.

    Returns the names of the functions that its modules call; without any the model has no recurrent
    layers, or unknown ones.
    """
    found = set()
    for module in {sys.modules[type(part).__module__] for part in hf.modules()}:
        for name, mixer in _MIXERS.items():
            original = getattr(module, name, None)
            if original is None:
                continue
            found.add(name)
            # A function of ours stays: around itself it would ask for the row twice.
            if not hasattr(original, "mixer"):
                setattr(module, name, _following(original, mixer))
    return found


def read_by_kernels(hf: nn.Module) -> set[str]:
    """The names of the linear layers whose weights a fused kernel reads itself.

    What is put beside such a layer, as an adapter, is not computed where the kernel is.
    """
    names = set()
    for name, part in hf.named_modules():
        functions = vars(sys.modules[type(part).__module__])
        # The name is there without its package too: which layers get adapters is not the machine's
        # matter.
        has_kernel = any(function in functions for function in _FUSED)
        # Of these modules the mixers alone have a decay.
        if not (has_kernel and hasattr(part, "A_log")):
            continue
        for child, layer in part.named_children():
            # The kernels begin behind the first layer.
            if isinstance(layer, nn.Linear) and child != "in_proj":
                names.add(f"{name}.{child}")
    return names


def _following(original: Callable[..., Any], mixer: type[_Mixer]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        sampling = decoding.current()
        row = current()
        if sampling is None and row is None:
            return original(*arguments, **options)
        return _mix(mixer, original, sampling, row, arguments, options)

    call.mixer = mixer  # type: ignore[attr-defined]
    return call


# A compiled layer would be compiled again for each plan.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mix(
    mixer: type[_Mixer],
    original: Callable[..., Any],
    sampling: decoding.Decoding | None,
    row: Row | None,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    if sampling is not None:
        return mixer.step(sampling, *arguments, **options)
    return mixer.tree(row, original, *arguments, **options)


class _Mixer:
    """How one function of transformers mixes tokens."""

    @staticmethod
    def tree(row: Any, original: Any, *arguments: Any, **options: Any) -> Any:
        """Its result for a row of trees. `original`: the function."""
        raise NotImplementedError

    @staticmethod
    def step(sampling: Any, *arguments: Any, **options: Any) -> Any:
        """Its result for one more token of each row that is sampled, as a row of S tokens."""
        raise NotImplementedError


class _NoResult(_Mixer):
    """A fused kernel for training. Where it gives no result, the layers call the functions
    below."""

    @staticmethod
    def tree(row: Any, original: Any, *arguments: Any, **options: Any) -> None:
        return None

    @staticmethod
    def step(sampling: Any, *arguments: Any, **options: Any) -> None:
        return None


class _Convolution(_Mixer):
    """A causal convolution of each channel, with its activation. Its state is the last K - 1
    inputs."""

    @staticmethod
    def tree(
        row: Row,
        original: Callable[..., Any],
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **options: Any,
    ) -> Tensor:
        plan = row.recurrence.window(weight.shape[-1])
        inputs_TD = hidden_states[0].T
        exchange = row.layout.exchange
        if exchange is not None:
            # Before the beginning of a conversation there are none.
            prefixes = [state for state in exchange.enter_states() if state is not None]
            inputs_TD = torch.cat([inputs_TD, *prefixes])
            states = []
            for places, num_before in plan.kept:
                last_inputs = inputs_TD.index_select(0, places)
                states.append(F.pad(last_inputs, (0, 0, num_before, 0)))
            exchange.keep_states(states)
        inputs_ED = inputs_TD.index_select(0, plan.source_E).index_fill(0, plan.before, 0.0)
        dtype = inputs_ED.dtype
        if inputs_ED.device.type == "cpu":
            # PyTorch's convolution of single channels is slow on a CPU: sums of shifted rows take
            # its place.
            wide = torch.promote_types(dtype, torch.float32)
            sums_ED = shifted_sums(inputs_ED.to(wide), weight.to(wide))
            sums_TD = sums_ED.index_select(0, plan.place_T)
            return _activated(sums_TD, bias, activation).to(dtype).T[None]
        out: Tensor = original(inputs_ED.T[None], weight, bias, activation=activation, **options)
        # The output of a place is that of the K inputs that end there.
        return out[:, :, weight.shape[-1] - 1 :].index_select(2, plan.place_T)

    @staticmethod
    def step(
        sampling: decoding.Decoding,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        last_SKD = sampling.state()
        new_SD = hidden_states[0].T
        inputs_SKD = torch.cat([last_SKD, new_SD[:, None]], dim=1)
        # In place, here and below: a captured graph writes to the addresses that it has seen.
        last_SKD.copy_(inputs_SKD[:, 1:])
        out_SD = (inputs_SKD.float() * weight.T.float()).sum(dim=1)
        return _activated(out_SD, bias, activation).to(new_SD.dtype).T[None]


def _activated(values: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    if bias is not None:
        values = values + bias
    if activation is not None:
        values = ACT2FN[activation](values)
    return values


class _GatedDeltaRule(_Mixer):
    """S <- exp(g) S + beta k (v - k^T exp(g) S)^T, out = q^T S (Yang et al. 2024, arXiv
    2412.06464).

    Its state is S, (H, Q, V). Kimi's delta attention is the same with a decay g for each key
    channel.
    """

    @staticmethod
    def tree(
        row: Row,
        original: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        **options: Any,
    ) -> tuple[Tensor, None]:
        # `initial_state` and `output_final_state` are named only to keep them out of `options`:
        # rounds have their own.
        chunk = GPU_CHUNK
        if query.device.type == "cpu":
            chunk = CPU_CHUNK
        chunk = min(chunk_size, chunk)
        # Arithmetic of ours, in chunks of the tree, knows neither a decay for each key channel nor
        # states of prefixes. What has one goes through the model's function in rounds.
        is_scalar = g.dim() == 3
        if query.device.type == "cpu" and is_scalar and row.layout.exchange is None:
            normalise = options.get("use_qk_l2norm_in_kernel", False)
            inputs = [x[0] for x in (query, key, value, g, beta)]
            out_THV = gated_delta_rule(row.recurrence.chunks(chunk), *inputs, normalise=normalise)
            return out_THV[None], None

        def kernel(
            inputs: Sequence[Tensor], start: Tensor | None, part: Round
        ) -> tuple[Tensor, Tensor | None]:
            query, key, value, g, beta = inputs
            if part.bounds is not None:
                lengths = {"cu_seqlens": part.bounds, "cu_seqlens_cpu": part.bounds_cpu}
                options.update(lengths)
            result: tuple[Tensor, Tensor | None] = original(
                query,
                key,
                value,
                g=g,
                beta=beta,
                chunk_size=chunk,
                initial_state=start,
                output_final_state=part.is_wanted,
                **options,
            )
            return result

        heads = value.shape[2]
        shape = (heads, key.shape[3], value.shape[3])
        inputs = [x[0] for x in (query, key, value, g, beta)]
        # Padding neither decays nor writes.
        neutral = (3, 4)
        # fla's kernels (0.6) take sequences of different lengths with a state each. This is written
        # from their source, and has not run: no GPU was there.
        takes_lengths = is_flash_linear_attention_available()
        plan = row.recurrence.rounds(None if takes_lengths else chunk)
        out_THV = _in_rounds(plan, kernel, inputs, neutral, shape, row.layout.exchange)
        return out_THV[None], None

    @staticmethod
    def step(
        sampling: decoding.Decoding,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, None]:
        state_SHQV = sampling.state()
        query, key, values_SHV, decay, beta = (x[0].float() for x in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query = query * torch.rsqrt(query.square().sum(dim=-1, keepdim=True) + 1e-6)
            key = key * torch.rsqrt(key.square().sum(dim=-1, keepdim=True) + 1e-6)
        repeats = values_SHV.shape[1] // key.shape[1]
        query_SHQ = query.repeat_interleave(repeats, dim=1) * query.shape[-1] ** -0.5
        key_SHQ = key.repeat_interleave(repeats, dim=1)
        if decay.dim() == 2:  # one for each head; Kimi's has one for each key channel
            decay = decay[..., None]
        state = state_SHQV * decay.exp()[..., None]
        known_SHV = (key_SHQ[..., None] * state).sum(dim=2)
        written_SHV = (values_SHV - known_SHV) * beta[..., None]
        state = state + key_SHQ[..., None] * written_SHV[:, :, None]
        state_SHQV.copy_(state)
        out_SHV = (query_SHQ[..., None] * state).sum(dim=2)
        return out_SHV.to(value.dtype)[None], None


class _Mamba2(_Mixer):
    """S <- exp(dt A) S + dt x b^T, out = S c + D x (Dao & Gu 2024, arXiv 2405.21060).

    Its state is S, (H, V, Q).
    """

    @staticmethod
    def tree(
        row: Row,
        original: Callable[..., Any],
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **options: Any,
    ) -> Tensor:
        chunk = min(chunk_size, GPU_CHUNK)

        def kernel(
            inputs: Sequence[Tensor], start: Tensor | None, part: Round
        ) -> tuple[Tensor, Tensor | None]:
            values, steps, keys, queries = inputs
            result: Any = original(
                values,
                steps,
                A,
                keys,
                queries,
                chunk_size=chunk,
                D=D,
                initial_states=start,
                return_final_states=part.is_wanted,
                **options,
            )
            # With states it returns a pair, without them the outputs alone.
            if not part.is_wanted:
                return result, None
            out, end = result
            return out, end

        heads = hidden_states.shape[2]
        shape = (heads, hidden_states.shape[3], B.shape[3])
        steps = _time_steps(dt, dt_bias, dt_softplus, dt_limit)
        inputs = [x[0] for x in (hidden_states, steps, B, C)]
        # The time does not go on in padding, which is why the steps are made here.
        neutral = (1,)
        plan = row.recurrence.rounds(chunk)
        return _in_rounds(plan, kernel, inputs, neutral, shape, row.layout.exchange)[None]

    @staticmethod
    def step(
        sampling: decoding.Decoding,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> Tensor:
        state_SHVQ = sampling.state()
        values_SHV = hidden_states[0].float()
        dt_SH = _time_steps(dt, dt_bias, dt_softplus, dt_limit)[0].float()
        repeats = values_SHV.shape[1] // B.shape[2]
        keys_SHQ = B[0].float().repeat_interleave(repeats, dim=1)
        queries_SHQ = C[0].float().repeat_interleave(repeats, dim=1)
        written = (dt_SH[..., None] * values_SHV)[..., None] * keys_SHQ[:, :, None]
        state = state_SHVQ * (dt_SH * A.float()).exp()[..., None, None] + written
        state_SHVQ.copy_(state)
        out_SHV = (state * queries_SHQ[:, :, None]).sum(dim=-1)
        if D is not None:
            out_SHV = out_SHV + D.float()[:, None] * values_SHV
        return out_SHV[None]


class _Mamba1(_Mixer):
    """As Mamba 2, with a decay for each channel and each of its states (Gu & Dao 2023, arXiv
    2312.00752). Its state is (C, Q).

    No kernel of transformers takes a state, so the tokens of each position are computed here.
    """

    @staticmethod
    def tree(
        row: Row,
        original: Callable[..., Any],
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> Tensor:
        plan = row.recurrence.steps
        dt_CT = _time_steps_of_channels(dt, delta_bias, delta_softplus)[0]
        # States are of float32 at least, and so is what is written to them.
        wide = torch.promote_types(dt_CT.dtype, torch.float32)
        values_NC, dt_NC, keys_NQ, queries_NQ = (
            plan.slots.take(x_T).to(wide) for x_T in (hidden_states[0].T, dt_CT.T, B[0].T, C[0].T)
        )
        decay_NCQ = torch.exp(dt_NC[..., None] * A)
        written_NCQ = (dt_NC * values_NC)[..., None] * keys_NQ[:, None]
        decays = decay_NCQ.split(plan.sizes)
        written = written_NCQ.split(plan.sizes)
        exchange = row.layout.exchange
        start = _start(exchange, plan.starts, (A.shape[0], A.shape[1]), written[0])
        state = written[0]
        if start is not None:
            state = decays[0] * start + state
        states = [state]
        for parents, decay, added in zip(plan.parents, decays[1:], written[1:], strict=True):
            state = decay * state.index_select(0, parents) + added
            states.append(state)
        states_NCQ = torch.cat(states)
        if exchange is not None:
            exchange.keep_states([states_NCQ[slot] for slot in plan.kept])
        out_NC = (states_NCQ @ queries_NQ[..., None])[..., 0]
        out = plan.slots.put(out_NC).T[None].to(hidden_states.dtype)
        return _gated(out, hidden_states, D, z)

    @staticmethod
    def step(
        sampling: decoding.Decoding,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        **_: Any,
    ) -> Tensor:
        state_SCQ = sampling.state()
        dt_CS = _time_steps_of_channels(dt, delta_bias, delta_softplus)[0]
        dt_SC, values_SC, keys_SQ, queries_SQ = (
            x_S.T.to(state_SCQ.dtype) for x_S in (dt_CS, hidden_states[0], B[0], C[0])
        )
        written = (dt_SC * values_SC)[..., None] * keys_SQ[:, None]
        state = torch.exp(dt_SC[..., None] * A) * state_SCQ + written
        state_SCQ.copy_(state)
        out_SC = (state @ queries_SQ[..., None])[..., 0]
        return _gated(out_SC.T[None].to(hidden_states.dtype), hidden_states, D, z)


_MIXERS: dict[str, type[_Mixer]] = {
    "causal_conv1d_fn": _Convolution,
    "torch_chunk_gated_delta_rule": _GatedDeltaRule,
    "chunk_kimi_delta_attention": _GatedDeltaRule,
    "mamba2_chunk_scan": _Mamba2,
    "mamba_selective_scan": _Mamba1,
    "mamba2_split_conv1d_scan_combined": _NoResult,
    "mamba_inner_fn": _NoResult,
}
"""What transformers' modules call, by name (5.23)."""

_FUSED = [name for name, mixer in _MIXERS.items() if mixer is _NoResult]


Kernel = Callable[[Sequence[Tensor], Tensor | None, Round], tuple[Tensor, Tensor | None]]
"""Inputs (R, L, D) of a round, or (1, N, D) of one with `bounds`, the states that its pieces start
from (None: zero), and the round: the outputs in the same form, and the last states if wanted."""


def _in_rounds(
    plan: Rounds,
    kernel: Kernel,
    inputs: Sequence[Tensor],
    neutral: Sequence[int],
    shape: tuple[int, ...],
    exchange: Exchange | None,
) -> Tensor:
    """The outputs (T, D) for inputs (T, D), round after round.

    `neutral`: the inputs that are zero in padding, so that a state passes it unchanged. `shape`: of
    a state.
    """
    slots = []
    for number, values_TD in enumerate(inputs):
        values_ND = plan.slots.take(values_TD)
        if number in neutral:
            ones = [1] * (values_ND.dim() - 1)
            values_ND = values_ND * plan.slots.is_token_N.view(-1, *ones)
        slots.append(values_ND)
    sizes = [part.num_slots for part in plan.rounds]
    by_input = [values_ND.split(sizes) for values_ND in slots]
    start = _start(exchange, plan.starts, shape, inputs[0])
    outs = []
    ends: list[Tensor | None] = []
    for number, part in enumerate(plan.rounds):
        if part.source is not None:
            last = ends[-1]
            assert last is not None, "a round before another is wanted"
            start = last.index_select(0, part.source)
        rows = [_rows(values[number], part) for values in by_input]
        out, end = kernel(rows, start, part)
        outs.append(out.flatten(0, 1))
        ends.append(end)
    if exchange is not None:
        kept_states = []
        for number, row in plan.kept:
            states = ends[number]
            assert states is not None, "a round in which a kept prefix ends is wanted"
            kept_states.append(states[row])
        exchange.keep_states(kept_states)
    return plan.slots.put(torch.cat(outs))


def _rows(values_ND: Tensor, part: Round) -> Tensor:
    if part.bounds is not None:
        return values_ND[None]
    rows: Tensor = values_ND.unflatten(0, (len(part.lengths), part.lengths[0]))
    return rows


def _start(
    exchange: Exchange | None, starts: Sequence[int | None], shape: tuple[int, ...], like: Tensor
) -> Tensor | None:
    """The states that the roots start from, (R, *shape); None if all are zero."""
    if exchange is None:
        return None
    # Entered even where nothing is read: the exchange counts the calls.
    prefixes = exchange.enter_states()
    if all(tree is None for tree in starts):
        return None
    zero = torch.zeros(shape, device=like.device)
    states = []
    for tree in starts:
        state = None
        if tree is not None:
            state = prefixes[tree]
        if state is None:  # a conversation that begins in this row
            state = zero
        states.append(state)
    return torch.stack(states)


def _time_steps(
    dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float]
) -> Tensor:
    """The time steps of Mamba 2, (B, T, H)."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if softplus:
        dt = F.softplus(dt)
    return dt.clamp(limit[0], limit[1])


def _time_steps_of_channels(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """The time steps of Mamba 1, (B, C, T)."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)[..., None]
    if softplus:
        dt = F.softplus(dt)
    return dt


def _gated(out_BCT: Tensor, values_BCT: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    if D is not None:
        out_BCT = out_BCT + values_BCT * D[None, :, None]
    if z is not None:
        out_BCT = out_BCT * F.silu(z)
    return out_BCT
