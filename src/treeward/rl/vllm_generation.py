"""`VllmGenerator`: completions sampled by engines of vLLM that the run starts, each in a Ray actor.

    apart = {"enabled": False, "resources": {"gpus_per_node": 4}}
    section = GenerationConfig(backend="vllm", colocated=apart)
    generator = VllmGenerator(policy, tokenizer, section, end_ids, chat_template=template)
    generator.load_weights(policy, 0)
    groups = generator.generate(prompts, prompt_ids, num_completions=8, seed=1)
    generator.close()

An engine starts from the policy's configuration and tokenizer with arbitrary weights, and gets the
policy's by vLLM's weight transfer, whose sending side runs in this process:
`WeightTransferTrainerFactory` of vLLM 0.29 and later. Weights travel in buckets: to a colocated
engine by shared memory of the GPU (CUDA IPC), to others by NCCL. Outside of `load_weights` to
`generate`, a colocated engine sleeps (level 1: its weights go to the host's memory).
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treeward import processes
from treeward.config.grpo_policy import GenerationConfig
from treeward.data.prompt_sets import Prompt
from treeward.errors import ConfigError
from treeward.model.export import exported_weights, write_settings
from treeward.model.policy_model import PolicyModel
from treeward.model.pretrained import DTYPES
from treeward.parallel.ray_cluster import check_room, first_line, free_port, on_this_node, start_ray
from treeward.rl.generation import CompletionGroup, GenerationError
from treeward.rl.served_generation import CompletionRequest, Served, ServedGenerator
from treeward.rl.vllm_engine import VllmEngine, engine_options, sampling_parameters

logger = logging.getLogger(__name__)

_START_SECONDS = 1800.0
_WHERE = "policy.generation"


def check_gpus() -> None:
    """Raise `ConfigError` if vLLM finds no GPU: its engines get their weights on GPUs. vLLM must be
    installed."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        raise ConfigError(
            "this machine has no GPU for engines of vLLM",
            where=_WHERE,
            field="backend url",
            got=f"vLLM for {current_platform.device_type or 'no device'}",
            fix="sample with policy.generation.backend=hf, or name a server: policy.generation.url",
        )


class VllmGenerator(ServedGenerator):
    """See `Generator`. Every process takes part in vLLM's weight transfer; only the main one starts
    and calls engines.

    Raises `ConfigError` for too few GPUs, `GenerationError` for an engine that does not start.
    """

    def __post_init__(self) -> None:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        engine = self.config.vllm_cfg
        world = processes.size()
        self._colocated = self.config.colocated.enabled
        if self._colocated and world % engine.tensor_parallel_size:
            raise ConfigError(
                "colocated engines do not fit the run",
                where=_WHERE,
                field="vllm_cfg.tensor_parallel_size",
                got=engine.tensor_parallel_size,
                need=f"a divisor of {world}, the processes that train",
            )
        # The engine refuses what is longer than its own limit.
        limits = (self.max_total_tokens, engine.max_model_len, self.policy.max_positions)
        self.max_total_tokens = min(filter(None, limits), default=None)
        super().__post_init__()
        # Every process says on which node a colocated engine runs; else the main one alone uses
        # Ray.
        self._ray: Any = None
        if self._colocated or processes.is_main():
            self._ray = start_ray()
        self.sampler_dtype = DTYPES[engine.precision or "bfloat16"]
        self.num_samplers = self.config.num_engines
        if self._colocated:
            self.num_samplers = world // engine.tensor_parallel_size
        self._weights = _PolicyWeights(self.policy, self.sampler_dtype)
        self.engines: list[Any] = []
        """The actors of Ray, on the main process."""
        # The parts of the engines, by vLLM's tags, that have no memory on the GPU now.
        self._asleep: set[str] = set()
        self._weights.metadata()  # on all processes: a sharded policy is gathered for it
        training: Sequence[_Place] = []
        if self._colocated:
            training = processes.gather((on_this_node(self._ray), _own_gpu()))
        try:
            processes.on_main(lambda: self._start(training))
            self._transfer = WeightTransferTrainerFactory.trainer_init(
                init_info=self._transfer_info(),
                client=_Client(self),
                source=self._weights,
            )
            self._sleep()
        except BaseException:
            self.close()
            raise

    def _start(self, training: Sequence[_Place]) -> None:
        dtype = self._weights.dtype
        hf = self.policy.hf
        changes = {"dtype": dtype, "architectures": [type(hf).__name__]}
        with tempfile.TemporaryDirectory() as folder:
            write_settings(hf, self.tokenizer, Path(folder), changes, self.chat_template)
            files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        name = str(dtype).removeprefix("torch.")
        options = engine_options(self.config, max_model_len=self.max_total_tokens, dtype=name)
        options |= {
            "trust_remote_code": self.trust_remote_code,
            "enforce_eager": self.config.vllm_cfg.enforce_eager,
            **self.config.vllm_kwargs,
        }
        actor = self._ray.remote(VllmEngine)
        self.engines = []
        for actor_options in self._place(training):
            self.engines.append(actor.options(**actor_options).remote())
        backend = "nccl"
        place = "apart from"
        if self._colocated:
            backend = "ipc"  # NCCL refuses two processes on one GPU
            place = "beside"
        self._all("start", files, backend, options, seconds=_START_SECONDS)
        logger.info(
            "%d engines of vLLM, %d GPUs each, %s those that train.",
            len(self.engines),
            self.config.vllm_cfg.tensor_parallel_size,
            place,
        )

    def load_weights(self, policy: PolicyModel, version: int) -> None:
        """Give the engines the weights and compare. Raises `GenerationError` where they have others
        afterwards."""
        self.version = version
        self._weights.policy = policy
        # Not the cache yet: weights and their copies in transfer need the room.
        self._wake("weights")
        self._transfer.send_weights()
        self._wake("kv_cache")
        # The cache holds values of the old weights. True: for running requests too.
        self._tell("reset_prefix_cache", True)
        self.compare(policy, where="an engine of vLLM")

    def generate(
        self,
        prompts: Sequence[Prompt],
        prompt_ids: Sequence[Sequence[int]],
        *,
        num_completions: int,
        seed: int,
    ) -> list[CompletionGroup]:
        """See `Generator`. The prompts are shared out over the engines."""
        # Asleep meanwhile, so that the update has the memory of the GPU.
        self._wake("weights", "kv_cache")
        groups = super().generate(prompts, prompt_ids, num_completions=num_completions, seed=seed)
        self._sleep()
        return groups

    def ask(
        self, requests: Sequence[CompletionRequest], sampling: GenerationConfig, *, log_probs: bool
    ) -> list[list[Served]]:
        end_ids = sorted(self.reader.end_ids)
        prompts = [request.prompt_ids for request in requests]
        parameters = []
        for request in requests:
            parameters.append(sampling_parameters(request, sampling, end_ids, log_probs=log_probs))
        # `timeout_seconds` is of one request, and so many go at once.
        rounds = math.ceil(len(requests) / self.config.max_concurrency)
        seconds = self.config.timeout_seconds * rounds
        # Requests are dealt out in turn, as `compare` expects.
        count = len(self.engines)
        shares = [(prompts[e::count], parameters[e::count]) for e in range(count)]
        replies: list[Any] = [None] * len(requests)
        for e, share in enumerate(self._all("generate", each=shares, seconds=seconds)):
            replies[e::count] = share
        completions: list[list[Served]] = []
        try:
            for request, reply in zip(requests, replies, strict=True):
                completions.append(self.checked(reply, request, log_probs=log_probs))
        except ValueError as error:
            raise GenerationError(
                "an engine's completions do not fit the request",
                where=_WHERE,
                got=f"{error}; asked for {requests[0].description}, and others",
            ) from None
        return completions

    def close(self) -> None:
        """End the engines."""
        if self._ray is not None and self._ray.is_initialized():
            for engine in self.engines:
                self._ray.kill(engine)
        self.engines = []
        self._transfer = None

    def _all(
        self,
        method: str,
        *args: Any,
        each: Sequence[tuple[Any, ...]] | None = None,
        seconds: float | None = None,
    ) -> list[Any]:
        """Call a method of all engines at once, from the main process. `each`: further arguments,
        per engine."""
        own_arguments = each or [()] * len(self.engines)
        running = []
        for engine, arguments in zip(self.engines, own_arguments, strict=True):
            running.append(getattr(engine, method).remote(*args, *arguments))
        timeout = seconds or self.config.timeout_seconds
        try:
            return list(self._ray.get(running, timeout=timeout))
        except self._ray.exceptions.RayError as error:
            # `call` is only the way to the engine's method.
            called = args[0] if method == "call" else method
            reason = first_line(getattr(error, "cause", error))
            raise GenerationError(
                "an engine of vLLM has failed",
                where=_WHERE,
                got=f"{called}: {reason}",
                fix=(
                    "look at vllm_cfg (such as gpu_memory_utilization), vllm_kwargs, "
                    "timeout_seconds and Ray's logs of the engine; the same command goes on from "
                    "the last checkpoint"
                ),
            ) from error

    def _tell(self, method: str, *args: Any) -> None:
        """Call a method of each engine. Every process calls this, and gets its error."""
        processes.on_main(lambda: self._all("call", method, *args))

    def _wake(self, *parts: str) -> None:
        tags = [part for part in parts if part in self._asleep]
        if not tags:
            return
        torch.cuda.empty_cache()
        processes.gather(None)  # until each has made room on its GPU
        self._tell("wake_up", tags)
        self._asleep -= set(tags)

    def _sleep(self) -> None:
        if self._colocated:
            self._tell("sleep", 1)
            self._asleep = {"weights", "kv_cache"}

    def _place(self, training: Sequence[_Place]) -> list[dict[str, Any]]:
        """Ray's options of each engine: on the training processes' GPUs, or on its own."""
        size = self.config.vllm_cfg.tensor_parallel_size
        if self._colocated:
            options = []
            for first in range(0, len(training), size):
                beside = training[first : first + size]
                # Handles of shared memory travel as pickles, from the run alone.
                variables = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
                gpus = [gpu for _, gpu in beside if gpu is not None]
                if gpus:
                    variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
                    # Ray gives this actor no GPU, and would empty the variable.
                    variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
                node_options, _ = beside[0]
                environment = {"env_vars": variables}
                options.append({"num_cpus": 0, **node_options, "runtime_env": environment})
            return options
        count = self.config.num_engines
        place = check_room(
            self._ray,
            count=count,
            cpus=1.0,
            gpus=size,
            what="vLLM",
            where=_WHERE,
            field="colocated.resources",
        )
        return [{"num_cpus": 1, "num_gpus": place.get("GPU", 0.0)}] * count

    def _transfer_info(self) -> Any:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        if self._colocated:
            return IPCTrainerInitInfo(rank=processes.rank(), packed=True)
        host, port = processes.on_main(lambda: (self._ray.util.get_node_ip_address(), free_port()))
        num_receivers = self.config.vllm_cfg.tensor_parallel_size * self.config.num_engines
        return NCCLTrainerInitInfo(
            master_address=host,
            master_port=port,
            world_size=1 + num_receivers,  # rank 0 sends
            rank=processes.rank(),
            packed=True,
        )


_Place = tuple[dict[str, Any], str | None]
"""Ray's options for the node of a training process, and its GPU."""


def _own_gpu() -> str | None:
    """The GPU of this process, as CUDA_VISIBLE_DEVICES calls it."""
    device = processes.device()
    if device.type == "cpu":
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible:
        return str(device.index)
    return visible.split(",")[device.index]


class _PolicyWeights:
    """vLLM's `WeightSource`: the weights of the policy, adapters merged, by the names of Hugging
    Face."""

    def __init__(self, policy: PolicyModel, dtype: torch.dtype) -> None:
        self.policy = policy
        self.dtype = dtype
        self._metadata: list[Any] = []

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in exported_weights(self.policy, self.dtype):
            # With cpu_offload the weights lie on the host.
            yield name, weight.to(processes.device())

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer import ParamMeta

        if not self._metadata:
            metadata = []
            for name, weight in self:
                metadata.append(ParamMeta(name, weight.dtype, tuple(weight.shape)))
            self._metadata = metadata
        return self._metadata


class _Client:
    """vLLM's `VLLMWeightSyncClient`: the sending side's calls of the engines."""

    def __init__(self, generator: VllmGenerator) -> None:
        self._all = generator._all
        self._count = len(generator.engines)
        self._size = generator.config.vllm_cfg.tensor_parallel_size

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        each = []
        for engine in range(self._count):
            own_info = dict(init_info)
            if "rank_offset" in own_info:
                # Rank 0 sends; an engine has the ranks of its GPUs from here on.
                own_info["rank_offset"] = 1 + engine * self._size
            each.append(({"init_info": own_info},))
        self._all("call", "init_weight_transfer_engine", each=each)

    def start_weight_update(self) -> None:
        self._all("call", "start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._all("call", "update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("call", "finish_weight_update")
