"""The processes of a run, and what they tell each other; in a run of one process all of this costs
nothing.

    with joined():                      # under torchrun or Ray Train; else this process is alone
        if is_main(): ...
        sizes = gather(len(rows))       # of every process, in the order of their ranks
        name = broadcast(name)          # that of the main process
        sums = summed(sums)             # a tensor, over all processes
        on_main(lambda: write(file))    # its error is raised on each

Every process runs the same code (SPMD), and all of them make the same calls in the same order.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from treeward.errors import LostProcessError

_T = TypeVar("_T")

SILENT_SECONDS = 10.0
"""How long a process waits for the others before it says so."""
_UNSET = "For a run of one process: unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT"

# A global, because the error of a process that hangs is made far from where it works.
work = "the set-up"
"""The work of this process, as `doing` has it."""


def rank() -> int:
    """The number of this process, from 0."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def size() -> int:
    """How many processes there are."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def is_main() -> bool:
    """Whether this is the process that prints, tracks and writes what is written once."""
    return rank() == 0


def device() -> torch.device:
    """This process's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # A launcher may show each process only its own GPU.
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


@contextmanager
def joined(*, timeout: timedelta = timedelta(minutes=30)) -> Iterator[None]:
    """Within it the processes that a launcher has started (RANK, WORLD_SIZE, MASTER_ADDR, ...) are
    one run.

    A process group that exists already, as in a worker of Ray Train, is used. `timeout`: how long a
    process waits for the others in a collective call before it ends with an error.
    """
    # Empty counts as unset, as for all variables of a shell.
    if distributed.is_initialized() or int(os.environ.get("WORLD_SIZE") or "1") == 1:
        yield
        return
    own_device = device()
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    backend = "gloo"
    if own_device.type == "cuda":
        # Both: tensors of the host (checkpoints, Python objects) are exchanged by gloo.
        backend = "cpu:gloo,cuda:nccl"
    reminder = threading.Timer(SILENT_SECONDS, _say_what_is_waited_for)
    reminder.daemon = True
    reminder.start()
    try:
        distributed.init_process_group(backend, timeout=timeout)
    except (RuntimeError, ValueError) as error:  # a ValueError is of a variable that is missing
        raise LostProcessError(
            f"rank {os.environ.get('RANK')} has not found the other processes",
            got=str(error).strip().splitlines()[0],
            need=f"{os.environ['WORLD_SIZE']} processes within {timeout}",
            fix=f"start all of them; each must reach {_address()}. {_UNSET}",
        ) from error
    finally:
        reminder.cancel()
    try:
        yield
    except BaseException:
        # Destroying the group may wait for those that wait for this process. Leaving it as it is
        # may end the interpreter by SIGABRT.
        distributed.distributed_c10d._abort_process_group()
        raise
    distributed.destroy_process_group()


def _say_what_is_waited_for() -> None:
    """Not by logging: of several processes only the first shows its log, and this may be any."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    sys.stderr.write(
        f"Waiting for the other processes of this run at {_address()} ({variables}). {_UNSET}\n"
    )


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def gather(value: _T, group: ProcessGroup | None = None) -> list[_T]:
    """The values of all processes, in the order of their ranks; on each of them. They are
    pickled."""
    if size() == 1:
        return [value]
    values: list[_T | None] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)
    return cast(list[_T], values)


def broadcast(value: _T, group: ProcessGroup | None = None) -> _T:
    """The main process's value, on each process; what the others give is not looked at. It is
    pickled."""
    if size() == 1:
        return value
    values = [value]
    distributed.broadcast_object_list(values, src=0, group=group)
    return values[0]


def broadcast_tensor(tensor: Tensor | None, like: Tensor) -> Tensor:
    """The main process's tensor, on each process, with the shape and dtype of `like`; the others
    give None."""
    if size() == 1:
        assert tensor is not None
        return tensor
    shared = torch.empty(like.shape, dtype=like.dtype, device=device())
    if tensor is not None:
        shared.copy_(tensor)
    # As bytes: gloo has no int16 and no float8.
    distributed.broadcast(shared.reshape(-1).view(torch.uint8), src=0)
    return shared


def on_main(function: Callable[[], _T], group: ProcessGroup | None = None) -> _T:
    """What `function` returns on the main process, which alone calls it; an error there is raised
    on each."""
    if size() == 1:
        return function()
    outcome: tuple[_T | None, Exception | None] = (None, None)
    if is_main():
        outcome = _outcome(function)
    result, error = broadcast(outcome, group)
    if error is not None:
        raise error
    return cast(_T, result)


def together(function: Callable[[], _T]) -> _T:
    """What `function` returns here; where it fails on one process, all raise the error of the first
    such."""
    if size() == 1:
        return function()
    result, own_error = _outcome(function)
    # Every process raises the same error, or none: one that went on alone would wait for ever in
    # its next collective call.
    for error in gather(own_error):
        if error is not None:
            raise error
    return cast(_T, result)


def _outcome(function: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """The result or the error; of an error that cannot be pickled the text."""
    try:
        return function(), None
    except Exception as error:
        try:
            # Back, too: an error whose constructor takes other arguments than its text is pickled,
            # and fails where it is read.
            pickle.loads(pickle.dumps(error))
            return None, error
        except Exception:
            return None, RuntimeError(f"{type(error).__name__}: {error}")


def summed(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The sum over the processes, on the same device; of a single process the tensor itself."""
    if size() == 1:
        return tensor
    total = tensor.detach().clone()
    distributed.all_reduce(total, group=group)
    return total


@contextmanager
def patience() -> Iterator[ProcessGroup | None]:
    """A group of all processes for `on_main`, whose others wait as long as it takes: tokenizing may
    take hours."""
    if size() == 1:
        yield None
        return
    group = distributed.new_group(timeout=timedelta(days=7), backend="gloo")
    yield group
    distributed.destroy_process_group(group)


def fails_first() -> bool:
    """Whether no other process has said so before; it works while collective calls hang."""
    if size() == 1:
        return True
    own_rank = str(rank())
    try:
        # The store of the process group is a server of its own, which answers while the group's
        # collective calls hang. It keeps the first value that anybody sets.
        store: Any = distributed.distributed_c10d._get_default_store()
        first = store.compare_set("treeward/fails_first", "", own_rank).decode()
        return bool(first == own_rank)
    except RuntimeError:
        # Rank 0 keeps the store, and is gone: the next one speaks for all.
        return rank() == 1


def doing(what: str) -> None:
    """Note the work of this process, as "step 5", for the error of a process that waits in vain."""
    global work
    work = what
