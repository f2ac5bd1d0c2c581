"""`set_up`: from a configuration to everything a run needs, checked, in one `RewardModelSetup`.

`set_up` and `read_data` take the whole configuration, and hand its sections on. The cheap checks
(names, files, rows) come before the slow work (weights).

Shapes: N completions of the training data, H grades.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from treeward import processes
from treeward.config.checkpointing import MetricKey
from treeward.config.data import DatasetConfig
from treeward.config.policy import PolicyConfig
from treeward.config.run import HubConfig, RewardModelRunConfig, RMConfig
from treeward.data.datasets import RowDataset, open_dataset
from treeward.data.encoding import EncodedDataset, encode_dataset
from treeward.data.pair_labels import labelled, read_pair_labels
from treeward.data.rendering import Renderer
from treeward.data.step_datasets import StepDataset, open_step_dataset
from treeward.data.step_encoding import encode_steps
from treeward.data.step_marks import TRAINED_MARK, choose_mark, mark_id
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
from treeward.tree.token_tree import TokenIds

logger = logging.getLogger(__name__)

_CHECKED_COMPARISONS = 64
"""Comparisons of each set on which model, tokenizer and data are checked."""
_OPTIMISATION_KEYS = {
    "train_global_batch_size",
    "optimizer",
    "scheduler",
    "precision",
    "max_grad_norm",
}
"""Keys of `policy` that a resumed run may not change: optimiser and schedule are restored from the
saved run, and a new rate would be ignored silently."""


@dataclass(frozen=True, slots=True)
class RewardModelSetup:
    """A run that is ready for its first step.

    `policy`, `rm` and `hub` are sections of its configuration. `ranking`: the metric that ranks
    checkpoints, None where nothing does. `cache_dir`: the folder of everything that is computed
    once. `validation_sets`: what a validation measures of each set. `features`: by the fingerprint
    of a data set, the features of a comparison (`training.features`); empty unless the backbone is
    frozen.
    """

    policy: PolicyConfig
    rm: RMConfig
    hub: HubConfig
    ranking: MetricKey | None
    cache_dir: Path
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
    features: Mapping[str, Callable[[int], Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run, and what follows from it without a model.

    `encoded_sets`: the whole validation sets; `validation_sets`: what a validation measures of
    them. `step_token`: the mark after each step, for a process reward model.
    """

    tokenizer: PreTrainedTokenizerBase
    step_token: str | None
    renderer: Renderer
    training_sets: dict[str, EncodedDataset]
    encoded_sets: dict[str, EncodedDataset]
    validation_sets: dict[str, EncodedDataset]
    order: EpochOrder
    total_steps: int

    @property
    def all_sets(self) -> list[EncodedDataset]:
        return [*self.training_sets.values(), *self.encoded_sets.values()]

    @property
    def grades_NH(self) -> np.ndarray:
        """The grades of the training data; NaN for none. The conversations of problems have none at
        all."""
        return np.concatenate([dataset.grades for dataset in self.training_sets.values()])


def read_data(
    config: RewardModelRunConfig, checkpoint: Checkpoint | None = None, show_progress: bool = False
) -> RunData:
    """Read and tokenize the data, with the checkpoint's tokenizer, if there is one. Raises a
    `TreewardError`."""
    learns_steps = config.policy.reward_model_cfg.learns_steps
    # Of the main process, which alone reads rows.
    streams: list[RowDataset | StepDataset] = []
    held_out: list[RowDataset | StepDataset] = []

    def open_all() -> None:
        open_set = open_step_dataset if learns_steps else open_dataset
        streams.extend(map(open_set, config.training_sets))
        held_out.extend(map(open_set, config.validation_sets))

    processes.on_main(open_all)
    renderer, step_token = _renderer(config, streams, checkpoint)
    encode = partial(
        _encoded, config=config, renderer=renderer, step_token=step_token, progress=show_progress
    )
    # The other processes wait, and open the files that the main one has made.
    with processes.patience() as group:
        training_sets, encoded_sets = processes.on_main(
            partial(_encoded_sets, config, streams, held_out, encode), group
        )
    most_comparisons = None
    if config.rm.val_batches is not None:
        batch_size = config.rm.val_global_batch_size or config.policy.train_global_batch_size
        most_comparisons = config.rm.val_batches * batch_size
    # A validation measures the first comparisons; the run's identity is of the whole sets.
    validation_sets = {
        name: dataset.first(most_comparisons) for name, dataset in encoded_sets.items()
    }
    _warn_of_seen(training_sets, validation_sets, learns_steps=learns_steps)
    sizes = [len(dataset) for dataset in training_sets.values()]
    weights = [section.weight for section in config.data.train]
    order = EpochOrder(sizes, weights=weights, seed=config.rm.seed, shuffle=config.data.shuffle)
    steps_per_epoch = order.steps_per_epoch(config.policy.train_global_batch_size)
    steps_in_data = steps_per_epoch * config.rm.max_num_epochs
    return RunData(
        tokenizer=renderer.tokenizer,
        step_token=step_token,
        renderer=renderer,
        training_sets=training_sets,
        encoded_sets=encoded_sets,
        validation_sets=validation_sets,
        order=order,
        total_steps=planned_steps(config.rm, steps_in_data, "rm"),
    )


def _renderer(
    config: RewardModelRunConfig,
    streams: Sequence[RowDataset | StepDataset],
    checkpoint: Checkpoint | None,
) -> tuple[Renderer, str | None]:
    """The renderer of the run's tokenizer, and the mark after each step, for a process reward
    model."""
    section = config.policy.reward_model_cfg
    marks = [section.step_token or TRAINED_MARK] if section.learns_steps else []
    tokenizer = find_tokenizer(config.policy, texts_of(streams), checkpoint, more_special=marks)
    step_token: str | None = None
    if section.learns_steps:
        step_token = choose_mark(tokenizer, section.step_token)
        mark_id(tokenizer, step_token)  # before the renderer: texts are parted at it
    renderer = Renderer(
        tokenizer,
        **config.policy.tokenizer.rendering,
        max_length=config.max_sequence_length,
        truncation=config.data.truncation,
    )
    return renderer, step_token


def _encoded_sets(
    config: RewardModelRunConfig,
    streams: Sequence[RowDataset | StepDataset],
    held_out: Sequence[RowDataset | StepDataset],
    encode: Callable[..., EncodedDataset],
) -> tuple[dict[str, EncodedDataset], dict[str, EncodedDataset]]:
    """The training sets and the validation sets, as tokens, by name. `encode`: `_encoded` with the
    run's settings."""
    # The validation sets first: they are the shorter ones, and may be faulty too.
    encoded_sets = {str(stream.config.name): encode(stream) for stream in held_out}
    names = _training_names(config.data.train)
    training_sets: dict[str, EncodedDataset] = {}
    for name, stream in zip(names, streams, strict=True):
        training_sets[name] = encode(stream, is_training=True)
    if config.data.labels:
        pair_labels = read_pair_labels(config.data.labels, config.data.suspects)
        training_sets = labelled(training_sets, encoded_sets, pair_labels, config.data.ties)
    _check_grades(config.policy.reward_model_cfg.labels, training_sets, where=streams[0].name)
    return training_sets, encoded_sets


def _encoded(
    stream: RowDataset | StepDataset,
    *,
    config: RewardModelRunConfig,
    renderer: Renderer,
    step_token: str | None,
    progress: bool,
    is_training: bool = False,
) -> EncodedDataset:
    cache_dir = _cache_dir(config)
    if isinstance(stream, StepDataset):
        assert step_token is not None
        return encode_steps(
            stream,
            renderer,
            mark=step_token,
            last_step_only=is_training and config.rm.loss.last_step_only,
            cache_dir=cache_dir,
            progress=progress,
        )
    return encode_dataset(
        stream,
        renderer,
        ties=config.data.ties,
        attributes=config.policy.reward_model_cfg.labels,
        cache_dir=cache_dir,
        progress=progress,
    )


def _cache_dir(config: RewardModelRunConfig) -> Path:
    return Path(config.data.cache_dir or ".treeward_cache")


def _check_grades(
    labels: Sequence[str], training_sets: Mapping[str, EncodedDataset], *, where: str
) -> None:
    """Raise `DataError` for a grade that no completion of the training data has."""
    for i, label in enumerate(labels):
        for dataset in training_sets.values():
            if np.isfinite(dataset.grades[:, i]).any():
                break
        else:
            raise DataError(
                "no completion has this grade",
                where=where,
                field=label,
                got="none in any training set",
                need="a number, for some completions at least",
            )


def _warn_of_seen(
    training_sets: Mapping[str, EncodedDataset],
    validation_sets: Mapping[str, EncodedDataset],
    *,
    learns_steps: bool,
) -> None:
    """Warn of validation data that the model is trained on."""
    if learns_steps:
        # By the prompt: rows of one problem, which a split by rows parts, have other solutions.
        keys_of = attrgetter("prompts")
        kind = "problems"
        likeness = "perhaps with other solutions"
    else:
        # By the tokens, so that a comparison is found in whatever form another set has it.
        keys_of = attrgetter("digests")
        kind = "comparisons"
        likeness = "word for word"
    trained_on = np.concatenate([keys_of(dataset) for dataset in training_sets.values()])
    for name, dataset in validation_sets.items():
        number = int(np.isin(keys_of(dataset), trained_on).sum())
        if number > 0:
            logger.warning(
                "%d of %d %s of the validation set %s are in the training data too, %s.",
                number,
                len(dataset),
                kind,
                name,
                likeness,
            )


def set_up(
    config: RewardModelRunConfig, checkpoint: Checkpoint | None = None, show_progress: bool = False
) -> RewardModelSetup:
    """Build everything a run needs, with the checkpoint's model and tokenizer, if there is one.
    Raises a `TreewardError`."""
    policy = config.policy
    seed = config.rm.seed
    mesh = make_mesh(policy.dtensor_cfg)
    data = read_data(config, checkpoint, show_progress)

    # Over the tokens of all sets, for which the other processes wait.
    def find_highest_token() -> int:
        return max(dataset.highest_token for dataset in data.all_sets)

    with processes.patience() as group:
        highest_token = processes.on_main(find_highest_token, group)
    identity = processes.on_main(partial(_identity, config, data))
    # From names and hashes, before weights are loaded.
    if checkpoint is not None:
        check_identity(checkpoint.path, identity)
    head_names = policy.reward_model_cfg.head_names
    kind: dict[str, Any] = {"labels": head_names, "step_token": data.step_token}
    model = load_model(
        policy,
        data.tokenizer,
        checkpoint,
        mesh,
        build=partial(build_reward_model, seed=seed, **kind),
        load=partial(load_classifier, head_seed=seed, **kind),
    )

    def check() -> None:
        check_positions(model, config.max_sequence_length)
        # A few of every set: sets may differ in language, length and special tokens.
        sample: list[TokenIds] = []
        for dataset in data.all_sets:
            for comparison in dataset[:_CHECKED_COMPARISONS]:
                sample += comparison.token_ids
        check_before_training(
            model,
            sample,
            data.tokenizer,
            num_heads=len(head_names) or None,
            highest_token=highest_token,
        )

    make_ready(
        model,
        policy,
        mesh,
        role="reward model",
        adaptation=partial(adapt, model, policy, seed=seed, checkpoint=checkpoint),
        check=check,
    )
    optimizer = build_optimizer(model, policy.optimizer, cpu_offload=steps_on_host(policy, mesh))
    scheduler = build_scheduler(optimizer, policy.scheduler, total_steps=data.total_steps)
    return RewardModelSetup(
        policy=policy,
        rm=config.rm,
        hub=config.hub.model_copy(update={"repo_id": config.hub_repo_id}),
        ranking=config.ranking_metric,
        cache_dir=_cache_dir(config),
        mesh=mesh,
        model=model,
        tokenizer=data.tokenizer,
        renderer=data.renderer,
        order=data.order,
        training_sets=data.training_sets,
        validation_sets=data.validation_sets,
        optimizer=optimizer,
        scheduler=scheduler,
        total_steps=data.total_steps,
        identity=identity,
        heads=heads_of(
            policy.reward_model_cfg,
            config.rm.loss,
            data.grades_NH,
            ties=config.data.ties,
            num_heads=model.num_heads,
        ),
    )


def _identity(config: RewardModelRunConfig, run_data: RunData) -> dict[str, Any]:
    """The values that a resumed run must share with the run that it continues, by readable
    names."""
    policy = config.policy
    # Whole weights are read from the checkpoint when a run resumes, so the name is enough.
    model_name = policy.model_name
    adapters: dict[str, Any] = {}
    if policy.dtensor_cfg.lora_cfg.enabled:
        adapters = identity_of_adapters(policy)
        # Their base is read from the folder again, which must have the same weights.
        model_name = with_weights(policy.model_name)
    # Fingerprints without paths: data that was moved is the same.
    training_data = []
    training_sets = run_data.training_sets.values()
    for dataset, section in zip(training_sets, config.data.train, strict=True):
        training_data.append((dataset.fingerprint, section.weight))
    # With other validation data the checkpoints of two sessions could not be compared.
    validation_data = {}
    for name, dataset in run_data.encoded_sets.items():
        validation_data[name] = dataset.fingerprint
    # Without defaults: an option that a later version adds changes nothing for older checkpoints.
    loss = config.rm.loss.model_dump(mode="json", exclude_defaults=True)
    reward_model = policy.reward_model_cfg.model_dump(mode="json", exclude_defaults=True)
    optimisation = policy.model_dump(mode="json", include=_OPTIMISATION_KEYS)
    return {
        "the model": model_name or policy.architecture,
        "the tokenizer or template": short_hash(run_data.renderer.fingerprint),
        "the training data": short_hash(json.dumps(training_data)),
        "the validation data": short_hash(json.dumps(validation_data, sort_keys=True)),
        "rm": {"seed": config.rm.seed, "loss": loss},
        "the reward model": reward_model,
        "data": {"shuffle": config.data.shuffle},
        "policy": {**optimisation, **adapters},
    }


def _training_names(datasets: Sequence[DatasetConfig]) -> list[str]:
    """A short name for each training set, as metrics and the model card show it: no paths of this
    machine."""
    names: list[str] = []
    for number, dataset in enumerate(datasets, start=1):
        name = dataset.name
        if not name and dataset.data_path:
            name = Path(dataset.data_path).name
        elif not name:
            # Of a class of the user, which is a dotted path, the last part.
            name = dataset.dataset_name.rpartition(".")[2]
        while name in names:
            name = f"{name}-{number}"
        names.append(name)
    return names
