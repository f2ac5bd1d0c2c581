"""`treeward plan`: parse, import, call, and print the memory that a run would take of its devices.

examples:
  treeward plan --config rm cluster.gpus_per_node=8
  treeward plan --config rm policy.model_name=Qwen/Qwen2.5-1.5B --gpu rtx4090
  treeward plan --config run.yaml --gpu a100 policy.dtensor_cfg.activation_checkpointing=true
  treeward plan --config run.yaml --json

The configuration is one of `treeward train` or `treeward grpo`. The command needs no GPU, no data
and no weights: it reads only the config.json of a model. The exit code is 0 if the run fits or may
fit, and 1 if it does not. docs/scaling.md explains the rows.
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

GpuName = Literal[
    "l4", "rtx4090", "rtx5090", "a100-40gb", "l40s", "a100", "h100", "h200", "b200", "cpu"
]


def run(
    config: ConfigFile,
    overrides: Overrides = None,
    gpu: Annotated[GpuName, typer.Option(help="The kind of GPU to plan for.")] = "h100",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print every number as JSON."),
    ] = False,
) -> int:
    loaded = load_run(config, overrides or [])
    # What a run would say of its models is no part of the plan.
    logging.getLogger("treeward").setLevel(logging.ERROR)

    from treeward.planning.plan import plan

    planned = plan(loaded, gpu)
    text = json.dumps(asdict(planned), indent=2) if as_json else plan_text(planned)
    sys.stdout.write(f"{text}\n")
    # So that a script can try sizes. Where nobody knows, the run itself has to tell.
    return 1 if planned.fits is False else 0


def plan_text(planned: Plan) -> str:
    """What one device holds."""
    rows = []
    for name, size in planned.memory.items():
        rows.append({"each device": name, "GB": size / 1e9})
    table = results_table(rows, ["each device", Column("GB", format=",.1f")])
    parameters = f"{planned.parameters / 1e9:,.2f} billion parameters"
    trained = f"{planned.trained / 1e6:,.0f} million trained"
    if planned.fits is not None:
        verdict = "fits" if planned.fits else "does not fit"
    elif planned.unknown is not None:
        verdict = f"may fit, as it is not known what {planned.unknown} keep"
    else:
        verdict = "may fit with fused kernels, but not with PyTorch's own functions"
    lines = [
        f"{planned.model}: {parameters}, {trained}",
        f"{planned.layout}: {verdict}",
        "",
        table,
        "",
        f"Tokens in a forward pass: {planned.micro_batch_tokens:,}",
    ]
    if planned.kernels is not None and planned.unknown is None:
        lines.append(
            "Activations of recurrent layers are those of PyTorch's own functions. Fused kernels "
            f"({planned.kernels}) keep others, which were not measured."
        )
    return "\n".join(lines)
