"""Reward models in several processes, as an application of Ray Serve: one front, and replicas that
hold the models.

    # Ray, the replicas, and a Service whose scores come from them
    with started(config, "rewards") as service:
        app = create_app(service)

The front is a server, or an environment of an RL loop. A replica is one process, or several with a
part of the model each. Conversations with a common beginning go to the same replica, so that each
prompt is in one cache. Serve places the replicas, watches them, and starts another for one that
dies, whose pending conversations are scored by the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayActorError

from treeward.config.server import ServerConfig
from treeward.data.conversation import AnyConversation
from treeward.errors import ModelError
from treeward.model.pretrained import check_local
from treeward.parallel.ray_cluster import equal_shares, start_ray
from treeward.progress import configure_logging
from treeward.scoring.score import Score
from treeward.serving.api_error import APIError
from treeward.serving.batcher import ServerMetrics, check_queue, not_in_time
from treeward.serving.models import ServedModel
from treeward.serving.rendered_text import RenderedText, beginning_of
from treeward.serving.service import SHUTDOWN_SECONDS, Service

logger = logging.getLogger(__name__)

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_BUCKETS = 512
"""Keys of prompts, and so the largest number of calls for a request."""
_MOST_CALLS = 1024
"""Calls in progress at a replica of a server. With the 5 of Serve's default, its batcher would have
little to batch."""
_MOST_DEATHS = 3
"""Replicas that may die during a call of a server before it fails: its conversations may be the
cause."""
_QUIET = {"log_level": "WARNING", "enable_access_log": False}
"""For Serve's own loggers."""


class Replica:
    """The models and the batcher of a server, called by a front."""

    def __init__(self, config: ServerConfig) -> None:
        configure_logging()
        self._service = Service.load(config)

    async def score(
        self,
        model: str,
        inputs: Sequence[AnyConversation | RenderedText],
    ) -> list[Score]:
        """The scores in order. The front cancels the call at its earlier deadline."""
        deadline = time.monotonic() + self._service.config.deadline_seconds
        # The front counts what waits, and shapes: a replica only scores.
        return await self._service.batcher.score(model, inputs, deadline=deadline)

    async def models(self) -> list[ServedModel]:
        """The models, for the front."""
        return list(self._service.models.values())

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises."""
        if not await self._service.batcher.check_alive():
            raise RuntimeError("the models do not score any more")


class ReplicaBatcher:
    """The front's counterpart of `Batcher`: replicas score the conversations.

    `most_deaths`: replicas that may die during a call before it fails.
    """

    def __init__(
        self,
        handle: Any,
        config: ServerConfig,
        models: Sequence[ServedModel],
        *,
        most_deaths: int = _MOST_DEATHS,
    ) -> None:
        self.config = config
        self.num_queued = 0
        self._most_deaths = most_deaths
        self._endings = {model.name: model.ending for model in models}
        self._handle = handle

    async def check_alive(self) -> bool:
        """Whether any replica passes Serve's health checks."""
        # Serve's status is a call that blocks.
        status = await asyncio.to_thread(serve.status)
        application = status.applications[self._handle.app_name]
        states = application.deployments[self._handle.deployment_name].replica_states
        return any(number for state, number in states.items() if state == "RUNNING")

    async def score(
        self,
        model: str,
        conversations: Sequence[AnyConversation | RenderedText],
        *,
        deadline: float,
    ) -> list[Score]:
        """One score for each conversation, in order. `deadline` and errors: as of
        `Batcher.score`.
        """
        number = len(conversations)
        check_queue(self.num_queued, number, self.config.max_queued)
        parts: dict[int, list[int]] = {}
        for i, conversation in enumerate(conversations):
            beginning = beginning_of(conversation, self._endings[model])
            # Lone surrogates are an error of the conversation, which the replica reports.
            key = zlib.crc32(beginning.encode(errors="surrogatepass")) % _BUCKETS
            parts.setdefault(key, []).append(i)
        tasks: dict[asyncio.Task[list[Score]], list[int]] = {}
        for key, part in parts.items():
            ask = self._ask(key, model, [conversations[i] for i in part])
            # A router identifies calls by their HTTP request's id, and would forget all but one.
            task = asyncio.create_task(ask, context=Context())
            tasks[task] = part
        self.num_queued += number
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await asyncio.gather(*tasks)
        except TimeoutError as error:
            missing = sum(len(part) for task, part in tasks.items() if task.cancelled())
            raise not_in_time(missing, number) from error
        finally:
            # If the request has failed or its client has gone; a task that is done stays so.
            for task in tasks:
                task.cancel()
            self.num_queued -= number
        scores: dict[int, Score] = {}
        for task, part in tasks.items():
            scores.update(zip(part, task.result(), strict=True))
        return [scores[i] for i in range(number)]

    def close(self) -> None:
        """Nothing to do: the replicas end with their application."""

    async def _ask(self, key: int, model: str, part: Sequence[Any]) -> list[Score]:
        """The scores by this key's replica, or by the next one if it dies."""
        for _ in range(self._most_deaths):
            call = self._handle.options(method_name="score", session_id=str(key))
            response = call.remote(model, part)
            try:
                return await response  # type: ignore[no-any-return]
            except asyncio.CancelledError:
                response.cancel()
                raise
            except RayActorError as error:
                reason = str(error).splitlines()[0]
                message = "A replica is gone; another scores its %d conversations: %s"
                logger.warning(message, len(part), reason)
                # An unreachable replica may be the only one, until Serve has replaced it.
                await asyncio.sleep(0.1)
        number = self._most_deaths
        message = f"{number} replicas died while they scored these conversations: {reason}"
        raise APIError(500, "scoring_failed", message)


@contextmanager
def started(
    config: ServerConfig,
    name: str,
    *,
    most_calls: int = _MOST_CALLS,
    most_deaths: int = _MOST_DEATHS,
    shutdown_seconds: float = SHUTDOWN_SECONDS,
) -> Iterator[Service]:
    """Replicas in Ray, under the name of an application, until the context ends.

    `most_calls`: in progress at a replica, which passes on what is above them to the next ones in
    the order of a prompt. `most_deaths`: as of `ReplicaBatcher`. `shutdown_seconds`: for calls in
    progress when the context ends. Raises `ConfigError` for more GPUs than this machine has, and
    `ModelError` for replicas that do not start.
    """
    ray = start_ray()
    # Serve starts them, watches them and replaces those that die.
    with _running(
        _of_replicas(config),
        name=name,
        num_replicas=config.replicas,
        max_ongoing_requests=most_calls,
        graceful_shutdown_timeout_s=shutdown_seconds,
        request_router_config={"request_router_class": _ROUTER},
        **_placed(config, ray),
    ) as handle:
        served = zip(handle.models.remote().result(), config.models, strict=True)
        # Clients see the members as they were named here, not the paths of the replicas.
        front_models = [replace(model, members=section.models) for model, section in served]
        batcher = ReplicaBatcher(handle, config, front_models, most_deaths=most_deaths)
        yield Service(front_models, config, ServerMetrics(), batcher)


def _of_replicas(config: ServerConfig) -> ServerConfig:
    """The configuration of each replica."""
    sections = []
    for section in config.models:
        models = []
        for model in section.models:
            check_local(model)
            # Replicas may run in another folder.
            is_local = Path(model).exists()
            models.append(str(Path(model).resolve()) if is_local else model)
        # The name follows from the path as it was given.
        changes = {"models": tuple(models), "name": section.served_name}
        sections.append(section.model_copy(update=changes))
    # The front counts what waits and refuses the rest, so a replica accepts whatever comes.
    return config.model_copy(update={"models": tuple(sections), "max_queued": 2**62})


def _placed(config: ServerConfig, ray: Any) -> dict[str, Any]:
    """Serve's options for where replicas run."""
    size = config.tensor_parallel_size
    options = config.ray_actor_options
    wants_gpu = any(section.device != "cpu" for section in config.models)
    share = equal_shares(
        ray,
        config.replicas * size,
        num_gpus=options.get("num_gpus", int(wants_gpu)),
        required="num_gpus" in options,
        where="replicas, ray_actor_options",
    )
    of_process = {**share, **options}
    if size == 1:
        return {"ray_actor_options": of_process}
    # A placement group: the processes of a replica are on one node, and start together or not.
    bundle = {"CPU": of_process.get("num_cpus", 1), "GPU": of_process.get("num_gpus", 0)}
    return {
        "ray_actor_options": {"num_cpus": bundle["CPU"], "num_gpus": bundle["GPU"]} | of_process,
        "placement_group_bundles": [bundle] * size,
        "placement_group_strategy": "STRICT_PACK",
    }


@contextmanager
def _running(config: ServerConfig, *, name: str, **options: Any) -> Iterator[Any]:
    """The handle of replicas in the Ray that runs, until the context ends.

    `options`: of `serve.deployment`. Raises `ModelError` for replicas that do not start.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config=_QUIET)
    deploy = serve.deployment(
        name="Replica",
        # By default Serve tries a model that cannot be loaded three times for each replica.
        max_constructor_retry_count=1,
        logging_config=_QUIET,
        **options,
    )
    try:
        try:
            handle = serve.run(deploy(Replica).bind(config), name=name, route_prefix=None)
        except RuntimeError:
            # With the traceback of the replica, whose last line is the error.
            status = serve.status().applications[name].deployments["Replica"].message
            reason = status.rpartition("treeward.errors.")[2].strip()
            raise ModelError(f"the replicas failed to start: {reason}") from None
        yield handle
    finally:
        serve.delete(name)
