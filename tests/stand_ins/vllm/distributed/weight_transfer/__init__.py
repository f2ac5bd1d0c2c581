"""The two sides of the weight transfer: `WeightTransferTrainerFactory` in the trainer, `receive` in
an engine.

With `ipc` the weights travel in the updates themselves, and with `nccl` on a connection to each
worker of each engine, whose ranks must be 1 to world_size - 1. Both send buckets of at most
BUCKET_BYTES.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch
from torch import Tensor, distributed

BUCKET_BYTES = 16_384

Weights = list[tuple[str, Tensor]]
Reader = Callable[[Mapping[str, Any]], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Weights]:
    held: Weights = []
    for name, weight in weights:
        if held and sum(one.nbytes for _, one in held) + weight.nbytes > BUCKET_BYTES:
            yield held
            held = []
        held.append((name, weight.detach().clone()))
    yield held


def packed(weights: Weights) -> bytes:
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Weights:
    found: Weights = torch.load(io.BytesIO(data))
    return found


class WeightTransferTrainerFactory:
    @staticmethod
    def trainer_init(init_info: Any, *, client: Any, source: Any) -> _Trainer:
        assert init_info.packed
        if init_info.rank:
            return _Trainer(None, source)
        if init_info.backend == "ipc":
            client.init_weight_transfer_engine({"packed": True})
            return _Trainer(client, source)
        listener = Listener((init_info.master_address, init_info.master_port))
        told = {**{k: v for k, v in asdict(init_info).items() if k != "rank"}, "rank_offset": 1}
        thread = threading.Thread(target=client.init_weight_transfer_engine, args=(told,))
        thread.start()
        workers = [listener.accept() for _ in range(init_info.world_size - 1)]
        thread.join()
        assert sorted(worker.recv() for worker in workers) == list(range(1, init_info.world_size))
        return _Trainer(client, source, workers)


@dataclass
class _Trainer:
    client: Any
    """None on all processes of the trainer but the first: they only iterate the source, and wait
    for each other."""
    source: Any
    workers: list[Connection] | None = None

    def send_weights(self) -> None:
        if self.client is None:
            assert list(self.source)
        else:
            self._send()
        if distributed.is_initialized():
            distributed.barrier()

    def _send(self) -> None:
        self.client.start_weight_update()
        if self.workers is None:
            for bucket in buckets(self.source):
                self.client.update_weights(
                    {"names": [name for name, _ in bucket], "ipc_handles": packed(bucket)}
                )
        else:
            declared = self.source.metadata()
            names = {"names": [one.name for one in declared]}
            thread = threading.Thread(target=self.client.update_weights, args=(names,))
            thread.start()
            sent = []
            for bucket in buckets(self.source):
                sent += [
                    ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in bucket
                ]
                for worker in self.workers:
                    worker.send_bytes(packed(bucket))
            assert sent == declared, "what is sent is not what was declared"
            thread.join()
        self.client.finish_weight_update()


def receive(
    backend: str, info: Mapping[str, Any], size: int
) -> Callable[[Mapping[str, Any]], Iterator[tuple[str, Tensor]]]:
    """The function of an engine of `size` workers that reads an update."""
    if backend == "ipc":
        assert info == {"packed": True}
        return lambda update: iter(unpacked(update["ipc_handles"]))
    workers = [Client((info["master_address"], info["master_port"])) for _ in range(size)]
    for rank, worker in enumerate(workers, start=info["rank_offset"]):
        worker.send(rank)

    def read(update: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        missing = set(update["names"])
        while missing:
            for bucket in [unpacked(worker.recv_bytes()) for worker in workers][:1]:
                missing -= {name for name, _ in bucket}
                yield from bucket

    return read
