"""`set_up`: from a configuration to everything a run needs, checked, in one frozen `RewardModelSetup`.

The cheap checks (names, files, rows) come before the slow work (weights), so that mistakes are reported early.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from treeward.config.data import DatasetConfig
from treeward.config.policy import TrainedModelConfig
from treeward.config.run import RewardModelRunConfig
from treeward.data.datasets import open_dataset
from treeward.data.encoding import Comparison, EncodedDataset, encode_dataset
from treeward.data.rendering import Renderer
from treeward.data.tokenizers import texts_of, train_tokenizer
from treeward.errors import DataError
from treeward.evaluation.diagnostics.perturbations import sample_examples
from treeward.evaluation.examples import EvalExample
from treeward.evaluation.suites.preferences import PreferenceSuite
from treeward.losses import LOSSES, Pairs, ranked_pairs
from treeward.model.checks import check_before_training, check_positions, check_tokenizer_survives
from treeward.model.loading import build_reward_model, load_reward_model
from treeward.model.policy_model import PolicyModel
from treeward.model.pretrained import DTYPES, load_tokenizer
from treeward.model.reward_model import RewardModel
from treeward.training.checkpoints import Checkpoint
from treeward.training.optimisation import build_optimizer, build_scheduler
from treeward.training.order import TrainingOrder
from treeward.training.state import check_identity
from treeward.tree.batch import plan_micro_batches, plan_padded

__all__ = ["Choice", "RewardModelSetup", "best_device", "choice_of", "find_tokenizer", "prepare_for_training"]
__all__ += ["set_up", "short_hash"]

logger = logging.getLogger(__name__)

_CHECKED_COMPARISONS = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """By which metric, and among how many checkpoints, the exported model is chosen.

    The best of several has been lucky as well as good: its numbers on the sets that chose it are too high on average,
    the more the smaller the sets are and the more checkpoints there were.

    `name`: the metric as the configuration spells it; `metric`: of each of the validation sets `sets`, pooled if they
    are several. `num_checkpoints`: how many have been measured by it when the run is done.
    """

    name: str
    metric: str
    sets: tuple[str, ...]
    num_checkpoints: int

    @property
    def among_several(self) -> bool:
        """Whether there are checkpoints to choose among."""
        return self.num_checkpoints > 1


def choice_of(config: RewardModelRunConfig, total_steps: int) -> Choice | None:
    """How a run of `total_steps` chooses; None where no metric ranks its checkpoints."""
    key = config.ranking_metric
    if key is None:
        return None
    saved, validated = config.checkpointing.save_period, config.rm.val_period
    steps = {total_steps, *(range(saved, total_steps + 1, saved) if saved else ())}
    num = sum(
        bool((validated and step % validated == 0) or (config.rm.val_at_end and step == total_steps)) for step in steps
    )
    sets = config.validation_names if key.validation is None else (key.validation,)
    return Choice(str(config.checkpointing.metric_name), key.metric, tuple(sets), num)


@dataclass(frozen=True, slots=True)
class RewardModelSetup:
    """A run that is ready for its first step.

    `validation_limit`: most comparisons of a set that a validation looks at, None for all. `perturbed`: by validation
    set, the comparisons whose completions are rewritten to measure `robust_accuracy`. `num_trained_on`: how many of
    those that a validation looks at are in the training data too. `choice`: how the exported model is chosen.
    """

    config: RewardModelRunConfig
    model: RewardModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    order: TrainingOrder
    training_sets: dict[str, EncodedDataset]
    validation_sets: dict[str, EncodedDataset]
    validation_limit: int | None
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    total_steps: int
    identity: dict[str, Any]
    perturbed: Mapping[str, Sequence[EvalExample]]
    num_trained_on: Mapping[str, int]
    choice: Choice | None

    @property
    def validation_sizes(self) -> dict[str, int]:
        """How many comparisons of each set a validation looks at."""
        return {name: _measured(dataset, self.validation_limit) for name, dataset in self.validation_sets.items()}

    def plan(self, comparisons: Sequence[Comparison], *, validation: bool = False) -> list[list[int]]:
        """Which comparisons share a forward pass: as many as the configured tokens and comparisons allow."""
        policy, max_groups = self.config.policy, self.config.policy.train_micro_batch_size
        if validation:
            max_groups = self.config.rm.val_micro_batch_size or max_groups
        limits = {"max_tokens": policy.micro_batch_tokens, "max_groups": max_groups}
        if self.model.layout == "tree":
            return plan_micro_batches([c.tree_tokens for c in comparisons], **limits)
        return plan_padded([(len(c.token_ids), max(map(len, c.token_ids))) for c in comparisons], **limits)

    def pairs_of(self, comparisons: Sequence[Comparison]) -> Pairs:
        """The pairs that the loss compares."""
        margins = [c.margin for c in comparisons] if self.config.rm.loss.margin else None
        half = self.config.data.ties == "half"
        return ranked_pairs([c.ranks for c in comparisons], margins=margins, ties="half" if half else "drop")

    def loss_of(self, scores_S: Tensor, pairs: Pairs) -> Tensor:
        """The loss, summed over comparison groups."""
        loss = self.config.rm.loss
        return LOSSES[loss.name](scores_S, pairs, **loss.options)


def set_up(
    config: RewardModelRunConfig, checkpoint: Checkpoint | None = None, show_progress: bool = False
) -> RewardModelSetup:
    """Build everything a run needs; model and tokenizer are those of the checkpoint, where there is one.

    Raises a `TreewardError` for anything that the user can mend.
    """
    streams = [open_dataset(dataset) for dataset in config.data.train]
    tokenizer = find_tokenizer(config.policy, texts_of(streams), checkpoint)
    renderer = Renderer(
        tokenizer,
        chat_template=config.policy.tokenizer.chat_template,
        chat_template_kwargs=config.policy.tokenizer.chat_template_kwargs,
        max_length=config.max_sequence_length,
        truncation=config.data.truncation,
    )
    encode = partial(
        encode_dataset,
        renderer=renderer,
        ties=config.data.ties,
        cache_dir=Path(config.data.cache_dir or ".treeward_cache"),
        progress=show_progress,
    )
    names = _training_names(config.data.train)
    training_sets = {name: encode(stream) for name, stream in zip(names, streams, strict=True)}
    validation_sets = {str(one.name): encode(open_dataset(one)) for one in config.data.validation}
    limit = config.rm.val_batches
    if limit is not None:
        limit *= config.rm.val_global_batch_size or config.policy.train_global_batch_size
    num_trained_on = _count_trained_on(training_sets, validation_sets, limit)
    perturbed = {
        str(one.name): examples_to_perturb(validation_sets[str(one.name)], one, number, limit=limit)
        for one in config.data.validation
        if (number := config.num_perturbations(str(one.name))) is not None
    }
    order = TrainingOrder(
        list(training_sets.values()),
        weights=[dataset.weight for dataset in config.data.train],
        seed=config.rm.seed,
        batch_size=config.policy.train_global_batch_size,
        shuffle=config.data.shuffle,
    )
    identity = _identity(config, renderer, training_sets, validation_sets)
    if checkpoint is not None:
        check_identity(checkpoint.path, identity)
    model = _load_model(config, tokenizer, checkpoint)
    _check_model(config, model, tokenizer, [*training_sets.values(), *validation_sets.values()], checkpoint)
    total_steps = order.steps_per_epoch * config.rm.max_num_epochs
    total_steps = min(total_steps, config.rm.max_num_steps or total_steps)
    optimizer = build_optimizer(model, config.policy.optimizer)
    scheduler = build_scheduler(optimizer, config.policy.scheduler, total_steps=total_steps)
    return RewardModelSetup(
        *(config, model, tokenizer, renderer, order, training_sets, validation_sets, limit),
        *(optimizer, scheduler, total_steps, identity, perturbed, num_trained_on),
        choice=_checked_choice(config, total_steps),
    )


def _checked_choice(config: RewardModelRunConfig, total_steps: int) -> Choice | None:
    """With a warning of checkpoints that no validation measures, and where there is nothing to choose among."""
    choice, saved, validated = choice_of(config, total_steps), config.checkpointing.save_period, config.rm.val_period
    if choice is not None and saved is not None and (validated is None or saved % validated):
        logger.warning(
            "checkpointing.save_period (%s) is no multiple of rm.val_period (%s): checkpoints that are saved between "
            "validations have no %s and rank last.", saved, validated, choice.name,
        )  # fmt: skip
    if choice is not None and not choice.among_several:
        logger.warning(
            "%s checkpoint of this run of %d steps will have a %s, so nothing is chosen by it: "
            "checkpointing.save_period is %s and rm.val_period %s. Lower both to compare several.",
            "One" if choice.num_checkpoints else "No", total_steps, choice.name, saved, validated,
        )  # fmt: skip
    return choice


def _measured(dataset: EncodedDataset, limit: int | None) -> int:
    return len(dataset) if limit is None else min(limit, len(dataset))


def _count_trained_on(
    training_sets: Mapping[str, EncodedDataset], validation_sets: Mapping[str, EncodedDataset], limit: int | None
) -> dict[str, int]:
    """How many comparisons of each validation set are trained on, with a warning: they are no test of new data."""
    counts = {name: num_shared(one, training_sets.values(), limit=limit) for name, one in validation_sets.items()}
    for name, count in counts.items():
        if count:
            logger.warning(
                "%d of %d comparisons of the validation set %s are in the training data too, word for word: its "
                "numbers say how well they are remembered, and little of new data.",
                count, _measured(validation_sets[name], limit), name,
            )  # fmt: skip
    return counts


def num_shared(dataset: EncodedDataset, training_sets: Iterable[EncodedDataset], *, limit: int | None = None) -> int:
    """How many of the first `limit` comparisons (None: all) have the same conversations and ranks as one of the
    training data, in any order. Completions of other prompts, which training may add, do not count."""
    trained_on = np.concatenate([np.zeros(0, np.int64), *(training.digests for training in training_sets)])
    return int(np.isin(dataset.digests[:limit], trained_on).sum())


def examples_to_perturb(
    dataset: EncodedDataset, config: DatasetConfig, num_examples: int, *, limit: int | None
) -> list[EvalExample]:
    """At most `num_examples` of the comparisons that a validation of `limit` measures, with their texts.

    They are those that `treeward eval --perturbations` draws. Raises `DataError` if no comparison has a better and a
    worse completion that are text.
    """
    validated = {place_of(dataset[i].where) for i in range(_measured(dataset, limit))}
    name = config.name or dataset.name
    examples = [example for example in PreferenceSuite(name, config).load() if place_of(example.where) in validated]
    sampled = sample_examples(examples, num_examples)
    if not sampled:
        raise DataError(
            "robust_accuracy cannot be measured: there is nothing to rewrite",
            where=name,
            got=f"{len(examples)} comparisons, none with a better and a worse completion that are text",
            fix="set rm.val_perturbations=null, and another checkpointing.metric_name",
        )
    return sampled


def place_of(where: str | None) -> str:
    """A row's file and number without the folder: data that has moved is read from the cache, with its old path."""
    return (where or "").rpartition("/")[2]


def find_tokenizer(
    policy: TrainedModelConfig, texts: Iterable[str], checkpoint: Checkpoint | None
) -> PreTrainedTokenizerBase:
    """The one that is named, or the model's own; for a bare architecture one that is trained on `texts`, once."""
    if policy.trained_vocab_size is None:
        name = policy.tokenizer.name or policy.model_name
        assert name is not None  # the schema sees to it
        return load_tokenizer(name, trust_remote_code=policy.trust_remote_code)
    if checkpoint is not None:
        return load_tokenizer(str(checkpoint.path / "model"))
    return train_tokenizer(texts, vocab_size=policy.trained_vocab_size)


def best_device() -> torch.device:
    """The GPU, where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def prepare_for_training(model: RewardModel | PolicyModel, policy: TrainedModelConfig, *, role: str) -> None:
    """Set the precision of the computation and what is recomputed. `role`: what the log calls the model.

    Weights are float32 whatever the precision: bfloat16 cannot hold the small steps of a low learning rate.
    """
    model.compute_dtype = DTYPES[policy.precision]
    if policy.activation_checkpointing:
        model.recompute_activations()
    count = sum(parameter.numel() for parameter in model.parameters())
    name = type(model.hf).__name__
    logger.info("The %s: %s, %s parameters, as %s, on %s.", role, name, f"{count:,}", model.layout, model.device)


def _load_model(
    config: RewardModelRunConfig, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint | None
) -> RewardModel:
    policy = config.policy
    if checkpoint is None and policy.architecture is not None:
        model = build_reward_model(
            {key: value for key, value in policy.architecture.items() if key != "vocab_size"},
            tokenizer,
            seed=config.rm.seed,
            attention=policy.attention,
            device=best_device(),
            head_std=config.rm.head_init_std,
        ).model
    else:
        name = policy.model_name if checkpoint is None else checkpoint.path / "model"
        assert name is not None  # the schema sees to it
        model = load_reward_model(
            name,
            tokenizer=tokenizer,
            attention=policy.attention,
            device=best_device(),
            head_seed=config.rm.seed,
            head_std=config.rm.head_init_std,
            trust_remote_code=policy.trust_remote_code,
        ).model
    prepare_for_training(model, policy, role="reward model")
    return model


def _check_model(
    config: RewardModelRunConfig,
    model: RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    datasets: Sequence[EncodedDataset],
    checkpoint: Checkpoint | None,
) -> None:
    """Whether model, tokenizer and data fit together, on the first comparisons of each set."""
    if checkpoint is None and config.policy.tokenizer.name != config.policy.model_name:
        check_tokenizer_survives(model.hf, tokenizer)
    sample = [
        ids for dataset in datasets for comparison in dataset[:_CHECKED_COMPARISONS] for ids in comparison.token_ids
    ]
    check_positions(model, config.max_sequence_length)
    check_before_training(model, sample, tokenizer, highest_token=max(dataset.highest_token for dataset in datasets))


def _identity(
    config: RewardModelRunConfig,
    renderer: Renderer,
    training_sets: Mapping[str, EncodedDataset],
    validation_sets: Mapping[str, EncodedDataset],
) -> dict[str, Any]:
    """What a resumed run must have in common with the run that it continues."""
    policy = config.policy
    weights = [dataset.weight for dataset in config.data.train]
    data = [(dataset.fingerprint, weight) for dataset, weight in zip(training_sets.values(), weights, strict=True)]
    # By other validation data the checkpoints of the two sessions could not be compared.
    validation = {name: dataset.fingerprint for name, dataset in validation_sets.items()}
    return {
        "the model": policy.model_name or policy.architecture,
        "the tokenizer or template": short_hash(renderer.fingerprint),
        "the training data": short_hash(json.dumps(data)),
        "the validation data": short_hash(json.dumps(validation, sort_keys=True)),
        "rm": {"seed": config.rm.seed, "loss": config.rm.loss.model_dump(mode="json")},
        "data": {"shuffle": config.data.shuffle},
        # The state of optimiser and schedule is that of the saved run: a new rate would be ignored without a word.
        "policy": policy.model_dump(
            mode="json", include={"train_global_batch_size", "optimizer", "scheduler", "precision", "max_grad_norm"}
        ),
    }


def short_hash(text: str) -> str:
    """Sixteen hexadecimal digits that differ where the texts do."""
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _training_names(datasets: Sequence[DatasetConfig]) -> list[str]:
    """A short name for each training set, as metrics and the model card show it: no paths of this machine."""
    names: list[str] = []
    for dataset in datasets:
        plain = dataset.dataset_name.rpartition(".")[2]
        name = dataset.name or (Path(dataset.data_path).name if dataset.data_path else plain)
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        names.append(name if name not in names else next(other for other in numbered if other not in names))
    return names
