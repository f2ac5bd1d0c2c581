"""`RewardModelRunConfig`: everything that a training run is told, and the checks between its sections.

    policy: {model_name: Qwen/Qwen2.5-0.5B-Instruct}
    data: {train_data_path: train.jsonl, val_data_path: val.jsonl}

is a whole configuration: every other key has a default, written once, on its field.
"""

from __future__ import annotations

from pydantic import model_validator

from treeward.config.base import Strict, nearest_name
from treeward.config.checkpointing import METRICS, CheckpointingConfig, MetricKey, parse_metric_name
from treeward.config.cluster import ClusterConfig
from treeward.config.data import DataConfig, check_longest_input
from treeward.config.evaluation import EvaluationConfig
from treeward.config.hub import HubConfig
from treeward.config.logger import LoggerConfig
from treeward.config.policy import PolicyConfig
from treeward.config.reward_shaping import RewardShapingConfig
from treeward.config.rm import RMConfig
from treeward.errors import ConfigError

__all__ = ["RewardModelRunConfig"]

_PERTURBATIONS = 100  # so says the docstring of rm.val_perturbations


class RewardModelRunConfig(Strict):
    """What `treeward train` reads."""

    rm: RMConfig = RMConfig()
    """The length of the run, its validations, its seed and its loss."""
    policy: PolicyConfig
    """The model, its batches, its numerics and its optimiser."""
    data: DataConfig
    """The training and validation sets."""
    reward_shaping: RewardShapingConfig | None = None
    """How scores become rewards: kept in the exported model's scoring contract, where `reward_shaping: contract` of an
    environment finds it. Constants that it needs are fitted on the validation sets when the model is exported."""
    checkpointing: CheckpointingConfig = CheckpointingConfig()
    """When the run is saved, and which checkpoints stay."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """The report that is written at the end."""
    logger: LoggerConfig = LoggerConfig()
    """Where the metrics go."""
    cluster: ClusterConfig = ClusterConfig()
    """How many processes train."""
    hub: HubConfig = HubConfig()
    """The upload of the exported model."""

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
        """The metric that ranks checkpoints, as it is read where the validation sets are known; None if none does."""
        name = self.checkpointing.metric_name if self.checkpointing.enabled else None
        return None if name is None else parse_metric_name(name, self.validation_names)

    def num_perturbations(self, validation: str) -> int | None:
        """Of how many comparisons of a validation set `robust_accuracy` is measured; None where it is not."""
        key = self.ranking_metric
        ranks = key is not None and key.metric == "robust_accuracy" and key.validation in (None, validation)
        return self.rm.val_perturbations or (_PERTURBATIONS if ranks else None)

    @model_validator(mode="after")
    def _upload_has_a_model(self) -> RewardModelRunConfig:
        if self.hub.push_to_hub and not self.checkpointing.enabled:
            raise ConfigError(
                "hub.push_to_hub has nothing to upload: checkpointing.enabled is false",
                field="hub.push_to_hub",
                got="true",
                need="checkpointing.enabled: true, whose export is uploaded",
                fix="set checkpointing.enabled=true, or hub.push_to_hub=false",
            )
        return self

    @model_validator(mode="after")
    def _report_has_a_model_and_data(self) -> RewardModelRunConfig:
        if not self.evaluation.enabled:
            return self
        if not self.checkpointing.enabled:
            raise ConfigError(
                "evaluation.enabled has nothing to evaluate: checkpointing.enabled is false",
                field="evaluation.enabled",
                got="true",
                need="checkpointing.enabled: true, whose export is evaluated",
                fix="set checkpointing.enabled=true, or evaluation.enabled=false",
            )
        if not self.data.validation and not self.evaluation.suites:
            raise ConfigError(
                "evaluation.enabled has nothing to evaluate on",
                field="evaluation.enabled",
                got="true, with no set in data.validation and no evaluation.suites",
                need="a validation set or a suite",
                fix="give data.val_data_path or evaluation.suites, or set evaluation.enabled=false",
            )
        return self

    @model_validator(mode="after")
    def _shaping_has_data(self) -> RewardModelRunConfig:
        if self.reward_shaping is not None and self.reward_shaping.uses_calibration and not self.data.validation:
            raise ConfigError(
                "reward_shaping needs constants that are fitted on validation sets, and data has none",
                field="reward_shaping",
                got="a length curve, temperature, mean or standard deviation that is to be fitted",
                need="a set in data.validation",
                fix="give data.val_data_path, or reward_mean and reward_std; or leave the section out and run "
                "`treeward calibrate` later",
            )
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> RewardModelRunConfig:
        check_longest_input(self.data.max_input_seq_length, self.policy.max_total_sequence_length)
        return self

    @model_validator(mode="after")
    def _ranking_metric_is_measured(self) -> RewardModelRunConfig:
        if not self.checkpointing.enabled or self.checkpointing.metric_name is None:
            return self
        names = self.validation_names
        if not names:
            raise ConfigError(
                "checkpointing.metric_name is a validation metric, and data has no validation set",
                field="checkpointing.metric_name",
                got=self.checkpointing.metric_name,
                need="a set in data.validation, or no metric_name",
                fix="give data.val_data_path, or set checkpointing.metric_name=null to keep the latest checkpoints",
            )
        try:
            key = parse_metric_name(self.checkpointing.metric_name, names)
        except ConfigError as error:
            raise ConfigError(
                error.summary, field="checkpointing.metric_name", got=error.got, need=error.need, fix=error.fix
            ) from None
        if key.validation is not None and key.validation not in names:
            near, metric = nearest_name(key.validation, names) or names[0], key.metric
            if f"{key.validation}_{key.metric}" in METRICS:  # validation-length_controlled_accuracy: the set is missing
                metric = f"{key.validation}_{key.metric}"
            raise ConfigError(
                f"checkpointing.metric_name names a validation set that is not in data: {key.validation}",
                field="checkpointing.metric_name",
                got=self.checkpointing.metric_name,
                need=f"one of the sets {', '.join(names)}",
                fix=f"set checkpointing.metric_name=validation-{near}/{metric}",
            )
        if self.rm.val_period is None and not self.rm.val_at_end:
            raise ConfigError(
                "checkpointing.metric_name is never measured: rm.val_period says never",
                field="checkpointing.metric_name",
                got=f"{self.checkpointing.metric_name}, with rm.val_period: null, rm.val_at_end: false",
                need="a validation to rank checkpoints by",
                fix="set rm.val_period, or rm.val_at_end=true, or checkpointing.metric_name=null",
            )
        return self
