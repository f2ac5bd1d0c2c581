"""`collect`: rollouts of a policy with their rewards, each on the disk as soon as it is made.

    outcome = await collect(tasks, policy, await Rewards.of(client), Path("out/rollouts.jsonl"), num_repeats=4)
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

from treeward.client.rewards import AsyncRewardClient
from treeward.data.responses_items import conversation_of
from treeward.errors import CheckpointError, ConfigError, DataError
from treeward.http import ServerError
from treeward.openai_client import check_listens
from treeward.resumable import ResumableRows, resumable_rows
from treeward.serving.dialects.nemo_gym import verdict
from treeward.serving.rollouts.policy import Policy, Task
from treeward.serving.rollouts.statistics import ROLLOUT_INDEX, TASK_INDEX, aggregate_metrics, reward_profiles
from treeward.storage import write_text

_WRONG_SETTING = frozenset({401, 403, 404, 405})
"""Every request would be refused with these: they end the run."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """The rewards of rollouts. `served`: the model as /v1/models has it."""

    client: AsyncRewardClient
    served: Mapping[str, Any]

    @classmethod
    async def of(cls, client: AsyncRewardClient) -> Rewards:
        """Raises `RewardServerError`, and `ConfigError` for a model that the server does not have."""
        listed = {one["id"]: one for one in await client.models()}
        name = client.model or next(iter(listed), None)
        if name not in listed:
            raise ConfigError("the server has no such reward model", got=name, need=f"one of {', '.join(listed)}")
        return cls(client, listed[name])

    @property
    def identity(self) -> dict[str, Any]:
        """What the rewards depend on. The contract identifies one model with one head, wherever it runs. An ensemble's
        method is not in its contract, so its name is compared too.
        """
        contract, shaping = self.served.get("contract"), self.served.get("shaping_sha256")
        is_single = len(self.served.get("members", ())) == 1 and len(self.served.get("heads", ())) == 1
        if contract is not None and shaping is None and is_single:
            return {"contract": contract}
        return {"model": self.served["id"], "contract": contract, "shaping": shaping}

    async def judge(
        self, params: Mapping[str, Any], output: Sequence[Mapping[str, Any]], row: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The keys that NeMo Gym's /verify adds. Raises `DataError` without a reward, and `RewardServerError`."""
        messages = conversation_of(params, output, developer=self.served.get("developer_role", "system"))
        key = self.served.get("reference_key")
        references = None if key is None else [row.get(key)]
        [reward] = await self.client.detailed_rewards([messages], reference_answers=references, on_error="mask")
        if reward.value is None:
            raise DataError(reward.error or "there is no reward")
        threshold = row.get("reward_threshold")
        return verdict(reward, threshold if isinstance(threshold, int | float) else None)


@dataclass(slots=True)
class Collected:
    """`num_kept`: rollouts of earlier runs. `metrics`: as `aggregate_metrics` gives them."""

    num_done: int = 0
    num_failed: int = 0
    num_kept: int = 0
    first_failure: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)


def _beside(output: Path, name: str) -> Path:
    """`rollouts_failures.jsonl` beside `rollouts.jsonl`."""
    return output.with_name(f"{output.stem}_{name}")


def check_free(output: Path, *, resume: bool) -> None:
    """Raises `ConfigError` where there are rollouts and `resume` is not set."""
    if not resume and output.exists() and output.stat().st_size > 0:
        need = "another --output, or --resume to go on with them"
        raise ConfigError("there are rollouts already", where=str(output), need=need)


async def collect(
    tasks: Sequence[Task],
    policy: Policy,
    rewards: Rewards | None,
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
        "rewards": None if rewards is None else rewards.identity,
    }
    planned = {(task.index, task.copy * num_repeats + i): task for task in tasks for i in range(num_repeats)}
    with resumable_rows(
        output, identity, lambda row, where: _kept(row, where, planned), identity_path=_beside(output, "settings.json")
    ) as rows:
        measured = dict(rows.kept)
        outcome = Collected(num_kept=len(measured))
        todo = [key for key in planned if key not in measured]
        if todo:  # a complete run needs no policy
            await check_listens(policy.client)
        with _beside(output, "failures.jsonl").open("w", encoding="utf-8") as stream:
            failures: ResumableRows[Any] = ResumableRows([], stream, output)
            waiting = iter(todo)

            async def work() -> None:
                for key in waiting:
                    row, reason = await _rollout(planned[key], key[1], policy, rewards)
                    if reason is None:
                        rows.add(row)
                        measured[key] = _measured(row)
                        outcome.num_done += 1
                    else:
                        failures.add(row)
                        outcome.num_failed += 1
                        outcome.first_failure = outcome.first_failure or reason
                    advance(outcome)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(work())
            except ExceptionGroup as several:
                raise several.exceptions[0] from None
    numbers = list(measured.values())
    outcome.metrics = aggregate_metrics(numbers)
    write_text(_beside(output, "aggregate_metrics.json"), json.dumps(outcome.metrics, indent=2) + "\n")
    profiles = [json.dumps(one, ensure_ascii=False) + "\n" for one in reward_profiles(numbers)]
    write_text(_beside(output, "reward_profiles.jsonl"), "".join(profiles))
    return outcome


async def _rollout(
    task: Task, index: int, policy: Policy, rewards: Rewards | None
) -> tuple[dict[str, Any], str | None]:
    """A rollout, and why it failed. Raises `ServerError` for what is wrong for every request."""
    row = {**task.row, "responses_create_params": task.params, TASK_INDEX: task.index, ROLLOUT_INDEX: index}
    failure = "agent_request_failed"
    try:
        row["response"] = await policy.complete(task)
        failure = "verifier_error"
        if rewards is not None:
            row |= await rewards.judge(task.params, row["response"]["output"], task.row)
    except (ServerError, DataError) as error:
        if isinstance(error, ServerError) and error.status in _WRONG_SETTING:
            raise
        reason = " ".join(str(error).split())
        return row | {"_ng_failure_class": failure, "failure_kind": failure, "failure_reason": reason}, reason
    return row, None


def _kept(row: Any, where: str, planned: Mapping[tuple[int, int], Task]) -> tuple[tuple[int, int], dict[str, Any]]:
    try:
        key, params = (int(row[TASK_INDEX]), int(row[ROLLOUT_INDEX])), row["responses_create_params"]
    except (LookupError, TypeError, ValueError) as error:
        raise DataError("this is no rollout", where=where, got=str(row)[:80], need=f"a row with {error}") from error
    task = planned.get(key)
    if task is not None and json.loads(json.dumps(task.params, default=str)) != params:
        summary, fix = "the rollout is of another row than the input has there", "resume with the same input"
        raise CheckpointError(summary, where=where, got=params, need=f"that of {task.where}", fix=fix)
    return key, _measured(row)


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a rollout that the statistics read, without the texts and token ids of thousands of rollouts."""
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    response = row.get("response")
    usage = response.get("usage") if isinstance(response, dict) else None
    return numbers | {"responses_create_params": row.get("responses_create_params"), "response": {"usage": usage}}
