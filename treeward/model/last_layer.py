"""`LastLayer`: of a decoder's last layer, the MLP is computed only for the tokens that are read.

    last = LastLayer.of(hf)                                     # None where the model has no such layer
    hidden_1TD = hf.base_model(..., tree_reads=at_N)[0]         # right at these places; elsewhere without the last MLP

A reward model reads one token of a conversation, and a policy those that predict its completion. Nothing attends to
what comes after the last attention, so the MLP behind it gets these tokens alone, and its output is put into zeros at
their places. A call without `tree_reads` computes everything.

The places come as an argument of the layer, so a backward pass that computes the layer again knows them too. The class
of the layer is replaced by a subclass, which compilers tell from the class of the other layers, and the MLP gets
hooks: names, parameters and exports stay as they are. Which models this suits is tried when one is loaded
(`checks.why_not_tree`).

Shapes: T tokens of the row, N of them read, D hidden size.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


class _Now(threading.local):
    """Of the forward pass that is in a last layer now; each thread has its own."""

    at_N: Tensor | None = None
    row_1TD: Tensor | None = None


_now = _Now()


class LastLayer:
    """`enabled`: False where the model is not suited."""

    def __init__(self, layer: nn.Module, mlp: nn.Module) -> None:
        self.enabled = True
        layer.__class__ = _class_with_reads(type(layer))
        layer.__dict__["last_layer"] = self
        mlp.register_forward_pre_hook(self._select, with_kwargs=True)
        mlp.register_forward_hook(self._spread, with_kwargs=True)

    @classmethod
    def of(cls, hf: PreTrainedModel) -> LastLayer | None:
        """The last layer of this model, the same every time."""
        num_layers = getattr(hf.config.get_text_config(), "num_hidden_layers", None)
        lists = (module for module in hf.base_model.modules() if isinstance(module, nn.ModuleList))
        layers = next((one for one in lists if len(one) and len(one) == num_layers), None)
        # norms have no parts, and attention precedes the MLP
        blocks = [] if layers is None else [one for one in layers[-1].children() if any(True for _ in one.children())]
        if layers is None or not blocks:
            return None
        known: LastLayer | None = getattr(layers[-1], "last_layer", None)
        return known or cls(layers[-1], blocks[-1])

    def call(self, forward: Any, at_N: Tensor | None, row_1TD: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's output, for which its MLP computes these places alone; all without any."""
        _now.at_N, _now.row_1TD = at_N, row_1TD
        try:
            return forward(row_1TD, *args, **kwargs)
        finally:  # a backward pass that computes the layer again leaves it by an exception
            _now.at_N = _now.row_1TD = None

    def _select(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if _now.at_N is None or len(args) != 1 or kwargs:
            return None
        return (args[0].index_select(1, _now.at_N),), kwargs

    def _spread(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if _now.at_N is None or _now.row_1TD is None or len(args) != 1 or kwargs:
            return output
        found_1ND = output[0] if isinstance(output, tuple) else output  # experts may give their routing as well
        spread_1TD = found_1ND.new_zeros(_now.row_1TD.shape).index_copy(1, _now.at_N, found_1ND)
        return (spread_1TD, *output[1:]) if isinstance(output, tuple) else spread_1TD


class _ReadsOnly(nn.Module):
    """What the class of a last layer becomes."""

    last_layer: LastLayer

    def forward(self, hidden_states: Tensor, *args: Any, tree_reads: Tensor | None = None, **kwargs: Any) -> Any:
        return self.last_layer.call(super().forward, tree_reads, hidden_states, *args, **kwargs)

    def __reduce__(self) -> Any:
        """Pickled with the class that it extends, as its own is not in a module."""
        return _new_layer, (type(self).__bases__[1],), vars(self)


def _class_with_reads(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (_ReadsOnly, kind), {"__module__": kind.__module__})


def _new_layer(kind: type[nn.Module]) -> nn.Module:
    """Without its state, which follows."""
    with_reads = _class_with_reads(kind)
    return with_reads.__new__(with_reads)
