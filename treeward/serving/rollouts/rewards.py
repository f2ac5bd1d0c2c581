"""`RewardSource`: the rewards of rollouts, from a reward model in this process or from a server that runs one.

source = local_rewards(make_service(config))        # or await remote_rewards(client)
source.identity                                     # what the rewards depend on: rewards of two are not mixed
added = await source.judge(params, output, row)     # the keys that NeMo Gym's /verify adds to a rollout
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treeward.client.rewards import AsyncRewardClient
from treeward.data.preference import Message
from treeward.data.responses_items import conversation_of
from treeward.errors import ConfigError, DataError
from treeward.scoring.score import Reward
from treeward.serving.api_error import APIError
from treeward.serving.dialects.nemo_gym import verdict
from treeward.serving.operations import description
from treeward.serving.service import Service

__all__ = ["RewardSource", "local_rewards", "remote_rewards"]

_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class RewardSource:
    """`ask`: the reward of one conversation, given its reference answers. `served`: the model as /v1/models has it."""

    served: Mapping[str, Any]
    ask: Callable[[list[Message], Any], Awaitable[Reward]]

    @property
    def identity(self) -> dict[str, Any]:
        """The contract identifies one model with one head, wherever it runs. An ensemble's method is not in its
        contract, so its name is compared too.
        """
        contract, shaping = self.served.get("contract"), self.served.get("shaping_sha256")
        is_single = len(self.served.get("members", ())) == 1 and len(self.served.get("heads", ())) == 1
        if contract is not None and shaping is None and is_single:
            return {"contract": contract}
        return {"model": self.served["id"], "contract": contract, "shaping": shaping}

    async def judge(
        self, params: Mapping[str, Any], output: Sequence[Mapping[str, Any]], row: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The keys to add to the rollout. Raises `DataError` without a reward, and `RewardServerError`."""
        messages = conversation_of(params, output, developer=self.served.get("developer_role", "system"))
        key = self.served.get("reference_key")
        reward = await self.ask(messages, None if key is None else row.get(key))
        if reward.value is None:
            raise DataError(reward.error or "there is no reward")
        threshold = row.get("reward_threshold")
        return verdict(reward, threshold if isinstance(threshold, int | float) else None)


def local_rewards(service: Service) -> RewardSource:
    """A reward model in this process; rollouts that end together are scored together."""
    model = service.model(None)

    async def ask(messages: list[Message], references: Any) -> Reward:
        try:
            [reward] = await service.rewards(
                model,
                [messages],
                deadline=time.monotonic() + _SECONDS,
                reference_answers=None if references is None else [references],
                on_error="mask",
            )
        except APIError as error:
            raise DataError(error.message) from error
        return reward

    return RewardSource(description(model, created=0), ask)


async def remote_rewards(client: AsyncRewardClient) -> RewardSource:
    """A running `treeward serve`. Raises `RewardServerError`, and `ConfigError` for a model that it does not have."""
    listed = {one["id"]: one for one in await client.models()}
    name = client.model or next(iter(listed), None)
    if name not in listed:
        raise ConfigError("the server has no such reward model", got=name, need=f"one of {', '.join(listed)}")

    async def ask(messages: list[Message], references: Any) -> Reward:
        given = None if references is None else [references]
        [reward] = await client.detailed_rewards([messages], reference_answers=given, on_error="mask")
        return reward

    return RewardSource(listed[name], ask)
