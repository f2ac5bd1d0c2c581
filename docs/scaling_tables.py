"""The tables of `treeward plan` in `docs/scaling.md`: planned anew, of the configurations that the
page shows.

CUDA_VISIBLE_DEVICES= python docs/scaling_tables.py       # writes docs/scaling.md
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treeward.config.load import load_run
from treeward.planning.plan import Plan, plan
from treeward.tables import Column, markdown_table

PAGE = Path(__file__).parent / "scaling.md"
_SIZES = ("weights", "gradients", "optimizer", "activations", "exchanged", "peak")
_COLUMNS = [
    Column("layout"),
    Column("change", "added to the command"),
    *(Column(name, f"{name}, GB", format=",.1f") for name in _SIZES),
    Column("fits"),
]
_CHECKPOINTING = "policy.dtensor_cfg.activation_checkpointing=true"
_LORA = "policy.dtensor_cfg.lora_cfg.enabled=true"
_8_BIT = "policy.optimizer.name=torchao.optim.AdamW8bit"
_NODE, _8_NODES = ("cluster.gpus_per_node=8",), ("cluster.gpus_per_node=8", "cluster.num_nodes=8")
LAYOUTS = {
    "llama_8b": [
        (),
        (_CHECKPOINTING, _8_BIT),
        _NODE,
        (*_8_NODES, "policy.dtensor_cfg.dp_replicate_size=8"),
    ],
    "llama_70b": [
        (),
        _NODE,
        (*_NODE, _LORA),
        _8_NODES,
        (*_8_NODES, "policy.dtensor_cfg.tensor_parallel_size=8"),
    ],
}
"""By configuration, the overrides of each row."""


def planned(page: str) -> str:
    """The page with its tables, between `<!-- begin NAME -->` and `<!-- end NAME -->`, planned
    anew."""
    for name, layouts in LAYOUTS.items():
        block = re.search(rf"```yaml\n(# {name}\.yaml\n.*?)```", page, re.DOTALL)
        assert block is not None, name
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"{name}.yaml"
            file.write_text(block[1], encoding="utf-8")
            rows = [
                _row(plan(load_run(file, overrides), "h100"), overrides) for overrides in layouts
            ]
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, rest = page.split(begin, 1)
        page = f"{head}{begin}\n{markdown_table(rows, _COLUMNS)}\n{end}{rest.split(end, 1)[1]}"
    return page


def _row(found: Plan, overrides: Sequence[str]) -> dict[str, Any]:
    change = " ".join(f"`{one}`" for one in overrides if "cluster" not in one)
    row = {"layout": found.layout, "change": change, "exchanged": 0.0, "fits": found.fits}
    return row | {name: size / 1e9 for name, size in found.memory.items()}


if __name__ == "__main__":
    PAGE.write_text(planned(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
