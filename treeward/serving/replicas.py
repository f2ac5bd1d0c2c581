"""The server in several processes, as an application of Ray Serve: one front, and replicas that hold the models.

    with started(config, "rewards") as service:     # Ray, the replicas, and a Service whose scores come from them
        app = create_app(service)

The front is the application of one server, with its routes, limits, shaping and counters, and without weights.
Conversations go to the replicas by the beginning that they have in common, so that each prompt is in the cache of one
replica. What a replica that dies had not scored is scored by another.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context
from itertools import chain
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException

from treeward.config.server import ServedModelConfig, ServerConfig
from treeward.model.pretrained import check_local
from treeward.parallel.ray_cluster import equal_shares, start_ray
from treeward.scoring.replicas import running
from treeward.scoring.score import Conversation, Score
from treeward.serving import logs
from treeward.serving.api_error import APIError
from treeward.serving.batcher import not_in_time, queue_full
from treeward.serving.metrics import ServerMetrics
from treeward.serving.models import ServedModel
from treeward.serving.rendered_text import RenderedText, beginning_of
from treeward.serving.service import Service

logger = logging.getLogger(__name__)

_BUCKETS = 512
"""Keys of prompts, and so the most calls that a large request becomes."""
MANY = 2**16
"""Calls that a process has at a time: the limit is the queue of a front."""
_MOST_DEATHS = 3
"""Replicas that may die of a call before it is given up: a conversation may be what they die of."""
_SECONDS_TO_ANSWER = 5.0
"""For the metrics of the replicas."""


class Replica:
    """The models and the batcher of a server, called by a front."""

    def __init__(self, config: ServerConfig) -> None:
        logs.configure(config.log_format)
        self._service = Service.load(config)

    async def score(self, key: int, model: str, asked: Sequence[Conversation | RenderedText]) -> list[Score]:
        """The scores in order. `key`: for the router. A front cancels the call at its deadline, which is earlier."""
        deadline = time.monotonic() + self._service.config.deadline_seconds
        return await self._service.batcher.score(model, asked, deadline=deadline)

    async def models(self) -> list[ServedModel]:
        """What a front says of the models."""
        return list(self._service.models.values())

    async def metrics(self) -> tuple[str, list[Metric]]:
        """The name of this replica, and what it has counted."""
        return serve.get_replica_context().replica_tag, list(self._service.metrics.registry.collect())

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises."""
        if not await self._service.batcher.check_alive():
            raise RuntimeError("the models do not score any more")


class ReplicaBatcher:
    """What a `Batcher` is to the service of a front: each conversation is scored by a replica."""

    def __init__(self, handle: Any, config: ServerConfig, models: Sequence[ServedModel]) -> None:
        self.config, self.num_queued = config, 0
        self._endings = {model.name: model.ending for model in models}
        self._handle, self._score = handle, handle.score
        self._busy_since, self._num_scored = 0.0, 0

    @property
    def seconds_of_queue(self) -> float:
        """About how long what is queued will take, from 1 to 60."""
        seconds = self.num_queued * (time.monotonic() - self._busy_since) / max(1, self._num_scored)
        return min(max(math.ceil(seconds), 1), 60)

    async def check_alive(self) -> bool:
        """Whether any replica passes Serve's health checks."""
        found = (await asyncio.to_thread(serve.status)).applications[self._handle.app_name]
        states = found.deployments[self._handle.deployment_name].replica_states
        return any(number for state, number in states.items() if state == "RUNNING")

    async def score(
        self, model: str, conversations: Sequence[Conversation | RenderedText], *, deadline: float
    ) -> list[Score]:
        """One score for each conversation, in order. `deadline` and errors: as of `Batcher.score`."""
        number = len(conversations)
        if self.num_queued and self.num_queued + number > self.config.max_queued:
            raise queue_full(self.num_queued, self.config.max_queued, self.seconds_of_queue)
        if not self.num_queued:
            self._busy_since, self._num_scored = time.monotonic(), 0
        parts: dict[int, list[int]] = {}
        for i, one in enumerate(conversations):
            beginning = beginning_of(one, self._endings[model]).encode(errors="surrogatepass")
            parts.setdefault(zlib.crc32(beginning) % _BUCKETS, []).append(i)
        # A router knows calls by the id of the HTTP request that makes them, and would forget all but one of these.
        tasks = {
            asyncio.create_task(self._ask(key, model, [conversations[i] for i in part]), context=Context()): part
            for key, part in parts.items()
        }
        self.num_queued += number
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await asyncio.gather(*tasks)
        except TimeoutError as error:
            missing = sum(len(part) for task, part in tasks.items() if task.cancelled())
            raise not_in_time(missing, number, self.seconds_of_queue) from error
        finally:
            for task in tasks:  # those of a request that has failed, or whose client has gone
                task.cancel()
            self.num_queued -= number
        self._num_scored += number
        scores = {i: score for task, part in tasks.items() for i, score in zip(part, task.result(), strict=True)}
        return [scores[i] for i in range(number)]

    def close(self) -> None:
        """The replicas end with their application."""

    async def _ask(self, key: int, model: str, part: Sequence[Any]) -> list[Score]:
        """The scores by the replica of this key, or by the next one if it dies."""
        for _ in range(_MOST_DEATHS):
            response = self._score.remote(key, model, part)
            try:
                return await response  # type: ignore[no-any-return]
            except asyncio.CancelledError:
                response.cancel()
                raise
            except RayActorError as error:
                reason = str(error).splitlines()[0]
                logger.warning("A replica is gone; another scores its %d conversations: %s", len(part), reason)
                await asyncio.sleep(0.1)  # one that cannot be reached may still be the only one
        raise APIError(500, "scoring_failed", f"{_MOST_DEATHS} replicas died while they scored these conversations")


class _AllMetrics(CollectorRegistry):
    """The metrics of a front, and what its replicas have counted, with the label `replica`."""

    def __init__(self, handle: Any) -> None:
        super().__init__()
        self._handle = handle

    def collect(self) -> Iterable[Metric]:
        """What the front has no values of is the replicas'; one that does not answer is counted."""
        families = {family.name: family for family in super().collect()}
        own = {name for name, family in families.items() if family.samples}
        try:
            asked = self._handle.broadcast("metrics")
            found = asked.results(timeout_s=_SECONDS_TO_ANSWER, return_exceptions=True)
        except (RayServeException, TimeoutError) as error:
            logger.warning("The replicas do not give their metrics: %s", error)
            found = []
        answers = [one for one in found if isinstance(one, tuple)]
        what = "Replicas that did not give their metrics in time."
        yield GaugeMetricFamily("treeward_silent_replicas", what, value=len(found) - len(answers))
        for replica, family in ((replica, one) for replica, theirs in answers for one in theirs):
            if family.name not in own:
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                known.samples += [one._replace(labels=one.labels | {"replica": replica}) for one in family.samples]
        yield from families.values()


def options_of(config: ServerConfig, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Serve's options of the replicas. `resources`: Ray's of each, beside those that are configured."""
    return {
        "num_replicas": config.replicas,
        "ray_actor_options": {**resources, **config.ray_actor_options},
        "max_ongoing_requests": MANY,
        "graceful_shutdown_timeout_s": config.shutdown_seconds,
        "request_router_config": {"request_router_class": "treeward.serving.prompt_router.PromptRouter"},
    }


def of_replicas(config: ServerConfig) -> ServerConfig:
    """What the replicas of a server are told: its models, which give scores alone, as the front shapes them."""
    models = tuple(map(_unshaped, config.models))
    return config.model_copy(update={"models": models, "max_queued": 2**62, "running": None})


def front(handle: Any, config: ServerConfig, models: Sequence[ServedModel]) -> Service:
    """The service of a front. `handle`: of the replicas; `models`: what one of them gave."""
    shaped = [model.shaped(section) for model, section in zip(models, config.models, strict=True)]
    metrics = ServerMetrics(batch_tokens=config.batch_tokens, registry=_AllMetrics(handle))
    return Service(shaped, config, metrics, ReplicaBatcher(handle, config, shaped))


@contextmanager
def started(config: ServerConfig, name: str) -> Iterator[Service]:
    """Replicas in Ray, under the name of an application, until the context ends.

    Raises `ConfigError` for more GPUs than this machine has, and `ModelError` for replicas that do not start.
    """
    for model in (name for section in config.models if section.reward_class is None for name in section.models):
        check_local(model)
    ray, devices, given = start_ray(), [section.device for section in config.models], config.ray_actor_options
    num_gpus = given.get("num_gpus", max(map(len, devices)) if {*chain(*devices)} != {"cpu"} else 0)
    resources = equal_shares(
        *(ray, config.replicas), num_gpus=num_gpus, required="num_gpus" in given, where="replicas, ray_actor_options"
    )
    with running(Replica, of_replicas(config), name=name, **options_of(config, resources)) as handle:
        yield front(handle, config, handle.models.remote().result())


def _unshaped(section: ServedModelConfig) -> ServedModelConfig:
    """A model as replicas load it, which may run in another folder: scores alone, as the front shapes them."""
    models = tuple(str(Path(one).resolve()) if Path(one).exists() else one for one in section.models)
    return section.model_copy(update={"models": models, "name": section.served_name, "shaping": None})
