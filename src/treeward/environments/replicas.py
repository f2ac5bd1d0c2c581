"""`ReplicaPool`: an environment's reward model in replicas, by Ray Serve.

    pool = ReplicaPool(config)                # waits until every replica is loaded
    pool.score(conversations)                 # the same scores as of one `ScoringWorker`, in order
    pool.shutdown()

A replica is one worker, or `dtensor_cfg.tensor_parallel_size` workers, each with a part of the model and all with the
same conversations. Free replicas take chunks of a step; neighbours with a common prompt stay together, so that it is
computed once. Serve replaces a replica that dies, and its chunk is repeated, at most `max_retries` times; then it has
no scores.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from treeward.config.reward_environments import RewardModelEnvironmentConfig
from treeward.data.conversation import AnyConversation
from treeward.environments.interface import WHERE
from treeward.environments.scoring_worker import ScoringWorker
from treeward.errors import TreewardError
from treeward.parallel.ray_cluster import check_room, first_line, start_ray
from treeward.scoring.replicas import running
from treeward.scoring.score import Score

logger = logging.getLogger(__name__)

_CHUNKS_OF_A_REPLICA = 2
"""More than one, so that replicas of different speed end a step together."""


class _Replica:
    """One replica, in a process of Ray Serve, with the processes of the model's other parts, which end with it."""

    def __init__(self, config: RewardModelEnvironmentConfig) -> None:
        device = "cuda" if config.resources.gpus_per_node and torch.cuda.is_available() else "cpu"
        size = config.dtensor_cfg.tensor_parallel_size
        self._worker = ScoringWorker(config, device)
        make: Any = ray.remote(ScoringWorker)
        self._fellows = [
            make.options(num_cpus=1, num_gpus=int(device == "cuda")).remote(config, device, rank)
            for rank in range(1, size)
        ]
        address = self._worker.address() if self._fellows else None
        loading = [fellow.load.remote(address) for fellow in self._fellows]
        self._worker.load(address)
        ray.get(loading)

    async def score(self, conversations: Sequence[AnyConversation]) -> list[Score]:
        """As `ScoringWorker.score`, in a thread: Serve's health checks go on. A call that is cancelled keeps its place
        until its thread has ended, so that others go to replicas that are free."""
        scoring = asyncio.ensure_future(asyncio.to_thread(self._score, conversations))
        try:
            return await asyncio.shield(scoring)
        except asyncio.CancelledError:
            await asyncio.wait([scoring])
            raise

    def _score(self, conversations: Sequence[AnyConversation]) -> list[Score]:
        scoring = [fellow.score.remote(conversations) for fellow in self._fellows]
        try:
            scores = self._worker.score(conversations)
            ray.get(scoring)
            return scores
        except TreewardError:
            raise
        except Exception:
            if self._fellows:  # if one has died, Serve restarts them all
                logger.exception("A process of this replica is lost, and with it the replica.")
                os._exit(1)
            raise


class ReplicaPool:
    """Replicas of the model of `config`, each on one or several GPUs or on CPUs: a deployment of Ray Serve.

    Raises `ConfigError` if Ray Serve is not installed or the cluster is too small, and `ModelError` if replicas do not
    start.
    """

    def __init__(self, config: RewardModelEnvironmentConfig) -> None:
        self._config, self._open = config, contextlib.ExitStack()
        size = config.dtensor_cfg.tensor_parallel_size
        room = check_room(
            start_ray(),
            count=config.num_workers,
            cpus=size,
            gpus=size if config.resources.gpus_per_node else 0,
            what="the reward model",
            where=WHERE,
            field="resources",
        )
        share = {name: amount / size for name, amount in room.items()}
        bundles: dict[str, Any] = {
            "placement_group_bundles": [share] * size,
            "placement_group_strategy": "STRICT_PACK",
        }
        self._handle = self._open.enter_context(
            running(
                _Replica,
                config,
                name=f"reward-model-{secrets.token_hex(4)}",
                num_replicas=config.num_workers,
                graceful_shutdown_timeout_s=1.0,
                max_ongoing_requests=1,  # the next chunk goes to the replica that is free
                ray_actor_options={"num_cpus": share["CPU"], "num_gpus": share.get("GPU", 0.0)},
                **(bundles if size > 1 else {}),
            )
        )
        logger.info("%d replicas of the reward model, %d processes each.", config.num_workers, size)

    def score(self, conversations: Sequence[AnyConversation]) -> list[Score]:
        """Scores in order; a failed conversation has None and the reason in `Score.error`.

        Raises the errors of the model, and `ModelError` after `shutdown`.
        """
        chunks = _chunks(conversations, _CHUNKS_OF_A_REPLICA * self._config.num_workers)
        with ThreadPoolExecutor(max(1, len(chunks))) as threads:
            return list(chain.from_iterable(threads.map(self._score, chunks)))

    def shutdown(self) -> None:
        """End the replicas. Safe to repeat."""
        self._open.close()

    def _score(self, conversations: Sequence[AnyConversation]) -> list[Score]:
        attempts, seconds = self._config.max_retries + 1, self._config.worker_timeout_seconds
        for _ in range(attempts):
            try:
                scoring = self._handle.score.remote(conversations)
                scores: list[Score] = scoring.result(timeout_s=seconds)
                return scores
            except RayTaskError as error:
                raise error.cause from None
            except TimeoutError:
                scoring.cancel()
                reason = f"not scored within worker_timeout_seconds: {seconds}"
            except RayActorError as lost:
                reason = f"its replica died: {first_line(lost)}"
        return [Score(None, error=f"tried {attempts} times: {reason}")] * len(conversations)


def _chunks(conversations: Sequence[AnyConversation], most: int) -> list[list[AnyConversation]]:
    """At most so many parts, in order, of equal numbers of prompts; neighbours with one prompt stay together."""
    prompts = [
        list(group)
        for _, group in groupby(conversations, key=lambda conversation: list(conversation[:-1]))
    ]
    size = max(1, math.ceil(len(prompts) / most))
    return [list(chain(*prompts[start : start + size])) for start in range(0, len(prompts), size)]
