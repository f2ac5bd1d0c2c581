"""`ReplicaPool`: an environment's reward model in replicas, by Ray Serve.

    pool = ReplicaPool(config)                # waits until every replica is loaded
    pool.score(conversations)                 # the same scores as of one `ScoringWorker`, in order
    pool.shutdown()

A replica is one worker, or `dtensor_cfg.tensor_parallel_size` workers, each with a part of the model and all with the
same conversations. Free replicas take chunks of a step; conversations with a common prompt stay together, so that it is
computed once. Serve replaces a replica that dies, and its chunk is repeated, at most `max_retries` times; then it has
no scores.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from treeward.config.reward_environments import RewardModelEnvironmentConfig
from treeward.environments.interface import WHERE
from treeward.environments.scoring_worker import ScoringWorker
from treeward.errors import TreewardError
from treeward.parallel.ray_cluster import check_room, first_line, start_ray
from treeward.scoring.replicas import running
from treeward.scoring.score import Conversation, Score

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
        self._process_ids = [os.getpid(), *ray.get(loading)]

    async def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """As `ScoringWorker.score`, in a thread: Serve's health checks go on."""
        return await asyncio.to_thread(self._score, conversations)

    async def process_ids(self) -> list[int]:
        return self._process_ids

    def _score(self, conversations: Sequence[Conversation]) -> list[Score]:
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
        bundles: dict[str, Any] = {"placement_group_bundles": [share] * size, "placement_group_strategy": "STRICT_PACK"}
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

    @property
    def process_ids(self) -> list[int]:
        """The processes of all replicas, on their nodes."""
        return [process_id for ids in self._handle.broadcast("process_ids").results() for process_id in ids]

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Scores in order; a failed conversation has None and the reason in `Score.error`.

        Raises the errors of the model, and `ModelError` after `shutdown`.
        """
        chunks = plan_chunks(conversations, _CHUNKS_OF_A_REPLICA * self._config.num_workers)
        with ThreadPoolExecutor(max(1, len(chunks))) as threads:
            scored = threads.map(self._score, [[conversations[i] for i in chunk] for chunk in chunks])
            scores_by_index = {
                i: score
                for chunk, scores in zip(chunks, scored, strict=True)
                for i, score in zip(chunk, scores, strict=True)
            }
        return [scores_by_index[i] for i in range(len(conversations))]

    def shutdown(self) -> None:
        """End the replicas. Safe to repeat."""
        self._open.close()

    def _score(self, conversations: Sequence[Conversation]) -> list[Score]:
        attempts = self._config.max_retries + 1
        for _ in range(attempts):
            try:
                scoring = self._handle.score.remote(conversations)
                scores: list[Score] = scoring.result(timeout_s=self._config.worker_timeout_seconds)
                return scores
            except RayTaskError as error:
                raise error.cause from None
            except (RayActorError, TimeoutError) as lost:
                reason = f"tried {attempts} times: its replica died: {first_line(lost)}"
        return [Score(None, error=reason)] * len(conversations)


def plan_chunks(conversations: Sequence[Conversation], num_workers: int) -> list[list[int]]:
    """The conversations' indices in one chunk per worker or fewer, balanced by characters.

    Conversations that differ only in their last message stay in one chunk.
    """
    prompts: dict[str, list[int]] = {}
    for i, conversation in enumerate(conversations):
        prompts.setdefault(json.dumps(list(conversation[:-1]), sort_keys=True, default=str), []).append(i)
    # Like its tokens, a prompt counts once.
    sizes = {
        prompt: 1 + len(prompt) + sum(len(str(conversations[i][-1:])) for i in indices)
        for prompt, indices in prompts.items()
    }
    chunks: list[list[int]] = [[] for _ in range(min(num_workers, len(prompts)))]
    loads = [0] * len(chunks)
    for prompt in sorted(prompts, key=lambda prompt: -sizes[prompt]):
        lightest = loads.index(min(loads))
        chunks[lightest] += prompts[prompt]
        loads[lightest] += sizes[prompt]
    return chunks
