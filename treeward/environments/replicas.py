"""`ScoringWorker`: the reward model of an environment, in one process; `ReplicaPool`: several of them, in Ray actors.

    worker = ScoringWorker(config, "cuda")
    worker.score(conversations)               # one `Score` each; its value is None where there is none

    pool = ReplicaPool(config)                # waits until every replica is loaded
    pool.score(conversations)                 # the same scores, in order
    pool.shutdown()

Each worker gets one chunk of a step, all of about one size; conversations with a common prompt stay together, so that
it is computed once. Ray restarts a worker that dies, and repeats its chunk there, `max_retries` times at most; then the
chunk has no scores.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from treeward.config.reward_environments import RewardModelEnvironmentConfig
from treeward.environments.actors import start_ray
from treeward.environments.interface import WHERE
from treeward.errors import ConfigError, ModelError
from treeward.model.pretrained import DTYPES
from treeward.model.reward_model import DEFAULT_BATCH_TOKENS
from treeward.scoring.ensemble import EnsembleScorer
from treeward.scoring.score import Conversation, Score
from treeward.scoring.scorer import Scorer

logger = logging.getLogger(__name__)

_LOAD_RETRIES = 3
"""Restarts of a worker that dies before its model is loaded."""


class ScoringWorker:
    """Loads the model of `config` and scores on `device`, "cpu" or "cuda".

    With `cpu_offload` the weights are on the GPU only during `score`.
    """

    def __init__(self, config: RewardModelEnvironmentConfig, device: str) -> None:
        self._config, self._device = config, device
        self._offload = config.dtensor_cfg.cpu_offload and device != "cpu"
        self._scorer: Scorer | EnsembleScorer | None = None

    @property
    def scorer(self) -> Scorer | EnsembleScorer:
        """The model, loaded at the first call. Raises `ModelError` or `ConfigError` where it cannot be loaded."""
        if self._scorer is None:
            self._scorer = _load(self._config, "cpu" if self._offload else self._device)
        return self._scorer

    def load(self) -> int:
        """Load the model, and return the id of this process."""
        _ = self.scorer
        return os.getpid()

    def score(self, conversations: Sequence[Conversation], *, timeout_seconds: float | None = None) -> list[Score]:
        """Scores in order; a failed conversation has None and the reason in `Score.error`.

        `timeout_seconds`: ends this process after that time, also where the GPU or a library hangs.
        """
        self.load()
        if timeout_seconds is not None:
            faulthandler.dump_traceback_later(timeout_seconds, exit=True, file=sys.__stderr__ or sys.stderr)
        try:
            with self._on_device():
                return self.scorer.score(conversations, on_error="mask")
        finally:
            if timeout_seconds is not None:
                faulthandler.cancel_dump_traceback_later()

    def shutdown(self) -> None:
        """Free the model."""
        self._scorer = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        if not self._offload:
            yield
            return
        try:
            for member in self.scorer.members:
                member.model.to(self._device)
            yield
        finally:
            for member in self.scorer.members:
                member.model.to("cpu")
            torch.cuda.empty_cache()


class ReplicaPool:
    """Replicas of the model of `config`, each on a GPU or on CPUs.

    Raises `ConfigError` where Ray is not installed or the cluster is too small, `ModelError` where a worker does not
    become ready, and the errors of loading the model.
    """

    def __init__(self, config: RewardModelEnvironmentConfig) -> None:
        self._ray = start_ray()
        self._config = config
        on_gpu = check_resources(config, self._ray.cluster_resources())
        actor = self._ray.remote(ScoringWorker).options(
            num_cpus=config.cpus_per_replica,
            num_gpus=1 if on_gpu else 0,
            max_restarts=-1,
            max_task_retries=_LOAD_RETRIES,
        )
        self._workers = [actor.remote(config, "cuda" if on_gpu else "cpu") for _ in range(config.num_workers)]
        self._closed = False
        try:
            self.process_ids()
        except BaseException:
            self.shutdown()
            raise

    def score(self, conversations: Sequence[Conversation]) -> list[Score]:
        """Scores in order; a failed conversation has None and the reason in `Score.error`.

        Raises the errors of the model, and `ModelError` where workers cannot be restarted or are shut down.
        """
        self.process_ids()  # restarted workers load their model first
        retries, seconds = self._config.max_retries, self._config.worker_timeout_seconds
        chunks = plan_chunks(conversations, len(self._workers))
        running = [
            worker.score.options(max_task_retries=retries).remote(
                [conversations[i] for i in chunk], timeout_seconds=seconds
            )
            for worker, chunk in zip(self._workers, chunks, strict=False)
        ]
        scores: dict[int, Score] = {}
        for reference, chunk in zip(running, chunks, strict=True):
            scores |= zip(chunk, self._result(reference, len(chunk)), strict=True)
        return [scores[i] for i in range(len(conversations))]

    def process_ids(self) -> list[int]:
        """The process of each worker, on its node, once its model is loaded."""
        self._check_open()
        errors = self._ray.exceptions
        seconds = self._config.start_timeout_seconds
        try:
            ids: list[int] = self._ray.get([worker.load.remote() for worker in self._workers], timeout=seconds)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.GetTimeoutError:
            raise ModelError(
                "a worker of the reward model was not ready in time",
                got=f"nothing within {seconds:g} seconds; free: {_listed(self._ray.available_resources())}",
                fix="free resources, lower the number of replicas, or raise start_timeout_seconds",
            ) from None
        except errors.RayError as error:
            self._check_open()
            raise ModelError(
                "a worker of the reward model dies while it loads the model",
                got=str(error).splitlines()[0],
                fix="look for the reason in Ray's logs; precision: bfloat16 and fewer replicas on a node save memory",
            ) from error
        return ids

    def shutdown(self) -> None:
        """End the workers; a step in another thread raises. Safe to repeat."""
        self._closed = True  # first, so that the step knows why its workers are gone
        if self._ray.is_initialized():
            for worker in self._workers:
                self._ray.kill(worker)
        self._workers = []

    def _result(self, reference: Any, num_conversations: int) -> list[Score]:
        errors = self._ray.exceptions
        try:
            scores: list[Score] = self._ray.get(reference)
        except errors.RayTaskError as error:
            raise error.cause from None
        except errors.RayError as error:
            self._check_open()
            attempts = self._config.max_retries + 1
            reason = f"tried {attempts} times: its worker died: {str(error).splitlines()[0]}"
            return [Score(None, error=reason)] * num_conversations
        return scores

    def _check_open(self) -> None:
        if self._closed:
            raise ModelError("the environment was shut down", got="a step", fix="make a new RewardModelEnvironment")


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


def check_resources(config: RewardModelEnvironmentConfig, cluster: Mapping[str, float]) -> bool:
    """Whether each replica has a GPU, given the resources of the Ray cluster.

    Raises `ConfigError` where the cluster can never hold the replicas: Ray would wait for ever.
    """
    wants_gpus = config.resources.gpus_per_node > 0
    on_gpu = wants_gpus and cluster.get("GPU", 0.0) > 0
    if wants_gpus and not on_gpu:
        logger.info("The Ray cluster has no GPU: %d replicas of the reward model run on CPUs.", config.num_workers)
    needed = {"CPU": config.num_workers * config.cpus_per_replica, "GPU": float(config.num_workers * on_gpu)}
    for name, amount in needed.items():
        if cluster.get(name, 0.0) < amount:
            raise ConfigError(
                f"the Ray cluster has too few {name}s for the reward model",
                where=WHERE,
                field="resources" if name == "GPU" else "cpus_per_replica",
                got=_listed(cluster),
                need=f"{amount:g} {name}s for {config.num_workers} replicas",
                fix="ask for fewer replicas (resources, num_replicas), or start Ray with more",
            )
    return on_gpu


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0.0):g} {name}s" for name in ("GPU", "CPU"))


def _load(config: RewardModelEnvironmentConfig, device: str) -> Scorer | EnsembleScorer:
    only_size = config.batch_tokens is None and config.batch_size is not None
    options: dict[str, Any] = {
        "device": device,
        "dtype": DTYPES[config.precision],
        "batch_tokens": None if only_size else config.batch_tokens or DEFAULT_BATCH_TOKENS,
        "max_sequences": config.batch_size,
        "max_length": config.max_model_len,
        "truncation": config.truncation,
        "trust_remote_code": config.trust_remote_code,
    }
    if config.head_weights is not None:
        options["head_weights"] = config.head_weights
    if len(config.model_names) == 1:
        name = config.tokenizer.name
        options |= {
            "tokenizer": None if name == config.model_names[0] else name,  # None: the model's own, with its contract
            "chat_template": config.tokenizer.chat_template,
            "chat_template_kwargs": config.tokenizer.chat_template_kwargs,
        }
    if config.ensemble is not None:
        return EnsembleScorer.load(config.model_names, config=config.ensemble, **options)
    return Scorer.load(config.model_names[0], **options)
