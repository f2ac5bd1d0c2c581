"""`GPUS`: bytes of memory by name, of NVIDIA's data sheets.

A100 80GB SXM (2021), H100 SXM (2023), H200 (2024), HGX B200 (2024), L40S (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

GpuName = Literal["a100", "b200", "h100", "h200", "l40s", "cpu"]

RESERVED = 0.05
"""Share of the memory for CUDA's context, libraries' workspaces and fragmentation."""

GPUS: Mapping[str, float] = {"a100": 80e9, "h100": 80e9, "h200": 141e9, "b200": 180e9, "l40s": 48e9}
