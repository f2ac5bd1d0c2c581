"""`RayActor`: a class whose objects may live in Ray actors.

    environment = RewardModelEnvironment.remote(env_config)       # RewardModelEnvironment(env_config), in an actor
    environment = RewardModelEnvironment.options(name="rewards").remote(env_config)
    ray.get(environment.step.remote(message_logs, env_infos))

The actor has every public method of the class. A faulty configuration raises in the caller's process at once; an error
in the actor's constructor (a missing model) is raised by each of its methods. Ray does not restart the actor: running
statistics would be lost silently. Ray is imported when an actor is made.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import platform
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from treeward import processes
from treeward.errors import ConfigError, TreewardError

logger = logging.getLogger(__name__)


class RayActor:
    """Gives a class `remote` and `options`, as `@ray.remote` would, while it stays a class."""

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the object in a Ray actor and return the actor's handle. Starts Ray where it is not running."""
        return cls.options().remote(*args, **kwargs)

    @classmethod
    def options(cls, **ray_options: Any) -> RemoteFactory:
        """`remote` with options of Ray's `ActorClass.options`, as `name`, or `max_restarts` for a stateless class."""
        return RemoteFactory(cls, ray_options)

    @classmethod
    def check_remote(cls, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the actor's object. Called in the caller's process; raises `ConfigError` for wrong ones."""
        return args, kwargs


@dataclass(frozen=True)
class RemoteFactory:
    """A class and the Ray options of its actor."""

    cls: type[RayActor]
    ray_options: Mapping[str, Any]

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Make the actor. Raises `ConfigError` for a faulty configuration, and where Ray is not installed."""
        args, kwargs = self.cls.check_remote(*args, **kwargs)
        options = {"num_cpus": 0} | dict(self.ray_options)  # the actor's own work needs no CPU
        return start_ray().remote(_deferring(self.cls)).options(**options).remote(*args, **kwargs)


def start_ray(*, spare_gpus: Collection[int] = (), address: str | None = None) -> Any:
    """Ray, running: a running one, that of `address`, the cluster of RAY_ADDRESS, or a new one on this machine.

    `spare_gpus`: those that the run computes on, by their places in CUDA_VISIBLE_DEVICES; a new Ray spares them.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "Ray is not installed", got=str(error), fix="pip install 'treeward[ray]', or use one replica here"
        ) from error
    if not ray.is_initialized():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if spare_gpus:
            gpus = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for i, gpu in enumerate(gpus) if i not in spare_gpus)
        try:
            ray.init(address, include_dashboard=False)
        except ConnectionError as error:
            got = f"{address or os.environ.get('RAY_ADDRESS')}: {first_line(error)}"
            fix = "ray start --address=HOST:6379 on each machine of the run, or take RAY_ADDRESS out of the environment"
            raise ConfigError("the Ray cluster cannot be reached", field="RAY_ADDRESS", got=got, fix=fix) from error
        finally:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            os.environ.update({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    return ray


def start_ray_of_run(*, spares: bool, everywhere: bool) -> None:
    """Ray for the main process of a run or, with `everywhere`, for each of its processes: engines lie beside them.

    `spares`: a new Ray spares the GPUs of the run. Raises `ConfigError` for processes on several nodes of no cluster.
    """
    import ray

    found = processes.gather((platform.node(), ray.is_initialized() or "RAY_ADDRESS" in os.environ))
    nodes = sorted({node for node, _ in found})
    if everywhere and len(nodes) > 1 and not all(is_joined for _, is_joined in found):
        raise ConfigError(
            "engines of vLLM beside the processes of several nodes need one Ray cluster over these nodes",
            field="policy.generation.colocated.enabled",
            got=f"{', '.join(nodes)}, and no RAY_ADDRESS",
            need="Ray on each node, and RAY_ADDRESS in the environment of each process",
            fix="ray start --head on the first, ray start --address=FIRST:6379 on the others, then torchrun with "
            "RAY_ADDRESS=auto; on Slurm the way with Ray of examples/slurm.sub",
        )
    own = set(processes.gather(processes.device().index)) - {None} if spares else ()
    address = processes.on_main(lambda: str(start_ray(spare_gpus=own).get_runtime_context().gcs_address))
    if everywhere:
        processes.together(lambda: start_ray(address=address))


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """Room for several actors, or groups of actors, in a Ray cluster, each on one node."""

    ray: Any
    group: Any
    on_gpu: bool

    def options(self, number: int) -> dict[str, Any]:
        """Ray's options of an actor in the place of this number."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)
        return {"scheduling_strategy": place}

    def free(self) -> None:
        """Give the room back."""
        self.ray.util.remove_placement_group(self.group)


def on_this_node(ray: Any) -> dict[str, Any]:
    """Ray's options of an actor on the node of this process."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def reserve(*, count: int, cpus: float, gpus: int, what: str, where: str, field: str, seconds: float) -> PlacementGroup:
    """`count` places of so many CPUs and GPUs each for `what`, once they are free; a cluster without GPUs gives CPUs.

    `where`, `field`: what asks for them, in errors. Raises `ConfigError` where the cluster is too small, or they are
    not free after so many seconds.
    """
    ray = start_ray()
    cluster = ray.cluster_resources()
    on_gpu = gpus > 0 and cluster.get("GPU", 0.0) > 0
    if gpus and not on_gpu:
        logger.info("The Ray cluster has no GPU: %s runs on CPUs.", what)
    place = {"CPU": cpus} | ({"GPU": float(gpus)} if on_gpu else {})
    need = f"{count} x ({_listed(place)})"
    if any(cluster.get(name, 0.0) < count * amount for name, amount in place.items()):  # Ray would wait for ever
        summary, got = f"the Ray cluster is too small for {what}", _listed(cluster)
    else:
        places = PlacementGroup(ray, ray.util.placement_group([place] * count), on_gpu)
        if places.group.wait(seconds):
            return places
        places.free()
        summary = f"{what} finds no free place in the Ray cluster"
        got = f"free after {seconds:g} seconds: {_listed(ray.available_resources())}"
    fix = "ask for less, start Ray with more, or free resources"
    raise ConfigError(summary, where=where, field=field, got=got, need=need, fix=fix)


def equal_shares(ray: Any, number: int, *, num_gpus: float, required: bool, where: str) -> dict[str, float]:
    """Ray's options of `number` processes: so many GPUs each where there are any, else an equal part of a node's CPUs.

    `required`: they have no use for CPUs. Raises `ConfigError` for more GPUs than a Ray of this machine has; a cluster
    (RAY_ADDRESS) may grow.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    have = sum(node.get("GPU", 0.0) for node in nodes)
    if num_gpus and (have or required):
        if have < number * num_gpus and not os.environ.get("RAY_ADDRESS"):
            fix = "ask for fewer, or join a cluster (RAY_ADDRESS)"
            got, need = f"{have:g} GPUs", f"{number * num_gpus:g}"
            raise ConfigError(f"there are too few GPUs for {number}", where=where, got=got, need=need, fix=fix)
        return {"num_gpus": num_gpus}
    cpus = [int(node.get("CPU", 0.0)) for node in nodes]
    share = next((n for n in range(max(cpus), 0, -1) if sum(one // n for one in cpus) >= number), 0)
    return {"num_cpus": share or 1 / math.ceil(number / max(1, sum(cpus)))}


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0.0):g} {name}s" for name in ("GPU", "CPU"))


def first_line(error: BaseException) -> str:
    """What an error says first, or else its kind."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server(("", 0)) as found:
        return int(found.getsockname()[1])


def _deferring(cls: type[RayActor]) -> type:
    """A class with the public methods of `cls` that can always be made: its methods raise the constructor's error.

    Ray keeps only the text of an exception in an actor's constructor.
    """

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        self.error = None
        try:
            self.object = cls(*args, **kwargs)
        except TreewardError as error:
            self.error = error

    body: dict[str, Any] = {"__init__": construct, "__doc__": cls.__doc__, "__module__": cls.__module__}
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if not name.startswith("_") and inspect.isfunction(member):
            body[name] = _forwarding(name, member)
    return type(cls.__name__, (), body)


def _forwarding(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.error is None:
            return getattr(self.object, name)(*args, **kwargs)
        if name == "shutdown":
            return True  # there is nothing to free
        raise self.error

    return call
