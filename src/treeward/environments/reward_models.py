"""Where the reward model of an environment is: in this process, in replicas, or at a server.

    model = ModelHere(config)             # or ModelInReplicas(config), or ModelAtServer(config)
    model.rewards(conversations)          # one `Reward` each; its value is None on failure
    model.shutdown()

All of them give the same rewards. `config` is the section `env.reward_model` of a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any, Protocol

import anyio.from_thread
import torch

from treeward.client.rewards import RewardClient
from treeward.config.reward_environments import RewardModelEnvironmentConfig
from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.data.conversation import AnyConversation
from treeward.environments.interface import WHERE, Reward
from treeward.errors import ConfigError, ModelError, pip_install
from treeward.http import RewardServerError
from treeward.model.reward_model import DEFAULT_BATCH_TOKENS
from treeward.openai_client import key_from
from treeward.parallel.ray_cluster import check_room, start_ray
from treeward.scoring.ensemble import load_scorer
from treeward.scoring.score import Score
from treeward.scoring.scorer import PreparedScorer
from treeward.scoring.shaping import load_shaper, rewards_of
from treeward.serving.api_error import APIError

logger = logging.getLogger(__name__)

_CALLS_OF_A_REPLICA = 4
"""Prompts whose completions a replica scores at a time. Enough that its next batch is tokenized
while it computes one, and few enough that all replicas end a step together."""
_NEVER_SECONDS = 365 * 24 * 3600.0
"""The deadline where there is none."""


class PlacedModel(Protocol):
    """A reward model somewhere."""

    def rewards(self, conversations: Sequence[AnyConversation]) -> list[Reward]:
        """One reward for each conversation, in order; its value is None where there is none, with
        the reason in `error`.
        """

    def shutdown(self) -> None:
        """Free the model. Safe to repeat."""


class ModelHere:
    """The model in this process, on a GPU where the configuration has one and the machine too.

    With `dtensor_cfg.cpu_offload` its weights are on the GPU only while it scores. Raises
    `ModelError` and `ConfigError` as `load_scorer`.
    """

    scorer: PreparedScorer
    """Until `shutdown`."""

    def __init__(self, config: RewardModelEnvironmentConfig) -> None:
        self._shaper = load_shaper(config)
        on_gpu = config.resources.gpus_per_node > 0 and torch.cuda.is_available()
        self._device = "cuda" if on_gpu else "cpu"
        self._offloads = on_gpu and config.dtensor_cfg.cpu_offload
        # A limit of conversations alone is one, as NeMo RL's files give it.
        batch_tokens = config.batch_tokens
        if batch_tokens is None and config.batch_size is None:
            batch_tokens = DEFAULT_BATCH_TOKENS
        self.scorer = load_scorer(
            config,
            device="cpu" if self._offloads else self._device,
            batch_tokens=batch_tokens,
            max_sequences=config.batch_size,
        )

    def rewards(self, conversations: Sequence[AnyConversation]) -> list[Reward]:
        """See `PlacedModel`."""
        if not self._offloads:
            scores = self.scorer.score(conversations, on_error="mask")
            return rewards_of(scores, conversations, self._shaper)
        try:
            for member in self.scorer.members:
                member.model.to(self._device)
            scores = self.scorer.score(conversations, on_error="mask")
        finally:
            for member in self.scorer.members:
                member.model.to("cpu")
            torch.cuda.empty_cache()
        return rewards_of(scores, conversations, self._shaper)

    def shutdown(self) -> None:
        """See `PlacedModel`."""
        vars(self).pop("scorer", None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class ModelInReplicas:
    """The model in replicas of Ray Serve, those of `treeward serve` without its HTTP.

    A replica that dies is replaced, and the completions of a prompt that it had not scored, or not
    within `worker_timeout_seconds`, are scored again, at most `max_retries` times. Raises
    `ConfigError` if Ray Serve is not installed or the cluster is too small, and `ModelError` if
    replicas do not start.
    """

    def __init__(self, config: RewardModelEnvironmentConfig) -> None:
        try:
            from treeward.serving.replicas import started  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                "Ray Serve is not installed",
                where=WHERE,
                got=str(error),
                fix=f"{pip_install('serve', 'ray')}, or use one replica",
            ) from error
        self._config = config
        self._shaper = load_shaper(config)
        self._open = contextlib.ExitStack()
        size = config.dtensor_cfg.tensor_parallel_size
        on_gpus = config.resources.gpus_per_node > 0
        if config.dtensor_cfg.cpu_offload:
            logger.warning("cpu_offload has no effect: replicas keep their weights on their GPUs.")
        place = check_room(
            start_ray(),
            count=config.num_workers,
            cpus=size,
            gpus=size if on_gpus else 0,
            what="the reward model",
            where=WHERE,
            field="resources",
        )
        # Rewards are shaped here, in the order of the step.
        section = ServedModelConfig(
            **config.model_dump(include=set(ServedModelConfig.model_fields), exclude={"shaping"}),
            device="auto" if on_gpus else "cpu",
        )
        server = ServerConfig(
            models=(section,),
            replicas=config.num_workers,
            tensor_parallel_size=size,
            # Of each process: a GPU, or none where the cluster has none.
            ray_actor_options={"num_cpus": 1, "num_gpus": place.get("GPU", 0.0) / size},
            batch_tokens=config.batch_tokens or DEFAULT_BATCH_TOKENS,
            batch_size=config.batch_size,
            # A step is as large as the loop makes it: nothing of it is refused.
            max_queued=2**62,
            deadline_seconds=_NEVER_SECONDS,
        )
        name = f"reward-model-{secrets.token_hex(4)}"
        replicas = started(
            server,
            name,
            most_calls=_CALLS_OF_A_REPLICA,
            # A death ends the call, because `_scores_of_prompt` counts the tries.
            most_deaths=1,
            shutdown_seconds=1.0,
        )
        service = self._open.enter_context(replicas)
        num_replicas = config.num_workers
        logger.info("%d replicas of the reward model, %d processes each.", num_replicas, size)
        self._batcher = service.batcher
        self._name = section.served_name
        self._loop = self._open.enter_context(anyio.from_thread.start_blocking_portal())

    def rewards(self, conversations: Sequence[AnyConversation]) -> list[Reward]:
        """See `PlacedModel`. The completions of a prompt are scored by one replica."""
        scores = self._loop.call(self._scores, conversations)
        return rewards_of(scores, conversations, self._shaper)

    def shutdown(self) -> None:
        """See `PlacedModel`."""
        self._open.close()

    async def _scores(self, conversations: Sequence[AnyConversation]) -> list[Score]:
        # Neighbours alone: a loop gives the completions of a prompt one after another.
        groups = groupby(conversations, key=lambda conversation: list(conversation[:-1]))
        parts = [self._scores_of_prompt(list(group)) for _, group in groups]
        return list(chain.from_iterable(await asyncio.gather(*parts)))

    async def _scores_of_prompt(self, part: Sequence[AnyConversation]) -> list[Score]:
        attempts = self._config.max_retries + 1
        seconds = self._config.worker_timeout_seconds
        for _ in range(attempts):
            deadline = time.monotonic() + (seconds or _NEVER_SECONDS)
            try:
                return await self._batcher.score(self._name, part, deadline=deadline)
            except APIError as error:
                reason = error.message
                if error.code == "deadline_exceeded":
                    reason = f"not scored within worker_timeout_seconds: {seconds}"
        return [Score(None, error=f"tried {attempts} times: {reason}")] * len(part)


class ModelAtServer:
    """The model of the `treeward serve` at `config.url`.

    Raises `RewardServerError` for a server that does not respond, and `ConfigError` for one without
    the model, or if the environment variable of the token is not set.
    """

    def __init__(self, config: RewardModelEnvironmentConfig) -> None:
        token = key_from(config.token_env, where=WHERE, field="token_env")
        self.client = RewardClient(
            str(config.url),
            token=token,
            model=config.served_model,
            max_retries=config.max_retries,
            # A client must have a limit, also where the section has none.
            timeout_seconds=config.worker_timeout_seconds or 600.0,
        )
        self.model = self._described()

    def rewards(self, conversations: Sequence[AnyConversation]) -> list[Reward]:
        """See `PlacedModel`; the server shapes them."""
        try:
            rewards = self.client.rewards(conversations, on_error="mask")
            # Afterwards, so that it describes the model that has scored.
            description = self._described()
        except RewardServerError as error:
            # It would refuse every later request too.
            if error.status in (401, 403, 404):
                raise ModelError(
                    error.summary,
                    where=error.where,
                    got=error.got,
                    fix=error.fix,
                ) from error
            reason = f"{error.where}: {error.summary} ({error.got})"
            return [Reward(None, Score(None, error=reason), error=reason) for _ in conversations]
        if description != self.model:
            summary = "the server's model, or its settings, have changed"
            raise ModelError(summary, where=self.client.url, got=description, need=str(self.model))
        names = tuple(description["heads"])
        named = []
        for reward in rewards:
            named.append(replace(reward, score=replace(reward.score, head_names=names)))
        return named

    def shutdown(self) -> None:
        """Close the connections."""
        self.client.close()

    def _described(self) -> dict[str, Any]:
        """The model's entry of /v1/models, without keys that rewards do not depend on."""
        name = self.client.model
        models = self.client.models()
        entry = next((model for model in models if name in (None, model["id"])), {})
        # Other servers list models too.
        if "identity" not in entry:
            names = ", ".join(model["id"] for model in models)
            raise ConfigError(
                "the server does not have this reward model",
                where=self.client.url,
                got=f"models {names}",
                need=f"a `treeward serve` with {name or 'a model'}",
                fix="name one of its models as served_model",
            )
        return {key: entry[key] for key in ("id", "identity", "heads")}
