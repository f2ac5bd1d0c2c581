"""`GPUS`: what a plan must know of a GPU.

    GPUS["h100"].memory         # bytes

Memory, dense bfloat16 operations and memory bandwidth are those of NVIDIA's data sheets: A100 80GB SXM (2021), H100 SXM
(2023), H200 (2024), HGX B200 (2024), L40S (2023); float32 is that of CUDA cores, as `matmul_precision: highest` uses.
`link` is NVLink in one direction, half of the data sheets' sum of both (L40S: PCIe 4.0 x16). `network` assumes one
adapter of 400 Gb/s a GPU, as NVIDIA's DGX H100 has (L40S: 200 Gb/s).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GpuName = Literal["a100", "b200", "h100", "h200", "l40s", "cpu"]

EFFICIENCY = 0.4
"""Share of the peak operations that training reaches: torchtitan's Llama-3.1-8B on 8 and 128 H100 with FSDP and
torch.compile (benchmarks/llama3_h100_202412_torchtitan.md: 39 % of the model's operations)."""
BANDWIDTH_EFFICIENCY = 0.8
"""Share of a link's bandwidth that a large collective reaches; a round number for NCCL."""
RESERVED = 0.05
"""Share of the memory for CUDA's context, libraries' workspaces and fragmentation."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory`: bytes; `bfloat16`, `float32`: operations a second; `link`, `network`: bytes a second to a device of
    the same node, and to one of another node."""

    memory: float
    bfloat16: float
    float32: float
    link: float
    network: float

    @property
    def usable(self) -> int:
        """Bytes that a run may take."""
        return int(self.memory * (1 - RESERVED))


GPUS: Mapping[str, Gpu] = {
    "a100": Gpu(80e9, 312e12, 19.5e12, 300e9, 50e9),
    "h100": Gpu(80e9, 989e12, 67e12, 450e9, 50e9),
    "h200": Gpu(141e9, 989e12, 67e12, 450e9, 50e9),
    "b200": Gpu(180e9, 2250e12, 75e12, 900e9, 50e9),
    "l40s": Gpu(48e9, 362e12, 91.6e12, 32e9, 25e9),
}
