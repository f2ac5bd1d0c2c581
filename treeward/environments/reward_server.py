"""`RewardServer`: a reward model that `treeward serve` runs, in the place of the workers of an environment.

    server = RewardServer(RewardClient("http://host:8000"))      # asks /v1/models, so the server must be there
    server.score(conversations)                                  # raw scores
    server.rewards(conversations, env_infos)                     # after the shaping that the model is served with

A request that fails gives no numbers: its conversations have None and the reason. A server that refuses the client, and
one that serves another model than at the start, raise `ModelError`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from treeward.client.rewards import RewardClient
from treeward.config.reward_environments import RewardModelEnvironmentConfig
from treeward.environments.completions import plain
from treeward.environments.interface import WHERE, Infos
from treeward.errors import ConfigError, ModelError
from treeward.http import RewardServerError
from treeward.openai_client import key_from
from treeward.scoring.score import Conversation, Reward, Score

logger = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 600.0
_READ = {
    *("enabled", "model_names", "served_model", "token_env", "tokenizer", "reward_model_cfg"),
    *("reward_shaping", "max_retries", "worker_timeout_seconds", "on_failure"),
}
"""The keys of a section that count with a server."""


class RewardServer:
    """The model of a client. Raises `RewardServerError` where the server is not there, and `ConfigError` where it does
    not have the model.
    """

    def __init__(self, client: RewardClient) -> None:
        self.client = client
        self.model = self._described()

    @classmethod
    def connect(cls, config: RewardModelEnvironmentConfig) -> RewardServer:
        """The server at `config.url`. Raises `ConfigError` for a token that is not in the environment."""
        if unread := sorted(config.model_fields_set - _READ):
            logger.info("%s is a server: %s of its clients have no effect.", config.url, ", ".join(unread))
        client = RewardClient(
            str(config.url),
            token=key_from(config.token_env, where=WHERE, field="token_env"),
            model=config.served_model,
            max_retries=config.max_retries,
            timeout_seconds=config.worker_timeout_seconds or _TIMEOUT_SECONDS,
        )
        return cls(client)

    @property
    def identity(self) -> str:
        """The hashes of the model's scoring contract and shaping; its address where it has no contract."""
        place = f"{self.client.url} {self.model['id']}"
        return f"contract {self.model['contract'] or place}, shaping {self.model['shaping_sha256']}"

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Raw scores in order; None with the reason in `Score.error` where there is none."""
        return [reward.score for reward in self._rewards(conversations, shaped=False)]

    def rewards(self, conversations: Sequence[Conversation], env_infos: Infos) -> list[Reward]:
        """Rewards in order, after the shaping that the model is served with; None with the reason."""
        key = self.model["reference_key"]
        references = None if key is None else [plain(info.get(key)) for info in env_infos]
        return self._rewards(conversations, reference_answers=references)

    def shutdown(self) -> None:
        """Close the connections."""
        self.client.close()

    def _rewards(self, conversations: Sequence[Conversation], **options: Any) -> list[Reward]:
        try:
            if (now := self._described()) != self.model:
                summary, got, need = "the server has another model than before", json.dumps(now), json.dumps(self.model)
                raise ModelError(summary, where=self.client.url, got=got, need=need)
            return self.client.detailed_rewards(conversations, on_error="mask", **options)
        except RewardServerError as error:
            if error.status in (401, 403, 404):  # it would refuse every later request too
                raise ModelError(error.summary, where=error.where, got=error.got, fix=error.fix) from error
            why = f"{error.where}: {error.summary} ({error.got})"
            return [Reward(None, Score(None, error=why), error=why) for _ in conversations]

    def _described(self) -> dict[str, Any]:
        """What rewards depend on, as /v1/models has it."""
        url, name, listed = self.client.url, self.client.model, self.client.models()
        found = next((one for one in listed if name is None or name in (one["id"], one.get("root"))), {})
        if "contract" not in found:  # other servers list models too
            got, fix = f"models {', '.join(one['id'] for one in listed)}", "name one of its models as served_model"
            need = f"a `treeward serve` with {name or 'a model'}"
            raise ConfigError("the server does not have this reward model", where=url, got=got, need=need, fix=fix)
        return {key: found.get(key) for key in ("id", "contract", "shaping_sha256", "reference_key")}
