"""Run a coroutine to its end from anywhere, also where an event loop runs already (Ray's async actors, notebooks).

rewards = run_async(ask_all())
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["run_async"]

_T = TypeVar("_T")


def run_async(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """The result of the coroutine, which runs in an event loop and a thread of its own; its exceptions are raised.

    If the caller is interrupted, the coroutine is cancelled.
    """
    cancel: list[Callable[[], object]] = []

    async def cancellable() -> _T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
        return await coroutine

    with ThreadPoolExecutor(1, thread_name_prefix="treeward-async") as executor:
        future = executor.submit(lambda: asyncio.run(cancellable()))
        try:
            return future.result()
        except BaseException:
            if not future.done():
                for stop in cancel:
                    stop()
            raise
