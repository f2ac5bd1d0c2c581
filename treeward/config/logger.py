"""`LoggerConfig`: where the metrics go. A `metrics.jsonl` in `log_dir` is always written; the others are switched on.

logger: {log_dir: logs/rm, wandb_enabled: true, wandb: {project: reward-models, name: first}}
"""

from __future__ import annotations

from typing import Any

from treeward.config.base import Strict


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


class LoggerConfig(Strict):
    """Where the metrics go."""

    log_dir: str = "logs/rm"
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

    log_dir: str = "logs/grpo"
    """Folder of `metrics.jsonl`, `samples.jsonl` and of the trackers' files."""
