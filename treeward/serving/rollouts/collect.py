"""`collect`: rollouts of a policy with their rewards, each on the disk as soon as it is there.

    outcome = await collect(tasks, policy, rewards, Files("out/rollouts.jsonl"), settings)
    outcome.num_done, outcome.num_failed

Beside `rollouts.jsonl` lie `rollouts_failures.jsonl` with what has no rollout or no reward and why,
`rollouts_aggregate_metrics.json`, `rollouts_reward_profiles.jsonl`, and `rollouts_settings.json`, which says what the
rollouts were made with, so that a run that is continued does not mix them.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from treeward.errors import CheckpointError, ConfigError, DataError
from treeward.evaluation.kept_rows import read_kept
from treeward.serving.rollouts.policy import Policy
from treeward.serving.rollouts.profiles import ROLLOUT_INDEX, TASK_INDEX, aggregate_metrics, reward_profiles
from treeward.serving.rollouts.requests import RequestFailed
from treeward.serving.rollouts.rewards import RewardSource
from treeward.serving.rollouts.rows import Job, Task, plan

__all__ = ["Collected", "Files", "Settings", "check_free", "collect"]

logger = logging.getLogger(__name__)

Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Settings:
    """`num_repeats`: rollouts of each row; `concurrency`: of them at one time; `resume`: go on with what is there."""

    num_repeats: int = 1
    concurrency: int = 16
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one collection; `output` ends with .jsonl."""

    output: Path

    def beside(self, what: str, suffix: str) -> Path:
        return self.output.with_name(f"{self.output.stem}_{what}{suffix}")


@dataclass(slots=True)
class Collected:
    """`metrics` as `aggregate_metrics` gives them; `num_kept` rollouts were there before."""

    num_done: int = 0
    num_failed: int = 0
    num_kept: int = 0
    first_failure: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)


async def collect(
    tasks: Sequence[Task],
    policy: Policy,
    rewards: RewardSource | None,
    files: Files,
    settings: Settings,
    *,
    advance: Callable[[Collected], None] = lambda _: None,
) -> Collected:
    """Make every rollout that is not there yet. `rewards`: None leaves them without. `advance` is told of each.

    Raises `DataError` for a row that the policy cannot be asked, before anything is; `CheckpointError` for rollouts of
    other rows or settings; `ConfigError` where there are rollouts and nothing says to go on; `ModelError` as `post`.
    """
    for task in tasks:
        policy.request(task)
    identity = {
        "model": policy.model,
        "api": policy.api,
        "sampling": dict(policy.sampling),
        "rewards": None if rewards is None else await rewards.identity(),
    }
    jobs = list(plan(tasks, num_repeats=settings.num_repeats))
    numbers = _claim(files, identity, {job.key: job.task for job in jobs}, resume=settings.resume)
    done = {(row[TASK_INDEX], row[ROLLOUT_INDEX]) for row in numbers}
    outcome = Collected(num_kept=len(done))
    todo = [job for job in jobs if job.key not in done]
    async with AsyncExitStack() as stack:
        if rewards is not None:
            stack.push_async_callback(rewards.close)
        if todo:  # a run that is complete needs nobody
            await policy.check_listens()
        waiting = iter(todo)
        output = stack.enter_context(_writer(files.output, "a"))
        failures = stack.enter_context(_writer(files.beside("failures", ".jsonl"), "w"))
        worker = _Worker(policy, rewards, output, failures, outcome, numbers, advance)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(settings.concurrency):
                    group.create_task(worker.run(waiting))
        except ExceptionGroup as several:  # one mistake stops all; the first to be noticed is the one to tell
            raise several.exceptions[0] from None
    outcome.metrics = _write_statistics(files, numbers)
    return outcome


@dataclass(slots=True)
class _Worker:
    policy: Policy
    rewards: RewardSource | None
    output: TextIO
    failures: TextIO
    outcome: Collected
    numbers: list[dict[str, Any]]
    advance: Callable[[Collected], None]

    async def run(self, jobs: Iterator[Job]) -> None:
        for job in jobs:
            await self._one(job)
            self.advance(self.outcome)

    async def _one(self, job: Job) -> None:
        indices = {TASK_INDEX: job.task.index, ROLLOUT_INDEX: job.rollout_index}
        row: dict[str, Any] = {**job.task.row, "responses_create_params": job.task.params, **indices}
        try:
            row["response"] = await self.policy.answer(job.task)
        except RequestFailed as error:
            self._failed(row, "agent_request_failed", str(error))
            return
        if self.rewards is not None:
            try:
                row |= await self.rewards.of(job.task.params, row["response"]["output"], job.task.row)
            except (RequestFailed, DataError) as error:
                self._failed(row, "verifier_error", " ".join(str(error).split()))
                return
        _write(self.output, row)
        self.numbers.append(_measured(row))
        self.outcome.num_done += 1

    def _failed(self, row: Mapping[str, Any], failure: str, reason: str) -> None:
        _write(self.failures, {**row, "_ng_failure_class": failure, "failure_kind": failure, "failure_reason": reason})
        self.outcome.num_failed += 1
        self.outcome.first_failure = self.outcome.first_failure or reason


def check_free(files: Files, *, resume: bool) -> bool:
    """Whether there are rollouts already. Raises `ConfigError` where there are and nothing says to go on with them."""
    there = files.output.exists() and files.output.stat().st_size > 0
    if there and not resume:
        raise ConfigError(
            "there are rollouts already",
            where=str(files.output),
            need="another --output, or --resume to go on with them",
        )
    return there


def _claim(
    files: Files, identity: Mapping[str, Any], tasks: Mapping[Key, Task], *, resume: bool
) -> list[dict[str, Any]]:
    """Make the files those of this collection; what is measured of the rollouts that are there."""
    settings_file = files.beside("settings", ".json")
    try:
        files.output.parent.mkdir(parents=True, exist_ok=True)
        if check_free(files, resume=resume):
            _check_same(settings_file, identity)
            found: dict[Key, dict[str, Any]] = {}
            for key, measured in read_kept(files.output, lambda row, where: _kept(row, where, tasks)):
                found.setdefault(key, measured)
            return list(found.values())
        text = json.dumps(identity, indent=2, ensure_ascii=False) + "\n"
        settings_file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(files.output, error) from error
    return []


def _check_same(file: Path, identity: Mapping[str, Any]) -> None:
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            "nothing says what the rollouts were made with",
            where=str(file),
            got=str(error),
            fix="choose another --output",
        ) from error
    now = json.loads(json.dumps(identity))
    before = before if isinstance(before, dict) else {}
    differing = [key for key in now if before.get(key) != now[key]]
    if differing:
        key = differing[0]
        raise CheckpointError(
            "the rollouts were made with other settings",
            where=str(file),
            field=key,
            got=json.dumps(now[key]),
            need=json.dumps(before.get(key)),
            fix="go on with the same settings, or choose another --output",
        )


def _kept(row: Any, where: str, tasks: Mapping[Key, Task]) -> tuple[Key, dict[str, Any]]:
    key = (row.get(TASK_INDEX), row.get(ROLLOUT_INDEX)) if isinstance(row, dict) else (None, None)
    if not isinstance(key[0], int) or not isinstance(key[1], int):
        raise DataError("this is no rollout", where=where, got=str(row)[:80], need=f"{TASK_INDEX} and {ROLLOUT_INDEX}")
    task = tasks.get((key[0], key[1]))
    if task is not None and json.loads(json.dumps(task.params, default=str)) != row.get("responses_create_params"):
        raise CheckpointError(
            "the rollout is of another row than the input has there",
            where=where,
            field="responses_create_params",
            got=str(row.get("responses_create_params"))[:200],
            need=f"that of {task.where}",
            fix="go on with the same input, or choose another --output",
        )
    return (key[0], key[1]), _measured(row)


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the statistics read of a rollout, without the texts and token ids of thousands of them."""
    kept = {name: value for name, value in row.items() if isinstance(value, int | float)}
    response = row.get("response")
    usage = response.get("usage") if isinstance(response, dict) else None
    return kept | {"responses_create_params": row.get("responses_create_params"), "response": {"usage": usage}}


def _write_statistics(files: Files, numbers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    metrics = aggregate_metrics(numbers)
    try:
        text = json.dumps(metrics, indent=2, ensure_ascii=False) + "\n"
        files.beside("aggregate_metrics", ".json").write_text(text, encoding="utf-8")
        profiles = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in reward_profiles(numbers))
        files.beside("reward_profiles", ".jsonl").write_text(profiles, encoding="utf-8")
    except OSError as error:
        raise _unwritable(files.output, error) from error
    return metrics


def _writer(path: Path, mode: str) -> TextIO:
    try:
        return open(path, mode, encoding="utf-8")  # type: ignore[return-value]
    except OSError as error:
        raise _unwritable(path, error) from error


def _write(stream: TextIO, row: Mapping[str, Any]) -> None:
    try:
        stream.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        stream.flush()
    except OSError as error:
        raise _unwritable(Path(stream.name), error) from error


def _unwritable(path: Path, error: OSError) -> DataError:
    return DataError(
        "the rollouts cannot be written",
        where=str(path),
        got=str(error),
        need="a folder that can be written, and room in it",
        fix="make room, and start the same command again with --resume",
    )
