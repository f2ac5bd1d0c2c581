"""The row of trees that a forward pass computes, for the layers that need its structure.

    with over(batch.layout):
        model(...)                      # its layers ask for current()

Attention reads the layout (`attention.py`), and recurrent layers the way of a state down a tree
(`mixers.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from treeward.tree.batch import TreeLayout
from treeward.tree.recurrence import Recurrence

_current: ContextVar[Row | None] = ContextVar("_current", default=None)


class Row:
    """A row of trees during one forward pass and its backward."""

    def __init__(self, layout: TreeLayout) -> None:
        self.layout = layout

    @cached_property
    def recurrence(self) -> Recurrence:
        """Its plans for recurrent layers, made once for all of them."""
        return Recurrence.of(self.layout)


@contextlib.contextmanager
def over(layout: TreeLayout) -> Iterator[None]:
    """A context in which models compute this row."""
    with _Within(Row(layout)):
        yield


def current() -> Row | None:
    """The row that is computed; None outside of `over`."""
    return _current.get()


def checkpointing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of PyTorch's activation checkpointing: nothing for the forward pass, and its
    row for the recomputation, which runs in the backward pass, outside of `over`.
    """
    if get_proxy_mode() is not None:
        # A compiled layer is traced. PyTorch refuses other contexts than these there, and has them
        # itself where no `context_fn` is given. Only layers of attention alone are traced whole
        # (`mixers._mix`), so nothing in the graph asks for a row.
        contexts: tuple[AbstractContextManager[None], AbstractContextManager[None]]
        contexts = create_selective_checkpoint_contexts(_recompute_all)
        return contexts
    return contextlib.nullcontext(), _Within(current())


def _recompute_all(*_: Any, **__: Any) -> CheckpointPolicy:
    """The policy of a selective checkpoint that keeps nothing."""
    return CheckpointPolicy.PREFER_RECOMPUTE


class _Within(AbstractContextManager[None]):
    """A context in which `row` is the current one. It can be entered again: with a graph that is
    retained, each backward pass recomputes.
    """

    def __init__(self, row: Row | None) -> None:
        self.row = row

    def __enter__(self) -> None:
        self._token = _current.set(self.row)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)
