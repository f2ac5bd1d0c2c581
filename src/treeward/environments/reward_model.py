"""`RewardModelEnvironment`: a reward model as the environment of an RL loop, in this process or in Ray actors.

    env = RewardModelEnvironment({"model_name": "results/rm/final", "batch_size": 32})
    env.step(message_logs, env_infos).rewards                                # float32 (B,)

    env = RewardModelEnvironment.remote(env_config)                          # the same, as a Ray actor
    ray.get(env.step.remote(message_logs, env_infos)).rewards

`env_config` is the section `env.reward_model` of an RL configuration: `RewardModelEnvironmentConfig`. Conversations are
rendered and read as in training, and a common prompt is computed once. Neither the number of replicas nor the other
conversations of a batch change a reward.

If `model_name` is the address of a `treeward serve`, the server scores (`RewardServer`). Several replicas are processes
of Ray Serve (`ReplicaPool`).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from treeward.client.rewards import RewardClient
from treeward.config.reward_environments import RewardModelEnvironmentConfig
from treeward.data.conversation import AnyConversation
from treeward.environments.interface import (
    WHERE,
    ConfiguredEnvironment,
    Conversations,
    Infos,
    Reward,
    conversation_of_log,
)
from treeward.environments.scoring_worker import ScoringWorker
from treeward.errors import ConfigError, ModelError, pip_install
from treeward.http import RewardServerError
from treeward.model.reward_model import RewardModel
from treeward.openai_client import key_from
from treeward.scoring.score import Score
from treeward.scoring.shaping import load_shaper, rewards_of

if TYPE_CHECKING:
    from treeward.environments.replicas import ReplicaPool


class RewardModelEnvironment(ConfiguredEnvironment[RewardModelEnvironmentConfig]):
    """Rewards conversations by a reward model.

    It runs in this process, or in replicas where the configuration asks for several, or where this process is a Ray
    actor without a GPU and the model needs one. Raises `ConfigError` for a faulty configuration or too few resources,
    `ModelError` for a model that cannot be loaded, `RewardServerError` for a server that does not respond.
    """

    name = "reward_model_env"
    section = RewardModelEnvironmentConfig

    def __init__(self, env_config: Mapping[str, Any] | RewardModelEnvironmentConfig) -> None:
        super().__init__(env_config)
        # steps may come from several threads; the model takes one at a time
        self._lock = threading.Lock()
        self._shaper = None if self.config.url else load_shaper(self.config)
        self._model: ScoringWorker | ReplicaPool | RewardServer | None
        if self.config.url is not None:
            self._model = RewardServer(self.config)
        elif _needs_ray(self.config):
            try:
                from treeward.environments.replicas import ReplicaPool
            except ImportError as error:
                fix = f"{pip_install('serve', 'ray')}, or use one replica"
                raise ConfigError(
                    "Ray Serve is not installed", where=WHERE, got=str(error), fix=fix
                ) from error
            self._model = ReplicaPool(self.config)
        else:
            on_gpu = self.config.resources.gpus_per_node > 0 and torch.cuda.is_available()
            self._model = ScoringWorker(self.config, "cuda" if on_gpu else "cpu")
            self._model.load()

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        with self._lock:
            model = self._running()
            if isinstance(model, RewardServer):
                rewards = model.rewards(conversations)
            else:
                rewards = rewards_of(model.score(conversations), conversations, self._shaper)
        return [
            replace(reward, components={**reward.components, **reward.score.parts})
            for reward in rewards
        ]

    def preprocess_data(
        self, message_logs: Sequence[Sequence[Mapping[str, Any]]]
    ) -> dict[str, Tensor]:
        """The model's input: `{"input_ids": int64 (B, L), "input_lengths": int64 (B,)}`, right-padded.

        Raises `DataError` for a conversation that has no completion, cannot be rendered or is too long, and
        `ConfigError` if the model is not in this process.
        """
        return self._here("preprocess_data").preprocess(
            [conversation_of_log(log) for log in message_logs]
        )

    @property
    def reward_model_policy(self) -> RewardModel:
        """The model, if one runs in this process: its `score(preprocess_data(logs))["scores"]` are unshaped scores."""
        members = self._here("reward_model_policy").scorer.members
        if len(members) > 1 or members[0].steps is not None:
            summary = (
                "an ensemble and a process reward model are no model with a value of a conversation"
            )
            raise ConfigError(summary, field="model_name", got=list(self.config.models))
        return members[0].model

    def shutdown(self) -> bool:
        """Free the model and end its processes. Safe to repeat; a later step is an error."""
        model, self._model = self._model, None
        if model is not None:
            model.shutdown()
        return True

    def _running(self) -> ScoringWorker | ReplicaPool | RewardServer:
        if self._model is None:
            raise ModelError(
                "the environment was shut down", fix="make a new RewardModelEnvironment"
            )
        return self._model

    def _here(self, what: str) -> ScoringWorker:
        model = self._running()
        if isinstance(model, ScoringWorker):
            return model
        raise ConfigError(
            f"{what} needs the model in this process",
            got="a model in other processes, or at a server",
            fix="the folder of the model, and one replica",
        )


def _needs_ray(config: RewardModelEnvironmentConfig) -> bool:
    if config.needs_ray:
        return True
    if config.resources.gpus_per_node == 0 or torch.cuda.is_available():
        return False
    try:
        import ray
    except ImportError:
        return False
    # In an actor without a GPU torch sees none, though the machine may have some.
    inside = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    return inside and ray.cluster_resources().get("GPU", 0) > 0


class RewardServer:
    """The model of the server at `config.url`.

    Raises `RewardServerError` for a server that does not respond, and `ConfigError` for one without the model, or if
    the environment variable of the token is not set.
    """

    def __init__(self, config: RewardModelEnvironmentConfig) -> None:
        token = key_from(config.token_env, where=WHERE, field="token_env")
        self.client = RewardClient(
            str(config.url),
            token=token,
            model=config.served_model,
            max_retries=config.max_retries,
            timeout_seconds=config.worker_timeout_seconds or 600.0,
        )
        self.model = self._described()

    def rewards(self, conversations: Sequence[AnyConversation]) -> list[Reward]:
        """The server's rewards in order; None with the reason."""
        try:
            rewards = self.client.rewards(conversations, on_error="mask")
            description = self._described()  # afterwards, to describe the model that has scored
        except RewardServerError as error:
            if error.status in (401, 403, 404):  # it would refuse every later request too
                raise ModelError(
                    error.summary, where=error.where, got=error.got, fix=error.fix
                ) from error
            reason = f"{error.where}: {error.summary} ({error.got})"
            return [Reward(None, Score(None, error=reason), error=reason) for _ in conversations]
        if description != self.model:
            summary = "the server's model, or its settings, have changed"
            raise ModelError(summary, where=self.client.url, got=description, need=str(self.model))
        names = tuple(description["heads"])
        return [
            replace(reward, score=replace(reward.score, head_names=names)) for reward in rewards
        ]

    def shutdown(self) -> None:
        """Close the connections."""
        self.client.close()

    def _described(self) -> dict[str, Any]:
        """The model's entry of /v1/models, without keys that rewards do not depend on."""
        name, models = self.client.model, self.client.models()
        entry = next((model for model in models if name in (None, model["id"])), {})
        if "identity" not in entry:  # other servers list models too
            got, need = (
                ", ".join(model["id"] for model in models),
                f"a `treeward serve` with {name or 'a model'}",
            )
            summary, fix = (
                "the server does not have this reward model",
                "name one of its models as served_model",
            )
            raise ConfigError(
                summary, where=self.client.url, got=f"models {got}", need=need, fix=fix
            )
        return {key: entry[key] for key in ("id", "identity", "heads")}
