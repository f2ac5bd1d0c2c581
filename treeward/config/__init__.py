"""The configuration of a run: a strict schema, read from YAML with references and command-line overrides.

    from treeward.config import load_config

    config = load_config("rm.yaml", ["rm.seed=7"])
    config.policy.train_global_batch_size

Each section is a frozen class; `treeward.config.run` and `treeward.config.grpo_run` join those of a run.
"""

from treeward.config.data import DataConfig, DatasetConfig
from treeward.config.load import load_config, load_grpo_config, save_config

__all__ = ["DataConfig", "DatasetConfig", "load_config", "load_grpo_config", "save_config"]
