"""`ScoringWorker`: the reward model of an environment, in one process; `ReplicaPool`: replicas of it, in Ray actors.

    worker = ScoringWorker(config, "cuda")
    worker.score(conversations)               # one `Score` each; its value is None where there is none

    pool = ReplicaPool(config)                # waits until every replica is loaded
    pool.score(conversations)                 # the same scores, in order
    pool.shutdown()

A replica is one worker, or with `dtensor_cfg.tensor_parallel_size` a group of them, each with a part of the model and
all with the same conversations. Each replica gets one chunk of a step, all of about one size; conversations with a
common prompt stay together, so that it is computed once. Where a worker dies, its replica is started again and the
chunk is repeated there, `max_retries` times at most; then the chunk has no scores.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from treeward.config.policy import ShardingConfig
from treeward.config.reward_environments import RewardModelEnvironmentConfig
from treeward.environments.actors import PlacementGroup, first_line, free_port, reserve, start_ray
from treeward.environments.interface import WHERE
from treeward.errors import ConfigError, DataError, ModelError, TreewardError
from treeward.model.pretrained import DTYPES
from treeward.model.reward_model import DEFAULT_BATCH_TOKENS
from treeward.parallel.mesh import make_mesh
from treeward.parallel.sharding import shard
from treeward.parallel.tensor import cut
from treeward.processes import joined
from treeward.scoring.ensemble import EnsembleScorer, load_scorer
from treeward.scoring.score import Conversation, Score
from treeward.scoring.scorer import Scorer

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_START_SECONDS = 1800.0
"""Time limit for placing the workers and loading the model."""


class ScoringWorker:
    """Loads the model of `config` and scores on `device`, "cpu" or "cuda". `rank`: its number in a group.

    With `cpu_offload` the weights are on the GPU only during `score`.
    """

    def __init__(self, config: RewardModelEnvironmentConfig, device: str, rank: int = 0) -> None:
        self._config, self._device, self._rank = config, device, rank
        self._offload = config.dtensor_cfg.cpu_offload and device != "cpu"
        self._scorer: Scorer | EnsembleScorer | None = None
        self._group = contextlib.ExitStack()

    @property
    def scorer(self) -> Scorer | EnsembleScorer:
        """The model, loaded at the first call. Raises `ModelError` or `ConfigError` where it cannot be loaded."""
        if self._scorer is None:
            is_whole = self._config.dtensor_cfg.tensor_parallel_size == 1
            self._scorer = _load(self._config, self._device if is_whole and not self._offload else "cpu")
            if not is_whole:
                self._divide(self._scorer)
        return self._scorer

    def _divide(self, scorer: Scorer | EnsembleScorer) -> None:
        """Leave this worker its part of each model: some heads and columns, or of a model that cannot be cut some rows
        of all weights, which are gathered layer by layer."""
        cutting, sharding = make_mesh(self._config.dtensor_cfg), make_mesh(ShardingConfig())
        for member in scorer.members:
            try:
                cut(member.model, cutting)
                member.model.to(self._device)
            except ConfigError as error:
                logger.info("The reward model is sharded, and not cut: %s", error.summary)
                shard(member.model.requires_grad_(False), sharding, dtype=DTYPES[self._config.dtype])

    def address(self) -> str:
        """Where a group can meet in this process: `host:port`."""
        return f"{start_ray().util.get_node_ip_address()}:{free_port()}"

    def load(self, address: str | None = None) -> int:
        """Load the model, and return the id of this process. `address`: that of the first worker of a group."""
        if address is not None:
            size, (host, _, port) = self._config.dtensor_cfg.tensor_parallel_size, address.rpartition(":")
            # each worker sees its own GPU alone
            launched = {"RANK": self._rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "MASTER_ADDR": host}
            os.environ.update({name: str(value) for name, value in launched.items()}, MASTER_PORT=port)
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # of torchrun, where it has started Ray
            self._group.enter_context(joined())
        _ = self.scorer
        return os.getpid()

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Scores in order; a failed conversation has None and the reason in `Score.error`."""
        scorer = self.scorer
        if not self._offload:
            return scorer.score(conversations, on_error="mask")
        try:
            for member in scorer.members:
                member.model.to(self._device)
            return scorer.score(conversations, on_error="mask")
        finally:
            for member in scorer.members:
                member.model.to("cpu")
            torch.cuda.empty_cache()

    def preprocess(self, conversations: Sequence[Conversation]) -> dict[str, Tensor]:
        """See `RewardModelEnvironment.preprocess_data`."""
        scorer = self.scorer.members[0]
        rows = []
        for one in scorer.prepare(conversations):
            if one.ids is None:
                raise DataError("the conversation cannot be tokenized", where=one.name, got=one.error)
            rows.append(one.ids)
        lengths_B = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        ids_BL = torch.full((len(rows), max(map(len, rows), default=0)), scorer.renderer.tokenizer.pad_token_id or 0)
        for i, row in enumerate(rows):
            ids_BL[i, : len(row)] = torch.tensor(row)
        return {"input_ids": ids_BL, "input_lengths": lengths_B}

    def shutdown(self) -> None:
        """Free the model."""
        self._scorer = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class ReplicaPool:
    """Replicas of the model of `config`, each on a GPU, on several, or on CPUs.

    Raises `ConfigError` where Ray is not installed or the cluster is too small, `ModelError` where a worker does not
    become ready, and the errors of loading the model.
    """

    def __init__(self, config: RewardModelEnvironmentConfig) -> None:
        size = config.dtensor_cfg.tensor_parallel_size
        self._places = reserve(
            count=config.num_workers,
            cpus=size,
            gpus=size if config.resources.gpus_per_node else 0,
            what="the reward model",
            where=WHERE,
            field="resources num_replicas",
            seconds=_START_SECONDS,
        )
        self._replicas = [_Replica(config, self._places, number) for number in range(config.num_workers)]
        try:
            self._each(_Replica.load)
            logger.info("%d replicas of the reward model, %d processes each.", config.num_workers, size)
        except BaseException as error:
            self.shutdown()
            if not isinstance(error, _WorkerLost):
                raise
            fix = "look into Ray's logs; free memory or processors, or use fewer replicas"
            raise ModelError("a worker of the reward model does not start", got=str(error), fix=fix) from error

    @property
    def process_ids(self) -> list[int]:
        """The process of each worker, on its node."""
        return [one for replica in self._replicas for one in replica.process_ids]

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Scores in order; a failed conversation has None and the reason in `Score.error`.

        Raises the errors of the model, and `ModelError` after `shutdown`.
        """
        chunks = plan_chunks(conversations, len(self._replicas))
        found = self._each(_Replica.score, [[conversations[i] for i in chunk] for chunk in chunks])
        scores = {i: score for chunk, of in zip(chunks, found, strict=True) for i, score in zip(chunk, of, strict=True)}
        return [scores[i] for i in range(len(conversations))]

    def preprocess(self, conversations: Sequence[Conversation]) -> dict[str, Tensor]:
        """By the first replica; see `RewardModelEnvironment.preprocess_data`."""
        self._replicas[0].load()
        data: dict[str, Tensor] = self._replicas[0].ask("preprocess", conversations)
        return data

    def shutdown(self) -> None:
        """End the workers; a step in another thread raises. Safe to repeat."""
        for replica in self._replicas:
            replica.close()
        self._places.free()

    def _each(self, method: Callable[..., _T], *arguments: Sequence[Any]) -> list[_T]:
        """What each replica returns, all at once, or as many of them as there are arguments."""
        with ThreadPoolExecutor(len(self._replicas)) as threads:
            return list(threads.map(method, self._replicas, *arguments))


class _WorkerLost(Exception):
    """A worker of a replica has died, takes too long, or failed as those do whose fellow has died."""


class _Replica:
    """One replica: a worker, or a group of workers that are started, asked and killed together."""

    def __init__(self, config: RewardModelEnvironmentConfig, places: PlacementGroup, number: int) -> None:
        self._config, self._places, self._number, self._ray = config, places, number, places.ray
        self._workers: list[Any] = []
        self._closed = False
        self.process_ids: list[int] = []

    def load(self) -> None:
        """Start the workers where they are not there."""
        if self._closed:
            raise ModelError("the environment was shut down", got="a step", fix="make a new RewardModelEnvironment")
        if self._workers:
            return
        config, on_gpu, seconds = self._config, self._places.on_gpu, _START_SECONDS
        options = {"num_cpus": 1, "num_gpus": int(on_gpu), **self._places.options(self._number)}
        actor = self._ray.remote(ScoringWorker).options(**options)
        size, device = config.dtensor_cfg.tensor_parallel_size, "cuda" if on_gpu else "cpu"
        self._workers = [actor.remote(config, device, rank) for rank in range(size)]
        address = self._all("address", seconds=seconds)[0] if size > 1 else None
        self.process_ids = self._all("load", address, seconds=seconds)

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Scores in order; none with the reason where the workers have died too often."""
        attempts = self._config.max_retries + 1
        for _ in range(attempts):
            try:
                self.load()
                scores: list[Score] = self.ask("score", conversations)
                return scores
            except _WorkerLost as lost:
                reason = f"tried {attempts} times: its worker died: {lost}"
        return [Score(None, error=reason)] * len(conversations)

    def ask(self, method: str, conversations: Sequence[Conversation]) -> Any:
        return self._all(method, conversations, seconds=self._config.worker_timeout_seconds)[0]

    def close(self) -> None:
        """End the workers for good."""
        self._closed = True  # first, so that a step in another thread starts none
        self._kill()

    def _kill(self) -> None:
        workers, self._workers = self._workers, []
        if self._ray.is_initialized():
            for worker in workers:
                self._ray.kill(worker)

    def _all(self, method: str, *arguments: Any, seconds: float | None) -> list[Any]:
        """What the method of each worker returns. Raises the errors of the model, and `_WorkerLost`; the workers are
        then killed, because one waits for its fellow."""
        running = [getattr(worker, method).remote(*arguments) for worker in self._workers]
        try:
            return list(self._ray.get(running, timeout=seconds))
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", error)
            is_own = cause is not error and (len(self._workers) == 1 or isinstance(cause, TreewardError))
            self._kill()
            raise (cause if is_own else _WorkerLost(first_line(cause))) from None


def plan_chunks(conversations: Sequence[Conversation], num_workers: int) -> list[list[int]]:
    """The conversations' indices in one chunk per worker or fewer, as even in characters as whole prompts allow.

    Conversations that differ only in their last message are in one chunk.
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


def _load(config: RewardModelEnvironmentConfig, device: str) -> Scorer | EnsembleScorer:
    only_size = config.batch_tokens is None and config.batch_size is not None
    batch_tokens = None if only_size else config.batch_tokens or DEFAULT_BATCH_TOKENS
    return load_scorer(config, device=device, batch_tokens=batch_tokens, max_sequences=config.batch_size)
