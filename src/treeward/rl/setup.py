"""`set_up_grpo`: from a configuration to everything that policy optimisation needs, checked, in one
frozen `GRPOSetup`.

The cheap checks (names, files, rows, environments) come before the slow work, so that mistakes are
reported early.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from treeward import processes
from treeward.config.data import PromptSetConfig
from treeward.config.grpo_policy import GenerationConfig, GRPOPolicyConfig
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.reward_environments import RewardModelEnvironmentConfig, is_enabled
from treeward.data.prompt_encoding import EncodedPrompts, encode_prompts
from treeward.data.prompt_sets import Prompt, PromptSet, open_prompts, prompts_summary
from treeward.data.rendering import Renderer
from treeward.environments.preference_verdict import open_questions
from treeward.environments.reward_models import ModelAtServer
from treeward.model.checks import check_policy, check_positions
from treeward.model.contract import read_contract
from treeward.model.loading import build_policy, load_policy
from treeward.model.lora import AdapterReference, has_adapters
from treeward.model.policy_model import PolicyModel
from treeward.parallel.mesh import Mesh, make_mesh
from treeward.parallel.ray_cluster import start_ray_of_run
from treeward.parallel.sharding import plain_copy
from treeward.rl.environment_runner import EnvironmentRunner, make_environment_runner
from treeward.rl.generation import Generator, LocalGenerator, end_ids_of, template_end_ids
from treeward.rl.http_generation import HttpGenerator
from treeward.rl.update import PolicyUpdater, Reference
from treeward.rl.vllm_generation import VllmGenerator, check_gpus
from treeward.rl.watch import OverOptimisationWatch
from treeward.training.checkpoints import Checkpoint
from treeward.training.models import (
    adapt,
    find_tokenizer,
    identity_of_adapters,
    load_model,
    make_ready,
    short_hash,
    steps_on_host,
    with_weights,
)
from treeward.training.optimisation import advance, build_optimizer, build_scheduler
from treeward.training.order import EpochOrder, planned_steps
from treeward.training.state import check_identity

logger = logging.getLogger(__name__)

_CHECKED_PROMPTS = 8  # of which `check_policy` takes the shortest
_NOT_OF_THE_RUN = {
    "max_num_epochs",
    "max_num_steps",
    "val_period",
    "val_start_at",
    "val_at_start",
    "val_at_end",
    "watch",
    "log_period",
    "gold_environment",
    "max_failed_share",
}
"""Keys of `grpo` that a resumed run may change: neither weights nor the comparability of
validations depend on them."""
_NOT_OF_THE_REWARD = {
    # where it is computed
    "device",
    "resources",
    "dtensor_cfg",
    "cpu_offload",
    "megatron_cfg",
    "base_url",
    "api_key_env",
    "served_model",
    "token_env",
    # how fast
    "batch_size",
    "batch_tokens",
    "activation_checkpointing",
    "dynamic_batching",
    "sequence_packing",
    "workers",
    "num_workers",
    "max_concurrency",
    # how patiently
    "max_retries",
    "worker_timeout_seconds",
    "timeout_seconds",
}
"""Keys of our environments that change where and how fast a reward is computed, not its value."""


@dataclass(frozen=True, slots=True)
class GRPOSetup:
    """A run that is ready for its first step.

    The run ends after `total_steps` steps or `prompt_limit` drawn prompts, which dynamic sampling
    reaches earlier. `validation`: the prompts of every validation; `validation_sets`: the set of
    each. Each process has such a setup.
    """

    config: GRPORunConfig
    policy: PolicyModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    prompts: EncodedPrompts
    order: EpochOrder
    validation: Sequence[tuple[Prompt, list[int]]]
    validation_sets: Sequence[str]
    generator: Generator
    rewards: EnvironmentRunner
    updater: PolicyUpdater
    scheduler: LRScheduler
    watch: OverOptimisationWatch
    identity: dict[str, Any]
    total_steps: int
    prompt_limit: int

    def close(self) -> None:
        """Free what is held outside this object. Safe to repeat."""
        try:
            self.generator.close()
        finally:
            self.rewards.shutdown()


def set_up_grpo(
    config: GRPORunConfig, checkpoint: Checkpoint | None = None, show_progress: bool = False
) -> GRPOSetup:
    """Build everything a run needs, with the checkpoint's policy and tokenizer, if there is one.
    Raises a `TreewardError` for anything that the user can mend."""
    mesh = make_mesh(config.policy.dtensor_cfg)
    training_sets = _open_sets(config, config.data.train)
    validation_sets = _open_sets(config, config.data.validation)
    tokenizer = find_tokenizer(config.policy, _texts_of(training_sets), checkpoint)
    renderer = Renderer(tokenizer, **config.policy.tokenizer.rendering)
    encode = partial(
        encode_prompts,
        renderer=renderer,
        max_length=config.max_prompt_length,
        progress=show_progress,
    )
    prompts = encode(training_sets)
    if config.grpo.num_prompts_per_step % prompts.together:
        need = "an even number: a comparison gives two questions"
        raise config.error("grpo.num_prompts_per_step", need)
    held_out = None
    every_prompt = list(prompts.prompts)
    if validation_sets:
        held_out = encode(validation_sets)
        every_prompt += held_out.prompts
    _log_prompts(prompts, held_out)
    # Before weights are loaded, so that the checkpoint of another run is refused early.
    identity = processes.on_main(lambda: _identity(config, renderer, prompts, held_out))
    if checkpoint is not None:
        check_identity(checkpoint.path, identity)
    with contextlib.ExitStack() as opened:
        _start_ray(config.policy.generation, has_other_gpus=config.has_other_gpus)
        rewards = processes.together(lambda: make_environment_runner(config, every_prompt))
        opened.callback(rewards.shutdown)
        max_length = config.policy.max_total_sequence_length
        processes.on_main(partial(_compare_lengths, config.reward_models, max_length))
        seed = config.grpo.seed
        policy = _make_policy(config.policy, seed, tokenizer, checkpoint, mesh, prompts)
        order = EpochOrder(
            prompts.sizes,
            weights=prompts.weights,
            seed=seed,
            shuffle=config.data.shuffle,
            together=prompts.together,
            what="prompt",
        )
        prompt_limit = order.rows_per_epoch * config.grpo.max_num_epochs
        # If the epochs leave too few prompts for the last step, it draws from the next epoch.
        steps_in_data = math.ceil(prompt_limit / config.grpo.num_prompts_per_step)
        total_steps = planned_steps(config.grpo, steps_in_data, "grpo")
        reference = None
        if config.needs_reference:
            reference = _load_reference(config.policy, seed, tokenizer, policy, mesh)
        updater, scheduler = _make_updater(config, policy, reference, mesh, total_steps)
        weight_folder = f"{config.checkpointing.checkpoint_dir}/weights"
        generator = make_generator(config.policy, weight_folder, policy, tokenizer, renderer, mesh)
        opened.callback(generator.close)
        validation, set_names = _chosen_for_validation(
            held_out, config.data.validation, config.grpo.most_val_prompts
        )
        run = GRPOSetup(
            config=config,
            policy=policy,
            tokenizer=tokenizer,
            renderer=renderer,
            prompts=prompts,
            order=order,
            validation=validation,
            validation_sets=set_names,
            generator=generator,
            rewards=rewards,
            updater=updater,
            scheduler=scheduler,
            watch=OverOptimisationWatch(config.grpo.watch),
            identity=identity,
            total_steps=total_steps,
            prompt_limit=prompt_limit,
        )
        opened.pop_all()  # from here on `GRPOSetup.close` frees them
    return run


def _texts_of(sets: Sequence[PromptSet]) -> Iterator[str]:
    """The texts of all messages, for a tokenizer that is trained on them; read only then."""
    for prompts in sets:
        for prompt in prompts:
            for message in prompt.messages:
                yield str(message.get("content", ""))


def _compare_lengths(
    reward_models: Mapping[str, RewardModelEnvironmentConfig], longest: int
) -> None:
    """Warn of reward models that have learnt from shorter conversations than the policy's, which
    may have `longest` tokens."""
    for name, section in reward_models.items():
        if section.url:
            continue  # the contract lies at the server
        limits = []
        for model in section.models:
            contract = read_contract(model)
            if contract is not None and contract.rendering.trained_length:
                limits.append(contract.rendering.trained_length)
        shortest = min(limits, default=longest)
        if shortest < longest:
            logger.warning(
                "env.%s was trained on conversations of at most %d tokens, and those of the policy "
                "may have %d (policy.max_total_sequence_length): trust the rewards of longer ones "
                "less.",
                name,
                shortest,
                longest,
            )


def _start_ray(generation: GenerationConfig, *, has_other_gpus: bool) -> None:
    """Ray, where engines or reward models have GPUs by it. Raises `ConfigError` for engines without
    a GPU."""
    if generation.starts_engines:
        check_gpus()
    if generation.starts_engines or has_other_gpus:
        is_colocated = generation.starts_engines and generation.colocated.enabled
        start_ray_of_run(spares=has_other_gpus, everywhere=is_colocated)


def _open_sets(config: GRPORunConfig, sets: Sequence[PromptSetConfig]) -> list[PromptSet]:
    """Sets of prompts, or of questions about the comparisons of a set."""
    opened: list[PromptSet] = []
    for dataset in sets:
        judge = config.judged_by(dataset)
        if judge is not None:
            opened.append(open_questions(dataset, judge))
        else:
            opened.append(open_prompts(dataset, environments=config.environments))
    return opened


def _load_policy(
    section: GRPOPolicyConfig,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Checkpoint | None,
    mesh: Mesh,
) -> PolicyModel:
    build = partial(build_policy, seed=seed)
    load = partial(load_policy, config_overrides=section.hf_config_overrides)
    return load_model(section, tokenizer, checkpoint, mesh, build=build, load=load)


def _make_policy(
    section: GRPOPolicyConfig,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Checkpoint | None,
    mesh: Mesh,
    prompts: EncodedPrompts,
) -> PolicyModel:
    """The policy to train, checked on the first prompts."""
    policy = _load_policy(section, seed, tokenizer, checkpoint, mesh)
    first = [ids.tolist() for ids in prompts.token_ids[:_CHECKED_PROMPTS]]

    def check() -> None:
        check_positions(policy, section.max_total_sequence_length)
        exact = None
        if mesh.devices is not None and section.precision != "float32":
            # The check widens whole weights where they are; shards are compared with a copy.
            exact = plain_copy(
                policy,
                mesh,
                saved=torch.float32,
                computed=torch.float32,
                device=None,
            )
        check_policy(policy, first, exact=exact)

    adaptation = partial(adapt, policy, section, seed=seed, checkpoint=checkpoint)
    make_ready(policy, section, mesh, role="policy", adaptation=adaptation, check=check)
    return policy


def _make_updater(
    config: GRPORunConfig,
    policy: PolicyModel,
    reference: Reference | None,
    mesh: Mesh,
    total_steps: int,
) -> tuple[PolicyUpdater, LRScheduler]:
    """The updater with its optimiser, and the schedule that its updates advance."""
    on_host = steps_on_host(config.policy, mesh)
    optimizer = build_optimizer(policy, config.policy.optimizer, cpu_offload=on_host)
    # The schedule goes on at every update, of which a step may have several.
    updates_per_step = config.grpo.updates_per_batch * config.updates_per_pass
    scheduler = build_scheduler(
        optimizer,
        config.policy.scheduler,
        total_steps=total_steps * updates_per_step,
    )
    updater = PolicyUpdater(
        policy,
        optimizer,
        reference=reference,
        loss=config.loss_fn,
        micro_batch_tokens=config.policy.micro_batch_tokens,
        max_grad_norm=config.policy.max_grad_norm,
        temperature=config.policy.generation.temperature,
        prompts_per_update=config.prompts_per_update,
        updates_per_batch=config.grpo.updates_per_batch,
        on_step=partial(advance, scheduler),
        mesh=mesh,
    )
    return updater, scheduler


def _load_reference(
    section: GRPOPolicyConfig,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    policy: PolicyModel,
    mesh: Mesh,
) -> Reference:
    """The run's first policy, frozen."""
    # Adapters begin as zero, so without them the policy is what it was at first.
    if has_adapters(policy):
        return AdapterReference(policy)
    # Without the checkpoint: a resumed run has the reference of its first start.
    reference = _load_policy(section, seed, tokenizer, None, mesh)
    make_ready(reference, section, mesh, role="reference, which stays as it is")
    return reference.requires_grad_(False).eval()


def make_generator(
    section: GRPOPolicyConfig,
    weight_folder: str,
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    renderer: Renderer,
    mesh: Mesh,
) -> Generator:
    """A server where `url` is set; else engines of vLLM, or the processes of the run themselves.

    `weight_folder`: for a server that reads the weights from files, unless the section names one.
    """
    generation = section.generation
    changes = {
        "model": generation.model or section.model_name,
        "weight_folder": generation.weight_folder or weight_folder,
    }
    kind: type[Generator] = LocalGenerator
    if generation.url is not None:
        kind = HttpGenerator
    elif generation.starts_engines:
        kind = VllmGenerator
    return kind(
        policy,
        tokenizer,
        generation.model_copy(update=changes),
        end_ids=end_ids_of(policy, tokenizer, generation, template_ids=template_end_ids(renderer)),
        max_total_tokens=section.max_total_sequence_length,
        chat_template=renderer.chat_template,
        trust_remote_code=section.trust_remote_code,
        mesh=mesh,
    )


def _chosen_for_validation(
    held_out: EncodedPrompts | None, sets: Sequence[PromptSetConfig], most_prompts: int | None
) -> tuple[list[tuple[Prompt, list[int]]], list[str]]:
    """The validation prompts, spread evenly over all sets, and the set of each.

    `most_prompts`: None for no limit.
    """
    if held_out is None:
        return [], []
    # Prompts that belong together, as the two questions about a comparison, are chosen together.
    size = held_out.together
    num_units = min(len(held_out), most_prompts or len(held_out)) // size
    last_unit = len(held_out) // size - 1
    # Evenly over the sets, which lie one after the other, and always the same ones: the watch
    # compares validations prompt by prompt.
    units = np.linspace(0, last_unit, max(num_units, 1)).round().astype(int)
    firsts = units * size
    indices = (firsts[:, None] + np.arange(size)).flatten().tolist()
    names = [dataset.name or "default" for dataset in sets]
    set_of_prompt = np.repeat(names, held_out.sizes).tolist()
    chosen = [(held_out.prompts[i], held_out.token_ids[i].tolist()) for i in indices]
    return chosen, [set_of_prompt[i] for i in indices]


def _log_prompts(prompts: EncodedPrompts, held_out: EncodedPrompts | None) -> None:
    logger.info("Prompts to train on: %s.", prompts_summary(prompts.counts))
    if held_out is None:
        return
    logger.info("Prompts to validate on: %s.", prompts_summary(held_out.counts))
    training_ids = {ids.tobytes() for ids in prompts.token_ids}
    num_shared = sum(ids.tobytes() in training_ids for ids in held_out.token_ids)
    if num_shared:
        logger.warning(
            "%d of %d validation prompts are also training prompts: they say little of new ones.",
            num_shared,
            len(held_out),
        )


def _identity(
    config: GRPORunConfig,
    renderer: Renderer,
    prompts: EncodedPrompts,
    held_out: EncodedPrompts | None,
) -> dict[str, Any]:
    """The settings and hashes that a resumed run must share with the run that it continues, by
    readable names.

    They cover everything that the weights depend on, including the weights of the first policy and
    of reward models.
    """
    policy = config.policy
    # What completions depend on, whoever samples them.
    sampling_keys = {
        "temperature",
        "top_p",
        "top_k",
        "stop_token_ids",
        "stop_strings",
        "max_new_tokens",
    }
    # What the weights depend on: not how a step is cut or where it is computed.
    training_keys = {
        "train_global_batch_size",
        "max_total_sequence_length",
        "precision",
        "max_grad_norm",
        "optimizer",
        "scheduler",
        "hf_config_overrides",
    }
    environments = {}
    for name, section in config.env.items():
        if is_enabled(section):
            environments[name] = reward_identity(name, section)
    validation_prompts = "none"
    if held_out is not None:
        validation_prompts = short_hash(held_out.fingerprint)
    return {
        "the policy": with_weights(policy.model_name) or policy.architecture,
        "the tokenizer or template": short_hash(renderer.fingerprint),
        "the training prompts": short_hash(prompts.fingerprint),
        "the validation prompts": validation_prompts,
        "data": {"shuffle": config.data.shuffle, "environment": config.default_environment},
        "grpo": config.grpo.model_dump(mode="json", exclude=_NOT_OF_THE_RUN),
        "loss_fn": config.loss_fn.model_dump(mode="json"),
        "env": environments,
        "policy": {
            **policy.model_dump(mode="json", include=training_keys),
            "generation": policy.generation.model_dump(mode="json", include=sampling_keys),
            **identity_of_adapters(policy),
        },
    }


def reward_identity(name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of an environment's section that rewards depend on, with hashes of its models'
    weights and of the template's file that it names.

    Every key counts for a class of the user. Raises `RewardServerError` for a server that does not
    respond.
    """
    kind = str(section.get("type") or name)
    # A dotted path: which keys of its section matter is known to its author alone.
    is_of_user = "." in kind
    kept = dict(section)
    if not is_of_user:
        kept = {key: value for key, value in section.items() if key not in _NOT_OF_THE_REWARD}
    if isinstance(kept.get("members"), Mapping):  # of a hybrid
        kept["members"] = {
            name: reward_identity(name, member) for name, member in kept["members"].items()
        }
    tokenizer = kept.get("tokenizer")
    if isinstance(tokenizer, Mapping) and "chat_template" in tokenizer:
        template = tokenizer["chat_template"]
        # Somebody may edit a template's file, so its hash counts. A template itself may be too long
        # for a path, and `Path.is_file` would raise.
        if isinstance(template, str) and os.path.isfile(os.path.expanduser(template)):
            template = f"file {short_hash(Path(template).expanduser().read_text('utf-8'))}"
        kept["tokenizer"] = {**tokenizer, "chat_template": template}
    if kind == "reward_model":
        keys = {key: value for key, value in section.items() if key not in ("type", "weight")}
        config = RewardModelEnvironmentConfig.model_validate(keys)
        if config.url:
            # The part of the server's identity that its rewards depend on.
            server = ModelAtServer(config)
            with server.client:
                kept["models"] = [str(server.model["identity"])]
        else:
            kept["models"] = [with_weights(model) for model in config.models]
    else:
        # `model`: of a judge in the process.
        for key in ("model_name", "model"):
            if isinstance(kept.get(key), str):
                kept[key] = with_weights(kept[key])
    return kept
