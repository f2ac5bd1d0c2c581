"""`RewardSource`: the rewards of rollouts, from a reward model in this process or from a server that runs one.

source = local_rewards(make_service(config))        # or await remote_rewards(connection, model=None)
source.identity                                     # what the rewards depend on: rewards of two are not mixed
added = await source.judge(params, output, row)     # the keys that NeMo Gym's /verify adds to a rollout
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeward.data.preference import Message
from treeward.data.responses_items import conversation_of
from treeward.errors import DataError
from treeward.http import Connection
from treeward.scoring.score import Reward, Score
from treeward.serving.api_error import APIError
from treeward.serving.dialects.nemo_gym import verdict
from treeward.serving.service import Service

__all__ = ["RewardSource", "local_rewards", "remote_rewards"]

_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class RewardSource:
    """`ask`: the reward of one conversation, given its reference answers; made by the functions below.

    `developer_role`: what a developer's messages become. `reference_key`: the key of a row with the references.
    """

    identity: Mapping[str, Any]
    ask: Callable[[list[Message], Any], Awaitable[Reward]]
    developer_role: str = "system"
    reference_key: str | None = None

    async def judge(
        self, params: Mapping[str, Any], output: Sequence[Mapping[str, Any]], row: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The keys to add to the rollout. Raises `DataError` without a reward, and `RewardServerError`."""
        messages = conversation_of(params, output, developer=self.developer_role)
        reward = await self.ask(messages, None if self.reference_key is None else row.get(self.reference_key))
        if reward.value is None:
            raise DataError(reward.error or "there is no reward")
        threshold = row.get("reward_threshold")
        return verdict(reward, threshold if isinstance(threshold, int | float) else None)


def local_rewards(service: Service) -> RewardSource:
    """A reward model in this process; rollouts that end together are scored together."""
    model = service.model(None)

    async def ask(messages: list[Message], references: Any) -> Reward:
        given = None if model.reference_key is None else [references]
        deadline = time.monotonic() + _SECONDS
        try:
            [reward] = await service.rewards(
                model, [messages], deadline=deadline, reference_answers=given, on_error="mask"
            )
        except APIError as error:
            raise DataError(error.message) from error
        return reward

    is_single = len(model.contracts) == 1 and len(model.contracts[0].heads) == 1
    identity = _identity(model.name, model.contract_sha256, model.shaping_sha256, is_single=is_single)
    return RewardSource(identity, ask, model.developer_role, model.reference_key)


async def remote_rewards(
    connection: Connection, *, model: str | None = None, timeout_seconds: float = 600.0
) -> RewardSource:
    """A running `treeward serve`. `model`: None for its first. Raises `RewardServerError`."""

    def until() -> float:
        return time.monotonic() + timeout_seconds

    listed = await connection.get("/v1/models", until=until())
    try:
        served = {one["id"]: one for one in listed.json["data"]}
        found = served[model or next(iter(served))]
    except (LookupError, TypeError, StopIteration) as error:
        raise listed.error("the server has no such reward model", got=model, need=f"one of {listed.json}") from error

    async def ask(messages: list[Message], references: Any) -> Reward:
        body = {"conversations": [messages], "model": model, "on_error": "mask"}
        if found.get("reference_key") is not None:
            body["reference_answers"] = [references]
        reply = await connection.post("/v1/rewards", json.dumps(body).encode(), until=until())
        try:
            [row] = reply.json["data"]
            heads, members = tuple(row.get("heads", ())), tuple(row.get("members", ()))
            score = Score(row["score"], row["num_tokens"], row["truncated"], heads=heads, members=members)
            return Reward(row["reward"], score, error=row["error"])
        except (KeyError, TypeError, ValueError) as error:
            raise reply.error("this is no answer of treeward serve", got=reply.json) from error

    is_single = len(found.get("members", ())) == 1 and len(found.get("heads", ())) == 1
    identity = _identity(found["id"], found.get("contract"), found.get("shaping_sha256"), is_single=is_single)
    return RewardSource(identity, ask, found.get("developer_role", "system"), found.get("reference_key"))


def _identity(name: str, contract: str | None, shaping: Any, *, is_single: bool) -> dict[str, Any]:
    """The contract identifies one model with one head, wherever it runs. An ensemble's method is not in its contract,
    so its name is compared too.
    """
    if contract is not None and shaping is None and is_single:
        return {"contract": contract}
    return {"model": name, "contract": contract, "shaping": shaping}
