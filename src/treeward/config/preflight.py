"""`check_inputs`: what a configuration asks of this machine, checked before torch is imported.

    check_inputs(load_config("rm.yaml"))

looks for the optional packages, the files and the folders. Hub names, and what is in the files, are
left to those that read them.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

from treeward.config.grpo_run import GRPORunConfig
from treeward.config.run import RewardModelRunConfig
from treeward.errors import ConfigError, nearest_path, pip_install

# data/train.jsonl has the form of a hub name, and is told by the ending of a file: those of `KINDS`
# of `data/sources.py`, which this layer cannot import.
_HUB_NAME = re.compile(
    r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
    r"(?<!\.jsonl)(?<!\.ndjson)(?<!\.json)(?<!\.csv)(?<!\.tsv)(?<!\.parquet)(?<!\.arrow)"
    r"(?<!\.feather)(?<!\.gz)",
    re.IGNORECASE,
)


def check_inputs(config: RewardModelRunConfig | GRPORunConfig) -> None:
    """Raise `ConfigError` for the first package or path that is missing on this machine."""
    check_packages(config)
    for kind, sets in (("train", config.data.train), ("validation", config.data.validation)):
        for i, dataset in enumerate(sets):
            path = dataset.data_path
            # A class of the user knows what its path means.
            if path is None or "." in dataset.dataset_name:
                continue
            if not glob.has_magic(path) and not _HUB_NAME.fullmatch(path):
                field = f"data.{kind}[{i}].data_path"
                _check_path(path, field, "a file, a folder or a hub name, as org/name")
    if isinstance(config, RewardModelRunConfig):
        for path in config.data.labels:
            _check_path(path, "data.labels", "a file that treeward check-labels has written")
    # A run that may resume needs no folder of its first weights.
    if not Path(config.checkpointing.checkpoint_dir).exists():
        _check_model(config.policy.model_name, "policy.model_name")
        _check_model(config.policy.tokenizer.name, "policy.tokenizer.name")
    if isinstance(config, GRPORunConfig):
        for name, section in config.reward_models.items():
            if section.url is not None:
                continue
            # An override of `env` adds to the environments of the file, which the user may not
            # have thought of.
            alternative = f"leave the environment out: ~env.{name}"
            for model in section.models:
                _check_model(model, f"env.{name}.model_name", alternative)


def check_packages(config: RewardModelRunConfig | GRPORunConfig) -> None:
    """Raise `ConfigError` for the first optional package that the configuration needs and that is
    not installed."""
    for field, module, extra, alternative in _packages(config):
        if importlib.util.find_spec(module) is None:
            install = pip_install(extra)
            if extra == "vllm":
                # It is no extra of ours: it brings a version of PyTorch of its own.
                install = "pip install vllm"
            raise ConfigError(
                f"the package {module} is not installed",
                field=field,
                need=module,
                fix=f"{install}, or {alternative}",
            )


def _packages(config: RewardModelRunConfig | GRPORunConfig) -> Iterator[tuple[str, str, str, str]]:
    """For each optional package: the key that needs it, its module, its extra, and what to do
    without it."""
    for name in ("tensorboard", "wandb", "mlflow"):
        if getattr(config.logger, f"{name}_enabled"):
            field = f"logger.{name}_enabled"
            yield field, name, name, f"set {field}=false: metrics.jsonl is always written"
    if config.policy.use_liger_kernel:
        yield (
            "policy.use_liger_kernel",
            "liger_kernel",
            "liger",
            "set policy.use_liger_kernel=false",
        )
    if config.policy.load_in_4bit:
        yield "policy.load_in_4bit", "bitsandbytes", "qlora", "set policy.load_in_4bit=false"
    if config.policy.dtensor_cfg.lora_cfg.enabled:
        yield "policy.dtensor_cfg.lora_cfg.enabled", "peft", "lora", "train the whole model"
    if config.policy.optimizer.name.startswith("torchao."):
        yield "policy.optimizer.name", "torchao", "lowbit", "take an optimiser of torch.optim"
    # Environments and engines are of GRPO alone.
    if isinstance(config, RewardModelRunConfig):
        return
    for name, kind, keys in config.used_sections:
        field = f"env.{name}"
        if kind == "math" or (kind == "rules" and keys.get("rule") == "math"):
            yield field, "math_verify", "math", "use another rule"
        elif kind == "judge" and keys.get("base_url") is not None:
            yield field, "openai", "judge", "use another environment"
    for name, model in config.reward_models.items():
        if model.needs_ray:
            yield f"env.{name}", "ray", "ray", f"set env.{name}.resources.gpus_per_node=1"
    if config.policy.generation.starts_engines:
        for module in ("vllm", "ray"):
            yield (
                "policy.generation.backend",
                module,
                module,
                "give the url of a server, or sample with backend: hf",
            )


def _check_model(name: str | None, field: str, alternative: str | None = None) -> None:
    """Raise `ConfigError` for the path of a model that does not exist; hub names are not looked
    up."""
    if name is None:
        return
    # A hub name has one slash, and begins with a letter or a digit.
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path:
        need = "the folder of a model, or a hub name, as org/name"
        _check_path(os.path.expanduser(name), field, need, alternative)


def _check_path(path: str, field: str, need: str, alternative: str | None = None) -> None:
    """Raise `ConfigError`, with the nearest name in the folder, for a file or folder that does not
    exist. `alternative`: another fix than a path."""
    if Path(path).exists():
        return
    near = nearest_path(path)
    fix = f"correct the path; relative paths begin at {os.getcwd()}"
    if near:
        fix = f"did you mean {near}?"
    if alternative is not None:
        fix += f"; or {alternative}"
    raise ConfigError("there is no such file or folder", field=field, got=path, need=need, fix=fix)
