"""`LoggerConfig`: where the metrics go. A `metrics.jsonl` in `log_dir` is always written; the others are switched on.

logger:
  log_dir: logs/rm
  tensorboard_enabled: true
  wandb_enabled: true
  wandb: {project: reward-models, name: first}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import ConfigDict

from treeward.config.base import Strict

__all__ = ["GRPOLoggerConfig", "LoggerConfig", "MlflowConfig", "TensorboardConfig", "WandbConfig"]


class WandbConfig(Strict):
    """Weights & Biases. Keys beside these are passed on to `wandb.init`."""

    model_config = ConfigDict(extra="allow")

    project: str | None = None
    """Project of the run."""
    name: str | None = None
    """Name of the run."""


class TensorboardConfig(Strict):
    """TensorBoard."""

    log_dir: str | None = None
    """Folder of the event files, inside `logger.log_dir` if it is relative. None: `tensorboard`."""


class MlflowConfig(Strict):
    """MLflow."""

    experiment_name: str | None = None
    """Experiment of the run."""
    run_name: str | None = None
    """Name of the run."""
    tracking_uri: str | None = None
    """Server or folder. None: a folder `mlflow` inside `logger.log_dir`."""
    artifact_location: str | None = None
    """Where a new experiment keeps its files. None: MLflow decides."""


class LoggerConfig(Strict):
    """Where the metrics go."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        "num_val_samples_to_print": "validating a reward model generates no text",
        "monitor_gpus": "the use of the GPUs is not sampled",
        "gpu_monitoring": "the use of the GPUs is not sampled",
        "swanlab": "there is no SwanLab tracker",
    }

    switched_off_keys: ClassVar[Mapping[str, str]] = {
        "swanlab_enabled": "enable tensorboard, wandb or mlflow; logger.log_dir always has a metrics.jsonl",
    }

    log_dir: str = "logs/rm"
    """Folder of `metrics.jsonl` and of the trackers' files."""
    tensorboard_enabled: bool = False
    """Write TensorBoard event files."""
    tensorboard: TensorboardConfig = TensorboardConfig()
    """TensorBoard."""
    wandb_enabled: bool = False
    """Log to Weights & Biases."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    mlflow_enabled: bool = False
    """Log to MLflow."""
    mlflow: MlflowConfig = MlflowConfig()
    """MLflow."""


class GRPOLoggerConfig(LoggerConfig):
    """Where the metrics go."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        **LoggerConfig.ignored_keys,
        "num_val_samples_to_print": "grpo.num_logged_samples says how many go to samples.jsonl and the report",
    }

    log_dir: str = "logs/grpo"
    """Folder of `metrics.jsonl`, `samples.jsonl` and of the trackers' files."""
