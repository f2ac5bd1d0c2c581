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
    with _within(Row(layout)):
        yield


def current() -> Row | None:
    """The row that is computed; None outside of `over`."""
    return _current.get()


def checkpointing() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of PyTorch's activation checkpointing: nothing for the forward pass, and its
    row for the recomputation, which runs in the backward pass, outside of `over`.
    """
    return contextlib.nullcontext(), _within(current())


@contextlib.contextmanager
def _within(row: Row | None) -> Iterator[None]:
    token = _current.set(row)
    try:
        yield
    finally:
        _current.reset(token)
