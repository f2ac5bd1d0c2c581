"""`GRPOCheckpointingConfig`: when a run of GRPO is saved, and by which metric its checkpoints are ranked.

    checkpointing:
      checkpoint_dir: results/grpo
      metric_name: val:reward      # or val_reward, validation/reward, val:accuracy
      keep_top_k: 3

Only what a validation measures ranks checkpoints: the reward of the training prompts changes with the prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import PositiveInt

from treeward.config.base import nearest_name
from treeward.config.checkpointing import CheckpointingConfig
from treeward.errors import ConfigError

__all__ = ["GRPO_METRICS", "GRPOCheckpointingConfig", "parse_grpo_metric_name"]

GRPO_METRICS: Mapping[str, bool | None] = {
    "reward": True,
    "raw_reward": True,
    "proxy": True,
    "gold_reward": True,
    "kl": False,
    "truncation_rate": False,
    "entropy": None,
    "mean_gen_tokens_per_sample": None,
}
"""What a validation of GRPO measures -> whether higher is better; None where neither direction is."""

_PREFIXES = ("validation/", "val:", "val_")


def parse_grpo_metric_name(name: str) -> str:
    """The key of `GRPO_METRICS` that a name means; `accuracy` is NeMo RL's name of the mean reward.

    Raises `ConfigError` for any other name.
    """
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
    metric = name.removeprefix(prefix) if prefix else name
    for again in ("validation/", "val_"):  # val:validation/reward
        metric = metric.removeprefix(again) if prefix else metric
    metric = "reward" if metric == "accuracy" else metric
    need = f"val:<metric>, val_<metric> or validation/<metric>; <metric> is one of {', '.join(GRPO_METRICS)}"
    if name.startswith(("train:", "train/")):
        raise ConfigError(
            "a metric of training does not rank checkpoints",
            got=name,
            need=need,
            fix="the prompts of each step are others: rank by val:reward",
        )
    if prefix is None or metric not in GRPO_METRICS:
        near = nearest_name(metric, GRPO_METRICS)
        raise ConfigError(
            "a metric is not known", got=name, need=need, fix=f"did you mean val:{near}?" if near else None
        )
    return metric


class GRPOCheckpointingConfig(CheckpointingConfig):
    """When the run is saved, and which checkpoints stay."""

    ignored_keys: ClassVar[Mapping[str, str]] = {
        **CheckpointingConfig.ignored_keys,
        "save_data_plane": "there is no data plane",
        "load_replay_buffer": "every answer is of the policy that learns from it",
    }

    checkpoint_dir: str = "results/grpo"
    """Folder of this run's checkpoints and of its export."""
    save_period: PositiveInt | None = 10
    """Save each time after so many steps. None: only at the end, on a signal, and by the deadline."""
    metric_name: str | None = None
    """The validation metric that ranks checkpoints, as `val:<metric>`, `val_<metric>` or `validation/<metric>`:
    `reward` (also `accuracy`), `raw_reward`, `proxy` (the reward on a scale that stays, where running statistics move
    it), `gold_reward`, `kl`, `truncation_rate`, `entropy` or `mean_gen_tokens_per_sample`. None: the latest stay."""
    higher_is_better: bool | None = None
    """Direction of the metric. None: decided by the metric; `entropy` and `mean_gen_tokens_per_sample` need it."""

    @classmethod
    def _metric(cls, name: str) -> tuple[str, bool | None]:
        metric = parse_grpo_metric_name(name)
        return metric, GRPO_METRICS[metric]
