"""What `treeward plan` says of communication, against what two processes send."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from treeward.config.load import load_run
from treeward.parallel.mesh import make_mesh
from treeward.planning.plan import plan
from treeward.planning.runs import Filling, planned_run
from treeward.planning.tracker import Tracker

BUDGET, MEAN = 512, 170  # two comparisons of 255 tokens in a micro-batch


def sent(file: str, overrides: list[str], budget: int, mean_tokens: int) -> int:
    """Bytes that this process sends in one step."""
    config = load_run(file, overrides)
    mesh = make_mesh(config.policy.dtensor_cfg)
    run = planned_run(config, mesh, Filling.of(budget, 2, mean_tokens))  # type: ignore[arg-type]
    run.step()
    with (tracker := Tracker(devices_per_node=2)):
        run.step()
    return sum(tracker.sent.values())


@pytest.mark.slow
def test_two_processes_send_what_is_planned(run_processes: Callable[..., list[Any]], tmp_path: Path) -> None:
    """By the shapes of real tensors; tests/planning counts by hand."""
    model = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    policy = {"model_config": model, "train_micro_batch_tokens": BUDGET, "max_total_sequence_length": BUDGET}
    policy["train_global_batch_size"] = 8  # two micro-batches a share, as are planned
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"policy": policy, "data": {"train_data_path": "train.jsonl"}}), encoding="utf-8")
    overrides = ["cluster.gpus_per_node=2"]
    planned = plan(load_run(file, overrides), "cpu", mean_tokens=MEAN)
    for num_bytes in run_processes("test_planned_calls:sent", 2, str(file), overrides, BUDGET, MEAN):
        assert num_bytes == pytest.approx(planned.sent["in the node"], rel=0.02)
