"""`Decoding`: what the layers know of rows that grow token by token: keys and values, with a
prompt's held once for all its rows, and the states of recurrent layers, which each row has its own
copy of.

    decoding = Decoding(prefixes, prompt_of_row, most_tokens=256)      # a `Prefix` per prompt
    with decoding.running() as implementation, model.attention(implementation):
        backbone(tokens_S[None], position_ids=decoding.positions_S[None], ...)
    decoding.advance()

Shapes: P prompts, G rows of the largest group, S rows, B batch (1), H heads, J key/value heads, R =
H / J, L tokens of the longest prompt, C capacity for a row's own tokens, K = L + own tokens to
read, Q queries, D head dimension, X any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface

from treeward.errors import ModelError
from treeward.tree.flex import MaskFunction
from treeward.tree.prefix import Prefix

_NAME = "treeward_decoding"
# Tokens of a row that have room from the first one on. The room doubles from there.
_FIRST_CAPACITY = 128


_running: ContextVar[Decoding | None] = ContextVar("running", default=None)


def current() -> Decoding | None:
    """The decoding whose next tokens are computed; None outside of `Decoding.running`."""
    return _running.get()


@dataclass(frozen=True, slots=True)
class _Mask:
    """Instead of a mask: the decoding, which knows the positions, and the rule of the layer."""

    decoding: Decoding
    mask_function: MaskFunction


def _make_mask(*, mask_function: MaskFunction, **_: Any) -> _Mask:
    decoding = _running.get()  # of this thread: others may decode too
    assert decoding is not None, "a decoding is running"
    return _Mask(decoding, mask_function)


@dataclass(slots=True)
class _Layer:
    """`prompt`: keys and values (P, J, L, D); `own`: (S, J, C, D), None before the first token."""

    prompt: tuple[Tensor, Tensor]
    own: tuple[Tensor, Tensor] | None = None


class Decoding:
    """The keys and values of all layers. `most_tokens`: the limit of a row's own tokens. `static`:
    read the whole capacity, with a mask, so that shapes and addresses only change when it grows,
    for CUDA graphs."""

    def __init__(
        self,
        prefixes: Sequence[Prefix],
        prompt_of_row: Sequence[int],
        *,
        most_tokens: int,
        static: bool,
    ) -> None:
        self.static = static
        self.device = prefixes[0].tensors[0].device
        self.layers = []
        for layer in range(len(prefixes[0].keys)):
            keys = _padded([prefix.keys[layer] for prefix in prefixes])
            values = _padded([prefix.values[layer] for prefix in prefixes])
            self.layers.append(_Layer((keys, values)))
        prompts_S = torch.tensor(list(prompt_of_row), device=self.device)
        self.states = []
        for number in range(len(prefixes[0].states)):
            states_P = torch.stack([prefix.states[number] for prefix in prefixes])
            self.states.append(states_P.index_select(0, prompts_S))
        self.most_tokens = most_tokens
        self.capacity = min(most_tokens, _FIRST_CAPACITY)
        self.prompt_of_row = list(prompt_of_row)
        # The tokens that each row has so far, for the host, and as a tensor for the device: a
        # captured graph reads the tensor anew at each replay.
        self.step = 0
        self.lengths_P = torch.tensor([len(prefix) for prefix in prefixes], device=self.device)
        self.step_1 = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._arrange()

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """A context of one forward pass, with the name of its attention in transformers."""
        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, _make_mask)
        # Layers are known by the order of their calls, as in an `Exchange`: functions of recurrent
        # layers have no number.
        self._next = 0
        self._next_state = 0
        self._biases: dict[MaskFunction, Tensor | None] = {}  # one for each kind of layer
        token = _running.set(self)
        try:
            yield _NAME
        finally:
            _running.reset(token)

    @property
    def positions_S(self) -> Tensor:
        """The position of each row's next token."""
        return self.lengths_S + self.step_1

    def advance(self) -> bool:
        """Count one more token in each row; True if tensors were replaced to grow the capacity."""
        self.step += 1
        self.step_1 += 1
        if self.step < self.capacity:
            return False
        # Doubled, so that in all no more tokens are copied than there are.
        # Never by 0: the last token of a row is sampled and not computed, so it needs no room.
        room = min(self.capacity, self.most_tokens - self.capacity)
        for layer in self.layers:
            assert layer.own is not None
            keys, values = layer.own
            layer.own = (F.pad(keys, (0, 0, 0, room)), F.pad(values, (0, 0, 0, room)))
        self.capacity += room
        # A model of recurrent layers alone has no keys that could have been replaced.
        return bool(self.layers)

    def choose(self, rows: Sequence[int]) -> None:
        """Go on with these rows, and free prompts without any."""
        rows_S = torch.tensor(rows, device=self.device)
        kept_prompts = sorted({self.prompt_of_row[s] for s in rows})
        prompts_P = torch.tensor(kept_prompts, device=self.device)
        for layer in self.layers:
            # indexing copies all that is kept, so only where a prompt is freed
            if len(kept_prompts) < len(self.lengths_P):
                layer.prompt = (layer.prompt[0][prompts_P], layer.prompt[1][prompts_P])
            if layer.own is not None:
                layer.own = (layer.own[0][rows_S], layer.own[1][rows_S])
        self.states = [states_S.index_select(0, rows_S) for states_S in self.states]
        self.lengths_P = self.lengths_P[prompts_P]
        self.prompt_of_row = [kept_prompts.index(self.prompt_of_row[s]) for s in rows]
        self._arrange()

    def _arrange(self) -> None:
        """Set the rows of each prompt, padded with row 0, int64 (P, G), and each row's place there,
        int64 (S,)."""
        members: list[list[int]] = [[] for _ in self.lengths_P]
        places = []
        for s, p in enumerate(self.prompt_of_row):
            places.append((p, len(members[p])))
            members[p].append(s)
        size = max(map(len, members))
        padded = [rows + [0] * (size - len(rows)) for rows in members]
        self.slots_PG = torch.tensor(padded, device=self.device)
        self.places_S = torch.tensor([p * size + g for p, g in places], device=self.device)
        self.lengths_S = self.lengths_P[torch.tensor(self.prompt_of_row, device=self.device)]

    def enter(self, key_SJD: Tensor, value_SJD: Tensor) -> tuple[_Layer, Tensor, Tensor]:
        """Write a layer's new keys and values; returns the layer, and the rows' own ones to read,
        (S, J, K - L, D)."""
        layer = self.layers[self._next]
        self._next += 1
        if layer.own is None:
            layer.own = (self._empty_cache(key_SJD), self._empty_cache(value_SJD))
        keys, values = layer.own
        keys.index_copy_(2, self.step_1, key_SJD[:, :, None].to(keys.dtype))
        values.index_copy_(2, self.step_1, value_SJD[:, :, None].to(values.dtype))
        return layer, keys[:, :, : self._read], values[:, :, : self._read]

    def state(self) -> Tensor:
        """The states (S, ...) of the rows in the next function of a recurrent layer, which writes
        the new ones there.
        """
        number = self._next_state
        self._next_state += 1
        return self.states[number]

    def _empty_cache(self, like_SJD: Tensor) -> Tensor:
        size, heads, width = like_SJD.shape
        return like_SJD.new_zeros(size, heads, self.capacity, width)

    @property
    def _read(self) -> int:
        if self.static:
            return self.capacity
        return self.step + 1

    def bias(self, mask_function: MaskFunction) -> Tensor | None:
        """0 where a row's query sees a key and -inf elsewhere, float32 (S, 1, 1, K); None if all
        see all, unless `static`."""
        if mask_function not in self._biases:
            longest_prompt = self.layers[0].prompt[0].shape[2]
            prompt_K = torch.arange(longest_prompt, device=self.device)
            own_K = torch.arange(self._read, device=self.device)
            lengths_S1 = self.lengths_S[:, None]
            num_rows = len(lengths_S1)
            # Padding of shorter prompts, and tokens to come, are no keys.
            own_exists_SK = (own_K <= self.step_1).expand(num_rows, -1)
            exists_SK = torch.cat([prompt_K < lengths_S1, own_exists_SK], dim=1)
            # The positions of the keys in the row's conversation: its own follow its prompt.
            keys_SK = torch.cat([prompt_K.expand(num_rows, -1), lengths_S1 + own_K], dim=1)
            zero = torch.zeros((), dtype=torch.int64, device=self.device)
            seen_SK = exists_SK & mask_function(zero, zero, self.positions_S[:, None], keys_SK)
            bias = None
            # A CUDA graph has the bias or not, whatever the rows are.
            if self.static or not bool(seen_SK.all()):
                zeros_SK = torch.zeros(seen_SK.shape, device=self.device)
                bias = zeros_SK.masked_fill_(~seen_SK, float("-inf"))[:, None, None]
            self._biases[mask_function] = bias
        return self._biases[mask_function]

    def by_prompt(self, rows_SJRX: Tensor) -> Tensor:
        """Tensors of rows, grouped by prompt, (P, J, G * R, X)."""
        slots = rows_SJRX.index_select(0, self.slots_PG.flatten()).unflatten(0, self.slots_PG.shape)
        grouped: Tensor = slots.transpose(1, 2).flatten(2, 3)
        return grouped

    def by_row(self, prompts_PJQX: Tensor) -> Tensor:
        """The inverse of `by_prompt`, (S, J, R, X)."""
        size = self.slots_PG.shape[1]
        slots: Tensor = prompts_PJQX.unflatten(2, (size, -1)).transpose(1, 2).flatten(0, 1)
        return slots.index_select(0, self.places_S)


def _attend(
    module: torch.nn.Module,
    query_BHSD: Tensor,
    key_BJSD: Tensor,
    value_BJSD: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each row's new token to its prompt and to the row's own tokens, written out;
    softmax in float32."""
    if not isinstance(attention_mask, _Mask):
        raise ModelError("this model cannot decode on shared prompts", where=type(module).__name__)
    decoding = attention_mask.decoding
    layer, own_keys, own_values = decoding.enter(
        key_BJSD[0].transpose(0, 1), value_BJSD[0].transpose(0, 1)
    )
    if scaling is None:
        scaling = query_BHSD.shape[-1] ** -0.5
    query_SJRD = query_BHSD[0].unflatten(0, (key_BJSD.shape[1], -1)).permute(2, 0, 1, 3)
    query_SJRD = query_SJRD * scaling
    # All rows of a prompt are queries of one product: its keys are read once, which is what
    # decoding waits for.
    prompt_scores = decoding.by_row(_product(decoding.by_prompt(query_SJRD), layer.prompt[0]))
    scores = torch.cat([prompt_scores, _product(query_SJRD, own_keys)], dim=-1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    bias = decoding.bias(attention_mask.mask_function)
    if bias is not None:
        scores = scores + bias
    if s_aux is not None:  # a sink is one more key without a value
        sinks = s_aux.float().view(1, *scores.shape[1:3], 1).expand(len(scores), -1, -1, -1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1).to(own_values.dtype)
    length = prompt_scores.shape[-1]
    out = decoding.by_row(decoding.by_prompt(weights[..., :length]) @ layer.prompt[1])
    out = out + weights[..., length : length + own_values.shape[2]] @ own_values
    return out.flatten(1, 2)[None].to(query_BHSD.dtype), None


def _product(query_XJQD: Tensor, key_XJKD: Tensor) -> Tensor:
    """Queries times keys in float32, (X, J, Q, K)."""
    if query_XJQD.dtype == torch.float32 or not query_XJQD.is_cuda:
        return query_XJQD.float() @ key_XJKD.float().mT
    # On a GPU without a float32 copy of the keys, which are most of the memory that is read.
    product = torch.bmm(
        query_XJQD.flatten(0, 1), key_XJKD.flatten(0, 1).mT, out_dtype=torch.float32
    )
    return product.view(*query_XJQD.shape[:3], -1)


def _padded(tensors_JLD: Sequence[Tensor]) -> Tensor:
    """(P, J, L, D), zeros at the end."""
    padded_PLJD = pad_sequence([x.transpose(0, 1) for x in tensors_JLD], batch_first=True)
    return padded_PLJD.transpose(1, 2).contiguous()
