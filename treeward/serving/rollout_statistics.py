"""Statistics of rollouts, of all and of each prompt, under the names that NeMo Gym gives them.

    aggregate_metrics(rows)["key_metrics"]["mean/reward"]

Every top-level number of a row is taken, and those of `response.usage`; True is 1. Keys that begin with `_` are not
measurements, and rows with `mask_sample` have none: they are counted and left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TASK_INDEX = "_ng_task_index"
ROLLOUT_INDEX = "_ng_rollout_index"

Row = Mapping[str, Any]


def aggregate_metrics(rows: Sequence[Row]) -> dict[str, Any]:
    """`agent_metrics` of all rows, `key_metrics` (their means), and `group_level_metrics` of each prompt in order."""
    groups = _by_task(rows)
    metrics = _describe(row for group in groups.values() for row in group)
    num_measured = sum(map(len, groups.values()))
    coverage: dict[str, Any] = {}
    if num_measured < len(rows):
        coverage = {
            "coverage/measured_rollouts": num_measured,
            "coverage/masked_rollouts": len(rows) - num_measured,
        }
    return {
        "group_level_metrics": [{TASK_INDEX: task} | _describe(group) for task, group in groups.items()],
        "agent_metrics": metrics | coverage,
        "key_metrics": {name: value for name, value in metrics.items() if name.startswith("mean/")} | coverage,
    }


def _by_task(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """The rows that are not masked by their task, in the order of tasks and rollouts."""
    groups: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (_index(row, TASK_INDEX), _index(row, ROLLOUT_INDEX))):
        if not row.get("mask_sample"):
            groups.setdefault(_index(row, TASK_INDEX), []).append(row)
    return groups


def _index(row: Row, key: str) -> int:
    """0 where there is none, as NeMo Gym has it."""
    return row[key] if isinstance(row.get(key), int) else 0


def _describe(rows: Iterable[Row]) -> dict[str, float]:
    """`mean/x`, `max/x`, `min/x`, `median/x` and `std/x` of every number x; the deviation of a sample, 0 of one."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        response = row.get("response")
        usage = response.get("usage") if isinstance(response, Mapping) else None
        for name, value in {**row, **(usage if isinstance(usage, Mapping) else {})}.items():
            # Sums of squares of larger numbers are not finite.
            if isinstance(value, int | float) and abs(value) < 1e150 and name != "mask_sample" and name[:1] != "_":
                columns.setdefault(name, []).append(float(value))
    found: dict[str, float] = {}
    for name, values in columns.items():
        found |= {
            f"mean/{name}": statistics.fmean(values),
            f"max/{name}": max(values),
            f"min/{name}": min(values),
            f"median/{name}": float(statistics.median(values)),
            f"std/{name}": statistics.stdev(values) if len(values) > 1 else 0.0,
        }
    return found
