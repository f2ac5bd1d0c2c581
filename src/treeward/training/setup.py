"""`set_up`: from a configuration to everything a run needs, checked, in one frozen `RewardModelSetup`.

The cheap checks (names, files, rows) come before the slow work (weights). Shapes: N completions of the training data, H
grades.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from treeward import processes
from treeward.config.data import DatasetConfig
from treeward.config.run import RewardModelRunConfig
from treeward.data.datasets import RowDataset, open_dataset
from treeward.data.encoding import EncodedDataset, encode_dataset
from treeward.data.rendering import Renderer
from treeward.data.tokenizers import texts_of
from treeward.errors import DataError
from treeward.losses import Heads, heads_of
from treeward.model.checks import check_before_training, check_positions
from treeward.model.loading import build_reward_model, load_classifier
from treeward.model.reward_model import RewardModel
from treeward.parallel.mesh import Mesh, make_mesh
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
from treeward.training.optimisation import build_optimizer, build_scheduler
from treeward.training.order import EpochOrder, planned_steps
from treeward.training.state import check_identity

logger = logging.getLogger(__name__)

_CHECKED_COMPARISONS = 64


@dataclass(frozen=True, slots=True)
class RewardModelSetup:
    """A run that is ready for its first step.

    `validation_sets`: what a validation measures of each set. `features`: by the file of a data set, the features of a
    comparison (`training.features`); empty unless the backbone is frozen.
    """

    config: RewardModelRunConfig
    mesh: Mesh
    model: RewardModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    order: EpochOrder
    training_sets: dict[str, EncodedDataset]
    validation_sets: dict[str, EncodedDataset]
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    total_steps: int
    identity: dict[str, Any]
    heads: Heads
    features: Mapping[Path, Callable[[int], Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run, and what follows from it without a model.

    `encoded_sets`: the whole validation sets; `validation_sets`: what a validation measures of them.
    """

    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    training_sets: dict[str, EncodedDataset]
    encoded_sets: dict[str, EncodedDataset]
    validation_sets: dict[str, EncodedDataset]
    order: EpochOrder
    total_steps: int


def read_data(
    config: RewardModelRunConfig, checkpoint: Checkpoint | None = None, show_progress: bool = False
) -> RunData:
    """Read and tokenize the data, with the checkpoint's tokenizer, if there is one. Raises a `TreewardError`."""
    streams: list[RowDataset] = []  # of the main process, which alone reads rows
    held_out: list[RowDataset] = []
    processes.on_main(lambda: streams.extend(map(open_dataset, config.training_sets)))
    processes.on_main(lambda: held_out.extend(map(open_dataset, config.validation_sets)))
    tokenizer = find_tokenizer(config.policy, texts_of(streams), checkpoint)
    renderer = Renderer(
        tokenizer,
        **config.policy.tokenizer.rendering,
        max_length=config.max_sequence_length,
        truncation=config.data.truncation,
    )
    encode = partial(
        encode_dataset,
        renderer=renderer,
        ties=config.data.ties,
        attributes=config.policy.reward_model_cfg.labels,
        cache_dir=Path(config.data.cache_dir or ".treeward_cache"),
        progress=show_progress,
    )

    def encode_all() -> tuple[dict[str, EncodedDataset], dict[str, EncodedDataset]]:
        # first: they are the shorter
        encoded_sets = {str(stream.config.name): encode(stream) for stream in held_out}
        names = _training_names(config.data.train)
        training_sets = {name: encode(stream) for name, stream in zip(names, streams, strict=True)}
        for i, label in enumerate(config.policy.reward_model_cfg.labels):
            if not any(
                np.isfinite(dataset.grades[:, i]).any() for dataset in training_sets.values()
            ):
                got, need = "none in any training set", "a number, for some completions at least"
                raise DataError(
                    "no completion has this grade",
                    where=streams[0].name,
                    field=label,
                    got=got,
                    need=need,
                )
        return training_sets, encoded_sets

    with processes.patience() as group:  # the others open the files that the main process has made
        training_sets, encoded_sets = processes.on_main(encode_all, group)
    batches = config.rm.val_batches
    batch_size = config.rm.val_global_batch_size or config.policy.train_global_batch_size
    validation_sets = {
        name: dataset.first(None if batches is None else batches * batch_size)
        for name, dataset in encoded_sets.items()
    }
    trained_on = np.concatenate([dataset.digests for dataset in training_sets.values()])
    for name, dataset in validation_sets.items():
        if number := int(np.isin(dataset.digests, trained_on).sum()):
            logger.warning("%d of %d comparisons of the validation set %s are in the training data too, word for word.",
                           number, len(dataset), name)  # fmt: skip
    sizes, weights = (
        list(map(len, training_sets.values())),
        [dataset.weight for dataset in config.data.train],
    )
    order = EpochOrder(sizes, weights=weights, seed=config.rm.seed, shuffle=config.data.shuffle)
    steps_in_data = (
        order.steps_per_epoch(config.policy.train_global_batch_size) * config.rm.max_num_epochs
    )
    return RunData(
        tokenizer=tokenizer,
        renderer=renderer,
        training_sets=training_sets,
        encoded_sets=encoded_sets,
        validation_sets=validation_sets,
        order=order,
        total_steps=planned_steps(config.rm, steps_in_data, "rm"),
    )


def set_up(
    config: RewardModelRunConfig, checkpoint: Checkpoint | None = None, show_progress: bool = False
) -> RewardModelSetup:
    """Build everything a run needs, with the checkpoint's model and tokenizer, if there is one. Raises a
    `TreewardError`."""
    mesh = make_mesh(config.policy.dtensor_cfg)
    data = read_data(config, checkpoint, show_progress)
    tokenizer, training_sets = data.tokenizer, data.training_sets
    datasets = [*training_sets.values(), *data.encoded_sets.values()]
    with processes.patience() as group:
        highest_token = processes.on_main(
            lambda: max(dataset.highest_token for dataset in datasets), group
        )
    identity = processes.on_main(
        partial(_identity, config, data.renderer, training_sets, data.encoded_sets)
    )
    if checkpoint is not None:
        check_identity(checkpoint.path, identity)
    model = _load_model(config, tokenizer, checkpoint, mesh)
    check = partial(_check_model, config, model, tokenizer, datasets, highest_token)
    adaptation = partial(adapt, model, config.policy, seed=config.rm.seed, checkpoint=checkpoint)
    make_ready(model, config.policy, mesh, role="reward model", adaptation=adaptation, check=check)
    optimizer = build_optimizer(
        model, config.policy.optimizer, cpu_offload=steps_on_host(config.policy, mesh)
    )
    scheduler = build_scheduler(optimizer, config.policy.scheduler, total_steps=data.total_steps)
    grades_NH = np.concatenate([dataset.grades for dataset in training_sets.values()])
    return RewardModelSetup(
        config=config,
        mesh=mesh,
        model=model,
        tokenizer=tokenizer,
        renderer=data.renderer,
        order=data.order,
        training_sets=training_sets,
        validation_sets=data.validation_sets,
        optimizer=optimizer,
        scheduler=scheduler,
        total_steps=data.total_steps,
        identity=identity,
        heads=heads_of(config, grades_NH, model.num_heads),
    )


def _load_model(
    config: RewardModelRunConfig,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Checkpoint | None,
    mesh: Mesh,
) -> RewardModel:
    seed, labels = config.rm.seed, config.policy.reward_model_cfg.head_names
    build = partial(build_reward_model, seed=seed, labels=labels)
    load = partial(load_classifier, head_seed=seed, labels=labels)
    return load_model(config.policy, tokenizer, checkpoint, mesh, build=build, load=load)


def _check_model(
    config: RewardModelRunConfig,
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    datasets: Sequence[EncodedDataset],
    highest_token: int,
) -> None:
    """Check that model, tokenizer and data fit together, on the first comparisons of each set."""
    first = [comparison for dataset in datasets for comparison in dataset[:_CHECKED_COMPARISONS]]
    sample = [ids for comparison in first for ids in comparison.token_ids]
    check_positions(model, config.max_sequence_length)
    num_heads = len(config.policy.reward_model_cfg.head_names) or None
    check_before_training(
        model, sample, tokenizer, num_heads=num_heads, highest_token=highest_token
    )


def _identity(
    config: RewardModelRunConfig,
    renderer: Renderer,
    training_sets: Mapping[str, EncodedDataset],
    validation_sets: Mapping[str, EncodedDataset],
) -> dict[str, Any]:
    """The values that a resumed run must share with the run that it continues."""
    policy = config.policy
    adapters = identity_of_adapters(policy) if policy.dtensor_cfg.lora_cfg.enabled else {}
    weights = [dataset.weight for dataset in config.data.train]
    data = [
        (dataset.fingerprint, weight)
        for dataset, weight in zip(training_sets.values(), weights, strict=True)
    ]
    # With other validation data the checkpoints of two sessions could not be compared.
    validation = {name: dataset.fingerprint for name, dataset in validation_sets.items()}
    return {
        # The weights that adapters are of are read from there again.
        "the model": (with_weights(policy.model_name) if adapters else policy.model_name)
        or policy.architecture,
        "the tokenizer or template": short_hash(renderer.fingerprint),
        "the training data": short_hash(json.dumps(data)),
        "the validation data": short_hash(json.dumps(validation, sort_keys=True)),
        "rm": {
            "seed": config.rm.seed,
            "loss": config.rm.loss.model_dump(mode="json", exclude_defaults=True),
        },
        "the reward model": policy.reward_model_cfg.model_dump(mode="json", exclude_defaults=True),
        "data": {"shuffle": config.data.shuffle},
        # Optimiser and schedule are restored from the saved run: a new rate would be ignored silently.
        "policy": policy.model_dump(
            mode="json",
            include={
                "train_global_batch_size",
                "optimizer",
                "scheduler",
                "precision",
                "max_grad_norm",
            },
        )
        | adapters,
    }


def _training_names(datasets: Sequence[DatasetConfig]) -> list[str]:
    """A short name for each training set, as metrics and the model card show it: no paths of this machine."""
    names: list[str] = []
    for number, dataset in enumerate(datasets, start=1):
        plain = (
            Path(dataset.data_path).name
            if dataset.data_path
            else dataset.dataset_name.rpartition(".")[2]
        )
        name = dataset.name or plain
        while name in names:
            name = f"{name}-{number}"
        names.append(name)
    return names
