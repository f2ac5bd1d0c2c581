"""Two processes against one: the same run of the quickstart, with a larger model, by torchrun in
turns.

    python benchmarks/two_processes.py [--rounds 3] [--steps 8]

Each process has one thread on a CPU, or one GPU. Both runs see the same data and are to have the
same losses; a step's tokens are those of plain rows. Two processes send over gloo, on a CPU, what a
fast network would carry between GPUs, so this shows that nothing is computed twice and what the
exchange costs, not how GPUs scale.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from treeward.tables import Column, results_table
from treeward.training.tracking import read_metrics

_QUICKSTART = Path(__file__).parents[1] / "examples" / "configs" / "quickstart.yaml"
_SKIPPED = 2  # steps that warm up


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=512)
    arguments = parser.parse_args()
    rates: dict[int, list[float]] = {1: [], 2: []}
    losses: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.rounds):
            for number in rates if turn % 2 == 0 else reversed(rates):
                lines = run(
                    Path(folder), f"{number}_{turn}", number, arguments.steps, arguments.hidden_size
                )
                rates[number].append(
                    statistics.median(tokens_per_second(line) for line in lines[_SKIPPED:])
                )
                losses[number] = [line["train/rm/loss"] for line in lines]
    rows = [
        {"processes": number, "tokens": statistics.median(found)} for number, found in rates.items()
    ]
    print(
        results_table(
            rows, [Column("processes"), Column("tokens", title="tokens a second", format=",.0f")]
        )
    )
    ratios = [two / one for one, two in zip(rates[1], rates[2], strict=True)]
    off = max(abs(one - two) for one, two in zip(losses[1], losses[2], strict=True))
    print(
        f"two processes against one: {statistics.median(ratios):.2f}x ({min(ratios):.2f} to "
        f"{max(ratios):.2f})"
    )
    print(f"largest difference of a step's loss: {off:.1e}")


def run(
    folder: Path, name: str, num_processes: int, steps: int, hidden_size: int
) -> list[dict[str, float]]:
    """The metrics of each step of a run."""
    own = folder / name
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(num_processes),
    ]
    settings = [
        *(
            f"rm.max_num_steps={steps}",
            "rm.val_period=null",
            "rm.val_at_end=false",
            "rm.max_num_epochs=4",
        ),
        *(
            f"policy.model_config.hidden_size={hidden_size}",
            "policy.model_config.num_hidden_layers=6",
        ),
        *("policy.optimizer.kwargs.lr=1e-5", "checkpointing.enabled=false"),
        "checkpointing.metric_name=null",
        *(f"data.cache_dir={folder}/cache", f"logger.log_dir={own}/logs"),
    ]
    command = [*torchrun, "-m", "treeward", "train", "--config", str(_QUICKSTART), *settings]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    return [
        line for line in read_metrics(own / "logs" / "metrics.jsonl") if "train/rm/loss" in line
    ]


def tokens_per_second(line: dict[str, float]) -> float:
    return line["timing/train/row_tokens_per_second"]


if __name__ == "__main__":
    main()
