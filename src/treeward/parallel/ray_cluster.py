"""`start_ray`: a running Ray, or a new one; and room in its cluster for the actors of a run.

ray = start_ray()
place = check_room(
    ray, count=2, cpus=1, gpus=1, what="the engines", where="policy", field="generation"
)
"""

from __future__ import annotations

import logging
import math
import os
import platform
import socket
from collections.abc import Collection, Mapping
from typing import Any

import torch

from treeward import processes
from treeward.errors import ConfigError, pip_install

logger = logging.getLogger(__name__)


def start_ray(*, spare_gpus: Collection[int] = (), address: str | None = None) -> Any:
    """Ray, running: a running one, that of `address`, the cluster of RAY_ADDRESS, or a new one on
    this machine. `spare_gpus`: the run's GPUs, by their places in CUDA_VISIBLE_DEVICES, which a new
    Ray leaves alone."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError("Ray is not installed", got=str(error), fix=pip_install("ray")) from error
    if not ray.is_initialized():
        # Ray reads this variable when it starts. This process gets its own value back below.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if spare_gpus:
            if visible:
                gpus = visible.split(",")
            else:
                gpus = [str(number) for number in range(torch.cuda.device_count())]
            left_to_ray = [gpu for place, gpu in enumerate(gpus) if place not in spare_gpus]
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(left_to_ray)
        try:
            ray.init(address, include_dashboard=False)
        except ConnectionError as error:
            got = f"{address or os.environ.get('RAY_ADDRESS')}: {first_line(error)}"
            fix = "ray start --address=HOST:6379 on each machine of the run, "
            fix += "or take RAY_ADDRESS out of the environment"
            raise ConfigError(
                "the Ray cluster cannot be reached", field="RAY_ADDRESS", got=got, fix=fix
            ) from error
        except Exception as error:  # Ray raises nothing narrower for a node that does not start
            got = first_line(error)
            fix = "end other Ray processes (ray stop), free memory and CPUs and start again; "
            fix += "or join a running cluster (RAY_ADDRESS)"
            raise ConfigError("Ray cannot be started on this machine", got=got, fix=fix) from error
        finally:
            if visible is None:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            else:
                os.environ["CUDA_VISIBLE_DEVICES"] = visible
    return ray


def start_ray_of_run(*, spares: bool, everywhere: bool) -> None:
    """Ray for the main process of a run or, with `everywhere`, for each: engines lie beside them.
    `spares`: a new Ray spares the GPUs of the run. Raises `ConfigError` for processes on several
    nodes of no cluster."""
    import ray

    is_joined = ray.is_initialized() or "RAY_ADDRESS" in os.environ
    nodes_joined = processes.gather((platform.node(), is_joined))
    nodes = sorted({node for node, _ in nodes_joined})
    all_joined = all(is_joined for _, is_joined in nodes_joined)
    if everywhere and len(nodes) > 1 and not all_joined:
        raise ConfigError(
            "engines of vLLM beside the processes of several nodes need one Ray cluster over these "
            "nodes",
            field="policy.generation.colocated.enabled",
            got=f"{', '.join(nodes)}, and no RAY_ADDRESS",
            need="Ray on each node, and RAY_ADDRESS in the environment of each process",
            fix="ray start --head on the first, ray start --address=FIRST:6379 on the others, "
            "then torchrun with RAY_ADDRESS=auto; "
            "on Slurm the way with Ray of examples/slurm.sub",
        )
    run_gpus: set[int] = set()
    if spares:
        run_gpus = set(processes.gather(processes.device().index)) - {None}

    def start() -> str:
        started = start_ray(spare_gpus=run_gpus)
        return str(started.get_runtime_context().gcs_address)

    # One process starts Ray and the others join it: each would else start a cluster of its own.
    address = processes.on_main(start)
    if everywhere:
        processes.together(lambda: start_ray(address=address))


def on_this_node(ray: Any) -> dict[str, Any]:
    """Ray's options of an actor on the node of this process."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    # `soft` would let Ray place it elsewhere where this node cannot take it.
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def check_room(
    ray: Any, *, count: int, cpus: float, gpus: int, what: str, where: str, field: str
) -> dict[str, float]:
    """The resources of one place with these CPUs and GPUs, or only CPUs in a cluster without GPUs.
    Raises `ConfigError` if the cluster is too small for `count` places. `where`, `field`: of the
    error."""
    cluster = ray.cluster_resources()
    on_gpu = gpus > 0 and cluster.get("GPU", 0.0) > 0
    if gpus and not on_gpu:
        logger.info("The Ray cluster has no GPU: %s runs on CPUs.", what)
    place = {"CPU": float(cpus)}
    if on_gpu:
        place["GPU"] = float(gpus)
    is_small = any(cluster.get(name, 0.0) < count * amount for name, amount in place.items())
    if is_small:  # Ray would wait for ever
        raise ConfigError(
            f"the Ray cluster is too small for {what}",
            where=where,
            field=field,
            got=_listed(cluster),
            need=f"{count} x ({_listed(place)})",
            fix="ask for less, or start Ray with more",
        )
    return place


def equal_shares(
    ray: Any, number: int, *, num_gpus: float, required: bool, where: str
) -> dict[str, float]:
    """Ray's options of `number` processes: so many GPUs each where there are any, else an equal
    part of a node's CPUs. `required`: they need GPUs. Raises `ConfigError` for more GPUs than a Ray
    of this machine has."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    have = sum(node.get("GPU", 0.0) for node in nodes)
    if num_gpus and (have or required):
        # a cluster may yet grow, and Ray waits for it; this machine does not
        if have < number * num_gpus and not os.environ.get("RAY_ADDRESS"):
            raise ConfigError(
                f"there are too few GPUs for {number}",
                where=where,
                got=f"{have:g} GPUs",
                need=f"{number * num_gpus:g}",
                fix="ask for fewer, or join a cluster (RAY_ADDRESS)",
            )
        return {"num_gpus": num_gpus}
    cpus = [int(node.get("CPU", 0.0)) for node in nodes]
    # The most whole CPUs that each process can have, when none is spread over two nodes.
    for share in range(max(cpus), 0, -1):
        room = sum(num_cpus // share for num_cpus in cpus)
        if room >= number:
            return {"num_cpus": share}
    # More processes than CPUs: Ray places as many of them on each CPU.
    processes_of_cpu = math.ceil(number / max(1, sum(cpus)))
    return {"num_cpus": 1 / processes_of_cpu}


def _listed(resources: Mapping[str, float]) -> str:
    gpus = resources.get("GPU", 0.0)
    cpus = resources.get("CPU", 0.0)
    return f"{gpus:g} GPUs, {cpus:g} CPUs"


def first_line(error: BaseException) -> str:
    """The first line of an error, or else its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])
