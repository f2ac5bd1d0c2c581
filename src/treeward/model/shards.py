"""Writing and reading sharded tensors, each process its part.

    write_tensors(folder, {"hf.score.weight.exp_avg": sharded, ...})    # every process calls it
    read_tensors(folder, {"hf.score.weight.exp_avg": sharded})          # in place, in any layout
    put(parameter, whole)                   # fill this process's part from a whole tensor

The files are safetensors, by PyTorch's `HuggingFaceStorageWriter`, which uses no pickle.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from treeward import processes

_FILE_BYTES = 250 * 1000**2
"""The size of a process's file of tensors, which is in memory while it is written."""


def write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, each process its parts; tensors that are not sharded are written once. An
    error of one process is raised on all."""
    # A process may have tensors that others do not; the numbers of the files are the same on each.
    sizes: dict[str, int] = {}
    for rank_sizes in processes.gather({name: tensor.nbytes for name, tensor in tensors.items()}):
        sizes.update(rank_sizes)
    file_of = {}
    total_bytes = 0
    for name, num_bytes in sizes.items():
        total_bytes += num_bytes
        # A file of this number has a part from each process, of `_FILE_BYTES` each.
        file_of[name] = 1 + total_bytes // (_FILE_BYTES * processes.size())
    writer = HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=file_of, save_distributed=True
    )
    if sizes:
        with _together():
            save(dict(tensors), storage_writer=writer)


def stored_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The sizes and dtypes of the whole tensors in a folder that `write_tensors` has written, by
    name."""
    stored: dict[str, tuple[torch.Size, torch.dtype]] = {}
    if not folder.is_dir():
        return stored
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            stored[name] = (entry.size, entry.properties.dtype)
    return stored


def read_tensors(folder: Path, targets: Mapping[str, Tensor]) -> None:
    """Read into tensors, each process its parts. An error of one process is raised on all."""
    if targets:
        with _together():
            load(dict(targets), storage_reader=HuggingFaceStorageReader(str(folder)))


@contextlib.contextmanager
def _together() -> Iterator[None]:
    with warnings.catch_warnings():
        # a run of one process
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        # It is no `Exception`. Every process gets one, with the errors of all.
        except CheckpointException as error:
            rank, (first, _) = next(iter(error.failures.items()))
            if processes.size() > 1 and isinstance(first, OSError):
                first = OSError(f"rank {rank}: {first}")
            raise first from error


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; every process calls it."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor


def own_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This process's part, a view of the tensor, and its place in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    sizes, starts = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    place = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return tensor.to_local(), tuple(place)


@torch.no_grad()
def put(tensor: Tensor, values: Tensor) -> None:
    """Fill this process's part of a tensor from the whole `values`."""
    part, place = own_part(tensor)
    part.copy_(values[place])
