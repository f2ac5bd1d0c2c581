"""`RewardModelRunConfig`: the configuration of a run that trains a reward model, and the checks
between its sections.

    policy: {model_name: Qwen/Qwen2.5-0.5B-Instruct}
    data: {train_data_path: train.jsonl, val_data_path: val.jsonl}

is a whole configuration: every other key has a default, written once, on its field. The small
sections `rm`, `logger`, `cluster` and `hub` are here too.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Self

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from treeward.config.base import FilePath, Limit, Period, Strict
from treeward.config.checkpointing import CheckpointingConfig, MetricKey, parse_metric_name
from treeward.config.data import DataConfig, DatasetConfig
from treeward.config.loss import LOSSES, LossConfig, readers
from treeward.config.policy import PolicyConfig
from treeward.errors import ConfigError


class ScheduleConfig(Strict):
    """What the length of a run, its validations and its seed have in common in both kinds of
    run."""

    max_num_epochs: PositiveInt = 1
    """Passes over the training data; a run of GRPO ends with the step that draws the last
    prompt."""
    max_num_steps: Limit = None
    """Most optimiser steps, or steps of GRPO, whatever the number of epochs. None (or -1): no
    limit."""
    val_period: Period = 100
    """Steps from one validation to the next. None (or 0): no validation before the end."""
    val_at_start: bool = False
    """Validate before the first step too."""
    val_at_end: bool = True
    """Validate after the last step too."""
    log_period: PositiveInt = 1
    """Steps from one log of the training metrics to the next."""
    seed: NonNegativeInt = 42
    """Determines the order of the data, the initial weights, the sampling and every other draw."""

    @property
    def validates(self) -> bool:
        """Whether there is a validation after the first step."""
        return self.val_period is not None or self.val_at_end

    def is_validated(self, step: int) -> bool:
        """Whether `val_period` asks for a validation after a step, counted from 1."""
        return self.val_period is not None and step % self.val_period == 0


class RMConfig(ScheduleConfig):
    """The length of the run, its validations, its seed and its loss."""

    val_batches: Limit = None
    """Most batches of `val_global_batch_size` to validate on, per set. None (or -1): the whole
    set."""
    val_global_batch_size: PositiveInt | None = None
    """Comparisons in a validation batch. None: `policy.train_global_batch_size`."""
    val_micro_batch_size: PositiveInt | None = None
    """Most comparisons in one forward pass of validation. None: as many as in training."""
    loss: LossConfig = LossConfig()


class TensorboardConfig(Strict):
    """TensorBoard."""

    log_dir: FilePath | None = None
    """Folder of the event files, inside `logger.log_dir` if it is relative. None: `tensorboard`."""


class MlflowConfig(Strict):
    """MLflow."""

    experiment_name: str | None = None
    """Experiment of the run."""
    run_name: str | None = None
    """Name of the run."""
    tracking_uri: str | None = None
    """Server or folder. None: a folder `mlflow` inside `logger.log_dir`."""


class LoggerConfig(Strict):
    """Where the metrics go."""

    log_dir: FilePath = "logs/rm"
    """Folder of `metrics.jsonl` and of the trackers' files."""
    tensorboard_enabled: bool = False
    """Write TensorBoard event files."""
    tensorboard: TensorboardConfig = TensorboardConfig()
    wandb_enabled: bool = False
    """Log to Weights & Biases."""
    wandb: dict[str, Any] = {}
    """Arguments of `wandb.init`, as `{project: reward-models, name: first}`."""
    mlflow_enabled: bool = False
    """Log to MLflow."""
    mlflow: MlflowConfig = MlflowConfig()


class GRPOLoggerConfig(LoggerConfig):
    """Where the metrics go."""

    log_dir: FilePath = "logs/grpo"
    """Folder of `metrics.jsonl`, `samples.jsonl` and of the trackers' files."""


class ClusterConfig(Strict):
    """The processes of the run, which share the model and the data of each step."""

    gpus_per_node: NonNegativeInt = 1
    """Processes on each node, each with its GPU where the machines have any; 0: one process, on the
    CPU. Where it is more than one, the GPUs that reward models and engines have of their own are
    among them."""
    num_nodes: PositiveInt = 1
    """Nodes; more than one need a Ray cluster (`RAY_ADDRESS`). torchrun decides both numbers
    itself."""
    max_restarts: NonNegativeInt = 3
    """Restarts from the last checkpoint when a process or a node is lost. torchrun has
    `--max-restarts` instead."""
    timeout_minutes: PositiveFloat = 30.0
    """Longest that a process waits for the others, before the run ends with an error."""

    @property
    def num_processes(self) -> int:
        return self.num_nodes * max(self.gpus_per_node, 1)

    def without(self, num_gpus: int) -> Self:
        """The processes that train where other models have `num_gpus`; one process stays one.

        Raises `ConfigError` where none is left.
        """
        if num_gpus == 0 or self.num_processes == 1:
            return self
        per_node = max(self.gpus_per_node, 1)
        num_left = self.num_processes - num_gpus
        if num_left < 1:
            num_nodes = num_gpus // per_node + 1
            raise ConfigError(
                "no GPU is left to train on",
                field="cluster",
                got=f"{self.num_processes}, of which reward models and engines have {num_gpus}",
                need="one or more",
                fix=f"set cluster.num_nodes={num_nodes}, or fewer resources of those",
            )
        # The fewest nodes that share the processes out evenly.
        num_nodes = math.ceil(num_left / per_node)
        while num_left % num_nodes != 0:
            num_nodes += 1
        update = {"num_nodes": num_nodes, "gpus_per_node": num_left // num_nodes}
        return self.model_copy(update=update)


class HubConfig(Strict):
    """The upload of the exported model to the Hugging Face hub."""

    push_to_hub: bool = False
    """Upload the exported folder when training ends. A failed upload leaves the model, with exit
    code 1; the same command tries it again."""
    repo_id: str | None = None
    """Repository, as `organisation/name`. None: the name of `checkpointing.checkpoint_dir`, in your
    own account."""
    private: bool = True
    """Make the repository private if it is new."""


class RewardModelRunConfig(Strict):
    """What `treeward train` reads."""

    rm: RMConfig = RMConfig()
    policy: PolicyConfig
    """The model, its batches, its numerics and its optimiser."""
    data: DataConfig
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    logger: LoggerConfig = LoggerConfig()
    cluster: ClusterConfig = ClusterConfig()
    hub: HubConfig = HubConfig()

    @property
    def training_sets(self) -> tuple[DatasetConfig, ...]:
        """The training sets, with the grades that the reward model learns."""
        return self._graded(self.data.train)

    @property
    def validation_sets(self) -> tuple[DatasetConfig, ...]:
        """The validation sets, likewise."""
        return self._graded(self.data.validation)

    def _graded(self, sets: tuple[DatasetConfig, ...]) -> tuple[DatasetConfig, ...]:
        labels = self.policy.reward_model_cfg.labels
        if not labels:
            return sets
        return tuple(dataset.model_copy(update={"attributes": labels}) for dataset in sets)

    @property
    def training_cluster(self) -> ClusterConfig:
        """The processes that train: all."""
        return self.cluster

    @property
    def max_sequence_length(self) -> int:
        """Longest conversation, in tokens."""
        return self.data.max_input_seq_length or self.policy.max_total_sequence_length

    @property
    def validation_names(self) -> list[str]:
        """The names of the validation sets."""
        return [dataset.name for dataset in self.data.validation if dataset.name is not None]

    @property
    def ranking_metric(self) -> MetricKey | None:
        """The metric that ranks checkpoints; None if they are not ranked."""
        name = self.checkpointing.metric_name
        if name is None or not self.checkpointing.enabled:
            return None
        return parse_metric_name(name, self.validation_names)

    @property
    def hub_repo_id(self) -> str:
        """The repository of the upload; without an organisation it is one of the account that is
        logged in."""
        if self.hub.repo_id:
            return self.hub.repo_id
        folder = Path(self.checkpointing.checkpoint_dir).resolve().name
        # The hub allows no other names, and none of more than 96 characters.
        words = re.findall(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*", folder)
        return "-".join(words)[:96].rstrip("-.") or "reward-model"

    def check(self) -> None:
        if (self.data.max_input_seq_length or 0) > self.policy.max_total_sequence_length:
            keys = "data.max_input_seq_length policy.max_total_sequence_length"
            fix = "set data.max_input_seq_length=null"
            raise self.error(keys, "at most policy.max_total_sequence_length", fix)
        if self.hub.push_to_hub and not self.checkpointing.enabled:
            fix = "set checkpointing.enabled=true, or hub.push_to_hub=false"
            need = "checkpointing.enabled: true, to export the model"
            raise self.error("hub.push_to_hub checkpointing.enabled", need, fix)
        # Does the type of the reward model read the options of the loss?
        key = "policy.reward_model_cfg.reward_model_type"
        kind = self.policy.reward_model_cfg.reward_model_type
        for name, option in LossConfig.model_fields.items():
            if name not in LOSSES[kind].options and getattr(self.rm.loss, name) != option.default:
                need = f"no such key, or the type {' or '.join(readers(name))}"
                raise self.error(f"rm.loss.{name} {key}", need)
        of_pairs = " or ".join(name for name, loss in LOSSES.items() if loss.learns == "pairs")
        if self.data.ties == "half" and LOSSES[kind].learns != "pairs":
            raise self.error(f"data.ties {key}", f"drop, or the type {of_pairs}")
        # Can the loss learn what `data.labels` says of pairs?
        if self.data.labels:
            if LOSSES[kind].learns != "pairs":
                raise self.error(f"data.labels {key}", f"no labels, or the type {of_pairs}")
            # A strength says by how much the label is right, which is then in question.
            if self.rm.loss.strength is not None and self.data.suspects != "drop":
                need = "data.suspects: drop, or no rm.loss.strength"
                raise self.error("data.suspects rm.loss.strength", need)

        if LOSSES[kind].learns == "steps" and self.data.truncation == "truncate_left":
            # A cut prompt would be another one in each solution, and the tree would fall apart.
            need = "drop, which leaves out the last steps of a solution that is too long, or error"
            raise self.error(f"data.truncation {key}", need)

        # Is the metric that ranks checkpoints measured?
        metric_name = self.checkpointing.metric_name
        names = self.validation_names
        if metric_name is None or not self.checkpointing.enabled:
            return
        field = "checkpointing.metric_name"
        fix = "set checkpointing.metric_name=null to keep the latest checkpoints"
        if not names:
            need = "a set in data.validation, to measure it on"
            raise self.error(field, need, f"give data.val_data_path, or {fix}")
        if not self.rm.validates:
            keys = f"{field} rm.val_period rm.val_at_end"
            need = "a validation, to measure it"
            raise self.error(keys, need, f"set rm.val_at_end=true, or {fix}")
        parse_metric_name(metric_name, names)
