from dataclasses import dataclass, field
from typing import ClassVar


@dataclass
class NCCLTrainerInitInfo:
    backend: ClassVar[str] = "nccl"
    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    rank: int = field(kw_only=True)
