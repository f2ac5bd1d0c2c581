"""`RewardModelEnvironment`: a reward model as the environment of an RL loop, in this process or in
Ray actors.

    env = RewardModelEnvironment({"model_name": "results/rm/final", "batch_size": 32})
    env.step(message_logs, env_infos).rewards                                # float32 (B,)

    env = RewardModelEnvironment.remote(env_config)     # the same, as a Ray actor
    ray.get(env.step.remote(message_logs, env_infos)).rewards

`env_config` is the section `env.reward_model` of an RL configuration:
`RewardModelEnvironmentConfig`. Conversations are rendered and read as in training, and a common
prompt is computed once. Neither the number of replicas nor the other conversations of a batch
change a reward. `treeward/environments/reward_models.py` has the places where the model may be.

Shapes: B conversations, L tokens of the longest.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from treeward.config.reward_environments import RewardModelEnvironmentConfig
from treeward.environments.interface import (
    ConfiguredEnvironment,
    Conversations,
    Infos,
    Reward,
    conversation_of_log,
)
from treeward.environments.reward_models import (
    ModelAtServer,
    ModelHere,
    ModelInReplicas,
    PlacedModel,
)
from treeward.errors import ConfigError, DataError, ModelError
from treeward.model.reward_model import RewardModel


class RewardModelEnvironment(ConfiguredEnvironment[RewardModelEnvironmentConfig]):
    """Rewards conversations by a reward model.

    It runs in this process, or in replicas where the configuration asks for several, or where this
    process is a Ray actor without a GPU and the model needs one. Raises `ConfigError` for a faulty
    configuration or too few resources, `ModelError` for a model that cannot be loaded,
    `RewardServerError` for a server that does not respond.
    """

    name = "reward_model_env"
    section = RewardModelEnvironmentConfig

    def __init__(self, env_config: Mapping[str, Any] | RewardModelEnvironmentConfig) -> None:
        super().__init__(env_config)
        # Steps may come from several threads; the model takes one at a time.
        self._lock = threading.Lock()
        self._model: PlacedModel | None
        if self.config.url is not None:
            self._model = ModelAtServer(self.config)
        elif _needs_ray(self.config):
            self._model = ModelInReplicas(self.config)
        else:
            self._model = ModelHere(self.config)

    def rewards(self, conversations: Conversations, env_infos: Infos) -> list[Reward]:
        with self._lock:
            rewards = self._running().rewards(conversations)
        with_parts = []
        for reward in rewards:
            parts = reward.score.parts
            spread = parts.pop("spread", None)
            components = {**reward.components, **parts}
            if spread is not None:
                # With a slash: a detail. A member or a head may be a reward of its own, but more
                # doubt is not better.
                components["score/spread"] = spread
            with_parts.append(replace(reward, components=components))
        return with_parts

    def preprocess_data(
        self, message_logs: Sequence[Sequence[Mapping[str, Any]]]
    ) -> dict[str, Tensor]:
        """The model's input: `{"input_ids": int64 (B, L), "input_lengths": int64 (B,)}`,
        right-padded.

        Raises `DataError` for a conversation that has no completion, cannot be rendered or is too
        long, and `ConfigError` if the model is not in this process.
        """
        scorer = self._here("preprocess_data").scorer.members[0]
        if scorer.steps is not None:
            summary = "a process reward model reads steps: a conversation has not one value"
            raise ConfigError(summary, where=self.config.models[0])
        conversations = [conversation_of_log(log) for log in message_logs]
        rows = []
        for item in scorer.prepare(conversations):
            if item.ids is None:
                summary = "the conversation cannot be tokenized"
                raise DataError(summary, where=item.name, got=item.error)
            rows.append(item.ids)
        lengths_B = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        # Which token pads is of no matter: `input_lengths` says where a row ends.
        pad_id = scorer.renderer.tokenizer.pad_token_id or 0
        ids_BL = torch.full((len(rows), max(map(len, rows), default=0)), pad_id)
        for i, row in enumerate(rows):
            ids_BL[i, : len(row)] = torch.tensor(row)
        return {"input_ids": ids_BL, "input_lengths": lengths_B}

    @property
    def reward_model_policy(self) -> RewardModel:
        """The model, if one runs in this process: its `score(preprocess_data(logs))["scores"]` are
        unshaped scores.
        """
        members = self._here("reward_model_policy").scorer.members
        if len(members) > 1 or members[0].steps is not None:
            summary = "an ensemble and a process reward model have no model with one value"
            raise ConfigError(summary, field="model_name", got=list(self.config.models))
        return members[0].model

    def shutdown(self) -> bool:
        """Free the model and end its processes. Safe to repeat; a later step is an error."""
        model = self._model
        self._model = None
        if model is not None:
            model.shutdown()
        return True

    def _running(self) -> PlacedModel:
        if self._model is None:
            raise ModelError(
                "the environment was shut down", fix="make a new RewardModelEnvironment"
            )
        return self._model

    def _here(self, what: str) -> ModelHere:
        model = self._running()
        if isinstance(model, ModelHere):
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
