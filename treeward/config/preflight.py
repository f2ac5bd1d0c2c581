"""`check_inputs`: what a configuration asks of this machine, checked before torch is imported.

    check_inputs(load_config("rm.yaml"))

looks for the optional packages, the files and folders, the names of datasets and the columns of the first row. Hub
names and classes by dotted path are left to those that load them.
"""

from __future__ import annotations

import glob
import gzip
import importlib.util
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treeward.config.data import COMPARISON_SETS, PROMPT_SETS, DatasetConfig, PromptSetConfig, SetConfig
from treeward.config.grpo_run import GRPORunConfig
from treeward.config.reward_environments import RewardModelEnvironmentConfig, environment_sections
from treeward.config.run import RewardModelRunConfig
from treeward.errors import ConfigError, nearest_name, nearest_path

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.jsonl)(?<!\.json)(?<!\.csv)(?<!\.parquet)(?<!\.gz)")

_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "BinaryPreferenceDataset": {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"},
    "ResponseDataset": {"input_key": "input", "output_key": "output"},
}
"""Format -> the keys of a set that name columns, with their defaults."""


def check_inputs(config: RewardModelRunConfig | GRPORunConfig) -> None:
    """Raise `ConfigError` for the first package, path, name or column that is missing on this machine."""
    check_packages(config)
    for kind, sets in (("train", config.data.train), ("validation", config.data.validation)):
        for i, dataset in enumerate(sets):
            if isinstance(config, GRPORunConfig) and isinstance(dataset, PromptSetConfig) and config.judged_by(dataset):
                dataset = dataset.comparisons
            _check_set(dataset, f"data.{kind}[{i}]")
    _check_models(config)


def check_packages(config: RewardModelRunConfig | GRPORunConfig) -> None:
    """Raise `ConfigError` for the first optional package that the configuration needs and that is not installed."""
    for field, module, extra, alternative in _packages(config):
        if importlib.util.find_spec(module) is None:
            fix = f"pip install 'treeward[{extra}]', or {alternative}"
            raise ConfigError(f"the package {module} is not installed", field=field, need=module, fix=fix)


def _packages(config: RewardModelRunConfig | GRPORunConfig) -> Iterator[tuple[str, str, str, str]]:
    """For each optional package: the key that needs it, its module, its extra, and what to do without it."""
    for name in ("tensorboard", "wandb", "mlflow"):
        if getattr(config.logger, f"{name}_enabled"):
            field = f"logger.{name}_enabled"
            yield field, name, name, f"set {field}=false: metrics.jsonl is always written"
    if config.policy.use_liger_kernel:
        yield "policy.use_liger_kernel", "liger_kernel", "liger", "set policy.use_liger_kernel=false"
    if config.policy.load_in_4bit:
        yield "policy.load_in_4bit", "bitsandbytes", "qlora", "set policy.load_in_4bit=false"
    if config.policy.dtensor_cfg.lora_cfg.enabled:
        yield "policy.dtensor_cfg.lora_cfg.enabled", "peft", "lora", "train the whole model"
    if config.policy.optimizer.name.startswith("torchao."):
        yield "policy.optimizer.name", "torchao", "lowbit", "take an optimiser of torch.optim"
    if isinstance(config, RewardModelRunConfig):
        return
    for name, kind, keys in _used_environments(config):
        field = f"env.{name}"
        if kind == "math" or (kind == "rules" and keys.get("rule") == "math"):
            yield field, "math_verify", "math", "use another rule"
        elif kind == "judge" and keys.get("base_url") is not None:
            yield field, "openai", "judge", "use another environment"
        elif kind == "reward_model" and RewardModelEnvironmentConfig.model_validate(keys).needs_ray:
            yield field, "ray", "ray", f"set {field}.resources.gpus_per_node=1"
    if config.policy.generation.starts_engines:
        for module in ("vllm", "ray"):
            yield "policy.generation.backend", module, module, "give the url of a server, or sample with backend: hf"


def _used_environments(config: GRPORunConfig) -> list[tuple[str, str, dict[str, Any]]]:
    """The name, kind and keys of each environment that the run starts, and of the members of hybrids."""
    used = (*config.used_environments, config.grpo.gold_environment)
    return list(environment_sections({name: section for name, section in config.env.items() if name in used}))


def _check_set(dataset: SetConfig, field: str) -> None:
    name, sets = dataset.dataset_name, COMPARISON_SETS if isinstance(dataset, DatasetConfig) else PROMPT_SETS
    if name not in sets and "." not in name:
        near, need = nearest_name(name, sets), f"one of {', '.join(sets)}, or the dotted path of a class"
        fix, summary = f"did you mean {near}?" if near else None, "there is no dataset of this name"
        raise ConfigError(summary, field=f"{field}.dataset_name", got=name, need=need, fix=fix)
    for key in ("prompt_file", "system_prompt_file"):
        _check_path(getattr(dataset, key), f"{field}.{key}", "a text file")
    path = dataset.data_path
    if path is None or "." in name or glob.has_magic(path) or (_HUB_NAME.fullmatch(path) and not Path(path).exists()):
        return
    _check_path(path, f"{field}.data_path", "a file, a folder or a hub name, as org/name")
    keys = _COLUMNS.get(name, {})
    columns = _columns(path) if keys else None
    for key, default in keys.items():
        column = str(getattr(dataset, key) or default)
        if (key, column) == ("prompt_key", default):
            continue  # the completions may hold the prompt
        if columns is not None and column not in columns:
            near, got = nearest_name(column, columns), f"a first row with the keys {', '.join(columns)}"
            fix = f"set data.{key} to the key that holds it" + (f", perhaps {near}" if near else "")
            fix += "; for prompts without answers set data.dataset_name=PromptDataset" * (name == "ResponseDataset")
            summary, need = f"the data has no key {column}", f"the key {column}"
            raise ConfigError(summary, where=path, field=f"{field}.{key}", got=got, need=need, fix=fix)


def _columns(path: str) -> list[str] | None:
    """The keys of the first row of a jsonl file; None where they are not known at once."""
    if not path.endswith((".jsonl", ".jsonl.gz")):
        return None
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            return list(json.loads(file.readline(1 << 24).decode("utf-8-sig")).keys())
    except (OSError, ValueError, AttributeError):
        return None  # the reader of the rows reports it with its line


def _check_models(config: RewardModelRunConfig | GRPORunConfig) -> None:
    """Refuse folders that do not exist. A run that may resume needs no folder of its first weights."""
    names: list[tuple[str, str | None]] = []
    if not Path(config.checkpointing.checkpoint_dir).exists():
        names += [("policy.model_name", config.policy.model_name)]
        names += [("policy.tokenizer.name", config.policy.tokenizer.name)]
    for name, kind, keys in _used_environments(config) if isinstance(config, GRPORunConfig) else ():
        section = RewardModelEnvironmentConfig.model_validate(keys) if kind == "reward_model" else None
        if section is not None and section.url is None:
            names += [(f"env.{name}.model_name", model) for model in section.models]
    for field, model in names:
        if model is not None and (model.startswith((".", "/", "~")) or model.count("/") > 1):
            _check_path(os.path.expanduser(model), field, "the folder of a model, or a hub name, as org/name")


def _check_path(path: str | None, field: str, need: str) -> None:
    """Raise `ConfigError`, with the nearest name in the folder, for a file or folder that does not exist."""
    if path is None or Path(path).exists():
        return
    near = nearest_path(path)
    fix = f"did you mean {near}?" if near else f"correct the path; relative paths begin at {os.getcwd()}"
    raise ConfigError("there is no such file or folder", field=field, got=path, need=need, fix=fix)
