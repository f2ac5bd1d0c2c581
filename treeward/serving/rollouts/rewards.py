"""Where the rewards of rollouts come from: a server's `/v1/rewards`, or a reward model in this process.

rewards = LocalRewards(make_service(config))        # or RemoteRewards(endpoint, model=None)
await rewards.identity()                            # what the rewards depend on, to refuse mixing
added = await rewards.of(messages, row)             # the keys that NeMo Gym's /verify adds to a rollout
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from treeward.data.preference import Message
from treeward.data.responses_items import conversation_of
from treeward.errors import ModelError
from treeward.scoring.score import Score
from treeward.serving.dialects.nemo_gym import verdict
from treeward.serving.refusals import Refusal
from treeward.serving.rollouts.requests import Endpoint, RequestFailed, get, post
from treeward.serving.service import Answer, Service

__all__ = ["LocalRewards", "RemoteRewards", "RewardSource"]

_SECONDS = 24 * 3600.0


class RewardSource(Protocol):
    """Gives rollouts their rewards."""

    async def identity(self) -> dict[str, Any]:
        """What the rewards depend on: the same gives the same rewards."""
        ...

    async def of(
        self, params: Mapping[str, Any], output: Sequence[Mapping[str, Any]], row: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What is added to the rollout. Raises `RequestFailed` where there is no reward, and `DataError`."""
        ...

    async def close(self) -> None:
        """End what runs for it."""


class LocalRewards:
    """A reward model in this process; rollouts that end together are scored together."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def identity(self) -> dict[str, Any]:
        model = self.service.engine.model(None)
        is_one = len(model.contracts) == 1 and len(model.contracts[0].heads) == 1
        return _identity(model.name, model.contract_sha256, model.shaping_sha256, is_one=is_one)

    async def of(
        self, params: Mapping[str, Any], output: Sequence[Mapping[str, Any]], row: Mapping[str, Any]
    ) -> dict[str, Any]:
        model = self.service.engine.model(None)
        messages = conversation_of(params, output, developer=model.developer_role)
        references = None if model.reference_key is None else [row.get(model.reference_key)]
        try:
            [answer] = await self.service.answer(
                None, [messages], deadline=time.monotonic() + _SECONDS, reference_answers=references
            )
        except Refusal as refusal:
            raise RequestFailed(refusal.message) from refusal
        return _verdict(answer, row)

    async def close(self) -> None:
        await self.service.engine.close(0.0)


class RemoteRewards:
    """A treeward server. `rewards` is its `/v1/rewards`, `models` its `/v1/models`; `model`: None for its first."""

    def __init__(self, rewards: Endpoint, models: Endpoint, *, model: str | None = None) -> None:
        self.rewards, self.models, self.model = rewards, models, model
        self._served: Mapping[str, Any] | None = None

    @classmethod
    def at(cls, endpoint: Endpoint, *, model: str | None = None) -> RemoteRewards:
        """`endpoint`: of the server's `/v1`."""
        rewards, models = (replace(endpoint, url=f"{endpoint.url}/{name}") for name in ("rewards", "models"))
        return cls(rewards, models, model=model)

    async def identity(self) -> dict[str, Any]:
        one = await self._model()
        is_one = len(one.get("members", ())) == 1 and len(one.get("heads", ())) == 1
        return _identity(one["id"], one.get("contract"), one.get("shaping_sha256"), is_one=is_one)

    async def _model(self) -> Mapping[str, Any]:
        """What the server says of the model, asked once."""
        if self._served is not None:
            return self._served
        try:
            listed = (await get(self.models))["data"]
            served = {one["id"]: one for one in listed}
        except (RequestFailed, KeyError, TypeError) as error:
            raise ModelError(
                "the server of the rewards does not say which models it has",
                where=self.models.url,
                got=str(error),
                need="a running `treeward serve`",
            ) from error
        name = self.model or next(iter(served), None)
        if name is None or name not in served:
            raise ModelError(
                "the server has no such reward model",
                where=self.models.url,
                got=self.model,
                need=", ".join(served) or "a model",
            )
        self._served = served[name]
        return self._served

    async def of(
        self, params: Mapping[str, Any], output: Sequence[Mapping[str, Any]], row: Mapping[str, Any]
    ) -> dict[str, Any]:
        served = await self._model()
        messages: list[Message] = conversation_of(params, output, developer=served.get("developer_role", "system"))
        body: dict[str, Any] = {"conversations": [messages], "model": self.model, "on_error": "mask"}
        if (key := served.get("reference_key")) is not None:
            body["reference_answers"] = [row.get(key)]
        answer = await post(self.rewards, body)
        try:
            [found] = answer["data"]
            score = Score(
                found["score"],
                found["num_tokens"],
                found["truncated"],
                heads=tuple(found.get("heads", ())),
                members=tuple(found.get("members", ())),
            )
            return _verdict(Answer(found["reward"], score, found["error"]), row)
        except (KeyError, TypeError, ValueError) as error:
            raise RequestFailed(f"{self.rewards.url} does not answer as a treeward server: {answer!r:.200}") from error

    async def close(self) -> None:
        pass


def _identity(name: str, contract: str | None, shaping: Any, *, is_one: bool) -> dict[str, Any]:
    """Of one model with one head the contract says it all, wherever it runs and whatever it is called there; what
    several become depends on a method as well, for which the name has to stand.
    """
    if contract is not None and shaping is None and is_one:
        return {"contract": contract}
    return {"model": name, "contract": contract, "shaping": shaping}


def _verdict(answer: Answer, row: Mapping[str, Any]) -> dict[str, Any]:
    if answer.value is None:
        raise RequestFailed(answer.error or "there is no reward")
    threshold = row.get("reward_threshold")
    return verdict(answer, threshold if isinstance(threshold, int | float) else None)
