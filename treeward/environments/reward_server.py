"""`RewardServer`: a reward model that `treeward serve` runs, in the place of the workers of an environment.

    server = RewardServer(RewardClient("http://host:8000"))      # asks /v1/models, so the server must be there
    server.rewards(conversations, env_infos)                     # after the shaping that the model is served with
    RewardServer(client, shaped=False).score(conversations)      # raw scores

A request that fails gives no numbers: its conversations have None and the reason. A server that refuses the client, and
one that has another model than at the start, raise `ModelError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treeward.client.rewards import RewardClient
from treeward.config.reward_environments import RewardModelEnvironmentConfig
from treeward.environments.completions import plain
from treeward.environments.interface import WHERE, Infos
from treeward.errors import ConfigError, ModelError
from treeward.http import RewardServerError
from treeward.openai_client import key_from
from treeward.scoring.score import Conversation, Reward, Score


class RewardServer:
    """The model of a client. `shaped`: its rewards are those of the shaping that it is served with.

    Raises `RewardServerError` for a server that is not there, and `ConfigError` for one that does not have the model.
    """

    def __init__(self, client: RewardClient, *, shaped: bool = True) -> None:
        self.client, self.shaped = client, shaped
        self.model = self._described()

    @classmethod
    def connect(cls, config: RewardModelEnvironmentConfig) -> RewardServer:
        """The server at `config.url`. Raises `ConfigError` for a token that is not in the environment."""
        token = key_from(config.token_env, where=WHERE, field="token_env")
        limits = {"max_retries": config.max_retries, "timeout_seconds": config.worker_timeout_seconds or 600.0}
        client = RewardClient(str(config.url), token=token, model=config.served_model, **limits)  # type: ignore[arg-type]
        return cls(client, shaped=config.shaping is None)

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Scores in order; None with the reason in `Score.error` where there is none."""
        return [reward.score for reward in self._rewards(conversations, None)]

    def rewards(self, conversations: Sequence[Conversation], env_infos: Infos) -> list[Reward]:
        """Rewards in order; None with the reason."""
        key = self.model["reference_key"]
        return self._rewards(conversations, None if key is None else [plain(info.get(key)) for info in env_infos])

    def shutdown(self) -> None:
        """Close the connections."""
        self.client.close()

    def _rewards(self, conversations: Sequence[Conversation], references: list[Any] | None) -> list[Reward]:
        options: dict[str, Any] = {"shaped": self.shaped, "on_error": "mask", "reference_answers": references}
        try:
            rewards = self.client.detailed_rewards(conversations, **options)
            now = self._described()  # afterwards, so that it is the model that has scored
        except RewardServerError as error:
            if error.status in (401, 403, 404):  # it would refuse every later request too
                raise ModelError(error.summary, where=error.where, got=error.got, fix=error.fix) from error
            why = f"{error.where}: {error.summary} ({error.got})"
            return [Reward(None, Score(None, error=why), error=why) for _ in conversations]
        if now != self.model:
            summary = "the server has another model than before, or serves it in another way"
            raise ModelError(summary, where=self.client.url, got=now, need=str(self.model))
        names = tuple(now["heads"])
        return [replace(one, score=replace(one.score, head_names=names)) for one in rewards]

    def _described(self) -> dict[str, Any]:
        """What rewards depend on, as /v1/models has it."""
        name, listed = self.client.model, self.client.models()
        found = next((one for one in listed if name in (None, one["id"])), {})
        if "identity" not in found:  # other servers list models too
            got, need = ", ".join(one["id"] for one in listed), f"a `treeward serve` with {name or 'a model'}"
            summary, fix = "the server does not have this reward model", "name one of its models as served_model"
            raise ConfigError(summary, where=self.client.url, got=f"models {got}", need=need, fix=fix)
        return {key: found[key] for key in ("id", "identity", "reference_key", "heads")}
