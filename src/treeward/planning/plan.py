"""`plan`: the memory that a run takes of each device, by arithmetic.

    planned = plan(load_run("rm.yaml", ["cluster.gpus_per_node=8"]), "h100")
    planned.memory["peak"], planned.fits

Of the model its config.json is read, and no weights. What its states take is counted weight by
weight, what its layers keep of a micro-batch by the formula of `treeward.planning.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# It imports transformers quietly, and comes before modules that do not.
import treeward.model  # noqa: F401
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.policy import OptimizerConfig, TrainedModelConfig
from treeward.config.run import ClusterConfig, RewardModelRunConfig
from treeward.errors import ConfigError
from treeward.model.checks import other_layers
from treeward.model.policy_model import PolicyModel
from treeward.model.pretrained import DTYPES, read_config
from treeward.model.reward_model import RewardModel
from treeward.model.wrapped import WrappedModel
from treeward.parallel.mesh import mesh_shape
from treeward.parallel.tensor import check_cut
from treeward.planning.bare_models import (
    bare_causal_model,
    bare_classifier,
    bare_policy,
    bare_reward_model,
)
from treeward.planning.memory import activation_bytes, find_mixers, layer_shapes
from treeward.planning.recurrent_memory import FUSED_KERNELS
from treeward.planning.sampling_memory import SamplingShape, sampling_memory
from treeward.training.models import adapt
from treeward.training.optimisation import build_optimizer, check_sharded_optimizer

GPUS: Mapping[str, float] = {
    "l4": 24e9,
    "rtx4090": 24e9,
    "rtx5090": 32e9,
    "a100-40gb": 40e9,
    "a100": 80e9,
    "h100": 80e9,
    "h200": 141e9,
    "b200": 180e9,
    "l40s": 48e9,
}
"""Bytes of memory by name, of NVIDIA's data sheets: L4, GeForce RTX 4090 and 5090, A100 40GB and
80GB SXM, H100 SXM, H200, HGX B200, L40S."""

_RESERVED = 0.05
"""Of the memory: for CUDA's context, the workspaces of libraries and fragmentation."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`parameters`, `trained`: of the whole model, which is of the class `model`.

    `memory`: bytes of one device, by what holds them. `weights`, `gradients`, `optimizer` and
    `reference` are there for the whole step; `activations` and `exchanged` weights come and go.
    `reward models`: beside a policy, judges too. `KV cache`, `recurrent states` and `whole policy`:
    while completions are sampled, when there are no gradients; `prompts`: before that, in place of
    the first two. `peak`: the most at a time. `usable`: of the device's memory. `host`: in the
    memory of the host, for each device. A micro-batch has `micro_batch_tokens`.

    `unknown`: layers of which the formula knows neither the activations nor what they keep while
    completions are sampled; they are in no number. `fits` is then false where the rest is too much
    already, and otherwise None.

    `kernels`: packages of fused kernels that a GPU may compute recurrent layers by. They keep other
    activations than PyTorch's functions, which are the ones that are planned. `fits` is None where
    these are too much and the rest is not.
    """

    model: str
    layout: str
    parameters: int
    trained: int
    memory: dict[str, int]
    fits: bool | None
    micro_batch_tokens: int
    unknown: str | None = None
    kernels: str | None = None


@dataclass(frozen=True, slots=True)
class _Layout:
    """Each weight is shared by `shards` of the run's `processes`, and cut into `tensor` parts
    before that."""

    processes: int
    shards: int
    tensor: int

    @property
    def parts(self) -> int:
        return self.shards * self.tensor

    @property
    def is_sharded(self) -> bool:
        """Whether the model goes through FSDP. So does that of several whole copies: its trained
        weights are float32 and exchanged like those of a sharded one."""
        return self.processes > 1


def plan(config: RewardModelRunConfig | GRPORunConfig, gpu: str) -> Plan:
    """The plan of a run on `gpu`, a name of `GPUS` or "cpu".

    Raises a `TreewardError` for a layout or a model that the run would refuse.
    """
    policy = config.policy
    processes = config.training_cluster.num_processes
    _, shards, tensor = mesh_shape(policy.dtensor_cfg, processes)
    layout = _Layout(processes, shards, tensor)
    if layout.is_sharded:
        check_sharded_optimizer(policy.optimizer)
    model = _adapted_model(config, layout)
    _check_planned(policy, model)
    unknown = _unknown_layers(model)
    tokens = _micro_batch_tokens(config)
    on_cpu = gpu == "cpu"

    # There for the whole step.
    held = _held_bytes(config, model, layout)
    host = 0
    if policy.dtensor_cfg.cpu_offload:
        # One process keeps masters and states of the optimizer on the host; several keep all their
        # shards there.
        moved = list(held) if layout.is_sharded else ["optimizer"]
        host = sum(held[name] for name in moved)
        held |= dict.fromkeys(moved, 0)
    # Only while a micro-batch is learnt from.
    learning: dict[str, int] = {}
    if unknown is None:
        learning["activations"] = _activation_bytes(model, policy, tokens, tensor, on_cpu=on_cpu)
    if layout.is_sharded:
        learning["exchanged"] = _exchanged_bytes(model, policy, tensor)
    # Only while completions are sampled; and reward models, which are there all the time.
    sampling: dict[str, int] = {}
    rewards = 0
    if isinstance(config, GRPORunConfig):
        assert isinstance(model, PolicyModel)
        sampling = _sampling_bytes(
            config, model, layout, on_cpu=on_cpu, knows_layers=unknown is None
        )
        rewards = _reward_model_bytes(config)

    # A step reads prompts, samples and learns, one after the other: the largest of the three counts.
    while_reading, while_sampling = _before_learning(held, sampling)
    while_learning = sum(held.values()) + sum(learning.values())
    peak = rewards + max(while_learning, while_reading, while_sampling)
    usable = 0  # of a CPU's memory the plan knows nothing, and every run fits
    if not on_cpu:
        usable = int(GPUS[gpu] * (1 - _RESERVED))
    fits: bool | None = on_cpu or peak <= usable
    if fits and unknown is not None:
        fits = None
    kernels = None
    if not on_cpu:
        kernels = _fused_kernels(model)
    # Kernels keep other activations, and compute prompts in other ways.
    without_kernels = while_learning - learning.get("activations", 0)
    certain = rewards + max(without_kernels, while_sampling)
    if not fits and kernels is not None and certain <= usable:
        fits = None
    others = {
        "reward models": rewards,
        **sampling,
        "peak": peak,
        "usable": usable,
        "host": host,
    }
    # a row of zeros would only lengthen the table
    others = {name: size for name, size in others.items() if size}
    return Plan(
        model=type(model.hf).__name__,
        layout=_layout_text(config.training_cluster, gpu),
        parameters=_count(model),
        trained=_count(model, only_trained=True),
        memory=held | learning | others,
        fits=fits,
        micro_batch_tokens=tokens,
        unknown=unknown,
        kernels=kernels,
    )


def _before_learning(held: Mapping[str, int], sampling: Mapping[str, int]) -> tuple[int, int]:
    """The bytes that are there while prompts are read, and while completions are sampled."""
    always = sum(held.values()) - held["gradients"] + sampling.get("whole policy", 0)
    of_completions = sampling.get("KV cache", 0) + sampling.get("recurrent states", 0)
    return always + sampling.get("prompts", 0), always + of_completions


def _layout_text(cluster: ClusterConfig, gpu: str) -> str:
    text = f"{cluster.num_processes // cluster.num_nodes} x {gpu}"
    if cluster.num_nodes > 1:
        text = f"{cluster.num_nodes} nodes of {text}"
    return text


def _check_planned(policy: TrainedModelConfig, model: WrappedModel) -> None:
    """Raise `ConfigError` for a run of which nothing can be planned."""
    reason = why_not_planned(policy, model)
    if reason is not None:
        raise ConfigError(
            "the memory of this run cannot be planned",
            field="policy",
            got=reason,
            fix="try the run itself with fewer layers, and watch its memory",
        )


def why_not_planned(policy: TrainedModelConfig, model: WrappedModel) -> str | None:
    """Why nothing of a run can be planned; None if it can."""
    if policy.load_in_4bit:
        return "weights of 4 bits"
    if not model.layers:
        return f"the layers of {type(model.hf).__name__}"
    return None


_ONE_MODULE = {"mlp", "moe"}
"""The types of layers of an MLP alone (Nemotron-H)."""


def _unknown_layers(model: WrappedModel) -> str | None:
    """The layers whose activations the formula does not know; None if it knows all."""
    config = model.hf.config.get_text_config()
    other = other_layers(model.hf)
    if other:
        mixers = find_mixers(model, on_cpu=True)
        # Layers within layers (Zamba) are not those that the configuration names.
        if len(config.layer_types) == len(mixers):
            for layer_type, mixer in zip(config.layer_types, mixers, strict=True):
                is_known = mixer is not None or layer_type in _ONE_MODULE
                if layer_type in other and not is_known:
                    return f"layers of type {layer_type}"
            return None
        return f"layers of type {', '.join(other)}"
    if not hasattr(config, "num_attention_heads"):
        return f"the layers of {type(model.hf).__name__}"
    return None


def _fused_kernels(model: WrappedModel) -> str | None:
    """The packages whose kernels may compute the model's recurrent layers on a GPU."""
    mixers = find_mixers(model, on_cpu=False)
    packages = {FUSED_KERNELS[type(mixer.shape)] for mixer in mixers if mixer is not None}
    if not packages:
        return None
    # Every such layer has a convolution.
    return ", ".join(sorted(packages | {"causal-conv1d"}))


def _micro_batch_tokens(config: RewardModelRunConfig | GRPORunConfig) -> int:
    """The tokens of a full micro-batch; a conversation of full length fits into every one."""
    policy = config.policy
    if isinstance(config, GRPORunConfig):
        longest = policy.max_total_sequence_length
    else:
        longest = config.max_sequence_length
    if policy.micro_batch_tokens is not None:
        return max(policy.micro_batch_tokens, longest)
    # a size in pairs: two completions with a common prompt of half their length
    pairs = policy.train_micro_batch_size or 1
    return max(3 * pairs * longest // 2, longest)


def _adapted_model(
    config: RewardModelRunConfig | GRPORunConfig, layout: _Layout
) -> RewardModel | PolicyModel:
    """The model without weights, whose parameters have the dtypes and the adapters of the run."""
    policy = config.policy
    model: RewardModel | PolicyModel
    with torch.device("meta"):
        if isinstance(config, GRPORunConfig):
            model = bare_policy(config.policy)
        else:
            model = bare_reward_model(config.policy)
        if not (layout.is_sharded and policy.trains_backbone):  # trained shards are float32
            model.cast(DTYPES[policy.precision])
        # After the cast: adapters are float32 in a model of any precision.
        adapt(model, policy, seed=0, checkpoint=None)
    # The run would refuse such a model only after its weights were loaded.
    check_cut(model, layout.tensor)
    return model


def _held_bytes(
    config: RewardModelRunConfig | GRPORunConfig,
    model: RewardModel | PolicyModel,
    layout: _Layout,
) -> dict[str, int]:
    """What is there for the whole step, by name."""
    policy = config.policy
    # Several processes offload by FSDP, whose step is an ordinary one over shards on the host.
    steps_on_host = policy.dtensor_cfg.cpu_offload and not layout.is_sharded
    weights = 0
    gradients = 0.0
    optimizer = 0.0
    of_dtype: dict[torch.dtype, tuple[float, float]] = {}
    for weight in model.parameters():
        weights += weight.nbytes
        if not weight.requires_grad:
            continue
        # one step of the optimizer tells it for all weights of a dtype
        if weight.dtype not in of_dtype:
            of_dtype[weight.dtype] = _bytes_of_weight(
                policy.optimizer, weight.dtype, on_host=steps_on_host
            )
        bytes_of_gradient, bytes_of_states = of_dtype[weight.dtype]
        gradients += bytes_of_gradient * weight.numel()
        optimizer += bytes_of_states * weight.numel()
    sizes = {"weights": weights, "gradients": int(gradients), "optimizer": int(optimizer)}
    needs_reference = isinstance(config, GRPORunConfig) and config.needs_reference
    # With adapters the reference is the policy without them, and takes no memory of its own.
    if needs_reference and not policy.dtensor_cfg.lora_cfg.enabled:
        sizes["reference"] = _frozen_bytes(model, policy)
    return {name: size // layout.parts for name, size in sizes.items()}


def _bytes_of_weight(
    config: OptimizerConfig, dtype: torch.dtype, *, on_host: bool
) -> tuple[float, float]:
    """Bytes of the gradient of a weight, and of its master and the optimizer's states.

    They are counted in a step of the optimizer itself over a small matrix: AdamW in float32 4 and
    8, in bfloat16 4 and 12, torchao's AdamW8bit in bfloat16 2 and about 2.
    """
    # Not smaller: torchao leaves the states of weights of less than 4096 numbers unquantized.
    layer = nn.Linear(256, 256, bias=False, dtype=dtype)
    weight = layer.weight
    optimizer = build_optimizer(layer, config, cpu_offload=on_host)
    weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    bytes_of_gradient = weight.grad.nbytes
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, which takes minutes
        optimizer.step()
    held = list(getattr(optimizer, "masters", []))
    for states in optimizer.state.values():
        held += [value for value in states.values() if isinstance(value, Tensor)]
    return bytes_of_gradient / weight.numel(), sum(map(_num_bytes, held)) / weight.numel()


def _num_bytes(tensor: Tensor) -> int:
    """The bytes of a tensor, or of those that a quantized one consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    names, _ = tensor.__tensor_flatten__()
    return sum(_num_bytes(getattr(tensor, name)) for name in names)


def _frozen_bytes(model: RewardModel | PolicyModel, policy: TrainedModelConfig) -> int:
    """A frozen copy of the model in the dtype of the computation."""
    return model.hf.num_parameters() * DTYPES[policy.precision].itemsize


def _activation_bytes(
    model: RewardModel | PolicyModel,
    policy: TrainedModelConfig,
    tokens: int,
    tensor: int,
    *,
    on_cpu: bool,
) -> int:
    head_bytes = 0
    if isinstance(model, PolicyModel):
        # the logits of a chunk with their softmax, and the gradient of the head in float32
        head = model.head.weight
        logits = 2 * 4 * min(model.chunk_tokens, tokens) * len(head)
        gradient = 4 * head.numel() if head.requires_grad else 0
        head_bytes = (logits + gradient) // tensor
    return activation_bytes(
        layer_shapes(model, on_cpu=on_cpu),
        tokens,
        itemsize=DTYPES[policy.precision].itemsize,
        recomputes=policy.dtensor_cfg.activation_checkpointing,
        tensor_size=tensor,
        head_bytes=head_bytes,
    )


def _exchanged_bytes(
    model: RewardModel | PolicyModel, policy: TrainedModelConfig, tensor: int
) -> int:
    """What a sharded model has whole at a time: a layer and the one that is fetched meanwhile, the
    weights outside of the layers, and the gradient of a layer in float32."""
    itemsize = DTYPES[policy.precision].itemsize
    sizes = [_count(layer) for layer in model.layers]
    trained = [_count(layer, only_trained=True) for layer in model.layers]
    outside = _count(model) - sum(sizes)
    # FSDP computes in the run's precision and reduces gradients in float32, 4 bytes each.
    return (itemsize * (2 * max(sizes) + outside) + 4 * max(trained)) // tensor


def _count(module: nn.Module, *, only_trained: bool = False) -> int:
    """The number of weights of a module."""
    weights = module.parameters()
    return sum(weight.numel() for weight in weights if weight.requires_grad or not only_trained)


def _sampling_bytes(
    config: GRPORunConfig,
    model: PolicyModel,
    layout: _Layout,
    *,
    on_cpu: bool,
    knows_layers: bool,
) -> dict[str, int]:
    """What a process holds to sample completions, and its whole policy."""
    generation = config.policy.generation
    # A server or an engine of vLLM has memory of its own, which is no part of this plan.
    if generation.url is not None or generation.starts_engines:
        return {}
    sizes = {}
    if knows_layers:
        memory = sampling_memory(
            model,
            SamplingShape.of(config),
            itemsize=DTYPES[config.policy.precision].itemsize,
            on_cpu=on_cpu,
            tensor_size=layout.tensor,
        )
        sizes = {
            "prompts": memory.prompts,
            "KV cache": memory.keys_and_values,
            "recurrent states": memory.states,
        }
    # Each process samples its own prompts with all weights (`on_whole` of `parallel.sharding`).
    if layout.is_sharded:
        sizes["whole policy"] = _frozen_bytes(model, config.policy) // layout.tensor
    return sizes


def _reward_model_bytes(config: GRPORunConfig) -> int:
    """Weights of the reward models and judges on the policy's device."""
    size = 0
    for section in config.reward_models.values():
        is_elsewhere = section.url is not None or section.needs_ray
        # An offloaded model is on the GPU only while it scores, and never while the policy learns.
        is_on_host = section.dtensor_cfg.cpu_offload or not section.resources.gpus_per_node
        if is_elsewhere or is_on_host:
            continue
        for name in section.models:
            with torch.device("meta"):
                model = bare_classifier(read_config(name, section.trust_remote_code))
            size += model.num_parameters() * DTYPES[section.dtype].itemsize
    for judge in config.judges:
        # None: a GPU if any. Of several GPUs the policy has the first.
        if judge.base_url is None and judge.device in (None, "cuda", "cuda:0"):
            with torch.device("meta"):
                hf = bare_causal_model(read_config(judge.model, trust_remote_code=False))
            size += hf.num_parameters() * DTYPES[judge.dtype].itemsize
    return size
