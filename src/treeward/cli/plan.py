"""`treeward plan`: parse, import, call, and print the memory that a run would take of its devices.

examples:
  treeward plan --config rm cluster.gpus_per_node=8
  treeward plan --config run.yaml --gpu a100 policy.dtensor_cfg.activation_checkpointing=true
  treeward plan --config run.yaml --json

A run of `treeward train` or `treeward grpo`. No GPU, data or weights are needed: of a model the config.json alone.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from treeward.cli.options import ConfigFile, Overrides
from treeward.config.load import load_run
from treeward.tables import Column, results_table

if TYPE_CHECKING:
    from treeward.planning.plan import Plan

GpuName = Literal["a100", "b200", "h100", "h200", "l40s", "cpu"]


def run(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Annotated[GpuName, typer.Option(help="What every device is.")] = "h100",
    as_json: Annotated[bool, typer.Option("--json", help="Every number as JSON on standard output.")] = False,
) -> int:
    loaded = load_run(config, overrides or [])
    logging.getLogger("treeward").setLevel(logging.ERROR)  # what a run says of its models

    from treeward.planning.plan import plan

    planned = plan(loaded, gpu)
    sys.stdout.write((json.dumps(asdict(planned), indent=2) if as_json else plan_text(planned)) + "\n")
    return 0 if planned.fits else 1


def plan_text(planned: Plan) -> str:
    """What one device holds."""
    table = [{"of a device": name, "GB": size / 1e9} for name, size in planned.memory.items()]
    lines = [
        f"{planned.model}: {planned.parameters / 1e9:,.2f} billion parameters, "
        f"{planned.trained / 1e6:,.0f} million trained",
        f"{planned.layout}: {'fits' if planned.fits else 'does not fit'}",
        "",
        results_table(table, ["of a device", Column("GB", format=",.1f")]),
        "",
        f"A micro-batch has {planned.micro_batch_tokens:,} tokens.",
    ]
    return "\n".join(lines)
