"""Runs on made-up data: the model, the optimiser and the step of a configuration, without weights and files.

    run = reward_model_run(config, make_mesh(config.policy.dtensor_cfg), Filling.of(8192, 2, 1024))
    run.step()

Only what reads files, a tokenizer or weights is left out of what `training.setup` and `rl.setup` do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from treeward.config.grpo_policy import GRPOPolicyConfig
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.policy import PolicyConfig, TrainedModelConfig
from treeward.config.run import RewardModelRunConfig
from treeward.data.encoding import Comparison
from treeward.data.prompt_sets import Prompt
from treeward.losses import heads_of
from treeward.model.checks import choose_layout, tree_or_rows
from treeward.model.loading import classifier_class
from treeward.model.lora import AdapterReference, has_adapters
from treeward.model.policy_model import PolicyModel
from treeward.model.pretrained import DTYPES, bare_config, read_config
from treeward.model.reward_model import RewardModel
from treeward.model.wrapped import WrappedModel
from treeward.parallel.mesh import Mesh
from treeward.rl.generation import CompletionGroup, SampledCompletion
from treeward.rl.update import PolicyUpdater, Reference
from treeward.training.models import adapt, make_ready, steps_on_host
from treeward.training.optimisation import build_optimizer, build_scheduler
from treeward.training.order import EpochOrder
from treeward.training.train import RewardModelRun

_MICRO_BATCHES = 2
"""Micro-batches of a step on each device: the second adds to gradients that are there."""

_Model = TypeVar("_Model", RewardModel, PolicyModel)


@dataclass(frozen=True, slots=True)
class Filling:
    """What fills a micro-batch: `number` prompts of `prompt` tokens, each with `group` completions of `completion`."""

    prompt: int
    completion: int
    group: int
    number: int

    @classmethod
    def of(cls, budget: int, group: int, mean_tokens: int) -> Filling:
        """Conversations of about `mean_tokens`, a half of them the prompt's, that fill `budget` tokens.

        Of a group that exceeds them, as many completions as a micro-batch holds, two at least.
        """
        prompt = max(1, min(mean_tokens, budget) // 2)
        completion = max(1, mean_tokens - prompt)
        group = min(group, max(2, (budget - prompt) // completion))
        number = max(1, budget // (prompt + group * completion))
        return cls(prompt, max(1, (budget // number - prompt) // group), group, number)

    @property
    def tokens_of_group(self) -> int:
        """With the prompt once."""
        return self.prompt + self.group * self.completion

    @property
    def tokens(self) -> int:
        return self.number * self.tokens_of_group

    def sequences(self, number: int) -> list[list[int]]:
        """The conversations of one group; groups share no prefix."""
        prompt = [number % 97, number // 97 % 97, *[0] * self.prompt][: self.prompt]
        return [[*prompt, *[g % 97] * self.completion] for g in range(self.group)]


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """`step`: takes a step of `_MICRO_BATCHES` on each device. `frozen`: the reference. Bytes: what is `sampled` with
    besides, and the reward models beside the policy (`rewards`)."""

    model: WrappedModel
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]
    frozen: WrappedModel | None = None
    sampled: dict[str, int] = field(default_factory=dict)
    rewards: int = 0


def bare_reward_model(policy: PolicyConfig) -> RewardModel:
    """The reward model of a run before its weights are read; random ones come to the device of the context."""
    num_heads = len(policy.reward_model_cfg.head_names) or 1
    hf = _classifier(_config_of(policy), policy.trust_remote_code, num_labels=num_heads)
    return RewardModel(hf, layout=choose_layout(hf, policy.attention))


def reward_model_run(config: RewardModelRunConfig, mesh: Mesh, filling: Filling) -> PlannedRun:
    """The run of `treeward train`."""
    size = filling.number * _MICRO_BATCHES * mesh.data_size
    sizes = {"train_global_batch_size": size, "train_micro_batch_tokens": filling.tokens}
    policy = config.policy.model_copy(update=sizes)
    section = policy.reward_model_cfg
    model = _trained(bare_reward_model(policy), policy, mesh)
    optimizer = build_optimizer(model, policy.optimizer, cpu_offload=steps_on_host(policy, mesh))
    config = config.model_copy(update={"policy": policy})
    setup = SimpleNamespace(
        config=config,
        mesh=mesh,
        model=model,
        order=EpochOrder([size], seed=0),
        training_sets={"planned": _Comparisons(filling, size, len(section.labels))},
        validation_sets={},
        optimizer=optimizer,
        scheduler=build_scheduler(optimizer, policy.scheduler, total_steps=1),
        total_steps=1,
        identity={},
        heads=heads_of(config, np.ones((1, len(section.labels))), model.num_heads),
        features={},
    )
    run = RewardModelRun(cast(Any, setup))
    return PlannedRun(model, optimizer, lambda: run.step(1))


def grpo_run(config: GRPORunConfig, mesh: Mesh, filling: Filling) -> PlannedRun:
    """Of `treeward grpo` the update, and the log-probabilities of its reference."""
    section, reference = config.policy, cast(Reference | None, None)
    policy = _trained(_policy(section), section, mesh)
    if config.needs_reference and has_adapters(policy):
        reference = AdapterReference(policy)
    elif config.needs_reference:
        reference = _policy(section)
        make_ready(reference, section, mesh, role="reference")
        reference.requires_grad_(False).eval()
    optimizer = build_optimizer(policy, section.optimizer, cpu_offload=steps_on_host(section, mesh))
    updater = PolicyUpdater(
        policy,
        optimizer,
        reference=reference,
        loss=config.loss_fn,
        micro_batch_tokens=filling.tokens,
        max_grad_norm=section.max_grad_norm,
        temperature=section.generation.temperature,
        mesh=mesh,
    )
    groups = [_completion_group(filling, i) for i in range(filling.number * _MICRO_BATCHES * mesh.data_size)]
    used_PG = torch.tensor([[True] * filling.group] * len(groups))  # a real tensor, as this constructor makes them
    return PlannedRun(
        policy,
        optimizer,
        step=lambda: updater.learn(groups, used_PG.float(), used_PG),
        frozen=reference if isinstance(reference, PolicyModel) else None,
        sampled=_bytes_of_sampling(config, policy, mesh),
        rewards=_reward_model_bytes(config),
    )


def _bytes_of_sampling(config: GRPORunConfig, policy: PolicyModel, mesh: Mesh) -> dict[str, int]:
    """Keys and values of all completions that a process samples at once, each prompt's once, and its whole policy."""
    section, longest = config.policy.generation, config.policy.max_total_sequence_length
    if section.url is not None or section.starts_engines:
        return {}
    shapes = policy.hf.config.get_text_config()
    heads = getattr(shapes, "num_key_value_heads", None) or shapes.num_attention_heads
    size = getattr(shapes, "head_dim", None) or shapes.hidden_size // shapes.num_attention_heads
    itemsize = DTYPES[config.policy.precision].itemsize
    rows, new = section.batch_size, min(config.max_new_tokens, longest)
    tokens = rows * new + -(-rows // config.grpo.num_generations_per_prompt) * (longest - new)
    cached = 2 * shapes.num_hidden_layers * heads * size * tokens
    sizes = {"KV cache": cached} | ({} if mesh.devices is None else {"whole policy": policy.hf.num_parameters()})
    return {name: number * itemsize // mesh.tensor_size for name, number in sizes.items()}


def _reward_model_bytes(config: GRPORunConfig) -> int:
    """Weights of the reward models on the policy's device."""
    size = 0
    for section in config.reward_models.values():
        offloads = section.dtensor_cfg.cpu_offload  # such weights come for the scoring alone
        if section.url or section.needs_ray or offloads or not section.resources.gpus_per_node:
            continue
        models = [_classifier(read_config(model, section.trust_remote_code)) for model in section.models]
        size += sum(model.num_parameters() for model in models) * DTYPES[section.dtype].itemsize
    return size


def _policy(policy: GRPOPolicyConfig) -> PolicyModel:
    hf = AutoModelForCausalLM.from_config(_config_of(policy), dtype=torch.float32, attn_implementation="eager")
    return PolicyModel(hf, layout=tree_or_rows(hf, policy.attention))


def _classifier(config: PreTrainedConfig, trust_remote_code: bool = False, num_labels: int = 1) -> PreTrainedModel:
    config.num_labels = num_labels
    made: Any = classifier_class(config, trust_remote_code)
    return made._from_config(config, dtype=torch.float32, attn_implementation="eager")  # type: ignore[no-any-return]


def _config_of(policy: TrainedModelConfig) -> PreTrainedConfig:
    if policy.architecture is None:
        return read_config(str(policy.model_name), policy.trust_remote_code)
    vocabulary = {} if policy.trained_vocab_size is None else {"vocab_size": policy.trained_vocab_size}
    return bare_config(vocabulary | dict(policy.architecture))


def _trained(model: _Model, policy: TrainedModelConfig, mesh: Mesh) -> _Model:
    adaptation = partial(adapt, model, policy, seed=0, checkpoint=None)
    make_ready(model, policy, mesh, role="model", adaptation=adaptation)
    return model


class _Comparisons:
    """A data set of comparisons of one size."""

    def __init__(self, filling: Filling, number: int, num_grades: int) -> None:
        self.filling, self.num_grades, self.tree_tokens = filling, num_grades, [filling.tokens_of_group] * number
        self.shapes = np.array([[filling.group, filling.prompt + filling.completion]] * number)

    def __getitem__(self, row: int) -> Comparison:
        rows, group = [np.array(ids, dtype=np.int32) for ids in self.filling.sequences(row)], self.filling.group
        grades = ((1.0,) * self.num_grades,) * group
        tokens = self.tree_tokens[row]
        return Comparison(tuple(rows), self.ranks(row), (1,) * group, "", None, "planned", tokens, grades=grades)

    def ranks(self, row: int) -> tuple[int, ...]:
        return tuple(range(self.filling.group))


def _completion_group(filling: Filling, number: int) -> CompletionGroup:
    rows, log_probs = filling.sequences(number), (0.0,) * filling.completion
    texts = [SampledCompletion(tuple(row[filling.prompt :]), "", truncated=False, log_probs=log_probs) for row in rows]
    return CompletionGroup(Prompt(()), tuple(rows[0][: filling.prompt]), tuple(texts))
