"""Statistics of rollouts, of all and of each prompt, under the names that NeMo Gym gives them.

    aggregate_metrics(rows)["key_metrics"]["mean/reward"]
    reward_profiles(rows)[0]["rewards"]              # of the first prompt

Every top-level number of a row is taken, and those of `response.usage`; True is 1. Keys that begin with `_` are not
measurements, and rows with `mask_sample` have none: they are counted and left out.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["ROLLOUT_INDEX", "TASK_INDEX", "aggregate_metrics", "describe_numbers", "reward_profiles"]

TASK_INDEX = "_ng_task_index"
ROLLOUT_INDEX = "_ng_rollout_index"


def aggregate_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`agent_metrics` of all rows, `key_metrics` (their means), and `group_level_metrics` of each prompt in order."""
    if not rows:
        return {"group_level_metrics": [], "agent_metrics": {}, "key_metrics": {}}
    measured = [row for row in rows if not row.get("mask_sample")]
    metrics: dict[str, Any] = describe_numbers(measured)
    tasks, measured_tasks = ({_index(row, TASK_INDEX) for row in part} for part in (rows, measured))
    coverage: dict[str, Any] = {}
    if len(measured) < len(rows):
        coverage = {
            "coverage/measured_rollouts": len(measured),
            "coverage/masked_rollouts": len(rows) - len(measured),
            "coverage/measured_tasks": len(measured_tasks),
            "coverage/fully_masked_tasks": len(tasks - measured_tasks),
        }
    means = {name: value for name, value in metrics.items() if name.startswith("mean/")}
    groups = [{TASK_INDEX: task} | describe_numbers(group) for task, group in _by_task(measured)]
    repeats = {"num_repeats": len({_index(row, ROLLOUT_INDEX) for row in rows})} if measured else {}
    return {
        "group_level_metrics": groups,
        "agent_metrics": metrics | coverage | repeats,
        "key_metrics": means | coverage,
    }


def reward_profiles(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each prompt, in order: what was asked, its rewards in the order of the rollouts, and their statistics."""
    profiles = []
    for task, group in _by_task([row for row in rows if not row.get("mask_sample")]):
        ordered = sorted(group, key=lambda row: _index(row, ROLLOUT_INDEX))
        profiles.append(
            {
                TASK_INDEX: task,
                "input": (ordered[0].get("responses_create_params") or {}).get("input"),
                "num_rollouts": len(ordered),
                "rewards": [row.get("reward") for row in ordered],
            }
            | describe_numbers(ordered)
        )
    return profiles


def describe_numbers(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """`mean/x`, `max/x`, `min/x`, `median/x` and `std/x` of every number x; the deviation of a sample, 0 of one."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        response = row.get("response")
        usage = response.get("usage") if isinstance(response, Mapping) else None
        for name, value in {**row, **(usage if isinstance(usage, Mapping) else {})}.items():
            if isinstance(value, int | float) and math.isfinite(value) and not name.startswith("_"):
                columns.setdefault(name, []).append(float(value))
    columns.pop("mask_sample", None)
    found: dict[str, float] = {}
    for name, values in columns.items():
        with contextlib.suppress(OverflowError):  # numbers near the largest have no finite statistics
            found |= {
                f"mean/{name}": statistics.fmean(values),
                f"max/{name}": max(values),
                f"min/{name}": min(values),
                f"median/{name}": float(statistics.median(values)),
                f"std/{name}": statistics.stdev(values) if len(values) > 1 else 0.0,
            }
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _by_task(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, list[Mapping[str, Any]]]]:
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(_index(row, TASK_INDEX), []).append(row)
    return sorted(groups.items())


def _index(row: Mapping[str, Any], key: str) -> int:
    """0 where there is none, as NeMo Gym has it."""
    index = row.get(key)
    return index if isinstance(index, int) else 0
