"""`plan`: the memory that a run takes of each device.

    planned = plan(load_run("rm.yaml", ["cluster.gpus_per_node=8"]), "h100")
    planned.memory["peak"], planned.fits

A step of the run itself is taken on fake tensors and a fake process group, with two micro-batches a device that are as
full as they get. Operations are taken one by one: compiled layers keep less, so the memory is an upper estimate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, distributed
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.testing._internal.distributed.fake_pg import FakeStore

import treeward.model  # noqa: F401 (it imports transformers quietly, and comes before what does not)
from treeward import processes
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.policy import ShardingConfig, TrainedModelConfig
from treeward.config.run import RewardModelRunConfig
from treeward.errors import ConfigError
from treeward.parallel.mesh import Mesh, make_mesh
from treeward.planning.runs import Filling, PlannedRun, grpo_run, reward_model_run
from treeward.planning.tracker import UNCOUNTED, MemoryTracker, no_storage
from treeward.tree import attention

GPUS: Mapping[str, float] = {"a100": 80e9, "h100": 80e9, "h200": 141e9, "b200": 180e9, "l40s": 48e9}
"""Bytes of memory by name, of NVIDIA's data sheets: A100 80GB SXM, H100 SXM, H200, HGX B200, L40S."""

_RESERVED = 0.05  # of the memory: for CUDA's context, libraries' workspaces and fragmentation
_MEAN_SHARE = 4  # a conversation has a quarter of the longest's tokens, where nobody says


@dataclass(frozen=True, slots=True)
class Plan:
    """`parameters`, `trained`: of the whole model, which is of the class `model`.

    `memory`: bytes of one device, by what holds them: first what is there for the whole step; `activations`, and all
    else that comes and goes; in sampling, when there are no gradients, `KV cache` and `whole policy`; `peak`, the most
    at a time, of what is `usable`; `host`, in the memory of the host. A micro-batch has `micro_batch_tokens`.
    """

    model: str
    layout: str
    parameters: int
    trained: int
    memory: dict[str, int]
    fits: bool
    micro_batch_tokens: int


def plan(config: RewardModelRunConfig | GRPORunConfig, gpu: str, *, mean_tokens: int | None = None) -> Plan:
    """The plan of a run on `gpu`, a name of `GPUS` or "cpu". `mean_tokens`: of a conversation, on average.

    Raises a `TreewardError` for a layout or a model that the run would refuse.
    """
    cluster, policy = config.training_cluster, config.policy
    nodes, devices = cluster.num_nodes, cluster.num_processes
    if isinstance(config, GRPORunConfig):
        longest, group = policy.max_total_sequence_length, config.grpo.num_generations_per_prompt
        make_run = partial(grpo_run, config)
    else:
        longest, group = config.max_sequence_length, 2
        make_run = partial(reward_model_run, config)
    if policy.load_in_4bit:
        raise ConfigError("weights of four bits are not planned: try the run itself", field="policy.load_in_4bit")
    mean = mean_tokens or max(longest // _MEAN_SHARE, 2)
    budget = max(policy.micro_batch_tokens or 3 * (policy.train_micro_batch_size or 1) * longest // 2, longest)
    filling = Filling.of(budget, group, mean)
    with _mesh_of(devices, policy.dtensor_cfg) as mesh, no_storage():
        run = make_run(mesh, filling)
        for model in filter(None, (run.model, run.frozen)):
            model.tree_attention = None if gpu == "cpu" else attention.FLEX
        memory, host = _measure(run, policy)
    sampling = sum(memory.values()) - memory["activations"] - memory["gradients"] + sum(run.sampled.values())
    peak = run.rewards + max(sum(memory.values()), sampling)
    usable = 0 if gpu == "cpu" else int(GPUS[gpu] * (1 - _RESERVED))
    others = {"reward models": run.rewards, **run.sampled, "peak": peak, "usable": usable, "host": host}
    return Plan(
        model=type(run.model.hf).__name__,
        layout=f"{nodes} nodes of " * (nodes > 1) + f"{devices // nodes} x {gpu}",
        parameters=sum(weight.numel() for weight in run.model.parameters()),
        trained=sum(weight.numel() for weight in run.model.parameters() if weight.requires_grad),
        memory=memory | {name: size for name, size in others.items() if size},
        fits=gpu == "cpu" or peak <= usable,
        micro_batch_tokens=filling.tokens,
    )


def _measure(run: PlannedRun, policy: TrainedModelConfig) -> tuple[dict[str, int], int]:
    """What a device holds at the peak of a step, and what the host holds."""
    offloads, alone = policy.dtensor_cfg.cpu_offload, processes.size() == 1
    on_host = offloads and alone  # the host steps tensors of its own; else FSDP keeps the shards there
    parameters, masters = [*run.model.parameters()], getattr(run.optimizer, "masters", [])
    for weight in parameters:  # the first step of an optimiser makes its states
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype) if weight.requires_grad else None
    gradients = _num_bytes(weight.grad for weight in parameters)
    run.optimizer.step()
    run.optimizer.zero_grad()
    states = [value for state in run.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    weights, optimizer = [*parameters, *run.model.buffers()], [*masters, *states]
    frozen = [] if run.frozen is None else [*run.frozen.parameters()]
    tracker = MemoryTracker()
    tracker.track_external(*weights, *frozen, *(() if on_host else optimizer))
    if on_host or policy.optimizer.name.startswith("torchao."):
        # torchao compiles its step to a few kernels: what is between two operations is never held
        run.optimizer.register_step_pre_hook(lambda *_: UNCOUNTED.__enter__())
        run.optimizer.register_step_post_hook(lambda *_: UNCOUNTED.__exit__())
    with tracker:
        run.step()
    memory = {"weights": _num_bytes(weights), "gradients": gradients, "optimizer": _num_bytes(optimizer)}
    memory |= {"reference": _num_bytes(frozen)} if frozen else {}
    activations = tracker.peak_bytes - sum(memory.values()) + (memory["optimizer"] if on_host else 0)
    moved = () if not offloads else ("optimizer",) if alone else tuple(memory)
    host = sum(memory[name] for name in moved)
    memory |= dict.fromkeys(moved, 0) | {"activations": activations}
    return memory, host


def _num_bytes(tensors: Iterable[Tensor | None]) -> int:
    storages = {storage for tensor in tensors if tensor is not None for storage in get_untyped_storages(tensor)}
    return sum(storage.nbytes() for storage in storages)


@contextlib.contextmanager
def _mesh_of(devices: int, config: ShardingConfig) -> Iterator[Mesh]:
    """Within it this is the first of so many processes, whose collectives do nothing."""
    if devices == 1:
        yield make_mesh(config)
        return
    distributed.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
    try:
        yield make_mesh(config)
    finally:
        distributed.destroy_process_group()
