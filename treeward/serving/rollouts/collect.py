"""`collect`: rollouts of a policy with their rewards, each on the disk as soon as it is made.

    outcome = await collect(tasks, policy, rewards, Path("out/rollouts.jsonl"), num_repeats=4)
    outcome.num_done, outcome.num_failed

Beside `rollouts.jsonl` lie `rollouts_failures.jsonl` with the rollouts that failed and why,
`rollouts_aggregate_metrics.json`, `rollouts_reward_profiles.jsonl`, and `rollouts_settings.json` with what the rollouts
depend on: rollouts of other settings are refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treeward.errors import CheckpointError, ConfigError, DataError
from treeward.http import ServerError
from treeward.openai_client import check_listens
from treeward.resumable import ResumableRows, resumable_rows
from treeward.serving.rollouts.policy import Policy
from treeward.serving.rollouts.profiles import ROLLOUT_INDEX, TASK_INDEX, aggregate_metrics, reward_profiles
from treeward.serving.rollouts.rewards import RewardSource
from treeward.serving.rollouts.rows import Task
from treeward.storage import write_text

__all__ = ["Collected", "beside", "check_free", "collect"]

_WRONG_SETTING = frozenset({401, 403, 404, 405})
"""Every request would be refused with these: they end the run."""


@dataclass(slots=True)
class Collected:
    """`num_kept`: rollouts of earlier runs. `metrics`: as `aggregate_metrics` gives them."""

    num_done: int = 0
    num_failed: int = 0
    num_kept: int = 0
    first_failure: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)


def beside(output: Path, what: str, suffix: str) -> Path:
    """`rollouts_failures.jsonl` beside `rollouts.jsonl`."""
    return output.with_name(f"{output.stem}_{what}{suffix}")


def check_free(output: Path, *, resume: bool) -> None:
    """Raises `ConfigError` where there are rollouts and `resume` is not set."""
    if not resume and output.exists() and output.stat().st_size > 0:
        need = "another --output, or --resume to go on with them"
        raise ConfigError("there are rollouts already", where=str(output), need=need)


async def collect(
    tasks: Sequence[Task],
    policy: Policy,
    rewards: RewardSource | None,
    output: Path,
    *,
    num_repeats: int = 1,
    concurrency: int = 16,
    resume: bool = False,
    advance: Callable[[Collected], None] = lambda _: None,
) -> Collected:
    """Make the rollouts that are missing. `rewards`: None for none. `advance` is called after each rollout.

    Raises `DataError` for a row that cannot be sent, before any is; `CheckpointError` for rollouts of other rows or
    settings; `ConfigError` where there are rollouts and `resume` is not set; `ServerError` for an address, a token or a
    model that is wrong for every request.
    """
    check_free(output, resume=resume)
    for task in tasks:
        policy.request(task)
    identity = {
        "model": policy.model,
        "api": policy.api,
        "sampling": dict(policy.sampling),
        "rewards": None if rewards is None else dict(rewards.identity),
    }
    planned = {(task.index, repeat): task for task in tasks for repeat in task.rollout_indices(num_repeats)}
    settings = beside(output, "settings", ".json")
    with resumable_rows(
        output, identity, lambda row, where: _kept(row, where, planned), identity_path=settings
    ) as rows:
        measured = dict(rows.kept)
        outcome = Collected(num_kept=len(measured))
        todo = [key for key in planned if key not in measured]
        if todo:  # a complete run needs no policy
            await check_listens(policy.client)
        with beside(output, "failures", ".jsonl").open("w", encoding="utf-8") as stream:
            run = _Run(policy, rewards, rows, ResumableRows([], stream, output), outcome, measured)
            waiting = iter(todo)

            async def work() -> None:
                for key in waiting:
                    await run.make(planned[key], key[1])
                    advance(outcome)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(work())
            except ExceptionGroup as several:
                raise several.exceptions[0] from None
    outcome.metrics = aggregate_metrics(list(measured.values()))
    write_text(
        beside(output, "aggregate_metrics", ".json"), json.dumps(outcome.metrics, indent=2, ensure_ascii=False) + "\n"
    )
    profiles = [json.dumps(one, ensure_ascii=False) + "\n" for one in reward_profiles(list(measured.values()))]
    write_text(beside(output, "reward_profiles", ".jsonl"), "".join(profiles))
    return outcome


@dataclass(frozen=True, slots=True)
class _Run:
    policy: Policy
    rewards: RewardSource | None
    rows: ResumableRows[Any]
    failures: ResumableRows[Any]
    outcome: Collected
    measured: dict[tuple[int, int], dict[str, Any]]

    async def make(self, task: Task, rollout_index: int) -> None:
        indices = {TASK_INDEX: task.index, ROLLOUT_INDEX: rollout_index}
        row: dict[str, Any] = {**task.row, "responses_create_params": task.params, **indices}
        failure = "agent_request_failed"
        try:
            row["response"] = await self.policy.complete(task)
            failure = "verifier_error"
            if self.rewards is not None:
                row |= await self.rewards.judge(task.params, row["response"]["output"], task.row)
        except (ServerError, DataError) as error:
            if isinstance(error, ServerError) and error.status in _WRONG_SETTING:
                raise
            reason = " ".join(str(error).split())
            self.failures.add({**row, "_ng_failure_class": failure, "failure_kind": failure, "failure_reason": reason})
            self.outcome.num_failed += 1
            self.outcome.first_failure = self.outcome.first_failure or reason
            return
        self.rows.add(row)
        self.measured[task.index, rollout_index] = _measured(row)
        self.outcome.num_done += 1


def _kept(row: Any, where: str, planned: Mapping[tuple[int, int], Task]) -> tuple[tuple[int, int], dict[str, Any]]:
    key = (row.get(TASK_INDEX), row.get(ROLLOUT_INDEX)) if isinstance(row, dict) else (None, None)
    if not isinstance(key[0], int) or not isinstance(key[1], int):
        raise DataError("this is no rollout", where=where, got=str(row)[:80], need=f"{TASK_INDEX} and {ROLLOUT_INDEX}")
    task = planned.get((key[0], key[1]))
    if task is not None and json.loads(json.dumps(task.params, default=str)) != row.get("responses_create_params"):
        raise CheckpointError(
            "the rollout is of another row than the input has there",
            where=where,
            field="responses_create_params",
            got=row.get("responses_create_params"),
            need=f"that of {task.where}",
            fix="go on with the same input, or choose another --output",
        )
    return (key[0], key[1]), _measured(row)


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a rollout that the statistics read, without the texts and token ids of thousands of rollouts."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    response = row.get("response")
    usage = response.get("usage") if isinstance(response, dict) else None
    return numbers | {"responses_create_params": row.get("responses_create_params"), "response": {"usage": usage}}
