"""Planning an epoch on many processes: time, memory, and how even the micro-batches are.

    python benchmarks/planning.py [--comparisons 1_000_000] [--batch 1024] [--tokens 8192] [--ranks 1 8 64]

Every step of one epoch is planned from the sizes of its comparisons alone, as each process of a run
plans it: the order of the epoch, the sizes, the micro-batches of all ranks. The sizes are drawn:
log-normal, median 400 tokens, a tenth above 1100, as chats of a few turns are. Nothing is read or
computed.

`fill`: tokens of a micro-batch against the budget. `wait`: the time in which ranks wait for the one
with most tokens, by tokens, against a division into equal parts. `memory`: what the process holds
more than before, at its peak.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from treeward.tables import Column, results_table
from treeward.training.order import EpochOrder
from treeward.tree.plan import plan_micro_batches

_MEDIAN, _SPREAD, _LEAST, _MOST = 400, 0.8, 16, 8192


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--comparisons", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=1024, help="comparisons of a step")
    parser.add_argument("--tokens", type=int, default=8192, help="token budget of a micro-batch")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    arguments = parser.parse_args()
    before = peak_memory()
    sizes = draw_sizes(arguments.comparisons)
    order = EpochOrder([len(sizes)], seed=0)
    started = time.perf_counter()
    order.batch(0, arguments.batch)
    drawing = time.perf_counter() - started
    rows = [
        measure(sizes, order, arguments.batch, arguments.tokens, ranks) for ranks in arguments.ranks
    ]
    columns = [
        Column("ranks"),
        Column("seconds", title="seconds an epoch", format=".1f"),
        Column("ms", title="ms a step", format=".2f"),
        Column("micro_batches", title="micro-batches a step and rank", format=".2f"),
        Column("tokens", title="tokens of a micro-batch", format=".0f"),
        Column("fill", format=".0%"),
        Column("wait", format=".1%"),
        Column("worst", title="wait, worst step", format=".1%"),
    ]
    print(
        f"{arguments.comparisons:,} comparisons, {arguments.batch} a step, at most "
        f"{arguments.tokens} tokens"
    )
    print(results_table(rows, columns))
    memory = (peak_memory() - before) / 2**20
    print(
        f"order of the epoch: {drawing:.2f} s; memory: {memory:.0f} MiB, "
        f"{memory * 2**20 / len(sizes):.0f} bytes each"
    )


def draw_sizes(number: int) -> np.ndarray:
    """Tokens of each tree, int32 (N,)."""
    drawn = np.random.default_rng(0).standard_normal(number, dtype=np.float32)
    drawn *= _SPREAD
    np.exp(drawn, out=drawn)
    drawn *= _MEDIAN
    return drawn.clip(_LEAST, _MOST, out=drawn).astype(np.int32)


def measure(
    sizes: np.ndarray, order: EpochOrder, batch: int, max_tokens: int, ranks: int
) -> dict[str, Any]:
    seconds = 0.0
    waits = []
    num = 0
    total = 0
    steps = order.steps_per_epoch(batch)
    for step in range(steps):
        started = time.perf_counter()
        own = sizes[[row for _, row in order.batch(step, batch)]].tolist()
        plan = plan_micro_batches(own, max_tokens=max_tokens, num_ranks=ranks)
        seconds += time.perf_counter() - started
        loads = [sum(own[i] for i in members) for members in plan]
        longest = sum(max(together) for together in side_by_side(loads, ranks))
        waits.append(longest * ranks / sum(loads) - 1)
        num = num + len(plan)
        total = total + sum(loads)
    return {
        "ranks": ranks,
        "seconds": seconds,
        "ms": 1000 * seconds / steps,
        "micro_batches": num / steps / ranks,
        "tokens": total / num,
        "fill": total / num / max_tokens,
        "wait": float(np.mean(waits)),
        "worst": max(waits),
    }


def side_by_side(loads: list[int], ranks: int) -> Iterator[list[int]]:
    """The micro-batches that the ranks compute at the same time."""
    return (loads[i : i + ranks] for i in range(0, len(loads), ranks))


def peak_memory() -> int:
    """Bytes that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


if __name__ == "__main__":
    main()
