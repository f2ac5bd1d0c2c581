from dataclasses import dataclass


@dataclass
class WeightTransferConfig:
    backend: str = "nccl"

    def __post_init__(self) -> None:
        assert self.backend in ("nccl", "ipc")
