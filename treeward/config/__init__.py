"""The configuration of a run: a strict schema, read from YAML with references and command-line overrides.

    from treeward.config import load_config

    config = load_config("rm.yaml", ["rm.seed=7"])
    config.policy.train_global_batch_size

Each section is a frozen class. `treeward.config.run` joins those of a run that trains a reward model,
`treeward.config.grpo_run` those of GRPO.
"""

from treeward.config.checkpointing import CheckpointingConfig, MetricKey, parse_metric_name
from treeward.config.cluster import ClusterConfig
from treeward.config.data import DataConfig, DatasetConfig
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.load import load_config, load_grpo_config, save_config
from treeward.config.logger import LoggerConfig
from treeward.config.policy import PolicyConfig, TokenizerConfig
from treeward.config.run import HubConfig, LossConfig, RewardModelRunConfig, RMConfig

__all__ = [
    "CheckpointingConfig",
    "ClusterConfig",
    "DataConfig",
    "DatasetConfig",
    "GRPORunConfig",
    "HubConfig",
    "LoggerConfig",
    "LossConfig",
    "MetricKey",
    "PolicyConfig",
    "RMConfig",
    "RewardModelRunConfig",
    "TokenizerConfig",
    "load_config",
    "load_grpo_config",
    "parse_metric_name",
    "save_config",
]
