from dataclasses import dataclass
from typing import ClassVar


@dataclass(kw_only=True)
class IPCTrainerInitInfo:
    backend: ClassVar[str] = "ipc"
    rank: int
    packed: bool = False
